"""Tiny models of every kind of attention: cupy_fa2 gives eager's numbers."""

from __future__ import annotations

import inspect
import itertools
import warnings
from typing import Any

import pytest
import torch
import transformers
from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask

from hf_flash_cupy.integrations.transformers import record_layers

from .matrix.shrink import tiny_config
from .tiny import assert_same, build, implementation, logits, padding, tokens

DECODERS = ["llama", "mistral", "qwen3", "gemma2", "gemma3", "llama4", "gpt2"]
ENCODERS = ["bert", "modernbert"]
SEQ2SEQ = ["bart", "t5gemma"]
CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
OLD = "block_sequence_ids" not in inspect.signature(create_chunked_causal_mask).parameters  # 5.17


def assert_equals_eager(name: str, where: torch.Tensor | None = None, **inputs: Any) -> None:
    """Eager's numbers, with a kernel launched in every attention layer."""
    model = build(name)
    with record_layers() as layers:
        actual = logits(model, "cupy_fa2", **inputs)
    assert_same(actual, logits(model, "eager", **inputs), where)
    assert layers
    assert all(record.launches == record.calls and record.backend == "host" for record in layers.values())


@pytest.mark.parametrize("name", DECODERS + ENCODERS)
def test_plain(name: str) -> None:
    assert_equals_eager(name, input_ids=tokens(2, 11))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", DECODERS + ENCODERS)
def test_padded(name: str, side: str) -> None:
    """M01, M05. Pad rows may differ (eager spreads them evenly, ours see nothing) but stay finite."""
    ids, mask = tokens(3, 11), padding(3, 11, side)
    assert_equals_eager(name, where=mask, input_ids=ids, attention_mask=mask)
    if side == "left" or name in ENCODERS:  # causal rows come before the padding on the right
        padded, unpadded = (logits(build(name), "eager", input_ids=ids, attention_mask=m) for m in (mask, None))
        assert (unpadded - padded)[mask.bool()].abs().max() > 1e-2  # a wrong mask would show


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert"])
def test_padding_with_holes(name: str) -> None:
    ids, mask = tokens(2, 11), torch.ones(2, 11, dtype=torch.long)
    mask[0, 4:6] = 0
    mask[1, [0, 3]] = 0
    assert_equals_eager(name, where=mask, input_ids=ids, attention_mask=mask)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", [name for name in DECODERS if name != "llama4" or not OLD])
def test_packed(name: str, batch: int) -> None:
    """M09: every document equals its own separate run.

    (Transformers 5.17 counts Llama 4's chunks over the whole row, in eager too.)
    """
    lengths = [(5, 9), (8, 6)][:batch]
    ids = tokens(batch, 14)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    model = build(name)
    with record_layers() as layers:
        packed = logits(model, "cupy_fa2", input_ids=ids, position_ids=positions, use_cache=False)
    for row, (first, _) in enumerate(lengths):
        for part in (slice(0, first), slice(first, 14)):
            alone = logits(model, "eager", input_ids=ids[row : row + 1, part])
            assert_same(packed[row : row + 1, part], alone)
    assert all(record.launches == 1 for record in layers.values())


@pytest.mark.parametrize("name", DECODERS)
def test_packed_equals_eager(name: str) -> None:
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in [(5, 9), (8, 6)]])
    assert_equals_eager(name, input_ids=tokens(2, 14), position_ids=positions, use_cache=False)


@pytest.mark.parametrize("name", DECODERS)
def test_cached_chunks_and_steps(name: str) -> None:
    """C01, C04: chunked prefill, then single steps, give the rows of the whole forward."""
    ids = tokens(2, 14)
    model = build(name)
    whole = logits(model, "eager", input_ids=ids)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad(), implementation(model, "cupy_fa2"):
        for start, stop in [(0, 6), (6, 11), (11, 12), (12, 13), (13, 14)]:
            out = model(ids[:, start:stop], **{CACHE: cache}, use_cache=True)
            assert_same(out.logits, whole[:, start:stop])


@pytest.mark.full
def test_head_sizes_of_256_and_512_in_one_model() -> None:
    """T09, Gemma 4: windowed layers of 256 columns, full ones of 512."""
    layers_of = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    config = tiny_config("gemma4_text", layers_of | {"head_dim": 256, "global_head_dim": 512})
    ids, mask = tokens(2, 9), padding(2, 9, "left")
    found = []
    with torch.no_grad(), record_layers() as layers:
        for name in ("eager", "cupy_fa2"):
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name).eval()
            found.append(model(ids, attention_mask=mask, use_cache=False).logits)
    assert_same(found[1], found[0], mask)
    assert [(record.launches, record.backend) for record in layers.values()] == [(1, "host"), (1, "host")]


