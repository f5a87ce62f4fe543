"""Verdicts, gates, and the report as JSON, table, Markdown and CSV."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from eval_fixture import TableModel, random_ids, random_table
from pydantic import ValidationError
from rich.console import Console

from hf_flash_cupy.evaluation import gates, render, schema
from hf_flash_cupy.evaluation.data import TokenStream
from hf_flash_cupy.evaluation.gates import Limits
from hf_flash_cupy.evaluation.probes import LayerCalls
from hf_flash_cupy.evaluation.protocols import PROTOCOLS, make_windows
from hf_flash_cupy.evaluation.report import section
from hf_flash_cupy.evaluation.runner import Plan, Runner
from hf_flash_cupy.evaluation.schema import Comparison, Report, Section

TABLE = random_table()
IDS = random_ids(50)


def comparison(**changes: Any) -> Comparison:
    same = {
        "attn": "ours", "baseline": "eager", "dlnppl": 1e-7, "se_paired": 1e-7, "ppl_ratio": 1.0,
        "kl_mean": 1e-8, "kl_median": 1e-8, "kl_p99": 1e-8, "kl_max": 1e-8, "top1": 1.0,
        "max_abs_dlogit": 1e-4, "verdict": "different",
    }  # fmt: skip
    return Comparison(**(same | changes))


def evaluated(
    protocol: str = "strided", scale: float = 1.0, attns: tuple[str, ...] = ("eager", "sdpa", "ours")
) -> Section:
    """A section of the table model; all but the first implementation add noise of ``scale`` to the logits."""

    def noisy(seed: int) -> Any:
        noise = scale * random_table(seed=seed)
        return lambda logits, ids: logits + noise[ids]

    model = TableModel(TABLE, {name: noisy(seed) for seed, name in enumerate(attns[1:], 1)})
    windows = make_windows(PROTOCOLS[protocol], [50], 16, 8)
    plan = Plan(IDS, windows, 16)
    runner = Runner(model, plan, attns)
    runner.run()
    stream = TokenStream(IDS, (50,), 0, np.full(50, 4), np.ones(50, int))
    info = schema.ProtocolInfo(
        name=protocol, context=16, stride=8, prefix="none", windows=0, scored=0, rule=PROTOCOLS[protocol].rule
    )
    layers = {name: LayerCalls({0: 1}, None, name) for name in attns}
    return section(plan, list(runner.tallies.values()), layers, stream, info, "float32")


class TestSection:
    def test_sums_and_units(self) -> None:
        result = evaluated(attns=("eager",)).results[0]
        log_p = TABLE.double().log_softmax(-1).numpy()
        nll = np.array([-log_p[a, b] for a, b in itertools.pairwise(IDS)])
        assert result.nll_sum == pytest.approx(nll.sum(), rel=1e-13)
        assert result.ppl == pytest.approx(math.exp(nll.sum() / 49), rel=1e-13)
        assert result.bits_per_byte == pytest.approx(nll.sum() / math.log(2) / (49 * 4), rel=1e-13)
        assert result.byte_ppl == pytest.approx(2**result.bits_per_byte, rel=1e-13)
        assert result.word_ppl == pytest.approx(math.exp(nll.sum() / 49), rel=1e-13)

    def test_the_paired_error_is_that_of_the_differences(self) -> None:
        found = evaluated(scale=0.01)
        log_p = TABLE.double().log_softmax(-1)
        log_q = (TABLE + 0.01 * random_table(seed=1)).double().log_softmax(-1)
        difference = (log_p - log_q)[IDS[:-1], IDS[1:]].numpy()
        pair = found.comparisons[0]
        assert pair.dlnppl == pytest.approx(difference.mean(), rel=1e-9)
        assert pair.se_paired == pytest.approx(difference.std(ddof=1) / 7, rel=1e-9)
        assert pair.ppl_ratio == pytest.approx(found.results[1].ppl / found.results[0].ppl, rel=1e-12)
        naive = found.results[0].se_naive
        assert naive is not None
        assert pair.se_paired < naive / 10  # the point of pairing

    def test_hf_doc_weighs_its_windows_as_the_guide_does(self) -> None:
        found = evaluated("hf-doc", attns=("eager",))
        windows = make_windows(PROTOCOLS["hf-doc"], [50], 16, 8)
        total = sum(info.nll_sum["eager"] / w.scored * w.weight for info, w in zip(found.windows, windows, strict=True))
        assert found.results[0].nll_mean == pytest.approx(total / sum(w.weight for w in windows), rel=1e-12)

    def test_eager_against_sdpa_is_the_noise_floor(self) -> None:
        found = evaluated()
        assert found.noise_floor == found.comparisons[0]
        assert evaluated(attns=("eager", "ours")).noise_floor is None

    def test_a_perplexity_beyond_a_float_is_null_with_a_reason_beside_its_mean(self) -> None:
        model = TableModel(1e4 * torch.eye(11).roll(1, 0))
        ids = np.zeros(20, int)
        plan = Plan(ids, make_windows(PROTOCOLS["strided"], [20], 16, 8), 16)
        runner = Runner(model, plan, ["eager"])
        runner.run()
        info = evaluated().protocol
        layers = {"eager": LayerCalls({0: 1}, None, "eager")}
        stream = TokenStream(ids, (20,), 0, None, None)
        result = section(plan, list(runner.tallies.values()), layers, stream, info, "float32").results[0]
        assert (result.ppl, result.nll_mean) == (None, 1e4)
        assert result.null_reasons["ppl"] == "too large for a float"
        assert "map tokens" in result.null_reasons["byte_ppl"]


class TestVerdict:
    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"max_abs_dlogit": 0.0}, "identical"),
            ({}, "within tolerance"),
            ({"dlnppl": -2e-5}, "different"),
            ({"kl_mean": 2e-6}, "different"),
            ({"kl_mean": None}, "different"),
            ({"top1": 0.998}, "different"),
        ],
    )
    def test_float32(self, changes: dict[str, Any], expected: str) -> None:
        assert gates.verdict(comparison(**changes), gates.tolerance("float32")) == expected

    def test_sixteen_bits_are_judged_by_the_measured_floor(self) -> None:
        floor = comparison(kl_mean=1e-4)
        assert gates.tolerance("bfloat16", floor).kl_mean == pytest.approx(3e-4)
        assert gates.tolerance("bfloat16").kl_mean == pytest.approx(4.35e-3)
        assert gates.tolerance("float32", floor) == gates.tolerance("float32")


class TestGates:
    def found(self, limits: Limits, scale: float = 1e-6) -> dict[str, bool]:
        return {gate.name: gate.ok for gate in gates.gates(evaluated(scale=scale), "float32", limits)}

    def test_every_comparison_must_be_within_its_dtype_s_tolerance(self) -> None:
        assert all(self.found(Limits()).values())
        far = self.found(Limits(), scale=0.3)
        assert {name for name, ok in far.items() if not ok} >= {"KL mean sdpa", "KL mean ours"}

    @pytest.mark.parametrize(
        ("limits", "name"),
        [
            (Limits(max_ppl=1.5), "ppl eager"),
            (Limits(expect_ppl=2.0), "|ln ppl - ln expected| ours"),
            (Limits(max_ppl_ratio=0.5), "ppl ratio ours"),
            (Limits(max_kl=-1.0), "KL mean ours"),
            (Limits(min_top1=1.1), "top-1 ours"),
            (Limits(min_speedup=1e9), "speedup ours"),
        ],
    )
    def test_a_limit_that_is_missed(self, limits: Limits, name: str) -> None:
        assert self.found(limits)[name] is False
        assert name not in self.found(Limits()) or self.found(Limits())[name]

    def test_limits_that_are_met(self) -> None:
        ppl = evaluated().results[0].ppl
        limits = Limits(ppl * 1.1, 1.001, 1.0, 0.5, ppl, 1e-3, 1e-9)
        assert all(self.found(limits).values())
        assert len(self.found(limits)) == 3 + 3 + 2 * 4 + 2


@pytest.fixture(scope="module")
def report() -> Report:
    part = evaluated(scale=1e-6)
    return Report(
        **dict(part),
        run=schema.Run(command="test", seed=0, versions={"python": "3"}, device="cpu", gpu=None, driver=None),
        model=schema.ModelInfo(
            id="tiny", revision=None, sha256=None, dtype="float32", parameters=1, layers=1, heads=1,
            kv_heads=1, head_dim=8,
        ),
        data=schema.DataInfo(
            name="text|1", sha256="0", bytes=200, words=50, tokens=50, truncated_tokens=7, ids_sha256="0",
            documents=1, joiner="\n\n",
        ),
        checks=[schema.CheckInfo(name="calls eager", ok=False, detail="none")],
        gates=gates.gates(part, "float32", Limits(max_ppl=1.5)),
        lengths=[part],
        exit_code=4,
    )  # fmt: skip


class TestFormats:
    def test_json_has_schema_1_and_comes_back_the_same(self, report: Report) -> None:
        found = json.loads(render.as_json(report))
        assert found["schema"] == 1
        assert set(found) == {
            "schema", "run", "model", "data", "protocol", "results", "comparisons", "noise_floor", "checks",
            "windows", "gates", "lengths", "exit_code",
        }  # fmt: skip
        assert Report.model_validate(found) == report

    def test_the_published_schema_names_every_field_of_the_json(self, report: Report) -> None:
        published = schema.json_schema()
        assert set(json.loads(render.as_json(report))) == set(published["properties"])
        assert set(published["$defs"]["Result"]["required"]) >= {
            "attn",
            "backend",
            "ppl",
            "nll_mean",
            "se_window",
        }

    def test_a_number_that_is_not_finite_cannot_get_into_a_report(self) -> None:
        with pytest.raises(ValidationError):
            comparison(kl_mean=math.inf)

    def test_every_format_prints_what_a_perplexity_depends_on(self, report: Report) -> None:
        """P11: dataset, joiner, context, stride, prefix, dtype, tokens scored, protocol."""
        console = Console(file=io.StringIO(), width=200)
        console.print(*render.as_table(report), sep="\n")
        table = console.file.getvalue()  # type: ignore[attr-defined]
        for text in (table, render.as_markdown(report)):
            for word in (
                "text|1",
                "'\\n\\n'",
                "context 16",
                "stride 8",
                "prefix    none",
                "float32",
                "49 tokens scored",
            ):
                assert word in text
        assert "FAILED calls eager: none" in table
        assert "FAILED ppl eager" in table

    def test_csv_has_a_line_per_implementation_and_length(self, report: Report) -> None:
        rows = list(csv.DictReader(io.StringIO(render.as_csv(report))))
        assert [row["attn"] for row in rows] == ["eager", "sdpa", "ours"] * 2
        assert float(rows[1]["ppl"]) == report.results[1].ppl
        assert rows[0]["verdict"] == ""
        assert rows[1]["verdict"] == "within tolerance"

    def test_markdown_is_a_table(self, report: Report) -> None:
        lines = [line for line in render.as_markdown(report).splitlines() if line.startswith("| ")]
        assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
        assert len(lines) == 2 * (2 + 3)


def test_infinite_logits_on_one_side_are_null_with_a_reason() -> None:
    table = random_table(12)
    model = TableModel(table, {"ours": lambda logits, _ids: logits.index_fill(-1, torch.tensor([11]), -math.inf)})
    plan = Plan(IDS, make_windows(PROTOCOLS["strided"], [50], 16, 8), 16)
    runner = Runner(model, plan, ["eager", "ours"])
    runner.run()
    layers = {name: LayerCalls({0: 1}, None, name) for name in ("eager", "ours")}
    stream = TokenStream(IDS, (50,), 0, None, None)
    pair = section(plan, list(runner.tallies.values()), layers, stream, evaluated().protocol, "float32").comparisons[0]
    assert (pair.max_abs_dlogit, pair.kl_mean) == (None, None)
    assert set(pair.null_reasons) == {"max_abs_dlogit", "kl_mean", "kl_median", "kl_p99", "kl_max"}
    assert pair.verdict == "different"
