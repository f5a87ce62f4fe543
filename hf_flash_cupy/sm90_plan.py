"""Plans of the forward kernel of compute capability 9.0: its tensor maps, and the counter that deals its tiles."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import torch
from torch import Tensor

from . import sm90, tensormap
from .lasting import lasting_zeros
from .launch import Launcher
from .params import FORWARD_SM90_PARAMS
from .plans import POINTER_WORDS as ATTENTION_WORDS
from .plans import Geometry, attention_params, explain_choice
from .problem import AttentionProblem, KernelConfig

_MAPS = {name: FORWARD_SM90_PARAMS.fields[name][1] // 8 for name in ("q", "k", "v", "out")}  # type: ignore[index]


def _pointer_words() -> dict[str, int]:
    """Where each tensor's address lies in the struct, in 8-byte words: q, k, v and out in their maps."""
    fields = FORWARD_SM90_PARAMS.fields
    assert fields is not None
    attention = fields["attention"][1] // 8
    words = {name: attention + word for name, word in ATTENTION_WORDS.items()}
    maps = {name: place + tensormap.ADDRESS_WORD for name, place in _MAPS.items()}
    return words | maps | {"tile_counter": fields["tile_counter"][1] // 8, "plain_out": words["out"]}


_WORDS = _pointer_words()
_COUNTER_WORD, _OUT_WORD = _WORDS["tile_counter"], _WORDS["plain_out"]


_HOST_BLOCKS = 2  # thread blocks on a CPU: few, so that each takes several tiles


class ForwardSm90Plan:
    """As :class:`hf_flash_cupy.plans.Plan`: one geometry, ready to launch, for one thread."""

    def __init__(
        self, config: KernelConfig, problem: AttentionProblem, geometry: Geometry, device: torch.device
    ) -> None:
        assert config.tile is not None
        self.config = config
        of_head, total = sm90.num_tiles(problem, geometry, config.tile)
        params = np.zeros(1, FORWARD_SM90_PARAMS)
        params["attention"] = attention_params(geometry, problem)
        params["attention"]["num_m_blocks"] = of_head
        params["attention"]["num_tiles"] = total
        params["attention"]["heads_per_section"] = sm90.heads_per_section(problem, geometry)
        params["group"] = group = geometry.num_heads // geometry.num_heads_k
        params["group_inverse"] = min(-(-(1 << 32) // group), (1 << 32) - 1)  # of a group of one nobody asks
        self._words = memoryview(params.view(np.uint8).data).cast("Q")
        on_host = device.type == "cpu"
        most = _HOST_BLOCKS if on_host else torch.cuda.get_device_properties(device).multi_processor_count
        grid = min(most, total)
        # Before the maps: a launcher gives its thread the device's context, without which the driver makes none.
        self.launchers = [Launcher(config, params, grid, device)]
        boxes = sm90.boxes(problem, geometry, config.tile.block_n)
        self._maps = tensormap.Maps(self._words, _MAPS, boxes, on_host)
        self._dynamic = total > grid
        self._varlen = problem.varlen
        self._device = device
        explain_choice(problem, config, self.launchers[0].grid)

    def __call__(self, **tensors: Tensor | None) -> None:
        """Launches on torch's current stream; q, k, v, out, lse and sinks have the plan's geometry."""
        words = self._words
        for name, tensor in tensors.items():
            words[_WORDS[name]] = 0 if tensor is None else tensor.data_ptr()
        if not self._maps.address_is_a_word:  # else it is written
            for name in _MAPS:
                self._maps.move(name, words[_WORDS[name]])
        if self._varlen:
            words[_OUT_WORD] = words[_WORDS["out"]]  # ragged ends of packed entries are stored without the map
        if self._dynamic:
            _alive, words[_COUNTER_WORD] = tile_counter(self._device)
        self.launchers[0]()


_RING = 1 << 14


class _CounterRing:
    """Zeroed words of device memory, each lent to a launch that leaves it 0.

    Launches of several streams may run at once, so that they must not share a word. A word comes round again after as
    many launches as the ring is long, which is more than all of a device's queues hold.
    """

    def __init__(self, device: torch.device) -> None:
        self._words = lasting_zeros(_RING, device)
        torch.cuda.synchronize(device)  # other streams than the one that zeroes will use them
        self._address = self._words.data_ptr()
        self._count = itertools.count()  # next() is atomic: threads share the ring

    def lend(self) -> int:
        return self._address + next(self._count) % _RING * 4


@cache
def _ring(device: torch.device) -> _CounterRing:
    return _CounterRing(device)


def tile_counter(device: torch.device) -> tuple[Tensor | None, int]:
    """The address of a word that is 0 and that no other launch uses, and what must live until the launch.

    A graph's launches repeat, beside whatever runs then: theirs are words of the graph's own memory, zeroed by it. On a
    CPU each launch has its own.
    """
    if device.type == "cpu" or torch._C._cuda_isCurrentStreamCapturing():
        word = torch.zeros(1, dtype=torch.int32, device=device)
        return word, word.data_ptr()
    return None, _ring(device).lend()
