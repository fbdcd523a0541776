"""The write-ups' operation: attention, output projection and the skip of a few-step model.

    y = c_skip(t) * x + c_out(t) * (softmax(q k^T / sqrt(D)) v W^T + b)

with a time t a sample and the coefficients of EDM. Written once as a user of torch would, once for
torch.compile, and in our two forms; `block` times them and `hbm` counts their memory traffic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.accuracy import attention_fp64
from benchmarks.clock import Call
from benchmarks.contest import Method
from benchmarks.peers import BACKENDS, backend_context, split_heads
from benchmarks.setup import Shape, generator
from turbo_rcm_patch import ops
from turbo_rcm_patch.boundary import EDM
from turbo_rcm_patch.config import Form

__all__ = ["FORMS", "OURS", "SIGMA_DATA", "inputs_of", "pair_methods", "truth_of"]

SIGMA_DATA: Final = 0.5
#: As in tables and on the command line; "two-pass" stands for each of torch's backends.
FORMS: Final = ("two-pass", "one-pass", "two-launch", "one-launch")
#: Our forms -> how the attention is computed, and in how many launches it is closed. "two-launch"
#: and "one-launch" choose the precision of p and v by the number of keys, as a patched model does.
OURS: Final[dict[str, tuple[dict[str, Any], Form]]] = {
    "two-launch": ({}, "two-launch"),
    "two-launch-fp8": ({"pv": "fp8"}, "two-launch"),
    "two-launch-exact": ({"attention": "exact"}, "two-launch"),
    "one-launch": ({}, "one-launch"),
}
#: Exact backends in the order in which the compiled form may take them.
_ANY_EXACT: Final = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def inputs_of(
    shape: Shape, device: torch.device, seed: int, *, linear: bool = False
) -> tuple[torch.Tensor, ...]:
    """One set of inputs.

    Returns:
        q, k, v [B, N, C] in bf16 (with `linear`: hidden states [B, N, C] and the weight [3 C, C]
        and bias [3 C] that make them), x [B, N, C], weight [C, C], bias [C] in bf16, and t [B] in
        fp32. v is so large that the branch is about as large as x and its errors show.
    """
    random = generator(device, seed)
    channels = shape.channels

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(*size, generator=random, device=device)).bfloat16()

    tokens = (shape.batch, shape.q_tokens, channels)
    # An attention over random keys averages about N / e values.
    large = (shape.kv_tokens / 2.718) ** 0.5
    if linear:
        qkv = normal(3 * channels, channels, scale=channels**-0.5)
        qkv[2 * channels :] *= large
        first = (normal(*tokens), qkv, normal(3 * channels, scale=0.1))
    else:
        first = (normal(*tokens), normal(*tokens), normal(*tokens, scale=large))
    weight, bias = normal(channels, channels, scale=channels**-0.5), normal(channels, scale=0.1)
    times = torch.linspace(0.2, 1.5, shape.batch, device=device)
    return (*first, normal(*tokens), weight, bias, times)


def truth_of(
    inputs: Sequence[torch.Tensor], shape: Shape, rows: torch.Tensor, *, linear: bool
) -> torch.Tensor:
    """The operation in fp64 on some rows: [B, rows, C]."""
    *first, x, weight, bias, times = inputs
    if linear:
        hidden, qkv, qkv_bias = first
        wide = F.linear(hidden.double(), qkv.double(), qkv_bias.double())
        q, k, v = wide.chunk(3, dim=-1)
    else:
        q, k, v = first
    branch = attention_fp64(q[:, rows], k, v, shape.heads)
    branch = F.linear(branch, weight.double(), bias.double())
    c_skip, c_out = _coefficients(times)
    wide_skip, wide_out = (c.double().view(-1, 1, 1) for c in (c_skip, c_out))
    return wide_skip * x[:, rows].double() + wide_out * branch


def _coefficients(times: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """c_skip(t) and c_out(t), fp32 [B]."""
    edm = EDM(SIGMA_DATA)
    return edm.c_skip(times).float(), edm.c_out(times).float()


def pair_methods(
    heads: int, *, linear: bool, compiler: str = "inductor", forms: Sequence[str] = FORMS
) -> list[Method]:
    """The operation in every form.

    Args:
        heads: H.
        linear: Whether the linear that makes q, k and v is part of it.
        compiler: Backend of torch.compile.
        forms: Some of `FORMS` and `OURS`.
    """
    methods = []
    plain = _written(heads, linear)
    if "two-pass" in forms:
        methods += [
            Method(
                f"two-pass, {name.removeprefix('torch ')}",
                functools.partial(_torch, plain),
                backend_context(backend),
                "attention, linear, and the skip as written in bf16: c_skip * x + c_out * y",
            )
            for name, backend in BACKENDS.items()
        ]
    if "one-pass" in forms:
        fused = torch.compile(plain, fullgraph=True, dynamic=False, backend=compiler)
        methods.append(
            Method(
                "one-pass",
                functools.partial(_torch, fused),
                lambda: sdpa_kernel(_ANY_EXACT, set_priority=True),
                f"the same as one function under torch.compile ({compiler}), cuDNN first",
            )
        )
    methods += [
        Method(name, functools.partial(_ours, ops.AttentionSpec(heads=heads, **how), linear, form))
        for name, (how, form) in OURS.items()
        if name in forms
    ]
    return methods


def _written(heads: int, linear: bool) -> Callable[..., torch.Tensor]:
    """The operation as a user of torch writes it."""

    def attend(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        q, k, v = (split_heads(one, heads).transpose(1, 2) for one in parts)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def plain(
        first: Sequence[torch.Tensor],
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        c_skip: torch.Tensor,
        c_out: torch.Tensor,
    ) -> torch.Tensor:
        parts = F.linear(*first).chunk(3, dim=-1) if linear else first
        y = F.linear(attend(parts), weight, bias)
        return c_skip * x + c_out * y

    return plain


def _torch(function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> Call:
    *first, x, weight, bias, times = inputs
    # As a module in bf16 would hold them.
    c_skip, c_out = (c.to(x.dtype).view(-1, 1, 1) for c in _coefficients(times))
    return lambda: function(first, x, weight, bias, c_skip, c_out)


def _ours(
    spec: ops.AttentionSpec, linear: bool, form: Form, inputs: Sequence[torch.Tensor]
) -> Call:
    *first, x, weight, bias, times = inputs
    c_skip, c_out = _coefficients(times)

    def call() -> torch.Tensor:
        q, k, v = F.linear(*first).chunk(3, dim=-1) if linear else first
        return ops.attention_project_skip(
            q, k, v, weight, bias, spec, residual=x, c_skip=c_skip, c_out=c_out, form=form
        )

    return call
