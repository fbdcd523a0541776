"""The verdict on a patched model, and all of its limits."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from turbo_rcm_patch.errors import SamplingError
from turbo_rcm_patch.video.measures import Drift

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
#: The same for "similar": twice the error that "unchanged" admits (6 dB are a factor of two).
#: int4 attention is about another factor of two away, or more: with the tiny Wan it is 22 dB and
#: 21 dB below the control, and has 8.3 times the error.
SIMILAR_MEDIAN_MARGIN_DB: Final = 12.0
SIMILAR_WORST_FRAME_MARGIN_DB: Final = 15.0
SIMILAR_NETWORK_LIMIT: Final = 4.0
#: Relative L2 of fused against unfused, fp32 in and out, over the same quantised attention.
FUSION_LIMIT: Final = 3e-6

#: Margins of "unchanged" and of "similar", and the floor.
_MEDIAN: Final = (MEDIAN_MARGIN_DB, SIMILAR_MEDIAN_MARGIN_DB, MEDIAN_FLOOR_DB)
_WORST: Final = (WORST_FRAME_MARGIN_DB, SIMILAR_WORST_FRAME_MARGIN_DB, WORST_FRAME_FLOOR_DB)
#: Limits of "unchanged" and of "similar".
_NETWORK: Final = (NETWORK_LIMIT, SIMILAR_NETWORK_LIMIT)
_FUSION: Final = (FUSION_LIMIT, FUSION_LIMIT)


@dataclass(frozen=True, slots=True)
class Check:
    """One condition of the verdict: `value` must be at least, or at most, a limit.

    Attributes:
        name: What is measured.
        value: What was measured.
        limit: For "unchanged".
        similar_limit: For "similar"; the same where nothing wider is accepted.
        at_least: Whether the limits are lower ones.
        unit: Of all three.
    """

    name: str
    value: float
    limit: float
    similar_limit: float
    at_least: bool
    unit: str = ""

    @property
    def passed(self) -> bool:
        """Whether it holds for "unchanged". It does not for a NaN."""
        return self._within(self.limit)

    @property
    def similar(self) -> bool:
        """Whether it holds for "similar"."""
        return self._within(self.similar_limit)

    @property
    def accepted(self) -> str:
        """What "unchanged" admits, in words."""
        return self._words(self.limit)

    @property
    def accepted_similar(self) -> str:
        """What "similar" admits, in words."""
        return self._words(self.similar_limit)

    def _within(self, limit: float) -> bool:
        return self.value >= limit if self.at_least else self.value <= limit

    def _words(self, limit: float) -> str:
        return f"{'at least' if self.at_least else 'at most'} {limit:.4g}{self.unit}"

    def __str__(self) -> str:
        beyond = f"{'below' if self.at_least else 'above'} {self.limit:.4g}{self.unit}"
        said = self.accepted if self.passed else beyond
        return f"{self.name} {self.value:.4g}{self.unit}, {said}"


Word = Literal["unchanged", "similar", "changed", "undecided"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether anything visible changed.

    Attributes:
        word: "unchanged" if every condition holds, "similar" if the wider limits hold, else
            "changed". It is "undecided" in place of the first two if one condition could not be
            measured, and in place of the first if the control itself is below an absolute limit,
            so that a comparison with it says nothing.
        checks: The conditions.
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
        See `Verdict`.
    """
    if not patched or len(patched) != len(control):
        raise SamplingError(
            "judge",
            expected="as many control runs as patched runs, at least one",
            got=f"{len(control)} and {len(patched)}",
        )
    if not all(math.isfinite(one.psnr) for one in control):
        equal = any(one.psnr == math.inf for one in control)
        what = "is bit-equal to the baseline" if equal else "holds NaN or infinity"
        raise SamplingError(
            f"the control run {what}, so its drift measures nothing",
            remedy="Choose another exact attention backend for the control",
        )
    sizes = (
        ("median PSNR over prompts", _median, _MEDIAN),
        ("worst frame", _worst, _WORST),
    )
    margins = [
        Check(name, of(patched), of(control) - limit, of(control) - wider, True, " dB")
        for name, of, (limit, wider, _) in sizes
    ]
    floors = [
        Check(f"{name}, whatever the control does", of(patched), floor, floor, True, " dB")
        for name, of, (*_, floor) in sizes
    ]
    given = (
        ("error of the network, patched / unpatched", network_ratio, _NETWORK),
        ("fused against unfused, relative L2", fusion, _FUSION),
    )
    numbers = [
        Check(name, value, *limits, at_least=False)
        for name, value, limits in given
        if value is not None
    ]
    # Where the control is no nearer than a floor either, the patch is not what changed the video.
    counted = [
        check
        for check, (_, of, _) in zip(floors, sizes, strict=True)
        if of(control) >= check.limit
    ]
    checks = (*margins, *floors, *numbers)
    word: Word = "changed"
    if all(check.passed for check in (*margins, *counted, *numbers)):
        decided = not missing and all(check.passed for check in checks)
        word = "unchanged" if decided else "undecided"
    elif all(check.similar for check in checks):
        word = "undecided" if missing else "similar"
    return Verdict(word, checks, tuple(missing))


def median(values: Sequence[float]) -> float:
    """The median; NaN if one of the values is, or where there is none."""
    return _or_nan(statistics.median, values)


def lowest(values: Sequence[float]) -> float:
    """As `median`."""
    return _or_nan(min, values)


def highest(values: Sequence[float]) -> float:
    """As `median`."""
    return _or_nan(max, values)


def _or_nan(how: Callable[[Sequence[float]], float], values: Sequence[float]) -> float:
    return math.nan if not values or any(map(math.isnan, values)) else how(values)


def _median(drifts: Sequence[Drift]) -> float:
    return median([one.psnr for one in drifts])


def _worst(drifts: Sequence[Drift]) -> float:
    return lowest([one.worst_psnr for one in drifts])
