"""``hf-flash-cupy doctor``: looks at the machine, launches one kernel per backend, says what to mend.

With a model: whether, and by which kernels, its attention layers will be accelerated.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hf_flash_cupy.diagnoses import Environment, Gpu, KernelCheck, capability, diagnose, dotted

PACKAGES = ("hf-flash-cupy", "torch", "transformers", "numpy")


def examine(console: Console) -> int:
    """Prints the report; returns 0 for a healthy machine and 1 where something must be mended."""
    env = collect()
    env = replace(env, checks=run_checks(env))
    console.print(_facts(env))
    found = diagnose(env)
    for diagnosis in found:
        mark = "[bold red]Problem[/]" if diagnosis.fatal else "[yellow]Remark[/]"
        console.print(f"{mark}: {diagnosis.problem}\n  To mend: [bold]{diagnosis.mend}[/]", soft_wrap=True)
    fatal = any(diagnosis.fatal for diagnosis in found)
    console.print("Not healthy." if fatal else "Healthy.")
    return int(fatal)


def examine_model(model: str, console: Console, arch: str = "") -> int:
    """Prints what the attention layers of ``model`` ask for and get, here or on another card of compute capability
    ``arch``; returns 0 where all are accelerated, else 1.
    """
    from hf_flash_cupy.integrations.model_report import report

    lines, accelerated = report(model, arch)
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    return int(not accelerated)


def collect() -> Environment:
    """Looks at this machine. Nothing is compiled or launched; a thing that cannot be found is left empty."""
    versions = installed_versions()
    nvrtc, archs, nvrtc_error = _nvrtc() if any(name.startswith("cupy") for name in versions) else (None, (), "")
    compiler, compiler_mend = _compiler()
    cache_dir, entries, size = _cache()
    return Environment(
        versions=versions,
        torch_cuda=_torch_cuda(),
        gpu_device=Path("/dev/nvidiactl").exists(),
        gpus=_gpus(),
        driver=_driver(),
        driver_cuda=_driver_cuda(),
        nvrtc=nvrtc,
        nvrtc_archs=archs,
        nvrtc_error=nvrtc_error,
        compiler=compiler,
        compiler_mend=compiler_mend,
        cache_dir=str(cache_dir),
        cache_error=why_unwritable(cache_dir),
        cache_entries=entries,
        cache_bytes=size,
    )


def installed_versions() -> dict[str, str]:
    """Versions by normalised distribution name: :data:`PACKAGES` and every CuPy there is."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.name or "").lower()
        if name in PACKAGES or name == "cupy" or name.startswith("cupy-"):
            found.setdefault(name, distribution.version)
    return found


def why_unwritable(folder: Path) -> str:
    """Why no file can be made in ``folder`` or its nearest existing parent; ``""`` where one can."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        # A file is tried rather than permissions read: those say nothing of a full or read-only filesystem.
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"{folder}: {error.strerror}"


def run_checks(env: Environment) -> tuple[KernelCheck, ...]:
    """One launch per backend that this machine should have."""
    devices = {"cuda": bool(env.gpus and env.cupys), "cpu": bool(env.compiler)}
    return tuple(check_kernel(device) for device, there in devices.items() if there)


def check_kernel(device: str) -> KernelCheck:
    """Causal float32 attention, 100 rows: max |out - float64 reference| against twice eager's own error."""
    import torch

    from hf_flash_cupy.functional import flash_attention
    from hf_flash_cupy.launch import record_launches
    from hf_flash_cupy.reference import attention_reference

    backend = "cuda" if device == "cuda" else "host"
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 100, 2, 64, generator=generator).to(device) for _ in range(3))
    try:
        with record_launches() as records:
            out = flash_attention(q, k, v, causal=True)
        # A fault of the kernel shows at the next synchronisation, which is this copy.
        result = out.cpu().double()
    except Exception as error:  # whatever it is, it is the finding
        return KernelCheck(backend, failure=f"{type(error).__name__}: {error}")
    launched = [record for record in records if record.backend == backend]
    if not launched:
        return KernelCheck(backend, failure="no kernel was launched")
    truth = attention_reference(q, k, v, causal=True)[0].cpu().double()
    eager = attention_reference(q, k, v, causal=True, compute_dtype=q.dtype)[0].cpu().double()
    floor = 4 * torch.finfo(q.dtype).eps * truth.abs().max().item()
    limit = 2 * (eager - truth).abs().max().item() + floor
    return KernelCheck(backend, launched[-1].kernel, (result - truth).abs().max().item(), limit)


def _torch_cuda() -> str:
    import torch

    return torch.version.cuda or ""


def _gpus() -> tuple[Gpu, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(Gpu(each.name, 10 * each.major + each.minor) for each in properties)


def _driver() -> str:
    """The driver's own version, e.g. ``"580.95.05"``."""
    try:
        match = re.search(r"\d{3}\.\d+(\.\d+)?", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return ""
    return match[0] if match else ""


def _driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA version the driver serves (cuDriverGetVersion, which creates no context)."""
    version = ctypes.c_int(0)
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return (version.value // 1000, version.value % 1000 // 10) if status == 0 else None


def _nvrtc() -> tuple[tuple[int, int] | None, tuple[int, ...], str]:
    """NVRTC's version, the architectures it compiles for, and why it cannot be used."""
    from hf_flash_cupy.jit import compiler

    try:
        return compiler.nvrtc_version(), compiler.supported_archs(), ""
    except Exception as error:  # a broken CuPy can raise anything while it is imported
        return None, (), str(error).partition("\n")[0]


def _compiler() -> tuple[str, str]:
    """The host compiler's version line, or ``""`` and the command that brings one."""
    from hf_flash_cupy.errors import MissingDependency
    from hf_flash_cupy.jit import host_compiler

    try:
        return host_compiler.find_compiler().version, ""
    except MissingDependency as error:
        return "", error.mend


def _cache() -> tuple[Path, int, int]:
    """The cache folder, how many kernels it holds, and their bytes."""
    from hf_flash_cupy.jit import cache

    entries = cache.list_entries()
    return cache.cache_dir(), sum(entry.is_kernel for entry in entries), sum(entry.size for entry in entries)


def _facts(env: Environment) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("python", f"{platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores")
    for name in (*PACKAGES, *(env.cupys or ("cupy",))):
        table.add_row(name, env.versions.get(name, "not installed"))
    table.add_row("torch's CUDA", env.torch_cuda or "none (CPU build)")
    gpus = ", ".join(f"{gpu.name} (compute capability {capability(gpu.arch)})" for gpu in env.gpus)
    table.add_row("GPU", gpus or ("there, but not usable" if env.gpu_device else "none"))
    table.add_row("driver", f"{env.driver} (CUDA {dotted(env.driver_cuda)})" if env.driver_cuda else "none")
    archs = f"{dotted(env.nvrtc)} for sm_{' '.join(map(str, env.nvrtc_archs))}" if env.nvrtc else "none"
    table.add_row("NVRTC", archs)
    table.add_row("C++ compiler", env.compiler or "none")
    table.add_row("kernel cache", f"{env.cache_dir}: {env.cache_entries} kernels, {env.cache_bytes / 2**20:.1f} MiB")
    for check in env.checks:
        numbers = f"{check.kernel}: off float64 by {check.error:.1e} (allowed {check.limit:.1e})"
        table.add_row(f"{check.backend} kernel", check.failure or numbers)
    return table
