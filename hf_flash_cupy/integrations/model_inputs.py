"""Inputs without values, on torch's meta device, that a model can be run on to see what its layers ask for."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

_BATCH, _LENGTH = 1, 16
_GRID = 16  # patches along each side of an image, for towers that take patches in place of images


def attempts(model: Any) -> Iterator[dict[str, Tensor]]:
    """Inputs to run ``model`` on, to be tried in turn.

    A tower that packs the patches of images of any size takes them and their grids; any other model takes its main
    input, then an image with it (CLIP takes no text alone).
    """
    if "grid_thw" in inspect.signature(model.forward).parameters:
        yield from _patches(model)
        return
    inputs = _inputs(model)
    yield inputs
    size = getattr(getattr(model.config, "vision_config", None), "image_size", None)
    if "input_ids" in inputs and isinstance(size, int):
        yield inputs | {"pixel_values": _floats(_BATCH, 3, size, size)}


class ValuesMeetMeta(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets tensors with values, on the CPU, meet tensors of the meta device; the outcome has no values.

    A tower reads how long its images are from their grid, so that one input must have values.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        met: list[bool] = []
        tree_map_only(Tensor, lambda tensor: met.append(tensor.is_meta), (args, kwargs or {}))
        if any(met) and not all(met):
            args, kwargs = tree_map(_on_meta, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def _floats(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def _patches(model: Any) -> Iterator[dict[str, Tensor]]:
    """The patches of one image, in the layouts that towers have: a row each, then an image each, then in a batch."""
    accepted = inspect.signature(model.forward).parameters
    config, patches = model.config, _GRID * _GRID
    main = "pixel_values" if "pixel_values" in accepted else "hidden_states"
    channels = getattr(config, "in_channels", None) or getattr(config, "num_channels", None) or 3
    size = config.patch_size if isinstance(config.patch_size, int) else config.patch_size[0]
    patch = (channels, getattr(config, "temporal_patch_size", None) or 1, size, size)
    beside = {"grid_thw": torch.tensor([[1, _GRID, _GRID]])}
    if "merge_sizes" in accepted:
        beside["merge_sizes"] = torch.tensor([2])
    image = (channels, size, size)
    for shape in ((patches, prod(patch)), (patches, prod(image)), (patches, *image), (_BATCH, patches, *image)):
        yield {main: _floats(*shape), **beside}


def _inputs(model: Any) -> dict[str, Tensor]:
    config, main = model.config, model.main_input_name
    accepted = inspect.signature(model.forward).parameters
    if main not in accepted and "pixel_values" in accepted:
        main = "pixel_values"

    def size(*names: str, default: int) -> Any:
        found = next((value for name in names if (value := getattr(config, name, None))), default)
        return found if isinstance(found, list | tuple) else [found, found]

    ids = torch.zeros(_BATCH, _LENGTH, dtype=torch.long, device="meta")
    if main == "pixel_values":
        whole = getattr(getattr(config, "vision_config", None), "image_size", 224)
        height, width = size("image_size", default=whole)
        channels = getattr(config, "num_channels", None) or 3
        return {main: _floats(_BATCH, channels, height, width)}
    if main == "input_values":
        return {main: _floats(_BATCH, 16_000)}
    if main == "input_features":
        bins, frames = getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 1500)
        return {main: _floats(_BATCH, bins, frames), "decoder_input_ids": ids}
    return {"input_ids": ids, **({"decoder_input_ids": ids} if config.is_encoder_decoder else {})}
