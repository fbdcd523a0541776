"""Attention whose epilogue closes a skip: `c_skip * residual + c_out * softmax(q k^T) v`.

`attend` is what patched blocks call. `attention_skip` is public. It checks its arguments, as do
`attend_checked` and `attend_and_project`, which take them as a record. The tables `KERNELS` and
`PROLOGUE_KERNELS` say which implementation runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from turbo_rcm_patch.config import CHOICES, Form, Impl, check_choice
from turbo_rcm_patch.errors import ConfigError, MaskError, MissingPackageError
from turbo_rcm_patch.ops.attention.emulation import emulated_attention
from turbo_rcm_patch.ops.attention.reference import (
    aligned_to_16_bytes,
    exact_attention,
    norm_rope,
    project,
    sdpa_attention,
    split_heads,
)
from turbo_rcm_patch.ops.attention.sage import sage_attention
from turbo_rcm_patch.ops.attention.spec import AttentionSpec
from turbo_rcm_patch.ops.checks import (
    check_attention,
    check_lengths,
    check_norm,
    check_out_dtype,
    check_same_device,
    check_weight,
    checked_coefficients,
    rotary_parts,
)
from turbo_rcm_patch.ops.dispatch import (
    Implementation,
    always,
    choose,
    quantises,
    resolve_impl,
    resolved,
)
from turbo_rcm_patch.ops.formats import (
    NO_NORMS,
    NO_SKIP,
    PV_DTYPES,
    QMAX,
    AttentionInputs,
    Norms,
    Prologue,
    QuantizedOperands,
    QuantizedRows,
    Rotary,
    Skip,
    Values,
    scale_block,
)
from turbo_rcm_patch.ops.register import (
    needs_registered,
    refuse_gradient,
    register,
)
from turbo_rcm_patch.ops.replay import replayed
from turbo_rcm_patch.ops.residual.api import close_skip
from turbo_rcm_patch.skip import Coefficient

if TYPE_CHECKING:
    from turbo_rcm_patch.ops.launch import Target

#: Tokens are padded to a multiple of this.
PADDED_TO: Final = 128
#: Heads of the kernels for Hopper.
_HOPPER_HEADS: Final = (64, 128)


# --- what blocks call ----------------------------------------------------------------------------


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: AttentionSpec,
    norms: Norms = NO_NORMS,
    rotary: Rotary | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute residual + softmax(q k^T / sqrt(D)) v, with norms and rotary embedding of q and k.

    Nothing is checked. A patched block has looked at its inputs.

    Args:
        q: [B, N, H*D].
        k: [B, Nk, H*D].
        v: [B, Nk, H*D].
        spec: How the attention is computed; its eps is not read.
        norms: The norms of q and k.
        rotary: Rotary tables of q and k, [N, D] each, or None.
        residual: [B, N, H*D], or None for 0.

    Returns:
        [B, N, H*D], dtype of q.
    """
    skip = None if residual is None else Skip(residual)
    if needs_registered(q):
        a = AttentionInputs(q, k, v, spec, q.dtype, norms, rotary, skip)
        return _registered_attention(a)[0]
    spec = resolved(spec, q.device, q.shape[1], k.shape[1])
    a = AttentionInputs(q, k, v, spec, q.dtype, norms, rotary, skip)
    if spec.impl == "triton" and spec.attention in QMAX:
        return launch_attention(a)[0]
    return _in_torch(a)[0]


def norm_rotate(
    x: Tensor,
    *,
    weight: Tensor | None,
    bias: Tensor | None = None,
    rotary: Rotary | None,
    heads: int,
    eps: float = 1e-6,
    impl: str,
) -> Tensor:
    """Apply norm and rotary embedding to x [B, N, H*D] in fp32, rounded once to its dtype.

    Args:
        x: [B, N, H*D].
        weight: As in `Norms`.
        bias: As in `Norms`.
        rotary: Rotary tables, [N, D] each, or None.
        heads: H.
        eps: Epsilon of the norm.
        impl: "triton", "reference" or "auto".
    """
    compute = _registered_norm_rotate if needs_registered(x) else _norm_rotated
    return compute(x, weight, bias, rotary, heads, eps, impl)


