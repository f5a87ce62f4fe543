"""Device memory: a call takes out and lse, nothing more; CuPy's pool stays empty (case D09)."""

from __future__ import annotations

import child_process
import pytest
import torch

from hf_flash_cupy import flash_attention, flash_attention_varlen

MEASURE = """
from hf_flash_cupy import flash_attention
sizes = []
for round in range(2):
    for seqlen in range(1, 200):
        q = rand(2, seqlen * 7 % 193 + 1, 4, 64, seed=seqlen)
        k = rand(2, seqlen, 2, 64, seed=seqlen)
        out, lse = flash_attention(q.requires_grad_(), k.requires_grad_(), k, causal=True, return_lse=True)
        gradients = torch.autograd.grad((out, lse), (q, k), (out.detach(), lse.detach()))
    del q, k, out, lse, gradients
    torch.cuda.synchronize()
    for _ in range(100):  # torch's thread of the backward pass lets go of the last graph when it comes to it
        if torch.cuda.memory_allocated() == sum(size for size, _ in sizes[:1]):
            break
        time.sleep(0.02)
    sizes.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
import cupy
pool, pinned = cupy.get_default_memory_pool(), cupy.get_default_pinned_memory_pool()
report(sizes=sizes, pool=pool.total_bytes(), pinned=pinned.n_free_blocks())
"""


def test_no_pool_beside_torch() -> None:
    """Many steps of many shapes, forward and backward: torch's memory is flat and CuPy has none."""
    facts = child_process.run(MEASURE)
    assert (facts["pool"], facts["pinned"]) == (0, 0)
    assert facts["sizes"][0] == facts["sizes"][1]


def extra_bytes(call: object, results: int) -> int:
    """Peak memory of ``call`` beyond its ``results`` bytes, which are whole units of the allocator."""
    assert results % 512 == 0
    call()  # type: ignore[operator]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = call()  # type: ignore[operator]
    peak = torch.cuda.max_memory_allocated() - before
    assert torch.cuda.memory_allocated() - before == results
    del kept
    return peak - results


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("kind", ["plain", "causal", "intervals", "mask", "strided", "varlen"])
def test_a_call_takes_its_results_only(kind: str, return_lse: bool) -> None:
    device, (batch, seqlen, heads, head_dim) = torch.device("cuda"), (2, 512, 8, 64)
    fused = torch.randn(batch, seqlen, 3, heads, head_dim, device=device, dtype=torch.bfloat16)
    q, k, v = fused.unbind(2) if kind == "strided" else (x.contiguous() for x in fused.unbind(2))
    options: dict[str, object] = {"return_lse": return_lse, "causal": kind == "causal"}
    if kind == "intervals":
        options["key_intervals"] = torch.tensor([3, 400], dtype=torch.int32, device=device)
    if kind == "mask":
        options["mask"] = torch.ones(seqlen, dtype=torch.bool, device=device)
    cu_seqlens = torch.tensor([0, 100, 1024], dtype=torch.int32, device=device)

    def call() -> object:
        if kind == "varlen":
            packed = (x.view(-1, heads, head_dim) for x in (q, k, v))
            return flash_attention_varlen(*packed, cu_seqlens, cu_seqlens, 924, 924, **options)  # type: ignore[arg-type]
        return flash_attention(q, k, v, **options)  # type: ignore[arg-type]

    out_bytes, lse_bytes = batch * seqlen * heads * head_dim * 2, batch * seqlen * heads * 4
    assert extra_bytes(call, out_bytes + (lse_bytes if return_lse else 0)) == 0
