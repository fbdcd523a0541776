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
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turbo_rcm_patch.config import Attention, Impl, PatchConfig, PVDType
from turbo_rcm_patch.ops import INT8_MIN_KEYS, AttentionSpec, Sparsity, unchecked
from turbo_rcm_patch.ops.formats import Rows
from turbo_rcm_patch.patching.int8_linears import int8_forward
from turbo_rcm_patch.patching.int8_weights import Int8Linear
from turbo_rcm_patch.patching.plain import (
    bare,
    compiling,
    hooked,
    own_function,
    plain_linear,
    readable,
)

WIDE: Final = torch.float32

#: Classes of layer norms that compute in fp32. Each family adds its own.
LAYER_NORMS: Final[set[type]] = set()
#: Classes of RMSNorms of q and k over all heads.
RMS_NORMS: Final[set[type]] = {nn.RMSNorm}

#: (cos, sin), [N, D] fp32 each, D channels of a head.
Rotary = tuple[Tensor, Tensor]


class Operands(NamedTuple):
    """An attention's inputs and output, for the guard.

    Attributes:
        q: [B, N, H*D], before its norm if `norms` holds that.
        k: [B, Nk, H*D].
        v: [B, Nk, H*D].
        norms: The norms that the kernel computed.
        rotary: The rotary table that the kernel read, or None.
        heads: H.
        out: [B, N, H*D].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    norms: Norms
    rotary: Rotary | None
    heads: int
    out: Tensor


class Notes:
    """Intermediate results of a block that the guard compares.

    Attributes:
        streams: The residual streams after each branch, fp32 [B, N, C] each.
        attention: Operands of the self-attention, None if it ran exactly.
    """

    def __init__(self) -> None:
        self.streams: list[tuple[Tensor, ...]] = []
        self.attention: Operands | None = None


# --- norms of the residual stream and skips ------------------------------------------------------


def norm(
    module: nn.Module,
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    dtype: torch.dtype,
    impl: str,
    *,
    rows: bool = False,
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
        [B, N, C], or `Rows`.
    """
    numbers = _numbers(module, x, scale, shift)
    if numbers is None:
        return _called_norm(module, x, scale, shift, dtype)
    if rows:
        return Rows(*unchecked.norm_modulate_rows(x, *numbers, impl))
    return unchecked.norm_modulate(x, *numbers, impl, dtype)


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
    rows: bool = False,
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
    numbers = _numbers(module, x, scale, shift)
    if numbers is None:
        x = skip(x, branch, gate, WIDE, impl)
        return x, _called_norm(module, x, scale, shift, dtype)
    if rows:
        x, *h = unchecked.skip_norm_rows(x, branch, gate, *numbers, "fp32", impl, WIDE)
        return x, Rows(*h)
    made: tuple[Tensor, Tensor] = unchecked.skip_norm(
        x, branch, gate, *numbers, "fp32", impl, WIDE, dtype
    )
    return made


def skip(x: Tensor, branch: Tensor, gate: Tensor | None, dtype: torch.dtype, impl: str) -> Tensor:
    """Compute x + gate * branch in fp32, rounded once to `dtype`; a gate of None is 1."""
    made: Tensor = unchecked.skip(x, branch, None, gate, 1.0, 1.0, "fp32", impl, dtype)
    return made


def _numbers(
    module: Any, x: Tensor, scale: Tensor | None, shift: Tensor | None
) -> tuple[Tensor | None, Tensor | None, float, float] | None:
    """Return the factor and the offset of a norm, the number added to the factor, and epsilon.

    Return None where the norm has to be called.
    """
    if type(module) not in LAYER_NORMS or not bare(module):
        return None
    held = module._parameters
    if "weight" not in held or "bias" not in held:  # replaced by tensors that are no parameters
        return None
    weight, bias = held["weight"], held["bias"]
    if scale is not None:
        modulates = weight is None and bias is None
        return (scale, shift, 1.0, module.eps) if modulates else None
    if not readable(weight, bias, device=x.device):
        return None
    factor = None if weight is None else weight.view(1, 1, -1)
    offset = None if bias is None else bias.view(1, 1, -1)
    return factor, offset, 0.0, module.eps


def _called_norm(
    module: nn.Module, x: Tensor, scale: Tensor | None, shift: Tensor | None, dtype: torch.dtype
) -> Tensor:
    made: Tensor = module(x.float())
    if scale is not None and shift is not None:
        made = made.float() * (1 + scale) + shift
    return made.to(dtype)


# --- attention -----------------------------------------------------------------------------------


class Norms(NamedTuple):
    """The norms of q and k that an attention's kernel computes.

    Attributes:
        q: Weight of q's norm: [H*D] of an RMSNorm over all heads, or [D] of one per head; None
            for no norm.
        k: Weight of k's norm, of the same kind.
        q_bias: [D], which makes q's norm a layer norm of each head.
        k_bias: [D], which makes k's norm a layer norm of each head.
        eps: Epsilon of both norms.
    """

    q: Tensor | None = None
    k: Tensor | None = None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    eps: float = 1e-6


NO_NORMS: Final = Norms()


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
    if of_q is None and of_k is None:
        return q, k, NO_NORMS
    weight_q, weight_k = _rms_weight(of_q, q), _rms_weight(of_k, k)
    if weight_q is not None and weight_k is not None and of_q.eps == of_k.eps:
        return q, k, Norms(weight_q, weight_k, eps=of_q.eps)
    return called(of_q, q), called(of_k, k), NO_NORMS


