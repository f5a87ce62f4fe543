"""Texts and tokens: what is read, which prefix stands in front, and the UTF-8 bytes and words each token
stands for.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_flash_cupy.evaluation import demo
from hf_flash_cupy.evaluation.outcome import WrongUse

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Corpus:
    """``documents`` are tokenized apart, so one text in ``stream`` mode is one document."""

    name: str
    documents: tuple[str, ...]
    joiner: str

    @property
    def bytes(self) -> int:
        return sum(len(document.encode()) for document in self.documents)

    @property
    def words(self) -> int:
        return sum(len(document.split()) for document in self.documents)

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(document.encode())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Prefix:
    """The tokens in front of every window and how the report names them."""

    ids: tuple[int, ...]
    label: str


@dataclass(frozen=True, slots=True)
class TokenStream:
    """Tokens of all documents, one after the other.

    ``utf8_bytes[i]`` and ``words[i]``: bytes, and words that begin, in the text of token i; None where the
    tokenizer cannot map tokens to the text.
    """

    ids: Ints
    document_lengths: tuple[int, ...]
    truncated: int
    utf8_bytes: Ints | None
    words: Ints | None

    @property
    def sha256(self) -> str:
        """Of the ids as little-endian int64."""
        return hashlib.sha256(self.ids.astype("<i8").tobytes()).hexdigest()


def read_corpus(files: Sequence[str], mode: str = "stream", joiner: str = "\n\n") -> Corpus:
    """The text of ``files`` (UTF-8, ``.gz`` unpacked, ``-`` = standard input), or of the demo where there are
    none.

    ``mode``: ``stream`` joins the files with ``joiner`` to one text, ``documents`` keeps each file apart.

    Raises:
        WrongUse: a file is missing, is not UTF-8, or there is no text at all.
        MissingDependency: the demo text cannot be fetched.
    """
    if not files:
        demo.fetch_text()
        return Corpus(demo.TEXT_NAME, (demo.text_file().read_bytes().decode(),), "\n\n")
    texts = [_read_text(file) for file in files]
    documents = (joiner.join(texts),) if mode == "stream" else tuple(texts)
    if not any(documents):
        raise WrongUse(f"--text {' '.join(files)}: the text is empty")
    return Corpus(", ".join(Path(file).name for file in files), documents, joiner)


def _read_text(file: str) -> str:
    try:
        if file == "-":
            raw = sys.stdin.buffer.read()
        else:
            raw = Path(file).read_bytes()
            raw = gzip.decompress(raw) if file.endswith(".gz") else raw
        return raw.decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise WrongUse(
            f"--text {file}: {error}; give UTF-8 text files (.gz allowed), or - for standard input"
        ) from error


def check_prefix(choice: str) -> None:
    """Refuse, before there is a tokenizer, a ``choice`` that is nothing :func:`resolve_prefix` knows."""
    if choice not in ("auto", "none", "bos", "eos") and not choice.isdecimal():
        raise WrongUse(f"--prefix {choice}: must be auto, none, bos, eos or a token id")


def resolve_prefix(tokenizer: Any, choice: str, needs_prefix: bool = False) -> Prefix:
    """The prefix tokens for ``choice``: ``auto``, ``none``, ``bos``, ``eos`` or a token id.

    ``auto`` is what the tokenizer itself puts in front of a text. Where the protocol needs a prefix and the
    tokenizer adds none, it is the BOS token, or the EOS token of a tokenizer without BOS
    (lm-evaluation-harness's rule).

    Raises:
        WrongUse: the tokenizer has no such token.
    """
    if choice == "none":
        return Prefix((), "none")
    if choice == "auto":
        if ids := _added_in_front(tokenizer):
            return Prefix(ids, f"auto: {_describe(tokenizer, ids)}, as the tokenizer adds it")
        if not needs_prefix:
            return Prefix((), "none (auto: the tokenizer adds no token)")
        choice = "bos" if tokenizer.bos_token_id is not None else "eos"
    if choice in ("bos", "eos"):
        token_id = getattr(tokenizer, f"{choice}_token_id")
        if token_id is None:
            raise WrongUse(f"--prefix {choice}: this tokenizer has no {choice.upper()} token; give none or a token id")
    elif choice.isdecimal() and int(choice) < len(tokenizer):
        token_id = int(choice)
    else:
        raise WrongUse(f"--prefix {choice}: must be auto, none, bos, eos or a token id below {len(tokenizer)}")
    return Prefix((token_id,), f"{choice}: {_describe(tokenizer, (token_id,))}")


def _describe(tokenizer: Any, ids: tuple[int, ...]) -> str:
    tokens = tokenizer.convert_ids_to_tokens(list(ids))
    return ", ".join(f"{token} (id {token_id})" for token, token_id in zip(tokens, ids, strict=True))


def _added_in_front(tokenizer: Any) -> tuple[int, ...]:
    """The ids that the tokenizer puts in front of a text by itself."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    for count in range(len(full) - len(bare) + 1):
        if full[count : count + len(bare)] == bare:
            return tuple(full[:count])
    return ()


def tokenize(tokenizer: Any, corpus: Corpus, prefix: Prefix, max_tokens: int = 0) -> TokenStream:
    """Tokenize without special tokens (the prefix is put in front by the windows, so it can never be there
    twice).

    ``max_tokens``: keep only so many tokens; 0 = all.

    Raises:
        WrongUse: the text holds no token.
    """
    parts = [_tokenize_document(tokenizer, document, prefix) for document in corpus.documents if document]
    parts = [part for part in parts if len(part[0])]
    if not parts:
        raise WrongUse(f"--text: {corpus.name} holds no token")
    ids = np.concatenate([part[0] for part in parts])
    total, kept = len(ids), min(max_tokens, len(ids)) if max_tokens else len(ids)
    ends = np.minimum(np.cumsum([len(part[0]) for part in parts]), kept)
    mapped = all(part[1] is not None for part in parts)
    return TokenStream(
        ids=ids[:kept],
        document_lengths=tuple(int(length) for length in np.diff(ends, prepend=0) if length),
        truncated=total - kept,
        utf8_bytes=np.concatenate([part[1] for part in parts])[:kept] if mapped else None,
        words=np.concatenate([part[2] for part in parts])[:kept] if mapped else None,
    )


def _tokenize_document(tokenizer: Any, text: str, prefix: Prefix) -> tuple[Ints, Any, Any]:
    encoded = tokenizer(
        text,
        add_special_tokens=False,
        return_offsets_mapping=tokenizer.is_fast,
        return_attention_mask=False,
        verbose=False,
    )
    ids = np.asarray(encoded["input_ids"], dtype=np.int64)
    # A text that spells out the prefix, or a tokenizer that adds it in spite of add_special_tokens=False.
    skip = len(prefix.ids) if prefix.ids and tuple(ids[: len(prefix.ids)]) == prefix.ids else 0
    if not tokenizer.is_fast or skip == len(ids):
        return ids[skip:], None, None
    ends = np.maximum.accumulate(np.asarray(encoded["offset_mapping"], dtype=np.int64)[:, 1])
    ends[-1] = len(text)
    code_points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    widths = 1 + (code_points > 0x7F) + (code_points > 0x7FF).astype(np.int64) + (code_points > 0xFFFF)
    byte_ends = np.concatenate([[0], np.cumsum(widths)])[ends]
    utf8_bytes = np.diff(byte_ends, prepend=0)
    word_starts = np.asarray([match.start() for match in re.finditer(r"\S+", text)], dtype=np.int64)
    words = np.bincount(np.searchsorted(ends, word_starts, side="right"), minlength=len(ids)).astype(np.int64)
    return ids[skip:], utf8_bytes[skip:], words[skip:]
