"""docs/ cannot rot: excerpts are the lines they name, tables those of the records, links and names lead somewhere."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from hf_flash_cupy.bench.measure import Row
from hf_flash_cupy.bench.record import Record
from hf_flash_cupy.bench.shapes import Shape

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("fa*.md"))
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("refresh_docs", ROOT / "scripts" / "refresh_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


refresh_docs = load_script()
docs_tables: ModuleType = refresh_docs.docs_tables


def excerpts(page: Path) -> list[re.Match[str]]:
    return list(refresh_docs.EXCERPT.finditer(page.read_text()))


def test_both_pages_are_there_in_both_languages() -> None:
    assert [page.name for page in PAGES] == ["fa1.md", "fa1.zh.md", "fa2.md", "fa2.zh.md"]


@each_page
class TestPage:
    def test_excerpts_are_the_lines_they_name(self, page: Path) -> None:
        found = excerpts(page)
        assert len(found) >= 15
        for match in found:
            lines = (ROOT / match["path"]).read_text().splitlines()
            first, last = int(match["first"]), int(match["last"])
            named = refresh_docs.dedented(lines[first - 1 : last])
            assert match["code"].splitlines() == named, f"{match['label']}: run scripts/refresh_docs.py"
            numbers = str(first) if first == last else f"{first}-{last}"
            assert match["label"] == f"{match['path']}, {numbers}"

    def test_every_code_block_is_an_excerpt(self, page: Path) -> None:
        assert page.read_text().count("```cpp\n") == len(excerpts(page))

    def test_every_line_of_the_algorithms_has_its_excerpt(self, page: Path) -> None:
        """Bold "Line n" (第 n 行) opens a step of a paper's algorithm; there are at least as many excerpts."""
        told = re.findall(r"^\*\*(?:Lines?|第) (\d+)", page.read_text(), re.MULTILINE)
        assert len(told) >= 9
        assert len(excerpts(page)) >= len(told)

    def test_tables_are_those_of_the_records(self, page: Path) -> None:
        text = page.read_text()
        tables = list(refresh_docs.TABLE.finditer(text))
        assert len(tables) >= 3
        language = "zh" if page.name.endswith(".zh.md") else "en"
        for match in tables:
            assert match["language"] == language
            assert refresh_docs._table(match, ROOT) == match[0], f"{match['name']}: run scripts/refresh_docs.py"

    def test_links_lead_somewhere(self, page: Path) -> None:
        links = re.findall(r"\]\(([^)\s]+)\)", prose_of(page))
        for link in links:
            if link.startswith("http"):
                assert link.startswith("https://arxiv.org/abs/")
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            if target.suffix == ".md" and anchor:
                assert anchor in anchors(target), link

    def test_names_in_the_text_exist_in_the_sources(self, page: Path) -> None:
        sources = "\n".join(
            path.read_text()
            for folder in ("cuda_src", "hf_flash_cupy")
            for path in (ROOT / folder).rglob("*")
            if path.suffix in (".cuh", ".h", ".py")
        )
        for code in set(re.findall(r"`([^`\n]+)`", prose_of(page))):
            if code.startswith(("cuda_src/", "hf-flash-cupy ", "explain ", "__sync")) or code in NOT_OURS:
                continue
            is_file = any(path.name == code for path in (ROOT / "hf_flash_cupy").rglob("*.py"))
            assert is_file or re.search(rf"(?<!\w){re.escape(code)}(?!\w)", sources), (
                f"`{code}` is nowhere in the sources"
            )

    def test_no_measured_figure_stands_outside_the_tables(self, page: Path) -> None:
        """Speeds in the text are the papers' or the data sheets', never this project's."""
        prose = re.sub(r"^<!-- table.*?^<!-- end of table -->$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        assert set(re.findall(r"([\d.]+) TFLOPs?/s", prose)) <= {"312", "19.5", "335", "989"}


NOT_OURS = {"mma.sync", "num_splits"}  # an instruction, and an argument of flash-attn 1.0


def prose_of(page: Path) -> str:
    """The page without its code blocks and drawings."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Anchors as GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", ["fa1", "fa2"])
def test_both_languages_show_the_same_code_and_tables(name: str) -> None:
    english, chinese = ROOT / "docs" / f"{name}.md", ROOT / "docs" / f"{name}.zh.md"
    assert [match[0] for match in excerpts(english)] == [match[0] for match in excerpts(chinese)]
    tables = [[match["name"] for match in refresh_docs.TABLE.finditer(page.read_text())] for page in (english, chinese)]
    assert tables[0] == tables[1]


@pytest.mark.parametrize("name", ["fa1", "fa2"])
def test_both_languages_check_the_same_claims(name: str) -> None:
    counts = []
    for suffix in ("", ".zh"):
        text = (ROOT / "docs" / f"{name}{suffix}.md").read_text()
        rows = re.search(r"^\| (?:the notes say|笔记说) .*?(?=\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
        assert rows is not None
        lines = rows[0].strip().splitlines()[2:]
        assert all(line.count(" | ") == 2 for line in lines), "claim, what is right, evidence"
        counts.append(len(lines))
    assert counts[0] == counts[1] >= 14


class TestRefresh:
    SOURCE = "int a;\n  if (b) {\n#pragma unroll\n    c();\n  }\nint d;\n"

    def page(self, code: str, first: int, last: int) -> str:
        return f"[`src/x.cuh, 0`](../src/x.cuh#L{first}-L{last})\n\n```cpp\n{code}```"

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        (tmp_path / "src").mkdir()
        (tmp_path / "src" / "x.cuh").write_text(self.SOURCE)
        (tmp_path / "benchmarks").mkdir()
        return tmp_path

    def test_moved_code_gets_its_new_lines(self, root: Path) -> None:
        code = "if (b) {\n#pragma unroll\n  c();\n}\n"
        text, problems = refresh_docs.refreshed(self.page(code, 40, 41), root)
        assert text == self.page(code, 2, 5).replace("x.cuh, 0", "x.cuh, 2-5")
        assert problems == []

    def test_changed_code_is_taken_anew_from_its_first_to_its_last_line(self, root: Path) -> None:
        text, problems = refresh_docs.refreshed(self.page("if (b) {\n  old();\n}\n", 2, 4), root)
        assert "```cpp\nif (b) {\n#pragma unroll\n  c();\n}\n```" in text
        assert "#L2-L5" in text
        assert problems == []

    def test_slightly_changed_ends_are_found(self, root: Path) -> None:
        text, problems = refresh_docs.refreshed(self.page("int aa;\n", 9, 9), root)
        assert "```cpp\nint a;\n```" in text
        assert "#L1-L1" in text
        assert problems == []

    def test_lost_code_is_reported_and_left(self, root: Path) -> None:
        page = self.page("gone();\n", 2, 2)
        text, problems = refresh_docs.refreshed(page, root)
        assert text == page
        assert len(problems) == 1
        assert "gone()" in problems[0]

    def test_a_page_that_is_true_stays_as_it_is(self) -> None:
        for page in PAGES:
            assert refresh_docs.refreshed(page.read_text()) == (page.read_text(), [])

    def record(self, name: str, names: tuple[str, ...], time: float) -> Record:
        shape = Shape(8, 4096, 16, 16, 64, False)
        row = Row(shape, "forward", dict.fromkeys(names, time), dict.fromkeys(names, 100.0 / time))
        row.failed = {"eager": "out of memory (1 GiB)"} if "eager" not in names else {}
        return Record({"date": name, "card": "NVIDIA H200", "versions": {}}, [row])

    def test_rows_come_from_one_record_with_the_most_participants(self) -> None:
        records = {
            "new.json": self.record("2026-02-02", ("cupy_fa2", "flash", "cudnn", "flex"), 1.0),
            "old.json": self.record("2026-01-01", ("cupy_fa1", "cupy_fa2"), 2.0),
        }
        words = docs_tables.WORDS["en"]
        found = docs_tables.newest(records, ("cupy_fa1", "cupy_fa2", "eager"), "forward", seqlen=4096)
        assert found[0] == "old.json"
        line = next(line for line in docs_tables.fa1_speed(records, words).splitlines() if "old" in line)
        assert line == "| forward | 4,096 | no | 50 | 50 | OOM | – | **1.00×** | [old](../benchmarks/old.json) |"

    def test_smoke_runs_and_other_records_are_no_source(self, root: Path) -> None:
        record = self.record("2026-01-01", ("cupy_fa2",), 1.0)
        record.write(root / "benchmarks" / "real.json")
        replace(record, smoke=True).write(root / "benchmarks" / "smoke.json")
        (root / "benchmarks" / "perplexity.json").write_text(json.dumps({"head_dim": 64}))
        assert list(docs_tables.bench_records(root / "benchmarks")) == ["real.json"]
