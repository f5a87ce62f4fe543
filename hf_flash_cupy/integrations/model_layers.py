"""Which attention layers a model has and what they will ask for, found by running it on torch's meta device.

No weights are read and nothing is computed: every layer calls an attention function that writes down its arguments.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_flash_cupy.integrations.class_maps import add_to_class_maps
from hf_flash_cupy.integrations.closures import structure
from hf_flash_cupy.integrations.model_inputs import ValuesMeetMeta, attempts
from hf_flash_cupy.integrations.routing import routes_attention

_PROBE = "cupy_probe"
# Recurrences under the name of attention: they have no softmax over keys that a kernel could take over.
_RECURRENT = ("Linear", "Lightning", "Delta", "RecurrentBlock", "LSH", "Mamba")
_MASKS = {
    "causal_mask": "causal",
    "bidirectional_mask": "all keys",
    "sliding_window": "window",
    "chunked": "chunks",
    "blockwise": "blocks of images",
}


@dataclass(frozen=True)
class LayerKind:
    """Attention layers that ask for the same."""

    module: str  # class name
    num_heads: int
    num_heads_k: int
    head_dim: int
    head_dim_v: int
    features: tuple[str, ...]  # of "softcap", "sinks", "bias", "selected keys"
    mask: str


@dataclass
class ModelPart:
    """A model, or one of the models it is made of."""

    name: str
    dtype: torch.dtype | None  # that its configuration names
    kinds: Counter[LayerKind] = field(default_factory=Counter)
    own: Counter[str] = field(default_factory=Counter)  # attention that asks no attention function, by class name
    unseen: Counter[str] = field(default_factory=Counter)  # attention that the run did not reach
    failure: str = ""  # why the run ended early

    @property
    def reached(self) -> bool:
        """Whether the run came to any attention."""
        return bool(self.kinds or self.own)


def load_config(model: str) -> Any:
    """The configuration of a folder, of a model type ("llama": its defaults) or of a hub id.

    Raises ValueError where there is none, OSError where a hub cannot be reached.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if is_model_type(model):
        return CONFIG_MAPPING[model]()
    return AutoConfig.from_pretrained(model)


