"""The pieces of context-parallel attention in Triton's interpreter; run by test_interpreter.py in
a process of its own. fp8 is wrong in the interpreter, so v stays 16-bit; see
`interpreted_attention` for the tolerance."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.measures import relative_l2
from tests.ranks import groups, on_ranks
from turbo_rcm_patch.kernels.portable import shards
from turbo_rcm_patch.ops import AttentionSpec, attention_skip
from turbo_rcm_patch.ops import shards as reference
from turbo_rcm_patch.ops.parallel import parallel_attention

TIGHT = 1e-3

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def tokens(n: int, heads: int, dim: int, batch: int = 1) -> reference.Tokens:
    angle = torch.randn(n, dim // 2).repeat_interleave(2, -1)
    x = torch.randn(batch, n, heads * dim) + torch.randn(heads * dim)
    weight = 1 + 0.1 * torch.randn(heads * dim)
    return reference.Tokens(x, heads, weight, None, angle.cos(), angle.sin(), 1e-6)


@pytest.mark.parametrize(("batch", "n", "dim"), [(1, 150, 64), (2, 70, 40), (1, 40, 160)])
@pytest.mark.usefixtures("poisoned")
def test_pieces_equal_the_reference(batch: int, n: int, dim: int) -> None:
    heads = 2
    q, k = tokens(n, heads, dim, batch), tokens(n, heads, dim, batch)
    v = torch.randn(batch, n, heads * dim).half()
    own, expected = (
        module.statistics(k, v, first=3, step=7, smooth_k=True, fp8=False)[0]
        for module in (shards, reference)
    )
    assert relative_l2(own[..., :dim], expected) < 1e-6
    mean = expected / -(-(n - 3) // 7)
    wide = torch.nn.functional.pad(mean, (0, shards.width(dim) - dim))
    operands = {}
    for module, given in ((shards, wide), (reference, mean)):
        made = (
            module.queries(q, sm_scale=dim**-0.5, qmax=127),
            module.keys(k, given, qmax=127),
        )
        out, lse = module.attend(
            *made, v, None,
            n_q=n, n_kv=n, head_dim=dim, pv="fp16", out_dtype=torch.float32, want_lse=True,
        )  # fmt: skip
        operands[module] = *made, out, lse
    (own_q, own_k, out, lse), (ref_q, ref_k, ref_out, ref_lse) = operands.values()
    for (int8, scale), (ref_int8, ref_scale), rows in ((own_q, ref_q, n), (own_k, ref_k, n)):
        # A head is padded to a power of two by one and to a Hadamard matrix by the other.
        apart = int8[:, :, :rows, : ref_int8.shape[3]].int() - ref_int8[:, :, :rows].int()
        assert apart.abs().max() <= 1 and (apart != 0).float().mean() < 1e-3
        some = slice(0, rows if scale.shape[2] == int8.shape[2] else None)
        assert relative_l2(scale[:, :, some], ref_scale[:, :, some]) < 1e-5
    assert relative_l2(out, ref_out) < TIGHT
    assert (lse - ref_lse).abs().max() < 1e-3


def equals_one_device(rank: int) -> None:
    heads, dim, lengths = 3, 64, (70, 61)
    torch.manual_seed(0)
    q, k = tokens(sum(lengths), heads, dim), tokens(sum(lengths), heads, dim)
    v = torch.randn(1, sum(lengths), heads * dim)
    spec = AttentionSpec(heads=heads, pv="fp16", impl="triton")
    whole = attention_skip(
        q.x, k.x, v, spec, norm_q=q.weight, norm_k=k.weight, rotary=(q.cos, q.sin)
    )
    rows = slice(0, 70) if rank == 0 else slice(70, None)
    for degrees in ((2, 1), (1, 2)):
        out = parallel_attention(
            q.x[:, rows], k.x[:, rows], v[:, rows], spec, groups(*degrees),
            norm_q=q.weight, norm_k=k.weight, rotary=(q.cos[rows], q.sin[rows]),
        )  # fmt: skip
        # The mean of k is added in another order; a ring has other blocks of keys.
        assert relative_l2(out, whole[:, rows]) < (TIGHT if degrees[1] == 1 else 1e-2), degrees


def some_heads_exact(rank: int) -> None:
    """Kernels read the channels of some heads where they lie among those of others."""
    heads, dim, lengths = 4, 64, (40, 30)
    torch.manual_seed(0)
    q, k = tokens(sum(lengths), heads, dim), tokens(sum(lengths), heads, dim)
    v = torch.randn(1, sum(lengths), heads * dim)
    spec = AttentionSpec(heads=heads, pv="fp16", impl="triton", exact_heads=(0, 3))
    whole = attention_skip(
        q.x, k.x, v, spec, norm_q=q.weight, norm_k=k.weight, rotary=(q.cos, q.sin)
    )
    rows = slice(0, 40) if rank == 0 else slice(40, None)
    out = parallel_attention(
        q.x[:, rows], k.x[:, rows], v[:, rows], spec, groups(2, 1),
        norm_q=q.weight, norm_k=k.weight, rotary=(q.cos[rows], q.sin[rows]),
    )  # fmt: skip
    for head in range(heads):
        at = slice(head * dim, (head + 1) * dim)
        assert relative_l2(out[..., at], whole[:, rows, at]) < TIGHT, head


@pytest.mark.parametrize("check", [equals_one_device, some_heads_exact])
def test_two_ranks_equal_one(check: Callable[[int], None]) -> None:
    on_ranks(2, check)
