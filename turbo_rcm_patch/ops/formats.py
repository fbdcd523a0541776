"""The arguments of kernels: the inputs of an attention, its quantised operands, and int8 rows for
Linears.

This module does not import triton.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

MEAN_SAMPLES = 256  # tokens whose mean is subtracted from k
NO_NORM, NORM_ACROSS, NORM_PER_HEAD, LAYER_NORM_PER_HEAD = 0, 1, 2, 3
#: Errors of rounding to e4m3 are counted in units of 1 / 256. An error is at most 16, so the sum
#: over 2**19 tokens always fits into an int32.
ERROR_STEPS = 256
#: Largest magnitude of a quantised q or k, by the name of the attention.
QMAX = {"int8": 127, "int4": 7}

#: Rows of int8 are padded to a multiple of this many bytes for hardware copies and wide loads.
ALIGNED = 16


class Rows(NamedTuple):
    """An activation [B, N, K] in int8 with a scale per row.

    Attributes:
        int8: int8 [B, N, K padded to a multiple of 16], dense, 0 in the padding.
        scale: fp32 [B, N].
    """

    int8: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def __torch_function__(
        cls, func: object, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> torch.Tensor:
        """Compute the product of a Linear whose int8 forward was removed while rows were on their
        way to it."""
        assert func is F.linear
        (int8, scale), weight, bias = args
        x = int8[..., : weight.shape[1]] * scale.unsqueeze(-1)
        return F.linear(x.to(weight.dtype), weight, bias)


def padded_channels(channels: int) -> int:
    """Return K of `Rows` with its padding."""
    return -(-channels // ALIGNED) * ALIGNED


class AttentionInputs(NamedTuple):
    """All arguments of one attention with its norms and its skip.

    y = c_skip * residual + c_out * softmax(sm_scale * norm(q) norm(k)^T) v

    The fields are the arguments of the registered operation in its order: `operation(*inputs)`
    calls it, and its body restores them with `AttentionInputs(*arguments)`.

    Attributes:
        q: [B, Nq, H*D].
        k: [B, Nk, H*D].
        v: [B, Nk, H*D].
        residual: [B, Nq, H*D] or None.
        c_skip: Broadcasts to [B, Nq, H*D]; None for the number `c_skip_value`.
        c_out: Broadcasts to [B, Nq, H*D]; None for the number `c_out_value`.
        norm_q: RMSNorm weight of q: [H*D] across all heads, or [D] per head; None for no norm.
        norm_k: RMSNorm weight of k, of either kind; None for no norm.
        norm_q_bias: [D], which makes the norm of q a layer norm of each head.
        norm_k_bias: [D], which makes the norm of k a layer norm of each head.
        cos: Cosines of the rotary embedding, [N, D], or None.
        sin: Sines of the rotary embedding, [N, D], or None.
        kv_lengths: int [B], the number of keys that are seen; None for all.
        c_skip_value: The coefficient if `c_skip` is None.
        c_out_value: The coefficient if `c_out` is None.
        heads: H.
        attention: "int8", "int4", "exact", "sage" or "auto".
        pv: "fp8", "bf16", "fp16" or "auto": the type of probabilities and values.
        smooth_k: True to subtract the mean of k before quantising it.
        causal: True if query i sees only keys 0..i.
        sm_scale: Factor on the logits, over 0.
        eps: Epsilon of the norms.
        impl: "triton", "reference" or "auto".
        out_dtype: dtype of y.
        want_lse: True to return the logsumexp of the logits, too.
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
        """Channels per head, D."""
        return self.q.shape[2] // self.heads

    @property
    def skip_factor(self) -> float | torch.Tensor:
        """The coefficient of the residual, a tensor or a number."""
        return self.c_skip_value if self.c_skip is None else self.c_skip

    @property
    def out_factor(self) -> float | torch.Tensor:
        """The coefficient of the attention, a tensor or a number."""
        return self.c_out_value if self.c_out is None else self.c_out

    @property
    def closes_skip(self) -> bool:
        """True if y is more than the attention: a residual is added, or c_out is not 1."""
        return self.residual is not None or self.c_out is not None or self.c_out_value != 1.0

    def alone(self, **changes: object) -> AttentionInputs:
        """Return the inputs without the skip, with an output in q's dtype."""
        return self._replace(
            residual=None, c_skip=None, c_out=None, c_skip_value=1.0, c_out_value=1.0,
            out_dtype=self.q.dtype, **changes,
        )  # fmt: skip


class Queries(NamedTuple):
    """Quantised q: int8 [B, H, n_padded, HEAD_PAD], scale and shift (or None) [B, H, n_padded]."""

    int8: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor | None


class Keys(NamedTuple):
    """Quantised k: int8 [B, H, n_padded, HEAD_PAD], scale [B, H, n_padded / scale_block(D)]."""

    int8: torch.Tensor
    scale: torch.Tensor


class Values(NamedTuple):
    """Quantised v: e4m3 [B, H, HEAD_PAD, n_padded], and the levels that restore v, per channel.

    levels [B, H, 3, HEAD_PAD] fp32 holds the scale, the mean that was subtracted before the
    rounding, and the sum of the rounding errors over all tokens, as an int32 in units of
    1 / `ERROR_STEPS`.
    """

    e4m3: torch.Tensor
    levels: torch.Tensor


class Operands(NamedTuple):
    """The results of the prologue: q, k and, for fp8, `values`; else v is 16-bit [B, Nk, H*D].

    The scales of q include sm_scale * log2(e), divided by the factor of the Hadamard matrices on
    logits. The shift of q is sm_scale * q · mean(k). Masked keys are 0.
    """

    queries: Queries
    keys: Keys
    values: Values | None
    v: torch.Tensor | None
    n_q: int
    n_kv: int
    lengths: torch.Tensor | None


class Prologue(NamedTuple):
    """The inputs of a prologue and the memory for its results.

    In inputs q, k and v have contiguous channels, and all other tensors are dense. values is None
    if v stays 16-bit. counters [B, n] int32 is zeroed for the one-launch kernel, one counter per
    counter_rows rows of q.
    """

    inputs: AttentionInputs
    queries: Queries
    keys: Keys
    values: Values | None
    counters: torch.Tensor | None
    counter_rows: int

    @property
    def step(self) -> int:
        """Distance of the tokens of k that are averaged."""
        return -(-self.inputs.k.shape[1] // MEAN_SAMPLES)

    @property
    def q_norm(self) -> int:
        """Kind of the norm of q, see `norm_kind`."""
        return norm_kind(self.inputs.norm_q, self.inputs.norm_q_bias, self.inputs.q.shape[2])

    @property
    def k_norm(self) -> int:
        """Kind of the norm of k, see `norm_kind`."""
        return norm_kind(self.inputs.norm_k, self.inputs.norm_k_bias, self.inputs.k.shape[2])


def norm_kind(weight: torch.Tensor | None, bias: torch.Tensor | None, channels: int) -> int:
    """Return the kind of a norm: `NO_NORM`, `NORM_ACROSS`, `NORM_PER_HEAD` or
    `LAYER_NORM_PER_HEAD`."""
    if weight is None:
        return NO_NORM
    if bias is not None:
        return LAYER_NORM_PER_HEAD
    return NORM_ACROSS if weight.numel() == channels else NORM_PER_HEAD
