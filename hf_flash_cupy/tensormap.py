"""Tensor maps: what Hopper's copy engine is told of a tensor (CUDA driver API, ``cuTensorMapEncodeTiled``)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

from .errors import MissingDependency
from .problem import DType

WORDS = 16  # of 8 bytes, of one map
ADDRESS_WORD = 0  # the tensor's address, as every driver so far writes it: see address_is_a_word()

_ALIGNMENT = 64
_DATA_TYPES: dict[DType, int] = {"fp16": 6, "fp32": 7, "bf16": 9}  # CUtensorMapDataType
_BYTES: dict[DType, int] = {"fp16": 2, "fp32": 4, "bf16": 2}
_NO_INTERLEAVE, _SWIZZLE_128B, _L2_PROMOTION_256B, _FILL_ZEROS = 0, 3, 3, 0
_MOST_STRIDE = 1 << 40


@dataclass(frozen=True, slots=True)
class TensorBox:
    """A tensor of 16-bit elements and the box that one copy moves, innermost dimension first."""

    dtype: DType
    sizes: tuple[int, int, int, int]  # columns, rows, heads, entries
    strides: tuple[int, int, int]  # bytes from one row, head, entry to the next
    box: tuple[int, int]  # columns and rows

    @property
    def is_encodable(self) -> bool:
        """Whether the copy engine takes these strides: multiples of 16 bytes below 1 TB, and none of 0."""
        return all(0 < stride < _MOST_STRIDE and stride % 16 == 0 for stride in self.strides)


@lru_cache(maxsize=4096)
def encode(tensor: TensorBox, address: int = 1 << 20) -> tuple[int, ...]:
    """The map's words for the tensor at ``address``, a multiple of 16.

    Raises ValueError where the driver refuses, :class:`MissingDependency` where there is no driver.
    """
    buffer = (ctypes.c_uint64 * (WORDS + _ALIGNMENT // 8))()
    aligned = -ctypes.addressof(buffer) % _ALIGNMENT // 8
    words = (ctypes.c_uint64 * WORDS).from_buffer(buffer, 8 * aligned)
    status = _encoder()(
        words,
        _DATA_TYPES[tensor.dtype],
        4,
        address,
        (ctypes.c_uint64 * 4)(*tensor.sizes),
        (ctypes.c_uint64 * 3)(*tensor.strides),
        (ctypes.c_uint32 * 4)(*tensor.box, 1, 1),
        (ctypes.c_uint32 * 4)(1, 1, 1, 1),
        _NO_INTERLEAVE,
        _SWIZZLE_128B,
        _L2_PROMOTION_256B,
        _FILL_ZEROS,
    )
    if status != 0:
        raise ValueError(f"cuTensorMapEncodeTiled refused {tensor} (CUresult {status}).")
    return tuple(words)


def host_words(tensor: TensorBox, address: int = 0) -> tuple[int, ...]:
    """The same for a kernel on the CPU: TensorMap of cuda_src/isa/host/tma.cuh."""
    words = (address, *tensor.sizes, *tensor.strides, *tensor.box, _BYTES[tensor.dtype])
    return words + (0,) * (WORDS - len(words))


class Maps:
    """The maps in a kernel's parameter struct."""

    def __init__(
        self, struct: memoryview, places: Mapping[str, int], boxes: Mapping[str, TensorBox], on_host: bool
    ) -> None:
        """``struct`` in 8-byte words; ``places``: in which of them the map of each of ``boxes`` begins.

        On a GPU the calling thread has the device's context, without which the driver makes no map.
        """
        self._struct, self._places, self._boxes = struct, places, boxes
        for name, box in boxes.items():
            self._write(name, host_words(box) if on_host else encode(box))
        self.address_is_a_word = on_host or address_is_a_word()

    def move(self, name: str, address: int) -> None:
        """Makes the map of ``name`` one of the tensor at ``address``."""
        if self.address_is_a_word:
            self._struct[self._places[name] + ADDRESS_WORD] = address
        else:
            self._write(name, encode.__wrapped__(self._boxes[name], address))

    def _write(self, name: str, words: tuple[int, ...]) -> None:
        for word, value in enumerate(words, self._places[name]):
            self._struct[word] = value


@cache
def address_is_a_word() -> bool:
    """Whether a map's address is its word 0 and nothing else, so that writing that word is encoding it anew.

    The layout is the driver's own and documented nowhere; so two maps are compared, once in a process.
    """
    tensor = TensorBox("bf16", (64, 128, 2, 2), (128, 16384, 32768), (64, 64))
    first, second = 1 << 20, (0x7F << 40) + 0x1234560
    low, high = encode(tensor, first), encode(tensor, second)
    rest = slice(ADDRESS_WORD + 1, None)
    return low[ADDRESS_WORD] == first and high[ADDRESS_WORD] == second and low[rest] == high[rest]


@cache
def _encoder() -> ctypes._CFuncPtr:  # type: ignore[name-defined]
    try:
        function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    except (OSError, AttributeError) as error:
        raise MissingDependency(
            f"The CUDA driver's cuTensorMapEncodeTiled cannot be loaded ({error}).", "a driver of CUDA 12 or newer"
        ) from error
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    function.argtypes = [pointer, integer, ctypes.c_uint32, *[pointer] * 5, *[integer] * 4]
    function.restype = integer
    return function
