"""The backward kernels of every architecture compile, without a GPU, and fit its registers and shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from hf_flash_cupy import fa2_backward, tiles
from hf_flash_cupy.errors import UnsupportedProblem
from hf_flash_cupy.jit import compiler, source
from hf_flash_cupy.problem import AttentionProblem, KernelConfig

# dk and dv of a thread block stay in registers: where features need more, a few values that a loop does not touch go to
# local memory. Beyond this bound it would be the loop's.
MAX_SPILL_BYTES = 1024

# Head size, seqlen_q → the tiles for which speed was measured: no spills worth the name.
TUNED_SPILL_BYTES = {(64, 4096): 0, (64, 512): 0, (128, 4096): 80, (256, 4096): 256}

FEATURES = ("softcap", "dropout", "varlen", "intervals", "mask")


def problems() -> Iterator[tuple[AttentionProblem, bool]]:
    """Each problem → whether it is of the fast tier."""
    for dtype in ("bf16", "fp16", "fp32"):
        for head_dim in (32, 64, 96, 128, 192, 256, 512):
            for seqlen_q in (512, 4096) if head_dim == 64 else (4096,):
                plain = AttentionProblem(dtype, head_dim, head_dim, seqlen_q, True)
                yield plain, dtype == "bf16" and head_dim in (64, 128, 256)
                yield replace(plain, bias="fp32", mask=True), head_dim == 64 and dtype == "fp32"
                if dtype == "bf16":
                    yield replace(plain, vector=False), False
                    for feature in FEATURES:
                        yield replace(plain, **{feature: True}), False
    yield AttentionProblem("bf16", 192, 128, 4096, True), True


def configs(problem: AttentionProblem, arch: str) -> dict[str, KernelConfig]:
    made = fa2_backward.configs(problem, arch)
    made |= fa2_backward.configs(replace(problem, deterministic=True), arch)
    if problem.bias != "none":
        made["bias"] = fa2_backward.bias_config(problem, arch)
    return made


def cases() -> Iterator[object]:
    seen = set()
    for arch in tiles.ARCHS:
        for problem, fast in problems():
            if arch == "75" and problem.dtype == "bf16":
                continue
            try:
                made = configs(problem, arch)
            except UnsupportedProblem:
                continue
            for config in made.values():
                key = (arch[:-1], config.constants, config.kernel)
                if key not in seen:
                    seen.add(key)
                    marks = () if fast and arch == "90" else pytest.mark.full
                    yield pytest.param(problem, config, id=config.name, marks=marks)


@pytest.mark.parametrize(("problem", "config"), list(cases()))
def test_it_compiles_into_what_the_architecture_has(problem: AttentionProblem, config: KernelConfig) -> None:
    if int(config.arch) not in compiler.supported_archs():
        pytest.skip(f"NVRTC {compiler.nvrtc_version()} does not know sm_{config.arch}")
    compiled = compiler.compile_cubin(source.generate_source(config), config.name, config.arch)
    assert "warning" not in compiled.log
    used = compiler.resource_usage(compiled.log)
    assert used is not None
    assert config.shared_bytes <= tiles.SHARED_LIMITS[config.arch]
    plain = replace(problem, dtype="bf16") == AttentionProblem("bf16", problem.head_dim, problem.head_dim_v, 4096, True)
    tuned = config.kernel == "fa2_backward" and config.arch == "90" and plain and problem.dtype == "bf16"
    bound = TUNED_SPILL_BYTES.get((problem.head_dim, problem.seqlen_q), MAX_SPILL_BYTES) if tuned else MAX_SPILL_BYTES
    assert used.spill_bytes <= bound
    assert used.registers * config.num_threads * config.min_blocks <= 1 << 16


@pytest.mark.parametrize("arch", tiles.ARCHS)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_every_architecture_has_a_backward_in_fp16(arch: str, head_dim: int) -> None:
    problem = AttentionProblem("fp16", head_dim, head_dim, 4096, True)
    if (arch, head_dim) == ("75", 512):
        with pytest.raises(UnsupportedProblem, match=r"gradient of head_dim 512.*sm_75"):
            fa2_backward.choose(problem, arch)
    else:
        assert fa2_backward.shared_bytes(fa2_backward.choose(problem, arch), problem, arch) <= tiles.SHARED_LIMITS[arch]
