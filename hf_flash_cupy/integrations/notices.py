"""Warnings that a model's every layer would repeat, said once a process."""

from __future__ import annotations

import warnings

_said: set[str] = set()


def warn_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        warnings.warn(message, UserWarning, stacklevel=3)
