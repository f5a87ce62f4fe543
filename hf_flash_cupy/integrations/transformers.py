"""The attention function registered with Transformers, under the names ``cupy_fa1`` and ``cupy_fa2``."""

from __future__ import annotations

from functools import partial, update_wrapper
from typing import Any

from torch import Tensor

from hf_flash_cupy import env, functional
from hf_flash_cupy.call import Call, Extras, Options, extras
from hf_flash_cupy.errors import UnsupportedProblem
from hf_flash_cupy.integrations import on_torch
from hf_flash_cupy.integrations.decode_step import step
from hf_flash_cupy.integrations.notices import warn_once
from hf_flash_cupy.integrations.recording import LayerRecord, is_recording, record_layers, run_recorded
from hf_flash_cupy.integrations.request import WAY_OUT, AttentionRequest, build_request, within_sequences

__all__ = ["NAMES", "LayerRecord", "attention_forward", "record_layers", "register"]

NAMES = {"cupy_fa1": "fa1", "cupy_fa2": "fa2"}  # and the algorithm behind each


def register() -> None:
    """Makes ``attn_implementation="cupy_fa1"`` and ``"cupy_fa2"`` known to Transformers; repeating it is harmless.

    Also ``"paged|cupy_fa2"``, which ``generate_batch`` takes by itself (5.17; from 5.24 on it wants
    :func:`hf_flash_cupy.enable_flash_alias`).

    The mask function goes with it: under a name that has none, Transformers passes no mask at all, and
    padding, window and packing are silently lost.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    from hf_flash_cupy.integrations.class_maps import add_to_class_maps
    from hf_flash_cupy.integrations.masks import attention_mask
    from hf_flash_cupy.integrations.paged import paged_attention_forward

    for name, algorithm in NAMES.items():
        function = update_wrapper(partial(attention_forward, algorithm=algorithm), attention_forward)
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, attention_mask)
        # Lengths say all that is visible in continuous batching: without a mask function there is no mask.
        paged = update_wrapper(partial(paged_attention_forward, algorithm=algorithm), paged_attention_forward)
        AttentionInterface.register(f"paged|{name}", paged)
    add_to_class_maps(NAMES)


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    algorithm: str = "fa2",
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one layer, with the arguments that Transformers' models call it with.

    Args:
        module: the calling layer; ``training``, ``is_causal`` and ``layer_idx`` are read, its config never.
        query: (batch or 1, num_heads, seqlen_q, head_dim), any strides.
        key: (batch, num_heads_k, seqlen_k, head_dim); num_heads is a multiple of num_heads_k.
        value: (batch, num_heads_k, seqlen_k, head_dim_v).
        attention_mask: an ``IntervalMask``; or bool, True = attend, or additive float, broadcastable to
            (batch, num_heads, seqlen_q, seqlen_k); or key padding (batch, seqlen_k); or None.
        scaling: of the scores; None = ``head_dim ** -0.5``.
        dropout: of the probabilities, while the module is in training.
        sliding_window: keys a row sees, its own included. Counts only without a mask, which would have it.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        is_causal: counts only without a mask; None = what the module says, False where it says nothing.
        algorithm: "fa2" or "fa1", which the registered name decides.
        kwargs: ``s_aux``/``sinks``, ``position_bias``, ``cu_seq_lens_q/k`` and ``max_length_q/k``, ``indices``,
            ``block_indices`` and ``output_attentions`` count; other names known to change the result are refused; the
            rest is ignored.

    Returns:
        (batch, seqlen_q, num_heads, head_dim_v), contiguous, in v's dtype (autocast's where on), and None; with
        ``output_attentions`` the probabilities (batch, num_heads, seqlen_q, seqlen_k) instead of None. It has gradients
        by query, key, value, sinks and biases.

    Raises:
        UnsupportedProblem: the layer asks for what no kernel can do; it says what, and what to do.
    """
    out = step(
        *(module, query, key, value, attention_mask),
        scaling=scaling,
        dropout=dropout,
        sliding_window=sliding_window,
        softcap=softcap,
        is_causal=is_causal,
        algorithm=algorithm,
        kwargs=kwargs,
    )
    if out is not None:
        return out, None
    request = build_request(
        module,
        query,
        key,
        value,
        attention_mask,
        scaling=scaling,
        dropout=dropout,
        sliding_window=sliding_window,
        softcap=softcap,
        is_causal=is_causal,
        kwargs=kwargs,
    )
    if kwargs.get("output_attentions"):
        return _with_probabilities(module, request, algorithm)
    if not is_recording():
        return _attend(request, algorithm)[0], None
    return run_recorded(module, lambda: _attend(request, algorithm)), None


