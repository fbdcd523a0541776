"""The skip, layer norm with modulation, and both in one pass, of one stream and of two: against
plain torch and fp64, and the kernels against the reference bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.implementations import Implementation, coefficient, over
from tests.measures import relative_l2
from turbo_rcm_patch.ops import norm_modulate, norm_modulate_rows, skip
from turbo_rcm_patch.ops.residual.api import Norm, skip_norm

pytestmark = pytest.mark.usefixtures("poisoned")

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16

# --- the skip ------------------------------------------------------------------------------------


@over(
    reference={
        "dtype": [FP32, FP16, BF16], "tokens, channels": [(37, 30)],
        "form": ["float", "batch", "channel", "element", "token", "half"],
    },
    interpreter={
        "dtype": [FP32, FP16], "tokens, channels": [(21, 300)],
        "form": ["float", "batch", "channel", "element", "token", "half"],
    },
    gpu={
        "dtype": [FP32, FP16, BF16], "tokens, channels": [(1023, 700)],
        "form": ["float", "batch", "channel", "element"],
    },
)  # fmt: skip
def test_a_skip_is_near_fp64_and_that_of_eager_code_bit_for_bit(
    on: Implementation, dtype: torch.dtype, tokens: int, channels: int, form: str
) -> None:
    c = coefficient(on, form, (2, tokens, channels))
    residual = on.randn(2, tokens, 3 * channels, dtype=dtype)[..., channels : 2 * channels]
    branch = on.randn(2, tokens, channels, dtype=dtype)
    out = skip(residual, branch, c, c, impl=on.impl)
    assert out.is_contiguous() and out.dtype == dtype
    wide = c if form == "float" else c.float().view(2, 1, 1) if form == "batch" else c.float()
    eager = residual.float() * wide + branch.float() * wide
    assert torch.equal(out, eager.to(dtype))
    rounding = {FP32: 3e-7, FP16: 4e-4, BF16: 3e-3}[dtype]
    truth = wide * (residual.double() + branch.double())
    assert relative_l2(out, truth) < rounding


#: Gate of the skip; scale and shift of the norm, None where it has neither, "row" for a weight and
#: a bias.
SKIP_NORMS = {
    "no-gate": (None, None, "channel"),
    "channel": ("channel", "channel", "channel"),
    "element": ("element", "element", "element"),
    "token": ("token", "token", "channel"),
    "half": ("half", None, None),
    "affine": (None, "row", "row"),
    "plain-norm": ("channel", None, None),
}
_SMALL = {
    "channels": [20, 300],
    "stream, dtype": [(FP32, FP32), (FP16, FP32), (FP16, FP16)],
    "form": ["no-gate", "channel", "element", "token", "half"],
}  # fmt: skip


@over(
    reference=_SMALL,
    interpreter=_SMALL | {"form": ["no-gate", "element", "token", "affine"]},
    gpu={
        "channels": [128, 1536, 1920, 5120],
        "stream, dtype": [(FP32, FP32), (BF16, FP32), (BF16, BF16)],
        "form": ["channel", "affine", "element", "plain-norm"],
    },
)  # fmt: skip
def test_a_skip_and_its_norm_in_one_pass_equal_two_passes_bit_for_bit(
    on: Implementation, channels: int, stream: torch.dtype, dtype: torch.dtype, form: str
) -> None:
    """From a residual stream of either dtype; the norm as a tensor or as int8 rows."""
    low = BF16 if on.name == "gpu" else FP16
    tokens = 333 if on.name == "gpu" else 3
    gate, scale, shift = (
        on.randn(1, 1, channels, dtype=low)
        if kind == "row"
        else None
        if kind is None
        else coefficient(on, kind, (2, tokens, channels))
        for kind in SKIP_NORMS[form]
    )
    eps = 1e-5 if form == "token" else 1e-6
    norm = Norm(weight=scale, bias=shift, eps=eps) if form == "affine" else Norm(scale, shift)
    residual = 3 * on.randn(2, tokens, 2 * channels, dtype=stream)[..., channels:]
    branch = on.randn(2, tokens + 3, channels, dtype=low)[:, 3:]
    how: Any = {"gate": gate, "dtype": dtype, "impl": on.impl}
    y = skip(residual, branch, 1.0, 1.0 if gate is None else gate, impl=on.impl, out_dtype=dtype)
    assert torch.equal(skip_norm(residual, branch, **how)[0], y)
    for norm_dtype in (low, torch.int8):
        normed = skip_norm(y, norm=norm, norm_dtype=norm_dtype, impl=on.impl)
        made = skip_norm(residual, branch, norm=norm, norm_dtype=norm_dtype, **how)
        assert torch.equal(made[0], y) and made[0].dtype == dtype
        of_both = [made[1]], [normed[1]]
        if norm_dtype == torch.int8:
            of_both = made[1], normed[1]
        assert all(map(torch.equal, *of_both)) and of_both[0][0].is_contiguous()
        assert normed[0] is None


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
    shapes = {"modulation": (2, 1, channels), "affine": (1, 1, channels)}
    shapes["rows-of-one"] = (1, tokens, 1)
    shape = shapes.get(form, (2, tokens, channels))
    scale, shift = (None, None) if form == "plain" else (on.randn(*shape), on.randn(*shape))
    affine = form in ("affine", "rows-of-one")
    norm = Norm(weight=scale, bias=shift) if affine else Norm(scale, shift)
    got, wide = (
        skip_norm(x, norm=norm, norm_dtype=kind, impl=on.impl)[1] for kind in (dtype, FP32)
    )
    exact = F.layer_norm(x.double(), (channels,), eps=1e-6)
    if scale is not None and shift is not None:
        exact = exact * (scale.double() + (not affine)) + shift.double()
    assert got.is_contiguous() and got.dtype == dtype
    # One rounding to bf16, 2^-9 at most, 2^-9 / sqrt(3) in the mean.
    assert relative_l2(got, exact) < {FP32: 1e-6, FP16: 4e-4, BF16: 2e-3}[dtype]
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
    weight, bias = torch.randn(2, 1, 1, 48)
    norm = Norm(weight=weight, bias=bias, eps=1e-5)
    got = skip_norm(x, norm=norm, norm_dtype=dtype)[1]
    expected = F.layer_norm(x.float(), (48,), weight[0, 0], bias[0, 0], 1e-5)
    assert torch.equal(got, expected.to(dtype))


# --- two streams ---------------------------------------------------------------------------------

_TWO = {"stream": [FP32, FP16], "weights": ["both", "weight", "none"], "channels": [20, 100]}


@over(reference=_TWO, interpreter=_TWO | {"weights": ["both", "none"], "channels": [100]},
      gpu=_TWO | {"channels": [100, 3072]})  # fmt: skip
def test_a_skip_of_two_streams_with_their_norm_is_both_bit_for_bit(
    on: Implementation, stream: torch.dtype, weights: str, channels: int
) -> None:
    """The streams are parts of a longer one; rows of one Linear modulate them; the skip alone, the
    norm alone, and both in one pass."""
    batch, lengths = 2, (3, 5) if on.name == "interpreter" else (9, 17)
    longer = on.randn(batch, 40, 2 * channels, dtype=stream)[..., channels:]
    x = longer[:, : lengths[0]], longer[:, 20 : 20 + lengths[1]]
    branch = on.randn(batch, sum(lengths), 3 * channels, dtype=FP16)[..., channels : 2 * channels]
    rows = on.randn(batch, 6 * channels, dtype=FP16).unflatten(-1, (6, 1, -1)).unbind(1)
    gates, scale, shift = rows[:2], rows[2:4], rows[4:]
    weight, bias = (on.randn(channels, dtype=FP16) for _ in range(2))
    own = {"both": (weight, bias), "weight": (weight, None), "none": (None, None)}[weights]
    norm: Any = {"norm": Norm(scale, shift, *own, 1e-5), "norm_dtype": FP16, "impl": on.impl}
    sums, nothing = skip_norm(x, branch, gate=gates, dtype=stream, impl=on.impl)
    assert nothing is None
    for y, part, out, gate in zip(sums, x, branch.split(lengths, dim=1), gates, strict=True):
        alone = skip(part, out, 1.0, gate, impl=on.impl)
        assert torch.equal(y, alone) and y.is_contiguous() and y.dtype == stream
    normed = skip_norm(sums, **norm)[1]
    made, both = skip_norm(x, branch, gate=gates, dtype=stream, **norm)
    assert all(map(torch.equal, (*made, both), (*sums, normed)))
    truth = []
    for y, a, b in zip(sums, scale, shift, strict=True):
        weight, bias = (None if part is None else part.double() for part in own)
        inner = F.layer_norm(y.double(), (channels,), weight, bias, 1e-5)
        truth.append(inner * (1 + a.double()) + b.double())
    assert normed.is_contiguous() and normed.dtype == FP16
    assert relative_l2(normed, torch.cat(truth, dim=1)) < 4e-4


# --- nothing -------------------------------------------------------------------------------------


def test_skips_and_norms_of_no_tokens() -> None:
    x = torch.randn(2, 0, 16)
    assert skip(x, x, 0.5, torch.ones(2)).shape == x.shape
    assert norm_modulate(x).shape == norm_modulate_rows(x).data.shape == x.shape
