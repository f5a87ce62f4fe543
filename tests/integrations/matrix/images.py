"""Rows of the matrix: images and video."""

from __future__ import annotations

from typing import Any

import torch

from .rows import PLAIN, Inputs, Row, floats, image, tokens

PLAIN_NAMES = """
beit chinese_clip_vision_model clip_vision_model deit dinov2 dinov2_with_registers idefics3_vision ijepa
internvl_vision mlcd_vision_model pixio sapiens2 siglip_vision_model smolvlm_vision tipsv2_vision_model vit vit_msn
"""
SAM = {
    "vision_config": {"output_channels": 256},
    "prompt_encoder_config": {"hidden_size": 256, "image_embedding_size": 4},
    "mask_decoder_config": {"hidden_size": 256, "num_attention_heads": 8, "iou_head_hidden_dim": 256},
}
VJEPA = {
    "frames_per_clip": 4, "crop_size": 32, "pred_hidden_size": 64, "pred_num_attention_heads": 4,
    "pred_num_hidden_layers": 2, "num_pooler_layers": 1,
}  # fmt: skip
STAGES = {"embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "patch_size": 4}


def _image_and_text(config: Any) -> Inputs:
    return {"input_ids": tokens(2, 9), "attention_mask": torch.ones(2, 9, dtype=torch.long), **image(config)}


def _image_and_noise(config: Any) -> Inputs:
    """The noise says which patches are dropped."""
    return image(config) | {"noise": floats(2, 16, seed=1)}


def _video(frames: int) -> Any:
    return lambda config: {"pixel_values": floats(2, frames, 3, 32, 32)}


def _clip(config: Any) -> Inputs:
    return {"pixel_values_videos": floats(2, 4, 3, 32, 32)}


def _patches(config: Any) -> Inputs:
    return {
        "pixel_values": floats(2, 16, 192),
        "pixel_attention_mask": torch.arange(16)[None] < torch.tensor([[16], [12]]),
        "spatial_shapes": torch.tensor([[4, 4], [4, 3]]),
    }


ROWS = [
    *(Row(name, "AutoModel", PLAIN, image) for name in PLAIN_NAMES.split()),
    Row("aimv2_vision_model", "AutoModel", PLAIN, image),
    Row("clip", "AutoModel", PLAIN, _image_and_text, {"text_config": {"eos_token_id": 2}}),
    Row("dinov3_vit", "AutoModel", PLAIN, image, {"num_register_tokens": 2}),
    Row("vit_mae", "AutoModel", PLAIN, _image_and_noise),
    Row("yolos", "AutoModel", PLAIN, image, {"image_size": [32, 32]}),
    Row("siglip", "AutoModel", PLAIN, _image_and_text),
    Row("siglip2_vision_model", "AutoModel", PLAIN, _patches, {"num_patches": 16}),
    Row("metaclip_2", "AutoModel", PLAIN, _image_and_text, {"text_config": {"eos_token_id": 2}}),
    Row("chinese_clip", "AutoModel", PLAIN, _image_and_text),
    Row("altclip", "AutoModel", PLAIN, _image_and_text),
    Row("pixtral", "AutoModel", PLAIN, image, {"head_dim": 16}),
    Row("swin", "AutoModel", PLAIN, image, STAGES),
    Row("videomae", "AutoModel", PLAIN, _video(4), {"num_frames": 4, "tubelet_size": 2}),
    Row("vivit", "AutoModel", PLAIN, _video(4), {"num_frames": 4, "tubelet_size": [2, 8, 8]}),
    Row("vjepa2", "AutoModel", PLAIN, _clip, VJEPA),
    Row("data2vec-vision", "AutoModel", PLAIN, image, {"use_relative_position_bias": True}),
    Row("sam", "AutoModel", PLAIN, image, SAM),
    Row("swinv2", "AutoModel", PLAIN, image, STAGES, own="always", note="scores are cosines"),
]  # fmt: skip
