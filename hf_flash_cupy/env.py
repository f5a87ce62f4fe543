"""The only reader of the package's environment variables.

``VARIABLES`` is the table the README prints; a test keeps both equal.
"""

from __future__ import annotations

import os
from typing import Literal, cast

CpuMode = Literal["auto", "kernels", "sdpa"]

VARIABLES: dict[str, str] = {
    "HF_FLASH_CUPY_CACHE_DIR": "folder of the compiled kernels and of the demo files (default: the user cache folder)",
    "HF_FLASH_CUPY_CPU": "auto | kernels | sdpa: what a Transformers model runs on the CPU (auto: SDPA, one warning)",
    "HF_FLASH_CUPY_ARCH": "75 | 80 | …: run that architecture's kernels, as PTX, on whatever GPU is there; "
    "90a: Hopper's on the CPU (for tests)",
    "HF_FLASH_CUPY_EXPLAIN": "1: print each kernel choice once",
    "HF_FLASH_CUPY_SANITIZE": "address,undefined: build the host kernels with these sanitizers (for tests)",
}


def _read(name: str) -> str:
    return os.environ.get(name, "").strip()


def _one_of(name: str, allowed: tuple[str, ...]) -> str:
    value = _read(name) or allowed[0]
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: supported are {', '.join(allowed)}; unset it or choose one of these.")
    return value


def cache_dir() -> str | None:
    """The cache folder the user asked for, or None for the default one."""
    return _read("HF_FLASH_CUPY_CACHE_DIR") or None


def cpu_mode() -> CpuMode:
    return cast(CpuMode, _one_of("HF_FLASH_CUPY_CPU", ("auto", "kernels", "sdpa")))


def forced_arch() -> str | None:
    """The architecture whose kernels are forced, e.g. ``"80"``, or None."""
    return _read("HF_FLASH_CUPY_ARCH") or None


def explain() -> bool:
    return _read("HF_FLASH_CUPY_EXPLAIN") not in ("", "0")


def sanitize() -> str:
    """Comma-separated sanitizers for host kernels, ``""`` for none."""
    return _read("HF_FLASH_CUPY_SANITIZE")
