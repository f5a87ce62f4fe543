"""The oracle itself, against loops that say what the documentation says and against torch's own attention."""

from __future__ import annotations

import math

import attention_check as check
import pytest
import torch

from hf_flash_cupy.reference import attention_reference, visible_keys


def sees(i: int, j: int, seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int, int]) -> bool:
    """Whether row i sees key j, in the documentation's words."""
    diagonal = i + seqlen_k - seqlen_q
    left, right = window
    inside_left = left == -1 or diagonal - left <= j
    inside_right = right == -1 or j <= diagonal + right
    return (j <= diagonal or not causal) and inside_left and inside_right


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 5), (3, 8), (8, 3), (1, 7), (4, 1)])
@pytest.mark.parametrize("window", [(-1, -1), (0, 0), (2, 0), (-1, 1), (1, -1), (2, 3), (50, 50)])
@pytest.mark.parametrize("causal", [False, True])
def test_visible_keys_against_loops(seqlen_q: int, seqlen_k: int, window: tuple[int, int], causal: bool) -> None:
    generator = torch.Generator().manual_seed(seqlen_q)
    mask = torch.rand(2, 3, seqlen_q, seqlen_k, generator=generator) < 0.7
    intervals = torch.randint(-2, seqlen_k + 3, (2, 1, seqlen_q, 2), generator=generator, dtype=torch.int32)
    found = visible_keys(2, 3, seqlen_q, seqlen_k, check.CPU, causal, window, mask, intervals)
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(n) for n in (2, 3, seqlen_q, seqlen_k))).tolist():
        lo, hi = intervals[b, 0, i].tolist()
        expected = sees(i, j, seqlen_q, seqlen_k, causal, window) and bool(mask[b, h, i, j]) and lo <= j < hi
        assert bool(found[b, h, i, j]) == expected, (b, h, i, j)


def test_values_against_loops() -> None:
    q, k, v = check.qkv(2, 3, 4, 4, 5, num_heads_k=2, head_dim_v=6, dtype=torch.float64, device=check.CPU)
    mask = torch.rand(2, 4, 3, 4, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[1, 2, 1] = False
    out, lse = attention_reference(q, k, v, mask=mask, softmax_scale=0.7, softcap=2.0)
    for b, h, i in torch.cartesian_prod(torch.arange(2), torch.arange(4), torch.arange(3)).tolist():
        total, expected = 0.0, torch.zeros(6, dtype=torch.float64)
        for j in range(4):
            if mask[b, h, i, j]:
                score = 0.7 * sum(q[b, i, h, c].item() * k[b, j, h // 2, c].item() for c in range(5))
                weight = math.exp(2.0 * math.tanh(score / 2.0))
                total += weight
                expected += weight * v[b, j, h // 2]
        assert lse[b, h, i].item() == pytest.approx(math.log(total) if total else -math.inf, abs=1e-12)
        torch.testing.assert_close(out[b, i, h], expected / total if total else expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_against_torch(causal: bool) -> None:
    q, k, v = check.qkv(2, 9, 9, 4, 8, num_heads_k=2, dtype=torch.float64, device=check.CPU)
    out, lse = attention_reference(q, k, v, causal=causal)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=True
    )
    torch.testing.assert_close(out.transpose(1, 2), expected, rtol=0, atol=1e-12)
    eager, eager_lse = check.eager_attention(q, k, v, causal=causal)
    torch.testing.assert_close(eager, out, rtol=0, atol=1e-6)  # its softmax is fp32 by definition
    torch.testing.assert_close(eager_lse.double(), lse, rtol=0, atol=1e-6)


def test_comparison_fails_where_it_should() -> None:
    truth = torch.linspace(-2, 2, check.MANY, dtype=torch.float64)
    eager = (truth + 1e-3).to(torch.float32)
    assert check.compare("out", eager, truth, eager) <= 1
    wrong = truth.float()
    wrong[7] += 0.01
    with pytest.raises(AssertionError, match=r"error 0\.01.*first at \(7,\)"):
        check.compare("out", wrong, truth, eager)
    spiky = truth.float()
    spiky[0] += 0.01  # one bad element of eager's excuses no error of that size everywhere
    with pytest.raises(AssertionError, match="rms error"):
        check.compare("out", truth.float() + 0.019, truth, spiky)
    for bad in (math.nan, math.inf):
        wrong[7] = bad
        with pytest.raises(AssertionError, match="differs at 1 of 1000, first at \\(7,\\)"):
            check.compare("out", wrong, truth, eager)
