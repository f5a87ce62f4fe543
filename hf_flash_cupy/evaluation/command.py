"""The commands ``ppl`` and ``demo``: options in, report out, exit code.

Exit codes: 0 ok, 1 gate failed, 2 wrong use, 3 something missing (the message gives the command that brings
it), 4 numerical or causality failure, 130 interrupted (the windows that were finished are reported).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from hf_flash_cupy.errors import MissingDependency, UnsupportedProblem
from hf_flash_cupy.evaluation import options as opt
from hf_flash_cupy.evaluation.outcome import ExitCode, WrongUse

if TYPE_CHECKING:
    from rich.console import Console

    from hf_flash_cupy.evaluation.evaluate import Observer
    from hf_flash_cupy.evaluation.runner import Plan, Progress, Tally
    from hf_flash_cupy.evaluation.schema import Report

demo = typer.Typer(no_args_is_help=True, help="The demo model and text: fetch, where, clear.")


def ppl(
    model: opt.Model = "demo",
    revision: opt.Revision = None,
    tokenizer: opt.Tokenizer = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "auto",
    attn: opt.Attn = "eager,sdpa,cupy_fa2",
    checks: opt.Checks = True,
    noise_floor: opt.NoiseFloor = False,
    text: opt.Text = None,
    mode: opt.DataMode = opt.Mode.STREAM,
    join: opt.Join = "\\n\\n",
    max_tokens: opt.MaxTokens = None,
    context: opt.Context = 512,
    stride: opt.Stride = None,
    protocol: opt.ProtocolOption = opt.ProtocolName.STRIDED,
    prefix: opt.Prefix = "auto",
    lengths: opt.Lengths = "",
    batch_size: opt.BatchSize = 1,
    warmup: opt.Warmup = 1,
    out: opt.Out = None,
    format: opt.FormatOption = opt.Format.TABLE,
    quiet: opt.Quiet = False,
    no_progress: opt.NoProgress = False,
    max_ppl: opt.MaxPpl = None,
    max_ppl_ratio: opt.MaxPplRatio = None,
    max_kl: opt.MaxKl = None,
    min_top1: opt.MinTop1 = None,
    expect_ppl: opt.ExpectPpl = None,
    rtol: opt.Rtol = None,
    min_speedup: opt.MinSpeedup = None,
    print_schema: opt.PrintSchema = False,
) -> None:
    """Perplexity of a model through one or several attention implementations, on the same windows.

    Under torchrun or accelerate launch the batches are dealt out to the processes; sums are those of one process.
    """
    with _exit_codes():
        from hf_flash_cupy.evaluation import evaluate, gates, processes, schema
        from hf_flash_cupy.evaluation import model as models

        if print_schema:
            typer.echo(json.dumps(schema.json_schema(), indent=1))
            return
        settings = evaluate.Settings(
            source=models.ModelSource(model, revision, tokenizer, trust_remote_code),
            dtype=dtype,
            device=device,
            attns=_names(attn),
            checks=checks,
            noise_floor=noise_floor,
            files=tuple(text or ()),
            mode=mode.value,
            joiner=join.replace("\\n", "\n"),
            max_tokens=max_tokens,
            context=context,
            stride=stride,
            protocol=protocol.value,
            prefix=prefix,
            lengths=_integers("--lengths", lengths),
            batch_size=batch_size,
            warmup=warmup,
            limits=gates.Limits(max_ppl, max_ppl_ratio, max_kl, min_top1, expect_ppl, rtol, min_speedup),
        )
        silent = processes.started().rank > 0
        report = evaluate.evaluate(settings, _observer(format, quiet or silent, no_progress))
        if silent:
            return  # the first process reports, and its exit code counts
        _deliver(report, format, out)
        raise typer.Exit(report.exit_code)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise WrongUse("--attn: name at least one attention implementation")
    return names


def _integers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise WrongUse(f"{option} {text}: must be integers separated by commas") from error


@contextmanager
def _exit_codes() -> Iterator[None]:
    """Turn the errors that a user can mend into one line and an exit code."""
    try:
        yield
    except (WrongUse, UnsupportedProblem) as error:
        _stop(error, ExitCode.WRONG_USE)
    except MissingDependency as error:
        _stop(error, ExitCode.MISSING)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("hf_flash_cupy"):
            raise
        _stop(f"{error}. To mend: pip install {error.name}", ExitCode.MISSING)
    except KeyboardInterrupt:
        _stop("interrupted before the first window", ExitCode.INTERRUPTED)


def _stop(error: object, code: ExitCode) -> NoReturn:
    typer.echo(f"hf-flash-cupy ppl: {error}", err=True)
    raise typer.Exit(int(code))


def _observer(format: opt.Format, quiet: bool, no_progress: bool) -> Observer:
    """Notices go where they do not mix with a machine-readable result."""
    from rich.console import Console

    from hf_flash_cupy.evaluation.evaluate import Observer

    errors = Console(stderr=True, highlight=False)
    notices = Console(highlight=False) if format is opt.Format.TABLE else errors

    def say(line: str) -> None:
        if not quiet:
            notices.print(line, markup=False, soft_wrap=True)

    return Observer(say, partial(_progress_bar, errors, hidden=quiet or no_progress))


@contextmanager
def _progress_bar(console: Console, what: str, windows: int, hidden: bool) -> Iterator[Progress]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from hf_flash_cupy.evaluation.statistics import RunningPerplexity

    running = RunningPerplexity()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[value]}"), console=console, disable=hidden) as bar:
        task = bar.add_task(what, total=windows, value="")

        def advance(plan: Plan, batch: Sequence[int], tallies: Sequence[Tally]) -> None:
            baseline = tallies[0]
            for index in batch:
                if (nll := baseline.nll[index]) is not None:
                    running.add(nll, plan.windows[index].weight)
            speeds = " ".join(f"{tally.cost.tokens_per_second or 0:.0f}" for tally in tallies)
            bar.update(task, advance=len(batch), value=f"{baseline.attn} {running} · {speeds} tokens/s")

        yield advance


def _deliver(report: Report, format: opt.Format, out: Path | None) -> None:
    from hf_flash_cupy.evaluation import render

    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "result.json").write_text(render.as_json(report))
    if format is opt.Format.TABLE:
        from rich.console import Console
        from rich.table import Table

        console = Console(highlight=False)
        for part in render.as_table(report):
            # Lines are left whole, for grep and for terminals that wrap; a table fits itself.
            console.print(part, soft_wrap=not isinstance(part, Table))
    else:
        write = {
            opt.Format.JSON: render.as_json,
            opt.Format.MARKDOWN: render.as_markdown,
            opt.Format.CSV: render.as_csv,
        }
        sys.stdout.write(write[format](report))


@demo.command()
def fetch() -> None:
    """Download the demo model and text (97 MB) unless they are there."""
    from hf_flash_cupy.evaluation import demo as files

    with _exit_codes():
        typer.echo(files.fetch(partial(typer.echo, err=True)))


@demo.command()
def where() -> None:
    """Print the folder of the demo files."""
    from hf_flash_cupy.evaluation import demo as files

    typer.echo(files.demo_dir())


@demo.command()
def clear() -> None:
    """Delete the demo files."""
    from hf_flash_cupy.evaluation import demo as files

    typer.echo(f"{files.clear() / 2**20:.0f} MiB freed")
