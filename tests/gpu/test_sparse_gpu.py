"""Sparse-linear attention on a real GPU: `pytest -m gpu tests/gpu/test_sparse_gpu.py`, under a
minute.

Tolerances as in test_ops_gpu.py: kernels against the emulation differ where a value of P lands on
the other side of a rounding boundary; against exact mathematics by what int8 and e4m3 cost.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from tests.inputs import attention_inputs
from tests.patching.sla import with_sla
from tests.patching.turbodiffusion import tiny, tiny_inputs, with_fast_norms, with_sparse
from tests.patching.wan import INT8, Case, relative
from turbo_rcm_patch import PatchConfig, patched
from turbo_rcm_patch.ops import (
    AttentionSpec,
    Sparsity,
    attention_skip,
    resolve_pv,
    sparse_linear_attention,
)
from turbo_rcm_patch.ops.reference import norm_rope, split_heads
from turbo_rcm_patch.ops.sparse_reference import (
    block_map,
    emulated_sparse_attention,
    linear_branch,
)
from turbo_rcm_patch.patching import sla_as_defined

pytestmark = pytest.mark.gpu

TIGHT = {"fp8": 8e-3, "bf16": 2e-3, "fp16": 2e-3}
FLOOR = {"fp8": 0.05, "bf16": 0.02}
HOPPER, ELSEWHERE = {"block_q": 64, "block_k": 128}, {"block_q": 128, "block_k": 64}


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def proj_l(dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    weight = random(dim, dim, dtype=torch.float32) * dim**-0.5
    return weight, random(dim, dtype=torch.float32)


def skip_without(pv: str) -> None:
    if pv == "fp8" and resolve_pv("auto", torch.device("cuda", 0)) != "fp8":
        pytest.skip("this GPU has no e4m3 matrix units")


@pytest.mark.parametrize("pv", ["fp8", "bf16", "fp16"])
@pytest.mark.parametrize("blocks", [HOPPER, ELSEWHERE], ids=["64x128", "128x64"])
@pytest.mark.parametrize(
    ("batch", "heads", "tokens", "dim", "topk", "dtype"),
    [
        pytest.param(1, 3, 1000, 128, 0.3, torch.bfloat16, id="d128"),
        pytest.param(2, 2, 777, 64, 0.5, torch.bfloat16, id="d64-batch-2"),
        pytest.param(1, 2, 640, 128, 0.2, torch.float16, id="fp16-whole-blocks"),
        pytest.param(1, 2, 300, 96, 0.5, torch.float32, id="fp32-d96"),
        pytest.param(1, 1, 50, 32, 0.1, torch.bfloat16, id="one-block-d32"),
    ],
)
def test_kernels_equal_the_emulation(
    batch: int,
    heads: int,
    tokens: int,
    dim: int,
    topk: float,
    dtype: torch.dtype,
    blocks: dict,
    pv: str,
) -> None:
    """On the kernels' own choice of blocks: among nearly equal ones a rounding chooses."""
    skip_without(pv)
    channels = heads * dim
    q, k, v = random(batch, tokens, 3 * channels, dtype=dtype).chunk(3, -1)
    weight, bias = proj_l(dim)
    spec, sparsity = AttentionSpec(heads=heads, pv=pv), Sparsity(topk=topk, **blocks)
    out = sparse_linear_attention(q, k, v, weight, bias, spec, sparsity, out_dtype=torch.float32)
    qh, kh, vh = (split_heads(x, heads).float() for x in (q, k, v))
    chosen = chosen_blocks(q, k, v, heads, sparsity)
    expected = emulated_sparse_attention(
        qh, kh, vh, chosen, sm_scale=dim**-0.5, pv=pv, qmax=127, smooth_k=True, **blocks
    )
    expected += linear_branch(qh, kh, vh, weight, bias, dtype=dtype)
    assert relative(split_heads(out, heads), expected) < TIGHT[pv]
    again = sparse_linear_attention(q, k, v, weight, bias, spec, sparsity, out_dtype=torch.float32)
    assert torch.equal(out, again)


