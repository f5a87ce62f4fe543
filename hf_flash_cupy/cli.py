"""The ``hf-flash-cupy`` command. A sub-command imports what it needs when it runs."""

from __future__ import annotations

import importlib
import sys
from typing import Annotated

import typer

from hf_flash_cupy import __version__
from hf_flash_cupy.errors import CompilationError, MissingDependency, UnsupportedProblem

# The same for every sub-command; 0 is success.
FAILED, WRONG_USE, MISSING = 1, 2, 3

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="FlashAttention for Hugging Face Transformers, compiled at run time through CuPy.",
)
cache = typer.Typer(no_args_is_help=True, help="The compiled kernels on disk.")
app.add_typer(cache, name="cache")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hf-flash-cupy {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """The options of the command itself."""


# The sub-command reads its own arguments, --help included.
_FORWARDED = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=_FORWARDED)
def ppl(ctx: typer.Context) -> None:
    """Perplexity of a model through one or several attention implementations, on the same windows."""
    _forward(ctx, "hf_flash_cupy.evaluation.command", "ppl")


@app.command(context_settings=_FORWARDED)
def demo(ctx: typer.Context) -> None:
    """The demo model and text: fetch, where, clear."""
    _forward(ctx, "hf_flash_cupy.evaluation.command", "demo")


@app.command(context_settings=_FORWARDED)
def bench(ctx: typer.Context) -> None:
    """Times attention forward and backward, or whole models (bench models), ours and every peer's, interleaved."""
    _forward(ctx, "hf_flash_cupy.bench.command", "app")


@app.command(context_settings=_FORWARDED)
def explain(ctx: typer.Context) -> None:
    """Shows what FlashAttention-1, -2 and standard attention do for a shape: grid, tiles, work, traffic, time."""
    _forward(ctx, "hf_flash_cupy.anatomy.command", "explain")


@app.command()
def doctor(
    model: Annotated[
        str | None, typer.Argument(help="Folder, hub id or model type (llama): its layers and kernels.")
    ] = None,
    arch: Annotated[
        str, typer.Option(help="75,80,90,… or host: MODEL's kernels there; default: this machine's. Needs no such GPU.")
    ] = "",
) -> None:
    """What this machine has, one kernel launched and compared, and the command that mends each fault.

    With MODEL: whether its attention layers will run this package's kernels, and which. Reads no weights.
    """
    from rich.console import Console

    from hf_flash_cupy.doctor import examine, examine_model

    if model is None and arch:
        raise typer.BadParameter(f"--arch {arch}: name a model; without one, this machine is looked at")
    raise typer.Exit(examine(Console()) if model is None else examine_model(model, Console(), arch))


@cache.command()
def where() -> None:
    """Print the folder."""
    from hf_flash_cupy.jit.cache import cache_dir

    typer.echo(cache_dir())


@cache.command("list")
def list_kernels() -> None:
    """Print every compiled kernel with its size."""
    from hf_flash_cupy.jit.cache import list_entries

    entries = list_entries()
    for entry in entries:
        typer.echo(f"{entry.size / 1024:8.1f} KiB  {entry.folder.parent.name}/{entry.folder.name}")
    kernels = sum(entry.is_kernel for entry in entries)
    typer.echo(f"{kernels} kernels, {sum(entry.size for entry in entries) / 2**20:.1f} MiB")


@cache.command()
def clear() -> None:
    """Remove every compiled kernel. Kernels are compiled again when they are next needed."""
    from hf_flash_cupy.jit import cache as store

    typer.echo(f"{store.clear()} kernels removed from {store.cache_dir()}")


@cache.command()
def warm(
    model: Annotated[str, typer.Argument(help="Hub id or folder whose config.json states the heads.")] = "",
    head_dim: Annotated[int | None, typer.Option(min=1, help="Head size, in place of a model.")] = None,
    head_dim_v: Annotated[int | None, typer.Option(min=1, help="Head size of v, where it differs.")] = None,
    softcap: Annotated[bool, typer.Option("--softcap", help="Kernels with softcap.")] = False,
    dtype: Annotated[str, typer.Option(help="float16,bfloat16,float32; default: what the GPU is used with.")] = "",
    arch: Annotated[str, typer.Option(help="75,80,90,…,host; default: this machine's. Needs no such GPU.")] = "",
) -> None:
    """Compile what a model needs before it is needed, here or, in an image, for another machine."""
    from hf_flash_cupy import warm as warming

    if bool(model) == bool(head_dim):
        raise typer.BadParameter("name a model or --head-dim, one of the two")
    if model and (head_dim_v or softcap):
        raise typer.BadParameter("--head-dim-v and --softcap go with --head-dim; a model's config.json states its own")
    try:
        heads = warming.Heads(head_dim, head_dim_v or head_dim, softcap) if head_dim else warming.heads_of_model(model)
        for each in warming.architectures(_listed(arch)):
            for config in warming.configurations(heads, _listed(dtype) or warming.default_dtypes(each), each):
                warmed = warming.warm(config, each)
                typer.echo(f"{warmed.seconds:6.2f} s  {warmed.name}")
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _forward(ctx: typer.Context, module: str, name: str) -> None:
    """Runs the typer function or app ``module.name`` with the arguments of ``ctx``."""
    target = getattr(importlib.import_module(module), name)
    if not isinstance(target, typer.Typer):
        function, target = target, typer.Typer(add_completion=False)
        target.command()(function)
    command = typer.main.get_command(target)
    with command.make_context(ctx.info_name, list(ctx.args), parent=ctx.parent) as inner:
        command.invoke(inner)


def main() -> None:
    """Entry point. Errors the package raises on purpose become one line and an exit code."""
    try:
        app()
    except MissingDependency as error:
        _stop(error, MISSING)
    except UnsupportedProblem as error:
        _stop(error, WRONG_USE)
    except CompilationError as error:
        _stop(error, FAILED)


def _stop(error: Exception, code: int) -> None:
    typer.echo(f"hf-flash-cupy: {error}", err=True)
    sys.exit(code)
