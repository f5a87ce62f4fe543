"""Zero-copy exchange with other CUDA array libraries (CuPy, JAX), ordered by DLPack's stream protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack


def call(function: Callable[..., Any], arrays: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Runs ``function`` on torch views of the DLPack ``arrays``; results are CuPy arrays on the same memory."""
    for name, array in zip(("q", "k", "v"), arrays, strict=True):
        if not hasattr(array, "__dlpack__"):
            raise TypeError(
                f"{name} is a {type(array).__name__}; a torch.Tensor or a CUDA array with __dlpack__ is needed."
            )
    views = [from_dlpack(array) for array in arrays]
    options = {key: _view(value) for key, value in options.items()}
    with torch.no_grad():
        results = function(*views, **options)
    return tuple(map(_export, results)) if isinstance(results, tuple) else _export(results)


def _view(value: Any) -> Any:
    return from_dlpack(value) if hasattr(value, "__dlpack__") and not isinstance(value, torch.Tensor) else value


def _export(result: torch.Tensor) -> Any:
    if not result.is_cuda:
        return result.numpy()
    from .jit.compiler import import_cupy

    return import_cupy().from_dlpack(result)
