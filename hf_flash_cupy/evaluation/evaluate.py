"""One evaluation from settings to report: load, probe, run, judge."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hf_flash_cupy.evaluation import demo, facts, gates, meters
from hf_flash_cupy.evaluation.data import (
    Corpus,
    Prefix,
    TokenStream,
    check_prefix,
    read_corpus,
    resolve_prefix,
    tokenize,
)
from hf_flash_cupy.evaluation.model import LoadedModel, ModelSource, check_attn_names, check_source, load, pick_device
from hf_flash_cupy.evaluation.outcome import ExitCode, NumericalFailure, WrongUse
from hf_flash_cupy.evaluation.probes import Check, LayerCalls, count_layers, probe
from hf_flash_cupy.evaluation.processes import Processes, joined, local_rank, merged
from hf_flash_cupy.evaluation.protocols import PROTOCOLS, Protocol, check_context, check_stride, make_windows
from hf_flash_cupy.evaluation.report import section
from hf_flash_cupy.evaluation.runner import Plan, Progress, Runner
from hf_flash_cupy.evaluation.schema import CheckInfo, ProtocolInfo, Report, Section

if TYPE_CHECKING:
    import torch

# A CPU needs 2 to 6 s per 1000 tokens and implementation; on a GPU the whole text takes less than loading the
# model.
CPU_TOKEN_BUDGET = 2048
_PROBE_TOKENS_CPU = 256
_MIN_PROBE_TOKENS = 8
_KERNELS_ON_CPU = "HF_FLASH_CUPY_CPU"


@dataclass(frozen=True, slots=True)
class Settings:
    """What to evaluate. ``max_tokens`` None = all on a GPU, ``CPU_TOKEN_BUDGET`` on a CPU; 0 = all."""

    source: ModelSource = field(default_factory=ModelSource)
    dtype: str = "auto"
    device: str = "auto"
    attns: tuple[str, ...] = ("eager", "sdpa", "cupy_fa2")
    checks: bool = True
    noise_floor: bool = False
    files: tuple[str, ...] = ()
    mode: str = "stream"
    joiner: str = "\n\n"
    max_tokens: int | None = None
    context: int = 512
    stride: int | None = None
    protocol: str = "strided"
    prefix: str = "auto"
    lengths: tuple[int, ...] = ()
    batch_size: int = 1
    warmup: int = 1
    limits: gates.Limits = field(default_factory=gates.Limits)


@dataclass(frozen=True, slots=True)
class Observer:
    """How an evaluation shows itself: ``say`` a line; ``track`` N windows by calling what it yields."""

    say: Callable[[str], None]
    track: Callable[[str, int], AbstractContextManager[Progress]]


@dataclass(slots=True)
class _Session:
    settings: Settings
    observer: Observer
    loaded: LoadedModel
    corpus: Corpus
    stream: TokenStream
    prefix: Prefix
    attns: tuple[str, ...]
    layers: dict[str, LayerCalls] = field(default_factory=dict)
    processes: Processes = field(default_factory=Processes)
    checks: list[Check] = field(default_factory=list)
    costs: dict[str, meters.Cost] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def protocol(self) -> Protocol:
        return PROTOCOLS[self.settings.protocol]

    @property
    def sound(self) -> bool:
        return all(check.ok for check in self.checks)


def evaluate(settings: Settings, observer: Observer) -> Report:
    """Evaluate every attention implementation of ``settings`` on the same windows of the same text.

    An interruption or a numerical failure ends it early; the report then holds what was finished, and its
    ``exit_code``.

    Raises:
        WrongUse: an option cannot work.
        MissingDependency: the model, the text, or a compiler is missing.
    """
    _check_windows(settings)
    check_source(settings.source, settings.dtype)
    attns = _attn_names(settings)
    corpus = read_corpus(settings.files, settings.mode, settings.joiner) if settings.files else None
    device = pick_device(settings.device, local_rank())
    with _kernels_on_cpu(attns, device, observer.say), joined() as processes:
        session = _open(settings, attns, device, observer, processes, corpus)
        plans = [_plan(session, context) for context in (settings.context, *settings.lengths)]
        try:
            _probe(session, max(plan.context for plan in plans))
        except KeyboardInterrupt:
            session.interrupted = True
        _share(session)
        sections = [_run(session, plan) for plan in plans]
        return _report(session, sections)


def _check_windows(settings: Settings) -> None:
    """What is wrong with the windows whatever the model and the text are, before either is brought."""
    check_prefix(settings.prefix)
    check_context("--context", settings.context)
    for length in settings.lengths:
        check_context("--lengths", length)
    _stride(settings, settings.context)
    longest = max((settings.context, *settings.lengths))
    if settings.checks and longest < _MIN_PROBE_TOKENS:
        raise WrongUse(f"--context {longest}: the probes need {_MIN_PROBE_TOKENS} tokens; give more, or --no-checks")


def _attn_names(settings: Settings) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(settings.attns))
    if settings.noise_floor:
        if names[0] not in ("eager", "sdpa"):
            raise WrongUse(f"--noise-floor: the baseline, named first, must be eager or sdpa, not {names[0]}")
        names = tuple(dict.fromkeys([*names, "eager", "sdpa"]))
    check_attn_names(names)
    return names


@contextmanager
def _kernels_on_cpu(attns: Sequence[str], device: torch.device, say: Callable[[str], None]) -> Iterator[None]:
    """On a CPU, let our names run our kernels: what torch's SDPA gives under them would prove nothing."""
    ours = [name for name in attns if name.startswith("cupy_")]
    if device.type != "cpu" or not ours:
        yield
        return
    from hf_flash_cupy.jit.host_compiler import find_compiler

    compiler = find_compiler()
    say(f"{', '.join(ours)} on this CPU: the CUDA kernels themselves, built by {compiler.version}")
    say("(backend host): to check their numbers, not for speed.")
    before = os.environ.get(_KERNELS_ON_CPU)
    os.environ[_KERNELS_ON_CPU] = "kernels"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_KERNELS_ON_CPU]
        else:
            os.environ[_KERNELS_ON_CPU] = before


