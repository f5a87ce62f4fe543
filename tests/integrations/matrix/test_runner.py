"""The matrix can fail: what it must notice, planted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_flash_cupy.integrations.transformers as integration

from .comparison import Tolerance, Verdict
from .registry import ROWS
from .runner import Outcome, Runner


def run(name: str) -> Outcome:
    return Runner(ROWS[name], "cpu", torch.float32).run()


def spoiled(monkeypatch: pytest.MonkeyPatch, name: str, **changes: Any) -> Outcome:
    """The row's outcome where every layer's request is changed before it is served."""
    attend = integration._attend
    monkeypatch.setattr(
        integration, "_attend", lambda request, algorithm: attend(replace(request, **changes), algorithm)
    )
    return run(name)


def test_a_dropped_mask_is_noticed_in_every_mode_that_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = spoiled(monkeypatch, "llama", intervals=None, mask=None)
    wrong = {mode for mode, text in outcome.modes.items() if text.startswith("differs")}
    assert {"left pad", "packed", "generate left-padded", "generate static left-padded"} <= wrong
    assert outcome.modes["plain"] == "ok"
    assert not outcome.equal


def test_dropped_sinks_softcap_and_bias_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, changes in {"gpt_oss": {"sinks": None}, "gemma2": {"softcap": 0.0}, "t5": {"bias": None}}.items():
        with monkeypatch.context() as patch:
            outcome = spoiled(patch, name, **changes)
        assert outcome.modes["plain"].startswith("differs"), name
        assert outcome.modes["train"] != "ok", name


def test_a_layer_that_ran_no_kernel_is_not_accelerated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_FLASH_CUPY_CPU", "sdpa")
    outcome = run("llama")
    assert outcome.equal
    assert not outcome.seen.accelerated
    assert outcome.seen.others == {"by sdpa"}


def test_an_attention_of_its_own_is_not_accelerated() -> None:
    outcome = run("longt5")
    assert outcome.equal
    assert not outcome.seen.accelerated
    assert outcome.seen.others == {"LongT5LocalAttention"}


def noise(size: float, seed: int) -> Tensor:
    return size * torch.randn(64, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("size", "equal"), [(0.02, True), (0.03, True), (0.1, False)])
def test_lower_precisions_may_err_twice_as_much_as_eager(size: float, equal: bool) -> None:
    truth = noise(1.0, 0)
    ours, peer = truth + noise(size, 1), truth + noise(0.02, 2)
    verdict = Verdict({"x": ours}, {"x": truth}, {"x": peer}).judge(Tolerance(torch.bfloat16))
    assert (verdict == "ok") == equal


def test_a_wrong_gradient_among_right_ones_is_noticed() -> None:
    truth = {f"p{index}": noise(1.0, index) for index in range(20)}
    peer = {name: x + noise(0.02, 50) for name, x in truth.items()}
    ours = {name: x + noise(0.02, 51) for name, x in truth.items()}
    tolerance = Tolerance(torch.bfloat16, training=True)
    assert Verdict(ours, truth, peer).judge(tolerance) == "ok"
    assert Verdict(ours | {"p3": torch.zeros(64, 8)}, truth, peer).judge(tolerance).startswith("differs: p3")
    assert Verdict(ours | {"p3": ours["p3"] * torch.nan}, truth, peer).judge(tolerance).startswith("p3")
