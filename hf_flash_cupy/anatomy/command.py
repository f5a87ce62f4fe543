"""The command ``explain``: three algorithms on one shape, side by side."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from hf_flash_cupy import cards
from hf_flash_cupy.anatomy import facts as facts_
from hf_flash_cupy.anatomy import kernels, profiler
from hf_flash_cupy.anatomy.facts import ALGORITHMS, IMPLEMENTATIONS, Facts
from hf_flash_cupy.bench.measure import Measurement, Row
from hf_flash_cupy.bench.shapes import DTYPES, Shape
from hf_flash_cupy.cards import Card
from hf_flash_cupy.errors import UnsupportedProblem

_ROUNDS, _ROUND_MS = 6, 20.0


def explain(
    batch: Annotated[int, typer.Option(min=1)] = 1,
    seqlen: Annotated[int, typer.Option(min=1, help="rows of q and of k")] = 4096,
    heads: Annotated[int, typer.Option(min=1)] = 16,
    kv_heads: Annotated[int, typer.Option(min=0, help="heads of k and v, 0 = those of q")] = 0,
    head_dim: Annotated[int, typer.Option(min=1)] = 64,
    causal: Annotated[bool, typer.Option("--causal", help="row i sees keys up to i")] = False,
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "bfloat16",
    direction: Annotated[str, typer.Option(help="forward, backward or both")] = "both",
    arch: Annotated[str, typer.Option(help="compute capability, e.g. 80 or 8.0; default: this GPU's, else 90")] = "",
    card: Annotated[
        str, typer.Option(help="GPU whose figures to use, e.g. A100; default: this GPU, else a usual one")
    ] = "",
    measure: Annotated[bool, typer.Option(help="time the three on this GPU")] = True,
    ncu: Annotated[bool, typer.Option(help="count bytes with Nsight Compute, where it is installed")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="everything as JSON")] = False,
) -> None:
    """Shows what standard attention, FlashAttention-1 and FlashAttention-2 do for one shape."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"--dtype {dtype}: supported are {', '.join(DTYPES)}")
    if heads % (kv_heads or heads):
        raise typer.BadParameter(f"--kv-heads {kv_heads}: must divide --heads {heads}")
    directions = {"both": ("forward", "backward")}.get(direction, (direction,))
    if unknown := set(directions) - {"forward", "backward"}:
        raise typer.BadParameter(f"--direction {unknown.pop()}: supported are forward, backward, both")
    shape = Shape(batch, seqlen, heads, kv_heads or heads, head_dim, causal, dtype)
    try:
        capability, known, num_sms, present = _machine(arch, card)
        kernel_arch = kernels.kernel_arch(capability)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    content: dict[str, Any] = {"shape": asdict(shape), "arch": capability, "num_sms": num_sms}
    console = Console(width=None if Console().is_terminal else 200)
    for each in directions:
        columns = [_facts(shape, algorithm, each, kernel_arch) for algorithm in ALGORITHMS]
        if measure and present:
            _measure(shape, each, columns, known, ncu)
        tables = {f.algorithm: facts_.rows(f, shape, known, num_sms) for f in columns}
        content[each] = tables
        if not as_json:
            console.print(_table(f"{each.capitalize()} of {shape.label}, {_where(known, capability, num_sms)}", tables))
    if not present and not as_json:
        console.print("Not measured: the GPU asked for is not here.", style="dim")
    if as_json:
        typer.echo(json.dumps(content, indent=1, ensure_ascii=False))


def _machine(arch: str, card: str) -> tuple[str, Card | None, int, bool]:
    """Compute capability, what is known of the card, its SMs, and whether it is the GPU of this machine."""
    arch = re.sub(r"^(\d+)\.(\d)$", r"\1\2", arch.strip())  # as NVIDIA writes it
    if card:
        known = cards.find_card(card)
        if known is None:
            names = ", ".join(each.name for each in cards.CARDS)
            raise ValueError(f"--card {card}: known are {names}.")
        if arch not in ("", known.arch):
            raise ValueError(
                f"--arch {arch}, --card {card}: {known.name} has compute capability {known.arch}; give one."
            )
        return known.arch, known, known.num_sms, False
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        own = f"{properties.major}{properties.minor}"
        if arch in ("", own):
            return own, cards.find_card(properties.name), properties.multi_processor_count, True
    known = cards.card_of_arch(arch or "90")
    if known is None:
        listed = ", ".join(sorted({each.arch for each in cards.CARDS}, key=int))
        raise ValueError(f"--arch {arch}: no card of that compute capability is known; those of {listed} are.")
    return known.arch, known, known.num_sms, False


def _where(card: Card | None, capability: str, num_sms: int) -> str:
    name = card.name if card else "this GPU"
    return f"{name}: compute capability {capability[:-1]}.{capability[-1]}, {num_sms} SMs"


def _facts(shape: Shape, algorithm: str, direction: str, arch: str) -> Facts:
    if algorithm == "standard":
        return facts_.gather(shape, algorithm, direction, None)
    try:
        kernel = kernels.find(shape, algorithm, direction, arch)
    except UnsupportedProblem as error:
        return Facts(algorithm, direction, None, None, {"refused": str(error)})
    return facts_.gather(shape, algorithm, direction, kernel)


def _measure(shape: Shape, direction: str, columns: list[Facts], card: Card | None, ncu: bool) -> None:
    """Adds to each column what the GPU shows: time, speed, share of the peak, memory, counted bytes."""
    names = [IMPLEMENTATIONS[column.algorithm] for column in columns]
    try:
        row = Measurement(shape, "cuda", _ROUNDS, _ROUND_MS).row(direction, names)
    except torch.OutOfMemoryError:
        row = Row(shape, direction, failed=dict.fromkeys(names, "the inputs alone are out of memory"))
    ran = [name for name in names if name in row.milliseconds] if ncu else []
    counted = profiler.profile(shape, ran, direction) if ran else {}
    for column, name in zip(columns, names, strict=True):
        column.measured |= measured(row, name, card)
        if name in ran:
            found = f"not measured: {counted}" if isinstance(counted, str) else facts_.counted(counted[name])
            column.measured["bytes (measured)"] = found


def measured(row: Row, name: str, card: Card | None) -> dict[str, str]:
    """What a row of the benchmark says of one implementation."""
    if name not in row.milliseconds:
        return {"time": f"not measured: {row.failed.get(name, 'it did not run')}"}
    speed = row.tflops[name]
    share = f", {100 * speed / card.matrix_tflops:.0f} % of the card's peak" if card else ""
    found = {
        "time": f"{row.milliseconds[name] * 1e3:,.0f} µs",
        "speed": f"{speed:.0f} TFLOP/s of useful work{share}",
    }
    if name in row.peak_bytes:
        extra = facts_.size(row.extra_bytes[name])
        found["peak memory (measured)"] = f"{facts_.size(row.peak_bytes[name])}, {extra} of it beyond the results"
    return found


def _table(title: str, tables: dict[str, dict[str, str]]) -> Table:
    table = Table("", title=title, title_justify="left", show_lines=True)
    for name in tables:
        table.add_column(ALGORITHMS[name], overflow="fold")
    labels = dict.fromkeys(label for rows in tables.values() for label in rows)
    order = [label for label in max(tables.values(), key=len) if label in labels]
    for label in (*order, *(label for label in labels if label not in order)):
        table.add_row(label, *(rows.get(label, "–") for rows in tables.values()))
    return table
