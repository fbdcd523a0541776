"""Rectified flow, x_t = (1 - t) x0 + t noise, v = noise - x0: sampling teacher and student."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

ODE_SHIFT: Final = 3.0

# (x_t [B, C, F, H, W], t [B]) -> velocity of x_t's shape
Velocity = Callable[[Tensor, Tensor], Tensor]


def shifted(u: Tensor) -> Tensor:
    """Move times towards the noise: s * u / (1 + (s - 1) * u)."""
    return ODE_SHIFT * u / (1 + (ODE_SHIFT - 1) * u)


def sample_times(count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Training times [count] fp32: logit-normal, shifted towards the noise, one in ten uniform."""
    normal = torch.randn(count, generator=generator, device=device).sigmoid()
    uniform = torch.rand(2, count, generator=generator, device=device)
    return torch.where(uniform[0] < 0.1, uniform[1], shifted(normal)).clamp(1e-3, 1.0)


def guided(conditional: Velocity, unconditional: Velocity, weight: float) -> Velocity:
    """Classifier-free guidance where the structure is decided (t > 0.6); later it saturates."""

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        v = conditional(x, t)
        if float(t[0]) <= 0.6:
            return v
        free = unconditional(x, t)
        return free + weight * (v - free)

    return velocity


def ode(velocity: Velocity, x: Tensor, start: float, steps: int) -> Tensor:
    """Integrate from `start` to 0, of second order at one network call a step (Adams-Bashforth).

    Args:
        velocity: The flow.
        x: State at `start`, fp32.
        start: Rectified-flow time; 1 is pure noise.
        steps: Network calls.
    """
    u_start = start / (ODE_SHIFT - (ODE_SHIFT - 1) * start)
    times = shifted(torch.linspace(u_start, 0, steps + 1, dtype=torch.float64)).tolist()
    previous: tuple[Tensor, float] | None = None
    for t, following in zip(times[:-1], times[1:], strict=True):
        v = velocity(x, torch.full((len(x),), t, device=x.device)).float()
        delta = following - t
        slope = v if previous is None else v + (v - previous[0]) * (delta / (2 * previous[1]))
        x = x + delta * slope
        previous = v, delta
    return x


def few_step(
    velocity: Velocity,
    noise: Tensor,
    times: Sequence[float],
    generator: torch.Generator | None,
    *,
    renoise: bool = True,
) -> Tensor:
    """A few-step sampler: jump to x0, go back to the next time, jump again.

    Args:
        velocity: The student.
        noise: [B, C, F, H, W] fp32 standard normal.
        times: From the noisiest down; where the last one is not 0, the result is a state there.
        generator: Source of the re-noising, on noise's device.
        renoise: Go back with fresh noise (the rCM sampler), or with the noise that the student
            finds in the state, which follows the flow (DDIM).
    """
    x = noise * times[0]
    for t, following in zip(times[:-1], times[1:], strict=True):
        v = velocity(x, torch.full((len(x),), t, device=x.device)).float()
        if not renoise:
            x = x - (t - following) * v
            continue
        x = x - t * v
        if following > 0:
            fresh = torch.randn(x.shape, generator=generator, device=x.device)
            x = (1 - following) * x + following * fresh
    return x
