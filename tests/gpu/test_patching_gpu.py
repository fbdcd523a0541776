"""Patching on a GPU: accuracy in bf16, compilation, memory, offloading, no synchronisation."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import accelerate
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from diffusers.hooks import apply_group_offloading

from tests.patching.wan import CASES, Case, dicts, relative, run, wan
from tests.patching.wan_family import FAMILIES, Family, classes
from turbo_rcm_patch import PatchConfig, errors, find_pairs, patch_model, patched, unpatch_model
from turbo_rcm_patch.config import Form

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
GPU = torch.device("cuda:0")
INT8 = PatchConfig(attention="int8", guard=False)
MIDDLE = Case(
    "middle", {"num_attention_heads": 12, "attention_head_dim": 128, "num_layers": 4,
               "ffn_dim": 8960, "rope_max_seq_len": 128}, fused=12,
)  # fmt: skip


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """fp32 means fp32 in the truth; nothing compiled or allocated leaks into the next test."""
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def on_gpu(inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.to(GPU) if torch.is_tensor(value) else value for key, value in inputs.items()
    }


def wide(inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.float() if torch.is_tensor(value) and value.is_floating_point() else value
        for key, value in inputs.items()
    }


def middle_inputs(frames: int = 9, side: int = 56) -> dict[str, Any]:
    """bf16 latents of frames * side * side / 4 tokens (7,056 by default)."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(1, 4, frames, side, side, generator=generator)
    text = torch.randn(1, 512, 16, generator=generator)
    return on_gpu(
        {
            "hidden_states": noise.to(BF16),
            "timestep": torch.tensor([500.0]),
            "encoder_hidden_states": text.to(BF16),
            "return_dict": False,
        }
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("form", ["two-launch", "one-launch"])
@pytest.mark.supports("WanTransformer3DModel", "Triton kernels")
def test_network_error_in_bf16(case: Case, form: Form) -> None:
    model, inputs = case.model(BF16).to(GPU), on_gpu(case.inputs(batch=2, dtype=BF16))
    truth = run(case.model(BF16).float().to(GPU), **wide(inputs))
    unpatched = relative(run(model, **inputs), truth)
    with patched(model, PatchConfig(attention="int8", form=form)) as report:
        assert report.impl == "triton" and report.fused == case.fused
        error = relative(run(model, **inputs), truth)
        assert report.fused == case.fused, str(report)
        assert all(record.error < 0.10 for record in report.guard)
    assert error < 2 * unpatched, f"{error:.4g} against {unpatched:.4g}"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.supports(classes(FAMILIES), "Triton kernels")
def test_network_error_of_the_family_in_bf16(family: Family) -> None:
    model, inputs = family.model(BF16).to(GPU), on_gpu(family.inputs(dtype=BF16))
    truth = run(family.model(BF16).float().to(GPU), **wide(inputs))
    unpatched = relative(run(model, **inputs), truth)
    with patched(model, attention="int8") as report:
        error = relative(run(model, **inputs), truth)
        assert report.impl == "triton" and report.fused == family.fused, str(report)
    assert error < 2 * unpatched, f"{error:.4g} against {unpatched:.4g}"


def test_network_error_of_a_middle_sized_model() -> None:
    model, inputs = MIDDLE.model(BF16).to(GPU), middle_inputs()
    truth = run(MIDDLE.model(BF16).float().to(GPU), **wide(inputs))
    unpatched = relative(run(model, **inputs), truth)
    with patched(model, attention="int8") as report:
        error = relative(run(model, **inputs), truth)
    assert report.fused == MIDDLE.fused
    assert error < 2 * unpatched, f"{error:.4g} against {unpatched:.4g}"


@pytest.mark.parametrize("pv", ["bf16", "fp16", "fp8"])
def test_element_types_of_the_second_product(pv: Any) -> None:
    case = CASES[0]
    model, inputs = case.model(BF16).to(GPU), on_gpu(case.inputs(dtype=BF16))
    expected = run(model, **inputs)
    if pv == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        with pytest.raises(errors.Fp8UnsupportedError):
            patch_model(model, PatchConfig(attention="int8", pv=pv))
        return
    with patched(model, PatchConfig(attention="int8", pv=pv, guard=False)) as report:
        assert report.pv == pv
        assert relative(run(model, **inputs), expected) < 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    case = CASES[0]
    model, inputs = case.model(dtype).to(GPU), on_gpu(case.inputs(dtype=dtype))
    expected = run(model, **inputs)
    with patched(model, INT8):
        assert relative(run(model, **inputs), expected) < 0.03
    with patched(model, PatchConfig(attention="exact", guard=False)):
        limit = 1e-4 if dtype == torch.float32 else 5e-3
        assert relative(run(model, **inputs), expected) < limit


def test_unpatch_is_bit_equal() -> None:
    model, inputs = CASES[1].model(BF16).to(GPU), on_gpu(CASES[1].inputs(dtype=BF16))
    expected, before = run(model, **inputs), dicts(model)
    with patched(model, attention="int8"):
        run(model, **inputs)
    assert dicts(model) == before
    assert torch.equal(run(model, **inputs), expected)


def test_a_model_moved_to_the_gpu_after_patching() -> None:
    model, inputs = CASES[0].model(BF16), on_gpu(CASES[0].inputs(dtype=BF16))
    report = patch_model(model, INT8)
    assert report.impl == "reference"
    model.to(GPU)
    assert report.impl == "triton"
    moved = run(model, **inputs)
    unpatch_model(model)
    assert relative(moved, run(model, **inputs)) < 0.03


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Inductor's own, and its advice to allow TF32.
def test_a_block_compiles_whole_with_inductor() -> None:
    case = CASES[0]
    model, inputs = case.model(BF16).to(GPU), on_gpu(case.inputs(dtype=BF16))
    with patched(model, INT8):
        expected = run(model, **inputs)
        model.compile_repeated_blocks(fullgraph=True)
        for timestep in (500.0, 400.0):
            inputs["timestep"] = torch.tensor([timestep], device=GPU)
            compiled = run(model, **inputs)
            if timestep == 500.0:
                assert relative(compiled, expected) < 0.02
        inputs["timestep"] = torch.tensor([300.0], device=GPU)
        with torch._dynamo.config.patch(error_on_recompile=True):
            run(model, **inputs)


def peak(function: Callable[[], object]) -> int:
    """Peak allocated bytes above what is held before the call, once warm."""
    function()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - held


@pytest.mark.parametrize("form", ["two-launch", "one-launch"])
def test_peak_memory_is_no_higher(form: Form) -> None:
    model, inputs = MIDDLE.model(BF16).to(GPU), middle_inputs(side=96)
    unpatched = peak(lambda: run(model, **inputs))
    with patched(model, PatchConfig(attention="int8", guard=False, form=form)):
        ours = peak(lambda: run(model, **inputs))
    assert ours <= unpatched, f"{ours / 2**20:.1f} MiB against {unpatched / 2**20:.1f} MiB"


def test_steady_state_does_not_synchronise() -> None:
    model, inputs = CASES[0].model(BF16).to(GPU), on_gpu(CASES[0].inputs(dtype=BF16))
    block = model.blocks[0]
    captured: list[Any] = []
    handle = block.register_forward_pre_hook(lambda module, args: captured.append(args))
    run(model, **inputs)
    handle.remove()
    patch_model(model, attention="int8", precision="fixed")
    run(model, **inputs)  # The first forward is the guard's.
    with torch.no_grad():
        block(*captured[0])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            block(*captured[0])
        finally:
            torch.cuda.set_sync_debug_mode("default")


def block_offloading(model: Any) -> None:
    apply_group_offloading(model, onload_device=GPU, offload_type="block_level",
                           num_blocks_per_group=1)  # fmt: skip


def leaf_offloading_on_a_stream(model: Any) -> None:
    apply_group_offloading(model, onload_device=GPU, offload_type="leaf_level", use_stream=True)


def sequential_offloading(model: Any) -> None:
    accelerate.cpu_offload(model, execution_device=GPU)


@pytest.mark.parametrize(
    "offload", [block_offloading, leaf_offloading_on_a_stream, sequential_offloading]
)
@pytest.mark.parametrize("patch_first", [True, False], ids=["patch-first", "patch-after"])
def test_offloading(offload: Callable[[Any], None], patch_first: bool) -> None:
    case = CASES[0]
    inputs = on_gpu(case.inputs(dtype=BF16))
    reference = case.model(BF16).to(GPU)
    with patched(reference, INT8):
        expected = run(reference, **inputs)
    model = case.model(BF16)
    if patch_first:
        patch_model(model, INT8)
    offload(model)
    if not patch_first:
        patch_model(model, INT8)
    for _ in range(2):
        assert relative(run(model, **inputs), expected) < 0.02
    unpatch_model(model)


def test_a_pipeline_with_model_offload() -> None:
    pipe = WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        transformer=wan(),
    )
    pipe.set_progress_bar_config(disable=True)
    pipe.enable_model_cpu_offload(device=GPU)

    def generate() -> torch.Tensor:
        latents: torch.Tensor = pipe(
            prompt_embeds=torch.ones(1, 7, 16, device=GPU),
            guidance_scale=1.0,
            height=64,
            width=64,
            num_frames=5,
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
        ).frames
        return latents.cpu()

    expected = generate()
    with patched(pipe, attention="int8", precision="fixed") as report:
        assert report.impl == "triton"
        assert 0 < relative(generate(), expected) < 0.05
        assert len(report.guard) == 2 * 6
    assert torch.equal(generate(), expected)


def test_gradients_of_the_exact_attention() -> None:
    case = CASES[0]

    def gradients(model: Any) -> dict[str, torch.Tensor]:
        model.requires_grad_(True).zero_grad()
        model(**on_gpu(case.inputs()))[0].square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = gradients(case.model().to(GPU))
    model = case.model().to(GPU)
    patch_model(model, PatchConfig(attention="exact", guard=False))
    found = gradients(model)
    assert max(relative(found[name], expected[name]) for name in expected) < 1e-3


def test_the_table_of_a_patched_model_on_a_gpu() -> None:
    model = CASES[1].model(BF16).to(GPU)
    with patched(model, attention="int8") as report:
        text = str(report)
        assert find_pairs(model) == report.pairs
    assert "implementation triton on cuda:0" in text
