"""A stage of training on one weight: what it keeps when it is killed, and what it resumes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from training.run import Budget, Run, Stage


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
