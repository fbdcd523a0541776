"""`attention`: the fused attention and others that a user could pick, in one run.

Inputs are q, k, v as [B, N, H*D], which is how a transformer's Linears leave them. A method that
wants separate heads gets views of the same memory, and every result is read as [B, N, H*D].
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Final

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.runner import (
    ERROR,
    TIMES,
    Benchmark,
    Call,
    Column,
    Journal,
    Plan,
    Record,
    Wrong,
    error_to,
    generator,
    seconds_of,
    time_calls,
)
from turbo_rcm_patch import ops
from turbo_rcm_patch.errors import MissingPackageError
from turbo_rcm_patch.extras import version_of
from turbo_rcm_patch.ops.sageattn import sageattn

#: Relative L2 to fp64 from which an output is wrong: int8 with fp8 p and v has 0.04.
WRONG: Final = 0.1
#: Rows of the output that are compared with fp64.
_ROWS: Final = 256
#: Case -> heads, tokens, channels of a head. First those that are measured unless others are
#: named, then what else engines run: Wan at 480p and 720p, and the heads of a rank of 4 and of 8.
SHAPES: Final = {
    f"H{heads}-N{tokens}-D{dim}": (heads, tokens, dim)
    for heads, tokens, dim in (
        (12, 2048, 128), (12, 4096, 128), (12, 8192, 128), (12, 16384, 128), (12, 32760, 128),
        (40, 75600, 128), (48, 17776, 64),
        (3, 32760, 128), (5, 32760, 128), (10, 32760, 128), (40, 32760, 128),
        (3, 75600, 128), (5, 75600, 128), (10, 75600, 128), (12, 75600, 128),
    )
}  # fmt: skip
_DEFAULT: Final = list(SHAPES)[:7]
_MICRO: Final = (2, 70, 64)
#: Inputs of several calls in turn are together larger than the L2 of any card (H200: 50 MB).
_L2_BYTES: Final = 128 * 2**20
_COLUMNS: Final = (*TIMES, Column("TOPS", "tops", ".0f"), ERROR)
_ABOUT: Final = {
    "inputs": "q, k, v [1, N, H*D], standard normal, bf16; several sets in turn",
    "ms": "calls queued one after another, prologue or smoothing and quantisation included",
    "tops": "4 N^2 D H / median",
    "error": f"relative L2 to softmax(q k^T / sqrt(D)) v in fp64, {_ROWS} rows",
}

Inputs = Sequence[torch.Tensor]


@torch.no_grad()
def _measure(case: str, methods: list[str], journal: Journal) -> None:
    plan, device = journal.plan, journal.device
    heads, tokens, dim = _MICRO if plan.micro else SHAPES[case]
    sets = input_sets(heads * dim, tokens, plan, device)
    rows = torch.linspace(0, tokens - 1, min(_ROWS, tokens), device=device).long()
    q, k, v = sets[0]
    error = error_to(attention_fp64(q[:, rows], k, v, heads), WRONG)

    def one(method: str, record: Record) -> None:
        cudnn = sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
        with cudnn if method == "torch cuDNN" else nullcontext():
            calls = [METHODS[method](heads, *inputs) for inputs in sets]
            output = calls[0]()
            if not output.isfinite().all():
                raise Wrong("wrong: not finite")
            record["error"] = error(output[:, rows])
            record["ms"] = time_calls(in_turn(calls), device, calls_within(calls[0], journal))
        record["tops"] = 4 * tokens**2 * dim * heads / record["ms"]["median"] / 1e9

    for method in methods:
        journal.measure(case, method, partial(one, method))


def input_sets(channels: int, tokens: int, plan: Plan, device: torch.device) -> list[Inputs]:
    """Draw sets of q, k and v [1, N, H*D], at least two and more than fit into L2."""
    count = max(2, min(12, -(-_L2_BYTES // (6 * tokens * channels))))
    random = generator(device, plan.seed)

    def draw() -> torch.Tensor:
        return torch.randn(1, tokens, channels, generator=random, device=device).bfloat16()

    return [tuple(draw() for _ in "qkv") for _ in range(2 if plan.micro else count)]


def in_turn(calls: Sequence[Call]) -> Call:
    """Return a call that makes the given ones in turn."""
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


def calls_within(call: Call, journal: Journal) -> int:
    """Return how many calls take about 0.3 s, 5 to 100."""
    call()
    once = seconds_of(call, journal.device)
    return journal.plan.most(max(5, min(100, int(0.3 / once))))


def attention_fp64(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int) -> torch.Tensor:
    """Compute softmax(q k^T / sqrt(D)) v in fp64, a head at a time; tensors are [B, N, H*D]."""
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    dim = q.shape[-1] // heads
    for head in range(heads):
        part = slice(head * dim, (head + 1) * dim)
        logits = q[..., part].double() @ k[..., part].double().transpose(-1, -2) * dim**-0.5
        out[..., part] = logits.softmax(-1) @ v[..., part].double()
    return out


# --- methods: each takes the number of heads and q, k, v, and returns the call to be timed ------


def _fused(heads: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: str) -> Call:
    spec = ops.AttentionSpec(heads=heads, **options)  # type: ignore[arg-type]
    return lambda: ops.attention_skip(q, k, v, spec)


def _with_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, N, H*D] as a view [B, N, H, D]."""
    return x.view(*x.shape[:2], heads, -1)


def _sdpa(heads: int, *inputs: torch.Tensor) -> Call:
    q, k, v = (_with_heads(x, heads).transpose(1, 2) for x in inputs)
    return lambda: F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _sage(heads: int, *inputs: torch.Tensor) -> Call:
    if not version_of("sageattention"):
        raise MissingPackageError("sageattention", expected="the package", got="none installed")
    peer = import_module("sageattention").sageattn
    q, k, v = (_with_heads(x, heads) for x in inputs)
    k = k.clone()  # Release 1 writes into it.
    return lambda: peer(q, k, v, tensor_layout="NHD").flatten(2)


def _as_engines_call(heads: int, *inputs: torch.Tensor) -> Call:
    q, k, v = (_with_heads(x, heads) for x in inputs)
    return lambda: sageattn(q, k, v, tensor_layout="NHD").flatten(2)


def _flash_3(heads: int, *inputs: torch.Tensor) -> Call:
    attention = import_module("flash_attn_interface").flash_attn_func
    q, k, v = (_with_heads(x, heads) for x in inputs)

    def call() -> torch.Tensor:
        out = attention(q, k, v)
        first: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return first.flatten(2)

    return call


METHODS: Final[dict[str, Callable[..., Call]]] = {
    "fused auto": partial(_fused, attention="auto"),
    "fused int8": _fused,
    "fused int8 bf16-pv": partial(_fused, pv="bf16"),
    "fused sageattn": _as_engines_call,
    "torch": _sdpa,
    "torch cuDNN": _sdpa,
    "sageattention": _sage,
    "FlashAttention-3": _flash_3,
}
attention: Final = Benchmark(
    name="attention", about=_ABOUT, columns=_COLUMNS, cases=SHAPES, methods=METHODS,
    measure=_measure, default=_DEFAULT,
)  # fmt: skip
