"""The host's compiler: which one is taken, what it is told, and that sanitizers really look."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
from jit_fixture import TINY_PARAMS, child_environment, is_right, tiny_config, write_sources

from hf_flash_cupy import params
from hf_flash_cupy.errors import CompilationError, MissingDependency
from hf_flash_cupy.jit import cache, host_compiler, module, source


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = write_sources(tmp_path / "cuda_src")
    monkeypatch.setattr(source, "sources_root", lambda: root)
    monkeypatch.setitem(params.PARAMS, "TinyParams", TINY_PARAMS)
    monkeypatch.setenv("HF_FLASH_CUPY_CACHE_DIR", str(tmp_path / "cache"))
    return root


def fake_compiler(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f'#!/bin/sh\necho "{name} of this test 1.2"\n')
    program.chmod(0o755)
    return program


class TestFindCompiler:
    def test_cxx_comes_first_and_may_have_arguments(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        program = fake_compiler(tmp_path / "bin", "mycxx")
        monkeypatch.setenv("CXX", f"{program} --flag")
        found = host_compiler.find_compiler()
        assert found.command == (str(program), "--flag")
        assert found.version == "mycxx of this test 1.2"

    def test_then_whatever_the_path_has(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_compiler(tmp_path / "bin", "clang++")
        fake_compiler(tmp_path / "bin", "c++")
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        assert host_compiler.find_compiler().command == ("clang++",)
        fake_compiler(tmp_path / "bin2", "g++")
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{tmp_path / 'bin2'}")
        assert host_compiler.find_compiler().command == ("g++",)

    @pytest.mark.parametrize("cxx", [None, "no-such-compiler -O2"])
    def test_none_names_the_command_that_mends_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cxx: str | None
    ) -> None:
        monkeypatch.delenv("CXX", raising=False)
        if cxx is not None:
            monkeypatch.setenv("CXX", cxx)
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(MissingDependency, match="no-such-compiler" if cxx else r"g\+\+, clang\+\+ and c\+\+") as no:
            host_compiler.find_compiler()
        assert "apt-get install g++" in no.value.mend


def test_a_kernel_computes(root: Path) -> None:
    assert is_right(module.get_host_kernel(tiny_config("host", 7)), 7)


def test_the_compiler_s_messages_are_passed_on(root: Path) -> None:
    path = root / "tiny/scale.cuh"
    path.write_text(path.read_text().replace("params.shift", "params.shfit"))
    with pytest.raises(CompilationError, match="shfit"):
        module.get_host_kernel(tiny_config("host"))


def test_kernels_share_no_statics(root: Path) -> None:
    """Kernels of one process instantiate the same template names, whose statics GNU's loader would merge."""
    path = root / "tiny/scale.cuh"
    body = "static volatile int factor = Config::kFactor; params.view.out[i] = factor"
    path.write_text(path.read_text().replace("params.view.out[i] = Config::kFactor", body))
    kernels = {factor: module.get_host_kernel(tiny_config("host", factor)) for factor in (2, 5)}
    assert all(is_right(kernel, factor) for factor, kernel in kernels.items())


def test_what_is_built_depends_on_compiler_and_cpu(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(sanitize: str = "") -> str:
        return module.host_recipe(tiny_config("host"), sanitize).digest

    plain = digest()
    assert digest() == plain
    assert digest("undefined") != plain
    with monkeypatch.context() as patch:
        patch.setattr(host_compiler, "cpu_identity", lambda: "another CPU")
        assert digest() != plain
    with monkeypatch.context() as patch:
        another = host_compiler.HostCompiler(("g++",), "g++ 99.1")
        patch.setattr(host_compiler, "find_compiler", lambda: another)
        assert digest() != plain


class TestHeader:
    """What all kernels include first is compiled once."""

    UNIT = "#ifndef FROM_HEADER\n#error no header\n#endif\n"

    @pytest.fixture
    def header(self, root: Path, tmp_path: Path) -> Path:
        header = tmp_path / "first.h"
        header.write_text("#define FROM_HEADER\n")
        (tmp_path / "unit.cpp").write_text(self.UNIT)
        host_compiler.compile_header(header, tmp_path / "first.h.gch")
        return header

    def test_it_is_not_read_again(self, header: Path, tmp_path: Path) -> None:
        if "clang" in host_compiler.find_compiler().version:
            pytest.skip("clang reads a header again that has changed")
        header.write_text("")
        host_compiler.compile_library(tmp_path / "unit.cpp", tmp_path / "unit.so", header=header)

    def test_one_that_cannot_be_loaded_costs_time_only(self, header: Path, tmp_path: Path) -> None:
        (tmp_path / "first.h.gch").write_bytes(b"damaged")
        host_compiler.compile_library(tmp_path / "unit.cpp", tmp_path / "unit.so", header=header)

    def test_a_kernel_is_built_without_one_that_is_gone(self, tmp_path: Path, root: Path) -> None:
        (tmp_path / "unit.cpp").write_text("int f() { return 0; }\n")
        host_compiler.compile_library(tmp_path / "unit.cpp", tmp_path / "unit.so", header=tmp_path / "gone.h")

    def test_two_kernels_share_it(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module._host_kernels, "_values", {})  # another test may have loaded them
        for factor in (2, 3):
            assert is_right(module.get_host_kernel(tiny_config("host", factor)), factor)
        assert sorted(entry.is_kernel for entry in cache.list_entries()) == [False, True, True]


class TestSanitizers:
    def test_a_process_without_the_runtime_is_told_how_to_start(self, root: Path) -> None:
        assert not hasattr(ctypes.CDLL(None), "__asan_init")
        with pytest.raises(MissingDependency, match=r"LD_PRELOAD=\S*libasan"):
            module.get_host_kernel(tiny_config("host"), sanitize="address,undefined")

    @pytest.mark.parametrize(
        ("fault", "report"),
        [
            ("", ""),
            ("params.view.out[i + 1] = 0; params.view.out[i]", "heap-buffer-overflow"),
            ("int shift = i + 30; params.view.out[i] = 1 << shift; params.view.out[i]", "shift exponent"),
        ],
        ids=["clean", "overflow", "undefined"],
    )
    def test_they_find_a_fault_that_is_there_and_no_other(self, root: Path, fault: str, report: str) -> None:
        path = root / "tiny/scale.cuh"
        path.write_text(path.read_text().replace("params.view.out[i]", fault or "params.view.out[i]"))
        # numpy's memory comes from malloc, which AddressSanitizer replaces.
        program = """
import jit_fixture
jit_fixture.install_from_environment()
kernel = jit_fixture.module.get_host_kernel(jit_fixture.tiny_config("host"), sanitize="address,undefined")
assert jit_fixture.is_right(kernel, 3)
print("right")
"""
        sanitizer = host_compiler.sanitizer_environment("address,undefined")
        environment = child_environment(root, root.parent / "cache", **sanitizer)
        answer = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
        )
        assert (answer.returncode == 0) == (not fault), answer.stderr
        assert ("right" in answer.stdout) == (not fault)
        assert report in answer.stderr
