"""The kernels on a GPU: the same bits under load, streams, constants of the process in captured
graphs, long sequences, offsets past 32 bits, tensors on two devices.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.measures import relative_l2
from turbo_rcm_patch import errors, ops
from turbo_rcm_patch.ops.attention import online_softmax
from turbo_rcm_patch.ops.attention.reference import exact_attention, split_heads

pytestmark = pytest.mark.gpu

HEADS, DIM = 2, 64
CHANNELS = HEADS * DIM
REPEATS = 100


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def has_fp8() -> bool:
    return ops.resolve_pv("auto", torch.device("cuda", 0)) == "fp8"


def fp8_spec(**options: Any) -> ops.AttentionSpec:
    if not has_fp8():
        pytest.skip("this GPU has no e4m3 matrix units")
    return ops.AttentionSpec(heads=HEADS, pv="fp8", **options)


def overwrite_free_memory() -> None:
    """NaN in what the allocator would hand out next."""
    torch.cuda.synchronize()
    held = [torch.full((1 << n,), float("nan"), device="cuda") for n in range(6, 22)]
    held += [torch.full((1 << 12,), float("nan"), device="cuda") for _ in range(64)]
    torch.cuda.synchronize()
    del held


# --- the same bits -------------------------------------------------------------------------------


def calls() -> dict[str, Callable[[], Tensor]]:
    """Every family of kernels, over lengths that end inside a block."""
    batch, n = 2, 1_333
    q, k, v, x = (random(batch, n, CHANNELS) for _ in range(4))
    odd = [random(batch, n, 2 * 40) for _ in range(3)]  # portable kernels
    gate, weight, bias = random(batch, 1, CHANNELS), random(CHANNELS, CHANNELS), random(CHANNELS)
    norm, lengths = torch.rand(CHANNELS, device="cuda") + 0.5, torch.tensor([700, n]).cuda()
    angle = torch.rand(n, DIM // 2, device="cuda").repeat_interleave(2, -1)
    rotary = (angle.cos(), angle.sin())
    int8, scale = ops.quantize_weight(weight)
    eye, sparsity = torch.eye(DIM, device="cuda"), ops.Sparsity(topk=0.3)

    def spec(**options: Any) -> ops.AttentionSpec:
        return ops.AttentionSpec(heads=options.pop("heads", HEADS), **options)

    more = {"norm_q": norm, "norm_k": norm, "rotary": rotary}
    made: dict[str, Callable[[], Tensor]] = {
        "16-bit": lambda: ops.attention_skip(q, k, v, spec(pv="bf16"), residual=x, c_out=gate),
        "normed": lambda: ops.attention_skip(q, k, v, spec(pv="bf16"), **more),
        "exact": lambda: ops.attention_skip(q, k, v, spec(attention="exact"), **more),
        "lengths": lambda: ops.attention_skip(q, k, v, spec(pv="fp16"), kv_lengths=lengths),
        "causal": lambda: ops.attention_skip(q, k, v, spec(pv="bf16", causal=True)),
        "portable": lambda: ops.attention_skip(*odd, spec(heads=2, pv="bf16")),
        "logsumexp": lambda: ops.attention_lse(q, k, v, spec(pv="bf16"))[1],
        "one launch": lambda: ops.attention_project_skip(
            q, k, v, weight, bias, spec(pv="bf16"), residual=x, form="one-launch"
        ),
        "sparse": lambda: ops.sparse_linear_attention(
            q, k, v, eye, None, spec(pv="bf16"), sparsity
        ),
        "int8 linear": lambda: ops.int8_linear(x, int8, scale, bias),
        "norm": lambda: ops.norm_modulate(x, scale=gate, shift=gate),
        "rows": lambda: ops.norm_modulate_rows(x, scale=gate).data,
        "skip": lambda: ops.skip(x, q, 0.5, gate),
    }
    if has_fp8():
        made |= {
            "fp8": lambda: ops.attention_skip(q, k, v, spec(pv="fp8"), **more),
            "fp8 portable": lambda: ops.attention_skip(*odd, spec(heads=2, pv="fp8")),
            "fp8 sparse": lambda: ops.sparse_linear_attention(
                q, k, v, eye, None, spec(pv="fp8"), sparsity
            ),
        }
    return made


def test_a_hundred_repeats_give_the_same_bits_under_load() -> None:
    """Another stream multiplies matrices and fills memory with NaN meanwhile."""
    made = calls()
    expected = {name: call().clone() for name, call in made.items()}
    assert all(bool(x.float().isfinite().all()) for x in expected.values())
    busy, side = torch.randn(3000, 3000, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    wrong: dict[str, Tensor] = {
        name: torch.zeros((), dtype=torch.int64, device="cuda") for name in made
    }
    for repeat in range(REPEATS):
        with torch.cuda.stream(side):
            busy @ busy
            torch.empty(1 << (12 + repeat % 10), device="cuda").fill_(float("nan"))
        for name, call in made.items():
            wrong[name] += (call() != expected[name]).sum()
    torch.cuda.synchronize()
    assert {name: int(n) for name, n in wrong.items() if int(n)} == {}


def test_streams_that_run_the_same_operations() -> None:
    made = calls()
    expected = {name: call().clone() for name, call in made.items()}
    torch.cuda.synchronize()
    streams, outs = [torch.cuda.Stream() for _ in range(3)], []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs += [(name, call()) for name, call in made.items()]
    torch.cuda.synchronize()
    assert {name for name, out in outs if not torch.equal(out, expected[name])} == set()


# --- constants that are kept between calls -------------------------------------------------------


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


# --- devices, alignment, limits ------------------------------------------------------------------


def test_tensors_on_the_cpu_beside_the_others_are_refused_by_name() -> None:
    q, table = random(1, 9, CHANNELS), torch.ones(9, DIM)
    spec = ops.AttentionSpec(heads=HEADS)
    with pytest.raises(errors.ShapeError, match="cos.*cpu"):
        ops.attention_skip(q, q, q, spec, rotary=(table, table))
    with pytest.raises(errors.ShapeError, match="kv_lengths.*cpu"):
        ops.attention_skip(q, q, q, spec, kv_lengths=torch.tensor([3]))
    with pytest.raises(errors.ShapeError, match="c_out.*cpu"):
        ops.skip(q, q, 1.0, torch.ones(1, 1, CHANNELS))


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


@pytest.mark.parametrize("dim", [64, 40])  # Hopper's own kernels, and the portable ones
@pytest.mark.parametrize("pv", ["fp8", "bf16"])
def test_lengths_past_32_bits_and_scales_of_any_sign_are_right(pv: str, dim: int) -> None:
    if pv == "fp8":
        fp8_spec()
    q, k, v = (random(2, 333, 2 * dim) for _ in range(3))
    plain = ops.AttentionSpec(heads=2, pv=pv)  # type: ignore[arg-type]
    lengths = torch.tensor([2**31, 2**40 + 3], device="cuda")
    out = ops.attention_skip(q, k, v, plain)
    # With lengths, v's scales and k's mean are found by other code.
    assert relative_l2(ops.attention_skip(q, k, v, plain, kv_lengths=lengths), out) < 0.01
    for scale in (-0.2, 0.0):
        spec = ops.AttentionSpec(heads=2, pv=pv, sm_scale=scale)  # type: ignore[arg-type]
        exact = ops.AttentionSpec(heads=2, attention="exact", sm_scale=scale)
        made, truth = (
            ops.attention_skip(q, k, v, s, norm_q=torch.ones_like(q[0, 0])) for s in (spec, exact)
        )
        assert relative_l2(made, truth) < 0.08


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
    parts = [torch.arange(at, at + 64, device="cuda") for at in (0, n // 2, n - 64)]
    kh, vh = (split_heads(x.contiguous(), 2).double() for x in (k, v))
    for rows in parts:
        qh = split_heads(q[:, rows].contiguous(), 2).double()
        truth = torch.cat(
            [
                exact_attention(
                    qh[:, h : h + 1], kh[:, h : h + 1], vh[:, h : h + 1], sm_scale=dim**-0.5
                )[0]
                for h in range(2)
            ],
            1,
        )
        assert relative_l2(out[:, rows], truth.transpose(1, 2).flatten(2)) < 0.12


def test_offsets_that_pass_32_bits() -> None:
    """200,000 tokens of 12,288 channels are 2.5e9 elements: only an int64 reaches the last ones.
    One kernel of each family, compared over the last rows."""
    free, _ = torch.cuda.mem_get_info()
    n, channels = 200_000, 12_288
    if free < 6 * 2 * n * channels:
        pytest.skip("too little free memory")
    x = torch.empty(1, n, channels, dtype=torch.bfloat16, device="cuda").normal_()
    gate, last = random(1, 1, channels), slice(n - 300, n)
    for run_it in (
        lambda s: ops.skip(x[:, s], x[:, s], 0.5, gate),
        lambda s: ops.norm_modulate(x[:, s], scale=gate, shift=gate),
        lambda s: ops.norm_modulate_rows(x[:, s], scale=gate).data,
    ):
        assert torch.equal(run_it(slice(None))[:, last], run_it(last))


# --- sageattention -------------------------------------------------------------------------------


def test_sage_runs_the_package() -> None:
    if find_spec("sageattention") is None:
        pytest.skip("sageattention is not installed")
    q, k, v = (random(1, 2048, 3 * 128) for _ in range(3))
    sage, exact = (
        ops.attention_skip(q, k, v, ops.AttentionSpec(heads=3, attention=attention))
        for attention in ("sage", "exact")
    )
    assert 1e-4 < relative_l2(sage, exact) < 0.08
