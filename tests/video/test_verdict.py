"""The verdict at the edges of its margins."""

from __future__ import annotations

import math
from typing import Any

import pytest

from turbo_rcm_patch.errors import SamplingError
from turbo_rcm_patch.video.measures import Drift
from turbo_rcm_patch.video.verdict import Ran, judge


def one(psnr: float, worst: float | None = None) -> Drift:
    worst = psnr if worst is None else worst
    return Drift(psnr, 1.0, (psnr, worst))


CONTROL = [one(40.0, 38.0), one(41.0), one(45.0)]


@pytest.mark.parametrize(
    ("patched", "control", "word"),
    [
        # Median and worst frame, at the edges of what the control allows.
        ([one(35.0)] * 3, CONTROL, "unchanged"),
        ([one(35.0), one(34.99), one(34.99)], CONTROL, "similar"),
        ([one(29.0)] * 3, CONTROL, "similar"),
        ([one(29.0), one(28.99), one(28.99)], CONTROL, "changed"),
        ([one(60.0), one(35.0), one(29.0)], CONTROL, "unchanged"),
        ([one(60.0), one(60.0), one(60.0, 28.99)], CONTROL, "similar"),
        ([one(60.0), one(35.0), one(60.0, 23.0)], CONTROL, "similar"),
        ([one(60.0), one(60.0), one(60.0, 22.99)], CONTROL, "changed"),
        ([one(math.inf)] * 3, CONTROL, "unchanged"),
        ([one(60.0), one(60.0), one(math.nan)], CONTROL, "changed"),
        ([one(60.0), one(60.0), one(60.0, math.nan)], CONTROL, "changed"),
        # A control below a floor excuses what is no worse, and nothing else.
        ([one(6.0)], [one(12.0)], "undecided"),
        ([one(12.0)], [one(12.0)], "undecided"),
        ([one(25.0)], [one(12.0)], "unchanged"),
        ([one(5.9)], [one(12.0)], "changed"),
        ([one(19.9)], [one(24.0)], "changed"),
        ([one(20.0)], [one(24.0)], "unchanged"),
        ([one(19.9)], [one(20.0)], "changed"),
        ([one(30.0, 14.9)], [one(30.0, 20.0)], "changed"),
        ([one(30.0, 14.9)], [one(30.0, 14.0)], "undecided"),
        ([one(math.nan)], [one(12.0)], "changed"),
        ([one(20.0)], [one(30.0)], "similar"),
        ([one(19.9)], [one(30.0)], "changed"),
        ([one(30.0, 14.9)], [one(30.0, 25.0)], "changed"),
    ],
)
def test_the_video(patched: list[Drift], control: list[Drift], word: str) -> None:
    verdict = judge(patched, control)
    assert verdict.word == word
    assert bool(verdict.reasons) == (word != "unchanged")


@pytest.mark.parametrize(
    ("psnr", "given", "word"),
    [
        (40.0, {"network_ratio": 2.0}, "unchanged"),
        (40.0, {"network_ratio": 2.01}, "similar"),
        (40.0, {"network_ratio": 4.0}, "similar"),
        (40.0, {"network_ratio": 4.01}, "changed"),
        (40.0, {"network_ratio": math.nan}, "changed"),
        (40.0, {"fusion": 3e-6}, "unchanged"),
        (40.0, {"fusion": 4e-6}, "changed"),
        # What is missing leaves nothing unchanged or similar.
        (40.0, {"missing": ["x"]}, "undecided"),
        (30.0, {"missing": ["x"]}, "undecided"),
        (30.0, {}, "similar"),
        (1.0, {"missing": ["x"]}, "changed"),
    ],
)
def test_the_numbers(psnr: float, given: dict[str, Any], word: str) -> None:
    verdict = judge([one(psnr)] * 3, CONTROL, **given)
    assert verdict.word == word
    assert ("not measured: x" in verdict.reasons) == ("missing" in given)


def test_runs_that_cannot_be_judged_are_refused() -> None:
    for bad, said in ((math.inf, "measures nothing"), (math.nan, "holds NaN or infinity")):
        with pytest.raises(SamplingError, match=said):
            judge([one(50.0)] * 2, [one(48.0), one(bad)])
    for patched, control in ((CONTROL, CONTROL[:2]), ([], [])):
        with pytest.raises(SamplingError, match="as many control runs"):
            judge(patched, control)


