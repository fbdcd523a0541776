"""The parts from which families write their blocks.

Linears are called as modules, so LoRA, hooks, offloading, sharding and quantisers need no code
here. The code reads parameters only of norms that a kernel computes, and of the first Linear of a
plain GELU feed-forward, whose activation is the epilogue of cuBLAS's product. A norm that cannot
be read, because it has a hook for example, is called, and the kernel runs without it.

Inside a block the residual stream is fp32. Every sum is computed in fp32, and only the last one is
rounded to the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turbo_rcm_patch.ops.formats import NO_NORMS, Norms, Rotary
from turbo_rcm_patch.ops.int8_linear import api as int8_linear
from turbo_rcm_patch.ops.residual import api as residual
from turbo_rcm_patch.patching.int8_linears import int8_forward
from turbo_rcm_patch.patching.int8_weights import Int8Linear
from turbo_rcm_patch.patching.plain import (
    compiling,
    hooked,
    kernel_can_read,
    own_function,
    plain_linear,
    runs_only_its_forward,
)

STREAM_DTYPE: Final = torch.float32

#: Classes of layer norms that compute in fp32. Each family adds its own.
LAYER_NORMS: Final[set[type]] = set()
#: Classes of RMSNorms of q and k over all heads.
RMS_NORMS: Final[set[type]] = {nn.RMSNorm}


# --- norms of the residual stream and skips ------------------------------------------------------


def norm(
    module: nn.Module,
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    dtype: torch.dtype,
    impl: str,
    *,
    rows: bool,
) -> Any:
    """Compute the modulated norm before a branch.

    Args:
        module: The norm.
        x: Residual stream [B, N, C].
        scale: [B, 1 or N, C]; None for a norm with weights and without modulation.
        shift: [B, 1 or N, C], or None with scale.
        dtype: dtype of the result.
        impl: "triton", "reference" or "auto".
        rows: Return int8 rows, for Linears in int8.

    Returns:
        [B, N, C], or `Int8Tensor`.
    """
    read = _read_norm(module, x, scale, shift)
    if read is None:
        return _called_norm(module, x, scale, shift, dtype)
    own = torch.int8 if rows else dtype
    return residual.skip_norm(x, norm=read, norm_dtype=own, impl=impl)[1]


def skip_norm(
    x: Tensor,
    branch: Tensor,
    gate: Tensor | None,
    module: nn.Module,
    scale: Tensor | None,
    shift: Tensor | None,
    dtype: torch.dtype,
    impl: str,
    *,
    rows: bool,
) -> tuple[Tensor, Any]:
    """Close a skip and compute the norm before the next branch, in one pass.

    Args:
        x: Residual stream [B, N, C].
        branch: [B, N, C].
        gate: [B, 1 or N, C], or None for 1.
        module: The norm.
        scale: Scale of the norm, [B, 1 or N, C], or None.
        shift: Shift of the norm, [B, 1 or N, C], or None.
        dtype: dtype of the norm.
        impl: "triton", "reference" or "auto".
        rows: Return the norm as int8 rows, for Linears in int8.

    Returns:
        x + gate * branch in fp32, and its norm.
    """
    read = _read_norm(module, x, scale, shift)
    if read is None:
        x = skip(x, branch, gate, STREAM_DTYPE, impl)
        return x, _called_norm(module, x, scale, shift, dtype)
    own = torch.int8 if rows else dtype
    return residual.skip_norm(
        x, branch, gate=gate, norm=read, dtype=STREAM_DTYPE, norm_dtype=own, impl=impl
    )


def skip(x: Tensor, branch: Tensor, gate: Tensor | None, dtype: torch.dtype, impl: str) -> Tensor:
    """Compute x + gate * branch in fp32, rounded once to `dtype`; a gate of None is 1."""
    out: Tensor = residual.skip_norm(x, branch, gate=gate, dtype=dtype, impl=impl)[0]
    return out


def _read_norm(
    module: Any, x: Tensor, scale: Tensor | None, shift: Tensor | None
) -> residual.Norm | None:
    """Return a norm as a kernel reads it, or None where it has to be called."""
    if type(module) not in LAYER_NORMS or not runs_only_its_forward(module):
        return None
    held = module._parameters
    if "weight" not in held or "bias" not in held:  # replaced by tensors that are no parameters
        return None
    weight, bias = held["weight"], held["bias"]
    if scale is not None:
        unweighted = weight is None and bias is None
        return residual.Norm(scale, shift, eps=module.eps) if unweighted else None
    if not kernel_can_read(weight, bias, device=x.device):
        return None
    weight = None if weight is None else weight.view(1, 1, -1)
    bias = None if bias is None else bias.view(1, 1, -1)
    return residual.Norm(weight=weight, bias=bias, eps=module.eps)


def _called_norm(
    module: nn.Module, x: Tensor, scale: Tensor | None, shift: Tensor | None, dtype: torch.dtype
) -> Tensor:
    y: Tensor = module(x.float())
    if scale is not None and shift is not None:
        y = y.float() * (1 + scale) + shift
    return y.to(dtype)


# --- attention -----------------------------------------------------------------------------------


def rms_norms(of_q: Any, of_k: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Norms]:
    """Read the RMSNorms of q and k for the kernel, or call them.

    Args:
        of_q: The norm of q, or None.
        of_k: The norm of k, or None.
        q: [B, N, H*D].
        k: [B, Nk, H*D].

    Returns:
        q and k, and the norms that the kernel still has to compute.
    """
    norms = read_rms_norms(of_q, of_k, q, k)
    return (called(of_q, q), called(of_k, k), NO_NORMS) if norms is None else (q, k, norms)


def read_rms_norms(of_q: Any, of_k: Any, q: Tensor, k: Tensor) -> Norms | None:
    """Return the norms of q and k for the kernel, or None if they have to be called."""
    weight_q, weight_k = _rms_weight(of_q, q), _rms_weight(of_k, k)
    if weight_q is None or weight_k is None or of_q.eps != of_k.eps:
        return None
    return Norms(weight_q, weight_k, eps=of_q.eps)


def called(module: Any, x: Tensor) -> Tensor:
    """Call a norm of q or k, or return x if there is none."""
    if module is None:
        return x
    out: Tensor = module(x)
    return out.to(x.dtype)


def _rms_weight(module: Any, x: Tensor) -> Tensor | None:
    """Return the weight of an RMSNorm if a kernel can compute that norm of x, else None."""
    if type(module) not in RMS_NORMS or not runs_only_its_forward(module) or module.eps is None:
        return None
    held = module._parameters
    weight: Tensor | None = held.get("weight")
    if weight is None or held.get("bias") is not None:  # diffusers' may have one
        return None
    fits = (
        kernel_can_read(weight, device=x.device)
        and weight.shape == x.shape[-1:]
        and (weight.dtype == x.dtype or weight.dtype == torch.float32)
    )
    return weight if fits else None


# --- feed-forward --------------------------------------------------------------------------------


def feed_forward(layers: Any, h: Any) -> Tensor:
    """Run a feed-forward, with its first Linear and GELU as one product if both are plain.

    Args:
        layers: A module that holds a Linear and its activation (or a Linear, then a GELU), and the
            modules after it.
        h: [B, N, C], or int8 rows of it.

    Returns:
        [B, N, C], dtype of the model.
    """
    linear, rest = gelu_linear(layers)
    if linear is None:
        x = h
    else:
        forward = int8_forward(linear)
        if forward is not None:
            x = forward.run(h, "gelu-tanh")
        elif plain_linear(linear, h) and (bias := linear.bias) is not None:
            x = int8_linear.gelu_of_linear(h, linear.weight, bias)
        elif type(linear) is Int8Linear and not hooked(linear):  # in place: its result is new
            x = torch.ops.aten.gelu_(linear(h), approximate="tanh")
        else:
            x = F.gelu(linear(h), approximate="tanh")
    for module in rest:
        x = module(x)
    out: Tensor = x
    return out


def gelu_linear(layers: Any) -> tuple[Any, list[Any]]:
    """Return the Linear before a tanh GELU and the modules after that GELU.

    Return None and all modules if the activation is another one or has a hook.
    """
    first, *rest = layers
    projected = getattr(first, "proj", None)
    if projected is not None:  # diffusers' GELU holds its Linear
        tanh = type(first).__name__ == "GELU" and first.approximate == "tanh"
        plain = tanh and runs_only_its_forward(first) and own_function(type(first), "gelu")
        return (projected, rest) if plain else (None, [first, *rest])
    if (
        type(rest[0]) is nn.GELU
        and rest[0].approximate == "tanh"
        and runs_only_its_forward(rest[0])
    ):
        return first, rest[1:]
    return None, [first, *rest]


# --- rotary tables -------------------------------------------------------------------------------


class KeptTables:
    """A cache of rotary tables, made once per forward for all blocks of a model.

    It keeps no table while a compiler traces, and none made from tensors of inference mode, whose
    changes cannot be noticed.
    """

    def __init__(self) -> None:
        self._kept: tuple[list[Tensor], Any, Rotary] | None = None

    def __reduce__(self) -> tuple[type[KeptTables], tuple[()]]:
        return KeptTables, ()

    def of(self, sources: Sequence[Tensor], facts: object, make: Callable[[], Rotary]) -> Rotary:
        """Return (cos, sin).

        Args:
            sources: The tensors from which the tables are made.
            facts: Values on which the tables also depend.
            make: Makes the tables.
        """
        if compiling() or any([x.is_inference() for x in sources]):
            return make()
        about, kept = ([x._version for x in sources], facts), self._kept
        if kept is not None and kept[1] == about and all(map(is_, kept[0], sources)):
            return kept[2]
        value = make()
        self._kept = list(sources), about, value
        return value