def _open(
    settings: Settings,
    attns: tuple[str, ...],
    device: torch.device,
    observer: Observer,
    processes: Processes,
    corpus: Corpus | None,
) -> _Session:
    """Bring the model and, where there is no ``corpus`` yet, the demo's text."""
    import torch

    torch.manual_seed(facts.SEED)
    if processes.rank == 0 and corpus is None:
        demo.fetch_text(observer.say)
    if processes.rank == 0 and settings.source.name == demo.NAME:
        demo.fetch_model(observer.say)
    processes.gather(None)  # the others wait for the files
    observer.say(f"Loading {settings.source.name} on {device} …")
    loaded = load(settings.source, settings.dtype, device, attns[0])
    corpus = corpus or read_corpus(())
    prefix = resolve_prefix(loaded.tokenizer, settings.prefix, PROTOCOLS[settings.protocol].needs_prefix)
    budget = settings.max_tokens
    if budget is None:
        budget = CPU_TOKEN_BUDGET if device.type == "cpu" else 0
    stream = tokenize(loaded.tokenizer, corpus, prefix, budget)
    session = _Session(settings, observer, loaded, corpus, stream, prefix, attns, processes=processes)
    session.costs = {name: meters.Cost() for name in attns}
    return session


def _plan(session: _Session, context: int) -> Plan:
    settings, loaded = session.settings, session.loaded
    if loaded.max_context and context > loaded.max_context:
        raise WrongUse(f"--context {context}: {loaded.id} was made for at most {loaded.max_context} tokens")
    windows = make_windows(
        session.protocol,
        session.stream.document_lengths,
        context,
        _stride(settings, context),
        len(session.prefix.ids),
    )
    if not windows:
        tokens = len(session.stream.ids)
        raise WrongUse(f"--protocol {settings.protocol} --context {context}: no window in {tokens} tokens")
    return Plan(session.stream.ids, windows, context, session.prefix.ids, settings.batch_size)


