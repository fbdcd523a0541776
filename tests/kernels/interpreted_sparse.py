"""Sparse-linear attention in Triton's interpreter; run by test_interpreter.py in a process of its
own.

fp32 and fp16 only, as in interpreted_attention.py, whose tolerance holds here too: the sparse part
rounds as the emulation does, and the linear branch adds fp32 sums in another order.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.inputs import attention_inputs
from tests.measures import relative_l2
from turbo_rcm_patch.kernels.portable.prologue import quantize
from turbo_rcm_patch.kernels.portable.sparse_attention import largest_scores
from turbo_rcm_patch.ops import AttentionSpec, Sparsity, sparse_linear_attention

TIGHT = 1e-3

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    # numpy computes both sides of a `where`
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.mark.parametrize(
    ("batch", "heads", "n_q", "n_k", "dim", "sparsity", "options"),
    [
        pytest.param(
            1, 2, 300, 300, 64, Sparsity(topk=0.5, block_q=64, block_k=128), {}, id="hopper-blocks"
        ),
        pytest.param(1, 1, 200, 330, 128, Sparsity(topk=0.4), {}, id="blocks-elsewhere-d128"),
        pytest.param(
            2, 2, 130, 260, 64, Sparsity(topk=0.5), {"dtype": torch.float16}, id="fp16-batch-2"
        ),
        pytest.param(
            1, 2, 70, 200, 40, Sparsity(topk=0.7, block_q=32, block_k=32), {"bias": False},
            id="d40-small-blocks",
        ),
        pytest.param(
            1, 2, 140, 140, 64, Sparsity(topk=0.5), {"norm": True, "strided": True},
            id="norm-and-rotary-strided",
        ),
        pytest.param(1, 1, 20, 20, 96, Sparsity(topk=0.1), {}, id="one-block-d96"),
        pytest.param(
            1, 1, 64, 260, 64, Sparsity(topk=1.0, block_q=64, block_k=128), {}, id="every-block"
        ),
    ],
)  # fmt: skip
def test_kernels_equal_the_emulation(
    batch: int, heads: int, n_q: int, n_k: int, dim: int, sparsity: Sparsity, options: dict
) -> None:
    dtype, channels = options.get("dtype", torch.float32), heads * dim
    q, k, v = (torch.randn(batch, n, channels).to(dtype) for n in (n_q, n_k, n_k))
    k = k + 2 * torch.randn(channels).to(dtype)
    if options.get("strided"):
        q, k, v = torch.cat([q, k, v], -1).chunk(3, -1)
    weight = torch.randn(dim, dim) * dim**-0.5
    bias = torch.randn(dim) if options.get("bias", True) else None
    more: dict = {"out_dtype": torch.float32}
    if options.get("norm"):
        angle = torch.randn(n_q, dim // 2).repeat_interleave(2, -1)
        norm = torch.rand(channels) + 0.5
        more |= {"norm_q": norm, "norm_k": norm, "rotary": (angle.cos(), angle.sin())}
    spec = AttentionSpec(heads=heads, pv="fp16", impl="triton")
    out = sparse_linear_attention(q, k, v, weight, bias, spec, sparsity, **more)
    expected = sparse_linear_attention(
        q, k, v, weight, bias, replace(spec, impl="reference"), sparsity, **more
    )
    assert relative_l2(out, expected) < TIGHT


def test_fp8_layout() -> None:
    """The interpreter's e4m3 casts are wrong for a few values in a hundred, so only coarsely."""
    q, k, v = (torch.randn(1, 200, 64) for _ in range(3))
    weight, sparsity = torch.randn(64, 64) / 8, Sparsity(topk=0.5)
    spec = AttentionSpec(heads=1, pv="fp8", impl="triton")
    out = sparse_linear_attention(q, k, v, weight, None, spec, sparsity)
    exact = replace(spec, attention="exact")
    expected = sparse_linear_attention(q, k, v, weight, None, exact, sparsity)
    assert relative_l2(out, expected) < 0.15


@pytest.mark.parametrize(("columns", "count"), [(1, 1), (5, 2), (16, 16), (37, 9), (300, 30)])
def test_largest_scores_are_the_sorted_ones(columns: int, count: int) -> None:
    """Coarse numbers, so that there are equals of both signs."""
    scores = torch.randn(1, 2, 7, columns).mul(2).round()
    scores[scores == 0] *= torch.tensor(-1.0)  # -0, which equals 0
    chosen = largest_scores(scores, count)
    expected = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    assert chosen.dtype == torch.int32
    assert torch.equal(chosen.long(), expected.sort(dim=-1).values)


def test_nan_is_chosen_and_stays_visible() -> None:
    q, k, v = (torch.randn(1, 256, 32) for _ in range(3))
    k[0, 200, 3] = float("nan")
    spec = AttentionSpec(heads=1, pv="fp16", impl="triton")
    sparsity = Sparsity(topk=0.3, block_q=64, block_k=64)
    out = sparse_linear_attention(q, k, v, torch.zeros(32, 32), None, spec, sparsity)
    assert out.isnan().any(-1).all()


def test_features_that_no_key_has_stay_finite_in_fp16() -> None:
    q, k, v = torch.zeros(1, 64, 32), torch.zeros(1, 128, 32), torch.randn(1, 128, 32)
    q[..., 3], k[..., 5] = 60.0, 60.0
    spec, sparsity = AttentionSpec(heads=1, pv="fp16"), Sparsity(topk=1.0)
    q, k, v = q.half(), k.half(), v.half()
    for impl in ("triton", "reference"):
        own = replace(spec, impl=impl)
        out = sparse_linear_attention(q, k, v, torch.eye(32), None, own, sparsity)
        assert out.isfinite().all()


def test_the_layout_of_the_prologue_is_the_one_the_kernel_reads() -> None:
    q = torch.randn(1, 130, 64)
    operands = quantize(attention_inputs(q, q, q, heads=1, pv="fp16", sm_scale=1.0))
    assert operands.keys.int8.shape == operands.queries.int8.shape == (1, 1, 256, 64)
    assert operands.keys.scale.shape == (1, 1, 2)
