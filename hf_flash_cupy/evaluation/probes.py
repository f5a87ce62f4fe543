"""Probes: what must hold for an implementation before any of its numbers is believed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_flash_cupy.evaluation.gates import Tolerance, tolerance
from hf_flash_cupy.evaluation.model import switch_attn, takes_logits_to_keep
from hf_flash_cupy.evaluation.scoring import divergence, forward_logits, token_nll

if TYPE_CHECKING:
    from torch import Tensor

    from hf_flash_cupy.integrations.recording import LayerRecord


@dataclass(frozen=True, slots=True)
class Check:
    """One probe's outcome; ``detail`` is the sentence a report shows."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class LayerCalls:
    """How often each layer called the registered function; ``launches`` is None where there are no kernels to
    count.
    """

    calls: dict[int, int]
    launches: dict[int, int] | None
    backend: str


def count_layers(model: Any, attn: str, ids: Sequence[int]) -> LayerCalls:
    """Which layers call ``attn`` in one forward pass of ``ids``, how often, and what it runs on."""
    import torch

    switch_attn(model, attn)
    row = torch.tensor([ids], device=next(model.parameters()).device)
    with torch.inference_mode(), _counted(attn) as layers:
        forward_logits(model, row, 1, takes_logits_to_keep(model))
    return layers()


def probe(model: Any, attn: str, ids: Sequence[int], layers: LayerCalls, baseline: LayerCalls) -> list[Check]:
    """Every check of ``attn``.

    Args:
        ids: a piece of the text with its prefix, at least 8 tokens; better several hundred, since faults may
            begin at the second key block.
        layers, baseline: what ``count_layers`` found for ``attn`` and for the first implementation.
    """
    import torch

    switch_attn(model, attn)
    keeps = takes_logits_to_keep(model)
    row = torch.tensor([ids], device=next(model.parameters()).device)
    # Not a multiple of any block size, so that a mask rounded to blocks leaks across it.
    cut = len(ids) * 3 // 4 // 16 * 16 - 5 if len(ids) >= 32 else len(ids) // 2
    changed = row.clone()
    changed[:, cut:] = (row[:, cut:] + 1) % _vocabulary(model)
    limits = tolerance(str(model.dtype).removeprefix("torch."))
    with torch.inference_mode():
        full = forward_logits(model, row, len(ids), keeps)
        other = forward_logits(model, changed, len(ids), keeps)
        pair = forward_logits(model, torch.cat([row, changed]), len(ids), keeps)
        part = forward_logits(model, row, len(ids) - cut + 1, keeps)
    return [
        _check_calls(attn, layers, baseline),
        _check_finite(attn, torch.cat([full, other])),
        _check_causality(attn, full[0], other[0], cut, limits),
        _check_batch(attn, torch.cat([full, other]), pair, limits),
        _check_chunks(attn, full[0], part[0], row[0], limits),
    ]


