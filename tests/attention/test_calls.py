"""How the function is called: parameters, autocast, mixed dtypes, threads, arrays, records, explain."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attention_check as check
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hf_flash_cupy import (
    execute,
    explain,
    flash_attention,
    flash_attention_varlen,
    functional,
    launch,
)
from hf_flash_cupy.errors import MissingDependency
from hf_flash_cupy.launch import launch_count, record_launches

FP32, BF16 = torch.float32, torch.bfloat16


def test_parameters_without_gradients(device: torch.device) -> None:
    """Case T05: nn.Parameter and tensors that require a gradient work wherever none is recorded."""
    plain = check.qkv(1, 70, 70, 2, 32, dtype=FP32, device=device)
    expected = flash_attention(*plain)
    q, k, v = (nn.Parameter(x.clone()) for x in plain)
    with torch.no_grad():
        out = flash_attention(q, k, v)
    assert check.identical(out, expected)
    assert not out.requires_grad
    with torch.inference_mode():
        assert check.identical(flash_attention(q, k, v), expected)
        inside = [x * 1 for x in (q, k, v)]
        out, _ = flash_attention(*inside, return_lse=True)
    assert check.identical(out.clone(), expected)
    assert check.identical(flash_attention(*inside), expected)  # inference tensors, used outside


def test_mixed_dtypes_take_that_of_v(device: torch.device) -> None:
    q, k, v = check.qkv(1, 70, 70, 2, 32, dtype=FP32, device=device)
    out = flash_attention(q, k, v.to(BF16))
    assert out.dtype == BF16
    assert check.identical(out, flash_attention(q.to(BF16), k.to(BF16), v.to(BF16)))
    assert check.identical(flash_attention(q.to(BF16), k, v), flash_attention(q.to(BF16).float(), k, v))


@pytest.mark.parametrize("dtypes", [(FP32, FP32, FP32), (FP32, FP32, BF16), (BF16, BF16, BF16)], ids=str)
def test_autocast(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    """Case T07: autocast's dtype, whatever the inputs hold."""
    q, k, v = (x.to(d) for x, d in zip(check.qkv(1, 70, 70, 2, 32, dtype=FP32, device=device), dtypes, strict=True))
    with torch.autocast(device.type, dtype=BF16):
        out = flash_attention(q, k, v)
    assert out.dtype == BF16
    assert check.identical(out, flash_attention(q.to(BF16), k.to(BF16), v.to(BF16)))
    with torch.autocast(device.type, enabled=False):
        assert flash_attention(q, k, v).dtype == v.dtype


def test_lse_is_optional(device: torch.device) -> None:
    q, k, v = check.qkv(2, 70, 70, 2, 32, dtype=FP32, device=device)
    out, _ = flash_attention(q, k, v, return_lse=True)
    alone = flash_attention(q, k, v)
    assert isinstance(alone, Tensor)
    assert check.identical(alone, out)


def test_changed_data_gives_changed_results(device: torch.device) -> None:
    """A plan is kept for the shape, never for the values; pointers may change between calls."""
    for seed in range(3):
        q, k, v = check.qkv(1, 70, 70, 2, 32, dtype=FP32, device=device, seed=seed)
        check.check(q, k, v)
        check.check(q, k, v, causal=True)
        check.check(q, k, v, softmax_scale=0.1 * (seed + 1))
        mask = torch.rand(70, 70, generator=torch.Generator().manual_seed(seed)) < 0.5
        check.check(q, k, v, mask=mask.to(device))
        check.check(q, k, v, mask=mask.to(device).mT)
        check.check(q, k, v, mask=mask.to(device)[:1])


