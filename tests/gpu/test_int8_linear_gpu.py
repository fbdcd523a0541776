"""int8 rows and linears on a real GPU: `pytest -m gpu tests/gpu/test_int8_linear_gpu.py`.

Tolerance, kernels against the emulation: the integers are equal but where a product falls on a
half, scales differ by a last bit, and the result is rounded once to its dtype.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.patching.wan import CASES, relative, run
from turbo_rcm_patch import PatchConfig, patched
from turbo_rcm_patch.kernels.gluon import hopper_module
from turbo_rcm_patch.kernels.launch import Tile
from turbo_rcm_patch.kernels.portable import int8_linear as kernel
from turbo_rcm_patch.kernels.portable.norm import norm_modulate_rows
from turbo_rcm_patch.kernels.portable.rows import quantize_rows
from turbo_rcm_patch.ops import int8_linear, quantize_weight
from turbo_rcm_patch.ops.quantize import quantized_rows

pytestmark = pytest.mark.gpu

#: fp32: the kernel rounds x / scale in one step and the emulation in two, which sends about one
#: value in a million to the other neighbour, a step of 0.026 standard deviations away.
TIGHT = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 1e-4}
BF16 = torch.bfloat16
SCHEDULES = ("ping-pong-128x128", "cooperative-192x256", "cooperative-128x256")


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", list(TIGHT), ids=str)
@pytest.mark.parametrize("channels", [1, 77, 1536, 5120, 8960, 13824, 40000])
def test_rows(channels: int, dtype: torch.dtype) -> None:
    x = random(2, 37, channels + 8, dtype=dtype)[..., 8:]
    x[1, 3], x[0, 5, channels // 2] = 0.0, float("nan")
    rows = quantize_rows(x)
    int8, scale = quantized_rows(x)
    good = ~scale.isnan()
    assert torch.equal(rows.scale.isnan(), ~good)
    far = (rows.int8[..., :channels][good].int() - int8[good].int()).abs()
    # bf16 values of few digits fall on halves often, and the kernel rounds a fused product.
    assert far.max() <= 1 and far.float().mean() < 1e-2
    assert (rows.int8[..., channels:] == 0).all()
    torch.testing.assert_close(rows.scale[good], scale[good], rtol=3e-7, atol=0)


@pytest.mark.parametrize("dtype", list(TIGHT), ids=str)
@pytest.mark.parametrize(
    ("tokens", "channels", "features"),
    [(1, 128, 16), (300, 77, 131), (1023, 1536, 1536), (8190, 1536, 8960), (4095, 8960, 1555)],
)
@pytest.mark.parametrize("blocks", [False, True], ids=["a-row", "128-rows"])
def test_a_scale_for_every_128_channels(
    tokens: int, channels: int, features: int, blocks: bool, dtype: torch.dtype
) -> None:
    """Sums of groups differ by the order of fp32 additions; all integers are equal."""
    x = random(2, tokens, channels, dtype=dtype)
    weight, _ = quantize_weight(random(features, channels, dtype=dtype))
    rows = -(-features // 128) if blocks else features
    scale = (torch.rand(-(-channels // 128), rows, device="cuda") + 0.1).t() / channels**0.5
    arguments = {
        "bias": random(features, dtype=dtype),
        "residual": random(2, tokens, features, dtype=dtype),
        "c_out": torch.randn(2, 1, features, device="cuda") / 127,
    }
    out = int8_linear(x, weight, scale, impl="triton", **arguments)
    emulated = int8_linear(x, weight, scale, impl="reference", **arguments)
    assert relative(out, emulated) < TIGHT[dtype]


@pytest.mark.parametrize("dtype", list(TIGHT), ids=str)
@pytest.mark.parametrize(
    ("batch", "tokens", "channels", "features", "options"),
    [
        pytest.param(1, 1, 16, 16, {}, id="one-token"),
        pytest.param(2, 1023, 1536, 1536, {}, id="small"),
        pytest.param(2, 300, 77, 131, {"bias": True}, id="nothing-divides"),
        pytest.param(1, 8190, 1536, 8960, {"bias": True, "gelu": True}, id="wide-gelu"),
        pytest.param(2, 4095, 8960, 1536, {"bias": True, "skip": "channel"}, id="wide-skip"),
        pytest.param(1, 8190, 1536, 1536, {"skip": "element"}, id="wide-skip-per-token"),
        pytest.param(
            1, 8190, 1536, 1536, {"skip": "float", "cast": "model"}, id="wide-model-cast"
        ),
        pytest.param(1, 8190, 1544, 1555, {"skip": "batch", "bias": True}, id="wide-odd"),
    ],
)
def test_kernel_equals_the_emulation(
    batch: int, tokens: int, channels: int, features: int, options: dict, dtype: torch.dtype
) -> None:
    x = random(batch, tokens, 2 * channels, dtype=dtype)[..., channels:]
    weight, scale = quantize_weight(random(features, channels, dtype=dtype) * channels**-0.5)
    shape = {"batch": (batch,), "channel": (batch, 1, features), "element": (batch, tokens, 1)}
    form = options.get("skip")
    c = 0.5 if form == "float" else torch.randn(shape[form], device="cuda") if form else 1.0
    arguments = {
        "bias": random(features, dtype=dtype) if "bias" in options else None,
        "activation": "gelu-tanh" if "gelu" in options else None,
        "residual": random(batch, tokens, features, dtype=dtype) if form else None,
        "c_skip": c if form else 1.0,
        "c_out": c,
        "cast": options.get("cast", "fp32"),
    }
    out = int8_linear(x, weight, scale, impl="triton", **arguments)
    emulated = int8_linear(x, weight, scale, impl="reference", **arguments)
    assert out.dtype == dtype
    budget = TIGHT[dtype] * (3 if arguments["cast"] == "model" else 1)
    assert relative(out, emulated) < budget


@pytest.mark.parametrize("persistent", [False, True], ids=["one-tile", "persistent"])
@pytest.mark.parametrize("epilogue_subtile", [False, True], ids=["whole", "halves"])
@pytest.mark.parametrize("tile", [(128, 256, 8, 3), (128, 128, 8, 3), (64, 64, 4, 4)], ids=str)
def test_every_form_gives_the_same(
    tile: tuple[int, int, int, int], epilogue_subtile: bool, persistent: bool
) -> None:
    """However the work is cut, the integers are exact and the epilogue is the same arithmetic."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these tiles are Hopper's")
    x, residual = random(1, 3001, 1536), random(1, 3001, 1544)
    weight, scale = quantize_weight(random(1544, 1536))
    bias, gate = random(1544), torch.randn(1, 1, 1544, device="cuda")
    rows = quantize_rows(x)

    def form(**more: object) -> torch.Tensor:
        return kernel.int8_linear(
            rows, weight, scale, bias, residual, 1.0, gate,
            gelu=False, cast="fp32", out_dtype=BF16, **more,
        )  # fmt: skip

    plain = form(tile=Tile(64, 64, 4, 2), epilogue_subtile=False, persistent=False)
    out = form(tile=Tile(*tile), epilogue_subtile=epilogue_subtile, persistent=persistent)
    assert relative(out, plain) < 1e-5


