"""The options of ``hf-flash-cupy ppl``: names, types and help. Their defaults stand in ``command.ppl``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"
    MARKDOWN = "md"
    CSV = "csv"


class ProtocolName(StrEnum):
    STRIDED = "strided"
    DISJOINT = "disjoint"
    LLAMA_CPP = "llama.cpp"
    LM_EVAL = "lm-eval"
    GPTQ = "gptq"
    HF_DOC = "hf-doc"


class Mode(StrEnum):
    STREAM = "stream"
    DOCUMENTS = "documents"


def _option(panel: str, *names: str, help: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


_MODEL, _ATTENTION, _DATA, _WINDOWS, _OUTPUT, _GATES = (
    "Model",
    "Attention",
    "Data",
    "Windows",
    "Output",
    "Gates (exit 1)",
)

Model = Annotated[str, _option(_MODEL, "--model", help="Hub id, folder, .gguf file, or demo (135 M parameters).")]
Revision = Annotated[str | None, _option(_MODEL, "--revision", help="Branch, tag or commit of a hub model.")]
Tokenizer = Annotated[str | None, _option(_MODEL, "--tokenizer", help="Another tokenizer: hub id or folder.")]
TrustRemoteCode = Annotated[bool, _option(_MODEL, "--trust-remote-code", help="Run the model repository's own code.")]
Dtype = Annotated[
    str,
    _option(
        _MODEL,
        "--dtype",
        help="auto, float32, float16 or bfloat16. auto: float32 on a CPU, else the checkpoint's 16-bit type.",
    ),
]
Device = Annotated[str, _option(_MODEL, "--device", help="auto, cpu, cuda or cuda:N.")]

Attn = Annotated[
    str,
    _option(_ATTENTION, "--attn", metavar="A[,B…]", help="Attention implementations; the first is the baseline."),
]
Checks = Annotated[
    bool,
    _option(
        _ATTENTION,
        "--checks/--no-checks",
        help="Probe causality, calls, kernel launches, finiteness, batching first (exit 4).",
    ),
]
NoiseFloor = Annotated[
    bool, _option(_ATTENTION, "--noise-floor", help="Add eager and sdpa: their difference is the floor.")
]

Text = Annotated[
    list[str] | None,
    _option(_DATA, "--text", metavar="FILE", help="UTF-8 text, .gz, or - (repeatable). Default: the demo text."),
]
DataMode = Annotated[Mode, _option(_DATA, "--mode", help="Join the files to one text, or evaluate each apart.")]
Join = Annotated[str, _option(_DATA, "--join", help="What joins the files; \\n is a line break.")]
MaxTokens = Annotated[
    int | None,
    _option(_DATA, "--max-tokens", min=0, help="Tokens to take; 0 = all. Default: 2048 on a CPU, all on a GPU."),
]

Context = Annotated[int, _option(_WINDOWS, "--context", help="Tokens the model is fed at once, the prefix included.")]
Stride = Annotated[
    int | None, _option(_WINDOWS, "--stride", help="Tokens a window advances. Default: half the context.")
]
ProtocolOption = Annotated[
    ProtocolName, _option(_WINDOWS, "--protocol", help="Which windows, which tokens are scored.")
]
Prefix = Annotated[
    str,
    _option(_WINDOWS, "--prefix", help="none, bos, eos, a token id, or auto (what the tokenizer itself adds)."),
]
Lengths = Annotated[
    str, _option(_WINDOWS, "--lengths", metavar="N[,M…]", help="Further context lengths to repeat all with.")
]
BatchSize = Annotated[int, _option(_WINDOWS, "--batch-size", min=1, help="Windows of equal shape fed at once.")]
Warmup = Annotated[int, _option(_WINDOWS, "--warmup", min=0, help="Untimed passes of each implementation.")]

Out = Annotated[Path | None, _option(_OUTPUT, "--out", help="Folder for result.json.")]
FormatOption = Annotated[Format, _option(_OUTPUT, "--format", help="What is printed.")]
PrintSchema = Annotated[bool, _option(_OUTPUT, "--print-schema", help="Print the JSON schema of the report and stop.")]
Quiet = Annotated[bool, _option(_OUTPUT, "--quiet", "-q", help="Print the result only.")]
NoProgress = Annotated[bool, _option(_OUTPUT, "--no-progress", help="No progress bar.")]

MaxPpl = Annotated[float | None, _option(_GATES, "--max-ppl", help="No perplexity above this.")]
MaxPplRatio = Annotated[
    float | None, _option(_GATES, "--max-ppl-ratio", help="None above this multiple of the baseline's.")
]
MaxKl = Annotated[
    float | None, _option(_GATES, "--max-kl", help="Mean KL to the baseline, in place of the dtype's limit.")
]
MinTop1 = Annotated[
    float | None,
    _option(_GATES, "--min-top1", help="Top-1 agreement, 0 to 1, in place of the dtype's limit."),
]
ExpectPpl = Annotated[
    float | None, _option(_GATES, "--expect-ppl", min=1, help="The perplexity every one must reproduce.")
]
Rtol = Annotated[
    float | None, _option(_GATES, "--rtol", help="Tolerance of --expect-ppl on ln ppl. Default: the dtype's.")
]
MinSpeedup = Annotated[float | None, _option(_GATES, "--min-speedup", help="Tokens/s as a multiple of the baseline's.")]
