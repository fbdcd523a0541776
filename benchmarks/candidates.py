"""What `tune` tries: the tiles of each kernel variant, and a call that spends its time in it.

Only public operations are called, with shapes that make the kernel in question take most of the
time: many queries against few keys for the prologue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

from benchmarks.accuracy import attention_fp64
from benchmarks.clock import Call
from benchmarks.setup import generator
from turbo_rcm_patch import ops
from turbo_rcm_patch.config import PVDType

__all__ = ["Work", "candidates", "work_for"]

#: Factor on the residual where one is closed: about as large as an attention over 8,192 keys, so
#: that a wrong attention shows.
SMALL: Final = 2.0**-6

Tiles = Sequence[tuple[int, int, int, int]]

_FP8: Final[Tiles] = (
    (64, 128, 4, 2), (64, 64, 4, 2), (128, 128, 8, 2), (64, 128, 4, 3), (64, 64, 4, 3),
    (128, 64, 4, 2), (128, 64, 8, 2), (128, 128, 8, 3),
)  # fmt: skip
_SIXTEEN: Final[Tiles] = (
    (64, 64, 4, 2), (128, 64, 4, 3), (64, 64, 4, 3), (128, 64, 4, 2), (128, 64, 8, 2),
    (64, 128, 4, 2), (128, 128, 8, 2), (128, 128, 8, 3), (64, 32, 8, 2), (64, 32, 4, 2),
)  # fmt: skip
_PROJECT: Final[Tiles] = (
    (64, 64, 4, 2), (128, 128, 8, 3), (128, 128, 8, 4), (64, 64, 4, 3), (64, 128, 4, 3),
    (128, 64, 4, 3), (128, 128, 4, 3), (128, 256, 8, 3), (256, 128, 8, 3),
)  # fmt: skip
# The rows are the scale block's; what is tried is the width of the pass that sums squares.
_PROLOGUE: Final[Tiles] = tuple((128, w, warps, 1) for warps in (16, 8, 4) for w in (512, 128))
_SKIP: Final[Tiles] = tuple(
    (rows, width, warps, 1) for rows, width in ((16, 256), (8, 512), (4, 1024)) for warps in (4, 8)
)


def candidates(kernel: str, variant: str) -> Tiles:
    """Tiles to try for a kernel variant; none for one that is not known here."""
    if kernel in ("attention", "one_launch"):
        return _FP8 if variant.startswith("fp8") else _SIXTEEN
    return {"project": _PROJECT, "prologue": _PROLOGUE, "skip": _SKIP}.get(kernel, ())


@dataclass(frozen=True, slots=True)
class Work:
    """A call that spends its time in one kernel.

    Attributes:
        words: Its shape, for a reader.
        call: The call.
        truth: fp64 on some rows.
        rows: Which rows of the output, int64.
    """

    words: str
    call: Call
    truth: torch.Tensor
    rows: torch.Tensor


def work_for(
    kernel: str, variant: str, device: torch.device, *, scale: float, seed: int = 0
) -> Work | None:
    """What is timed for a kernel variant; None for one that is not known here.

    Args:
        kernel: As in the table of tiles.
        variant: Likewise.
        device: Where.
        scale: Factor on the number of tokens; 1 is the real size.
        seed: Of the inputs.
    """

    def tokens(real: int) -> int:
        return max(64, int(real * scale))

    last = variant.split("_")[-1]
    head_dim = int(last) if last.isdigit() else 0
    pv: PVDType = "fp8" if variant.startswith("fp8") else "bf16"
    make: Callable[[], Work] | None = {
        # Closing a skip: an attention without one may have a kernel of its own, without tiles.
        "attention": lambda: _attention(
            tokens(8192), tokens(8192), head_dim, pv, device, seed, close=True
        ),
        "one_launch": lambda: _one_launch(tokens(8192), head_dim, pv, device, seed),
        "prologue": lambda: _attention(
            tokens(65536), 128, head_dim, "fp8", device, seed, norm=True
        ),
        "project": lambda: _project(variant, tokens, device, seed),
        "skip": lambda: _skip(tokens(32760), device, seed),
    }.get(kernel)
    return None if make is None else make()


def _rows(tokens: int, device: torch.device) -> torch.Tensor:
    return torch.linspace(0, tokens - 1, min(64, tokens), device=device).long()


def _heads(head_dim: int) -> int:
    return max(1, 1536 // head_dim)


def _normal(
    device: torch.device, seed: int, dtype: torch.dtype = torch.bfloat16
) -> Callable[..., torch.Tensor]:
    random = generator(device, seed)
    return lambda *size: torch.randn(*size, generator=random, device=device).to(dtype)


def _attention(
    n_q: int,
    n_kv: int,
    head_dim: int,
    pv: PVDType,
    device: torch.device,
    seed: int,
    *,
    norm: bool = False,
    close: bool = False,
) -> Work:
    normal, heads = _normal(device, seed), _heads(head_dim)
    channels = heads * head_dim
    q, k, v = (normal(1, n, channels) for n in (n_q, n_kv, n_kv))
    spec = ops.AttentionSpec(heads=heads, pv=pv)
    # A norm of weight 1 over inputs that are normal already: its work without its error.
    weight = torch.ones(channels, device=device, dtype=torch.bfloat16) if norm else None
    rows = _rows(n_q, device)
    q64, k64 = q[:, rows].double(), k.double()
    if norm:
        q64, k64 = (x * (x.square().mean(-1, keepdim=True) + spec.eps).rsqrt() for x in (q64, k64))
    truth = attention_fp64(q64, k64, v, heads)
    residual = q if close else None
    if close:
        truth += SMALL * q[:, rows].double()
    return Work(
        f"H{heads} N{n_q}x{n_kv} D{head_dim} {pv}" + (" with norm" if norm else ""),
        lambda: ops.attention_skip(
            q, k, v, spec, norm_q=weight, norm_k=weight, residual=residual, c_skip=SMALL
        ),
        truth,
        rows,
    )


def _one_launch(tokens: int, head_dim: int, pv: PVDType, device: torch.device, seed: int) -> Work:
    normal, heads = _normal(device, seed), _heads(head_dim)
    channels = heads * head_dim
    q, k, v = (normal(1, tokens, channels) for _ in range(3))
    weight = normal(channels, channels) * channels**-0.5
    spec = ops.AttentionSpec(heads=heads, pv=pv)
    rows = _rows(tokens, device)
    truth = F.linear(attention_fp64(q[:, rows], k, v, heads), weight.double())
    return Work(
        f"H{heads} N{tokens} D{head_dim} {pv}",
        lambda: ops.attention_project_skip(
            q, k, v, weight, None, spec, residual=None, form="one-launch"
        ),
        truth,
        rows,
    )


def _project(variant: str, tokens: Callable[[int], int], device: torch.device, seed: int) -> Work:
    wide = variant.endswith("wide")
    dtype = torch.float32 if variant == "fp32" else torch.bfloat16
    n, channels = (tokens(32760), 1536) if wide else (tokens(4096), 1536)
    normal = _normal(device, seed, dtype)
    x, residual = normal(1, n, channels), normal(1, n, channels)
    weight = normal(channels, channels) * channels**-0.5
    rows = _rows(n, device)
    truth = residual[:, rows].double() + F.linear(x[:, rows].double(), weight.double())
    return Work(
        f"N{n} C{channels} {str(dtype).removeprefix('torch.')}",
        lambda: ops.project_skip(x, weight, residual=residual, c_skip=SMALL),
        truth,
        rows,
    )


def _skip(tokens: int, device: torch.device, seed: int) -> Work:
    normal = _normal(device, seed)
    residual, branch = normal(1, tokens, 1536), normal(1, tokens, 1536)
    gate = normal(1, 1, 1536).float()
    rows = _rows(tokens, device)
    truth = residual[:, rows].double() + gate.double() * branch[:, rows].double()
    return Work(f"N{tokens} C1536", lambda: ops.skip(residual, branch, 1.0, gate), truth, rows)
