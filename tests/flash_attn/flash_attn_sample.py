"""pytest plugin: a seeded sample of the cases of flash-attn's own test file, on this package's kernels.

Cases are drawn before pytest builds them: the file has more than a million.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import stand_in

# Of flash-attn's inside; an error that only waiting for the GPU could find; packed queries with pages, refused.
LEFT_OUT = ("generator_arg", "block_table_bounds", "varlen_paged")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("flash-attn")
    group.addoption("--cases", type=int, default=3000, help="how many cases to draw (default: 3000)")
    group.addoption("--seed", type=int, default=0, help="of the drawing (default: 0)")


def pytest_configure(config: pytest.Config) -> None:
    stand_in.install()
    if not torch.cuda.is_available():  # the file asks for it on import
        torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Module | None:
    if module_path not in [Path(argument).resolve() for argument in parent.config.args]:
        return None  # a neighbour of the file: pytest looks at all that lie in its folders
    module = pytest.Module.from_parent(parent, path=module_path)
    draw(module.obj, module.config.getoption("cases"), module.config.getoption("seed"))
    return module


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_runtest_teardown() -> None:
    """Gives memory back that other processes of the same run may want."""
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2 << 30:
        torch.cuda.empty_cache()


def draw(module: Any, cases: int, seed: int) -> None:
    """Leaves of the module's test functions only drawn cases: as many of each, or all there are."""
    grids = {}
    for name, function in list(vars(module).items()):
        if not name.startswith("test_") or not callable(function):
            continue
        if any(word in name for word in LEFT_OUT):
            delattr(module, name)
        else:
            grids[name] = Grid(function)
    for (name, grid), count in zip(grids.items(), share([grid.size for grid in grids.values()], cases), strict=True):
        grid.keep(count, random.Random(f"{seed} {name}"))


def share(sizes: list[int], total: int) -> list[int]:
    """At least ``total`` (or all there are) over functions of ``sizes`` cases: equal numbers, small ones whole."""
    quota = 0
    while sum(min(size, quota) for size in sizes) < min(total, sum(sizes)):
        quota += 1
    return [min(size, quota) for size in sizes]


class Grid:
    """The parameters of a test function, every combination of which is a case."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        marks = getattr(function, "pytestmark", [])
        self.others = [mark for mark in marks if mark.name != "parametrize"]
        self.axes = [self._axis(*mark.args) for mark in marks if mark.name == "parametrize"]
        self.size = sum(1 for _ in self._runnable()) if self._small() else self._product()

    @staticmethod
    def _axis(names: str | tuple[str, ...], values: Any) -> list[dict[str, Any]]:
        split = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        return [dict(zip(split, value if len(split) > 1 else (value,), strict=True)) for value in values]

    def _product(self) -> int:
        return math.prod(map(len, self.axes))

    def _small(self) -> bool:
        return self._product() <= 20_000

    def _case(self, index: int) -> dict[str, Any]:
        case: dict[str, Any] = {}
        for axis in self.axes:
            index, place = divmod(index, len(axis))
            case |= axis[place]
        return case

    def _runnable(self) -> Iterator[int]:
        return (index for index in range(self._product()) if runs(self._case(index)))

    def keep(self, count: int, generator: random.Random) -> None:
        """Replaces the grid by ``count`` cases of it."""
        if not self.axes:
            return
        indices = list(self._runnable()) if self._small() else range(self._product())
        drawn: dict[int, dict[str, Any]] = {}
        while len(drawn) < count:
            index = generator.choice(indices)
            case = self._case(index)
            if runs(case):
                drawn[index] = case
        names = list(self._case(0))
        rows = [tuple(case[name] for name in names) for _, case in sorted(drawn.items())]
        self.function.pytestmark = [*self.others, pytest.mark.parametrize(names, rows).mark]  # type: ignore[attr-defined]


def runs(case: dict[str, Any]) -> bool:
    """Not skipped by the test itself, and pages only where keys are appended to a cache."""
    if case.get("softcap", 0.0) and case.get("dropout_p", 0.0):
        return False
    paged = case.get("paged_kv_block_size") is not None
    if "new_kv" not in case:  # not a test of the cache
        return not paged
    if not case["new_kv"]:
        return not (case["rotary_fraction"] > 0.0 or (paged and (case["has_batch_idx"] or case["has_leftpad"])))
    return case["seqlen_q"] <= case["seqlen_k"] and not (paged and (case["has_batch_idx"] or case["has_leftpad"]))
