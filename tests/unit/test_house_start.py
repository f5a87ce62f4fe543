"""Importing and using the package: without GPU, CuPy or HOME, without a CUDA context, safe to fork."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def run(program: str, tmp_path: Path, **variables: str | None) -> str:
    """Output of ``program`` in a new process; a variable of None is taken away."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    merged = {**os.environ, "PYTHONPATH": path, **variables}
    env = {name: value for name, value in merged.items() if value is not None}
    answer = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


ATTENTION = """
import torch
from hf_flash_cupy import flash_attention
q = torch.randn(1, 20, 2, 32)
weights = torch.einsum("bihd,bjhd->bhij", q.double(), q.double() / 32**0.5).softmax(-1)
expected = torch.einsum("bhij,bjhd->bihd", weights, q.double())
assert (flash_attention(q, q, q) - expected).abs().max() < 1e-5
"""


def test_importing_loads_no_cupy_and_makes_no_cuda_context(tmp_path: Path) -> None:
    program = """
import sys
import hf_flash_cupy, torch
assert not torch.cuda.is_initialized()
assert not {name for name in sys.modules if name.partition(".")[0] in ("cupy", "cupy_backends")}
"""
    run(program, tmp_path)


def test_it_works_without_cupy_and_gpu(tmp_path: Path) -> None:
    block = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cupy", "cupy_backends", "cupyx"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
"""
    run(block + ATTENTION, tmp_path, CUDA_VISIBLE_DEVICES="")


def test_it_works_without_home(tmp_path: Path) -> None:
    """J03: HOME cannot be made, nothing else says where to write: the cache lives as long as the process."""
    gone = dict.fromkeys(("HF_FLASH_CUPY_CACHE_DIR", "XDG_CACHE_HOME", "CUPY_CACHE_DIR", "HF_HOME"))
    run(ATTENTION, tmp_path, HOME="/proc/nohome", CUDA_VISIBLE_DEVICES="", **gone)


FORK = """
import os, torch
import hf_flash_cupy
from transformers import AttentionInterface
assert "cupy_fa2" in AttentionInterface().valid_keys()

def compute(device):
    q = torch.randn(1, 8, 2, 32, device=device)
    return hf_flash_cupy.flash_attention(q, q, q).sum().item()

def fork_and_compute(device):
    child = os.fork()
    if child == 0:
        try:
            compute(device)
            os._exit(0)
        finally:  # an error in the child must not run the rest of the parent's program
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_forked_child_can_compute(tmp_path: Path) -> None:
    """D08: before and after the parent has launched a kernel; one thread, as torch's pool does not fork."""
    program = FORK + "fork_and_compute('cpu')\ncompute('cpu')\nfork_and_compute('cpu')\n"
    run(program, tmp_path, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
def test_a_forked_child_can_use_cuda(tmp_path: Path) -> None:
    """D08: importing and registering leave CUDA untouched, so the child may be the first to use it."""
    run(FORK + "fork_and_compute('cuda')\n", tmp_path)


def test_data_loader_workers_live_beside_the_package(tmp_path: Path) -> None:
    """D08: forked workers of a DataLoader, in a process that imported and used the package."""
    program = (
        ATTENTION
        + """
from torch.utils.data import DataLoader
loader = DataLoader(list(range(8)), num_workers=2, multiprocessing_context="fork")
assert sorted(int(x) for x in loader) == list(range(8))
"""
    )
    run(program, tmp_path, OMP_NUM_THREADS="1")
