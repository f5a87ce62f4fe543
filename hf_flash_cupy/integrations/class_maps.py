"""Models that pick their attention class from a map of implementation names (Falcon, GPT-Neo, SAM's image tower …).

``FALCON_ATTENTION_CLASSES["cupy_fa2"]`` would be a ``KeyError`` when such a model is built. There is no hook between
the import of a model's file and its building, so the file is seen when it is imported: a finder in front of
``sys.meta_path`` that only such files reach. It changes nothing of Transformers but adds this package's names to those
maps, each with a class of mapped_attention.py, or for what is "eager" there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from hf_flash_cupy.integrations.mapped_attention import mapped_class, stays_eager
from hf_flash_cupy.integrations.notices import warn_once


def add_to_class_maps(names: Iterable[str]) -> None:
    """Puts ``names`` into the class maps of all models' files, those imported and those to come."""
    names = tuple(names)
    finders = [finder for finder in sys.meta_path if isinstance(finder, _ModelFiles)]
    if not finders:
        finders = [_ModelFiles()]
        sys.meta_path.insert(0, finders[0])
    finders[0].names |= dict.fromkeys(names)
    for name, module in list(sys.modules.items()):
        if _is_model_file(name) and module is not None:
            _extend(module, names)


def class_maps(module: ModuleType) -> dict[str, dict[str, Any]]:
    """The maps from implementation names to attention classes that a model's file has."""
    return {
        name: value
        for name, value in vars(module).items()
        if name.endswith("_ATTENTION_CLASSES") and isinstance(value, dict) and "eager" in value
    }


def asks_interface(module: ModuleType) -> bool | None:
    """Whether every class map of a model's file has an entry that asks the attention function; None: it has no map."""
    maps = class_maps(module)
    if not maps:
        return None
    entries = [entry for classes in maps.values() for entry in classes.values() if isinstance(entry, _Entry)]
    return all(entry.mapped is not None for entry in entries)


def _is_model_file(name: str) -> bool:
    return name.startswith("transformers.models.") and name.rpartition(".")[2].startswith("modeling_")


class _ModelFiles(MetaPathFinder):
    """Finds nothing itself: lets the others find a model's file, and looks at it once it is executed."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self._within: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _is_model_file(fullname) or fullname in self._within:
            return None
        self._within.add(fullname)
        try:
            spec = find_spec(fullname)
        finally:
            self._within.discard(fullname)
        if spec is not None and spec.loader is not None:
            # On the instance: the loader stays what it is for whoever asks it for the source.
            spec.loader.exec_module = self._then_extend(spec.loader.exec_module)  # type: ignore[method-assign,assignment]
        return spec

    def _then_extend(self, execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        def exec_module(module: ModuleType) -> None:
            execute(module)
            _extend(module, tuple(self.names))

        return exec_module


def _extend(module: ModuleType, names: Iterable[str]) -> None:
    for classes in class_maps(module).values():
        for name in names:
            classes.setdefault(name, _Entry(name, classes))


class _Entry:
    """A class map's entry for one of this package's names: builds a class that asks the attention function, or the
    map's eager class, and says so then.
    """

    def __init__(self, implementation: str, classes: dict[str, Any]) -> None:
        self.implementation, self.eager = implementation, classes["eager"]
        self.mapped = mapped_class(classes, implementation)

    def __call__(self, config: Any, *args: Any, **kwargs: Any) -> Any:
        if self.mapped is not None and not stays_eager(config):
            return self.mapped(config, *args, **kwargs)
        warn_once(
            f"{self.eager.__name__} does not route its attention through Transformers' attention interface: "
            f'with attn_implementation="{self.implementation}" these layers run their own (eager) attention, not '
            "hf_flash_cupy's kernels. The results are right."
        )
        return self.eager(config, *args, **kwargs)
