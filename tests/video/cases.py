"""Pipelines of every kind that `generate` calls, as they are loaded, and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from PIL import Image

from tests.video.micro import (
    SMALL,
    chronoedit,
    micro_image_pipe,
    micro_pipe,
    micro_token_time_pipe,
    skyreels,
)
from tests.video.micro_cogvideox import micro_cogvideox
from turbo_rcm_patch.video.generation import settings_for
from turbo_rcm_patch.video.settings import Settings


def picture(shift: int = 0, size: int = 40) -> Image.Image:
    """Colours that differ from pixel to pixel; not of the videos' size."""
    ramp = torch.arange(size, dtype=torch.float32)
    red, green = torch.meshgrid(ramp, ramp + shift, indexing="ij")
    pixels = torch.stack([red * 6 % 256, green * 5 % 256, (red + green) * 3 % 256], -1)
    return Image.fromarray(pixels.to(torch.uint8).numpy(), "RGB")


IMAGE = {"image": picture()}
#: A pipeline in fp32, and what its videos are made from beside the prompt.
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "wan": (micro_pipe, {}),
    "cogvideox": (micro_cogvideox, {}),
    "cogvideox-1.5": (partial(micro_cogvideox, patch_t=2), {}),
    "wan-clip": (partial(micro_image_pipe, experts=False), IMAGE),
    "wan-two-experts": (partial(micro_image_pipe, experts=True), IMAGE),
    "wan-token-times": (partial(micro_token_time_pipe, image=True), IMAGE),
    "skyreels": (skyreels, {}),
    "chronoedit": (chronoedit, IMAGE),
    "cogvideox-image": (partial(micro_cogvideox, source="image"), IMAGE),
    "cogvideox-1.5-image": (partial(micro_cogvideox, source="image", patch_t=2), IMAGE),
}
_LOADED: dict[str, Any] = {}


def loaded(name: str, make: Callable[[], Any] | None = None) -> Any:
    """The pipeline of a case as it is loaded. Tests leave it as they found it."""
    if name not in _LOADED:
        pipe = (make or CASES[name][0])()
        for part in ("transformer", "transformer_2", "text_encoder"):
            if (module := getattr(pipe, part, None)) is not None:
                kept = getattr(module, "_keep_in_fp32_modules", None) or ()
                for key, x in (*module.named_parameters(), *module.named_buffers()):
                    if x.is_floating_point() and not any(one in key.split(".") for one in kept):
                        x.data = x.data.to(torch.bfloat16)
        pipe.set_progress_bar_config(disable=True)
        _LOADED[name] = pipe
    return _LOADED[name]


def settings_of(name: str, **more: Any) -> Settings:
    """Four steps of the pipeline's own scheduler; of nine frames, which 1.5 pads."""
    frames = {"num_frames": 9} if "1.5" in name else {}
    given = {"steps": 4, "sampler": "scheduler", "guidance_scale": 1.0, **SMALL, **frames}
    return settings_for(loaded(name), **given | more)
