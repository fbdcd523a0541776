"""The custom operations as torch sees them: schema, fake, gradients, compilation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.measures import relative_l2
from turbo_rcm_patch.errors import GradientError
from turbo_rcm_patch.ops import (
    AttentionSpec,
    attention_lse,
    attention_project_skip,
    attention_skip,
    project_skip,
    reference,
    registry,
    skip,
)
from turbo_rcm_patch.ops.fused import one_launch
from turbo_rcm_patch.ops.projection import project_forward, skip_forward
from turbo_rcm_patch.ops.reference import split_heads
from turbo_rcm_patch.ops.registry import attention_forward

BATCH, TOKENS, HEADS, DIM = 2, 20, 2, 16
CHANNELS = HEADS * DIM


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).requires_grad_()


def tokens() -> torch.Tensor:
    return leaf(BATCH, TOKENS, CHANNELS)


def rotary() -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.randn(TOKENS, DIM // 2).repeat_interleave(2, -1)
    return angle.cos(), angle.sin()


def sample_arguments() -> dict[str, tuple[Callable[..., object], tuple[object, ...]]]:
    cos, sin = rotary()
    lengths = torch.tensor([5, TOKENS], dtype=torch.int32)
    gate = leaf(BATCH, 1, CHANNELS)
    numbers = (HEADS, "int8", "bf16", True, False, DIM**-0.5, 1e-6)
    norms = leaf(CHANNELS), leaf(DIM), None, leaf(DIM)  # RMSNorm of q, layer norm of k
    weight, bias = leaf(24, CHANNELS), leaf(24)
    return {
        "attention": (
            attention_forward,
            (tokens(), tokens(), tokens(), tokens(), leaf(BATCH, 1, 1), gate, *norms, cos, sin,
             lengths, 1.0, 1.0, *numbers, "reference", torch.float32, True),
        ),
        "attention-plain": (
            attention_forward,
            (tokens(), tokens(), tokens(), *(None,) * 10, 1.0, 0.5, *numbers, "reference",
             torch.float32, False),
        ),
        "skip": (
            skip_forward,
            (tokens(), tokens(), None, gate, 0.5, 1.0, "fp32", "reference", torch.float32),
        ),
        "project": (
            project_forward,
            (tokens(), weight, bias, leaf(BATCH, TOKENS, 24), None, leaf(BATCH, 1, 24), 0.5, 1.0,
             "fp32", "reference", torch.float32),
        ),
        "one-launch": (
            one_launch,
            (tokens(), tokens(), tokens(), weight, bias, leaf(BATCH, TOKENS, 24), None, None,
             *norms, cos, sin, None, 1.0, 0.5, *numbers, "fp32", "one-launch", "reference",
             torch.float32),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["attention", "attention-plain", "skip", "project", "one-launch"])
def test_opcheck(name: str) -> None:
    operation, arguments = sample_arguments()[name]
    torch.library.opcheck(operation.registered, arguments)


def exact(q, k, v, norm_q, norm_k, cos, sin, lengths, norm_q_bias=None, norm_k_bias=None):
    """Attention and logsumexp that torch can differentiate, written without the library's ops."""
    qh = norm_rope_by_torch(q, norm_q, cos, sin, norm_q_bias)
    kh = norm_rope_by_torch(k, norm_k, cos, sin, norm_k_bias)
    logits = qh @ kh.transpose(-1, -2) * DIM**-0.5
    if lengths is not None:
        unseen = torch.arange(TOKENS) >= lengths.view(-1, 1, 1, 1)
        logits = logits.masked_fill(unseen, float("-inf"))
    out = logits.softmax(-1) @ split_heads(v, HEADS)
    return out.transpose(1, 2).flatten(2), logits.logsumexp(-1)


def norm_rope_by_torch(x, weight, cos, sin, bias=None):
    if bias is not None:
        y = F.layer_norm(split_heads(x, HEADS), (DIM,), weight, bias, 1e-6)
    elif weight.numel() == CHANNELS:
        y = split_heads(F.rms_norm(x, (CHANNELS,), weight, 1e-6), HEADS)
    else:
        y = F.rms_norm(split_heads(x, HEADS), (DIM,), weight, 1e-6)
    turned = torch.view_as_real(
        torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous())
        * torch.complex(cos[:, 0::2], sin[:, 1::2])
    )
    return turned.flatten(-2)


