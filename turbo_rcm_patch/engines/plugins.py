"""The entry points that SGLang and vllm-omni load in every worker (`pyproject.toml`).

Both are loaded wherever this package is installed, so they import nothing of an engine and change
nothing unless `TURBO_RCM_PATCH=1` is set. Then the engine's own switch decides: its backend
SAGE_ATTN runs our attention.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from turbo_rcm_patch.engines import STAND_IN, say, switched_on
from turbo_rcm_patch.errors import ConfigError

#: Head sizes that `sageattn` takes.
HEAD_SIZES = range(1, 257)


def sglang() -> None:
    """Let the backend SAGE_ATTN of SGLang's diffusion engine be ours."""
    if not switched_on():
        return
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

    platform = "sglang.multimodal_gen.runtime.platforms.cuda.CudaPlatformBase"
    HookRegistry.register(f"{platform}.get_attn_backend_cls_str", _choose, HookType.AROUND)
    say("SGLang: --attention-backend sage_attn runs the attention of turbo_rcm_patch")


def _choose(
    original: Callable[..., str], cls: type, selected_backend: Any, head_size: int, dtype: Any
) -> str:
    """Return the name of the class for a backend, around SGLang's function."""
    if getattr(selected_backend, "name", None) != "SAGE_ATTN":
        return original(cls, selected_backend, head_size, dtype)
    if head_size not in HEAD_SIZES:  # SGLang's selector takes a ValueError and looks further
        raise ConfigError(
            "head_size of SGLang's SAGE_ATTN", expected="at most 256", got=str(head_size),
            remedy="Choose another --attention-backend",
        )  # fmt: skip
    return "turbo_rcm_patch.engines.sglang.Backend"


def vllm_omni() -> None:
    """Let the backend SAGE_ATTN of vllm-omni's diffusion engine be ours."""
    if not switched_on():
        return
    from vllm_omni.diffusion.attention.backends.registry import (
        DiffusionAttentionBackendEnum,
        register_diffusion_backend,
    )

    backend = DiffusionAttentionBackendEnum.SAGE_ATTN
    register_diffusion_backend(backend, "turbo_rcm_patch.engines.vllm_omni.Backend")
    # The platform imports a package `sageattention` before it asks for the class, and ring
    # attention calls it. One that is installed is found first.
    if str(STAND_IN) not in sys.path:
        sys.path.append(str(STAND_IN))
    say("vllm-omni: the diffusion backend SAGE_ATTN runs the attention of turbo_rcm_patch")
