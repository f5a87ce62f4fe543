"""Kernel configuration → loaded kernel: from memory, else from disk, else from the compiler."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from hf_flash_cupy import env
from hf_flash_cupy.errors import CompilationError
from hf_flash_cupy.jit import cache, compiler, host_compiler, source
from hf_flash_cupy.problem import KernelConfig

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A kernel loaded on one GPU."""

    config: KernelConfig
    pointer: int  # CUfunction whose limit of dynamic shared memory is config.shared_bytes
    target: compiler.Target
    resources: compiler.Resources | None  # None where the driver compiles it from PTX
    binary: Path
    module: Any  # the cupy.RawModule that owns the function


@dataclass(frozen=True, slots=True)
class HostKernel:
    """A kernel loaded for the CPU."""

    config: KernelConfig
    function: Callable[[Any, Any], bytes | None]  # (const Params*, const LaunchShape*) → what went wrong, None: nothing
    binary: Path


@dataclass(frozen=True, slots=True)
class Stats:
    """What kernels have cost this process so far. A kernel already in memory counts nowhere."""

    compiles: int  # built by NVRTC or the host's compiler
    disk_hits: int  # found in the cache on disk
    seconds: float  # spent in compilers, summed over threads


class _Memory(Generic[K, V]):
    """Values made once each: threads that ask for the same one wait for the first, others are not held up."""

    def __init__(self) -> None:
        self._values: dict[K, V] = {}
        self.forget_locks()

    def forget_locks(self) -> None:
        """For a forked child, where the threads that held these locks do not exist."""
        self._guard = threading.Lock()
        self._locks: dict[K, threading.Lock] = {}

    def get(self, key: K, make: Callable[[], V]) -> V:
        value = self._values.get(key)
        if value is not None:
            return value
        with self._guard:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            value = self._values.get(key)
            if value is None:
                value = self._values[key] = make()
            return value


_device_kernels: _Memory[tuple[KernelConfig, int], CompiledKernel] = _Memory()
_host_kernels: _Memory[tuple[KernelConfig, str], HostKernel] = _Memory()
_host_headers: _Memory[tuple[Path, str], cache.Entry] = _Memory()
_stats = Stats(0, 0, 0.0)
_stats_lock = threading.Lock()


def _after_fork_in_child() -> None:
    global _stats_lock
    _stats_lock = threading.Lock()
    _device_kernels.forget_locks()
    _host_kernels.forget_locks()
    _host_headers.forget_locks()


os.register_at_fork(after_in_child=_after_fork_in_child)


def stats() -> Stats:
    """The counters of this process."""
    return _stats


def get_kernel(config: KernelConfig, device_index: int) -> CompiledKernel:
    """``config`` loaded on GPU ``device_index``, whose CUDA context is created if there is none.

    Raises :class:`CompilationError` or :class:`MissingDependency`.
    """
    return _device_kernels.get((config, device_index), lambda: _load_kernel(config, device_index))


def get_host_kernel(config: KernelConfig, sanitize: str = "") -> HostKernel:
    """``config`` (of arch ``"host"``) loaded for the CPU, built with ``-fsanitize=<sanitize>`` unless empty.

    Raises :class:`CompilationError` or :class:`MissingDependency`.
    """
    return _host_kernels.get((config, sanitize), lambda: _load_host_kernel(config, sanitize))


def ensure_cached(config: KernelConfig, target: compiler.Target | None = None) -> cache.Entry:
    """The compiled ``config`` in the cache on disk, built if it is not there; loads nothing, needs no GPU.

    ``target`` as :func:`compiler.select_target` chooses it; None for the one of ``config.arch`` itself.
    """
    if source.side_of(config) == "host":
        return _fetch(host_recipe(config))
    own = compiler.select_target(config.arch, None, compiler.supported_archs())
    return _fetch(cuda_recipe(config, target or own))


def _load_kernel(config: KernelConfig, device_index: int) -> CompiledKernel:
    cupy = compiler.import_cupy()

    def load(entry: cache.Entry) -> CompiledKernel:
        module = cupy.RawModule(path=str(entry.binary))
        kernel = module.get_function(config.name)
        if config.shared_bytes > 0:
            kernel.max_dynamic_shared_size_bytes = config.shared_bytes
        resources = compiler.resource_usage(entry.meta["log"])
        return CompiledKernel(config, kernel.kernel.ptr, target, resources, entry.binary, module)

    with cupy.cuda.Device(device_index) as device:
        capability = divmod(int(device.compute_capability), 10)
        forced = env.forced_arch() is not None
        target = compiler.select_target(config.arch, capability, compiler.supported_archs(), forced=forced)
        refusal = cupy.cuda.driver.CUDADriverError
        try:
            return _load(cuda_recipe(config, target), load, refusal)
        except refusal as error:
            raise CompilationError(
                f"The driver refused kernel {config.name}, built with {target.option} by {_nvrtc_name()}: "
                f"{error}. PTX needs a driver as new as NVRTC: update the driver, or install "
                "the NVRTC of its CUDA version."
            ) from error