@pytest.mark.parametrize("attention", ["int8", "exact"])
@pytest.mark.parametrize("masked", [False, True], ids=["all-keys", "key-padding"])
@pytest.mark.parametrize("rows", [TOKENS, 2], ids=["at-once", "two-rows-at-a-time"])
def test_gradients_are_those_of_exact_attention(
    attention: str, masked: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_CHUNK_ELEMENTS", rows * BATCH * HEADS * TOKENS)
    q, k, v, residual = (tokens() for _ in range(4))
    c_skip, c_out = leaf(BATCH), leaf(BATCH, 1, CHANNELS)
    norm_q, norm_k = leaf(CHANNELS), leaf(DIM)
    cos, sin = rotary()
    lengths = torch.tensor([5, TOKENS]) if masked else None
    inputs = (q, k, v, residual, c_skip, c_out, norm_q, norm_k)
    weights = torch.randn(BATCH, TOKENS, CHANNELS)
    out = attention_skip(
        q, k, v, AttentionSpec(heads=HEADS, attention=attention),
        residual=residual, c_skip=c_skip, c_out=c_out, norm_q=norm_q, norm_k=norm_k,
        rotary=(cos, sin), kv_lengths=lengths,
    )  # fmt: skip
    branch, _ = exact(q, k, v, norm_q, norm_k, cos, sin, lengths)
    expected = c_skip.view(-1, 1, 1) * residual + c_out * branch
    got = torch.autograd.grad((out * weights).sum(), inputs)
    want = torch.autograd.grad((expected * weights).sum(), inputs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("asked", [("residual",), ("c_skip",), ("residual", "c_skip")], ids=str)
def test_gradients_of_the_residual_and_its_factor_compute_no_attention(
    asked: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen branch costs a product each."""
    q, k, v = (tokens().detach() for _ in range(3))
    near = {"residual": tokens().detach(), "c_skip": torch.rand(BATCH)}
    inputs = [near[name].requires_grad_() for name in asked]
    out = attention_skip(q, k, v, AttentionSpec(heads=HEADS), c_out=torch.rand(BATCH), **near)

    def computed(*args: object, **more: object) -> None:
        raise AssertionError("q and k were prepared")

    monkeypatch.setattr(registry, "prepared", computed)
    loss = torch.randn(BATCH, TOKENS, CHANNELS)
    found = dict(zip(asked, torch.autograd.grad((out * loss).sum(), inputs), strict=True))
    want = {
        "residual": loss * near["c_skip"].detach().view(-1, 1, 1),
        "c_skip": (loss * near["residual"].detach()).sum((1, 2)),
    }
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, want[name])


def test_gradients_through_a_layer_norm() -> None:
    q, k, v = ((3 * tokens() + 1).detach().requires_grad_() for _ in range(3))
    norms = {f"norm_{x}{part}": leaf(DIM) for x in "qk" for part in ("", "_bias")}
    weight, bias = torch.eye(CHANNELS), torch.zeros(CHANNELS)
    table, lengths = rotary(), torch.tensor([5, TOKENS])
    inputs, loss = (q, k, v, *norms.values()), torch.randn(BATCH, TOKENS, CHANNELS)
    expected, _ = exact(
        q, k, v, norms["norm_q"], norms["norm_k"], *table, lengths,
        norms["norm_q_bias"], norms["norm_k_bias"],
    )  # fmt: skip
    want = torch.autograd.grad((expected * loss).sum(), inputs)
    spec = AttentionSpec(heads=HEADS)
    outs = [attention_skip(q, k, v, spec, rotary=table, kv_lengths=lengths, **norms)]
    outs += [
        attention_project_skip(
            q, k, v, weight, bias, spec, residual=None, rotary=table, kv_lengths=lengths,
            form=form, **norms,
        )
        for form in ("one-launch", "two-launch")
    ]  # fmt: skip
    for out in outs:
        got = torch.autograd.grad((out * loss).sum(), inputs)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=2e-4)


def test_one_gradient_of_a_layer_norm_alone() -> None:
    q, k, v = (tokens().detach() for _ in range(3))
    weight, bias = torch.ones(DIM), leaf(DIM)
    spec = AttentionSpec(heads=HEADS, attention="exact")
    out = attention_skip(
        q, k, v, spec, norm_q=weight, norm_k=weight, norm_q_bias=bias, norm_k_bias=bias.detach()
    )
    (got,) = torch.autograd.grad(out.square().sum(), bias)
    still = torch.ones(TOKENS, DIM), torch.zeros(TOKENS, DIM)
    expected, _ = exact(q, k, v, weight, weight, *still, None, bias, bias.detach())
    (want,) = torch.autograd.grad(expected.square().sum(), bias)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-4)


def test_gradient_of_the_logsumexp() -> None:
    q, k, v = (tokens() for _ in range(3))
    norm_q, norm_k = leaf(CHANNELS), leaf(DIM)
    cos, sin = rotary()
    out, lse = attention_lse(
        q, k, v, AttentionSpec(heads=HEADS), norm_q=norm_q, norm_k=norm_k, rotary=(cos, sin)
    )
    expected, expected_lse = exact(q, k, v, norm_q, norm_k, cos, sin, None)
    got = torch.autograd.grad(out.sum() + lse.square().sum(), (q, k, v))
    # The forward value of lse is the quantised one; its weight in the loss has to be the same.
    weight = 2 * lse.detach()
    want = torch.autograd.grad(expected.sum() + (expected_lse * weight).sum(), (q, k, v))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("form", ["one-launch", "two-launch"])
def test_gradients_through_the_projection(form: str) -> None:
    q, k, v = (tokens() for _ in range(3))
    weight, bias, residual = leaf(24, CHANNELS), leaf(24), leaf(BATCH, TOKENS, 24)
    c_skip, c_out = leaf(BATCH, TOKENS, 24), leaf(BATCH, 1, 24)
    inputs = (q, k, v, weight, bias, residual, c_skip, c_out)
    spec = AttentionSpec(heads=HEADS)
    out = attention_project_skip(
        q, k, v, weight, bias, spec, residual=residual, c_skip=c_skip, c_out=c_out, form=form
    )
    heads = [split_heads(x, HEADS) for x in (q, k, v)]
    branch = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
    expected = c_skip * residual + c_out * F.linear(branch, weight, bias)
    got = torch.autograd.grad(out.sum(), inputs)
    want = torch.autograd.grad(expected.sum(), inputs)
    for a, b in zip(got, want, strict=True):
        # W_o and the gate see the quantised branch in one form and the exact one in the other.
        assert relative_l2(a, b) < 0.02


@pytest.mark.parametrize("form", ["one-launch", "two-launch"])
def test_each_gradient_through_the_projection_by_itself(form: str) -> None:
    q, k, v = (tokens().detach() for _ in range(3))
    given = [*(q, k, v), leaf(24, CHANNELS), leaf(24), leaf(BATCH, TOKENS, 24), leaf(BATCH, 1, 24)]
    given = [x.detach() for x in given]

    def closed(*inputs: torch.Tensor) -> torch.Tensor:
        q, k, v, weight, bias, residual, c_out = inputs
        spec = AttentionSpec(heads=HEADS)
        out = attention_project_skip(
            q, k, v, weight, bias, spec, residual=residual, c_out=c_out, form=form
        )
        return out.square().sum()

    together = [x.clone().requires_grad_() for x in given]
    want = torch.autograd.grad(closed(*together), together)
    for one in range(len(given)):
        alone = [x.clone().requires_grad_(i == one) for i, x in enumerate(given)]
        (got,) = torch.autograd.grad(closed(*alone), alone[one])
        torch.testing.assert_close(got, want[one])


def test_gradients_of_the_skip_in_bf16() -> None:
    x, branch = (torch.randn(2, 5, 8).bfloat16().requires_grad_() for _ in range(2))
    gate = leaf(2, 1, 8)
    got = torch.autograd.grad(skip(x, branch, 0.5, gate).float().sum(), (x, branch, gate))
    want = torch.autograd.grad((0.5 * x.float() + branch.float() * gate).sum(), (x, branch, gate))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-2)


def test_second_derivatives_are_refused() -> None:
    q = tokens()
    out = attention_skip(q, q, q, AttentionSpec(heads=HEADS))
    (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(GradientError):
        torch.autograd.grad(first.sum(), q)


@pytest.mark.parametrize("form", ["one-launch", "two-launch"])
def test_compiles_without_a_break(form: str) -> None:
    weight, bias, residual = leaf(24, CHANNELS), leaf(24), torch.randn(BATCH, TOKENS, 24)
    gate, spec, table = torch.randn(BATCH, 1, 24), AttentionSpec(heads=HEADS), rotary()

    def block(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        q, k, v = torch.cat([x, 2 * x, x], -1).chunk(3, -1)
        y = attention_project_skip(
            q, k, v, weight, bias, spec, residual=residual, c_out=gate, rotary=table, form=form
        )
        return skip(y, project_skip(x, weight, bias, residual=y), c_out=gate)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    x = tokens()
    out, expected = compiled(x, gate), block(x, gate)
    torch.testing.assert_close(out, expected)
    (a,) = torch.autograd.grad(out.sum(), x)
    (b,) = torch.autograd.grad(expected.sum(), x)
    torch.testing.assert_close(a, b)
