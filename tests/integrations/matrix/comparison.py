"""When two results of a model count as equal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Tolerance:
    """float32: a share of the largest value. Lower precisions: twice eager's own distance from float32's truth. One
    parameter's gradient may have five times, for an activation function that turns at another point moves it whole, as
    long as all parameters' on average keep to two.
    """

    dtype: torch.dtype
    training: bool = False
    discrete: bool = False  # the model chooses experts or keys: where rounding turns a choice, that position is another

    @property
    def exact(self) -> bool:
        return self.dtype == torch.float32

    @property
    def floor(self) -> float:
        """Relative error that nobody can be asked to stay below."""
        return 4 * torch.finfo(self.dtype).eps

    @property
    def rounding(self) -> float:
        """Share of the largest gradient that another's may be off: it is the sum of parts as large as that one.

        In lower precisions FlashAttention takes delta = Σ dO·O from the rounded output (Dao et al. 2022, Algorithm 4,
        line 19), which shows where the values of all keys are nearly equal and dP − delta nearly nothing.
        """
        if not self.training:
            return 0.0
        return 1e-6 if self.exact else torch.finfo(self.dtype).eps / 8

    def allowed(self, truth: Tensor, peer: Tensor) -> float:
        if self.exact:
            return (5e-4 if self.training else 1e-4) * float(truth.abs().max())
        return (5 if self.training else 2) * self.distance(peer, truth) + self.floor * _rms(truth)

    def distance(self, x: Tensor, truth: Tensor) -> float:
        """float32: the worst element's. Else the root of the mean square, since one element's error is rounding's luck;
        of a model that chooses, the median position's.
        """
        if self.exact:
            return float((x - truth).abs().max())
        if self.discrete and x.dim() > 1:
            return float((x - truth).square().mean(-1).sqrt().median())
        return _rms(x - truth)


@dataclass(frozen=True)
class Verdict:
    """Ours against the truth, beside what eager of the same precision makes of it."""

    ours: Results
    truth: Results
    peer: Results

    def judge(self, tolerance: Tolerance) -> str:
        """ "ok", or which tensor is how far off."""
        if not self.truth:
            return "nothing to compare"
        if self.ours.keys() != self.truth.keys():
            return f"other outputs: {sorted(self.ours.keys() ^ self.truth.keys())[:3]}"
        worst, where = 0.0, ""
        largest = self._largest()
        relative: list[tuple[float, float]] = []  # ours, eager's
        for name, ours, truth, peer in self._pairs():
            if ours.shape != truth.shape or not torch.equal(ours.isfinite(), truth.isfinite()):
                return f"{name}: shape {tuple(ours.shape)} for {tuple(truth.shape)}, or not finite"
            ours, truth, peer = (torch.where(truth.isfinite(), x, 0) for x in (ours, truth, peer))
            allowed = tolerance.allowed(truth, peer) + tolerance.rounding * largest
            excess = tolerance.distance(ours, truth) / (allowed + 1e-30)
            if not excess <= worst:
                worst, where = excess, name
            if _rms(truth) > tolerance.rounding * largest:
                relative.append((_rms(ours - truth) / _rms(truth), _rms(peer - truth) / _rms(truth)))
        if worst > 1:
            return f"differs: {where} {worst:.3g} × what is allowed"
        if tolerance.exact or not tolerance.training:
            return "ok"
        of_ours, of_peer = (sum(errors) / len(relative) for errors in zip(*relative, strict=True))
        if of_ours > 2 * of_peer + tolerance.floor:
            return f"differs: gradients are off by {of_ours:.3g} on average, eager's by {of_peer:.3g}"
        return "ok"

    def _pairs(self) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        """What counts, in float32: steps of equal history, gradients that are more than rounding error."""
        largest = self._largest()
        for name in self.truth:
            ours, truth, peer = (x[name].float() for x in (self.ours, self.truth, self.peer))
            if name == "logits" and "tokens" in self.truth:
                ours, truth, peer = (x[self._agreeing()] for x in (ours, truth, peer))
            # A bias of keys has a gradient of zero, since softmax takes it out: what is computed is rounding error.
            if name != "tokens" and float(truth.abs().max()) > 1e-5 * largest:
                yield name, ours, truth, peer

    def _largest(self) -> float:
        return max(float(x.abs().max()) for x in self.truth.values())

    def _agreeing(self) -> Tensor:
        """bool (batch, steps): steps whose history is the same in all three. After a tie they may go apart."""
        same = (self.ours["tokens"] == self.truth["tokens"]) & (self.peer["tokens"] == self.truth["tokens"])
        before = torch.cat((torch.ones_like(same[:, :1]), same[:, :-1]), 1)
        return before.long().cumprod(1).bool()


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())
