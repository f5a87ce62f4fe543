"""Tiny random models, one of each kind of attention, and how to run them next to eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB = 96
# Weights large enough that attention is far from uniform: a wrong mask then moves the logits by tenths.
DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
ENCODER = {key: value for key, value in DECODER.items() if key not in ("num_key_value_heads", "head_dim")}
SEQ2SEQ = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 256,
    "init_std": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "forced_eos_token_id": None,
    "decoder_start_token_id": 2,
}
LAYERS = ["sliding_attention", "full_attention"]


def _t5gemma() -> Any:
    part = DECODER | {"sliding_window": 4, "layer_types": LAYERS, "query_pre_attn_scalar": 16}
    part |= {"attention_dropout": 0.0, "dropout_rate": 0.0}
    return transformers.T5GemmaConfig(
        encoder=part, decoder=part | {"cross_attention_hidden_size": 64}, vocab_size=VOCAB
    )


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**DECODER),
    "mistral": lambda: transformers.MistralConfig(**DECODER, sliding_window=4),
    "qwen3": lambda: transformers.Qwen3Config(**DECODER),
    "gemma2": lambda: transformers.Gemma2Config(
        **DECODER, sliding_window=4, layer_types=LAYERS, query_pre_attn_scalar=16, attn_logit_softcapping=5.0
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **DECODER, sliding_window=4, layer_types=LAYERS, query_pre_attn_scalar=16
    ),
    "llama4": lambda: transformers.Llama4TextConfig(
        **DECODER,
        intermediate_size_mlp=64,
        num_local_experts=2,
        moe_layers=[],
        attention_chunk_size=4,
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=256, initializer_range=0.3,
        pad_token_id=0, bos_token_id=1, eos_token_id=None,
    ),
    "bloom": lambda: transformers.BloomConfig(
        vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4, initializer_range=0.3,
        pad_token_id=0, bos_token_id=1, eos_token_id=None,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **DECODER, sliding_window=4, layer_types=LAYERS, num_local_experts=2, num_experts_per_tok=1
    ),
    "bert": lambda: transformers.BertConfig(**ENCODER),
    "modernbert": lambda: transformers.ModernBertConfig(
        **ENCODER, local_attention=4, layer_types=LAYERS, classifier_pooling="mean"
    ),
    "bart": lambda: transformers.BartConfig(**SEQ2SEQ),
    "t5gemma": _t5gemma,
    "t5": lambda: transformers.T5Config(
        vocab_size=VOCAB, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
        pad_token_id=0, eos_token_id=None, decoder_start_token_id=2,
    ),
}  # fmt: skip
MODEL_CLASSES = {
    "bert": transformers.AutoModelForMaskedLM,
    "modernbert": transformers.AutoModelForMaskedLM,
    "bart": transformers.AutoModelForSeq2SeqLM,
    "t5gemma": transformers.AutoModelForSeq2SeqLM,
    "t5": transformers.AutoModelForSeq2SeqLM,
}


@cache
def build(name: str, implementation: str = "eager") -> Any:
    """A float32 model in eval mode with seeded weights; the same object for every test."""
    torch.manual_seed(0)
    model_class = MODEL_CLASSES.get(name, transformers.AutoModelForCausalLM)
    return model_class.from_config(CONFIGS[name](), attn_implementation=implementation).eval()


@contextmanager
def implementation(model: Any, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def logits(model: Any, name: str, **inputs: Any) -> Tensor:
    with torch.no_grad(), implementation(model, name):
        return model(**inputs).logits


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def padding(batch: int, length: int, side: str, count: int = 3) -> Tensor:
    """1 = a real token; row 0 is padded by ``count``, row 1 by one more, the last not at all."""
    mask = torch.ones(batch, length, dtype=torch.long)
    for row in range(batch - 1):
        hidden = slice(0, count + row) if side == "left" else slice(length - count - row, length)
        mask[row, hidden] = 0
    return mask


def assert_same(actual: Tensor, expected: Tensor, where: Tensor | None = None) -> None:
    """Equal up to float32 rounding of a few layers, on the rows that count; finite everywhere."""
    assert actual.isfinite().all()
    if where is not None:
        actual, expected = actual[where.bool()], expected[where.bool()]
    tolerance = 64 * torch.finfo(torch.float32).eps * float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)
