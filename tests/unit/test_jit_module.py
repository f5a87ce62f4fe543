"""Loading kernels: once per thread crowd, once per machine, and past crashes, forks and spoilt caches."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from jit_fixture import (
    TINY_PARAMS,
    child_environment,
    is_right,
    run_child,
    tiny_config,
    write_sources,
)

from hf_flash_cupy import params
from hf_flash_cupy.jit import cache, host_compiler, module, source


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = write_sources(tmp_path / "cuda_src")
    monkeypatch.setattr(source, "sources_root", lambda: root)
    monkeypatch.setitem(params.PARAMS, "TinyParams", TINY_PARAMS)
    monkeypatch.setenv("HF_FLASH_CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_host_kernels", module._Memory())
    monkeypatch.setattr(module, "_stats", module.Stats(0, 0, 0.0))
    return root


class TestThreads:
    def test_eight_that_want_one_kernel_compile_it_once(self, root: Path) -> None:
        together = threading.Barrier(8)

        def load(_: int) -> module.HostKernel:
            together.wait()
            return module.get_host_kernel(tiny_config("host"))

        with ThreadPoolExecutor(8) as pool:
            kernels = list(pool.map(load, range(8)))
        assert all(kernel is kernels[0] for kernel in kernels)
        assert module.stats().compiles == 1
        assert module.stats().disk_hits == 0
        assert is_right(kernels[0], 3)

    def test_two_that_want_different_kernels_compile_at_once(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        inside = threading.Barrier(2, timeout=60)  # passed only if both are compiling
        compile_library = host_compiler.compile_library

        def meet(*arguments: Any) -> str:
            inside.wait()
            return compile_library(*arguments)

        monkeypatch.setattr(host_compiler, "compile_library", meet)
        with ThreadPoolExecutor(2) as pool:
            kernels = pool.map(lambda factor: module.get_host_kernel(tiny_config("host", factor)), (2, 5))
            assert [is_right(kernel, factor) for kernel, factor in zip(kernels, (2, 5), strict=True)] == [
                True,
                True,
            ]

    def test_a_failed_compilation_is_tried_again(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any) -> str:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(host_compiler, "compile_library", fail)
            with pytest.raises(MemoryError):
                module.get_host_kernel(tiny_config("host"))
        assert is_right(module.get_host_kernel(tiny_config("host")), 3)


class TestStats:
    def test_memory_counts_nowhere_and_disk_is_no_compilation(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for _ in range(3):
            module.get_host_kernel(tiny_config("host"))
        first = module.stats()
        assert (first.compiles, first.disk_hits) == (1, 0)
        assert first.seconds > 0
        monkeypatch.setattr(module, "_host_kernels", module._Memory())
        module.get_host_kernel(tiny_config("host"))
        assert module.stats() == module.Stats(1, 1, first.seconds)


class TestUselessEntries:
    """Whole by their checksums, and yet of no use."""

    def test_one_that_cannot_be_loaded_is_built_again(self, root: Path) -> None:
        recipe = module.host_recipe(tiny_config("host"))

        def foreign(folder: Path) -> dict[str, Any]:
            (folder / "kernel.so").write_bytes(b"for another machine")
            return {"seconds": 0.0, "log": ""}

        cache.fetch(cache.Recipe(recipe.name, recipe.digest, recipe.unit, recipe.binary, foreign))
        assert is_right(module.get_host_kernel(tiny_config("host")), 3)
        assert (module.stats().compiles, module.stats().disk_hits) == (1, 1)

    def test_one_that_is_cleared_between_reading_and_loading(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        module.ensure_cached(tiny_config("host"))
        fetch = cache.fetch

        def fetch_and_clear(recipe: cache.Recipe, *, rebuild: bool = False) -> cache.Entry:
            entry = fetch(recipe, rebuild=rebuild)
            if not rebuild:
                cache.clear()
            return entry

        monkeypatch.setattr(cache, "fetch", fetch_and_clear)
        assert is_right(module.get_host_kernel(tiny_config("host")), 3)


def spoil(file: Path, damage: str) -> None:
    content = file.read_bytes()
    # In meta.json, only what it says about the files matters.
    middle = content.rindex(b"sha256") + 20 if file.suffix == ".json" else len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    if damage == "delete":
        file.unlink()
    else:
        file.write_bytes({"truncate": content[:middle], "flip": flipped, "empty": b""}[damage])


class TestProcesses:
    def test_the_second_one_compiles_nothing(self, root: Path, tmp_path: Path) -> None:
        """J08"""
        first, second = (run_child(root, tmp_path / "shared", "3", "4") for _ in range(2))
        assert (first["compiles"], first["disk_hits"], first["nvrtc_calls"]) == (4, 0, 2)
        assert (second["compiles"], second["disk_hits"], second["nvrtc_calls"]) == (0, 4, 0)
        for report in (first, second):
            assert report["right"] == report["cubins"] == [True, True]
            assert report["warnings"] == []

    @pytest.mark.parametrize(
        "damage", ["flip", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("truncate", "empty", "delete"))]
    )
    def test_one_that_finds_every_file_damaged_is_right(self, root: Path, tmp_path: Path, damage: str) -> None:
        """J05: another file of each kernel's entry is damaged, for CUDA and for the host."""
        run_child(root, tmp_path / "shared", "3", "4", "5")
        for factor, damaged in ((3, ["kernel.cu"]), (4, ["kernel.cubin", "kernel.so"]), (5, ["meta.json"])):
            entries = list((tmp_path / "shared").glob(f"*/tiny_scale_x{factor}_*"))
            files = [file for entry in entries for file in entry.iterdir() if file.name in damaged]
            assert len(files) == len(entries) == 2
            for file in files:
                spoil(file, damage)
        report = run_child(root, tmp_path / "shared", "3", "4", "5")
        assert (report["compiles"], report["disk_hits"], report["nvrtc_calls"]) == (6, 0, 3)
        assert report["right"] == report["cubins"] == [True] * 3
        assert run_child(root, tmp_path / "shared", "3", "4", "5")["disk_hits"] == 6

    def test_one_that_can_write_nowhere_warns_once_and_is_right(self, root: Path) -> None:
        report = run_child(root, "/proc/nohome/cache", "3", "4")
        assert report["right"] == report["cubins"] == [True, True]
        assert report["compiles"] == 4
        assert len(report["warnings"]) == 1

    def test_eight_cold_ones_compile_once(self, root: Path, tmp_path: Path) -> None:
        """Eight forks of one process that has compiled nothing: separate in all that matters here."""
        program = """
import json, os, time
from jit_fixture import is_right, tiny_config
from hf_flash_cupy.jit import host_compiler, module
compile_library = host_compiler.compile_library
def slow(*arguments):
    time.sleep(1)  # so that all eight are there before the first is done
    return compile_library(*arguments)
host_compiler.compile_library = slow
reader, writer = os.pipe()
for _ in range(8):
    if os.fork() == 0:
        right = is_right(module.get_host_kernel(tiny_config("host")), 3)
        module.ensure_cached(tiny_config("80"))
        stats = module.stats()
        os.write(writer, (json.dumps([right, stats.compiles, stats.disk_hits]) + chr(10)).encode())
        os._exit(0)
for _ in range(8):
    os.wait()
os.close(writer)
print(json.dumps([json.loads(line) for line in os.fdopen(reader)]))
"""
        reports: Any = run_child(root, tmp_path / "shared", program=program)
        assert len(reports) == 8
        assert all(right for right, _, _ in reports)
        assert sum(compiles for _, compiles, _ in reports) == 2
        assert sum(hits for _, _, hits in reports) == 14


