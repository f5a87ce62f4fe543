"""The tables of docs/: measured figures from the records in benchmarks/, counted ones from the kernels' tiles."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from model_table import model_table

from hf_flash_cupy.anatomy import facts, kernels
from hf_flash_cupy.bench.measure import Row
from hf_flash_cupy.bench.models import WORKLOADS, ModelRow, Workload, best_peer
from hf_flash_cupy.bench.record import Record, read
from hf_flash_cupy.bench.shapes import Shape
from hf_flash_cupy.cards import find_card


def bench_records(folder: Path) -> dict[str, Record]:
    """The records of the benchmark by file name, the newest first; smoke runs are none."""
    records = {path.name: record for path in folder.glob("*.json") if (record := _of_benchmark(path))}
    return dict(sorted(records.items(), key=lambda item: (item[1].environment["date"], item[0]), reverse=True))


def _of_benchmark(path: Path) -> Record | None:
    content = json.loads(path.read_text())
    rows = content.get("rows")
    is_record = content.get("models") or (rows and "shape" in rows[0])
    record = read(path) if is_record else None
    return None if record is None or record.smoke else record


def newest(
    records: dict[str, Record], names: tuple[str, ...], direction: str, **shape: object
) -> tuple[str, Row] | None:
    """The row with the most of ``names``, of the newest record among equals: ratios compare within a record only."""
    found = [(name, row) for name, record in records.items() if (row := record.find(direction, **shape)) is not None]
    return max(found, key=lambda pair: len(set(names) & pair[1].milliseconds.keys()), default=None)


Words = dict[str, str]
WORDS: dict[str, Words] = {
    "en": {
        "language": "en",
        "forward": "forward",
        "backward": "backward",
        "both": "forward + backward",
        "causal": "causal",
        "yes": "yes",
        "no": "no",
        "none": "not measured",
        "record": "record",
        "peak": "of the peak",
        "busy": "SMs with work",
        "standard": "standard attention",
        "grid": "thread blocks",
        "moved": "read / written by thread blocks",
        "matrix": "FLOPs in matrix instructions",
        "other": "operations outside, and their share",
        "times": "least µs at the peaks of an H200: inside / outside",
        "extra": "extra memory",
        "workload": "milliseconds (extra MiB)",
        "best": "as fast as the best other",
        "refuses": "refuses",
        "prefill": "prefill",
        "train": "forward + backward",
        "generate": "generate 64",
        "generate static": "generate 64, static cache, compiled",
        "left-padded": "left-padded",
        "packed": "packed",
    },
    "zh": {
        "language": "zh",
        "forward": "前向",
        "backward": "反向",
        "both": "前向 + 反向",
        "causal": "因果",
        "yes": "是",
        "no": "否",
        "none": "未测量",
        "record": "记录",
        "peak": "占峰值",
        "busy": "有活干的 SM",
        "standard": "标准注意力",
        "grid": "线程块数",
        "moved": "线程块读 / 写的字节",
        "matrix": "矩阵指令中的 FLOPs",
        "other": "矩阵指令之外的运算及其占比",
        "times": "按 H200 峰值计的最短 µs：之内 / 之外",
        "extra": "额外显存",
        "workload": "毫秒（额外 MiB）",
        "best": "是其他最快者的几倍快",
        "refuses": "拒绝",
        "prefill": "prefill",
        "train": "前向 + 反向",
        "generate": "生成 64 个 token",
        "generate static": "生成 64 个 token，静态缓存，编译",
        "left-padded": "左填充",
        "packed": "打包",
    },
}


def _lines(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def _speed(found: tuple[str, Row] | None, name: str, words: Words) -> str:
    return f"{found[1].tflops[name]:.0f}" if found and name in found[1].tflops else _missing(found, name, words)


def _missing(found: tuple[str, Row] | None, name: str, words: Words) -> str:
    return "OOM" if found and "out of memory" in found[1].failed.get(name, "") else words["none"]


def _times(found: tuple[str, Row] | None, name: str, than: str) -> str:
    """How many times as fast ``name`` is as ``than``."""
    if found is None or not {name, than} <= found[1].milliseconds.keys():
        return "–"
    return f"**{found[1].milliseconds[than] / found[1].milliseconds[name]:.2f}×**"


def _source(found: tuple[str, object] | None) -> str:
    return f"[{found[0].removesuffix('.json')}](../benchmarks/{found[0]})" if found else "–"


def fa1_speed(records: dict[str, Record], words: Words) -> str:
    """FlashAttention-1 against standard attention: 128 heads in all, D 64."""
    names = ("cupy_fa1", "cupy_fa2", "eager")
    head = [
        "",
        "S",
        words["causal"],
        *(f"{name}, TFLOP/s" for name in names),
        "fa1 / eager",
        "fa2 / fa1",
        words["record"],
    ]
    rows = []
    for direction in ("forward", "both"):
        for seqlen in (2048, 4096, 8192, 16384):
            for causal in (False, True):
                shape = {
                    "batch": 8,
                    "heads": 16,
                    "head_dim": 64,
                    "seqlen": seqlen,
                    "causal": causal,
                    "dtype": "bfloat16",
                }
                found = newest(records, names, direction, **shape)
                ratios = [_times(found, "cupy_fa1", "eager"), _times(found, "cupy_fa2", "cupy_fa1")]
                cells = [words[direction], f"{seqlen:,}", words["yes" if causal else "no"]]
                rows.append([*cells, *(_speed(found, name, words) for name in names), *ratios, _source(found)])
    return _lines(head, rows)


def fa1_memory(records: dict[str, Record], words: Words) -> str:
    """Peak memory of one call beyond its inputs, MiB: 128 heads in all, D 64, not causal."""
    names = ("cupy_fa1", "cupy_fa2", "eager")
    head = ["", "S", *(f"{name}, MiB" for name in names), "eager / fa1", words["record"]]
    rows = []
    for direction in ("forward", "both"):
        for seqlen in (2048, 4096, 8192):
            shape = {"batch": 8, "heads": 16, "head_dim": 64, "seqlen": seqlen, "causal": False, "dtype": "bfloat16"}
            found = newest(records, names, direction, **shape)
            peak = found[1].peak_bytes if found else {}
            cells = [f"{peak[n] / 2**20:,.0f}" if n in peak else _missing(found, n, words) for n in names]
            known = {"eager", "cupy_fa1"} <= peak.keys()
            ratio = f"**{peak['eager'] / peak['cupy_fa1']:.1f}×**" if known else "–"
            rows.append([words[direction], f"{seqlen:,}", *cells, ratio, _source(found)])
    return _lines(head, rows)


def fa2_speed(records: dict[str, Record], words: Words) -> str:
    """The papers' cells: 16,384 tokens, hidden size 2048."""
    names = ("cupy_fa1", "cupy_fa2", "flash")
    labels = ("cupy_fa1", "cupy_fa2", "torch SDPA flash")
    ratios = ["fa2 / fa1", "fa2 / flash", f"fa2, {words['peak']}"]
    head = ["", "D", "S", words["causal"], *(f"{label}, TFLOP/s" for label in labels), *ratios, words["record"]]
    rows = []
    for direction in ("forward", "backward"):
        for head_dim in (64, 128):
            for seqlen in (1024, 4096, 16384):
                for causal in (False, True):
                    sizes = {"batch": 16384 // seqlen, "heads": 2048 // head_dim, "head_dim": head_dim}
                    kind = {"seqlen": seqlen, "causal": causal, "dtype": "bfloat16"}
                    found = newest(records, names, direction, **sizes, **kind)
                    cells = [words[direction], str(head_dim), f"{seqlen:,}"]
                    cells += [words["yes" if causal else "no"], *(_speed(found, name, words) for name in names)]
                    cells += [_times(found, "cupy_fa2", other) for other in ("cupy_fa1", "flash")]
                    rows.append([*cells, _share(records, found), _source(found)])
    return _lines(head, rows)


def _share(records: dict[str, Record], found: tuple[str, Row] | None) -> str:
    """Part of the card's 16-bit matrix peak that FlashAttention-2 reaches."""
    if found is None or "cupy_fa2" not in found[1].tflops:
        return "–"
    card = find_card(str(records[found[0]].environment["card"]))
    return f"{100 * found[1].tflops['cupy_fa2'] / card.matrix_tflops:.0f} %" if card else "–"


def few_heads(records: dict[str, Record], words: Words) -> str:
    """Parallel granularity: S 4,096, D 64, not causal, one batch entry; SMs of an H200."""
    names = ("cupy_fa1", "cupy_fa2")
    head = ["", "batch × heads", f"{words['busy']}: fa1 / fa2", *(f"{name}, TFLOP/s" for name in names), "fa2 / fa1"]
    rows = []
    for direction in ("forward", "backward"):
        for heads in (1, 8, 16, 64, 128, 256):
            shape = Shape(1, 4096, heads, heads, 64, False)
            sizes = {"batch": 1, "heads": heads, "head_dim": 64, "seqlen": 4096, "causal": False, "dtype": "bfloat16"}
            found = newest(records, names, direction, **sizes)
            grids = [kernels.find(shape, name, direction, "90", compile_it=False).num_blocks for name in ("fa1", "fa2")]
            cells = [words[direction], str(heads), " / ".join(str(min(grid, 132)) for grid in grids)]
            cells += [*(_speed(found, name, words) for name in names), _times(found, "cupy_fa2", "cupy_fa1")]
            rows.append([*cells, _source(found)])
    return _lines([*head, words["record"]], rows)


def work_table(records: dict[str, Record], words: Words) -> str:
    """The forward of 16 heads of 4,096 rows, D 64, bf16, counted with the tiles of an H200."""
    shape = Shape(1, 4096, 16, 16, 64, False)
    card = find_card("H200")
    assert card is not None
    columns: dict[str, list[str]] = {
        name: [] for name in ("grid", "busy", "moved", "matrix", "other", "times", "extra")
    }
    for algorithm in ("standard", "fa1", "fa2"):
        kernel = None
        if algorithm != "standard":
            kernel = kernels.find(shape, algorithm, "forward", card.arch, compile_it=False)
        work = facts.gather(shape, algorithm, "forward", kernel).work
        assert work is not None
        times = (work.matrix / card.matrix_tflops / 1e6, work.other_total / card.fp32_tflops / 1e6)
        columns["grid"].append(f"{kernel.num_blocks:,}" if kernel else "–")
        columns["busy"].append(f"{min(kernel.num_blocks, card.num_sms)} / {card.num_sms}" if kernel else "–")
        columns["moved"].append(f"{facts.size(work.moved.read)} / {facts.size(work.moved.written)}")
        columns["matrix"].append(facts.count(work.matrix))
        columns["other"].append(f"{facts.count(work.other_total)}, {100 * work.other_total / work.matrix:.1f} %")
        columns["times"].append(" / ".join(f"{time:.0f}" for time in times))
        columns["extra"].append(facts.size(work.extra_bytes))
    head = ["", words["standard"], "FlashAttention-1", "FlashAttention-2"]
    return _lines(head, [[words[name], *cells] for name, cells in columns.items()])


def whole_models(records: dict[str, Record], words: Words) -> str:
    """Every row of ``bench models``, of the newest record that has it."""
    names = ("cupy_fa2", "sdpa", "flex_attention", "eager")
    head = [words["workload"], *names, words["best"], words["record"]]
    lines = []
    for name, workload in WORKLOADS.items():
        found = next(
            ((file, row) for file, record in records.items() for row in record.models if row.name == name), None
        )
        if found is None:
            continue
        file, row = found
        best = best_peer(row)
        ratio = f"**{1 / best[1]:.2f}×** ({best[0]})" if best else "–"
        cells = [_model_cost(row, each, words) for each in names]
        lines.append([_workload_label(workload, words), *cells, ratio, _source((file, None))])
    return _lines(head, lines)


def _model_cost(row: ModelRow, name: str, words: Words) -> str:
    if name not in row.milliseconds:
        reason = row.failed.get(name, "")
        return "OOM" if "out of memory" in reason else words["refuses"] if reason else words["none"]
    time = row.milliseconds[name]
    shown = f"{time:,.0f}" if time >= 100 else f"{time:.1f}"
    return f"{shown} ({row.extra_bytes[name] / 2**20:,.0f})"


def _workload_label(workload: Workload, words: Words) -> str:
    layout = "" if workload.layout == "plain" else f", {words[workload.layout]}"
    return f"{workload.model}: {words[workload.kind]}, {workload.batch} × {workload.seqlen:,}{layout}"


TABLES: dict[str, Callable[[dict[str, Record], Words], str]] = {
    "work": work_table,
    "fa1-speed": fa1_speed,
    "fa1-memory": fa1_memory,
    "fa2-speed": fa2_speed,
    "few-heads": few_heads,
    "whole-models": whole_models,
    "models": lambda records, words: model_table(words["language"]),
}
