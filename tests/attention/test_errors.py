"""Wrong arguments: the message names the argument, what is supported, and what to do."""

from __future__ import annotations

from typing import Any

import attention_check as check
import numpy as np
import pytest
import torch
from torch import Tensor

from hf_flash_cupy import UnsupportedProblem, flash_attention, flash_attention_varlen
from hf_flash_cupy.launch import launch_count


def tensors(device: torch.device, **changes: Any) -> dict[str, Any]:
    """A right call, of a shape that needs no kernel compiled, with some arguments replaced."""
    q, k, v = check.qkv(2, 5, 7, 4, 32, num_heads_k=2, dtype=torch.float32, device=device)
    return {"q": q, "k": k, "v": v, **changes}


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


# What is changed in a right call, the error, its message.
Wrong = tuple[dict[str, Any], type[Exception] | tuple[type[Exception], ...], str]

WRONG: dict[str, Wrong] = {
    "q-flat": ({"q": zeros(4)}, ValueError, r"q has shape \(4,\).*batch, seqlen, heads, head_dim"),
    "q-2d": ({"q": zeros(4, 4)}, ValueError, r"q has shape \(4, 4\)"),
    "q-3d": ({"q": zeros(5, 4, 32)}, ValueError, r"q has shape \(5, 4, 32\)"),
    "k-3d": ({"k": zeros(7, 2, 32)}, ValueError, r"k has shape \(7, 2, 32\)"),
    "v-5d": ({"v": zeros(2, 7, 2, 32, 1)}, ValueError, r"v has shape \(2, 7, 2, 32, 1\)"),
    "k-scalar": ({"k": zeros()}, ValueError, r"k has shape \(\)"),
    "q-list": ({"q": [1.0]}, TypeError, "q is a list"),
    "q-none": ({"q": None}, TypeError, "q is a NoneType"),
    "k-list": ({"k": [1.0]}, TypeError, "k is a list"),
    "k-numpy": ({"k": np.zeros((2, 7, 2, 32), np.float32)}, TypeError, "k is a ndarray"),
    "v-none": ({"v": None}, TypeError, "v is a NoneType"),
    "head_dim": ({"k": zeros(2, 7, 2, 40)}, ValueError, "q has head_dim 32, k 40"),
    "no-head_dim": ({"v": zeros(2, 7, 2, 0)}, ValueError, "head_dim is 0"),
    "seqlen_k": ({"v": zeros(2, 8, 2, 32)}, ValueError, r"k has shape .* v \(2, 8, 2, 32\).*same seqlen"),
    "heads_k": ({"v": zeros(2, 7, 4, 32)}, ValueError, r"k has shape .* v \(2, 7, 4, 32\).*heads"),
    "heads": ({"q": zeros(2, 5, 3, 32)}, ValueError, "q has 3 heads, k 2: .*multiple"),
    "batch": ({"k": zeros(3, 7, 2, 32), "v": zeros(3, 7, 2, 32)}, ValueError, "batch sizes 2, 3, 3"),
    "float64": (
        {name: zeros(2, 5, 2, 32, dtype=torch.float64) for name in "qkv"},
        TypeError,
        "q is torch.float64",
    ),
    "v-int": ({"v": zeros(2, 7, 2, 32, dtype=torch.int64)}, TypeError, "v is torch.int64"),
    "q-bool": ({"q": zeros(2, 5, 4, 32, dtype=torch.bool)}, TypeError, "q is torch.bool"),
    "wide-q": (
        {"q": zeros(2, 5, 4, 520), "k": zeros(2, 7, 2, 520)},
        UnsupportedProblem,
        "q has head_dim 520.*1 to 512.*sdpa",
    ),
    "wide-v": ({"v": zeros(2, 7, 2, 513)}, UnsupportedProblem, "v has head_dim 513.*1 to 512"),
    "positions": (
        {name: zeros(1, 1, 2, 32).expand(1, 2**31, 2, 32) for name in "kv"},
        UnsupportedProblem,
        "k has 2147483648 positions; at most",
    ),
    "window-int": ({"window_size": 4}, ValueError, r"window_size=4: a pair \(left, right\)"),
    "window-three": ({"window_size": (1, 2, 3)}, ValueError, r"window_size=\(1, 2, 3\): a pair"),
    "window-text": ({"window_size": ("a", "b")}, ValueError, "window_size=.*a pair"),
    "window-negative": ({"window_size": (-2, 0)}, ValueError, r"window_size=\(-2, 0\): sizes are"),
    "scale-nan": ({"softmax_scale": float("nan")}, ValueError, "softmax_scale=nan: .*finite number"),
    "scale-inf": ({"softmax_scale": float("inf")}, ValueError, "softmax_scale=inf"),
    "scale-text": ({"softmax_scale": "x"}, (ValueError, TypeError), "softmax_scale"),
    "softcap-negative": ({"softcap": -1.0}, ValueError, "softcap=-1.0: 0 .*or a positive number"),
    "softcap-nan": ({"softcap": float("nan")}, ValueError, "softcap=nan"),
    "softcap-text": ({"softcap": "x"}, (ValueError, TypeError), "softcap"),
    "mask-float": ({"mask": zeros(5, 7)}, TypeError, "mask is torch.float32; bool is needed.*bias"),
    "mask-int": ({"mask": zeros(5, 7, dtype=torch.int64)}, TypeError, "mask is torch.int64"),
    "mask-list": ({"mask": [True] * 7}, TypeError, "mask is a list"),
    "mask-shape": (
        {"mask": zeros(5, 8, dtype=torch.bool)},
        ValueError,
        r"mask has shape \(5, 8\).*broadcast to \(2, 4, 5, 7\)",
    ),
    "mask-5d": ({"mask": zeros(1, 2, 4, 5, 7, dtype=torch.bool)}, ValueError, "mask has shape .*broadcast"),
    "intervals-int64": (
        {"key_intervals": zeros(5, 2, dtype=torch.int64)},
        TypeError,
        "key_intervals is torch.int64; int32",
    ),
    "intervals-list": ({"key_intervals": [0, 7]}, TypeError, "key_intervals is a list"),
    "intervals-pair": (
        {"key_intervals": zeros(5, 3, dtype=torch.int32)},
        ValueError,
        r"key_intervals has shape \(5, 3\)",
    ),
    "intervals-scalar": (
        {"key_intervals": zeros(dtype=torch.int32)},
        ValueError,
        r"key_intervals has shape \(\)",
    ),
    "intervals-rows": (
        {"key_intervals": zeros(6, 2, dtype=torch.int32)},
        ValueError,
        r"key_intervals has shape \(6, 2\)",
    ),
    "intervals-strided": (
        {"key_intervals": zeros(2, 5, dtype=torch.int32).mT},
        ValueError,
        r"key_intervals.*neighbours.*\.contiguous\(\)",
    ),
    "alibi-half": ({"alibi_slopes": zeros(4, dtype=torch.float16)}, TypeError, "alibi_slopes is torch.float16"),
    "alibi-shape": ({"alibi_slopes": zeros(2)}, ValueError, r"alibi_slopes has shape \(2,\); \(4,\) or \(2, 4\)"),
    "alibi-batch": ({"alibi_slopes": zeros(3, 4)}, ValueError, r"alibi_slopes has shape \(3, 4\).*\(2, 4\)"),
    "alibi-list": ({"alibi_slopes": [1.0]}, TypeError, "alibi_slopes is a list"),
    "alibi-scalar": ({"alibi_slopes": zeros()}, ValueError, r"alibi_slopes has shape \(\)"),
    "sinks-shape": ({"sinks": zeros(2)}, ValueError, r"sinks has shape \(2,\); one logit a head, \(4,\)"),
    "sinks-int": ({"sinks": zeros(4, dtype=torch.int64)}, TypeError, "sinks is torch.int64; a float dtype"),
    "sinks-number": ({"sinks": 1.0}, TypeError, "sinks is a float"),
    "bias-shape": ({"bias": zeros(5, 8)}, ValueError, r"bias has shape .*5, 8\), .*broadcast to \(2, 4, 5, 7\)"),
    "bias-5d": ({"bias": zeros(1, 2, 4, 5, 7)}, ValueError, "bias has shape .*broadcast"),
    "bias-bool": ({"bias": zeros(5, 7, dtype=torch.bool)}, TypeError, "bias is torch.bool; a float.*mask"),
    "bias-list": ({"bias": [0.0] * 7}, TypeError, "bias is a list"),
    "dropout-all": ({"dropout_p": 1.0}, ValueError, r"dropout_p=1.0: a probability in \[0, 1\)"),
    "dropout-negative": ({"dropout_p": -0.1}, ValueError, "dropout_p=-0.1"),
    "dropout-nan": ({"dropout_p": float("nan")}, ValueError, "dropout_p=nan"),
    "dropout-text": ({"dropout_p": "x"}, ValueError, "dropout_p=x"),
    "algorithm": ({"algorithm": "fa9"}, ValueError, "algorithm='fa9': 'fa1' and 'fa2' are"),
    "algorithm of another type": ({"algorithm": [1]}, ValueError, r"algorithm=\[1\]: 'fa1' and 'fa2' are"),
}  # fmt: skip


