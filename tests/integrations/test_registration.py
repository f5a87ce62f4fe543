"""How a model comes to use cupy_fa2, what it runs on a CPU, and how one sees that it really does."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface

from hf_flash_cupy.integrations.routing import routes_attention
from hf_flash_cupy.integrations.transformers import attention_forward, record_layers, register
from hf_flash_cupy.launch import record_launches

from .tiny import CONFIGS, assert_same, build, implementation, logits, padding, tokens

IDS, MASK = tokens(2, 9), padding(2, 9, "left")


class TestSetting:
    def check(self, model: Any) -> None:
        expected = logits(build("llama"), "eager", input_ids=IDS, attention_mask=MASK)
        with torch.no_grad(), record_layers() as layers:
            actual = model(input_ids=IDS, attention_mask=MASK).logits
        assert_same(actual, expected, MASK)
        assert {layer: record.launches for layer, record in layers.items()} == {0: 1, 1: 1}

    def test_by_from_pretrained(self, tmp_path: Path) -> None:
        build("llama").save_pretrained(tmp_path)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="cupy_fa2")
        self.check(model.eval())

    def test_by_config(self) -> None:
        config = CONFIGS["llama"]()
        config._attn_implementation = "cupy_fa2"
        model = transformers.LlamaForCausalLM(config).eval()
        model.load_state_dict(build("llama").state_dict())
        self.check(model)

    def test_by_set_attn_implementation(self) -> None:
        model = build("llama")
        with implementation(model, "cupy_fa2"):
            self.check(model)

    def test_registering_twice_is_harmless(self) -> None:
        register()
        for name in ("cupy_fa1", "cupy_fa2"):
            assert name in AttentionInterface().valid_keys()
            assert name in AttentionMaskInterface().valid_keys()

    def test_each_name_runs_its_algorithm(self) -> None:
        model = build("llama")
        for name in ("cupy_fa1", "cupy_fa2"):
            with implementation(model, name), torch.no_grad(), record_launches() as launches:
                model(input_ids=IDS)
            assert {launch.kernel for launch in launches} == {f"{name.removeprefix('cupy_')}_forward"}


CASES: dict[str, tuple[int, dict[str, Any]]] = {  # query rows for 9 keys, arguments
    "causal": (9, {}),
    "fewer rows": (3, {}),
    "window": (9, {"sliding_window": 3}),
    "fewer rows, window": (3, {"sliding_window": 3}),
    "not causal": (9, {"is_causal": False}),
    "window on both sides": (9, {"is_causal": False, "sliding_window": 3}),
    "softcap": (9, {"softcap": 2.0}),
    "mask": (9, {"attention_mask": torch.ones(1, 1, 9, 9, dtype=torch.bool).tril(1)}),
    "padding": (9, {"attention_mask": torch.arange(9)[None] > 3}),
    "sequences": (9, {"cu_seq_lens_q": torch.tensor([0, 4, 9], dtype=torch.int32)}),
    "fewer rows, sequences": (
        5,
        {
            "cu_seq_lens_q": torch.tensor([0, 2, 5], dtype=torch.int32),
            "cu_seq_lens_k": torch.tensor([0, 5, 9], dtype=torch.int32),
            "sliding_window": 3,
        },
    ),
}


class TestOnTheCpu:
    """T10."""

    def run(self, name: str, **inputs: Any) -> tuple[torch.Tensor, set[str], list[str]]:
        with warnings.catch_warnings(record=True) as warned, record_layers() as layers:
            warnings.simplefilter("always")
            out = logits(build(name), "cupy_fa2", **inputs)
        ours = [str(w.message) for w in warned if "cupy_fa2" in str(w.message)]
        assert all(record.launches == 0 for record in layers.values())
        return out, {record.backend for record in layers.values()}, ours

    @pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "bert"])
    def test_auto_is_sdpa_with_one_warning(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_FLASH_CUPY_CPU", "auto")
        actual, backends, warned = self.run(name, input_ids=IDS, attention_mask=MASK)
        assert_same(actual, logits(build(name), "eager", input_ids=IDS, attention_mask=MASK), MASK)
        assert backends == {"sdpa"}
        assert len(warned) == 1
        assert "HF_FLASH_CUPY_CPU=kernels" in warned[0]

    def test_sdpa_says_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_FLASH_CUPY_CPU", "sdpa")
        actual, backends, warned = self.run("llama", input_ids=IDS)
        assert_same(actual, logits(build("llama"), "eager", input_ids=IDS))
        assert (backends, warned) == ({"sdpa"}, [])

    @pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
    def test_what_sdpa_cannot_express_runs_the_reference(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Softcap, which SDPA would drop, and sinks."""
        monkeypatch.setenv("HF_FLASH_CUPY_CPU", "sdpa")
        actual, backends, _ = self.run(name, input_ids=IDS, attention_mask=MASK)
        assert_same(actual, logits(build(name), "eager", input_ids=IDS, attention_mask=MASK), MASK)
        assert backends == {"reference"}

    def test_position_bias(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_FLASH_CUPY_CPU", "sdpa")
        inputs = {"input_ids": IDS, "attention_mask": MASK, "decoder_input_ids": tokens(2, 5, seed=1)}
        with torch.no_grad(), record_layers() as layers:
            actual = build("t5", "cupy_fa2")(**inputs).logits
        assert_same(actual, logits(build("t5"), "eager", **inputs))
        assert {record.backend for record in layers.values()} == {"sdpa"}

    @pytest.mark.parametrize("case", CASES)
    def test_sdpa_agrees_with_the_kernels(self, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
        module = SimpleNamespace(training=False, is_causal=True)
        rows, arguments = CASES[case]
        generator = torch.Generator().manual_seed(0)
        q = torch.randn(1, 4, rows, 16, generator=generator)
        k, v = torch.randn(2, 1 if "cu_seq_lens_q" in arguments else 2, 2, 9, 16, generator=generator).unbind(0)
        arguments = {"attention_mask": None, "scaling": None} | arguments
        kernels, _ = attention_forward(module, q, k, v, **arguments)
        monkeypatch.setenv("HF_FLASH_CUPY_CPU", "sdpa")
        on_torch, _ = attention_forward(module, q, k, v, **arguments)
        torch.testing.assert_close(kernels, on_torch, rtol=0, atol=2e-6)

    def test_rows_without_keys_are_zero(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_FLASH_CUPY_CPU", "sdpa")
        q, k, v = torch.randn(3, 1, 2, 6, 16, generator=torch.Generator().manual_seed(0)).unbind(0)
        mask = torch.ones(1, 1, 6, 6, dtype=torch.bool)
        mask[:, :, 2] = False
        out, _ = attention_forward(SimpleNamespace(training=False), q, k, v, mask, scaling=None)
        assert out.isfinite().all()
        assert (out[:, 2] == 0).all()

    def test_training(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """M01."""
        monkeypatch.setenv("HF_FLASH_CUPY_CPU", "sdpa")
        model, mask = build("llama"), padding(2, 9, "right")
        labels = IDS.masked_fill(mask == 0, -100)
        gradients = []
        for name in ("eager", "cupy_fa2"):
            model.zero_grad()
            with implementation(model, name):
                model(input_ids=IDS, attention_mask=mask, labels=labels).loss.backward()
            gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad.clone())
        model.zero_grad()
        assert_same(gradients[1], gradients[0])


class TestTraining:
    @pytest.mark.parametrize(
        ("name", "algorithm"),
        [
            *((name, "cupy_fa2") for name in ("llama", "gpt_oss", "gemma2", "t5")),
            ("llama", "cupy_fa1"),
            *(pytest.param(name, "cupy_fa1", marks=pytest.mark.full) for name in ("gpt_oss", "gemma2", "t5")),
        ],
    )
    def test_gradients_equal_eager(self, name: str, algorithm: str) -> None:
        """M01 on the kernels: softcap, sinks and position biases have theirs."""
        mask = padding(2, 9, "right")
        inputs: dict[str, Any] = {"input_ids": IDS, "attention_mask": mask, "labels": IDS.masked_fill(mask == 0, -100)}
        found = []
        for implementation_name in ("eager", algorithm):
            model = build(name, implementation_name)
            model.zero_grad()
            with record_layers() as layers:
                model(**inputs).loss.backward()
            found.append({key: x.grad.clone() for key, x in model.named_parameters() if x.grad is not None})
            model.zero_grad()
        assert all(record.backend == "host" for record in layers.values())
        assert found[0].keys() == found[1].keys()
        for key, gradient in found[0].items():
            torch.testing.assert_close(
                found[1][key], gradient, rtol=1e-3, atol=1e-5 + 1e-4 * float(gradient.abs().max())
            )


class TestRecording:
    def test_layers_that_share_a_number_are_told_apart(self) -> None:
        inputs = {"input_ids": IDS, "decoder_input_ids": tokens(2, 5, seed=1)}
        with record_layers() as layers:
            logits(build("bart"), "cupy_fa2", **inputs)
        assert len(layers) == 6  # two layers: encoder, decoder, cross
        assert all(record == (1, 1, "host") for record in layers.values())

    def test_calls_add_up_and_recorders_nest(self) -> None:
        with record_layers() as outer:
            logits(build("llama"), "cupy_fa2", input_ids=IDS)
            with record_layers() as inner:
                logits(build("llama"), "cupy_fa2", input_ids=IDS)
        assert outer == {0: (2, 2, "host"), 1: (2, 2, "host")}
        assert inner == {0: (1, 1, "host"), 1: (1, 1, "host")}
        logits(build("llama"), "cupy_fa2", input_ids=IDS)
        assert outer[0].calls == 2


class TestRouting:
    def test_models_that_ask_the_interface(self) -> None:
        for name in ("llama", "bert", "bart", "t5gemma"):
            assert routes_attention(build(name).config)

    def test_models_that_do_not(self) -> None:
        assert not routes_attention(build("bloom").config)

    def test_one_package_with_both(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each config counts for the model file that uses it (BLIP's text tower has a file of its own)."""
        routed, own = type("RoutedConfig", (), {}), type("OwnConfig", (), {})
        for config_class, name in ((routed, "modeling_routed"), (own, "modeling_own")):
            module = ModuleType(f"house.{name}")
            attention = type("TinyAttention", (torch.nn.Module,), {"__module__": module.__name__})
            model = type("TinyModel", (torch.nn.Module,), {"config_class": config_class})
            module.__dict__.update(TinyAttention=attention, TinyModel=model)
            config_class.__module__ = "house.configuration_both"
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(sys.modules["house.modeling_routed"], "ALL_ATTENTION_FUNCTIONS", {}, raising=False)
        assert routes_attention(routed())
        assert not routes_attention(own())

    def test_an_unknown_config_counts_as_routed(self) -> None:
        assert routes_attention(None)
