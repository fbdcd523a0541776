"""Derivatives in forward mode and the transforms of torch.func: right, or a typed error; never a
silent zero."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.implementations import Implementation, over
from tests.versions import COMPILES_TRANSFORMS
from turbo_rcm_patch import ops
from turbo_rcm_patch.errors import GradientError
from turbo_rcm_patch.ops import reference
from turbo_rcm_patch.ops.gradients import attention_gradients

BATCH, TOKENS, HEADS, DIM = 2, 12, 2, 16
CHANNELS = HEADS * DIM
EXACT = ops.AttentionSpec(heads=HEADS, attention="exact")
INT8 = ops.AttentionSpec(heads=HEADS)

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """An operation of some tensors, all of which have a derivative."""

    name: str
    function: Callable[..., Tensor | Outputs]
    shapes: tuple[tuple[int, ...], ...]

    def inputs(self, seed: int = 0) -> Outputs:
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randn(*shape, generator=generator) for shape in self.shapes)

    def __call__(self, *inputs: Tensor) -> Outputs:
        outputs = self.function(*inputs)
        return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def rotary() -> tuple[Tensor, Tensor]:
    angle = torch.linspace(0, 3, TOKENS * DIM // 2).view(TOKENS, -1).repeat_interleave(2, -1)
    return angle.cos(), angle.sin()


LENGTHS = torch.tensor([5, TOKENS])
X, CROSS = (BATCH, TOKENS, CHANNELS), (BATCH, 7, CHANNELS)
GATE, HEAD, ROW = (BATCH, 1, CHANNELS), (DIM,), (CHANNELS,)
SQUARE = (CHANNELS, CHANNELS)


def attend(q, k, v, residual, c_out, norm_q, norm_k, norm_k_bias):  # type: ignore[no-untyped-def]
    return ops.attention_skip(
        q, k, v, EXACT, residual=residual, c_skip=0.5, c_out=c_out, norm_q=norm_q, norm_k=norm_k,
        norm_k_bias=norm_k_bias, rotary=rotary(), kv_lengths=LENGTHS,
    )  # fmt: skip


def blind(q, k, v):  # type: ignore[no-untyped-def]
    """The first sample sees no key."""
    return ops.attention_skip(q, k, v, EXACT, kv_lengths=torch.tensor([0, 3]))


def causal(q, k, v, c_skip):  # type: ignore[no-untyped-def]
    spec = ops.AttentionSpec(heads=HEADS, attention="exact", causal=True)
    return ops.attention_skip(q, k, v, spec, residual=q, c_skip=c_skip)


def projected(form: str) -> Callable[..., Tensor]:
    def run(q, k, v, weight, bias, residual, c_out, norm_q):  # type: ignore[no-untyped-def]
        spec = EXACT if form == "two-launch" else INT8
        return ops.attention_project_skip(
            q, k, v, weight, bias, spec, residual=residual, c_out=c_out, norm_q=norm_q, form=form
        )  # type: ignore[arg-type]

    return run


MASK = torch.rand(TOKENS, TOKENS, generator=torch.Generator().manual_seed(3)) > 0.3
WEIGHT_INT8, WEIGHT_SCALE = ops.quantize_weight(
    torch.randn(24, CHANNELS, generator=torch.Generator().manual_seed(4))
)

CASES = [
    Case("attention", attend, (X, X, X, X, GATE, ROW, HEAD, HEAD)),
    Case("causal", causal, (X, X, X, (BATCH,))),
    Case("no-keys", blind, (X, X, X)),
    Case("cross", lambda q, k, v: ops.attention_skip(q, k, v, EXACT), (X, CROSS, CROSS)),
    Case("lse", lambda q, k, v: ops.attention_lse(q, k, v, EXACT), (X, X, X)),
    Case(
        "two-launch", projected("two-launch"),
        (X, X, X, (24, CHANNELS), (24,), (BATCH, TOKENS, 24), (BATCH, 1, 24), ROW),
    ),
    Case("masked", lambda q, k, v: ops.masked_attention(q, k, v, MASK, EXACT), (X, X, X)),
    Case("skip", lambda r, b, s, c: ops.skip(r, b, s, c), (X, X, (BATCH,), GATE)),
    Case("skip-model", lambda r, b, c: ops.skip(r, b, 0.5, c, cast="model"), (X, X, GATE)),
    Case(
        "project",
        lambda x, w, b, r, c: ops.project_skip(x, w, b, residual=r, c_out=c),
        (X, SQUARE, ROW, X, GATE),
    ),
    Case("norm", lambda x, s, t: ops.norm_modulate(x, scale=s, shift=t), (X, GATE, GATE)),
    Case(
        "norm-affine",
        lambda x, s, t: ops.norm_modulate(x, scale=s, shift=t, form="affine"),
        (X, ROW, ROW),
    ),
    Case("gelu", ops.linear_gelu, (X, (24, CHANNELS), (24,))),
    Case(
        "norm-streams",
        lambda a, b, s, t: ops.norm_modulate_streams([a, b], scale=[s, t], shift=[t, s]),
        (X, CROSS, GATE, GATE),
    ),
    Case(
        "project-streams",
        lambda x, w, a, b, c: ops.project_skip_streams(x, w, residuals=[a, b], c_out=[c, c]),
        ((BATCH, TOKENS + 7, 24), (CHANNELS, 24), X, CROSS, GATE),
    ),
    Case(
        "int8-linear",
        lambda x, b, r, c: ops.int8_linear(
            x, WEIGHT_INT8, WEIGHT_SCALE, b, activation="gelu-tanh", residual=r, c_out=c
        ),
        (X, (24,), (BATCH, TOKENS, 24), (BATCH, 1, 24)),
    ),
    Case(
        "denoise",
        lambda x, v, n: ops.denoise_step(x, v, n, torch.tensor([0.2, 0.7, 0.1]).double()),
        (X, X, X),
    ),
]  # fmt: skip


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def distance(a: Outputs, b: Outputs) -> float:
    size = sum(float(y.double().square().sum()) for y in b)
    return (
        sum(float((x - y).double().square().sum()) for x, y in zip(a, b, strict=True)) / size
    ) ** 0.5


def inner(a: Outputs, b: Outputs) -> float:
    return sum(float((x.double() * y.double()).sum()) for x, y in zip(a, b, strict=True))


@every
def test_a_forward_derivative_is_the_transpose_of_the_backward_one(case: Case) -> None:
    """<J t, g> = <t, J^T g>, for the tangent of every input alone and of all."""
    inputs = case.inputs()
    leaves = tuple(x.clone().requires_grad_() for x in inputs)
    outputs = case(*leaves)
    cotangents = tuple(torch.randn_like(y) for y in outputs)
    gradients = torch.autograd.grad(outputs, leaves, cotangents)
    tangents = tuple(torch.randn_like(x) for x in inputs)
    zero = tuple(map(torch.zeros_like, inputs))
    for index in (*range(len(inputs)), None):
        t = tuple(
            x if index in (None, i) else z
            for i, (x, z) in enumerate(zip(tangents, zero, strict=True))
        )
        values, derivative = torch.func.jvp(lambda *xs: case(*xs), inputs, t)
        assert distance(values, tuple(y.detach() for y in outputs)) < 0.02  # int8 x in one
        assert inner(derivative, cotangents) == pytest.approx(
            inner(t, gradients), rel=2e-4, abs=2e-3
        ), index


_ATTENTIONS = {"attention": ["int8", "exact"]}


@over(reference=_ATTENTIONS, gpu=_ATTENTIONS)
def test_a_forward_derivative_through_norm_attention_and_projection_is_that_transpose_too(
    on: Implementation, attention: str
) -> None:
    """<J t, g> = <t, J^T g>; on a GPU the forward is the kernels'."""
    q, weight = on.randn(2, 70, 128), on.randn(128, 128)
    spec = ops.AttentionSpec(heads=2, attention=attention)  # type: ignore[arg-type]

    def run(x: Tensor) -> Tensor:
        y = ops.norm_modulate(x, scale=x[:, :1])
        return ops.attention_project_skip(y, y, y, weight, None, spec, residual=x)

    leaf = q.clone().requires_grad_()
    out = run(leaf)
    g, t = torch.randn_like(out), torch.randn_like(q)
    (gradient,) = torch.autograd.grad(out, leaf, g)
    _, tangent = torch.func.jvp(run, (q,), (t,))
    near = 1e-3 if on.name == "reference" else 5e-2
    assert float((tangent * g).sum()) == pytest.approx(float((t * gradient).sum()), rel=near)
    assert float(tangent.norm()) > 1


