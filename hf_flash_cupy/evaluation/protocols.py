"""Protocols: which windows a text is cut into, and which tokens of each are scored.

The same model and text give perplexities that differ by 15 % by protocol alone, so every protocol has a name,
is written down here as plain arithmetic on token positions, and prints its rule in every report.

A window covers tokens ``[begin, end)`` of the stream; tokens ``[scored_from, end)`` are scored, those before
are context. ``context`` counts everything the model is fed, the prefix included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hf_flash_cupy.evaluation.outcome import WrongUse


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens ``[begin, end)``, of which ``[scored_from, end)`` are scored.

    ``prefixed``: the prefix tokens stand in front of ``begin`` (attended, never scored).
    ``weight``: how many tokens the window's mean nll counts for; the number scored in every protocol but
    ``hf-doc``.
    """

    begin: int
    end: int
    scored_from: int
    prefixed: bool = False
    weight: float = -1.0

    def __post_init__(self) -> None:
        first_with_left_context = self.begin if self.prefixed else self.begin + 1
        if not first_with_left_context <= self.scored_from < self.end:
            raise ValueError(f"{self}: a scored token needs at least one token in front of it")
        if self.weight < 0:
            object.__setattr__(self, "weight", float(self.scored))

    @property
    def scored(self) -> int:
        return self.end - self.scored_from

    def shifted(self, offset: int) -> Window:
        return Window(self.begin + offset, self.end + offset, self.scored_from + offset, self.prefixed, self.weight)


@dataclass(frozen=True, slots=True)
class Cut:
    """What a protocol cuts: ``tokens`` of one document, with ``prefix`` tokens available to stand in front of
    a window.
    """

    tokens: int
    context: int
    stride: int
    prefix: int = 0


@dataclass(frozen=True, slots=True)
class Protocol:
    name: str
    rule: str
    windows: Callable[[Cut], Iterator[Window]]
    uses_stride: bool = False
    needs_prefix: bool = False


def _strided(cut: Cut) -> Iterator[Window]:
    room = cut.context - cut.prefix  # tokens of the text that fit in one window
    advance = min(cut.stride, room if cut.prefix else room - 1)
    begin = 0
    scored_from = 0 if cut.prefix else 1
    while scored_from < cut.tokens:
        end = min(begin + room, cut.tokens)
        yield Window(begin, end, scored_from, bool(cut.prefix))
        scored_from = end
        begin += advance


def _disjoint(cut: Cut) -> Iterator[Window]:
    room = cut.context - cut.prefix
    first = 0 if cut.prefix else 1
    for begin in range(0, cut.tokens - first, room):
        yield Window(begin, min(begin + room, cut.tokens), begin + first, bool(cut.prefix))


def _llama_cpp(cut: Cut) -> Iterator[Window]:
    # llama.cpp cuts the stream, its BOS included, into chunks and then overwrites the first token of each
    # chunk with the BOS: the token there is lost, so chunks start `context` apart though they hold `context -
    # prefix` tokens of the text.
    room = cut.context - cut.prefix
    for begin in range(0, cut.tokens - room + 1, cut.context):
        scored_from = begin + cut.context // 2 + 1 - cut.prefix
        yield Window(begin, begin + room, scored_from, bool(cut.prefix))


def _lm_eval(cut: Cut) -> Iterator[Window]:
    # The model is fed `context` tokens and the last one scored is never fed, hence windows of `context` + 1
    # with the prefix.
    for scored_from in range(0, cut.tokens, cut.context):
        end = min(scored_from + cut.context, cut.tokens)
        if scored_from == 0:
            yield Window(0, end, 0, prefixed=True)
        else:  # the last window looks back as far as the context allows
            full = end - scored_from == cut.context
            yield Window(scored_from - 1 if full else end - cut.context - 1, end, scored_from)


