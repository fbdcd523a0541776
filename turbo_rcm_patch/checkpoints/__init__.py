"""Convert TurboDiffusion's checkpoints to diffusers folders.

A converted folder has diffusers' format, so stock classes load it. They have no place for SLA's
`proj_l`; these are in `EXTRA_FILE` beside the weights, which `load_extra` attaches.
"""

from __future__ import annotations

from turbo_rcm_patch.checkpoints.convert import convert_pipeline
from turbo_rcm_patch.checkpoints.extra import Extra, load_extra, unload_extra
from turbo_rcm_patch.checkpoints.extra_file import EXTRA_FILE
from turbo_rcm_patch.checkpoints.folder import Written, write_transformer
from turbo_rcm_patch.checkpoints.int8_folder import load_int8_only
from turbo_rcm_patch.checkpoints.keys import Sizes
from turbo_rcm_patch.checkpoints.read import Checkpoint, read_checkpoint
from turbo_rcm_patch.patching.sla import PROJ_L

__all__ = [
    "EXTRA_FILE",
    "PROJ_L",
    "Checkpoint",
    "Extra",
    "Sizes",
    "Written",
    "convert_pipeline",
    "load_extra",
    "load_int8_only",
    "read_checkpoint",
    "unload_extra",
    "write_transformer",
]
