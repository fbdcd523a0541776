"""vllm-omni's diffusion engine: its backend SAGE_ATTN, computed by our kernels.

`plugins.vllm_omni` registers `Backend`.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from turbo_rcm_patch.engines import imports_of
from turbo_rcm_patch.engines.plugins import HEAD_SIZES
from turbo_rcm_patch.engines.served import Served
from turbo_rcm_patch.ops.sageattn import MASK

with imports_of("vllm-omni", "vllm-omni 0.30"):
    from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl

SERVED: Final = Served("vllm-omni")


class Impl(SDPAImpl):  # type: ignore[misc]
    """Attention of a layer. One with a mask is vllm-omni's own exact attention."""

    def forward_cuda(
        self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: Any = None
    ) -> Any:
        """Compute the attention of query [B, Nq, H, D] over key and value [B, Nk, Hk, D]."""
        if attn_metadata is not None and attn_metadata.attn_mask is not None:
            SERVED.count(query, key, "NHD", MASK)
            return super().forward_cuda(query, key, value, attn_metadata)
        return SERVED.attend(query, key, value, "NHD", self.causal, self.softmax_scale)


class Backend(SDPABackend):  # type: ignore[misc]
    """What vllm-omni's selector returns for SAGE_ATTN. It takes masks, as its base does."""

    @staticmethod
    def get_name() -> str:
        return "SAGE_ATTN"

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        return list(HEAD_SIZES)

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl
