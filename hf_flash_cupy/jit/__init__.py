"""Run-time compilation: kernel configuration → generated unit → compiled, cached and loaded kernel."""

from hf_flash_cupy.jit.compiler import import_cupy
from hf_flash_cupy.jit.module import (
    CompiledKernel,
    HostKernel,
    Stats,
    ensure_cached,
    get_host_kernel,
    get_kernel,
    stats,
)

__all__ = [
    "CompiledKernel",
    "HostKernel",
    "Stats",
    "ensure_cached",
    "get_host_kernel",
    "get_kernel",
    "import_cupy",
    "stats",
]
