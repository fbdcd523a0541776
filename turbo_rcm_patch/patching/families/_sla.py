"""The pair inside a sparse-linear attention (SLA), as every family with one lists it."""

from __future__ import annotations

from dataclasses import replace

from turbo_rcm_patch.skip import Residual, SkipPair, Stream

__all__ = ["linear_pair"]


def linear_pair(pair: SkipPair, path: str, runs: Residual, reason: str) -> SkipPair:
    """The sum of a sparse and of a projected linear attention, a pair of its own before W_o.

    Args:
        pair: The self-attention around it.
        path: Where the linear branch sits.
        runs: How the sum is closed.
        reason: Why.
    """
    return replace(
        pair,
        path=path,
        streams=(Stream("proj_l of the linear attention", "1", "1"),),
        projection=False,
        runs=runs,
        reason=reason,
    )
