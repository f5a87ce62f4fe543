"""``hf-flash-cupy doctor MODEL``: whether, and by which kernels, a model's attention layers will be accelerated."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import __version__ as transformers_version

from hf_flash_cupy import decode, dispatch, env, sm90, warm
from hf_flash_cupy.call import Call, Options, describe, extras
from hf_flash_cupy.errors import UnsupportedProblem
from hf_flash_cupy.integrations.model_layers import LayerKind, ModelPart, is_model_type, load_config, model_parts
from hf_flash_cupy.integrations.model_names import is_missing_folder, similar_model_type, slip_of_model_type

_LENGTH = 2048  # of the prompt whose kernels are named
_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


def report(model: str, arch: str = "") -> tuple[list[str], bool]:
    """The report's lines on a folder, hub id or model type, and whether every attention layer is accelerated.

    The kernels are those of compute capability ``arch`` ("90", or "host" for the CPU), by default of this machine's
    first GPU, without one of the CPU; in the dtype that the configuration names, else in the one that models are
    loaded in there.

    Raises:
        UnsupportedProblem: no model of that name, saying what a name can be; or no such ``arch``.
    """
    config = _config(model)
    try:
        arch = warm.architectures([arch] if arch else ())[0]
    except ValueError as error:
        raise UnsupportedProblem(str(error)) from None
    parts = model_parts(config)
    dtype = _DTYPES.get(parts[0].dtype or torch.float64) or warm.default_dtypes(arch)[0]
    place = "the CPU" if arch == "host" else f"compute capability {int(arch) / 10}"
    lines = [f"{model}: {type(config).__name__}, Transformers {transformers_version}; kernels for {place}, {dtype}"]
    accelerated = True
    for part in parts:
        if part is not parts[0] and part.failure and not part.reached:
            lines.append(f"{part.name}: could not be run here without inputs; not judged ({part.failure})")
            continue
        found = list(_part_lines(part, dtype, warm.kernel_arch(arch)))
        accelerated &= found[0][1]
        lines += [line for line, _ in found]
    if parts[0].failure and is_model_type(model):
        lines.append(f"{model} stands for the type's default configuration; a checkpoint's folder or hub id says more")
    if arch == "host" and env.cpu_mode() != "kernels" and any(part.kinds for part in parts):
        lines.append(
            "On a CPU a model runs torch's scaled_dot_product_attention in place of these kernels, "
            "unless HF_FLASH_CUPY_CPU=kernels is set (to check them: slower)"
        )
    return lines, accelerated


def _config(model: str) -> Any:
    """The configuration of ``model``; a name that is surely wrong is refused before a hub is asked."""
    needed = f"doctor {model or repr('')}: a folder with config.json, a hub id that can be reached, or a model type"
    needed += " such as llama is needed."
    if not model.strip():
        raise UnsupportedProblem(needed)
    if is_missing_folder(model):
        raise UnsupportedProblem(f"{needed} There is no such folder.")
    if not is_model_type(model) and not Path(model).is_dir() and (meant := slip_of_model_type(model)):
        raise UnsupportedProblem(f"{needed} There is no model type of that name: did you mean {meant}?")
    try:
        return load_config(model)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        meant = similar_model_type(model)
        hint = f" Did you mean {meant}?" if meant and meant != model else ""
        raise UnsupportedProblem(f"{needed} {reason}{hint}") from None


def _part_lines(part: ModelPart, dtype: str, arch: str) -> Iterator[tuple[str, bool]]:
    """Lines on one part; the first also says whether all of its attention is accelerated."""
    served = {kind: _kernels(kind, dtype, arch) for kind in part.kinds}
    ours = sum(part.kinds[kind] for kind, (_, is_served) in served.items() if is_served)
    total = part.kinds.total() + part.own.total() + part.unseen.total()
    if total == 0 and not part.failure:
        yield f"{part.name}: no attention layers, so there is nothing to accelerate", True
        return
    yield f"{part.name}: {ours} of {total} attention layers accelerated", ours == total > 0
    for kind, count in part.kinds.items():
        yield f"  {count} × {kind.module}: {_wording(kind)}", True
        yield from ((f"      {line}", True) for line in served[kind][0])
    for name, count in part.own.items():
        yield f"  {count} × {name}: its own (eager) attention, right but not accelerated", True
    if part.unseen:
        names = ", ".join(f"{count} × {name}" for name, count in part.unseen.items())
        yield f"  not reached: {names}", True
    if part.failure:
        yield f"  the run without weights ended early ({part.failure})", True


def _wording(kind: LayerKind) -> str:
    heads = f"{kind.num_heads} heads"
    if kind.num_heads_k != kind.num_heads:
        heads += f" on {kind.num_heads_k} of keys"
    size = str(kind.head_dim) if kind.head_dim == kind.head_dim_v else f"{kind.head_dim} (v: {kind.head_dim_v})"
    return ", ".join((heads, f"head size {size}", kind.mask, *kind.features))


def _kernels(kind: LayerKind, dtype: str, arch: str) -> tuple[list[str], bool]:
    """The forward kernels of a prompt and, with a cache, of the next token; or why there are none."""
    generates = any(word in kind.mask for word in ("causal", "chunks"))
    try:
        prompt = f"prompt of {_LENGTH:,}: {_chosen(kind, dtype, arch, _LENGTH)}"
        return [prompt, *([f"next token: {_chosen(kind, dtype, arch, 1)}"] if generates else [])], True
    except UnsupportedProblem as error:
        return [f"refused: {error}"], False


def _chosen(kind: LayerKind, dtype: str, arch: str, rows: int) -> str:
    """What a call of ``rows`` rows and the prompt's keys launches: the choice that execute makes."""
    problem, geometry = describe(_call(kind, getattr(torch, dtype), rows))
    if decode.serves(problem, geometry, arch):
        return decode.decode_config(problem, arch, decode.packed_rows(geometry)).name
    own = arch == "90" and env.forced_arch() is None  # compute capability 9.0's own kernels
    if own and (hopper := sm90.select(problem, geometry)) is not None:
        return hopper.name
    return dispatch.select(problem, arch).name


def _call(kind: LayerKind, dtype: torch.dtype, rows: int) -> Call:
    """Tensors of the right shapes that nobody writes to or reads."""
    q = torch.empty(1, rows, kind.num_heads, kind.head_dim, dtype=dtype)
    k = torch.empty(1, _LENGTH, kind.num_heads_k, kind.head_dim, dtype=dtype)
    v = torch.empty(1, _LENGTH, kind.num_heads_k, kind.head_dim_v, dtype=dtype)
    masked = "selected keys" in kind.features or kind.mask == "dense"
    beside = extras(
        q,
        mask=torch.empty(1, 1, rows, _LENGTH, dtype=torch.bool) if masked else None,
        key_intervals=torch.empty(1, 1, rows, 2, dtype=torch.int32) if _has_intervals(kind) and rows > 1 else None,
        bias=torch.empty(1, 1, rows, _LENGTH, dtype=dtype) if "bias" in kind.features else None,
        sinks=torch.empty(kind.num_heads) if "sinks" in kind.features else None,
    )
    window = re.search(r"window (\d+)", kind.mask)
    left, causal = int(window[1]) - 1 if window else -1, "causal" in kind.mask
    options = Options(
        causal=causal, window_size=(left, -1 if causal else left), softcap=float("softcap" in kind.features)
    )
    return Call(q, k, v, beside, options)


def _has_intervals(kind: LayerKind) -> bool:
    return any(word in kind.mask for word in ("chunks", "blocks"))
