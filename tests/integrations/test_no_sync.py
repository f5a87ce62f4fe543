"""No attention layer waits for the device: whoever reads a number back stops the host until all work before is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from hf_flash_cupy.integrations.masks import attention_mask
from hf_flash_cupy.integrations.transformers import attention_forward, record_layers

from .tiny import build, padding, tokens

pytestmark = pytest.mark.gpu
SYNC_FREE = "house_sync_free"


@contextmanager
def refused() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def layer(*args: Any, **kwargs: Any) -> Any:
    with refused():
        return attention_forward(*args, **kwargs)


def cases() -> dict[str, tuple[str, dict[str, Tensor]]]:
    positions = torch.cat([torch.arange(n) for n in (20, 30, 14)])[None]
    holes = torch.ones(3, 64, dtype=torch.long)
    holes[0, 5:9] = 0
    floats = torch.zeros(3, 1, 64, 64).masked_fill(torch.ones(64, 64).triu(1).bool(), -1e38)
    return {
        "plain": ("llama", {"input_ids": tokens(3, 64)}),
        "left-padded": ("llama", {"input_ids": tokens(3, 64), "attention_mask": padding(3, 64, "left")}),
        "padded with holes": ("llama", {"input_ids": tokens(3, 64), "attention_mask": holes}),
        "packed, window": ("mistral", {"input_ids": tokens(1, 64), "position_ids": positions}),
        "float mask": ("llama", {"input_ids": tokens(3, 64), "attention_mask": floats}),
        "sinks, window": ("gpt_oss", {"input_ids": tokens(3, 64), "attention_mask": padding(3, 64, "left")}),
    }


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("case", cases())
def test_no_layer_waits_for_the_device(case: str, training: bool) -> None:
    AttentionInterface.register(SYNC_FREE, layer)
    AttentionMaskInterface.register(SYNC_FREE, attention_mask)
    name, inputs = cases()[case]
    model = build(name, SYNC_FREE).to("cuda", torch.bfloat16)
    inputs = {key: x.to("cuda") for key, x in inputs.items()}
    for _ in range(2):  # the first compiles
        with torch.set_grad_enabled(training), record_layers() as layers:
            out = model(**inputs, use_cache=False).logits
    assert out.isfinite().all()
    assert layers
    assert all(record.backend == "cuda" and record.launches for record in layers.values())
    if training:
        loss = out.float().square().mean()
        with refused():
            loss.backward()


@pytest.mark.parametrize("case", ["plain", "packed, window"])
def test_no_mask_without_padding_waits_for_the_device(case: str) -> None:
    """Of a kind seen before. (Transformers itself asks the device whether positions are packed.)"""

    def mask(*args: Any, **kwargs: Any) -> Tensor | None:
        with refused() if seen else nullcontext():
            return attention_mask(*args, **kwargs)

    seen = False
    AttentionInterface.register(SYNC_FREE, layer)
    AttentionMaskInterface.register(SYNC_FREE, mask)
    name, inputs = cases()[case]
    model = build(name, SYNC_FREE).to("cuda", torch.bfloat16)
    inputs = {key: x.to("cuda") for key, x in inputs.items()}
    with torch.no_grad():
        model(**inputs, use_cache=False)
        seen = True
        model(**inputs, use_cache=False)
