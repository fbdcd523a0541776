"""Attention on a GPU: Hopper's own kernels against the portable ones, long sequences, offsets past
32 bits, constants in captured graphs, one launch, and `sageattn` with the diffusers backend. Its
accuracy is tested beside the other implementations, in `tests/ops`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from tests.gpu.common import random, skip_without
from tests.inputs import attention_inputs
from tests.measures import relative_l2, truth
from tests.ops.test_sageattn import each_layout, exact, heads_first
from turbo_rcm_patch import ops, sageattn
from turbo_rcm_patch.ops import AttentionSpec, attention_skip
from turbo_rcm_patch.ops.attention import api, online_softmax
from turbo_rcm_patch.ops.attention import triton as kernel
from turbo_rcm_patch.ops.attention.api import launch_attention, quantize
from turbo_rcm_patch.ops.launch import target_of

pytestmark = pytest.mark.gpu

#: Against fp64 where q and k are N(0, 1) too: int8 alone costs 0.011, e4m3 raises it to 0.037.
FLOOR = {"fp8": 0.05, "bf16": 0.02}
HEADS, DIM = 2, 64
CHANNELS = HEADS * DIM

# --- Hopper's own kernels ------------------------------------------------------------------------


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


def almost_equal(x: Tensor, y: Tensor) -> None:
    """int8 that differ by one step at most, and that in fewer than one of 10,000."""
    apart = (x.int() - y.int()).abs()
    assert apart.max() <= 1
    assert (apart > 0).float().mean() < 1e-4


_SIZES = [(1, 4096, 4096, None), (1, 1000, 333, None), (2, 70, 640, None)]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("dtype", "pv", "batch", "n_q", "n_kv", "lengths"),
    [
        *((torch.bfloat16, "fp8", *size) for size in _SIZES),
        *(
            (torch.bfloat16, "fp8", 2, *size)
            for size in ((193, 129, (0, 129)), (70, 640, (1, 500)))
        ),
        *((torch.bfloat16, "bf16", *size) for size in _SIZES),
        *((torch.float16, "fp16", *size) for size in _SIZES),
        (torch.float16, "bf16", 2, 193, 129, None),
    ],
)
def test_the_hopper_kernel_equals_the_portable_one(
    head_dim: int, dtype: torch.dtype, pv: Any, batch: int, n_q: int, n_kv: int,
    lengths: tuple[int, ...] | None,
) -> None:  # fmt: skip
    """With fp8 and 128 channels bit for bit: the same arithmetic in another order of loads. With
    64 an eighth of the exponentials is a polynomial, whose error of 7.5e-5 moves a few e4m3
    roundings. In 16 bits the tiles differ, so sums are rounded in another order.
    """
    device, heads = hopper(), 3
    q, k, v = (random(batch, n, heads * head_dim).to(dtype) for n in (n_q, n_kv, n_kv))
    counts = None if lengths is None else torch.tensor(lengths, device=device, dtype=torch.int32)
    inputs = attention_inputs(q, k, v, heads=heads, pv=pv, kv_lengths=counts, want_lse=True)
    with names_of_kernels() as launched:
        own, own_lse = launch_attention(inputs)
    assert "hopper_kernel" in launched
    portable, portable_lse = torch.empty_like(own), torch.empty_like(own_lse)
    kernel.launch_kernel(inputs, quantize(inputs), (portable,), portable_lse)
    assert torch.isfinite(own).all()
    if pv == "fp8" and head_dim == 128:
        assert torch.equal(own, portable) and torch.equal(own_lse, portable_lse)
        return
    assert relative_l2(own, portable) < (1e-3 if pv == "fp16" else 4e-3)  # fp8 itself: 0.037
    assert torch.allclose(own_lse, portable_lse, rtol=0, atol=1e-2 if pv == "fp8" else 2e-3)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("pv", ["bf16", "fp16"])
@pytest.mark.parametrize("rise", [0.3, 3.0, 20.0])
@pytest.mark.parametrize("rows", [slice(None), slice(8, None)], ids=["all rows", "every second 8"])
def test_sums_in_16_bits_follow_a_rising_maximum(
    head_dim: int, pv: Any, rise: float, rows: slice
) -> None:
    """By `rise` (log2) from one block of keys to the next: far below the step at which sums are
    rescaled, near it, and above it. A thread has rows r and r + 8 of a warp's 16.
    """
    device, heads, n = hopper(), 2, 2048
    dtype = getattr(torch, "bfloat16" if pv == "bf16" else "float16")
    q, k, v = (random(1, n, heads, head_dim).to(dtype) for _ in "qkv")
    k[..., 0] += rise * (torch.arange(n, device=device) // 128)[:, None]
    q[0].view(-1, 16, heads, head_dim)[:, rows, :, 0] = head_dim**0.5 * math.log(2)
    flat = (x.flatten(2) for x in (q, k, v))
    inputs = attention_inputs(*flat, heads=heads, pv=pv, want_lse=True)
    own, own_lse = launch_attention(inputs)
    portable, portable_lse = torch.empty_like(own), torch.empty_like(own_lse)
    kernel.launch_kernel(inputs, quantize(inputs), (portable,), portable_lse)
    assert relative_l2(own, portable) < (1e-3 if pv == "fp16" else 4e-3)
    assert torch.allclose(own_lse, portable_lse, rtol=1e-6, atol=2e-3)


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
    n_q: int, n_kv: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Sums in another order: an int8 may round the other way, a few in a million."""
    device, heads, batch = hopper(), 5, 2
    channels = heads * head_dim
    n = max(n_q, n_kv)
    if fused:  # strided, as one linear makes them
        both = random(batch, n, 3 * channels).chunk(3, -1)
        q, k, v = (x[:, :m] for x, m in zip(both, (n_q, n_kv, n_kv), strict=True))
    else:
        q, k, v = (random(batch, m, channels) for m in (n_q, n_kv, n_kv))
        k += 3 * random(channels)
    size = channels if norm == "across" else head_dim
    weight = torch.rand(size, device=device).bfloat16() + 0.5 if norm else None
    bias = random(head_dim) if norm == "layer norm per head" else None
    angle = 6 * torch.rand(n, head_dim // 2, device=device).repeat_interleave(2, -1)
    counts = torch.tensor([n_kv, n_kv // 2], device=device, dtype=torch.int32)
    inputs = attention_inputs(
        q, k, v, heads=heads, norm_q=weight, norm_k=weight, norm_q_bias=bias, norm_k_bias=bias,
        cos=angle.cos() if rope else None, sin=angle.sin() if rope else None,
        kv_lengths=counts if lengths else None, pv=pv, want_lse=True,
        attention={127: "int8", 7: "int4"}[qmax],
    )  # fmt: skip
    with names_of_kernels() as launched:
        own = quantize(inputs)
    assert len(launched) == 2
    assert all("hopper" in name for name in launched)
    monkeypatch.setattr(api, "PROLOGUE_KERNELS", api.PROLOGUE_KERNELS[-1:])
    portable = quantize.__wrapped__(inputs)  # Hopper's was recorded.
    one, other = own.queries, portable.queries
    seen = slice(0, n_q)
    almost_equal(one.int8[:, :, seen], other.int8[:, :, seen])
    torch.testing.assert_close(one.scale[:, :, seen], other.scale[:, :, seen])
    assert one.shift is not None
    assert other.shift is not None
    largest = other.shift[:, :, seen].abs().max().item()
    assert torch.allclose(one.shift[:, :, seen], other.shift[:, :, seen], atol=1e-5 * largest)
    if n_kv == 1:  # It is its own mean, and what is left of it are roundings.
        for keys in (own.keys, portable.keys):
            largest = keys.int8.float().abs().amax((2, 3)) * keys.scale[:, :, 0]
            assert largest.max() < 1e-6 * inputs.k.abs().max()
    else:
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


# --- offsets and lengths -------------------------------------------------------------------------


@pytest.mark.parametrize("pv", ["fp8", "bf16"])
def test_attention_reads_past_two_to_the_31_elements(pv: str) -> None:
    skip_without(pv)
    tokens, channels = 210_000, 5120
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB")
    fused = torch.empty(1, tokens, 3 * channels, dtype=torch.bfloat16, device="cuda").normal_()
    q, k, v = fused.chunk(3, -1)
    spec = AttentionSpec(heads=40, pv=pv)
    out = attention_skip(q, k[:, :512], v[:, :512], spec, residual=q, c_skip=0.5)[:, -200:]
    exact = 0.5 * q[:, -200:].double() + truth(q[:, -200:], k[:, :512], v[:, :512], 40)
    assert relative_l2(out, exact) < FLOOR[pv]
    first, last = slice(0, 128), slice(channels - 128, channels)
    out = attention_skip(q[:, :64], k, v, spec)
    for head in (first, last):
        exact = truth(q[:, :64, head], k[..., head], v[..., head], 1)
        assert relative_l2(out[..., head], exact) < 0.08


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offset", [1, 3])
def test_attention_reads_addresses_of_any_alignment(offset: int, dtype: torch.dtype) -> None:
    def shifted(*shape: int) -> Tensor:
        size = torch.Size(shape).numel()
        room = torch.full((offset + size + 64,), float("nan"), device="cuda", dtype=dtype)
        return room[offset : offset + size].view(shape).copy_(random(*shape, dtype=dtype))

    x = [shifted(2, n, CHANNELS) for n in (33, 113, 113)]
    for attention in ("exact", "int8"):
        spec = ops.AttentionSpec(heads=HEADS, attention=attention)  # type: ignore[arg-type]
        out = ops.attention_skip(*x, spec)
        assert torch.equal(out, ops.attention_skip(*(y.clone() for y in x), spec))


@pytest.mark.parametrize("n", [65_537, 200_003])
@pytest.mark.parametrize("dim", [64, 40, 128])  # 40: portable kernels
@pytest.mark.parametrize("pv", ["bf16", "fp8"])
def test_long_sequences_against_exact_attention(n: int, dim: int, pv: Any) -> None:
    """All rows are computed; the first, the last and some between are compared with fp64. The end
    of a strided v lies beyond 2^31 bytes."""
    if pv == "fp8":
        fp8_spec()
    q, k, v = random(1, n, 3 * 2 * dim).chunk(3, -1)
    out = ops.attention_skip(q, k, v, ops.AttentionSpec(heads=2, pv=pv))
    assert bool(out.isfinite().all())
    for at in (0, n // 2, n - 64):
        rows = slice(at, at + 64)
        assert relative_l2(out[:, rows], truth(q[:, rows], k, v, 2)) < 0.12


# --- constants that are kept between calls, and one launch ---------------------------------------


def fp8_spec(**options: Any) -> ops.AttentionSpec:
    skip_without("fp8")
    return ops.AttentionSpec(heads=HEADS, pv="fp8", **options)


def overwrite_free_memory() -> None:
    """NaN in what the allocator would hand out next."""
    torch.cuda.synchronize()
    held = [torch.full((1 << n,), float("nan"), device="cuda") for n in range(6, 22)]
    held += [torch.full((1 << 12,), float("nan"), device="cuda") for _ in range(64)]
    torch.cuda.synchronize()
    del held


def test_the_ones_of_a_captured_graph_are_its_own() -> None:
    spec = fp8_spec(causal=True)  # the kernel that reads ones
    q = random(1, 300, CHANNELS)
    expected = ops.attention_skip(q, q, q, spec)
    online_softmax._ones.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.attention_skip(q, q, q, spec)
    overwrite_free_memory()
    assert torch.equal(ops.attention_skip(q, q, q, spec), expected), "before the first replay"
    graph.replay()
    assert torch.equal(captured, expected)
    del graph, captured
    overwrite_free_memory()
    assert torch.equal(ops.attention_skip(q, q, q, spec), expected), "after the graph is gone"


def test_the_ones_are_written_before_another_stream_reads_them() -> None:
    spec = fp8_spec(causal=True)
    q = random(1, 300, CHANNELS)
    expected = ops.attention_skip(q, q, q, spec)
    busy = torch.randn(6000, 6000, device="cuda")
    for _ in range(5):
        online_softmax._ones.clear()
        overwrite_free_memory()
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(first):
            for _ in range(4):
                busy @ busy
            online_softmax.ones_for(q.device)
        with torch.cuda.stream(second):
            out = ops.attention_skip(q, q, q, spec)
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


# --- sageattention -------------------------------------------------------------------------------

#: e4m3 p and v from 4,096 keys on, from 12,288 on Hopper.
SAGE_FLOOR = {1500: 0.02, 4200: 0.05, 12_300: 0.05}


@each_layout
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "transposed"])
@pytest.mark.parametrize("tokens", SAGE_FLOOR)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 128])
def test_sageattn_against_exact_attention(
    tokens: int, layout: str, contiguous: bool, causal: bool, dim: int
) -> None:
    q, k, v = (heads_first(random(2, 3, tokens, dim), layout).contiguous() for _ in range(3))
    if not contiguous:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    out, lse = sageattn(q, k, v, layout, causal, return_lse=True)
    assert out.shape == q.shape and lse.shape == (2, 3, tokens)
    expected = exact(q, k, v, layout, is_causal=causal)
    for one in (out, sageattn(q, k, v, layout, causal)):
        assert relative_l2(one, expected) < SAGE_FLOOR[tokens]


def test_sage_runs_the_package() -> None:
    if find_spec("sageattention") is None:
        pytest.skip("sageattention is not installed")
    q, k, v = (random(1, 2048, 3 * 128) for _ in range(3))
    sage, exact = (
        ops.attention_skip(q, k, v, ops.AttentionSpec(heads=3, attention=attention))
        for attention in ("sage", "exact")
    )
    assert 1e-4 < relative_l2(sage, exact) < 0.08
