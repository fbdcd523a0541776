"""Choose and run an exact attention backend for the control run, without side effects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["candidates", "exact_backend"]

_BACKENDS: Final = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def candidates(device: torch.device) -> tuple[str, ...]:
    """Names of exact backends for the control, best first.

    "Native" is flash on a CPU and cuDNN or flash on a GPU, depending on the card; the first
    candidate whose result differs from native is the control. math comes last on a GPU, because it
    holds the whole score matrix.
    """
    return ("math", "flash") if device.type == "cpu" else ("flash", "efficient", "cudnn", "math")


@contextmanager
def exact_backend(name: str) -> Iterator[None]:
    """Run `scaled_dot_product_attention` with this backend only."""
    with sdpa_kernel(_BACKENDS[name]):
        yield
