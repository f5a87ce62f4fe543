"""Loading a causal language model once and switching its attention implementation."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_flash_cupy.errors import MissingDependency
from hf_flash_cupy.evaluation import demo
from hf_flash_cupy.evaluation.outcome import WrongUse
from hf_flash_cupy.integrations.model_names import is_missing_folder

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "float16", "bfloat16")
# Hashing more than this at every start would take longer than it is worth; hub models have their revision
# instead.
_MAX_HASHED_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from: ``name`` is a hub id, a folder, a ``.gguf`` file, or ``demo``."""

    name: str = demo.NAME
    revision: str | None = None
    tokenizer: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Any
    tokenizer: Any
    id: str
    revision: str | None
    sha256: str | None

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def dtype(self) -> str:
        return str(next(self.model.parameters()).dtype).removeprefix("torch.")

    @property
    def max_context(self) -> int | None:
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return int(limit) if limit else None


def pick_device(device: str, own: int = 0) -> torch.device:
    """``auto`` (``cuda`` if there is one, else the CPU), ``cpu``, ``cuda`` (number ``own``) or ``cuda:N``."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not (device in ("cpu", "cuda") or device.removeprefix("cuda:").isdecimal()):
        raise WrongUse(f"--device {device}: must be auto, cpu, cuda or cuda:N")
    if device.startswith("cuda"):
        index = int(device.partition(":")[2] or own)
        if index >= torch.cuda.device_count():
            raise WrongUse(f"--device {device}: torch sees {torch.cuda.device_count()} CUDA devices")
        return torch.device("cuda", index)
    return torch.device(device)


def check_source(source: ModelSource, dtype: str) -> None:
    """Refuse, before anything is downloaded, what can be seen to be no model, no tokenizer or no dtype.

    Raises:
        WrongUse: naming the option.
    """
    if dtype not in ("auto", *DTYPES):
        raise WrongUse(f"--dtype {dtype}: must be auto, {', '.join(DTYPES)}")
    for option, name in (("--model", source.name), ("--tokenizer", source.tokenizer)):
        if name == "":
            raise WrongUse(f"{option} '': name a hub id or a folder")
        if option == "--model" and name and name.endswith(".gguf"):
            if not Path(name).expanduser().is_file():
                raise WrongUse(f"{option} {name}: there is no such file")
        elif name and is_missing_folder(name):
            raise WrongUse(f"{option} {name}: there is no such folder")


def load(source: ModelSource, dtype: str, device: torch.device, attn: str) -> LoadedModel:
    """Load model and tokenizer for inference.

    ``dtype``: one of ``DTYPES``, or ``auto`` = float32 on a CPU (16-bit is slow there), else the checkpoint's
    own 16-bit type, else bfloat16 where the GPU has it.

    :func:`check_source` has passed both.

    Raises:
        WrongUse: a checkpoint that is no causal language model.
        MissingDependency: the model cannot be found or downloaded.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    path, options = _locate(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.tokenizer or path, **({} if source.tokenizer else options))
        torch_dtype = getattr(torch, dtype) if dtype in DTYPES else _auto_dtype(device, path, options)
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, **options, **_dequantized(options), dtype=torch_dtype, attn_implementation=attn
        )
    except OSError as error:
        raise MissingDependency(
            f"--model {source.name} could not be loaded: {error}", mend=f"hf download {source.name}"
        ) from error
    except ValueError as error:
        raise WrongUse(f"--model {source.name}: {error}") from error
    revision = source.revision or getattr(model.config, "_commit_hash", None)
    return LoadedModel(model.to(device).eval(), tokenizer, _model_id(source), revision, _weights_sha256(path, options))


def _locate(source: ModelSource) -> tuple[str, dict[str, Any]]:
    """The path or hub id for ``from_pretrained`` and its keyword arguments."""
    if source.name == demo.NAME:
        demo.fetch_model()
        return str(demo.model_dir()), {}
    options: dict[str, Any] = {"trust_remote_code": source.trust_remote_code}
    if source.name.endswith(".gguf"):
        file = Path(source.name).expanduser()
        return str(file.parent), options | {"gguf_file": file.name}
    return source.name, options | ({"revision": source.revision} if source.revision else {})


def _dequantized(options: dict[str, Any]) -> dict[str, Any]:
    from transformers import GgufConfig

    return {"quantization_config": GgufConfig(dequantize=True)} if "gguf_file" in options else {}


def _auto_dtype(device: torch.device, path: str, options: dict[str, Any]) -> torch.dtype:
    import torch
    from transformers import AutoConfig

    if device.type == "cpu":
        return torch.float32
    own = AutoConfig.from_pretrained(path, **options).get_text_config().dtype
    supported = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return own if own in (torch.float16, supported) else supported


def _model_id(source: ModelSource) -> str:
    return demo.MODEL_ID if source.name == demo.NAME else source.name


def _weights_sha256(path: str, options: dict[str, Any]) -> str | None:
    """Of the local weight file, or of the digests of several in the order of their names; None for hub and
    huge models.
    """
    folder = Path(path)
    names = [options["gguf_file"]] if "gguf_file" in options else ["*.safetensors"]
    files = sorted(file for name in names for file in folder.glob(name)) if folder.is_dir() else []
    if not files or sum(file.stat().st_size for file in files) > _MAX_HASHED_BYTES:
        return None
    digests = [demo.file_sha256(file) for file in files]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def check_attn_names(names: Sequence[str]) -> None:
    """Refuse, before a model is loaded, a name that Transformers does not know.

    Raises:
        WrongUse: listing the known names.
    """
    from transformers import AttentionInterface

    if any(name.startswith("cupy_") for name in names):
        from hf_flash_cupy.integrations import transformers as integration

        integration.register()
    known = {"eager", *AttentionInterface._global_mapping}
    for name in names:
        # A name with a slash is a kernel repository of the hub, which Transformers loads by itself.
        if name not in known and "/" not in name:
            usable = sorted(other for other in known if not other.startswith("paged|"))
            raise WrongUse(f"--attn {name}: unknown; known are {', '.join(usable)}")


def switch_attn(model: Any, name: str) -> None:
    """Let ``model`` run the attention implementation ``name`` from the next call on.

    Raises:
        WrongUse: the model cannot switch, so its figures would be another implementation's.
        MissingDependency: the implementation's package is not installed.
    """
    try:
        model.set_attn_implementation(name)
    except ImportError as error:
        raise MissingDependency(
            f"--attn {name}: {error}", mend=f"pip install the package that brings {name}"
        ) from error
    except ValueError as error:
        raise WrongUse(f"--attn {name}: {error}") from error
    if model.config._attn_implementation != name:
        raise WrongUse(f"--attn {name}: {type(model).__name__} stays with {model.config._attn_implementation}")


def takes_logits_to_keep(model: Any) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters
