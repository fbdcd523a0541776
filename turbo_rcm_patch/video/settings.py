"""`Settings`: how a video is sampled, and the published few-step schedules.

A model folder may bring defaults (`turbo_rcm.json`). Importing this file needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

from turbo_rcm_patch.config import is_number
from turbo_rcm_patch.errors import ConfigError
from turbo_rcm_patch.files import read_json

SolverForm = Literal["sde", "ode"]
Sampler = Literal["scheduler", "rcm", "lightning", "fastwan", "self-forcing", "times"]

#: Steps and guidance that Wan's own scheduler is usually run with.
WAN_OWN: Final = MappingProxyType({"steps": 50, "guidance_scale": 5.0})
#: The pipeline that FastVideo's distilled models name. It is Wan's with another sampler.
FASTWAN: Final = "WanDMDPipeline"
#: Settings that belong to a sampler: a folder's go when another sampler is chosen.
_OF_SAMPLER: Final = ("sampler", "steps", "guidance_scale", "sigma_max", "times", "shift", "form")


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and is_number(value) and math.isfinite(value)


_Rule = tuple[Callable[[Any], bool], str]
#: Names of settings -> whether a value is right, and what is expected.
_RULES: Final[Mapping[str, _Rule]] = {
    "sampler": (lambda x: x in get_args(Sampler), f"one of {get_args(Sampler)}"),
    "form": (lambda x: x in (*get_args(SolverForm), None), f"one of {get_args(SolverForm)}"),
    "steps": (lambda x: type(x) is int and 0 < x <= 1000, "a whole number from 1 to 1000"),
    "height width num_frames fps max_sequence_length": (
        lambda x: type(x) is int and x > 0,
        "a positive whole number",
    ),
    "guidance_scale_2": (lambda x: x is None or _is_finite(x), "a finite number or None"),
    "sigma_max guidance_scale": (_is_finite, "a finite number"),
    "negative_prompt": (lambda x: isinstance(x, str), "a text"),
}


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
    form: SolverForm = "sde"


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
    listed = list(times) if isinstance(times, Sequence) and not isinstance(times, str) else []
    numbers = all(is_number(time) and 0 < time <= 1000 for time in listed)
    if not listed or not numbers or sorted({*listed}, reverse=True) != listed:
        raise ConfigError(
            "times",
            expected="network times that decrease, in (0, 1000], such as 1000, 750, 500, 250",
            got=repr(times),
            remedy="Leave out the 0 at the end",
        )
    if not is_number(shift) or not 0 < shift < math.inf:
        raise ConfigError("shift", expected="a positive number", got=repr(shift))
    return tuple(1000 * shift * t / (1000 + (shift - 1) * t) for t in map(float, listed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of a generation but seed and what the video is made from.

    Attributes:
        sampler: "scheduler" is the pipeline's own. The others are for distilled models: "rcm" (1
            to 4 steps), the schedules "lightning", "fastwan" and "self-forcing"
            (`SCHEDULES`), or "times".
        steps: Number of steps. Each calls the network once, under guidance twice.
        times: Network times of the steps, of 1000, from the noisiest down. Giving them chooses
            sampler="times".
        shift: Shift of `times`, or of a named schedule in place of its own.
        form: "sde" adds noise after each step of a few-step sampler, "ode" adds none. By default
            the schedule's own, "sde" for "rcm" and "times".
        sigma_max: First noise level of the rCM sampler.
        height: Height in pixels.
        width: Width in pixels.
        num_frames: Number of frames. Where num_frames - 1 is no multiple of the VAE's temporal
            factor, the VAE makes fewer.
        fps: Frames per second of the mp4.
        guidance_scale: Classifier-free guidance; 1 switches it off. Distilled models need none.
        guidance_scale_2: The same for the low-noise expert of Wan 2.2; by default
            `guidance_scale`.
        negative_prompt: Used under guidance only.
        max_sequence_length: Largest number of prompt tokens.
        lora: The LoRAs of the pipeline, each with its scale and a digest of its weights. For the
            record: `settings_for` reads them off the pipeline, and loads none.
    """

    sampler: Sampler = "scheduler"
    steps: int = 50
    times: tuple[float, ...] | None = None
    shift: float | None = None
    form: SolverForm | None = None
    sigma_max: float = 80.0
    height: int = 480
    width: int = 832
    num_frames: int = 81
    fps: int = 16
    guidance_scale: float = 5.0
    guidance_scale_2: float | None = None
    negative_prompt: str = ""
    max_sequence_length: int = 512
    lora: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for names, (right, expected) in _RULES.items():
            for name in names.split():
                if not right(value := getattr(self, name)):
                    raise ConfigError(name, expected=expected, got=repr(value))
        for name in ("height", "width"):
            if (value := getattr(self, name)) % 16:
                near = f"Try {max(16, round(value / 16) * 16)}"
                raise ConfigError(name, expected="a multiple of 16", got=str(value), remedy=near)
        for name in ("times", "lora"):  # JSON has lists.
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        self._check_few_steps()

    def _check_few_steps(self) -> None:
        sampler = f"sampler={self.sampler!r}"
        if (self.times is not None) != (self.sampler == "times"):
            expected = f"{'some' if self.times is None else 'none'} with {sampler}"
            remedy = "Give times=[...] and sampler='times' together, or neither"
            raise ConfigError("times", expected=expected, got=repr(self.times), remedy=remedy)
        if self.shift is not None and self.sampler not in (*SCHEDULES, "times"):
            remedy = f"It shifts the times of {', '.join(SCHEDULES)} and of times=[...]"
            got = repr(self.shift)
            raise ConfigError("shift", expected=f"none with {sampler}", got=got, remedy=remedy)
        if self.sampler == "rcm":
            from turbo_rcm_patch.video.rcm_times import rcm_times  # imports torch

            rcm_times(self.steps, self.sigma_max)
            if self.guidance_scale > 1.0:
                expected = "1 with sampler='rcm', whose students have guidance distilled in"
                got, remedy = str(self.guidance_scale), "Use sampler='scheduler' for guidance"
                raise ConfigError("guidance_scale", expected=expected, got=got, remedy=remedy)
        elif self.few_steps is not None and self.steps != len(self.few_steps["times"]):
            expected = f"{len(self.few_steps['times'])}, one for each of its times"
            got, remedy = str(self.steps), "Leave steps out, or give other times"
            raise ConfigError(f"steps of {sampler}", expected=expected, got=got, remedy=remedy)

    @property
    def few_steps(self) -> dict[str, Any] | None:
        """Arguments of `RCMScheduler`, or None for the pipeline's own scheduler."""
        if self.sampler == "scheduler":
            return None
        if self.sampler == "rcm":
            return {"sigma_max": self.sigma_max, "sampler": self.form or "sde"}
        known = SCHEDULES.get(self.sampler) or Schedule(self.times or ())
        times = shifted(known.times, known.shift if self.shift is None else self.shift)
        return {"times": times, "sampler": self.form or known.form}

    @classmethod
    def for_model(
        cls,
        folder: str | Path | None,
        family: Mapping[str, object] = MappingProxyType({}),
        with_scheduler: Mapping[str, object] = WAN_OWN,
        /,
        **given: object,
    ) -> Settings:
        """Return the settings for a model: what is given, else what its folder says, else the
        defaults of the sampler and of the model's family.

        Args:
            folder: The model's folder, or None or a hub id for a model without one.
            family: Defaults of the model's family, or of the pipeline; a folder's come before.
            with_scheduler: Steps and guidance for the pipeline's own scheduler; by default Wan's.
            **given: Fields of this class; None means "not given".

        Raises:
            ConfigError: A field does not exist, or has a value that it cannot have.
        """
        known = {field.name for field in fields(cls)}
        chosen = {name: value for name, value in given.items() if value is not None}
        if unknown := sorted(chosen.keys() - known):
            raise ConfigError(f"setting {unknown[0]!r}", expected=f"one of {sorted(known)}")
        stored = dict(family) | folder_defaults(folder)
        usual = stored.get("sampler", "scheduler")
        sampler = chosen.get("sampler", "times" if "times" in chosen else usual)
        if sampler != usual or "times" in chosen:
            stored = {name: value for name, value in stored.items() if name not in _OF_SAMPLER}
        few_steps = {"steps": 4, "guidance_scale": 1.0}
        defaults = dict(with_scheduler) if sampler == "scheduler" else few_steps
        times: Any = chosen.get("times", stored.get("times"))
        if isinstance(sampler, str) and sampler in SCHEDULES:
            times = SCHEDULES[sampler].times
        if isinstance(times, (list, tuple)) and times:
            defaults["steps"] = len(times)
        merged = defaults | stored | chosen | {"sampler": sampler}
        return replace(cls(), **merged)  # type: ignore[arg-type]

    def as_dict(self) -> dict[str, object]:
        """Fields by name, for JSON."""
        return asdict(self)


def folder_defaults(folder: str | Path | None) -> dict[str, object]:
    """Read the settings that a model folder brings along, empty if it brings none.

    Keys that are not settings (notes for other readers) are left out. A folder that names no
    sampler means a few-step one if it has a `sigma_max` or `times`, or if its model_index.json
    names FastVideo's pipeline for distilled models.
    """
    from turbo_rcm_patch.checkpoints.pipeline import stored_settings  # imports torch

    known = {field.name for field in fields(Settings)} - {"lora"}
    stored = {name: value for name, value in stored_settings(folder).items() if name in known}
    if "sampler" in stored or folder is None:
        return stored
    index = Path(folder) / "model_index.json"
    if "times" in stored or "sigma_max" in stored:
        stored["sampler"] = "times" if "times" in stored else "rcm"
    elif index.is_file() and read_json(index).get("_class_name") == FASTWAN:
        stored["sampler"] = "fastwan"
    return stored
