"""How an evaluation can end: the exit codes of ``hf-flash-cupy ppl`` and the errors behind them."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    OK = 0
    GATE_FAILED = 1
    WRONG_USE = 2
    MISSING = 3
    NUMERICAL_FAILURE = 4
    INTERRUPTED = 130


class WrongUse(ValueError):
    """An option's value cannot work; the message names the option and what it may be."""


class NumericalFailure(ArithmeticError):
    """A negative log-likelihood is not finite: ``attn`` at ``token`` of the stream, in ``window``."""

    def __init__(self, attn: str, window: int, token: int, value: float) -> None:
        super().__init__(f"{attn}: the nll of token {token} in window {window} is {value}")
        self.attn, self.window, self.token = attn, window, token
