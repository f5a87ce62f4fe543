"""What a user meant by the name of a model: a folder, a model type, or an id of the hub."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

# Ids without an owner are old ones of the hub: xlm-roberta-base is 0.81 like xlm-roberta, and no slip of the pen.
_SLIP, _SIMILAR = 0.85, 0.6
_CLASS_ENDING = re.compile(r"(PreTrainedModel|ForCausalLM|For[A-Z]\w*|Model|Config)$")


def is_missing_folder(name: str) -> bool:
    """Whether ``name`` can only be a path, as no id of the hub is written like it, and there is no such folder."""
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1
    return is_path and not Path(name).is_dir()


def slip_of_model_type(name: str) -> str:
    """The model type that ``name`` is a slip of the pen or a class of ("llam", "LlamaForCausalLM"); "" for none."""
    return _nearest(name, _SLIP)


def similar_model_type(name: str) -> str:
    """The model type most like ``name``, of those that are like it at all; "" for none."""
    return _nearest(name, _SIMILAR)


def _nearest(name: str, cutoff: float) -> str:
    """By letters, without case; a class's name counts as that of its configuration: LlamaConfig's type is llama."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # type: ignore[attr-defined]

    if "/" in name:
        return ""
    types = {config.removesuffix("Config").lower(): kind for kind, config in reversed(CONFIG_MAPPING_NAMES.items())}
    types |= {kind.lower(): kind for kind in CONFIG_MAPPING_NAMES}
    found = difflib.get_close_matches(_CLASS_ENDING.sub("", name).lower(), types, n=1, cutoff=cutoff)
    return types[found[0]] if found else ""