def called(module: Any, x: Tensor) -> Tensor:
    """Call a norm of q or k, or return x if there is none."""
    if module is None:
        return x
    made: Tensor = module(x)
    return made.to(x.dtype)


def _rms_weight(module: Any, x: Tensor) -> Tensor | None:
    """Return the weight of an RMSNorm if a kernel can compute that norm of x, else None."""
    if type(module) not in RMS_NORMS or not bare(module) or module.eps is None:
        return None
    held = module._parameters
    weight: Tensor | None = held.get("weight")
    if weight is None or held.get("bias") is not None:  # diffusers' may have one
        return None
    fits = (
        readable(weight, device=x.device)
        and weight.shape == x.shape[-1:]
        and (weight.dtype == x.dtype or weight.dtype == torch.float32)
    )
    return weight if fits else None


class Attend(NamedTuple):
    """The options of a block's attentions: their fields of `PatchConfig`, and their heads."""

    heads: int
    head_dim: int
    attention: Attention
    pv: PVDType
    smooth_k: bool
    impl: Impl

    @classmethod
    def of(cls, config: PatchConfig, heads: int, head_dim: int) -> Attend:
        """Take the options from a configuration."""
        return cls(heads, head_dim, config.attention, config.pv, config.smooth_k, config.impl)

    def spec(self, eps: float = 1e-6) -> AttentionSpec:
        """Return the options of an operation; `eps` is that of the norms of q and k."""
        return AttentionSpec(
            heads=self.heads, attention=self.attention, pv=self.pv, smooth_k=self.smooth_k,
            eps=eps, impl=self.impl,
        )  # fmt: skip

    def exactly(self) -> Attend:
        """Return these options with exact attention."""
        return self._replace(attention="exact")

    def over_few_keys(self, n_kv: int) -> Attend:
        """Return exact options for a prompt, where quantising costs more than it saves."""
        quantised = self.attention in ("auto", "int8")
        return self.exactly() if quantised and n_kv < INT8_MIN_KEYS else self

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        norms: Norms,
        rotary: Rotary | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Compute residual + softmax(q k^T / sqrt(D)) v, with norms and rotary embedding of q and
        k.

        Args:
            q: [B, N, H*D].
            k: [B, Nk, H*D].
            v: [B, Nk, H*D].
            norms: The norms of q and k.
            rotary: Rotary table of q and k, or None.
            residual: [B, N, H*D], or None for 0.

        Returns:
            [B, N, H*D], dtype of q.
        """
        cos, sin = (None, None) if rotary is None else rotary
        out: Tensor = unchecked.attention(
            q, k, v, residual, None, None, norms.q, norms.k, norms.q_bias, norms.k_bias, cos, sin,
            None, 1.0, 1.0, self.heads, self.attention, self.pv, self.smooth_k, False,
            self.head_dim**-0.5, norms.eps, self.impl, q.dtype, False,
        )[0]  # fmt: skip
        return out

    def sparse(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        proj_l: tuple[Tensor, Tensor],
        sparsity: Sparsity,
        norms: Norms,
        rotary: Rotary | None,
    ) -> Tensor:
        """Compute SLA: softmax over few blocks of keys plus projected linear attention over all.

        `proj_l` is a weight [D, D] and a bias [D]. Shapes are those of `__call__`.
        """
        cos, sin = (None, None) if rotary is None else rotary
        out: Tensor = unchecked.sparse_linear_attention(
            q, k, v, *proj_l, norms.q, norms.k, cos, sin, self.heads, self.attention, self.pv,
            self.smooth_k, self.head_dim**-0.5, norms.eps, sparsity.count(k.shape[1]),
            sparsity.block_q, sparsity.block_k, self.impl, q.dtype,
        )  # fmt: skip
        return out


# --- feed-forward --------------------------------------------------------------------------------


def feed_forward(layers: Any, h: Any, impl: str) -> Tensor:
    """Run a feed-forward, with its first Linear and GELU as one product if both are plain.

    Args:
        layers: A module that holds a Linear and its activation (or a Linear, then a GELU), and the
            modules after it.
        h: [B, N, C], or int8 rows of it.
        impl: "triton", "reference" or "auto".

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
            x = unchecked.linear_gelu(h, linear.weight, bias)
        elif type(linear) is Int8Linear and not hooked(linear):  # in place: its result is new
            x = torch.ops.aten.gelu_(linear(h), approximate="tanh")
        else:
            x = F.gelu(linear(h), approximate="tanh")
    for module in rest:
        x = module(x)
    made: Tensor = x
    return made


def gelu_linear(layers: Any) -> tuple[Any, list[Any]]:
    """Return the Linear before a tanh GELU and the modules after that GELU.

    Return None and all modules if the activation is another one or has a hook.
    """
    first, *rest = layers
    projected = getattr(first, "proj", None)
    if projected is not None:  # diffusers' GELU holds its Linear
        tanh = type(first).__name__ == "GELU" and first.approximate == "tanh"
        plain = tanh and bare(first) and own_function(type(first), "gelu")
        return (projected, rest) if plain else (None, [first, *rest])
    if type(rest[0]) is nn.GELU and rest[0].approximate == "tanh" and bare(rest[0]):
        return first, rest[1:]
    return None, [first, *rest]


# --- rotary tables -------------------------------------------------------------------------------


class KeptTables:
    """A cache of rotary tables, made once per forward for all blocks of a model.

    It keeps no table while a compiler traces, and none made from tensors of inference mode, whose
    changes cannot be noticed.
    """

    __slots__ = ("_kept",)

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
        made = make()
        self._kept = list(sources), about, made
        return made
