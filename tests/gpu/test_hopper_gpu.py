"""Hopper's own kernels for attention against the portable ones, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton

from tests.inputs import attention_inputs
from tests.measures import relative_l2
from turbo_rcm_patch.ops.attention.api import launch_attention, quantize
from turbo_rcm_patch.ops.launch import target_of, tile_for

pytestmark = pytest.mark.gpu


def hopper() -> torch.device:
    device = torch.device("cuda", 0)
    if target_of(device) != ("cuda", 90):
        pytest.skip("the kernels are for compute capability 9.0")
    return device


@contextmanager
def names_of_kernels() -> Iterator[list[str]]:
    """The kernels that start meanwhile, as Triton tells a profiler."""
    found: list[str] = []

    def note(metadata: Any) -> None:
        found.append(metadata.get()["name"])

    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(note)
    try:
        yield found
    finally:
        hook.remove(note)


def almost_equal(x: torch.Tensor, y: torch.Tensor) -> None:
    """int8 that differ by one step at most, and that in fewer than one of 10,000."""
    apart = (x.int() - y.int()).abs()
    assert apart.max() <= 1
    assert (apart > 0).float().mean() < 1e-4


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("batch", "n_q", "n_kv", "lengths"),
    [(1, 4096, 4096, None), (1, 1000, 333, None), (2, 193, 129, (0, 129)), (2, 70, 640, (1, 500))],
)
def test_the_hopper_kernel_equals_the_portable_one(
    head_dim: int, batch: int, n_q: int, n_kv: int, lengths: tuple[int, ...] | None
) -> None:
    """With 128 channels bit for bit: the same arithmetic in another order of loads. With 64 an
    eighth of the exponentials is a polynomial, whose error of 7.5e-5 moves a few e4m3 roundings.
    """
    device = hopper()
    heads = 3
    q = torch.randn(batch, n_q, heads * head_dim, device=device, dtype=torch.bfloat16)
    k = torch.randn(batch, n_kv, heads * head_dim, device=device, dtype=torch.bfloat16)
    v = torch.randn(batch, n_kv, heads * head_dim, device=device, dtype=torch.bfloat16)
    if lengths is not None:
        lengths = torch.tensor(lengths, device=device, dtype=torch.int32)
    inputs = attention_inputs(q, k, v, heads=heads, kv_lengths=lengths, want_lse=True)
    own, own_lse = launch_attention(inputs)
    tile = tile_for("attention", f"fp8_{head_dim}", target_of(device))
    portable, portable_lse = launch_attention(inputs, tile=tile)
    assert torch.isfinite(own).all()
    if head_dim == 128:
        assert torch.equal(own, portable)
        assert torch.equal(own_lse, portable_lse)
    else:
        assert relative_l2(own, portable) < 4e-3  # fp8 itself: 0.037
        assert torch.allclose(own_lse, portable_lse, rtol=0, atol=1e-2)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("norm", "rope", "fused", "lengths", "pv", "qmax"),
    [
        (None, False, False, False, "fp8", 127),
        ("across", True, True, True, "fp8", 127),
        ("per head", True, False, False, "bf16", 127),
        ("across", False, True, False, "fp8", 7),
        ("layer norm per head", True, True, False, "fp8", 127),
        ("layer norm per head", False, False, True, "bf16", 127),
    ],
    ids=["bare", "wan", "per-head-16bit", "no-rope-int4", "cogvideox", "cogvideox-2b-padding"],
)
@pytest.mark.parametrize(("n_q", "n_kv"), [(2000, 2000), (300, 77), (130, 4700), (1, 1)])
def test_the_hopper_prologue_equals_the_portable_one(
    head_dim: int, norm: str | None, rope: bool, fused: bool, lengths: bool, pv: str, qmax: int,
    n_q: int, n_kv: int,
) -> None:  # fmt: skip
    """Sums in another order: an int8 may round the other way, a few in a million."""
    device, heads, batch = hopper(), 5, 2
    channels = heads * head_dim
    n = max(n_q, n_kv)
    if fused:  # strided, as one linear makes them
        both = torch.randn(batch, n, 3 * channels, device=device, dtype=torch.bfloat16)
        q, k, v = (x[:, :m] for x, m in zip(both.chunk(3, -1), (n_q, n_kv, n_kv), strict=True))
    else:
        q, k, v = (
            torch.randn(batch, m, channels, device=device, dtype=torch.bfloat16)
            for m in (n_q, n_kv, n_kv)
        )
        k += 3 * torch.randn(channels, device=device, dtype=torch.bfloat16)
    size = channels if norm == "across" else head_dim
    weight = torch.rand(size, device=device).bfloat16() + 0.5 if norm else None
    bias = None
    if norm == "layer norm per head":
        bias = torch.randn(head_dim, device=device).bfloat16()
    angle = 6 * torch.rand(n, head_dim // 2, device=device).repeat_interleave(2, -1)
    common = {
        "heads": heads,
        "norm_q": weight,
        "norm_k": weight,
        "norm_q_bias": bias,
        "norm_k_bias": bias,
        "cos": angle.cos() if rope else None,
        "sin": angle.sin() if rope else None,
        "kv_lengths": torch.tensor([n_kv, n_kv // 2], device=device, dtype=torch.int32)
        if lengths
        else None,
        "pv": pv,
        "attention": {127: "int8", 7: "int4"}[qmax],
        "want_lse": True,
    }
    inputs = attention_inputs(q, k, v, **common)
    with names_of_kernels() as launched:
        own = quantize(inputs)
    assert len(launched) == 2
    assert all("hopper" in name for name in launched)
    portable = quantize(inputs, portable=True)
    one, other = own.queries, portable.queries
    seen = slice(0, n_q)
    almost_equal(one.int8[:, :, seen], other.int8[:, :, seen])
    torch.testing.assert_close(one.scale[:, :, seen], other.scale[:, :, seen])
    assert one.shift is not None
    assert other.shift is not None
    largest = other.shift[:, :, seen].abs().max().item()
    assert torch.allclose(one.shift[:, :, seen], other.shift[:, :, seen], atol=1e-5 * largest)
    almost_equal(own.keys.int8, portable.keys.int8)
    torch.testing.assert_close(own.keys.scale, portable.keys.scale)
    if own.values is None:
        assert pv == "bf16"
    else:
        assert portable.values is not None
        same = own.values.e4m3.view(torch.int8) == portable.values.e4m3.view(torch.int8)
        assert same.all()
        levels = (x.values.levels.view(torch.int32) for x in (own, portable))
        assert torch.equal(*levels)  # the sums of errors too: they are integers


def test_the_hopper_prologue_keeps_nan_and_zero() -> None:
    q = torch.randn(1, 256, 256, device=hopper(), dtype=torch.bfloat16)
    k, v = torch.zeros_like(q), torch.randn_like(q)
    q[0, 3, 5] = float("nan")
    operands = quantize(attention_inputs(q, k, v, heads=2, sm_scale=0.1))
    assert torch.isnan(operands.queries.scale).nonzero().tolist() == [[0, 0, 3]]
    assert not operands.keys.int8.any()
    assert torch.isfinite(operands.keys.scale).all()


def test_rows_that_cannot_be_copied_by_sixteen_bytes_take_the_portable_prologue() -> None:
    """A row that begins 8 bytes off, as a view into another tensor may."""
    device = hopper()
    wide = torch.randn(1, 512, 3 * 128 + 4, device=device, dtype=torch.bfloat16)
    q, k, v = (wide[..., 4 + 128 * i : 4 + 128 * (i + 1)] for i in range(3))
    with names_of_kernels() as launched:
        off = quantize(attention_inputs(q, k, v, heads=1, sm_scale=0.1))
    assert not any("hopper" in name for name in launched)
    rows = (x.contiguous() for x in (q, k, v))
    dense = quantize(attention_inputs(*rows, heads=1, sm_scale=0.1))
    almost_equal(off.queries.int8, dense.queries.int8)
