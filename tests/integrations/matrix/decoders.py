"""Rows of the matrix: decoders."""

from __future__ import annotations

from typing import Any

import torch

from .rows import BATCH, DECODER, LENGTH, OWN_SCORES, Inputs, Row, tokens

CAUSAL_LM = "AutoModelForCausalLM"
SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
RECURRENT = {"layer_types": ["linear_attention", "full_attention"]}
LATENT = {"head_dim": 8, "num_key_value_heads": 4}  # multi-head latent attention: rotary parts of 8, own k and v

# Nothing of their own but the sizes.
PLAIN = """
afmoe apertus arcee aria_text bert-generation biogpt bitnet cohere cohere2_moe ctrl cwm diffllama doge dots1 emu3
ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon_h1 flex_olmo gemma glm glm4 glm4_moe gpt2 gpt-sw3 gpt_bigcode gpt_neox
gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe
hy_v3 hyperclovax jais2 laguna lfm2 llama mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text ministral
ministral3 mistral mixtral modernbert-decoder nanochat nemotron nemotron_h olmo olmo2 olmo_hybrid olmoe opt persimmon
phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2
"""
OWN: dict[str, dict[str, Any]] = {
    "axk1": LATENT,
    "axk2": LATENT,
    "bamba": {"attn_layer_indices": [1]},
    "cohere2": SLIDING,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "deepseek_v4": {},
    "gemma2": SLIDING | {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "gemma3_text": SLIDING | {"query_pre_attn_scalar": 16},
    "gemma3n_text": SLIDING
    | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 96, "laurel_rank": 8}
    | {"activation_sparsity_pattern": None},
    "gemma4_text": SLIDING
    | {"global_head_dim": 32, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 16}
    | {"num_kv_shared_layers": 0},
    "gemma4_unified_text": SLIDING | {"global_head_dim": 32},
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hy_v4": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "jetmoe": {"kv_channels": 16},
    "kimi_linear": LATENT | RECURRENT | {"linear_head_dim": 16, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]},
    "longcat_flash": LATENT,
    "minicpm3": LATENT,
    "olmo3": SLIDING,
    "qwen3_5_text": RECURRENT,
    "qwen3_5_moe_text": RECURRENT,
    "qwen3_next": RECURRENT,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 4},
    "vaultgemma": SLIDING | {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "youtu": LATENT,
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2}
    | {"attention_head_dim": 32, "attention_hidden_size": 128},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
NOTES = {
    "axk2": "selected keys as a mask",
    "deepseek_v32": "selected keys as a mask",
    "glm_moe_dsa": "selected keys as a mask",
    "hy_v4": "selected keys as a mask",
    "minimax_m3_vl_text": "selected blocks of keys as a mask",
}
OWN_ATTENTION: dict[str, dict[str, Any]] = {
    "bloom": {},
    "mpt": {"max_seq_len": 128, "attn_config": {"attn_pdrop": 0}},
    "xglm": {},
}


def _with_mask(config: Any) -> Inputs:
    return {"input_ids": tokens(), "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long)}


ROWS = [
    *(Row(name, CAUSAL_LM, DECODER) for name in PLAIN.split()),
    *(Row(name, CAUSAL_LM, DECODER, config=config, note=NOTES.get(name, "")) for name, config in OWN.items()),
    Row(
        "codegen", CAUSAL_LM, DECODER, config={"rotary_dim": 8}, own="5.17",
        note="its file computes the scores itself up to Transformers 5.17",
    ),
    Row("gptj", CAUSAL_LM, DECODER, config={"rotary_dim": 8}),
    Row("falcon", CAUSAL_LM, DECODER, note="with ALiBi its own: eager adds it twice, sdpa once"),
    Row(
        "gpt_neo", CAUSAL_LM, tuple(mode for mode in DECODER if "static" not in mode),
        config={"attention_types": [[["global", "local"], 1]], "window_size": 4},
        note="with a static cache eager's window lies at the cache's end",
    ),
    *(Row(name, CAUSAL_LM, DECODER, config=c, own="always", note=OWN_SCORES) for name, c in OWN_ATTENTION.items()),
    Row(
        "moshi", CAUSAL_LM, tuple(mode for mode in DECODER if mode != "packed"), _with_mask,
        note="eager forgets causality where no attention_mask is given",
    ),
]  # fmt: skip