def test_error_against_the_exact_linear() -> None:
    x, weight, bias = random(1, 4096, 5120), random(5120, 5120), random(5120)
    out = int8_linear(x, *quantize_weight(weight), bias)
    assert relative(out, F.linear(x.double(), weight.double(), bias.double())) < 0.014


def test_a_row_that_is_not_finite_stays_so() -> None:
    x = random(1, 300, 512)
    x[0, 7, 400], x[0, 9, 0] = float("nan"), float("inf")
    out = int8_linear(x, *quantize_weight(random(128, 512)))
    assert out.isnan().all(-1).nonzero()[:, 1].tolist() == [7, 9]
    assert out.isnan().any(-1).sum() == 2


def test_offsets_past_two_to_the_31() -> None:
    tokens, channels, features = 280_000, 512, 8192
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB")
    x = random(1, tokens, channels)
    weight, scale = quantize_weight(random(features, channels) * channels**-0.5)
    out = int8_linear(x, weight, scale)[:, -100:]
    assert relative(out, int8_linear(x[:, -100:], weight, scale, impl="reference")) < TIGHT[BF16]


def test_a_graph_replays() -> None:
    x, residual = random(1, 3000, 512), random(1, 3000, 1024)
    weight, scale = quantize_weight(random(1024, 512))

    def step() -> torch.Tensor:
        return int8_linear(x, weight, scale, residual=residual)

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


def test_compiles_without_a_break() -> None:
    x, weight, residual = random(1, 300, 256), random(384, 256), random(1, 300, 384)

    def block(x: torch.Tensor) -> torch.Tensor:
        return int8_linear(x * 2, *quantize_weight(weight), residual=residual)

    torch.testing.assert_close(torch.compile(block, fullgraph=True)(x), block(x))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_network_error_in_bf16(case) -> None:
    model = case.model(BF16).cuda()
    given = {
        key: value.cuda() if torch.is_tensor(value) else value
        for key, value in case.inputs(batch=2, dtype=BF16).items()
    }
    wide = {k: v.float() if torch.is_tensor(v) else v for k, v in given.items()}
    truth = run(case.model(BF16).float().cuda(), **wide)
    with patched(model, PatchConfig(attention="int8", linear="int8", precision="fixed")) as report:
        output = run(model, **given)
        assert report.impl == "triton" and report.fused == case.fused
        assert all(pair.int8_linears for pair in report.pairs), str(report)
        assert torch.equal(run(model, **given), output)
    assert relative(output, truth) < 0.03