# --- what ranks that share a sequence write to each other's memory -------------------------------


def norm_rotate_to(
    to: tuple[Tensor, ...],
    x: Tensor,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    rotary: Rotary | None = None,
    heads: int,
    eps: float = 1e-6,
    impl: str,
) -> None:
    """Write what `norm_rotate` returns: to each of P ranks the channels of its heads.

    Args:
        to: The ranks' tensors [B, N, H*D / P], which may lie on other GPUs.
        x: [B, N, H*D]. The other arguments are those of `norm_rotate`.
    """
    on = resolve_impl(impl, x.device)
    if on == "triton" and _in_one_pass(x, weight, bias, heads):
        _rotated(x, weight, bias, rotary, heads, eps, to=to)
        return
    if weight is not None or rotary is not None:
        x = _norm_rotated(x, weight, bias, rotary, heads, eps, impl)
    for of_rank, part in zip(to, x.chunk(len(to), 2), strict=True):
        of_rank.copy_(part)


def attend_to(
    to: tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor, *, spec: AttentionSpec
) -> bool:
    """Write `attend(q, k, v, spec=spec)`: to each of P ranks the rows of its tokens.

    Args:
        to: The ranks' tensors [B, N/P, H*D], whose rows are P*H*D apart and which may lie on other
            GPUs.
        q: [B, N, H*D].
        k: [B, N, H*D].
        v: [B, N, H*D].
        spec: How the attention is computed.

    Returns:
        False if no kernel does this, and nothing was written.
    """
    spec = resolved(spec, q.device, q.shape[1], k.shape[1])
    if spec.impl != "triton" or spec.attention not in QMAX:
        return False
    launch_attention(AttentionInputs(q, k, v, spec, q.dtype), to=to)
    return True


# --- public functions ----------------------------------------------------------------------------


