"""`sparse`: a whole self-attention, sparse-linear (SLA) compared with dense int8.

Both begin with q, k and v as the Linears leave them and end before the output projection: norm,
rotary embedding, quantisation, block map and linear branch are in the time.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import torch

from benchmarks.attention import calls_within, in_turn, input_sets
from benchmarks.runner import (
    ERROR,
    TIMES,
    Benchmark,
    Call,
    Column,
    Journal,
    Record,
    error_to,
    time_calls,
)
from turbo_rcm_patch import ops
from turbo_rcm_patch.config import PVDType
from turbo_rcm_patch.ops.attention.reference import norm_rope, split_heads
from turbo_rcm_patch.ops.sparse_linear import reference

#: Relative L2 to exact mathematics from which an output is wrong.
_WRONG: Final = 0.1
#: Blocks of queries of every head that are compared with it.
_BLOCKS: Final = 3
_DENSE: Final = "fused dense int8"
_METHODS: Final[dict[str, PVDType]] = {
    _DENSE: "auto",
    "fused sparse": "auto",
    "fused sparse bf16-pv": "bf16",
}
#: Case -> heads, tokens, channels of a head, share of the key blocks.
_CASES: Final = {
    f"H{heads}-N{tokens}-D128-k{topk:g}": (heads, tokens, 128, topk)
    for heads, tokens, topk in (
        (12, 32760, 0.1), (12, 32760, 0.15), (12, 32760, 0.2), (40, 75600, 0.1), (12, 8192, 0.1),
    )
}  # fmt: skip
_MICRO: Final = (2, 300, 64, 0.5)
_COLUMNS: Final = (*TIMES, Column("dense / this", "speed_up", ".2f"), ERROR)
_ABOUT: Final = {
    "inputs": "q, k, v [1, N, H*D], standard normal, bf16; several sets in turn",
    "k": "share of the key blocks, which have SageSLA's sizes on this device",
    "error": f"relative L2 to its own definition in fp32, {_BLOCKS} blocks of queries of a head",
    "speed_up": "median of dense int8 over median",
}


@torch.no_grad()
def _measure(case: str, methods: list[str], journal: Journal) -> None:
    plan, device = journal.plan, journal.device
    heads, tokens, dim, topk = _MICRO if plan.micro else _CASES[case]
    sets = input_sets(heads * dim, tokens, plan, device)
    torch.manual_seed(plan.seed)
    angle = torch.randn(tokens, dim // 2, device=device).repeat_interleave(2, -1)
    rotary = angle.cos(), angle.sin()
    norm = (1 + 0.1 * torch.randn(heads * dim, device=device)).bfloat16()
    weight = torch.randn(dim, dim, device=device) * dim**-0.5
    bias = torch.randn(dim, device=device)
    sparsity = ops.Sparsity.sage(topk, device)
    dense = ops.Sparsity(topk=1.0, block_q=sparsity.block_q, block_k=sparsity.block_k)

    def error(kept: ops.Sparsity, output: torch.Tensor) -> float:
        """The error over a few blocks of queries, by the definition."""
        q, k = (
            norm_rope(x, heads, weight=norm, cos=rotary[0], sin=rotary[1], eps=1e-6)
            .bfloat16()
            .float()
            for x in sets[0][:2]
        )
        v = split_heads(sets[0][2], heads).float()
        sizes = {"block_q": kept.block_q, "block_k": kept.block_k}
        blocks = reference.block_map(q, k, count=kept.count(tokens), dtype=torch.bfloat16, **sizes)
        last = blocks.shape[2] - 1
        some = torch.tensor([last * i // (_BLOCKS - 1) for i in range(_BLOCKS)], device=device)
        rows = (some[:, None] * kept.block_q + torch.arange(kept.block_q, device=device)).flatten()
        rows = rows[rows < tokens]
        truth = reference.exact_sparse_attention(
            q[:, :, rows], k, v, blocks[:, :, some], sm_scale=dim**-0.5, **sizes
        )
        if kept is sparsity:
            truth += reference.linear_branch(
                q[:, :, rows], k, v, weight, bias, dtype=torch.float32
            )
        return error_to(truth.transpose(1, 2).flatten(2), _WRONG)(output[:, rows])

    def call_of(method: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
        spec = ops.AttentionSpec(heads=heads, pv=_METHODS[method])
        if method == _DENSE:
            return lambda: ops.attention_skip(
                q, k, v, spec, norm_q=norm, norm_k=norm, rotary=rotary
            )
        return lambda: ops.sparse_linear_attention(
            q, k, v, weight, bias, spec, sparsity, norm_q=norm, norm_k=norm, rotary=rotary
        )

    def one(method: str, record: Record) -> None:
        calls = [call_of(method, *inputs) for inputs in sets]
        record["error"] = error(dense if method == _DENSE else sparsity, calls[0]())
        record["ms"] = time_calls(in_turn(calls), device, calls_within(calls[0], journal))
        base = record if method == _DENSE else journal.case(case).get(_DENSE, {})
        if "ms" in base:
            record["speed_up"] = base["ms"]["median"] / record["ms"]["median"]

    for method in methods:
        journal.measure(case, method, partial(one, method))


sparse: Final = Benchmark(
    name="sparse", about=_ABOUT, columns=_COLUMNS, cases=_CASES, methods=_METHODS,
    measure=_measure,
)  # fmt: skip
