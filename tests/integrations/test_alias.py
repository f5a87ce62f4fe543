"""``cupy_flash_fa2``: the name with ``flash`` in it, how it comes and goes, and what it is for."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from hf_flash_cupy import UnsupportedProblem, enable_flash_alias
from hf_flash_cupy.integrations.alias import NAME, disable_flash_alias
from hf_flash_cupy.integrations.transformers import record_layers

from .tiny import CONFIGS, assert_same, build, implementation, logits, padding, tokens


@pytest.fixture
def flash_alias() -> Iterator[None]:
    enable_flash_alias()
    yield
    disable_flash_alias()


class TestComingAndGoing:
    def test_it_is_unknown_before_and_after(self) -> None:
        config = CONFIGS["llama"]()
        original = flash_utils._lazy_imports
        for _ in range(2):
            with pytest.raises((ValueError, ImportError)):
                transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=NAME)
            enable_flash_alias()
            enable_flash_alias()
            model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=NAME)
            assert model.config._attn_implementation == NAME
            disable_flash_alias()
            disable_flash_alias()
            assert flash_utils._lazy_imports is original

    def test_other_names_still_go_to_transformers(self, flash_alias: None, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []
        monkeypatch.setattr(flash_utils._lazy_imports, "original", lambda *given, **more: asked.append((given, more)))
        flash_utils._lazy_imports("flash_attention_2", None, allow_all_kernels=True)
        flash_utils._lazy_imports(None)
        assert asked == [(("flash_attention_2", None), {"allow_all_kernels": True}), ((None,), {})]

    @pytest.mark.parametrize("method", ["_reset_static_tensors", "prepare_batch_tensors"])
    def test_what_is_written_into_inputs_on_a_gpu_is_waited_for(
        self, monkeypatch: pytest.MonkeyPatch, method: str
    ) -> None:
        """Whichever batching it is: of one that is not asynchronous, the steps' inputs are on the GPU."""
        happened: list[object] = []
        monkeypatch.setattr(ContinuousBatchingIOs, method, write := lambda inputs, *given: happened.append(given))
        stream = SimpleNamespace(synchronize=lambda: happened.append("waited"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: happened.append(device) or stream)
        enable_flash_alias()
        enable_flash_alias()
        gpu = torch.device("cuda", 1)
        for device, expected in ((gpu, [(1, 2), gpu, "waited"]), (torch.device("cpu"), [(1, 2)])):
            getattr(ContinuousBatchingIOs, method)(SimpleNamespace(device=device), 1, 2)
            assert happened == expected
            happened.clear()
        disable_flash_alias()
        assert getattr(ContinuousBatchingIOs, method) is write

    def test_another_transformers_is_refused_by_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(flash_utils, "_lazy_imports")
        with pytest.raises(UnsupportedProblem, match=r"cannot be made known to it\. Use attn_implementation"):
            enable_flash_alias()


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_models_get_the_same_numbers(flash_alias: None, name: str) -> None:
    ids, mask = tokens(3, 11), padding(3, 11, "left")
    packed = torch.cat([torch.arange(5), torch.arange(6)])[None]
    runs: list[tuple[dict[str, Any], Tensor | None]] = [
        ({"input_ids": ids}, None),
        ({"input_ids": ids, "attention_mask": mask}, mask),
        ({"input_ids": ids[:1], "position_ids": packed, "use_cache": False}, None),
    ]
    for inputs, where in runs:
        model = build(name)
        with record_layers() as layers:
            actual = logits(model, NAME, **inputs)
        assert_same(actual, logits(model, "eager", **inputs), where)
        assert [record.launches for record in layers.values()] == [1, 1]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation(flash_alias: None, cache: str) -> None:
    model, given = build("mistral"), {"input_ids": tokens(2, 6), "attention_mask": padding(2, 6, "left", 2)}
    found = []
    for name in (NAME, "eager"):
        with implementation(model, name):
            options: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False, "disable_compile": True}
            found.append(model.generate(**given, **options, cache_implementation=cache))
    assert torch.equal(*found)


def test_a_vision_tower_attends_all_images_and_windows_in_one_call(flash_alias: None) -> None:
    """Qwen2.5-VL: two images, 4 + 3 windows of one layer and the whole images of the other."""
    config = Qwen2_5_VLVisionConfig(
        depth=2, hidden_size=64, intermediate_size=64, num_heads=4, out_hidden_size=64, patch_size=14,
        window_size=56, fullatt_block_indexes=[1], spatial_merge_size=2, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    tower = Qwen2_5_VisionTransformerPretrainedModel._from_config(config, attn_implementation="eager").eval()
    grid = torch.tensor([[1, 8, 8], [1, 4, 12]])
    pixels = torch.randn(int(grid.prod(1).sum()), 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(1))
    calls, outputs = {}, {}
    for name in ("eager", "cupy_fa2", NAME):
        tower.set_attn_implementation(name)
        with torch.no_grad(), record_layers() as layers:
            found = tower(pixels, grid_thw=grid)
        outputs[name] = found.last_hidden_state
        calls[name] = [(record.calls, record.launches) for record in layers.values()]
    assert calls == {"eager": [], "cupy_fa2": [(7, 7), (2, 2)], NAME: [(1, 1), (1, 1)]}
    for name in ("cupy_fa2", NAME):
        assert_same(outputs[name], outputs["eager"])
