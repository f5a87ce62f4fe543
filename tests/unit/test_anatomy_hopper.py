"""What ``explain`` says where a call takes Hopper's own kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from hf_flash_cupy import sm90
from hf_flash_cupy.anatomy import facts, kernels
from hf_flash_cupy.bench.shapes import Shape

runner = CliRunner()
FULL = Shape(2, 256, 4, 4, 64, False)
CAUSAL = replace(FULL, causal=True)


class TestHopper:
    """On compute capability 9.0 FlashAttention-2 has kernels of its own."""

    def test_other_columns_keep_theirs(self) -> None:
        shape = Shape(2, 1000, 8, 2, 64, True)
        for algorithm, direction in (("fa1", "forward"), ("fa1", "backward")):
            found = [kernels.find(shape, algorithm, direction, arch, compile_it=False) for arch in ("90", "90a")]
            assert found[0] == found[1]

    def test_the_column_describes_the_kernel_that_a_call_takes(self) -> None:
        shape = Shape(2, 1000, 8, 2, 64, True)
        kernel = kernels.find(shape, "fa2", "forward", "90a", compile_it=False)
        problem, geometry = kernels.problem_of(shape, "fa2"), kernels.geometry_of(shape)
        assert kernel.config == sm90.select(problem, geometry)
        mma = kernels.find(shape, "fa2", "forward", "90", compile_it=False)
        assert mma.config.name in kernel.note
        assert "HF_FLASH_CUPY_ARCH=90 " in kernel.note
        units = -(-1000 // 64) * 4  # of the heads that share a head of keys
        assert kernel.num_blocks == 2 * 2 * -(-units // kernel.parts)
        assert kernel.parts == kernel.config.num_threads // 128 - 1
        text = facts.rows(facts.gather(shape, "fa2", "forward", kernel), shape, None, 8)
        assert text["kernel"].startswith("fa2_forward_sm90_")
        assert text["tile"].endswith(f"{kernel.parts} warpgroups of 4 warps that compute, 1 that loads")
        assert "each warpgroup owns 64 rows" in text["ownership"]
        assert "TMA" in text["ownership"]
        assert "4 query heads" in text["ownership"]
        assert text["grid"].startswith(f"8 thread blocks of {kernel.config.num_threads} threads that stay")
        assert text["SMs with work"] == "8 of 8 (100 %)"
        assert text["note"].endswith(kernel.note)

    def test_so_it_is_backward(self) -> None:
        shape = Shape(2, 1000, 8, 2, 64, True)
        kernel = kernels.find(shape, "fa2", "backward", "90a", compile_it=False)
        assert kernel.config.kernel == "fa2_backward_sm90"
        assert (kernel.parts, kernel.stays, kernel.num_blocks) == (2, False, 8 * 2 * 2)
        mma = kernels.find(shape, "fa2", "backward", "90", compile_it=False)
        assert mma.config.name in kernel.note
        text = facts.rows(facts.gather(shape, "fa2", "backward", kernel), shape, None, 8)
        assert text["tile"] == "128 rows (B_r) × 128 keys (B_c), 2 warpgroups of 4 warps that compute, 1 that loads"
        assert "K, V, Q and dO by TMA" in text["ownership"]
        assert text["grid"] == "32 thread blocks of 384 threads"
        assert text["at once"].startswith("1 thread blocks an SM")
        extra = [facts.gather(shape, "fa2", "backward", each).work.extra_bytes for each in (kernel, mma)]  # type: ignore[union-attr]
        assert extra[0] - extra[1] == 2 * 8 * 1000 * (16 - 4)

    def test_wide_heads_share_their_keys(self) -> None:
        """Where dk and dv of 64 keys take all registers, a thread block has no more keys than that."""
        kernel = kernels.find(Shape(2, 1000, 8, 2, 200, True), "fa2", "backward", "90a", compile_it=False)
        assert kernel.config.kernel == "fa2_backward_sm90"
        assert (kernel.block_m, kernel.block_n, kernel.parts, kernel.num_blocks) == (64, 64, 2, 16 * 2 * 2)

    def test_registers_are_those_before_and_after_they_change_hands(self) -> None:
        found = kernels.find(FULL, "fa2", "forward", "90a", compile_it=False)
        known = replace(found, registers=96)
        assert known.blocks_per_sm == 1
        text = facts.rows(facts.gather(FULL, "fa2", "forward", known), FULL, None, 132)["registers"]
        constants = dict(found.config.constants)
        loading, computing = constants["int kLoadRegisters"], constants["int kComputeRegisters"]
        assert (
            text == f"96 a thread at the start, then {loading} of one that loads and {computing} of one that computes"
        )

    @pytest.mark.parametrize(
        ("changed", "reason"),
        [({"head_dim": 32}, "head_dim 32"), ({"seqlen": 33}, "fewer than 64 rows"), ({"dtype": "float32"}, "float32")],
    )
    def test_where_it_refuses_that_is_said(self, changed: dict[str, object], reason: str) -> None:
        shape = replace(FULL, **changed)  # type: ignore[arg-type]
        kernel = kernels.find(shape, "fa2", "forward", "90a", compile_it=False)
        assert kernel.config.kernel == "fa2_forward"
        assert f"not the kernel of TMA and wgmma: {reason}" in kernel.note
        backward = kernels.find(shape, "fa2", "backward", "90a", compile_it=False)
        assert backward.config.kernel == "fa2_backward"
        assert f"not the kernel of TMA and wgmma: {reason}" in backward.note
        assert kernel.note in facts.rows(facts.gather(shape, "fa2", "forward", kernel), shape, None, 1)["note"]

    def test_a_forced_architecture_is_followed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HF_FLASH_CUPY_ARCH", raising=False)
        assert kernels.kernel_arch("90") == "90a"
        monkeypatch.setenv("HF_FLASH_CUPY_ARCH", "90")
        assert kernels.kernel_arch("90") == "90"
        with pytest.raises(ValueError, match=r"HF_FLASH_CUPY_ARCH=90: for compute capability 80 supported are 75, 80"):
            kernels.kernel_arch("80")
