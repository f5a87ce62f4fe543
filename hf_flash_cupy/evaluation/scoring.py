"""From logits to numbers per token: negative log-likelihoods, and how far two implementations' distributions
are apart.

Logits stay in the model's dtype; only a few rows at a time become float64, so memory does not grow with the
window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# float64 elements of one chunk (8 MiB): small enough for a CPU's cache, large enough to keep a GPU busy.
CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Divergence:
    """Per scored token: ``kl`` = KL(baseline || other) in nats and whether both rank the same token first."""

    kl: Tensor  # (rows,) float64
    same_top1: Tensor  # (rows,) bool
    max_abs_dlogit: float


def _chunks(rows: int, vocab: int) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS // vocab)
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))


def token_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood of each target from a float64 log-softmax.

    Args:
        logits: (rows, vocab), any float dtype.
        targets: (rows,) int64.

    Returns:
        (rows,) float64, in nats, on the CPU.
    """
    import torch

    nll = torch.empty(len(targets), dtype=torch.float64, device=logits.device)
    for rows in _chunks(*logits.shape):
        chunk = logits[rows].double()
        nll[rows] = chunk.logsumexp(-1) - chunk.gather(-1, targets[rows, None]).squeeze(-1)
    return nll.cpu()


def divergence(baseline: Tensor, other: Tensor) -> Divergence:
    """How far ``other`` is from ``baseline``, both (rows, vocab) logits of the same tokens."""
    import torch

    kl, same_top1, largest = [], [], []
    for rows in _chunks(*baseline.shape):
        p, q = baseline[rows].double(), other[rows].double()
        same_top1.append(p.argmax(-1) == q.argmax(-1))
        # Equal infinities (a masked vocabulary entry) differ by nothing, though inf - inf is NaN.
        difference = torch.where(p == q, 0.0, (p - q).abs())
        largest.append(difference.max())  # torch's max keeps a NaN, Python's would lose it
        log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
        weight = log_p.exp()
        kl.append(torch.where(weight == 0, 0.0, weight * (log_p - log_q)).sum(-1))
    return Divergence(torch.cat(kl).cpu(), torch.cat(same_top1).cpu(), float(torch.stack(largest).max()))


def forward_logits(model: Any, input_ids: Tensor, keep: int, takes_logits_to_keep: bool = True) -> Tensor:
    """Logits of the last ``keep`` positions: (batch, keep, vocab). No padding, no cache, so no attention mask
    is needed.
    """
    if takes_logits_to_keep:
        logits: Tensor = model(input_ids=input_ids, use_cache=False, logits_to_keep=keep).logits
    else:
        logits = model(input_ids=input_ids, use_cache=False).logits
    return logits[:, -keep:]
