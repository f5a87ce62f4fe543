"""Device memory that outlives the call which is the first to need it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def lasting_zeros(count: int, device: torch.device) -> Tensor:
    """int32 zeros that work on the current stream may use from now on, and that the caller may keep.

    torch.compile's CUDA graphs warm up and record with all that their thread allocates in a pool of their own, and
    refuse what is kept there: the memory is another thread's.
    """

    def make() -> tuple[Tensor, torch.cuda.Event]:
        with torch.cuda.device(device):
            made = torch.zeros(count, dtype=torch.int32, device=device)
            return made, torch.cuda.current_stream().record_event()

    stream = torch.cuda.current_stream(device)
    made, ready = on_another_thread(make)
    stream.wait_event(ready)
    made.record_stream(stream)  # or, once let go, it could be used again before this stream is done with it
    return made


def on_another_thread(make: Callable[[], T]) -> T:
    """What ``make`` returns or raises."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(make).result()