@every
def test_dual_tensors_without_torch_func_have_the_same_derivative(case: Case) -> None:
    inputs = case.inputs()
    tangents = tuple(torch.randn_like(x) for x in inputs)
    _, expected = torch.func.jvp(lambda *xs: case(*xs), inputs, tangents)
    with forward_ad.dual_level():
        duals = map(forward_ad.make_dual, inputs, tangents)
        parts = [forward_ad.unpack_dual(y).tangent for y in case(*duals)]
    assert all(part is not None for part in parts)
    assert distance(tuple(parts), expected) < 1e-6


@every
def test_gradients_of_torch_func_are_those_of_autograd(case: Case) -> None:
    inputs = case.inputs()
    leaves = tuple(x.clone().requires_grad_() for x in inputs)
    outputs = case(*leaves)
    cotangents = tuple(torch.randn_like(y) for y in outputs)
    expected = torch.autograd.grad(outputs, leaves, cotangents)
    _, pull = torch.func.vjp(lambda *xs: case(*xs), *inputs)
    assert distance(pull(cotangents), expected) < 1e-4


@every
def test_vmap_gives_what_a_loop_gives(case: Case) -> None:
    several = [case.inputs(seed) for seed in range(3)]
    stacked = tuple(torch.stack(xs) for xs in zip(*several, strict=True))
    together = torch.func.vmap(lambda *xs: case(*xs))(*stacked)
    for i, inputs in enumerate(several):
        assert distance(tuple(y[i] for y in together), case(*inputs)) < 0.02
    one = torch.func.vmap(lambda x: case(x, *several[0][1:]))(stacked[0])
    assert distance(tuple(y[0] for y in one), case(*several[0])) < 0.02


