"""Training as Transformers' users do it: Trainer, checkpointing, autocast, flattened batches, LoRA. Equal to eager."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Trainer, TrainingArguments

from hf_flash_cupy.integrations.transformers import record_layers
from hf_flash_cupy.launch import record_launches

from .tiny import build, padding, tokens

IMPLEMENTATIONS = ("eager", "cupy_fa2")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def own(name: str, implementation: str, device: str = "cpu", dropout: float = 0.0) -> Any:
    """A model in training that no other test changes."""
    model = copy.deepcopy(build(name)).to(device).train()
    model.set_attn_implementation(implementation)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = dropout
    return model


def gradients(model: Any, **inputs: Any) -> dict[str, Tensor]:
    model.zero_grad()
    model(**inputs).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_close(mine: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-4) -> None:
    """Up to ``tolerance`` of each one's largest value."""
    assert mine.keys() == wanted.keys()
    for name, expected in wanted.items():
        scale = max(float(expected.abs().max()), 1e-6)
        torch.testing.assert_close(
            mine[name], expected, rtol=0, atol=tolerance * scale, msg=lambda text, name=name: f"{name}: {text}"
        )


class TestTrainer:
    def trained(self, implementation: str, folder: Path, device: str, **options: Any) -> Any:
        model = own("llama", implementation, device)
        data = [{"input_ids": row, "labels": row} for row in tokens(6, 12, seed=3).tolist()]
        arguments = TrainingArguments(
            output_dir=str(folder),
            max_steps=3,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            use_cpu=device == "cpu",
            **options,
        )
        Trainer(model=model, args=arguments, train_dataset=data).train()
        return model

    def test_three_steps_equal_eager(self, tmp_path: Path, device: str) -> None:
        before = dict(build("llama").named_parameters())
        eager, ours = (dict(self.trained(name, tmp_path, device).named_parameters()) for name in IMPLEMENTATIONS)
        moved = max(float((eager[name].detach().cpu() - before[name].detach()).abs().max()) for name in before)
        assert moved > 1e-3
        for name, expected in eager.items():
            # Adam divides by a gradient's own size: where that is rounding alone, a step may go either way.
            apart = (ours[name] - expected).detach().abs()
            assert float(apart.mean()) < 1e-6
            assert float((apart > 1e-5).float().mean()) < 0.01

    @pytest.mark.full
    def test_checkpointed_in_bfloat16(self, tmp_path: Path, device: str) -> None:
        options: dict[str, Any] = {"gradient_checkpointing": True, "bf16": True}
        eager, ours = (self.trained(name, tmp_path, device, **options) for name in IMPLEMENTATIONS)
        ids = tokens(2, 12, seed=3).to(device)
        with torch.no_grad():
            losses = [
                float(model(input_ids=ids, labels=ids).loss) for model in (eager, ours, build("llama").to(device))
            ]
        build("llama").to("cpu")
        assert losses[1] == pytest.approx(losses[0], rel=0.02)
        assert losses[1] < losses[2]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_gradient_checkpointing(use_reentrant: bool, dropout: float, device: str) -> None:
    """R01: what is computed again drops the same."""
    ids = tokens(2, 11).to(device)
    model = own("llama", "cupy_fa2", device, dropout)
    torch.manual_seed(1)
    expected = gradients(model, input_ids=ids, labels=ids)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    torch.manual_seed(1)
    with record_layers() as layers:
        actual = gradients(model, input_ids=ids, labels=ids)
    assert [record.calls for record in layers.values()] == [2, 2]
    assert_close(actual, expected, 1e-5)
    if not dropout:
        assert_close(actual, gradients(own("llama", "eager", device), input_ids=ids, labels=ids))


