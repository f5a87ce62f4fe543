"""The host kernels under the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import sanitizer_cases

from hf_flash_cupy.jit import host_compiler

SANITIZE = "address,undefined"
HERE = Path(__file__).parent


def run_sanitized(program: str, *arguments: str) -> dict[str, dict[str, Any]]:
    """What a program of this folder reports from a process that loads sanitized kernels."""
    variables = {
        **host_compiler.sanitizer_environment(SANITIZE),
        "HF_FLASH_CUPY_SANITIZE": SANITIZE,
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]),
        "OMP_NUM_THREADS": "2",
    }
    command = [sys.executable, str(HERE / program), *arguments]
    answer = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False, timeout=900
    )
    assert answer.returncode == 0, f"exit {answer.returncode}\n{answer.stdout[-2000:]}\n{answer.stderr[-4000:]}"
    report: dict[str, dict[str, Any]] = json.loads(answer.stdout.splitlines()[-1])
    return report


def assert_clean(outcome: dict[str, Any]) -> None:
    assert outcome["status"] == 0, outcome["stderr"]
    assert "Sanitizer" not in outcome["stderr"]
    assert "runtime error" not in outcome["stderr"]


def families_are_clean(names: Iterable[str], subtests: pytest.Subtests) -> None:
    outcomes = run_sanitized("sanitizer_cases.py", "cpu", *names)
    assert set(outcomes) == set(names)
    for name, outcome in outcomes.items():
        with subtests.test(name):
            assert_clean(outcome)


@pytest.mark.slow
def test_families_are_clean(subtests: pytest.Subtests) -> None:
    families_are_clean(sanitizer_cases.CASES, subtests)


@pytest.mark.full
def test_more_families_are_clean(subtests: pytest.Subtests) -> None:
    families_are_clean(sanitizer_cases.MORE_CASES, subtests)


EXPECTED = {
    "global-read": ("heap-buffer-overflow", "READ of size 4"),
    "global-write": ("heap-buffer-overflow", "WRITE of size 4"),
    "shared-read": ("use-after-poison", "READ of size 4"),
    "shared-write": ("use-after-poison", "WRITE of size 4"),
    "shared-end": ("use-after-poison", "WRITE of size 4"),
    "shared-begin": ("heap-buffer-overflow", "WRITE of size 4"),
    "stack": ("stack-buffer-overflow", "WRITE of size 4"),
    "overflow": ("runtime error: signed integer overflow",),
    "shift": ("runtime error: shift exponent 252",),
}


@pytest.mark.slow
def test_planted_faults_are_seen(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """What the sanitizers must catch, they catch; the same kernel without a fault passes."""
    outcomes = run_sanitized("planted_faults.py", str(tmp_path))
    assert set(outcomes) == {"none", *EXPECTED}
    for name, outcome in outcomes.items():
        with subtests.test(name):
            if name == "none":
                assert_clean(outcome)
                continue
            assert outcome["status"] != 0
            for text in EXPECTED[name]:
                assert text in outcome["stderr"], outcome["stderr"]
