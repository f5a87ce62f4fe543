"""Small calls of every kernel family, with tensors of exact size, for tools that watch memory.

As a program: ``python sanitizer_cases.py cpu`` runs every case in a forked child and prints, as JSON, how
each ended; ``python sanitizer_cases.py cuda`` runs them in turn, under compute-sanitizer say (then with
PYTORCH_NO_CUDA_MEMORY_CACHING=1, which gives every tensor an allocation of its own).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The watching library has come with this process; the compilers that it starts shall run without.
os.environ.pop("LD_PRELOAD", None)

sys.path.append(str(Path(__file__).parents[1] / "attention"))

import torch
from torch import Tensor

from hf_flash_cupy import dropout_mask, flash_attention, flash_attention_varlen, flash_attention_with_kvcache
from hf_flash_cupy.launch import record_launches
from hf_flash_cupy.reference import attention_reference

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


def right(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """Calls the kernel; its result is checked roughly, so that a case that ran nothing cannot pass."""
    torch.manual_seed(0)
    philox = torch.randint(2**62, (2,), device=q.device)
    torch.manual_seed(0)
    out, lse = flash_attention(q, k, v, return_lse=True, **options)
    if dropout_p := options.pop("dropout_p", 0.0):
        shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        options["keep"] = dropout_mask.kept(philox, shape, dropout_p).to(q.device)
        options["dropout_p"] = dropout_mask.exact_p(dropout_p)
    truth, truth_lse = attention_reference(q, k, v, **options)
    tolerance = 1e-4 if out.dtype == FP32 else 0.05
    torch.testing.assert_close(out.double(), truth, rtol=0, atol=tolerance)
    torch.testing.assert_close(lse.double(), truth_lse, rtol=0, atol=1e-3)


def tensors(
    device: str, dtype: torch.dtype, head_dim: int, head_dim_v: int, seqlen_q: int = 37, seqlen_k: int = 70
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of batch 2, 4 heads over 2, each an allocation of its own."""
    torch.manual_seed(0)
    sizes = ((seqlen_q, 4, head_dim), (seqlen_k, 2, head_dim), (seqlen_k, 2, head_dim_v))
    q, k, v = (torch.randn(2, *size).to(device, dtype) for size in sizes)
    return q, k, v


def plain(device: str, dtype: torch.dtype, head_dim: int, head_dim_v: int) -> None:
    for lengths in ((37, 70), (1, 1), (70, 37), (64, 128)):
        q, k, v = tensors(device, dtype, head_dim, head_dim_v, *lengths)
        for options in ({}, {"causal": True}, {"window_size": (5, 3)}, {"window_size": (2**31, 2**31)}):
            right(q, k, v, **options)


def hidden(device: str, dtype: torch.dtype, head_dim: int, intervals: bool, mask: bool, softcap: float = 0.0) -> None:
    low, high = -(2**31), 2**31 - 1
    ends = [(0, 70), (low, high), (high, low), (0, low), (3, 66), (69, 70), (high, high), (5, 5)]
    for seqlen_q in (37, 1, 70):
        q, k, v = tensors(device, dtype, head_dim, head_dim, seqlen_q)
        options: dict[str, Any] = {"softcap": softcap}
        if intervals:
            options["key_intervals"] = torch.tensor((ends * 9)[:seqlen_q], dtype=torch.int32).to(device)
        for shape in ((2, 4, seqlen_q, 70), (2, 1, 1, 70), (seqlen_q, 1), ()) if mask else ((),):
            if mask:
                options["mask"] = (torch.rand(shape) < 0.7).to(device)
            right(q, k, v, **options)
            right(q, k, v, causal=True, **options)


