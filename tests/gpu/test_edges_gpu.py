"""What only a GPU shows of edges: streams, graphs, devices, long batches, and kernels' own limits.

`pytest -m gpu tests/gpu/test_edges_gpu.py`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.measures import relative_l2
from turbo_rcm_patch import errors, ops
from turbo_rcm_patch.kernels.portable import attention as kernels
from turbo_rcm_patch.patching.copies import Copies
from turbo_rcm_patch.patching.linears import Linears, Projection
from turbo_rcm_patch.video.scheduler import fingerprint

pytestmark = pytest.mark.gpu

HEADS, DIM = 2, 64
CHANNELS = HEADS * DIM


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def fp8_spec(**options: Any) -> ops.AttentionSpec:
    device = torch.device("cuda", torch.cuda.current_device())
    if ops.resolve_pv("auto", device) != "fp8":
        pytest.skip("this GPU has no e4m3 matrix units")
    return ops.AttentionSpec(heads=HEADS, pv="fp8", **options)


def overwrite_free_memory() -> None:
    """NaN in what the allocator would hand out next."""
    torch.cuda.synchronize()
    held = [torch.full((1 << n,), float("nan"), device="cuda") for n in range(6, 22)]
    held += [torch.full((1 << 12,), float("nan"), device="cuda") for _ in range(64)]
    torch.cuda.synchronize()
    del held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("offset", [1, 3])
@pytest.mark.parametrize("n_kv", [7, 17, 113])
def test_attention_reads_addresses_of_any_alignment(
    n_kv: int, offset: int, dtype: torch.dtype
) -> None:
    """torch's attention with a mask gives NaN or faults where 16 bytes do not divide one."""
    overwrite_free_memory()

    def shifted(*shape: int) -> Tensor:
        room = torch.full((offset + torch.Size(shape).numel() + 64,), float("nan"), device="cuda")
        room = room.to(dtype)
        return room[offset : offset + torch.Size(shape).numel()].view(shape).copy_(
            random(*shape, dtype=dtype)
        )  # fmt: skip

    x = [shifted(2, n, CHANNELS) for n in (33, n_kv, n_kv)]
    spec = ops.AttentionSpec(heads=HEADS, attention="exact")
    added = shifted(2, HEADS, 1, n_kv)
    for mask in (added, added > -1.0, added.expand(2, HEADS, 33, n_kv)):
        out = ops.masked_attention(*x, mask, spec)
        wide = ops.masked_attention(*(y.double().float() for y in x), mask, spec)
        assert bool(out.isfinite().all()) and relative_l2(out, wide) < 0.01
    out = ops.attention_skip(*x, spec)
    assert torch.equal(out, ops.attention_skip(*(y.clone() for y in x), spec))


# --- what is kept between calls ------------------------------------------------------------------


def test_the_ones_of_a_captured_graph_are_its_own() -> None:
    spec = fp8_spec(causal=True)  # the kernel that reads ones
    q = random(1, 300, CHANNELS)
    expected = ops.attention_skip(q, q, q, spec)
    kernels._ones.clear()
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
        kernels._ones.clear()
        overwrite_free_memory()
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(first):
            for _ in range(4):
                busy @ busy
            kernels.ones_for(q.device)
        with torch.cuda.stream(second):
            out = ops.attention_skip(q, q, q, spec)
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


