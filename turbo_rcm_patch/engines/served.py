"""What all engines share: the call, and what the log says about it."""

from __future__ import annotations

from collections import Counter
from typing import Final, Literal

import torch
from torch import Tensor

from turbo_rcm_patch import __version__
from turbo_rcm_patch.engines import REQUIRE, say, switched_on
from turbo_rcm_patch.errors import DeviceError, MaskError, OpError
from turbo_rcm_patch.ops import INT8_MIN_KEYS, AttentionSpec, resolved
from turbo_rcm_patch.ops.sageattn import MASK, Result, reason_for_torch, sageattn

_INT8: Final = "int8"
_SHORT: Final = "exact, because it is short"
_EXACTLY: Final = "exact, because of {}"
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
        reason = reason_for_torch(q, k, v, layout, causal=causal, sm_scale=sm_scale)
        self.count(q, k, layout, reason, want_lse=want_lse)
        return sageattn(q, k, v, layout, causal, sm_scale, want_lse)

    def count(
        self,
        q: Tensor,
        k: Tensor,
        layout: str,
        reason: str | None = None,
        *,
        want_lse: bool = False,
    ) -> None:
        """Count a call, and log the 1st, 10th, 100th, ... of its kind.

        Args:
            q: As in `sageattn`.
            k: As in `sageattn`.
            layout: "HND" or "NHD".
            reason: As `reason_for_torch` returns it.
            want_lse: True if the call returns the logsumexp.

        Raises:
            DeviceError: The environment requires our kernels, and this device has none.
            OpError: The same, and our kernels do not take the call (`MaskError` for a mask).
        """
        if torch.compiler.is_compiling():
            return
        n_q, n_kv = (x.shape[-2 if layout == "HND" else -3] for x in (q, k))
        kind = _kind(q.device, n_q, n_kv, reason, want_lse)
        if kind not in (_SHORT, _INT8) and switched_on(REQUIRE):
            errors = {_EMULATED: DeviceError, _EXACTLY.format(MASK): MaskError}
            raise errors.get(kind, OpError)(
                f"an attention of {self.engine} over {n_kv:,} keys",
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
            shape = f"{list(q.shape)} x {n_kv:,} keys in {str(q.dtype)[6:]}"
            say(f"{self.engine}: {n:,} {'call' if n == 1 else 'calls'} {kind} (this one {shape})")


def _kind(device: torch.device, n_q: int, n_kv: int, reason: str | None, want_lse: bool) -> str:
    """Return how `sageattn` computes a call."""
    chosen = resolved(AttentionSpec(heads=1, attention="auto"), device, n_q, n_kv)
    # With the logsumexp "auto" is int8 at any length.
    if n_kv < INT8_MIN_KEYS or (chosen.attention == "exact" and not want_lse):
        return _SHORT
    if reason is not None:
        return _EXACTLY.format(reason)
    return _INT8 if chosen.impl == "triton" else _EMULATED


def _card(device: torch.device) -> str:
    if device.type != "cuda":
        return f"the device {device.type}, which has no kernels"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
