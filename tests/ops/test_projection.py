"""A projection that closes its skip, after an attention too: in plain torch, in the interpreter
and on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.implementations import Implementation, coefficient, over
from tests.measures import relative_l2
from turbo_rcm_patch.kernels.launch import Tile
from turbo_rcm_patch.kernels.portable.project import project_skip as own_kernel
from turbo_rcm_patch.ops import (
    AttentionSpec,
    attention_project_skip,
    attention_skip,
    choose_form,
    norm_modulate,
    project_skip,
    skip,
)

pytestmark = pytest.mark.usefixtures("poisoned")

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
#: The fusion alone, in fp32, W_o included: relative L2.
FUSION = 3e-6

# --- a projection alone --------------------------------------------------------------------------

#: Tokens, channels, features.
SIZE = {"reference": (9, 20, 30), "interpreter": (70, 72, 100), "gpu": (1023, 520, 700)}
#: Against fp64. 16 bits round once at the end, or with the cast "model" after every step; the
#: reference rounds the product too, as a Linear does.
BUDGET = {
    "reference": {(FP32, "fp32"): FUSION, (BF16, "fp32"): 6e-3},
    "interpreter": {
        (FP32, "fp32"): FUSION, (FP32, "model"): FUSION,
        (FP16, "fp32"): 4e-4, (FP16, "model"): 1.5e-3,
    },
    "gpu": {
        (FP32, "fp32"): FUSION, (FP32, "model"): 3 * FUSION,
        (FP16, "fp32"): 3e-4, (FP16, "model"): 9e-4,
        (BF16, "fp32"): 2e-3, (BF16, "model"): 6e-3,
    },
}  # fmt: skip
FORMS = ["float", "batch", "channel", "element"]


@over(
    **{
        name: {
            "dtype, cast": budgets,
            "form": FORMS + (["token"] if name == "reference" else []),
        }
        for name, budgets in BUDGET.items()
    }
)
def test_a_projection_that_closes_its_skip_is_near_fp64(
    on: Implementation, dtype: torch.dtype, cast: str, form: str
) -> None:
    tokens, channels, features = SIZE[on.name]
    c = coefficient(on, form, (2, tokens, features))
    x = on.randn(2, tokens, 3 * channels, dtype=dtype)[..., channels : 2 * channels]
    weight = on.randn(features, channels, dtype=dtype) * channels**-0.5
    bias, residual = on.randn(features, dtype=dtype), on.randn(2, tokens, features, dtype=dtype)
    given = {"residual": residual, "c_skip": c, "c_out": c, "cast": cast, "impl": on.impl}
    out = project_skip(x, weight, bias, **given)
    wide = c.view(2, 1, 1) if form == "batch" else c
    truth = wide * (residual.double() + F.linear(x.double(), weight.double(), bias.double()))
    if on.name == "gpu" and dtype != FP32:
        # The library's product, rounded as the author's is, and the skip; then our own kernel.
        assert torch.equal(out, skip(residual, F.linear(x, weight, bias), c, c, cast=cast))
        own = {"cast": cast, "out_dtype": dtype, "tile": Tile(64, 64, 4, 2)}
        out = own_kernel(x, weight, bias, residual, wide, wide, **own)
    assert relative_l2(out, truth) < BUDGET[on.name][dtype, cast]


def test_a_projection_needs_neither_residual_nor_bias() -> None:
    x, weight = torch.randn(2, 9, 20), torch.randn(30, 20)
    out = project_skip(x, weight, residual=None, c_out=2.0)
    torch.testing.assert_close(out, 2 * F.linear(x, weight))


@over("gpu")
def test_a_large_projection_is_the_library_s_bit_for_bit(on: Implementation) -> None:
    """Rounded to bf16 before the skip, as eager code does."""
    x, residual = (on.randn(1, 32760, 1536, dtype=BF16) for _ in range(2))
    weight, bias = on.randn(1536, 1536, dtype=BF16) / 40, on.randn(1536, dtype=BF16)
    gate = on.randn(1, 1, 1536)
    got = project_skip(x, weight, bias, residual=residual, c_out=gate)
    eager = (residual.float() + F.linear(x, weight, bias) * gate).to(BF16)
    assert torch.equal(got, eager)


@over(interpreter={"stream": [FP32, FP16], "out_dtype": [FP32, FP16]})
def test_beside_a_residual_in_fp32_only_the_result_is_rounded(
    on: Implementation, stream: torch.dtype, out_dtype: torch.dtype
) -> None:
    """By projection, skip and norm, whatever the cast policy of the 16-bit model."""
    x, weight = on.randn(2, 70, 72, dtype=FP16), on.randn(100, 72, dtype=FP16)
    residual, gate = 100 * on.randn(2, 70, 100, dtype=stream), on.randn(2, 1, 100)
    given = {"c_out": gate, "impl": on.impl, "out_dtype": out_dtype}
    branch = F.linear(x.double(), weight.double())
    truth = residual.double() + gate.double() * branch
    budget = 1e-6 if out_dtype == FP32 else 4e-4
    made = project_skip(x, weight, residual=residual, **given)
    assert made.dtype == out_dtype and relative_l2(made, truth) < budget
    narrow = branch.half()
    made, truth = skip(residual, narrow, **given), residual.double() + gate.double() * narrow
    assert made.dtype == out_dtype and relative_l2(made, truth) < budget
    normed = norm_modulate(residual, scale=gate, impl=on.impl, out_dtype=out_dtype)
    truth = F.layer_norm(residual.double(), (100,), eps=1e-6) * (1 + gate.double())
    assert normed.dtype == out_dtype and relative_l2(normed, truth) < budget


# --- attention, its projection and the skip ------------------------------------------------------


@over(
    reference={
        "attention": ["int8", "exact"],
        "heads, dim, tokens, features": [pytest.param(3, 32, 60, 80, id="d32")],
    },
    interpreter={
        "attention": ["int8"],
        "heads, dim, tokens, features": [
            pytest.param(2, 64, 130, 128, id="d64"),
            pytest.param(3, 40, 70, 100, id="d40-odd-features"),
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
    residual, gate = on.randn(2, tokens, features), on.randn(2, 1, features)
    given, forms = {}, ["two-launch", "auto"]
    if on.name == "reference":
        gate = on.randn(2, tokens, features)
    else:
        given["kv_lengths"] = torch.tensor([tokens - 9, tokens], dtype=torch.int32)
        forms.remove("auto")  # it is two launches again
    if attention == "int8":
        forms.append("one-launch")
    spec = AttentionSpec(heads=heads, attention=attention, pv="fp16", impl=on.impl)
    branch = attention_skip(q, k, v, spec, **given)
    projected = F.linear(branch.double(), weight.double(), bias.double())
    truth = 0.5 * residual.double() + gate * projected
    unfused = 0.5 * residual + gate * F.linear(branch, weight, bias)
    for form in forms:
        out = attention_project_skip(
            q, k, v, weight, bias, spec,
            residual=residual, c_skip=0.5, c_out=gate, form=form, **given,
        )  # fmt: skip
        assert relative_l2(out, truth) < FUSION
        assert relative_l2(out, unfused) < FUSION
        assert relative_l2(out, truth) <= 2 * relative_l2(unfused, truth) + 1e-8


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
    budget = {FP32: FUSION, BF16: 2e-3, FP16: 4e-4}[dtype]
    if dtype == FP32:
        assert relative_l2(run("two-launch"), truth) < budget
    else:  # Its product is the library's, rounded as the author's is.
        projected = F.linear(branch.to(dtype), weight, bias)
        assert torch.equal(run("two-launch"), skip(residual, projected, 1.0, gate))
    first = run("one-launch")
    assert relative_l2(first, truth) < budget
    for _ in range(100):  # scratch memory is reused from call to call, in whatever state
        assert torch.equal(run("one-launch"), first)


def test_a_device_nobody_measured_takes_two_launches() -> None:
    assert choose_form(1, 1000, 1000, 12, 128, 1536, torch.device("cpu")) == "two-launch"
