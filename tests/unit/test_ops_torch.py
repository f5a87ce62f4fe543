"""torch.compile, torch.export, torch.func and modes see attention as one operator, and get the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from reference_plans import Calls, install
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from hf_flash_cupy import UnsupportedProblem, flash_attention, flash_attention_varlen

FORWARD, BACKWARD = torch.ops.hf_flash_cupy.forward.default, torch.ops.hf_flash_cupy.backward.default


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    torch.compiler.reset()
    return install(monkeypatch)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def leaves(rows: int = 5, keys: int = 7, **changes: tuple[int, ...]) -> dict[str, Tensor]:
    shapes = {"q": (2, rows, 4, 8), "k": (2, keys, 2, 8), "v": (2, keys, 2, 16), **changes}
    return {name: randn(*shape, seed=i).requires_grad_() for i, (name, shape) in enumerate(shapes.items())}


def loss(function: Callable[..., Any], given: dict[str, Tensor]) -> Tensor:
    out, lse = function(**given)
    return out.square().sum() + lse.sum()  # type: ignore[no-any-return]


def assert_same_gradients(compiled: Callable[..., Any], plain: Callable[..., Any], given: dict[str, Tensor]) -> None:
    got = torch.autograd.grad(loss(compiled, given), list(given.values()))
    expected = torch.autograd.grad(loss(plain, given), list(given.values()))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


VARIANTS: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({}, {"causal": True, "window_size": (3, 0), "softmax_scale": 0.3, "softcap": 2.0}),
    "mask": ({}, {"mask": torch.ones(5, 7, dtype=torch.bool).tril(2)}),
    "intervals": ({}, {"key_intervals": torch.tensor([[0, 4], [1, 7], [2, 2], [0, 7], [3, 5]], dtype=torch.int32)}),
    "bias": ({"bias": (4, 5, 7)}, {}),
    "sinks": ({"sinks": (4,)}, {}),
    "alibi": ({}, {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])}),
    "batch-1": ({"q": (1, 5, 4, 8)}, {}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_in_one_graph(variant: str) -> None:
    changes, options = VARIANTS[variant]
    plain = partial(flash_attention, return_lse=True, **options)
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    assert_same_gradients(compiled, plain, leaves(**changes))


def test_compiled_for_any_length(calls: Calls) -> None:
    """Case T01: one graph, no break and no recompilation for a second length."""
    plain = partial(flash_attention, return_lse=True, causal=True)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(plain, fullgraph=True, dynamic=True, backend=counter)
    compiled_frames = set()
    for rows in (5, 9, 12):
        assert_same_gradients(compiled, plain, leaves(rows, rows + 2))
        compiled_frames.add(counter.frame_count)
    assert len(compiled_frames) == 1


@pytest.mark.slow
def test_inductor() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return flash_attention(q * 2, k + 1, v, causal=True, return_lse=True)  # type: ignore[no-any-return]

    assert_same_gradients(torch.compile(step, fullgraph=True), step, leaves())


def test_compiled_varlen() -> None:
    offsets = torch.tensor([0, 4, 10], dtype=torch.int32)

    def packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, longest: int) -> Any:
        return flash_attention_varlen(q, k, v, cu_seqlens_q, offsets, longest, 7, causal=True, return_lse=True)

    given = {name: x.detach().flatten(0, 1).requires_grad_() for name, x in leaves(5, 5).items()}
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    bound = {"cu_seqlens_q": offsets, "longest": 6}
    assert_same_gradients(partial(compiled, **bound), partial(packed, **bound), given)


def test_compiled_with_autocast_and_mixed_dtypes() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return flash_attention(q, k.half(), v, return_lse=True)

    assert_same_gradients(torch.compile(step, fullgraph=True, backend="aot_eager"), step, leaves())


def test_compiled_dropout_draws_each_time() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(q, k, v, dropout_p=0.5)  # type: ignore[no-any-return]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    given = {name: x.detach() for name, x in leaves().items()}
    first, second = compiled(**given), compiled(**given)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("asked", [None, True])
def test_compiled_determinism(asked: bool | None, calls: Calls) -> None:
    compiled = torch.compile(
        partial(flash_attention, return_lse=True, deterministic=asked), fullgraph=True, backend="aot_eager"
    )
    loss(compiled, leaves()).backward()
    assert [problem.deterministic for problem, _ in calls.backward] == [bool(asked)]


def test_errors_keep_their_words_when_compiled() -> None:
    given = {name: x.detach() for name, x in leaves().items()}
    compiled = torch.compile(partial(flash_attention, window_size=(-3, 0)), backend="aot_eager")
    with pytest.raises(ValueError, match=r"window_size=\(-3, 0\): sizes are"):
        compiled(**given)


def test_exported() -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flash_attention(q, k, v, causal=True)  # type: ignore[no-any-return]

    given = tuple(x.detach() for x in leaves().values())
    program = torch.export.export(Module(), given)
    assert next(node.target for node in program.graph.nodes if node.op == "call_function") is FORWARD
    torch.testing.assert_close(program.module()(*given), Module()(*given))


def operator_arguments(given: dict[str, Tensor], **options: Any) -> list[Any]:
    """Of ``FORWARD``, in the order of its schema."""
    defaults = {"window_left": -1, "window_right": -1, "softcap": 0.0, "dropout_p": 0.0, "algorithm": "fa2"}
    values = {"causal": False, "max_seqlen_q": 0, "deterministic": False, **defaults, **given, **options}
    return [values.get(argument.name) for argument in FORWARD._schema.arguments]


CHECKED: dict[str, dict[str, Any]] = {
    "plain": operator_arguments(leaves()),
    "causal": operator_arguments(leaves(), causal=True, window_left=2, softcap=3.0, softmax_scale=0.5),
    "all": operator_arguments(
        leaves(bias=(1, 4, 5, 1), sinks=(4,)), mask=torch.ones(7).bool(), alibi_slopes=randn(4).abs()
    ),
    "dropout": operator_arguments(leaves(), dropout_p=0.5, philox=torch.tensor([3, 4])),
    "no-keys": operator_arguments(leaves(keys=0)),
}


@pytest.mark.parametrize("name", CHECKED)
def test_forward_operator(name: str) -> None:
    torch.library.opcheck(FORWARD, CHECKED[name])


@pytest.mark.parametrize("needs", [[True] * 5, [True, False, True, False, False], [False] * 3 + [False, True]], ids=str)
def test_backward_operator(needs: list[bool]) -> None:
    arguments = [x.detach() if isinstance(x, Tensor) else x for x in CHECKED["all"]]
    out, lse, statistics = FORWARD(*arguments)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    saved = (out, lse, statistics)
    for gradients in ((torch.ones_like(out), None), (None, torch.ones_like(lse))):
        torch.library.opcheck(BACKWARD, (*gradients, *saved, needs, *arguments), test_utils=tests)


class TestFunctorch:
    def test_gradient(self) -> None:
        given = leaves()
        function = partial(flash_attention, causal=True, return_lse=True)
        expected = torch.autograd.grad(loss(function, given), list(given.values()))

        def scalar(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return loss(function, {"q": q, "k": k, "v": v})

        got = torch.func.grad(scalar, argnums=(0, 1, 2))(*(x.detach() for x in given.values()))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)

    @pytest.mark.filterwarnings("ignore:There is a performance drop")
    def test_vmap(self) -> None:
        q, k, v = (randn(3, *x.shape, seed=i) for i, x in enumerate(leaves().values()))
        got = torch.vmap(partial(flash_attention, causal=True))(q, k, v)
        expected = torch.stack([flash_attention(*x, causal=True) for x in zip(q, k, v, strict=True)])
        torch.testing.assert_close(got, expected)
        shared = torch.vmap(partial(flash_attention, k=k[0], v=v[0]), in_dims=1, out_dims=2)(q.transpose(0, 1))
        torch.testing.assert_close(shared[:, :, 2], flash_attention(q[2], k[0], v[0]))

    def test_second_derivative(self) -> None:
        q, k, v = (x.detach() for x in leaves().values())

        def scalar(q: Tensor) -> Tensor:
            return flash_attention(q, k, v).square().sum()  # type: ignore[no-any-return]

        with pytest.raises(UnsupportedProblem, match="second derivative of attention"):
            torch.func.grad(lambda q: torch.func.grad(scalar)(q).sum())(q)

    def test_forward_mode_is_refused(self) -> None:
        q, k, v = (x.detach() for x in leaves().values())
        attend = partial(flash_attention, k=k, v=v)
        with pytest.raises(UnsupportedProblem, match="forward-mode derivative"):
            torch.func.jvp(attend, (q,), (torch.ones_like(q),))
        with forward_ad.dual_level(), torch.no_grad():
            dual = forward_ad.make_dual(q, torch.ones_like(q))
            with pytest.raises(UnsupportedProblem, match="forward-mode derivative"):
                attend(dual)


class TestModes:
    def test_under_a_mode(self) -> None:
        given = leaves()
        function = partial(flash_attention, return_lse=True)
        expected = torch.autograd.grad(loss(function, given), list(given.values()))
        with FlopCounterMode(display=False):
            got = torch.autograd.grad(loss(function, given), list(given.values()))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))

    def test_selective_checkpoint_may_keep_attention(self, calls: Calls) -> None:
        given = leaves()

        def policy(_: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if operator is FORWARD else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = partial(create_selective_checkpoint_contexts, policy)
        function = partial(flash_attention, return_lse=True)

        def wrapped(**given: Tensor) -> Any:
            return checkpoint(lambda: function(**given), use_reentrant=False, context_fn=contexts)

        assert_same_gradients(wrapped, function, given)

    def test_fake_tensors(self) -> None:
        with torch._subclasses.FakeTensorMode():
            q, k, v = (torch.empty(x.shape) for x in leaves().values())
            out, lse = flash_attention(q, k, v, return_lse=True)
        assert (out.shape, lse.shape) == ((2, 5, 4, 16), (2, 4, 5))
