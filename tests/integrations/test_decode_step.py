"""The short road of a decoding step: taken when nothing has to be looked at, and with the long road's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_flash_cupy.integrations import transformers as integration
from hf_flash_cupy.integrations.decode_step import KEYWORDS
from hf_flash_cupy.integrations.key_intervals import IntervalMask, KeyIntervals
from hf_flash_cupy.integrations.recording import record_layers
from hf_flash_cupy.integrations.transformers import attention_forward

from .calls import CAUSAL, ENCODER, qkv

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def inference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_FLASH_CUPY_CPU", "kernels")
    with torch.no_grad():
        yield


@pytest.fixture
def long_roads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for each call that went the long road."""
    calls: list[Any] = []
    build = integration.build_request

    def build_request(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return build(*args, **kwargs)

    monkeypatch.setattr(integration, "build_request", build_request)
    return calls


def interval_mask(keys: int, **changes: Any) -> IntervalMask:
    return IntervalMask(KeyIntervals(2, 1, keys, CPU, shift=keys - 1, right=0, **changes))


CALLS: dict[str, dict[str, Any]] = {
    "causal": {},
    "encoder": {"module": ENCODER},
    "window": {"sliding_window": 5},
    "scale and softcap": {"scaling": 0.3, "softcap": 2.0},
    "mask": {"mask": interval_mask(9)},
    "mask with a window": {"mask": interval_mask(9, left=3)},
    "dropout of a module that is not in training": {"dropout": 0.5},
    "unknown keywords": {"use_cache": True, "position_ids": None},
}


def run(tensors: tuple[Tensor, Tensor, Tensor], *, module: Any = CAUSAL, mask: Any = None, **kwargs: Any) -> Tensor:
    return attention_forward(module, *tensors, mask, **{"scaling": None, **kwargs})[0]


@pytest.mark.parametrize("name", CALLS)
def test_the_second_call_takes_it_with_the_same_numbers(name: str, long_roads: list[Any]) -> None:
    tensors = qkv(rows=1)
    first = run(tensors, **CALLS[name])
    before = len(long_roads)
    other = tuple(x + 1 for x in tensors)
    second, found = run(tensors, **CALLS[name]), run(other, **CALLS[name])
    assert len(long_roads) == before
    assert torch.equal(first, second)
    with record_layers():  # which the long road serves
        assert torch.equal(run(other, **CALLS[name]), found)


def changed(tensors: tuple[Tensor, Tensor, Tensor]) -> dict[str, tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]]:
    q, k, v = tensors
    training = SimpleNamespace(training=True, is_causal=True, layer_idx=0)
    padded = interval_mask(9, key_mask=torch.arange(9).expand(2, -1) > 3)
    return {
        "rows": (qkv(rows=2), {}),
        "dtypes": ((q, k, v.double().float().bfloat16()), {}),
        "layout": ((q, k.mT.contiguous().mT, v), {}),
        "sinks": (tensors, {"s_aux": torch.zeros(4)}),
        "dropout": (tensors, {"module": training, "dropout": 0.5}),
        "dense mask": (tensors, {"mask": torch.arange(9)[None, None, None] > 2}),
        "padding": (tensors, {"mask": padded}),
        "probabilities": (tensors, {"output_attentions": True}),
    }


@pytest.mark.parametrize("name", changed(qkv(rows=1)))
def test_what_has_to_be_looked_at_goes_the_long_road(name: str, long_roads: list[Any]) -> None:
    tensors = qkv(rows=1)
    run(tensors)
    tensors, options = changed(tensors)[name]
    for _ in range(2):
        before = len(long_roads)
        run(tensors, **options)
        assert len(long_roads) == before + 1


def test_gradients_and_autocast_go_the_long_road(long_roads: list[Any]) -> None:
    q, k, v = qkv(rows=1)
    run((q, k, v))
    with torch.enable_grad():
        q.requires_grad_()
        run((q, k, v)).sum().backward()
    assert q.grad is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run((q, k, v)).dtype == torch.bfloat16
    assert len(long_roads) >= 2


def test_every_keyword_of_the_long_road_is_known() -> None:
    """Those that its source asks for by name."""
    import inspect
    import re

    from hf_flash_cupy.integrations import request, selected_keys

    source = "".join(inspect.getsource(module) for module in (request, selected_keys, integration))
    asked = set(re.findall(r"kwargs(?:\.get\(|\[)\"(\w+)\"", source)) | set(request._UNSERVED)
    asked |= set(re.findall(r"\"(\w+)\" in kwargs", source))
    assert asked <= KEYWORDS, asked - KEYWORDS
