"""One shape and direction → a row: warm each implementation, measure its memory alone, then race those that work."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from hf_flash_cupy.bench import peers
from hf_flash_cupy.bench.race import Run, Stopped, race
from hf_flash_cupy.bench.shapes import Shape
from hf_flash_cupy.errors import MissingDependency

_ROOT = Path(__file__).parents[2]  # a record names no folder of the machine
_STEP = 512  # torch hands out device memory in steps of this many bytes
_AGREEMENT = {"float32": 1e-2}  # largest difference from torch's result, of the largest |out|; 16 bits: 0.05


@dataclass
class Row:
    """What one shape and direction gave, by implementation. Who is in ``failed`` is nowhere else."""

    shape: Shape
    direction: str
    milliseconds: dict[str, float] = field(default_factory=dict)  # median of the rounds
    tflops: dict[str, float] = field(default_factory=dict)  # useful work per time
    peak_bytes: dict[str, int] = field(default_factory=dict)  # device memory of one call beyond what was there before
    extra_bytes: dict[str, int] = field(default_factory=dict)  # of that, beyond its results
    failed: dict[str, str] = field(default_factory=dict)  # the reason
    unchecked: str = ""  # why nobody's results were compared with torch's; empty where they were


@dataclass
class Tensors:
    """Inputs of a shape, and those that ask for gradients, sharing their memory."""

    inputs: tuple[Tensor, Tensor, Tensor]
    leaves: tuple[Tensor, Tensor, Tensor]
    dout: Tensor

    @classmethod
    def of(cls, shape: Shape, device: str) -> Tensors:
        generator = torch.Generator(device).manual_seed(0)
        dtype = getattr(torch, shape.dtype)

        def random(heads: int, columns: int) -> Tensor:
            size = (shape.batch, shape.seqlen, heads, columns)
            return torch.randn(size, device=device, dtype=dtype, generator=generator)

        dim, dim_v = shape.head_dim, shape.values_dim
        inputs = (random(shape.heads, dim), random(shape.heads_k, dim), random(shape.heads_k, dim_v))
        q, k, v = (x.detach().requires_grad_() for x in inputs)
        return cls(inputs, (q, k, v), random(shape.heads, dim_v))


def prepare(attend: peers.Attend, direction: str, tensors: Tensors) -> Run:
    """The call that is timed. The backward's graph is built once, here."""
    if direction == "forward":
        return lambda: attend(*tensors.inputs)
    if direction == "both":
        return lambda: torch.autograd.grad(attend(*tensors.leaves), tensors.leaves, tensors.dout)
    out = attend(*tensors.leaves)
    return lambda: torch.autograd.grad(out, tensors.leaves, tensors.dout, retain_graph=True)


