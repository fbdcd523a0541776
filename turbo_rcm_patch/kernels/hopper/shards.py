"""`portable.shards` for Hopper: q, k or v alone through `hopper_prologue_kernel`."""

from __future__ import annotations

from typing import Any

import torch

from turbo_rcm_patch.kernels.hopper.prologue import (
    HEAD_DIMS,
    _heads_a_program,
    hopper_prologue_kernel,
)
from turbo_rcm_patch.kernels.launch import cdiv, launch, strides
from turbo_rcm_patch.kernels.operands import NORM_ACROSS, norm_kind
from turbo_rcm_patch.kernels.portable.prologue import AMAX_CHUNKS

_K_ROWS = 128  # keys that share a scale
_SLOTS = 132  # programs at a time, on an H100 or H200


def run_hopper_part(
    tokens: Any,
    which: str,
    *,
    int8: torch.Tensor | None,
    scale: torch.Tensor | None,
    qmax: int,
    factor: float,
    mean: torch.Tensor | None,
    v_out: torch.Tensor | None,
    v_levels: torch.Tensor | None,
    v_errors: torch.Tensor | None,
    v_stats: torch.Tensor | None,
) -> bool:
    """Quantise q, k or v; see `portable.shards._prologue`. False where the kernel does not serve
    it: it reads 16-bit rows 16 bytes at a time."""
    x, heads = tokens.x, tokens.heads
    (batch, n, channels), head_dim = x.shape, x.shape[2] // heads
    served = (
        head_dim in HEAD_DIMS
        and x.element_size() == 2
        and x.stride(1) % 16 == 0
        and x.stride(1) < 2**22
        and (batch == 1 or x.stride(0) % 16 == 0)
        and (x.device.type == "meta" or x.data_ptr() % 16 == 0)
    )
    if not served:
        return False
    rows = 8192 // head_dim if which == "q" else _K_ROWS
    n_padded = cdiv(n, _K_ROWS) * _K_ROWS
    blocks = n_padded // rows
    norm = norm_kind(tokens.weight, tokens.bias, channels)
    group = _heads_a_program(heads, batch * blocks, 1 + heads / 4 * (norm == NORM_ACROSS))
    tiles = min(4, cdiv(blocks * heads * batch, 2 * _SLOTS))
    programs = heads * cdiv(blocks, tiles) if which == "v" else blocks * cdiv(heads, group)
    # What the launch does not take is compiled too, and never reached: any pointer will do.
    int8 = v_out.view(torch.int8) if int8 is None else int8
    scale = v_levels if scale is None else scale

    def of(part: str, value: Any) -> Any:
        return value if which == part else None

    launch(
        hopper_prologue_kernel,
        (programs, batch),
        x.device,
        q_ptr=x,
        q_int8_ptr=int8,
        q_scale_ptr=scale,
        q_weight_ptr=of("q", tokens.weight),
        q_bias_ptr=of("q", tokens.bias),
        shift_ptr=None,
        counter_ptr=None,
        k_ptr=x,
        k_int8_ptr=int8,
        k_scale_ptr=scale,
        k_weight_ptr=of("k", tokens.weight),
        k_bias_ptr=of("k", tokens.bias),
        mean_ptr=mean,
        v_ptr=x,
        v_stats_ptr=v_stats,
        v_out_ptr=v_out,
        v_levels_ptr=v_levels,
        v_error_ptr=v_errors,
        cos_ptr=tokens.cos,
        sin_ptr=tokens.sin,
        lengths_ptr=None,
        **strides(one_sample=batch == 1, q=x, k=x, v=x),
        n_q=n,
        n_kv=n,
        n_q_padded=n_padded,
        n_kv_padded=n_padded,
        n_counters=0,
        chunks=1,
        step=n,  # the mean is one partial sum of one token
        q_programs=programs if which == "q" else 0,
        k_programs=programs if which == "k" else 0,
        q_blocks=blocks,
        kv_blocks=blocks,
        q_group=group,
        k_group=group,
        tiles=tiles,
        eps=tokens.eps,
        factor=factor,
        shift_factor=1.0,
        CHANNELS=channels,
        HEAD_DIM=head_dim,
        QMAX=qmax,
        COUNTER_ROWS=1,
        CHUNKS=AMAX_CHUNKS,
        MEANS=1,
        Q_NORM=norm if which == "q" else 0,
        K_NORM=norm if which == "k" else 0,
        ROPE=tokens.cos is not None,
        HAS_LENGTHS=False,
        SUBTRACT=mean is not None,
        SHIFT=False,
        COUNTERS=False,
        FP8=which == "v",
        num_warps=8,
        maxnreg=128,  # two programs a multiprocessor
    )
    return True