SLOW_COMPILER = """
import json, os, sys, threading, time
from pathlib import Path
from jit_fixture import is_right, tiny_config
from hf_flash_cupy.jit import host_compiler, module
compile_library = host_compiler.compile_library
compiling = threading.Event()
def slow(*arguments):
    compiling.set()
    time.sleep(SECONDS)
    return compile_library(*arguments)
host_compiler.compile_library = slow
def load():
    return is_right(module.get_host_kernel(tiny_config("host")), 3)
"""


@contextlib.contextmanager
def start(root: Path, shared: Path, program: str) -> Iterator[subprocess.Popen[str]]:
    install = "import jit_fixture; jit_fixture.install_from_environment()\n"
    environment = child_environment(root, shared)
    command = [sys.executable, "-c", install + program]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(condition: Callable[[], object]) -> None:
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("nothing happened for a minute")


class TestCrashes:
    def test_a_killed_compiler_does_not_block_the_next(self, root: Path, tmp_path: Path) -> None:
        shared = tmp_path / "shared"
        with start(root, shared, SLOW_COMPILER.replace("SECONDS", "600") + "load()") as victim:
            wait_for(lambda: list(shared.glob("*/.building-*/kernel.cu")))
            os.kill(victim.pid, signal.SIGKILL)
        begin = time.perf_counter()
        report = run_child(root, shared, "3")
        assert report["right"] == [True]
        assert report["compiles"] == 2
        assert time.perf_counter() - begin < cache._LOCK_TIMEOUT_S / 3

    def test_a_waiting_process_goes_on_when_the_holder_is_killed(self, root: Path, tmp_path: Path) -> None:
        shared = tmp_path / "shared"
        patient = SLOW_COMPILER.replace("SECONDS", "0") + "print('waiting', flush=True); print(load())"
        with start(root, shared, SLOW_COMPILER.replace("SECONDS", "600") + "load()") as victim:
            wait_for(lambda: list(shared.glob("*/.building-*/kernel.cu")))
            with start(root, shared, patient) as waiting:
                assert waiting.stdout is not None
                assert waiting.stdout.readline() == "waiting\n"
                time.sleep(1)
                assert waiting.poll() is None
                os.kill(victim.pid, signal.SIGKILL)
                assert waiting.stdout.readline() == "True\n"