def _with_probabilities(module: Any, request: AttentionRequest, algorithm: str) -> tuple[Tensor, Tensor]:
    warn_once(
        f"output_attentions=True: cupy_{algorithm} computes the probabilities by plain operations of torch, exact but "
        "with the memory and time of eager attention. Without it the kernels run."
    )
    weights: list[Tensor] = []

    def attend() -> tuple[Tensor, str]:
        out, probabilities = on_torch.attend_with_probabilities(request)
        weights.append(probabilities)
        return out, "probabilities"

    return run_recorded(module, attend), weights[0]


def _attend(request: AttentionRequest, algorithm: str) -> tuple[Tensor, str]:
    """The output, and what computed it if that was none of this package's kernels."""
    if not request.q.is_cuda and request.q.device.type == "cpu":
        mode = env.cpu_mode()
        if mode == "auto":
            warn_once(
                f"cupy_{algorithm} on a CPU runs torch's scaled_dot_product_attention. HF_FLASH_CUPY_CPU=kernels runs "
                "this package's kernels (to check them: slower), HF_FLASH_CUPY_CPU=sdpa silences this."
            )
        if mode != "kernels":
            return on_torch.attend(request)
    return _on_kernels(request, algorithm), "none"


def _on_kernels(request: AttentionRequest, algorithm: str) -> Tensor:
    if request.mask is not None or request.intervals is not None or request.bias is not None:
        request = within_sequences(request)
    try:
        out = _packed(request, algorithm) if request.sequences is not None else _batched(request, algorithm)
    except UnsupportedProblem as error:
        if "attn_implementation" in str(error):
            raise
        raise UnsupportedProblem(f"{error} {WAY_OUT}") from error
    return out


def _batched(request: AttentionRequest, algorithm: str) -> Tensor:
    """By the shortest road: a decoding step has as many calls as layers, and the GPU waits for each."""
    q, k, v = functional.prepare(request.q, request.k, request.v, 4)
    options = Options(
        *(request.causal, request.window_size, request.softmax_scale, request.softcap, request.dropout_p, algorithm),
        heads_first=True,
    )
    beside: Extras = {}
    if request.has_extras:
        beside = extras(
            q,
            mask=request.mask,
            key_intervals=None if request.intervals is None else request.intervals.intervals,
            bias=request.bias,
            sinks=request.sinks,
            dropout_p=request.dropout_p,
        )
    return functional.attend(Call(q, k, v, beside, options), None, need_lse=False)[0]


def _packed(request: AttentionRequest, algorithm: str) -> Tensor:
    sequences = request.sequences
    assert sequences is not None
    q, k, v = (x[0].transpose(0, 1) for x in (request.q, request.k, request.v))
    out: Tensor = functional.flash_attention_varlen(
        *(q, k, v, sequences.cu_seqlens_q, sequences.cu_seqlens_k, sequences.max_seqlen_q, sequences.max_seqlen_k),
        causal=request.causal,
        window_size=request.window_size,
        softmax_scale=request.softmax_scale,
        softcap=request.softcap,
        sinks=request.sinks,
        dropout_p=request.dropout_p,
        algorithm=algorithm,
    )
    return out[None]