def generated(model: Any, implementation_name: str, **kwargs: Any) -> torch.Tensor:
    with implementation(model, implementation_name):
        return model.generate(max_new_tokens=7, do_sample=False, disable_compile=True, **kwargs)


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "left padded"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generate(name: str, cache: str, padded: bool) -> None:
    model, ids = build(name), tokens(2, 6)
    if (name, cache) == ("llama4", "static") and OLD:
        pytest.skip("this Transformers itself fails: create_chunked_causal_mask() takes no block_sequence_ids")
    mask = padding(2, 6, "left", 2) if padded else torch.ones(2, 6, dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": mask, "cache_implementation": cache}
    assert torch.equal(generated(model, "cupy_fa2", **inputs), generated(model, "eager", **inputs))


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_left_padded_generation_equals_single_runs(name: str) -> None:
    """M10."""
    model, ids = build(name), tokens(2, 5)
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[0, :2] = 0
    together = generated(model, "cupy_fa2", input_ids=ids, attention_mask=mask)
    for row, start in ((0, 2), (1, 0)):
        single = ids[row : row + 1, start:]
        alone = generated(model, "cupy_fa2", input_ids=single, attention_mask=torch.ones_like(single))
        assert torch.equal(together[row, 5:], alone[0, single.shape[1] :])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", SEQ2SEQ)
def test_encoder_decoder(name: str, side: str) -> None:
    mask = padding(2, 9, side)
    inputs = {"input_ids": tokens(2, 9), "attention_mask": mask, "decoder_input_ids": tokens(2, 7, seed=1)}
    assert_equals_eager(name, **inputs)


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_encoder_decoder_generates(name: str) -> None:
    model, inputs = build(name), {"input_ids": tokens(2, 9), "attention_mask": padding(2, 9, "right")}
    assert torch.equal(generated(model, "cupy_fa2", **inputs), generated(model, "eager", **inputs))


def test_a_model_with_its_own_attention_stays_right_and_says_so() -> None:
    """Bloom never asks the interface for an attention function, yet would get our mask."""
    ids, mask = tokens(3, 9), padding(3, 9, "left")
    ours = build("bloom", "cupy_fa2")
    runs = [{"input_ids": ids, "attention_mask": mask}, {"input_ids": ids}]
    with torch.no_grad(), record_layers() as layers, warnings.catch_warnings(record=True) as warned:
        actual = [ours(**inputs).logits for inputs in runs]
    for logits_of_ours, inputs in zip(actual, runs, strict=True):
        assert_same(logits_of_ours, logits(build("bloom"), "eager", **inputs), inputs.get("attention_mask"))
    assert len([w for w in warned if "Bloom does not route" in str(w.message)]) == 1
    assert layers == {}


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "bert"])
def test_output_attentions_are_eagers(name: str) -> None:
    ids, mask = tokens(2, 9), padding(2, 9, "right")
    found = []
    for implementation_name in ("eager", "cupy_fa2"):
        model = build(name)
        with torch.no_grad(), implementation(model, implementation_name), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(model(input_ids=ids, attention_mask=mask, output_attentions=True))
    assert_same(found[1].logits, found[0].logits, mask)
    assert len(found[1].attentions) == 2
    for ours, expected in zip(found[1].attentions, found[0].attentions, strict=True):
        valid = mask[:, None, :, None].expand_as(expected)
        assert_same(ours, expected, valid)


def test_packed_encoder() -> None:
    """cu_seq_lens are an encoder's only sign of packing: every sequence equals its own separate run."""
    model, ids, ends = build("bert"), tokens(1, 14), (0, 5, 14)
    offsets = torch.tensor(ends, dtype=torch.int32)
    positions = torch.cat([torch.arange(5), torch.arange(9)])[None]
    packed = logits(
        model,
        "cupy_fa2",
        input_ids=ids,
        position_ids=positions,
        cu_seq_lens_q=offsets,
        cu_seq_lens_k=offsets,
        max_length_q=9,
        max_length_k=9,
    )
    for start, stop in itertools.pairwise(ends):
        assert_same(packed[:, start:stop], logits(model, "eager", input_ids=ids[:, start:stop]))
