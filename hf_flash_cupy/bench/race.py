"""Interleaved timing: position and temperature favour nobody."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable

import torch

Run = Callable[[], object]


def balanced_orders(count: int) -> list[list[int]]:
    """Orders in which each runs after each other one equally often (Williams 1949): what ran before sets the clock."""
    zigzag = [0]
    for step in range(1, count):
        zigzag.append((zigzag[-1] + (step if step % 2 else -step)) % count)
    orders = [[(position + shift) % count for position in zigzag] for shift in range(count)]
    return orders if count % 2 == 0 else orders + [order[::-1] for order in orders]


def whole_rounds(rounds: int, count: int) -> int:
    """At least ``rounds``, made whole so that every order of ``count`` participants comes equally often."""
    orders = len(balanced_orders(count))
    return -(-rounds // orders) * orders


def milliseconds(run: Run, calls: int, device: str) -> float:
    """Time of one call, averaged over ``calls`` back to back: CUDA events, or the clock for CPU kernels."""
    if device == "cpu":
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - begin) * 1e3 / calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / calls


class Stopped(Exception):
    """A participant failed inside the race; the others' times would no longer be interleaved."""

    def __init__(self, name: str, error: BaseException) -> None:
        super().__init__(name)
        self.name = name
        self.error = error


def race(runs: dict[str, Run], rounds: int, round_ms: float, device: str, *, least_calls: int = 2) -> dict[str, float]:
    """Median milliseconds of each, every one in turn for ``round_ms``. Raises :class:`Stopped` naming who failed."""
    names = list(runs)
    calls = {name: _calls(name, run, round_ms, device, least_calls) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in names}
    for position in _positions(rounds, len(names)):
        name = names[position]
        times[name].append(_guarded(name, runs[name], calls[name], device))
    return {name: statistics.median(values) for name, values in times.items()}


def _positions(rounds: int, count: int) -> Iterable[int]:
    orders = balanced_orders(count)
    for index in range(whole_rounds(rounds, count)):
        yield from orders[index % len(orders)]


def _calls(name: str, run: Run, round_ms: float, device: str, least: int) -> int:
    """How many calls fill a round. The first call has compiled or chosen what it needs already."""
    few, least = (1, 1) if device == "cpu" else (2 * least - 1, least)
    return max(least, int(round_ms / max(_guarded(name, run, few, device), 1e-6)))


def _guarded(name: str, run: Run, calls: int, device: str) -> float:
    try:
        return milliseconds(run, calls, device)
    except Exception as error:  # whatever a peer raises is its finding
        raise Stopped(name, error) from error