def scores(device: str, dtype: torch.dtype, head_dim: int, head_dim_v: int) -> None:
    """ALiBi, bias of every extent, sinks and dropout, each tensor an allocation of exact size."""
    for seqlen_q, seqlen_k in ((37, 70), (1, 1), (65, 33)):
        q, k, v = tensors(device, dtype, head_dim, head_dim_v, seqlen_q, seqlen_k)
        whole = (2, 4, seqlen_q, seqlen_k)
        for shape in (whole, (4, seqlen_q, 1), (2, 1, 1, seqlen_k), (1, 1), ()):
            for kind in {dtype, FP32}:
                options = {"bias": torch.randn(shape).to(device, kind), "dropout_p": 0.3}
                right(q, k, v, causal=True, sinks=torch.randn(4).to(device), **options)
        for slopes in ((4,), (2, 4)):
            right(
                q, k, v, window_size=(9, 5), alibi_slopes=torch.rand(slopes).to(device), sinks=torch.randn(4).to(device)
            )


def varlen(device: str, dtype: torch.dtype, head_dim: int, modified: bool = False) -> None:
    """Packings as they should be, and offsets from nowhere."""
    low, high = -(2**31), 2**31 - 1
    q, k, v = (x[0] for x in tensors(device, dtype, head_dim, head_dim, 100, 90))
    pairs = [
        ([0, 100], [0, 90]), ([0, 0, 40, 90], [0, 20, 20, 85]), ([0], [0]), ([low, high], [low, high]),
        ([0, high], [high, 0]), ([70, 30, 0], [80, 20, 0]), ([0, 99], [89, 90]),
    ]  # fmt: skip
    for lists in pairs:
        offsets = [torch.tensor(x, dtype=torch.int32).to(device) for x in lists]
        for options in ({}, {"causal": True}, {"window_size": (3, 2)}):
            if modified:
                options["alibi_slopes"] = torch.rand(len(lists[0]) - 1, 4).to(device)
                options |= {"sinks": torch.randn(4).to(device), "dropout_p": 0.3}
            for max_seqlen_q in (1, 100, high):
                out = flash_attention_varlen(q, k, v, *offsets, max_seqlen_q, 0, **options)
    whole = flash_attention(q[None], k[None], v[None], window_size=(3, 2))[0]
    offsets = [torch.tensor(x, dtype=torch.int32).to(device) for x in pairs[0]]
    out = flash_attention_varlen(q, k, v, *offsets, 100, 90, window_size=(3, 2))
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-3 if dtype == FP32 else 0.05)


def gradients(
    device: str, dtype: torch.dtype, head_dim: int, head_dim_v: int, modified: bool = False, **call: Any
) -> None:
    """Backward passes; what they give is compared roughly where nothing is random."""
    for seqlen_q, seqlen_k in ((37, 70), (1, 1), (70, 37), (130, 65)):
        given = [x.requires_grad_() for x in tensors(device, dtype, head_dim, head_dim_v, seqlen_q, seqlen_k)]
        options: dict[str, Any] = {"causal": True}
        if modified:
            others = (torch.randn(4, 1, seqlen_k).to(device), torch.randn(4).to(device))
            given += [x.requires_grad_() for x in others]
            options |= {"bias": given[3], "sinks": given[4], "softcap": 3.0, "window_size": (40, -1)}
            options["mask"] = (torch.rand(seqlen_q, seqlen_k) < 0.8).to(device)
        got = torch.autograd.grad(flash_attention(*given[:3], **options, **call).sum(), given)
        truth = torch.autograd.grad(attention_reference(*given[:3], **options)[0].sum(), given)
        for mine, exact in zip(got, truth, strict=True):
            torch.testing.assert_close(mine.double(), exact.double(), rtol=0.05, atol=0.2)
        if modified:
            flash_attention(*given[:3], dropout_p=0.3, **options, **call).sum().backward()


def varlen_gradients(device: str, dtype: torch.dtype, head_dim: int, **call: Any) -> None:
    """Packings as they should be, and offsets from nowhere."""
    low, high = -(2**31), 2**31 - 1
    q, k, v = (x[0].requires_grad_() for x in tensors(device, dtype, head_dim, head_dim, 100, 90))
    for lists in (
        ([0, 100], [0, 90]),
        ([0, 0, 40, 90], [0, 20, 20, 85]),
        ([low, high], [low, high]),
        ([70, 30, 0], [80, 20, 0]),
        ([0, 99], [89, 90]),
    ):
        offsets = [torch.tensor(x, dtype=torch.int32).to(device) for x in lists]
        out = flash_attention_varlen(q, k, v, *offsets, 100, 90, causal=True, **call)
        torch.autograd.grad(out.sum(), (q, k, v))


