"""What the guard's measure makes of a known error: of a sample, rows, a head, an input."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from turbo_rcm_patch.patching import measure as file
from turbo_rcm_patch.patching.measure import measure

ROWS, CHANNELS = 200, 16


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def shaken(x: torch.Tensor, share: float) -> torch.Tensor:
    """x with an error of this share that has nothing of x."""
    error = noise(*x.shape).roll(1, -1)
    error = error - (error * x).sum() / x.square().sum() * x
    return x + share * x.norm() / error.norm() * error


def test_room_is_what_the_architecture_says() -> None:
    assert (file.ROW_ROOM, file.HEAD_ROOM, file.KEY_ROOM) == (4.0, 4.0, 4.0)
    assert file.NORM_SHARE == file.GAIN_SHARE == 0.25 and file.WORST_ROWS == 100


def test_a_sample() -> None:
    author, base = noise(3, ROWS, CHANNELS), torch.zeros(3, ROWS, CHANNELS)
    ours = author.clone()
    ours[1] = shaken(ours[1], 0.02)
    found = measure((ours,), (author,), (base,), inputs=[])
    assert found.error == pytest.approx(0.02, rel=1e-3)
    assert (found.sample, found.where, found.head) == (1, "sample 1", None)


def test_what_a_pair_adds_is_the_size() -> None:
    base = 10 * noise(1, ROWS, CHANNELS)
    added = noise(1, ROWS, CHANNELS).roll(1, 1)
    found = measure((base + shaken(added, 0.03),), (base + added,), (base,), inputs=[])
    assert found.error == pytest.approx(0.03, rel=1e-2)


def test_a_few_rows() -> None:
    author, base = noise(1, ROWS, CHANNELS), torch.zeros(1, ROWS, CHANNELS)
    ours = author.clone()
    ours[0, 70:72] *= 1.5
    found = measure((ours,), (author,), (base,), inputs=[])
    assert found.rows == (70, 71) and found.where == "rows 70, 71 of sample 0"
    typical = author[0].square().sum(-1).median()
    own = author[0, 70:72].square().sum(-1)
    expected = 0.5 * (own.mean() / torch.maximum(typical, own.mean())).sqrt() / 4
    assert found.error == found.row_error == pytest.approx(float(expected), rel=1e-3)


def test_a_head() -> None:
    x, base = noise(2, ROWS, CHANNELS), torch.zeros(2, ROWS, CHANNELS)
    before = noise(2, ROWS, 4 * 8)
    wrong = before.clone()
    wrong[1, :, 8:16] = shaken(wrong[1, :, 8:16], 0.2)
    found = measure((x,), (x,), (base,), inputs=[], heads=4, before=before, ours_before=wrong)
    assert found.error == found.head_error == pytest.approx(0.2 / 4, rel=1e-2)
    assert (found.sample, found.head, found.where) == (1, 1, "head 1 of sample 1")


@pytest.mark.parametrize("room", [0.25, 1.0])
def test_an_input(room: float) -> None:
    x, base = noise(2, ROWS, CHANNELS), torch.zeros(2, ROWS, CHANNELS)
    seen = noise(2, ROWS, CHANNELS)
    found = measure((x,), (x,), (base,), inputs=[(seen * 1.02, seen, room)])
    assert found.error == pytest.approx(0.02 / room, rel=1e-3)
    assert found.where.startswith("the input of the branch")


def test_the_worst_stream_counts() -> None:
    text, video = noise(1, 30, CHANNELS), noise(1, ROWS, CHANNELS)
    base = (torch.zeros_like(text), torch.zeros_like(video))
    ours = (shaken(text, 0.03), shaken(video, 0.01))
    found = measure(ours, (text, video), base, inputs=[])
    assert found.error == pytest.approx(0.03, rel=1e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_an_endless_error(value: float) -> None:
    author, base = noise(2, ROWS, CHANNELS), torch.zeros(2, ROWS, CHANNELS)
    ours = author.clone()
    ours[1, 5, 3] = value
    found = measure((ours,), (author,), (base,), inputs=[])
    assert found.error == float("inf") and found.sample == 1


def test_two_roundings_are_no_error() -> None:
    author = noise(1, ROWS, 256)
    base = torch.zeros_like(author)
    for dtype in (torch.bfloat16, torch.float16):
        once = author.to(dtype)
        again = (author * (1 + 2e-4)).to(dtype)
        assert measure((again,), (once,), (base.to(dtype),), inputs=[]).error < 1e-3
        wrong = shaken(author, 0.03).to(dtype)
        found = measure((wrong,), (once,), (base.to(dtype),), inputs=[])
        assert found.error == pytest.approx(0.03, rel=0.06)


# --- what is too large or too small as a whole ---------------------------------------------------


def test_a_sample_that_is_too_small() -> None:
    author, base = noise(3, ROWS, CHANNELS), torch.zeros(3, ROWS, CHANNELS)
    ours = author.clone()
    ours[1] *= 0.97
    found = measure((ours,), (author,), (base,), inputs=[])
    assert found.error == pytest.approx(0.03 / 0.25, rel=1e-3)
    assert found.gain == pytest.approx(0.03, rel=1e-3)
    assert (found.sample, found.where) == (1, "the size of sample 1, 3.0% off")


@pytest.mark.parametrize("share", [0.0, 0.02, 0.06])
def test_a_head_that_is_too_large_behind_an_honest_error(share: float) -> None:
    x, base = noise(2, ROWS, CHANNELS), torch.zeros(2, ROWS, CHANNELS)
    before = noise(2, ROWS, 4 * 64)
    fine = shaken(before, share)
    wrong = fine.clone()
    wrong[1, :, 64:128] *= 1.05
    given: dict[str, Any] = {"inputs": [], "heads": 4, "before": before}
    assert measure((x,), (x,), (base,), ours_before=fine, **given).gain == 0.0
    found = measure((x,), (x,), (base,), ours_before=wrong, **given)
    assert 0.025 < found.gain < 0.051 and found.error > 0.1
    assert (found.sample, found.head) == (1, 1) and "the size of head 1" in found.where


def test_a_head_that_is_too_large_only_behind_the_projection() -> None:
    before, weight = noise(1, ROWS, 4 * 64), noise(256, 4 * 64)
    gates = (0.1 + noise(1, 1, 256).abs()).expand(1, ROWS, 256)
    base = noise(1, ROWS, 256).roll(3, 1)
    made = before @ weight.T * gates
    columns = weight.clone()
    columns[:, 64:128] *= 1.05
    ours = before @ columns.T * gates
    given: dict[str, Any] = {
        "inputs": [], "heads": 4, "before": before, "ours_before": before, "gates": (gates,),
        "weight": weight,
    }  # fmt: skip
    honest = shaken(made, 0.04)
    assert measure((base + honest,), (base + made,), (base,), **given).error < 0.06
    found = measure((base + ours + honest - made,), (base + made,), (base,), **given)
    assert found.head == 1 and found.error > 0.1 and found.gain > 0.025


def test_a_head_that_adds_next_to_nothing_is_measured_by_the_others() -> None:
    """Twice as large a share of it changes nothing that anybody sees."""
    before, weight = noise(2, ROWS, 4 * 64), noise(256, 4 * 64)
    before[:, :, 64:128] *= 1e-2
    gates, base = (torch.ones(2, ROWS, 256),), noise(2, ROWS, 256).roll(3, 1)
    made = before @ weight.T
    given: dict[str, Any] = {
        "inputs": [], "heads": 4, "before": before, "gates": gates, "weight": weight,
    }  # fmt: skip
    for head, judged in ((slice(64, 128), False), (slice(128, 192), True)):
        ours = made.clone()
        ours[0] += before[0, :, head] @ weight[:, head].T
        found = measure((base + ours,), (base + made,), (base,), **given)
        assert (found.head_error > 0.5) == judged, found.head_error
        assert judged or found.head_error < 0.01


def test_a_step_of_rounding_is_no_gain() -> None:
    """What is added to a stream in bf16 is lost, or a whole step, where it is small."""
    base = (10 * noise(1, 400, 256)).bfloat16()
    for size in (0.001, 0.01, 0.1):
        added = size * noise(1, 400, 256).roll(5, 1)
        author = (base.float() + added).bfloat16()
        ours = (base.float() + 0.01 * noise(1, 400, 256) + added).bfloat16()
        assert measure((ours,), (author,), (base,), inputs=[]).gain == 0.0


def test_chunks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    author, base = noise(2, ROWS, CHANNELS), torch.zeros(2, ROWS, CHANNELS)
    before = noise(2, ROWS, 4 * 8)
    given: dict[str, Any] = {
        "inputs": [(shaken(before, 0.01), before, 1.0)], "heads": 4, "before": before,
        "ours_before": shaken(before, 0.03), "gates": (torch.ones_like(author),),
        "weight": noise(CHANNELS, 32), "last_keys": 0.1 * before,
    }  # fmt: skip
    whole = measure((shaken(author, 0.02),), (author,), (base,), **given)
    monkeypatch.setattr(file, "_CHUNK", 7 * 2 * CHANNELS)
    parts = measure((shaken(author, 0.02),), (author,), (base,), **given)
    assert parts.error == pytest.approx(whole.error, rel=1e-5)
    assert (parts.head, parts.rows, parts.where) == (whole.head, whole.rows, whole.where)
