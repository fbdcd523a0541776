"""The int8 linear: exact integers, its error against fp64; the kernels against the emulation.

Tolerance, kernels against the emulation: the integers are equal but where a product falls on a
half (the kernel may fuse the multiplication with the rounding), scales differ by a last bit, and
so do bias and activation; the result is rounded once to its dtype. In the interpreter 2e-6 in fp32
holds that apart from any wrong scale, column or mask. A GPU rounds x / scale in one step and the
emulation in two, which sends about one value in a million to the other neighbour, a step of 0.026
standard deviations away.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.implementations import Implementation, over
from tests.measures import relative_l2
from turbo_rcm_patch.ops import (
    MAX_CHANNELS,
    Int8Tensor,
    int8_linear,
    linear_gelu,
    norm_modulate,
    norm_modulate_rows,
    quantize_weight,
)
from turbo_rcm_patch.ops.int8_linear import triton as kernel
from turbo_rcm_patch.ops.int8_linear.api import (
    LinearInputs,
    dequantized,
    quantize_rows,
    quantized_rows,
)
from turbo_rcm_patch.ops.int8_linear.samples import SAMPLES, Samples
from turbo_rcm_patch.ops.launch import Target

pytestmark = pytest.mark.usefixtures("poisoned")

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
FLOATS = [FP32, FP16, BF16]
#: Kernels against the emulation.
TIGHT = {"interpreter": {FP32: 2e-6, FP16: 4e-4}, "gpu": {BF16: 3e-3, FP16: 4e-4, FP32: 1e-4}}

# --- rows of a token and of a weight -------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("channels", [1, 77, 1041])
def test_rows_are_rounded_to_nearest(channels: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, 9, channels).to(dtype)
    x[0, 3] = 0.0
    int8, scale = quantized_rows(x)
    amax = x.double().abs().amax(-1, keepdim=True)
    steps = torch.where(amax == 0, amax, x.double() / amax * 127)
    # A value that falls on a half to fp32 precision may be rounded either way.
    assert ((int8.double() - steps).abs() <= 0.5 + 1e-5).all()
    torch.testing.assert_close(
        scale[amax[..., 0] > 0].double(), amax[amax > 0] / 127, rtol=2e-7, atol=0
    )


@over(
    interpreter={"dtype": [FP32, FP16], "channels": [1, 77, 2100]},
    gpu={"dtype": FLOATS, "channels": [1, 77, 1536, 5120, 8960, 13824, 40000]},
)
def test_the_kernel_s_rows_are_those_of_the_reference(
    on: Implementation, dtype: torch.dtype, channels: int
) -> None:
    tokens = 37 if on.name == "gpu" else 5
    x = on.randn(2, tokens, channels + 16, dtype=dtype)[..., 8 : channels + 8]
    x[1, 2], x[0, 4, channels // 2] = 0.0, float("nan")
    rows_int8, rows_scale = quantize_rows(x, on.impl)
    int8, scale = quantized_rows(x)
    good = ~scale.isnan()
    assert torch.equal(rows_scale.isnan(), ~good)
    assert rows_int8.shape[2] % 16 == 0 and (rows_int8[..., channels:] == 0).all()
    far = (rows_int8[..., :channels][good].int() - int8[good].int()).abs()
    # bf16 values of few digits fall on halves often, and the kernel rounds a fused product.
    assert far.max() <= 1 and far.float().mean() < (1e-2 if on.name == "gpu" else 1e-3)
    torch.testing.assert_close(rows_scale[good], scale[good], rtol=3e-7, atol=0)


@over("reference", "interpreter")
def test_tiny_rows_are_zero(on: Implementation) -> None:
    x = torch.full((1, 3, 32), 1e-40)
    x[0, 1] = 1.0
    int8, scale = quantize_rows(x, on.impl)
    assert (int8[0, 0] == 0).all() and (int8[0, 1] == 127).all()
    assert scale.isfinite().all()


@over(
    reference={"bad": [float("nan"), float("inf")], "place": [0, -1]},
    interpreter={"bad": [float("nan"), float("-inf")], "place": [-1]},
    gpu={"bad": [float("nan"), float("inf"), float("-inf")], "place": [0, -1]},
)
def test_a_row_that_is_not_finite_stays_so(on: Implementation, bad: float, place: int) -> None:
    """In x for its token, in a weight for its feature, through a norm too."""
    tokens, channels = (300, 512) if on.name == "gpu" else (4, 1101)
    dtype = BF16 if on.name == "gpu" else FP32
    x, weight = on.randn(1, tokens, channels, dtype=dtype), on.randn(8, channels, dtype=dtype)
    x[0, 1, place], weight[3, place] = bad, bad
    out = int8_linear(x, *quantize_weight(weight, impl=on.impl), impl=on.impl)
    token, feature = torch.arange(tokens) == 1, torch.arange(8) == 3
    expected = token[:, None] | feature
    assert torch.equal(out[0].isnan().cpu(), expected)
    assert torch.equal(norm_modulate_rows(x, impl=on.impl).scale[0].isnan().cpu(), token)


# --- the product ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scales", ["row", "block"])
@pytest.mark.parametrize(
    ("channels", "features"), [(1, 11), (77, 130), (300, 256), (1041, 11), (3000, 140)]
)
def test_a_product_is_exact_but_for_the_rounding_of_its_scales(
    channels: int, features: int, scales: str
) -> None:
    x = torch.randn(2, 9, channels)
    x[0, 3] = 0.0
    int8, scale = quantize_weight(torch.randn(features, channels))
    groups, blocks = -(-channels // 128), -(-features // 128)
    if scales != "row":
        scale = torch.rand(blocks, groups) + 0.1
    rows = scale.repeat_interleave(128, 0)[:features]
    wide = scale[:, None] if scales == "row" else rows.repeat_interleave(128, 1)[:, :channels]
    weight = int8.double() * wide.double()
    x_int8, x_scale = quantized_rows(x)
    bias = torch.randn(features)
    truth = x_int8.double() @ weight.T * x_scale.double().unsqueeze(-1) + bias.double()
    out = int8_linear(x, int8, scale, bias)
    assert relative_l2(out, truth) < 4e-7
    assert torch.equal(out[0, 3], bias)
    for dtype in (FP32, BF16):
        assert torch.equal(dequantized(int8, scale, dtype), weight.float().to(dtype))


def test_a_large_weight_is_dequantised_in_parts() -> None:
    int8, _ = quantize_weight(torch.randn(2500, 140))
    scale = torch.rand(20, 2)
    whole = dequantized(int8, scale, FP32)
    assert torch.equal(dequantized(int8, scale, BF16), whole.bfloat16())


def test_the_largest_products_do_not_overflow() -> None:
    """Every product is 127 * 127: the sum needs all 31 bits."""
    x, weight = torch.ones(1, 1, MAX_CHANNELS), -torch.ones(2, MAX_CHANNELS)
    out = int8_linear(x, *quantize_weight(weight))
    torch.testing.assert_close(out, torch.full((1, 1, 2), -float(MAX_CHANNELS)), rtol=1e-6, atol=0)


@over(
    reference={"dtype": FLOATS, "tokens, channels, features": [(200, 512, 300)]},
    gpu={"dtype": [BF16], "tokens, channels, features": [(4096, 5120, 5120)]},
)
def test_the_error_against_the_exact_linear_is_that_of_int8(
    on: Implementation, dtype: torch.dtype, tokens: int, channels: int, features: int
) -> None:
    """Independent normal values: the largest of 512 is about 3.1 sigma, so a step is 0.025 and its
    rounding error 0.007 of sigma, for both operands: 0.01 together. Of 5120 it is 3.9 sigma."""
    x, weight = (on.randn(n, channels, dtype=dtype) for n in (tokens, features))
    bias = on.randn(features, dtype=dtype)
    out = int8_linear(x.unsqueeze(0), *quantize_weight(weight), bias)
    truth = F.linear(x.double(), weight.double(), bias.double())
    assert out.dtype == dtype
    assert 0.005 < relative_l2(out[0], truth) < (0.012 if channels == 512 else 0.014)


def test_a_loud_row_or_channel_does_not_disturb_its_neighbours() -> None:
    x, weight = torch.randn(1, 50, 256), torch.randn(40, 256)
    x[0, ::7] *= 1e4
    weight[::5] *= 1e4
    out = int8_linear(x, *quantize_weight(weight))
    truth = F.linear(x.double(), weight.double())
    error = (out - truth).norm(dim=-1) / truth.norm(dim=-1)
    assert error.max() < 0.02
    quiet = torch.arange(40) % 5 != 0
    assert relative_l2(out[..., quiet], truth[..., quiet]) < 0.012


def test_gelu_follows_in_fp32_and_the_result_is_rounded_once() -> None:
    x, weight, bias = torch.randn(2, 9, 20), torch.randn(30, 20), torch.randn(30)
    quantised = quantize_weight(weight)
    plain = int8_linear(x, *quantised, bias)
    out = int8_linear(x, *quantised, bias, activation="gelu-tanh", out_dtype=BF16)
    assert torch.equal(out, F.gelu(plain, approximate="tanh").bfloat16())


_CASES = "tokens, channels, features, gelu, bias"


@over(
    interpreter={
        "dtype": [FP32, FP16],
        _CASES: [
            pytest.param(1, 16, 16, False, False, id="one-token"),
            pytest.param(70, 72, 100, False, True, id="nothing-divides"),
            pytest.param(37, 300, 65, True, True, id="gelu-odd"),
        ],
        "scales": ["row", "block"],
    },
    gpu={
        "dtype": FLOATS,
        _CASES: [
            pytest.param(1, 16, 16, False, False, id="one-token"),
            pytest.param(1023, 1536, 1536, False, False, id="small"),
            pytest.param(300, 77, 131, False, True, id="nothing-divides"),
            pytest.param(8190, 1536, 8960, True, True, id="wide-gelu"),
            pytest.param(4095, 8960, 1536, False, True, id="wide"),
            pytest.param(8190, 1544, 1555, False, True, id="wide-odd"),
        ],
        "scales": ["row", "block"],
    },
)
def test_the_kernel_equals_the_emulation(
    on: Implementation, dtype: torch.dtype, tokens: int, channels: int, features: int, gelu: bool,
    bias: bool, scales: str,
) -> None:  # fmt: skip
    """Sums of groups differ by the order of fp32 additions; all integers are equal."""
    x = on.randn(2, tokens, 2 * channels, dtype=dtype)[..., channels:]
    weight, scale = quantize_weight(on.randn(features, channels, dtype=dtype) * channels**-0.5)
    if scales != "row":
        blocks = -(-channels // 128), -(-features // 128)
        scale = (torch.rand(*blocks, device=on.device) + 0.1).t()
        scale = scale / 127 * channels**-0.5
    given: dict[str, Any] = {
        "bias": on.randn(features, dtype=dtype) if bias else None,
        "activation": "gelu-tanh" if gelu else None,
    }
    out = int8_linear(x, weight, scale, impl=on.impl, **given)
    emulated = int8_linear(x, weight, scale, impl="reference", **given)
    assert out.dtype == dtype
    assert relative_l2(out, emulated) < TIGHT[on.name][dtype]


@over(interpreter={"scales": ["row", "block"]})
def test_operands_by_descriptors_give_the_same(
    on: Implementation, scales: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How a Hopper GPU reads them where its own kernel does not serve, with a rest everywhere."""
    x = torch.randn(1, 70, 272)
    weight, scale = quantize_weight(torch.randn(80, 272))
    scale = scale if scales == "row" else torch.rand(1, 3) / 127
    bias = torch.randn(80)
    expected = int8_linear(x, weight, scale, bias, impl="reference")
    monkeypatch.setattr(kernel, "target_of", lambda device: Target("cuda", 90))
    out = torch.empty(1, 70, 80)
    kernel.launch_kernel(out, quantize_rows(x, on.impl), LinearInputs(weight, scale, bias, ""))
    assert relative_l2(out, expected) < TIGHT[on.name][FP32]


