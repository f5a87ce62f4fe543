"""Attention masks as one key interval per query row: what Transformers' S × S masks nearly always are.

``KeyIntervals`` is the description; ``IntervalMask`` lends it the looks of the bool tensor that model code
expects.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class KeyIntervals:
    """Query row i (at key position ``p = i + shift``) attends the keys j of all of these:

    ``p - left <= j <= p + right``, ``lo <= j < hi``, ``0 <= j < seqlen_k``, and ``key_mask[j]``.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    device: torch.device
    shift: int | Tensor = 0  # key position of query row 0; a 0-dim tensor with static caches
    left: int | None = None  # keys before the row's own, None: all
    right: int | None = None  # keys after the row's own, None: all
    lo: Tensor | None = None  # int64 (batch or 1, seqlen_q or 1)
    hi: Tensor | None = None  # int64 (batch or 1, seqlen_q or 1)
    key_mask: Tensor | None = None  # bool (batch or 1, seqlen_k): padding that has holes
    # int32 (sequences + 1,), if lo and hi are those of sequences packed into one row: where each begins, the last ends
    offsets: Tensor | None = None

    @property
    def window_size(self) -> tuple[int, int] | None:
        """(left, right), −1 = unbounded, if a bottom-right aligned window says all but ``key_mask``."""
        aligned = isinstance(self.shift, int) and self.shift == self.seqlen_k - self.seqlen_q
        unbounded = self.left is None and self.right is None
        if self.lo is not None or self.hi is not None or not (aligned or unbounded):
            return None
        return (-1 if self.left is None else self.left, -1 if self.right is None else self.right)

    @cached_property
    def intervals(self) -> Tensor:
        """int32 (batch or 1, 1, seqlen_q, 2): ``[lo, hi)`` of every row, within ``[0, seqlen_k]``."""
        row = torch.arange(self.seqlen_q, device=self.device)[None] + self.shift  # (1, seqlen_q)
        lo, hi = torch.zeros_like(row), torch.full_like(row, self.seqlen_k)
        if self.left is not None:
            lo = torch.maximum(lo, row - self.left)
        if self.right is not None:
            hi = torch.minimum(hi, row + (self.right + 1))
        if self.lo is not None:
            lo = torch.maximum(lo, self.lo)
        if self.hi is not None:
            hi = torch.minimum(hi, self.hi)
        lo = lo.clamp(max=self.seqlen_k)
        hi = torch.maximum(lo, hi)  # has both batches
        return torch.stack((lo.expand_as(hi), hi), dim=-1).to(torch.int32)[:, None]

    def dense(self) -> Tensor:
        """bool (batch, 1, seqlen_q, seqlen_k), True = attend."""
        key = torch.arange(self.seqlen_k, device=self.device)
        mask = (key >= self.intervals[..., :1]) & (key < self.intervals[..., 1:])
        if self.key_mask is not None:
            mask = mask & self.key_mask[:, None, None, :]
        return mask.expand(self.batch, -1, -1, -1)

    def within(self, lo: Tensor, hi: Tensor) -> KeyIntervals:
        """Only the keys ``lo <= j < hi``, each int64 (batch or 1, seqlen_q or 1)."""
        lo = lo if self.lo is None else torch.maximum(self.lo, lo)
        hi = hi if self.hi is None else torch.minimum(self.hi, hi)
        return replace(self, lo=lo, hi=hi, offsets=None)

    def take_batch(self, start: int, stop: int) -> KeyIntervals:
        def take(x: Tensor | None) -> Tensor | None:
            return x if x is None or x.shape[0] == 1 else x[start:stop]

        lo, hi, key_mask = take(self.lo), take(self.hi), take(self.key_mask)
        return replace(self, batch=stop - start, lo=lo, hi=hi, key_mask=key_mask, offsets=None)

    def take_rows(self, start: int, stop: int) -> KeyIntervals:
        def take(x: Tensor | None) -> Tensor | None:
            return x if x is None or x.shape[1] == 1 else x[:, start:stop]

        moved = self.shift + start
        lo, hi = take(self.lo), take(self.hi)
        return replace(self, seqlen_q=stop - start, shift=moved, lo=lo, hi=hi, offsets=None)

    def take_keys(self, start: int, stop: int) -> KeyIntervals:
        return replace(
            self,
            seqlen_k=stop - start,
            shift=self.shift - start,
            lo=None if self.lo is None else self.lo - start,
            hi=None if self.hi is None else self.hi - start,
            key_mask=None if self.key_mask is None else self.key_mask[:, start:stop],
            offsets=None,
        )

    def to(self, device: torch.device) -> KeyIntervals:
        def move(x: Any) -> Any:
            return x.to(device) if isinstance(x, Tensor) else x

        moved = {name: move(getattr(self, name)) for name in ("shift", "lo", "hi", "key_mask", "offsets")}
        return replace(self, device=device, **moved)


