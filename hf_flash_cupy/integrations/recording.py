"""Which attention layers really ran through this package, and what they launched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from hf_flash_cupy.launch import record_launches


class LayerRecord(NamedTuple):
    """What one attention module has done so far."""

    calls: int  # of the attention function
    launches: int  # of this package's kernels within them
    backend: str  # of the kernels: "cuda" or "host"; without a launch "sdpa", "reference" or "none"


class _Recorder:
    def __init__(self) -> None:
        self.records: dict[int, LayerRecord] = {}
        self._owners: dict[int, Any] = {}  # layer -> its module, kept alive so that its id stays its own

    def add(self, module: Any, launches: int, backend: str) -> None:
        layer = getattr(module, "layer_idx", None)
        # Encoder, decoder and cross attention count separately: the first to come keeps the number.
        if not isinstance(layer, int) or self._owners.get(layer, module) is not module:
            layer = id(module)
        self._owners[layer] = module
        before = self.records.get(layer, LayerRecord(0, 0, backend))
        backends = dict.fromkeys([*before.backend.split("+"), *backend.split("+")])
        self.records[layer] = LayerRecord(before.calls + 1, before.launches + launches, "+".join(backends))


_recorders: list[_Recorder] = []


@contextmanager
def record_layers() -> Iterator[dict[int, LayerRecord]]:
    """Counts calls and kernel launches of every attention module inside; yields the dict that it fills.

    A key is the module's ``layer_idx``, or its ``id`` where it has none or shares it with another module.
    """
    recorder = _Recorder()
    _recorders.append(recorder)
    try:
        yield recorder.records
    finally:
        _recorders.remove(recorder)


def is_recording() -> bool:
    """Whether somebody counts; otherwise :func:`run_recorded` only calls."""
    return bool(_recorders)


def run_recorded(module: Any, attend: Callable[[], tuple[Tensor, str]]) -> Tensor:
    """``attend()``'s output. It also names what ran, which the launches know better where there are some."""
    if not _recorders:
        return attend()[0]
    with record_launches() as launches:
        out, backend = attend()
    if launches:
        backend = "+".join(dict.fromkeys(launch.backend for launch in launches))
    for recorder in _recorders:
        recorder.add(module, len(launches), backend)
    return out