def _gptq(cut: Cut) -> Iterator[Window]:
    # The prefix, where there is one, stands once in front of the whole stream, as the tokenizer puts it.
    for start in range(0, cut.tokens + cut.prefix - cut.context + 1, cut.context):
        begin = max(start - cut.prefix, 0)
        prefixed = start == 0 and cut.prefix > 0
        yield Window(begin, start + cut.context - cut.prefix, begin if prefixed else begin + 1, prefixed)


def _hf_doc(cut: Cut) -> Iterator[Window]:
    # The guide's loop, on the stream with the prefix once in front; it takes one token per window off the
    # weight though only windows whose first token is a target lose it to the label shift.
    length, previous_end = cut.tokens + cut.prefix, 0
    for start in range(0, length, cut.stride):
        stop = min(start + cut.context, length)
        targets = stop - previous_end
        prefixed = start == 0 and cut.prefix > 0
        begin, end = max(start - cut.prefix, 0), stop - cut.prefix
        first_target = previous_end - cut.prefix if previous_end > start else begin + (0 if prefixed else 1)
        if end > first_target:
            uncounted = cut.prefix if prefixed else 1
            yield Window(begin, end, first_target, prefixed, weight=float(targets - uncounted))
        previous_end = stop
        if stop == length:
            break


PROTOCOLS: dict[str, Protocol] = {
    protocol.name: protocol
    for protocol in (
        Protocol(
            "strided",
            "windows advance by min(stride, context - 1) and score what is new: every token is scored once, "
            "but the first where there is no prefix",
            _strided,
            uses_stride=True,
        ),
        Protocol("disjoint", "windows without overlap; all but the first token of each is scored", _disjoint),
        Protocol(
            "llama.cpp",
            "chunks without overlap, only the second half of each is scored, the tail is dropped; the prefix "
            "overwrites the first token of each chunk",
            _llama_cpp,
        ),
        Protocol(
            "lm-eval",
            "rolling: every token is scored once, with the prefix in front of the first, windows share one "
            "token, the last one looks back",
            _lm_eval,
            needs_prefix=True,
        ),
        Protocol(
            "gptq",
            "texts joined, windows without overlap, tail dropped; all but the first token of each is scored; "
            "the prefix once in front of the stream",
            _gptq,
        ),
        Protocol(
            "hf-doc",
            "Transformers' guide: windows advance by stride, each window's mean nll weighs (new tokens - 1); "
            "the prefix once in front of the stream",
            _hf_doc,
            uses_stride=True,
        ),
    )
}


def check_context(option: str, context: int, prefix: int = 0) -> None:
    """Refuse a ``context`` without room for a scored token behind ``prefix`` tokens; ``option`` gave it."""
    if context < 3 + prefix:
        raise WrongUse(f"{option} {context}: at least {3 + prefix} tokens are needed (three and the prefix)")


def check_stride(stride: int, context: int) -> None:
    """Refuse a ``stride`` that would go back, stand still, or leave tokens out."""
    if not 1 <= stride <= context:
        raise WrongUse(f"--stride {stride}: must be from 1 to the context ({context}), or tokens would be left out")


def make_windows(
    protocol: Protocol, documents: Sequence[int], context: int, stride: int, prefix: int = 0
) -> list[Window]:
    """The windows of each document (given by its number of tokens) in the order of the text.

    Raises:
        WrongUse: ``context`` leaves no room for a scored token, ``stride`` is not in [1, context], or the
        protocol needs
            a prefix and there is none.
    """
    check_context("--context", context, prefix)
    check_stride(stride, context)
    if protocol.needs_prefix and prefix != 1:
        raise WrongUse(f"--protocol {protocol.name} scores the first token too: give --prefix bos, eos or a token id")
    windows, offset = [], 0
    for tokens in documents:
        cut = Cut(tokens, context, stride, prefix)
        windows += [window.shifted(offset) for window in protocol.windows(cut)]
        offset += tokens
    return windows
