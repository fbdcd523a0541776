"""`Settings`: what is generated and how. A model folder may bring defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, get_args

from turbo_rcm_patch.errors import ConfigError

Sampler = Literal["rcm", "scheduler"]

#: What Wan's own scheduler is usually run with.
WAN_OWN: Final = MappingProxyType({"steps": 50, "guidance_scale": 5.0})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of a generation but seed and what the video is made from.

    Attributes:
        sampler: "rcm" (1 to 4 steps of a distilled model) or "scheduler" (the pipeline's own).
        steps: Number of network calls (two per step under guidance).
        strength: How much of a given video is made anew: the last `strength * steps` steps run.
            None where no video is given, or for all of them.
        form: "sde" or "ode" of the rCM sampler.
        sigma_max: First noise level of the rCM sampler.
        height: Height in pixels.
        width: Width in pixels.
        num_frames: Number of frames; num_frames - 1 must be a multiple of the VAE's temporal
            factor.
        fps: Frames per second of the mp4.
        guidance_scale: Classifier-free guidance; 1 switches it off. rCM models need none.
        guidance_scale_2: The same for the low-noise expert of Wan 2.2; None takes
            `guidance_scale`.
        negative_prompt: Used under guidance only.
        max_sequence_length: Largest number of prompt tokens.
    """

    sampler: Sampler = "rcm"
    steps: int = 4
    strength: float | None = None
    form: Literal["sde", "ode"] = "sde"
    sigma_max: float = 80.0
    height: int = 480
    width: int = 832
    num_frames: int = 81
    fps: int = 16
    guidance_scale: float = 1.0
    guidance_scale_2: float | None = None
    negative_prompt: str = ""
    max_sequence_length: int = 512

    def __post_init__(self) -> None:
        if self.sampler not in get_args(Sampler):
            raise ConfigError("sampler", expected="'rcm' or 'scheduler'", got=repr(self.sampler))
        if self.form not in ("sde", "ode"):
            raise ConfigError("form", expected="'sde' or 'ode'", got=repr(self.form))
        for name in ("steps", "height", "width", "num_frames", "fps", "max_sequence_length"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(name, expected="a positive whole number", got=repr(value))
        for name in ("sigma_max", "guidance_scale", "guidance_scale_2"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (number and math.isfinite(value)) and (name, value) != (
                "guidance_scale_2",
                None,
            ):
                raise ConfigError(name, expected="a finite number", got=repr(value))
        strength = self.strength
        if strength is not None and not (
            isinstance(strength, (int, float)) and 0 < strength <= 1 and self.steps_run
        ):
            raise ConfigError(
                "strength",
                expected="more than 0 and at most 1, and at least one step when times steps",
                got=f"{strength!r} with {self.steps} steps",
                remedy="Raise strength or steps",
            )
        if not isinstance(self.negative_prompt, str):
            raise ConfigError("negative_prompt", expected="a text", got=repr(self.negative_prompt))
        for name in ("height", "width"):
            if getattr(self, name) % 16:
                value = getattr(self, name)
                raise ConfigError(
                    name,
                    expected="a multiple of 16",
                    got=str(value),
                    remedy=f"Try {max(16, round(value / 16) * 16)}",
                )
        if self.sampler == "rcm":
            from turbo_rcm_patch.video.rcm_times import rcm_times

            rcm_times(self.steps, self.sigma_max)
            if self.guidance_scale > 1.0:
                raise ConfigError(
                    "guidance_scale",
                    expected="1 with sampler='rcm', whose students have guidance distilled in",
                    got=str(self.guidance_scale),
                    remedy="Use sampler='scheduler' for guidance",
                )

    @property
    def steps_run(self) -> int:
        """How many of the steps run."""
        return self.steps if self.strength is None else int(self.steps * self.strength)

    @classmethod
    def for_model(
        cls,
        folder: str | Path | None,
        family: Mapping[str, object] = MappingProxyType({}),
        own: Mapping[str, object] = WAN_OWN,
        /,
        **given: object,
    ) -> Settings:
        """Settings for a model: what is given, else what its folder says, else the defaults of its
        family and of the sampler.

        Args:
            folder: The model's folder, or None or a hub id for a model without one.
            family: Defaults of the model's family.
            own: What the pipeline's own scheduler is run with; by default what Wan's is.
            **given: Fields of this class; None means "not given".
        """
        known = {field.name for field in fields(cls)}
        chosen = {name: value for name, value in given.items() if value is not None}
        if unknown := sorted(chosen.keys() - known):
            raise ConfigError(f"setting {unknown[0]!r}", expected=f"one of {sorted(known)}")
        defaults = dict(family) | folder_defaults(folder)
        usual = defaults.get("sampler", "rcm")
        if chosen.get("sampler", usual) == "scheduler":
            # A folder's steps and guidance belong to the sampler it names.
            if usual != "scheduler":
                defaults = {k: v for k, v in defaults.items() if k not in own}
            defaults = dict(own) | defaults
        return replace(cls(), **(defaults | chosen))  # type: ignore[arg-type]

    def as_dict(self) -> dict[str, object]:
        """Fields by name, for JSON."""
        return asdict(self)


def folder_defaults(folder: str | Path | None) -> dict[str, object]:
    """The settings that a model folder brings along, empty if it brings none.

    Keys that are not settings (notes for other readers) are left out.
    """
    from turbo_rcm_patch.turbodiffusion.pipeline import stored_settings  # imports torch

    known = {field.name for field in fields(Settings)}
    return {name: value for name, value in stored_settings(folder).items() if name in known}
