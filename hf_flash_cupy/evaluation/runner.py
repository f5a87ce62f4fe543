"""The loop: every window through every attention implementation, each compared with the first on the spot.

Only the baseline's logits of the current batch are kept; per token a few numbers remain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hf_flash_cupy.evaluation import meters
from hf_flash_cupy.evaluation.model import switch_attn, takes_logits_to_keep
from hf_flash_cupy.evaluation.outcome import NumericalFailure
from hf_flash_cupy.evaluation.protocols import Window
from hf_flash_cupy.evaluation.scoring import divergence, forward_logits, token_nll
from hf_flash_cupy.evaluation.statistics import Floats

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Plan:
    """What is evaluated: the windows of a token stream, and how they are fed."""

    ids: NDArray[np.int64]
    windows: Sequence[Window]
    context: int
    prefix: tuple[int, ...] = ()
    batch_size: int = 1

    def row(self, window: Window) -> list[int]:
        """The window's tokens, the prefix in front. One more than the model is fed where ``lm-eval`` never
        feeds the last.
        """
        return [*(self.prefix if window.prefixed else ()), *self.ids[window.begin : window.end].tolist()]

    def batches(self) -> Iterator[list[int]]:
        """Indices of windows of equal shape, so that no row is padded; the first of each batch in order."""
        waiting: dict[tuple[int, int], list[int]] = {}
        for index, window in enumerate(self.windows):
            shape = (len(self.row(window)), window.scored)
            batch = waiting.setdefault(shape, [])
            batch.append(index)
            if len(batch) == self.batch_size:
                yield waiting.pop(shape)
        yield from waiting.values()


@dataclass(slots=True)
class Tally:
    """What one implementation gave: per window a list entry (None until it is done), and totals."""

    attn: str
    nll: list[Floats | None]
    kl: list[Floats | None]
    same_top1: int = 0
    max_abs_dlogit: float = 0.0
    cost: meters.Cost = field(default_factory=meters.Cost)

    @classmethod
    def empty(cls, attn: str, windows: int) -> Tally:
        return cls(attn, [None] * windows, [None] * windows)


# Called after each batch with the plan, the indices of its windows, and all tallies so far.
Progress = Callable[[Plan, Sequence[int], Sequence[Tally]], None]


class Runner:
    """Evaluates ``attns`` on ``plan``; ``tallies`` is valid at any moment, also after an interruption."""

    def __init__(self, model: Any, plan: Plan, attns: Sequence[str], rank: int = 0, size: int = 1) -> None:
        """``rank`` of ``size`` processes, each of which does every ``size``-th batch."""
        self.model, self.plan, self.attns = model, plan, list(attns)
        self.batches = list(islice(plan.batches(), rank, None, size))
        self.tallies = {name: Tally.empty(name, len(plan.windows)) for name in attns}
        self._takes_logits_to_keep = takes_logits_to_keep(model)

    def warm_up(self, repeats: int) -> None:
        """Untimed passes of the first batch, so that first-call costs stay out of the speed."""
        for name in self.attns:
            for _ in range(repeats):
                self._logits(name, next(self.plan.batches()))
            self.tallies[name].cost.forget_speed()

    def run(self, progress: Progress = lambda _plan, _batch, _tallies: None) -> None:
        """Evaluate every window of this process.

        Raises:
            NumericalFailure: a scored token's nll is not finite.
        """
        for batch in self.batches:
            baseline: Tensor | None = None
            for name in self.attns:
                logits = self._logits(name, batch, held=baseline)
                self._score(self.tallies[name], batch, logits)
                if baseline is None:
                    baseline = logits
                else:
                    self._compare(self.tallies[name], batch, baseline, logits)
                del logits  # or it would be counted in the next pass's peak
            progress(self.plan, batch, list(self.tallies.values()))

    def _logits(self, name: str, batch: list[int], held: Tensor | None = None) -> Tensor:
        """Logits that predict the scored tokens of ``batch``: (batch, scored, vocab)."""
        import torch

        rows = [self.plan.row(self.plan.windows[index]) for index in batch]
        scored = self.plan.windows[batch[0]].scored
        fed = [row[: self.plan.context] for row in rows]
        device = next(self.model.parameters()).device
        input_ids = torch.tensor(fed, device=device)
        # The last position fed predicts nothing that is scored, unless the last token was not fed.
        unused = 1 if len(fed[0]) == len(rows[0]) else 0
        switch_attn(self.model, name)
        with torch.inference_mode(), meters.measure(self.tallies[name].cost, device, input_ids.numel(), held):
            logits = forward_logits(self.model, input_ids, scored + unused, self._takes_logits_to_keep)
        return logits[:, :scored]

    def _score(self, tally: Tally, batch: list[int], logits: Tensor) -> None:
        import torch

        for index, rows in zip(batch, logits, strict=True):
            window = self.plan.windows[index]
            targets = torch.from_numpy(self.plan.ids[window.scored_from : window.end]).to(logits.device)
            nll = token_nll(rows, targets).numpy()
            if not np.isfinite(nll).all():
                first = int(np.flatnonzero(~np.isfinite(nll))[0])
                raise NumericalFailure(tally.attn, index, window.scored_from + first, float(nll[first]))
            tally.nll[index] = nll

    @staticmethod
    def _compare(tally: Tally, batch: list[int], baseline: Tensor, logits: Tensor) -> None:
        for index, expected, found in zip(batch, baseline, logits, strict=True):
            difference = divergence(expected, found)
            tally.kl[index] = difference.kl.numpy()
            tally.same_top1 += int(difference.same_top1.sum())
            tally.max_abs_dlogit = max(tally.max_abs_dlogit, difference.max_abs_dlogit)
