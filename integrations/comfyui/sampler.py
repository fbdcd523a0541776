"""The rCM sampler as a k-diffusion sampler of ComfyUI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm.auto import trange

from turbo_rcm_patch.video.rcm_times import MAX_STEPS, noise_stream, rcm_times, step_coefficients

#: Times in fp32 and in fp64 differ by less.
_SAME_TIME = 1e-6


@torch.no_grad()
def sample_rcm(
    model: Callable[..., Tensor],
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: Callable[[dict[str, Any]], None] | None = None,
    disable: bool | None = None,
    sampler: Literal["sde", "ode"] = "sde",
    steps: int = MAX_STEPS,
    sigma_max: float = 80.0,
) -> Tensor:
    """Run the loop of `RCMScheduler`: its coefficients, its fp64 state, its kind of noise.

    Noise comes from a CPU generator of the seed, so it is the same on every device, and it is
    another stream than the initial noise of the same seed. A sampler that begins at a later time
    of the video's schedule continues its noise: two samplers with split sigmas, for the two
    experts of Wan 2.2, give the bits of one.

    Args:
        model: x, t [B] -> the clean sample x0 = x - t v.
        x: t0 * noise, [B, ...].
        sigmas: Rectified-flow times from the noisiest down to 0.
        extra_args: Passed on to the model; "seed" is read.
        callback: Called after each step's network.
        disable: Of the progress bar.
        sampler: "sde" or "ode".
        steps: Of the whole video, of which `sigmas` may be a part.
        sigma_max: Noise level at which the whole video begins.
    """
    extra_args = {} if extra_args is None else extra_args
    times = sigmas.to("cpu", torch.float64)
    coefficients = step_coefficients(times, sampler)
    stream = _noise_after(times[0], rcm_times(steps, sigma_max), x, extra_args.get("seed") or 0)
    ones = x.new_ones([x.shape[0]])
    state = x.to(torch.float64)
    for i in trange(len(times) - 1, disable=disable):
        latents = state.to(x.dtype)
        denoised = model(latents, sigmas[i] * ones, **extra_args)
        if callback is not None:
            callback(
                {"x": latents, "i": i, "sigma": sigmas[i], "sigma_hat": sigmas[i],
                 "denoised": denoised}
            )  # fmt: skip
        velocity = (latents.double() - denoised.double()) / times[i]
        c_skip, c_out, c_noise = coefficients[i].tolist()
        state = c_skip * state + c_out * velocity
        if c_noise:
            noise = torch.randn(x.shape, generator=stream, dtype=torch.float32)
            state += c_noise * noise.to(x.device, torch.float64)
    return state.to(x.dtype)


def _noise_after(start: Tensor, schedule: Tensor, x: Tensor, seed: int) -> torch.Generator:
    """Return the noise of a sampler that begins at `start`, after the draws of samplers before it.

    Where `start` is no time of the schedule, the number of draws is unknown, so such a
    sampler gets a stream of its own.
    """
    done = int((schedule > start + _SAME_TIME).sum())
    if done and (schedule[done] - start).abs() > _SAME_TIME:
        return noise_stream(int(seed), f"rcm-renoise:{float(start):.6f}")
    stream = noise_stream(int(seed), "rcm-renoise")
    for _ in range(done):
        torch.randn(x.shape, generator=stream, dtype=torch.float32)
    return stream