def _load_host_kernel(config: KernelConfig, sanitize: str) -> HostKernel:
    host_compiler.check_sanitizer_runtime(sanitize)

    def load(entry: cache.Entry) -> HostKernel:
        function = ctypes.CDLL(str(entry.binary))[config.name]
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        function.restype = ctypes.c_char_p
        return HostKernel(config, function, entry.binary)

    return _load(host_recipe(config, sanitize), load, OSError)


def _load(recipe: cache.Recipe, load: Callable[[cache.Entry], V], refusal: type[Exception]) -> V:
    entry = _fetch(recipe)
    try:
        return load(entry)
    except refusal:
        # An entry that is whole can be gone by now (somebody cleared the cache), or foreign (a home folder
        # shared with a machine of another C library). One of our own settles both.
        if entry.fresh:
            raise
        return load(_fetch(recipe, rebuild=True))


def _fetch(recipe: cache.Recipe, rebuild: bool = False) -> cache.Entry:
    global _stats
    entry = cache.fetch(recipe, rebuild=rebuild)
    with _stats_lock:
        compiled, seconds = (1, entry.meta["seconds"]) if entry.fresh else (0, 0.0)
        _stats = Stats(_stats.compiles + compiled, _stats.disk_hits + 1 - compiled, _stats.seconds + seconds)
    return entry


def cuda_recipe(config: KernelConfig, target: compiler.Target) -> cache.Recipe:
    """How to build ``config`` for ``target`` with NVRTC; needs no GPU."""
    unit = source.generate_source(config)
    binary = f"kernel.{target.form}"

    def build(folder: Path) -> str:
        compiled = compiler.compile_cubin(unit, config.name, target)
        (folder / binary).write_bytes(compiled.cubin)
        return compiled.log

    identity = {"compiler": _nvrtc_name(), "options": compiler.options(target)}
    return _recipe(config.name, unit, identity, binary, build, {"config": asdict(config)})


def host_recipe(config: KernelConfig, sanitize: str = "") -> cache.Recipe:
    """How to build ``config`` with the host's compiler."""
    binary = "kernel.so"

    def build(folder: Path) -> str:
        recipe = host_header_recipe(sanitize)
        header = _host_headers.get((cache.cache_dir(), recipe.key), lambda: cache.fetch(recipe))
        return host_compiler.compile_library(folder / cache.UNIT, folder / binary, sanitize, header.folder / cache.UNIT)

    unit = source.generate_source(config)
    return _recipe(config.name, unit, _host_identity(sanitize), binary, build, {"config": asdict(config)})


def host_header_recipe(sanitize: str = "") -> cache.Recipe:
    """How to save the compiler's work on what all kernels of the host include first: a third of a kernel's time."""
    binary = f"{cache.UNIT}.gch"

    def build(folder: Path) -> str:
        return host_compiler.compile_header(folder / cache.UNIT, folder / binary, sanitize)

    return _recipe("isa_host", source.generate_header(), _host_identity(sanitize), binary, build, {})


def _host_identity(sanitize: str) -> dict[str, Any]:
    return {
        "compiler": host_compiler.find_compiler().version,
        "options": host_compiler.options(sanitize),
        "cpu": host_compiler.cpu_identity(),
    }


def _nvrtc_name() -> str:
    major, minor = compiler.nvrtc_version()
    return f"NVRTC {major}.{minor}"


def _recipe(
    name: str,
    unit: str,
    identity: dict[str, Any],
    binary: str,
    build: Callable[[Path], str],
    facts: dict[str, Any],
) -> cache.Recipe:
    """The unit names the digests of all it includes; with what compiles it, it stands for the binary."""

    def timed(folder: Path) -> dict[str, Any]:
        start = time.perf_counter()
        log = build(folder)
        seconds = time.perf_counter() - start
        return {**identity, "seconds": seconds, **facts, "log": log}

    digest = hashlib.sha256(json.dumps([unit, identity]).encode()).hexdigest()[:24]
    return cache.Recipe(name, digest, unit, binary, timed)
