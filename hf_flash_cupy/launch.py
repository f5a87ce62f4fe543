"""KernelConfig + tensors → launch. What does not change between calls of one shape is prepared once."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from . import dispatch, env, tiles
from .errors import UnsupportedProblem
from .jit import module
from .params import FORWARD_PARAMS
from .problem import AttentionProblem, KernelConfig

Backend = Literal["cuda", "host"]

_MAX_GRID_X = 2**31 - 1
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """One kernel launch, for those who check what really ran."""

    kernel: str
    backend: Backend
    grid: tuple[int, int]
    config: KernelConfig


_count = 0
_recorders: list[list[LaunchRecord]] = []
_explained: set[AttentionProblem] = set()


def launch_count() -> int:
    """Kernels this process has launched so far, on any backend."""
    return _count


@contextmanager
def record_launches() -> Iterator[list[LaunchRecord]]:
    """Every launch of this process inside the ``with`` block, in order."""
    records: list[LaunchRecord] = []
    _recorders.append(records)
    try:
        yield records
    finally:
        _recorders[:] = [other for other in _recorders if other is not records]


@dataclass(frozen=True, slots=True)
class Geometry:
    """The run-time numbers of a forward call. Strides in elements, (batch, row, head) each."""

    batch: int
    num_heads: int
    num_heads_k: int
    seqlen_q: int  # varlen: total_q
    seqlen_k: int  # varlen: total_k
    head_dim: int
    head_dim_v: int
    q_strides: tuple[int, int, int]
    k_strides: tuple[int, int, int]
    v_strides: tuple[int, int, int]
    out_strides: tuple[int, int, int]
    lse_strides: tuple[int, int]  # (batch, head)
    mask_strides: tuple[int, int, int, int]
    interval_strides: tuple[int, int, int]
    window: tuple[int, int]
    softmax_scale: float
    softcap: float


def device_arch(device: torch.device) -> str:
    """The architecture whose kernels serve ``device``: "host", or the newest we know not above the GPU's."""
    if device.type == "cpu":
        return "host"
    forced = env.forced_arch()
    if forced is not None:
        if forced not in tiles.ARCHS:
            raise ValueError(f"HF_FLASH_CUPY_ARCH={forced!r}: supported are {', '.join(tiles.ARCHS)}.")
        return forced
    major, minor = torch.cuda.get_device_capability(device)
    known = [arch for arch in tiles.ARCHS if int(arch) <= 10 * major + minor]
    if not known:
        raise UnsupportedProblem(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; 7.5 (Turing) or newer "
            'is supported. Use attn_implementation="sdpa" on this GPU.'
        )
    return known[-1]