def on(device: torch.device, value: Any) -> Any:
    """``value`` on ``device``; what is expanded stays so and takes no memory."""
    if not isinstance(value, Tensor):
        return value
    one = value[tuple(slice(1) if stride == 0 else slice(None) for stride in value.stride())]
    return one.to(device).expand(value.shape)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_argument(device: torch.device, name: str) -> None:
    changes, error, message = WRONG[name]
    call = tensors(device, **{key: on(device, value) for key, value in changes.items()})
    before = launch_count()
    with pytest.raises(error, match=message):
        flash_attention(**call)
    assert launch_count() == before


@pytest.mark.parametrize("name", WRONG)
def test_wrong_argument_after_right_calls(device: torch.device, name: str) -> None:
    """A plan kept from a right call lets nothing wrong through."""
    flash_attention(**tensors(device))
    flash_attention(**tensors(device, mask=torch.ones(5, 7, dtype=torch.bool, device=device)))
    test_wrong_argument(device, name)


@pytest.mark.parametrize("name", ["k", "v", "mask", "key_intervals", "bias", "alibi_slopes", "sinks"])
def test_other_device(device: torch.device, name: str) -> None:
    """Other devices' tensors are refused by name (``meta`` stands in where there is one device)."""
    others = {
        "mask": torch.ones(5, 7, dtype=torch.bool, device=device),
        "key_intervals": torch.tensor([0, 7], dtype=torch.int32, device=device),
        "bias": torch.zeros(5, 7, device=device),
        "alibi_slopes": torch.zeros(4, device=device),
        "sinks": torch.zeros(4, device=device),
    }
    call = tensors(device)
    value = call.get(name, others.get(name))
    call[name] = value.to("meta" if device.type == "cpu" else "cpu")
    with pytest.raises(ValueError, match=rf"{name} is on .*one device"):
        flash_attention(**call)