def decode(device: str, dtype: torch.dtype, head_dim: int, head_dim_v: int) -> None:
    """Few rows against keys that are split, and caches whose lengths and pages come from nowhere."""
    for seqlen_q, seqlen_k in ((1, 530), (3, 512)):
        q, k, v = tensors(device, dtype, head_dim, head_dim_v, seqlen_q, seqlen_k)
        mask = (torch.rand(2, 1, 1, seqlen_k) < 0.5).to(device)
        for options in ({}, {"causal": True, "window_size": (99, 0)}, {"mask": mask}):
            right(q, k, v, sinks=torch.randn(4).to(device), **options)
    low, high = -(2**31), 2**31 - 1
    q, k, v = tensors(device, dtype, head_dim, head_dim_v, 2, 2 * 64)
    new = [torch.randn(2, 3, 2, x.shape[3]).to(device, dtype) for x in (k, v)]
    paged = [x.unflatten(1, (4, 32)).flatten(0, 1).contiguous() for x in (k, v)]  # 8 pages
    for lengths in ((0, 126), (high, low), (128, 5)):
        for splits in (1, 3):
            seqlens = torch.tensor(lengths, dtype=torch.int32).to(device)
            flash_attention_with_kvcache(q, k, v, *new, cache_seqlens=seqlens, num_splits=splits)
            for pages in ([[0, 5, 2, 1], [7, 6, 4, 3]], [[low, high, 8, -1]] * 2):
                table = torch.tensor(pages, dtype=torch.int32).to(device)
                out = flash_attention_with_kvcache(
                    q, *paged, *new, cache_seqlens=seqlens, block_table=table, num_splits=splits
                )
    assert out.isfinite().all()


def hopper(device: str) -> None:
    """The Hopper forward: on its GPU, or on the CPU, in a process of its own."""
    if device == "cpu":
        os.environ["HF_FLASH_CUPY_ARCH"] = "90a"
    with record_launches() as records:
        for lengths in ((64, 70), (333, 65)):
            q, k, v = tensors(device, BF16, 64, 64, *lengths)
            for options in ({"causal": True}, {"window_size": (5, 3)}, {"mask": torch.ones(1, 1).bool().to(device)}):
                right(q, k, v, **options)
        varlen(device, BF16, 64)
    if device == "cpu":
        assert "fa2_forward_sm90" in {record.kernel for record in records}


