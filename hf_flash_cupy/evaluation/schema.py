"""The report as data (schema 1). ``hf-flash-cupy ppl --print-schema`` prints its JSON schema.

Errors and nll are in nats per token. A number that is not finite or cannot be known is null, and
``null_reasons`` of the same object says why.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, populate_by_name=True, frozen=True)


class Run(_Model):
    command: str
    seed: int = Field(description="given to torch; nothing in the evaluation draws random numbers")
    versions: dict[str, str | None] = Field(description="python, torch, transformers, cupy, nvrtc, hf_flash_cupy")
    device: str
    gpu: str | None
    driver: str | None


class ModelInfo(_Model):
    id: str
    revision: str | None
    sha256: str | None = Field(description="of the local weight file; null for hub models, which have a revision")
    dtype: str
    parameters: int
    layers: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None


class DataInfo(_Model):
    name: str
    sha256: str = Field(description="of the UTF-8 text")
    bytes: int = Field(description="UTF-8 bytes of the whole text")
    words: int = Field(description="runs of non-blank characters in the whole text")
    tokens: int = Field(description="tokens evaluated")
    truncated_tokens: int = Field(description="tokens left out by --max-tokens")
    ids_sha256: str = Field(description="of the evaluated token ids as little-endian int64")
    documents: int
    joiner: str


class ProtocolInfo(_Model):
    name: str
    context: int
    stride: int
    prefix: str
    windows: int
    scored: int = Field(description="tokens scored by the windows that are done")
    rule: str


class Result(_Model):
    """One implementation. ``nll_sum`` is weighted where the protocol weighs (hf-doc)."""

    attn: str
    backend: str = Field(description="cuda, host (CUDA kernels built for the CPU), reference, or the attn's own name")
    calls_per_layer: dict[int, int] = Field(
        description="layer index to calls of the attention function in one forward pass"
    )
    launches_per_layer: dict[int, int] | None = Field(
        description="kernels launched likewise; null for other libraries' kernels"
    )
    nll_sum: float
    nll_mean: float
    ppl: float | None
    se_naive: float | None = Field(description="standard error of nll_mean, tokens as independent")
    se_window: float | None = Field(description="standard error of nll_mean, windows as clusters")
    word_ppl: float | None
    byte_ppl: float | None
    bits_per_byte: float | None
    tokens_per_s: float | None = Field(description="tokens fed to the model per second of forward passes")
    seconds: float
    peak_bytes: int | None = Field(description="GPU: allocated by torch; CPU: resident set of the process")
    compile_s: float
    cache_hits: int
    null_reasons: dict[str, str] = {}


class Comparison(_Model):
    """``attn`` against ``baseline`` on the same tokens; differences are attn - baseline."""

    attn: str
    baseline: str
    dlnppl: float
    se_paired: float | None = Field(description="standard error of dlnppl from paired per-token differences")
    ppl_ratio: float | None
    kl_mean: float | None = Field(description="KL(baseline || attn) per token; median, p99 and max likewise")
    kl_median: float | None
    kl_p99: float | None
    kl_max: float | None
    top1: float = Field(description="fraction of tokens for which both rank the same token first")
    max_abs_dlogit: float | None
    verdict: Literal["identical", "within tolerance", "different"]
    null_reasons: dict[str, str] = {}


class CheckInfo(_Model):
    name: str
    ok: bool
    detail: str


class WindowInfo(_Model):
    index: int
    begin: int
    end: int
    scored_from: int
    scored: int
    nll_sum: dict[str, float]


class Gate(_Model):
    name: str
    value: float | None
    limit: float
    ok: bool


class Section(_Model):
    """The evaluation at one context length."""

    protocol: ProtocolInfo
    results: list[Result]
    comparisons: list[Comparison]
    noise_floor: Comparison | None
    windows: list[WindowInfo]


class Report(Section):
    schema_version: Literal[1] = Field(default=1, alias="schema")
    run: Run
    model: ModelInfo
    data: DataInfo
    checks: list[CheckInfo]
    gates: list[Gate]
    lengths: list[Section] = Field(
        description="further context lengths (--lengths), each like this report's own section"
    )
    exit_code: int


def json_schema() -> dict[str, Any]:
    """The published JSON schema of a report."""
    schema = Report.model_json_schema(by_alias=True, mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
