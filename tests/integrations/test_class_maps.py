"""Models that choose their attention class by implementation name: built under our name, they run what eager runs."""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.machinery import SourceFileLoader
from typing import Any

import pytest
import torch
import transformers

from hf_flash_cupy.integrations import class_maps
from hf_flash_cupy.integrations.transformers import NAMES, record_layers

from .matrix.registry import ROWS
from .tiny import assert_same, padding, tokens

MAPPED = ["falcon", "gpt_neo", *(["gptj"] if transformers.__version__.startswith("5.17") else [])]


@pytest.mark.parametrize("name", MAPPED)
def test_the_result_is_eagers_and_one_sentence_says_so(name: str) -> None:
    inputs = {"input_ids": tokens(2, 9), "attention_mask": padding(2, 9, "left")}
    eager = ROWS[name].build("eager")
    with warnings.catch_warnings(record=True) as warned, record_layers() as layers, torch.no_grad():
        warnings.simplefilter("always")
        ours = ROWS[name].build("cupy_fa2")
        actual = ours(**inputs).logits
        assert_same(actual, eager(**inputs).logits, inputs["attention_mask"])
    said = [str(w.message) for w in warned if "does not route" in str(w.message)]
    assert len(said) == 1
    assert "Attention does not route" in said[0]
    assert 'attn_implementation="cupy_fa2"' in said[0]
    assert layers == {}


def test_every_map_of_a_file_has_our_names() -> None:
    module = importlib.import_module("transformers.models.falcon.modeling_falcon")
    maps = class_maps.class_maps(module)
    assert list(maps) == ["FALCON_ATTENTION_CLASSES"]
    for classes in maps.values():
        assert set(NAMES) <= classes.keys()
        assert isinstance(classes["eager"], type)


def test_a_file_imported_later_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "transformers.models.sam.modeling_sam"
    monkeypatch.delitem(sys.modules, name, raising=False)
    module: Any = importlib.import_module(name)
    assert set(NAMES) <= module.SAM_VISION_ATTENTION_CLASSES.keys()
    assert isinstance(module.__spec__.loader, SourceFileLoader)  # still the loader that knows the source


def test_one_finder_however_often_we_register() -> None:
    class_maps.add_to_class_maps(NAMES)
    assert sum(type(finder).__name__ == "_ModelFiles" for finder in sys.meta_path) == 1
