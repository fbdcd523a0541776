"""What the guard's measure makes of a known error: of a sample, rows, a head, an input."""

from __future__ import annotations

import pytest
import torch

from turbo_rcm_patch.patching import measure as file
from turbo_rcm_patch.patching.measure import measure

ROWS, CHANNELS = 200, 16


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def test_room_is_what_the_architecture_says() -> None:
    assert (file.ROW_ROOM, file.HEAD_ROOM, file.KEY_ROOM) == (4.0, 4.0, 4.0)
    assert file.NORM_SHARE == 0.25 and file.WORST_ROWS == 100


def test_a_sample() -> None:
    author, base = noise(3, ROWS, CHANNELS), torch.zeros(3, ROWS, CHANNELS)
    ours = author.clone()
    ours[1] *= 1.02
    found = measure((ours,), (author,), (base,), inputs=[])
    assert found.error == pytest.approx(0.02, rel=1e-3)
    assert (found.sample, found.where, found.head) == (1, "sample 1", None)


def test_what_a_pair_adds_is_the_size() -> None:
    base = 10 * noise(1, ROWS, CHANNELS)
    added = noise(1, ROWS, CHANNELS).roll(1, 1)
    found = measure((base + 1.03 * added,), (base + added,), (base,), inputs=[])
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
    wrong[1, :, 8:16] *= 1.2
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
    found = measure((1.03 * text, 1.01 * video), (text, video), base, inputs=[])
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
        wrong = (author * 1.03).to(dtype)
        found = measure((wrong,), (once,), (base.to(dtype),), inputs=[])
        assert found.error == pytest.approx(0.03, rel=0.06)
