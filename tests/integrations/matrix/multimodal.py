"""Rows of the matrix: texts with images."""

from __future__ import annotations

from typing import Any

import torch

from .rows import IMAGE_TEXT, Inputs, Row, floats, image_text, tokens, with_images

ITT = "AutoModelForImageTextToText"
CLIP = {"model_type": "clip_vision_model"}
SIGLIP = {"model_type": "siglip_vision_model"}
LLAMA = {"model_type": "llama"}


def _qwen(config: Any) -> Inputs:
    """Patches of both images one after another: 16 of each, four to a token."""
    ids = with_images(4)
    ids[:, 4], ids[:, 9] = 92, 93  # vision start and end
    return {
        "input_ids": ids,
        "pixel_values": floats(32, 3 * 2 * 8 * 8),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "mm_token_type_ids": (ids == 90).int(),
    }


def _gemma3(config: Any) -> Inputs:
    ids = with_images(4)
    return {"input_ids": ids, "pixel_values": floats(2, 3, 32, 32), "token_type_ids": (ids == 90).long()}


def _idefics(config: Any) -> Inputs:
    return {"input_ids": with_images(4), "pixel_values": floats(2, 1, 3, 32, 32)}


def _mllama(config: Any) -> Inputs:
    return {
        "input_ids": tokens(2, 11),
        "pixel_values": floats(2, 1, 1, 3, 32, 32),
        "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(2, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(2, 11, 1, 1, dtype=torch.long),
    }


def _mistral3(config: Any) -> Inputs:
    return image_text(4)(config) | {"image_sizes": torch.tensor([[32, 32]] * 2)}


def _instructblip(config: Any) -> Inputs:
    return image_text(4)(config) | {"qformer_input_ids": tokens(2, 5, seed=1)}


VISION = {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "out_hidden_size": 64}
WINDOWS = {"window_size": 16, "fullatt_block_indexes": [1]}
SECTIONS = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}}
MLLAMA = {
    "vision_config": {
        "max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]], "intermediate_layers_indices": [0],
        "num_global_layers": 1, "vision_output_dim": 128, "attention_heads": 4,
    },
    "text_config": {"cross_attention_layers": [1]},
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16}

ROWS = [
    Row("llava", ITT, IMAGE_TEXT, image_text(16), {"vision_config": CLIP, "text_config": LLAMA}),
    Row("vipllava", ITT, IMAGE_TEXT, image_text(16), {"vision_config": CLIP | {"num_hidden_layers": 2},
        "text_config": LLAMA, "vision_feature_layers": [-1, -2]}),
    Row("gemma3", ITT, IMAGE_TEXT, _gemma3, {"mm_tokens_per_image": 4, "text_config": SLIDING}),
    Row("paligemma", ITT, IMAGE_TEXT, image_text(16), {"text_config": {"model_type": "gemma"}}),
    Row("idefics3", ITT, IMAGE_TEXT, _idefics, {"scale_factor": 2}),
    Row("smolvlm", ITT, IMAGE_TEXT, _idefics, {"scale_factor": 2}),
    Row("qwen2_vl", ITT, IMAGE_TEXT, _qwen, {"vision_config": VISION, "text_config": SECTIONS}),
    Row("qwen2_5_vl", ITT, IMAGE_TEXT, _qwen, {"vision_config": VISION | WINDOWS, "text_config": SECTIONS}),
    Row("qwen3_vl", ITT, IMAGE_TEXT, _qwen, {"vision_config": VISION | {"deepstack_visual_indexes": [0]},
        "text_config": SECTIONS}),
    Row("glm4v", ITT, IMAGE_TEXT, _qwen, {"vision_config": VISION, "text_config": SECTIONS}),
    Row("internvl", ITT, IMAGE_TEXT, image_text(4)),
    Row("aya_vision", ITT, IMAGE_TEXT, image_text(4)),
    Row("mistral3", ITT, IMAGE_TEXT, _mistral3),
    Row("mllama", ITT, ("plain", "left pad", "generate dynamic", "train"), _mllama, MLLAMA),
    Row("blip-2", ITT, IMAGE_TEXT, image_text(4), {"num_query_tokens": 4, "text_config": {"model_type": "opt"}}),
    Row("instructblip", ITT, IMAGE_TEXT, _instructblip, {"num_query_tokens": 4, "text_config": {"model_type": "opt"}}),
    Row("got_ocr2", ITT, IMAGE_TEXT, image_text(1), own="always",
        note="the image tower's attention is its own; the text model is accelerated"),
    Row("git", "AutoModelForCausalLM", ("plain", "generate dynamic", "train"), image_text(0)),
]  # fmt: skip
