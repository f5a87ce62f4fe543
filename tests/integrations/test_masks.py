"""The mask function against Transformers' own dense evaluation, and the tensor it answers with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers.masking_utils as hf
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_flash_cupy.integrations import masks
from hf_flash_cupy.integrations.key_intervals import IntervalMask, KeyIntervals

remap = getattr(hf, "remap_positions_for_packed_sequence", None)  # not in 5.17


def ours_and_truth(**kwargs: Any) -> tuple[Tensor, Tensor]:
    common = {"batch_size": 2, "q_length": 8, "kv_length": 8, "device": "cpu"} | kwargs
    ours = masks.attention_mask(**common, allow_is_causal_skip=True, config=None)
    truth = hf.sdpa_mask(**common, allow_is_causal_skip=False)
    assert ours is not None
    return ours, truth


def dense(mask: Tensor) -> Tensor:
    return mask.dense() if isinstance(mask, IntervalMask) else mask


def keep(*rows: str) -> Tensor:
    return torch.tensor([[character == "1" for character in row] for row in rows])


def ids(*rows: str) -> Tensor:
    """A digit is an id, "." is −1."""
    return torch.tensor([[-1 if character == "." else int(character) for character in row] for row in rows])


WINDOW = hf.sliding_window_causal_mask_function(3)
BOTH_SIDES = hf.sliding_window_bidirectional_mask_function(2)
CHUNKS = hf.chunked_causal_mask_function(3, torch.tensor([0, 2]))
PACKED = hf.packed_sequence_mask_function(ids("00011222", "00000000"))
RESTARTING = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], list(range(8))])
IMAGES = hf.blockwise_overlay(ids("..000.11", "........"))
EXACT: dict[str, dict[str, Any]] = {
    "causal": {},
    "all": {"mask_function": hf.bidirectional_mask_function},
    "window": {"mask_function": WINDOW},
    "window on both sides": {"mask_function": BOTH_SIDES},
    "chunks": {"mask_function": CHUNKS},
    "packed": {"mask_function": hf.and_masks(hf.causal_mask_function, PACKED)},
    "packed window": {"mask_function": hf.and_masks(WINDOW, PACKED)},
    "images": {"mask_function": hf.or_masks(hf.causal_mask_function, IMAGES)},
    "images in a window": {"mask_function": hf.or_masks(WINDOW, IMAGES)},
    "cross": {"mask_function": hf.bidirectional_mask_function, "kv_length": 5},
    "chunked prefill": {"q_length": 3, "q_offset": 5},
    "sliding cache": {"q_length": 4, "kv_length": 6, "q_offset": 10, "kv_offset": 8, "mask_function": WINDOW},
    "static cache": {"kv_length": 20, "q_offset": torch.tensor(3)},
    "static cache, window": {"kv_length": 20, "q_offset": torch.tensor(3), "mask_function": WINDOW},
    "static cache, images": {
        "q_length": 4,
        "q_offset": torch.tensor(2),
        "mask_function": hf.or_masks(hf.causal_mask_function, IMAGES),
    },
}
if remap is not None:
    for name, inner in {"causal": hf.causal_mask_function, "window": WINDOW, "chunks": CHUNKS}.items():
        EXACT[f"packed, {name} restarting"] = {"mask_function": hf.and_masks(remap(inner, RESTARTING), PACKED)}
    EXACT["packed images restarting"] = {
        "mask_function": hf.and_masks(hf.or_masks(remap(hf.causal_mask_function, RESTARTING), IMAGES), PACKED)
    }
PADDING = {
    "unpadded": None,
    "left": keep("00011111", "11111111"),
    "right": keep("11111000", "11111111"),
    "both sides": keep("01111100", "00001111"),
    "everything": keep("00000000", "11111111"),
}


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("kind", EXACT)
def test_exact_kinds_are_intervals(kind: str, padding: str) -> None:
    arguments = EXACT[kind]
    if padding != "unpadded" and arguments.get("kv_offset"):
        arguments = arguments | {"attention_mask": torch.cat([PADDING[padding], torch.ones(2, 6).bool()], 1)}
    else:
        arguments = arguments | {"attention_mask": PADDING[padding]}
    ours, truth = ours_and_truth(**arguments)
    assert isinstance(ours, IntervalMask)
    assert ours.shape == truth.shape
    assert ours.dtype == torch.bool
    assert ours.described is not None
    assert ours.described.key_mask is None
    assert ours.described.intervals.dtype == torch.int32
    assert torch.equal(ours.dense(), truth)


@pytest.mark.parametrize(("kind", "window"), [("causal", (-1, 0)), ("all", (-1, -1)), ("window", (2, 0)),
                                              ("window on both sides", (2, 2)), ("cross", (-1, -1)),
                                              ("chunked prefill", (-1, 0)), ("sliding cache", (2, 0)),
                                              ("chunks", None), ("static cache", None)])  # fmt: skip
def test_plain_windows_need_no_tensor(kind: str, window: tuple[int, int] | None) -> None:
    ours, _ = ours_and_truth(**EXACT[kind])
    assert isinstance(ours, IntervalMask)
    assert ours.described is not None
    assert ours.described.window_size == window


def test_padding_that_hides_nothing_costs_nothing() -> None:
    """What tokenizers give for one prompt."""
    ours, truth = ours_and_truth(attention_mask=torch.ones(2, 8, dtype=torch.bool))
    assert isinstance(ours, IntervalMask)
    assert ours.described is not None
    assert ours.described.window_size == (-1, 0)
    assert torch.equal(ours.dense(), truth)


@pytest.mark.parametrize("kind", ["causal", "window", "all", "static cache"])
def test_padding_with_holes_keeps_the_intervals(kind: str) -> None:
    ours, truth = ours_and_truth(**EXACT[kind], attention_mask=keep("01100111", "11101110"))
    assert isinstance(ours, IntervalMask)
    assert ours.described is not None
    assert ours.described.key_mask is not None
    assert torch.equal(ours.dense(), truth)


READS = ("_local_scalar_dense", "is_nonzero", "equal", "item", "nonzero")


@pytest.mark.parametrize("kind", [kind for kind in EXACT if "images" not in kind])
def test_nothing_is_read_back_from_the_device(kind: str) -> None:
    """But for padding, blocks of tokens, and the first mask of a kind: on a GPU each would wait for all before."""
    arguments = {"batch_size": 2, "q_length": 8, "kv_length": 8} | EXACT[kind]
    masks.attention_mask(**arguments, config=None)
    with OperatorNames() as called:
        mask = masks.attention_mask(**arguments, config=None)
        assert isinstance(mask, IntervalMask)
        assert mask.described is not None
        plain = mask.described.window_size is not None
        assert not plain or called.names == []
        assert mask.described.intervals is not None
    assert called.names
    assert not [name for name in called.names if name.startswith(READS)]


class OperatorNames(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def by_user(batch: Any, head: Any, q: Any, kv: Any) -> Any:
    return (kv + q) % 2 == 0


DENSE: dict[str, dict[str, Any]] = {
    "a user's function": {"mask_function": hf.and_masks(hf.causal_mask_function, by_user)},
    "a block in two parts": {
        "mask_function": hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(ids("..00..00", "........")))
    },
    "packed ids that return": {
        "mask_function": hf.and_masks(WINDOW, hf.packed_sequence_mask_function(ids("00011000", "00000000"))),
        "use_vmap": True,
    },
    "union with a gap": {"mask_function": hf.or_masks(WINDOW, hf.padding_mask_function(keep("10000000", "10000000")))},
    "a window of none": {"mask_function": hf.sliding_window_causal_mask_function(0)},
    "one row, static cache": {"q_length": 1, "q_offset": torch.tensor(4)},
}


@pytest.mark.parametrize("kind", DENSE)
def test_what_intervals_cannot_say_is_dense(kind: str) -> None:
    ours, truth = ours_and_truth(**DENSE[kind])
    assert not isinstance(ours, IntervalMask)
    assert torch.equal(ours, truth)


@pytest.mark.parametrize("function", [hf.causal_mask_function, WINDOW])
@pytest.mark.parametrize("first", ["00111111", "01011111", "11111111"])
def test_one_row_keeps_its_padding_as_it_is(first: str, function: Callable[..., Any]) -> None:
    padding = keep(first, "11111111")
    ours, truth = ours_and_truth(q_length=1, q_offset=7, mask_function=function, attention_mask=padding)
    assert isinstance(ours, IntervalMask)
    assert ours.described is not None
    assert (ours.described.key_mask is None) == bool(padding.all())
    assert ours.described.window_size is not None
    assert torch.equal(ours.dense(), truth)


def test_a_union_is_looked_at_each_time() -> None:
    """The same kind of mask is one interval with these keys, and two with those."""
    for columns, single in (("00000000", True), ("10000000", False)):
        function = hf.or_masks(WINDOW, hf.padding_mask_function(keep(columns, columns)))
        ours, truth = ours_and_truth(mask_function=function)
        assert isinstance(ours, IntervalMask) == single
        assert torch.equal(dense(ours), truth)


@pytest.mark.parametrize("function", [hf.causal_mask_function, WINDOW])
def test_one_row_with_a_growing_cache_needs_no_tensor(function: Callable[..., Any]) -> None:
    ours, truth = ours_and_truth(q_length=1, q_offset=7, mask_function=function)
    assert isinstance(ours, IntervalMask)
    assert torch.equal(ours.dense(), truth)


def test_one_row_for_a_compiled_step_is_dense() -> None:
    """A cache that compiles its decode step forbids the skip: the graph takes a plain tensor."""
    ours = masks.attention_mask(2, 1, 8, q_offset=7, allow_is_causal_skip=False, config=None, device="cpu")
    assert not isinstance(ours, IntervalMask)


def test_compiled_code_gets_a_dense_mask() -> None:
    def make(padding: Tensor) -> Tensor:
        mask = masks.attention_mask(2, 8, 8, attention_mask=padding, config=None, device="cpu")
        assert mask is not None
        return mask

    compiled = torch.compile(make, backend="eager", fullgraph=True)(PADDING["left"])
    assert not isinstance(compiled, IntervalMask)
    assert torch.equal(compiled, dense(make(PADDING["left"])))


def test_a_mask_function_that_changed_its_meaning_costs_speed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a later Transformers let its sliding window see one key more under the same name."""

    def sliding_window_overlay(sliding_window: int) -> Callable[..., Any]:
        def inner_mask(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
            return kv_idx >= q_idx - sliding_window

        inner_mask.__module__, inner_mask.__qualname__ = (
            hf.__name__,
            "sliding_window_overlay.<locals>.inner_mask",
        )
        return inner_mask

    monkeypatch.setattr(masks, "_AGREED", {})
    function = hf.and_masks(sliding_window_overlay(3), hf.causal_mask_function)
    with pytest.warns(UserWarning, match="does not know"):
        first, truth = ours_and_truth(mask_function=function)
    second, _ = ours_and_truth(mask_function=function)
    assert not isinstance(first, IntervalMask)
    assert not isinstance(second, IntervalMask)
    assert torch.equal(first, truth)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    window=st.integers(1, 12),
    left=st.integers(0, 4),
    right=st.integers(0, 4),
)
def test_any_packing_window_and_padding(lengths: list[int], window: int, left: int, right: int) -> None:
    size = sum(lengths)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    function = hf.and_masks(hf.sliding_window_causal_mask_function(window), hf.packed_sequence_mask_function(sequence))
    padding = torch.ones(1, size, dtype=torch.bool)
    padding[:, :left] = False
    padding[:, size - right :] = False
    ours, truth = ours_and_truth(
        batch_size=1, q_length=size, kv_length=size, mask_function=function, attention_mask=padding
    )
    assert torch.equal(dense(ours), truth)


