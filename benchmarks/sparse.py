"""`sparse`: a whole self-attention, sparse-linear against our dense int8 one.

Both begin with q, k and v as the linears leave them and end before the output projection: RMSNorm,
rotary embedding, quantisation and, where it is sparse, the block map and the linear branch are in
the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from turbo_rcm_patch.ops.gradients import prepare

from benchmarks import runner
from benchmarks.measure import Call
from benchmarks.runner import REL_L2, Column, Errors, Journal, Method, Plan, Shape
from turbo_rcm_patch import ops
from turbo_rcm_patch.config import PVDType
from turbo_rcm_patch.ops import sparse_reference as reference
from turbo_rcm_patch.ops.reference import split_heads

#: Relative L2 to exact mathematics from which an output is wrong and not inaccurate.
_WRONG: Final = 0.1
#: Blocks of queries of every head that are compared with it.
_BLOCKS: Final = 3
_DENSE: Final = "dense int8"
_SPARSE: Final[dict[str, PVDType]] = {"sparse auto": "auto", "sparse bf16": "bf16"}
_COLUMNS: Final = (
    Column("case", 24), Column("method", 12), *runner.times(),
    Column("kernel", 9, "kernel_milliseconds", ".4f"), Column("speed-up", 9, "speed_up", ".2f"),
    REL_L2,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Case:
    shape: Shape
    topk: float
    quick: bool = False

    @property
    def name(self) -> str:
        return f"{self.shape.name}-k{self.topk:g}"


def _cases(*, micro: bool) -> dict[str, _Case]:
    wan = Shape.square(12, 32760, 128)  # Wan2.1-1.3B at 480p and 81 frames
    cases = [
        _Case(wan, 0.1, quick=True),
        _Case(wan, 0.2),
        _Case(Shape.square(40, 75600, 128), 0.1),  # Wan2.1-14B at 720p
        _Case(Shape.square(12, 8192, 128), 0.1),
    ]
    if micro:
        cases = [_Case(Shape.square(2, 300, 64), 0.5, quick=True)]
    return {case.name: case for case in cases}


def run(plan: Plan) -> int:
    """Measure and write `sparse.json`; 0 if everything was right."""
    cases = _cases(micro=plan.micro)
    return runner.run_cases(
        plan,
        "sparse",
        _COLUMNS,
        {
            "inputs": "q, k, v [B, N, H*D], standard normal, bf16; several sets in turn",
            "included": "RMSNorm across heads, rotary embedding, quantisation, block map",
            "k": "share of the blocks of keys; blocks as SageSLA's on this device",
            "kernel_milliseconds": "the attention kernel alone, by torch.profiler",
            "truth": f"its own definition in fp32, {_BLOCKS} blocks of queries of every head",
            "speed_up": f"median of {_DENSE} over median",
        },
        cases,
        _run_case,
        methods=[_DENSE, *_SPARSE],
        default=[name for name, case in cases.items() if case.quick or not plan.quick],
    )


def _run_case(case: _Case, peers: list[str], journal: Journal) -> bool:
    plan, device, shape = journal.plan, journal.device, case.shape
    heads, dim = shape.heads, shape.head_dim
    torch.manual_seed(plan.seed)
    sets = [
        runner.random_normal(shape, device, plan.seed + i)
        for i in range(runner.input_sets(6 * shape.q_tokens * shape.channels))
    ]
    angle = torch.randn(shape.q_tokens, dim // 2, device=device).repeat_interleave(2, -1)
    rotary = angle.cos(), angle.sin()
    norm = (1 + 0.1 * torch.randn(shape.channels, device=device)).bfloat16()
    weight, bias = (
        torch.randn(dim, dim, device=device) * dim**-0.5,
        torch.randn(dim, device=device),
    )
    sparsity = ops.Sparsity.sage(case.topk, device)

    def dense(inputs: Sequence[torch.Tensor]) -> Call:
        q, k, v = inputs
        spec = ops.AttentionSpec(heads=heads)
        return lambda: ops.attention_skip(q, k, v, spec, norm_q=norm, norm_k=norm, rotary=rotary)

    def sparse(pv: PVDType) -> Method:
        spec = ops.AttentionSpec(heads=heads, pv=pv)

        def make(inputs: Sequence[torch.Tensor]) -> Call:
            q, k, v = inputs
            return lambda: ops.sparse_linear_attention(
                q, k, v, weight, bias, spec, sparsity, norm_q=norm, norm_k=norm, rotary=rotary
            )

        name = next(one for one, known in _SPARSE.items() if known == pv)
        return Method(name, make, several=True)

    def errors(kept: ops.Sparsity, branch: tuple[torch.Tensor, torch.Tensor] | None) -> Errors:
        """Numbers against the definition, over a few blocks of queries."""
        q, k = (
            prepare(x, heads, norm, None, *rotary, 1e-6).to(x.dtype).float() for x in sets[0][:2]
        )
        v = split_heads(sets[0][2], heads).float()
        sizes = {"block_q": kept.block_q, "block_k": kept.block_k}
        count = kept.count(shape.q_tokens)
        blocks = reference.block_map(q, k, count=count, dtype=sets[0][0].dtype, **sizes)
        last = blocks.shape[2] - 1
        some = torch.tensor(sorted({last * i // (_BLOCKS - 1) for i in range(_BLOCKS)}))
        some = some.to(device)
        rows = (some[:, None] * kept.block_q + torch.arange(kept.block_q, device=device)).flatten()
        rows = rows[rows < shape.q_tokens]
        truth = reference.exact_sparse_attention(
            q[:, :, rows], k, v, blocks[:, :, some], sm_scale=dim**-0.5, **sizes
        )
        if branch is not None:
            truth += reference.linear_branch(q[:, :, rows], k, v, *branch, dtype=torch.float32)
        return runner.errors_to(truth.transpose(1, 2).flatten(2), rows)

    whole = errors(ops.Sparsity(topk=1.0, block_k=128), None)
    methods = [
        Method(_DENSE, dense, several=True, errors=whole),
        *(sparse(pv) for pv in _SPARSE.values()),
    ]
    entrants = runner.compete(
        [method for method in methods if method.name in peers],
        sets,
        errors(sparsity, (weight, bias)),
        journal,
        plan.effort(250.0, 60),
        case.name,
        wrong=_WRONG,
        alone=("attention", "kernel_milliseconds"),
    )
    blocks = [sparsity.block_q, sparsity.block_k]
    runner.finish(entrants, journal, case.name, {"shape": shape.record, "blocks": blocks}, _DENSE)
    return all(entrant.calls for entrant in entrants)