def chosen_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, sparsity: Sparsity
) -> torch.Tensor:
    """The kernels' block map, after comparing it with the reference's."""
    from turbo_rcm_patch.kernels.portable.sparse_attention import largest_scores, prepare_tokens
    from turbo_rcm_patch.kernels.portable.sparse_attention import linear_branch as branch_of

    geometry = {"block_q": sparsity.block_q, "block_k": sparsity.block_k}
    dim, count = q.shape[2] // heads, sparsity.count(k.shape[1])
    inputs = attention_inputs(q, k, v, heads=heads)
    tokens = prepare_tokens(inputs, block_q=sparsity.block_q)
    eye = torch.eye(dim, device="cuda")
    branch = branch_of(k, v, tokens.k_mean, eye, None, heads=heads, block_k=sparsity.block_k)
    chosen = largest_scores(tokens.q_pooled @ branch.k_pooled.transpose(-1, -2), count)
    qh, kh = (split_heads(x, heads).float() for x in (q, k))
    expected = block_map(qh, kh, count=count, dtype=q.dtype, **geometry)
    assert (chosen[..., 1:] > chosen[..., :-1]).all()
    differing = (chosen != expected).any(-1).double().mean()
    assert differing < 0.1, f"{differing:.1%} of the blocks of queries"
    return chosen.long()


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


def test_norm_and_rotary_come_first() -> None:
    q, k, v = random(1, 900, 3 * 256).chunk(3, -1)
    angle = torch.randn(900, 64, device="cuda").repeat_interleave(2, -1)
    rotary, norm = (angle.cos(), angle.sin()), (torch.rand(256, device="cuda") + 0.5).bfloat16()
    weight, bias = proj_l(128)
    spec, sparsity = AttentionSpec(heads=2, pv="bf16"), Sparsity(topk=1.0)
    out = sparse_linear_attention(
        q, k, v, weight, bias, spec, sparsity, norm_q=norm, norm_k=norm, rotary=rotary
    )
    turned = [
        norm_rope(x, 2, weight=norm, cos=rotary[0], sin=rotary[1], eps=1e-6)
        .to(x.dtype)
        .transpose(1, 2)
        .flatten(2)
        for x in (q, k)
    ]
    expected = sparse_linear_attention(*turned, v, weight, bias, spec, sparsity)
    # q and k are rounded to bf16 once in both, by other instructions.
    assert relative(out, expected) < 5e-3


@pytest.mark.parametrize("pv", ["fp8", "bf16"])
@pytest.mark.parametrize("blocks", [HOPPER, ELSEWHERE], ids=["64x128", "128x64"])
def test_full_size_against_exact_mathematics(pv: str, blocks: dict) -> None:
    """Wan2.1-1.3B at 480p and 81 frames, a tenth of the keys; every head, a few blocks of rows."""
    skip_without(pv)
    heads, tokens, dim = 12, 32760, 128
    q, k, v = (random(1, tokens, heads * dim) for _ in range(3))
    k = k + 2 * random(heads * dim)
    weight, bias = proj_l(dim)
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


@pytest.mark.parametrize("pv", ["fp8", "bf16"])
def test_every_block_and_a_zero_projection_is_dense_attention(pv: str) -> None:
    skip_without(pv)
    q, k, v = (random(1, 1500, 256) for _ in range(3))
    spec = AttentionSpec(heads=2, pv=pv)
    zero = torch.zeros(128, 128, device="cuda")
    out = sparse_linear_attention(q, k, v, zero, None, spec, Sparsity(topk=1.0, **HOPPER))
    assert relative(out, attention_skip(q, k, v, spec)) < TIGHT[pv]


def test_large_keys_and_sums_stay_finite_in_fp16() -> None:
    """Features of 100,000 keys add up to more than fp16 holds unless they are scaled."""
    q, k, v = (random(1, 100_000, 64, dtype=torch.float16) * 8 for _ in range(3))
    weight, bias = proj_l(64)
    spec = AttentionSpec(heads=1)
    out = sparse_linear_attention(q, k, v, weight, bias, spec, Sparsity(topk=0.02))
    assert out.isfinite().all()


def test_inside_a_cuda_graph_and_a_compiled_function() -> None:
    q, k, v = (random(1, 1024, 256) for _ in range(3))
    weight, bias = proj_l(128)
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
def test_turbodiffusion_s_model(kind: str, fast: bool) -> None:
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
def test_diffusers_wan_with_a_proj_l(case: Case, linear: str) -> None:
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


def test_diffusers_wan_with_a_proj_l_in_a_compiled_model() -> None:
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
    weight, bias = proj_l(128)
    sparsity = Sparsity(topk=0.1, **HOPPER)
    ours = sparse_linear_attention(q, k, v, weight, bias, AttentionSpec(heads=heads), sparsity)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    exact = AttentionSpec(heads=heads, attention="exact")
    out = sparse_linear_attention(q, k, v, weight, bias, exact, sparsity)
    assert torch.cuda.max_memory_allocated() - before < 3 * 2**30
    # Random keys score nearly alike, so a few blocks of queries see other keys.
    assert relative(ours, out) < 0.15
