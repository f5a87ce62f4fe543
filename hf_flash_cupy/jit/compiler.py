"""NVRTC: generated unit → cubin for a device's exact architecture, or PTX where NVRTC does not know it."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Literal

from hf_flash_cupy.errors import CompilationError, MissingDependency
from hf_flash_cupy.jit import source
from hf_flash_cupy.jit.cache import cache_dir, scratch_dir

_OPTIONS = ("-std=c++17", "-default-device", "-lineinfo", "--ptxas-options=-v")


@dataclass(frozen=True, slots=True)
class Target:
    """What NVRTC is asked for."""

    arch: str  # "80", "90a" …
    form: Literal["cubin", "ptx"]

    @property
    def option(self) -> str:
        """NVRTC's ``-arch`` option."""
        return f"-arch={'sm' if self.form == 'cubin' else 'compute'}_{self.arch}"


@dataclass(frozen=True, slots=True)
class CompiledUnit:
    """The result of one compilation."""

    cubin: bytes  # PTX text where target.form is "ptx"
    log: str  # NVRTC's and ptxas' messages
    target: Target


@dataclass(frozen=True, slots=True)
class Resources:
    """What a kernel takes, as ptxas reports it."""

    registers: int  # per thread
    spill_bytes: int  # stores and loads, per thread
    stack_bytes: int  # per thread
    shared_bytes: int  # static shared memory, per block


def select_target(
    arch: str, device: tuple[int, int] | None, supported: Sequence[int], *, forced: bool = False
) -> Target:
    """Chooses what to compile a kernel of architecture ``arch`` to.

    ``device``: compute capability it is to run on, None for ``arch``'s own. ``supported``: what NVRTC knows,
    e.g. ``[75, 80, 90]``. ``forced``: keep to ``arch`` on whatever device there is, hence PTX.

    The device's exact architecture where NVRTC knows it; else ``arch`` itself where the device runs its cubin
    (same major version); else PTX of the newest known one, which every later device runs.
    """
    own = int(arch.removesuffix("a"))
    capability = own if device is None else device[0] * 10 + device[1]
    known = ", ".join(f"sm_{number}" for number in supported)
    if own > capability or (arch.endswith("a") and (own != capability or own not in supported)):
        raise CompilationError(
            f"A kernel of sm_{arch} cannot be built for compute capability {capability / 10} by an NVRTC "
            f"that knows {known}: older devices cannot run it, and sm_…a code runs on one device alone."
        )
    if arch.endswith("a"):
        return Target(arch, "cubin")
    if not forced and capability in supported:
        return Target(str(capability), "cubin")
    if not forced and own in supported and own // 10 == capability // 10:
        return Target(arch, "cubin")
    limit = own if forced else capability
    nearest = max((number for number in supported if number <= limit), default=None)
    if nearest is None:
        raise CompilationError(f"This NVRTC compiles for {known}, none of which runs on sm_{limit}.")
    return Target(str(nearest), "ptx")


def import_cupy() -> ModuleType:
    """CuPy, also where it cannot make a cache folder of its own (it refuses to load then).

    Raises :class:`MissingDependency` without CuPy.
    """
    if "cupy" not in sys.modules:
        folder = os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache")
        if not _can_make(Path(folder)):
            ours = cache_dir() / "cupy"
            os.environ["CUPY_CACHE_DIR"] = str(ours if _can_make(ours) else scratch_dir())
    try:
        import cupy
    except ImportError as error:
        mend = f"pip install 'hf-flash-cupy[cuda{_cuda_major()}]'"
        raise MissingDependency(f"CuPy cannot be imported ({error}).", mend) from error
    return cupy  # type: ignore[no-any-return]


def _can_make(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        return True
    return False


def _cuda_major() -> str:
    """Major CUDA version of the torch in use, 13 where that says nothing."""
    torch = sys.modules.get("torch")
    version = getattr(getattr(torch, "version", None), "cuda", None)
    return str(version or "13").partition(".")[0]


@cache
def _nvrtc() -> ModuleType:
    import_cupy()
    from cupy_backends.cuda.api import runtime
    from cupy_backends.cuda.libs import nvrtc

    try:
        nvrtc.getVersion()
    except Exception as error:  # RuntimeError of CuPy's, or whatever the loader below it raises
        major = runtime._getCUDAMajorVersion()
        mend = "pip install nvidia-cuda-nvrtc" + ("-cu12" if major == 12 else "")
        raise MissingDependency(f"NVRTC of CUDA {major} cannot be loaded ({error}).", mend) from error
    return nvrtc  # type: ignore[no-any-return]


def nvrtc_version() -> tuple[int, int]:
    """Version of the NVRTC at hand, e.g. ``(12, 9)``. Raises :class:`MissingDependency` without one."""
    major, minor = _nvrtc().getVersion()
    return major, minor


def supported_archs() -> tuple[int, ...]:
    """Architectures the NVRTC at hand knows, ascending, e.g. ``(75, 80, 86, …)``."""
    return tuple(sorted(_nvrtc().getSupportedArchs()))


def options(target: Target) -> tuple[str, ...]:
    """NVRTC's options, without the include folders."""
    return (target.option, *_OPTIONS)


def compile_cubin(unit: str, name: str, arch: str | Target) -> CompiledUnit:
    """Compiles the text ``unit`` of kernel ``name``; needs NVRTC, but no GPU, driver or CUDA header.

    ``arch``: an architecture (``"80"``: its cubin, or PTX of the nearest older one that NVRTC knows), or what
    :func:`select_target` chose. Raises :class:`CompilationError` with NVRTC's messages.
    """
    nvrtc = _nvrtc()
    target = select_target(arch, None, supported_archs()) if isinstance(arch, str) else arch
    includes = [f"-I{folder}" for folder in source.include_dirs("cuda")]
    # Quoted includes are looked for in the folder of the unit's name first, else the current one.
    with _program(nvrtc, unit, str(source.sources_root() / f"{name}.cu")) as program:
        try:
            nvrtc.compileProgram(program, (*options(target), *includes))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise CompilationError(f"NVRTC refused {name} for {target.option}: {error}\n{log}") from None
        log = nvrtc.getProgramLog(program)
        if target.form == "ptx":
            return CompiledUnit(nvrtc.getPTX(program), log, target)
        # CuPy's binding drops the last byte as if it ended a string. A cubin is an ELF file, which ends in 0.
        return CompiledUnit(nvrtc.getCUBIN(program) + b"\0", log, target)


@contextlib.contextmanager
def _program(nvrtc: ModuleType, unit: str, file_name: str) -> Iterator[int]:
    program = nvrtc.createProgram(unit, file_name, (), ())
    try:
        yield program
    finally:
        nvrtc.destroyProgram(program)


_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def resource_usage(log: str) -> Resources | None:
    """Registers, spills, stack and static shared memory from the log of a one-kernel unit; None for PTX."""
    registers = _REGISTERS.search(log)
    frames = _FRAME.findall(log)  # the kernel's, and one of each function that was not inlined
    if registers is None or not frames:
        return None
    shared = _SHARED.search(log)
    return Resources(
        registers=int(registers[1]),
        spill_bytes=sum(int(stores) + int(loads) for _, stores, loads in frames),
        stack_bytes=max(int(stack) for stack, _, _ in frames),
        shared_bytes=int(shared[1]) if shared else 0,
    )