def linear() -> tuple[nn.Linear, Tensor, Tensor]:
    module = nn.Linear(256, 512, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    x = random(1, 300, 256)
    return module, x, product(Linears(Copies("auto")), module, x)


def product(linears: Linears, module: nn.Linear, x: Tensor) -> Tensor:
    (made,), _ = Projection(linears, "a", (module,), x, x.dtype, int8=True)(None, x, x)
    return made


def test_an_int8_weight_first_wanted_inside_a_capture_is_right_after_it() -> None:
    module, x, expected = linear()
    linears = Linears(Copies("auto"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = product(linears, module, x)
    overwrite_free_memory()
    eager = product(linears, module, x)
    assert torch.equal(eager, expected)
    graph.replay()
    assert torch.equal(captured, expected)


def test_a_graph_runs_with_the_weights_of_its_replay() -> None:
    module, x, expected = linear()
    copies = Copies("auto")
    linears = Linears(copies)
    product(linears, module, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = product(linears, module, x)
    graph.replay()
    assert torch.equal(captured, expected)
    module.weight.mul_(2)
    copies.begin()
    eager = product(linears, module, x)
    assert relative_l2(eager - module.bias, 2 * (expected - module.bias)) < 0.02
    overwrite_free_memory()
    graph.replay()
    assert torch.equal(captured, eager)


def test_an_int8_weight_is_written_before_another_stream_reads_it() -> None:
    module, x, expected = linear()
    busy = torch.randn(6000, 6000, device="cuda")
    for _ in range(5):
        linears = Linears(Copies("auto"))
        overwrite_free_memory()
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(first):
            for _ in range(4):
                busy @ busy
            product(linears, module, x)
        with torch.cuda.stream(second):
            out = product(linears, module, x)
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


# --- devices -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["weight", "bias", "residual", "c_out"])
def test_a_tensor_on_the_cpu_beside_the_others_is_refused_by_name(name: str) -> None:
    given: dict[str, Any] = {
        "x": random(2, 5, 64),
        "weight": random(64, 64),
        "bias": random(64),
        "residual": random(2, 5, 64),
        "c_out": random(2, 1, 64),
    }
    given[name] = given[name].cpu()
    with pytest.raises(errors.ShapeError, match=f"{name}.*cpu"):
        ops.project_skip(**given)


def test_attention_with_tables_on_the_cpu_is_refused() -> None:
    q, table = random(1, 9, CHANNELS), torch.ones(9, DIM)
    spec = ops.AttentionSpec(heads=HEADS)
    with pytest.raises(errors.ShapeError, match="cos.*cpu"):
        ops.attention_skip(q, q, q, spec, rotary=(table, table))
    with pytest.raises(errors.ShapeError, match="kv_lengths.*cpu"):
        ops.attention_skip(q, q, q, spec, kv_lengths=torch.tensor([3]))


# --- a batch that is longer than a grid ----------------------------------------------------------

LONG = 65_535 + 5


def long_cases() -> dict[str, Callable[[slice, str], Any]]:
    """Each operation over some samples of long tensors."""
    x, y = random(LONG, 2, 32, dtype=torch.float32), random(LONG, 2, 32, dtype=torch.float32)
    gate, weight = random(LONG, 1, 32, dtype=torch.float32), random(32, 32, dtype=torch.float32)
    int8, scale = ops.quantize_weight(weight)
    eye, sparsity = torch.eye(32, device="cuda"), ops.Sparsity(topk=0.5)

    def spec(impl: Any) -> ops.AttentionSpec:
        return ops.AttentionSpec(heads=1, pv="bf16", impl=impl)

    return {
        "attention": lambda s, i: ops.attention_skip(
            x[s], y[s], x[s], spec(i), residual=y[s], c_out=gate[s]
        ),
        "sparse": lambda s, i: ops.sparse_linear_attention(
            x[s], y[s], x[s], eye, None, spec(i), sparsity
        ),
        "skip": lambda s, i: ops.skip(x[s], y[s], 0.5, gate[s], impl=i),
        "project": lambda s, i: ops.project_skip(
            x[s], weight, residual=y[s], c_out=gate[s], impl=i
        ),
        "norm": lambda s, i: ops.norm_modulate(x[s], scale=gate[s], shift=gate[s], impl=i),
        "rows": lambda s, i: ops.norm_modulate_rows(x[s], scale=gate[s], impl=i).scale,
        "int8": lambda s, i: ops.int8_linear(x[s], int8, scale, residual=y[s], impl=i),
        "norm-streams": lambda s, i: ops.norm_modulate_streams(
            [x[s], y[s]], scale=[gate[s], gate[s]], shift=[gate[s], gate[s]], impl=i
        ),
        "project-streams": lambda s, i: ops.project_skip_streams(
            torch.cat([x[s], y[s]], 1), weight, residuals=[x[s], y[s]],
            c_out=[gate[s], gate[s]], impl=i,
        )[1],
        "denoise": lambda s, i: ops.denoise_step(
            x[s], y[s], None, torch.ones(3, dtype=torch.float64, device="cuda"), impl=i
        ),
    }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["attention", "sparse", "skip", "project", "norm", "rows", "int8", "norm-streams"]
    + ["project-streams", "denoise"],
)
def test_a_batch_longer_than_a_grid_equals_the_reference(name: str) -> None:
    run = long_cases()[name]
    out = run(slice(None), "triton")
    assert out.shape[0] == LONG
    for part in (slice(0, 4), slice(LONG - 9, LONG)):
        assert relative_l2(out[part], run(part, "reference")) < 5e-3


# --- the kernels' own limits ---------------------------------------------------------------------


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
        ours, truth = (
            ops.attention_skip(q, k, v, s, norm_q=torch.ones_like(q[0, 0])) for s in (spec, exact)
        )
        assert relative_l2(ours, truth) < 0.08


@pytest.mark.parametrize("dim", [64, 40])
@pytest.mark.parametrize("size", [1e-30, 1e-37])
def test_fp8_of_tiny_values_is_finite_and_accurate(size: float, dim: int) -> None:
    spec = fp8_spec()
    q = random(1, 333, 2 * dim)
    v = q * size
    out = ops.attention_skip(q, q, v, spec, out_dtype=torch.float32)
    assert bool(out.isfinite().all())
    if size == 1e-30:
        truth = ops.attention_skip(
            q.float(), q.float(), v.float(), ops.AttentionSpec(heads=2, attention="exact")
        )
        assert relative_l2(out.double() / size, truth.double() / size) < 0.08


def test_an_empty_batch_gives_an_empty_result() -> None:
    x, weight = random(0, 9, CHANNELS), random(CHANNELS, CHANNELS)
    int8, scale = ops.quantize_weight(weight)
    spec = ops.AttentionSpec(heads=HEADS)
    for out in (
        ops.attention_skip(x, x, x, spec, residual=x),
        ops.attention_project_skip(x, x, x, weight, None, spec, residual=x, form="one-launch"),
        ops.skip(x, x),
        ops.project_skip(x, weight, residual=x),
        ops.norm_modulate(x),
        ops.norm_modulate_rows(x).int8,
        ops.int8_linear(x, int8, scale),
        ops.linear_gelu(x, weight, weight[0]),
        ops.norm_modulate_streams([x, x], scale=[x[:, :1]] * 2, shift=[x[:, :1]] * 2),
        ops.denoise_step(x, x, x, torch.ones(3, dtype=torch.float64, device="cuda")),
    ):
        assert out.numel() == 0
    torch.cuda.synchronize()


def test_autocast_leaves_fp32_operations_alone() -> None:
    x, weight = random(2, 9, 64, dtype=torch.float32), random(64, 64, dtype=torch.float32)
    spec = ops.AttentionSpec(heads=2, attention="exact")

    def run() -> tuple[Tensor, ...]:
        return (
            ops.project_skip(x, weight, residual=x),
            ops.attention_skip(x, x, x, spec),
            ops.linear_gelu(x, weight, weight[0]),
        )

    plain = run()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        cast = run()
    for a, b in zip(cast, plain, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_the_seed_of_the_renoising_is_that_of_the_cpu() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        sample = random(16, 21, 60, 104, dtype=dtype)
        assert fingerprint(sample) == fingerprint(sample.cpu())
