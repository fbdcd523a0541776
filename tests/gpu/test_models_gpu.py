"""The patched `RCMAttention` through the Triton kernels, against plain torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.measures import relative_l2
from turbo_rcm_patch import patch_model
from turbo_rcm_patch.boundary import (
    EDM,
    ConsistencyModel,
    Parameterisation,
    RCMWrapper,
    RectifiedFlow,
    TrigFlow,
)
from turbo_rcm_patch.models import RCMAttention

pytestmark = pytest.mark.gpu

FUSION_BUDGET = 3e-6
projections = pytest.mark.parametrize("projection", [True, False], ids=["projection", "bare"])


def pair(projection: bool, dtype: torch.dtype = torch.float32, **options: Any) -> list[Any]:
    """The module in plain torch, and the same one patched."""
    given = {name: options.pop(name) for name in list(options) if name.startswith("c_")}
    plain = RCMAttention(256, 2, projection=projection, device="cuda", **given).to(dtype).eval()
    fused = copy.deepcopy(plain)
    patch_model(fused, impl="triton", guard=False, **options)
    return [plain, fused]


@projections
@pytest.mark.parametrize("tokens", [1, 77, 1000])
@pytest.mark.parametrize("per_sample", [False, True], ids=["scalar", "per sample"])
def test_exact_attention_equals_two_pass(projection: bool, tokens: int, per_sample: bool) -> None:
    two_pass, one_pass = pair(projection, attention="exact")
    x = torch.randn(2, tokens, 256, device="cuda")
    t = torch.tensor([0.3, 1.7], device="cuda") if per_sample else 0.8
    with torch.no_grad():
        want, got = two_pass(x, t), one_pass(x, t)
        exact = copy.deepcopy(two_pass).double()(x.double(), t)
    assert relative_l2(got, want) < FUSION_BUDGET
    assert relative_l2(got, exact) <= 2 * relative_l2(want, exact) + 1e-8


@projections
@pytest.mark.parametrize("form", ["one-launch", "two-launch"])
def test_int8_is_within_its_budget_in_bf16(projection: bool, form: str) -> None:
    two_pass, one_pass = pair(projection, torch.bfloat16, attention="int8", form=form)
    x = torch.randn(2, 1000, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        assert relative_l2(one_pass(x, 1e6), two_pass(x, 1e6)) < 0.10


@projections
@pytest.mark.parametrize(
    "family",
    [EDM(0.5), ConsistencyModel(0.5, 0.002), TrigFlow(), RCMWrapper(), RectifiedFlow()],
    ids=lambda f: type(f).__name__,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_identity_end_gives_the_input_exactly(
    family: Parameterisation, projection: bool, dtype: torch.dtype
) -> None:
    options = {"c_skip": family.c_skip, "c_out": family.c_out, "attention": "int8"}
    _, one_pass = pair(projection, dtype, **options)
    x = torch.randn(2, 130, 256, device="cuda", dtype=dtype)
    end = family.identity_end
    with torch.no_grad():
        assert torch.equal(one_pass(x, end), x)
        assert torch.equal(one_pass(x, torch.full((2,), end, device="cuda")), x)
