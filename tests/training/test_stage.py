"""A stage of training on one weight: what it keeps when it is killed, and what it resumes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from training.run import Budget, Run, Stage, TrainingError


class Killed(BaseException):
    """The process ends here."""


def _stage(out: Path, *, minutes: float = 1.0, steps: int | None = 10, lr: float = 0.1) -> Stage:
    run = Run(out, torch.device("cpu"), seed=0, autocast=False)
    torch.manual_seed(0)
    return Stage(run, "teacher", {"net": nn.Linear(2, 1)}, Budget(minutes, steps, 1, lr), salt=1)


def _loss(stage: Stage) -> Callable[[], dict[str, Tensor]]:
    x = torch.ones(1, 2)
    return lambda: {"loss": (stage.networks["net"](x) - 3).square().mean()}


def _train(stage: Stage) -> None:
    stage.train(_loss(stage), lambda _: None)


def _save_killed(stage: Stage, before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save, and be killed before the change of this number to the folder, if there are so many."""
    changes = iter(range(1, 100))

    def killing(do: Callable[..., object]) -> Callable[..., object]:
        def instead(*args: object, **how: object) -> object:
            if next(changes) == before:
                raise Killed
            return do(*args, **how)

        return instead

    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        for method in ("mkdir", "write_bytes", "rename"):
            patch.setattr(Path, method, killing(getattr(Path, method)))
        stage.save()


@pytest.mark.parametrize("first", range(1, 5))
@pytest.mark.parametrize("second", range(1, 5))
def test_no_kill_loses_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, second: int
) -> None:
    stage = _stage(tmp_path)
    stage.step = 500
    stage.save()
    for before in (first, second):
        resumed = _stage(tmp_path)
        assert resumed.step >= 500
        resumed.step += 100
        _save_killed(resumed, before, monkeypatch)
    assert _stage(tmp_path).step >= 500


def _control(out: Path, **values: float) -> None:
    (out / "control.json").write_text(json.dumps({"teacher": values}))


def test_a_stage_that_was_shortened_stays_finished(tmp_path: Path) -> None:
    _control(tmp_path, minutes=3)
    stage = _stage(tmp_path, minutes=7, steps=None)
    stage.seconds = 3 * 60.0
    _train(stage)
    assert stage.done
    resumed = _stage(tmp_path, minutes=7, steps=None)
    assert resumed.done and resumed.progress == 1.0


def test_a_stage_that_was_lengthened_goes_on(tmp_path: Path) -> None:
    stage = _stage(tmp_path, minutes=5, steps=None)
    stage.seconds = 6 * 60.0
    stage.save()
    _control(tmp_path, minutes=9, lr=0.5)
    resumed = _stage(tmp_path, minutes=5, steps=None)
    assert resumed.open and resumed.progress == pytest.approx(6 / 9) and resumed.lr == 0.5


@pytest.mark.parametrize("limit", [None, 0.0], ids=["at a check", "at the time limit"])
def test_weights_that_are_not_finite_replace_no_checkpoint(
    tmp_path: Path, limit: float | None
) -> None:
    """The loss is finite, its gradient is not."""
    stage = _stage(tmp_path, steps=40)
    stage.save()
    stage.run.save_every = -1.0
    bad = 20 if limit is None else 7

    def losses() -> dict[str, Tensor]:
        loss = stage.networks["net"](torch.ones(1, 2)).square().mean()
        if stage.step == bad - 1:
            loss.register_hook(lambda gradient: gradient * torch.nan)
            if limit is not None:
                stage.run.limit = -1.0
        return {"loss": loss}

    with pytest.raises(TrainingError, match=f"diverged at step {bad}.*--resume.*--lr-teacher"):
        stage.train(losses, lambda _: None)
    kept = _stage(tmp_path, steps=40)
    assert all(p.isfinite().all() for p in kept.parameters)
