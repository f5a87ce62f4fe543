"""Attention classes for the models that choose theirs from a map of implementation names (Falcon, GPT-Neo, SAM …).

Each is the model's own class, its weights and cache included, but for the scores and their softmax: these go to the
attention function that is registered under the implementation's name, as in every other model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hf_flash_cupy.integrations.key_intervals import IntervalMask

Weights = Tensor | None


def mapped_class(classes: dict[str, Any], implementation: str) -> type[nn.Module] | None:
    """The class for ``implementation`` in a model's map; None where only the model's eager class would be right."""
    eager, sdpa = classes["eager"], classes.get("sdpa")
    if not isinstance(eager, type):
        return None
    if eager.__name__ in _BY_NAME:
        return _derived(_BY_NAME[eager.__name__], eager, implementation)
    if isinstance(sdpa, type) and "scaled_dot_product_attention" in _code(sdpa).co_names:
        return _derived(_ThroughSdpa, sdpa, implementation)
    return None


def _code(own: Any) -> CodeType:
    code: CodeType = own.forward.__code__
    return code


def stays_eager(config: Any) -> bool:
    """Whether a model whose class is known here is left to its eager class.

    Falcon with ALiBi: its eager class adds the slopes twice (in the scores and in the mask), its sdpa branch once.
    """
    return type(config).__name__ == "FalconConfig" and bool(config.alibi)


@cache
def _derived(mixin: type, own: type, implementation: str) -> type[nn.Module]:
    code = _code(own)
    body = {
        "implementation": implementation,
        "origin": (mixin, own, implementation),
        "arguments": code.co_varnames[1 : code.co_argcount],
        "__module__": own.__module__,
        "__doc__": own.__doc__,
    }
    made: type[nn.Module] = type(own.__name__, (mixin, own), body)
    return made


def _unpickled(mixin: type, own: type, implementation: str) -> nn.Module:
    made = _derived(mixin, own, implementation)
    return made.__new__(made)


class _Mapped(nn.Module):
    implementation: str
    origin: tuple[type, type, str]
    arguments: tuple[str, ...]  # of the own class's forward, without self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """By what the class is made of: pickle would find the model's own class under its name."""
        return _unpickled, self.origin, dict(vars(self))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> tuple[Tensor, Weights]:
        """The registered attention function; q, k, v are (batch, heads, seqlen, size), the output likewise."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        out, weights = ALL_ATTENTION_FUNCTIONS[self.implementation](self, q, k, v, mask, **options)
        return out.transpose(1, 2), weights


class _ThroughSdpa(_Mapped):
    """A class that calls ``torch.nn.functional.scaled_dot_product_attention``: that call is answered."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = getattr(self, "config", None)
        if config is not None:  # Falcon's looks there which branch to take
            self.config = copy.copy(config)
            self.config._attn_implementation = "sdpa"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        wanted = kwargs.pop("output_attentions", False)
        place = self.arguments.index("output_attentions") if "output_attentions" in self.arguments else len(args)
        if place < len(args):
            wanted, args = args[place], (*args[:place], False, *args[place + 1 :])
        weights: list[Weights] = []
        with _Answer(self, bool(wanted), weights):
            out, _ = super().forward(*args, **kwargs)  # Falcon's calls torch's function where no weights are wanted
        return out, weights[0]


class _Answer(TorchFunctionMode):
    """Answers torch's scaled_dot_product_attention by the attention function of a layer."""

    def __init__(self, layer: _Mapped, wanted: bool, weights: list[Weights]) -> None:
        super().__init__()
        self.layer, self.wanted, self.weights = layer, wanted, weights

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        rows, keys = query.shape[2], key.shape[2]
        if is_causal and rows != keys:  # torch's is aligned at the top left
            attn_mask = torch.ones(1, 1, rows, keys, dtype=torch.bool, device=query.device).tril()
        out, weights = self.layer.attend(
            query,
            key,
            value,
            attn_mask,
            scaling=scale,
            dropout=dropout_p,
            is_causal=is_causal,
            output_attentions=self.wanted,
        )
        self.weights.append(weights)
        return out


