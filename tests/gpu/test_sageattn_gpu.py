"""`sageattn` and the diffusers backend on a real GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import dispatch_attention_fn

from tests.measures import relative_l2
from turbo_rcm_patch import register_backend, sageattn, unregister_backend

pytestmark = pytest.mark.gpu

#: e4m3 p and v from 4,096 keys on; see test_ops_gpu.py.
FLOOR = {1500: 0.02, 4200: 0.05}


@pytest.mark.parametrize("tokens", FLOOR)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "transposed-view"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 128])
def test_against_exact_attention(
    tokens: int, layout: str, contiguous: bool, causal: bool, dim: int
) -> None:
    q, k, v = (torch.randn(2, 3, tokens, dim, device="cuda").bfloat16() for _ in range(3))
    exact = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=causal)
    if layout == "NHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    # As memory of this layout, or of the other one.
    if contiguous:
        q, k, v = (x.contiguous() for x in (q, k, v))
    else:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    out, lse = sageattn(q, k, v, layout, causal, return_lse=True)
    plain = sageattn(q, k, v, layout, causal)
    assert out.shape == q.shape and lse.shape == (2, 3, tokens)
    for one in (out, plain):
        one = one if layout == "HND" else one.transpose(1, 2)
        assert relative_l2(one, exact) < FLOOR[tokens]


def test_grouped_queries_and_the_backend() -> None:
    q = torch.randn(1, 1500, 6, 64, device="cuda").bfloat16()
    k, v = (torch.randn(1, 1500, 2, 64, device="cuda").bfloat16() for _ in range(2))
    exact = dispatch_attention_fn(q.float(), k.float(), v.float(), enable_gqa=True)
    name = register_backend()
    try:
        out = dispatch_attention_fn(q, k, v, enable_gqa=True, backend=name)
    finally:
        unregister_backend()
    assert relative_l2(out, exact) < 0.02
