"""Each mistake has its own error, and says what was expected, what came and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import CogVideoXTransformer3DModel, WanTransformer3DModel
from diffusers.models.transformers import transformer_wan
from torch import nn

from tests.patching import turbodiffusion
from tests.patching.wan import CASES, dicts, run, wan
from turbo_rcm_patch import PatchConfig, errors, find_pairs, patch_model, unpatch_model
from turbo_rcm_patch.patching import patch as patch_file


def says(error: errors.TurboRCMError) -> None:
    assert error.expected and error.got and error.remedy, str(error)


def test_not_a_model() -> None:
    for thing in (None, 3, "Wan", [wan()], type("Pipe", (), {"transformer": None})()):
        with pytest.raises(errors.NotAModelError) as caught:
            patch_model(thing)
        says(caught.value)
    assert isinstance(caught.value, TypeError)


def test_unknown_architecture_names_the_known_ones() -> None:
    class Mine(WanTransformer3DModel):
        pass

    for model in (nn.Linear(2, 2), Mine(num_layers=1, num_attention_heads=1, ffn_dim=8)):
        for function in (patch_model, find_pairs, unpatch_model):
            with pytest.raises(
                errors.UnknownArchitectureError, match="WanTransformer3D"
            ) as caught:
                function(model)
            says(caught.value)
            assert type(model).__qualname__ in caught.value.got


def test_already_patched_and_not_patched() -> None:
    model = wan()
    with pytest.raises(errors.NotPatchedError) as not_patched:
        unpatch_model(model)
    patch_model(model)
    now = dicts(model)
    with pytest.raises(errors.AlreadyPatchedError) as already:
        patch_model(model)
    assert dicts(model) == now
    says(not_patched.value)
    says(already.value)


def test_an_expert_that_is_patched_already() -> None:
    class Pipe:
        transformer, transformer_2 = wan(), wan()

    patch_model(Pipe.transformer_2)
    before = dicts(Pipe.transformer)
    with pytest.raises(errors.AlreadyPatchedError, match="transformer_2"):
        patch_model(Pipe())
    assert dicts(Pipe.transformer) == before


def test_wrapped_by_someone_else() -> None:
    model = wan()
    patch_model(model)
    block = model.blocks[1]
    ours = block.forward
    block.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    now = dicts(model)
    with pytest.raises(errors.WrappedError, match=r"blocks\.1\.forward") as caught:
        unpatch_model(model)
    says(caught.value)
    assert dicts(model) == now
    block.forward = ours
    unpatch_model(model)


def test_a_block_replaced_before_is_left_as_written() -> None:
    model = wan()
    model.blocks[0].forward = lambda hidden, *rest: hidden
    expected = run(model)
    report = patch_model(model)
    left = [pair for pair in report.pairs if not pair.fused]
    assert {pair.path for pair in left} == {f"blocks.0.{n}" for n in ("attn1", "attn2", "ffn")}
    assert "somebody else" in left[0].reason
    unpatch_model(model)
    assert torch.equal(run(model), expected)


def test_nothing_to_patch() -> None:
    class Other(transformer_wan.WanAttnProcessor):
        pass

    model = wan()
    for block in model.blocks:
        block.attn1.set_processor(Other())
    assert "processor is a" in find_pairs(model)[0].reason
    assert patch_model(model).fused == 4
    unpatch_model(model)
    before = dicts(model)
    with pytest.raises(errors.NothingToPatchError, match="processor is a") as caught:
        patch_model(model, PatchConfig(kinds=("self",)))
    says(caught.value)
    assert dicts(model) == before


def test_a_processor_that_comes_later_is_called() -> None:
    class Zero(transformer_wan.WanAttnProcessor):
        def __call__(self, attn: Any, hidden_states: torch.Tensor, *rest: Any) -> torch.Tensor:
            return torch.zeros_like(hidden_states)

    model = wan()
    model.blocks[0].attn1.set_processor(Zero())
    expected = run(model)
    model.blocks[0].attn1.set_processor(transformer_wan.WanAttnProcessor())
    patch_model(model, PatchConfig(attention="exact", guard=False))
    model.blocks[0].attn1.set_processor(Zero())
    assert torch.allclose(run(model), expected, atol=1e-5)
    assert find_pairs(model)[0].runs == "as-written"


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn], ids=str)
def test_wrong_dtype(dtype: torch.dtype) -> None:
    model = wan()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    with pytest.raises(errors.DTypeError, match="to_q.weight") as caught:
        patch_model(model)
    says(caught.value)


def heads_of(family: str, head_dim: int) -> nn.Module:
    with torch.device("meta"):
        if family == "turbodiffusion":
            return turbodiffusion.tiny(dim=head_dim, num_heads=1, layers=1)
        classes = {"wan": WanTransformer3DModel, "cogvideox": CogVideoXTransformer3DModel}
        more = {"ffn_dim": 8} if family == "wan" else {"time_embed_dim": 8}
        return classes[family](
            num_attention_heads=1, attention_head_dim=head_dim, num_layers=1, **more
        )


@pytest.mark.parametrize("head_dim", [272, 512])
@pytest.mark.parametrize("family", ["wan", "cogvideox", "turbodiffusion"])
def test_head_dim_out_of_range(family: str, head_dim: int) -> None:
    model = heads_of(family, head_dim)
    with pytest.raises(errors.ShapeError, match=str(head_dim)) as caught:
        patch_model(model)
    says(caught.value)


def test_triton_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(errors.DeviceError, match="no GPU") as caught:
        patch_model(wan(), PatchConfig(impl="triton"))
    says(caught.value)


def test_fp8_on_a_gpu_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(patch_file, "execution_device", lambda model: torch.device("cuda:0"))
    model = wan()
    before = dicts(model)
    with pytest.raises(errors.Fp8UnsupportedError, match="8.0") as caught:
        patch_model(model, PatchConfig(pv="fp8"))
    says(caught.value)
    assert dicts(model) == before


def test_one_launch_needs_a_quantised_attention() -> None:
    with pytest.raises(errors.ConfigError, match="one-launch") as caught:
        patch_model(wan(), PatchConfig(attention="exact", form="one-launch"))
    says(caught.value)


def test_sage_without_the_package() -> None:
    with pytest.raises((errors.MissingPackageError, errors.DeviceError)) as caught:
        patch_model(wan(), PatchConfig(attention="sage"))
    says(caught.value)


def on_model(model: Any) -> None:
    model._parallel_config = object()


def on_processor(model: Any) -> None:
    model.blocks[1].attn1.processor._parallel_config = object()


@pytest.mark.parametrize("enable", [on_model, on_processor])
def test_an_unknown_parallelism_before(enable: Callable[[Any], None]) -> None:
    model = wan()
    enable(model)
    before = dicts(model)
    with pytest.raises(errors.ContextParallelError) as caught:
        patch_model(model)
    says(caught.value)
    assert dicts(model) == before


def test_an_unknown_parallelism_afterwards_is_refused_on_the_first_forward() -> None:
    model = wan()
    patch_model(model)
    on_processor(model)
    with pytest.raises(errors.ContextParallelError) as caught:
        run(model)
    says(caught.value)
    unpatch_model(model)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (transformer_wan.WanTransformerBlock, "forward"),
        (transformer_wan.WanAttention, "forward"),
        (transformer_wan.WanAttnProcessor, "__call__"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_signature_drift(owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def drifted(self: Any, hidden_states: Any, something_new: Any) -> None: ...

    model = wan()
    monkeypatch.setattr(owner, name, drifted)
    with pytest.raises(errors.FamilyError, match="something_new") as caught:
        patch_model(model)
    says(caught.value)
    assert isinstance(caught.value, errors.FamilyError)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["hidden_states", "encoder_hidden_states", "timestep"])
def test_non_finite_input_with_the_guard_on(value: float, where: str) -> None:
    model, inputs = wan(), CASES[0].inputs()
    inputs[where] = inputs[where].clone()
    inputs[where].view(-1)[0] = value
    expected = run(model, **inputs)
    report = patch_model(model)
    with pytest.raises(errors.NonFiniteInputError, match="first patched block") as caught:
        run(model, **inputs)
    says(caught.value)
    assert len(report.guard) == 0 and report.fused == 6
    run(model)
    assert len(report.guard) == 6, "the first good forward is checked"
    unpatch_model(model)
    patch_model(model, PatchConfig(guard=False))
    assert torch.equal(run(model, **inputs).isnan(), expected.isnan())
