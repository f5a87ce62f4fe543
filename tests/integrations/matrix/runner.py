"""Runs a row of the matrix in each of its modes, next to eager, and says what happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .comparison import Tolerance, Verdict
from .observation import Observation, observe
from .rows import LENGTH, Inputs, Row, padding

_CHOOSING = ("Expert", "MoE", "Moe", "MOE", "Router", "Indexer", "SparseM")  # in the names of modules


@dataclass
class Outcome:
    """What a row did. A mode is "ok", or says how it went wrong; "eager: …" where eager itself fails, and "discrete: …"
    where nothing can be compared in less than float32.
    """

    row: Row
    modes: dict[str, str] = field(default_factory=dict)
    seen: Observation = field(default_factory=Observation)

    @property
    def equal(self) -> bool:
        return all(result == "ok" or result.startswith(("eager:", "discrete:")) for result in self.modes.values())


class Runner:
    """The models of one row: eager (float32, the truth), ours, and for lower precisions eager of that."""

    def __init__(self, row: Row, device: str, dtype: torch.dtype, implementation: str = "cupy_fa2") -> None:
        self.row, self.device, self.dtype = row, device, dtype
        self.truth = row.build("eager", device)
        self.ours = row.build(implementation, device, dtype)
        self.peer = self.truth if dtype == torch.float32 else row.build("eager", device, dtype)
        names = {type(module).__name__ for module in self.truth.modules()}
        self.discrete = any(word in name for name in names for word in _CHOOSING)
        self.outcome = Outcome(row)

    def run(self) -> Outcome:
        # Convolutions in TF32 would differ from run to run by more than attention may.
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            for mode in self.row.modes:
                self.outcome.modes[mode] = self._run_mode(mode)
        return self.outcome

    def _run_mode(self, mode: str) -> str:
        how, *details = mode.split(" ", 1)
        detail = details[0] if details else ""
        function = {"generate": self._generate, "train": self._train}.get(how, self._forward)
        detail = mode if function == self._forward else detail
        tolerance = Tolerance(self.dtype, how == "train", self.discrete)
        if how == "train" and self.discrete and self.dtype != torch.float32:
            return "discrete: rounding turns choices of experts or keys, and with them whole gradients"

        def run(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
            torch.manual_seed(0)  # some models move their positions at random in training
            return function(model, dtype, detail)

        try:
            truth = run(self.truth, torch.float32)
            peer = truth if self.peer is self.truth else run(self.peer, self.dtype)
        except Exception as error:  # whatever eager cannot do, nobody can be equal to
            return f"eager: {_brief(error)}"
        try:
            with observe(self.ours, self.outcome.seen):
                found = run(self.ours, self.dtype)
        except Exception as error:
            return f"raises {_brief(error)}"
        return Verdict(found, truth, peer).judge(tolerance)

    def _inputs(self, dtype: torch.dtype) -> Inputs:
        def place(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return x.to(self.device, dtype if x.is_floating_point() else x.dtype)

        return {name: place(x) for name, x in self.row.inputs(self.truth.config).items()}

    def _forward(self, model: Any, dtype: torch.dtype, detail: str) -> dict[str, Tensor]:
        inputs, valid = self._arranged(dtype, detail)
        with torch.no_grad():
            return _results(model(**inputs), valid, inputs.get("attention_mask"))

    def _arranged(self, dtype: torch.dtype, detail: str) -> tuple[Inputs, Tensor | None]:
        """Inputs with padding or packing, and which text positions count."""
        inputs = self._inputs(dtype)
        if detail in ("left pad", "right pad"):
            ids = inputs["input_ids"]
            mask = padding(detail.split()[0], *ids.shape).to(self.device)
            mask |= (ids >= 80).long()  # image tokens stay
            counts = None if "decoder_input_ids" in inputs else mask
            return inputs | {"attention_mask": mask}, counts
        if detail == "packed":
            lengths = [(5, LENGTH - 5), (LENGTH - 3, 3), (LENGTH,)]
            positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
            return inputs | {"position_ids": positions.to(self.device), "use_cache": False}, None
        return inputs, None

    def _generate(self, model: Any, dtype: torch.dtype, detail: str) -> dict[str, Tensor]:
        inputs = self._inputs(dtype)
        inputs.pop("decoder_input_ids", None)
        cache = "static" if "static" in detail else "dynamic"
        if "left-padded" in detail:
            inputs["attention_mask"] = padding("left", *inputs["input_ids"].shape).to(self.device)
        out = model.generate(
            **inputs, max_new_tokens=6, do_sample=False, num_beams=1, cache_implementation=cache, disable_compile=True,
            return_dict_in_generate=True, output_logits=True, pad_token_id=0,
        )  # fmt: skip
        return {"logits": torch.stack(out.logits, 1), "tokens": out.sequences[:, -len(out.logits) :]}

    def _train(self, model: Any, dtype: torch.dtype, detail: str) -> dict[str, Tensor]:
        model.train()
        model.zero_grad()
        try:
            results = _results(model(**self._inputs(dtype)))
            loss = torch.zeros((), device=self.device)
            for x in results.values():
                weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(x)
                loss = loss + (x * weights).float().mean()
            loss.backward()
            return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
        finally:
            model.eval()
            model.zero_grad()


def _results(output: Any, valid: Tensor | None = None, source: Tensor | None = None) -> dict[str, Tensor]:
    """Every float tensor of a model's output; with ``valid`` only those of text, at the positions that count.

    ``source`` says which positions of an encoder's own output count.
    """
    found: dict[str, Tensor] = {}
    for name, x in output.items():
        if not isinstance(x, Tensor) or not x.is_floating_point() or "loss" in name or x.numel() == 0:
            continue
        if name == "encoder_last_hidden_state" and source is not None:
            x = x[source.bool()]
        if valid is not None:
            if x.shape[:2] != valid.shape:
                continue
            x = x[valid.bool()]
        found[name] = x
    return found


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"
