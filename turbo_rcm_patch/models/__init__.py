"""Attention followed by an rCM skip, as modules: two passes in plain torch, or one fused
operation."""

from turbo_rcm_patch.models.rcm_attention import FusedRCMAttention, RCMAttention

__all__ = ["FusedRCMAttention", "RCMAttention"]
