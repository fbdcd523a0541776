"""Patching on a GPU: bf16 accuracy, the same bits, compilation, capture, streams, undo."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

from tests.measures import relative_l2
from tests.patching.models import (
    ANYFLOWS,
    COGVIDEOXS,
    MODELS,
    WANS,
    Model,
    classes,
    mapped,
    run,
    wide,
)
from turbo_rcm_patch import PatchConfig, patch_model, patched, unpatch_model
from turbo_rcm_patch.config import Linear
from turbo_rcm_patch.patching import sla_as_defined

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
GPU = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """fp32 means fp32 in the truth; nothing compiled leaks into the next test."""
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
    torch._dynamo.reset()


def made(row: Model) -> tuple[torch.nn.Module, dict[str, object]]:
    return row.model(BF16).to(GPU), mapped(row.inputs(dtype=BF16), lambda x: x.to(GPU))


@pytest.mark.parametrize("row", [row for row in MODELS if "sla" not in row.name], ids=str)
def test_attention_in_16_bits_keeps_the_networks_error(row: Model) -> None:
    model, inputs = made(row)
    before = run(model, inputs)
    truth = run(copy.deepcopy(model).float(), wide(inputs))
    patch_model(model, PatchConfig(attention="exact", guard=False))
    error = relative_l2(run(model, inputs).float(), truth)
    assert error <= relative_l2(before.float(), truth)
    unpatch_model(model)
    assert torch.equal(run(model, inputs), before)


@pytest.mark.supports(classes(WANS + ANYFLOWS + COGVIDEOXS), "Triton kernels")
@pytest.mark.parametrize("linear", ["as-is", "int8"])
@pytest.mark.parametrize("row", MODELS, ids=str)
def test_a_network_in_int8_is_near_fp32(row: Model, linear: Linear) -> None:
    """Through the Triton kernels, with the guard as users run it."""
    model, inputs = made(row)
    other, options = copy.deepcopy(model).float(), {"sla_topk": 0.5}
    with sla_as_defined(other, 0.5):
        truth = run(other, wide(inputs))
    with patched(model, attention="int8", linear=linear, **options) as report:
        output = run(model, inputs)
        assert report.impl == "triton" and report.fused >= len(row.kinds) - row.left - 2
        assert torch.equal(run(model, inputs), output)
    assert relative_l2(output, truth) < 0.06


def test_the_caller_may_capture_a_cuda_graph() -> None:
    model, inputs = made(WANS[0])
    patch_model(model, PatchConfig(guard=False))
    for _ in range(3):
        eager = run(model, inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(model, inputs)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, eager)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_blocks_agree_with_plain_calls(mode: str) -> None:
    model, inputs = made(WANS[0])
    patch_model(model, PatchConfig(guard=False))
    eager = run(model, inputs)
    compiled = torch.compile(model, mode=mode)
    for _ in range(3):
        output = run(compiled, inputs).clone()
    assert relative_l2(output, eager) <= 2e-2
    with torch.profiler.profile() as found:
        run(compiled, inputs)
        torch.cuda.synchronize()
    assert any("residual_kernel" in event.key for event in found.key_averages())


def test_patching_holds_no_more_memory_than_the_model() -> None:
    model, inputs = made(WANS[0])
    inputs["hidden_states"] = torch.randn(1, 4, 9, 64, 64, device=GPU, dtype=BF16)
    inputs["timestep"], inputs["encoder_hidden_states"] = (
        inputs[name][:1] for name in ("timestep", "encoder_hidden_states")
    )

    def peak() -> int:
        for _ in range(2):  # compilation and workspaces
            run(model, inputs)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run(model, inputs)
        return torch.cuda.max_memory_allocated()

    how = PatchConfig(attention="int8", guard=False)
    with patched(model, how):  # makes the workspaces that the process keeps
        run(model, inputs)
    unpatched = peak()
    patch_model(model, how)
    assert peak() <= 1.02 * unpatched


def test_no_forward_after_the_first_waits_for_the_device() -> None:
    model, inputs = made(WANS[0])
    patch_model(model, PatchConfig(guard=False))
    for _ in range(3):
        run(model, inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(model, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
