"""TurboRCM nodes for ComfyUI. Copy or link this folder into `ComfyUI/custom_nodes`."""

from .nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
