"""Sparse-linear attention by its definition at full size, and int8 weights such as a checkpoint
brings along: what `turbo` checks with and what it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.setup import generator
from turbo_rcm_patch import ops
from turbo_rcm_patch.checkpoints.blocks import dequantise
from turbo_rcm_patch.ops.sparse_reference import block_map, linear_branch
from turbo_rcm_patch.patching.int8_weights import attach_int8, detach_int8

__all__ = ["block_weights", "exact_sla", "projection", "quantised_blocks"]

#: Blocks of an int8 weight that share a scale, and the steps of its largest magnitude.
_BLOCK, _STEPS = 128, 128


def projection(head_dim: int, device: torch.device, seed: int) -> nn.Linear:
    """SLA's proj_l in fp32, which starts at zero, with seeded random values instead."""
    linear = nn.Linear(head_dim, head_dim, device=device).requires_grad_(False)
    for parameter in linear.parameters():
        parameter.normal_(std=head_dim**-0.5, generator=generator(device, seed))
    return linear


def exact_sla(
    q: Tensor, k: Tensor, v: Tensor, proj_l: nn.Linear, sparsity: ops.Sparsity
) -> Tensor:
    """softmax(q k^T) v over the chosen blocks plus proj_l of the linear branch, in fp32.

    `ops.sparse_reference` does this block by block; here all blocks of queries of a head go
    together, which a forward of 30 layers needs. The choice of blocks is the reference's.

    Args:
        q: [B, N, H, D], normalised and rotated, any float dtype, which the block map rounds to.
        k: [B, N, H, D], likewise.
        v: [B, N, H, D].
        proj_l: [D, D] and its bias.
        sparsity: Share of key blocks and the sizes of blocks.

    Returns:
        [B, N, H, D], dtype of q.
    """
    dtype, tokens = q.dtype, k.shape[1]
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    size, width = sparsity.block_q, sparsity.block_k
    out = linear_branch(q, k, v, proj_l.weight, proj_l.bias, dtype=torch.float32)
    padding = -q.shape[2] % size
    within = torch.arange(width, device=q.device)
    for batch in range(q.shape[0]):
        for head in range(q.shape[1]):
            one = slice(batch, batch + 1), slice(head, head + 1)
            blocks = block_map(
                q[one], k[one], count=sparsity.count(tokens), block_q=size, block_k=width,
                dtype=dtype,
            )[0, 0]  # fmt: skip
            keys = (blocks[..., None] * width + within).flatten(1)
            absent = (keys >= tokens)[:, None]
            keys = keys.clamp(max=tokens - 1)
            rows = F.pad(q[batch, head], (0, 0, 0, padding)).view(-1, size, q.shape[3])
            logits = rows @ k[batch, head][keys].transpose(1, 2) * q.shape[3] ** -0.5
            weights = logits.masked_fill_(absent, float("-inf")).softmax(-1)
            sparse = (weights @ v[batch, head][keys]).flatten(0, 1)
            out[batch, head] += sparse[: q.shape[2]]
    return out.transpose(1, 2).to(dtype)


def quantised_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight in int8 with a scale per block of 128 x 128, as `Int8Linear` of TurboDiffusion.

    Args:
        weight: [Cout, K], any float dtype.

    Returns:
        int8 [Cout, K] and fp32 [ceil(Cout / 128), ceil(K / 128)].
    """
    rows, columns = weight.shape
    padded = F.pad(weight.detach().float(), (0, -columns % _BLOCK, 0, -rows % _BLOCK))
    down, across = (size // _BLOCK for size in padded.shape)
    blocks = padded.view(down, _BLOCK, across, _BLOCK)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-30) / _STEPS
    steps = (blocks / scale[:, None, :, None]).round().clamp(-_STEPS, _STEPS - 1)
    int8 = steps.flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return int8.to(torch.int8).contiguous(), scale


@contextmanager
def block_weights(blocks: nn.Module) -> Iterator[None]:
    """Inside, the Linears of the blocks hold int8 weights with a scale per 128 x 128, and are
    about their product; afterwards they are as before."""
    before: list[tuple[Any, Tensor]] = []
    try:
        for name, linear in blocks.named_modules():
            if type(linear) is not nn.Linear or "proj_l" in name:
                continue
            # Not on the device, whose peak memory is measured.
            before.append((linear, linear.weight.data.to("cpu", copy=True)))
            int8, scale = quantised_blocks(linear.weight)
            linear.weight.data.copy_(dequantise(int8, scale, linear.weight.dtype))
            attach_int8(linear, int8, scale)
        yield
    finally:
        for linear, weight in before:
            detach_int8(linear)
            linear.weight.data.copy_(weight)
