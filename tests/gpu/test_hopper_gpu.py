"""Hopper's own attention kernel against the portable one, on a GPU."""

from __future__ import annotations

import pytest
import torch

from turbo_rcm_patch.kernels.attention import attention
from turbo_rcm_patch.kernels.launch import target_of, tile_for

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("batch", "n_q", "n_kv", "lengths"),
    [(1, 4096, 4096, None), (1, 1000, 333, None), (2, 193, 129, (0, 129)), (2, 70, 640, (1, 500))],
)
def test_the_hopper_kernel_equals_the_portable_one(
    head_dim: int, batch: int, n_q: int, n_kv: int, lengths: tuple[int, ...] | None
) -> None:
    """Bit for bit: the same arithmetic in another order of loads."""
    device = torch.device("cuda", 0)
    if target_of(device) != ("cuda", 90):
        pytest.skip("the kernel is for compute capability 9.0")
    heads = 3
    q = torch.randn(batch, n_q, heads * head_dim, device=device, dtype=torch.bfloat16)
    k = torch.randn(batch, n_kv, heads * head_dim, device=device, dtype=torch.bfloat16)
    v = torch.randn(batch, n_kv, heads * head_dim, device=device, dtype=torch.bfloat16)
    common = {
        "heads": heads,
        "residual": None,
        "c_skip": 1.0,
        "c_out": 1.0,
        "norm_q": None,
        "norm_k": None,
        "cos": None,
        "sin": None,
        "kv_lengths": None
        if lengths is None
        else torch.tensor(lengths, device=device, dtype=torch.int32),
        "pv": "fp8",
        "qmax": 127,
        "smooth_k": True,
        "causal": False,
        "sm_scale": head_dim**-0.5,
        "eps": 1e-6,
        "out_dtype": torch.bfloat16,
        "want_lse": True,
    }
    own, own_lse = attention(q, k, v, **common)
    tile = tile_for("attention", f"fp8_{head_dim}", target_of(device))
    portable, portable_lse = attention(q, k, v, tile=tile, **common)
    assert torch.isfinite(own).all()
    assert torch.equal(own, portable)
    assert torch.equal(own_lse, portable_lse)
