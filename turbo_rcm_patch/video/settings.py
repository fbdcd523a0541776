"""`Settings`: how a video is sampled, and the published few-step schedules.

A model folder may bring defaults (`turbo_rcm.json`). Importing this file needs no torch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, TypedDict, get_args

from turbo_rcm_patch.config import is_number
from turbo_rcm_patch.errors import ConfigError
from turbo_rcm_patch.files import read_json

_log = logging.getLogger(__name__)

SolverForm = Literal["sde", "ode"]
Sampler = Literal["scheduler", "rcm", "lightning", "fastwan", "self-forcing"]

#: Steps and guidance that Wan's own scheduler is usually run with.
WAN_OWN: Final = MappingProxyType({"steps": 50, "guidance_scale": 5.0})
#: The pipeline that FastVideo's distilled models name. It is Wan's with another sampler.
FASTWAN: Final = "WanDMDPipeline"
#: Settings that belong to a sampler: a folder's go when another sampler is chosen.
_OF_SAMPLER: Final = ("sampler", "steps", "guidance_scale", "sigma_max")


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and is_number(value) and math.isfinite(value)


_Rule = tuple[Callable[[Any], bool], str]
#: Names of settings -> whether a value is right, and what is expected.
_RULES: Final[Mapping[str, _Rule]] = {
    "sampler": (lambda x: x in get_args(Sampler), f"one of {get_args(Sampler)}"),
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
        times: Network times of the steps, of 1000.
        form: "sde" where its authors add noise after each step, else "ode".
    """

    times: tuple[float, ...]
    form: SolverForm = "sde"


def _shifted(shift: float, *times: float) -> tuple[float, ...]:
    """Shift network times of 1000, t <- shift t / (1 + (shift - 1) t) for t of 0 to 1."""
    return tuple(1000 * shift * t / (1000 + (shift - 1) * t) for t in times)


#: Schedules by name. rCM's is not among them, because its times depend on `sigma_max`.
SCHEDULES: Final = MappingProxyType(
    {
        # ModelTC/LightX2V, lightx2v/models/schedulers/wan/step_distill/scheduler.py:
        # `denoising_step_list` and `sample_shift` of its configurations for Wan 2.2, and the
        # Euler step of `Wan22StepDistillScheduler`. Run at 1000, 937.5, 833.3, 625.
        "lightning": Schedule(_shifted(5.0, 1000.0, 750.0, 500.0, 250.0), form="ode"),
        # hao-ai-lab/FastVideo, `DmdDenoisingStage`: `dmd_denoising_steps` are network times, with
        # sigma looked up at the nearest of them, so no shift is applied.
        "fastwan": Schedule((1000.0, 757.0, 522.0)),
        # guandeh17/Self-Forcing, configs/self_forcing_dmd.yaml: `denoising_step_list`, and
        # `warp_denoising_step` with `timestep_shift`. LightX2V's LoRAs for Wan 2.1
        # (`WanStepDistillScheduler`) step the same way. Run at 1000, 937.5, 833.3, 625.
        "self-forcing": Schedule(_shifted(5.0, 1000.0, 750.0, 500.0, 250.0)),
    }
)


def check_times(times: Sequence[float]) -> tuple[float, ...]:
    """Check network times of 1000, from the noisiest down, without the 0 at the end.

    Raises:
        ConfigError: They do not decrease, or are not in (0, 1000].
    """
    listed = list(times) if isinstance(times, Sequence) and not isinstance(times, str) else []
    numbers = all(is_number(time) and 0 < time <= 1000 for time in listed)
    if not listed or not numbers or sorted({*listed}, reverse=True) != listed:
        wrong_order = listed and numbers
        raise ConfigError(
            "times",
            expected="network times that decrease, in (0, 1000], such as 1000, 750, 500, 250",
            got=repr(times),
            remedy=f"Order them: {sorted({*listed}, reverse=True)}"
            if wrong_order
            else "Leave out the 0 at the end",
        )
    return tuple(map(float, listed))


