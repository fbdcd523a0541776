"""The skip, layer norm with modulation, both in one pass and over two streams, and the linear with
GELU: against plain torch and fp64, and the kernels against the reference bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.implementations import Implementation, coefficient, over
from tests.measures import relative_l2
from turbo_rcm_patch.ops import linear_gelu, norm_modulate, norm_modulate_rows, skip, unchecked

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
    reference={
        "dtype": [FP32, FP16, BF16], "cast": ["fp32", "model"], "tokens, channels": [(37, 30)],
        "form": ["float", "batch", "channel", "element", "token", "half"],
    },
    interpreter={
        "dtype": [FP32, FP16], "cast": ["fp32", "model"], "tokens, channels": [(21, 300)],
        "form": ["float", "batch", "channel", "element", "token", "half"],
    },
    gpu={
        "dtype": [FP32, FP16, BF16], "cast": ["fp32", "model"], "tokens, channels": [(1023, 700)],
        "form": ["float", "batch", "channel", "element"],
    },
)  # fmt: skip
def test_a_skip_is_near_fp64_and_a_kernel_s_that_of_the_reference_bit_for_bit(
    on: Implementation, dtype: torch.dtype, cast: str, tokens: int, channels: int, form: str
) -> None:
    c = coefficient(on, form, (2, tokens, channels))
    residual = on.randn(2, tokens, 3 * channels, dtype=dtype)[..., channels : 2 * channels]
    branch = on.randn(2, tokens, channels, dtype=dtype)
    out = skip(residual, branch, c, c, cast=cast, impl=on.impl)
    assert out.is_contiguous() and out.dtype == dtype
    assert torch.equal(out, skip(residual, branch, c, c, cast=cast, impl="reference"))
    wide = c.view(2, 1, 1) if form == "batch" else c
    rounding = {FP32: 3e-7, FP16: 4e-4, BF16: 3e-3}[dtype]
    truth = wide * (residual.double() + branch.double())
    assert relative_l2(out, truth) < (3 if cast == "model" else 1) * rounding


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
        (FP32, FP32, "fp32"), (FP16, FP32, "fp32"), (FP16, FP16, "model"), (FP32, FP32, "model"),
    ],
    "form": ["no-gate", "channel", "element", "token", "half"],
}  # fmt: skip


@over(
    reference=_SMALL,
    interpreter=_SMALL | {"form": ["no-gate", "element", "token"]},
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
    y = unchecked.skip(residual, branch, None, gate, 1.0, 1.0, cast, on.impl, out_dtype)
    normed = unchecked.norm_modulate(y, factor, offset, one, eps, on.impl, low)
    how = (factor, offset, one, eps, cast, on.impl, out_dtype)
    made = unchecked.skip_norm(residual, branch, gate, *how, low)
    assert torch.equal(made[0], y) and made[0].dtype == out_dtype
    assert torch.equal(made[1], normed) and made[1].is_contiguous()
    rows = unchecked.norm_modulate_rows(y, factor, offset, one, eps, on.impl)
    made = unchecked.skip_norm_rows(residual, branch, gate, *how)
    assert torch.equal(made[0], y) and all(map(torch.equal, made[1:], rows))


# --- the norm ------------------------------------------------------------------------------------

_NORMS = {
    "form": ["modulation", "affine", "per-token", "rows-of-one", "plain"],
    "dtype": [FP32, BF16], "channels": [100, 1536],
}  # fmt: skip


@over(
    reference=_NORMS, interpreter=_NORMS | {"dtype": [FP32, FP16], "channels": [100]}, gpu=_NORMS
)
def test_a_modulated_norm_is_one_rounding_from_fp64(
    on: Implementation, form: str, dtype: torch.dtype, channels: int
) -> None:
    tokens = 5 if on.name == "interpreter" else 333
    x = on.randn(2, tokens, 3 * channels, dtype=dtype)[..., channels : 2 * channels]
    shapes = {"modulation": (2, 1, channels), "affine": (channels,), "rows-of-one": (1, tokens, 1)}
    shape = shapes.get(form, (2, tokens, channels))
    scale, shift = (None, None) if form == "plain" else (on.randn(*shape), on.randn(*shape))
    kind = "affine" if form in ("affine", "rows-of-one") else "modulation"
    got = norm_modulate(x, scale=scale, shift=shift, form=kind, impl=on.impl)
    exact = F.layer_norm(x.double(), (channels,), eps=1e-6)
    if scale is not None and shift is not None:
        exact = exact * (scale.double() + (kind == "modulation")) + shift.double()
    assert got.is_contiguous() and got.dtype == dtype
    # One rounding to bf16, 2^-9 at most, 2^-9 / sqrt(3) in the mean.
    assert relative_l2(got, exact) < {FP32: 1e-6, FP16: 4e-4, BF16: 2e-3}[dtype]
    wide = norm_modulate(x, scale=scale, shift=shift, form=kind, impl=on.impl, out_dtype=FP32)
    assert relative_l2(wide, exact) < 1e-6


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tokens", [1, 7])
def test_a_norm_has_the_bits_of_a_block(dtype: torch.dtype, tokens: int) -> None:
    """The bits of adaptive layer norm, and those of a layer norm with weights."""
    x = torch.randn(2, 7, 48).to(dtype)
    scale, shift = torch.randn(2, tokens, 48), torch.randn(2, tokens, 48)
    expected = F.layer_norm(x.float(), (48,), eps=1e-6) * (1 + scale) + shift
    got = norm_modulate(x, scale=scale, shift=shift, eps=1e-6)
    assert torch.equal(got, expected.to(dtype))
    weight, bias = torch.randn(48), torch.randn(48)
    got = norm_modulate(x, scale=weight, shift=bias, form="affine", eps=1e-5)
    assert torch.equal(got, F.layer_norm(x.float(), (48,), weight, bias, 1e-5).to(dtype))


# --- two streams ---------------------------------------------------------------------------------


@over(
    reference={"stream": [FP32, FP16], "weights": ["both", "weight", "none"], "one": [1.0, 0.0]},
    interpreter={"stream": [FP32, FP16], "weights": ["both", "none"], "one": [1.0]},
    gpu={"stream": [FP32, FP16], "weights": ["both", "weight", "none"], "one": [1.0, 0.0]},
)
def test_a_skip_of_two_streams_with_their_norm_is_both_bit_for_bit(
    on: Implementation, stream: torch.dtype, weights: str, one: float
) -> None:
    """The streams are parts of a longer one; rows of one Linear modulate them; the skip alone, the
    norm alone, and both in one pass."""
    lengths, channels, batch = (9, 17), 100, 2
    longer = on.randn(batch, 40, 2 * channels, dtype=stream)[..., channels:]
    first, second = longer[:, :9], longer[:, 20:37]
    branch = on.randn(batch, 26, 3 * channels, dtype=FP16)[..., channels : 2 * channels]
    rows = on.randn(batch, 6 * channels, dtype=FP16).unflatten(-1, (6, 1, -1)).unbind(1)
    gates, scale, shift = rows[:2], rows[2:4], rows[4:]
    weight, bias = (on.randn(channels, dtype=FP16) for _ in range(2))
    own = {"both": (weight, bias), "weight": (weight, None), "none": (None, None)}[weights]
    modulation: Any = (*scale, *shift, *own, one, 1e-5)
    cast: Any = "fp32" if stream == FP32 else "model"
    how = (cast, on.impl, stream)
    left, right = unchecked.skip_streams(branch, first, second, *gates, *how)
    parts = branch.split(lengths, dim=1)
    for y, x, part, gate in zip((left, right), (first, second), parts, gates, strict=True):
        alone = skip(x, part, 1.0, gate, cast=cast, impl=on.impl)
        assert torch.equal(y, alone) and y.is_contiguous() and y.dtype == stream
    normed = unchecked.norm_modulate_streams(left, right, *modulation, on.impl, FP16)
    made = unchecked.skip_norm_streams(branch, first, second, *gates, *modulation, *how, FP16)
    assert all(map(torch.equal, made, (left, right, normed)))
    truth = []
    for x, a, b in zip((left, right), scale, shift, strict=True):
        weight, bias = (None if one is None else one.double() for one in own)
        inner = F.layer_norm(x.double(), (channels,), weight, bias, 1e-5)
        truth.append(inner * (one + a.double()) + b.double())
    assert normed.is_contiguous() and normed.dtype == FP16
    assert relative_l2(normed, torch.cat(truth, dim=1)) < 4e-4


# --- the linear with GELU ------------------------------------------------------------------------


@over(reference={"dtype": [FP32, FP16, BF16]}, gpu={"dtype": [FP32, FP16, BF16]})
def test_gelu_of_a_linear_is_near_fp64(on: Implementation, dtype: torch.dtype) -> None:
    """On a GPU it sees the sum before that is rounded."""
    x, weight = on.randn(2, 300, 512, dtype=dtype), on.randn(70, 512, dtype=dtype) / 22
    bias = on.randn(70)
    exact = F.gelu(
        F.linear(x.double(), weight.double(), bias.to(dtype).double()), approximate="tanh"
    )
    out = linear_gelu(x, weight, bias)
    assert out.dtype == dtype
    limit = {FP32: 3e-6, FP16: 4e-4, BF16: 2.2e-3}[dtype]
    assert relative_l2(out, exact) < (limit if on.name == "gpu" else 2 * limit)


# --- nothing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize("shape", [(0, 5, 16), (2, 0, 16), (2, 5, 0)], ids=str)
def test_elementwise_of_nothing(shape: tuple[int, ...], impl: str) -> None:
    x = torch.randn(*shape)
    assert skip(x, x, 0.5, torch.ones(shape[0]), impl=impl).shape == shape
    assert norm_modulate(x, impl=impl).shape == shape
    out = linear_gelu(x, torch.randn(8, shape[2]), torch.zeros(8))
    assert out.shape == (*shape[:2], 8) and not out.any()
    if shape[2]:
        assert norm_modulate_rows(x, impl=impl).int8.shape == shape
