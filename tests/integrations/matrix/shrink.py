"""Any model's configuration, made tiny: the sizes that Transformers' configurations name, a few tokens wide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 96
PAD, START, IMAGE = 0, 2, 90

_WIDTH = dict.fromkeys(
    ["hidden_size", "d_model", "n_embd", "embed_dim", "dim", "emb_dim", "embedding_size", "projection_dim"], 64
) | dict.fromkeys(["hidden_dim", "qkv_dim", "lru_width", "out_hidden_size", "encoder_hidden_size"], 64)
_FEED_FORWARD = dict.fromkeys(
    ["intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size",
     "shared_expert_intermediate_size", "intermediate_size_mlp", "mlp_dim", "ffn_hidden_size", "expert_ffn_hidden_size",
     "shared_intermediate_size", "dense_intermediate_size", "block_ff_dim", "encoder_intermediate_size",
     "moe_shared_expert_intermediate_size"], 64
)  # fmt: skip
_LAYERS = dict.fromkeys(
    ["num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers", "depth",
     "num_decoder_layers", "encoder_num_hidden_layers", "decoder_num_hidden_layers"], 2
)  # fmt: skip
_HEADS = dict.fromkeys(
    ["num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads", "decoder_attention_heads",
     "attention_heads", "encoder_num_attention_heads", "decoder_num_attention_heads"], 4
) | {"num_key_value_heads": 2, "head_dim": 16, "d_kv": 16}  # fmt: skip
_EXPERTS = dict.fromkeys(
    ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4
) | dict.fromkeys(["num_experts_per_tok", "moe_topk", "moe_k", "top_k"], 2) | dict.fromkeys(
    ["n_group", "topk_group", "n_shared_experts", "moe_num_shared_experts", "num_shared_experts"], 1
)  # fmt: skip
_LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "qk_head_dim": 24, "index_head_dim": 16, "index_n_heads": 4, "index_topk": 5,
}  # fmt: skip
_LENGTHS = {
    "max_position_embeddings": 128, "n_positions": 128, "n_ctx": 128, "max_source_positions": 64,
    "max_target_positions": 128, "sliding_window": 4, "attention_chunk_size": 4, "local_attention": 4,
    "type_vocab_size": 2, "vocab_size": VOCAB,
}  # fmt: skip
_STATE = {
    "mamba_n_heads": 8, "mamba_num_heads": 8, "mamba_d_head": 16, "mamba_head_dim": 16, "mamba_d_state": 8,
    "mamba_n_groups": 1, "mamba_d_conv": 2, "mamba_chunk_size": 8, "mamba_expand": 2, "mamba_d_ssm": 128,
    "n_mamba_heads": 8, "ssm_state_size": 8, "n_groups": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "conv_L_cache": 3,
}  # fmt: skip
_IMAGES = {"image_size": 32, "patch_size": 8, "num_channels": 3, "temporal_patch_size": 2, "spatial_merge_size": 2}
# Weights large enough that attention is far from uniform: a wrong mask then moves the logits by tenths.
_WEIGHTS = dict.fromkeys(["initializer_range", "init_std", "initializer_factor"], 0.2) | {"initializer_factor": 1.0}
_DROPOUT = dict.fromkeys(
    ["attention_dropout", "dropout", "activation_dropout", "hidden_dropout", "hidden_dropout_prob", "resid_pdrop",
     "attention_probs_dropout_prob", "attn_pdrop", "embd_pdrop", "dropout_rate", "classifier_dropout", "drop_path_rate",
     "resid_dropout", "embd_dropout", "embed_dropout", "embedding_dropout", "layerdrop", "encoder_layerdrop",
     "decoder_layerdrop", "feat_proj_dropout", "final_dropout", "mask_time_prob", "mask_feature_prob", "mlp_dropout",
     "attn_dropout_prob", "residual_dropout", "residual_dropout_prob", "output_dropout", "attn_drop_rate", "drop_rate",
     "emb_dropout_prob", "hidden_dropout_rate", "conformer_conv_dropout", "projection_dropout", "positional_dropout",
     "router_jitter_noise", "input_jitter_noise", "dropout_positions", "speech_encoder_dropout", "dropout_p"], 0.0
)  # fmt: skip
_TOKENS = {
    "image_token_id": IMAGE, "image_token_index": IMAGE, "video_token_id": 91, "video_token_index": 91,
    "vision_start_token_id": 92, "vision_end_token_id": 93, "audio_token_id": 94, "audio_token_index": 94,
    "boi_token_index": 92, "eoi_token_index": 93, "image_start_token_id": 92, "image_end_token_id": 93,
    "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": None, "forced_eos_token_id": None,
    "forced_bos_token_id": None, "decoder_start_token_id": START, "suppress_tokens": None,
    "begin_suppress_tokens": None,
}  # fmt: skip

SIZES: Mapping[str, Any] = (
    _WIDTH | _FEED_FORWARD | _LAYERS | _HEADS | _EXPERTS | _LATENT | _LENGTHS | _STATE | _IMAGES | _WEIGHTS | _DROPOUT
) | _TOKENS  # fmt: skip


def tiny_config(model_type: str, overrides: Mapping[str, Any]) -> Any:
    """A configuration of ``model_type`` in :data:`SIZES`; ``overrides`` are its own values, dicts for its parts."""
    return _shrink(CONFIG_MAPPING[model_type], overrides)


def _shrink(config_class: Any, overrides: Mapping[str, Any]) -> Any:
    names = {field.name for field in fields(config_class)}
    values = {name: value for name, value in SIZES.items() if name in names} | dict(overrides)
    for name, part_class in getattr(config_class, "sub_configs", {}).items():
        given = dict(overrides.get(name) or {})
        if overrides.get(name, ()) is None:
            continue
        kind = given.pop("model_type", None)
        if kind is not None:
            part_class = CONFIG_MAPPING[kind]
        elif not hasattr(part_class, "__dataclass_fields__"):  # AutoConfig: the whole decides what the part is
            part_class = type(getattr(config_class(), name))
        values[name] = _shrink(part_class, given)
    return config_class(**values)
