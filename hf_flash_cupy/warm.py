"""Compiling kernels before they are needed (``hf-flash-cupy cache warm``); no GPU is needed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from hf_flash_cupy import dispatch, sm90, tiles
from hf_flash_cupy.errors import MissingDependency
from hf_flash_cupy.integrations.model_names import is_missing_folder
from hf_flash_cupy.problem import MAX_HEAD_DIM, AttentionProblem, DType, KernelConfig

DTYPES: dict[str, DType] = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True, slots=True)
class Heads:
    """What of a model decides which kernels it needs."""

    head_dim: int
    head_dim_v: int
    softcap: bool = False


@dataclass(frozen=True, slots=True)
class Warmed:
    name: str
    seconds: float  # 0 where the kernel was there already


def heads_of_model(model: str) -> Heads:
    """Reads the head sizes out of the ``config.json`` of a folder or, through its client, of a hub.

    Raises ValueError where it does not state them (some leave them to their class's defaults).
    """
    folder = Path(model)
    if folder.is_dir():
        path = folder / "config.json"
    else:
        import huggingface_hub

        if is_missing_folder(model):
            raise ValueError(f"{model}: there is no such folder.")
        path = Path(huggingface_hub.hf_hub_download(model, "config.json"))
    return heads_of_config(json.loads(path.read_text()))


def heads_of_config(config: dict[str, Any]) -> Heads:
    """The same for a parsed ``config.json``; in a multimodal model the language model's part counts."""
    config = config.get("text_config", config)
    head_dim = config.get("head_dim")
    if head_dim is None and {"hidden_size", "num_attention_heads"} <= config.keys():
        head_dim = config["hidden_size"] // config["num_attention_heads"]
    # Multi-head latent attention: the rotated and the unrotated part are attended as one.
    if "qk_rope_head_dim" in config and "qk_nope_head_dim" in config:
        head_dim = config["qk_rope_head_dim"] + config["qk_nope_head_dim"]
    if head_dim is None:
        raise ValueError("This model's config.json states no head size: name it with --head-dim.")
    return Heads(head_dim, config.get("v_head_dim") or head_dim, bool(config.get("attn_logit_softcapping")))


def problems(heads: Heads, dtype: str) -> Iterator[AttentionProblem]:
    """What a Transformers model asks for: few and many rows, each without and with key intervals."""
    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype}: supported are {', '.join(DTYPES)}.")
    if min(heads.head_dim, heads.head_dim_v) < 1:
        raise ValueError(f"--head-dim {heads.head_dim}, v's {heads.head_dim_v}: must be 1 to {MAX_HEAD_DIM}.")
    for seqlen_q, intervals in product((1, tiles.SHORT_SEQLEN_Q + 1), (False, True)):
        yield AttentionProblem(
            dtype=DTYPES[dtype],
            head_dim=heads.head_dim,
            head_dim_v=heads.head_dim_v,
            seqlen_q=seqlen_q,
            vector=_is_vector(heads, dtype),
            intervals=intervals,
            softcap=heads.softcap,
        )


def architectures(asked: Iterable[str] = ()) -> list[str]:
    """Compute capabilities without the dot, or "host": ``asked``, else this machine's GPUs.

    Raises ValueError where what is ``asked`` is none, saying which there are.
    """
    import torch

    asked = list(asked)
    _require_known(asked)
    if not (found := list(dict.fromkeys(asked))):
        capabilities = (torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))
        found = sorted({f"{major}{minor}" for major, minor in capabilities}) or ["host"]
    return found


def _require_known(asked: Iterable[str]) -> None:
    """Refuses what is no compute capability: 77 would be given the kernels of 75, which no such GPU will ever ask for.

    Known are those with tiles of their own and, as a GPU between two of them takes the older one's kernels, those that
    NVRTC compiles for.
    """
    from hf_flash_cupy.jit import compiler

    unknown = [arch for arch in asked if arch not in ("host", *tiles.ARCHS)]
    if not unknown:
        return
    try:
        newest = [str(arch) for arch in compiler.supported_archs() if arch >= int(tiles.ARCHS[0])]
    except MissingDependency:  # its own list will do
        newest = []
    known = sorted({*tiles.ARCHS, *newest}, key=int)
    for arch in unknown:
        if arch not in known:
            raise ValueError(f"--arch {arch}: supported are host, {', '.join(known)} (90 for an H100 or H200).")


def default_dtypes(arch: str) -> list[str]:
    """What models are loaded in there: 16 bits on a GPU, in the type its tensor cores have, 32 on a CPU."""
    return ["float32" if arch == "host" else "float16" if int(arch) < 80 else "bfloat16"]


def kernel_arch(arch: str) -> str:
    """Whose kernels run on compute capability ``arch``: the newest that is no newer; "host" for "host"."""
    return "host" if arch == "host" else [name for name in tiles.ARCHS if int(name) <= int(arch)][-1]


def configurations(heads: Heads, dtypes: Iterable[str], arch: str) -> list[KernelConfig]:
    """The kernels for ``heads`` on ``arch``, each once. Raises UnsupportedProblem where there is none."""
    asked = [problem for dtype in dtypes for problem in problems(heads, dtype)]
    found = [dispatch.select(problem, kernel_arch(arch)) for problem in asked]
    if arch == "90":
        served = (problem for problem in asked if not sm90.refusal_of_problem(problem))
        found += [config for problem in served for config in sm90.configs_of(problem, windows=[(-1, 0)])]
    return list({config.name: config for config in found}.values())


def warm(config: KernelConfig, arch: str) -> Warmed:
    """Brings the binary of ``config`` for ``arch`` into the cache; raises what compiling raises."""
    from hf_flash_cupy.jit import cache, compiler, module

    if arch == "host":
        recipe = module.host_recipe(config)
    else:
        capability = divmod(int(arch), 10)
        target = compiler.select_target(config.arch, capability, compiler.supported_archs())
        recipe = module.cuda_recipe(config, target)
    entry = cache.fetch(recipe)
    return Warmed(config.name, entry.meta["seconds"] if entry.fresh else 0.0)


def _is_vector(heads: Heads, dtype: str) -> bool:
    """Whether rows are whole 16-byte chunks, as they are in the contiguous tensors of a model."""
    size = 4 if dtype == "float32" else 2
    return all(width * size % 16 == 0 for width in (heads.head_dim, heads.head_dim_v))
