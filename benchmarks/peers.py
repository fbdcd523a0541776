"""The attentions that are compared: ours, torch's, and every package a user could pick instead.

Inputs are q, k, v as [B, N, H*D], which is how a transformer's linears leave them. A method that
wants heads apart gets views of the same memory; none is copied in the timed call, and every result
is read as [B, N, H*D].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module, metadata
from typing import Final

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.clock import Call
from benchmarks.contest import Method
from turbo_rcm_patch import ops
from turbo_rcm_patch.config import PVDType
from turbo_rcm_patch.errors import MissingPackageError

__all__ = ["BACKENDS", "OURS", "attention_methods", "backend_context", "sage_major", "split_heads"]

#: Ours by the name they have in tables, with the element type of the second product.
OURS: Final[dict[str, PVDType]] = {"ours fp8": "fp8", "ours bf16": "bf16"}
#: torch's exact attentions by the name they have in tables.
BACKENDS: Final = {
    "torch cuDNN": SDPBackend.CUDNN_ATTENTION,
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_VIEWS: Final = "[B, H, N, D] views of [B, N, H*D]; copied only if the result is not"


def backend_context(backend: SDPBackend) -> Callable[[], AbstractContextManager[object]]:
    """Inside, torch's scaled_dot_product_attention runs this backend or raises."""
    return functools.partial(sdpa_kernel, backend)


def attention_methods(heads: int) -> list[Method]:
    """Every attention for q, k, v [B, N, heads*D], ours first."""
    methods = [
        Method(name, functools.partial(_ours, heads, pv), note="prologue included", prologue=True)
        for name, pv in OURS.items()
    ]
    methods += [
        Method(name, functools.partial(_sdpa, heads), backend_context(backend), _VIEWS)
        for name, backend in BACKENDS.items()
    ]
    smoothed = "NHD layout; smoothing and quantisation included"
    return [
        *methods,
        Method(
            "sageattention 1",
            functools.partial(_sage, heads, 1),
            note=f"{smoothed}; it writes into k, so it has a copy of its own, made outside",
            prologue=True,
        ),
        Method(
            "sageattention 2", functools.partial(_sage, heads, 2), note=smoothed, prologue=True
        ),
        Method(
            "FlashAttention-3",
            functools.partial(_flash, heads, "flash_attn_interface"),
            note="NHD layout",
        ),
        Method(
            "FlashAttention-2",
            functools.partial(_flash, heads, "flash_attn"),
            note="the flash_attn package, NHD layout",
        ),
        Method("xFormers", functools.partial(_xformers, heads), note="NHD layout"),
    ]


def split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, N, H*D] as a view [B, N, H, D]."""
    return x.view(x.shape[0], x.shape[1], heads, -1)


def sage_major() -> int:
    """Major version of the installed sageattention, 0 if there is none."""
    try:
        return int(metadata.version("sageattention").split(".")[0])
    except (metadata.PackageNotFoundError, ValueError):
        return 0


def _ours(heads: int, pv: PVDType, inputs: Sequence[torch.Tensor]) -> Call:
    q, k, v = inputs
    spec = ops.AttentionSpec(heads=heads, pv=pv)
    return lambda: ops.attention_skip(q, k, v, spec)


def _sdpa(heads: int, inputs: Sequence[torch.Tensor]) -> Call:
    q, k, v = (split_heads(x, heads).transpose(1, 2) for x in inputs)
    return lambda: F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _sage(heads: int, major: int, inputs: Sequence[torch.Tensor]) -> Call:
    found = sage_major()
    if found != major:
        raise MissingPackageError(
            "sageattention",
            expected=f"release {major}.x",
            got=f"release {found}.x" if found else "no such package",
        )
    sageattn = import_module("sageattention").sageattn
    q, k, v = (split_heads(x, heads) for x in inputs)
    k = k.clone()
    return lambda: sageattn(q, k, v, tensor_layout="NHD").flatten(2)


def _flash(heads: int, package: str, inputs: Sequence[torch.Tensor]) -> Call:
    attention = import_module(package).flash_attn_func
    q, k, v = (split_heads(x, heads) for x in inputs)

    def call() -> torch.Tensor:
        out = attention(q, k, v)
        first: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return first.flatten(2)

    return call


def _xformers(heads: int, inputs: Sequence[torch.Tensor]) -> Call:
    attention = import_module("xformers.ops").memory_efficient_attention
    q, k, v = (split_heads(x, heads) for x in inputs)
    return lambda: attention(q, k, v).flatten(2)
