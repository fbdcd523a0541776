"""CogVideoX on a GPU: accuracy in bf16, products for the library, compilation."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.patching.cogvideox import BOTH_CLASSES, CASES, Case, cogvideox, widened
from tests.patching.wan import relative, run
from turbo_rcm_patch import PatchConfig, patched
from turbo_rcm_patch.ops import project_skip_streams

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
GPU = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """fp32 means fp32 in the truth; nothing compiled or allocated leaks into the next test."""
    matmul = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = matmul
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def on_gpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(GPU)
    if isinstance(value, dict):
        return {name: on_gpu(part) for name, part in value.items()}
    return type(value)(map(on_gpu, value)) if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("linear", ["as-is", "int8"])
@pytest.mark.supports(BOTH_CLASSES, "Triton kernels")
def test_network_error_in_bf16(case: Case, linear: str) -> None:
    model, inputs = case.model(BF16).to(GPU), on_gpu(case.inputs(batch=2, dtype=BF16))
    truth = run(case.model(BF16).float().to(GPU), **widened(inputs))
    unpatched = relative(run(model, **inputs), truth)
    with patched(model, PatchConfig(attention="int8", linear=linear)) as report:  # type: ignore[arg-type]
        assert report.impl == "triton" and report.fused == 4
        error = relative(run(model, **inputs), truth)
        assert report.fused == 4, str(report)
        assert all(record.error < 0.10 for record in report.guard)
    if linear == "as-is":
        assert error < 2 * unpatched, f"{error:.4g} against {unpatched:.4g}"


@pytest.mark.parametrize("video", [500, 9000], ids=["one kernel", "library"])
@pytest.mark.parametrize("cast", ["fp32", "model"])
def test_projection_of_two_streams(video: int, cast: str) -> None:
    lengths, channels = (226, video), 1920
    x, *residuals = (
        torch.randn(2, n, channels, device=GPU, dtype=BF16) for n in (sum(lengths), *lengths)
    )
    weight = torch.randn(channels, channels, device=GPU, dtype=BF16) * channels**-0.5
    bias = torch.randn(channels, device=GPU, dtype=BF16)
    gates = [torch.randn(2, 1, channels, device=GPU, dtype=BF16) for _ in lengths]
    outs = project_skip_streams(
        x, weight, bias, residuals=residuals, c_out=gates, cast=cast  # type: ignore[arg-type]
    )  # fmt: skip
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    parts = exact.split(lengths, dim=1)
    for out, residual, gate, part in zip(outs, residuals, gates, parts, strict=True):
        assert relative(out, residual.double() + gate.double() * part) < 6e-3


def test_compiles_to_the_same_numbers() -> None:
    case = CASES[1]
    model, inputs = case.model(BF16).to(GPU), on_gpu(case.inputs(dtype=BF16))
    with patched(model, PatchConfig(attention="int8", guard=False)):
        eager = run(model, **inputs)
        compiled = torch.compile(model, fullgraph=True)
        assert relative(run(compiled, **inputs), eager) < 0.02


def test_a_long_sequence_takes_fp8() -> None:
    """3 heads of 64, 226 + 7,800 tokens: what 5B has, in few channels."""
    torch.manual_seed(0)
    model = cogvideox(num_attention_heads=3, sample_width=52, sample_height=60, sample_frames=37)
    model = model.to(GPU, BF16)
    inputs = {
        "hidden_states": torch.randn(1, 10, 4, 60, 52, device=GPU, dtype=BF16),
        "encoder_hidden_states": torch.randn(1, 7, 16, device=GPU, dtype=BF16),
        "timestep": torch.tensor([500], device=GPU),
        "return_dict": False,
    }
    expected = run(model, **inputs)
    with patched(model, attention="int8") as report:
        assert relative(run(model, **inputs), expected) < 0.05
        assert all(record.verdict == "kept" for record in report.guard)
