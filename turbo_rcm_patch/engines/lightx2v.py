"""LightX2V: an attention "turbo_rcm_int8", computed by our kernels.

    import turbo_rcm_patch.engines.lightx2v  # before the pipeline is made
    pipe.create_generator(attn_mode="turbo_rcm_int8", ...)

In a configuration file it is the value of `self_attn_1_type` and its relatives.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from turbo_rcm_patch.engines import imports_of, say
from turbo_rcm_patch.engines.served import Served
from turbo_rcm_patch.errors import MaskError
from turbo_rcm_patch.ops.sageattn import sageattn_varlen

with imports_of("LightX2V", "commit f8aee98b"):
    from lightx2v.common.ops.attn.template import AttnWeightTemplate
    from lightx2v.utils.registry_factory import ATTN_WEIGHT_REGISTER

#: The name in LightX2V's registry.
NAME: Final = "turbo_rcm_int8"
SERVED: Final = Served("LightX2V")


@ATTN_WEIGHT_REGISTER(NAME)
class Attention(AttnWeightTemplate):  # type: ignore[misc]
    """An attention without weights, as LightX2V makes one for each layer."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}

    def apply(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Any = None,
        max_seqlen_q: Any = None,
        max_seqlen_kv: Any = None,
        **more: Any,
    ) -> Tensor:
        """Compute the attention of q [Nq, H, D] or [B, Nq, H, D] over k and v.

        Several sequences that are packed into one are those that cu_seqlens names.

        Returns:
            [Nq, H*D] or [B*Nq, H*D].

        Raises:
            MaskError: A mask, or dropout.
        """
        if more.get("attn_mask") is not None or more.get("drop_rate") or more.get("dropout_p"):
            raise MaskError(
                f"attention {NAME!r} of LightX2V", expected="no mask and no dropout",
                got=", ".join(name for name, value in more.items() if value is not None),
                remedy='Use attn_mode="torch_sdpa" for this layer',
            )  # fmt: skip
        causal, scale = bool(more.get("causal")), more.get("softmax_scale", more.get("sm_scale"))
        if q.dim() == 3 and cu_seqlens_q is not None and len(cu_seqlens_q) > 2:
            SERVED.count(q[None, :max_seqlen_q], k[None, :max_seqlen_kv], "NHD")
            return sageattn_varlen(
                q, k, v, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv,
                is_causal=causal, sm_scale=scale,
            ).flatten(1)  # fmt: skip
        q, k, v = (x if x.dim() == 4 else x[None] for x in (q, k, v))
        out: Any = SERVED.attend(q, k, v, "NHD", causal, scale)
        rows: Tensor = out.flatten(2).flatten(0, 1)
        return rows

    def apply_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute `apply` for one block of keys, and its logsumexp as [tokens, H]."""
        q, k, v = (x if x.dim() == 4 else x[None] for x in (q, k, v))
        result: Any = SERVED.attend(q, k, v, "NHD", False, softmax_scale, True)
        out, lse = result
        return out.flatten(2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)


say(f"LightX2V: the attention {NAME!r} is that of turbo_rcm_patch")
