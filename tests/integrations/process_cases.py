"""What each of several processes does: run by ``python -m torch.distributed.run``, see test_processes.py.

Arguments: device ("cpu", "cuda"), a folder with a saved tiny Llama, and the file for the result of every case.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_flash_cupy import flash_attention
from hf_flash_cupy.integrations.transformers import record_layers

DEVICE, FOLDER = sys.argv[1], Path(sys.argv[2])


def load(implementation: str, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        FOLDER, attn_implementation=implementation, dtype=torch.float32, **options
    )


def batch() -> Tensor:
    """One row for each process."""
    return torch.randint(3, 96, (dist.get_world_size(), 11), generator=torch.Generator().manual_seed(2)).to(DEVICE)


def expected_gradients() -> dict[str, Tensor]:
    """Of the mean loss over the whole batch, by eager in one process."""
    model = load("eager").to(DEVICE).train()
    model(input_ids=batch(), labels=batch()).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_gradients(model: Any, whole: Callable[[Tensor], Tensor] = lambda x: x) -> None:
    for name, expected in expected_gradients().items():
        grad = whole(dict(model.named_parameters())[name].grad)
        torch.testing.assert_close(grad, expected, rtol=0, atol=1e-4 * float(expected.abs().max()), msg=name)


def step(model: Any) -> None:
    """Forward and backward on this process's row, through the kernels."""
    mine = batch()[dist.get_rank() : dist.get_rank() + 1]
    with record_layers() as layers:
        model(input_ids=mine, labels=mine).loss.backward()
    assert len(layers) == 2
    assert all(record.launches == record.calls == 1 for record in layers.values()), layers


def ddp() -> None:
    wrapped = DistributedDataParallel(load("cupy_fa2").to(DEVICE).train())
    step(wrapped)
    assert_gradients(wrapped.module)


def fsdp2() -> None:
    model = load("cupy_fa2").to(DEVICE).train()
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    step(model)
    assert_gradients(model, lambda grad: grad.full_tensor())


def tensor_parallel() -> None:
    """Each process has half of the heads: 2 of q, 1 of k and v."""
    model = load("cupy_fa2", distributed_config=DistributedConfig(tp_plan="auto")).train()
    assert isinstance(model.model.layers[0].self_attn.q_proj.weight, DTensor)
    with record_layers() as layers:
        out = model(input_ids=batch(), labels=batch())
        out.loss.backward()
    assert all(record.launches == record.calls == 1 for record in layers.values())
    reference = load("eager").to(DEVICE)
    with torch.no_grad():
        expected = reference(input_ids=batch()).logits
    torch.testing.assert_close(out.logits.detach(), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    assert_gradients(model, lambda grad: grad.full_tensor() if isinstance(grad, DTensor) else grad)


def dtensors_are_refused() -> None:
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    q, k, v = (distribute_tensor(torch.ones(1, 4, 2, 16, device=DEVICE), mesh, [Replicate()]) for _ in range(3))
    for tensors in ((q, k, v), (q.to_local(), k, v)):
        try:
            flash_attention(*tensors)
        except TypeError as error:
            told = str(error)
        else:
            told = "nothing"
        assert "DTensor" in told, told
        assert "to_local()" in told, told


CASES = (ddp, fsdp2, tensor_parallel, dtensors_are_refused)


def main() -> None:
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    results = {}
    for case in CASES:
        try:
            case()
            result = ""
        except Exception:
            result = traceback.format_exc()
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, result)
        results[case.__name__] = "\n".join(filter(None, everyones))
    if dist.get_rank() == 0:
        Path(sys.argv[3]).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)  # on a busy machine torch's threads have aborted an interpreter that was ending


if __name__ == "__main__":
    main()
