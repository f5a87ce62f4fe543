#!/usr/bin/env python
"""Trains a small Llama on real text through several attention implementations and compares the loss curves.

    python scripts/training_curves.py --out benchmarks/NAME.json --plot benchmarks/NAME.png

Every implementation starts from the same weights and trains on the same batches, once for each seed of the data's
order, in bfloat16 as Trainer(bf16=True) does: float32 weights under autocast, a learning rate that warms up. Its mean
curve should lie within the band that eager attention's curves span over those seeds.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from hf_flash_cupy.bench.record import environment
from hf_flash_cupy.evaluation import demo
from hf_flash_cupy.launch import launch_count

SMOOTH = 20  # steps of the moving average
SEQLEN, BATCH = 512, 8
LEARNING_RATE, WARM_UP = 1e-3, 30  # steps until it is whole


def read_bytes(text: Path | None, device: torch.device) -> Tensor:
    """The text's UTF-8 bytes, which are its tokens."""
    content = (text or demo.fetch() / demo.text_file().name).read_bytes()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long().to(device)


def new_model(implementation: str, device: torch.device) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=SEQLEN,
        attn_implementation=implementation,
    )
    return LlamaForCausalLM(config).to(device).train()


def train(implementation: str, seed: int, tokens: Tensor, steps: int) -> list[float]:
    """The loss of every step."""
    model = new_model(implementation, tokens.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    order = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        starts = torch.randint(0, len(tokens) - SEQLEN, (BATCH,), generator=order)
        batch = torch.stack([tokens[start : start + SEQLEN] for start in starts.tolist()])
        with torch.autocast(tokens.device.type, torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def smoothed(losses: list[float]) -> list[float]:
    return [statistics.fmean(losses[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(losses))]


def excess(curve: list[float], band: list[list[float]]) -> float:
    """How far the curve leaves the band that the others span, at worst."""
    return max(
        max(min(at) - value, value - max(at), 0.0) for value, at in zip(curve, zip(*band, strict=True), strict=True)
    )


def plot(curves: dict[str, list[list[float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    band = list(zip(*curves["eager"], strict=True))
    steps = range(len(band))
    axes.fill_between(steps, [min(x) for x in band], [max(x) for x in band], alpha=0.3, label="eager, all seeds")
    for name, runs in curves.items():
        axes.plot(steps, [statistics.fmean(at) for at in zip(*runs, strict=True)], label=f"{name}, mean", linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss, mean of {SMOOTH} steps")
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main(
    implementations: Annotated[str, typer.Option(help="compared with eager")] = "cupy_fa1,cupy_fa2",
    steps: Annotated[int, typer.Option(min=1)] = 300,
    seeds: Annotated[int, typer.Option(min=2, help="orders of the data")] = 3,
    text: Annotated[Path | None, typer.Option(help="UTF-8 text; the demo's if not given")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    out: Annotated[Path | None, typer.Option(help="JSON record")] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="PNG")] = None,
) -> None:
    """Loss curves of eager attention and of ours."""
    tokens = read_bytes(text, torch.device(device))
    curves = {}
    results: dict[str, dict[str, float]] = {}
    for name in ["eager", *implementations.split(",")]:
        before = launch_count()
        curves[name] = [smoothed(train(name, seed, tokens, steps)) for seed in range(seeds)]
        mean = [statistics.fmean(at) for at in zip(*curves[name], strict=True)]
        launches = launch_count() - before
        results[name] = {"last": mean[-1], "excess": excess(mean, curves["eager"]), "launches": launches}
        print(
            f"{name:10} last {mean[-1]:.4f}  outside eager's band by {results[name]['excess']:.4f}  {launches} launches"
        )
    if picture is not None:
        plot(curves, picture)
    if out is not None:
        facts = environment(device, sys.argv)
        out.write_text(json.dumps({"environment": facts, "results": results, "curves": curves}, indent=1))


if __name__ == "__main__":
    typer.run(main)
