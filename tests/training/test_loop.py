"""A stage of training on one weight: what it keeps when it is killed, and what it resumes."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from training import loop
from training.loop import Budget, Run, Stage


class _Blocks(nn.Sequential):
    """A network with a block, whose matrix is trained by Muon where a budget asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(nn.Linear(2, 3)), nn.Linear(3, 1)


def _stage(out: Path, steps: int = 45, *, muon: bool = False) -> Stage:
    torch.manual_seed(0)
    run = Run(out, torch.device("cpu"))
    return Stage(run, "teacher", {"net": _Blocks()}, Budget(steps, 1, 0.1, muon))


def _loss(stage: Stage) -> Tensor:
    noise = torch.randn(1, 2, generator=stage.noise)
    return (stage.networks["net"].head(stage.networks["net"].blocks(noise)) - 3).square().mean()


def _same(a: Stage, b: Stage) -> bool:
    states = [[s.networks["net"].state_dict(), s.average["net"].state_dict()] for s in (a, b)]
    return all(torch.equal(x[name], y[name]) for x, y in zip(*states, strict=True) for name in x)


needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 has it")


@pytest.mark.parametrize("muon", [False, pytest.param(True, marks=needs_muon)])
def test_pieces_end_as_the_whole(tmp_path: Path, muon: bool, monkeypatch) -> None:
    """Killed several times, each time with the same command again."""
    whole = _stage(tmp_path / "whole", muon=muon)
    whole.train(partial(_loss, whole))
    monkeypatch.setattr(loop, "SAVE_EVERY", -1.0)
    for begins, ends in ((0, 5), (1, 15), (10, 42)):  # It saves in the steps that it logs.
        part = _stage(tmp_path / "parts", muon=muon)
        assert part.step == begins

        def dies(part: Stage = part, last: int = ends) -> Tensor:
            if part.step == last:
                raise KeyboardInterrupt
            return _loss(part)

        with pytest.raises(KeyboardInterrupt):
            part.train(dies)
    rest = _stage(tmp_path / "parts", muon=muon)
    assert rest.step == 40
    rest.train(partial(_loss, rest))
    assert _same(rest, whole)
    assert _stage(tmp_path / "parts", muon=muon).done
    assert not _stage(tmp_path / "parts", 50, muon=muon).done


def test_a_kill_while_saving_loses_no_checkpoint(tmp_path, monkeypatch) -> None:
    stage = _stage(tmp_path)
    stage.step = 5
    stage.save()
    stage.step = 6

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", killed)
        stage.save()
    assert _stage(tmp_path).step == 5


def test_weights_that_are_not_finite_replace_no_checkpoint(tmp_path: Path) -> None:
    """The loss is finite, its gradient is not."""
    stage = _stage(tmp_path)
    stage.save()

    def loss() -> Tensor:
        loss = _loss(stage)
        if stage.step == 19:
            loss.register_hook(lambda gradient: gradient * torch.nan)
        return loss

    with pytest.raises(RuntimeError, match="non-finite"):
        stage.train(loss)
    kept = _stage(tmp_path)
    assert kept.step == 0 and all(p.isfinite().all() for p in kept.parameters)
