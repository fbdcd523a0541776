"""TurboDiffusion's inference scripts on diffusers' pipelines: what both examples are made of.

`examples/turbowan_t2v.py` and `examples/turbowan_i2v.py` take the arguments of its scripts and
draw the same noise from the same seeds.
"""

from __future__ import annotations

from turbo_rcm_patch.sampling.turbowan.arguments import (
    base_of,
    frame_size,
    image_to_video_parser,
    parse,
    patch_config,
    run,
    text_to_video_parser,
)
from turbo_rcm_patch.sampling.turbowan.image import adapted_size, read_image
from turbo_rcm_patch.sampling.turbowan.models import (
    load,
    transformer_folder,
    transformer_folders,
)
from turbo_rcm_patch.sampling.turbowan.sampling import (
    FPS,
    boundary_ratio,
    decode,
    sample,
    write_video,
)
from turbo_rcm_patch.sampling.turbowan.serving import requests, serve

__all__ = [
    "FPS",
    "adapted_size",
    "base_of",
    "boundary_ratio",
    "decode",
    "frame_size",
    "image_to_video_parser",
    "load",
    "parse",
    "patch_config",
    "read_image",
    "requests",
    "run",
    "sample",
    "serve",
    "text_to_video_parser",
    "transformer_folder",
    "transformer_folders",
    "write_video",
]