def _vocabulary(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


@contextmanager
def _counted(attn: str) -> Iterator[Callable[[], LayerCalls]]:
    """Count, per layer, the calls of the attention function that the model looks up; yields a function that
    tells.
    """
    if attn.startswith("cupy_"):
        from hf_flash_cupy.integrations.transformers import record_layers

        with record_layers() as records:
            yield lambda: _from_records(records)
    else:
        calls: Counter[int] = Counter()
        with _wrapped_interface(attn, calls):
            yield lambda: LayerCalls(dict(sorted(calls.items())), None, attn)


def _from_records(records: dict[int, LayerRecord]) -> LayerCalls:
    layers = dict(sorted(records.items()))
    return LayerCalls(
        calls={layer: record.calls for layer, record in layers.items()},
        launches={layer: record.launches for layer, record in layers.items()},
        backend="+".join(sorted({record.backend for record in layers.values()})) or "none",
    )


@contextmanager
def _wrapped_interface(attn: str, calls: Counter[int]) -> Iterator[None]:
    """Every lookup of ``attn`` gives the same function, counting.

    The lookup is wrapped rather than the registry entry, because ``eager`` is not in the registry: each model
    file brings its own as the lookup's default.
    """
    from transformers import AttentionInterface

    original = AttentionInterface.get_interface

    def get_interface(self: Any, name: str, default: Any) -> Any:
        function = original(self, name, default)
        if name != attn:
            return function

        def counting(module: Any, *args: Any, **kwargs: Any) -> Any:
            calls[getattr(module, "layer_idx", -1)] += 1
            return function(module, *args, **kwargs)

        return counting

    interface: Any = AttentionInterface
    interface.get_interface = get_interface
    try:
        yield
    finally:
        interface.get_interface = original


def _check_calls(attn: str, layers: LayerCalls, baseline: LayerCalls) -> Check:
    name, expected = f"calls {attn}", sum(baseline.calls.values())
    if not layers.calls:
        past = "no layer called it: the model routes its attention past Transformers' registry"
        return Check(name, False, past)
    calls = sum(layers.calls.values())
    detail = f"{len(layers.calls)} layers, {calls} calls (baseline {expected}), backend {layers.backend}"
    if layers.launches is None:
        return Check(name, calls == expected, detail)
    idle = [layer for layer, count in layers.launches.items() if count < layers.calls[layer]]
    detail += f", {sum(layers.launches.values())} kernels launched"
    if idle:
        detail += f"; layers without a kernel: {idle}"
    return Check(name, calls == expected and not idle and layers.backend in ("cuda", "host"), detail)


def _check_finite(attn: str, logits: Tensor) -> Check:
    # -inf is a masked vocabulary entry of some models; NaN and +inf are never right.
    wrong = int((logits.isnan() | (logits == math.inf)).sum())
    return Check(f"finite {attn}", not wrong, f"{wrong} of {logits.numel()} logits are NaN or inf")


# The largest KL of a row over the mean that is tolerated. Of 187 rows of the demo model, rounding alone gave 1e-11 in
# float32, 7e-5 in float16, 3e-3 in bfloat16; one key too many gave 1.4 (in bfloat16, in every layer).
_WORST_ROW = 10.0


def _check_causality(attn: str, logits: Tensor, changed: Tensor, cut: int, limits: Tolerance) -> Check:
    """``changed``: the logits with other tokens from ``cut`` on.

    Those before may move by rounding: a kernel decides for a tile of rows when to rescale, expert layers see other
    batch shapes. So distributions are compared, not bits.
    """
    moved = float(divergence(logits[:cut], changed[:cut]).kl.max())
    effect = float(divergence(logits[cut:], changed[cut:]).kl.max())
    allowed = _WORST_ROW * limits.kl_mean
    moves = f"earlier ones by KL {moved:.3g} (at most {allowed:.3g}), later ones by {effect:.3g}"
    return Check(f"causality {attn}", moved <= allowed < effect, f"changing later tokens moved {moves}")


def _check_batch(attn: str, singles: Tensor, pair: Tensor, limits: Tolerance) -> Check:
    kl = float(divergence(singles.flatten(0, 1), pair.flatten(0, 1)).kl.mean())
    detail = f"batch of 2 against batch of 1: KL {kl:.3g} (at most {limits.kl_mean:.3g})"
    return Check(f"batch {attn}", kl <= limits.kl_mean, detail)


def _check_chunks(attn: str, full: Tensor, part: Tensor, ids: Tensor, limits: Tolerance) -> Check:
    """The nll as the evaluation takes it (last positions only, in chunks) against torch's cross-entropy of
    all logits.
    """
    import torch

    targets = ids[1 - len(part) :]
    reference = torch.nn.functional.cross_entropy(full[-len(part) : -1].double(), targets)
    difference = abs(float(token_nll(part[:-1], targets).mean() - reference.cpu()))
    detail = f"chunked against full cross-entropy: {difference:.3g} nats (at most {limits.dlnppl:.3g})"
    return Check(f"chunks {attn}", difference <= limits.dlnppl, detail)
