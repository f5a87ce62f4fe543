"""A language model whose logits are a table, and small tokenizers, for the tests of the evaluation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

TEXT = "the quick brown fox jumps over the lazy dog. the dog sleeps; the fox runs away from the dog.\n" * 8


class TableModel(torch.nn.Module):
    """Logits of the next token are ``table[token]``, whatever came before: every nll is known by hand.

    ``spoil[attn](logits, input_ids)`` changes what that attention implementation gives.
    """

    def __init__(self, table: Tensor, spoil: dict[str, Callable[[Tensor, Tensor], Tensor]] | None = None) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(table, requires_grad=False)
        self.spoil = spoil or {}
        self.config = SimpleNamespace(_attn_implementation="eager")
        self.fed: list[tuple[int, ...]] = []

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name

    def forward(self, input_ids: Tensor, use_cache: bool = True, logits_to_keep: int = 0) -> Any:
        self.fed.append(tuple(input_ids.shape))
        logits = self.table[input_ids]
        name = self.config._attn_implementation
        if name in self.spoil:
            logits = self.spoil[name](logits, input_ids)
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])


def random_table(vocab: int = 11, seed: int = 0) -> Tensor:
    return 3 * torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed))


def random_ids(count: int, vocab: int = 11, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, count)


def table_nll(table: Tensor, stream: Sequence[int]) -> np.ndarray:
    """nll of stream[1:], each given the token in front of it, in float64."""
    log_p = table.double().log_softmax(-1).numpy()
    return np.array([-log_p[left, right] for left, right in itertools.pairwise(stream)])


def byte_tokenizer(bos: str | None = "<s>", eos: str | None = "</s>", adds_bos: bool = False) -> Any:
    """A byte-level BPE: every text can be told in it, non-ASCII letters take several tokens or share one."""
    specials = list(dict.fromkeys(token for token in (bos, eos) if token))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    if adds_bos:
        template = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), template])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos)
