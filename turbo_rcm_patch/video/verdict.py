"""The verdict on a changed model, and all of its limits."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, Literal

from turbo_rcm_patch.errors import SamplingError
from turbo_rcm_patch.video.measures import Drift

#: The median PSNR over prompts may be this much below that of the control.
MEDIAN_MARGIN_DB: Final = 6.0
#: The worst frame of all prompts may be this much below the control's worst frame.
WORST_FRAME_MARGIN_DB: Final = 9.0
#: The least that is accepted however far the control drifts. At 20 dB frames differ by a tenth of
#: the range of a pixel (root mean square): a layout is the same, details are not. Two frames that
#: share nothing but brightness and contrast are some 9 to 12 dB apart, so a worst frame under
#: 15 dB has lost its picture, and a median there compares two videos.
MEDIAN_FLOOR_DB: Final = 20.0
WORST_FRAME_FLOOR_DB: Final = 15.0
#: Error of the judged network against fp32 truth, in units of the unpatched network's own bf16
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

#: The least share of the calls of blocks that have to run in the form that was asked for. Below it
#: the videos say little about that form.
ASKED_SHARE: Final = 0.5
#: Form in which a block ran (`PatchedBlock.form`) -> words. "asked" is as it was asked for.
FORMS: Final = {
    "skipped": "were skipped by a cache or another hook",
    "length": "ran exact attention, because there are few tokens",
    "mask": "ran exact attention, because of a mask",
    "wide-values": "ran quantised attention with values in 16 bits, by the guard's decision",
    "exact": "ran exact attention, by the guard's decision",
    "asked-16bit": "ran Linears in 16 bits, by the guard's decision",
    "wide-values-16bit": "ran values and Linears in 16 bits, by the guard's decision",
    "exact-16bit": "ran exact attention and Linears in 16 bits, by the guard's decision",
    "author": "ran their author's code",
}

#: With fewer videos a report says how far single ones scatter.
FEW: Final = 5
#: Resamples of the videos, from which intervals come, and the share of them that one holds.
RESAMPLES: Final = 1000
CONFIDENCE: Final = 0.95
#: Why there is no verdict, or no certain one.
NO_CONTROL: Final = (
    "how far is too far, because no control was given: videos of the same model under another "
    "exact attention, which differ from the baseline by rounding alone"
)

#: Names of two conditions, which the page looks up.
NETWORK: Final = "error of the network, patched / unpatched"
FUSION: Final = "fused against unfused, relative L2"


@dataclass(frozen=True, slots=True)
class Check:
    """One condition of the verdict: `value` must be at least, or at most, a limit.

    Attributes:
        name: The quantity.
        value: Its measured value.
        limit: The limit for "unchanged".
        similar_limit: The limit for "similar"; equal to `limit` where nothing wider is accepted.
        at_least: True for lower limits, False for upper ones.
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
        """True if the value is accepted as "unchanged". A NaN never is."""
        return self._within(self.limit)

    @property
    def similar(self) -> bool:
        """True if the value is accepted as "similar"."""
        return self._within(self.similar_limit)

    def _within(self, limit: float) -> bool:
        return self.value >= limit if self.at_least else self.value <= limit

    def accepted(self, limit: float) -> str:
        """Return the values that one of the limits admits, in words."""
        return f"{'at least' if self.at_least else 'at most'} {limit:.4g}{self.unit}"

    def __str__(self) -> str:
        beyond = f"{'below' if self.at_least else 'above'} {self.limit:.4g}{self.unit}"
        words = self.accepted(self.limit) if self.passed else beyond
        return f"{self.name} {self.value:.4g}{self.unit}, {words}"


