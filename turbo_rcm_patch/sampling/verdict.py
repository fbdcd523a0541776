"""The verdict on a patched model, and all of its limits."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from turbo_rcm_patch.errors import SamplingError
from turbo_rcm_patch.sampling.measures import Drift

__all__ = [
    "FUSION_LIMIT",
    "MEDIAN_FLOOR_DB",
    "MEDIAN_MARGIN_DB",
    "NETWORK_LIMIT",
    "WORST_FRAME_FLOOR_DB",
    "WORST_FRAME_MARGIN_DB",
    "Verdict",
    "judge",
]

#: The median PSNR over prompts may be this much below that of the control.
MEDIAN_MARGIN_DB: Final = 6.0
#: The worst frame of all prompts may be this much below the control's worst frame.
WORST_FRAME_MARGIN_DB: Final = 9.0
#: What the margins may not excuse, however far the control drifts. At 20 dB frames differ by a
#: tenth of the range of a pixel (root mean square): a layout is the same, details are not. Two
#: frames that share nothing but brightness and contrast are some 9 to 12 dB apart, so a worst
#: frame under 15 dB has lost its picture, and a median there compares two videos.
MEDIAN_FLOOR_DB: Final = 20.0
WORST_FRAME_FLOOR_DB: Final = 15.0
#: Error of the patched network against fp32 truth, in units of the unpatched network's own bf16
#: error.
NETWORK_LIMIT: Final = 2.0
#: Relative L2 of fused against unfused, fp32 in and out, over the same quantised attention.
FUSION_LIMIT: Final = 3e-6


@dataclass(frozen=True, slots=True)
class Check:
    """One condition of the verdict: `value` must be at least, or at most, `limit`."""

    name: str
    value: float
    limit: float
    at_least: bool
    unit: str = ""

    @property
    def passed(self) -> bool:
        """Whether the condition holds. It does not for a NaN."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        sign = (
            ("at least" if self.passed else "below")
            if self.at_least
            else ("at most" if self.passed else "above")
        )
        return f"{self.name} {self.value:.4g}{self.unit}, {sign} {self.limit:.4g}{self.unit}"


Word = Literal["unchanged", "changed", "undecided"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether anything visible changed.

    Attributes:
        word: "unchanged", "changed" or "undecided". It is "undecided" if all measured conditions
            hold but one could not be measured, or if the control itself is below an absolute
            limit, so that a comparison with it says nothing.
        checks: The conditions. An "unchanged" model meets all of them.
        missing: What could not be measured, and why.
    """

    word: Word
    checks: tuple[Check, ...]
    missing: tuple[str, ...] = ()

    @property
    def reasons(self) -> tuple[str, ...]:
        """The failed conditions and the missing numbers, as text; empty if unchanged."""
        failed = tuple(str(check) for check in self.checks if not check.passed)
        return failed + tuple(f"not measured: {what}" for what in self.missing)


def judge(
    patched: Sequence[Drift],
    control: Sequence[Drift],
    *,
    network_ratio: float | None = None,
    fusion: float | None = None,
    missing: Sequence[str] = (),
) -> Verdict:
    """Compare the drift of the patched model with that of the same model under another exact
    attention backend.

    Args:
        patched: Patched against baseline, one entry per prompt.
        control: Control against baseline, same prompts.
        network_ratio: e(patched)/e(unpatched) of one network call, if it was measured.
        fusion: Relative L2 of fused against unfused, if it was measured.
        missing: What could not be measured, and why. A number that was left out on request is not
            missing.

    Returns:
        "unchanged" if every number is within its limit and none is missing.
    """
    if not patched or len(patched) != len(control):
        raise SamplingError(
            "judge",
            expected="as many control runs as patched runs, at least one",
            got=f"{len(control)} and {len(patched)}",
        )
    if any(math.isinf(one.psnr) for one in control):
        raise SamplingError(
            "the control run is bit-equal to the baseline, so its drift measures nothing",
            remedy="Choose another exact attention backend for the control",
        )
    sizes = (
        ("median PSNR over prompts", _median, MEDIAN_MARGIN_DB, MEDIAN_FLOOR_DB),
        ("worst frame", _worst, WORST_FRAME_MARGIN_DB, WORST_FRAME_FLOOR_DB),
    )
    margins = [
        Check(name, of(patched), of(control) - margin, at_least=True, unit=" dB")
        for name, of, margin, _ in sizes
    ]
    floors = [
        Check(f"{name}, whatever the control does", of(patched), floor, at_least=True, unit=" dB")
        for name, of, _, floor in sizes
    ]
    numbers = [
        Check(name, value, limit, at_least=False)
        for name, value, limit in (
            ("error of the network, patched / unpatched", network_ratio, NETWORK_LIMIT),
            ("fused against unfused, relative L2", fusion, FUSION_LIMIT),
        )
        if value is not None
    ]
    # Where the control is no nearer than a floor either, the patch is not what changed the video.
    blamed = [check for check, (_, of, _, floor) in zip(floors, sizes, strict=True)
              if of(control) >= floor]  # fmt: skip
    checks = (*margins, *floors, *numbers)
    word: Word = "unchanged"
    if missing or not all(check.passed for check in checks):
        word = "undecided"
    if not all(check.passed for check in (*margins, *blamed, *numbers)):
        word = "changed"
    return Verdict(word, checks, tuple(missing))


def _median(drifts: Sequence[Drift]) -> float:
    values = [one.psnr for one in drifts]
    return math.nan if any(math.isnan(v) for v in values) else statistics.median(values)


def _worst(drifts: Sequence[Drift]) -> float:
    values = [one.worst_psnr for one in drifts]
    return math.nan if any(math.isnan(v) for v in values) else min(values)
