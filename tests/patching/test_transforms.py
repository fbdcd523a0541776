"""A patched model under forward mode and torch.func gives what the unpatched one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.patching import cogvideox, turbodiffusion, wan, wan_family
from tests.patching.sla import inputs_of, with_sla
from turbo_rcm_patch import PatchConfig, errors, patched
from turbo_rcm_patch.models import RCMAttention

CONFIGS = {
    "int8": PatchConfig(guard=False),
    "guard": PatchConfig(),
    "int8-linears": PatchConfig(linear="int8", guard=False),
    "one-launch": PatchConfig(form="one-launch", guard=False),
}

#: A model, and its output as a function of one tensor, and that tensor.
Subject = tuple[Any, Callable[[Tensor], Tensor], Tensor]


def of_case(case: Any) -> Subject:
    """A case of one of diffusers' families, by its latents."""
    model, given = case.model(), case.inputs()
    x = given.pop("hidden_states")
    return model, lambda x: model(hidden_states=x, **given)[0], x


def of_turbodiffusion() -> Subject:
    model, given = turbodiffusion.tiny(checkpoint=False), turbodiffusion.tiny_inputs()
    x = given.pop("x")
    return model, lambda x: model(x, **given), x


def of_rcm() -> Subject:
    torch.manual_seed(0)
    module = RCMAttention(64, 2).eval().requires_grad_(False)
    return module, lambda x: module(x, 0.7), torch.randn(2, 20, 64)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "wan": lambda: of_case(wan.CASES[0]),
    "wan-i2v": lambda: of_case(wan.CASES[1]),
    "vace": lambda: of_case(wan_family.named("vace")),
    "animate": lambda: of_case(wan_family.named("animate")),
    "chronoedit": lambda: of_case(wan_family.named("chronoedit")),
    "skyreels": lambda: of_case(wan_family.named("skyreels")),
    "cogvideox": lambda: of_case(cogvideox.ROTARY),
    "consisid": lambda: of_case(cogvideox.ONE_EACH[1]),
    "turbodiffusion": of_turbodiffusion,
    "rcm": of_rcm,
}
every = pytest.mark.parametrize("name", SUBJECTS)


def close(a: Tensor, b: Tensor) -> bool:
    return wan.relative(a, b) < 1e-5


@every
def test_a_forward_derivative(name: str) -> None:
    model, function, x = SUBJECTS[name]()
    t = torch.randn_like(x)
    with sdpa_kernel(SDPBackend.MATH):  # no other backend has a forward derivative
        value, expected = torch.func.jvp(function, (x,), (t,))
        assert float(expected.norm()) > 0.1
        with patched(model):
            ours, derivative = torch.func.jvp(function, (x,), (t,))
            assert close(derivative, expected) and close(ours, value)
            with forward_ad.dual_level():
                dual = forward_ad.unpack_dual(function(forward_ad.make_dual(x, t)))
            assert close(dual.tangent, expected)


@every
def test_gradients_and_vmap(name: str) -> None:
    model, function, x = SUBJECTS[name]()
    with sdpa_kernel(SDPBackend.MATH):
        expected = torch.func.grad(lambda x: function(x).square().sum())(x)
        both = torch.stack([x, 2 * x])
        mapped = torch.func.vmap(function)(both)
        with patched(model):
            assert close(torch.func.grad(lambda x: function(x).square().sum())(x), expected)
            assert close(torch.func.vmap(function)(both), mapped)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_way_to_patch(config: PatchConfig) -> None:
    model, function, x = SUBJECTS["wan"]()
    t = torch.randn_like(x)
    with sdpa_kernel(SDPBackend.MATH):
        _, expected = torch.func.jvp(function, (x,), (t,))
        with patched(model, config):
            function(x)  # the guard, and what is cached, come before
            assert close(torch.func.jvp(function, (x,), (t,))[1], expected)


def test_a_tangent_of_the_weights_alone() -> None:
    """No activation carries it into the first block: the mode is what counts."""
    model, _, x = SUBJECTS["wan"]()
    given = wan.CASES[0].inputs()
    name = "blocks.0.attn1.to_out.0.weight"
    weight = dict(model.named_parameters())[name].detach()
    t = torch.randn_like(weight)

    def function(weight: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(model, {name: weight}, (), given)[0]
        return out

    with sdpa_kernel(SDPBackend.MATH):
        _, expected = torch.func.jvp(function, (weight,), (t,))
        with patched(model):
            assert close(torch.func.jvp(function, (weight,), (t,))[1], expected)
    assert float(expected.norm()) > 0.1


def test_sparse_attention_refuses_a_forward_derivative() -> None:
    """Never the dense one in its place, which is another model."""
    model, given = with_sla(wan.CASES[0].model()), inputs_of(wan.CASES[0], batch=1)
    x = given.pop("hidden_states")
    with patched(model, PatchConfig(guard=False)), pytest.raises(errors.GradientError):
        torch.func.jvp(lambda x: model(hidden_states=x, **given)[0], (x,), (torch.ones_like(x),))


def test_the_next_forward_is_fused_again() -> None:
    model, function, x = SUBJECTS["wan"]()
    with patched(model, PatchConfig(guard=False)):
        before = function(x)
        with sdpa_kernel(SDPBackend.MATH):
            torch.func.jvp(function, (x,), (torch.ones_like(x),))
        assert torch.equal(function(x), before)
