"""Several processes: DDP, FSDP2 and tensor parallel training, and an evaluation dealt out. Two each, gloo or NCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from hf_flash_cupy.evaluation.meters import Cost
from hf_flash_cupy.evaluation.processes import merged
from hf_flash_cupy.evaluation.runner import Tally

from .test_perplexity import WORDS, tokenizer
from .tiny import CONFIGS, VOCAB, build

FOLDER = Path(__file__).parent
CASES = ("ddp", "fsdp2", "tensor_parallel", "dtensors_are_refused")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def environment(**variables: str) -> dict[str, str]:
    path = os.pathsep.join([str(FOLDER.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}


def torchrun(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command],
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, two_gpus])])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What every case of process_cases.py ended with, in one pair of processes: "" or its traceback."""
    folder = tmp_path_factory.mktemp("processes")
    build("llama").save_pretrained(folder)
    file = folder / "results.json"
    program = str(FOLDER / "process_cases.py")
    answer = torchrun(program, request.param, str(folder), str(file), HF_FLASH_CUPY_CPU="kernels")
    assert answer.returncode == 0, f"{answer.stdout[-2000:]}\n{answer.stderr[-4000:]}"
    found: dict[str, Any] = json.loads(file.read_text())
    assert set(found) == set(CASES)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_training(results: dict[str, str], case: str) -> None:
    assert results[case] == "", results[case]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of an evaluation whose 13 windows make batches of 4, 4, 4 and 1."""
    folder = tmp_path_factory.mktemp("evaluated")
    transformers.LlamaForCausalLM(CONFIGS["llama"]()).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    picks = torch.randint(3, VOCAB, (220,), generator=torch.Generator().manual_seed(1)).tolist()
    (folder / "words.txt").write_text(" ".join(WORDS[pick] for pick in picks))
    command = ["-m", "hf_flash_cupy", "ppl", "--model", str(folder), "--text", str(folder / "words.txt")]
    command += [
        "--context",
        "32",
        "--stride",
        "16",
        "--batch-size",
        "4",
        "--attn",
        "eager,cupy_fa2",
        "--format",
        "json",
    ]
    return command


def sums(answer: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """All of a report that does not tell of time, memory and the machine."""
    assert answer.returncode == 0, f"{answer.stdout[-2000:]}\n{answer.stderr[-4000:]}"
    report = json.loads(answer.stdout)  # one process reports
    costs = ("tokens_per_s", "seconds", "peak_bytes", "compile_s", "cache_hits", "null_reasons")
    results = [{key: value for key, value in each.items() if key not in costs} for each in report["results"]]
    return {name: report[name] for name in ("windows", "comparisons", "protocol", "checks")} | {"results": results}


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, two_gpus])])
@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("accelerate", marks=pytest.mark.full)])
def test_an_evaluation_dealt_out_gives_the_sums_of_one_process(
    evaluated: list[str], launcher: str, device: str
) -> None:
    command = [*evaluated, "--device", device]
    alone = subprocess.run(
        [sys.executable, *command], env=environment(), capture_output=True, text=True, check=False, timeout=400
    )
    if launcher == "torchrun":
        dealt = torchrun(*command)
    else:
        # --multi_gpu is what makes it start processes; the evaluation's own --device says where they run.
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
        launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--gpu_ids", "all"]
        dealt = subprocess.run(
            [*launch, *command], env=environment(), capture_output=True, text=True, check=False, timeout=400
        )
    assert "2 processes" in dealt.stdout
    assert sums(dealt) == sums(alone)
    assert len(sums(alone)["windows"]) == 13


def test_tallies_of_processes_make_one() -> None:
    first, second = Tally.empty("a", 3), Tally.empty("a", 3)
    first.nll[0], first.nll[2], second.nll[1] = (np.full(2, float(i)) for i in (0, 2, 1))
    first.kl[0] = np.full(2, 0.5)
    first.same_top1, second.same_top1 = 3, 4
    first.max_abs_dlogit, second.max_abs_dlogit = 0.1, 0.3
    first.cost, second.cost = Cost(2.0, 100, 7, 0.5, 1), Cost(3.0, 50, None, 0.25, 2)
    whole = merged([first, second])
    assert [float(x[0]) for x in whole.nll if x is not None] == [0.0, 1.0, 2.0]
    assert whole.kl[0] is first.kl[0]
    assert (whole.same_top1, whole.max_abs_dlogit) == (7, 0.3)
    assert whole.cost == Cost(3.0, 150, 7, 0.75, 3)
