"""What needs a process of its own: imports, forks, other archs' kernels, first calls (D08, J09, T06)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import child_process
import pytest
import torch

Record = Callable[[str, object], None]

IMPORT_AND_FORK = """
import os, ctypes
import hf_flash_cupy
import hf_flash_cupy.integrations.transformers as integration
integration.register()
initialised = torch.cuda.is_initialized()
driver = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
not_initialized = 3  # CUDA_ERROR_NOT_INITIALIZED
no_context = driver.cuCtxGetCurrent(ctypes.byref(context)) == not_initialized or not context.value
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    x = rand(1, 70, 2, 64)
    good = hf_flash_cupy.flash_attention(x, x, x).isfinite().all().item()
    os.write(writer, b"1" if good else b"0")
    os._exit(0)
os.waitpid(child, 0)
report(initialised=initialised, no_context=no_context, child=os.read(reader, 1).decode())
"""


def test_import_leaves_the_device_alone_and_forks() -> None:
    """Case D08: no CUDA context comes with the import, so a forked child may use the device."""
    assert child_process.run(IMPORT_AND_FORK) == {"initialised": False, "no_context": True, "child": "1"}


WORKERS = """
from hf_flash_cupy import flash_attention
class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        x = torch.full((1, 3, 1, 32), float(index))
        return flash_attention(x, x, x)[0, 0, 0, 0]
x = rand(1, 70, 2, 64)
before = flash_attention(x, x, x)
loader = torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2, multiprocessing_context="fork")
values = [round(value, 3) for batch in loader for value in batch.tolist()]
report(values=values, same=torch.equal(before, flash_attention(x, x, x)))
"""


def test_data_loader_workers() -> None:
    """Case D08: forked workers run host kernels while the parent's device goes on working."""
    assert child_process.run(WORKERS) == {"values": [float(i) for i in range(8)], "same": True}


OTHER_ARCH = """
import attention_check as check
from hf_flash_cupy.launch import record_launches
device = torch.device("cuda")
ratios, names = [], []
dtypes = (torch.float16, torch.float32) if ARCH == "75" else check.DTYPES
sizes = [(128, 128)] if ARCH in ("86", "89") else [(128, 128), (64, 64), (7, 7), (192, 128)]
with check.poisoned_allocations():
    for dtype in dtypes:
        for head_dim, head_dim_v in sizes:
            more = {"num_heads_k": 2, "head_dim_v": head_dim_v, "dtype": dtype, "device": device}
            q, k, v = check.qkv(2, 70, 131, 4, head_dim, **more)
            with record_launches() as records:
                ratios += [check.check(q, k, v), check.check(q, k, v, causal=True, window_size=(50, -1))]
            names.append(records[0].config.name)
        mask = torch.rand(70, 131, generator=torch.Generator().manual_seed(0)) < 0.6
        q, k, v = check.qkv(2, 70, 131, 4, 64, num_heads_k=2, dtype=dtype, device=device)
        ends = torch.tensor([3, 100], dtype=torch.int32, device=device)
        ratios.append(check.check(q, k, v, mask=mask.to(device), key_intervals=ends, softcap=5.0))
        packed = [x.flatten(0, 1) for x in (q, k, v)]
        ratios.append(check.check_varlen(*packed, [0, 5, 100], [0, 50, 200]))
report(worst=max(ratios), names=names)
"""


@pytest.mark.parametrize("arch", ["75", "80", "86", "89"])
def test_kernels_of_another_arch(arch: str, record_property: Record) -> None:
    """HF_FLASH_CUPY_ARCH: another architecture's kernels, as PTX, are right on this device."""
    if int(arch) > int("{}{}".format(*torch.cuda.get_device_capability())):
        pytest.skip(f"sm_{arch} is newer than this device")
    facts = child_process.run(f'ARCH = "{arch}"\n{OTHER_ARCH}', HF_FLASH_CUPY_ARCH=arch)
    assert all(name.endswith(f"_sm{arch}") for name in facts["names"])
    assert facts["worst"] <= 1
    record_property("worst error / allowed error", facts["worst"])


BF16_ON_TURING = """
from hf_flash_cupy import UnsupportedProblem, flash_attention
x = rand(1, 70, 2, 64)
try:
    flash_attention(x, x, x)
    report(refused="")
except UnsupportedProblem as error:
    report(refused=str(error))
"""


def test_bf16_is_refused_on_turing() -> None:
    assert "8.0 or newer" in child_process.run(BF16_ON_TURING, HF_FLASH_CUPY_ARCH="75")["refused"]


WITHOUT_ML_DTYPES = """
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ml_dtypes":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
from hf_flash_cupy import flash_attention
x = rand(1, 70, 2, 64)
report(finite=flash_attention(x, x, x).isfinite().all().item())
"""


def test_bf16_without_ml_dtypes() -> None:
    """Case T06: torch tensors in bf16 need nothing beyond the declared dependencies."""
    assert child_process.run(WITHOUT_ML_DTYPES) == {"finite": True}


FIRST_CALL = """
from hf_flash_cupy import flash_attention
x = rand(1, 1024, 8, 64)
torch.cuda.synchronize()
times = []
for _ in range(2):
    start = time.perf_counter()
    flash_attention(x, x, x, causal=True)
    torch.cuda.synchronize()
    times.append(time.perf_counter() - start)
start = time.perf_counter()
flash_attention(x, x, x, causal=True, softcap=3.0)
torch.cuda.synchronize()
times.append(time.perf_counter() - start)
report(times=times)
"""


def test_first_call(tmp_path: Path, capsys: pytest.CaptureFixture[str], record_property: Record) -> None:
    """Case J09: the time to the first output, from nothing and from disk. Printed, and bounded loosely."""
    cold, warm = (child_process.run(FIRST_CALL, HF_FLASH_CUPY_CACHE_DIR=str(tmp_path))["times"] for _ in range(2))
    facts = {
        "cold first call, s": cold[0],
        "cold call of a second kernel, s": cold[2],
        "first call from disk, s": warm[0],
        "second kernel from disk, s": warm[2],
        "warm call, s": warm[1],
    }
    for name, seconds in facts.items():
        record_property(name, seconds)
    with capsys.disabled():
        print("\n" + "\n".join(f"{name}: {seconds:.4f}" for name, seconds in facts.items()))
    assert warm[2] < cold[2] / 2, "the cache on disk saved nothing"


CALL_TIME = """
import statistics
from hf_flash_cupy import flash_attention
x = rand(1, 16, 8, 64)
y = x.transpose(1, 2)
sdpa = torch.nn.functional.scaled_dot_product_attention
calls = {"ours": lambda: flash_attention(x, x, x, causal=True), "sdpa": lambda: sdpa(y, y, y, is_causal=True)}
micros = {name: [] for name in calls}
with torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
    for round in range(30):
        for name, call in calls.items():
            call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(100):
                call()
            micros[name].append((time.perf_counter() - start) * 1e4)
            torch.cuda.synchronize()
report(**{name: statistics.median(values) for name, values in micros.items()})
"""


def test_cpu_time_of_a_call(capsys: pytest.CaptureFixture[str], record_property: Record) -> None:
    """Microseconds of CPU time a call costs, beside torch's own. Printed, not judged."""
    facts = child_process.run(CALL_TIME)
    for name, micros in facts.items():
        record_property(f"CPU time of a call, {name}, µs", micros)
    with capsys.disabled():
        print(f"\nCPU time of a call: ours {facts['ours']:.1f} µs, torch SDPA (flash) {facts['sdpa']:.1f} µs")
