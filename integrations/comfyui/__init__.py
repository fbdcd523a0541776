"""TurboRCM nodes for ComfyUI. Copy or link this folder into `ComfyUI/custom_nodes`."""

import sys
from importlib.util import find_spec

if find_spec("turbo_rcm_patch") is None:
    raise ImportError(
        "TurboRCM's nodes need turbo_rcm_patch in ComfyUI's own Python: "
        f'"{sys.executable}" -m pip install PATH_OF_ITS_REPOSITORY'
    )

from .nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
