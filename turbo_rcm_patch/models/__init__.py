"""An example module: attention followed by the skip of a few-step model."""

from turbo_rcm_patch.models.rcm_attention import RCMAttention

__all__ = ["RCMAttention"]
