"""``rearrange`` and ``repeat`` for machines without einops: the part of its patterns that flash-attn's tests use."""

from __future__ import annotations

import re
from math import prod

from torch import Tensor


def repeat(x: Tensor, pattern: str, **sizes: int) -> Tensor:
    """``x`` with its axes named, split, merged, reordered and repeated, e.g. ``"b s h d -> b s (h g) d", g=2``."""
    left, right = (_groups(side, x.dim()) for side in pattern.split("->"))
    if "..." in pattern:
        others = [[f"...{i}"] for i in range(x.dim() - len(left) + 1)]
        left, right = (_spread(side, others) for side in (left, right))
    for group, size in zip(left, x.shape, strict=True):
        unknown = [axis for axis in group if axis not in sizes]
        if unknown:
            (axis,) = unknown
            sizes[axis] = size // prod(sizes[other] for other in group if other != axis)
    names = [axis for group in left for axis in group if not axis[0].isdigit()]  # the 1s of the left side vanish
    x = x.reshape([sizes[axis] for axis in names])
    wanted = [axis for group in right for axis in group]
    for axis in wanted:
        if axis not in names:  # a new axis: of size 1, a number, or one that repeats
            sizes.setdefault(axis, int(axis.partition("@")[0]) if axis[0].isdigit() else 1)
            x = x.unsqueeze(-1).expand(*x.shape, sizes[axis])
            names.append(axis)
    x = x.permute([names.index(axis) for axis in wanted])
    return x.reshape([prod(sizes[axis] for axis in group) for group in right])


rearrange = repeat


def _groups(side: str, dimensions: int) -> list[list[str]]:
    """The axes that each dimension consists of; numbers, which may occur twice, get names of their own."""
    found = [(merged or single).split() for merged, single in re.findall(r"\(([^)]*)\)|(\S+)", side)]
    return [
        [f"{axis}@{i}.{j}" if axis.isdigit() else axis for j, axis in enumerate(group)] for i, group in enumerate(found)
    ]


def _spread(side: list[list[str]], others: list[list[str]]) -> list[list[str]]:
    place = side.index(["..."])
    return side[:place] + others + side[place + 1 :]
