"""`sparse`: a whole self-attention, sparse-linear against our dense int8 one.

Both begin with q, k and v as the linears leave them and end before the output projection: RMSNorm,
rotary embedding, quantisation and, where it is sparse, the block map and the linear branch are in
the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from benchmarks.accuracy import random_normal
from benchmarks.clock import Call, input_sets
from benchmarks.contest import Effort, Entrant, Method, admit, time_entrants
from benchmarks.journal import Journal, Plan, chosen
from benchmarks.setup import Shape, errors_of
from turbo_rcm_patch import ops
from turbo_rcm_patch.config import PVDType
from turbo_rcm_patch.ops import sparse_reference as reference
from turbo_rcm_patch.ops.gradients import prepare
from turbo_rcm_patch.ops.reference import split_heads

__all__ = ["run"]

#: Relative L2 to exact mathematics from which an output is wrong and not inaccurate.
_WRONG: Final = 0.1
#: Blocks of queries of every head that are compared with it.
_BLOCKS: Final = 3
_DENSE: Final = "dense int8"
_SPARSE: Final[dict[str, PVDType]] = {"sparse auto": "auto", "sparse bf16": "bf16"}
_COLUMNS: Final = (
    ("case", 24), ("method", 12), ("ms", 9), ("p20", 9), ("p80", 9), ("kernel", 9),
    ("speed-up", 9), ("relL2", 8),
)  # fmt: skip

_Qkv = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Case:
    shape: Shape
    topk: float
    quick: bool = False

    @property
    def name(self) -> str:
        return f"H{self.shape.heads}-N{self.shape.q_tokens}-D{self.shape.head_dim}-k{self.topk:g}"


def _cases(*, micro: bool) -> list[_Case]:
    if micro:
        return [_Case(Shape(1, 300, 300, 2, 64), 0.5, quick=True)]
    wan = Shape(1, 32760, 32760, 12, 128)  # Wan2.1-1.3B at 480p and 81 frames
    return [
        _Case(wan, 0.1, quick=True),
        _Case(wan, 0.2),
        _Case(Shape(1, 75600, 75600, 40, 128), 0.1),  # Wan2.1-14B at 720p
        _Case(Shape(1, 8192, 8192, 12, 128), 0.1),
    ]


def run(plan: Plan) -> int:
    """Measure and write `sparse.json`; 0 if everything was right."""
    cases = {case.name: case for case in _cases(micro=plan.micro)}
    quick = [name for name, case in cases.items() if case.quick or not plan.quick]
    wanted = chosen("--only", plan.only, list(cases)) if plan.only else quick
    peers = chosen("--peers", plan.peers, [_DENSE, *_SPARSE])
    journal = Journal(
        "sparse",
        plan,
        _COLUMNS,
        about={
            "inputs": "q, k, v [B, N, H*D], standard normal, bf16; several sets in turn",
            "included": "RMSNorm across heads, rotary embedding, quantisation, block map",
            "k": "share of the blocks of keys; blocks as SageSLA's on this device",
            "kernel_milliseconds": "the attention kernel alone, by torch.profiler",
            "truth": f"its own definition in fp32, {_BLOCKS} blocks of queries of every head",
            "speed_up": f"median of {_DENSE} over median",
        },
    )
    good = True
    with journal.running():
        for name in wanted:
            if not journal.late(name):
                good &= _run_case(cases[name], peers, journal)
    return 0 if good else 1


def _run_case(case: _Case, peers: Sequence[str], journal: Journal) -> bool:
    plan, device, shape = journal.plan, journal.device, case.shape
    torch.manual_seed(plan.seed)
    sets = [
        random_normal(shape, device, plan.seed + i)
        for i in range(input_sets(6 * shape.q_tokens * shape.channels))
    ]
    work = _Work(case, device)
    dense = ops.Sparsity(topk=1.0, block_k=128)
    methods = [(Method(_DENSE, work.dense, prologue=True), dense, False)] + [
        (Method(name, work.sparse(pv), prologue=True), work.sparsity, True)
        for name, pv in _SPARSE.items()
    ]
    entrants = [
        admit(method, sets, work.errors(sets[0], sparsity, linear), _WRONG)
        for method, sparsity, linear in methods
        if method.name in peers
    ]
    least, most = (1, 2) if plan.micro else (4, 60)
    most = plan.calls or most
    effort = Effort(budget=250.0, least=min(least, most), most=most)
    time_entrants(entrants, journal, effort, case.name, kernels=True)
    base = next((e.median() for e in entrants if e.method.name == _DENSE), None)
    for entrant in entrants:
        _show(case.name, entrant, base, journal)
    journal.case(
        case.name,
        {
            "shape": {"B": shape.batch, "H": shape.heads, "N": shape.q_tokens,
                      "D": shape.head_dim},
            "blocks": [work.sparsity.block_q, work.sparsity.block_k],
            "methods": {entrant.method.name: entrant.record for entrant in entrants},
        },
    )  # fmt: skip
    return all(entrant.ready for entrant in entrants)


class _Work:
    """One case: what both attentions share, and the truth of each."""

    def __init__(self, case: _Case, device: torch.device) -> None:
        shape = case.shape
        self.heads, dim = shape.heads, shape.head_dim
        angle = torch.randn(shape.q_tokens, dim // 2, device=device).repeat_interleave(2, -1)
        self.rotary = angle.cos(), angle.sin()
        self.norm = (1 + 0.1 * torch.randn(shape.channels, device=device)).bfloat16()
        self.weight = torch.randn(dim, dim, device=device) * dim**-0.5
        self.bias = torch.randn(dim, device=device)
        self.sparsity = ops.Sparsity.sage(case.topk, device)

    def dense(self, inputs: _Qkv) -> Call:
        q, k, v = inputs
        spec, norm, rotary = ops.AttentionSpec(heads=self.heads), self.norm, self.rotary
        return lambda: ops.attention_skip(q, k, v, spec, norm_q=norm, norm_k=norm, rotary=rotary)

    def sparse(self, pv: PVDType) -> Callable[[_Qkv], Call]:
        spec = ops.AttentionSpec(heads=self.heads, pv=pv)

        def make(inputs: _Qkv) -> Call:
            q, k, v = inputs
            return lambda: ops.sparse_linear_attention(
                q, k, v, self.weight, self.bias, spec, self.sparsity,
                norm_q=self.norm, norm_k=self.norm, rotary=self.rotary,
            )  # fmt: skip

        return make

    def errors(
        self, inputs: _Qkv, sparsity: ops.Sparsity, linear: bool
    ) -> Callable[[torch.Tensor], dict[str, float]]:
        """Numbers of an output against the definition, over a few blocks of queries."""
        cos, sin = self.rotary
        q, k = (
            prepare(x, self.heads, self.norm, None, cos, sin, 1e-6).to(x.dtype).float()
            for x in inputs[:2]
        )
        v = split_heads(inputs[2], self.heads).float()
        tokens, (size, block_k) = q.shape[2], (sparsity.block_q, sparsity.block_k)
        count = sparsity.count(tokens)
        blocks = reference.block_map(
            q, k, count=count, block_q=size, block_k=block_k, dtype=inputs[0].dtype
        )
        last = blocks.shape[2] - 1
        some = torch.tensor(sorted({last * i // (_BLOCKS - 1) for i in range(_BLOCKS)}))
        some = some.to(q.device)
        rows = (some[:, None] * size + torch.arange(size, device=q.device)).flatten()
        rows = rows[rows < tokens]
        truth = reference.exact_sparse_attention(
            q[:, :, rows], k, v, blocks[:, :, some],
            sm_scale=q.shape[3] ** -0.5, block_q=size, block_k=block_k,
        )  # fmt: skip
        if linear:
            truth += reference.linear_branch(
                q[:, :, rows], k, v, self.weight, self.bias, dtype=torch.float32
            )
        truth = truth.transpose(1, 2).flatten(2)
        return lambda output: errors_of(output[:, rows], truth)


def _show(case: str, entrant: Entrant, base: float | None, journal: Journal) -> None:
    record, median = entrant.record, entrant.median()
    timing, error = record.get("milliseconds"), record.get("error")
    if median is None or not isinstance(timing, dict) or not isinstance(error, dict):
        journal.show((case, entrant.method.name, str(record.get("reason", "not timed"))))
        return
    alone = record.get("kernel_milliseconds")
    if base is not None:
        record["speed_up"] = base / median
    journal.show(
        (
            case,
            entrant.method.name,
            *(f"{timing[name]:.4f}" for name in ("median", "p20", "p80")),
            f"{alone:.4f}" if isinstance(alone, float) else "",
            f"{base / median:.2f}" if base is not None else "",
            f"{error['relative_l2']:.5f}",
        )
    )
