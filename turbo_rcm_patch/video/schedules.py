"""Published few-step schedules: Lightning, FastWan, Self-Forcing. This file needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from turbo_rcm_patch.config import is_number
from turbo_rcm_patch.errors import ConfigError

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


def shifted(times: Sequence[float], shift: float = 1.0) -> tuple[float, ...]:
    """Check network times and shift them, t <- shift t / (1 + (shift - 1) t) for t of 0 to 1.

    Args:
        times: Network times of 1000, from the noisiest down, without the 0 at the end.
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
