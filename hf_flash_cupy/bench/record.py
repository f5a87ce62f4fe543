"""A run as a JSON record: card, driver, versions, command, every figure."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from hf_flash_cupy.bench.decode import DecodeRow
from hf_flash_cupy.bench.measure import Row
from hf_flash_cupy.bench.models import ModelRow
from hf_flash_cupy.bench.shapes import Shape

_DISTRIBUTIONS = (
    "hf-flash-cupy",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12",
    "transformers",
    "triton",
    "flash-attn",
    "fa3-fwd",
    "flash-attn-4",
)


@dataclass
class Record:
    """What a run measured and on what. ``smoke``: on a CPU, to see that it works; its times mean nothing."""

    environment: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)  # rows that the time budget left out
    call_microseconds: dict[str, float] = field(default_factory=dict)
    smoke: bool = False
    models: list[ModelRow] = field(default_factory=list)  # whole models
    decode: list[DecodeRow] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Replaces ``path`` in one step, so that an interrupted run leaves a whole record."""
        content = {
            **self.environment,
            "smoke": self.smoke,
            "rows": [asdict(row) for row in self.rows],
            "models": [asdict(row) for row in self.models],
            "decode": [asdict(row) for row in self.decode],
            "not_run": self.not_run,
            "call_microseconds": self.call_microseconds,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(path.name + ".new")
        new.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(new, path)

    def find(self, direction: str, **shape: object) -> Row | None:
        """The first row of ``direction`` whose shape has these values, e.g. ``head_dim=64, causal=True``."""
        for row in self.rows:
            if row.direction == direction and all(getattr(row.shape, key) == value for key, value in shape.items()):
                return row
        return None


def read(path: Path) -> Record:
    """The record in ``path``, those of version 0.1 (forward only, our extra bytes only) included."""
    content: dict[str, Any] = json.loads(path.read_text())
    rows = [_row(each) for each in content.pop("rows")]
    models = [ModelRow(**each) for each in content.pop("models", [])]
    decode = [DecodeRow(**each) for each in content.pop("decode", [])]
    taken = {name: content.pop(name, default) for name, default in (("not_run", []), ("call_microseconds", {}))}
    smoke = content.pop("smoke", False)
    return Record(rows=rows, models=models, decode=decode, smoke=smoke, environment=content, **taken)


def _row(content: dict[str, Any]) -> Row:
    fields = {name: value for name, value in content.items() if name not in ("shape", "ratio")}
    if not isinstance(fields["extra_bytes"], dict):
        fields["extra_bytes"] = {"cupy_fa2": fields["extra_bytes"]}
    shape = Shape(**{**content["shape"], "packed": tuple(content["shape"].get("packed", ()))})  # JSON has lists alone
    return Row(shape=shape, **{"direction": "forward", **fields})


def environment(device: str, arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Date, command, card, driver, power limit, SMs and versions."""
    command = list(sys.argv if arguments is None else arguments)
    command[0] = Path(command[0]).name
    versions: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        versions |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}  # type: ignore[no-untyped-call]
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    facts = {"card": "CPU", "driver": "", "power_limit": "", "num_sms": 0} if device == "cpu" else _card()
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    return {"date": date, "command": shlex.join(["python", *command]), **facts, "versions": versions}


def _card() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    query = ["nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        name, driver, power = answer.splitlines()[0].split(", ")
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        name, driver, power = properties.name, "", ""
    return {"card": name, "driver": driver, "power_limit": power, "num_sms": properties.multi_processor_count}
