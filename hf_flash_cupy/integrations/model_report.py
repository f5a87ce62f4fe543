"""``hf-flash-cupy doctor MODEL``: whether, and by which kernels, a model's attention layers will be accelerated."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import __version__ as transformers_version

from hf_flash_cupy import dispatch, tiles, warm
from hf_flash_cupy.errors import UnsupportedProblem
from hf_flash_cupy.integrations.model_layers import LayerKind, ModelPart, load_config, model_parts
from hf_flash_cupy.problem import AttentionProblem

_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


def report(model: str) -> tuple[list[str], bool]:
    """The report's lines on a folder, hub id or model type, and whether every attention layer is accelerated.

    The kernels are those of this machine's first GPU, without one those of the CPU; in the dtype that the configuration
    names, else in the one that models are loaded in there.

    Raises:
        UnsupportedProblem: no model of that name, saying what a name can be.
    """
    try:
        config = load_config(model)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UnsupportedProblem(
            f"doctor {model}: a folder with config.json, a hub id that can be reached, or a model type such as llama "
            f"is needed. {reason}"
        ) from None
    arch = warm.architectures()[0]
    parts = model_parts(config)
    dtype = _DTYPES.get(parts[0].dtype or torch.float64) or warm.default_dtypes(arch)[0]
    place = "the CPU" if arch == "host" else f"compute capability {int(arch) / 10}"
    lines = [f"{model}: {type(config).__name__}, Transformers {transformers_version}; kernels for {place}, {dtype}"]
    accelerated = True
    for part in parts:
        found = list(_part_lines(part, dtype, arch))
        accelerated &= found[0][1]
        lines += [line for line, _ in found]
    return lines, accelerated


def _part_lines(part: ModelPart, dtype: str, arch: str) -> Iterator[tuple[str, bool]]:
    """Lines on one part; the first also says whether all of its attention is accelerated."""
    served = {kind: _kernel(kind, dtype, arch) for kind in part.kinds}
    ours = sum(part.kinds[kind] for kind, (_, is_served) in served.items() if is_served)
    total = part.kinds.total() + part.own.total() + part.unseen.total()
    # A whole that cannot be run on its first input alone is told by its parts.
    everything = ours == total and (total > 0 or not part.failure)
    yield f"{part.name}: {ours} of {total} attention layers accelerated", everything
    for kind, count in part.kinds.items():
        kernel, _ = served[kind]
        yield f"  {count} × {kind.module}: {_wording(kind)}", True
        yield f"      {kernel}", True
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


def _kernel(kind: LayerKind, dtype: str, arch: str) -> tuple[str, bool]:
    """The forward kernel of a prompt, or why there is none; and whether there is one."""
    bias = "bias" in kind.features
    bytes_of = 4 if dtype == "float32" else 2
    problem = AttentionProblem(
        dtype=warm.DTYPES[dtype],
        head_dim=kind.head_dim,
        head_dim_v=kind.head_dim_v,
        seqlen_q=tiles.SHORT_SEQLEN_Q + 1,
        vector=all(size * bytes_of % 16 == 0 for size in (kind.head_dim, kind.head_dim_v)),
        intervals="chunks" in kind.mask or "blocks" in kind.mask,
        mask="selected keys" in kind.features or kind.mask == "dense",
        softcap="softcap" in kind.features,
        bias="element" if bias else "none",
    )
    try:
        return dispatch.select(problem, arch).name, True
    except UnsupportedProblem as error:
        return f"refused: {error}", False
