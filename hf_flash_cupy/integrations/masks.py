"""The mask function registered with Transformers: per-row key intervals where exact, else dense bools.

It never answers None. To Transformers None means "the attention function will know", and what that is depends
on the cache, the model's ``is_causal`` and the implementation: where they disagree, numbers are wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, eager_mask, prepare_padding_mask, sdpa_mask
from transformers.utils.import_utils import is_tracing

from hf_flash_cupy import sm90, sm90_backward
from hf_flash_cupy.integrations.closures import PACKED, KeyRange, NotARange, Reading, hull, read, structure
from hf_flash_cupy.integrations.key_intervals import IntervalMask, KeyIntervals
from hf_flash_cupy.integrations.notices import warn_once
from hf_flash_cupy.integrations.routing import has_class_maps, routes_attention


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of one attention pattern, as ``AttentionMaskInterface`` asks for it.

    Args:
        batch_size: of the mask, as are the next two.
        q_length: query rows.
        kv_length: keys.
        q_offset: position of the first query row (a 0-dim tensor with static caches).
        kv_offset: position of the first key.
        mask_function: Transformers' composed ``(batch, head, q, kv) -> bool``.
        attention_mask: padding, bool (batch, positions), True = a real token.

    Returns:
        An ``IntervalMask``, or a bool tensor (batch, 1, q_length, kv_length), True = attend. A model that
        does not route its attention through Transformers' interface gets what its own attention expects:
        the float mask, or None.

    Nothing is read back from the device, but for: padding and blocks of tokens (one small read to see that
    they have no holes), packed sequences in training (where they begin), and the first mask of a new kind (see
    ``_agrees``).
    """
    request = _Request(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, kwargs)
    if not routes_attention(kwargs.get("config")):
        return request.for_own_attention()
    # Dynamo can neither read closures nor carry a tensor subclass through a full graph.
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        return request.dense()
    try:
        described = request.describe()
    except NotARange:
        described = None
    return request.dense() if described is None else IntervalMask(described)


