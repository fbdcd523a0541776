"""Sparse-linear attention in plain torch against a dense, masked oracle of its definition."""

from __future__ import annotations

import pytest
import torch

from tests.measures import relative_l2
from turbo_rcm_patch.errors import ConfigError, GradientError, ShapeError
from turbo_rcm_patch.ops import (
    AttentionSpec,
    Sparsity,
    attention_skip,
    sparse_linear_attention,
)
from turbo_rcm_patch.ops.reference import norm_rope
from turbo_rcm_patch.ops.sparse_linear import sparse_linear_forward
from turbo_rcm_patch.ops.sparse_reference import block_map

pytestmark = pytest.mark.usefixtures("poisoned")

#: int8 q and k with 16-bit or e4m3 P and v against exact mathematics, N(0, 1).
FLOOR = {"bf16": 0.02, "fp8": 0.05}


def proj_l(dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random: the author's starts at zero, which would hide the linear branch."""
    return torch.randn(dim, dim) * dim**-0.5, torch.randn(dim)


def by_definition(q, k, v, weight, bias, heads, topk, block_q, block_k):
    """A mask over all pairs of tokens, and the linear branch as it is written; fp64."""
    qh, kh, vh = (x.double().unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    n_q, n_k, dim = qh.shape[2], kh.shape[2], qh.shape[3]
    rows, columns = torch.arange(n_q) // block_q, torch.arange(n_k) // block_k
    to_q = torch.nn.functional.one_hot(rows).double()
    to_k = torch.nn.functional.one_hot(columns).double()
    smooth = kh - kh.mean(2, keepdim=True)
    pooled_q = (to_q / to_q.sum(0)).T @ qh
    pooled_k = (to_k / to_k.sum(0)).T @ smooth
    scores = pooled_q @ pooled_k.transpose(-1, -2)
    count = max(1, int(topk * scores.shape[-1]))
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen.scatter_(-1, scores.topk(count, dim=-1).indices, True)
    seen = chosen[:, :, rows][..., columns]
    logits = (qh @ kh.transpose(-1, -2) * dim**-0.5).masked_fill(~seen, float("-inf"))
    sparse = logits.softmax(-1) @ vh
    phi_q, phi_k = qh.softmax(-1), kh.softmax(-1)
    numerator = phi_q @ (phi_k.transpose(-1, -2) @ vh)
    denominator = 1e-5 + (phi_q * phi_k.sum(2, keepdim=True)).sum(-1, keepdim=True)
    linear = (numerator / denominator) @ weight.double().T
    if bias is not None:
        linear = linear + bias.double()
    return (sparse + linear).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("batch", "heads", "n_q", "n_k", "dim", "topk", "block_q", "block_k"),
    [
        pytest.param(1, 2, 512, 512, 64, 0.25, 128, 64, id="d64"),
        pytest.param(2, 1, 300, 300, 128, 0.5, 64, 128, id="hopper-blocks-odd-length"),
        pytest.param(1, 2, 130, 333, 32, 0.3, 32, 32, id="cross-d32"),
        pytest.param(1, 1, 70, 70, 48, 0.1, 128, 64, id="at-least-one-block"),
        pytest.param(1, 2, 200, 200, 96, 1.0, 64, 128, id="every-block-d96"),
    ],
)
def test_exact_and_int8_equal_the_definition(
    batch: int, heads: int, n_q: int, n_k: int, dim: int, topk: float, block_q: int, block_k: int
) -> None:
    channels = heads * dim
    q, k, v = (torch.randn(batch, n, channels) for n in (n_q, n_k, n_k))
    k = k + 2 * torch.randn(channels)
    weight, bias = proj_l(dim)
    sparsity = Sparsity(topk=topk, block_q=block_q, block_k=block_k)
    expected = by_definition(q, k, v, weight, bias, heads, topk, block_q, block_k)
    exact = AttentionSpec(heads=heads, attention="exact")
    out = sparse_linear_attention(q, k, v, weight, bias, exact, sparsity)
    assert relative_l2(out, expected) < 1e-5
    for pv, floor in FLOOR.items():
        spec = AttentionSpec(heads=heads, pv=pv)
        out = sparse_linear_attention(q, k, v, weight, bias, spec, sparsity)
        assert relative_l2(out, expected) < floor


@pytest.mark.parametrize("attention", ["int8", "exact"])
def test_every_block_and_a_zero_projection_is_dense_attention(attention: str) -> None:
    q, k, v = (torch.randn(1, 300, 128) for _ in range(3))
    spec = AttentionSpec(heads=2, attention=attention)
    whole = sparse_linear_attention(
        q, k, v, torch.zeros(64, 64), None, spec, Sparsity(topk=1.0, block_k=128)
    )
    torch.testing.assert_close(whole, attention_skip(q, k, v, spec), atol=2e-6, rtol=1e-5)


def test_norm_and_rotary_come_first() -> None:
    q, k, v = (torch.randn(1, 150, 128) for _ in range(3))
    angle = torch.randn(150, 32).repeat_interleave(2, -1)
    rotary, norm = (angle.cos(), angle.sin()), torch.rand(128) + 0.5
    weight, bias = proj_l(64)
    spec, sparsity = AttentionSpec(heads=2, attention="exact"), Sparsity(topk=0.5)
    out = sparse_linear_attention(
        q, k, v, weight, bias, spec, sparsity, norm_q=norm, norm_k=norm, rotary=rotary
    )
    q, k = (
        norm_rope(x, 2, weight=norm, cos=rotary[0], sin=rotary[1], eps=1e-6)
        .transpose(1, 2)
        .flatten(2)
        for x in (q, k)
    )
    expected = sparse_linear_attention(q, k, v, weight, bias, spec, sparsity)
    torch.testing.assert_close(out, expected)


def test_a_shift_of_all_keys_changes_no_choice() -> None:
    q, k = torch.randn(1, 2, 256, 64).double(), torch.randn(1, 2, 512, 64).double()
    maps = [
        block_map(q, x, count=3, block_q=64, block_k=64, dtype=x.dtype)
        for x in (k, k + 5 * torch.randn(64))
    ]
    assert torch.equal(*maps)


def test_the_block_map_is_rounded_as_in_bf16_code() -> None:
    """Against the author's steps in torch's own bf16, with many nearly equal blocks. Sums in
    another order move a rounding now and then; fp32 throughout differs in more."""
    q, k = (torch.randn(1, 2, 2048, 64).bfloat16() for _ in range(2))

    def pooled(x: torch.Tensor, block: int) -> torch.Tensor:
        return x.float().unflatten(2, (-1, block)).mean(3).to(x.dtype)

    smooth = k - k.mean(2, keepdim=True)
    scores = pooled(q, 64) @ pooled(smooth, 32).transpose(-1, -2)
    author = scores.float().sort(dim=-1, descending=True, stable=True).indices[..., :16]
    author = author.sort(dim=-1).values
    differing = {}
    for dtype in (torch.bfloat16, torch.float32):
        own = block_map(q.float(), k.float(), count=16, block_q=64, block_k=32, dtype=dtype)
        differing[dtype] = int((own != author).any(-1).sum())
    assert differing[torch.bfloat16] <= 1 < differing[torch.float32]


def test_the_block_map_is_ascending_and_takes_the_first_of_equals() -> None:
    q, k = torch.ones(1, 1, 64, 32), torch.zeros(1, 1, 320, 32)
    k[:, :, 192:256] = 1.0
    chosen = block_map(q, k, count=3, block_q=64, block_k=64, dtype=torch.float32)
    assert chosen.flatten().tolist() == [0, 1, 3]


def test_sparsity_counts_and_refuses() -> None:
    assert Sparsity(topk=0.1, block_q=64, block_k=128).count(32760) == 25
    assert Sparsity(topk=0.1).count(64) == 1
    assert Sparsity.sage(0.2, torch.device("cpu")) == Sparsity(topk=0.2, block_q=128, block_k=64)
    bad_shares = ({"topk": value} for value in (0.0, 1.5, None, "0.1", True))
    for bad in (*bad_shares, {"topk": 0.1, "block_q": 48}):
        with pytest.raises(ConfigError):
            Sparsity(**bad)


def test_refusals() -> None:
    q = torch.randn(1, 70, 64)
    spec, sparsity = AttentionSpec(heads=1), Sparsity(topk=0.5)
    weight, bias = proj_l(64)
    with pytest.raises(GradientError):
        sparse_linear_attention(q, q, q, weight.requires_grad_(), bias, spec, sparsity)
    with torch.no_grad():
        sparse_linear_attention(q, q, q, weight, bias, spec, sparsity)
    with pytest.raises(ShapeError, match="proj_l"):
        sparse_linear_attention(q, q, q, weight.detach()[:32], bias, spec, sparsity)
    with pytest.raises(ConfigError, match="causal"):
        causal = AttentionSpec(heads=1, causal=True)
        sparse_linear_attention(q, q, q, weight.detach(), bias, causal, sparsity)
    wide = torch.randn(1, 10, 160)
    with pytest.raises(ShapeError, match="head_dim"):
        sparse_linear_attention(wide, wide, wide, weight.detach(), bias, spec, sparsity)


def test_opcheck_and_compile() -> None:
    q, k, v = (torch.randn(2, 80, 64) for _ in range(3))
    weight, bias = proj_l(32)
    numbers = (2, "int8", "bf16", True, 32**-0.5, 1e-6, 1, 64, 64, "reference", torch.float32)
    torch.library.opcheck(
        sparse_linear_forward.registered, (q, k, v, weight, bias, None, None, None, None, *numbers)
    )
    spec, sparsity = AttentionSpec(heads=2), Sparsity(topk=0.5, block_q=64)

    def branch(x: torch.Tensor) -> torch.Tensor:
        return sparse_linear_attention(x, 2 * x, x, weight, bias, spec, sparsity)

    compiled = torch.compile(branch, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), branch(q))