# --- what ran ------------------------------------------------------------------------------------


def ran(*forms: str, asked: str = "int8 attention", part: tuple[str, ...] = ("length",)) -> Ran:
    """Two videos of two steps; a form a block, "a|b" where its second step ran in another."""
    steps = [{f"blocks.{i}": one.split("|")[step % len(one.split("|"))] for i, one in
              enumerate(forms)} for step in range(2)]  # fmt: skip
    found = Ran.of(asked, part, [steps, steps])
    assert found is not None
    return found


GUARD = "by the guard's decision"
SHORT = "exact attention, because there are few tokens"
NOT_INT8 = "this is not a verdict on int8 attention"
OFF = "(`guard=False` judges it)"


@pytest.mark.parametrize(
    ("given", "word", "said"),
    [
        (ran(*["asked"] * 5), "unchanged", "All 5 blocks ran int8 attention in every forward"),
        (ran("exact", *["asked"] * 4), "unchanged",
         f"1 of 5 blocks ran exact attention, {GUARD}; the rest ran int8 attention"),
        (ran("author", "asked"), "unchanged",
         "1 of 2 blocks ran their author's code; the rest ran int8 attention"),
        (ran("exact|asked", "exact"), "not judged",
         f"All 2 blocks ran exact attention, {GUARD} in 75% of the forwards: {NOT_INT8} {OFF}"),
        (ran(*["exact"] * 4, "asked"), "not judged",
         f"4 of 5 blocks ran exact attention, {GUARD}: {NOT_INT8} {OFF}"),
        (ran("exact-16bit", "exact-16bit", asked="exact attention and int8 Linears"),
         "not judged",
         f"All 2 blocks ran exact attention and Linears in 16 bits, {GUARD}: this is not a "
         f"verdict on exact attention and int8 Linears {OFF}"),
        (ran("asked", "asked|skipped"), "unchanged",
         "1 of 2 blocks were skipped by a cache or another hook in 50% of the forwards; the rest "
         "ran int8 attention"),
        (ran("exact", "exact|skipped", "asked|skipped"), "not judged",
         f"2 of 3 blocks were skipped by a cache or another hook in 50% of the forwards; 2 of 3 "
         f"blocks ran exact attention, {GUARD} in 75% of the forwards: {NOT_INT8} {OFF}"),
        (ran("asked|skipped", "exact|skipped", "asked|skipped"), "unchanged",
         "All 3 blocks were skipped by a cache or another hook in 50% of the forwards; 1 of 3 "
         f"blocks ran exact attention, {GUARD} in 50% of the forwards; the rest ran int8 "
         "attention"),
        # "auto" takes exact attention for few tokens, so that is what was asked for.
        (ran("length", "length"), "unchanged", f"All 2 blocks ran {SHORT}: {NOT_INT8}"),
        (ran("length", "length", part=()), "not judged",
         f"All 2 blocks ran {SHORT}: {NOT_INT8}"),
        (ran("wide-values", "exact", part=("wide-values",)), "unchanged",
         f"1 of 2 blocks ran quantised attention with values in 16 bits, {GUARD}; 1 of 2 blocks "
         f"ran exact attention, {GUARD}"),
        (ran("wide-values", part=()), "not judged",
         f"All 1 blocks ran quantised attention with values in 16 bits, {GUARD}: {NOT_INT8} "
         f"{OFF}"),
    ],
)  # fmt: skip
def test_a_verdict_is_about_what_was_asked_for(given: Ran, word: str, said: str) -> None:
    found = judge([one(35.0)] * 3, CONTROL, ran=given)
    assert (found.word, str(found.ran)) == (word, said)
    assert found.reasons == ((said,) if word == "not judged" else ())
    # What did not run is not called changed either, and the numbers are said.
    far = judge([one(5.0)] * 3, CONTROL, ran=given)
    assert far.word == ("not judged" if word == "not judged" else "changed") and far.reasons[1:]


def test_nobody_counts_the_calls_of_another_backend() -> None:
    assert Ran.of("int8 attention", (), [(), ()]) is None
