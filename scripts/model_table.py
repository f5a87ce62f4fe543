"""The tables of docs/models.md: the record that scripts/model_matrix.py keeps, as Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parents[1] / "benchmarks" / "models.json"

Run = dict[str, Any]

# What stands in the record's English.
CHINESE = {
    "run": "运行",
    "model types": "模型类型",
    "equal to eager in every mode": "所有模式都与 eager 相等",
    "accelerated": "加速",
    "accelerated and equal": "加速且相等",
    "Decoder": "解码器",
    "Encoder, encoder-decoder": "编码器、编码器-解码器",
    "Image, video": "图像、视频",
    "Audio": "音频",
    "Text with images": "图文",
    "model": "模型",
    "head size": "头宽",
    "masks": "掩码",
    "features": "特性",
    "notes": "说明",
    "attention of its own": "自带的注意力",
    "its pooling head ({}) is not routed": "池化头（{}）不走注意力接口",
    "eager fails, too": "eager 也失败",
    "selected keys as a mask": "选中的键以掩码给出",
    "selected blocks of keys as a mask": "选中的键块以掩码给出",
    "eager forgets causality where no attention_mask is given": "没有 attention_mask 时 eager 忘了因果性",
    "with ALiBi its own: eager adds it twice, sdpa once": "带 ALiBi 时用自带的：eager 加两次，sdpa 加一次",
    "with a static cache eager's window lies at the cache's end": "静态缓存下 eager 的窗口落在缓存末尾",
    "its file computes the scores itself": "模型文件自己计算分数",
    "its file computes the scores itself up to Transformers 5.17": "到 Transformers 5.17 为止模型文件自己计算分数",
    "half of the heads are convolutions": "一半的头是卷积",
    "scores of content and position apart": "内容与位置的分数分开计算",
    "windows in blocks, and global tokens": "分块窗口加全局 token",
    "the encoder's sparse attention is its own; the decoder is accelerated": "编码器的稀疏注意力自带；解码器被加速",
    "the image tower's attention is its own; the text model is accelerated": "图像塔的注意力自带；文本模型被加速",
    "scores are cosines": "分数是余弦",
    "position bias gated by each layer's input": "位置偏置由各层输入门控",
}


class Words:
    """Texts of one language."""

    def __init__(self, language: str) -> None:
        self.chinese = language == "zh"

    def __call__(self, text: str) -> str:
        return CHINESE[text] if self.chinese and text else text


def model_table(language: str = "en") -> str:
    """A summary of every run, then one table a kind of model."""
    words = Words(language)
    runs: list[Run] = json.loads(RECORD.read_text())["runs"]
    head = ["run", "model types", "equal to eager in every mode", "accelerated"]
    parts = [f"| {' | '.join(map(words, head))} |\n|---|---|---|---|"]
    parts[0] += "".join(f"\n{_summary(run, words)}" for run in runs)
    names: dict[str, list[str]] = {}
    for row in runs[0]["rows"]:
        names.setdefault(row["group"], []).append(row["name"])
    for group, members in names.items():
        head = [words("model"), *map(_title, runs), *map(words, ("head size", "masks", "features", "notes"))]
        lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        lines += [_line(name, runs, words) for name in sorted(members)]
        parts.append(f"### {words(group[0].upper() + group[1:])}\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _title(run: Run) -> str:
    dtype = {"float32": "fp32", "bfloat16": "bf16"}[run["dtype"]]
    version = ".".join(run["transformers"].split(".")[:2])
    return f"{version} {'CPU' if run['device'] == 'cpu' else 'CUDA'} {dtype}"


def _summary(run: Run, words: Words) -> str:
    rows = run["rows"]
    equal, ours = (sum(row[key] for row in rows) for key in ("equal", "accelerated"))
    both = sum(row["equal"] and row["accelerated"] for row in rows)
    share = f"{ours} ({100 * both / len(rows):.1f} % {words('accelerated and equal')})"
    return f"| Transformers {_title(run)} | {len(rows)} | {equal} | {share} |"


def _line(name: str, runs: list[Run], words: Words) -> str:
    found = [row for run in runs for row in run["rows"] if row["name"] == name]
    cells = [_state(next((row for row in run["rows"] if row["name"] == name), None)) for run in runs]

    def union(key: str) -> str:
        return ", ".join(dict.fromkeys(value for row in found for value in row[key]))

    return f"| {' | '.join([name, *cells, union('heads'), union('masks'), union('features'), _notes(found, words)])} |"


def _state(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    return ("✓" if row["accelerated"] else "own") if row["equal"] else "✗"


def _notes(found: list[dict[str, Any]], words: Words) -> str:
    first = found[0]
    notes = [words(first["note"])]
    own = sorted({name for row in found for name in row["own"]})
    if own:
        notes.insert(0, f"{', '.join(own)}: {words('attention of its own')}")
    if first["pools"]:
        notes.append(words("its pooling head ({}) is not routed").format(", ".join(first["pools"])))
    failing = {mode for row in found for mode, text in row["modes"].items() if text.startswith("eager:")}
    notes += [f"{', '.join(sorted(failing))}: {words('eager fails, too')}"] if failing else []
    wrong = {
        f"{mode}: {text}" for row in found for mode, text in row["modes"].items() if not row["equal"] and _bad(text)
    }
    return "; ".join(filter(None, [*notes, *sorted(wrong)])).replace("|", "/")


def _bad(text: str) -> bool:
    return text != "ok" and not text.startswith(("eager:", "discrete:"))
