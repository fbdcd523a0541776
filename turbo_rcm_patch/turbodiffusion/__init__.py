"""Convert TurboDiffusion's checkpoints to diffusers folders and back.

A converted folder has diffusers' format, so stock classes load it. They have no place for SLA's
`proj_l` and int8 weights; these are in `EXTRA_FILE` beside the weights, which `load_extra`
attaches.
"""

from __future__ import annotations

from turbo_rcm_patch.patching.sla import PROJ_L
from turbo_rcm_patch.turbodiffusion.extra import Extra, load_extra, unload_extra
from turbo_rcm_patch.turbodiffusion.extra_file import EXTRA_FILE
from turbo_rcm_patch.turbodiffusion.folder import Written, write_checkpoint, write_transformer
from turbo_rcm_patch.turbodiffusion.keys import Sizes
from turbo_rcm_patch.turbodiffusion.read import Checkpoint, read_checkpoint

__all__ = [
    "EXTRA_FILE",
    "PROJ_L",
    "Checkpoint",
    "Extra",
    "Sizes",
    "Written",
    "load_extra",
    "read_checkpoint",
    "unload_extra",
    "write_checkpoint",
    "write_transformer",
]
