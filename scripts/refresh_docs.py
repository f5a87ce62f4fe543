#!/usr/bin/env python
"""Keeps docs/ true: code excerpts are the lines they name, tables are those of the records in benchmarks/.

    python scripts/refresh_docs.py           # after changes of the sources or new records
    python scripts/refresh_docs.py --check   # says what is stale, changes nothing

An excerpt is a link to lines of a source file and, below it, a code block with these lines (without their common
indentation). Where the block's text has moved, the line numbers follow. Where it has changed, the block is taken anew
from its first to its last line, if these or lines much like them are still there; read such a page again. Else it is
reported and must be mended by hand.
"""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import docs_tables  # noqa: E402

EXCERPT = re.compile(
    r"^\[`(?P<label>[^`\n]+)`\]\(\.\./(?P<path>[\w./-]+)#L(?P<first>\d+)-L(?P<last>\d+)\)\n\n"
    r"```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
TABLE = re.compile(
    r"^<!-- table: (?P<name>[\w-]+) (?P<language>en|zh) -->\n.*?^<!-- end of table -->$", re.MULTILINE | re.DOTALL
)


class Stale(Exception):
    """An excerpt whose code is no longer there."""


def documents(root: Path = ROOT) -> list[Path]:
    return sorted((root / "docs").glob("*.md"))


def refreshed(text: str, root: Path = ROOT) -> tuple[str, list[str]]:
    """``text`` with its excerpts and tables brought up to date, and what must be mended by hand."""
    problems: list[str] = []

    def excerpt(match: re.Match[str]) -> str:
        try:
            return _excerpt(match, root)
        except Stale as error:
            problems.append(str(error))
            return match[0]

    text = EXCERPT.sub(excerpt, text)
    return TABLE.sub(lambda match: _table(match, root), text), problems


def _excerpt(match: re.Match[str], root: Path) -> str:
    path, code = match["path"], match["code"].splitlines()
    lines = (root / path).read_text().splitlines()
    near = int(match["first"])
    first, last = locate(code, lines, near) or _by_its_ends(code, lines, near, path)
    current = "\n".join(dedented(lines[first - 1 : last])) + "\n"
    label = f"{path}, {first}" if first == last else f"{path}, {first}-{last}"
    return f"[`{label}`](../{path}#L{first}-L{last})\n\n```{match['language']}\n{current}```"


def dedented(lines: list[str]) -> list[str]:
    """``lines`` without their common indentation; preprocessor lines, which have none, follow."""
    indents = [len(line) - len(line.lstrip()) for line in lines if line.strip() and not line.startswith("#")]
    common = min(indents, default=0)
    return [line if line.startswith("#") else line[common:] for line in lines]


def locate(code: list[str], lines: list[str], near: int) -> tuple[int, int] | None:
    """The first and last line, from 1, where ``code`` stands in ``lines``, the nearest to line ``near``."""
    found = []
    for start in range(len(lines) - len(code) + 1):
        if dedented(lines[start : start + len(code)]) == code:
            found.append((start + 1, start + len(code)))
    return min(found, key=lambda span: abs(span[0] - near), default=None)


def _by_its_ends(code: list[str], lines: list[str], near: int, path: str) -> tuple[int, int]:
    bare = [line.strip() for line in lines]
    begin, end = (_closest(code[index].strip(), bare, path) for index in (0, -1))
    first = min((i for i, line in enumerate(bare) if line == begin), key=lambda i: abs(i + 1 - near))
    if end not in bare[first:]:
        raise Stale(f"{path}, line {first + 1}: the excerpt from {begin!r} has lost its end {end!r}")
    return first + 1, first + 1 + bare[first:].index(end)


def _closest(line: str, lines: list[str], path: str) -> str:
    """``line`` itself where it is among ``lines``, else one that differs little."""
    if line in lines:
        return line
    found = difflib.get_close_matches(line, [other for other in lines if other], n=1, cutoff=0.8)
    if not found:
        raise Stale(f"{path}: the excerpt with the line {line!r}: there is none like it any more")
    return found[0]


def _table(match: re.Match[str], root: Path) -> str:
    name, language = match["name"], match["language"]
    records = docs_tables.bench_records(root / "benchmarks")
    body = docs_tables.TABLES[name](records, docs_tables.WORDS[language])
    return f"<!-- table: {name} {language} -->\n{body}\n<!-- end of table -->"


def main(arguments: list[str]) -> int:
    check = "--check" in arguments
    stale = 0
    for path in documents():
        text = path.read_text()
        new, problems = refreshed(text)
        for problem in problems:
            print(f"{path.relative_to(ROOT)}: mend by hand: {problem}", file=sys.stderr)
        if new != text:
            print(f"{path.relative_to(ROOT)}: {'stale' if check else 'refreshed'}")
            if not check:
                path.write_text(new)
        stale += bool(problems) or (check and new != text)
    return int(stale > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