@pytest.mark.parametrize("shared", [False, True])
def test_weights_are_quantised_under_vmap_as_in_a_loop(shared: bool) -> None:
    several, other = torch.randn(3, 16, 32), torch.randn(4, 32)
    weights = (several, other) if shared else (several,)
    dims = (0, None)[: len(weights)]
    int8, scale = torch.func.vmap(ops.quantize_weight, in_dims=dims)(*weights)
    for i, one in enumerate(several):
        expected = ops.quantize_weight(one, *weights[1:])
        assert torch.equal(int8[i], expected[0]) and torch.equal(scale[i], expected[1])


@every
def test_a_batch_of_cotangents_gives_the_gradients_of_each(case: Case) -> None:
    """vmap over the backward pass of a forward that ran outside it."""
    leaves = tuple(x.requires_grad_() for x in case.inputs())
    outputs = case(*leaves)
    cotangents = tuple(torch.randn(3, *y.shape, dtype=y.dtype) for y in outputs)
    together = torch.func.vmap(
        lambda *each: torch.autograd.grad(outputs, leaves, each, retain_graph=True)
    )(*cotangents)
    for i in range(3):
        own = torch.autograd.grad(outputs, leaves, [c[i] for c in cotangents], retain_graph=True)
        assert distance(tuple(g[i] for g in together), own) < 1e-5