def test_dropout_follows_training() -> None:
    """R02."""
    model, ids = own("llama", "cupy_fa2", dropout=0.5), tokens(1, 11)

    def logits() -> Tensor:
        with torch.no_grad():
            return model(input_ids=ids).logits  # type: ignore[no-any-return]

    first = logits()
    assert not torch.equal(first, logits())
    model.eval()
    assert torch.equal(logits(), logits())
    model.train()
    assert not torch.equal(logits(), logits())


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_autocast(name: str, dtype: torch.dtype, device: str) -> None:
    """T07: q and k come in float32 from rotary embeddings and norms, v in 16 bits."""
    ids = tokens(2, 11).to(device)
    truth = gradients(own(name, "eager", device), input_ids=ids, labels=ids)
    errors = {}
    for implementation in IMPLEMENTATIONS:
        with torch.autocast(device, dtype), record_layers() as layers:
            found = gradients(own(name, implementation, device), input_ids=ids, labels=ids)
        if implementation == "cupy_fa2":
            assert [record.launches > 0 for record in layers.values()] == [True, True]
        assert all(x.isfinite().all() and x.dtype == torch.float32 for x in found.values())
        errors[implementation] = sum(float((found[key] - truth[key]).square().sum()) for key in truth) ** 0.5
    scale = sum(float(x.square().sum()) for x in truth.values()) ** 0.5
    assert errors["cupy_fa2"] <= 1.5 * errors["eager"] + 1e-3 * scale


@pytest.mark.parametrize("lengths_given", [False, True], ids=["positions", "cu_seq_lens"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_flattened_batch_equals_separate_rows(name: str, lengths_given: bool, device: str) -> None:
    """M09, with gradients."""
    rows = [tokens(1, length, seed=length)[0].tolist() for length in (5, 9, 1)]
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=lengths_given)
    batch = collator([{"input_ids": row, "labels": row} for row in rows])
    batch = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
    assert ("cu_seq_lens_q" in batch) == lengths_given
    packed = own(name, "cupy_fa2", device)
    with record_layers() as layers, record_launches() as launches:
        actual = gradients(packed, **batch, use_cache=False)
    assert all(record.launches == record.calls for record in layers.values())
    assert all("varlen" in launch.config.name for launch in launches)  # which goes by sequences, backward too
    separate = own(name, "eager", device)
    separate.zero_grad()
    scored = sum(len(row) - 1 for row in rows)
    for row in rows:
        if len(row) > 1:  # a row of one token predicts nothing
            ids = torch.tensor([row], device=device)
            (separate(input_ids=ids, labels=ids).loss * (len(row) - 1) / scored).backward()
    expected = {key: parameter.grad for key, parameter in separate.named_parameters() if parameter.grad is not None}
    assert_close(actual, expected)


@pytest.mark.parametrize("upcast", [False, True], ids=["float32", "bfloat16 with float32 adapters"])
def test_lora(upcast: bool, device: str) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    ids = tokens(2, 11).to(device)
    found = {}
    for implementation in IMPLEMENTATIONS:
        model = own("qwen3", implementation, device)
        torch.manual_seed(7)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model.to(torch.bfloat16) if upcast else model, config)
        with torch.autocast(device, torch.bfloat16, enabled=upcast):
            found[implementation] = gradients(model, input_ids=ids, labels=ids)
    assert len(found["eager"]) == 8
    assert_close(found["cupy_fa2"], found["eager"], 0.1 if upcast else 1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_model_over_two_devices(tmp_path: Path) -> None:
    """D01: ``device_map`` puts a layer on each GPU, and the mask that the first had made goes along."""
    build("llama").save_pretrained(tmp_path)
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0}
    places |= {"model.layers.1": 1, "model.norm": 1, "lm_head": 1}
    ids, mask = tokens(3, 11), padding(3, 11, "right")
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    found = []
    for implementation in IMPLEMENTATIONS:
        model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=implementation, device_map=places)
        with record_layers() as layers:
            found.append(gradients(model, **{name: x.to(0) for name, x in inputs.items()}))
    assert [record.backend for record in layers.values()] == ["cuda", "cuda"]
    assert {x.device.index for x in found[1].values()} == {0, 1}
    assert_close(found[1], found[0])