def _stride(settings: Settings, context: int) -> int:
    """Half the context where none was asked; the same share of the context for every length."""
    if not PROTOCOLS[settings.protocol].uses_stride:
        if settings.stride is not None:
            raise WrongUse(f"--stride {settings.stride}: --protocol {settings.protocol} has no stride")
        return context
    if settings.stride is None:
        return max(context // 2, 1)
    check_stride(settings.stride, settings.context)
    return max(settings.stride * context // settings.context, 1)


def _probe(session: _Session, context: int) -> None:
    loaded, on_cpu = session.loaded, session.loaded.device.type == "cpu"
    count = min(context - len(session.prefix.ids), len(session.stream.ids), _PROBE_TOKENS_CPU if on_cpu else context)
    if session.settings.checks and count < _MIN_PROBE_TOKENS:
        raise WrongUse(f"the probes need {_MIN_PROBE_TOKENS} tokens, there are {count}; give more text, or --no-checks")
    ids = [*session.prefix.ids, *session.stream.ids[:count].tolist()]
    for name in session.attns:
        session.observer.say(f"Probing {name} …")
        with meters.compilation(session.costs[name]):
            session.layers[name] = count_layers(loaded.model, name, ids)
            if session.settings.checks:
                baseline = session.layers[session.attns[0]]
                session.checks += probe(loaded.model, name, ids, session.layers[name], baseline)


def _run(session: _Session, plan: Plan) -> Section:
    """Evaluate one plan, unless a probe failed: then no number would mean anything."""
    import torch

    processes = session.processes
    runner = Runner(session.loaded.model, plan, session.attns, processes.rank, processes.size)
    for name, tally in runner.tallies.items():
        # What the probes had to compile counts in the first section.
        tally.cost = session.costs.pop(name, tally.cost)
    try:
        if session.sound and not session.interrupted:
            runner.warm_up(session.settings.warmup)
            mine = sum(map(len, runner.batches))
            with session.observer.track(f"context {plan.context}", mine) as progress:
                runner.run(progress)
    except KeyboardInterrupt:
        session.interrupted = True
    except torch.OutOfMemoryError as error:
        raise WrongUse(f"out of GPU memory; take a smaller --batch-size or --context. {error}") from error
    except NumericalFailure as failure:
        token = session.loaded.tokenizer.decode([int(session.stream.ids[failure.token])])
        session.checks.append(Check(f"finite nll {failure.attn}", False, f"{failure} ({token!r})"))
    _share(session)
    tallies = [processes.gather(runner.tallies[name]) for name in session.attns]
    info = ProtocolInfo(
        name=session.protocol.name,
        context=plan.context,
        stride=_stride(session.settings, plan.context),
        prefix=session.prefix.label,
        windows=0,
        scored=0,
        rule=session.protocol.rule,
    )
    whole = [merged(parts) for parts in tallies]
    return section(plan, whole, session.layers, session.stream, info, session.loaded.dtype)


def _share(session: _Session) -> None:
    """What failed in one process, or was interrupted there, has failed in all."""
    failed = [check for check in session.checks if not check.ok]
    everyones = session.processes.gather((failed, session.interrupted))
    for checks, interrupted in everyones:
        session.checks += [check for check in checks if check not in session.checks]
        session.interrupted = session.interrupted or interrupted


def _report(session: _Session, sections: Sequence[Section]) -> Report:
    all_gates = []
    for part in sections:
        label = f" at {part.protocol.context}" if len(sections) > 1 else ""
        all_gates += gates.gates(part, session.loaded.dtype, session.settings.limits, label)
    code = ExitCode.OK if all(gate.ok for gate in all_gates) else ExitCode.GATE_FAILED
    if not session.sound:
        code = ExitCode.NUMERICAL_FAILURE
    if session.interrupted:
        code = ExitCode.INTERRUPTED
    return Report(
        **dict(sections[0]),
        run=facts.describe_run(session.loaded.device, session.processes.size),
        model=facts.describe_model(session.loaded),
        data=facts.describe_data(session.corpus, session.stream),
        checks=[CheckInfo(name=check.name, ok=check.ok, detail=check.detail) for check in session.checks],
        gates=all_gates,
        lengths=list(sections[1:]),
        exit_code=int(code),
    )
