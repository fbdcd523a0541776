"""Sparse-linear attention on a GPU: Hopper's own pass over keys, full sizes, memory. Its accuracy
is tested in `tests/ops`, networks in `test_patching_gpu.py`.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.common import random, skip_without
from tests.measures import relative_l2
from tests.sparse import ELSEWHERE, FLOOR, HOPPER, chosen_blocks, proj_l
from turbo_rcm_patch.ops import AttentionSpec, Sparsity, sparse_linear_attention
from turbo_rcm_patch.ops.attention.reference import split_heads
from turbo_rcm_patch.ops.sparse_linear.reference import linear_branch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("batch", "heads", "tokens", "dim", "block_k", "dtype", "strided"),
    [
        pytest.param(1, 3, 1000, 128, 128, torch.bfloat16, False, id="d128"),
        pytest.param(2, 2, 777, 64, 128, torch.float16, True, id="d64-batch-2-strided"),
        pytest.param(1, 5, 5000, 64, 64, torch.bfloat16, False, id="small-blocks"),
        pytest.param(1, 2, 50, 128, 64, torch.bfloat16, False, id="one-block"),
        pytest.param(1, 200, 300, 64, 128, torch.bfloat16, True, id="more-heads-than-programs"),
    ],
)
def test_the_pass_over_keys_on_hopper_equals_the_portable_one(
    batch: int, heads: int, tokens: int, dim: int, block_k: int, dtype: torch.dtype,
    strided: bool,
) -> None:  # fmt: skip
    from turbo_rcm_patch.ops.launch import target_of
    from turbo_rcm_patch.ops.sparse_linear import hopper, triton
    from turbo_rcm_patch.ops.sparse_linear.api import KERNELS

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper GPU")
    wide = random(batch, tokens, 3 * heads * dim, dtype=dtype)
    k, v = wide.chunk(3, -1)[1:]
    if not strided:
        k, v = k.contiguous(), v.contiguous()
    mean = k.float().mean(1).view(batch, heads, dim).to(dtype)
    assert KERNELS[0].serves(target_of(k.device), (k, v, heads, block_k))
    own = hopper.launch_key_sums(k, v, mean, heads=heads, block_k=block_k)
    portable = triton.launch_key_sums(k, v, mean, heads=heads, block_k=block_k)
    # Sums in another order; a mean of a block may then round the other way.
    assert relative_l2(own.matrix.sum(2), portable.matrix.sum(2)) < 1e-4
    assert relative_l2(own.total.sum(2), portable.total.sum(2)) < 1e-5
    assert relative_l2(own.k_pooled, portable.k_pooled) < 1e-3
    again = hopper.launch_key_sums(k, v, mean, heads=heads, block_k=block_k)
    assert all(torch.equal(one, other) for one, other in zip(own, again, strict=True))


@pytest.mark.parametrize("pv", ["fp8", "bf16"])
@pytest.mark.parametrize("blocks", [HOPPER, ELSEWHERE], ids=["64x128", "128x64"])
def test_a_full_size_is_near_exact_mathematics(pv: str, blocks: dict) -> None:
    """Wan2.1-1.3B at 480p and 81 frames, a tenth of the keys; every head, a few blocks of rows."""
    skip_without(pv)
    heads, tokens, dim = 12, 32760, 128
    q, k, v = (random(1, tokens, heads * dim) for _ in range(3))
    k = k + 2 * random(heads * dim)
    weight, bias = proj_l(dim, "cuda")
    spec, sparsity = AttentionSpec(heads=heads, pv=pv), Sparsity(topk=0.1, **blocks)
    out = split_heads(sparse_linear_attention(q, k, v, weight, bias, spec, sparsity), heads)
    qh, kh, vh = (split_heads(x, heads).float() for x in (q, k, v))
    chosen = chosen_blocks(q, k, v, heads, sparsity)
    linear = linear_branch(qh, kh, vh, weight, bias, dtype=torch.float32)
    assert chosen.shape[-1] == sparsity.count(tokens)
    block_q, block_k = blocks["block_q"], blocks["block_k"]
    for h in range(heads):
        for i in (0, 17 * (h + 1), chosen.shape[2] - 1):
            rows = slice(i * block_q, (i + 1) * block_q)
            keys = chosen[0, h, i, :, None] * block_k + torch.arange(block_k, device="cuda")
            keys = keys.flatten()[keys.flatten() < tokens]
            logits = (qh[0, h, rows] @ kh[0, h, keys].T * dim**-0.5).double()
            expected = logits.softmax(-1) @ vh[0, h, keys].double() + linear[0, h, rows]
            assert relative_l2(out[0, h, rows], expected) < FLOOR[pv], (h, i)


def test_large_keys_and_sums_stay_finite_in_fp16() -> None:
    """Features of 100,000 keys add up to more than fp16 holds unless they are scaled."""
    q, k, v = (random(1, 100_000, 64, dtype=torch.float16) * 8 for _ in range(3))
    weight, bias = proj_l(64, "cuda")
    spec = AttentionSpec(heads=1)
    out = sparse_linear_attention(q, k, v, weight, bias, spec, Sparsity(topk=0.02))
    assert out.isfinite().all()


def test_the_exact_form_at_full_size_fits_beside_a_model() -> None:
    """The form that the guard compares with, Wan2.1-1.3B at 480p and 81 frames."""
    heads, tokens = 12, 32760
    q, k, v = (random(1, tokens, heads * 128) for _ in range(3))
    weight, bias = proj_l(128, "cuda")
    sparsity = Sparsity(topk=0.1, **HOPPER)
    made = sparse_linear_attention(q, k, v, weight, bias, AttentionSpec(heads=heads), sparsity)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    exact = AttentionSpec(heads=heads, attention="exact")
    out = sparse_linear_attention(q, k, v, weight, bias, exact, sparsity)
    assert torch.cuda.max_memory_allocated() - before < 3 * 2**30
    # Random keys score nearly alike, so a few blocks of queries see other keys.
    assert relative_l2(made, out) < 0.15
