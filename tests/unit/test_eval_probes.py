"""What the causality probe lets pass and what it catches, on logits made by hand."""

from __future__ import annotations

import math

import pytest
import torch

from hf_flash_cupy.evaluation.gates import tolerance
from hf_flash_cupy.evaluation.probes import LayerCalls, _check_calls, _check_causality

ROWS, CUT = 40, 27


def logits(seed: int = 0) -> torch.Tensor:
    return 5 * torch.randn(ROWS, 50, generator=torch.Generator().manual_seed(seed))


def later_changed() -> torch.Tensor:
    changed = logits()
    changed[CUT:] = logits(1)[CUT:]
    return changed


class TestCausality:
    @pytest.mark.parametrize(
        ("dtype", "noise"), [("float32", 0.0), ("float32", 1e-4), ("float16", 2e-2), ("bfloat16", 0.2)]
    )
    def test_rounding_passes(self, dtype: str, noise: float) -> None:
        changed = later_changed()
        changed[:CUT] += noise * torch.randn(CUT, 50, generator=torch.Generator().manual_seed(2))
        assert _check_causality("ours", logits(), changed, CUT, tolerance(dtype)).ok

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    @pytest.mark.parametrize("row", [0, CUT - 1])
    def test_one_row_that_sees_too_much_is_caught(self, dtype: str, row: int) -> None:
        changed = later_changed()
        changed[row] = 0.8 * changed[row] + 0.2 * logits(3)[row]
        assert not _check_causality("ours", logits(), changed, CUT, tolerance(dtype)).ok

    def test_nan_is_never_rounding(self) -> None:
        changed = later_changed()
        changed[3, 3] = math.nan
        assert not _check_causality("ours", logits(), changed, CUT, tolerance("float32")).ok

    def test_a_change_without_any_effect_proves_nothing(self) -> None:
        assert not _check_causality("ours", logits(), logits(), CUT, tolerance("float32")).ok


class TestCalls:
    BASELINE = LayerCalls({0: 1, 1: 1}, None, "eager")

    @pytest.mark.parametrize(
        ("layers", "ok"),
        [
            (LayerCalls({0: 1, 1: 1}, None, "sdpa"), True),
            (LayerCalls({0: 1}, None, "sdpa"), False),
            (LayerCalls({}, None, "sdpa"), False),
            (LayerCalls({0: 1, 1: 1}, {0: 1, 1: 2}, "cuda"), True),
            (LayerCalls({0: 1, 1: 1}, {0: 1, 1: 1}, "host"), True),
            (LayerCalls({0: 1, 1: 1}, {0: 1, 1: 0}, "cuda"), False),
            (LayerCalls({0: 1, 1: 1}, {0: 1, 1: 1}, "cuda+sdpa"), False),
            (LayerCalls({0: 1, 1: 1}, {0: 0, 1: 0}, "reference"), False),
            (LayerCalls({}, {}, "none"), False),
        ],
    )
    def test_every_layer_must_have_run_it_on_kernels(self, layers: LayerCalls, ok: bool) -> None:
        assert _check_calls("ours", layers, self.BASELINE).ok is ok