def result_bytes(direction: str, tensors: Tensors) -> int:
    """Device memory of what a call gives: out (as large as dout), the gradients (as the inputs), or both."""

    def rounded(x: Tensor) -> int:
        return -(-x.numel() * x.element_size() // _STEP) * _STEP

    out, gradients = rounded(tensors.dout), sum(map(rounded, tensors.inputs))
    return {"forward": out, "backward": gradients, "both": out + gradients}[direction]


def peak_bytes(run: Run) -> int:
    """Peak device memory of one call beyond what was there before."""
    before = _settled_bytes()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak


def require_gpu(smoke: bool) -> None:
    """Raises MissingDependency where there is none, unless only ``smoke`` is asked for."""
    if not smoke and not torch.cuda.is_available():
        raise MissingDependency(
            "No CUDA device is usable here, and times of CPU kernels say nothing.",
            "run on a GPU machine (hf-flash-cupy doctor names what is wrong), or see that it works with --smoke",
        )


def _settled_bytes() -> int:
    """Device memory in use, once autograd's thread has let go of what the last backward pass left."""
    torch.cuda.synchronize()
    while True:
        before = torch.cuda.memory_allocated()
        time.sleep(0.005)
        if torch.cuda.memory_allocated() == before:
            return before


def why(error: BaseException) -> str:
    """One line about a peer's error."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    if isinstance(error, peers.Unavailable):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = next((line for line in lines if "error:" in line), lines[0] if lines else "")  # of a compiler's many
    return f"{type(error).__name__}: {text.replace(f'{_ROOT}/', '')[:200]}".rstrip(": ")


def release() -> None:
    """Gives a failed peer's memory back, which its error's frames held until now."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def disagreement(expected: Tensor, out: Tensor) -> float:
    """Largest difference over the largest value expected; NaN counts as infinite."""
    scale = expected.abs().max().float().clamp_min(torch.finfo(torch.float32).tiny)
    return float(((expected - out).abs().max().float() / scale).nan_to_num(nan=torch.inf))


class Measurement:
    """The rows of one shape; what an implementation builds for it serves every direction."""

    def __init__(self, shape: Shape, device: str, rounds: int, round_ms: float) -> None:
        self.shape = shape
        self.device = device
        self.rounds = rounds
        self.round_ms = round_ms
        self.tensors = Tensors.of(shape, device)
        self._expected: dict[bool, tuple[Tensor, ...]] = {}  # torch's out, and its gradients: everyone must agree
        self._unchecked = ""
        self._made: dict[str, peers.Attend] = {}

    def row(self, direction: str, names: Sequence[str], progress: Callable[[str], None] = lambda _: None) -> Row:
        """Times ``names`` in ``direction``; whoever fails is named with the reason, the rest race on."""
        row = Row(self.shape, direction)
        runs: dict[str, Run] = {}
        for name in sorted(names, key=list(peers.IMPLEMENTATIONS).index):
            progress(f"{self.shape.label} {direction}: preparing {name}")
            self._enter(name, direction, row, runs)
        if self.device != "cpu":
            size = peers.CUBLAS_SIZE
            matrix = torch.randn(size, size, device=self.device, dtype=torch.bfloat16)
            runs[peers.CUBLAS] = lambda: matrix @ matrix
        progress(f"{self.shape.label} {direction}: {len(runs)} in turn")
        while runs:
            try:
                row.milliseconds = race(runs, self.rounds, self.round_ms, self.device)
                break
            except Stopped as stopped:
                row.failed[stopped.name] = why(stopped.error)
                del runs[stopped.name]
            release()
        self._complete(row)
        runs.clear()
        release()
        return row

    def _enter(self, name: str, direction: str, row: Row, runs: dict[str, Run]) -> None:
        try:
            attend = self._made.get(name) or peers.make(name, self.shape, direction, self.device)
            if name in peers.FORWARD_ONLY and direction != "forward":
                raise peers.Unavailable(peers.FORWARD_ONLY[name])
            self._made[name] = attend
            run = prepare(attend, direction, self.tensors)
            self._check(run(), direction != "forward", row)
            if self.device != "cpu":
                row.peak_bytes[name] = peak_bytes(run)
            runs[name] = run
            return
        except Exception as error:  # whatever a peer raises is its finding
            reason = why(error)
        release()
        if reason == "out of memory":  # only now: the error's frames held the failed call's tensors
            reason += f" beside {torch.cuda.memory_allocated() / 2**30:.1f} GiB of inputs and the others' graphs"
        row.failed[name] = reason

    def _check(self, result: object, gradients: bool, row: Row) -> None:
        """Raises where ``result``, out or the gradients of q, k and v, is not what torch computes."""
        expected = self._expected_of(gradients, row)
        if not expected:
            return
        names = ("dq", "dk", "dv") if gradients else ("out",)
        found = result if isinstance(result, tuple) else (result,)
        for name, wanted, x in zip(names, expected, found, strict=True):
            assert isinstance(x, Tensor)
            if (off := disagreement(wanted, x)) > _AGREEMENT.get(self.shape.dtype, 0.05):
                raise peers.Unavailable(f"its {name} differs from torch's by {off:.2g} of the largest value")

    def _expected_of(self, gradients: bool, row: Row) -> tuple[Tensor, ...]:
        """What torch computes; nothing, and the reason in ``row``, where it cannot."""
        if gradients not in self._expected:
            leaves = self.tensors.leaves
            try:
                out = peers.torch_attention(self.shape, *leaves)
                made = torch.autograd.grad(out, leaves, self.tensors.dout) if gradients else (out.detach(),)
                self._expected[gradients] = made
            except (torch.OutOfMemoryError, RuntimeError) as error:
                self._unchecked = why(error)
                self._expected[gradients] = ()
        if not self._expected[gradients]:
            row.unchecked = self._unchecked
        return self._expected[gradients]

    def _complete(self, row: Row) -> None:
        work = {peers.CUBLAS: 2.0 * peers.CUBLAS_SIZE**3}
        useful = self.shape.flops(row.direction)
        row.tflops = {name: work.get(name, useful) / time / 1e9 for name, time in row.milliseconds.items()}
        row.peak_bytes = {name: value for name, value in row.peak_bytes.items() if name in row.milliseconds}
        results = result_bytes(row.direction, self.tensors)
        row.extra_bytes = {name: value - results for name, value in row.peak_bytes.items()}
