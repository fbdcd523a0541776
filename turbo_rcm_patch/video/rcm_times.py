"""Times and noise of few-step samplers: rCM, Lightning, FastWan, Self-Forcing, or a list.

A rectified flow has x_t = (1 - t) x0 + t eps, and its network predicts v = eps - x0 at 1000 t.
This file needs torch alone, so that ComfyUI's nodes run without diffusers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

import torch

from turbo_rcm_patch.boundary import RectifiedFlow, rectified_flow_time
from turbo_rcm_patch.config import is_number
from turbo_rcm_patch.errors import ConfigError

#: TrigFlow times between the first and the last, as the published few-step Wan models were
#: distilled.
MID_TIMES: Final = (1.5, 1.4, 1.0)
MAX_STEPS: Final = len(MID_TIMES) + 1

Form = Literal["sde", "ode"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A published few-step schedule.

    Attributes:
        times: Network times of the steps, of 1000, before the shift.
        shift: The shift that it was trained with.
        form: "sde" where its authors add noise after each step, else "ode".
    """

    times: tuple[float, ...]
    shift: float = 1.0
    form: Form = "sde"


#: Schedules by name. rCM's is not among them, because its times depend on `sigma_max`.
SCHEDULES: Final = MappingProxyType(
    {
        # ModelTC/LightX2V, lightx2v/models/schedulers/wan/step_distill/scheduler.py:
        # `denoising_step_list` and `sample_shift` of its configurations for Wan 2.2, and the
        # Euler step of `Wan22StepDistillScheduler`. Run at 1000, 937.5, 833.3, 625.
        "lightning": Schedule((1000.0, 750.0, 500.0, 250.0), shift=5.0, form="ode"),
        # hao-ai-lab/FastVideo, `DmdDenoisingStage`: `dmd_denoising_steps` are network times, with
        # sigma looked up at the nearest of them, so no shift is applied.
        "fastwan": Schedule((1000.0, 757.0, 522.0)),
        # guandeh17/Self-Forcing, configs/self_forcing_dmd.yaml: `denoising_step_list`, and
        # `warp_denoising_step` with `timestep_shift`. LightX2V's LoRAs for Wan 2.1
        # (`WanStepDistillScheduler`) step the same way. Run at 1000, 937.5, 833.3, 625.
        "self-forcing": Schedule((1000.0, 750.0, 500.0, 250.0), shift=5.0),
    }
)


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
            remedy="Use sampler='scheduler' for a model that needs more steps than an rCM student",
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


def shifted(times: Sequence[float], shift: float = 1.0) -> tuple[float, ...]:
    """Check network times and shift them, t <- shift t / (1 + (shift - 1) t) for t of 0 to 1.

    Args:
        times: Of 1000, from the noisiest down, without the 0 at the end.
        shift: 1 keeps them; more moves them towards noise.

    Returns:
        The network times of the steps, of 1000.

    Raises:
        ConfigError: They do not decrease, are not in (0, 1000], or the shift is not positive.
    """
    given = list(times) if isinstance(times, Sequence) and not isinstance(times, str) else []
    numbers = all(is_number(time) and 0 < time <= 1000 for time in given)
    if not given or not numbers or sorted({*given}, reverse=True) != given:
        raise ConfigError(
            "times",
            expected="network times that decrease, in (0, 1000], such as 1000, 750, 500, 250",
            got=repr(times),
            remedy="Leave out the 0 at the end",
        )
    if not is_number(shift) or not 0 < shift < math.inf:
        raise ConfigError("shift", expected="a positive number", got=repr(shift))
    return tuple(1000 * shift * t / (1000 + (shift - 1) * t) for t in map(float, given))


def step_coefficients(times: torch.Tensor, sampler: Form) -> torch.Tensor:
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
