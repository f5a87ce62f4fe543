"""Whole models of Transformers, random weights, by each attention implementation: what a user's run takes.

One model serves all implementations of a row, so that they differ in nothing but their attention and its mask.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from hf_flash_cupy.bench.measure import peak_bytes, release, why
from hf_flash_cupy.bench.peers import CUBLAS, CUBLAS_SIZE, Unavailable
from hf_flash_cupy.bench.race import Run, Stopped, race

IMPLEMENTATIONS = ("sdpa", "flex_attention", "eager", "cupy_fa1", "cupy_fa2")  # the first to finish is the measure
NEW_TOKENS = 64
_AGREEMENT = 0.1  # root mean square of the difference of the last hidden states, of their own
_ROUNDING = {"float32": 1e-3}


@dataclass(frozen=True, slots=True)
class Workload:
    """One row: what a model is made to do."""

    model: str  # of MODELS
    kind: Literal["prefill", "train", "generate", "generate static"]
    batch: int
    seqlen: int  # of the prompt, where tokens are generated
    layout: Literal["plain", "left-padded", "packed"] = "plain"  # packed: the batch end to end in one row
    dtype: str = "bfloat16"
    seldom: tuple[str, ...] = ()  # implementations that do not finish, or not in bearable time

    @property
    def label(self) -> str:
        work = {
            "prefill": "prefill",
            "train": "forward and backward",
            "generate": f"generate {NEW_TOKENS}",
            "generate static": f"generate {NEW_TOKENS}, static cache, compiled",
        }[self.kind]
        layout = "" if self.layout == "plain" else f", {self.layout}"
        return f"{self.model}: {work}, {self.batch} × {self.seqlen:,}{layout}"


@dataclass
class ModelRow:
    """What one workload gave, by implementation. Who is in ``failed`` is nowhere else."""

    name: str
    label: str
    milliseconds: dict[str, float] = field(default_factory=dict)  # median of the rounds
    extra_bytes: dict[str, int] = field(default_factory=dict)  # peak device memory beyond weights and inputs
    failed: dict[str, str] = field(default_factory=dict)  # the reason


def _llama() -> Any:
    """Llama-3.2-1B."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )


def _gemma2() -> Any:
    """Gemma-2-2B with 8 layers: softcap 50, head size 256, every other layer a window of 4,096."""
    from transformers import Gemma2Config

    return Gemma2Config(num_hidden_layers=8, max_position_embeddings=8192, eos_token_id=None)


def _gpt_oss() -> Any:
    """gpt-oss-20b with 4 layers and 4 experts: sinks, 64 heads of 64, every other layer a window of 128."""
    from transformers import GptOssConfig

    return GptOssConfig(num_hidden_layers=4, num_local_experts=4, num_experts_per_tok=4, eos_token_id=None)


def _tiny() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )


MODELS: dict[str, Callable[[], Any]] = {
    "Llama-3.2-1B": _llama,
    "Gemma-2-2B (8 layers)": _gemma2,
    "gpt-oss-20b (4 layers, 4 experts)": _gpt_oss,
    "tiny Llama": _tiny,
}
_LLAMA, _GEMMA2, _GPT_OSS, _TINY = MODELS

WORKLOADS: dict[str, Workload] = {
    "prefill-8k": Workload(_LLAMA, "prefill", 1, 8192),
    "prefill-32k": Workload(_LLAMA, "prefill", 1, 32768, seldom=("eager",)),
    "prefill-padded": Workload(_LLAMA, "prefill", 4, 4096, "left-padded"),
    "prefill-packed": Workload(_LLAMA, "prefill", 16, 1024, "packed", seldom=("eager",)),
    "train": Workload(_LLAMA, "train", 4, 4096, seldom=("eager",)),
    "train-packed": Workload(_LLAMA, "train", 16, 1024, "packed", seldom=("eager",)),
    "generate-1": Workload(_LLAMA, "generate", 1, 512, seldom=("eager", "flex_attention")),
    "generate-32": Workload(_LLAMA, "generate", 32, 512, seldom=("eager", "flex_attention")),
    "static-1": Workload(_LLAMA, "generate static", 1, 512, seldom=("eager", "flex_attention")),
    "static-32": Workload(_LLAMA, "generate static", 32, 512, seldom=("eager", "flex_attention")),
    "gemma2-4k": Workload(_GEMMA2, "prefill", 1, 4096),
    "gemma2-8k": Workload(_GEMMA2, "prefill", 1, 8192),
    "gpt-oss-4k": Workload(_GPT_OSS, "prefill", 1, 4096),
    "gpt-oss-8k": Workload(_GPT_OSS, "prefill", 1, 8192),
}
SMOKE: dict[str, Workload] = {
    "smoke-padded": Workload(_TINY, "prefill", 2, 24, "left-padded", "float32", ("flex_attention",)),
    "smoke-train-packed": Workload(_TINY, "train", 2, 16, "packed", "float32", ("flex_attention",)),
    "smoke-generate": Workload(_TINY, "generate", 2, 8, "plain", "float32", ("flex_attention",)),
}