def attention_skip(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    residual: Tensor | None = None,
    c_skip: Coefficient = 1.0,
    c_out: Coefficient = 1.0,
    norm_q: Tensor | None = None,
    norm_k: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    kv_lengths: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute c_skip * residual + c_out * softmax(sm_scale * q k^T) v.

    Norms, rotary embedding, smoothing and quantisation are computed in fp32 without intermediate
    rounding. The epilogue is fp32 and rounds once. Arguments with a contiguous last dimension are
    read in place, whatever their other strides (e.g. views of a fused QKV tensor). Others are
    copied.

    Args:
        q: [B, Nq, H*D], bf16, fp16 or fp32.
        k: [B, Nk, H*D], dtype of q.
        v: [B, Nk, H*D], dtype of q.
        spec: How the attention is computed.
        residual: [B, Nq, H*D], any float dtype, or None for c_out * attention.
        c_skip: Float or tensor [B], [B, 1, H*D] or [B, Nq, H*D], read as fp32.
        c_out: Float or tensor, as c_skip.
        norm_q: RMSNorm weight of q: [H*D] normalises across all heads, [D] per head.
        norm_k: RMSNorm weight of k, as norm_q.
        rotary: (cos, sin), each [N, D] or [1, N, 1, D], applied to interleaved pairs of q and k:
            cos at even and sin at odd channels, as diffusers' Wan does.
        kv_lengths: int32 [B]; keys at or past the length are masked exactly, even if they hold
            NaN. A query that sees no key gives 0.
        out_dtype: dtype of the result; q's by default.

    Returns:
        [B, Nq, H*D], contiguous.

    Raises:
        OpError: The arguments do not fit together (`ShapeError`, `DTypeError`, `MaskError`), or a
            gradient is wanted (`GradientError`).
    """
    norms = Norms(norm_q, norm_k, eps=spec.eps)
    skip = Skip(residual, c_skip, c_out)
    dtype = cast("Any", getattr(q, "dtype", None) if out_dtype is None else out_dtype)
    a = AttentionInputs(q, k, v, spec, dtype, norms, rotary, skip, kv_lengths=kv_lengths)
    return attend_checked(a)[0]


def attend_checked(a: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Compute `attention_skip` of a record, and the logsumexp of its logits.

    Smoothing k shifts every logit of a row by sm_scale * q · mean(k). The shift is computed in
    fp32 and added back, so the logsumexp is that of the unsmoothed logits.

    Returns:
        Output [B, Nq, H*D] and, with `want_lse`, natural-log logsumexp fp32 [B, H, Nq], -inf where
        a query sees no key; else an empty tensor.
    """
    a = checked(a)
    if not a.q.shape[0]:  # the kernels do not take an empty batch
        return _empty_attention(a)
    registered = needs_registered(a.q, a.k, a.v, *tensors_of(a).values())
    return (_registered_attention if registered else _attention)(a)


def attend_and_project(
    a: AttentionInputs, weight: Tensor, bias: Tensor | None, *, form: Form = "auto"
) -> Tensor:
    """Compute c_skip * residual + c_out * (softmax(sm_scale * q k^T) v @ weight^T + bias).

    Both forms round the attention output to q's dtype before the projection. "two-launch" also
    rounds the product of the projection to it.

    Args:
        a: The attention; the residual and the coefficients of its skip have Cout channels.
        weight: [Cout, H*D], dtype of q.
        bias: [Cout] or None.
        form: "one-launch" (the attention kernel also projects; int8 and int4 only), or
            "two-launch" and "auto" (attention, cuBLAS's product, and a pass that closes the skip).

    Returns:
        [B, Nq, Cout], contiguous.
    """
    check_choice("form", form, CHOICES["form"])
    if form == "one-launch" and not quantises(a.spec.attention):
        raise ConfigError(
            'form="one-launch"',
            expected='attention="int8" or "int4"',
            got=repr(a.spec.attention),
            remedy='Use form="two-launch"',
        )
    a = checked(a, weight=weight, bias=bias)
    refuse_gradient("attention_project_skip", (weight, bias))
    if not a.q.shape[0]:
        return _empty_projected(a, weight, bias, form)
    registered = needs_registered(a.q, a.k, a.v, weight, bias, *tensors_of(a).values())
    return (_registered_projected if registered else _projected)(a, weight, bias, form)


def checked(
    a: AttentionInputs,
    operation: str = "attention",
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> AttentionInputs:
    """Check the arguments of an attention, and return them as launchers take them.

    Args:
        a: The arguments.
        operation: The name of the operation that refuses a gradient.
        weight: [Cout, H*D] of a projection before the skip, or None.
        bias: [Cout] of the projection, or None.
    """
    q, k, v, spec = a[:4]
    check_attention(q, k, v, spec)
    if weight is not None:
        check_weight(q, weight, bias)
    batch, n_q, channels = q.shape
    head_dim = channels // spec.heads
    check_norm("norm_q", a.norms.q, channels, spec.heads)
    check_norm("norm_k", a.norms.k, channels, spec.heads)
    cos, sin = rotary_parts(a.rotary, n_q, k.shape[1], head_dim)
    check_lengths(a.kv_lengths, batch)
    if spec.attention == "sage" and a.kv_lengths is not None:
        raise MaskError(
            'kv_lengths with attention="sage"',
            expected="no key padding (the package ignores masks)",
            remedy='Use attention="int8"',
        )
    check_out_dtype(a.out_dtype)
    skip_shape = (batch, n_q, channels if weight is None else weight.shape[0])
    skip = None if a.skip is None else _checked_skip(a.skip, skip_shape)
    a = a._replace(rotary=None if cos is None or sin is None else (cos, sin), skip=skip)
    tensors = tensors_of(a)
    check_same_device(q.device, **tensors)
    refuse_gradient(operation, (q, k, v, *tensors.values()))
    return a


def _checked_skip(skip: Skip, shape: tuple[int, int, int]) -> Skip | None:
    """Check a skip over [B, N, C]; return None if it changes nothing."""
    c_skip, c_out = checked_coefficients(*skip, shape)
    if skip.residual is None and isinstance(c_out, float) and c_out == 1.0:
        return None
    return Skip(skip.residual, c_skip, c_out)


def tensors_of(a: AttentionInputs) -> dict[str, Tensor | None]:
    """Return the tensors beside q, k and v by the names of the arguments."""
    cos, sin = a.rotary or (None, None)
    residual, *factors = a.skip or NO_SKIP
    c_skip, c_out = (c if isinstance(c, Tensor) else None for c in factors)
    return {
        "norm_q": a.norms.q, "norm_k": a.norms.k, "norm_q_bias": a.norms.q_bias,
        "norm_k_bias": a.norms.k_bias, "cos": cos, "sin": sin, "kv_lengths": a.kv_lengths,
        "residual": residual, "c_skip": c_skip, "c_out": c_out,
    }  # fmt: skip


# --- which implementation runs -------------------------------------------------------------------


#: Writes an attention over quantised operands into tensors, and its logsumexp.
AttentionKernel = Callable[
    [AttentionInputs, QuantizedOperands, tuple[Tensor, ...], Tensor | None], None
]


def _hopper() -> AttentionKernel:
    from turbo_rcm_patch.ops.attention.hopper import launch_kernel

    return launch_kernel


def _triton() -> AttentionKernel:
    from turbo_rcm_patch.ops.attention.triton import launch_kernel

    return launch_kernel


def _prologue_hopper() -> Callable[[Prologue], None]:
    from turbo_rcm_patch.ops.attention.prologue_hopper import run_prologue

    return run_prologue


def _prologue_triton() -> Callable[[Prologue], None]:
    from turbo_rcm_patch.ops.attention.prologue_triton import run_prologue

    return run_prologue


def _plain_on_hopper(target: Target, a: AttentionInputs) -> bool:
    # A masked token's v of 16 bits is multiplied by 0 where it lies, and may be NaN.
    served = a.spec.pv == "fp8" or a.kv_lengths is None
    plain = served and not a.spec.causal and a.skip is None
    return plain and target == ("cuda", 90) and a.head_dim in _HOPPER_HEADS


def _copied_on_hopper(target: Target, a: AttentionInputs) -> bool:
    from turbo_rcm_patch.ops.launch import in_whole_copies

    return (
        target == ("cuda", 90)
        and a.head_dim in _HOPPER_HEADS
        and all(x.dtype == a.k.dtype and in_whole_copies(x) for x in a[:3])
    )


#: The attention itself, over quantised operands.
KERNELS: Final = (
    Implementation(
        "hopper", _plain_on_hopper,
        "sm_90, heads of 64 or 128, no skip in the kernel, not causal; lengths with fp8 alone",
        _hopper, "attention",
    ),
    Implementation("triton", always, "everything else", _triton, "attention"),
)  # fmt: skip
#: The quantisation before it.
PROLOGUE_KERNELS: Final = (
    Implementation(
        "prologue_hopper", _copied_on_hopper,
        "sm_90, heads of 64 or 128, 16 bits in rows of whole copies of 16 bytes",
        _prologue_hopper, "prologue",
    ),
    Implementation("prologue_triton", always, "everything else", _prologue_triton, "prologue"),
)  # fmt: skip


def load_kernels(impl: Impl, device: torch.device) -> None:
    """Import the kernels that run on a GPU, so that no forward waits for them.

    Raises:
        MissingPackageError: Triton is installed and cannot be imported.
    """
    if device.type != "cuda" or resolve_impl(impl, device) != "triton":
        return
    try:
        from turbo_rcm_patch.ops.gluon import hash_compiler, hopper_function
        from turbo_rcm_patch.ops.launch import target_of
        from turbo_rcm_patch.ops.residual import triton as residual
    except ImportError as error:
        raise MissingPackageError(
            'impl="triton"',
            expected="a Triton that can be imported",
            got=f"{type(error).__name__}: {error}",
            remedy='Install the Triton that your torch asks for, or use impl="reference"',
        ) from error
    assert residual
    tables: Any = (KERNELS, PROLOGUE_KERNELS)
    for *special, portable in tables:
        portable.load()
        for row in special if target_of(device) == ("cuda", 90) else ():
            hopper_function(row.load, row.what)
    hash_compiler()


@replayed
def launch_attention(
    inputs: AttentionInputs, *, to: tuple[Tensor, ...] = ()
) -> tuple[Tensor, Tensor | None]:
    """Launch the prologue and the attention.

    Args:
        inputs: The attention, with "int8" or "int4" and a pv other than "auto".
        to: As in `attend_to`; by default a new tensor.

    Returns:
        y [B, Nq, H*D] or the first of `to`, and the logsumexp fp32 [B, H, Nq] or None.
    """
    a = inputs
    batch, n_q, _ = a.q.shape
    operands = quantize(a)
    ys = to or (torch.empty(a.q.shape, dtype=a.out_dtype, device=a.q.device),)
    lse = None
    if a.want_lse:
        lse = torch.empty(batch, a.spec.heads, n_q, dtype=torch.float32, device=a.q.device)
    choose(KERNELS, a.q.device, a)(a, operands, ys, lse)
    return ys[0], lse


@replayed
def launch_projected(inputs: AttentionInputs, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Launch the prologue, and attention, projection and skip in one kernel: [B, Nq, Cout].

    The projection has a weight [Cout, H*D] and a bias [Cout].
    """
    from turbo_rcm_patch.ops.attention.one_launch_triton import launch_kernel
    from turbo_rcm_patch.ops.attention.online_softmax import tile_of

    tile, (batch, n_q, _) = tile_of(inputs), inputs.q.shape
    # A counter for each block of rows, which the prologue zeroes.
    blocks = -(-n_q // tile.block_m)
    counters = torch.empty(batch, blocks, dtype=torch.int32, device=inputs.q.device)
    operands = quantize(inputs, counters=counters, counter_rows=tile.block_m)
    return launch_kernel(inputs, operands, counters, weight, bias, tile=tile)


@replayed
def quantize(
    inputs: AttentionInputs, *, counters: Tensor | None = None, counter_rows: int = 1
) -> QuantizedOperands:
    """Launch the prologue of an attention.

    Args:
        inputs: The attention, with "int8" or "int4" and a pv other than "auto". Its skip is not
            read.
        counters: [B, n] int32, to be zeroed.
        counter_rows: Rows of q that share a counter.
    """
    from turbo_rcm_patch.ops.launch import dense_rows, pad_head

    def dense(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.contiguous()

    a = inputs._replace(
        q=dense_rows(inputs.q), k=dense_rows(inputs.k), v=dense_rows(inputs.v),
        norms=Norms._make([*map(dense, inputs.norms[:4]), inputs.norms.eps]),
        rotary=None if inputs.rotary is None else cast("Any", tuple(map(dense, inputs.rotary))),
        kv_lengths=dense(inputs.kv_lengths),
    )  # fmt: skip
    (batch, n_q, _), n_kv, device = a.q.shape, a.k.shape[1], a.q.device
    fp8, head_pad, heads = a.spec.pv == "fp8", pad_head(a.head_dim), a.spec.heads
    n_q_padded, n_kv_padded = (-(-n // PADDED_TO) * PADDED_TO for n in (n_q, n_kv))

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(batch, heads, *shape, dtype=dtype, device=device)

    queries = QuantizedRows(
        empty(n_q_padded, head_pad, dtype=torch.int8),
        empty(n_q_padded),
        empty(n_q_padded) if a.want_lse and a.spec.smooth_k else None,
        n_q_padded,
    )
    keys = QuantizedRows(
        empty(n_kv_padded, head_pad, dtype=torch.int8),
        empty(n_kv_padded // scale_block(a.head_dim)),
        None,
        n_kv_padded,
    )
    values = None
    if fp8:
        values = Values(
            empty(head_pad, n_kv_padded, dtype=torch.float8_e4m3fn), empty(3, head_pad)
        )
    job = Prologue(a, queries, keys, values, counters, counter_rows)
    choose(PROLOGUE_KERNELS, device, a)(job)
    wide = None if fp8 else a.v.to(PV_DTYPES[a.spec.pv])
    return QuantizedOperands(queries, keys, values, wide, n_q, n_kv, a.kv_lengths)


# --- one call ------------------------------------------------------------------------------------


def _attention(a: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Compute an attention: y, and its logsumexp, which is empty without `want_lse`."""
    spec = resolved(a.spec, a.q.device, a.q.shape[1], a.k.shape[1], a.want_lse)
    a = a._replace(spec=spec)
    quantised = spec.impl == "triton" and spec.attention in QMAX
    out, lse = launch_attention(a) if quantised else _in_torch(a)
    if lse is None or not a.want_lse:
        lse = a.q.new_empty(0, dtype=torch.float32)
    return out, lse


def _empty_attention(a: AttentionInputs) -> tuple[Tensor, Tensor]:
    lse_shape = (a.q.shape[0], a.spec.heads, a.q.shape[1]) if a.want_lse else (0,)
    return (
        a.q.new_empty(a.q.shape, dtype=a.out_dtype),
        a.q.new_empty(lse_shape, dtype=torch.float32),
    )


_RECORDS: Final = (AttentionInputs, AttentionSpec, Norms, Skip)
_registered_attention = register("attention", _attention, _empty_attention, *_RECORDS)


def _in_torch(a: AttentionInputs) -> tuple[Tensor, Tensor | None]:
    """Compute an attention in torch: y, and its logsumexp or None."""
    branch, lse = _branch(a)
    if a.skip is None:
        out = branch if branch.dtype == a.out_dtype else branch.to(a.out_dtype)
    else:
        out = close_skip(
            a.skip.residual, branch, a.skip.c_skip, a.skip.c_out,
            impl=a.spec.impl, out_dtype=a.out_dtype,
        )  # fmt: skip
    return out.contiguous(), lse


def _branch(a: AttentionInputs) -> tuple[Tensor, Tensor | None]:
    """Compute the attention without its skip in torch: [B, Nq, H*D], and the logsumexp or None."""
    spec, heads, norms = a.spec, a.spec.heads, a.norms
    vh = split_heads(a.v, heads)
    of_q, of_k = (norms.q, norms.q_bias), (norms.k, norms.k_bias)
    one_pass = _in_one_pass(a.q, *of_q, heads) and _in_one_pass(a.k, *of_k, heads)
    if spec.impl != "triton" or not one_pass or a.want_lse:
        qh, kh = prepared(a)
    elif a.rotary is None and (norms.q is None or norms.k is None):
        qh, kh = (
            split_heads(x, heads)
            if norm[0] is None
            else _rotated(x, *norm, None, heads, norms.eps, by_head=True)
            for x, norm in ((a.q, of_q), (a.k, of_k))
        )
    else:
        # Exact attention takes q and k in their own dtype, so one kernel makes each in one pass.
        from turbo_rcm_patch.ops.residual.triton import norm_rotate_both

        cos, sin = a.rotary or (None, None)
        qh, kh = norm_rotate_both(a.q, a.k, heads, of_q, of_k, cos, sin, norms.eps)
    masks: Any = {"sm_scale": a.sm_scale, "causal": spec.causal, "kv_lengths": a.kv_lengths}
    if spec.attention in QMAX:
        return emulated_attention(
            qh, kh, vh, pv=cast("Any", spec.pv), qmax=QMAX[spec.attention],
            smooth_k=spec.smooth_k, **masks,
        )  # fmt: skip
    lse = None
    qh, kh, vh = aligned_to_16_bytes(qh), aligned_to_16_bytes(kh), aligned_to_16_bytes(vh)
    if a.want_lse:
        branch, lse = exact_attention(qh, kh, vh.float(), **masks)
    elif spec.attention == "sage":
        branch = sage_attention(
            qh.to(a.v.dtype), kh.to(a.v.dtype), vh,
            sm_scale=a.sm_scale, causal=spec.causal, smooth_k=spec.smooth_k,
        )  # fmt: skip
    else:
        branch = sdpa_attention(qh.to(a.v.dtype), kh.to(a.v.dtype), vh, **masks)
    return branch.transpose(1, 2).flatten(2), lse


def prepared(a: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Return q and k [B, H, N, D] fp32, normalised and rotated."""
    norms, (cos, sin) = a.norms, a.rotary or (None, None)
    rest: Any = {"cos": cos, "sin": sin, "eps": norms.eps}
    return (
        norm_rope(a.q, a.spec.heads, weight=norms.q, bias=norms.q_bias, **rest),
        norm_rope(a.k, a.spec.heads, weight=norms.k, bias=norms.k_bias, **rest),
    )


def _rotated(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rotary: Rotary | None,
    heads: int,
    eps: float,
    **more: Any,
) -> Tensor:
    """Apply norm and rotary embedding to x [B, N, H*D] in one kernel, with more of its options."""
    from turbo_rcm_patch.ops.residual.triton import norm_rotate as launch

    cos, sin = rotary or (None, None)
    return launch(x, heads, weight=weight, bias=bias, cos=cos, sin=sin, eps=eps, **more)


def _in_one_pass(x: Tensor, weight: Tensor | None, bias: Tensor | None, heads: int) -> bool:
    """Return True if the kernel `norm_rotate` supports the norm of x [B, N, H*D].

    It supports norms over whole rows, and norms over heads with a power of two of channels.
    """
    dim = x.shape[-1] // heads
    across = weight is None or (bias is None and weight.numel() == x.shape[-1])
    return across or dim & (dim - 1) == 0


def _norm_rotated(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rotary: Rotary | None,
    heads: int,
    eps: float,
    impl: str,
) -> Tensor:
    on = resolve_impl(impl, x.device)
    if on == "triton" and _in_one_pass(x, weight, bias, heads):
        if weight is None and rotary is None:
            return x.clone()
        return _rotated(x, weight, bias, rotary, heads, eps)
    cos, sin = rotary or (None, None)
    y = norm_rope(x, heads, weight=weight, bias=bias, cos=cos, sin=sin, eps=eps)
    return y.transpose(1, 2).flatten(2).to(x.dtype)


_registered_norm_rotate = register(
    "norm_rotate", _norm_rotated, lambda x, *_: x.new_empty(x.shape)
)


def _projected(a: AttentionInputs, weight: Tensor, bias: Tensor | None, form: str) -> Tensor:
    """Compute an attention, its projection and its skip, in one launch or in three."""
    spec = a.spec
    if form == "one-launch" and spec.attention == "auto":
        spec = replace(spec, attention="int8")
    spec = resolved(spec, a.q.device, a.q.shape[1], a.k.shape[1])
    a = a._replace(spec=spec)
    if form == "one-launch" and spec.impl == "triton" and spec.attention in QMAX:
        return launch_projected(a, weight, bias)
    branch = _attention(a._replace(skip=None, out_dtype=a.q.dtype))[0]
    if spec.impl == "triton":
        branch = F.linear(branch, weight, bias)
    else:
        branch = project(branch, weight, bias)
    skip = a.skip or NO_SKIP
    return close_skip(
        skip.residual, branch, skip.c_skip, skip.c_out, impl=spec.impl, out_dtype=a.out_dtype
    )


def _empty_projected(a: AttentionInputs, weight: Tensor, *_: object) -> Tensor:
    return a.q.new_empty((*a.q.shape[:2], weight.shape[0]), dtype=a.out_dtype)


_registered_projected = register("attention_project_skip", _projected, _empty_projected, *_RECORDS)
