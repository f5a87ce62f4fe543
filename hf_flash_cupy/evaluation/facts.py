"""What a report says about the machine, the model and the data."""

from __future__ import annotations

import platform
import re
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from hf_flash_cupy import __version__
from hf_flash_cupy.errors import MissingDependency
from hf_flash_cupy.evaluation.data import Corpus, TokenStream
from hf_flash_cupy.evaluation.model import LoadedModel
from hf_flash_cupy.evaluation.schema import DataInfo, ModelInfo, Run

if TYPE_CHECKING:
    import torch

SEED = 0


def describe_run(device: torch.device, processes: int = 1) -> Run:
    import torch

    on_gpu = device.type == "cuda"
    where = str(device) if on_gpu else f"cpu ({torch.get_num_threads()} threads)"
    return Run(
        command=shlex.join(["hf-flash-cupy", *sys.argv[1:]]),
        seed=SEED,
        versions=_versions(),
        device=where if processes == 1 else f"{processes} processes, the first on {where}",
        gpu=torch.cuda.get_device_name(device) if on_gpu else None,
        driver=_driver() if on_gpu else None,
    )


def _versions() -> dict[str, str | None]:
    cupy = next((version for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy") if (version := _version(name))), None)
    return {
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "cupy": cupy,
        "nvrtc": _nvrtc() if cupy else None,
        "hf_flash_cupy": __version__,
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _nvrtc() -> str | None:
    from hf_flash_cupy.jit.compiler import nvrtc_version

    try:
        return ".".join(map(str, nvrtc_version()))
    except MissingDependency:
        return None


def _driver() -> str | None:
    try:
        found = re.search(r"\d+\.\d+(\.\d+)?", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return found[0] if found else None


def describe_model(loaded: LoadedModel) -> ModelInfo:
    config = loaded.model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    hidden = getattr(config, "hidden_size", None)
    return ModelInfo(
        id=loaded.id,
        revision=loaded.revision,
        sha256=loaded.sha256,
        dtype=loaded.dtype,
        parameters=sum(parameter.numel() for parameter in loaded.model.parameters()),
        layers=getattr(config, "num_hidden_layers", None),
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or (hidden // heads if hidden and heads else None),
    )


def describe_data(corpus: Corpus, stream: TokenStream) -> DataInfo:
    return DataInfo(
        name=corpus.name,
        sha256=corpus.sha256,
        bytes=corpus.bytes,
        words=corpus.words,
        tokens=len(stream.ids),
        truncated_tokens=stream.truncated,
        ids_sha256=stream.sha256,
        documents=len(stream.document_lengths),
        joiner=corpus.joiner,
    )
