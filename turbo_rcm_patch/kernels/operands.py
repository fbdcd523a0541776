"""The operands of the attention kernels: q, k and v quantised."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = [
    "LAYER_NORM_PER_HEAD",
    "MEAN_SAMPLES",
    "NORM_ACROSS",
    "NORM_PER_HEAD",
    "NO_NORM",
    "Keys",
    "Operands",
    "Prologue",
    "Queries",
    "Values",
    "norm_form",
]

MEAN_SAMPLES = 256  # tokens whose mean is taken out of k
NO_NORM, NORM_ACROSS, NORM_PER_HEAD, LAYER_NORM_PER_HEAD = 0, 1, 2, 3


class Queries(NamedTuple):
    """int8 [B, H, n_padded, HEAD_PAD], scale [B, H, n_padded], shift [B, H, n_padded] or None."""

    int8: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor | None


class Keys(NamedTuple):
    """int8 [B, H, n_padded, HEAD_PAD] and scale [B, H, n_padded / scale_block(D)]."""

    int8: torch.Tensor
    scale: torch.Tensor


class Values(NamedTuple):
    """e4m3 [B, H, HEAD_PAD, n_padded] and scale [B, H, HEAD_PAD]."""

    e4m3: torch.Tensor
    scale: torch.Tensor


class Operands(NamedTuple):
    """What the prologue made of q, k and v: `values` for fp8, else 16-bit `v` [B, Nk, H*D].

    Queries have sm_scale * log2(e) in their scales, and what spreading q and k has multiplied
    logits by divided out; their shift is sm_scale * q · mean(k). Keys that are not seen are 0.
    """

    queries: Queries
    keys: Keys
    values: Values | None
    v: torch.Tensor | None
    n_q: int
    n_kv: int
    lengths: torch.Tensor | None


class Prologue(NamedTuple):
    """What a prologue reads and where it writes.

    q [B, Nq, H*D], k and v [B, Nk, H*D] with contiguous channels; weights [H*D] (NORM_ACROSS) or
    [D] (NORM_PER_HEAD, LAYER_NORM_PER_HEAD) or None; biases [D] (LAYER_NORM_PER_HEAD) or None;
    cos, sin [N, D] or None; lengths [B] int32 or None. values is None where v stays 16-bit.
    counters [B, n] int32, zeroed for the kernel that counts: one for counter_rows rows of q.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    heads: int
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    q_bias: torch.Tensor | None
    k_bias: torch.Tensor | None
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    lengths: torch.Tensor | None
    eps: float
    sm_scale: float
    qmax: int
    smooth_k: bool
    queries: Queries
    keys: Keys
    values: Values | None
    counters: torch.Tensor | None
    counter_rows: int

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.q.shape[2] // self.heads

    @property
    def step(self) -> int:
        """Every how many tokens of k one is averaged."""
        return -(-self.k.shape[1] // MEAN_SAMPLES)

    @property
    def q_norm(self) -> int:
        """The form of the norm of q."""
        return norm_form(self.q_weight, self.q_bias, self.q.shape[2])

    @property
    def k_norm(self) -> int:
        """The form of the norm of k."""
        return norm_form(self.k_weight, self.k_bias, self.k.shape[2])


def norm_form(weight: torch.Tensor | None, bias: torch.Tensor | None, channels: int) -> int:
    """None, RMSNorm over all of a token's channels or per head, or, with a bias, layer norm per
    head."""
    if weight is None:
        return NO_NORM
    if bias is not None:
        return LAYER_NORM_PER_HEAD
    return NORM_ACROSS if weight.numel() == channels else NORM_PER_HEAD
