"""What only a GPU shows of sparse-linear attention: Hopper's own pass over keys, full sizes,
memory, graphs, whole networks. Its accuracy is tested in `tests/ops`.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from tests.patching.sla import with_sla
from tests.patching.turbodiffusion import tiny, tiny_inputs, with_fast_norms, with_sparse
from tests.patching.wan import INT8, Case, relative
from tests.sparse import chosen_blocks, proj_l
from turbo_rcm_patch import PatchConfig, patched
from turbo_rcm_patch.ops import (
    AttentionSpec,
    Sparsity,
    resolve_pv,
    sparse_linear_attention,
)
from turbo_rcm_patch.ops.reference import split_heads
from turbo_rcm_patch.ops.sparse_reference import linear_branch
from turbo_rcm_patch.patching import sla_as_defined

pytestmark = pytest.mark.gpu

FLOOR = {"fp8": 0.05, "bf16": 0.02}
HOPPER, ELSEWHERE = {"block_q": 64, "block_k": 128}, {"block_q": 128, "block_k": 64}


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def skip_without(pv: str) -> None:
    if pv == "fp8" and resolve_pv("auto", torch.device("cuda", 0)) != "fp8":
        pytest.skip("this GPU has no e4m3 matrix units")


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
    strided: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from turbo_rcm_patch.kernels.hopper import linear_branch as hopper
    from turbo_rcm_patch.kernels.portable import sparse_attention

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper GPU")
    wide = random(batch, tokens, 3 * heads * dim, dtype=dtype)
    k, v = wide.chunk(3, -1)[1:]
    if not strided:
        k, v = k.contiguous(), v.contiguous()
    mean = k.float().mean(1).view(batch, heads, dim).to(dtype)
    assert hopper.serves(k, v, heads=heads, block_k=block_k)
    own = hopper.hopper_key_sums(k, v, mean, heads=heads, block_k=block_k)
    monkeypatch.setattr(sparse_attention, "ran_on_hopper", lambda *_: False)
    portable = sparse_attention._key_sums(k, v, mean, heads=heads, block_k=block_k)
    # Sums in another order; a mean of a block may then round the other way.
    assert relative(own.matrix.sum(2), portable.matrix.sum(2)) < 1e-4
    assert relative(own.total.sum(2), portable.total.sum(2)) < 1e-5
    assert relative(own.k_pooled, portable.k_pooled) < 1e-3
    again = hopper.hopper_key_sums(k, v, mean, heads=heads, block_k=block_k)
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
            assert relative(out[0, h, rows], expected) < FLOOR[pv], (h, i)


def test_large_keys_and_sums_stay_finite_in_fp16() -> None:
    """Features of 100,000 keys add up to more than fp16 holds unless they are scaled."""
    q, k, v = (random(1, 100_000, 64, dtype=torch.float16) * 8 for _ in range(3))
    weight, bias = proj_l(64, "cuda")
    spec = AttentionSpec(heads=1)
    out = sparse_linear_attention(q, k, v, weight, bias, spec, Sparsity(topk=0.02))
    assert out.isfinite().all()


def test_it_runs_inside_a_cuda_graph_and_a_compiled_function() -> None:
    q, k, v = (random(1, 1024, 256) for _ in range(3))
    weight, bias = proj_l(128, "cuda")
    spec, sparsity = AttentionSpec(heads=2), Sparsity(topk=0.25, **HOPPER)

    def call() -> torch.Tensor:
        return sparse_linear_attention(q, k, v, weight, bias, spec, sparsity)

    expected = call()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    graph.replay()
    assert torch.equal(captured, expected)


@pytest.mark.parametrize("kind", ["original", "sla", "sagesla"])
@pytest.mark.parametrize("fast", [False, True], ids=["trained-norms", "fast-norms"])
@pytest.mark.supports("WanModel", "Triton kernels")
def test_turbodiffusion_s_model_in_bf16_is_near_fp32(kind: str, fast: bool) -> None:
    """The stand-in of the patcher tests in bf16, near the same network in fp32."""
    model = tiny(dim=256)
    if kind != "original":
        model = with_sparse(model, topk=0.4, sage=kind == "sagesla")
    model = model.cuda()
    inputs = {name: x.cuda() for name, x in tiny_inputs(tokens=1000, dim=256).items()}
    with torch.no_grad():
        truth = model(**inputs)
        model = model.bfloat16()
        if fast:
            model = with_fast_norms(model)
        narrow = {name: x if name == "e" else x.bfloat16() for name, x in inputs.items()}
        unpatched = relative(model(**narrow), truth)
        with patched(model, INT8):
            # Rounding to bf16 decides about a block of keys here and there, with either code.
            assert relative(model(**narrow), truth) < max(0.05, 2 * unpatched)
        with patched(model, PatchConfig(attention="int8")) as report:
            model(**narrow)
            assert len(report.guard) >= len(report.pairs)
            # One attention that chose other blocks than its author's may be given back.
            assert report.fused >= len(report.pairs) - 2


WAN = [
    Case("t2v", {"attention_head_dim": 128, "rope_max_seq_len": 64}),
    Case("i2v-d64", {"rope_max_seq_len": 64}, image=True, fused=8),
    Case("ti2v", {"attention_head_dim": 128, "rope_max_seq_len": 64}, per_token=True),
]


@pytest.mark.parametrize("case", WAN, ids=lambda case: case.name)
@pytest.mark.parametrize("linear", ["as-is", "int8"])
def test_diffusers_wan_with_a_proj_l_in_bf16_is_near_fp32(case: Case, linear: str) -> None:
    """In bf16, near the same SLA in fp32; 1,008 tokens are no whole number of blocks."""
    model, inputs = with_sla(case.model(torch.bfloat16)).cuda(), wan_inputs(case)
    wide = {k: v.float() if v.is_floating_point() else v for k, v in inputs.items()}
    config = PatchConfig(attention="int8", guard=False, sla_topk=0.4, linear=linear)
    with torch.no_grad():
        dense = model(**inputs, return_dict=False)[0]
        other = copy.deepcopy(model).float()
        with sla_as_defined(other, 0.4):
            truth = other(**wide, return_dict=False)[0]
        with sla_as_defined(model, 0.4) as count:
            unpatched = relative(model(**inputs, return_dict=False)[0], truth)
        assert count == 2 and relative(dense, truth) > 0.1
        with patched(model, config) as report:
            assert report.impl == "triton" and report.fused == len(report.pairs)
            assert len(report.pairs) == case.fused + 2
            # Rounding to bf16 decides about a block of keys here and there, with either code.
            assert relative(model(**inputs, return_dict=False)[0], truth) < max(
                0.05, 2 * unpatched
            )
        with patched(model, replace(config, guard=True)) as report:
            model(**inputs, return_dict=False)
            of_sla = [one for one in report.guard if "attn1" in one.path]
            assert len(of_sla) >= 4
            # One attention that chose other blocks than the exact one may be given back.
            assert report.fused >= len(report.pairs) - 2
        assert torch.equal(model(**inputs, return_dict=False)[0], dense)


def test_diffusers_wan_with_a_proj_l_compiles_without_a_break() -> None:
    case = WAN[0]
    model, inputs = with_sla(case.model(torch.bfloat16)).cuda(), wan_inputs(case)
    with torch.no_grad(), patched(model, PatchConfig(attention="int8", guard=False, sla_topk=0.4)):
        expected = model(**inputs, return_dict=False)[0]
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert relative(compiled(**inputs, return_dict=False)[0], expected) < 5e-3
    torch._dynamo.reset()


def wan_inputs(case: Case) -> dict[str, torch.Tensor]:
    inputs = case.inputs(1, torch.bfloat16)
    inputs.pop("return_dict")
    inputs["hidden_states"] = torch.randn(1, 4, 3, 42, 32).bfloat16()
    if case.per_token:
        inputs["timestep"] = torch.rand(1, 1008) * 1000
    return {name: x.cuda() for name, x in inputs.items()}


def test_the_exact_form_at_full_size_fits_beside_a_model() -> None:
    """What the guard compares with, Wan2.1-1.3B at 480p and 81 frames."""
    heads, tokens = 12, 32760
    q, k, v = (random(1, tokens, heads * 128) for _ in range(3))
    weight, bias = proj_l(128, "cuda")
    sparsity = Sparsity(topk=0.1, **HOPPER)
    ours = sparse_linear_attention(q, k, v, weight, bias, AttentionSpec(heads=heads), sparsity)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    exact = AttentionSpec(heads=heads, attention="exact")
    out = sparse_linear_attention(q, k, v, weight, bias, exact, sparsity)
    assert torch.cuda.max_memory_allocated() - before < 3 * 2**30
    # Random keys score nearly alike, so a few blocks of queries see other keys.
    assert relative(ours, out) < 0.15
