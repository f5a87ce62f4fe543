"""Rows of the matrix: encoders, and encoder-decoder models of text."""

from __future__ import annotations

from typing import Any

from .rows import ENCODER, OWN_SCORES, SEQ2SEQ, Row, text_to_text

MASKED_LM, SEQ2SEQ_LM = "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"

PLAIN = """
albert bert camembert data2vec-text distilbert electra ernie esm eurobert jina_embeddings_v3 modernbert
nomic_bert roberta roberta-prelayernorm roc_bert xlm-roberta xlm-roberta-xl
"""
OWN: dict[str, dict[str, Any]] = {
    "esmc": {"num_key_value_heads": 4},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
}
OWN_ATTENTION = {  # and what it is
    "convbert": "half of the heads are convolutions",
    "deberta": "scores of content and position apart",
    "deberta-v2": "scores of content and position apart",
    "longformer": "windows in blocks, and global tokens",
    "mpnet": OWN_SCORES,
    "roformer": OWN_SCORES,
}

TEXT_TO_TEXT = ["bart", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "nllb-moe", "pegasus", "plbart"]
START = {"decoder_start_token_id": 2}
T5 = {"t5": START, "mt5": START, "umt5": START, "switch_transformers": START}
PART = {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16}
CROSS = {"cross_attention_hidden_size": 64}
SPARSE_ENCODER = "the encoder's sparse attention is its own; the decoder is accelerated"

ROWS = [
    *(Row(name, MASKED_LM, ENCODER) for name in PLAIN.split()),
    *(Row(name, MASKED_LM, ENCODER, config=config) for name, config in OWN.items()),
    Row("layoutlm", MASKED_LM, ENCODER),
    Row("markuplm", "AutoModel", ENCODER),
    Row("splinter", "AutoModel", ENCODER),
    *(Row(name, MASKED_LM, ENCODER, own="always", note=note) for name, note in OWN_ATTENTION.items()),
    *(Row(name, SEQ2SEQ_LM, SEQ2SEQ, text_to_text) for name in TEXT_TO_TEXT),
    *(Row(name, SEQ2SEQ_LM, SEQ2SEQ, text_to_text, config) for name, config in T5.items()),
    Row("t5gemma", SEQ2SEQ_LM, SEQ2SEQ, text_to_text, {"encoder": PART, "decoder": PART | CROSS}),
    Row("t5gemma2", SEQ2SEQ_LM, SEQ2SEQ, text_to_text),
    *(
        Row(name, SEQ2SEQ_LM, SEQ2SEQ, text_to_text, START, own="always", note=SPARSE_ENCODER)
        for name in ("bigbird_pegasus", "longt5", "pegasus_x")
    ),
    Row("led", SEQ2SEQ_LM, SEQ2SEQ, text_to_text, START, own="always", note="windows in blocks, and global tokens"),
]
