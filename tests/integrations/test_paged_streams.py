"""Asynchronous continuous batching where the GPU's streams run in the least favourable order, played on the CPU.

Transformers' own classes run, on tensors of the CPU that pass for a GPU's. Work of their streams is done at once; what
is written on the current stream outside them comes late, as on a GPU that other processes keep busy, unless somebody
waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.continuous_batching import input_outputs, model_runner

from hf_flash_cupy.integrations import alias

from .test_paged import alone, batched, model_of, prompts

IOs, AsyncIOs = input_outputs.ContinuousBatchingIOs, input_outputs.ContinuousBatchingAsyncIOs
aten = torch.ops.aten
WRITES = (aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default)


class CurrentStream(TorchDispatchMode):
    """Writes are put off until somebody waits, or until the stream named ``late`` starts its ``count``-th work."""

    def __init__(self, late: str, count: int) -> None:
        super().__init__()
        self.late, self.count = late, count
        self.pending: list[Callable[[], object]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in WRITES:
            return func(*args, **(kwargs or {}))
        self.pending.append(partial(func, *args, **(kwargs or {})))
        return args[0]

    def synchronize(self) -> None:
        for write in self.pending:
            write()
        self.pending.clear()

    def other_starts(self, name: str) -> None:
        if self.count and name == self.late:
            self.count -= 1
            if self.count == 0:
                self.synchronize()


class Stream:
    """One of Transformers' streams, whose work is done where it is asked for: its events are always over."""

    def __init__(self) -> None:
        self.synchronize = self.record_event = self.wait_event = lambda *_: None


class Torch:
    """``torch`` as a module of Transformers sees it: the GPU's tensors are the CPU's."""

    def __init__(self, current: CurrentStream, names: Callable[[Any], str]) -> None:
        @contextmanager
        def work(stream: Any) -> Iterator[None]:
            current.other_starts(names(stream))
            yield

        self.stream_context = work
        self.Event = lambda *_, **__: SimpleNamespace(synchronize=lambda: None)
        self.cuda = SimpleNamespace(
            is_available=lambda: True, Stream=lambda device=None: Stream(), Event=self.Event, stream=work
        )
        self.get_device_module = lambda *_: self.cuda
        self.empty, self.tensor = _on_cpu(torch.empty), _on_cpu(torch.tensor)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given, device=None, **options: make(*given, **options)


@pytest.fixture
def late_current_stream(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CurrentStream:
    """Plays the streams for all that this test builds from now on."""
    current = CurrentStream(*request.param)
    built: list[Any] = []

    def name_of(stream: Any) -> str:
        return next(name for name in ("h2d", "compute", "d2h") if getattr(built[0], f"{name}_stream") is stream)

    shim = Torch(current, name_of)
    for module in (input_outputs, model_runner):
        monkeypatch.setattr(module, "torch", shim)
        if hasattr(module, "stream_context"):  # later than 5.17
            monkeypatch.setattr(module, "stream_context", shim.stream_context)
    if hasattr(input_outputs, "create_device_stream"):
        monkeypatch.setattr(input_outputs, "create_device_stream", lambda device: Stream())
    build, clear = AsyncIOs.__init__, IOs._reset_static_tensors

    def init(self: Any, **options: Any) -> None:
        built.append(self)
        build(self, **options | {"device": torch.device("cuda")})

    def clear_late(self: Any, *given: Any, **options: Any) -> None:
        if self.device.type == "cpu":
            return clear(self, *given, **options)
        with current:
            return clear(self, *given, **options)

    monkeypatch.setattr(AsyncIOs, "__init__", init)
    monkeypatch.setattr(IOs, "_reset_static_tensors", clear_late)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    return current


@pytest.fixture
def flash_alias(late_current_stream: CurrentStream) -> Iterator[None]:
    """After the streams, whose methods it wraps as it would Transformers'."""
    alias.enable_flash_alias()
    yield
    alias.disable_flash_alias()


@pytest.mark.parametrize("late_current_stream", [("compute", 1), ("d2h", 1), ("compute", 2)], indirect=True, ids=str)
@pytest.mark.parametrize(
    "name", ["mistral", *(pytest.param(each, marks=pytest.mark.full) for each in ("llama", "gemma2"))]
)
def test_cleared_inputs_are_cleared_before_the_first_step(
    name: str, late_current_stream: CurrentStream, flash_alias: None
) -> None:
    """Late zeros would fall on the first step's inputs, on its tokens, or on the second step's inputs too."""
    expected = [alone(model_of(name, "eager"), prompt) for prompt in prompts()]
    assert batched(model_of(name, alias.NAME), use_async_batching=True, use_cuda_graph=False) == expected
    assert late_current_stream.count == 0  # so many steps have run