@dataclass(frozen=True)
class _Request:
    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int | Tensor
    kv_offset: int
    mask_function: Callable[..., Any]
    padding: Tensor | None
    others: dict[str, Any]

    @property
    def device(self) -> torch.device:
        return torch.device(self.others.get("device", "cpu"))

    def _arguments(self) -> dict[str, Any]:
        names = ("batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function")
        own = {name: getattr(self, name) for name in names}
        return {**self.others, **own, "attention_mask": self.padding}

    def dense(self) -> Tensor:
        """Transformers' own evaluation, never skipped."""
        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return cast(Tensor, sdpa_mask(**{**self._arguments(), **skips}))

    def for_own_attention(self) -> Tensor | None:
        name = type(self.others["config"]).__name__.removesuffix("Config")
        if not has_class_maps(self.others["config"]):
            warn_once(
                f"{name} does not route its attention through Transformers' attention interface: it runs its own "
                "(eager) attention, not hf_flash_cupy's kernels. The results are right."
            )
        return cast("Tensor | None", eager_mask(**self._arguments()))

    def describe(self) -> KeyIntervals | None:
        """The mask as key intervals, or None where it is not exactly that. Raises ``NotARange`` likewise."""
        may_skip = self.others.get("allow_is_causal_skip") or self.others.get("allow_is_bidirectional_skip")
        if self.q_length == 1 and not may_skip:
            return None  # kv_length bools are as small, and what compiled and captured decode steps take
        if self.kv_length == 0 or self.q_length == 0 or (self.padding is not None and self.padding.ndim != 2):
            return None
        in_order = not self.others.get("use_vmap", False)
        reading = Reading(self.q_length, self.q_offset, self.device, in_order)
        described = self._intervals(read(self.mask_function, reading))
        if self.q_length == 1 and described.window_size is None:
            return None
        checked = self._checked(described, reading.checks)
        return checked if checked is None else self._with_offsets(checked)

    def _intervals(self, rows: KeyRange) -> KeyIntervals:
        """Absolute key positions become columns of the mask."""
        return KeyIntervals(
            batch=self.batch_size,
            seqlen_q=self.q_length,
            seqlen_k=self.kv_length,
            device=self.device,
            shift=self.q_offset - self.kv_offset,  # a new tensor: caches move theirs on in place
            left=rows.left,
            right=rows.right,
            lo=None if rows.lo is None else rows.lo - self.kv_offset,
            hi=None if rows.hi is None else rows.hi - self.kv_offset,
        )

    def _with_offsets(self, described: KeyIntervals) -> KeyIntervals:
        """In training, adds where packed sequences begin: going by sequences, the backward pass skips what lies
        between them. That is one read a forward pass, which a backward pass that goes by intervals does without.
        """
        lo = described.lo
        if lo is None or described.right != 0 or not torch.is_grad_enabled() or self._hopper_goes_by_intervals():
            return described
        kind = structure(self.mask_function)
        packed = PACKED in kind and not any(other in kind for other in ("or_masks", "chunked", "blockwise", "padding"))
        at_start = isinstance(self.q_offset, int) and self.q_offset == self.kv_offset == 0
        whole = self.batch_size == 1 and at_start and self.q_length == self.kv_length and self.padding is None
        if not (packed and whole) or lo.shape[0] != 1 or is_tracing(lo):
            return described
        row = torch.arange(self.q_length + 1, device=lo.device)
        begins = torch.nn.functional.pad(lo[0] == row[:-1], (0, 1), value=True)  # the last ends where none begins
        return replace(described, offsets=row[begins].to(torch.int32))

    def _hopper_goes_by_intervals(self) -> bool:
        """As far as is known before a layer has been called: as of ``request.py``, which asks again."""
        config, dtype = self.others.get("config"), self.others.get("dtype")
        head_dim, softcap = (getattr(config, name, None) for name in ("head_dim", "attn_logit_softcapping"))
        if not isinstance(head_dim, int) or softcap or getattr(config, "attention_dropout", 0.0):
            return False
        return sm90.serves(self.device) and sm90_backward.serves_tensors(dtype, head_dim, head_dim)

    def _keep(self) -> Tensor | None:
        """Padding over the mask's columns, bool (batch, kv_length)."""
        padding = prepare_padding_mask(self.padding, self.kv_length, self.kv_offset)
        return None if padding is None else padding[:, self.kv_offset : self.kv_offset + self.kv_length]

    def _checked(self, described: KeyIntervals, checks: list[Tensor]) -> KeyIntervals | None:
        """Adds the padding; None where the intervals are not exact, or cannot be seen to be."""
        keep = self._keep()
        kind = structure(self.mask_function)
        if keep is None and not checks and kind in _AGREED:
            return described if _AGREED[kind] else None
        if is_tracing(self.padding):
            return None  # under capture, or fake: nothing can be read
        if keep is not None and self.q_length == 1:  # a decoding step has time for one look, not for intervals
            described = described if bool(keep.all()) else replace(described, key_mask=keep)
            keep = None
        if keep is not None:
            lo, hi, whole = hull(keep)
            checks = [*checks, whole.all(), keep.all()]
        # One read a forward pass: with a bool a key instead, every layer would take nearly twice the time.
        answers = torch.stack(checks).tolist() if checks else []
        if keep is not None:
            without_holes, without_padding = answers[-2:]
            del answers[-2:]
            described = described if without_padding else described.within(lo, hi)
            described = described if without_holes else replace(described, key_mask=keep)
        if not all(answers):
            return None
        if kind not in _AGREED:
            _AGREED[kind] = self._agrees(described)
        return described if _AGREED[kind] else None

    def _agrees(self, described: KeyIntervals) -> bool:
        """Compares some rows with Transformers' evaluation: done once per kind of mask and process, so that a
        Transformers version whose functions change their meaning under the same names costs speed, not
        numbers.
        """
        count = min(self.q_length, 64, max(1, 2**24 // (self.batch_size * self.kv_length)))
        for start in {0, (self.q_length - count) // 2, self.q_length - count}:
            truth = replace(self, q_length=count, q_offset=self.q_offset + start).dense()
            if not torch.equal(truth, described.take_rows(start, start + count).dense()):
                warn_once(
                    "This version of Transformers has masks with a meaning that hf_flash_cupy does not know: "
                    f"dense masks are used, right but slower ({structure(self.mask_function)})."
                )
                return False
        return True


_AGREED: dict[str, bool] = {}  # structure of a mask function -> its reading was compared and found equal