def test_launches_are_counted_and_recorded(device: torch.device) -> None:
    q, k, v = check.qkv(2, 70, 70, 2, 32, dtype=FP32, device=device)
    before = launch_count()
    with record_launches() as outer:
        flash_attention(q, k, v)
        with record_launches() as inner:
            flash_attention(q, k, v, causal=True)
    flash_attention(q, k, v)
    assert launch_count() == before + 3
    assert (len(outer), len(inner)) == (2, 1)
    assert outer[1] == inner[0]
    record = inner[0]
    assert record.backend == ("host" if device.type == "cpu" else "cuda")
    assert record.grid == (-(-70 // record.config.tile.block_m) * 2 * 2, 1)


def test_explain_names_the_kernel_that_runs(device: torch.device, capfd: pytest.CaptureFixture[str]) -> None:
    q, k, v = check.qkv(2, 70, 70, 4, 32, num_heads_k=2, dtype=BF16, device=device)
    mask = torch.ones(70, 70, dtype=torch.bool, device=device)
    for options in ({}, {"causal": True}, {"mask": mask}, {"softcap": 2.0, "return_lse": True}):
        before = launch_count()
        text = explain(q, k, v, **options)
        assert launch_count() == before
        with record_launches() as records:
            flash_attention(q, k, v, **options)
        config = records[0].config
        for fact in (
            config.name,
            f"{config.shared_bytes} bytes",
            f"{config.tile.block_m} rows × {config.tile.block_n} keys",
        ):
            assert fact in text
    assert capfd.readouterr().out == ""


def test_explain_drops_nothing(device: torch.device) -> None:
    q, k, v = check.qkv(1, 5, 7, 2, 32, dtype=FP32, device=device)
    assert "alibi=True" in explain(q, k, v, alibi_slopes=torch.zeros(2, device=device))
    with pytest.raises(ValueError, match="sinks"):
        explain(q, k, v, sinks=torch.zeros(3, device=device))
    with pytest.raises(TypeError, match="causl"):
        explain(q, k, v, causl=True)
    with pytest.raises(ValueError, match="window_size"):
        explain(q, k, v, window_size=(-3, 0))


def test_eight_threads(device: torch.device) -> None:
    """Threads call at once, each with shapes and values of its own; nobody gets another's."""
    calls: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = []
    for seed in range(8):
        tensors = check.qkv(1 + seed % 3, 20 + 17 * seed, 40 + 5 * seed, 2, 32, dtype=FP32, device=device, seed=seed)
        calls.append((tensors, {"causal": seed % 2 == 0}))
    expected = [flash_attention(*tensors, **options) for tensors, options in calls]
    barrier = threading.Barrier(8)
    before = launch_count()

    def work(thread: int) -> list[bool]:
        barrier.wait()
        same = []
        for turn in range(20):
            index = (thread + turn % 2) % 8  # shapes are shared by neighbours too
            tensors, options = calls[index]
            same.append(check.identical(flash_attention(*tensors, **options), expected[index]))
        return same

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(8)))
    assert all(all(same) for same in results)
    assert launch_count() == before + 160


