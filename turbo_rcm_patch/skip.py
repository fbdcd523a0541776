"""The one concept of this library: the skip pair `y = c_skip * x + c_out * F(x)`.

`F` is a branch (attention, feed-forward, a whole network), `x` the residual it meets. A transformer block's gated residual
is (1, gate), a cross-attention's plain add is (1, 1), and the boundary condition of a few-step model is
(c_skip(t), c_out(t)). One word, one dataclass, one epilogue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from turbo_rcm_patch.config import Kind

__all__ = ["Cast", "Coefficient", "Residual", "SkipPair", "Stream"]

#: A float, or an fp32 tensor of shape [B], [B, 1, C] or [B, N, C].
Coefficient = float | torch.Tensor

#: Where fp32 begins and ends. "fp32": coefficient and sum in fp32, one rounding at the end (diffusers' Wan self-attention
#: and feed-forward). "model": every step rounds to the model's dtype (diffusers' Wan cross-attention, CogVideoX).
Cast = Literal["fp32", "model"]

#: How a pair runs. "in-kernel": closed in the attention kernel (nothing stands between attention and residual).
#: "one-launch" / "two-launch": closed across the output projection. "after-linear": a Linear that is not plain is called,
#: then one elementwise kernel closes the skip. "as-written": the author's own code.
Residual = Literal["in-kernel", "one-launch", "two-launch", "after-linear", "as-written"]


@dataclass(frozen=True, slots=True)
class Stream:
    """One residual stream of a pair.

    Attributes:
        name: "video", "text", ...
        c_skip: Coefficient of the residual, as a person would write it ("1", "cos t", ...).
        c_out: Coefficient of the branch ("gate_msa", "1", ...).
        c_out_shape: Shape of c_out at run time, e.g. "[B, 1, C]", or "" for a plain number.
    """

    name: str
    c_skip: str
    c_out: str
    c_out_shape: str = ""


@dataclass(frozen=True, slots=True)
class SkipPair:
    """A branch and the residual it meets, found in a model.

    Attributes:
        path: Where it sits in the model, e.g. "blocks.0.attn1".
        kind: "self", "cross", "image" (image branch of I2V), "feed-forward", or "boundary" (the whole network).
        heads: Number of attention heads, 0 where the branch is not attention.
        head_dim: Channels per head, 0 where the branch is not attention.
        streams: One entry per residual stream.
        cast: Cast policy of the author's code.
        projection: Whether an output projection stands between attention and residual.
        runs: How it will run (see `Residual`).
        reason: Why it runs that way, in words; never empty for "after-linear" and "as-written".
    """

    path: str
    kind: Kind | Literal["boundary"]
    heads: int
    head_dim: int
    streams: tuple[Stream, ...]
    cast: Cast
    projection: bool
    runs: Residual
    reason: str = ""

    @property
    def fused(self) -> bool:
        """Whether any of our kernels closes this pair."""
        return self.runs != "as-written"
