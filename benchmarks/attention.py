"""`attention`: the fused attention and others that a user could pick, in one run.

Inputs are q, k, v as [B, N, H*D], which is how a transformer's Linears leave them. A method that
wants separate heads gets views of the same memory, and every result is read as [B, N, H*D].

Cases whose name ends in a share of key blocks measure a whole self-attention, sparse-linear (SLA)
and dense: it begins with q, k and v as the Linears leave them and ends before the output
projection, so norm, rotary embedding, quantisation, block map and linear branch are in the time.

`ms` is the median of calls by `triton.testing.do_bench`, which clears the L2 before each,
smoothing and quantisation included. Of attention alone, `TOPS` is 4 N^2 D H / ms, and `error` is
relative L2 to softmax(q k^T / sqrt(D)) v in fp64, of some rows; the other cases have tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import runner
from benchmarks.runner import ERROR, MS, Benchmark, Call, Column, Measure, Plan, Record, Wrong
from turbo_rcm_patch import ops
from turbo_rcm_patch.ops.attention.reference import split_heads
from turbo_rcm_patch.ops.sageattn import sageattn


class Case(NamedTuple):
    """Heads, tokens, channels of a head, and the share of key blocks of a sparse attention."""

    heads: int
    tokens: int
    dim: int
    topk: float | None = None


#: First those that are measured unless others are named, then what else engines run: Wan at 480p
#: and 720p, and the heads of a rank of 4.
_DENSE: Final = {
    f"H{case.heads}-N{case.tokens}-D{case.dim}": case
    for case in (
        Case(12, 2048, 128), Case(12, 4096, 128), Case(12, 8192, 128), Case(12, 16384, 128),
        Case(12, 32760, 128), Case(40, 75600, 128), Case(48, 17776, 64),
        Case(3, 32760, 128), Case(10, 32760, 128), Case(40, 32760, 128),
        Case(3, 75600, 128), Case(10, 75600, 128), Case(12, 75600, 128),
    )
}  # fmt: skip
_SPARSE: Final = {"H12-N32760-D128-k0.1": Case(12, 32760, 128, 0.1)}
#: Relative L2 to exact mathematics from which an output is wrong: int8 with fp8 p and v has 0.04.
WRONG: Final = 0.1
#: Rows of the output that are compared.
_ROWS: Final = 256


def _prepare(name: str, plan: Plan, device: torch.device) -> Measure:
    case = {**_DENSE, **_SPARSE}[name]
    if plan.micro:
        case = Case(2, 70, 64) if case.topk is None else Case(2, 300, 64, 0.5)
    random, size = runner.generator(device), (1, case.tokens, case.heads * case.dim)
    inputs = [torch.randn(size, generator=random, device=device).bfloat16() for _ in "qkv"]
    dense = case.topk is None
    methods = METHODS if dense else _sparse_methods(case, device)
    rows = torch.linspace(0, case.tokens - 1, min(_ROWS, case.tokens), device=device).long()
    exact = _exact(case, inputs, rows) if dense else None

    def measure(method: str, record: Record) -> None:
        cudnn = sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
        with cudnn if method == "torch cuDNN" else nullcontext():
            call = methods[method](case.heads, *inputs)
            output = call()
            if not output.isfinite().all():
                raise Wrong("wrong: not finite")
            if exact is not None:
                record["error"] = runner.checked_error(output[:, rows], exact, WRONG)
            record["ms"] = runner.time_queued(call, device)
        if dense:
            operations = 4 * case.tokens**2 * case.dim * case.heads
            record["tops"] = operations / record["ms"] / 1e9

    return measure


def _exact(case: Case, inputs: Sequence[Tensor], rows: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v of some rows [R] in fp64: [1, R, H*D]."""
    q, k, v = inputs
    heads = (split_heads(x, case.heads)[0] for x in (q[:, rows], k, v))
    outputs = []
    for q_h, k_h, v_h in zip(*heads, strict=True):  # [N, D]; all would need 20 GB in fp64
        logits = q_h.double() @ k_h.double().T * case.dim**-0.5
        outputs.append(logits.softmax(-1) @ v_h.double())
    return torch.cat(outputs, -1)[None]


# --- methods: each takes the number of heads and q, k, v, and returns the call to be timed ------


def _fused(heads: int, q: Tensor, k: Tensor, v: Tensor, **options: str) -> Call:
    spec = ops.AttentionSpec(heads=heads, **options)  # type: ignore[arg-type]
    return lambda: ops.attention_skip(q, k, v, spec)


def _with_heads(heads: int, *inputs: Tensor) -> list[Tensor]:
    """[B, N, H*D] as views [B, N, H, D]."""
    return [x.view(*x.shape[:2], heads, -1) for x in inputs]


def _sdpa(heads: int, *inputs: Tensor) -> Call:
    q, k, v = (x.transpose(1, 2) for x in _with_heads(heads, *inputs))
    return lambda: F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _sage(heads: int, *inputs: Tensor) -> Call:
    peer = import_module("sageattention").sageattn
    q, k, v = _with_heads(heads, *inputs)
    k = k.clone()  # Release 1 writes into it.
    return lambda: peer(q, k, v, tensor_layout="NHD").flatten(2)


def _as_engines_call(heads: int, *inputs: Tensor) -> Call:
    q, k, v = _with_heads(heads, *inputs)
    return lambda: sageattn(q, k, v, tensor_layout="NHD").flatten(2)


def _sparse_methods(case: Case, device: torch.device) -> dict[str, Callable[..., Call]]:
    """A self-attention with norms and rotary embedding, dense, and with SLA's projection."""
    assert case.topk is not None
    torch.manual_seed(0)
    dim, spec = case.dim, ops.AttentionSpec(heads=case.heads)
    angle = torch.randn(case.tokens, dim // 2, device=device).repeat_interleave(2, -1)
    norm = (1 + 0.1 * torch.randn(case.heads * dim, device=device)).bfloat16()
    options: Any = {"norm_q": norm, "norm_k": norm, "rotary": (angle.cos(), angle.sin())}
    weight = torch.randn(dim, dim, device=device) * dim**-0.5
    bias, sparsity = torch.randn(dim, device=device), ops.Sparsity.sage(case.topk, device)

    def dense(heads: int, q: Tensor, k: Tensor, v: Tensor) -> Call:
        return lambda: ops.attention_skip(q, k, v, spec, **options)

    def sparse(heads: int, q: Tensor, k: Tensor, v: Tensor) -> Call:
        return lambda: ops.sparse_linear_attention(
            q, k, v, weight, bias, spec, sparsity, **options
        )

    return {"fused dense int8": dense, "fused sparse": sparse}


METHODS: Final[dict[str, Callable[..., Call]]] = {
    "fused int8": _fused,
    "fused int8 bf16-pv": partial(_fused, pv="bf16"),
    "fused sageattn": _as_engines_call,
    "torch": _sdpa,
    "torch cuDNN": _sdpa,
    "sageattention": _sage,
}
_SPARSE_METHODS: Final = ("fused dense int8", "fused sparse")
attention: Final = Benchmark(
    name="attention",
    text="attention alone, compared with torch's and sageattention, and sparse (SLA)",
    columns=(MS, Column("TOPS", "tops", ".0f"), ERROR),
    cases={**dict.fromkeys(_DENSE, list(METHODS)), **dict.fromkeys(_SPARSE, _SPARSE_METHODS)},
    prepare=_prepare,
    default=[*list(_DENSE)[:7], "H12-N32760-D128-k0.1"],
)
