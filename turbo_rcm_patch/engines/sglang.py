"""SGLang's diffusion engine: its backend SAGE_ATTN, computed by our kernels.

`plugins.sglang` names `Backend` to SGLang.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from turbo_rcm_patch.engines import imports_of
from turbo_rcm_patch.engines.plugins import HEAD_SIZES
from turbo_rcm_patch.engines.served import Served

with imports_of("SGLang", "sglang 0.5.23"):
    from sglang.multimodal_gen.runtime.layers.attention.backends.sage_attn import (
        SageAttentionBackend,
        SageAttentionImpl,
    )

SERVED: Final = Served("SGLang")


class Impl(SageAttentionImpl):  # type: ignore[misc]
    """Attention of a layer. Packed sequences come through `forward_varlen` of the base, which
    calls `forward` for each; masks go to SGLang's own attention before they come here."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_metadata: Any,
        *,
        return_softmax_lse: bool = False,
    ) -> Any:
        """Compute the attention of query [B, Nq, H, D] over key and value [B, Nk, Hk, D].

        Returns:
            [B, Nq, H, D]; with return_softmax_lse also the logsumexp [B, H, Nq] fp32.
        """
        return SERVED.attend(
            query, key, value, "NHD", self.causal, self.softmax_scale, return_softmax_lse
        )


class Backend(SageAttentionBackend):  # type: ignore[misc]
    """What SGLang's selector returns for SAGE_ATTN."""

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        return list(HEAD_SIZES)

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl
