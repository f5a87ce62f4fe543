"""What a forward pass costs: seconds, peak memory, compilation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_flash_cupy.jit import module

if TYPE_CHECKING:
    import torch

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(slots=True)
class Cost:
    """Totals over the passes of one implementation.

    ``peak_bytes``: on a GPU what torch had allocated at most, on a CPU the process's largest resident set,
    both with the weights and without the baseline's logits kept for the comparison; None where it cannot be
    measured.
    """

    seconds: float = 0.0
    tokens: int = 0
    peak_bytes: int | None = None
    compile_seconds: float = 0.0
    cache_hits: int = 0

    def forget_speed(self) -> None:
        """Start timing again (after the warm-up); what was compiled stays counted."""
        self.seconds, self.tokens = 0.0, 0

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None


@contextmanager
def compilation(cost: Cost) -> Iterator[None]:
    """Add what the kernels called inside the block needed to be compiled or found on disk."""
    before = module.stats()
    yield
    after = module.stats()
    cost.compile_seconds += after.seconds - before.seconds
    cost.cache_hits += after.disk_hits - before.disk_hits


@contextmanager
def measure(cost: Cost, device: torch.device, tokens: int, held: torch.Tensor | None = None) -> Iterator[None]:
    """Add the pass inside the block to ``cost``; ``held`` is memory that is not the pass's own."""
    measurable = _reset_peak(device)
    compiled = cost.compile_seconds
    start = _now(device)
    with compilation(cost):
        yield
        elapsed = _now(device) - start
    cost.seconds += max(elapsed - (cost.compile_seconds - compiled), 0.0)
    cost.tokens += tokens
    if measurable:
        peak = _peak(device) - (held.untyped_storage().nbytes() if held is not None else 0)
        cost.peak_bytes = max(cost.peak_bytes or 0, peak)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
    return time.perf_counter()


def _reset_peak(device: torch.device) -> bool:
    """Start a new high-water mark; False where the system has none that can be reset."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        _CLEAR_REFS.write_text("5")  # Linux: the mark becomes the present resident set
    except OSError:
        return False
    return True


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    kibibytes = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(kibibytes.split()[1]) * 1024