@dataclass(frozen=True, slots=True)
class Ran:
    """In which form the blocks of the judged model ran, over all videos.

    Attributes:
        asked: The form that was asked for, in words.
        part: Forms that are part of it: "length" with attention="auto", "wide-values" with
            pv="auto".
        calls: Block -> of each forward of a network how many videos ran it in which form.
    """

    asked: str
    part: Sequence[str]
    calls: Mapping[str, Sequence[Counter[str]]]

    @classmethod
    def of(
        cls, asked: str, part: Sequence[str], videos: Sequence[Sequence[Mapping[str, str]]]
    ) -> Ran | None:
        """Count the forms of videos: of each video and forward, block -> form. None if no block
        was watched."""
        blocks = dict.fromkeys(block for video in videos for forms in video for block in forms)
        forwards = list(zip_longest(*videos, fillvalue={}))
        calls = {
            block: [Counter(forms[block] for forms in each if block in forms) for each in forwards]
            for block in blocks
        }
        return cls(asked, part, calls) if calls else None

    @property
    def forms(self) -> Counter[str]:
        """How many calls ran in which form."""
        return sum((forms for calls in self.calls.values() for forms in calls), Counter())

    @property
    def share(self) -> float:
        """The share of the calls that ran as it was asked for, of those that ran at all."""
        forms = self.forms
        ran = forms.total() - forms["skipped"]
        return sum(forms[form] for form in ("asked", *self.part)) / ran

    def as_dict(self) -> dict[str, object]:
        """Return plain data for JSON."""
        calls = {block: [*map(dict, forwards)] for block, forwards in self.calls.items()}
        words = {"share_as_asked": self.share, "words": str(self)}
        return {"asked": self.asked, "part": self.part, "calls": calls} | words

    def __str__(self) -> str:
        blocks = [sum(forwards, Counter[str]()) for forwards in self.calls.values()]
        parts = []
        for form in [form for form in FORMS if self.forms[form]]:
            counts = [counts for counts in blocks if counts[form]]
            share = sum(c[form] for c in counts) / sum(c.total() for c in counts)
            all_of_them = len(counts) == len(blocks)
            number = f"All {len(blocks)}" if all_of_them else f"{len(counts)} of {len(blocks)}"
            often = "" if share == 1 else f" in {share:.0%} of the forwards"
            parts.append(f"{number} blocks {FORMS[form]}{often}")
        if not parts:
            return f"All {len(blocks)} blocks ran {self.asked} in every forward"
        rest, wide = self.forms["asked"], self.forms["wide-values"]
        if self.share >= ASKED_SHARE and (rest or wide):
            return "; ".join([*parts, f"the rest ran {self.asked}"] if rest else parts)
        by_guard = any(self.forms[form] for form, words in FORMS.items() if "guard" in words)
        how = " (`guard=False` judges it)" if by_guard else ""
        return f"{'; '.join(parts)}: this is not a verdict on {self.asked}{how}"


