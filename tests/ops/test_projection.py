"""The projection with skip, the elementwise skip and the fused operation, in plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.measures import relative_l2
from turbo_rcm_patch.ops import (
    AttentionSpec,
    attention_project_skip,
    attention_skip,
    choose_form,
    project_skip,
    skip,
)

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("cast", ["fp32", "model"])
def test_skip_is_what_eager_code_computes(cast: str) -> None:
    x, branch = torch.randn(2, 2, 9, 16).bfloat16()
    gate = torch.randn(2, 1, 16)
    if cast == "fp32":
        expected = (x.float() + branch.float() * gate).to(x.dtype)
    else:
        expected = x + branch * gate.to(x.dtype)
    assert torch.equal(skip(x, branch, 1.0, gate, cast=cast), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(), (2,), (2, 1, 30), (2, 9, 30), (2, 9, 1)], ids=str)
def test_projection(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    c = torch.randn(shape) if shape else 0.7
    x, weight, bias = torch.randn(2, 9, 20), torch.randn(30, 20), torch.randn(30)
    x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    residual = torch.randn(2, 9, 30).to(dtype)
    out = project_skip(x, weight, bias, residual=residual, c_skip=c, c_out=c)
    wide = c.view(2, 1, 1) if len(shape) == 1 else c
    truth = wide * (residual.double() + F.linear(x.double(), weight.double(), bias.double()))
    assert relative_l2(out, truth) < (3e-6 if dtype == torch.float32 else 6e-3)


def test_without_residual_or_bias() -> None:
    x, weight = torch.randn(2, 9, 20), torch.randn(30, 20)
    out = project_skip(x, weight, residual=None, c_out=2.0)
    torch.testing.assert_close(out, 2 * F.linear(x, weight))


@pytest.mark.parametrize("attention", ["int8", "exact"])
def test_the_fusion_alone(attention: str) -> None:
    """fp32, W_o included: fused against unfused over the same attention."""
    q, k, v = torch.randn(3, 2, 60, 96)
    weight, bias = torch.randn(80, 96) * 0.1, torch.randn(80)
    residual, gate = torch.randn(2, 60, 80), torch.randn(2, 60, 80)
    spec = AttentionSpec(heads=3, attention=attention)
    forms = ["two-launch", "auto"] + (["one-launch"] if attention == "int8" else [])
    branch = attention_skip(q, k, v, spec)
    truth = 0.5 * residual.double() + gate * F.linear(
        branch.double(), weight.double(), bias.double()
    )
    unfused = 0.5 * residual + gate * F.linear(branch, weight, bias)
    for form in forms:
        out = attention_project_skip(
            q, k, v, weight, bias, spec, residual=residual, c_skip=0.5, c_out=gate, form=form
        )
        assert relative_l2(out, unfused) < 3e-6
        assert relative_l2(out, truth) <= 2 * relative_l2(unfused, truth) + 1e-8


def test_form_on_a_device_nobody_measured() -> None:
    assert choose_form(1, 1000, 1000, 12, 128, 1536, torch.device("cpu")) == "two-launch"