def hopper_gradients(device: str, head_dim: int) -> None:
    """The Hopper backward, the same way: plain, parts of dq in turns, windows, and intervals from nowhere."""
    if device == "cpu":
        os.environ["HF_FLASH_CUPY_ARCH"] = "90a"
    low, high = -(2**31), 2**31 - 1
    ends = torch.tensor([(low, high), (high, low), (3, 70), (low, 40), (65, high)], dtype=torch.int32).to(device)
    with record_launches() as records:
        for seqlen_q, seqlen_k in ((64, 70), (201, 133)):
            given = [x.requires_grad_() for x in tensors(device, BF16, head_dim, head_dim, seqlen_q, seqlen_k)]
            rows = torch.arange(seqlen_q).to(device)
            per_head = torch.stack([ends[(rows + head) % 5] for head in range(given[0].shape[2])])
            intervals = ({"key_intervals": ends[rows // 50]}, {"key_intervals": per_head, "causal": True})
            plain = ({"causal": True}, {"causal": True, "deterministic": True}, {"deterministic": True})
            for options in (*plain, {"window_size": (5, 3)}, *intervals):
                got = torch.autograd.grad(flash_attention(*given, **options).sum(), given)
                exact_options = {name: value for name, value in options.items() if name != "deterministic"}
                truth = torch.autograd.grad(attention_reference(*given, **exact_options)[0].sum(), given)
                for mine, exact in zip(got, truth, strict=True):
                    torch.testing.assert_close(mine.double(), exact.double(), rtol=0.05, atol=0.2)
    if device == "cpu":
        assert len({record.config.name for record in records if record.kernel == "fa2_backward_sm90"}) == 4


CASES: dict[str, Callable[[str], None]] = {
    "bf16-decode": lambda device: decode(device, BF16, 32, 32),
    "bf16-vector": lambda device: plain(device, BF16, 24, 24),
    "fp16-elements": lambda device: plain(device, FP16, 7, 7),
    "fp32-vector": lambda device: plain(device, FP32, 20, 20),
    "bf16-everything": lambda device: hidden(device, BF16, 31, intervals=True, mask=True, softcap=2.0),
    "fp32-varlen": lambda device: varlen(device, FP32, 32),
    "bf16-scores": lambda device: scores(device, BF16, 32, 24),
    "bf16-gradients": lambda device: gradients(device, BF16, 32, 32, modified=True),
    "bf16-gradients-fa1": lambda device: gradients(device, BF16, 32, 32, algorithm="fa1"),
}
MORE_CASES: dict[str, Callable[[str], None]] = {
    "fp32-elements": lambda device: plain(device, FP32, 19, 19),
    "fp16-unequal": lambda device: plain(device, FP16, 72, 24),
    "bf16-wide": lambda device: plain(device, BF16, 256, 256),
    "fp32-wide": lambda device: plain(device, FP32, 200, 200),
    "fp32-intervals": lambda device: hidden(device, FP32, 32, intervals=True, mask=False),
    "fp32-mask": lambda device: hidden(device, FP32, 32, intervals=False, mask=True),
    "bf16-intervals": lambda device: hidden(device, BF16, 64, intervals=True, mask=False),
    "bf16-mask": lambda device: hidden(device, BF16, 128, intervals=False, mask=True, softcap=3.0),
    "bf16-varlen": lambda device: varlen(device, BF16, 64),
    "fp32-scores": lambda device: scores(device, FP32, 17, 40),
    "fp16-scores": lambda device: scores(device, FP16, 64, 64),
    "bf16-varlen-scores": lambda device: varlen(device, BF16, 32, modified=True),
    "bf16-512": lambda device: plain(device, BF16, 512, 512),
    "fp32-gradients": lambda device: gradients(device, FP32, 31, 31, modified=True, deterministic=True),
    "fp16-gradients-unequal": lambda device: gradients(device, FP16, 72, 24, deterministic=True),
    "fp32-gradients-fa1": lambda device: gradients(device, FP32, 31, 31, modified=True, algorithm="fa1"),
    "bf16-gradients-320": lambda device: gradients(device, BF16, 320, 320),
    "bf16-varlen-gradients": lambda device: varlen_gradients(device, BF16, 64),
    "bf16-varlen-gradients-deterministic": lambda device: varlen_gradients(device, BF16, 64, deterministic=True),
    "bf16-varlen-gradients-fa1": lambda device: varlen_gradients(device, BF16, 64, algorithm="fa1"),
    "fp16-decode-elements": lambda device: decode(device, FP16, 23, 40),
    "fp32-decode": lambda device: decode(device, FP32, 64, 32),
    "fp32-chunks": lambda device: plain(device, FP32, 259, 301),
    "bf16-hopper": hopper,
    "bf16-hopper-gradients": lambda device: hopper_gradients(device, 64),
    "bf16-hopper-gradients-wide": lambda device: hopper_gradients(device, 200),
}


def in_child(work: Callable[[], None]) -> dict[str, Any]:
    """How ``work`` ends in a forked child: its exit status (negative: a signal) and what it printed."""
    with tempfile.TemporaryFile() as stderr:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.dup2(stderr.fileno(), 2)
                work()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        stderr.seek(0)
        return {"status": status, "stderr": stderr.read().decode(errors="replace")[:4000]}


def main(device: str, *names: str) -> None:
    cases = {**CASES, **MORE_CASES}
    chosen = {name: cases[name] for name in names or cases}
    if device == "cpu":
        print(json.dumps({name: in_child(lambda case=case: case("cpu")) for name, case in chosen.items()}))  # type: ignore[misc]
        return
    for name, case in chosen.items():
        case(device)
        torch.cuda.synchronize()
        print(f"{name}: done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
