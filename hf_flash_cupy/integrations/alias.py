"""An attention name with ``flash`` in it, for the few places where Transformers serves no other name."""

from __future__ import annotations

from functools import partial, update_wrapper, wraps
from typing import Any

import torch

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
    ``transformers.modeling_flash_attention_utils._lazy_imports``, is wrapped, for this one name; and so are the
    two methods by which continuous batching writes a step's inputs (see :func:`_wait_for_inputs`). Repeating the call
    is harmless; ``hf_flash_cupy.integrations.alias.disable_flash_alias`` takes it back.

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
    _wait_for_inputs(True)
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
    _wait_for_inputs(False)
    for name in (NAME, f"paged|{NAME}"):
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)
        if getattr(flash_utils, "_loaded_implementation", None) == name:
            flash_utils._loaded_implementation = None


def _wait_for_inputs(wanted: bool) -> None:
    """Whether continuous batching waits for what it writes into inputs on the GPU before a step may use them.

    Transformers (5.17 and 5.24 alike) writes there on the thread's current stream, copies and computes on streams of
    its own, and orders nothing between them. Asynchronous batching, which a name with ``flash`` turns on, clears the
    inputs and tokens of both its pairs when the generating thread starts; ``ContinuousBatchingAsyncIOs.reset`` then
    waits for every stream but the one that clears. On a GPU busy with other processes the zeros may land on the first
    steps' inputs, or on their tokens. Batching that is not asynchronous writes the last of a step's inputs right before
    the step starts on its stream.

    Its warm-ups need no wait: reset waits for them, and what they read is valid before and after it is cleared.
    Asynchronous steps are written on the host, and wait for nothing here.
    """
    from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs

    for name in ("_reset_static_tensors", "prepare_batch_tensors"):
        method = getattr(ContinuousBatchingIOs, name)
        original = getattr(method, "_hf_flash_cupy_original", None)
        if wanted and original is None:
            setattr(ContinuousBatchingIOs, name, _waiting(method))
        elif not wanted and original is not None:
            setattr(ContinuousBatchingIOs, name, original)


def _waiting(write: Any) -> Any:
    @wraps(write)
    def write_and_wait(self: Any, *arguments: Any, **options: Any) -> Any:
        result = write(self, *arguments, **options)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return result

    write_and_wait._hf_flash_cupy_original = write  # type: ignore[attr-defined]
    return write_and_wait


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