def build(workload: Workload, device: str) -> Any:
    """The model with random weights, made where it runs."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            MODELS[workload.model](), dtype=getattr(torch, workload.dtype)
        )
    model.generation_config.eos_token_id = None  # or a run would end where its random weights happen to
    model.generation_config.pad_token_id = 0
    return model.train(workload.kind == "train")


def inputs(workload: Workload, vocab: int, device: str) -> dict[str, Tensor]:
    """Token ids and what describes their layout, as a tokenizer or a collator gives them."""
    batch, seqlen = workload.batch, workload.seqlen
    generator = torch.Generator(device).manual_seed(0)
    ids = torch.randint(3, vocab, (batch, seqlen), device=device, generator=generator)
    if workload.layout == "packed":
        positions = torch.arange(seqlen, device=device).repeat(batch)
        return {"input_ids": ids.reshape(1, -1), "position_ids": positions[None]}
    if workload.layout == "left-padded":
        hidden = torch.arange(batch, device=device) * (seqlen // (2 * batch))  # the first row has no padding
        return {
            "input_ids": ids,
            "attention_mask": (torch.arange(seqlen, device=device) >= hidden[:, None]).long(),
        }
    return {"input_ids": ids}


def prepare(workload: Workload, model: Any, given: dict[str, Tensor]) -> Run:
    """The call that is timed; forward passes return the last hidden states, generation the tokens."""
    body = model.model
    if workload.kind == "prefill":

        def prefill() -> Tensor:
            with torch.no_grad():
                return body(**given, use_cache=False).last_hidden_state  # type: ignore[no-any-return]

        return prefill
    if workload.kind == "train":

        def step() -> Tensor:
            hidden: Tensor = body(**given, use_cache=False).last_hidden_state
            hidden.backward(hidden.detach())  # type: ignore[no-untyped-call]
            body.zero_grad(set_to_none=True)
            return hidden.detach()

        return step
    return _generation(workload, model, given)


def _generation(workload: Workload, model: Any, given: dict[str, Tensor]) -> Run:
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    if workload.kind == "generate static":
        options["cache_implementation"] = "static"  # Transformers then compiles the decoding step by itself
    mask = torch.ones_like(given["input_ids"])

    def generate() -> Tensor:
        return model.generate(**given, attention_mask=mask, **options)  # type: ignore[no-any-return]

    return generate


def _named(model: Any, name: str, run: Run) -> Run:
    """``run`` with the implementation ``name``, which other runs of the same model change."""
    model.set_attn_implementation(name)  # refuses what the model cannot do, which the assignment below would not
    if model.config._attn_implementation != name:
        raise Unavailable(f"the model stays with {model.config._attn_implementation}")

    def named() -> object:
        model.config._attn_implementation = name
        return run()

    return named


def measure(
    name: str,
    workload: Workload,
    names: Sequence[str],
    *,
    rounds: int,
    round_ms: float,
    device: str,
    progress: Callable[[str], None] = lambda _: None,
) -> ModelRow:
    """Times ``names`` on one workload; whoever fails is named with the reason, the rest race on."""
    row = ModelRow(name, workload.label)
    progress(f"{workload.label}: making the model")
    model = build(workload, device)
    given = inputs(workload, model.config.get_text_config().vocab_size, device)
    runs: dict[str, Run] = {}
    expected: Tensor | None = None
    for implementation in (each for each in IMPLEMENTATIONS if each in names):
        progress(f"{workload.label}: preparing {implementation}")
        try:
            # A compiled model has one implementation for good.
            own = copy.deepcopy(model) if workload.kind == "generate static" else model
            run = _named(own, implementation, prepare(workload, own, given))
            found = run()
            assert isinstance(found, Tensor)
            expected = _agreeing(workload, given, found, expected)
            del found
            if device != "cpu":
                row.extra_bytes[implementation] = peak_bytes(run)
            runs[implementation] = run
        except Exception as error:  # whatever an implementation raises is its finding
            row.failed[implementation] = why(error)
        release()
    del expected
    progress(f"{workload.label}: {len(runs)} in turn")
    row.milliseconds = _race(runs, row, rounds, round_ms, device)
    row.extra_bytes = {key: value for key, value in row.extra_bytes.items() if key in row.milliseconds}
    runs.clear()
    del model
    torch.compiler.reset()
    release()
    return row


def _race(runs: dict[str, Run], row: ModelRow, rounds: int, round_ms: float, device: str) -> dict[str, float]:
    if device != "cpu":
        matrix = torch.randn(CUBLAS_SIZE, CUBLAS_SIZE, device=device, dtype=torch.bfloat16)
        runs[CUBLAS] = lambda: matrix @ matrix
    while runs:
        try:
            return race(runs, rounds, round_ms, device, least_calls=1)
        except Stopped as stopped:
            row.failed[stopped.name] = why(stopped.error)
            del runs[stopped.name]
        release()
    return {}


def _agreeing(workload: Workload, given: dict[str, Tensor], found: Tensor, expected: Tensor | None) -> Tensor | None:
    """What the next ones are compared with. Raises where ``found`` differs from it.

    Generated tokens are not compared: under random weights two correct results soon go different ways.
    """
    if workload.kind not in ("prefill", "train"):
        return None
    rows = given.get("attention_mask")
    found = found.reshape(-1, found.shape[-1]) if rows is None else found[rows.bool()]  # pad rows mean nothing
    if expected is None:
        return found.clone()
    off = float((found - expected).float().square().mean().sqrt() / expected.float().square().mean().sqrt())
    if not off <= _ROUNDING.get(workload.dtype, _AGREEMENT):
        raise Unavailable(f"its hidden states differ from the first implementation's by {off:.2g}")
    return expected


def chosen(workload: Workload, names: Sequence[str], asked: bool) -> tuple[str, ...]:
    """The implementations of a row: those asked for, else those that finish in bearable time."""
    return tuple(name for name in names if asked or name not in workload.seldom)


def best_peer(row: ModelRow) -> tuple[str, float] | None:
    """The fastest implementation that is neither ours nor cuBLAS, and our FlashAttention-2's time over its."""
    times = row.milliseconds
    others = [name for name in times if not name.startswith("cupy_") and name != CUBLAS]
    if not others or "cupy_fa2" not in times:
        return None
    name = min(others, key=times.__getitem__)
    return name, times["cupy_fa2"] / times[name]


def table(rows: Sequence[ModelRow]) -> tuple[list[str], Iterator[list[str]]]:
    """Head and rows: milliseconds, in brackets the extra MiB."""
    names = [name for name in (*IMPLEMENTATIONS[::-1], CUBLAS) if any(name in _tried(row) for row in rows)]

    def cell(row: ModelRow, name: str) -> str:
        if name not in row.milliseconds:
            return "OOM" if "out of memory" in row.failed.get(name, "") else "–"
        time, extra = row.milliseconds[name], row.extra_bytes.get(name)
        shown = f"{time:,.0f}" if time >= 100 else f"{time:.1f}"
        return shown if extra is None else f"{shown} ({extra / 2**20:,.0f})"

    def lines() -> Iterator[list[str]]:
        for row in rows:
            best = best_peer(row)
            ratio = "–" if best is None else f"{best[1]:.2f} ({best[0]})"
            yield [row.label, *(cell(row, name) for name in names), ratio]

    return ["workload", *names, "time of cupy_fa2 / best peer"], lines()


def _tried(row: ModelRow) -> set[str]:
    return row.milliseconds.keys() | row.failed.keys()
