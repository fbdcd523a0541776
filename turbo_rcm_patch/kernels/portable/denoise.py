"""One step of a few-step sampler in one pass over its latents, in fp64."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.kernels.launch import LENGTHS, cdiv, launch, target_of

_BLOCK = 1024


@triton.jit(do_not_specialize=LENGTHS)
def denoise_step_kernel(
    y_ptr, x_ptr, branch_ptr, noise_ptr, c_ptr, n_elements,
    BLOCK: tl.constexpr, HAS_NOISE: tl.constexpr,
):  # fmt: skip
    """y = c[0] * x + c[1] * branch + c[2] * noise.

    Grid: (blocks of elements,). y fp64, x, branch, noise of any float dtype, all dense and of one
    shape; c [3] fp64. It is read from memory because a float argument would be rounded to fp32.
    """
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n_elements
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float64)
    branch = tl.load(branch_ptr + offs, mask=mask, other=0.0).to(tl.float64)
    y = tl.load(c_ptr) * x + tl.load(c_ptr + 1) * branch
    if HAS_NOISE:
        noise = tl.load(noise_ptr + offs, mask=mask, other=0.0).to(tl.float64)
        y += tl.load(c_ptr + 2) * noise
    tl.store(y_ptr + offs, y, mask=mask)


def denoise_step(
    x: torch.Tensor, branch: torch.Tensor, noise: torch.Tensor | None, coefficients: torch.Tensor
) -> torch.Tensor:
    """coefficients . (x, branch, noise); tensors of one shape, coefficients fp64 [3]."""
    target_of(x.device)  # a device that cannot run it is refused with a remedy
    y = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    launch(
        denoise_step_kernel,
        (cdiv(x.numel(), _BLOCK),),
        x.device,
        y_ptr=y,
        x_ptr=x.contiguous(),
        branch_ptr=branch.contiguous(),
        noise_ptr=None if noise is None else noise.contiguous(),
        c_ptr=coefficients.contiguous(),
        n_elements=x.numel(),
        BLOCK=_BLOCK,
        HAS_NOISE=noise is not None,
        num_warps=4,
        num_stages=1,
    )
    return y
