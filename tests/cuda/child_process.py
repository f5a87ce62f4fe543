"""Programs in processes of their own: no other test has touched their CUDA context, pools and kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PRELUDE = """
import json, sys, time
import torch
def rand(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)
def report(**facts):
    print(json.dumps(facts))
"""


def run(program: str, **variables: str) -> dict[str, Any]:
    """The last line that ``program`` prints, through ``report(name=value, …)``."""
    folders = [str(FOLDER), str(FOLDER.parent / "attention"), str(FOLDER.parents[1])]
    path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    answer = subprocess.run(
        [sys.executable, "-c", PRELUDE + program],
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert answer.returncode == 0, f"exit {answer.returncode}\n{answer.stdout[-2000:]}\n{answer.stderr[-4000:]}"
    facts: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return facts
