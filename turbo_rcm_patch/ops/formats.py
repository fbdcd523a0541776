"""The number formats of all operators, and the records in which an attention's inputs and its
quantised operands travel.

Kernels take the same numbers as `tl.constexpr`. This module does not import triton.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from turbo_rcm_patch.ops.attention.spec import AttentionSpec

LOG2_E: Final = math.log2(math.e)
LN_2: Final = math.log(2.0)

# int8, with a scale per row or per block.
INT8_MAX: Final = 127
#: Values that are all smaller become 0, because the inverse of their scale would overflow.
TINY: Final = 2.0**-100
#: Adding 1.5 * 2**23 to |x| < 2**22 rounds it to an integer, half to even, in the low bits.
ROUNDER: Final = 12582912.0
ROUNDER_BITS: Final = 0x4B400000
#: Largest magnitude of a quantised q or k, by the name of the attention.
QMAX: Final = {"int8": INT8_MAX, "int4": 7}
#: Rows of int8 are padded to a multiple of this many bytes for hardware copies and wide loads.
ALIGNED: Final = 16

# v in e4m3, less its mean, with a scale per channel.
E4M3_MAX: Final = 448.0
#: Tokens whose mean is subtracted from k and v. Any constant is exact, so a sample is enough.
MEAN_SAMPLES: Final = 256
#: Partial sums of the sample of v. The order of the sum is part of the numeric contract.
MEAN_ROWS: Final = 32
#: Least magnitude by which a channel of v is scaled. Below it the inverse of the scale overflows,
#: and the scale is subnormal.
LEAST_V: Final = 2.0**-117
#: A channel of v with larger values keeps its mean, because the sum of a sample could overflow.
LARGEST_CENTRED: Final = 2.0**119
#: Errors of rounding to e4m3 are counted in units of 1 / 256. An error is at most 16, so the sum
#: over 2**19 tokens always fits into an int32.
ERROR_STEPS: Final = 256
#: log2 of the largest p. e4m3 uses its whole range; fp16 stays clear of its subnormals.
P_MAX_LOG2: Final = {"fp8": math.log2(E4M3_MAX), "fp16": 8.0, "bf16": 0.0}

#: dtypes of probabilities and values by the name of their type.
PV_DTYPES: Final = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp16": torch.float16}

NO_NORM, NORM_ACROSS, NORM_PER_HEAD, LAYER_NORM_PER_HEAD = 0, 1, 2, 3


def scale_block(head_dim: int) -> int:
    """Return the number of keys that share a scale of k and a step of the online softmax.

    It is part of the numeric contract. A block of this many rows of one head has to fit into
    registers, beside the masks of a padded head.
    """
    if head_dim <= 64 or head_dim == 128:
        return 128
    return 64 if head_dim < 128 else 32


def hadamard_width(head_dim: int) -> int:
    """Return the number of channels that one Hadamard matrix mixes before int8.

    It is part of the numeric contract. With heads of 64 channels the network number of the shipped
    model is 1.024 for matrices over 64 channels, and 1.055 over 32. Wider heads have not been
    measured.
    """
    return 64 if 32 < head_dim <= 64 else 32


class Int8Tensor(NamedTuple):
    """An activation [B, N, K] in int8 with a scale per row.

    Attributes:
        data: int8 [B, N, K padded to a multiple of 16], dense, 0 in the padding.
        scale: fp32 [B, N].
    """

    data: Tensor
    scale: Tensor


class _InFlight(Int8Tensor):
    """An `Int8Tensor` that a Linear multiplies after its int8 forward was removed."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: object, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> torch.Tensor:
        """Compute the product of a Linear whose int8 forward was removed while rows were in
        flight."""
        assert func is F.linear
        (int8, scale), weight, bias = args
        x = int8[..., : weight.shape[1]] * scale.unsqueeze(-1)
        return F.linear(x.to(weight.dtype), weight, bias)


def int8_rows(data: Tensor, scale: Tensor) -> Int8Tensor:
    """Return rows for a Linear, which another thread may unpatch before they reach it.

    In a graph there is no such thread, and some compilers do not trace a `__torch_function__`.
    """
    return (Int8Tensor if torch.compiler.is_compiling() else _InFlight)(data, scale)