def test_packed_windows_take_kilobytes() -> None:
    """16 sequences of 1,000 tokens: a dense mask would have 256 MB."""
    ids = torch.arange(16).repeat_interleave(1000)[None]
    function = hf.and_masks(hf.sliding_window_causal_mask_function(512), hf.packed_sequence_mask_function(ids))
    arguments = {"batch_size": 1, "q_length": 16_000, "kv_length": 16_000, "mask_function": function, "device": "cpu"}
    mask = masks.attention_mask(**arguments, config=None)
    assert isinstance(mask, IntervalMask)
    assert mask.described is not None
    held = [*vars(mask.described).values(), mask.described.intervals]
    assert sum(x.untyped_storage().nbytes() for x in held if isinstance(x, Tensor)) <= 2**20
    assert mask._dense is None


# --- the tensor


def interval_mask() -> IntervalMask:
    lo = torch.tensor([[0], [2]])
    return IntervalMask(KeyIntervals(2, 6, 9, torch.device("cpu"), shift=3, right=0, lo=lo))


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "keys": lambda m: m[:, :, :, :7],
    "later keys": lambda m: m[..., 2:],
    "rows": lambda m: m[:, :, 2:5],
    "last row": lambda m: m[:, :, slice(-1, None), :],
    "entries": lambda m: m[1:],
    "all three": lambda m: m[:1, :, 1:4, 3:8],
    "moved": lambda m: m.to("cpu", dtype=torch.bool, copy=True),
    "detached": lambda m: m.detach(),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_slices_and_moves_stay_compact(operation: str) -> None:
    mask = interval_mask()
    taken = OPERATIONS[operation](mask)
    assert isinstance(taken, IntervalMask)
    expected = OPERATIONS[operation](mask.dense())
    assert taken.shape == expected.shape
    assert torch.equal(taken.dense(), expected)


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "select": lambda m: m[:, 0],
    "step": lambda m: m[..., ::2],
    "invert": lambda m: ~m,
    "and": lambda m: m & torch.ones(9, dtype=torch.bool),
    "where": lambda m: torch.where(m, 1.0, 2.0),
    "cat": lambda m: torch.cat([m, m], -1),
    "float": lambda m: m.to(torch.float32),
    "expand": lambda m: m.expand(-1, 4, -1, -1),
    "clone": lambda m: m.clone(),
    "pad": lambda m: torch.nn.functional.pad(m, (1, 0)),
}


@pytest.mark.parametrize("operation", OTHERS)
def test_any_other_operation_sees_the_dense_mask(operation: str) -> None:
    mask = interval_mask()
    result = OTHERS[operation](mask)
    assert not isinstance(result, IntervalMask)
    assert torch.equal(result, OTHERS[operation](mask.dense()))


def test_adding_a_float_makes_it_additive() -> None:
    mask, scores = interval_mask(), torch.randn(2, 4, 6, 9)
    added = scores + mask
    assert torch.equal(added[:, :1][mask.dense()], scores[:, :1][mask.dense()])
    assert (added[:, :1][~mask.dense()] < -1e38).all()


def test_writing_into_a_view_is_noticed() -> None:
    mask = interval_mask()
    mask[:, 0].fill_(False)
    assert mask.described is None
    assert not mask.dense().any()


def test_writing_into_a_slice_is_refused() -> None:
    mask = interval_mask()
    with pytest.raises(RuntimeError, match="clone"):
        mask[:, :, 1:3].fill_(False)
