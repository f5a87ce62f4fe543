"""Does a model's attention go through Transformers' attention interface at all?"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch import nn

from hf_flash_cupy.integrations.class_maps import asks_interface
from hf_flash_cupy.integrations.mapped_attention import stays_eager

_routed: dict[type, bool] = {}


def routes_attention(config: Any) -> bool:
    """False for models (bloom, mpt, longformer …) whose attention never asks the interface for a function.

    Transformers loads such a model under any registered name and hands its own attention our mask, which it
    misreads silently. The sign: the file of the model this config belongs to has attention modules, and
    none of the files they come from knows ``ALL_ATTENTION_FUNCTIONS``, nor has a class map that this package serves.
    A model that cannot be found counts as routed.
    """
    routed: bool = _routes(type(config))
    return routed and not stays_eager(config)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # Dynamo cannot trace a look into modules
def _routes(config_class: type) -> bool:
    if config_class not in _routed:
        _routed[config_class] = all(_module_routes(module) for module in _model_modules(config_class))
    return _routed[config_class]


def has_class_maps(config: Any) -> bool:
    """Does the model choose its attention from a map of implementation names? Its layers then said so when built."""
    return any(asks_interface(module) is not None for module in _model_modules(type(config)))


def _model_modules(config_class: type) -> list[ModuleType]:
    """The loaded ``modeling_…`` files beside the config's file that define a model of this config."""
    package = config_class.__module__.rpartition(".")[0]
    found = [module for name, module in list(sys.modules.items()) if name.startswith(f"{package}.modeling_")]
    return [
        module
        for module in found
        if any(
            isinstance(value, type) and getattr(value, "config_class", None) is config_class
            for value in vars(module).values()
        )
    ]


def _module_routes(module: ModuleType) -> bool:
    mapped = asks_interface(module)
    if mapped is not None:
        return mapped
    attentions = [
        value
        for name, value in vars(module).items()
        if "Attention" in name and isinstance(value, type) and issubclass(value, nn.Module)
    ]
    homes = [sys.modules.get(cls.__module__) for cls in attentions]
    return not attentions or any(hasattr(home, "ALL_ATTENTION_FUNCTIONS") for home in homes)
