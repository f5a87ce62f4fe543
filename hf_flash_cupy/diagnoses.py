"""What can be wrong with a machine, and the one command that mends it.

Every diagnosis is a pure function over an ``Environment``, so each fault is tested on machines that do not
have it. ``doctor`` looks at the real machine and fills the ``Environment``.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

OLDEST_NVRTC = (12, 4)
OLDEST_ARCH = 75
# The first driver branch of each CUDA major version (CUDA toolkit release notes, "CUDA Driver").
DRIVER_OF_CUDA = {12: "525.60.13", 13: "580.65.06"}


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    arch: int  # 90 for compute capability 9.0


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """One attention call: max |out - float64 reference| and its limit, or why there is no result."""

    backend: str  # "cuda" or "host"
    kernel: str = ""
    error: float = 0.0
    limit: float = 0.0
    failure: str = ""

    @property
    def ok(self) -> bool:
        return not self.failure and self.error <= self.limit


@dataclass(frozen=True, slots=True)
class Environment:
    """The facts a diagnosis reads. Empty strings and None mean "not there"."""

    versions: Mapping[str, str] = field(default_factory=dict)  # distribution name → version, what is installed
    torch_cuda: str = ""  # the CUDA version torch was built for, e.g. "13.0"
    gpu_device: bool = False  # the operating system shows an NVIDIA device
    gpus: tuple[Gpu, ...] = ()  # what torch can use
    driver: str = ""  # e.g. "580.95.05"
    driver_cuda: tuple[int, int] | None = None  # the newest CUDA the driver serves
    nvrtc: tuple[int, int] | None = None
    nvrtc_archs: tuple[int, ...] = ()
    nvrtc_error: str = ""
    compiler: str = ""  # of the host kernels
    compiler_mend: str = ""
    cache_dir: str = ""
    cache_error: str = ""  # why the folder cannot be written
    cache_entries: int = 0
    cache_bytes: int = 0
    checks: tuple[KernelCheck, ...] = ()

    @property
    def cupys(self) -> tuple[str, ...]:
        return tuple(sorted(name for name in self.versions if name == "cupy" or name.startswith("cupy-")))

    @property
    def has_gpu(self) -> bool:
        return self.gpu_device or bool(self.gpus)

    @property
    def cuda_major(self) -> int:
        """The CUDA major version to install for: torch's, else the driver's, else the newest supported."""
        if self.torch_cuda:
            return int(self.torch_cuda.split(".")[0])
        return self.driver_cuda[0] if self.driver_cuda else max(DRIVER_OF_CUDA)

    @property
    def cupy_major(self) -> int | None:
        """The CUDA major version of the one CuPy wheel, None where its name does not tell."""
        match = re.fullmatch(r"cupy-cuda(\d+)x", self.cupys[0]) if len(self.cupys) == 1 else None
        return int(match[1]) if match else None

    @property
    def install_cupy(self) -> str:
        return f'pip install "cupy-cuda{self.cuda_major}x[ctk]"'


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """``fatal``: something the user has cannot be used; else a remark that leaves the machine healthy."""

    problem: str
    mend: str
    fatal: bool = True


def two_cupys(env: Environment) -> Diagnosis | None:
    if len(env.cupys) < 2:
        return None
    return Diagnosis(
        f"{' and '.join(env.cupys)} are both installed: they share the folder cupy/ and break each other.",
        f"pip uninstall -y {' '.join(env.cupys)} && {env.install_cupy}",
    )


def no_cupy(env: Environment) -> Diagnosis | None:
    if env.cupys or not env.has_gpu:
        return None
    return Diagnosis("There is a GPU but no CuPy: the CUDA kernels cannot be compiled.", env.install_cupy)


def cuda_majors_differ(env: Environment) -> Diagnosis | None:
    if not env.torch_cuda or env.cupy_major in (None, env.cuda_major):
        return None
    return Diagnosis(
        f"torch was built for CUDA {env.torch_cuda}, {env.cupys[0]} for CUDA {env.cupy_major}: "
        "two CUDA runtimes of different major versions in one process.",
        f"pip uninstall -y {env.cupys[0]} && {env.install_cupy}",
    )


def torch_without_cuda(env: Environment) -> Diagnosis | None:
    if not env.has_gpu or env.torch_cuda:
        return None
    return Diagnosis(
        f"There is a GPU, but torch {env.versions.get('torch', '')} is a CPU build: models stay on the CPU.",
        "pip uninstall -y torch && pip install torch, from an index that has its CUDA builds",
    )


def old_driver(env: Environment) -> Diagnosis | None:
    if not env.has_gpu or not env.torch_cuda:
        return None
    if env.driver_cuda is None:
        return Diagnosis(
            "There is a GPU, but the driver's library libcuda.so.1 cannot be loaded.",
            f"install the NVIDIA driver {DRIVER_OF_CUDA.get(env.cuda_major, '')} or newer "
            "(in a container: start it with --gpus all)",
        )
    needed = max(env.cuda_major, env.cupy_major or 0, env.nvrtc[0] if env.nvrtc else 0)
    if env.driver_cuda[0] >= needed:
        return None
    return Diagnosis(
        f"The driver {env.driver} serves CUDA {dotted(env.driver_cuda)}; what is installed needs {needed}.",
        f"install the NVIDIA driver {DRIVER_OF_CUDA.get(needed, '')} or newer, or torch and CuPy for CUDA "
        f"{env.driver_cuda[0]}",
    )


def unusable_gpu(env: Environment) -> Diagnosis | None:
    if not env.gpu_device or env.gpus or not env.torch_cuda or old_driver(env):
        return None
    return Diagnosis(
        "There is a GPU and a driver, but torch sees no device.",
        "unset CUDA_VISIBLE_DEVICES, then python -c 'import torch; torch.cuda.init()' names the cause",
    )


def old_gpu(env: Environment) -> Diagnosis | None:
    too_old = [gpu for gpu in env.gpus if gpu.arch < OLDEST_ARCH]
    if not too_old:
        return None
    return Diagnosis(
        f"{too_old[0].name} is of compute capability {capability(too_old[0].arch)}; "
        f"the kernels need {capability(OLDEST_ARCH)} (Turing) or newer.",
        "choose another device with CUDA_VISIBLE_DEVICES, or attn_implementation='sdpa'",
        fatal=len(too_old) == len(env.gpus),
    )


def no_nvrtc(env: Environment) -> Diagnosis | None:
    if not env.cupys or len(env.cupys) > 1 or env.nvrtc:
        return None
    major = env.cupy_major or env.cuda_major
    wheel = "nvidia-cuda-nvrtc-cu12" if major == 12 else "nvidia-cuda-nvrtc"
    reason = f" ({env.nvrtc_error})" if env.nvrtc_error else ""
    return Diagnosis(
        f"CuPy is installed, but NVRTC, the run-time compiler, cannot be loaded{reason}.",
        f"pip install {wheel}",
        fatal=env.has_gpu,
    )


def old_nvrtc(env: Environment) -> Diagnosis | None:
    if not env.nvrtc or env.nvrtc >= OLDEST_NVRTC:
        return None
    return Diagnosis(
        f"NVRTC {dotted(env.nvrtc)} is too old: the kernels need {dotted(OLDEST_NVRTC)} or newer.",
        "pip install --upgrade nvidia-cuda-nvrtc-cu12",
        fatal=env.has_gpu,
    )


def no_compiler(env: Environment) -> Diagnosis | None:
    if env.compiler:
        return None
    return Diagnosis(
        "There is no C++ compiler: CPU tensors take the slow reference in place of the kernels.",
        env.compiler_mend or "apt-get install g++",
        fatal=not env.has_gpu,
    )


def unwritable_cache(env: Environment) -> Diagnosis | None:
    if not env.cache_error:
        return None
    return Diagnosis(
        f"The cache folder {env.cache_dir} cannot be written ({env.cache_error}): "
        "every process compiles its kernels again.",
        f"export HF_FLASH_CUPY_CACHE_DIR={Path(tempfile.gettempdir()) / 'hf_flash_cupy'}",
    )


def failed_kernel(env: Environment) -> Diagnosis | None:
    failed = next((check for check in env.checks if not check.ok), None)
    if failed is None:
        return None
    what = failed.failure or f"{failed.kernel} is off by {failed.error:.1e}, allowed are {failed.limit:.1e}"
    return Diagnosis(
        f"The {failed.backend} kernel did not pass: {what}.",
        "mend the faults above first, then hf-flash-cupy cache clear and hf-flash-cupy doctor",
    )


# In the order in which they should be mended: a fault may only be the consequence of an earlier one.
DIAGNOSES: tuple[Callable[[Environment], Diagnosis | None], ...] = (
    two_cupys,
    no_cupy,
    cuda_majors_differ,
    torch_without_cuda,
    old_driver,
    unusable_gpu,
    old_gpu,
    no_nvrtc,
    old_nvrtc,
    no_compiler,
    unwritable_cache,
    failed_kernel,
)


def diagnose(env: Environment) -> list[Diagnosis]:
    return [found for diagnosis in DIAGNOSES if (found := diagnosis(env))]


def dotted(version: tuple[int, int] | None) -> str:
    return ".".join(map(str, version)) if version else ""


def capability(arch: int) -> str:
    return f"{arch // 10}.{arch % 10}"
