"""A kernel configuration and a parameter struct → a launch on torch's current stream; and a record of what ran."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import torch

from . import env, tiles
from .errors import UnsupportedProblem
from .jit import module
from .problem import KernelConfig

Backend = Literal["cuda", "host"]

_MAX_GRID_X = 2**31 - 1
_CAPTURE_MODE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """One kernel launch, for those who check what really ran."""

    kernel: str
    backend: Backend
    grid: tuple[int, int]
    config: KernelConfig


_count = 0
_thread = threading.local()  # contexts: GPUs whose context this thread has made current once
_recorders: list[list[LaunchRecord]] = []


def launch_count() -> int:
    """Kernels this process has launched so far, on any backend."""
    return _count


@contextmanager
def record_launches() -> Iterator[list[LaunchRecord]]:
    """Every launch of this process inside the ``with`` block, in order."""
    records: list[LaunchRecord] = []
    _recorders.append(records)
    try:
        yield records
    finally:
        _recorders[:] = [other for other in _recorders if other is not records]


def device_arch(device: torch.device) -> str:
    """The architecture whose kernels serve ``device``: "host", or the newest we know not above the GPU's."""
    if device.type == "cpu":
        return "host"
    forced = env.forced_arch()
    if forced is not None:
        if forced not in tiles.ARCHS:
            raise ValueError(f"HF_FLASH_CUPY_ARCH={forced!r}: supported are {', '.join(tiles.ARCHS)}.")
        return forced
    return _own_arch(device)


@cache
def _own_arch(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    known = [arch for arch in tiles.ARCHS if int(arch) <= 10 * major + minor]
    if not known:
        raise UnsupportedProblem(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; 7.5 (Turing) or newer "
            'is supported. Use attn_implementation="sdpa" on this GPU.'
        )
    return known[-1]


@contextmanager
def _loading_allowed() -> Iterator[None]:
    """Lets this thread load a kernel while a CUDA graph is being captured.

    Loading is no work of any stream, but the driver refuses in a capture whatever might wait for one, unless the thread
    has said that it will not (CUDA driver API, cuThreadExchangeStreamCaptureMode).
    """
    if not torch.cuda.is_current_stream_capturing():
        yield
        return
    exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
    exchange(ctypes.byref(mode))  # leaves the former mode in its argument
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


class Launcher:
    """A built kernel and the struct its parameters travel in: calling it launches ``num_tiles`` thread blocks."""

    def __init__(
        self, config: KernelConfig, params: np.ndarray[Any, Any], num_tiles: int, device: torch.device
    ) -> None:
        self.config = config
        self.backend: Backend = "host" if device.type == "cpu" else "cuda"
        self.resize(num_tiles)
        address = params.ctypes.data
        self._launch = (
            self._prepare_host(address) if device.type == "cpu" else self._prepare_cuda(address, device.index)
        )

    def resize(self, num_tiles: int) -> None:
        """From now on so many thread blocks."""
        grid_x = min(num_tiles, _MAX_GRID_X)
        self.num_tiles, self.grid = num_tiles, (grid_x, -(-num_tiles // grid_x))

    def __call__(self) -> None:
        global _count
        self._launch()
        _count += 1
        for records in _recorders:
            records.append(LaunchRecord(self.config.kernel, self.backend, self.grid, self.config))

    def _prepare_cuda(self, address: int, index: int) -> Callable[[], None]:
        from cupy_backends.cuda.api import driver, runtime  # here, not above: the package works without CuPy

        with _loading_allowed():
            kernel = module.get_kernel(self.config, index)
        # CuPy's wrappers cost 4 µs more than the driver call, a DLPack view of one tensor 29 µs: the struct holds the
        # same pointers, shapes and strides.
        self._keep = (kernel, ctypes.c_void_p(address))
        function, arguments = kernel.pointer, ctypes.addressof(self._keep[1])
        threads, shared = self.config.num_threads, self.config.shared_bytes
        stream = torch._C._cuda_getCurrentRawStream
        contexts = vars(_thread).setdefault("contexts", set())
        if index not in contexts:
            with torch.cuda.device(index):
                runtime.setDevice(index)  # a new thread has no current context until somebody asks; launches need one
            contexts.add(index)

        def launch() -> None:
            grid_x, grid_y = self.grid
            driver.launchKernel(function, grid_x, grid_y, 1, threads, 1, 1, shared, stream(index), arguments, 0)

        return launch

    def _prepare_host(self, address: int) -> Callable[[], None]:
        kernel = module.get_host_kernel(self.config, env.sanitize())
        function = kernel.function

        def launch() -> None:
            shape = (ctypes.c_uint * 4)(*self.grid, 1, torch.get_num_threads())
            if (failure := function(address, ctypes.addressof(shape))) is not None:
                raise RuntimeError(f"The host kernel {self.config.name} failed: {failure.decode()}.")

        return launch
