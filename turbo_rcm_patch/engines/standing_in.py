"""The functions that a program finds in `sageattention` under `as-sageattention`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Final

import torch

from turbo_rcm_patch.engines import REPLACE, refuse_installed, switched_on
from turbo_rcm_patch.engines.served import Served
from turbo_rcm_patch.ops import sageattn as ours

SERVED: Final = Served("sageattention")


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Count the calls of a function of `ops.sageattn`."""
    signature = inspect.signature(function)
    packed = "cu_seqlens_q" in signature.parameters

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **named)
        arguments = signature.bind(*args, **named).arguments
        q, k, layout = arguments["q"], arguments["k"], arguments.get("tensor_layout") or "HND"
        if packed:
            layout = "NHD"
            q, k = q[None, : arguments["max_seqlen_q"]], k[None, : arguments["max_seqlen_k"]]
        masked, want_lse = (
            arguments.get("attn_mask") is not None,
            bool(arguments.get("return_lse")),
        )
        SERVED.count(q, k, layout, masked=masked, want_lse=want_lse)
        return function(*args, **named)

    call.__module__ = "sageattention"  # where pickle finds it
    return call


# In the place of sageattention's names. A program may run in another environment than the command.
_package = sys.modules.get("sageattention")
if _package is not None and not switched_on(REPLACE):
    refuse_installed(str(Path(str(_package.__file__)).parents[1]))
FUNCTIONS: Final = {name: _counted(getattr(ours, name)) for name in ours.__all__}
