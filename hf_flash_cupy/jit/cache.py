"""Compiled kernels on disk: ``{cache}/{version}/{name}.{digest}/{kernel.cu, kernel.cubin, meta.json}``.

The binary is ``kernel.cubin``, ``kernel.ptx`` or ``kernel.so``; of the header that all kernels of the host include
first it is ``kernel.cu.gch``. An entry appears whole or not at all
(temporary folder, fsync, rename), is built by one process at a time (under a lock that dies with its holder),
and counts as missing unless every file has the size and sha256 stated in meta.json. Where nothing can be
written, there is one warning and a folder that lives as long as the process.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import filelock
import platformdirs

from hf_flash_cupy import env
from hf_flash_cupy.jit import source

UNIT = "kernel.cu"
_META = "meta.json"
_TEMPORARY = ".building-"
_LOCKS = ".locks"

# Longer than any compilation: who has waited this long builds for itself, beside the holder of the lock.
_LOCK_TIMEOUT_S = 180.0
_ABANDONED_S = 3600.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make an entry."""

    name: str  # the kernel's readable name
    digest: str  # of everything the binary depends on
    unit: str  # content of kernel.cu
    binary: str  # file name of the result, e.g. "kernel.cubin"
    build: Callable[[Path], dict[str, Any]]  # writes binary into a folder that holds kernel.cu; → JSON for meta.json

    @property
    def key(self) -> str:
        """Name of the entry's folder."""
        return f"{self.name}.{self.digest}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One compiled kernel on disk."""

    folder: Path
    binary: Path
    meta: dict[str, Any]  # what build reported, and "files": name → {"sha256", "size"}
    fresh: bool  # built by this call rather than found

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(file["size"] for file in self.meta["files"].values())

    @property
    def is_kernel(self) -> bool:
        """Else it is a compiled header."""
        return self.binary.suffix != ".gch"


def cache_dir() -> Path:
    """Folder of the cache: ``$HF_FLASH_CUPY_CACHE_DIR`` or the user cache folder. It need not exist."""
    chosen = env.cache_dir()
    if chosen:
        return Path(chosen).expanduser().absolute()
    default = ""
    with contextlib.suppress(RuntimeError):
        default = platformdirs.user_cache_dir("hf_flash_cupy", appauthor=False)
    if os.path.isabs(default):
        return Path(default)
    # A user without HOME and without an entry in the user database: platformdirs raises, or keeps the "~".
    _warn_once("there is no home folder to keep compiled kernels in")
    return scratch_dir()


def scratch_dir() -> Path:
    """A private folder that is removed when the process ends."""
    return _scratch_dir(os.getpid())


@cache
def _scratch_dir(owner: int) -> Path:
    folder = tempfile.mkdtemp(prefix="hf_flash_cupy-")
    # A forked child inherits this callback, but the folder is its parent's.
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return Path(folder)


def fetch(recipe: Recipe, *, rebuild: bool = False) -> Entry:
    """The entry of ``recipe``, found or built. What its ``build`` raises is passed on.

    ``rebuild`` replaces an entry that is whole but of no use.
    """
    shelf = cache_dir() / source.package_version()
    found = None if rebuild else _read(shelf / recipe.key, recipe.binary)
    if found is not None:
        return found
    try:
        shelf.mkdir(parents=True, exist_ok=True)
        with _lock(shelf, recipe.key):
            # Another process may have built it while this one waited.
            found = None if rebuild else _read(shelf / recipe.key, recipe.binary)
            return found or _build(shelf, recipe)
    except OSError as error:
        _warn_once(f"compiled kernels cannot be kept in {shelf} ({error})")
        return _build(scratch_dir(), recipe)


def list_entries() -> list[Entry]:
    """Every whole entry, of every version, sorted by path."""
    entries = (_read(folder, None) for folder in _entry_folders())
    return [entry for entry in entries if entry is not None]


def clear() -> int:
    """Removes every compiled kernel, whole or damaged, of every version; returns how many there were."""
    folders = _entry_folders()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    for shelf in {folder.parent for folder in folders}:
        shutil.rmtree(shelf / _LOCKS, ignore_errors=True)
        with contextlib.suppress(OSError):
            shelf.rmdir()
    return len(folders)


def _entry_folders() -> list[Path]:
    # The cache folder holds other things too; only what looks like an entry is one.
    folders = (folder for shelf in _children(cache_dir()) for folder in _children(shelf))
    named = (folder for folder in folders if "." in folder.name and not folder.name.startswith("."))
    return sorted(folder for folder in named if any(_is_of_an_entry(file.name) for file in _children(folder)))


def _is_of_an_entry(name: str) -> bool:
    return name.startswith("kernel.") or name == _META


def _children(folder: Path) -> list[Path]:
    """None of a file, or of a folder that another process has removed or renamed meanwhile."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _read(folder: Path, binary: str | None) -> Entry | None:
    """The entry in ``folder`` if it is whole, else None. ``binary=None`` takes the one meta.json names."""
    try:
        meta = json.loads((folder / _META).read_bytes())
        for name, stated in meta["files"].items():
            if _fingerprint(folder / name) != stated:
                return None
        binary = binary or next(name for name in meta["files"] if name != UNIT)
        if set(meta["files"]) != {UNIT, binary}:
            return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration):
        return None
    return Entry(folder, folder / binary, meta, fresh=False)


def _fingerprint(file: Path) -> dict[str, Any]:
    content = file.read_bytes()
    return {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}


@contextlib.contextmanager
def _lock(shelf: Path, key: str) -> Iterator[None]:
    folder = shelf / _LOCKS
    folder.mkdir(exist_ok=True)
    lock = filelock.FileLock(folder / key)
    # Too long a wait, or a filesystem without locks: go on without. Entries still appear whole.
    with contextlib.suppress(filelock.Timeout, NotImplementedError):
        lock.acquire(timeout=_LOCK_TIMEOUT_S)
    try:
        yield
    finally:
        lock.release()


def _build(shelf: Path, recipe: Recipe) -> Entry:
    _remove_abandoned(shelf)
    temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=shelf))
    folder = shelf / recipe.key
    names = (UNIT, recipe.binary)
    try:
        (temporary / UNIT).write_text(recipe.unit)
        meta = recipe.build(temporary)
        meta["files"] = {name: _fingerprint(temporary / name) for name in names}
        (temporary / _META).write_text(json.dumps(meta, indent=1))
        for name in (*names, _META, "."):
            _sync(temporary / name)
        _publish(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Entry(folder, folder / recipe.binary, meta, fresh=True)


def _publish(temporary: Path, folder: Path) -> None:
    """Renames ``temporary`` to ``folder``. What stands there goes first: it is damaged, and not empty."""
    if folder.exists():
        discarded = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=folder.parent))
        with contextlib.suppress(FileNotFoundError):
            folder.rename(discarded / "entry")
        shutil.rmtree(discarded, ignore_errors=True)
    try:
        temporary.rename(folder)
    except OSError as error:
        # Another process, building without the lock, was a moment faster; its entry is as good as ours.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_abandoned(shelf: Path) -> None:
    """Removes what processes that were killed while building left behind."""
    for folder in shelf.glob(f"{_TEMPORARY}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(folder, ignore_errors=True)


_warned = False


def _warn_once(why: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"hf_flash_cupy: {why}, so every process compiles its own. "
            "Set HF_FLASH_CUPY_CACHE_DIR to a folder that can be written.",
            RuntimeWarning,
            stacklevel=2,
        )