def test_int8_attention_has_the_derivative_of_the_exact_one() -> None:
    q, k, v = named("cross").inputs()
    t = torch.randn_like(q)
    for spec in (INT8, ops.AttentionSpec(heads=HEADS, attention="int4")):
        _, ours = torch.func.jvp(lambda q, s=spec: ops.attention_skip(q, k, v, s), (q,), (t,))
        _, exact = torch.func.jvp(lambda q: ops.attention_skip(q, k, v, EXACT), (q,), (t,))
        assert torch.equal(ours, exact) and float(ours.norm()) > 0.1


def test_one_launch_has_the_forward_derivative_of_two() -> None:
    one = Case("one-launch", projected("one-launch"), named("two-launch").shapes)
    inputs = one.inputs()
    tangents = tuple(torch.randn_like(x) for x in inputs)
    _, ours = torch.func.jvp(lambda *xs: one(*xs), inputs, tangents)
    _, exact = torch.func.jvp(lambda *xs: named("two-launch")(*xs), inputs, tangents)
    assert distance(ours, exact) < 1e-6


def test_derivatives_of_attention_do_not_depend_on_its_chunks_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward and vmap do not depend on how many rows are computed at a time."""
    inputs = named("attention").inputs()
    tangents = tuple(torch.randn_like(x) for x in inputs)
    whole = torch.func.jvp(lambda *xs: named("attention")(*xs), inputs, tangents)
    monkeypatch.setattr(
        "turbo_rcm_patch.ops.reference._CHUNK_ELEMENTS", 5 * BATCH * HEADS * TOKENS
    )
    parts = torch.func.jvp(lambda *xs: named("attention")(*xs), inputs, tangents)
    for a, b in zip(parts, whole, strict=True):
        assert distance(a, b) < 1e-6


def test_a_second_derivative_is_that_of_plain_torch() -> None:
    """Forward over reverse through attention, against plain torch."""
    q, k, v = (torch.randn(1, 6, 8, dtype=torch.float32) for _ in range(3))
    spec = ops.AttentionSpec(heads=1, attention="exact")

    def plain(q: Tensor) -> Tensor:
        return ((q @ k.mT * 8**-0.5).softmax(-1) @ v).square().sum()

    def ours(q: Tensor) -> Tensor:
        return ops.attention_skip(q, k, v, spec).square().sum()

    t = torch.randn_like(q)
    _, expected = torch.func.jvp(torch.func.grad(plain), (q,), (t,))
    _, derivative = torch.func.jvp(torch.func.grad(ours), (q,), (t,))
    assert distance((derivative,), (expected,)) < 1e-4


@pytest.mark.parametrize("dual", [True, False], ids=["dual", "torch.func"])
@pytest.mark.parametrize("what", ["rows", "rows-linear", "sparse"])
def test_an_operation_without_a_derivative_refuses_to_give_one(what: str, dual: bool) -> None:
    def run(x: Tensor) -> Tensor:
        if what == "rows":
            return ops.norm_modulate_rows(x).scale
        if what == "rows-linear":
            rows = ops.norm_modulate_rows(torch.ones(1, 256, 32))
            return ops.int8_linear(
                rows, WEIGHT_INT8, WEIGHT_SCALE, residual=x[..., :24], out_dtype=torch.float32
            )
        weight = torch.eye(DIM)
        return ops.sparse_linear_attention(x, x, x, weight, None, INT8, ops.Sparsity(topk=0.5))

    x, t = torch.randn(1, 256, CHANNELS), torch.ones(1, 256, CHANNELS)
    with pytest.raises(GradientError):
        if dual:
            with forward_ad.dual_level():
                run(forward_ad.make_dual(x, t))
        else:
            torch.func.jvp(run, (x,), (t,))
    with pytest.raises(GradientError):
        torch.func.grad(lambda x: run(x).sum())(x)


@COMPILES_TRANSFORMS
def test_a_transform_inside_a_compiled_function_gives_the_same() -> None:
    case = named("attention")
    inputs = case.inputs()
    tangents = tuple(torch.randn_like(x) for x in inputs)

    def derivative(*xs: Tensor) -> Outputs:
        return torch.func.jvp(lambda *ys: case(*ys), xs, tangents)[1]

    compiled = torch.compile(derivative, backend="aot_eager", fullgraph=True)
    assert distance(compiled(*inputs), derivative(*inputs)) < 1e-5
    torch._dynamo.reset()


def test_an_attention_in_fp32_stays_so_under_a_transform_and_autocast() -> None:
    q = torch.randn(1, 32, CHANNELS)
    expected, lse = ops.attention_lse(q, q, q, EXACT)
    with torch.autocast("cpu", torch.bfloat16):
        with forward_ad.dual_level():
            in_forward_mode = ops.attention_lse(q, q, q, EXACT)
        batched = torch.func.vmap(lambda x: ops.attention_lse(x, x, x, EXACT))(q[None])
    for out, its_lse in (in_forward_mode, (batched[0][0], batched[1][0])):
        torch.testing.assert_close(out, expected)  # bfloat16 is 0.08 away
        torch.testing.assert_close(its_lse, lse)


def test_results_are_contiguous_under_a_transform_too() -> None:
    residual = torch.randn(5, 2, CHANNELS).transpose(0, 1)
    x, spec = torch.randn(2, 5, CHANNELS), ops.AttentionSpec(heads=HEADS)
    weight = ops.quantize_weight(torch.randn(CHANNELS, CHANNELS))
    with forward_ad.dual_level():
        assert ops.attention_skip(x, x, x, spec, residual=residual).is_contiguous()
        assert ops.int8_linear(x, *weight, residual=residual).is_contiguous()


@pytest.mark.parametrize("held", [float("nan"), float("inf")])
@pytest.mark.parametrize("across", [True, False])
@pytest.mark.parametrize("transform", [False, True])
def test_what_unseen_keys_hold_reaches_no_gradient(
    held: float, across: bool, transform: bool
) -> None:
    q, clean = torch.randn(1, 4, CHANNELS), torch.randn(1, 8, CHANNELS)
    clean[:, 5:] = 0.0
    dirty = clean.clone()
    dirty[:, 5:] = held
    weight = torch.randn(CHANNELS if across else DIM)
    lengths = torch.tensor([5], dtype=torch.int32)

    def loss(q: Tensor, k: Tensor, v: Tensor, norm_k: Tensor) -> Tensor:
        return ops.attention_skip(q, k, v, INT8, norm_k=norm_k, kv_lengths=lengths).sum()

    def gradients(keys: Tensor) -> Outputs:
        inputs = q, keys, keys.clone(), weight
        if transform:
            return tuple(torch.func.grad(loss, argnums=(0, 1, 2, 3))(*inputs))
        inputs = tuple(x.clone().requires_grad_() for x in inputs)
        return torch.autograd.grad(loss(*inputs), inputs)

    for own, expected in zip(gradients(dirty), gradients(clean), strict=True):
        assert torch.equal(own, expected)


def test_a_backward_pass_holds_the_logits_of_some_rows_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of all rows they would be batch * heads * queries * keys numbers."""
    largest = [0]

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            made = function(*args, **(kwargs or {}))
            for one in tree_leaves(made):
                if isinstance(one, Tensor):
                    largest[0] = max(largest[0], one.numel())
            return made

    monkeypatch.setattr(reference, "_CHUNK_ELEMENTS", 2000)
    q, k = torch.randn(2, 3, 40, 4), torch.randn(2, 3, 50, 4)
    how = {"sm_scale": 0.5, "causal": False, "kv_lengths": None}
    with Sizes():
        attention_gradients(torch.randn_like(q), None, q, k, k, **how)
    assert 2 * 3 * 50 <= largest[0] <= 2000