# --- a norm that leaves rows ---------------------------------------------------------------------


@over(
    reference={"channels": [1, 77, 1536], "form": ["none", "batch", "token"]},
    interpreter={"channels": [1, 77, 1536], "form": ["none", "token"]},
    gpu={"channels": [77, 1536, 5120], "form": ["batch", "token"]},
)
def test_a_norm_as_rows_is_half_a_step_from_fp64_s(
    on: Implementation, channels: int, form: str
) -> None:
    tokens, dtype = (300, BF16) if on.name == "gpu" else (5, FP32)
    x = (on.randn(2, tokens, channels + 16) * 3 + 1)[..., 8 : channels + 8].to(dtype)
    scale = shift = None
    exact = F.layer_norm(x.double(), (channels,), eps=1e-6)
    if form != "none":
        scale, shift = on.randn(2, 2, 1 if form == "batch" else tokens, channels)
        exact = exact * (1 + scale) + shift
    rows = norm_modulate_rows(x, scale=scale, shift=shift, eps=1e-6, impl=on.impl)
    assert rows.data.shape[2] % 16 == 0 and (rows.data[..., channels:] == 0).all()
    back = rows.data[..., :channels].double() * rows.scale[..., None]
    assert ((back - exact).abs() <= 0.501 * rows.scale[..., None]).all()
    if channels > 1:  # the norm of one channel is 0
        expected = exact.abs().amax(-1) / 127
        torch.testing.assert_close(rows.scale.double(), expected, rtol=1e-5, atol=0)


