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

    @wraps(function)
    def counted(*args: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **named)
        bound = signature.bind(*args, **named)
        bound.apply_defaults()
        call = dict(bound.arguments)
        call |= call.pop("neutral")
        if function is ours.sageattn:
            call = ours.in_our_order(**call)
        q, k, v, layout = call["q"], call["k"], call["v"], call.get("tensor_layout") or "HND"
        if "cu_seqlens_q" in call:
            layout, longest = "NHD", call["max_seqlen_k"]
            q, k, v = q[None, : call["max_seqlen_q"]], k[None, :longest], v[None, :longest]
        reason = ours.reason_for_torch(
            q, k, v, layout, mask=call.get("attn_mask"), causal=bool(call["is_causal"]),
            sm_scale=call["sm_scale"], dropout_p=call.get("dropout_p", 0.0),
        )  # fmt: skip
        SERVED.count(q, k, layout, reason, want_lse=bool(call.get("return_lse")))
        return function(*args, **named)

    counted.__module__ = "sageattention"  # where pickle finds it
    return counted


# In the place of sageattention's names. A program may run in another environment than the command.
_package = sys.modules.get("sageattention")
if _package is not None and not switched_on(REPLACE):
    refuse_installed(str(Path(str(_package.__file__)).parents[1]))
FUNCTIONS: Final = {name: _counted(getattr(ours, name)) for name in ours.__all__}
