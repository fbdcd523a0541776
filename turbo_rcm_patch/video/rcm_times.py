"""The times of the rCM sampler, and the steps and the noise of every few-step sampler.

A rectified flow has x_t = (1 - t) x0 + t eps, and its network predicts v = eps - x0 at 1000 t.
This file needs torch alone, so that ComfyUI's nodes run without diffusers.
"""

from __future__ import annotations

import hashlib
import math
from typing import Final, Literal

import torch

from turbo_rcm_patch.boundary import RectifiedFlow, rectified_flow_time
from turbo_rcm_patch.errors import ConfigError

#: TrigFlow times between the first and the last, as the published few-step Wan models were
#: distilled.
MID_TIMES: Final = (1.5, 1.4, 1.0)
MAX_STEPS: Final = len(MID_TIMES) + 1


def rcm_times(steps: int, sigma_max: float = 80.0) -> torch.Tensor:
    """Compute the rectified-flow times of the rCM sampler (arXiv 2510.08431).

    Args:
        steps: Number of network calls, 1 to 4.
        sigma_max: Noise level of the first call (80; 200 for Wan 2.2 I2V).

    Returns:
        Times t from the noisiest down to exactly 0, fp64, [steps + 1].

    Raises:
        ConfigError: Another number of steps, or a `sigma_max` that is too small for it.
    """
    if not isinstance(steps, int) or not 1 <= steps <= MAX_STEPS:
        raise ConfigError(
            "steps of the rCM sampler",
            expected=f"a whole number from 1 to {MAX_STEPS}",
            got=repr(steps),
            remedy="Use `sampler='scheduler'` for a model that needs more steps",
        )
    first = math.atan(sigma_max)
    if steps > 1 and first <= MID_TIMES[0]:
        raise ConfigError(
            "sigma_max of the rCM sampler",
            expected=f"more than {math.tan(MID_TIMES[0]):.1f}, so that times decrease",
            got=repr(sigma_max),
            remedy="Use 80, the value the models were distilled with (200 for Wan 2.2 I2V)",
        )
    trig = torch.tensor([first, *MID_TIMES[: steps - 1], 0.0], dtype=torch.float64)
    return rectified_flow_time(trig)


def step_coefficients(times: torch.Tensor, sampler: Literal["sde", "ode"]) -> torch.Tensor:
    """Compute (c_skip, c_out, c_noise) of every step: x <- c_skip x + c_out v + c_noise eps.

    - "sde": the network's skip, then noise up to the next time,
      (1 - t') (x - t v) + t' eps;
    - "ode": x - (t - t') v, which adds none.

    Args:
        times: t from the noisiest down to 0, fp64, [steps + 1].
        sampler: "sde" or "ode".

    Returns:
        fp64, [steps, 3].
    """
    t, t_next = times[:-1], times[1:]
    if sampler == "ode":
        return torch.stack([torch.ones_like(t), t_next - t, torch.zeros_like(t)], dim=1)
    flow = RectifiedFlow()
    keep = 1 - t_next
    return torch.stack([keep * flow.c_skip(t), keep * flow.c_out(t), t_next], dim=1)


def noise_stream(seed: int, name: str) -> torch.Generator:
    """Return a CPU generator for one purpose of one seed, so that streams of the same seed never
    repeat each other.
    """
    digest = hashlib.blake2b(f"{name}:{seed}".encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
