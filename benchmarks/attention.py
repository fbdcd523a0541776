"""`attention`: the fused attention and others that a user could pick, in one run.

Inputs are q, k, v as [B, N, H*D], which is how a transformer's Linears leave them. A method that
wants separate heads gets views of the same memory, and every result is read as [B, N, H*D].

Cases whose name ends in a share of key blocks measure a whole self-attention, sparse-linear (SLA)
and dense: it begins with q, k and v as the Linears leave them and ends before the output
projection, so norm, rotary embedding, quantisation, block map and linear branch are in the time.

`ms` is the median of calls by `triton.testing.do_bench`, which clears the L2 before each,
smoothing and quantisation included; `TOPS` is
4 N^2 D H / ms. `error` is relative L2 to softmax(q k^T / sqrt(D)) v in fp64, of some rows; of SLA
to its definition in fp32, of some blocks of queries.
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
from turbo_rcm_patch.ops.attention.reference import norm_rope, split_heads
from turbo_rcm_patch.ops.sageattn import sageattn
from turbo_rcm_patch.ops.sparse_linear import reference


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
#: Rows of the output that are compared, and blocks of queries of a sparse attention.
_ROWS, _BLOCKS = 256, 3

Inputs = Sequence[Tensor]


def _prepare(name: str, plan: Plan, device: torch.device) -> Measure:
    case = {**_DENSE, **_SPARSE}[name]
    if plan.micro:
        case = Case(2, 70, 64) if case.topk is None else Case(2, 300, 64, 0.5)
    random, size = runner.generator(device), (1, case.tokens, case.heads * case.dim)
    inputs = [torch.randn(size, generator=random, device=device).bfloat16() for _ in "qkv"]
    kind = _Dense(case, inputs) if case.topk is None else _Sparse(case, inputs)

    def measure(method: str, record: Record) -> None:
        cudnn = sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
        with cudnn if method == "torch cuDNN" else nullcontext():
            call = kind.call(method)
            output = call()
            if not output.isfinite().all():
                raise Wrong("wrong: not finite")
            rows, right = kind.truth(method)
            record["error"] = runner.checked_error(output[:, rows], right, WRONG)
            record["ms"] = runner.time_queued(call, device)
        if case.topk is None:
            operations = 4 * case.tokens**2 * case.dim * case.heads
            record["tops"] = operations / record["ms"] / 1e9

    return measure


class _Dense:
    """Attention alone. The truth is softmax(q k^T / sqrt(D)) v of some rows in fp64."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self._heads, self._inputs = case.heads, inputs
        q, k, v = inputs
        count, device = min(_ROWS, case.tokens), q.device
        self._rows = torch.linspace(0, case.tokens - 1, count, device=device).long()
        heads = (split_heads(x, case.heads)[0] for x in (q[:, self._rows], k, v))
        outputs = []
        for q_h, k_h, v_h in zip(*heads, strict=True):  # [N, D]; all would need 20 GB in fp64
            logits = q_h.double() @ k_h.double().T * case.dim**-0.5
            outputs.append(logits.softmax(-1) @ v_h.double())
        self._exact = torch.cat(outputs, -1)[None]

    def call(self, method: str) -> Call:
        """Return the call to be timed."""
        return METHODS[method](self._heads, *self._inputs)

    def truth(self, method: str) -> tuple[Tensor, Tensor]:
        """Rows [R] and their right output [1, R, H*D]."""
        return self._rows, self._exact


class _Sparse:
    """A self-attention with norms, rotary embedding and SLA's projection."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        assert case.topk is not None
        self._inputs, self.heads, dim, device = inputs, case.heads, case.dim, inputs[0].device
        torch.manual_seed(0)
        angle = torch.randn(case.tokens, dim // 2, device=device).repeat_interleave(2, -1)
        norm = (1 + 0.1 * torch.randn(case.heads * dim, device=device)).bfloat16()
        self.options: Any = {
            "norm_q": norm, "norm_k": norm, "rotary": (angle.cos(), angle.sin())
        }  # fmt: skip
        self.weight = torch.randn(dim, dim, device=device) * dim**-0.5
        self.bias = torch.randn(dim, device=device)
        self.sparsity = ops.Sparsity.sage(case.topk, device)

    def call(self, method: str) -> Call:
        """Return the call to be timed."""
        q, k, v = self._inputs
        spec = ops.AttentionSpec(heads=self.heads)
        if "dense" in method:
            return lambda: ops.attention_skip(q, k, v, spec, **self.options)
        return lambda: ops.sparse_linear_attention(
            q, k, v, self.weight, self.bias, spec, self.sparsity, **self.options
        )

    def truth(self, method: str) -> tuple[Tensor, Tensor]:
        """Rows of a few blocks of queries, and their result by the definition in fp32."""
        inputs = self._inputs
        (cos, sin), norm = self.options["rotary"], self.options["norm_q"]
        q, k = (
            norm_rope(x, self.heads, weight=norm, cos=cos, sin=sin, eps=1e-6).bfloat16().float()
            for x in inputs[:2]
        )
        v, tokens, dim = split_heads(inputs[2], self.heads).float(), q.shape[2], q.shape[3]
        sizes = {"block_q": self.sparsity.block_q, "block_k": self.sparsity.block_k}
        kept = ops.Sparsity(topk=1.0, **sizes) if "dense" in method else self.sparsity
        count = kept.count(tokens)
        blocks = reference.block_map(q, k, count=count, dtype=torch.bfloat16, **sizes)
        last = blocks.shape[2] - 1
        some = torch.tensor([last * i // (_BLOCKS - 1) for i in range(_BLOCKS)], device=q.device)
        offsets = torch.arange(kept.block_q, device=q.device)
        rows = (some[:, None] * kept.block_q + offsets).flatten()
        rows = rows[rows < tokens]
        right = reference.exact_sparse_attention(
            q[:, :, rows], k, v, blocks[:, :, some], sm_scale=dim**-0.5, **sizes
        )
        if "dense" not in method:
            right += reference.linear_branch(
                q[:, :, rows], k, v, self.weight, self.bias, dtype=torch.float32
            )
        return rows, right.transpose(1, 2).flatten(2)


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