def padded_channels(channels: int) -> int:
    """Return K of `Int8Tensor` with its padding."""
    return -(-channels // ALIGNED) * ALIGNED


class LinearInputs(NamedTuple):
    """The product of an int8 linear with everything after it.

    Attributes:
        weight: int8 [Cout, K].
        scale: fp32, in one of the two shapes that `int8_linear` takes.
        bias: [Cout] or None.
        activation: "" or "gelu-tanh".
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    activation: str


#: Least number of outputs for which tiles of 128x256 fill the card: 192 of them on the H200's 132
#: multiprocessors. From there on Hopper's own kernel is faster (29.5 us against 33.0 for 4,096 x
#: 1,536 outputs of 1,536 channels, 76 against 148 of 8,960).
LARGE: Final = 3 * 2**21


class Norms(NamedTuple):
    """The norms of q and k that an attention's kernel computes.

    Attributes:
        q: Weight of q's norm: [H*D] of an RMSNorm over all heads, or [D] of one per head; None
            for no norm.
        k: Weight of k's norm, of either kind.
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

#: A tensor of the residual stream, or one for each of two streams.
Streams = Tensor | tuple[Tensor, Tensor]
#: (cos, sin), [N, D] each, D channels of a head.
Rotary = tuple[Tensor, Tensor]


class Skip(NamedTuple):
    """The skip that an operator combines with its result y: c_skip * residual + c_out * y.

    Attributes:
        residual: [B, N, C], or None for c_out * y.
        c_skip: A number, or a tensor that broadcasts to [B, N, C].
        c_out: A number, or a tensor that broadcasts to [B, N, C].
    """

    residual: Tensor | None
    c_skip: float | Tensor = 1.0
    c_out: float | Tensor = 1.0


NO_SKIP: Final = Skip(None)


class AttentionInputs(NamedTuple):
    """An attention with its norms and its skip.

    y = c_skip * residual + c_out * softmax(sm_scale * norm(q) norm(k)^T) v

    A tuple, not a dataclass, because a recorded launch reads its tensors on every call.

    Attributes:
        q: [B, Nq, H*D].
        k: [B, Nk, H*D].
        v: [B, Nk, H*D].
        spec: The options. For a launcher attention, pv and impl are decided (`dispatch.resolved`).
        out_dtype: dtype of y.
        norms: The norms of q and k.
        rotary: Tables of the rotary embedding of q and k, or None.
        skip: The skip, or None if y is the attention itself.
        kv_lengths: int [B], the number of keys that are seen; None for all.
        want_lse: True to return the logsumexp of the logits, too.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    spec: AttentionSpec
    out_dtype: torch.dtype
    norms: Norms = NO_NORMS
    rotary: Rotary | None = None
    skip: Skip | None = None
    kv_lengths: Tensor | None = None
    want_lse: bool = False

    @property
    def head_dim(self) -> int:
        """Channels per head, D."""
        return self.q.shape[2] // self.spec.heads

    @property
    def sm_scale(self) -> float:
        """Factor on the logits, over 0."""
        return self.spec.scale_of(self.head_dim)


class QuantizedRows(NamedTuple):
    """Quantised q or k.

    Attributes:
        int8: [B, H, n_padded, HEAD_PAD].
        scale: fp32 [B, H, n_padded] of q, [B, H, n_padded / scale_block(D)] of k.
        shift: fp32 [B, H, n_padded], which smoothing subtracts from every logit of a row of q, or
            None.
        n_padded: Padded number of tokens.
    """

    int8: Tensor
    scale: Tensor
    shift: Tensor | None
    n_padded: int


class Values(NamedTuple):
    """Quantised v: e4m3 [B, H, HEAD_PAD, n_padded], and the levels that restore v, per channel.

    levels [B, H, 3, HEAD_PAD] fp32 holds the scale, the mean that was subtracted before the
    rounding, and the sum of the rounding errors over all tokens, as an int32 in units of
    1 / `ERROR_STEPS`.
    """

    e4m3: Tensor
    levels: Tensor


class QuantizedOperands(NamedTuple):
    """The results of the prologue: q, k and, for fp8, `values`; else v is 16-bit [B, Nk, H*D].

    The scales of q include sm_scale * log2(e), divided by the factor of the Hadamard matrices on
    logits. The shift of q is sm_scale * q · mean(k). Masked keys are 0.
    """

    queries: QuantizedRows
    keys: QuantizedRows
    values: Values | None
    v: Tensor | None
    n_q: int
    n_kv: int
    lengths: Tensor | None


class AttentionOutput(NamedTuple):
    """The memory of an attention's results, as kernels take it.

    Attributes:
        y_ptrs: [B, Nq, H*D] dense, or the rows of each rank in its own tensor.
        lse_ptr: fp32 [B, H, Nq], or None.
        shift_ptr: fp32 [B, H, n_q_padded], which smoothing subtracted from every logit of a row
            and the logsumexp gets back, or None.
    """

    y_ptrs: tuple[Tensor, ...]
    lse_ptr: Tensor | None
    shift_ptr: Tensor | None


class TokenRows(NamedTuple):
    """q or k [B, N, H*D] with its norm and its result, as kernels take them.

    Attributes:
        ptr: The rows, with contiguous channels.
        strides: Their strides of batch and tokens.
        weight_ptr: Weight of the norm, [H*D], or [D] per head, or None.
        bias_ptr: Bias [D] of a layer norm, or None.
        out: The memory of the result.
    """

    ptr: Tensor
    strides: tuple[int, int]
    weight_ptr: Tensor | None
    bias_ptr: Tensor | None
    out: QuantizedRows | Tensor


class CommonOperands(NamedTuple):
    """Operands of a prologue that q, k and v have in common; each may be None.

    Attributes:
        mean_ptr: Mean of k, fp32 [B, H, HEAD_PAD], or on Hopper partial sums [B, H, MEANS, D].
        rotary: cos and sin, [N, D] each.
        lengths_ptr: Numbers of keys that are seen, int32 [B].
        counter_ptr: Counters of the one-launch kernel, int32 [B, n_counters].
    """

    mean_ptr: Tensor | None
    rotary: Rotary | None
    lengths_ptr: Tensor | None
    counter_ptr: Tensor | None


class ValueRows(NamedTuple):
    """v [B, N, H*D], its statistics and the memory of its result; all but v are None without fp8.

    Attributes:
        ptr: The rows.
        strides: Their strides of batch and tokens.
        stats_ptr: fp32 [B, H, 1 + chunks, HEAD_PAD]: the mean, then largest magnitudes.
        error_ptr: `levels_ptr` as int32.
        levels_ptr: [B, H, 3, HEAD_PAD], see `Values`.
        out_ptr: e4m3 [B, H, HEAD_PAD, n_padded].
    """

    ptr: Tensor
    strides: tuple[int, int]
    stats_ptr: Tensor | None = None
    error_ptr: Tensor | None = None
    levels_ptr: Tensor | None = None
    out_ptr: Tensor | None = None


class Factors(NamedTuple):
    """Numbers of a prologue: on scales of q and on its shift, and epsilon of the norms."""

    q: float
    shift: float
    eps: float


class Prologue(NamedTuple):
    """The inputs of a prologue and the memory for its results.

    In inputs q, k and v have contiguous channels, and all other tensors are dense. values is None
    if v stays 16-bit. counters [B, n] int32 is zeroed for the one-launch kernel, one counter per
    counter_rows rows of q.
    """

    inputs: AttentionInputs
    queries: QuantizedRows
    keys: QuantizedRows
    values: Values | None
    counters: Tensor | None
    counter_rows: int

    @property
    def step(self) -> int:
        """Distance of the tokens of k that are averaged."""
        return -(-self.inputs.k.shape[1] // MEAN_SAMPLES)

    @property
    def factors(self) -> Factors:
        """The factors of the kernel."""
        a = self.inputs
        return Factors(a.sm_scale * LOG2_E / hadamard_width(a.head_dim), a.sm_scale, a.norms.eps)

    def query_rows(self, strides: tuple[int, int]) -> TokenRows:
        """Return q with the strides, its norm and the memory of its result."""
        norms = self.inputs.norms
        return TokenRows(self.inputs.q, strides, norms.q, norms.q_bias, self.queries)

    def key_rows(self, strides: tuple[int, int]) -> TokenRows:
        """Return k with the strides, its norm and the memory of its result."""
        norms = self.inputs.norms
        return TokenRows(self.inputs.k, strides, norms.k, norms.k_bias, self.keys)

    def value_rows(self, strides: tuple[int, int], stats: Tensor | None) -> ValueRows:
        """Return v with the strides, and with fp8 the memory of its statistics and its result."""
        v, values = self.inputs.v, self.values
        if values is None:
            return ValueRows(v, strides)
        errors = values.levels.view(torch.int32)
        return ValueRows(v, strides, stats, errors, values.levels, values.e4m3)

    @property
    def q_norm(self) -> int:
        """Kind of the norm of q, see `norm_kind`."""
        norms = self.inputs.norms
        return norm_kind(norms.q, norms.q_bias, self.inputs.q.shape[2])

    @property
    def k_norm(self) -> int:
        """Kind of the norm of k, see `norm_kind`."""
        norms = self.inputs.norms
        return norm_kind(norms.k, norms.k_bias, self.inputs.k.shape[2])


def norm_kind(weight: Tensor | None, bias: Tensor | None, channels: int) -> int:
    """Return the kind of a norm: `NO_NORM`, `NORM_ACROSS`, `NORM_PER_HEAD` or
    `LAYER_NORM_PER_HEAD`."""
    if weight is None:
        return NO_NORM
    if bias is not None:
        return LAYER_NORM_PER_HEAD
    return NORM_ACROSS if weight.numel() == channels else NORM_PER_HEAD
