"""Transformers' mask closures read as key ranges.

``transformers.masking_utils`` composes masks from a dozen small functions ``(batch, head, q, kv) -> bool``.
Evaluated, they cost S × S; read, they are one key range per query row. Only functions known by name are read;
everything else raises ``NotARange`` and is evaluated by Transformers itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

_FAR = 1 << 40  # beyond every key position, far from overflowing int64


class NotARange(Exception):
    """The closure is unknown here, or no single range per row can express it."""


@dataclass(frozen=True)
class KeyRange:
    """The row at position p attends the keys j with ``p - left <= j <= p + right`` and ``lo <= j < hi``."""

    left: int | None = None
    right: int | None = None
    lo: Tensor | None = None  # int64 (batch or 1, seqlen_q or 1)
    hi: Tensor | None = None

    def __and__(self, other: KeyRange) -> KeyRange:
        return KeyRange(
            left=_both(min, self.left, other.left),
            right=_both(min, self.right, other.right),
            lo=_both(torch.maximum, self.lo, other.lo),
            hi=_both(torch.minimum, self.hi, other.hi),
        )

    def bounds(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """``lo, hi`` (batch or 1, seqlen_q) of rows at ``position``, everything included."""
        lo = torch.full_like(position, -_FAR) if self.left is None else position - self.left
        hi = torch.full_like(position, _FAR) if self.right is None else position + (self.right + 1)
        lo = lo if self.lo is None else torch.maximum(lo, self.lo)
        hi = hi if self.hi is None else torch.minimum(hi, self.hi)
        return lo, hi


def _both(join: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else join(a, b)


@dataclass(frozen=True, eq=False)
class Reading:
    """What the functions need to know of where they stand, and what they leave to be checked."""

    seqlen_q: int
    offset: int | Tensor  # q index of row 0
    device: torch.device
    in_order: bool  # packed ids come from Transformers' own cumulative sum, not from a user
    packed: bool = False  # an enclosing "and" keeps every row within its packed sequence
    restarting: Tensor | None = None  # int64 (batch, seqlen_q): the q index of every row, if no plain count
    checks: list[Tensor] = field(default_factory=list)  # 0-dim bool: the range is exact if all hold

    @cached_property
    def position(self) -> Tensor:
        """int64 (batch or 1, seqlen_q): the q index of every row. Made on demand: most masks need none."""
        if self.restarting is not None:
            return self.restarting
        return torch.arange(self.seqlen_q, device=self.device)[None] + self.offset


def read(function: Callable[..., Any], reading: Reading) -> KeyRange:
    """The key range of every row. Raises ``NotARange``; exact only if ``reading.checks`` hold."""
    reader = _READERS.get(_name(function))
    if reader is None:
        raise NotARange(_name(function))
    try:
        return reader(_captured(function), reading)
    except KeyError as missing:  # another Transformers version captures other variables
        raise NotARange(f"{_name(function)} without {missing}") from None


def structure(function: Callable[..., Any]) -> str:
    """The nested names of a closure that ``read`` understood: of equal structure means equally read."""
    inner: list[Any] = []
    for value in _captured(function).values():
        inner.extend(value if isinstance(value, tuple) else (value,))
    names = ", ".join(structure(x) for x in inner if callable(x) and not isinstance(x, Tensor))
    return f"{_name(function)}({names})"


def _name(function: Callable[..., Any]) -> str:
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", repr(function))
    return name if module == "transformers.masking_utils" else f"{module}.{name}"


def _captured(function: Callable[..., Any]) -> dict[str, Any]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if not code or not cells:
        return {}
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True))


# --- the functions


def _causal(_: dict[str, Any], reading: Reading) -> KeyRange:
    return KeyRange(right=0)


def _all_keys(_: dict[str, Any], reading: Reading) -> KeyRange:
    return KeyRange()


def _window(captured: dict[str, Any], reading: Reading) -> KeyRange:
    return KeyRange(left=_size(captured["sliding_window"]) - 1)  # kv > q - W: W keys, its own included


def _window_both_sides(captured: dict[str, Any], reading: Reading) -> KeyRange:
    width = _size(captured["sliding_window"])  # |q - kv| <= W
    return KeyRange(left=width, right=width)


def _chunk(captured: dict[str, Any], reading: Reading) -> KeyRange:
    """Llama 4: chunks of equal size, counted from the first token after the left padding."""
    size, padding = _size(captured["chunk_size"]), captured["left_padding"][:, None]  # (batch, 1)
    start = padding + (reading.position - padding).div(size, rounding_mode="floor") * size
    return KeyRange(lo=start, hi=start + size)


def _block(captured: dict[str, Any], reading: Reading) -> KeyRange:
    """Image tokens: a row with an id >= 0 attends its whole block, one without attends nothing here."""
    ids = captured["block_sequence_ids"]  # (batch, length)
    reading.checks.append(_one_run_each(ids, ids >= 0))
    lo, hi = (_at(x, reading.position) for x in _runs(ids))
    return KeyRange(lo=lo, hi=torch.where(_at(ids, reading.position) >= 0, hi, lo))


def _packed(captured: dict[str, Any], reading: Reading) -> KeyRange:
    ids = captured["packed_sequence_mask"]  # (batch, length)
    if not reading.in_order:
        reading.checks.append(_one_run_each(ids, torch.ones_like(ids, dtype=torch.bool)))
    lo, hi = (_at(x, reading.position) for x in _runs(ids))
    return KeyRange(lo=lo, hi=hi)


def _restarting_positions(captured: dict[str, Any], reading: Reading) -> KeyRange:
    """The inner mask over each packed sequence's own positions: they rise by one within a sequence, so its
    range
    only moves; beyond the sequence it would be wrong, hence the demand for an enclosing packed mask.
    """
    if not reading.packed:
        raise NotARange("restarting positions without a packed mask around them")
    own = _at(captured["position_ids"], reading.position)  # (batch, seqlen_q)
    inner = read(captured["mask_function"], replace(reading, restarting=own, packed=False))
    moved = reading.position - own
    return replace(
        inner,
        lo=None if inner.lo is None else inner.lo + moved,
        hi=None if inner.hi is None else inner.hi + moved,
    )


def _padding(captured: dict[str, Any], reading: Reading) -> KeyRange:
    keep = captured["padding_mask"]  # (batch, length)
    lo, hi, whole = hull(keep)
    reading.checks.append(whole.all())
    return KeyRange(lo=lo, hi=hi)


def _and(captured: dict[str, Any], reading: Reading) -> KeyRange:
    parts = captured["mask_functions"]
    if not reading.packed and any(_name(part) == PACKED for part in parts):
        reading = replace(reading, packed=True)
    result = KeyRange()
    for part in parts:
        result = result & read(part, reading)
    return result


def _or(captured: dict[str, Any], reading: Reading) -> KeyRange:
    """The union is a range where the two overlap or touch, or where one of them is empty."""
    first, *others = (read(part, reading).bounds(reading.position) for part in captured["mask_functions"])
    lo, hi = first
    for lo_b, hi_b in others:
        empty_a, empty_b = hi <= lo, hi_b <= lo_b
        touching = torch.maximum(lo, lo_b) <= torch.minimum(hi, hi_b)
        reading.checks.append((empty_a | empty_b | touching).all())
        union_lo = torch.where(empty_a, lo_b, torch.where(empty_b, lo, torch.minimum(lo, lo_b)))
        hi = torch.where(empty_a, hi_b, torch.where(empty_b, hi, torch.maximum(hi, hi_b)))
        lo = union_lo
    return KeyRange(lo=lo, hi=hi)


PACKED = "packed_sequence_mask_function.<locals>.inner_mask"
_READERS: dict[str, Callable[[dict[str, Any], Reading], KeyRange]] = {
    "causal_mask_function": _causal,
    "bidirectional_mask_function": _all_keys,
    "sliding_window_overlay.<locals>.inner_mask": _window,
    "sliding_window_bidirectional_overlay.<locals>.inner_mask": _window_both_sides,
    "chunked_overlay.<locals>.inner_mask": _chunk,
    "blockwise_overlay.<locals>.inner_mask": _block,
    "padding_mask_function.<locals>.inner_mask": _padding,
    PACKED: _packed,
    "remap_positions_for_packed_sequence.<locals>.inner_mask": _restarting_positions,
    "and_masks.<locals>.and_mask": _and,
    "or_masks.<locals>.or_mask": _or,
}


# --- their arithmetic


def _size(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise NotARange(f"a size of {value!r}")
    return value


def _at(table: Tensor, position: Tensor) -> Tensor:
    """``table[b, position]``: (batch or 1, seqlen_q) from (batch, length) at (batch or 1, seqlen_q)."""
    if position.shape[0] == 1:
        return table[:, position[0]]
    return table.expand(position.shape[0], -1).gather(1, position)


def _runs(ids: Tensor) -> tuple[Tensor, Tensor]:
    """First and one-past-last index of the run of equal ids around every element, (batch, length)."""
    index = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    changes = ids[:, 1:] != ids[:, :-1]
    edge = torch.ones_like(ids[:, :1], dtype=torch.bool)
    first = torch.where(torch.cat((edge, changes), 1), index, 0).cummax(1).values
    last = torch.where(torch.cat((changes, edge), 1), index, _FAR).flip(1).cummin(1).values.flip(1)
    return first, last + 1


def _one_run_each(ids: Tensor, matter: Tensor) -> Tensor:
    """0-dim bool: no id among those that matter occurs in two separate runs."""
    starts = torch.cat((torch.ones_like(matter[:, :1]), ids[:, 1:] != ids[:, :-1]), 1) & matter
    floor = torch.iinfo(torch.int64).min
    heads = torch.where(starts, ids.long(), floor).sort(1).values
    return ~((heads[:, 1:] == heads[:, :-1]) & (heads[:, 1:] != floor)).any()


def hull(keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``lo, hi`` (batch, 1) around the True of (batch, length), and whether all between are True (batch,)."""
    count = keep.sum(1, keepdim=True)
    length = keep.shape[1]
    index = torch.arange(length, device=keep.device)
    lo = torch.where(keep, index, length).amin(1, keepdim=True)
    hi = torch.where(keep, index + 1, 0).amax(1, keepdim=True)
    lo = torch.minimum(lo, hi)
    return lo, hi, (hi - lo == count)[:, 0]
