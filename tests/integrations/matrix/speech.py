"""Rows of the matrix: audio."""

from __future__ import annotations

from typing import Any

from .rows import PLAIN, Inputs, Row, floats, tokens

WAVES = {"conv_dim": [32, 32], "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_feat_extract_layers": 2,
         "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "do_stable_layer_norm": False}  # fmt: skip
GENERATING = ("plain", "generate dynamic", "generate static", "train")


def _waves(config: Any) -> Inputs:
    return {"input_values": floats(2, 800)}


def _spectrum(frames: int, bins: int, name: str = "input_features") -> Any:
    return lambda config: {name: floats(2, frames, bins)}


def _whisper(config: Any) -> Inputs:
    return {"input_features": floats(2, 16, 128), "decoder_input_ids": tokens(2, 7)}


def _moonshine(config: Any) -> Inputs:
    return {"input_values": floats(2, 4000), "decoder_input_ids": tokens(2, 7)}


def _speech_to_text(config: Any) -> Inputs:
    return {"input_features": floats(2, 40, 16), "decoder_input_ids": tokens(2, 7)}


ROWS = [
    *(Row(name, "AutoModel", PLAIN, _waves, WAVES) for name in ("wav2vec2", "hubert", "unispeech")),
    Row("wav2vec2-conformer", "AutoModel", PLAIN, _waves, WAVES | {"position_embeddings_type": "relative"}),
    Row("wav2vec2-bert", "AutoModel", PLAIN, _spectrum(20, 160), {"position_embeddings_type": "relative_key"}),
    Row("audio-spectrogram-transformer", "AutoModel", PLAIN, _spectrum(32, 16, "input_values"),
        {"max_length": 32, "num_mel_bins": 16, "frequency_stride": 4, "time_stride": 4}),
    Row("data2vec-audio", "AutoModel", PLAIN, _waves, WAVES | {"conv_pos_kernel_size": 3}),
    Row("sew", "AutoModel", PLAIN, _waves, WAVES | {"squeeze_factor": 2}),
    Row("whisper", "AutoModelForSpeechSeq2Seq", GENERATING, _whisper, {"num_mel_bins": 16}),
    Row("moonshine", "AutoModelForSpeechSeq2Seq", GENERATING, _moonshine),
    Row("speech_to_text", "AutoModelForSpeechSeq2Seq", GENERATING, _speech_to_text,
        {"input_feat_per_channel": 16, "conv_channels": 32, "num_conv_layers": 2, "conv_kernel_sizes": [3, 3]}),
    Row("parakeet_encoder", "AutoModel", PLAIN, _spectrum(32, 16),
        {"num_mel_bins": 16, "subsampling_conv_channels": 16}),
    Row("unispeech-sat", "AutoModel", PLAIN, _waves, WAVES | {"eos_token_id": 2}),
    Row("wavlm", "AutoModel", PLAIN, _waves, WAVES, own="always", note="position bias gated by each layer's input"),
]  # fmt: skip
