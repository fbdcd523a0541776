"""The skip alone, layer norm with modulation, both in one pass, and the linear with GELU: against
plain torch, and the kernels against the reference bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.implementations import Implementation, coefficient, over
from tests.measures import relative_l2
from turbo_rcm_patch.errors import ShapeError
from turbo_rcm_patch.ops import linear_gelu, norm_modulate, skip
from turbo_rcm_patch.ops.elementwise import norm_forward, rows_forward, skip_norm
from turbo_rcm_patch.ops.projection import skip_forward

pytestmark = pytest.mark.usefixtures("poisoned")

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16

# --- the skip ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", ["fp32", "model"])
def test_a_skip_is_what_eager_code_computes(cast: str) -> None:
    x, branch = torch.randn(2, 2, 9, 16).bfloat16()
    gate = torch.randn(2, 1, 16)
    if cast == "fp32":
        expected = (x.float() + branch.float() * gate).to(x.dtype)
    else:
        expected = x + branch * gate.to(x.dtype)
    assert torch.equal(skip(x, branch, 1.0, gate, cast=cast), expected)


@over(
    interpreter={
        "dtype": [FP32, FP16], "cast": ["fp32", "model"], "tokens, channels": [(37, 300)],
        "form": ["float", "batch", "channel", "element", "token", "half"],
    },
    gpu={
        "dtype": [FP32, FP16, BF16], "cast": ["fp32", "model"], "tokens, channels": [(1023, 700)],
        "form": ["float", "batch", "channel", "element"],
    },
)  # fmt: skip
def test_a_skip_is_that_of_the_reference_bit_for_bit(
    on: Implementation, dtype: torch.dtype, cast: str, tokens: int, channels: int, form: str
) -> None:
    c = coefficient(on, form, (2, tokens, channels))
    residual = on.randn(2, tokens, 2 * channels, dtype=dtype)[..., 100 : 100 + channels]
    branch = on.randn(2, tokens, channels, dtype=dtype)
    out = skip(residual, branch, c, c, cast=cast, impl=on.impl)
    assert torch.equal(out, skip(residual, branch, c, c, cast=cast, impl="reference"))


#: Gate of the skip; scale and shift of the norm, None where it has neither; what is added to the
#: scale.
SKIP_NORMS = {
    "no-gate": ("none", None, "channel", 1.0),
    "channel": ("channel", "channel", "channel", 1.0),
    "element": ("element", "element", "element", 1.0),
    "token": ("token", "token", "channel", 0.0),
    "half": ("half", None, None, 1.0),
    "affine": ("none", "row", "row", 0.0),
    "plain-norm": ("channel", None, None, 1.0),
}
_SMALL = {
    "channels": [300],
    "stream, out_dtype, cast": [
        (stream, out, cast)
        for stream, out in ((FP32, FP32), (FP16, FP32), (FP16, FP16))
        for cast in ("fp32", "model")
    ],
    "form": ["no-gate", "channel", "element", "token", "half"],
}


@over(
    reference=_SMALL,
    interpreter=_SMALL,
    gpu={
        "channels": [128, 1536, 1920, 5120],
        "stream, out_dtype, cast": [
            (FP32, FP32, "fp32"), (BF16, FP32, "fp32"), (BF16, BF16, "model")
        ],
        "form": ["channel", "affine", "element", "plain-norm"],
    },
)  # fmt: skip
def test_a_skip_and_its_norm_in_one_pass_equal_two_passes_bit_for_bit(
    on: Implementation,
    channels: int,
    stream: torch.dtype,
    out_dtype: torch.dtype,
    cast: str,
    form: str,
) -> None:
    """From a residual stream of either dtype; the norm as a tensor or as int8 rows."""
    low = BF16 if on.name == "gpu" else FP16
    tokens = 333 if on.name == "gpu" else 5
    gate, factor, offset = (
        on.randn(1, 1, channels, dtype=low)
        if kind == "row"
        else None
        if kind is None
        else coefficient(on, kind, (2, tokens, channels))
        for kind in SKIP_NORMS[form][:3]
    )
    one, eps = SKIP_NORMS[form][3], 1e-5 if form == "token" else 1e-6
    residual = 3 * on.randn(2, tokens, 2 * channels, dtype=stream)[..., channels:]
    branch = on.randn(2, tokens + 3, channels, dtype=low)[:, 3:]
    y = skip_forward.body(residual, branch, None, gate, 1.0, 1.0, cast, on.impl, out_dtype)
    normed = norm_forward.body(y, factor, offset, one, eps, on.impl, low)
    how = (factor, offset, one, eps, cast, on.impl, out_dtype)
    made = skip_norm(residual, branch, gate, *how, low)
    assert torch.equal(made[0], y) and made[0].dtype == out_dtype
    assert torch.equal(made[1], normed) and made[1].is_contiguous()
    rows = rows_forward.body(y, factor, offset, one, eps, on.impl)
    made = skip_norm(residual, branch, gate, *how, torch.int8)
    assert torch.equal(made[0], y) and all(map(torch.equal, made[1], rows))


# --- the norm ------------------------------------------------------------------------------------


_NORMS = {"form": ["modulation", "affine", "per-token"], "channels": [100, 1536, 3072]}


@over(reference=_NORMS, gpu=_NORMS)
def test_a_modulated_norm_is_one_rounding_from_fp64(
    on: Implementation, form: str, channels: int
) -> None:
    x = on.randn(2, 333, 3 * channels, dtype=BF16)[..., channels : 2 * channels]
    shape = {"modulation": (2, 1, channels), "affine": (channels,)}.get(form, (2, 333, channels))
    scale, shift = on.randn(*shape), on.randn(*shape)
    kind = "affine" if form == "affine" else "modulation"
    got = norm_modulate(x, scale=scale, shift=shift, form=kind, impl=on.impl)
    exact = F.layer_norm(x.double(), (channels,), eps=1e-6)
    exact = exact * (scale.double() + (kind == "modulation")) + shift.double()
    # One rounding to bf16, 2^-9 at most, 2^-9 / sqrt(3) in the mean.
    assert relative_l2(got, exact) < 2e-3


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tokens", [1, 7])
def test_a_modulated_norm_is_what_a_block_computes(dtype: torch.dtype, tokens: int) -> None:
    x = torch.randn(2, 7, 48).to(dtype)
    scale, shift = torch.randn(2, tokens, 48), torch.randn(2, tokens, 48)
    expected = F.layer_norm(x.float(), (48,), eps=1e-6) * (1 + scale) + shift
    got = norm_modulate(x, scale=scale, shift=shift, eps=1e-6)
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert torch.equal(got, expected.to(dtype))


def test_an_affine_norm_is_a_layer_norm_with_weights() -> None:
    x, weight, bias = torch.randn(2, 5, 32), torch.randn(32), torch.randn(32)
    got = norm_modulate(x, scale=weight, shift=bias, form="affine", eps=1e-5)
    assert torch.equal(got, F.layer_norm(x, (32,), weight, bias, 1e-5))
    plain = norm_modulate(x, form="affine", eps=1e-5)
    assert torch.equal(plain, F.layer_norm(x, (32,), eps=1e-5))


@pytest.mark.parametrize("form", ["modulation", "affine"])
def test_the_gradients_of_a_norm_are_torch_s(form: str) -> None:
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


# --- the linear with GELU ------------------------------------------------------------------------


@over("gpu")
def test_gelu_sees_the_linear_s_sum_before_it_is_rounded(on: Implementation) -> None:
    x, weight = on.randn(2, 300, 512, dtype=BF16), on.randn(700, 512, dtype=BF16) / 22
    bias = on.randn(700, dtype=BF16)
    exact = F.gelu(F.linear(x.double(), weight.double(), bias.double()), approximate="tanh")
    assert relative_l2(linear_gelu(x, weight, bias), exact) < 2.2e-3


def test_a_linear_with_gelu_and_its_gradients_are_torch_s() -> None:
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
def test_the_registration_passes_opcheck(operation: str) -> None:
    call = getattr(torch.ops.turbo_rcm_patch, operation).default
    x = torch.randn(2, 5, 16, requires_grad=True)
    if operation == "norm_modulate":
        args = (x, torch.randn(2, 1, 16), torch.randn(2, 1, 16), 1.0, 1e-6, "auto", torch.bfloat16)
    else:
        args = (x, torch.randn(24, 16), torch.randn(24))
    torch.library.opcheck(call, args)


@pytest.mark.parametrize("shapes", [((1, 16, 1), (1, 16, 1)), ((16,), (1, 16, 1)), ((16,), (1,))])
def test_an_affine_norm_broadcasts_as_it_says(shapes: tuple[tuple[int, ...], ...]) -> None:
    x, (scale, shift) = torch.randn(2, 16, 16), (torch.randn(shape) for shape in shapes)
    got = norm_modulate(x, scale=scale, shift=shift, form="affine", impl="reference")
    expected = F.layer_norm(x, (16,), eps=1e-6) * scale + shift
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
