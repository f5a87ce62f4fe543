"""What ``explain`` counts and says, without a GPU: work from the loops, grids, SMs with work, ncu's table."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hf_flash_cupy import call, cards, cli, explain
from hf_flash_cupy.anatomy import command, facts, kernels, profiler, work
from hf_flash_cupy.anatomy.work import Blocks
from hf_flash_cupy.bench.measure import Row, Tensors
from hf_flash_cupy.bench.shapes import Shape
from hf_flash_cupy.errors import MissingDependency
from hf_flash_cupy.jit import host_compiler

runner = CliRunner()
FULL = Shape(2, 256, 4, 4, 64, False)
CAUSAL = replace(FULL, causal=True)
BLOCKS = Blocks(64, 32, 4)


def seen_pairs(shape: Shape, block_m: int, block_n: int) -> int:
    """Blocks of the score matrix with a visible score, counted one by one."""
    row, key = torch.arange(shape.seqlen)[:, None], torch.arange(shape.seqlen)
    visible = key <= row if shape.causal else torch.ones(shape.seqlen, shape.seqlen, dtype=torch.bool)
    return sum(bool(block.any()) for rows in visible.split(block_m) for block in rows.split(block_n, dim=1))


class TestWork:
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(
        ("seqlen", "block_m", "block_n"), [(256, 64, 32), (256, 32, 64), (250, 64, 48), (1, 16, 16)]
    )
    def test_visits_are_the_blocks_that_somebody_sees(
        self, causal: bool, seqlen: int, block_m: int, block_n: int
    ) -> None:
        shape = replace(FULL, seqlen=seqlen, causal=causal)
        assert work.visits(shape, block_m, block_n) == seen_pairs(shape, block_m, block_n)

    @pytest.mark.parametrize("count", [work.fa1_forward, work.fa2_forward, work.fa1_backward, work.fa2_backward])
    def test_without_a_mask_matrix_work_is_the_useful_work(self, count: object) -> None:
        direction = count.__name__.partition("_")[2]  # type: ignore[attr-defined]
        assert count(FULL, BLOCKS).matrix == FULL.flops(direction)  # type: ignore[operator]

    def test_standard_attention_multiplies_all_that_a_mask_hides(self) -> None:
        assert work.standard(CAUSAL, "forward").matrix == 2 * CAUSAL.flops("forward")
        assert work.standard(FULL, "backward").matrix == FULL.flops("backward") * 4 / 5  # nothing recomputed

    def test_chunks_compute_the_scores_anew(self) -> None:
        """Wide outputs are shared by thread blocks: of the products only those of the scores are repeated."""
        twice = replace(BLOCKS, chunks=2)
        product = FULL.flops("forward") / 2
        assert work.fa2_forward(FULL, twice).matrix == 3 * product
        assert work.fa2_backward(FULL, twice).matrix == 7 * product
        assert work.fa2_forward(FULL, twice).other["exponentials"] == 2 * 2 * 4 * 256 * 256

    def test_under_a_causal_mask_little_more_than_half_is_left(self) -> None:
        big = replace(CAUSAL, seqlen=4096)
        for count in (work.fa1_forward, work.fa2_forward):
            assert 1.0 < count(big, BLOCKS).matrix / big.flops("forward") < 1.03

    def test_extra_memory_is_linear_but_for_standard_attention(self) -> None:
        long = replace(FULL, seqlen=2 * FULL.seqlen)
        assert work.standard(long, "forward").extra_bytes == 4 * work.standard(FULL, "forward").extra_bytes
        assert work.fa1_forward(long, BLOCKS).extra_bytes == 2 * work.fa1_forward(FULL, BLOCKS).extra_bytes
        assert work.fa1_forward(FULL, BLOCKS).extra_bytes == 2 * 4 * 256 * (4 * 64 + 8)  # O in fp32, l and m
        assert work.fa2_forward(FULL, BLOCKS).extra_bytes == 0
        assert work.fa2_backward(FULL, BLOCKS).extra_bytes == 2 * 4 * 256 * (4 * 64 + 4)  # dQ in fp32, delta

    def test_traffic_of_the_forward_is_that_of_the_loops(self) -> None:
        """Every tile load of both algorithms walked through for one head: 4 row blocks, 8 key blocks."""
        heads, tile_q, tile_kv, tile_out = 8, 64 * 64 * 2, 2 * 32 * 64 * 2, 64 * 64 * 4
        read = written = 0
        for j in range(8):
            read += tile_kv
            for _ in range(4):
                read += tile_q + (0 if j == 0 else tile_out + 64 * 8)
                written += tile_q if j == 7 else tile_out + 64 * 8
        found = work.fa1_forward(FULL, BLOCKS)
        assert (found.moved.read, found.moved.written) == (heads * read, heads * written)
        found = work.fa2_forward(FULL, BLOCKS)
        assert found.moved.read == heads * 4 * (tile_q + 8 * tile_kv)
        assert found.moved.written == heads * 4 * tile_q

    def test_flashattention_1_works_more_outside_matrix_instructions(self) -> None:
        first, second = work.fa1_forward(FULL, BLOCKS), work.fa2_forward(FULL, BLOCKS)
        assert first.other["exponentials"] == second.other["exponentials"] == 2 * 4 * 256 * 256
        visited = 8 * 32 * 64 * 64  # elements of O in all visits
        assert first.other["sum of the warps' partial products"] == 4 * visited
        assert first.other["rescaling and adding O (line 12)"] == 3 * visited
        assert second.other["normalising O, once"] == 8 * 256 * 64

    def test_grouped_queries_share_their_keys_and_values(self) -> None:
        grouped = replace(FULL, heads_k=2)
        assert work.fa2_forward(FULL, BLOCKS).least.read == 3 * 2 * 4 * 256 * 64 * 2
        assert work.fa2_forward(grouped, BLOCKS).least.read == 2 * 2 * 4 * 256 * 64 * 2
        assert work.fa2_backward(grouped, BLOCKS).moved.read < work.fa2_backward(FULL, BLOCKS).moved.read

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(
        ("seqlen", "group", "parts", "block_n"), [(250, 2, 3, 32), (256, 1, 4, 64), (640, 4, 3, 80)]
    )
    def test_the_kernel_of_warpgroups_counts_what_its_tiles_see(
        self, causal: bool, seqlen: int, group: int, parts: int, block_n: int
    ) -> None:
        """Every tile of a head of keys walked through: units of 64 rows, those of the same rows neighbours."""
        shape = Shape(2, seqlen, 4, 4 // group, 64, causal)
        row, key = torch.arange(seqlen)[:, None], torch.arange(seqlen)
        visible = key <= row if causal else torch.ones(seqlen, seqlen, dtype=torch.bool)
        units = [rows for rows in visible.split(64) for _ in range(group)]
        missing = -len(units) % parts
        loaded = scores = maxima = first = 0
        while first < len(units):
            count = parts - (1 if missing > 0 else 0)
            tile, first, missing = units[first : first + count], first + count, missing - 1
            loaded += sum(block.shape[1] for block in torch.cat(tile).split(block_n, dim=1) if block.any())
            for unit in tile:
                seen = [block for block in unit.split(block_n, dim=1) if block.any()]
                scores += len(seen) * 64 * block_n
                maxima += 64 * block_n * (1 + sum(not block.all() for block in seen[:-1]))
        key_heads = 2 * 4 // group
        found = work.fa2_forward_sm90(shape, Blocks(64 * parts, block_n, parts, group=group))
        assert found.matrix == key_heads * scores * 4 * 64
        assert found.other["exponentials"] == key_heads * scores
        assert next(n for name, n in found.other.items() if name.startswith("maximum")) == key_heads * maxima
        assert found.moved.read == 2 * 4 * seqlen * 64 * 2 + key_heads * loaded * 2 * 64 * 2
        assert found.moved.written == 2 * 4 * seqlen * 64 * 2


class TestCards:
    def test_names_of_drivers_are_found(self) -> None:
        assert cards.find_card("NVIDIA H200").num_sms == 132  # type: ignore[union-attr]
        assert cards.find_card("NVIDIA H100 PCIe").num_sms == 114  # type: ignore[union-attr]
        assert cards.find_card("NVIDIA H100 80GB HBM3").num_sms == 132  # type: ignore[union-attr]
        assert cards.find_card("NVIDIA A100-SXM4-80GB").num_sms == 108  # type: ignore[union-attr]
        assert cards.find_card("NVIDIA L40S").name == "L40S"  # type: ignore[union-attr]
        assert cards.find_card("NVIDIA L4").name == "L4"  # type: ignore[union-attr]
        assert cards.find_card("Tesla T4").arch == "75"  # type: ignore[union-attr]
        assert cards.find_card("h100pcie").num_sms == 114  # type: ignore[union-attr]
        assert cards.find_card("something else") is None

    def test_an_a100_multiplies_sixteen_times_faster_by_matrix_instructions(self) -> None:
        """Dao 2023, section 3.1: 312 against 19.5 TFLOP/s."""
        card = cards.find_card("A100")
        assert card is not None
        assert round(card.matrix_tflops / card.fp32_tflops) == 16

    @pytest.mark.parametrize(
        ("arch", "threads", "shared", "registers", "blocks"),
        [
            ("90", 128, 48 << 10, 240, 2),  # registers: 65536 / (240 · 128)
            ("90", 256, 198 << 10, 128, 1),  # shared memory
            ("90", 128, 0, 32, 16),  # threads: 2048 / 128
            ("75", 128, 64 << 10, None, 1),
            ("86", 128, 100 << 10, 128, 0),  # with the system's 1 KB it does not fit
            ("80", 32, 0, 16, 32),  # blocks
        ],
    )
    def test_blocks_of_an_sm(self, arch: str, threads: int, shared: int, registers: int | None, blocks: int) -> None:
        assert cards.blocks_per_sm(arch, threads, shared, registers) == blocks


class TestKernels:
    def test_grids(self) -> None:
        shape = Shape(2, 1000, 8, 2, 64, False)
        first = kernels.find(shape, "fa1", "forward", "90", compile_it=False)
        second = kernels.find(shape, "fa2", "forward", "90", compile_it=False)
        third = kernels.find(shape, "fa2", "backward", "90", compile_it=False)
        assert first.num_blocks == 2 * 8
        assert second.num_blocks == 2 * 8 * -(-1000 // second.block_m)
        assert third.num_blocks == 2 * 2 * -(-1000 // third.block_n)
        assert (first.config.kernel, second.config.kernel, third.config.kernel) == (
            "fa1_forward",
            "fa2_forward",
            "fa2_backward",
        )

    def test_few_heads_leave_sms_idle_with_flashattention_1_only(self) -> None:
        shape = Shape(2, 4096, 8, 8, 64, False)  # the notes' example: 16 heads in all on an A100
        card = cards.find_card("A100")
        assert card is not None
        texts = {}
        for algorithm in ("fa1", "fa2"):
            kernel = kernels.find(shape, algorithm, "forward", "80", compile_it=False)
            found = facts.gather(shape, algorithm, "forward", kernel)
            texts[algorithm] = facts.rows(found, shape, card, card.num_sms)["SMs with work"]
        assert texts == {"fa1": "16 of 108 (15 %)", "fa2": "108 of 108 (100 %)"}

    @pytest.mark.parametrize("capability", ["60", "x", ""])
    def test_capabilities_that_no_kernel_serves_are_named(self, capability: str) -> None:
        with pytest.raises(ValueError, match="--arch"):
            kernels.kernel_arch(capability)
        assert kernels.kernel_arch("87") == "86"

    def test_the_call_described_is_the_benchmark_s(self) -> None:
        shape = Shape(2, 128, 4, 2, 64, True)
        q, k, v = Tensors.of(shape, "cpu").inputs
        described = call.describe(call.Call(q, k, v, {}, call.Options(causal=True)))
        assert described == (kernels.problem_of(shape, "fa2"), kernels.geometry_of(shape))


def ncu_row(kernel: int, metric: str, value: str, name: str = "fa2") -> str:
    return f'"{kernel}","7","{name}","{metric}","byte","{value}"'


NCU = "\n".join(
    (
        "==PROF== Connected to process 7",
        "torch says hello",
        "==PROF== Disconnected from process 7",
        '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"',
        ncu_row(0, "dram__bytes_read.sum", "1", "spin_kernel(long)"),
        ncu_row(0, "lts__t_bytes.sum", "1", "spin_kernel(long)"),
        ncu_row(1, "dram__bytes_read.sum", "25,000,448"),
        ncu_row(1, "dram__bytes_write.sum", "8,000,000"),
        ncu_row(1, "lts__t_bytes.sum", "100"),
        ncu_row(2, "dram__bytes_read.sum", "10"),
        ncu_row(3, "dram__bytes_read.sum", "1", "spin_kernel(long)"),
        ncu_row(4, "dram__bytes_read.sum", "5"),
        ncu_row(4, "dram__bytes_write.sum", "6"),
        ncu_row(4, "lts__t_bytes.sum", "7"),
    )
)


class TestProfiler:
    def test_the_kernels_of_each_call_are_summed(self) -> None:
        assert profiler.parse(NCU, 2) == [
            profiler.Counted(25000458.0, 8000000.0, 100.0, 2),
            profiler.Counted(5.0, 6.0, 7.0, 1),
        ]

    @pytest.mark.parametrize(
        "text", ["", "==ERROR== ERR_NVGPUCTRPERM", NCU.partition('"0",')[0], NCU.partition('"4",')[0]]
    )
    def test_no_figures_is_an_error(self, text: str) -> None:
        with pytest.raises(ValueError, match="no "):
            profiler.parse(text, 2)

    def test_without_ncu_that_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        assert profiler.profile(FULL, ["cupy_fa2"], "forward") == "ncu is not installed"

    def test_the_watched_process_runs_all(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """In place of ncu: notes what it is to run, and prints the table above."""
        ncu, asked = tmp_path / "ncu", tmp_path / "asked"
        program = f"import pathlib, sys; pathlib.Path({str(asked)!r}).write_text(sys.argv[-1]); print({NCU!r})"
        ncu.write_text(f"#!{sys.executable}\n{program}\n")
        ncu.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        names = ["eager", "cupy_fa2"]
        assert profiler.profile(CAUSAL, names, "backward") == dict(zip(names, profiler.parse(NCU, 2), strict=True))
        calls = []
        monkeypatch.setattr(profiler, "launch", calls.append)
        exec(asked.read_text())
        assert calls == [(asdict(CAUSAL), tuple(names), "backward")]
        assert profiler.profile(CAUSAL, ["eager"], "backward") == "ncu: no kernel of some implementation in its table"


class TestCommand:
    @pytest.fixture
    def content(self) -> dict[str, dict[str, dict[str, str]]]:
        options = ["explain", "--batch", "2", "--heads", "8", "--seqlen", "1024", "--card", "A100", "--json"]
        answer = runner.invoke(cli.app, options)
        assert answer.exit_code == 0, answer.output
        return json.loads(answer.output)  # type: ignore[no-any-return]

    @pytest.mark.slow
    def test_every_fact_has_a_column_of_each_algorithm(self, content: dict[str, dict[str, dict[str, str]]]) -> None:
        facts_of_kernels = {"kernel", "tile", "grid", "SMs with work", "at once", "shared memory", "registers"}
        counted = {"loops", "ownership", "matrix FLOPs", "other FLOPs", "bytes (computed)", "extra memory (computed)"}
        for direction in ("forward", "backward"):
            assert list(content[direction]) == ["standard", "fa1", "fa2"]
            for algorithm, found in content[direction].items():
                assert counted <= set(found)
                if algorithm != "standard":
                    assert facts_of_kernels <= set(found)
                    assert "not known" not in found["registers"] or "NVRTC" in found["registers"] + found["kernel"]
                    assert f"{algorithm}_{direction}" in found["kernel"]
        assert "16 of 108" in content["forward"]["fa1"]["SMs with work"]
        assert content["forward"]["fa2"]["extra memory (computed)"].startswith("0 B")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--dtype", "int8"], "--dtype int8"),
            (["--direction", "up"], "--direction up"),
            (["--heads", "4", "--kv-heads", "3"], "--kv-heads 3"),
            (["--card", "Voodoo"], "--card Voodoo"),
            (["--arch", "60"], "--arch 60"),
            (["--arch", "90", "--card", "A100"], "--arch 90, --card A100: A100 has compute capability 80"),
        ],
    )
    def test_wrong_options_are_named(self, options: list[str], message: str) -> None:
        answer = runner.invoke(cli.app, ["explain", *options])
        assert answer.exit_code == cli.WRONG_USE
        assert message in " ".join(answer.output.replace("│", " ").split())

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            (["--arch", "9.0"], ("90", 132)),
            (["--arch", "8.0", "--card", "a100"], ("80", 108)),
            (["--card", "H100 pcie"], ("90", 114)),
            (["--card", "rtx4090"], ("89", 128)),
        ],
    )
    def test_capabilities_and_cards_are_read_as_people_write_them(
        self, options: list[str], expected: tuple[str, int]
    ) -> None:
        answer = runner.invoke(cli.app, ["explain", *options, "--head-dim", "600", "--no-measure", "--json"])
        content = json.loads(answer.output)
        assert (content["arch"], content["num_sms"]) == expected

    def test_what_no_kernel_serves_is_told_and_the_rest_shown(self) -> None:
        options = ["explain", "--arch", "7.5", "--dtype", "bfloat16", "--seqlen", "128", "--json"]
        content = json.loads(runner.invoke(cli.app, options).output)
        for direction in ("forward", "backward"):
            assert "matrix FLOPs" in content[direction]["standard"]
            for algorithm in ("fa1", "fa2"):
                assert "bfloat16 needs a GPU of compute capability 8.0" in content[direction][algorithm]["refused"]
                assert "ownership" not in content[direction][algorithm]  # of which rows or keys there are no numbers

    def test_what_a_gpu_measured_is_told(self) -> None:
        row = Row(FULL, "forward", {"cupy_fa2": 0.5}, {"cupy_fa2": 494.7}, {"cupy_fa2": 2048}, {"cupy_fa2": 0})
        row.failed["eager"] = "out of memory"
        assert command.measured(row, "cupy_fa2", cards.find_card("H200")) == {
            "time": "500 µs",
            "speed": "495 TFLOP/s of useful work, 50 % of the card's peak",
            "peak memory (measured)": "2 KiB, 0 B of it beyond the results",
        }
        assert command.measured(row, "eager", None) == {"time": "not measured: out of memory"}


class TestLibrary:
    """``hf_flash_cupy.explain``: the text about one call."""

    def test_flashattention_1_is_a_block_a_head(self) -> None:
        q, k, v = torch.randn(3, 2, 70, 4, 32)
        text = explain(q, k, v, algorithm="fa1")
        assert "fa1_forward_fp32_d32" in text
        assert "4 heads × 2 = 8 thread blocks" in text
        assert "O, l, m read and written" in text

    def test_without_a_compiler_it_says_what_runs_instead(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing() -> None:
            raise MissingDependency("No C++ compiler.", "apt-get install g++")

        q, k, v = torch.randn(3, 1, 16, 2, 32)
        assert "not runnable" not in explain(q, k, v)
        monkeypatch.setattr(host_compiler, "find_compiler", missing)
        text = explain(q, k, v)
        assert "not runnable here, plain PyTorch operations serve the call: No C++ compiler." in text
        assert "apt-get install g++" in text
