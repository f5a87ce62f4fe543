"""What the tests of the Hopper kernels share: what a good compilation shows; the problem and the geometry of a call."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from hf_flash_cupy.jit import compiler
from hf_flash_cupy.plans import Geometry
from hf_flash_cupy.problem import AttentionProblem

# ptxas: wgmma is serialised, for whatever reason (C7510 to C7519), or setmaxnreg is ignored (C7508).
COMPLAINTS = re.compile(r"C75(?:08|1\d)")


def check_resources(compiled: compiler.CompiledUnit) -> None:
    """Nothing spills and nothing is serialised."""
    usage = compiler.resource_usage(compiled.log)
    assert usage is not None
    assert usage.spill_bytes == usage.shared_bytes == 0  # static shared memory would move the aligned dynamic one
    assert not COMPLAINTS.findall(compiled.log), compiled.log


def disassembler() -> str | None:
    wheel = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin"
    return shutil.which("cuobjdump", path=os.pathsep.join((os.environ.get("PATH", ""), str(wheel))))


def product_runs(compiled: compiler.CompiledUnit, tmp_path: Path) -> list[int]:
    """Products in a row that no wait and no start of a group parts."""
    if (tool := disassembler()) is None:
        pytest.skip("needs cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    file = tmp_path / "kernel.cubin"
    file.write_bytes(compiled.cubin)
    path = os.pathsep.join((str(Path(tool).parent), os.environ.get("PATH", "")))
    listing = subprocess.run(
        [tool, "-sass", file], capture_output=True, text=True, check=True, env=os.environ | {"PATH": path}
    ).stdout
    relevant = re.findall(r"\b(HGMMA|WARPGROUP)\b", listing)
    return [len(list(run)) for name, run in groupby(relevant) if name == "HGMMA"]


def problem(head_dim: int = 128, dtype: Any = "bf16", **features: Any) -> AttentionProblem:
    return replace(AttentionProblem(dtype, head_dim, head_dim, 4096, vector=True), **features)


def geometry(head_dim: int = 128, seqlen: int = 4096, **changes: Any) -> Geometry:
    heads, heads_k = 8, 2
    row, row_k = heads * head_dim, heads_k * head_dim
    q, k = ((seqlen * size, size, head_dim) for size in (row, row_k))
    plain = Geometry(
        *(2, heads, heads_k, seqlen, seqlen, head_dim, head_dim),
        q_strides=q,
        k_strides=k,
        v_strides=k,
        out_strides=q,
        lse_strides=(heads * seqlen, seqlen),
        mask_strides=(0, 0, 0, 0),
        interval_strides=(0, 0, 0),
        window=(-1, -1),
        softmax_scale=head_dim**-0.5,
        softcap=0.0,
    )
    return replace(plain, **changes)
