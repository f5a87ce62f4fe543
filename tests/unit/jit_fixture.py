"""A tiny kernel for CUDA and for the host, in the house's folder layout: out[i] = kFactor * in[i] + shift.

Run as a program it does one thing in a process of its own and prints JSON; see :func:`main`.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from hf_flash_cupy import params
from hf_flash_cupy.jit import module, source
from hf_flash_cupy.problem import KernelConfig

PROJECT = Path(__file__).parents[2]

FILES = {
    "tiny/scale.cuh": """
        #pragma once
        #include "common/tiny.cuh"
        #include "isa.cuh"
        namespace hfc {
        template <class Config>
        HFC_DEVICE void tiny_scale(const TinyParams& params) {
          const int i = thread_index();
          if (i < params.view.count) {
            params.view.out[i] = Config::kFactor * params.view.in[i] + params.shift;
          }
        }
        }  // namespace hfc
    """,
    "common/tiny.cuh": """
        #pragma once
        #include "deep/../types.cuh"
        namespace hfc {
        struct View { const float* in; float* out; int count; int padding; };
        struct TinyParams { View view; int64 stride; float shift; int unused; };
        }  // namespace hfc
    """,
    "common/types.cuh": """
        #pragma once
        // #include "common/unrelated.cuh"
        #  include <isa.cuh>
        namespace hfc { using int64 = long long; }
    """,
    "common/deep/placeholder.cuh": "",
    "common/unrelated.cuh": "// included by nobody\n",
    "isa/ptx/isa.cuh": """
        #pragma once
        #define HFC_DEVICE __device__
        namespace hfc {
        HFC_DEVICE inline int thread_index() { return blockIdx.x * blockDim.x + threadIdx.x; }
        }
    """,
    "isa/host/isa.cuh": """
        #pragma once
        #include <cstddef>
        #include "launch.h"
        #define HFC_DEVICE
        namespace hfc { inline int thread_index() { return host::current; } }
    """,
    "isa/host/launch.h": """
        #pragma once
        namespace hfc::host {
        inline thread_local int current = 0;
        struct LaunchShape { unsigned grid_x, grid_y, grid_z; int num_workers; };
        template <class Params, int kNumThreads, int kSharedBytes>
        const char* launch(void (*kernel)(const Params&), const Params& params, const LaunchShape& shape) {
          const int count = static_cast<int>(shape.grid_x) * kNumThreads;
          for (current = 0; current < count; ++current) kernel(params);
          return nullptr;
        }
        }  // namespace hfc::host
    """,
}

VIEW = np.dtype([("in", "u8"), ("out", "u8"), ("count", "i4"), ("padding", "i4")])
TINY_PARAMS = np.dtype([("view", VIEW), ("stride", "i8"), ("shift", "f4"), ("unused", "i4")])

VALUES = np.linspace(-2.0, 7.0, 100, dtype=np.float32)
SHIFT = 0.25


class LaunchShape(ctypes.Structure):
    _fields_ = (
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("num_workers", ctypes.c_int),
    )


def write_sources(root: Path) -> Path:
    """Writes the kernel's files below ``root``."""
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def tiny_config(arch: str, factor: int = 3, **changes: Any) -> KernelConfig:
    """The tiny kernel for ``arch``; every factor is a kernel of its own."""
    fields: dict[str, Any] = {
        "kernel": "tiny_scale",
        "name": f"tiny_scale_x{factor}_{'host' if arch == 'host' else 'sm' + arch}",
        "include": "tiny/scale.cuh",
        "params": "TinyParams",
        "arch": arch,
        "constants": (("int kFactor", str(factor)), ("using Element", "float")),
        "num_threads": 64,
        "min_blocks": 2,
        "shared_bytes": 0,
    }
    return KernelConfig(**{**fields, **changes})


def tiny_params(values: int, out: int, count: int) -> np.ndarray[Any, Any]:
    """The parameter struct for two addresses of ``count`` floats."""
    struct = np.zeros(1, TINY_PARAMS)
    struct["view"]["in"], struct["view"]["out"] = values, out
    struct["view"]["count"], struct["shift"] = count, SHIFT
    return struct


def is_right(kernel: module.HostKernel, factor: int) -> bool:
    """Runs a host kernel and compares what it computes."""
    out = np.full_like(VALUES, np.nan)
    struct = tiny_params(VALUES.ctypes.data, out.ctypes.data, VALUES.size)
    shape = LaunchShape(-(-VALUES.size // kernel.config.num_threads), 1, 1, 1)
    failure = kernel.function(struct.ctypes.data, ctypes.byref(shape))
    return failure is None and bool(np.allclose(out, factor * VALUES.astype(np.float64) + SHIFT, rtol=1e-6))


def install(root: Path) -> None:
    """Makes the package compile from ``root`` in this process."""
    source.sources_root = lambda: root
    params.PARAMS["TinyParams"] = TINY_PARAMS


def child_environment(root: Path, cache: Path | str, **variables: str) -> dict[str, str]:
    inherited = os.environ.get("PYTHONPATH", "")
    paths = os.pathsep.join((str(Path(__file__).parent), str(PROJECT), inherited)).rstrip(os.pathsep)
    own = {"PYTHONPATH": paths, "TINY_ROOT": str(root), "HF_FLASH_CUPY_CACHE_DIR": str(cache)}
    return {**os.environ, **own, **variables}


def run_child(root: Path, cache: Path | str, *arguments: str, program: str = "", **variables: str) -> dict[str, Any]:
    """What a new process reports: ``main(*arguments)``, or the JSON that the text ``program`` prints last."""
    start = ["-c", f"import jit_fixture; jit_fixture.install_from_environment()\n{program}"] if program else [__file__]
    answer = subprocess.run(
        [sys.executable, *start, *arguments],
        env=child_environment(root, cache, **variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert answer.returncode == 0, f"exit {answer.returncode}\n{answer.stdout}\n{answer.stderr}"
    report: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return report


def install_from_environment() -> None:
    install(Path(os.environ["TINY_ROOT"]))


def main(*factors: str) -> dict[str, Any]:
    """Loads the host kernel of each factor and compiles its twin for sm_80, counting NVRTC's own calls."""
    from cupy_backends.cuda.libs import nvrtc

    calls = 0
    compile_program = nvrtc.compileProgram

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return compile_program(*arguments)

    nvrtc.compileProgram = counted
    install_from_environment()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        right = [is_right(module.get_host_kernel(tiny_config("host", int(factor))), int(factor)) for factor in factors]
        cubins = [module.ensure_cached(tiny_config("80", int(factor))).binary.read_bytes() for factor in factors]
    stats = module.stats()
    return {
        "right": right,
        "cubins": [cubin[:4] == b"\x7fELF" for cubin in cubins],
        "compiles": stats.compiles,
        "disk_hits": stats.disk_hits,
        "nvrtc_calls": calls,
        "warnings": [str(warning.message) for warning in caught if warning.category is RuntimeWarning],
    }


if __name__ == "__main__":
    # Run by path, this file is "__main__" beside the module of its name: one copy of everything.
    import jit_fixture

    print(json.dumps(jit_fixture.main(*sys.argv[1:])))