class IntervalMask(Tensor):
    """A ``KeyIntervals`` that model code may treat as its bool (batch, 1, seqlen_q, seqlen_k) attention mask.

    A subclass, because Transformers lets nothing but four-dimensional tensors through its mask interface, and
    models slice, move and join masks. Slices and moves stay compact; other operations see the dense tensor.
    """

    described: KeyIntervals | None  # None: someone holds a view of the dense tensor, which then counts alone
    _dense: Tensor | None
    _derived: bool

    @staticmethod
    def __new__(cls, described: KeyIntervals, derived: bool = False) -> IntervalMask:
        shape = (described.batch, 1, described.seqlen_q, described.seqlen_k)
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=described.device)
        mask.described = described
        mask._dense = None
        mask._derived = derived
        return mask

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"IntervalMask(shape={tuple(self.shape)}, {self.described})"

    def dense(self) -> Tensor:
        """bool (batch, 1, seqlen_q, seqlen_k); made once."""
        if self._dense is None:
            assert self.described is not None
            self._dense = self.described.dense().contiguous()  # an expanded tensor could not be written to
        return self._dense

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], IntervalMask) else None
        if first is not None and first.described is not None and func in _COMPACT:
            described = _COMPACT[func](first.described, *args[1:], **kwargs)
            if described is not None:
                return IntervalMask(described, derived=True)
        if first is not None and first._derived and func._schema.is_mutable:
            raise RuntimeError("This part of an attention mask has memory of its own: clone() it before writing.")
        if func in _ADDITIONS:
            # Only code written for additive masks adds to a mask: hidden keys must become very negative.
            args = tuple(_additive(x, args) for x in args)
        shares_memory = any(result.alias_info is not None for result in func._schema.returns)

        def plain(x: Any) -> Any:
            if not isinstance(x, IntervalMask):
                return x
            dense = x.dense()
            x.described = None if shares_memory else x.described
            return dense

        args, kwargs = torch.utils._pytree.tree_map(plain, (args, kwargs))
        return func(*args, **kwargs)


def _additive(x: Any, operands: tuple[Any, ...]) -> Any:
    floats = [y.dtype for y in operands if isinstance(y, Tensor) and y.is_floating_point()]
    if not isinstance(x, IntervalMask) or not floats:
        return x
    zero = torch.zeros((), dtype=floats[0], device=x.device)
    return torch.where(x.dense(), zero, torch.finfo(floats[0]).min)


def _same(described: KeyIntervals) -> KeyIntervals:
    return described


def _moved(described: KeyIntervals, **kwargs: Any) -> KeyIntervals | None:
    if kwargs.get("dtype") not in (None, torch.bool):
        return None
    device = kwargs.get("device")
    return _same(described) if device is None else described.to(torch.device(device))


def _sliced(
    described: KeyIntervals, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> KeyIntervals | None:
    sizes = (described.batch, 1, described.seqlen_q, described.seqlen_k)
    dim %= 4
    first, last, _ = slice(start, end).indices(sizes[dim])
    if step != 1:
        return None
    last = max(first, last)
    if dim == 1:
        return _same(described) if last - first == 1 else None
    take = (described.take_batch, None, described.take_rows, described.take_keys)[dim]
    return take(first, last) if take else None


_aten = torch.ops.aten
# detach and alias give a new wrapper: returning the same one breaks autograd's view checks.
_COMPACT: dict[Any, Any] = {
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten._to_copy.default: _moved,
    _aten.slice.Tensor: _sliced,
}
_ADDITIONS = (_aten.add.Tensor, _aten.add_.Tensor)
