"""What a row of the matrix is: one model type, tiny, with what it is fed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from .shrink import IMAGE, VOCAB, tiny_config

BATCH, LENGTH = 3, 11
Inputs = dict[str, Any]

GENERATION = ("generate dynamic", "generate static", "generate left-padded", "generate static left-padded")
DECODER = ("plain", "left pad", "right pad", "packed", *GENERATION, "train")
ENCODER = ("plain", "left pad", "right pad", "train")
SEQ2SEQ = ("plain", "left pad", "right pad", "generate dynamic", "generate static", "train")
IMAGE_TEXT = ("plain", "left pad", "generate dynamic", "generate static", "train")
PLAIN = ("plain", "train")
OWN_SCORES = "its file computes the scores itself"


def tokens(batch: int = BATCH, length: int = LENGTH, seed: int = 0) -> Tensor:
    """Random ids that are no special token's: those are below 5, or among the last 16."""
    return torch.randint(5, VOCAB - 16, (batch, length), generator=torch.Generator().manual_seed(seed))


def floats(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def padding(side: str, batch: int, length: int, count: int = 3) -> Tensor:
    """1 = a real token; row 0 is padded by ``count``, the next by one more, the last not at all."""
    mask = torch.ones(batch, length, dtype=torch.long)
    for row in range(batch - 1):
        hidden = slice(0, count + row) if side == "left" else slice(length - count - row, length)
        mask[row, hidden] = 0
    return mask


def text(config: Any) -> Inputs:
    return {"input_ids": tokens()}


def text_to_text(config: Any) -> Inputs:
    return {"input_ids": tokens(), "decoder_input_ids": tokens(length=7, seed=1)}


def image(config: Any) -> Inputs:
    return {"pixel_values": floats(2, 3, 32, 32)}


def image_text(count: int) -> Callable[[Any], Inputs]:
    """Two texts with an image each, which takes ``count`` tokens."""

    def inputs(config: Any) -> Inputs:
        return {"input_ids": with_images(count), "pixel_values": floats(2, 3, 32, 32)}

    return inputs


def with_images(count: int, before: int = 5, after: int = 4) -> Tensor:
    ids = tokens(2, before + count + after)
    ids[:, before : before + count] = IMAGE
    return ids


@dataclass(frozen=True)
class Row:
    """One model type; two models built of it have equal weights."""

    name: str
    auto: str  # one of Transformers' Auto classes
    modes: tuple[str, ...]
    inputs: Callable[[Any], Inputs] = text  # of the config: a whole batch, without padding and positions
    config: Mapping[str, Any] = field(default_factory=dict)  # beside shrink.SIZES
    model_type: str = ""  # where it is not the name
    own: str = ""  # attention layers of the model's own: "" none, "5.17" in that version, "always"
    note: str = ""  # what the table says beside the results

    @property
    def accelerated(self) -> bool:
        """Whether every attention layer asks the interface, in this version of Transformers."""
        return not self.own or not (self.own == "always" or transformers.__version__.startswith(self.own))

    def build(self, implementation: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
        config = tiny_config(self.model_type or self.name, self.config)
        torch.manual_seed(0)
        model = getattr(transformers, self.auto).from_config(config, attn_implementation=implementation)
        _wake(model)
        return model.to(device, dtype).eval()


def _wake(model: nn.Module) -> None:
    """Parameters that start at zero (gates, biases, tables of relative positions) would hide what they scale."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and not parameter.any():
                parameter.normal_(0, 0.1, generator=generator)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
