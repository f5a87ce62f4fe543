"""The harness for flash-attn's tests: what it draws, and that its helpers mean what flash-attn's do."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import einops_stand_in as einops
import flash_attn_sample as sample
import pytest
import stand_in
import torch

HERE = Path(__file__).parent

FILE = """
import pytest
import torch
from einops import rearrange, repeat
from flash_attn import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func, flash_attn_varlen_func
from flash_attn import flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func, flash_attn_with_kvcache
from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.flash_attn_interface import _get_block_size_n, USE_TRITON_ROCM
from flash_attn.layers.rotary import apply_rotary_emb

is_sm80 = torch.cuda.get_device_capability("cuda") == (8, 0)

@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(i, j) for i in range(8) for j in range(8)])
@pytest.mark.parametrize("softcap", [0.0, 50.0])
@pytest.mark.parametrize("dropout_p", [0.0, 0.17])
def test_large(seqlen_q, seqlen_k, dropout_p, softcap, dtype):
    assert not (softcap and dropout_p)

@pytest.mark.parametrize("paged_kv_block_size", [None, 256])
@pytest.mark.parametrize("d", [32, 64])
def test_small(d, paged_kv_block_size):
    assert paged_kv_block_size is None

@pytest.mark.parametrize("new_kv,has_leftpad", [(False, False), (True, True)])
@pytest.mark.parametrize("rotary_fraction", [0.0, 0.5])
@pytest.mark.parametrize("paged_kv_block_size", [None, 256])
@pytest.mark.parametrize("has_batch_idx", [False, True])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(1, 128), (3, 2)])
def test_flash_attn_kvcache(
    seqlen_q, seqlen_k, has_batch_idx, paged_kv_block_size, rotary_fraction, new_kv, has_leftpad
):
    assert seqlen_q <= seqlen_k or not new_kv
    assert new_kv or rotary_fraction == 0.0
    assert paged_kv_block_size is None or not (has_batch_idx or has_leftpad)

@pytest.mark.parametrize("d", [32, 64])
def test_flash_attn_kvcache_paged_block_table_bounds(d):
    raise AssertionError

def test_alone():
    pass
"""


def collect(file: Path, *options: str) -> list[str]:
    file.write_text(FILE)
    command = [sys.executable, str(HERE / "run.py"), str(file), "--collect-only", "-q", *options]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": ""})
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return [line for line in answer.stdout.splitlines() if "::" in line]


@pytest.mark.slow
def test_the_sample_is_as_large_as_asked(tmp_path: Path) -> None:
    file = tmp_path / "test_flash_attn.py"
    first = collect(file, "--cases", "100", "--seed", "1")
    names = ("test_large", "test_small", "test_flash_attn_kvcache", "test_alone")
    counts = [sum(f"::{name}" in line for line in first) for name in names]
    assert counts == [87, 2, 10, 1]
    assert len(set(first)) == len(first) == 100
    assert len(collect(file, "--cases", "1000000")) == 3 * 128 + 2 + 10 + 1  # all that runs


def test_the_sample_is_seeded() -> None:
    def drawn(seed: int) -> object:
        @pytest.mark.parametrize("d", range(50))
        @pytest.mark.parametrize("seqlen", range(50))
        def case(seqlen: int, d: int) -> None: ...

        sample.Grid(case).keep(20, random.Random(seed))
        return vars(case)["pytestmark"][-1].args

    assert drawn(1) == drawn(1) != drawn(2)


def test_shares() -> None:
    assert sample.share([5, 1000, 1000], 105) == [5, 50, 50]
    assert sample.share([5, 2], 100) == [5, 2]


PATTERNS = [
    ((2, 3), "b h -> b h 1 1", {}, (2, 3, 1, 1)),
    ((3,), "s -> b s", {"b": 2}, (2, 3)),
    ((3,), "s -> b 1 1 s", {"b": 2}, (2, 1, 1, 3)),
    ((2, 3, 4, 5), "b s h d -> (b s) h d", {}, (6, 4, 5)),
    ((6, 4, 5), "(b s) h d -> b s h d", {"b": 2}, (2, 3, 4, 5)),
    ((2, 1, 12, 5), "b 1 (s h) d -> b s h d", {"s": 3}, (2, 3, 4, 5)),
    ((2, 3, 4, 5), "b s h d -> b s (h g) d", {"g": 3}, (2, 3, 12, 5)),
    ((2, 3, 4, 5), "b s ... -> s b ...", {}, (3, 2, 4, 5)),
    ((2, 1), "s_16 s_256 -> (s_16 16) (s_256 256)", {}, (32, 256)),
]


@pytest.mark.parametrize(("shape", "pattern", "sizes", "expected"), PATTERNS, ids=lambda x: str(x))
def test_patterns(shape: tuple[int, ...], pattern: str, sizes: dict[str, int], expected: tuple[int, ...]) -> None:
    x = torch.arange(torch.tensor(shape).prod()).view(shape)
    found = einops.repeat(x, pattern, **sizes)
    assert found.shape == expected
    assert set(found.flatten().tolist()) == set(x.flatten().tolist())


def test_values_of_patterns() -> None:
    x = torch.randn(2, 3, 4, 5)
    assert torch.equal(einops.repeat(x, "b s h d -> b s (h g) d", g=3), x.repeat_interleave(3, dim=2))
    assert torch.equal(einops.rearrange(x, "b s h d -> (b s) h d"), x.flatten(0, 1))
    assert torch.equal(einops.rearrange(x.flatten(0, 1), "(b s) h d -> b s h d", b=2), x)
    assert torch.equal(einops.rearrange(x, "b s ... -> s b ..."), x.transpose(0, 1))


def test_padding_there_and_back() -> None:
    x = torch.randn(3, 5, 2, 4, requires_grad=True)
    mask = torch.arange(5) < torch.tensor([[5], [0], [3]])
    packed, indices, offsets, longest, used = stand_in.unpad_input(x, mask)
    assert torch.equal(packed, torch.cat([x[0], x[2, :3]]))
    assert offsets.tolist() == [0, 5, 5, 8]
    assert offsets.dtype == torch.int32
    assert (longest, used.tolist()) == (5, [5, 0, 3])
    back = stand_in.pad_input(packed, indices, 3, 5)
    assert torch.equal(back, x * mask[..., None, None])
    back.sum().backward()
    assert torch.equal(x.grad, mask[..., None, None].expand_as(x).float())


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding_turns_pairs(interleaved: bool) -> None:
    x = torch.randn(2, 3, 1, 6)
    angles = torch.rand(8, 2)
    found = stand_in.apply_rotary_emb(x, angles.cos(), angles.sin(), interleaved, seqlen_offsets=torch.tensor([0, 5]))
    assert torch.equal(found[..., 4:], x[..., 4:])
    places = [(0, 1), (2, 3)] if interleaved else [(0, 2), (1, 3)]
    for i, (a, b) in enumerate(places):
        turned = torch.view_as_complex(torch.stack([x[..., a], x[..., b]], -1))
        for entry, first in enumerate((0, 5)):
            expected = turned[entry] * torch.polar(torch.ones(3), angles[first : first + 3, i])[:, None]
            torch.testing.assert_close(found[entry, ..., a], expected.real)
            torch.testing.assert_close(found[entry, ..., b], expected.imag)
