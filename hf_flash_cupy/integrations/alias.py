"""An attention name with ``flash`` in it, for the few places where Transformers serves no other name."""

from __future__ import annotations

from functools import partial, update_wrapper, wraps
from typing import Any

from hf_flash_cupy.errors import UnsupportedProblem

NAME = "cupy_flash_fa2"


def enable_flash_alias() -> None:
    """Makes ``attn_implementation="cupy_flash_fa2"`` known to Transformers: FlashAttention-2 as under ``cupy_fa2``.

    Transformers serves only names with ``flash`` in them in two places:

    - continuous batching (``generate_batch``) from 5.24 on, and its decoding from pages (CUDA only);
    - vision towers such as Qwen2.5-VL's, which then attend all images and windows in one call instead of one each:
      ``attn_implementation={"text_config": "cupy_fa2", "vision_config": "cupy_flash_fa2"}``.

    Everywhere else prefer ``cupy_fa2``: under a name with ``flash`` Transformers refuses what flash-attn cannot do
    (Llama 4 beyond a chunk), compiles static caches without ``fullgraph``, and loads another package for models that
    list the implementations they take (gpt_oss).

    Transformers looks for a package behind such a name. The private function that does,
    ``transformers.modeling_flash_attention_utils._lazy_imports``, is wrapped, for this one name; and so is the warm-up
    of continuous batching (see :func:`_wait_for_warm_ups`). Repeating the call is harmless;
    ``hf_flash_cupy.integrations.alias.disable_flash_alias`` takes it back.

    Raises:
        UnsupportedProblem: this version of Transformers has no such function.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers import modeling_flash_attention_utils as flash_utils

    from hf_flash_cupy.integrations.class_maps import add_to_class_maps
    from hf_flash_cupy.integrations.masks import attention_mask
    from hf_flash_cupy.integrations.paged import flash_alias_forward, paged_attention_forward

    original = getattr(flash_utils, "_lazy_imports", None)
    if original is None:
        raise UnsupportedProblem(
            "This version of Transformers loads flash attention by other means than 5.17 and 5.24 do: the name "
            f'{NAME} cannot be made known to it. Use attn_implementation="cupy_fa2".'
        )
    if not isinstance(original, _LazyImports):
        flash_utils._lazy_imports = _LazyImports(original)
    _wait_for_warm_ups(True)
    functions = {NAME: flash_alias_forward, f"paged|{NAME}": paged_attention_forward}
    for name, function in functions.items():
        AttentionInterface.register(name, update_wrapper(partial(function, algorithm="fa2"), function))
    AttentionMaskInterface.register(NAME, attention_mask)
    add_to_class_maps([NAME])


def disable_flash_alias() -> None:
    """Takes :func:`enable_flash_alias` back: the name is unknown again. Harmless where it was not called."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers import modeling_flash_attention_utils as flash_utils

    wrapped = getattr(flash_utils, "_lazy_imports", None)
    if isinstance(wrapped, _LazyImports):
        flash_utils._lazy_imports = wrapped.original
    _wait_for_warm_ups(False)
    for name in (NAME, f"paged|{NAME}"):
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)
        if getattr(flash_utils, "_loaded_implementation", None) == name:
            flash_utils._loaded_implementation = None


def _wait_for_warm_ups(wanted: bool) -> None:
    """Whether continuous batching waits for each step that it runs to warm up.

    Under a name with ``flash`` Transformers prepares a step while the one before runs. 5.17 does not wait for its
    warm-ups either, whose inputs the first real steps then overwrite: on a busy GPU a model with a sliding window got
    wrong tokens, or an index out of range. Later versions wait; once more costs nothing.
    """
    from transformers.generation.continuous_batching.model_runner import ModelRunner

    runner: Any = ModelRunner
    original = getattr(runner.run_one_warmup, "_hf_flash_cupy_original", None)
    if wanted and original is None:
        runner.run_one_warmup = _waiting(runner.run_one_warmup)
    elif not wanted and original is not None:
        runner.run_one_warmup = original


def _waiting(warm_up: Any) -> Any:
    @wraps(warm_up)
    def run_one_warmup(self: Any, *arguments: Any, **options: Any) -> Any:
        duration = warm_up(self, *arguments, **options)
        if (stream := self.inputs_and_outputs.compute_stream) is not None:
            stream.synchronize()
        return duration

    run_one_warmup._hf_flash_cupy_original = warm_up  # type: ignore[attr-defined]
    return run_one_warmup


class _LazyImports:
    """``_lazy_imports`` of Transformers, which knows one name more."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __call__(self, implementation: str | None, *arguments: Any, **options: Any) -> Any:
        if (implementation or "").removeprefix("paged|") != NAME:
            return self.original(implementation, *arguments, **options)
        from transformers import modeling_flash_attention_utils as flash_utils

        from hf_flash_cupy import flash_attn_interface as ours

        # Models that call the package's functions themselves get ours, of the same signatures.
        functions = (ours.flash_attn_func, ours.flash_attn_varlen_func, ours.flash_attn_with_kvcache)
        return (*functions, flash_utils._pad_input, flash_utils._unpad_input)
