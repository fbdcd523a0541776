"""The int8 linear: exact integers, its error against fp64, gradients, refusals; the kernels
against the emulation.

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

from tests.implementations import Implementation, coefficient, over
from tests.measures import relative_l2
from turbo_rcm_patch import errors
from turbo_rcm_patch.kernels.launch import Target, Tile
from turbo_rcm_patch.kernels.portable import int8_linear as kernel
from turbo_rcm_patch.kernels.portable.rows import quantize_rows
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
    interpreter={"dtype": [FP32, FP16], "channels": [1, 16, 77, 130, 1536, 2100]},
    gpu={"dtype": FLOATS, "channels": [1, 77, 1536, 5120, 8960, 13824, 40000]},
)
def test_the_kernel_s_rows_are_those_of_the_reference(
    on: Implementation, dtype: torch.dtype, channels: int
) -> None:
    tokens = 37 if on.name == "gpu" else 5
    x = on.randn(2, tokens, channels + 16, dtype=dtype)[..., 8 : channels + 8]
    x[1, 2], x[0, 4, channels // 2] = 0.0, float("nan")
    rows = quantize_rows(x)
    int8, scale = quantized_rows(x)
    good = ~scale.isnan()
    assert torch.equal(rows.scale.isnan(), ~good)
    assert rows.int8.shape[2] % 16 == 0 and (rows.int8[..., channels:] == 0).all()
    far = (rows.int8[..., :channels][good].int() - int8[good].int()).abs()
    # bf16 values of few digits fall on halves often, and the kernel rounds a fused product.
    assert far.max() <= 1 and far.float().mean() < (1e-2 if on.name == "gpu" else 1e-3)
    torch.testing.assert_close(rows.scale[good], scale[good], rtol=3e-7, atol=0)


@over("reference", "interpreter")
def test_tiny_rows_are_zero(on: Implementation) -> None:
    x = torch.full((1, 3, 32), 1e-40)
    x[0, 1] = 1.0
    int8, scale = quantized_rows(x) if on.impl == "reference" else quantize_rows(x)
    assert (int8[0, 0] == 0).all() and (int8[0, 1] == 127).all()
    assert scale.isfinite().all()


# --- the product ---------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 77, 1040, 1041, 3000])
def test_a_product_is_exact_but_for_the_rounding_of_its_scales(channels: int) -> None:
    x, weight = torch.randn(2, 9, channels), torch.randn(11, channels)
    x[0, 3], weight[4] = 0.0, 0.0
    (x_int, x_scale), (w_int, w_scale) = quantized_rows(x), quantize_weight(weight)
    truth = (x_int.long() @ w_int.long().T) * x_scale.double().unsqueeze(-1) * w_scale.double()
    out = int8_linear(x, w_int, w_scale)
    assert relative_l2(out, truth) < 2e-7
    assert (out[0, 3] == 0).all() and (out[..., 4] == 0).all()


_CASES = "batch, tokens, channels, features, options"


@over(
    interpreter={
        "dtype": [FP32, FP16],
        _CASES: [
            pytest.param(1, 1, 16, 16, {}, id="one-token"),
            pytest.param(2, 70, 72, 100, {"bias": True}, id="nothing-divides"),
            pytest.param(1, 65, 257, 65, {"bias": True, "gelu": True}, id="gelu-odd-channels"),
            pytest.param(2, 37, 384, 128, {"skip": "float"}, id="skip-float"),
            pytest.param(2, 37, 130, 96, {"skip": "batch", "bias": True}, id="skip-per-batch"),
            pytest.param(
                2, 70, 128, 130, {"skip": "channel", "bias": True}, id="skip-per-channel"
            ),
            pytest.param(
                2, 70, 64, 70, {"skip": "token", "cast": "model", "gelu": True}, id="model-cast"
            ),
        ],
    },
    gpu={
        "dtype": FLOATS,
        _CASES: [
            pytest.param(1, 1, 16, 16, {}, id="one-token"),
            pytest.param(2, 1023, 1536, 1536, {}, id="small"),
            pytest.param(2, 300, 77, 131, {"bias": True}, id="nothing-divides"),
            pytest.param(1, 8190, 1536, 8960, {"bias": True, "gelu": True}, id="wide-gelu"),
            pytest.param(2, 4095, 8960, 1536, {"bias": True, "skip": "channel"}, id="wide-skip"),
            pytest.param(1, 8190, 1536, 1536, {"skip": "token"}, id="wide-skip-per-token"),
            pytest.param(
                1, 8190, 1536, 1536, {"skip": "float", "cast": "model"}, id="wide-model-cast"
            ),
            pytest.param(1, 8190, 1544, 1555, {"skip": "batch", "bias": True}, id="wide-odd"),
        ],
    },
)
def test_the_kernel_equals_the_emulation(
    on: Implementation, dtype: torch.dtype, batch: int, tokens: int, channels: int, features: int,
    options: dict[str, Any],
) -> None:  # fmt: skip
    x = on.randn(batch, tokens, 2 * channels, dtype=dtype)[..., channels:]
    weight, scale = quantize_weight(on.randn(features, channels, dtype=dtype) * channels**-0.5)
    form = options.get("skip")
    c = coefficient(on, form, (batch, tokens, features)) if form else 1.0
    given = {
        "bias": on.randn(features, dtype=dtype) if "bias" in options else None,
        "activation": "gelu-tanh" if "gelu" in options else None,
        "residual": on.randn(batch, tokens, features, dtype=dtype) if form else None,
        "c_skip": c,
        "c_out": c,
        "cast": options.get("cast", "fp32"),
    }
    out = int8_linear(x, weight, scale, impl=on.impl, **given)
    emulated = int8_linear(x, weight, scale, impl="reference", **given)
    assert out.dtype == dtype
    steps = 3 if on.name == "gpu" and given["cast"] == "model" else 1  # every step rounds
    assert relative_l2(out, emulated) < steps * TIGHT[on.name][dtype]


@over(
    interpreter={
        "persistent, epilogue_subtile": [
            pytest.param(False, False, id="a-tile-a-program"),
            pytest.param(True, True, id="persistent-halves"),
            pytest.param(True, False, id="persistent"),
        ]
    }
)
def test_descriptors_and_persistent_programs_give_the_same(
    on: Implementation, persistent: bool, epilogue_subtile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs on Hopper, with tiles that leave a rest everywhere: 15 tiles for 4 programs."""
    made = described(monkeypatch)
    x, residual = torch.randn(1, 70, 144), torch.randn(1, 70, 80)
    weight, scale = quantize_weight(torch.randn(80, 144))
    bias, gate = torch.randn(80), torch.randn(1, 1, 80)
    out = kernel.int8_linear(
        quantize_rows(x), weight, scale, bias, residual, 1.0, gate,
        gelu=False, cast="fp32", out_dtype=FP32,
        tile=Tile(16, 32, 4, 2), block_k=64, persistent=persistent,
        epilogue_subtile=epilogue_subtile,
    )  # fmt: skip
    assert made == [[16, 64], [32, 64]]
    expected = int8_linear(x, weight, scale, bias, residual=residual, c_out=gate, impl="reference")
    assert relative_l2(out, expected) < TIGHT[on.name][FP32]


