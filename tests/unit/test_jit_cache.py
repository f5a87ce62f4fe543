"""The cache on disk: entries are whole or missing, and a folder that cannot be used never stops anybody."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from jit_fixture import run_child, write_sources

from hf_flash_cupy.jit import cache, source


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_FLASH_CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", False)
    return tmp_path / "cache"


class Builder:
    """Counts how often an entry is built."""

    def __init__(self, content: bytes = b"binary") -> None:
        self.content = content
        self.calls = 0

    def __call__(self, folder: Path) -> dict[str, Any]:
        assert (folder / "kernel.cu").read_text() == "unit"
        self.calls += 1
        (folder / "kernel.so").write_bytes(self.content)
        return {"seconds": 0.5, "log": ""}

    def recipe(self, name: str = "kernel_a", digest: str = "0123") -> cache.Recipe:
        return cache.Recipe(name, digest, "unit", "kernel.so", self)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def append(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


DAMAGES = (truncate, flip_a_bit, empty, append, Path.unlink)


def test_an_entry_is_laid_out_as_documented(folder: Path) -> None:
    entry = cache.fetch(Builder().recipe())
    assert entry.folder == folder / source.package_version() / "kernel_a.0123"
    assert sorted(file.name for file in entry.folder.iterdir()) == ["kernel.cu", "kernel.so", "meta.json"]
    assert entry.binary.read_bytes() == b"binary"
    meta = json.loads((entry.folder / "meta.json").read_text())
    assert meta["seconds"] == 0.5
    assert set(meta["files"]) == {"kernel.cu", "kernel.so"}
    assert meta["files"]["kernel.so"]["size"] == len(b"binary")


def test_it_is_built_once(folder: Path) -> None:
    builder = Builder()
    built, found = (cache.fetch(builder.recipe()) for _ in range(2))
    assert builder.calls == 1
    assert (built.fresh, found.fresh) == (True, False)
    assert built.meta == found.meta


def test_another_digest_is_another_entry(folder: Path) -> None:
    builder = Builder()
    folders = {cache.fetch(builder.recipe(digest=digest)).folder for digest in ("0123", "4567")}
    assert len(folders) == builder.calls == 2


@pytest.mark.parametrize("file", ["kernel.cu", "kernel.so", "meta.json"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_entry_is_built_again(folder: Path, file: str, damage: Callable[[Path], Any]) -> None:
    builder = Builder()
    damage(cache.fetch(builder.recipe()).folder / file)
    entry = cache.fetch(builder.recipe())
    assert builder.calls == 2
    assert entry.fresh
    assert entry.binary.read_bytes() == b"binary"
    assert not cache.fetch(builder.recipe()).fresh


@pytest.mark.parametrize(
    "content", ["null", "[]", "{}", '{"files": null}', '{"files": {}}', '{"files": {"meta.json": 1}}']
)
def test_a_meta_file_of_another_shape_is_damage(folder: Path, content: str) -> None:
    builder = Builder()
    (cache.fetch(builder.recipe()).folder / "meta.json").write_text(content)
    assert cache.list_entries() == []
    assert cache.fetch(builder.recipe()).fresh


def test_a_folder_in_the_way_of_a_file_is_damage(folder: Path) -> None:
    builder = Builder()
    entry = cache.fetch(builder.recipe())
    entry.binary.unlink()
    entry.binary.mkdir()
    assert cache.fetch(builder.recipe()).binary.read_bytes() == b"binary"


def test_rebuild_replaces_a_whole_entry(folder: Path) -> None:
    cache.fetch(Builder(b"old").recipe())
    assert cache.fetch(Builder(b"new").recipe(), rebuild=True).binary.read_bytes() == b"new"
    assert cache.fetch(Builder().recipe()).binary.read_bytes() == b"new"


def test_a_failed_build_leaves_nothing_behind(folder: Path) -> None:
    def fail(folder: Path) -> dict[str, Any]:
        (folder / "kernel.so").write_bytes(b"half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cache.fetch(cache.Recipe("kernel_a", "0123", "unit", "kernel.so", fail))
    assert [file.name for file in (folder / source.package_version()).iterdir()] == [".locks"]
    assert cache.fetch(Builder().recipe()).fresh


def test_what_killed_processes_left_is_removed_after_a_while(folder: Path) -> None:
    shelf = cache.fetch(Builder().recipe()).folder.parent
    old, recent = shelf / ".building-old", shelf / ".building-recent"
    for left in (old, recent):
        left.mkdir()
        (left / "kernel.cu").write_text("half")
    two_hours_ago = time.time() - 7200
    os.utime(old, (two_hours_ago, two_hours_ago))
    cache.fetch(Builder().recipe(name="kernel_b"))
    assert not old.exists()
    assert recent.exists()


def test_list_and_clear(folder: Path) -> None:
    builder = Builder()
    entries = [cache.fetch(builder.recipe(name=name)) for name in ("kernel_b", "kernel_a")]
    truncate(cache.fetch(builder.recipe(name="kernel_c")).binary)
    (folder / "demo.model").mkdir()
    (folder / "demo.model" / "weights").write_text("not a kernel")
    listed = cache.list_entries()
    assert [entry.folder for entry in listed] == sorted(entry.folder for entry in entries)
    assert listed[0].size == len("unit") + len("binary")
    assert cache.clear() == 3
    assert cache.list_entries() == []
    assert [file.name for file in folder.iterdir()] == ["demo.model"]
    assert (folder / "demo.model" / "weights").exists()
    assert cache.clear() == 0


@pytest.mark.parametrize("seen", [True, False])
def test_whoever_waited_too_long_builds_too_and_both_entries_are_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    """The second build finds the place taken: it replaces the entry or, if it appeared just now, takes it."""
    monkeypatch.setattr(cache, "_LOCK_TIMEOUT_S", 0.1)
    impatient = Builder(b"of the impatient")

    def slow(building: Path) -> dict[str, Any]:
        assert cache.fetch(impatient.recipe()).fresh  # while the lock is held
        return Builder(b"of the slow")(building)

    recipe = cache.Recipe("kernel_a", "0123", "unit", "kernel.so", slow)
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: exists(path) and (seen or path.name != recipe.key))
    entry = cache.fetch(recipe)
    assert impatient.calls == 1
    assert entry.binary.read_bytes() == (b"of the slow" if seen else b"of the impatient")
    assert not cache.fetch(recipe).fresh


UNWRITABLE = ("/proc/nohome/cache", "/dev/null/cache")


@pytest.mark.parametrize("place", UNWRITABLE)
def test_where_nothing_can_be_written_there_is_one_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("HF_FLASH_CUPY_CACHE_DIR", place)
    builder = Builder()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        entries = [cache.fetch(builder.recipe(name=name)) for name in ("kernel_a", "kernel_b", "kernel_c")]
    assert [entry.binary.read_bytes() for entry in entries] == [b"binary"] * 3
    assert [warning.category for warning in caught] == [RuntimeWarning]
    assert place in str(caught[0].message)
    assert "HF_FLASH_CUPY_CACHE_DIR" in str(caught[0].message)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
@pytest.mark.parametrize("step", ["mkdir", "write_text", "rename"])
def test_a_disk_that_fails_on_the_way_costs_no_result(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, step: str
) -> None:
    original: Callable[..., Any] = getattr(Path, step)

    def fail(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.is_relative_to(folder):
            raise OSError(number, os.strerror(number), str(path))
        return original(path, *arguments, **options)

    monkeypatch.setattr(Path, step, fail)
    with pytest.warns(RuntimeWarning, match="cannot be kept"):
        entry = cache.fetch(Builder().recipe())
    assert entry.binary.read_bytes() == b"binary"
    assert not entry.folder.is_relative_to(folder)


def test_a_warm_cache_that_cannot_be_written_is_read_in_silence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.fetch(Builder().recipe())

    def fail(path: Path, *arguments: Any, **options: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    for step in ("mkdir", "write_text", "rename"):
        monkeypatch.setattr(Path, step, fail)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not cache.fetch(Builder().recipe()).fresh


def raise_no_home(*_: Any, **__: Any) -> str:
    raise RuntimeError("could not determine the home directory")


class TestCacheDir:
    def test_is_the_users_own_by_default(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HF_FLASH_CUPY_CACHE_DIR", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert cache.cache_dir() == tmp_path / "hf_flash_cupy"

    def test_is_absolute_and_knows_the_home_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HF_FLASH_CUPY_CACHE_DIR", "relative")
        assert cache.cache_dir() == tmp_path / "relative"
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("HF_FLASH_CUPY_CACHE_DIR", "~/below")
        assert cache.cache_dir() == tmp_path / "below"

    @pytest.mark.parametrize("user_cache_dir", [raise_no_home, lambda *_, **__: "~/.cache/hf_flash_cupy"])
    def test_without_any_home_is_a_folder_of_the_process(
        self, monkeypatch: pytest.MonkeyPatch, user_cache_dir: Callable[..., str]
    ) -> None:
        """A container's user id that is in no user database: platformdirs raises, or keeps the "~"."""
        monkeypatch.delenv("HF_FLASH_CUPY_CACHE_DIR", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(cache, "_warned", False)
        monkeypatch.setattr(platformdirs, "user_cache_dir", user_cache_dir)
        with pytest.warns(RuntimeWarning, match="HF_FLASH_CUPY_CACHE_DIR"):
            assert cache.cache_dir() == cache.scratch_dir()


def test_the_folder_of_the_process_goes_with_it(tmp_path: Path) -> None:
    """It outlives a forked child, which gets its own."""
    program = """
import json, os
from pathlib import Path
from hf_flash_cupy.jit import cache
mine = cache.scratch_dir()
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.write(writer, str(cache.scratch_dir()).encode())
    raise SystemExit
os.waitpid(child, 0)
theirs = Path(os.read(reader, 4096).decode())
print(json.dumps({"mine": str(mine), "theirs": str(theirs), "before": [mine.exists(), theirs.exists()]}))
"""
    report = run_child(write_sources(tmp_path / "cuda_src"), "/proc/nohome", program=program)
    assert report["mine"] != report["theirs"]
    assert report["before"] == [True, False]
    assert not Path(report["mine"]).exists()


def test_entries_are_listed_while_others_come_and_go(folder: Path) -> None:
    """As while other processes build: a folder that was seen may be gone when it is looked into."""
    shelf = folder / source.package_version()
    shelf.mkdir(parents=True)
    over = threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            temporary = Path(tempfile.mkdtemp(prefix=".building-", dir=shelf))
            (temporary / "kernel.cu").write_text("unit")
            temporary.rename(shelf / "scale.0123")
            shutil.rmtree(shelf / "scale.0123")

    other = threading.Thread(target=come_and_go)
    other.start()
    try:
        for _ in range(500):
            assert cache.list_entries() == []  # none is whole
    finally:
        over.set()
        other.join()
