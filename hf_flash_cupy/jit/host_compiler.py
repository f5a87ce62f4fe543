"""The host's C++ compiler: generated unit → shared library, for kernels that run on the CPU."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hf_flash_cupy.errors import CompilationError, MissingDependency
from hf_flash_cupy.jit import source

# -std=c++17 alone makes g++ keep a*b+c as two roundings; CUDA contracts by default, and so do we.
_FLAGS = (
    *("-std=c++17", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    *("-march=native", "-ffp-contract=fast", "-fno-math-errno"),
)
_OPTIMISED = ("-O2",)
_SANITIZED = ("-Og", "-g1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all")
_INSTALL = "apt-get install g++ (or your system's package of a C++17 compiler), or point CXX at one"


@dataclass(frozen=True, slots=True)
class HostCompiler:
    """A C++ compiler that was found."""

    command: tuple[str, ...]  # $CXX in words, or the one program
    version: str  # first line of --version


def find_compiler() -> HostCompiler:
    """``$CXX``, else g++, clang++ or c++. Raises :class:`MissingDependency` where there is none."""
    return _find_compiler(os.environ.get("CXX", "").strip(), os.environ.get("PATH", ""))


@cache
def _find_compiler(cxx: str, path: str) -> HostCompiler:
    for command in [shlex.split(cxx)] if cxx else [["g++"], ["clang++"], ["c++"]]:
        if shutil.which(command[0], path=path) is None:
            continue
        answer = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            return HostCompiler(tuple(command), answer.stdout.partition("\n")[0])
    tried = f"CXX={cxx}" if cxx else "g++, clang++ and c++"
    raise MissingDependency(f"No C++ compiler to build the kernels for the CPU (tried {tried}).", _INSTALL)


@cache
def cpu_identity() -> str:
    """Digest of the CPU's model and instruction sets: what -march=native builds is good for no other CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    wanted = ("flags", "Features", "model name", "CPU part")
    kept = sorted({line for line in lines if line.startswith(wanted)})
    return hashlib.sha256("\n".join([platform.machine(), *kept]).encode()).hexdigest()


def options(sanitize: str = "") -> tuple[str, ...]:
    """Compiler flags. ``sanitize`` follows ``-fsanitize=``, e.g. ``"address,undefined"``; empty for none."""
    return (*_FLAGS, *((*_SANITIZED, f"-fsanitize={sanitize}") if sanitize else _OPTIMISED))


def compile_library(unit: Path, library: Path, sanitize: str = "", header: Path | None = None) -> str:
    """Compiles the file ``unit`` to ``library`` and returns the compiler's warnings.

    ``header``: one that :func:`compile_header` has compiled with the same flags, to be included first.

    Raises :class:`CompilationError` with the compiler's messages, :class:`MissingDependency` without one.
    """
    included = [] if header is None else ["-include", str(header)]
    try:
        return _compile([*included, "-x", "c++", str(unit), "-o", str(library)], sanitize)
    except CompilationError:
        if header is None:
            raise
        return compile_library(unit, library, sanitize)  # without: compilers need not be able to load what they saved


def compile_header(header: Path, compiled: Path, sanitize: str = "") -> str:
    """Saves what the compiler knows after ``header``. ``compiled`` is ``{header}.gch``, where it will be looked for."""
    return _compile(["-x", "c++-header", str(header), "-o", str(compiled)], sanitize)


def _compile(arguments: list[str], sanitize: str) -> str:
    includes = [f"-I{folder}" for folder in source.include_dirs("host")]
    command = [*find_compiler().command, *options(sanitize), *includes, *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise CompilationError(f"{shlex.join(command)}\nended with {answer.returncode}:\n{answer.stderr}")
    return answer.stderr


def sanitizer_environment(sanitize: str) -> dict[str, str]:
    """Variables to start Python with, so that it can load libraries built with ``sanitize``.

    AddressSanitizer must come before every other library, hence the preload. Leak checks are off: the
    interpreter keeps memory until the process ends.
    """
    if "address" not in sanitize.split(","):
        return {}
    command = [*find_compiler().command, "-print-file-name=libasan.so"]
    runtime = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0"}


def check_sanitizer_runtime(sanitize: str) -> None:
    """Raises :class:`MissingDependency` where a library built with ``sanitize`` would end the process."""
    if "address" in sanitize.split(",") and not hasattr(ctypes.CDLL(None), "__asan_init"):
        variables = " ".join(f"{key}={value}" for key, value in sanitizer_environment(sanitize).items())
        raise MissingDependency(
            "Kernels built with AddressSanitizer need its runtime loaded before everything else.",
            f"start Python with {variables}",
        )
