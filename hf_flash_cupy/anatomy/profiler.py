"""Device-memory traffic as Nsight Compute's counters see it, where ``ncu`` is installed."""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_flash_cupy.bench.shapes import Shape

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_bytes.sum")
_SCRIPT = "from hf_flash_cupy.anatomy.profiler import launch; launch({!r})"
_SEPARATOR = "spin_kernel"  # torch.cuda._sleep's: stands before the kernels of each implementation


@dataclass(frozen=True, slots=True)
class Counted:
    """Bytes, summed over the kernels of one call."""

    read: float  # from device memory
    written: float
    cache: float  # all traffic of the L2 cache
    kernels: int


def profile(shape: Shape, names: Sequence[str], direction: str) -> dict[str, Counted] | str:
    """One call of each implementation, all in one process under ncu, since starting that takes longest.

    Returns the counted bytes by name; else why that is not possible.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        return "ncu is not installed"
    script = _SCRIPT.format((asdict(shape), tuple(names), direction))
    options = ("--csv", "--print-units", "base", "--profile-from-start", "off", "--metrics", ",".join(METRICS))
    command = (ncu, *options, "--target-processes", "all", sys.executable, "-c", script)
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=300, env={**os.environ, "PYTHONPATH": path}
        )
    except subprocess.TimeoutExpired:
        return "ncu did not finish within 300 s"
    try:
        return dict(zip(names, parse(answer.stdout, len(names)), strict=True))
    except ValueError as error:
        lines = [
            line for line in (answer.stdout + answer.stderr).splitlines() if "==ERROR==" in line or "Error" in line
        ]
        return f"ncu: {lines[0].removeprefix('==ERROR==').strip() if lines else error}"


def parse(text: str, count: int) -> list[Counted]:
    """What ``ncu --csv`` printed, the program's own output around it included: a sum for each of ``count`` calls.

    Raises ValueError without figures.
    """
    lines = text.splitlines()
    start = next((index for index, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError("no table in its output")
    calls: list[dict[str, dict[str, float]]] = []  # of each: metrics by kernel
    separators = set()
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        if row["Metric Name"] not in METRICS:
            continue
        if _SEPARATOR in row["Kernel Name"]:
            if row["ID"] not in separators:
                calls.append({})
            separators.add(row["ID"])
        elif calls:
            calls[-1].setdefault(row["ID"], {})[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    if len(calls) != count or not all(calls):
        raise ValueError("no kernel of some implementation in its table")
    return [_sum(call) for call in calls]


def _sum(call: dict[str, dict[str, float]]) -> Counted:
    read, written, cache = (sum(kernel.get(metric, 0.0) for kernel in call.values()) for metric in METRICS)
    return Counted(read, written, cache, len(call))


def launch(call: tuple[dict[str, Any], tuple[str, ...], str]) -> None:
    """The process that ncu watches: all warm up, then one call of each between the profiler's marks."""
    import torch

    from hf_flash_cupy.bench import peers
    from hf_flash_cupy.bench.measure import Tensors, prepare

    shape, (names, direction) = Shape(**call[0]), call[1:]
    tensors = Tensors.of(shape, "cuda")
    runs = [prepare(peers.make(name, shape, direction, "cuda"), direction, tensors) for name in names]
    for run in runs:
        run()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    for run in runs:
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
        run()
        torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
