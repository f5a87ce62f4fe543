"""Continuous batching: ``generate_batch`` gives what ``generate`` gives each prompt alone."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig

from hf_flash_cupy import enable_flash_alias
from hf_flash_cupy.integrations import alias, paged
from hf_flash_cupy.integrations.transformers import record_layers
from hf_flash_cupy.reference import attention_reference

from .tiny import build, tokens

PAGE_SIZE = "page_size" if "page_size" in inspect.signature(ContinuousBatchingConfig).parameters else "block_size"
OLD = PAGE_SIZE == "block_size"  # 5.17, where a name without "flash" is taken too
NEW_TOKENS = 8


@pytest.fixture(autouse=True)
def flash_alias() -> Iterator[None]:
    enable_flash_alias()
    yield
    alias.disable_flash_alias()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def prompts() -> list[list[int]]:
    return [tokens(1, length, seed=length)[0].tolist() for length in (5, 9, 3, 14)]


def alone(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "disable_compile": True}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def batched(model: Any, **options: Any) -> list[list[int]]:
    """Ten tokens a step at most: prompts are taken in parts, beside others that decode already."""
    settings = {"num_blocks": 16, "max_batch_tokens": 10, PAGE_SIZE: 32, **options}
    results = model.generate_batch(
        inputs=prompts(),
        generation_config=GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(**settings),
        progress_bar=False,
    )
    in_order = sorted(results.values(), key=lambda result: prompts().index(list(result.prompt_ids)))
    return [result.generated_tokens for result in in_order]


def model_of(name: str, implementation: str, device: str = "cpu") -> Any:
    model = copy.deepcopy(build(name)).to(device)
    model.set_attn_implementation(implementation)
    return model


NAMES = [
    pytest.param("cupy_fa2", marks=pytest.mark.skipif(not OLD, reason="this Transformers takes names with flash only")),
    pytest.param(alias.NAME),
]


@pytest.mark.parametrize(
    "name", ["mistral", *(pytest.param(each, marks=pytest.mark.full) for each in ("llama", "gemma2"))]
)
@pytest.mark.parametrize("implementation", NAMES)
def test_generate_batch_equals_single_runs(name: str, implementation: str, device: str) -> None:
    """A window shorter than the prompts; full attention; both, with softcap."""
    eager = model_of(name, "eager", device)
    expected = [alone(eager, prompt) for prompt in prompts()]
    model = model_of(name, implementation, device)
    with record_layers() as layers:
        assert batched(model) == expected
    assert len(layers) == model.config.num_hidden_layers
    assert all(record.launches >= record.calls > 0 for record in layers.values())
    assert model.config._attn_implementation == implementation


@pytest.mark.full
@pytest.mark.skipif(not OLD, reason="gpt_oss lists the flash implementations it takes")
def test_sinks() -> None:
    expected = [alone(model_of("gpt_oss", "eager"), prompt) for prompt in prompts()]
    assert batched(model_of("gpt_oss", "cupy_fa2")) == expected


@pytest.mark.skipif(not OLD, reason="this Transformers takes names with flash only")
@pytest.mark.full
def test_fa1() -> None:
    expected = [alone(model_of("mistral", "eager"), prompt) for prompt in prompts()]
    assert batched(model_of("mistral", "cupy_fa1")) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "cuda graphs"])
def test_decoding_from_pages(graphs: bool) -> None:
    """The block-table path: steps in which every sequence decodes one token read and append to the pages in place."""
    name = "llama"
    expected = [alone(model_of(name, "eager", "cuda"), prompt) for prompt in prompts()]
    model = model_of(name, alias.NAME, "cuda")
    calls = []
    decode = paged._decode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged, "_decode", lambda *args, **kwargs: calls.append(1) or decode(*args, **kwargs))
        found = batched(model, max_blocks_per_request=4, use_cuda_graph=graphs)
    assert calls
    assert found == expected


MODULE = SimpleNamespace(training=False, is_causal=True, layer_idx=0)


class Cache:
    """A paged cache of two groups of layers, as Transformers 5.17 lays it out, for one layer of the second."""

    def __init__(self, blocks: int = 6, page_size: int = 16, heads: int = 2, dim: int = 16) -> None:
        generator = torch.Generator().manual_seed(5)
        self.block_size, self.num_key_value_heads, self.head_dim = page_size, heads, dim
        shape = (blocks * page_size, heads, dim)
        self.key_cache = [torch.randn(shape, generator=generator)]
        self.value_cache = [torch.randn(shape, generator=generator)]
        self.layer_index_to_group_indices = {0: (1, 0)}


def decode_inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(1, heads, 3, 16, generator=generator) for heads in (4, 2, 2))
    return q, k, v


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("sinks", [False, True])
def test_one_step_from_pages(window: int | None, sinks: bool) -> None:
    """Two sequences of 33 and 5 cached keys, and a third that only fills up the batch, without pages of its own."""
    cache, (q, k, v) = Cache(), decode_inputs()
    lengths = [33, 5]
    table = torch.full((2, 3, 4), -1, dtype=torch.int32)
    table[1, 0, :3], table[1, 1, :1] = torch.tensor([4, 1, 3]), torch.tensor([2])
    keys_before, values_before = cache.key_cache[0].clone(), cache.value_cache[0].clone()
    module = SimpleNamespace(**vars(MODULE), sliding_window=window)
    s_aux = torch.tensor([0.5, -1.0, 2.0, 0.0]) if sinks else None
    cu_seqlens_k = torch.tensor([0, 34, 40, 40], dtype=torch.int32)
    out, _ = paged.paged_attention_forward(
        module,
        *(q, k, v, None),
        cache=cache,
        cu_seq_lens_q=torch.tensor([0, 1, 2, 2], dtype=torch.int32),
        cu_seq_lens_k={"full_attention": cu_seqlens_k, "sliding_attention": cu_seqlens_k},
        block_table=table,
        scaling=0.3,
        s_aux=s_aux,
    )
    assert out.shape == (1, 3, 4, 16)
    rows = [[*range(64, 80), *range(16, 32), 48, 49], [*range(32, 38)]]  # where the pages keep keys, the new one last
    for index, (length, places) in enumerate(zip(lengths, rows, strict=True)):
        for before, new, pages in ((keys_before, k, cache.key_cache[0]), (values_before, v, cache.value_cache[0])):
            before[places[length]] = new[0, :, index]
            assert torch.equal(pages[places], before[places])
        tensors = (q[:, :, index][:, None], keys_before[places][None], values_before[places][None])
        options: dict[str, Any] = {"softmax_scale": 0.3, "sinks": s_aux}
        truth, _ = attention_reference(*tensors, window_size=(window - 1 if window else -1, 0), **options)
        torch.testing.assert_close(out[:, index : index + 1].double(), truth, rtol=0, atol=1e-5)
    assert torch.equal(out[:, 2], torch.zeros(1, 4, 16))
    # Nothing else was written, in particular not by the sequence without pages.
    assert torch.equal(cache.key_cache[0], keys_before)
    assert torch.equal(cache.value_cache[0], values_before)


def test_a_paged_name_outside_continuous_batching_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no paged cache"):
        paged.paged_attention_forward(MODULE, *decode_inputs(), None)


def test_a_block_table_without_pages_is_refused() -> None:
    table = torch.zeros(3, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="block_table came without the pages"):
        paged.flash_alias_forward(MODULE, *decode_inputs(), None, block_table=table)
