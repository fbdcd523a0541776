"""The rCM sampler as a k-diffusion sampler of ComfyUI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm.auto import trange

from turbo_rcm_patch import ops
from turbo_rcm_patch.sampling.scheduler import noise_stream, step_coefficients

__all__ = ["sample_rcm"]


@torch.no_grad()
def sample_rcm(
    model: Callable[..., Tensor],
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: Callable[[dict[str, Any]], None] | None = None,
    disable: bool | None = None,
    sampler: Literal["sde", "ode"] = "sde",
) -> Tensor:
    """The loop of `RCMScheduler`: its coefficients, its fp64 state, its kind of noise.

    Noise comes from a CPU generator of the seed, so it is the same on every device, and it is
    another stream than the initial noise of the same seed.

    Args:
        model: x, t [B] -> the clean sample x0 = x - t v.
        x: t0 * noise, [B, ...].
        sigmas: Rectified-flow times from the noisiest down to 0.
        extra_args: Passed on to the model; "seed" is read.
        callback: Called after each step's network.
        disable: Of the progress bar.
        sampler: "sde" or "ode".
    """
    extra_args = {} if extra_args is None else extra_args
    times = sigmas.to("cpu", torch.float64)
    coefficients = step_coefficients(times, sampler)
    stream = noise_stream(int(extra_args.get("seed") or 0), "rcm-renoise")
    ones = x.new_ones([x.shape[0]])
    state = x.to(torch.float64)
    for i in trange(len(times) - 1, disable=disable):
        given = state.to(x.dtype)
        denoised = model(given, sigmas[i] * ones, **extra_args)
        if callback is not None:
            callback(
                {"x": given, "i": i, "sigma": sigmas[i], "sigma_hat": sigmas[i],
                 "denoised": denoised}
            )  # fmt: skip
        velocity = (given.double() - denoised.double()) / times[i]
        noise = None
        if coefficients[i, 2] > 0:
            noise = torch.randn(x.shape, generator=stream, dtype=torch.float32).to(x.device)
        state = ops.denoise_step(state, velocity, noise, coefficients[i].to(x.device))
    return state.to(x.dtype)
