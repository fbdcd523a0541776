"""The verdict on a patched model, and the only place where its margins are written."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from turbo_rcm_patch.errors import ControlError, SamplingError
from turbo_rcm_patch.sampling.metrics import Drift

__all__ = [
    "FUSION_LIMIT",
    "MEDIAN_MARGIN_DB",
    "NETWORK_LIMIT",
    "WORST_FRAME_MARGIN_DB",
    "Verdict",
    "judge",
]

#: The median PSNR over prompts may be this much below that of the control.
MEDIAN_MARGIN_DB: Final = 6.0
#: The worst frame of all prompts may be this much below the control's worst frame.
WORST_FRAME_MARGIN_DB: Final = 9.0
#: Error of the patched network against fp32 truth, in units of the unpatched network's own bf16
#: error.
NETWORK_LIMIT: Final = 2.0
#: Relative L2 of fused against unfused, fp32 in and out, over the same quantised attention.
FUSION_LIMIT: Final = 3e-6


@dataclass(frozen=True, slots=True)
class Check:
    """One condition of the verdict: `value` must lie on the right side of `limit`."""

    name: str
    value: float
    limit: float
    at_least: bool
    unit: str = ""

    @property
    def passed(self) -> bool:
        """Whether the condition holds; a NaN never passes."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        sign = (
            ("at least" if self.passed else "below")
            if self.at_least
            else ("at most" if self.passed else "above")
        )
        return f"{self.name} {self.value:.4g}{self.unit}, {sign} {self.limit:.4g}{self.unit}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether anything visible changed.

    Attributes:
        word: "unchanged" or "changed".
        checks: The conditions, all of which an "unchanged" model meets.
    """

    word: Literal["unchanged", "changed"]
    checks: tuple[Check, ...]

    @property
    def unchanged(self) -> bool:
        """True if nothing visible changed."""
        return self.word == "unchanged"

    @property
    def reasons(self) -> tuple[str, ...]:
        """The failed conditions in words; empty if unchanged."""
        return tuple(str(check) for check in self.checks if not check.passed)


def judge(
    patched: Sequence[Drift],
    control: Sequence[Drift],
    *,
    network_ratio: float | None = None,
    fusion: float | None = None,
) -> Verdict:
    """Compare the drift of the patched model with that of the same model under another exact
    attention backend.

    Args:
        patched: Patched against baseline, one entry a prompt.
        control: Control against baseline, same prompts.
        network_ratio: e(patched)/e(unpatched) of one network call, if it was measured.
        fusion: Relative L2 of fused against unfused, if it was measured.

    Returns:
        "unchanged" if every number is within its margin.
    """
    if not patched or len(patched) != len(control):
        raise SamplingError(
            "judge",
            expected="as many control runs as patched runs, at least one",
            got=f"{len(control)} and {len(patched)}",
        )
    if any(math.isinf(one.psnr) for one in control):
        raise ControlError(
            "the control run equals the baseline in every bit, so its drift measures nothing",
            remedy="Choose another exact attention backend for the control",
        )
    checks = [
        Check(
            "median PSNR over prompts",
            _median(patched),
            _median(control) - MEDIAN_MARGIN_DB,
            at_least=True,
            unit=" dB",
        ),
        Check(
            "worst frame",
            _worst(patched),
            _worst(control) - WORST_FRAME_MARGIN_DB,
            at_least=True,
            unit=" dB",
        ),
    ]
    if network_ratio is not None:
        checks.append(
            Check("error of the network, patched / unpatched", network_ratio, NETWORK_LIMIT, False)
        )
    if fusion is not None:
        checks.append(Check("fused against unfused, relative L2", fusion, FUSION_LIMIT, False))
    word: Literal["unchanged", "changed"] = (
        "unchanged" if all(check.passed for check in checks) else "changed"
    )
    return Verdict(word, tuple(checks))


def _median(drifts: Sequence[Drift]) -> float:
    values = [one.psnr for one in drifts]
    return math.nan if any(math.isnan(v) for v in values) else statistics.median(values)


def _worst(drifts: Sequence[Drift]) -> float:
    values = [one.worst_psnr for one in drifts]
    return math.nan if any(math.isnan(v) for v in values) else min(values)