class TestForks:
    def test_a_child_forked_while_a_thread_compiles_gets_its_kernel(self, root: Path, tmp_path: Path) -> None:
        """D08: in the child, the thread that holds the locks does not exist."""
        program = (
            SLOW_COMPILER.replace("SECONDS", "3")
            + """
thread = threading.Thread(target=load)
thread.start()
assert compiling.wait(60)
child = os.fork()
if child == 0:
    os._exit(0 if load() and is_right(module.get_host_kernel(tiny_config("host", 9)), 9) else 1)
_, status = os.waitpid(child, 0)
thread.join()
print(json.dumps({"status": status, "compiles": module.stats().compiles}))
"""
        )
        report = run_child(root, tmp_path / "shared", program=program)
        assert report == {"status": 0, "compiles": 1}

    def test_a_child_outlives_the_parent_that_crashed_compiling(self, root: Path, tmp_path: Path) -> None:
        """The child inherits the lock's descriptor; it must not go on holding the lock for a dead parent."""
        done = tmp_path / "done"
        program = (
            SLOW_COMPILER.replace("SECONDS", "600")
            + f"""
parent = os.getpid()
threading.Thread(target=load).start()
assert compiling.wait(60)
if os.fork() == 0:
    os.close(1)
    while os.getppid() == parent:
        time.sleep(0.05)
    host_compiler.compile_library = compile_library
    right = load()
    Path({str(done)!r}).write_text(str(right))
    os._exit(0)
print("forked", flush=True)
"""
        )
        with start(root, tmp_path / "shared", program) as parent:
            assert parent.stdout is not None
            assert parent.stdout.readline() == "forked\n"
            os.kill(parent.pid, signal.SIGKILL)
        wait_for(lambda: done.exists() and done.read_text())
        assert done.read_text() == "True"

    def test_a_kernel_loaded_before_the_fork_works_in_the_child(self, root: Path) -> None:
        kernel = module.get_host_kernel(tiny_config("host"))
        child = os.fork()
        if child == 0:
            os._exit(0 if is_right(kernel, 3) and module.get_host_kernel(tiny_config("host")) is kernel else 1)
        assert os.waitpid(child, 0)[1] == 0
