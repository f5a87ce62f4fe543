"""Device memory of calls whose keys are split: the splits' parts, and counters of those that have left theirs.

Launches of one stream follow each other, so they share one buffer, and no call allocates: as torch's allocator does,
this trusts that a stream's name is not used again while its work is unfinished. A kernel leaves the counters as it
found them, 0. A CUDA graph is replayed beside whatever runs then: its launches have parts of the graph's own memory,
and counters that nobody else ever gets.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from .lasting import lasting_zeros

_COUNTERS = 4096  # of a stream's buffer; tiles that are split are fewer unless the user says how often to split
_DEFAULT_STREAM = 0  # the one that cannot be captured: asking costs as much as a launch
_GRAPH_COUNTERS = 1 << 18  # of all graphs of a process, on one device


class Lent(NamedTuple):
    """Addresses; ``alive`` holds the memory until the launch is enqueued."""

    alive: tuple[Tensor, ...]
    parts: int
    arrivals: int


_streams: dict[tuple[int, int], Tensor] = {}  # by device and stream: counters, then parts


def lend(device: torch.device, floats: int, tiles: int) -> Lent:
    """Memory for the next launch on the current stream: ``floats`` fp32 of parts, ``tiles`` counters that are 0."""
    if device.type == "cpu" or tiles > _COUNTERS:
        return _own(device, floats, torch.zeros(tiles, dtype=torch.int32, device=device))
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    if stream != _DEFAULT_STREAM and torch.cuda.is_current_stream_capturing():
        return _own(device, floats, _graph_counters(device).take(tiles))
    key = (device.index, stream)
    buffer = _streams.get(key)
    if buffer is None or buffer.shape[0] < _COUNTERS + floats:
        buffer = _streams[key] = lasting_zeros(_COUNTERS + floats, device)
    address = buffer.data_ptr()
    return Lent((buffer,), address + 4 * _COUNTERS, address)


def prepare(device: torch.device) -> None:
    """Makes ready what a capture cannot make."""
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        _graph_counters(device)


def _own(device: torch.device, floats: int, counters: Tensor) -> Lent:
    parts = torch.empty(floats, dtype=torch.float32, device=device)
    return Lent((parts, counters), parts.data_ptr(), counters.data_ptr())


class _GraphCounters:
    """Zeros, handed out once: a graph may live as long as the process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if torch.cuda.is_current_stream_capturing():
            self._left = torch.zeros(0, dtype=torch.int32, device=device)
        else:
            self._left = lasting_zeros(_GRAPH_COUNTERS, device)
            torch.cuda.synchronize(device)  # other streams than the one that zeroes will use them

    def take(self, count: int) -> Tensor:
        if count > self._left.shape[0]:
            return torch.zeros(count, dtype=torch.int32, device=self._device)  # by a node of the graph, at each replay
        taken, self._left = self._left[:count], self._left[count:]
        return taken


@cache
def _graph_counters(device: torch.device) -> _GraphCounters:
    return _GraphCounters(device)
