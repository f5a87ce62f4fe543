"""Windows of every protocol against the loops of the programs they are named after (cases P03, P11)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_flash_cupy.evaluation.outcome import WrongUse
from hf_flash_cupy.evaluation.protocols import PROTOCOLS, Window, make_windows

# (what the model is fed, what is scored) of one window, both as stream positions; a prefix token is -1.
Fed = tuple[tuple[int, ...], tuple[int, ...]]

sizes = st.integers(3, 40)


def windows(name: str, tokens: int, context: int, stride: int, prefix: int = 0) -> list[Window]:
    return make_windows(PROTOCOLS[name], [tokens], context, stride, prefix)


def fed(window: Window, context: int, prefix: int) -> Fed:
    row = (*([-1] * prefix if window.prefixed else ()), *range(window.begin, window.end))
    return row[:context], tuple(range(window.scored_from, window.end))


class TestStrided:
    @given(tokens=st.integers(2, 200), context=sizes, data=st.data(), prefix=st.integers(0, 1))
    def test_every_token_is_scored_exactly_once(
        self, tokens: int, context: int, data: st.DataObject, prefix: int
    ) -> None:
        context += prefix
        stride = data.draw(st.integers(1, context))
        found = windows("strided", tokens, context, stride, prefix)
        scored = [token for window in found for token in range(window.scored_from, window.end)]
        assert scored == list(range(0 if prefix else 1, tokens))
        assert all(window.end - window.begin + prefix <= context for window in found)

    def test_the_first_window_is_full_and_fully_scored(self) -> None:
        found = windows("strided", 50, 16, 8)
        assert (found[0].begin, found[0].end, found[0].scored_from) == (0, 16, 1)
        assert [(w.begin, w.end, w.scored_from) for w in found[1:]] == [
            (8, 24, 16),
            (16, 32, 24),
            (24, 40, 32),
            (32, 48, 40),
            (40, 50, 48),
        ]

    def test_a_stride_of_the_whole_context_gives_plain_chunks_of_context_minus_one_targets(self) -> None:
        found = windows("strided", 50, 16, 16)
        assert [(w.begin, w.end, w.scored) for w in found] == [
            (0, 16, 15),
            (15, 31, 15),
            (30, 46, 15),
            (45, 50, 4),
        ]

    @given(tokens=st.integers(3, 120), context=sizes)
    def test_a_prefix_longer_than_one_token_leaves_no_gap(self, tokens: int, context: int) -> None:
        found = windows("strided", tokens, context + 2, context + 2, prefix=2)
        assert [t for w in found for t in range(w.scored_from, w.end)] == list(range(tokens))


class TestDisjoint:
    @given(tokens=st.integers(2, 200), context=sizes, prefix=st.integers(0, 1))
    def test_all_but_the_first_token_of_each_chunk_is_scored(self, tokens: int, context: int, prefix: int) -> None:
        context, room = context + prefix, context
        expected = []
        for begin in range(0, tokens, room):
            chunk = tuple(range(begin, min(begin + room, tokens)))
            if targets := chunk if prefix else chunk[1:]:
                expected.append(((*[-1] * prefix, *chunk), targets))
        assert [fed(w, context, prefix) for w in windows("disjoint", tokens, context, context, prefix)] == expected


def llama_cpp(tokens: int, context: int, prefix: int) -> list[Fed]:
    """llama.cpp's perplexity tool: the stream holds the BOS, and each chunk's first token becomes it."""
    stream = [-1] * prefix + list(range(tokens))
    found = []
    for chunk in range(len(stream) // context):
        row = stream[chunk * context : (chunk + 1) * context]
        if prefix:
            row[0] = -1
        found.append((tuple(row), tuple(row[context // 2 + 1 :])))
    return found


def lm_eval(tokens: int, context: int) -> list[Fed]:
    """get_rolling_token_windows and make_disjoint_window with context_len=1, as the harness feeds them."""
    stream = list(range(tokens))
    first = min(context, tokens)
    pairs = [([-1, *stream[: first - 1]], stream[:first])]
    predicted = first
    while predicted < tokens:
        count = min(tokens - predicted, context)
        end = predicted + count
        pairs.append((stream[end - context - 1 : end - 1], stream[end - count : end]))
        predicted += count
    found = []
    for left, targets in pairs:
        left = left[: len(left) - (len(targets) - 1)]
        found.append((tuple([*left, *targets][-(context + 1) :][:-1]), tuple(targets)))
    return found


def gptq(tokens: int, context: int, prefix: int) -> list[Fed]:
    stream = [-1] * prefix + list(range(tokens))
    rows = [tuple(stream[i * context : (i + 1) * context]) for i in range(len(stream) // context)]
    return [(row, row[1:]) for row in rows]


def hf_doc(tokens: int, context: int, stride: int, prefix: int) -> list[tuple[Fed, int]]:
    stream = [-1] * prefix + list(range(tokens))
    found, previous_end = [], 0
    for begin in range(0, len(stream), stride):
        end = min(begin + context, len(stream))
        row, count = stream[begin:end], end - previous_end
        targets = row[-count:]
        scored = targets[1:] if count == len(row) else targets  # the label shift loses a row's first token
        found.append(((tuple(row), tuple(scored)), count - 1))
        previous_end = end
        if end == len(stream):
            break
    return found


class TestNamedProtocols:
    @given(tokens=st.integers(4, 200), context=sizes, prefix=st.integers(0, 1))
    def test_llama_cpp(self, tokens: int, context: int, prefix: int) -> None:
        context += prefix
        found = [fed(w, context, prefix) for w in windows("llama.cpp", tokens, context, context, prefix)]
        assert found == llama_cpp(tokens, context, prefix)

    @given(tokens=st.integers(1, 200), context=st.integers(4, 40))
    def test_lm_eval(self, tokens: int, context: int) -> None:
        found = []
        for window in windows("lm-eval", tokens, context, context, prefix=1):
            row, targets = fed(window, context, 1)
            # A text shorter than the context is fed to its end here; its last position predicts nothing.
            found.append((row[:-1] if row[-1] == targets[-1] else row, targets))
        assert found == lm_eval(tokens, context)

    @given(tokens=st.integers(4, 200), context=sizes, prefix=st.integers(0, 1))
    def test_gptq(self, tokens: int, context: int, prefix: int) -> None:
        context += prefix
        assert [fed(w, context, prefix) for w in windows("gptq", tokens, context, context, prefix)] == gptq(
            tokens, context, prefix
        )

    @given(tokens=st.integers(2, 200), context=sizes, data=st.data(), prefix=st.integers(0, 1))
    def test_hf_doc(self, tokens: int, context: int, data: st.DataObject, prefix: int) -> None:
        context += prefix
        stride = data.draw(st.integers(1, context))
        found = [(fed(w, context, prefix), w.weight) for w in windows("hf-doc", tokens, context, stride, prefix)]
        assert found == [pair for pair in hf_doc(tokens, context, stride, prefix) if pair[0][1]]


class TestDocuments:
    def test_windows_never_cross_from_one_document_to_the_next(self) -> None:
        found = make_windows(PROTOCOLS["strided"], [5, 1, 20], 8, 4)
        assert [(w.begin, w.end) for w in found] == [(0, 5), (6, 14), (10, 18), (14, 22), (18, 26)]
        assert [t for w in found for t in range(w.scored_from, w.end)] == [1, 2, 3, 4, *range(7, 26)]


class TestWrongUse:
    @pytest.mark.parametrize(
        ("name", "context", "stride", "prefix", "words"),
        [
            ("strided", 2, 1, 0, "--context 2"),
            ("strided", 16, 0, 0, "--stride 0"),
            ("strided", 16, 17, 0, "--stride 17"),
            ("lm-eval", 16, 16, 0, "--prefix bos"),
        ],
    )
    def test_names_the_option(self, name: str, context: int, stride: int, prefix: int, words: str) -> None:
        with pytest.raises(WrongUse, match=words):
            windows(name, 50, context, stride, prefix)

    def test_a_window_never_scores_a_token_without_context(self) -> None:
        with pytest.raises(ValueError, match="at least one token in front"):
            Window(begin=3, end=5, scored_from=3)