class _GptJ(_Mapped):
    """Transformers 5.17's GPT-J; later versions ask the interface."""

    attn_dropout: nn.Dropout
    head_dim: int

    def forward(self, *args: Any, output_attentions: bool | None = False, **kwargs: Any) -> Any:
        self.wanted = bool(output_attentions)
        return super().forward(*args, **kwargs)

    def _attn(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, Weights]:
        return self._attend(query, key, value, attention_mask, scaling=self.head_dim**-0.5)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Weights]:
        # The embedded positions may have left q and k in another dtype than v: they are taken to v's.
        options |= {"dropout": self.attn_dropout.p, "output_attentions": self.wanted}
        return self.attend(query, key, value, mask, **options)


class _GptNeo(_GptJ):
    """Scores are not scaled; every other layer sees ``window_size`` keys only."""

    attention_type: str
    config: Any

    def _attn(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, Weights]:
        width = self.config.window_size if self.attention_type == "local" else None
        if width is not None and attention_mask is not None:
            attention_mask = windowed(attention_mask, width)
        return self._attend(query, key, value, attention_mask, scaling=1.0, sliding_window=width)


def windowed(mask: Tensor, width: int) -> Tensor:
    """A causal mask (batch, 1, seqlen_q, seqlen_k) with no more than ``width`` keys a row, its own the last."""
    described = mask.described if isinstance(mask, IntervalMask) else None
    if described is not None:
        left = width - 1 if described.left is None else min(described.left, width - 1)
        return IntervalMask(replace(described, left=left))
    dense = mask.dense() if isinstance(mask, IntervalMask) else mask
    visible = dense if dense.dtype == torch.bool else dense > torch.finfo(dense.dtype).min / 2
    column = torch.arange(dense.shape[3], device=dense.device)
    # A row's own key is the last that it sees: so it is with static caches, whose end is not yet filled, too.
    near = column > torch.where(visible, column, -1).amax(-1, keepdim=True) - width
    return dense & near if dense.dtype == torch.bool else dense.masked_fill(~near, -torch.inf)


class _Bert(_Mapped):
    """Projections named ``query``, ``key`` and ``value``, as in GIT and SuperGlue."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    dropout: nn.Dropout
    attention_head_size: int

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:-1], -1, self.attention_head_size).transpose(1, 2)

    def _merged(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, wanted: bool) -> tuple[Tensor, Weights]:
        scaling = self.attention_head_size**-0.5
        out, weights = self.attend(
            q, k, v, mask, scaling=scaling, dropout=self.dropout.p, is_causal=False, output_attentions=wanted
        )
        return out.transpose(1, 2).flatten(2), weights


class _Git(_Bert):
    layer_idx: int

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, past_key_values: Any = None, **kwargs: Any
    ) -> Any:
        q, k, v = (self._heads(project(hidden_states)) for project in (self.query, self.key, self.value))
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        return self._merged(q, k, v, attention_mask, bool(kwargs.get("output_attentions")))


class _SuperGlue(_Bert):
    is_decoder: bool

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        output_attentions: bool | None = False,
    ) -> Any:
        source, mask = hidden_states, attention_mask
        if encoder_hidden_states is not None:
            source, mask = encoder_hidden_states, encoder_attention_mask
        q, k, v = (self._heads(x) for x in (self.query(hidden_states), self.key(source), self.value(source)))
        out, weights = self._merged(q, k, v, mask, bool(output_attentions))
        return (out, *([weights] if output_attentions else []), *([None] if self.is_decoder else []))


_BY_NAME: dict[str, type] = {
    "GPTNeoSelfAttention": _GptNeo,
    "GPTJAttention": _GptJ,
    "GitSelfAttention": _Git,
    "SuperGlueSelfAttention": _SuperGlue,
}
