"""One evaluation by several processes, as ``torchrun`` and ``accelerate launch`` start them.

Batches are formed first and dealt out then, so every window meets the batch shape that it would meet in one process,
and kernels of one machine give it the same bits. Each process has its own copy of the model, on its own GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hf_flash_cupy.evaluation.meters import Cost
from hf_flash_cupy.evaluation.runner import Tally


@dataclass(frozen=True, slots=True)
class Processes:
    """``rank`` is this process's place among ``size``; 0 reports."""

    rank: int = 0
    size: int = 1

    def gather(self, mine: Any) -> list[Any]:
        """What every process hands in, in the order of their ranks; all must come here."""
        if self.size == 1:
            return [mine]
        import torch.distributed as dist

        everyones: list[Any] = [None] * self.size
        dist.all_gather_object(everyones, mine)
        return everyones


def started() -> Processes:
    """What the launcher says of this process; one alone where there is none."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if any(name not in os.environ for name in names):
        return Processes()
    return Processes(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def local_rank() -> int:
    """This process's place on its machine, which is the number of its GPU."""
    return int(os.environ.get("LOCAL_RANK", 0)) if started().size > 1 else 0


@contextmanager
def joined() -> Iterator[Processes]:
    """The processes, able to ``gather`` inside the block. What they exchange are a few numbers a token, on the CPU."""
    processes = started()
    if processes.size == 1:
        yield processes
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        yield processes
    finally:
        dist.destroy_process_group()


def merged(parts: Sequence[Tally]) -> Tally:
    """The tally of one implementation from those of the processes, each of which did other windows.

    Seconds are those of the slowest process, since they ran at once; memory is that of the largest.
    """
    whole = Tally.empty(parts[0].attn, len(parts[0].nll))
    for part in parts:
        for index, (nll, kl) in enumerate(zip(part.nll, part.kl, strict=True)):
            whole.nll[index] = nll if whole.nll[index] is None else whole.nll[index]
            whole.kl[index] = kl if whole.kl[index] is None else whole.kl[index]
    whole.same_top1 = sum(part.same_top1 for part in parts)
    whole.max_abs_dlogit = max(part.max_abs_dlogit for part in parts)
    peaks = [part.cost.peak_bytes for part in parts if part.cost.peak_bytes is not None]
    whole.cost = Cost(
        seconds=max(part.cost.seconds for part in parts),
        tokens=sum(part.cost.tokens for part in parts),
        peak_bytes=max(peaks, default=None),
        compile_seconds=sum(part.cost.compile_seconds for part in parts),
        cache_hits=sum(part.cost.cache_hits for part in parts),
    )
    return whole
