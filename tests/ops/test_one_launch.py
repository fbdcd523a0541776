"""Attention, its output projection and the skip, in one launch and in three."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.implementations import Implementation, over
from tests.inputs import attention_project_skip
from tests.measures import relative_l2
from turbo_rcm_patch.ops import AttentionSpec, attention_skip, skip

pytestmark = pytest.mark.usefixtures("poisoned")

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
#: The fusion alone, in fp32, W_o included: relative L2.
FUSION = 3e-6


@over(
    reference={
        "attention": ["int8", "exact"],
        "heads, dim, tokens, features": [pytest.param(3, 32, 60, 80, id="d32")],
    },
    interpreter={
        "attention": ["int8"],
        "heads, dim, tokens, features": [
            pytest.param(2, 64, 70, 128, id="d64"),
            pytest.param(3, 40, 30, 100, id="d40-odd-features"),
        ],
    },
)
def test_attention_and_projection_fused_are_as_near_fp64_as_apart(
    on: Implementation, attention: str, heads: int, dim: int, tokens: int, features: int
) -> None:
    """The fusion alone: in fp32, over the same quantised attention, in every form."""
    channels = heads * dim
    q, k, v = (on.randn(2, tokens, channels) for _ in range(3))
    weight, bias = on.randn(features, channels) * channels**-0.5, on.randn(features)
    residual = on.randn(2, tokens, features)
    gate = on.randn(2, tokens if on.name == "reference" else 1, features)
    lengths = torch.tensor([tokens - 9, tokens], dtype=torch.int32)
    spec = AttentionSpec(heads=heads, attention=attention, pv="fp16", impl=on.impl)
    branch = attention_skip(q, k, v, spec, kv_lengths=lengths)
    projected = F.linear(branch.double(), weight.double(), bias.double())
    truth = 0.5 * residual.double() + gate * projected
    unfused = 0.5 * residual + gate * F.linear(branch, weight, bias)
    forms = ["two-launch"] + ["one-launch"] * (attention == "int8")
    for form in forms + ["auto"] * (on.name == "reference"):
        out = attention_project_skip(
            q, k, v, weight, bias, spec,
            residual=residual, c_skip=0.5, c_out=gate, form=form, kv_lengths=lengths,
        )  # fmt: skip
        assert relative_l2(out, truth) < FUSION
        assert relative_l2(out, truth) <= 2 * relative_l2(unfused, truth) + 1e-8


@pytest.mark.parametrize("form", ["one-launch", "two-launch"])
def test_without_residual_and_bias_and_in_16_bits(form: str) -> None:
    q, k, v = (torch.randn(1, 40, 64).bfloat16() for _ in range(3))
    weight = torch.randn(48, 64).bfloat16() / 8
    spec = AttentionSpec(heads=2, impl="reference")
    out = attention_project_skip(q, k, v, weight, None, spec, residual=None, c_out=0.5, form=form)
    expected = 0.5 * F.linear(attention_skip(q, k, v, spec).double(), weight.double())
    assert out.shape == (1, 40, 48) and out.dtype == BF16
    assert relative_l2(out, expected) < 6e-3


@over(
    gpu={
        "heads, dim, tokens, dtype, pv": [
            pytest.param(12, 128, 1023, BF16, "fp8", id="bf16-h12-d128-fp8"),
            pytest.param(12, 128, 1023, BF16, "bf16", id="bf16-h12-d128"),
            pytest.param(5, 64, 777, FP32, "fp8", id="fp32-h5-d64-fp8"),
            pytest.param(3, 128, 4100, BF16, "auto", id="bf16-d128-long"),
            pytest.param(3, 80, 500, BF16, "bf16", id="bf16-d80"),
            pytest.param(2, 256, 300, FP16, "fp16", id="fp16-d256"),
        ]
    }
)
def test_one_launch_is_near_fp64_and_gives_the_same_bits_again(
    on: Implementation, heads: int, dim: int, tokens: int, dtype: torch.dtype, pv: str
) -> None:
    on.skip_without(pv)
    channels = heads * dim
    q, k, v, residual = (on.randn(2, tokens, channels, dtype=dtype) for _ in range(4))
    weight = on.randn(channels, channels, dtype=dtype) * channels**-0.5
    bias, gate = on.randn(channels, dtype=dtype), on.randn(2, 1, channels)
    spec = AttentionSpec(heads=heads, pv=pv)

    def run(form: str) -> torch.Tensor:
        return attention_project_skip(
            q, k, v, weight, bias, spec, residual=residual, c_out=gate, form=form
        )

    branch = attention_skip(q, k, v, spec).double()
    truth = residual.double() + gate * F.linear(branch, weight.double(), bias.double())
    # Two launches take the library's product, rounded as the author's is.
    projected = F.linear(branch.to(dtype), weight, bias)
    assert torch.equal(run("two-launch"), skip(residual, projected, 1.0, gate))
    first = run("one-launch")
    assert relative_l2(first, truth) < {FP32: FUSION, BF16: 2e-3, FP16: 4e-4}[dtype]
    for _ in range(100):  # scratch memory is reused from call to call, in whatever state
        assert torch.equal(run("one-launch"), first)
