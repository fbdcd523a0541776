"""xDiT: its backend SAGE, computed by our kernels.

import turbo_rcm_patch.engines.xdit  # in the script that torchrun starts
... --attention_backend SAGE

"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from turbo_rcm_patch.engines import imports_of, say
from turbo_rcm_patch.engines.served import Served
from turbo_rcm_patch.errors import MaskError
from turbo_rcm_patch.ops.sageattn import MASK, sageattn_varlen

with imports_of("xDiT", "xfuser 0.7.0"):
    from xfuser.core.distributed import attention_backend as backends
    from xfuser.core.distributed import get_ring_parallel_world_size
    from xfuser.envs import PACKAGES_CHECKER

SERVED: Final = Served("xDiT")


@backends.register_attention_function(backends.AttentionBackendType.SAGE)  # type: ignore[untyped-decorator]
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of query [B, H, Nq, D] over key and value [B, Hk, Nk, D].

    Keys that `indices_k` names are served. An `attn_mask` is xDiT's own exact attention. In a ring
    neither is.

    Returns:
        The attention, and in a ring its logsumexp [B, H, Nq] fp32, else None.

    Raises:
        MaskError: Dropout, or a mask in a ring.
    """
    options, ring = attention_kwargs or {}, get_ring_parallel_world_size() > 1
    masked = options.get("attn_mask") is not None
    packed = backends._varlen_pack_keys(
        *(x.transpose(1, 2) for x in (query, key, value)), attention_kwargs
    )
    if dropout_p or (ring and (masked or packed is not None)):
        raise MaskError(
            "attention of xDiT's backend SAGE", expected="no dropout, and no mask in a ring",
            got=f"dropout_p={dropout_p}, a mask: {masked or packed is not None}",
            remedy="Use --ulysses_degree for a mask, or another --attention_backend",
        )  # fmt: skip
    if packed is not None:
        SERVED.count(query, key, "HND")
        q, k, v, bounds_q, bounds_k, longest, batch, n_q, heads, dim = packed
        out = sageattn_varlen(q, k, v, bounds_q, bounds_k, n_q, longest, is_causal)
        return out.view(batch, n_q, heads, dim).transpose(1, 2), None
    if masked:
        SERVED.count(query, key, "HND", MASK)
        exact = backends.ATTENTION_FUNCTION_REGISTRY[backends.AttentionBackendType.SDPA]
        masked_out: Tensor = exact(query, key, value, dropout_p, is_causal, attention_kwargs)[0]
        return masked_out, None
    result = SERVED.attend(query, key, value, "HND", is_causal, None, ring)
    return result if isinstance(result, tuple) else (result, None)


# xDiT looks for the package `sageattention` when it starts, and refuses the backend without it.
PACKAGES_CHECKER.get_packages_info()["has_sage"] = True
say("xDiT: --attention_backend SAGE runs the attention of turbo_rcm_patch")
