"""What goes into an attention: its inputs, and its operands, which are q, k and v quantised; and
rows in int8, which go into Linears.

This module loads no triton.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

MEAN_SAMPLES = 256  # tokens whose mean is taken out of k
NO_NORM, NORM_ACROSS, NORM_PER_HEAD, LAYER_NORM_PER_HEAD = 0, 1, 2, 3
#: What errors of rounding to e4m3 are counted in: this many to 1. A sum over 2**19 tokens fits
#: into an int32 whatever their errors are, which are at most 16.
ERROR_STEPS = 256
#: Largest magnitude of a quantised q or k, by the name of the attention.
QMAX = {"int8": 127, "int4": 7}

#: Rows of int8 are padded to a multiple of this many bytes, which hardware copies and wide loads
#: want.
ALIGNED = 16


class Rows(NamedTuple):
    """An activation [B, N, K] in int8 with a scale per row.

    Attributes:
        int8: int8 [B, N, K padded to a multiple of 16], dense, 0 in the padding.
        scale: fp32 [B, N].
    """

    int8: torch.Tensor
    scale: torch.Tensor


def padded_channels(channels: int) -> int:
    """K of `Rows`, padded."""
    return -(-channels // ALIGNED) * ALIGNED


class AttentionInputs(NamedTuple):
    """One attention with its prologue and its skip: all that a call of it says.

    y = c_skip * residual + c_out * softmax(sm_scale * norm(q) norm(k)^T) v

    The fields are the arguments of the registered operation, in its order: `operation(*inputs)`
    flattens, `AttentionInputs(*arguments)` makes it again.

    Attributes:
        q: [B, Nq, H*D].
        k: [B, Nk, H*D].
        v: [B, Nk, H*D].
        residual: [B, Nq, H*D] or None.
        c_skip: Broadcasts to [B, Nq, H*D]; None for the number `c_skip_value`.
        c_out: Likewise, with `c_out_value`.
        norm_q: RMSNorm weight of q: [H*D] across all heads, or [D] per head; None for no norm.
        norm_k: Likewise for k.
        norm_q_bias: [D], which makes the norm of q a layer norm of each head.
        norm_k_bias: Likewise for k.
        cos: [N, D] of the rotary embedding, or None.
        sin: Likewise.
        kv_lengths: int [B]: how many keys are seen, or None for all.
        c_skip_value: Stands for `c_skip` where that is None.
        c_out_value: Likewise for `c_out`.
        heads: H.
        attention: "int8", "int4", "exact", "sage" or "auto".
        pv: "fp8", "bf16", "fp16" or "auto": the type of probabilities and values.
        smooth_k: Whether k loses its mean before it is quantised.
        causal: Whether query i sees keys 0..i alone.
        sm_scale: Factor on the logits, over 0.
        eps: Of the norms.
        impl: "triton", "reference" or "auto".
        out_dtype: dtype of y.
        want_lse: Whether the logsumexp of the logits is wanted too.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    residual: torch.Tensor | None
    c_skip: torch.Tensor | None
    c_out: torch.Tensor | None
    norm_q: torch.Tensor | None
    norm_k: torch.Tensor | None
    norm_q_bias: torch.Tensor | None
    norm_k_bias: torch.Tensor | None
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    kv_lengths: torch.Tensor | None
    c_skip_value: float
    c_out_value: float
    heads: int
    attention: str
    pv: str
    smooth_k: bool
    causal: bool
    sm_scale: float
    eps: float
    impl: str
    out_dtype: torch.dtype
    want_lse: bool

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.q.shape[2] // self.heads

    @property
    def skip_factor(self) -> float | torch.Tensor:
        """c_skip, tensor or number."""
        return self.c_skip_value if self.c_skip is None else self.c_skip

    @property
    def out_factor(self) -> float | torch.Tensor:
        """c_out, tensor or number."""
        return self.c_out_value if self.c_out is None else self.c_out

    @property
    def closes_skip(self) -> bool:
        """Whether y is more than the attention."""
        return self.residual is not None or self.c_out is not None or self.c_out_value != 1.0

    def alone(self, **changes: object) -> AttentionInputs:
        """The attention without its skip, in q's dtype."""
        return self._replace(
            residual=None, c_skip=None, c_out=None, c_skip_value=1.0, c_out_value=1.0,
            out_dtype=self.q.dtype, **changes,
        )  # fmt: skip


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
    """e4m3 [B, H, HEAD_PAD, n_padded], and what makes v of it again, by channel.

    levels [B, H, 3, HEAD_PAD] fp32: the scale, what was subtracted before the rounding, and, as
    int32 in 1 / `ERROR_STEPS` of a step of e4m3, the sum of the rounding errors over all tokens.
    """

    e4m3: torch.Tensor
    levels: torch.Tensor


class Operands(NamedTuple):
    """What the prologue made of q, k and v: `values` for fp8, else 16-bit `v` [B, Nk, H*D].

    Queries have sm_scale * log2(e) in their scales, and what the Hadamard matrices have multiplied
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

    inputs: q, k, v with contiguous channels, all else dense. values is None where v stays 16-bit.
    counters [B, n] int32, zeroed for the kernel that counts: one for counter_rows rows of q.
    """

    inputs: AttentionInputs
    queries: Queries
    keys: Keys
    values: Values | None
    counters: torch.Tensor | None
    counter_rows: int

    @property
    def step(self) -> int:
        """Every how many tokens of k one is averaged."""
        return -(-self.inputs.k.shape[1] // MEAN_SAMPLES)

    @property
    def q_norm(self) -> int:
        """The kind of the norm of q."""
        return norm_kind(self.inputs.norm_q, self.inputs.norm_q_bias, self.inputs.q.shape[2])

    @property
    def k_norm(self) -> int:
        """The kind of the norm of k."""
        return norm_kind(self.inputs.norm_k, self.inputs.norm_k_bias, self.inputs.k.shape[2])


def norm_kind(weight: torch.Tensor | None, bias: torch.Tensor | None, channels: int) -> int:
    """None, RMSNorm over all of a token's channels or per head, or, with a bias, layer norm per
    head."""
    if weight is None:
        return NO_NORM
    if bias is not None:
        return LAYER_NORM_PER_HEAD
    return NORM_ACROSS if weight.numel() == channels else NORM_PER_HEAD
