"""Device-memory traffic as Nsight Compute's counters see it, where ``ncu`` is installed."""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hf_flash_cupy.bench.shapes import Shape

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_bytes.sum")
_SCRIPT = "from hf_flash_cupy.anatomy.profiler import launch; launch({!r})"


@dataclass(frozen=True, slots=True)
class Counted:
    """Bytes, summed over the kernels of one call."""

    read: float  # from device memory
    written: float
    cache: float  # all traffic of the L2 cache
    kernels: int


def profile(shape: Shape, name: str, direction: str) -> Counted | str:
    """Runs one call of implementation ``name`` under ncu in a process of its own; else why that is not possible."""
    ncu = shutil.which("ncu")
    if ncu is None:
        return "ncu is not installed"
    script = _SCRIPT.format(
        (
            shape.batch,
            shape.seqlen,
            shape.heads,
            shape.heads_k,
            shape.head_dim,
            shape.causal,
            shape.dtype,
            name,
            direction,
        )
    )
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
        return parse(answer.stdout)
    except ValueError as error:
        lines = [
            line for line in (answer.stdout + answer.stderr).splitlines() if "==ERROR==" in line or "Error" in line
        ]
        return f"ncu: {lines[0].removeprefix('==ERROR==').strip() if lines else error}"


def parse(text: str) -> Counted:
    """What ``ncu --csv`` printed, the program's own output around it included. Raises ValueError without figures."""
    lines = text.splitlines()
    start = next((index for index, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError("no table in its output")
    sums = dict.fromkeys(METRICS, 0.0)
    kernels = set()
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        if row["Metric Name"] in sums:
            sums[row["Metric Name"]] += float(row["Metric Value"].replace(",", ""))
            kernels.add(row["ID"])
    if not kernels:
        raise ValueError("no kernel ran")
    read, written, cache = sums.values()
    return Counted(read, written, cache, len(kernels))


def launch(call: tuple[int, int, int, int, int, bool, str, str, str]) -> None:
    """The process that ncu watches: warms up, then one call between the profiler's marks."""
    import torch

    from hf_flash_cupy.bench import peers
    from hf_flash_cupy.bench.measure import Tensors, prepare

    shape, (name, direction) = Shape(*call[:7]), call[7:]
    run = prepare(peers.make(name, shape, direction, "cuda"), direction, Tensors.of(shape, "cuda"))
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
