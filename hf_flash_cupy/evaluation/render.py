"""A report for people: a table, Markdown or CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_flash_cupy.evaluation.schema import Comparison, Report, Result, Section

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_COLUMNS = (
    "attn",
    "backend",
    "ppl",
    "± (windows)",
    "Δ ln ppl",
    "± (paired)",
    "KL mean",
    "KL median",
    "KL p99",
    "KL max",
    "top-1",
    "max |Δlogit|",
    "tokens/s",
    "peak MiB",
    "compile s",
    "verdict",
)


def headline(report: Report) -> list[str]:
    """The lines without which a perplexity cannot be compared: model, data, protocol."""
    model, data, protocol, run = report.model, report.data, report.protocol, report.run
    joiner = f", {data.documents} documents" if data.documents > 1 else f", joiner {data.joiner!r}"
    return [
        f"model     {model.id}, {model.dtype}, {model.parameters / 1e6:.1f} M parameters",
        f"device    {run.gpu or run.device}",
        f"dataset   {data.name}{joiner}, {data.tokens} tokens of {data.tokens + data.truncated_tokens}",
        f"protocol  {_protocol(report)}",
        f"prefix    {protocol.prefix}",
        f"rule      {protocol.rule}",
    ]


def _protocol(section: Section) -> str:
    protocol = section.protocol
    return (
        f"{protocol.name}, context {protocol.context}, stride {protocol.stride}, "
        f"{protocol.windows} windows, {protocol.scored} tokens scored"
    )


def _rows(section: Section) -> list[list[str]]:
    comparisons = {comparison.attn: comparison for comparison in section.comparisons}
    return [_row(result, comparisons.get(result.attn)) for result in section.results]


def _row(result: Result, comparison: Comparison | None) -> list[str]:
    error = None if result.ppl is None or result.se_window is None else result.ppl * result.se_window
    row = [result.attn, result.backend, _number(result.ppl, ".6f"), _number(error, ".3g")]
    if comparison is None:
        row += ["baseline"] + [""] * 7
    else:
        row += [
            f"{comparison.dlnppl:+.2e}",
            _number(comparison.se_paired, ".1e"),
            _number(comparison.kl_mean, ".2e"),
            _number(comparison.kl_median, ".2e"),
            _number(comparison.kl_p99, ".2e"),
            _number(comparison.kl_max, ".2e"),
            f"{comparison.top1:.3%}",
            _number(comparison.max_abs_dlogit, ".2e"),
        ]
    peak = None if result.peak_bytes is None else result.peak_bytes / 2**20
    row += [_number(result.tokens_per_s, ".1f"), _number(peak, ".0f"), _number(result.compile_s, ".2f")]
    return [*row, comparison.verdict if comparison else ""]


def _number(value: float | None, spec: str) -> str:
    return "–" if value is None or not math.isfinite(value) else format(value, spec)


def as_table(report: Report) -> list[RenderableType]:
    """Headline, one table per context length (an implementation a column, so that it fits a terminal),
    checks, gates.
    """
    from rich.text import Text

    parts: list[RenderableType] = [Text(line) for line in headline(report)]
    for section in (report, *report.lengths):
        if section is not report:
            parts.append(Text(f"protocol  {_protocol(section)}"))
        if section.results:
            parts.append(_section_table(section))
        parts += [Text(line) for line in _units(section)]
    failed = [check for check in report.checks if not check.ok]
    parts.append(Text(f"checks    {len(report.checks) - len(failed)} of {len(report.checks)} passed"))
    parts += [Text(f"  FAILED {check.name}: {check.detail}", style="bold red") for check in failed]
    parts.append(Text(f"gates     {sum(gate.ok for gate in report.gates)} of {len(report.gates)} passed"))
    for gate in report.gates:
        if not gate.ok:
            parts.append(
                Text(
                    f"  FAILED {gate.name}: {_number(gate.value, '.4g')}, limit {gate.limit:.4g}",
                    style="bold red",
                )
            )
    return parts


def _section_table(section: Section) -> Table:
    from rich.table import Table

    rows = _rows(section)
    table = Table(show_header=False)
    table.add_column(style="bold")
    for _ in rows:
        table.add_column(justify="right")
    for index, name in enumerate(_COLUMNS):
        table.add_row(name, *(row[index] for row in rows))
    return table


def _units(section: Section) -> list[str]:
    if not section.results:
        return ["no window was evaluated"]
    base = section.results[0]
    lines = [
        f"baseline  {base.attn}: nll {base.nll_mean:.6f} nats/token, "
        f"{_number(base.bits_per_byte, '.5f')} bits/byte, "
        f"byte ppl {_number(base.byte_ppl, '.5f')}, word ppl {_number(base.word_ppl, '.4f')}"
    ]
    if floor := section.noise_floor:
        lines.append(
            f"floor     {floor.attn} against {floor.baseline}: |Δ ln ppl| {abs(floor.dlnppl):.2e}, KL mean "
            f"{_number(floor.kl_mean, '.2e')}, top-1 {floor.top1:.3%}"
        )
    return lines


def as_json(report: Report) -> str:
    document = report.model_dump(mode="json", by_alias=True)
    first = ("schema", "run", "model", "data")  # what the numbers are about, before the numbers
    ordered = {key: document[key] for key in (*first, *(key for key in document if key not in first))}
    return json.dumps(ordered, indent=1, allow_nan=False) + "\n"


def as_markdown(report: Report) -> str:
    lines = [f"    {line}" for line in headline(report)]
    for section in (report, *report.lengths):
        lines += [
            "",
            f"{_protocol(section)}:",
            "",
            _markdown_row(_COLUMNS),
            _markdown_row(["---"] * len(_COLUMNS)),
        ]
        lines += [_markdown_row(row) for row in _rows(section)]
    return "\n".join(lines) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def as_csv(report: Report) -> str:
    """One line per implementation and context length; numbers as in the JSON, not rounded."""
    out = io.StringIO()
    results = [
        "attn",
        "backend",
        "nll_mean",
        "ppl",
        "se_naive",
        "se_window",
        "word_ppl",
        "byte_ppl",
        "bits_per_byte",
    ]
    results += ["tokens_per_s", "seconds", "peak_bytes", "compile_s", "cache_hits"]
    comparisons = ["baseline", "dlnppl", "se_paired", "ppl_ratio", "kl_mean", "kl_median", "kl_p99", "kl_max"]
    comparisons += ["top1", "max_abs_dlogit", "verdict"]
    protocol = ["name", "context", "stride", "prefix", "scored"]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["model", "dtype", "data", "protocol", *protocol[1:], *results, *comparisons])
    for section in (report, *report.lengths):
        pairs = {comparison.attn: comparison for comparison in section.comparisons}
        for result in section.results:
            row: list[object] = [report.model.id, report.model.dtype, report.data.name]
            row += [getattr(section.protocol, name) for name in protocol]
            row += [getattr(result, name) for name in results]
            row += [getattr(pairs.get(result.attn), name, None) for name in comparisons]
            writer.writerow(row)
    return out.getvalue()