def test_unsupported_device(device: torch.device) -> None:
    with pytest.raises(UnsupportedProblem, match="q is on meta; CUDA GPUs and the CPU are supported"):
        flash_attention(**{name: x.to("meta") for name, x in tensors(device).items()})


@pytest.mark.parametrize("window", [[-1, -1], [3, 0], (np.int64(3), 0), (3.0, 0.0)], ids=str)
def test_any_pair_of_integers_is_a_window(device: torch.device, window: Any) -> None:
    expected = tuple(int(size) for size in window)
    out = flash_attention(**tensors(device, window_size=window))
    assert check.identical(out, flash_attention(**tensors(device, window_size=expected)))


INT32 = torch.int32
WRONG_VARLEN: dict[str, Wrong] = {
    "q-4d": (
        {"q": zeros(1, 10, 4, 32)},
        ValueError,
        r"q has shape \(1, 10, 4, 32\); \(total, heads, head_dim\)",
    ),
    "k-none": ({"k": None}, (ValueError, TypeError), "k "),
    "int64": ({"cu_seqlens_q": zeros(3, dtype=torch.int64)}, TypeError, "cu_seqlens_q is torch.int64; .*int32"),
    "2d": (
        {"cu_seqlens_k": zeros(3, 1, dtype=INT32)},
        ValueError,
        r"cu_seqlens_k has shape \(3, 1\); \(batch \+ 1,\)",
    ),
    "none": ({"cu_seqlens_k": zeros(0, dtype=INT32)}, ValueError, r"cu_seqlens_k has shape \(0,\)"),
    "list": ({"cu_seqlens_q": [0, 4, 10]}, TypeError, "cu_seqlens_q is .*list"),
    "lengths": (
        {"cu_seqlens_q": zeros(4, dtype=INT32)},
        ValueError,
        "cu_seqlens_q has 4 offsets, cu_seqlens_k 3",
    ),
    "max": ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q=-1"),
    "heads": ({"q": zeros(10, 3, 32)}, ValueError, "q has 3 heads, k 2"),
    "head_dim": ({"q": zeros(10, 4, 40)}, ValueError, "q has head_dim 40, k 32"),
    "sinks": ({"sinks": zeros(3)}, ValueError, r"sinks has shape \(3,\)"),
    "alibi": ({"alibi_slopes": zeros(3, 4)}, ValueError, r"alibi_slopes has shape \(3, 4\).*\(2, 4\)"),
    "dropout": ({"dropout_p": 1.5}, ValueError, "dropout_p=1.5"),
    "algorithm": ({"algorithm": "fa3"}, ValueError, "algorithm='fa3'"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap=-1.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_VARLEN)
def test_wrong_varlen_argument(device: torch.device, name: str) -> None:
    changes, error, message = WRONG_VARLEN[name]
    offsets = zeros(3, dtype=INT32)
    right = {"q": zeros(10, 4, 32), "k": zeros(14, 2, 32), "v": zeros(14, 2, 32), "cu_seqlens_q": offsets}
    call = {**right, "cu_seqlens_k": offsets.clone(), "max_seqlen_q": 5, "max_seqlen_k": 7, **changes}
    with pytest.raises(error, match=message):
        flash_attention_varlen(**{key: on(device, value) for key, value in call.items()})


def test_varlen_offsets_on_another_device(device: torch.device) -> None:
    q, k = torch.zeros(10, 4, 32, device=device), torch.zeros(14, 2, 32, device=device)
    offsets = torch.zeros(3, dtype=INT32, device=device)
    elsewhere = offsets.to("meta" if device.type == "cpu" else "cpu")
    with pytest.raises(ValueError, match=r"cu_seqlens_k is on .*one device"):
        flash_attention_varlen(q, k, k, offsets, elsewhere, 5, 7)