def test_threads_that_meet_a_new_kernel(device: torch.device) -> None:
    """Eight first calls at once of a kernel that no thread has loaded yet."""
    q, k, v = check.qkv(1, 33, 33, 1, 32, dtype=torch.float16, device=device)
    cu_seqlens = torch.tensor([0, 33], dtype=torch.int32, device=device)
    barrier = threading.Barrier(8)

    def work(_: int) -> Tensor:
        barrier.wait()
        return flash_attention_varlen(q[0], k[0], v[0], cu_seqlens, cu_seqlens, 33, 33)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(8)))
    assert all(check.identical(result, results[0]) for result in results)
    check.check_varlen(q[0], k[0], v[0], [0, 33], [0, 33])


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a C++ compiler, where nothing has been planned or warned of yet."""

    def missing(*_: Any) -> Any:
        raise MissingDependency("No C++ compiler.", "apt-get install g++")

    monkeypatch.setattr(launch.module, "get_host_kernel", missing)
    monkeypatch.setattr(execute, "_local", threading.local())
    functional._warn_reference.cache_clear()


@pytest.mark.usefixtures("no_compiler")
def test_reference_runs_without_a_compiler() -> None:
    """On the CPU the reference stands in, with one warning that says how to mend it."""
    q, k, v = check.qkv(2, 70, 90, 4, 32, num_heads_k=2, dtype=FP32, device=check.CPU)
    before = launch_count()
    with pytest.warns(UserWarning, match="not its kernels.*apt-get install g\\+\\+"):
        out, lse = flash_attention(q, k, v, causal=True, window_size=(9, 0), softcap=3.0, return_lse=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = flash_attention(q, k, v, causal=True, window_size=(9, 0), softcap=3.0)
        half = flash_attention(q.half(), k.half(), v.half())
    assert launch_count() == before
    truth, truth_lse = check.attention_reference(q, k, v, causal=True, window_size=(9, 0), softcap=3.0)
    torch.testing.assert_close(out.double(), truth, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), truth_lse, rtol=0, atol=1e-5)
    assert out.is_contiguous()
    assert check.identical(again, out)
    assert half.dtype == torch.float16
    for x in (q, k, v):
        x.requires_grad_()
    flash_attention(q, k, v, causal=True).sum().backward()
    expected = torch.autograd.grad(check.attention_reference(q, k, v, causal=True)[0].sum(), (q, k, v))
    for x, gradient in zip((q, k, v), expected, strict=True):
        torch.testing.assert_close(x.grad, gradient)
    dropped = flash_attention(q, k, v, dropout_p=0.999)
    assert (dropped == 0).any()


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.filterwarnings("ignore:hf_flash_cupy runs plain PyTorch")
def test_reference_runs_packed_sequences_too() -> None:
    q, k, v = (x[0] for x in check.qkv(1, 70, 90, 4, 32, num_heads_k=2, dtype=FP32, device=check.CPU))
    offsets = [torch.tensor(x, dtype=torch.int32) for x in ([0, 0, 30, 60], [0, 20, 50, 50])]
    out, lse = flash_attention_varlen(q, k, v, *offsets, 30, 30, causal=True, return_lse=True)
    truth, truth_lse = check.attention_reference(q[None, :30], k[None, 20:50], v[None, 20:50], causal=True)
    torch.testing.assert_close(out[None, :30].double(), truth, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse[None, :, :30].double(), truth_lse, rtol=0, atol=1e-5)
    assert (out[30:] == 0).all()
    assert (lse[:, 30:] == -torch.inf).all()


def test_chosen_kernels_are_printed_on_demand(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """HF_FLASH_CUPY_EXPLAIN=1 prints each choice once."""
    q, k, v = check.qkv(1, 71, 91, 2, 32, dtype=FP32, device=device)
    monkeypatch.setenv("HF_FLASH_CUPY_EXPLAIN", "1")
    monkeypatch.setattr(execute, "_local", threading.local())  # no call has been planned yet
    with record_launches() as records:
        for _ in range(2):
            flash_attention(q, k, v)
    assert capfd.readouterr().out.count(records[0].config.name) == 1


def test_numpy_arrays_on_the_host() -> None:
    """Arrays with __dlpack__ are taken as they are and give arrays back, without a copy of what goes in."""
    tensors = check.qkv(1, 70, 70, 2, 32, dtype=FP32, device=check.CPU)
    expected, expected_lse = flash_attention(*tensors, return_lse=True)
    arrays = [x.numpy() for x in tensors]
    out, lse = flash_attention(*arrays, return_lse=True)
    assert isinstance(out, np.ndarray)
    np.testing.assert_array_equal(out, expected.numpy())
    np.testing.assert_array_equal(lse, expected_lse.numpy())
    mask = np.tril(np.ones((70, 70), dtype=bool))
    np.testing.assert_array_equal(
        flash_attention(*arrays, mask=mask), flash_attention(*arrays, mask=torch.from_numpy(mask))
    )
    with pytest.raises(TypeError, match="v is a list"):
        flash_attention(arrays[0], arrays[1], [1.0])
