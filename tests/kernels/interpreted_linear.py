"""int8 rows and linears in Triton's interpreter; run by test_interpreter.py.

Tolerance, kernels against the emulation: the integers are equal but where a product falls on a
half (the kernel may fuse the multiplication with the rounding), scales differ by a last bit, and
so do bias and activation. 2e-6 in fp32 holds that apart from any wrong scale, column or mask.
"""

from __future__ import annotations

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.measures import relative_l2
from turbo_rcm_patch.kernels.launch import Target, Tile
from turbo_rcm_patch.kernels.portable import int8_linear as kernel
from turbo_rcm_patch.kernels.portable.norm import norm_modulate_rows
from turbo_rcm_patch.kernels.portable.rows import quantize_rows
from turbo_rcm_patch.ops import int8_linear, quantize_weight
from turbo_rcm_patch.ops.quantize import quantized_rows

TIGHT = {torch.float32: 2e-6, torch.float16: 4e-4}

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("channels", [1, 16, 77, 130, 1536, 2100], ids=lambda k: f"k{k}")
def test_rows(channels: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, 5, channels + 8).to(dtype)[..., 4 : channels + 4]
    x[1, 2] = 0.0
    rows = quantize_rows(x)
    int8, scale = quantized_rows(x)
    assert rows.int8.shape[2] % 16 == 0
    assert (rows.int8[..., channels:] == 0).all()
    far = (rows.int8[..., :channels].int() - int8.int()).abs()
    assert far.max() <= 1 and far.float().mean() < 1e-3
    torch.testing.assert_close(rows.scale, scale, rtol=3e-7, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("place", [0, 1100], ids=["first-channels", "last-channels"])
def test_a_row_that_is_not_finite_stays_so(bad: float, place: int) -> None:
    x = torch.randn(1, 4, 1101)
    x[0, 1, place] = bad
    scale = quantize_rows(x).scale
    assert scale.isnan().tolist() == [[False, True, False, False]]
    weight = quantize_weight(torch.randn(8, 1101), impl="triton")
    out = int8_linear(x, *weight, impl="triton")
    assert out.isnan().all(-1).tolist() == [[False, True, False, False]]


def test_several_weights_are_one() -> None:
    weights = [torch.randn(n, 40) for n in (5, 12)]
    int8, scale = quantize_weight(*weights, impl="triton")
    apart = [quantize_weight(weight, impl="triton") for weight in weights]
    assert torch.equal(int8, torch.cat([part[0] for part in apart]))
    assert torch.equal(scale, torch.cat([part[1] for part in apart]))


def test_tiny_rows_are_zero() -> None:
    x = torch.full((1, 3, 32), 1e-40)
    x[0, 1] = 1.0
    rows = quantize_rows(x)
    assert (rows.int8[0, 0] == 0).all() and (rows.int8[0, 1] == 127).all()
    assert rows.scale.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(
    ("batch", "tokens", "channels", "features", "options"),
    [
        pytest.param(1, 1, 16, 16, {}, id="one-token"),
        pytest.param(2, 70, 72, 100, {"bias": True}, id="nothing-divides"),
        pytest.param(1, 65, 257, 65, {"bias": True, "gelu": True}, id="gelu-odd-channels"),
        pytest.param(2, 37, 384, 128, {"skip": "float"}, id="skip-float"),
        pytest.param(2, 37, 130, 96, {"skip": "batch", "bias": True}, id="skip-per-batch"),
        pytest.param(2, 70, 128, 130, {"skip": "channel", "bias": True}, id="skip-per-channel"),
        pytest.param(
            2, 70, 64, 70, {"skip": "element", "cast": "model", "gelu": True}, id="model-cast"
        ),
    ],
)
def test_linear(
    batch: int, tokens: int, channels: int, features: int, options: dict, dtype: torch.dtype
) -> None:
    x = torch.randn(batch, tokens, 2 * channels).to(dtype)[..., channels:]
    weight, scale = quantize_weight(torch.randn(features, channels) * channels**-0.5)
    shape = {"batch": (batch,), "channel": (batch, 1, features), "element": (batch, tokens, 1)}
    form = options.get("skip")
    c = 0.3 if form == "float" else torch.randn(shape[form]) if form else 1.0
    arguments = {
        "bias": torch.randn(features).to(dtype) if "bias" in options else None,
        "activation": "gelu-tanh" if "gelu" in options else None,
        "residual": torch.randn(batch, tokens, features).to(dtype) if form else None,
        "c_skip": c if form else 1.0,
        "c_out": c,
        "cast": options.get("cast", "fp32"),
    }
    out = int8_linear(x, weight, scale, impl="triton", **arguments)
    emulated = int8_linear(x, weight, scale, impl="reference", **arguments)
    assert out.dtype == dtype
    assert relative_l2(out, emulated) < TIGHT[dtype]


@pytest.mark.parametrize(
    ("persistent", "epilogue_subtile"), [(False, False), (True, True), (True, False)], ids=str
)
def test_descriptors_and_persistent_programs(
    monkeypatch: pytest.MonkeyPatch, persistent: bool, epilogue_subtile: bool
) -> None:
    """What runs on Hopper, with tiles that leave a rest everywhere: 15 tiles for 4 programs."""
    monkeypatch.setattr(kernel, "target_of", lambda device: Target("cuda", 90))
    made = []

    def describing(x: torch.Tensor, block: list[int]) -> TensorDescriptor:
        made.append(block)
        return TensorDescriptor.from_tensor(x, block)

    monkeypatch.setattr(kernel, "descriptor", describing)
    x, residual = torch.randn(1, 70, 144), torch.randn(1, 70, 80)
    weight, scale = quantize_weight(torch.randn(80, 144))
    bias, gate = torch.randn(80), torch.randn(1, 1, 80)
    out = kernel.int8_linear(
        quantize_rows(x), weight, scale, bias, residual, 1.0, gate,
        gelu=False, cast="fp32", out_dtype=torch.float32,
        tile=Tile(16, 32, 4, 2), block_k=64, persistent=persistent,
        epilogue_subtile=epilogue_subtile,
    )  # fmt: skip
    assert made == [[16, 64], [32, 64]]
    expected = int8_linear(x, weight, scale, bias, residual=residual, c_out=gate, impl="reference")
    assert relative_l2(out, expected) < TIGHT[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(
    ("channels", "features", "gelu"), [(77, 100, False), (300, 65, True), (384, 130, False)]
)
@pytest.mark.parametrize("blocks", [False, True], ids=["a-row", "128-rows"])
def test_a_scale_for_every_128_channels(
    channels: int, features: int, gelu: bool, blocks: bool, dtype: torch.dtype
) -> None:
    x = torch.randn(2, 37, channels).to(dtype)
    weight, _ = quantize_weight(torch.randn(features, channels))
    rows = -(-features // 128) if blocks else features
    scale = (torch.rand(-(-channels // 128), rows) + 0.1).t() / 127 * channels**-0.5
    arguments = {
        "bias": torch.randn(features).to(dtype),
        "activation": "gelu-tanh" if gelu else None,
        "residual": torch.randn(2, 37, features).to(dtype),
        "c_out": torch.randn(2, 1, features),
    }
    out = int8_linear(x, weight, scale, impl="triton", **arguments)
    emulated = int8_linear(x, weight, scale, impl="reference", **arguments)
    assert relative_l2(out, emulated) < TIGHT[dtype]


def test_groups_through_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale per row and group stays with the portable kernel on Hopper, however large the
    product, and a step over K is a group whatever a tuner asks for."""
    monkeypatch.setattr(kernel, "target_of", lambda device: Target("cuda", 90))
    monkeypatch.setattr(kernel, "WIDE", 1)
    monkeypatch.setattr(
        kernel, "descriptor", lambda x, block: TensorDescriptor.from_tensor(x, block)
    )
    x, (weight, _) = torch.randn(1, 70, 272), quantize_weight(torch.randn(80, 272))
    scale = torch.rand(80, 3) / 127
    expected = int8_linear(x, weight, scale, impl="reference")
    for more in ({}, {"tile": Tile(16, 32, 4, 2), "block_k": 64}):
        out = kernel.int8_linear(
            quantize_rows(x), weight, scale, None, None, 1.0, 1.0,
            gelu=False, cast="fp32", out_dtype=torch.float32, **more,
        )  # fmt: skip
        assert relative_l2(out, expected) < TIGHT[torch.float32]


@pytest.mark.parametrize("channels", [1, 77, 130, 1536])
@pytest.mark.parametrize("form", ["none", "batch", "token"])
def test_norm_and_modulation_to_rows(channels: int, form: str) -> None:
    """Half a step of the scale from the exact norm, everywhere."""
    x = (torch.randn(2, 5, channels + 8) * 3 + 1)[..., 4 : channels + 4]
    factor = offset = None
    if form != "none":
        factor, offset = torch.randn(2, 2, 1 if form == "batch" else 5, channels)
    rows = norm_modulate_rows(x, factor, offset, one=1.0, eps=1e-6)
    exact = torch.nn.functional.layer_norm(x.double(), (channels,), eps=1e-6)
    if factor is not None and offset is not None:
        exact = exact * (1 + factor) + offset
    assert rows.int8.shape[2] % 16 == 0 and (rows.int8[..., channels:] == 0).all()
    back = rows.int8[..., :channels].double() * rows.scale[..., None]
    assert ((back - exact).abs() <= 0.501 * rows.scale[..., None]).all()
    if channels > 1:  # the norm of one channel is 0
        scale = exact.abs().amax(-1) / 127
        torch.testing.assert_close(rows.scale.double(), scale, rtol=1e-5, atol=0)


def test_a_norm_that_is_not_finite_stays_so() -> None:
    x = torch.randn(1, 4, 1101)
    x[0, 1, 1100], x[0, 3, 0] = float("inf"), float("nan")
    scale = norm_modulate_rows(x, None, None, one=1.0, eps=1e-6).scale
    assert scale.isnan().tolist() == [[False, True, False, True]]
