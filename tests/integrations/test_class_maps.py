"""Models that choose their attention class by implementation name: built under our name, they ask our function."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
import warnings
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from hf_flash_cupy.integrations import class_maps, mapped_attention, routing
from hf_flash_cupy.integrations.transformers import NAMES, record_layers

from .matrix.registry import ROWS
from .tiny import VOCAB, assert_same, padding, tokens

OLD = transformers.__version__.startswith("5.17")
MAPPED = ["falcon", "gpt_neo", *(["gptj"] if OLD else [])]


@pytest.mark.parametrize("name", MAPPED)
def test_every_layer_asks_and_none_complains(name: str) -> None:
    inputs = {"input_ids": tokens(2, 9), "attention_mask": padding(2, 9, "left")}
    eager = ROWS[name].build("eager")
    with warnings.catch_warnings(record=True) as warned, record_layers() as layers, torch.no_grad():
        warnings.simplefilter("always")
        ours = ROWS[name].build("cupy_fa2")
        actual, expected = ours(**inputs).logits, eager(**inputs).logits
    assert_same(actual, expected, inputs["attention_mask"])
    assert not [w for w in warned if "does not route" in str(w.message)]
    assert [(record.launches, record.backend) for record in layers.values()] == [(1, "host"), (1, "host")]
    assert routing.routes_attention(ours.config)
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        with torch.no_grad(), record_layers() as layers:
            assert torch.equal(again(**inputs).logits, actual)
        assert len(layers) == 2


@pytest.mark.parametrize("name", MAPPED)
def test_probabilities(name: str) -> None:
    ids, mask = tokens(2, 9), padding(2, 9, "right")
    found = []
    for implementation in ("eager", "cupy_fa2"):
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            found.append(ROWS[name].build(implementation)(ids, attention_mask=mask, output_attentions=True))
    assert_same(found[1].logits, found[0].logits, mask)
    assert len(found[1].attentions) == 2
    for ours, expected in zip(found[1].attentions, found[0].attentions, strict=True):
        assert_same(ours, expected, mask[:, None, :, None].expand_as(expected))


@pytest.mark.full
def test_falcon_is_one_graph() -> None:
    ids, mask = tokens(2, 9), padding(2, 9, "left")
    compiled = torch.compile(ROWS["falcon"].build("cupy_fa2"), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        actual = compiled(input_ids=ids, attention_mask=mask).logits
        assert_same(actual, ROWS["falcon"].build("eager")(ids, attention_mask=mask).logits, mask)


def test_gpt_neos_window_with_a_static_cache() -> None:
    """Where eager's own is wrong: what counts is that it is the dynamic cache's."""
    model, ids = ROWS["gpt_neo"].build("cupy_fa2"), tokens(2, 9)
    options = {"max_new_tokens": 8, "do_sample": False, "disable_compile": True, "pad_token_id": 0}
    for mask in (torch.ones_like(ids), padding(2, 9, "left")):
        runs = [
            model.generate(ids, attention_mask=mask, cache_implementation=cache, **options)
            for cache in ("dynamic", "static")
        ]
        assert torch.equal(*runs)


def test_falcon_with_alibi_keeps_its_own_class_and_says_so() -> None:
    config = transformers.FalconConfig(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=True,
        multi_query=False, initializer_range=0.3,
    )  # fmt: skip
    ids, mask = tokens(2, 9), padding(2, 9, "left")
    found = []
    with warnings.catch_warnings(record=True) as warned, record_layers() as layers, torch.no_grad():
        warnings.simplefilter("always")
        for implementation in ("eager", "cupy_fa2"):
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
            found.append(model(ids, attention_mask=mask).logits)
    assert_same(found[1], found[0], mask)
    said = [str(w.message) for w in warned if "does not route" in str(w.message)]
    assert len(said) == 1
    assert 'attn_implementation="cupy_fa2"' in said[0]
    assert layers == {}


@pytest.mark.parametrize("crossed", [False, True], ids=["self", "cross"])
def test_superglue(crossed: bool) -> None:
    module: Any = importlib.import_module("transformers.models.superglue.modeling_superglue")
    classes = module.SUPERGLUE_SELF_ATTENTION_CLASSES
    config = transformers.SuperGlueConfig(hidden_size=64, num_attention_heads=4, attention_probs_dropout_prob=0.0)
    torch.manual_seed(0)
    eager = classes["eager"](config).eval()
    ours = classes["cupy_fa2"](config).eval()
    ours.load_state_dict(eager.state_dict())
    x, other = torch.randn(2, 2, 9, 64).unbind()
    mask = (1.0 - padding(2, 9, "right")[:, None, None, :].float()) * torch.finfo(torch.float32).min
    inputs: dict[str, Any] = {"hidden_states": x, "attention_mask": mask}
    if crossed:
        inputs |= {"encoder_hidden_states": other, "encoder_attention_mask": mask}
    with record_layers() as layers, torch.no_grad():
        actual, expected = ours(**inputs), eager(**inputs)
    assert len(layers) == 1
    assert len(actual) == len(expected)
    assert_same(actual[0], expected[0])


class TestScaledDotProductAttention:
    """Torch's function, inside a class that calls it."""

    class Own(nn.Module):
        def forward(self, output_attentions: bool = False, **given: Any) -> tuple[Tensor, None]:
            return torch.nn.functional.scaled_dot_product_attention(**given), None

    def attention(self) -> Any:
        made = mapped_attention.mapped_class({"eager": nn.Module, "sdpa": self.Own}, "cupy_fa2")
        assert made is not None
        return made()

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"is_causal": True},
            {"scale": 0.3},
            {"attn_mask": torch.ones(5, 9, dtype=torch.bool).tril(2)[None, None]},
            {"attn_mask": torch.linspace(-2, 2, 45).view(1, 1, 5, 9)},
        ],
        ids=["plain", "causal at the top left", "scale", "bool", "float"],
    )
    def test_answers_as_torch_does(self, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        q, k, v = torch.randn(2, 4, 5, 16), torch.randn(2, 4, 9, 16), torch.randn(2, 4, 9, 16)
        with record_layers() as layers:
            actual, weights = self.attention()(query=q, key=k, value=v, **options)
        assert [record.launches for record in layers.values()] == [1]
        assert weights is None
        assert_same(actual, torch.nn.functional.scaled_dot_product_attention(q, k, v, **options))

    def test_probabilities(self) -> None:
        q, k, v = torch.randn(3, 2, 4, 5, 16)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, weights = self.attention()(query=q, key=k, value=v, output_attentions=True)
        assert_same(weights, torch.softmax(q @ k.mT / 4, -1))


def test_a_map_nobody_knows_gets_its_eager_class() -> None:
    class Unknown(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()

    module: Any = ModuleType("transformers.models.unknown.modeling_unknown")
    module.UNKNOWN_ATTENTION_CLASSES = {"eager": Unknown}
    class_maps._extend(module, ["cupy_fa2"])
    assert class_maps.asks_interface(module) is False
    with pytest.warns(UserWarning, match=r"Unknown does not route .* attn_implementation=.cupy_fa2"):
        assert type(module.UNKNOWN_ATTENTION_CLASSES["cupy_fa2"](None)) is Unknown


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
