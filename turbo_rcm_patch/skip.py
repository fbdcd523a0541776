"""The skip pair, `y = c_skip * x + c_out * F(x)`: the one concept of this library.

`F` is a branch (attention, feed-forward, a whole network) and `x` the residual that it is added
to. (c_skip, c_out) is (1, gate) for the gated residual of a transformer block, (1, 1) for the
plain add of a cross-attention, and (c_skip(t), c_out(t)) for the boundary condition of a few-step
model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from turbo_rcm_patch.config import Kind
from turbo_rcm_patch.errors import DTypeError, ShapeError

__all__ = [
    "Cast",
    "Coefficient",
    "Residual",
    "SkipPair",
    "Stream",
    "apply_skip",
    "broadcast_coefficient",
]

#: A float, or an fp32 tensor of shape [B], [B, 1, C] or [B, N, C].
Coefficient = float | torch.Tensor

#: Where the author's code rounds. "fp32": coefficient and sum in fp32, one rounding at the end
#: (diffusers' Wan self-attention and feed-forward). "model": every step rounds to the model's
#: dtype (diffusers' Wan cross-attention, CogVideoX).
Cast = Literal["fp32", "model"]

#: How a pair runs. "in-kernel": closed in the kernel of the attention or of the convolution before
#: it. "one-launch": attention, output projection and skip are one kernel.
#: "two-launch": the projection runs as a module, and one pass after it closes the skip.
#: "as-written": the author's code.
Residual = Literal["in-kernel", "one-launch", "two-launch", "as-written"]


@dataclass(frozen=True, slots=True)
class Stream:
    """One residual stream of a pair.

    Attributes:
        name: "video", "text", ...
        c_skip: Coefficient of the residual, as text ("1", "cos t", ...).
        c_out: Coefficient of the branch ("gate_msa", "1", ...).
        c_out_shape: Shape of c_out at run time, e.g. "[B, 1, C]", or "" for a plain number.
    """

    name: str
    c_skip: str
    c_out: str
    c_out_shape: str = ""


@dataclass(frozen=True, slots=True)
class SkipPair:
    """A branch of a model and the residual that it is added to.

    Attributes:
        path: Its name in the model, e.g. "blocks.0.attn1".
        kind: "self", "cross", "image" (image branch of I2V), "feed-forward", or
            "convolution" (a residual block of a VAE).
        heads: Number of attention heads, 0 where the branch is not attention.
        head_dim: Channels per head, 0 where the branch is not attention.
        streams: One entry per residual stream.
        cast: Cast policy of the author's code.
        projection: True if an output projection stands between attention and residual.
        runs: How it runs (see `Residual`).
        reason: Why it runs that way; never empty for "as-written".
        int8_linears: Names of its Linears that run in int8.
    """

    path: str
    kind: Kind | Literal["convolution"]
    heads: int = 0
    head_dim: int = 0
    streams: tuple[Stream, ...] = ()
    cast: Cast = "model"
    projection: bool = False
    runs: Residual = "as-written"
    reason: str = ""
    int8_linears: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"SkipPair({self.path!r}, kind={self.kind!r}, runs={self.runs!r})"

    @property
    def fused(self) -> bool:
        """True if one of our kernels closes this pair."""
        return self.runs != "as-written"


def broadcast_coefficient(coefficient: Coefficient, like: torch.Tensor, name: str) -> Coefficient:
    """Reshape a coefficient to as many dimensions as the tensor it multiplies.

    Args:
        coefficient: Float, or floating point tensor of shape [], [B], [B, 1, C] or [B, N, C]
            (generally: [B], or as many dimensions as `like`).
        like: Residual of shape [B, ...].
        name: Its name in error messages.

    Returns:
        The float, or a view that broadcasts against `like`.
    """
    if not isinstance(coefficient, torch.Tensor):
        return float(coefficient)
    if coefficient.is_complex() or coefficient.dtype == torch.bool:
        raise DTypeError(name, expected="a real number", got=str(coefficient.dtype))
    view = coefficient
    if coefficient.ndim == 1 and like.ndim > 1:
        view = coefficient.reshape(-1, *(1,) * (like.ndim - 1))
    fits = view.ndim in (0, like.ndim) and all(
        c in (1, n) for c, n in zip(view.shape, like.shape, strict=False)
    )
    if not fits:
        raise ShapeError(
            name,
            expected=f"a float, or a shape [B] or one that broadcasts against {list(like.shape)}",
            got=str(list(coefficient.shape)),
        )
    return view


def apply_skip(
    x: torch.Tensor,
    branch: torch.Tensor,
    c_skip: Coefficient,
    c_out: Coefficient,
    *,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Compute `c_skip * x + c_out * branch` in plain torch, with one rounding at the end.

    Where c_out is exactly 0 the branch is not used. So the identity end returns x bit for bit,
    even if the branch holds a negative zero or an infinity. If c_out is the float 0.0, the branch
    is also left out of the autograd graph.

    Args:
        x: Residual of shape [B, ...], any floating dtype.
        branch: F(x), same shape as x.
        c_skip: Coefficient of x.
        c_out: Coefficient of the branch.
        dtype: The dtype of products and sum. Both operands are cast to it, multiplied and added;
            the result is cast once to x's dtype.

    Returns:
        Tensor of x's shape and dtype.
    """
    if x.shape != branch.shape:
        raise ShapeError(
            "branch", expected=f"the shape of x, {list(x.shape)}", got=str(list(branch.shape))
        )
    a = broadcast_coefficient(c_skip, x, "c_skip")
    b = broadcast_coefficient(c_out, x, "c_out")
    a = a.to(dtype) if isinstance(a, torch.Tensor) else a
    kept = a * x.to(dtype)
    if not isinstance(b, torch.Tensor):
        return (kept if b == 0.0 else kept + b * branch.to(dtype)).to(x.dtype)
    b = b.to(dtype)
    return torch.where(b == 0, kept, kept + b * branch.to(dtype)).to(x.dtype)
