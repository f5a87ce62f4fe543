"""Kernels loaded on a GPU: from a cubin and from PTX, with more shared memory than a kernel gets unasked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jit_fixture import SHIFT, TINY_PARAMS, VALUES, tiny_config, tiny_params, write_sources

from hf_flash_cupy import params
from hf_flash_cupy.errors import CompilationError
from hf_flash_cupy.jit import cache, compiler, module, source

pytestmark = pytest.mark.gpu

SHARED_BYTES = 60 * 1024  # more than the 48 KB that need no leave

REVERSE = """
#pragma once
#include "tiny/scale.cuh"
namespace hfc {
// out[i] = in[n - 1 - i] through the last bytes of dynamic shared memory, n threads.
template <class Config> __device__ void reverse(const TinyParams& params) {
  extern __shared__ float memory[];
  float* last = memory + Config::kSharedBytes / 4 - blockDim.x;
  last[blockDim.x - 1 - threadIdx.x] = params.view.in[threadIdx.x];
  __syncthreads();
  params.view.out[threadIdx.x] = last[threadIdx.x];
}
}
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = write_sources(tmp_path / "cuda_src")
    (root / "tiny/reverse.cuh").write_text(REVERSE)
    monkeypatch.setattr(source, "sources_root", lambda: root)
    monkeypatch.setitem(params.PARAMS, "TinyParams", TINY_PARAMS)
    monkeypatch.setenv("HF_FLASH_CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_FLASH_CUPY_ARCH", raising=False)
    monkeypatch.setattr(module, "_device_kernels", module._Memory())
    return root


def own_arch() -> str:
    """The newest architecture with kernels that this device runs."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return max(
        (arch for arch in ("75", "80", "86", "89", "90", "100", "120") if int(arch) <= 10 * major + minor),
        key=int,
    )


def launch(kernel: module.CompiledKernel, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Launches by the CUfunction alone, as the product does, on torch's memory and stream."""
    import torch
    from cupy_backends.cuda.api import driver

    given = torch.from_numpy(values).cuda()
    out = torch.full_like(given, float("nan"))
    struct = tiny_params(given.data_ptr(), out.data_ptr(), values.size)
    arguments = np.array([struct.ctypes.data], np.uintp)
    threads = kernel.config.num_threads
    grid = (-(-values.size // threads), 1, 1)
    stream = torch.cuda.current_stream().cuda_stream
    shared = kernel.config.shared_bytes
    driver.launchKernel(kernel.pointer, *grid, threads, 1, 1, shared, stream, arguments.ctypes.data, 0)
    result: np.ndarray[Any, Any] = out.cpu().numpy()
    return result


def test_a_cubin_of_the_exact_architecture(root: Path) -> None:
    kernel = module.get_kernel(tiny_config(own_arch()), 0)
    assert kernel.target.form == "cubin"
    assert kernel.resources is not None
    assert kernel.resources.spill_bytes == 0
    np.testing.assert_allclose(launch(kernel, VALUES), 3 * VALUES.astype(np.float64) + SHIFT, rtol=1e-6)
    assert module.get_kernel(tiny_config(own_arch()), 0) is kernel


def test_a_forced_architecture_runs_as_ptx(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the driver is older than NVRTC, PTX is refused with what to do about it."""
    monkeypatch.setenv("HF_FLASH_CUPY_ARCH", "75")
    driver = divmod(compiler.import_cupy().cuda.runtime.driverGetVersion() // 10, 100)
    if driver < compiler.nvrtc_version():
        with pytest.raises(CompilationError, match="PTX needs a driver as new as NVRTC"):
            module.get_kernel(tiny_config("75"), 0)
        return
    kernel = module.get_kernel(tiny_config("75"), 0)
    assert kernel.target == compiler.Target("75", "ptx")
    np.testing.assert_allclose(launch(kernel, VALUES), 3 * VALUES.astype(np.float64) + SHIFT, rtol=1e-6)


def test_dynamic_shared_memory_beyond_the_default(root: Path) -> None:
    changes = {
        "kernel": "reverse",
        "name": "reverse",
        "include": "tiny/reverse.cuh",
        "constants": (("int kSharedBytes", str(SHARED_BYTES)),),
        "num_threads": 128,
        "min_blocks": 1,
        "shared_bytes": SHARED_BYTES,
    }
    values = np.arange(128, dtype=np.float32)
    kernel = module.get_kernel(tiny_config(own_arch(), **changes), 0)
    np.testing.assert_array_equal(launch(kernel, values), values[::-1])


def test_a_cubin_of_another_device_is_built_again(root: Path) -> None:
    """Whole by its checksums, but nothing the driver can load."""
    config = tiny_config(own_arch())
    import torch

    target = compiler.select_target(config.arch, torch.cuda.get_device_capability(), compiler.supported_archs())
    recipe = module.cuda_recipe(config, target)

    def foreign(folder: Path) -> dict[str, Any]:
        (folder / recipe.binary).write_bytes(b"\x7fELF for another machine")
        return {"seconds": 0.0, "log": ""}

    cache.fetch(cache.Recipe(recipe.name, recipe.digest, recipe.unit, recipe.binary, foreign))
    kernel = module.get_kernel(config, 0)
    np.testing.assert_allclose(launch(kernel, VALUES), 3 * VALUES.astype(np.float64) + SHIFT, rtol=1e-6)


def test_loading_allocates_nothing_from_cupy_s_pool(root: Path) -> None:
    cupy = compiler.import_cupy()
    launch(module.get_kernel(tiny_config(own_arch(), 6), 0), VALUES)
    assert cupy.get_default_memory_pool().total_bytes() == 0
