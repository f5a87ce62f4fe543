"""The kernels' dropout mask by torch operations: Philox4x32-7 (Salmon et al. 2011) as attn/dropout.cuh draws it."""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def threshold(dropout_p: float) -> int:
    """A probability is dropped where its 16 random bits are below this."""
    return min(round(dropout_p * 65536), 65535)


def exact_p(dropout_p: float) -> float:
    """The probability of being dropped that 16 bits can express."""
    return threshold(dropout_p) / 65536


def kept(philox: Tensor, shape: tuple[int, int, int, int], dropout_p: float, first_entry: int = 0) -> Tensor:
    """Bool (batch, num_heads, seqlen_q, seqlen_k) on philox's device, True where kept; entries from ``first_entry``.

    ``philox``: int64 {seed, offset}.
    """
    batch, num_heads, seqlen_q, seqlen_k = shape
    seed, offset = (word & (2**64 - 1) for word in philox.tolist())
    device = philox.device
    rows, keys = torch.arange(seqlen_q, device=device)[:, None], torch.arange(seqlen_k, device=device)
    pairs = torch.arange(batch * num_heads, device=device).view(batch, num_heads, 1, 1) + first_entry * num_heads
    # One call serves rows r, r + 8 and keys 2t, 2t + 1, 2t + 8, 2t + 9 of a tile of 16 by 16.
    counter = [
        rows // 16 * 8 + rows % 8,
        keys // 16 * 4 + keys % 8 // 2,
        pairs,
        torch.tensor(offset & _WORD, device=device),
    ]
    words = philox4x32(counter, (seed & _WORD, seed >> 32 ^ offset >> 32), rounds=7)
    which = (rows % 16 // 8 * 2 + keys % 16 // 8).expand(batch, num_heads, -1, -1)
    stacked = torch.stack([word.expand(shape) for word in words])
    word = stacked.gather(0, which[None])[0]
    return (word >> (keys % 2 * 16) & 0xFFFF) >= threshold(dropout_p)


def philox4x32(counter: list[Tensor], key: tuple[int, int], rounds: int) -> list[Tensor]:
    """Four words of int64 holding 32 bits each → four random ones."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return [c0, c1, c2, c3]


def _multiply(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a product of 32-bit words, in halves that no int64 overflows."""
    low, high = (x & 0xFFFF) * factor, (x >> 16) * factor
    middle = (low >> 16) + high
    return middle >> 16, (middle & 0xFFFF) << 16 | low & 0xFFFF
