"""Reading, prefixes and units (cases P05, P06, P12)."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from eval_fixture import TEXT, byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from hf_flash_cupy.evaluation.data import Corpus, Prefix, read_corpus, resolve_prefix, tokenize
from hf_flash_cupy.evaluation.outcome import WrongUse

NO_PREFIX = Prefix((), "none")
PLAIN = byte_tokenizer()


def corpus(*documents: str) -> Corpus:
    return Corpus("test", documents, "\n\n")


class TestPrefix:
    """P06: three tokenizers; P05: whoever adds the BOS, it is there once."""

    TOKENIZERS = {  # noqa: RUF012
        "adds bos": byte_tokenizer(adds_bos=True),
        "has bos": byte_tokenizer(),
        "none": byte_tokenizer(bos=None, eos=None),
        "bos is eos": byte_tokenizer(bos="<|end|>", eos="<|end|>"),
        "eos only": byte_tokenizer(bos=None),
    }

    @pytest.mark.parametrize(
        ("kind", "choice", "needed", "token"),
        [
            ("adds bos", "auto", False, "<s>"),
            ("has bos", "auto", False, None),
            ("none", "auto", False, None),
            ("bos is eos", "auto", False, None),
            ("adds bos", "auto", True, "<s>"),
            ("has bos", "auto", True, "<s>"),  # never the EOS where there is a BOS
            ("bos is eos", "auto", True, "<|end|>"),
            ("eos only", "auto", True, "</s>"),
            ("adds bos", "none", False, None),
            ("has bos", "bos", False, "<s>"),
            ("has bos", "eos", False, "</s>"),
            ("has bos", "0", False, "<s>"),
        ],
    )
    def test_choice(self, kind: str, choice: str, needed: bool, token: str | None) -> None:
        tokenizer = self.TOKENIZERS[kind]
        prefix = resolve_prefix(tokenizer, choice, needed)
        assert prefix.ids == (() if token is None else (tokenizer.convert_tokens_to_ids(token),))
        assert (token or "none") in prefix.label

    @pytest.mark.parametrize(
        ("kind", "choice"), [("none", "bos"), ("eos only", "bos"), ("has bos", "9999"), ("has bos", "first")]
    )
    def test_a_token_that_is_not_there_is_refused(self, kind: str, choice: str) -> None:
        with pytest.raises(WrongUse, match=f"--prefix {choice}"):
            resolve_prefix(self.TOKENIZERS[kind], choice)

    def test_a_protocol_that_needs_a_prefix_says_so_where_there_is_none(self) -> None:
        with pytest.raises(WrongUse, match="--prefix eos"):
            resolve_prefix(self.TOKENIZERS["none"], "auto", needs_prefix=True)

    @pytest.mark.parametrize("kind", ["adds bos", "has bos"])
    @pytest.mark.parametrize("choice", ["auto", "bos", "none"])
    @pytest.mark.parametrize("text", ["a fox", "<s>a fox"])
    def test_the_tokens_of_the_text_never_begin_with_the_prefix(self, kind: str, choice: str, text: str) -> None:
        tokenizer = self.TOKENIZERS[kind]
        prefix = resolve_prefix(tokenizer, choice)
        ids = (*prefix.ids, *tokenize(tokenizer, corpus(text), prefix).ids.tolist())
        spelled_out = text.startswith("<s>")
        assert ids.count(tokenizer.bos_token_id) == (1 if prefix.ids or spelled_out else 0)

    def test_a_tokenizer_that_adds_its_bos_in_spite_of_us_is_seen_through(self) -> None:
        inner = byte_tokenizer()
        stubborn = SimpleNamespace(is_fast=True)

        def call(text: str, **options: object) -> dict[str, object]:
            encoded = inner(text, add_special_tokens=False, return_offsets_mapping=True)
            return {
                "input_ids": [0, *encoded["input_ids"]],
                "offset_mapping": [(0, 0), *encoded["offset_mapping"]],
            }

        found = tokenize(_Callable(stubborn, call), corpus("a fox"), Prefix((0,), "bos"))
        assert found.ids.tolist() == inner("a fox", add_special_tokens=False)["input_ids"]
        assert found.utf8_bytes is not None
        assert found.utf8_bytes.sum() == 5


class _Callable:
    def __init__(self, attributes: SimpleNamespace, call: object) -> None:
        self.__dict__ |= vars(attributes)
        self._call = call

    def __call__(self, text: str, **options: object) -> object:
        return self._call(text, **options)  # type: ignore[operator]


class TestUnits:
    """P12: bytes are UTF-8 bytes, not characters; words are what is between blanks."""

    @given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60))
    def test_bytes_and_words_of_all_tokens_are_those_of_the_text(self, text: str) -> None:
        stream = tokenize(PLAIN, corpus(text), NO_PREFIX)
        assert stream.utf8_bytes is not None
        assert stream.words is not None
        assert stream.utf8_bytes.sum() == len(text.encode())
        assert stream.words.sum() == len(text.split())
        assert (stream.utf8_bytes >= 0).all()

    @pytest.mark.parametrize("text", ["größer café 東京 🦊 naïve", TEXT])
    def test_every_prefix_of_the_tokens_has_the_bytes_of_its_own_text(self, text: str) -> None:
        stream = tokenize(PLAIN, corpus(text), NO_PREFIX)
        assert stream.utf8_bytes is not None
        decoded = [PLAIN.decode(stream.ids[:count]) for count in range(1, len(stream.ids) + 1)]
        for count, piece in zip(np.cumsum(stream.utf8_bytes), decoded, strict=True):
            if "\ufffd" not in piece:  # between two whole letters
                assert count == len(piece.encode())

    def test_truncation_leaves_the_units_of_what_is_kept(self) -> None:
        full = tokenize(PLAIN, corpus(TEXT), NO_PREFIX)
        part = tokenize(PLAIN, corpus(TEXT), NO_PREFIX, max_tokens=20)
        assert len(part.ids) == 20
        assert part.truncated == len(full.ids) - 20
        assert part.utf8_bytes is not None
        assert part.utf8_bytes.sum() == len(PLAIN.decode(part.ids).encode())

    def test_documents_are_tokenized_apart(self) -> None:
        stream = tokenize(PLAIN, corpus("a fox", "", "the dog"), NO_PREFIX)
        lengths = [len(PLAIN(text)["input_ids"]) for text in ("a fox", "the dog")]
        assert list(stream.document_lengths) == lengths
        assert tokenize(PLAIN, corpus("a fox", "the dog"), NO_PREFIX, lengths[0]).document_lengths == (lengths[0],)


class TestReading:
    def test_files_are_joined_or_kept_apart(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("ä fox")
        (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"the dog\r\n"))
        files = [str(tmp_path / name) for name in ("a.txt", "b.txt.gz")]
        joined = read_corpus(files)
        assert joined.documents == ("ä fox\n\nthe dog\r\n",)
        assert (joined.bytes, joined.words) == (6 + 2 + 9, 4)
        assert read_corpus(files, "documents").documents == ("ä fox", "the dog\r\n")

    def test_standard_input(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO("ä".encode())))
        assert read_corpus(["-"]).documents == ("ä",)

    def test_what_cannot_be_read_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "latin.txt").write_bytes("ä".encode("latin-1"))
        (tmp_path / "empty.txt").touch()
        (tmp_path / "broken.gz").write_bytes(b"no gzip")
        for name in ("missing.txt", "latin.txt", "empty.txt", "broken.gz"):
            with pytest.raises(WrongUse, match=f"--text .*{name}"):
                read_corpus([str(tmp_path / name)])
