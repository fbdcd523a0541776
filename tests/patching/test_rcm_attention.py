"""The library's own two-pass module is a pair like any other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.patching.wan import EXACT, INT8, dicts, relative, with_lora
from turbo_rcm_patch import PatchConfig, errors, find_pairs, patch_model, patched, unpatch_model
from turbo_rcm_patch.models import RCMAttention


def module(**options: object) -> RCMAttention:
    torch.manual_seed(0)
    made = RCMAttention(128, 2, **options)  # type: ignore[arg-type]
    return made.eval().requires_grad_(False)


X = torch.randn(2, 77, 128, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("projection", [True, False])
@pytest.mark.parametrize("t", [0.0, 0.7, torch.tensor([0.3, 5.0])], ids=["zero", "float", "each"])
@pytest.mark.supports("RCMAttention", "self-attention", "the guard", "unpatched, bit-equal")
def test_patched_is_two_pass(projection: bool, t: float | torch.Tensor) -> None:
    made = module(projection=projection)
    expected, before = made(X, t), dicts(made)
    with patched(made, EXACT) as report:
        assert relative(made(X, t), expected) < 3e-6
        assert report.fused == 1
        assert report.pairs[0].runs == ("two-launch" if projection else "in-kernel")
    with patched(made) as report:
        assert relative(made(X, t), expected) < 0.02
        assert report.guard[0].error < 0.05
    assert dicts(made) == before
    assert torch.equal(made(X, t), expected)


def test_the_pair_says_all_there_is_to_know() -> None:
    pair = find_pairs(module(projection=False))[0]
    assert (pair.path, pair.kind, pair.heads, pair.head_dim) == ("RCMAttention", "self", 2, 64)
    assert pair.cast == "fp32" and not pair.projection
    assert pair.streams[0].c_skip == "c_skip(t)" and pair.streams[0].c_out == "c_out(t)"


def test_modules_inside_a_model() -> None:
    model = nn.ModuleDict({"a": module(), "b": nn.Sequential(module(projection=False))})
    report = patch_model(model)
    assert [pair.path for pair in report.pairs] == ["a", "b.0"]
    unpatch_model(model)


def test_a_projection_that_is_not_plain_is_called() -> None:
    made = module()
    assert made.proj is not None
    made.proj.register_forward_hook(lambda _, args, output: 2 * output)
    expected = made(X, 0.5)
    with patched(made, EXACT) as report:
        assert report.pairs[0].runs == "after-linear"
        assert relative(made(X, 0.5), expected) < 3e-6


@pytest.mark.supports("RCMAttention", "training")
def test_gradients_are_equal() -> None:
    def gradients(made: RCMAttention) -> list[torch.Tensor]:
        made.train().requires_grad_(True)
        made.zero_grad()
        made(X, 0.5).square().mean().backward()
        return [p.grad.clone() for p in made.parameters() if p.grad is not None]

    expected = gradients(module())
    made = module()
    patch_model(made, EXACT)
    for found, truth in zip(gradients(made), expected, strict=True):
        assert relative(found, truth) < 1e-5


def test_over_budget_and_non_finite() -> None:
    made = module()
    expected = made(X, 0.5)
    report = patch_model(made, PatchConfig(attention="int4", guard_budget=1e-6))
    assert torch.equal(made(X, 0.5), expected) and report.fused == 0
    unpatch_model(made)
    patch_model(made)
    with pytest.raises(errors.NonFiniteInputError):
        made(X * float("nan"), 0.5)


def test_refusals() -> None:
    with pytest.raises(errors.DTypeError, match="float64"):
        patch_model(module(dtype=torch.float64))
    with pytest.raises(errors.ShapeError, match="512"):
        patch_model(RCMAttention(512, 1))
    with pytest.raises(errors.NothingToPatchError):
        patch_model(module(), PatchConfig(kinds=("cross",)))


@pytest.mark.supports("RCMAttention", "LoRA")
def test_lora() -> None:
    made = module()
    with_lora(made, "qkv", "proj")
    expected = made(X, 0.5)
    assert relative(module()(X, 0.5), expected) > 0.05
    with patched(made, EXACT) as report:
        assert report.pairs[0].runs == "after-linear" and "peft" in report.pairs[0].reason
        assert relative(made(X, 0.5), expected) < 3e-6


@pytest.mark.supports("RCMAttention", "torch.compile")
def test_compiles_without_a_break() -> None:
    made = module()
    with patched(made, INT8):
        compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
        assert relative(compiled(X, 0.5), made(X, 0.5)) < 1e-5
