"""What the attention layers of a model asked for, and whether this package's kernels answered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from torch import nn

import hf_flash_cupy.integrations.transformers as integration
from hf_flash_cupy.integrations.model_layers import attention_modules, is_pooling
from hf_flash_cupy.integrations.request import AttentionRequest


@dataclass
class Observation:
    """Over all modes of a model."""

    heads: set[tuple[int, int]] = field(default_factory=set)  # (head_dim, head_dim_v)
    masks: set[str] = field(default_factory=set)
    features: set[str] = field(default_factory=set)
    ours: set[str] = field(default_factory=set)  # modules (by class) that asked the attention function
    others: set[str] = field(default_factory=set)  # attention modules that ran without
    pools: set[str] = field(default_factory=set)  # heads that pool a whole image by one learned query, likewise

    @property
    def accelerated(self) -> bool:
        return bool(self.ours) and not self.others


@contextmanager
def observe(model: nn.Module, seen: Observation) -> Iterator[None]:
    """Adds to ``seen`` what the model does inside."""
    asked: set[int] = set()
    ran: dict[int, str] = {}
    build = integration.build_request

    def build_request(module: Any, *args: Any, **kwargs: Any) -> AttentionRequest:
        request = build(module, *args, **kwargs)
        asked.add(id(module))
        seen.ours.add(type(module).__name__)
        _note(request, seen)
        return request

    def hook(module: nn.Module, *_: Any) -> None:
        ran[id(module)] = type(module).__name__

    with ExitStack() as stack:
        layers = stack.enter_context(integration.record_layers())
        stack.enter_context(patch.object(integration, "build_request", build_request))
        for module in attention_modules(model):
            stack.callback(module.register_forward_hook(hook).remove)
        yield
    parents = {id(child): id(module) for module in model.modules() for child in module.children()}
    covered = asked | {parents[key] for key in asked if key in parents}
    for key, name in ran.items():
        if key not in covered:
            (seen.pools if is_pooling(name) else seen.others).add(name)
    for record in layers.values():
        if record.launches < record.calls:
            seen.others.add(f"by {record.backend}")


def _note(request: AttentionRequest, seen: Observation) -> None:
    seen.heads.add((request.q.shape[3], request.v.shape[3]))
    kinds = {
        "causal": request.causal,
        "window": request.window_size != (-1, -1),
        "intervals": request.intervals is not None,
        "keys": request.mask is not None and request.mask.shape[2] == 1,
        "dense": request.mask is not None and request.mask.shape[2] > 1,
        "packed": request.sequences is not None,
    }
    seen.masks |= {kind for kind, there in kinds.items() if there} or {"all"}
    features = {
        "bias": request.bias is not None,
        "sinks": request.sinks is not None,
        "softcap": request.softcap != 0,
        "GQA": request.q.shape[1] != request.k.shape[1],
    }
    seen.features |= {name for name, there in features.items() if there}