def described(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Let the kernel take its operands as on Hopper, by descriptors; the blocks of those made."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    made = []

    def describing(x: torch.Tensor, block: list[int]) -> TensorDescriptor:
        made.append(block)
        return TensorDescriptor.from_tensor(x, block)

    monkeypatch.setattr(kernel, "target_of", lambda device: Target("cuda", 90))
    monkeypatch.setattr(kernel, "descriptor", describing)
    return made


def test_the_largest_products_do_not_overflow() -> None:
    """Every product is 127 * 127: the sum needs all 31 bits."""
    channels = MAX_CHANNELS
    x, weight = torch.ones(1, 1, channels), -torch.ones(2, channels)
    out = int8_linear(x, *quantize_weight(weight))
    torch.testing.assert_close(out, torch.full((1, 1, 2), -float(channels)), rtol=1e-6, atol=0)


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
    assert 0.005 < relative_l2(out[0], truth) < (0.012 if channels == 512 else 0.014)


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


@over("reference", "interpreter")
def test_several_weights_together_are_those_apart(on: Implementation) -> None:
    x, weights = torch.randn(2, 5, 33), [torch.randn(n, 33) for n in (8, 3)]
    together = quantize_weight(*weights, impl=on.impl)
    apart = [quantize_weight(weight, impl=on.impl) for weight in weights]
    for whole, parts in zip(together, zip(*apart, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(parts))
    outs = [int8_linear(x, *weight, impl=on.impl) for weight in apart]
    assert torch.equal(int8_linear(x, *together, impl=on.impl), torch.cat(outs, -1))


_BAD = {
    "bad": [float("nan"), float("inf"), float("-inf")],
    "place": [pytest.param(0, id="first-channel"), pytest.param(-1, id="last-channel")],
}


@over(reference=_BAD, interpreter=_BAD, gpu=_BAD)
def test_a_row_that_is_not_finite_stays_so(on: Implementation, bad: float, place: int) -> None:
    tokens, channels = (300, 512) if on.name == "gpu" else (4, 1101)
    dtype = BF16 if on.name == "gpu" else FP32
    x = on.randn(1, tokens, channels, dtype=dtype)
    x[0, 1, place] = bad
    _, scale = quantized_rows(x) if on.impl == "reference" else quantize_rows(x)
    expected = [i == 1 for i in range(tokens)]
    assert scale[0].isnan().tolist() == expected
    weight = quantize_weight(on.randn(8, channels, dtype=dtype), impl=on.impl)
    out = int8_linear(x, *weight, impl=on.impl)
    assert out[0].isnan().all(-1).tolist() == out[0].isnan().any(-1).tolist() == expected


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_a_weight_that_is_not_finite_spoils_its_own_feature_alone(bad: float) -> None:
    x, weight = torch.randn(1, 4, 32), torch.randn(8, 32)
    weight[3, 1] = bad
    out = int8_linear(x, *quantize_weight(weight))
    assert out.isnan().all(1).tolist() == [[i == 3 for i in range(8)]]


@pytest.mark.parametrize("cast", ["fp32", "model"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_epilogue_follows_the_cast_policy(dtype: torch.dtype, cast: str) -> None:
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
def test_the_registrations_pass_opcheck(more: dict[str, object]) -> None:
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


def test_wrong_arguments_are_refused() -> None:
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


# --- a norm that leaves rows ---------------------------------------------------------------------


_NORMS = {"channels": [1, 77, 130, 1536], "form": ["none", "batch", "token"]}


@over(
    reference=_NORMS,
    interpreter=_NORMS,
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
    assert rows.int8.shape[2] % 16 == 0 and (rows.int8[..., channels:] == 0).all()
    back = rows.int8[..., :channels].double() * rows.scale[..., None]
    assert ((back - exact).abs() <= 0.501 * rows.scale[..., None]).all()
    if channels > 1:  # the norm of one channel is 0
        expected = exact.abs().amax(-1) / 127
        torch.testing.assert_close(rows.scale.double(), expected, rtol=1e-5, atol=0)


@over("reference", "interpreter")
def test_a_norm_that_is_not_finite_stays_so(on: Implementation) -> None:
    x = torch.randn(1, 4, 1101)
    x[0, 1, 1100], x[0, 3, 0] = float("inf"), float("nan")
    scale = norm_modulate_rows(x, eps=1e-6, impl=on.impl).scale
    assert scale.isnan().tolist() == [[False, True, False, True]]


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


def test_the_registrations_of_rows_pass_opcheck() -> None:
    x, part = torch.randn(2, 5, 33), torch.randn(2, 1, 33)
    torch.library.opcheck(rows_forward.registered, (x, part, None, 1.0, 1e-6, "reference"))
    rows, weight = norm_modulate_rows(x, scale=part), quantize_weight(torch.randn(7, 33))
    rest = (None, None, None, None, 1.0, 1.0, "", "fp32", "reference", torch.bfloat16)
    torch.library.opcheck(rows_linear_forward.registered, (*rows, *weight, *rest))


def test_wrong_rows_are_refused() -> None:
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
def test_with_a_scale_for_every_128_channels_a_product_is_exact_too(
    channels: int, features: int
) -> None:
    x = torch.randn(2, 9, channels)
    int8, _ = quantize_weight(torch.randn(features, channels))
    scale = torch.rand(features, -(-channels // 128)) + 0.1
    rows = quantize_weight(x.reshape(-1, channels))
    wide = scale.double().repeat_interleave(128, 1)[:, :channels] * int8
    truth = (rows[0].double() @ wide.T) * rows[1].double().unsqueeze(1)
    bias = torch.randn(features)
    out = int8_linear(x, int8, scale, bias)
    assert relative_l2(out, truth.reshape(2, 9, features) + bias.double()) < 4e-7


_GROUPS = "tokens, channels, features, gelu"


@over(
    interpreter={
        "dtype": [FP32, FP16],
        _GROUPS: [(37, 77, 100, False), (37, 300, 65, True), (37, 384, 130, False)],
        "blocks": [pytest.param(False, id="a-row"), pytest.param(True, id="128-rows")],
    },
    gpu={
        "dtype": FLOATS,
        _GROUPS: [
            (1, 128, 16, False), (300, 77, 131, False), (1023, 1536, 1536, False),
            (8190, 1536, 8960, False), (4095, 8960, 1555, False),
        ],
        "blocks": [pytest.param(False, id="a-row"), pytest.param(True, id="128-rows")],
    },
)  # fmt: skip
def test_the_kernel_with_a_scale_for_every_128_channels_equals_the_emulation(
    on: Implementation, dtype: torch.dtype, tokens: int, channels: int, features: int, gelu: bool,
    blocks: bool,
) -> None:  # fmt: skip
    """Sums of groups differ by the order of fp32 additions; all integers are equal."""
    x = on.randn(2, tokens, channels, dtype=dtype)
    weight, _ = quantize_weight(on.randn(features, channels, dtype=dtype))
    rows = -(-features // 128) if blocks else features
    scale = (torch.rand(-(-channels // 128), rows, device=on.device) + 0.1).t()
    scale = scale / 127 * channels**-0.5
    given = {
        "bias": on.randn(features, dtype=dtype),
        "activation": "gelu-tanh" if gelu else None,
        "residual": on.randn(2, tokens, features, dtype=dtype),
        "c_out": on.randn(2, 1, features),
    }
    out = int8_linear(x, weight, scale, impl=on.impl, **given)
    emulated = int8_linear(x, weight, scale, impl="reference", **given)
    assert relative_l2(out, emulated) < TIGHT[on.name][dtype]


@over("interpreter")
def test_groups_through_descriptors_equal_the_emulation(
    on: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scale per row and group stays with the portable kernel on Hopper, however large the
    product, and a step over K is a group whatever a tuner asks for."""
    described(monkeypatch)
    monkeypatch.setattr(kernel, "WIDE", 1)
    x, (weight, _) = torch.randn(1, 70, 272), quantize_weight(torch.randn(80, 272))
    scale = torch.rand(80, 3) / 127
    expected = int8_linear(x, weight, scale, impl="reference")
    for more in ({}, {"tile": Tile(16, 32, 4, 2), "block_k": 64}):
        out = kernel.int8_linear(
            quantize_rows(x), weight, scale, None, None, 1.0, 1.0,
            gelu=False, cast="fp32", out_dtype=FP32, **more,
        )  # fmt: skip
        assert relative_l2(out, expected) < TIGHT[on.name][FP32]


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


@pytest.mark.parametrize("blocks", [False, True], ids=["a-row", "128-rows"])
def test_gradients_go_through_groups_of_scales(blocks: bool) -> None:
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
