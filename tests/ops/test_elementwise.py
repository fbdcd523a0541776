"""Layer norm with modulation, and the linear with GELU, against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from turbo_rcm_patch.errors import ShapeError
from turbo_rcm_patch.ops import linear_gelu, norm_modulate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7])
def test_modulation_is_what_a_block_does(dtype: torch.dtype, tokens: int) -> None:
    x = torch.randn(2, 7, 48).to(dtype)
    scale, shift = torch.randn(2, tokens, 48), torch.randn(2, tokens, 48)
    expected = F.layer_norm(x.float(), (48,), eps=1e-6) * (1 + scale) + shift
    got = norm_modulate(x, scale=scale, shift=shift, eps=1e-6)
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert torch.equal(got, expected.to(dtype))


def test_affine_is_a_layer_norm_with_weights() -> None:
    x, weight, bias = torch.randn(2, 5, 32), torch.randn(32), torch.randn(32)
    got = norm_modulate(x, scale=weight, shift=bias, form="affine", eps=1e-5)
    assert torch.equal(got, F.layer_norm(x, (32,), weight, bias, 1e-5))
    plain = norm_modulate(x, form="affine", eps=1e-5)
    assert torch.equal(plain, F.layer_norm(x, (32,), eps=1e-5))


@pytest.mark.parametrize("form", ["modulation", "affine"])
def test_norm_gradients(form: str) -> None:
    x = torch.randn(2, 3, 8, dtype=torch.float32, requires_grad=True)
    shape = (2, 1, 8) if form == "modulation" else (8,)
    scale, shift = (torch.randn(shape, requires_grad=True) for _ in range(2))
    inputs = (x, scale, shift)
    d_out = torch.randn(2, 3, 8)
    ours = torch.autograd.grad(
        norm_modulate(x, scale=scale, shift=shift, form=form), inputs, d_out
    )
    factor = 1 + scale if form == "modulation" else scale
    exact = torch.autograd.grad(F.layer_norm(x, (8,), eps=1e-6) * factor + shift, inputs, d_out)
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_shapes_that_do_not_broadcast_are_refused() -> None:
    x = torch.randn(2, 5, 32)
    with pytest.raises(ShapeError, match="scale"):
        norm_modulate(x, scale=torch.randn(16))
    with pytest.raises(ShapeError, match="x"):
        norm_modulate(x[0])


def test_linear_gelu_and_its_gradients() -> None:
    x, weight, bias = torch.randn(2, 5, 16), torch.randn(24, 16), torch.randn(24)
    inputs = [t.requires_grad_() for t in (x, weight, bias)]
    expected = F.gelu(F.linear(*inputs), approximate="tanh")
    got = linear_gelu(*inputs)
    torch.testing.assert_close(got, expected)
    d_out = torch.randn_like(got)
    for a, b in zip(
        torch.autograd.grad(got, inputs, d_out),
        torch.autograd.grad(expected, inputs, d_out),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("operation", ["norm_modulate", "linear_gelu"])
def test_registration(operation: str) -> None:
    call = getattr(torch.ops.turbo_rcm_patch, operation).default
    x = torch.randn(2, 5, 16, requires_grad=True)
    if operation == "norm_modulate":
        args = (x, torch.randn(2, 1, 16), torch.randn(2, 1, 16), 1.0, 1e-6, "auto", torch.bfloat16)
    else:
        args = (x, torch.randn(24, 16), torch.randn(24))
    torch.library.opcheck(call, args)


@pytest.mark.parametrize("shapes", [((1, 16, 1), (1, 16, 1)), ((16,), (1, 16, 1)), ((16,), (1,))])
def test_affine_broadcasts_as_it_says(shapes: tuple[tuple[int, ...], ...]) -> None:
    x, (scale, shift) = torch.randn(2, 16, 16), (torch.randn(shape) for shape in shapes)
    got = norm_modulate(x, scale=scale, shift=shift, form="affine", impl="reference")
    expected = F.layer_norm(x, (16,), eps=1e-6) * scale + shift
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