class SettingsOptions(TypedDict, total=False):
    """The fields of `Settings` as keywords of `generate`, again because a type checker cannot read
    them from the dataclass."""

    sampler: Sampler | None
    steps: int | None
    sigma_max: float | None
    height: int | None
    width: int | None
    num_frames: int | None
    fps: int | None
    guidance_scale: float | None
    guidance_scale_2: float | None
    negative_prompt: str | None
    max_sequence_length: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of a generation but seed and what the video is made from.

    Attributes:
        sampler: "scheduler" is the pipeline's own. The others are for distilled models: "rcm" (1
            to 4 steps), and the schedules "lightning", "fastwan" and "self-forcing"
            (`SCHEDULES`).
        steps: Number of steps. Each calls the network once, under guidance twice.
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
        if self.sampler == "rcm":
            from turbo_rcm_patch.video.rcm_times import rcm_times  # imports torch

            rcm_times(self.steps, self.sigma_max)
            if self.guidance_scale > 1.0:
                expected = "1 with sampler='rcm', whose students have guidance distilled in"
                got, remedy = str(self.guidance_scale), "Use `sampler='scheduler'` for guidance"
                raise ConfigError("guidance_scale", expected=expected, got=got, remedy=remedy)
        elif self.sampler in SCHEDULES and self.steps != len(SCHEDULES[self.sampler].times):
            what = f"steps of sampler={self.sampler!r}"
            expected = f"{len(SCHEDULES[self.sampler].times)}, one for each of its times"
            raise ConfigError(what, expected=expected, got=str(self.steps), remedy="Leave it out")

    @property
    def few_steps(self) -> dict[str, Any] | None:
        """Arguments of `RCMScheduler`, or None for the pipeline's own scheduler."""
        if self.sampler == "scheduler":
            return None
        if self.sampler == "rcm":
            return {"sigma_max": self.sigma_max}
        schedule = SCHEDULES[self.sampler]
        return {"times": schedule.times, "sampler": schedule.form}

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
        sampler = chosen.get("sampler", usual)
        if sampler != usual:
            stored = {name: value for name, value in stored.items() if name not in _OF_SAMPLER}
        few_steps = {"steps": 4, "guidance_scale": 1.0}
        defaults = dict(with_scheduler) if sampler == "scheduler" else few_steps
        if isinstance(sampler, str) and sampler in SCHEDULES:
            defaults["steps"] = len(SCHEDULES[sampler].times)
        merged = defaults | stored | chosen | {"sampler": sampler}
        return replace(cls(), **merged)  # type: ignore[arg-type]

    def as_dict(self) -> dict[str, object]:
        """Fields by name, for JSON."""
        return asdict(self)


def folder_defaults(folder: str | Path | None) -> dict[str, object]:
    """Read the settings that a model folder brings along, empty if it brings none.

    Keys that are not settings (notes for other readers) are left out. A folder that names no
    sampler means rCM's if it has a `sigma_max`, or FastVideo's if its model_index.json names their
    pipeline for distilled models.
    """
    from turbo_rcm_patch.checkpoints.pipeline import stored_settings  # imports torch

    known = {field.name for field in fields(Settings)} - {"lora"}
    written = stored_settings(folder)
    if schedule := [name for name in ("times", "shift", "form") if name in written]:
        _log.warning(
            "%s: %s in turbo_rcm.json are not read: set pipe.scheduler = RCMScheduler(times=...)",
            folder,
            ", ".join(schedule),
        )
    stored = {name: it for name, it in written.items() if name in known}
    if "sampler" in stored or folder is None:
        return stored
    index = Path(folder) / "model_index.json"
    if "sigma_max" in stored:
        stored["sampler"] = "rcm"
    elif index.is_file() and read_json(index).get("_class_name") == FASTWAN:
        stored["sampler"] = "fastwan"
    return stored