@pytest.fixture
def own():
    """The module of Hopper's own kernel."""
    module = hopper_module("int8_linear", "int8 linear")
    if torch.cuda.get_device_capability() != (9, 0) or module is None:
        pytest.skip("needs a Hopper GPU and a Triton that can build its kernel")
    return module


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("batch", "tokens", "channels", "features", "options"),
    [
        pytest.param(1, 1, 16, 32, {}, id="one-token"),
        pytest.param(1, 700, 1536, 1536, {}, id="plain"),
        pytest.param(1, 9001, 1536, 1536, {"gelu": True}, id="several-tiles-a-program"),
        pytest.param(2, 1333, 1544, 1568, {"skip": True}, id="ragged-skip"),
        pytest.param(2, 333, 904, 1555, {"gelu": True, "skip": True}, id="odd-features"),
    ],
)
def test_hopper_s_own_kernel_gives_the_same_bits(
    own, schedule: str, batch: int, tokens: int, channels: int, features: int, options: dict
) -> None:
    x, residual = random(batch, tokens, channels), random(batch, tokens, features)
    weight, scale = quantize_weight(random(features, channels))
    bias, gate = random(features), torch.randn(batch, 1, features, device="cuda")
    rows = quantize_rows(x)
    weight = F.pad(weight, (0, rows.int8.shape[2] - channels))
    skip, c_out = (residual, gate) if options.get("skip") else (None, 1.0)
    more = {"gelu": options.get("gelu", False), "cast": "fp32"}
    expected = kernel.int8_linear(
        rows, weight, scale, bias, skip, 0.5, c_out,
        out_dtype=torch.float32, tile=Tile(128, 128, 8, 3), **more,
    )  # fmt: skip
    for permuted in [False, True] if features % 32 == 0 else [False]:
        out = torch.full_like(expected, float("nan"))
        own.hopper_linear(
            out, rows, weight, scale, bias, skip, 0.5, c_out,
            schedule=own.SCHEDULES[schedule], permuted=permuted, **more,
        )  # fmt: skip
        assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("batch", "tokens", "channels", "features", "options"),
    [
        pytest.param(1, 1, 16, 32, {}, id="one-token"),
        pytest.param(1, 700, 1536, 1536, {}, id="plain"),
        pytest.param(1, 9001, 1536, 1536, {"gelu": True}, id="several-tiles-a-program"),
        pytest.param(1, 3000, 8960, 1536, {"skip": True}, id="long-skip"),
        pytest.param(2, 1333, 1544, 1568, {"skip": True}, id="ragged-skip"),
        pytest.param(2, 333, 904, 1555, {"gelu": True, "skip": True}, id="odd-features"),
    ],
)
def test_hopper_s_own_kernel_for_blocks_gives_the_same_bits(
    own, batch: int, tokens: int, channels: int, features: int, options: dict
) -> None:
    x, residual = random(batch, tokens, channels), random(batch, tokens, features)
    weight, _ = quantize_weight(random(features, channels))
    shape = (-(-features // 128), -(-channels // 128))
    scale = (torch.rand(shape, device="cuda") + 0.1) / 127 * channels**-0.5
    bias, gate = random(features), torch.randn(batch, 1, features, device="cuda")
    rows = quantize_rows(x)
    weight = F.pad(weight, (0, rows.int8.shape[2] - channels))
    skip, c_out = (residual, gate) if options.get("skip") else (None, 1.0)
    more = {"gelu": options.get("gelu", False), "cast": "fp32"}
    expected = kernel.int8_linear(
        rows, weight, scale, bias, skip, 0.5, c_out,
        out_dtype=torch.float32, tile=Tile(128, 128, 8, 3), **more,
    )  # fmt: skip
    for permuted in [False, True] if features % 32 == 0 else [False]:
        out = torch.full_like(expected, float("nan"))
        own.hopper_linear(
            out, rows, weight, scale, bias, skip, 0.5, c_out,
            permuted=permuted, **more,
        )  # fmt: skip
        assert torch.equal(out, expected)


@pytest.mark.parametrize("channels", [77, 1536, 5120])
@pytest.mark.parametrize("wide", [False, True], ids=["a-batch-entry", "a-token"])
def test_norm_and_modulation_to_rows(channels: int, wide: bool) -> None:
    x = random(2, 300, channels) * 3 + 1
    factor, offset = torch.randn(2, 2, 300 if wide else 1, channels, device="cuda")
    rows = norm_modulate_rows(x, factor, offset, one=1.0, eps=1e-6)
    exact = F.layer_norm(x.double(), (channels,), eps=1e-6) * (1 + factor) + offset
    assert (rows.int8[..., channels:] == 0).all()
    back = rows.int8[..., :channels].double() * rows.scale[..., None]
    assert ((back - exact).abs() <= 0.501 * rows.scale[..., None]).all()
    torch.testing.assert_close(rows.scale.double(), exact.abs().amax(-1) / 127, rtol=1e-5, atol=0)