Word = Literal["unchanged", "similar", "changed", "undecided", "not judged"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision about a change, with its conditions.

    Attributes:
        word: "unchanged" if every condition holds, "similar" if the wider limits hold, else
            "changed". It is "undecided" in place of the first two if one condition could not be
            measured, and in place of the first if the control itself is below an absolute limit,
            so that a comparison with it says nothing. It is "not judged" whatever was measured if
            fewer than `ASKED_SHARE` of the blocks' calls ran in the form that was asked for, or
            if there was no control.
        checks: The conditions.
        missing: The numbers that could not be measured, and why.
        ran: In which form the blocks ran; None if that was not watched.
    """

    word: Word
    checks: tuple[Check, ...]
    missing: tuple[str, ...] = ()
    ran: Ran | None = None

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why nothing was judged, the failed conditions and the missing numbers, as text; empty if
        unchanged."""
        failed: tuple[str, ...] = ()
        if self.ran is not None and self.word == "not judged":
            failed = (str(self.ran),)
        failed += tuple(str(check) for check in self.checks if not check.passed)
        return failed + tuple(f"not measured: {what}" for what in self.missing)


def judge(
    patched: Sequence[Drift],
    control: Sequence[Drift] | None,
    *,
    network_ratio: float | None = None,
    fusion: float | None = None,
    missing: Sequence[str] = (),
    ran: Ran | None = None,
) -> Verdict:
    """Compare the drift of a changed model with that of the same model under another exact
    attention backend.

    Args:
        patched: Changed model against baseline, one entry per prompt.
        control: Control against baseline, same prompts; None if there is none, which leaves the
            verdict open.
        network_ratio: e(changed)/e(unpatched) of the network, if it was measured.
        fusion: Relative L2 of fused against unfused, if it was measured.
        missing: The numbers that could not be measured, and why. A number that was left out on
            request is not missing.
        ran: In which form the blocks ran, if that was watched.

    Raises:
        SamplingError: The runs are not paired, or the control equals the baseline or holds NaN.
    """
    if control is None:
        return Verdict("not judged", (), (NO_CONTROL, *missing), ran)
    if not patched or len(patched) != len(control):
        raise SamplingError(
            "judge",
            expected="as many control runs as patched runs, at least one",
            got=f"{len(control)} and {len(patched)}",
        )
    if not all(math.isfinite(drift.psnr) for drift in control):
        equal = any(drift.psnr == math.inf for drift in control)
        what = "is bit-equal to the baseline" if equal else "holds NaN or infinity"
        raise SamplingError(
            f"the control run {what}, so its drift measures nothing",
            remedy="Choose another exact attention backend for the control",
        )
    margins, floors, counted = [], [], []
    for name, how, of, margin, wider, floor in (
        ("median PSNR", median, "psnr",
         MEDIAN_MARGIN_DB, SIMILAR_MEDIAN_MARGIN_DB, MEDIAN_FLOOR_DB),
        ("worst frame", lowest, "worst_psnr",
         WORST_FRAME_MARGIN_DB, SIMILAR_WORST_FRAME_MARGIN_DB, WORST_FRAME_FLOOR_DB),
    ):  # fmt: skip
        value, other = (how([getattr(drift, of) for drift in run]) for run in (patched, control))
        margins.append(Check(name, value, other - margin, other - wider, True, " dB"))
        whatever = f"{name}, whatever the control does"
        floors.append(Check(whatever, value, floor, floor, True, " dB"))
        # Where the control is below a floor too, the change is not to blame for it.
        counted += floors[-1:] if other >= floor else []
    numbers = []
    if network_ratio is not None:
        numbers.append(
            Check(NETWORK, network_ratio, NETWORK_LIMIT, SIMILAR_NETWORK_LIMIT, at_least=False)
        )
    if fusion is not None:
        numbers.append(Check(FUSION, fusion, FUSION_LIMIT, FUSION_LIMIT, at_least=False))
    checks = (*margins, *floors, *numbers)
    word: Word = "changed"
    if all(check.passed for check in (*margins, *counted, *numbers)):
        decided = not missing and all(check.passed for check in checks)
        word = "unchanged" if decided else "undecided"
    elif all(check.similar for check in checks):
        word = "undecided" if missing else "similar"
    if ran is not None and ran.share < ASKED_SHARE:
        word = "not judged"
    return Verdict(word, checks, tuple(missing), ran)


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the interval that holds `CONFIDENCE` of the medians of resampled values (percentile
    bootstrap, always the same resamples); None for fewer than two, or where a value is NaN."""
    if len(values) < 2 or any(map(math.isnan, values)):
        return None
    draw = random.Random(0)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = round(RESAMPLES * (1 - CONFIDENCE) / 2)
    return medians[tail], medians[-1 - tail]


def median(values: Sequence[float]) -> float:
    """Return the median; NaN if one of the values is NaN."""
    return math.nan if any(map(math.isnan, values)) else statistics.median(values)


def lowest(values: Sequence[float]) -> float:
    """Return the minimum; NaN if one of the values is NaN."""
    return math.nan if any(map(math.isnan, values)) else min(values)
