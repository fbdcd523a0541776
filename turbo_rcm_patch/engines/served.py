"""What all engines share: the call, and what the log says about it."""

from __future__ import annotations

from collections import Counter
from typing import Final, Literal

import torch
from torch import Tensor

from turbo_rcm_patch import __version__
from turbo_rcm_patch.engines import REQUIRE, say, switched_on
from turbo_rcm_patch.errors import DeviceError, MaskError
from turbo_rcm_patch.ops import INT8_MIN_KEYS, AttentionSpec, resolved
from turbo_rcm_patch.ops.sageattn import Result, sageattn

_INT8: Final = "int8"
_SHORT: Final = "exact, because it is short"
_MASKED: Final = "exact, because of a mask"
_EMULATED: Final = "int8 emulated in plain torch"


class Served:
    """The attention of one engine in this process, and what the log says about it.

    Attributes:
        engine: Its name, for the log.
        calls: How often each kind of attention ran. Calls inside a compiled graph are not counted.
    """

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.calls: Counter[str] = Counter()

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Literal["HND", "NHD"],
        causal: bool = False,
        sm_scale: float | None = None,
        want_lse: bool = False,
    ) -> Result:
        """Compute `sageattn` and count the call."""
        self.count(q, k, layout, want_lse=want_lse)
        return sageattn(q, k, v, layout, causal, sm_scale, want_lse)

    def count(
        self, q: Tensor, k: Tensor, layout: str, *, masked: bool = False, want_lse: bool = False
    ) -> None:
        """Count a call, and log the 1st, 10th, 100th, ... of its kind.

        Raises:
            DeviceError: The environment requires our kernels, and this device has none.
            MaskError: The same, and the call has a mask.
        """
        if torch.compiler.is_compiling():
            return
        at = 2 if layout == "HND" else 1
        kind = _kind(q.device, q.shape[at], k.shape[at], masked, want_lse)
        if kind in (_MASKED, _EMULATED) and switched_on(REQUIRE):
            error = MaskError if kind == _MASKED else DeviceError
            raise error(
                f"an attention of {self.engine} over {k.shape[at]:,} keys",
                expected="int8 kernels, as the environment requires",
                got=f"{kind}, on {_card(q.device)}",
                remedy=f"Run without --require or {REQUIRE}",
            )
        if not self.calls:
            say(
                f"{self.engine}: attention by turbo_rcm_patch {__version__} on {_card(q.device)}, "
                "int8 where it is long and has no mask, else exact"
            )
        self.calls[kind] += 1
        n = self.calls[kind]
        if str(n).strip("0") == "1":
            shape = f"{list(q.shape)} x {k.shape[at]:,} keys in {str(q.dtype)[6:]}"
            say(f"{self.engine}: {n:,} {'call' if n == 1 else 'calls'} {kind} (this one {shape})")


def _kind(device: torch.device, n_q: int, n_kv: int, masked: bool, want_lse: bool) -> str:
    """Return how `sageattn` computes a call."""
    chosen = resolved(AttentionSpec(heads=1, attention="auto"), device, n_q, n_kv)
    # With the logsumexp "auto" is int8 at any length.
    if n_kv < INT8_MIN_KEYS or (chosen.attention == "exact" and not want_lse):
        return _SHORT
    if masked:
        return _MASKED
    return _INT8 if chosen.impl == "triton" else _EMULATED


def _card(device: torch.device) -> str:
    if device.type != "cuda":
        return f"the device {device.type}, which has no kernels"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
