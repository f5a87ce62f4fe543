"""Each diagnosis on a faked machine that has the fault, and the whole doctor on this one."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from hf_flash_cupy import cli, doctor
from hf_flash_cupy.diagnoses import DIAGNOSES, Diagnosis, Environment, Gpu, KernelCheck, diagnose

HEALTHY_GPU = Environment(
    versions={"torch": "2.13.0", "transformers": "5.17.0", "numpy": "2.4.6", "cupy-cuda13x": "14.2.0"},
    torch_cuda="13.0",
    gpu_device=True,
    gpus=(Gpu("H200", 90),),
    driver="580.95.05",
    driver_cuda=(13, 0),
    nvrtc=(13, 0),
    nvrtc_archs=(75, 90),
    compiler="g++ 12.2.0",
    cache_dir="/home/user/.cache/hf_flash_cupy",
    checks=(KernelCheck("cuda", "fa2_forward", 1e-7, 1e-6), KernelCheck("host", "fa2_forward", 1e-7, 1e-6)),
)
HEALTHY_CPU = Environment(versions={"torch": "2.13.0+cpu"}, compiler="g++ 12.2.0")


def with_cupy(*names: str) -> dict[str, str]:
    others = {name: version for name, version in HEALTHY_GPU.versions.items() if not name.startswith("cupy")}
    return others | dict.fromkeys(names, "14.2.0")


def only(env: Environment) -> Diagnosis:
    """The one diagnosis of ``env``: a fault must not raise alarms besides its own."""
    found = diagnose(env)
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize("env", [HEALTHY_GPU, HEALTHY_CPU], ids=["gpu", "cpu"])
def test_a_healthy_machine_has_no_diagnosis(env: Environment) -> None:
    assert diagnose(env) == []


FAULTS = {
    "two_cupys": (
        replace(HEALTHY_GPU, versions=with_cupy("cupy-cuda12x", "cupy-cuda13x")),
        "cupy-cuda12x and cupy-cuda13x",
        'pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install "cupy-cuda13x[ctk]"',
    ),
    "no_cupy": (
        replace(HEALTHY_GPU, versions=with_cupy(), nvrtc=None),
        "no CuPy",
        'pip install "cupy-cuda13x[ctk]"',
    ),
    "cuda_majors_differ": (
        replace(HEALTHY_GPU, torch_cuda="12.8"),
        "torch was built for CUDA 12.8, cupy-cuda13x for CUDA 13",
        'pip uninstall -y cupy-cuda13x && pip install "cupy-cuda12x[ctk]"',
    ),
    "torch_without_cuda": (
        replace(HEALTHY_GPU, torch_cuda="", gpus=()),
        "torch 2.13.0 is a CPU build",
        "pip install torch",
    ),
    "old_driver": (
        replace(HEALTHY_GPU, driver="550.54.14", driver_cuda=(12, 4), gpus=()),
        "550.54.14 serves CUDA 12.4; what is installed needs 13",
        "580.65.06 or newer",
    ),
    "no_driver": (
        replace(HEALTHY_GPU, driver="", driver_cuda=None, gpus=()),
        "libcuda.so.1 cannot be loaded",
        "--gpus all",
    ),
    "unusable_gpu": (replace(HEALTHY_GPU, gpus=()), "torch sees no device", "CUDA_VISIBLE_DEVICES"),
    "old_gpu": (replace(HEALTHY_GPU, gpus=(Gpu("V100", 70),)), "V100 is of compute capability 7.0", "sdpa"),
    "no_nvrtc": (
        replace(HEALTHY_GPU, nvrtc=None, nvrtc_error="libnvrtc.so.13: cannot open shared object file"),
        "libnvrtc.so.13: cannot open shared object file",
        "pip install nvidia-cuda-nvrtc",
    ),
    "old_nvrtc": (
        replace(HEALTHY_GPU, torch_cuda="12.1", versions=with_cupy("cupy-cuda12x"), nvrtc=(12, 1)),
        "NVRTC 12.1 is too old: the kernels need 12.4 or newer",
        "pip install --upgrade nvidia-cuda-nvrtc-cu12",
    ),
    "no_compiler": (
        replace(HEALTHY_CPU, compiler="", compiler_mend="apt-get install g++"),
        "no C++ compiler",
        "apt-get install g++",
    ),
    "unwritable_cache": (
        replace(HEALTHY_CPU, cache_dir="/proc/nohome/.cache", cache_error="/proc: No such file or directory"),
        "/proc/nohome/.cache cannot be written (/proc: No such file or directory)",
        "export HF_FLASH_CUPY_CACHE_DIR=",
    ),
    "wrong_kernel": (
        replace(HEALTHY_CPU, checks=(KernelCheck("host", "fa2_forward", 1e-3, 1e-6),)),
        "fa2_forward is off by 1.0e-03, allowed are 1.0e-06",
        "cache clear",
    ),
    "no_launch": (
        replace(HEALTHY_CPU, checks=(KernelCheck("host", failure="no kernel was launched"),)),
        "no kernel was launched",
        "cache clear",
    ),
    "nan_kernel": (
        replace(HEALTHY_CPU, checks=(KernelCheck("host", "fa2_forward", float("nan"), 1e-6),)),
        "fa2_forward is off by nan",
        "cache clear",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_its_mend_and_alone(fault: str) -> None:
    env, problem, mend = FAULTS[fault]
    found = only(env)
    assert problem in found.problem
    assert mend in found.mend
    assert found.fatal


def test_every_diagnosis_has_its_fault_here() -> None:
    seen = {diagnosis for env, _, _ in FAULTS.values() for diagnosis in DIAGNOSES if diagnosis(env)}
    assert seen == set(DIAGNOSES)


@pytest.mark.parametrize(
    "env",
    [
        replace(HEALTHY_GPU, compiler=""),
        replace(HEALTHY_CPU, versions=with_cupy("cupy-cuda13x")),
        replace(HEALTHY_GPU, gpus=(Gpu("H200", 90), Gpu("V100", 70))),
    ],
    ids=["gpu without a compiler", "cpu with CuPy but no NVRTC", "one of two devices too old"],
)
def test_what_leaves_the_machine_usable_is_a_remark(env: Environment) -> None:
    assert not only(env).fatal


def test_cuda_12_is_mended_with_cuda_12() -> None:
    env = replace(HEALTHY_GPU, torch_cuda="12.8", versions=with_cupy("cupy-cuda12x"), nvrtc=None)
    assert only(env).mend == "pip install nvidia-cuda-nvrtc-cu12"


def test_two_installed_cupys_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """J12: two distributions that own the same folder."""
    for name in ("cupy_cuda12x", "cupy_cuda13x"):
        info = tmp_path / f"{name}-14.2.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 14.2.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    env = Environment(versions=doctor.installed_versions(), compiler="g++")
    assert {"cupy-cuda12x", "cupy-cuda13x"} <= set(env.cupys)
    assert "pip uninstall -y" in diagnose(env)[0].mend


def test_the_versions_are_those_installed() -> None:
    found = doctor.installed_versions()
    for name in ("torch", "transformers", "numpy"):
        assert found[name] == importlib.metadata.version(name)


def test_a_folder_to_be_made_in_a_writable_one_is_writable(tmp_path: Path) -> None:
    assert doctor.why_unwritable(tmp_path / "a" / "b") == ""
    assert doctor.why_unwritable(Path("/proc/nohome/.cache")).startswith("/proc: ")


def test_the_kernel_check_fails_on_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check must notice a result that is off by 1 %, one of NaN, and one that no kernel made."""
    import hf_flash_cupy.functional as functional

    kernels = functional.flash_attention
    assert doctor.check_kernel("cpu").ok
    for spoil in (lambda out: out * 1.01, lambda out: out * float("nan")):
        monkeypatch.setattr(functional, "flash_attention", lambda *a, spoil=spoil, **k: spoil(kernels(*a, **k)))
        assert not doctor.check_kernel("cpu").ok
    monkeypatch.setattr(functional, "flash_attention", lambda q, *_, **__: torch.zeros_like(q))
    assert doctor.check_kernel("cpu").failure == "no kernel was launched"


@pytest.mark.slow
class TestOnThisMachine:
    """The command as a user runs it, but for the process of its own (test_house_wheel has that)."""

    def run(self) -> Result:
        return CliRunner().invoke(cli.app, ["doctor"], env={"COLUMNS": "200"})

    def test_it_is_healthy(self) -> None:
        answer = self.run()
        assert answer.exit_code == 0, answer.output
        assert "host kernel" in answer.output
        assert re.search(rf"^torch +{re.escape(torch.__version__)} *$", answer.output, re.MULTILINE)

    def test_a_missing_compiler_is_named(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
        answer = self.run()
        assert "no C++ compiler" in answer.output
        assert "apt-get install g++" in answer.output
        assert answer.exit_code == (0 if torch.cuda.is_available() else 1)

    def test_an_unwritable_cache_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_FLASH_CUPY_CACHE_DIR", "/proc/nohome/cache")
        answer = self.run()
        assert answer.exit_code == 1
        assert "/proc/nohome/cache cannot be written" in answer.output