class ForwardPlan:
    """A forward call of one geometry, ready to launch; belongs to one thread, since calls share its buffer."""

    def __init__(self, problem: AttentionProblem, geometry: Geometry, device: torch.device) -> None:
        self.config = dispatch.select(problem, device_arch(device))
        self.device = device
        tile = self.config.tile
        assert tile is not None
        num_m_blocks, self.num_tiles = _num_tiles(geometry, problem, tile.block_m)
        grid_x = min(self.num_tiles, _MAX_GRID_X)
        self.grid = (grid_x, -(-self.num_tiles // grid_x))
        self._params = _forward_params(geometry, problem, num_m_blocks, self.num_tiles)
        self._words = memoryview(self._params.view(np.uint8).data).cast("Q")  # pointers are written through it
        self._address = self._params.ctypes.data
        self._launch = self._prepare_host() if device.type == "cpu" else self._prepare_cuda()
        if env.explain() and problem not in _explained:
            _explained.add(problem)
            print(f"hf_flash_cupy: {problem} -> {self.config.name}, first with grid {self.grid}")

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor | None,
        mask: Tensor | None = None,
        key_intervals: Tensor | None = None,
        cu_seqlens: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Launches on torch's current stream; the tensors have the plan's geometry."""
        global _count
        words = self._words
        words[0] = q.data_ptr()
        words[4] = k.data_ptr()
        words[8] = v.data_ptr()
        words[12] = out.data_ptr()
        words[16] = 0 if lse is None else lse.data_ptr()
        if mask is not None:
            words[17] = mask.data_ptr()
        if key_intervals is not None:
            words[18] = key_intervals.data_ptr()
        if cu_seqlens is not None:
            words[19], words[20] = cu_seqlens[0].data_ptr(), cu_seqlens[1].data_ptr()
        self._launch()
        _count += 1
        for records in _recorders:
            records.append(LaunchRecord(self.config.kernel, self.backend, self.grid, self.config))

    @property
    def backend(self) -> Backend:
        return "host" if self.device.type == "cpu" else "cuda"

    def _prepare_cuda(self) -> Any:
        from cupy_backends.cuda.api import driver, runtime  # here, not above: the package works without CuPy

        index = self.device.index
        kernel = module.get_kernel(self.config, index)
        # CuPy's wrappers cost 4 µs more than the driver call, a DLPack view of one tensor 29 µs: the struct holds the
        # same pointers, shapes and strides.
        self._keep = (kernel, np.array([self._address], np.uintp))
        function, arguments = kernel.pointer, self._keep[1].ctypes.data
        grid_x, grid_y = self.grid
        threads, shared = self.config.num_threads, self.config.shared_bytes
        stream = torch._C._cuda_getCurrentRawStream
        with torch.cuda.device(index):
            runtime.setDevice(index)  # a new thread has no current context until somebody asks, and launches need one

        def launch() -> None:
            driver.launchKernel(function, grid_x, grid_y, 1, threads, 1, 1, shared, stream(index), arguments, 0)

        return launch

    def _prepare_host(self) -> Any:
        kernel = module.get_host_kernel(self.config, env.sanitize())
        function, address = kernel.function, self._address
        grid_x, grid_y = self.grid

        def launch() -> None:
            shape = (ctypes.c_uint * 4)(grid_x, grid_y, 1, torch.get_num_threads())
            if function(address, ctypes.addressof(shape)) != 0:
                raise RuntimeError(f"The host kernel {self.config.name} failed.")

        return launch


def _num_tiles(geometry: Geometry, problem: AttentionProblem, block_m: int) -> tuple[int, int]:
    """Row blocks (of a head; packed: of a head over all entries) and thread blocks of the grid."""
    blocks = -(-geometry.seqlen_q // block_m)
    if problem.varlen:  # each entry, and the rows beyond the last offset, may end in one block that is not full
        blocks += geometry.batch + 1
        return blocks, blocks * geometry.num_heads
    return blocks, blocks * geometry.num_heads * geometry.batch


def _forward_params(
    geometry: Geometry, problem: AttentionProblem, num_m_blocks: int, num_tiles: int
) -> np.ndarray[Any, Any]:
    params = np.zeros(1, FORWARD_PARAMS)
    for name in ("q", "k", "v", "out"):
        strides = getattr(geometry, f"{name}_strides")
        for field, stride in zip(("batch_stride", "row_stride", "head_stride"), strides, strict=True):
            params[name][field] = stride
    params["lse_batch_stride"], params["lse_head_stride"] = geometry.lse_strides
    for field, stride in zip(("batch", "head", "row", "col"), geometry.mask_strides, strict=True):
        params[f"mask_{field}_stride"] = stride
    for field, stride in zip(("batch", "head", "row"), geometry.interval_strides, strict=True):
        params[f"interval_{field}_stride"] = stride
    for field in ("batch", "num_heads", "num_heads_k", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"):
        params[field] = getattr(geometry, field)
    params["num_tiles"] = num_tiles
    params["num_m_blocks"] = num_m_blocks
    params["window_left"], params["window_right"] = geometry.window
    params["heads_per_section"] = _heads_per_section(geometry, problem)
    params["score_scale_log2"] = (1.0 if geometry.softcap > 0 else geometry.softmax_scale) * _LOG2_E
    params["softcap"] = geometry.softcap
    params["softcap_inner"] = geometry.softmax_scale / geometry.softcap if geometry.softcap > 0 else 0.0
    return params


_L2_BYTES = 32 << 20  # of an A100 and later about 40 to 60 MB: leave room for q and out


def _heads_per_section(geometry: Geometry, problem: AttentionProblem) -> int:
    """How many (batch, head) pairs share the L2 cache with their keys and values. 1 unless rows differ in length."""
    if geometry.window == (-1, -1):
        return 1
    size = 4 if problem.dtype == "fp32" else 2
    group = geometry.num_heads // geometry.num_heads_k
    one = geometry.seqlen_k * (geometry.head_dim + geometry.head_dim_v) * size
    pairs = geometry.num_heads * geometry.batch
    return max(min(_L2_BYTES // max(one, 1) * group, pairs), min(group, pairs), 1)
