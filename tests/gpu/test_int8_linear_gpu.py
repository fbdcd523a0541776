"""What only a GPU shows of the int8 linear: Hopper's tiles and own kernel, offsets past 32 bits,
graphs, compiled functions, a whole network. Its accuracy is tested in `tests/ops`.
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
from turbo_rcm_patch.kernels.portable.rows import quantize_rows
from turbo_rcm_patch.ops import int8_linear, quantize_weight

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
SCHEDULES = ("ping-pong-128x128", "cooperative-192x256", "cooperative-128x256")


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.parametrize("persistent", [False, True], ids=["one-tile", "persistent"])
@pytest.mark.parametrize("epilogue_subtile", [False, True], ids=["whole", "halves"])
@pytest.mark.parametrize("tile", [(128, 256, 8, 3), (128, 128, 8, 3), (64, 64, 4, 4)], ids=str)
def test_every_tile_and_form_gives_the_same(
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


def test_a_linear_writes_past_two_to_the_31_elements() -> None:
    tokens, channels, features = 280_000, 512, 8192
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB")
    x = random(1, tokens, channels)
    weight, scale = quantize_weight(random(features, channels) * channels**-0.5)
    out = int8_linear(x, weight, scale)[:, -100:]
    emulated = int8_linear(x[:, -100:], weight, scale, impl="reference")
    assert relative(out, emulated) < 3e-3  # as in tests/ops


def test_a_linear_replays_in_a_graph() -> None:
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


def test_a_linear_compiles_without_a_break() -> None:
    x, weight, residual = random(1, 300, 256), random(384, 256), random(1, 300, 384)

    def block(x: torch.Tensor) -> torch.Tensor:
        return int8_linear(x * 2, *quantize_weight(weight), residual=residual)

    torch.testing.assert_close(torch.compile(block, fullgraph=True)(x), block(x))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_network_with_int8_linears_is_near_fp32(case) -> None:
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
