"""Every error the package raises on purpose; each message says what was asked, what is supported, what to do."""

from __future__ import annotations


class UnsupportedProblem(ValueError):
    """A valid request that no kernel can serve: names the request, what is supported, and the way out."""


class CompilationError(RuntimeError):
    """NVRTC or the host compiler refused a kernel: carries the unit's name, the arch and the compiler's log."""


class MissingDependency(RuntimeError):
    """Something outside the package is missing. ``mend`` is the one command that brings it."""

    def __init__(self, message: str, mend: str) -> None:
        super().__init__(f"{message} To mend: {mend}")
        self.message, self.mend = message, mend

    def __reduce__(self) -> tuple[type[MissingDependency], tuple[str, str]]:
        return type(self), (self.message, self.mend)  # pickle would call with the one text of both
