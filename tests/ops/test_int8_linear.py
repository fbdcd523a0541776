"""The int8 linear in plain torch: exact integers, its error against fp64, gradients, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.measures import relative_l2
from turbo_rcm_patch import errors
from turbo_rcm_patch.ops import (
    MAX_CHANNELS,
    Rows,
    int8_linear,
    norm_modulate,
    norm_modulate_rows,
    quantize_weight,
)
from turbo_rcm_patch.ops.elementwise import rows_forward
from turbo_rcm_patch.ops.int8_linear import linear_forward, rows_linear_forward
from turbo_rcm_patch.ops.quantize import quantize_weights, quantized_rows

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


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


@pytest.mark.parametrize("channels", [1, 77, 1040, 1041, 3000])
def test_integers_are_exact(channels: int) -> None:
    x, weight = torch.randn(2, 9, channels), torch.randn(11, channels)
    x[0, 3], weight[4] = 0.0, 0.0
    (x_int, x_scale), (w_int, w_scale) = quantized_rows(x), quantize_weight(weight)
    truth = (x_int.long() @ w_int.long().T) * x_scale.double().unsqueeze(-1) * w_scale.double()
    out = int8_linear(x, w_int, w_scale)
    assert relative_l2(out, truth) < 2e-7
    assert (out[0, 3] == 0).all() and (out[..., 4] == 0).all()


def test_largest_products_do_not_overflow() -> None:
    """Every product is 127 * 127: the sum needs all 31 bits."""
    channels = MAX_CHANNELS
    x, weight = torch.ones(1, 1, channels), -torch.ones(2, channels)
    out = int8_linear(x, *quantize_weight(weight))
    torch.testing.assert_close(out, torch.full((1, 1, 2), -float(channels)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_error_against_the_exact_linear(dtype: torch.dtype) -> None:
    """Independent normal values: the largest of 512 is about 3.1 sigma, so a step is 0.025 and its
    rounding error 0.007 of sigma, for both operands: 0.01 together."""
    x, weight = torch.randn(1, 200, 512).to(dtype), torch.randn(300, 512).to(dtype)
    bias = torch.randn(300).to(dtype)
    out = int8_linear(x, *quantize_weight(weight), bias)
    truth = F.linear(x.double(), weight.double(), bias.double())
    assert 0.005 < relative_l2(out, truth) < 0.012


def test_a_loud_row_or_channel_does_not_disturb_its_neighbours() -> None:
    x, weight = torch.randn(1, 50, 256), torch.randn(40, 256)
    x[0, ::7] *= 1e4
    weight[::5] *= 1e4
    out = int8_linear(x, *quantize_weight(weight))
    truth = F.linear(x.double(), weight.double())
    error = (out - truth).norm(dim=-1) / truth.norm(dim=-1)
    assert error.max() < 0.02
    quiet = torch.ones(40, dtype=torch.bool)
    quiet[::5] = False
    assert relative_l2(out[..., quiet], truth[..., quiet]) < 0.012


def test_several_weights_are_one() -> None:
    x, weights = torch.randn(2, 5, 33), [torch.randn(n, 33) for n in (8, 3)]
    together = int8_linear(x, *quantize_weight(*weights))
    apart = [int8_linear(x, *quantize_weight(weight)) for weight in weights]
    assert torch.equal(together, torch.cat(apart, -1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_a_row_that_is_not_finite_stays_so(bad: float) -> None:
    x, weight = torch.randn(1, 4, 32), torch.randn(8, 32)
    x[0, 2, 5] = bad
    out = int8_linear(x, *quantize_weight(weight))
    assert out.isnan().all(-1).tolist() == [[False, False, True, False]]
    weight[3, 1] = bad
    out = int8_linear(x[:, :1], *quantize_weight(weight))
    assert out.isnan()[0, 0].tolist() == [i == 3 for i in range(8)]


def test_tiny_rows_are_zero() -> None:
    int8, scale = quantized_rows(torch.full((2, 3), 1e-40))
    assert (int8 == 0).all() and scale.isfinite().all()


@pytest.mark.parametrize("cast", ["fp32", "model"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_epilogue(dtype: torch.dtype, cast: str) -> None:
    x, weight, bias = torch.randn(2, 9, 20), torch.randn(30, 20), torch.randn(30)
    residual, gate = torch.randn(2, 9, 30).to(dtype), torch.randn(2, 1, 30)
    quantised = quantize_weight(weight)
    plain = int8_linear(x, *quantised, bias)
    out = int8_linear(
        x, *quantised, bias, activation="gelu-tanh", residual=residual, c_skip=0.5, c_out=gate,
        cast=cast, out_dtype=dtype,
    )  # fmt: skip
    branch = F.gelu(plain, approximate="tanh")
    if cast == "fp32":
        expected = (0.5 * residual.float() + gate * branch).to(dtype)
    else:
        expected = residual * 0.5 + branch.to(dtype) * gate.to(dtype)
    assert torch.equal(out, expected)


def arguments(**more: object) -> tuple[object, ...]:
    weight, scale = quantize_weight(torch.randn(24, 16))
    given: dict[str, object] = {
        "x": torch.randn(2, 5, 16).requires_grad_(),
        "weight": weight,
        "scale": scale,
        "bias": torch.randn(24).requires_grad_(),
        "residual": torch.randn(2, 5, 24).requires_grad_(),
        "c_skip": None,
        "c_out": torch.randn(2, 1, 24).requires_grad_(),
        "c_skip_value": 0.5,
        "c_out_value": 1.0,
        "activation": "gelu-tanh",
        "cast": "fp32",
        "impl": "reference",
        "out_dtype": torch.float32,
    }
    return tuple((given | more).values())


@pytest.mark.parametrize(
    "more",
    [{}, {"bias": None, "residual": None, "c_out": None, "activation": ""}],
    ids=["everything", "plain"],
)
def test_opcheck(more: dict[str, object]) -> None:
    torch.library.opcheck(linear_forward.registered, arguments(**more))
    torch.library.opcheck(
        quantize_weights.registered, ([torch.randn(6, 10), torch.randn(2, 10)], "reference")
    )


@pytest.mark.parametrize("activation", [None, "gelu-tanh"])
def test_gradients_are_those_of_the_dequantised_linear(activation: str | None) -> None:
    x = torch.randn(2, 9, 64).requires_grad_()
    weight, scale = quantize_weight(torch.randn(30, 64) * 0.2)
    bias = torch.randn(30).requires_grad_()
    residual = torch.randn(2, 9, 30).requires_grad_()
    c_skip, c_out = torch.randn(2).requires_grad_(), torch.randn(2, 1, 30).requires_grad_()
    inputs, weights = (x, bias, residual, c_skip, c_out), torch.randn(2, 9, 30)
    out = int8_linear(
        x, weight, scale, bias,
        activation=activation, residual=residual, c_skip=c_skip, c_out=c_out,
    )  # fmt: skip
    branch = F.linear(x, weight * scale[:, None], bias)
    branch = F.gelu(branch, approximate="tanh") if activation else branch
    expected = c_skip.view(-1, 1, 1) * residual + c_out * branch
    got = torch.autograd.grad((out * weights).sum(), inputs)
    want = torch.autograd.grad((expected * weights).sum(), inputs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-4)


def test_compiles_without_a_break() -> None:
    weight, residual = torch.randn(24, 16), torch.randn(2, 5, 24)

    def block(x: torch.Tensor) -> torch.Tensor:
        return int8_linear(x * 2, *quantize_weight(weight), residual=residual)

    x = torch.randn(2, 5, 16)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), block(x))


def test_refusals() -> None:
    x = torch.zeros(1, 4, 8)
    weight, scale = quantize_weight(torch.randn(6, 8))
    with pytest.raises(errors.DTypeError, match="quantize_weight"):
        int8_linear(x, weight.float(), scale)
    with pytest.raises(errors.DTypeError):
        int8_linear(x.double(), weight, scale)
    with pytest.raises(errors.DTypeError):
        int8_linear(x, weight, scale.half())
    with pytest.raises(errors.ShapeError):
        int8_linear(x[0], weight, scale)
    with pytest.raises(errors.ShapeError):
        int8_linear(x, weight[:, :7], scale)
    with pytest.raises(errors.ShapeError):
        int8_linear(x, weight, scale[:5])
    with pytest.raises(errors.ShapeError):
        int8_linear(x, weight, scale, torch.zeros(5))
    with pytest.raises(errors.ShapeError):
        int8_linear(x, weight, scale, residual=torch.zeros(1, 4, 7))
    with pytest.raises(errors.ConfigError, match="gelu-tanh"):
        int8_linear(x, weight, scale, activation="relu")
    with pytest.raises(errors.ConfigError):
        int8_linear(x, weight, scale, cast="fp16")
    with pytest.raises(errors.GradientError, match="Train with the Linear"):
        int8_linear(x, weight, scale.clone().requires_grad_())
    with pytest.raises(errors.GradientError):
        int8_linear(x, weight, scale, c_skip=torch.zeros(1).requires_grad_())
    with pytest.raises(errors.ShapeError):
        quantize_weight(torch.zeros(3))
    with pytest.raises(errors.ShapeError):
        quantize_weight(torch.zeros(3, 4), torch.zeros(3, 5))
    with pytest.raises(errors.DTypeError):
        quantize_weight(torch.zeros(3, 3).double())
    with pytest.raises(errors.ShapeError, match=str(MAX_CHANNELS)):
        quantize_weight(torch.zeros(1, MAX_CHANNELS + 1))


@pytest.mark.parametrize("channels", [32, 77])
@pytest.mark.parametrize("form", ["modulation", "affine"])
def test_a_norm_as_rows_is_the_norm_quantised(channels: int, form: Any) -> None:
    x, weight = torch.randn(2, 9, channels) * 3 + 1, torch.randn(11, channels)
    scale, shift = torch.randn(2, 1, channels), torch.randn(2, 9, channels)
    rows = norm_modulate_rows(x, scale=scale, shift=shift, form=form)
    normed = norm_modulate(x, scale=scale, shift=shift, form=form)
    int8, row_scale = quantized_rows(normed)
    assert rows.int8.shape[2] % 16 == 0 and not rows.int8[..., channels:].any()
    assert torch.equal(rows.int8[..., :channels], int8)
    assert torch.equal(rows.scale, row_scale)
    residual, gate = torch.randn(2, 9, 11), torch.randn(2, 1, 11)
    quantised = quantize_weight(weight)
    more = {"activation": "gelu-tanh", "residual": residual, "c_out": gate}
    out = int8_linear(rows, *quantised, out_dtype=torch.float32, **more)
    assert torch.equal(out, int8_linear(normed, *quantised, **more))


def test_rows_of_bf16_are_not_rounded_on_the_way() -> None:
    x = torch.randn(1, 200, 512, dtype=torch.bfloat16)
    exact = F.layer_norm(x.double(), (512,), eps=1e-6)
    rows = norm_modulate_rows(x)
    back = rows.int8.double() * rows.scale.unsqueeze(-1)
    assert ((back - exact).abs() <= 0.5005 * rows.scale.unsqueeze(-1)).all()


def test_opcheck_of_rows() -> None:
    x, part = torch.randn(2, 5, 33), torch.randn(2, 1, 33)
    torch.library.opcheck(rows_forward.registered, (x, part, None, 1.0, 1e-6, "reference"))
    rows, weight = norm_modulate_rows(x, scale=part), quantize_weight(torch.randn(7, 33))
    rest = (None, None, None, None, 1.0, 1.0, "", "fp32", "reference", torch.bfloat16)
    torch.library.opcheck(rows_linear_forward.registered, (*rows, *weight, *rest))


def test_refusals_of_rows() -> None:
    x, weight = torch.randn(1, 4, 33), quantize_weight(torch.randn(7, 33))
    rows = norm_modulate_rows(x)
    dtype = torch.float32
    with pytest.raises(errors.ConfigError, match="out_dtype"):
        int8_linear(rows, *weight)
    with pytest.raises(errors.ShapeError, match="weight_int8"):
        int8_linear(rows, *quantize_weight(torch.randn(7, 65)), out_dtype=dtype)
    with pytest.raises(errors.ShapeError, match="scale"):
        int8_linear(Rows(rows.int8, rows.scale[:, :2]), *weight, out_dtype=dtype)
    with pytest.raises(errors.DTypeError, match="int8"):
        int8_linear(Rows(rows.int8.float(), rows.scale), *weight, out_dtype=dtype)
    with pytest.raises(errors.GradientError, match="norm_modulate_rows"):
        norm_modulate_rows(x.requires_grad_())
    residual = torch.randn(1, 4, 7, requires_grad=True)
    with pytest.raises(errors.GradientError, match="rows"):
        int8_linear(rows, *weight, residual=residual, out_dtype=dtype)


def test_strided_rows_are_made_dense() -> None:
    whole, weight = norm_modulate_rows(torch.randn(2, 8, 32)), quantize_weight(torch.randn(5, 32))
    part = Rows(whole.int8[:, :4], whole.scale[:, :4])
    dense = Rows(part.int8.contiguous(), part.scale.contiguous())
    one, other = (int8_linear(x, *weight, out_dtype=torch.float32) for x in (part, dense))
    assert torch.equal(one, other)


# --- scales of a checkpoint: for groups of channels, or for blocks


@pytest.mark.parametrize(("channels", "features"), [(128, 64), (77, 130), (300, 256), (513, 100)])
def test_a_scale_for_every_128_channels(channels: int, features: int) -> None:
    x = torch.randn(2, 9, channels)
    int8, _ = quantize_weight(torch.randn(features, channels))
    scale = torch.rand(features, -(-channels // 128)) + 0.1
    rows = quantize_weight(x.reshape(-1, channels))
    wide = scale.double().repeat_interleave(128, 1)[:, :channels] * int8
    truth = (rows[0].double() @ wide.T) * rows[1].double().unsqueeze(1)
    bias = torch.randn(features)
    out = int8_linear(x, int8, scale, bias)
    assert relative_l2(out, truth.reshape(2, 9, features) + bias.double()) < 4e-7


def test_equal_scales_are_a_scale_per_row() -> None:
    x, (int8, scale) = torch.randn(1, 5, 384), quantize_weight(torch.randn(40, 384))
    grouped = int8_linear(x, int8, scale.unsqueeze(1).expand(40, 3))
    torch.testing.assert_close(grouped, int8_linear(x, int8, scale), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("channels", "features"), [(128, 64), (77, 130), (300, 256), (513, 300)])
def test_scales_of_blocks_are_those_of_their_rows(channels: int, features: int) -> None:
    x, int8 = torch.randn(2, 9, channels), quantize_weight(torch.randn(features, channels))[0]
    scale = torch.rand(-(-features // 128), -(-channels // 128)) + 0.1
    rows = torch.stack([scale[i // 128] for i in range(features)])
    assert torch.equal(int8_linear(x, int8, scale), int8_linear(x, int8, rows))


@pytest.mark.parametrize("blocks", [False, True])
def test_gradients_go_through_groups(blocks: bool) -> None:
    x = torch.randn(1, 5, 200, requires_grad=True)
    int8, _ = quantize_weight(torch.randn(40, 200))
    scale = torch.rand(1 if blocks else 40, 2)
    int8_linear(x, int8, scale, activation="gelu-tanh").sum().backward()
    twin = x.detach().clone().requires_grad_()
    wide = int8 * scale.expand(40, 2).repeat_interleave(128, 1)[:, :200]
    F.gelu(twin @ wide.T, approximate="tanh").sum().backward()
    assert x.grad is not None and twin.grad is not None
    torch.testing.assert_close(x.grad, twin.grad)


def test_other_numbers_of_scales_are_refused() -> None:
    int8, _ = quantize_weight(torch.randn(40, 200))
    for shape in ((40, 1), (40, 3), (2, 2), (39,)):
        with pytest.raises(errors.ShapeError, match=r"\[40\], \[40, 2\] or \[1, 2\]"):
            int8_linear(torch.randn(1, 5, 200), int8, torch.ones(shape))