def is_model_type(model: str) -> bool:
    """Whether ``model`` names a type that Transformers knows ("llama"), and no folder here."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return model in CONFIG_MAPPING and not Path(model).is_dir()


def model_parts(config: Any) -> list[ModelPart]:
    """The model of ``config``, run on what its first input is, and those of its parts that see or hear."""
    whole = ModelPart(type(config).__name__.removesuffix("Config"), _dtype(config))
    try:
        model = _build(config)
    except Exception as error:
        whole.failure = _first_line(error)
        return [whole]
    _run(model, whole)
    parts = [whole]
    for name in getattr(type(config), "sub_configs", {}):
        part_config = getattr(config, name, None)
        if any(word in name for word in ("text", "decoder", "encoder")):
            continue
        found = [module for module in model.modules() if getattr(module, "config", None) is part_config]
        inner = next((module for module in found if hasattr(module, "main_input_name")), None)
        if inner is not None:
            part = ModelPart(name.removesuffix("_config"), whole.dtype)
            _run(inner, part)
            parts.append(part)
    return parts


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """Modules named after attention that hold none within."""

    def is_attention(module: nn.Module) -> bool:
        name = type(module).__name__
        return ("Attention" in name or "Attn" in name) and not any(word in name for word in _RECURRENT)

    return [
        module
        for module in model.modules()
        if is_attention(module) and not any(is_attention(child) for child in list(module.modules())[1:])
    ]


def is_pooling(name: str) -> bool:
    """A head that pools a whole image by one learned query: no layer, and no model routes it."""
    return "Pooling" in name or name == "MultiheadAttention"


def _run(model: nn.Module, part: ModelPart) -> None:
    """Fills in what the attention layers ask for; where the run ends early, what is left counts by its class."""
    with _watched(model, part), torch.no_grad(), ValuesMeetMeta():  # type: ignore[no-untyped-call]
        for inputs in attempts(model):
            try:
                model(**inputs)
            except Exception as error:  # whatever a model's own code raises is the finding
                part.failure = part.failure or _first_line(error)
            else:
                part.failure = ""
                return


def _dtype(config: Any) -> torch.dtype | None:
    found = [getattr(config, "dtype", None), *(getattr(part, "dtype", None) for part in vars(config).values())]
    return next((dtype for dtype in found if isinstance(dtype, torch.dtype)), None)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _build(config: Any) -> nn.Module:
    import transformers

    _register_probe()
    autos = (
        transformers.AutoModel,
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForSeq2SeqLM,
        transformers.AutoModelForImageTextToText,
    )
    auto = next((each for each in autos if type(config) in each._model_mapping), transformers.AutoModel)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of attention that is not routed: the report says it by the layer
        model: nn.Module = auto.from_config(config, attn_implementation=_PROBE)  # type: ignore[no-untyped-call]
    return model.to(torch.bfloat16).eval()  # experts in groups are multiplied in no other dtype


@contextmanager
def _watched(model: nn.Module, part: ModelPart) -> Iterator[None]:
    asked: dict[int, LayerKind] = {}
    ran: dict[int, str] = {}
    hooks = [
        module.register_forward_hook(lambda module, *_: ran.update({id(module): type(module).__name__}))
        for module in attention_modules(model)
    ]
    _listeners.append(asked)
    try:
        yield
    finally:
        _listeners.remove(asked)
        for hook in hooks:
            hook.remove()
    parents = {id(child): id(module) for module in model.modules() for child in module.children()}
    covered = asked.keys() | {parents[key] for key in asked if key in parents}
    part.kinds.update(asked.values())
    modules = {id(module): type(module).__name__ for module in attention_modules(model)}
    if part.failure:
        part.unseen.update(name for key, name in modules.items() if key not in covered and key not in ran)
    part.own.update(name for key, name in ran.items() if key not in covered and not is_pooling(name))


_listeners: list[dict[int, LayerKind]] = []


def _register_probe() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_PROBE, _attention)
    AttentionMaskInterface.register(_PROBE, _mask)
    add_to_class_maps([_PROBE])


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Writes down what the layer asks for; the answer has the right shape and nothing in it."""
    given = {
        "softcap": kwargs.get("softcap"),
        "sinks": kwargs.get("s_aux", kwargs.get("sinks")),
        "bias": kwargs.get("position_bias"),
        "selected keys": kwargs.get("indices", kwargs.get("block_indices")),
    }
    if attention_mask is not None and attention_mask.is_floating_point():
        given["bias"] = attention_mask
    kind = LayerKind(
        module=type(module).__name__,
        num_heads=query.shape[1],
        num_heads_k=key.shape[1],
        head_dim=query.shape[3],
        head_dim_v=value.shape[3],
        features=tuple(name for name, value in given.items() if value is not None),
        mask=_mask_of(module, attention_mask, kwargs),
    )
    for listener in _listeners:
        listener[id(module)] = kind
    batch = max(query.shape[0], key.shape[0])
    return query.new_empty(batch, query.shape[2], query.shape[1], value.shape[3]), None


def _mask_of(module: Any, mask: Tensor | None, kwargs: dict[str, Any]) -> str:
    window = kwargs.get("sliding_window")
    if mask is None:
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", False) if causal is None else causal
        return ("causal" if causal else "all keys") + (f", window {window}" if window else "")
    described = getattr(mask, "description", "") or (f"causal, window {window}" if window else "")
    return described or ("additive" if mask.is_floating_point() else "dense")


def _mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: Any = None, device: Any = "meta", **kwargs: Any
) -> Tensor:
    own = not routes_attention(kwargs.get("config"))
    dtype = kwargs.get("dtype", torch.float32) if own else torch.bool
    mask = torch.empty(batch_size, 1, q_length, kv_length, dtype=dtype, device=device)
    names = structure(mask_function)
    words = [word for name, word in _MASKS.items() if name in names]
    size = kwargs.get("local_size")
    if size is not None:
        words = [f"{word} {size}" if word in ("window", "chunks") else word for word in words]
    mask.description = ", ".join(words)  # type: ignore[attr-defined]
    return mask