def test_a_linear_of_rows_is_that_of_the_norm() -> None:
    """Also of rows that do not lie densely."""
    x, weight = torch.randn(2, 9, 77) * 3 + 1, quantize_weight(torch.randn(11, 77))
    scale, shift = torch.randn(2, 1, 77), torch.randn(2, 9, 77)
    rows = norm_modulate_rows(x, scale=scale, shift=shift)
    normed = norm_modulate(x, scale=scale, shift=shift)
    out = int8_linear(rows, *weight, activation="gelu-tanh", out_dtype=FP32)
    assert torch.equal(out, int8_linear(normed, *weight, activation="gelu-tanh"))
    part = Int8Tensor(rows.data[:, :4], rows.scale[:, :4])
    made = int8_linear(part, *weight, activation="gelu-tanh", out_dtype=FP32)
    assert torch.equal(made, out[:, :4])


# --- elements that are compared ------------------------------------------------------------------


@over("interpreter", "gpu")
def test_the_elements_of_weights_are_those_that_torch_reads(on: Implementation) -> None:
    for dtype in (FP32, FP16, BF16, torch.float8_e4m3fn, torch.float64):
        wide = on.randn(300, 200).to(dtype)
        weights = [wide, wide[7:], wide.t(), wide[:, 3:90], wide[:3, :5], wide.t()[:40], wide[:1]]
        made, expected = (Samples(weights, impl).read(weights) for impl in (on.impl, "reference"))
        assert made.shape == (7, SAMPLES) and torch.equal(made, expected)


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
