"""A stage of training on one weight: what it keeps when it is killed, and what it resumes."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from training import stage as module
from training.families import Budget
from training.stage import OutOfTimeError, Recorded, Run, Stage, TrainingError


class _Blocks(nn.Sequential):
    """A network with a block, whose matrix is trained by Muon where a budget asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(nn.Linear(2, 3)), nn.Linear(3, 1)


def _stage(out: Path, steps: int = 10, *, muon: bool = False) -> Stage:
    torch.manual_seed(0)
    run, net = Run(out, torch.device("cpu")), _Blocks() if muon else nn.Linear(2, 1)
    return Stage(run, "teacher", {"net": net}, Budget(steps, 1, 0.1, muon), salt=1)


def _loss(stage: Stage) -> Tensor:
    noise = torch.randn(1, 2, generator=stage.noise)
    return (stage.networks["net"](noise) - 3).square().mean()


needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 has it")


@needs_muon
def test_muon_trains_the_matrices_of_blocks_alone(tmp_path: Path) -> None:
    steps = {}
    for muon in (False, True):
        stage = _stage(tmp_path / str(muon), 1, muon=True)
        if not muon:
            run = Run(tmp_path / "adamw", torch.device("cpu"))
            stage = Stage(run, "teacher", stage.networks, Budget(1, 1, 0.1), salt=1)
        before = {name: p.clone() for name, p in stage.networks["net"].named_parameters()}
        stage.train(lambda stage=stage: _loss(stage))
        after = dict(stage.networks["net"].named_parameters())
        steps[muon] = {name: after[name] - old for name, old in before.items()}
    for name in ("blocks.0.bias", "head.weight", "head.bias"):
        torch.testing.assert_close(steps[True][name], steps[False][name])
    assert not torch.allclose(steps[True]["blocks.0.weight"], steps[False]["blocks.0.weight"])


@pytest.mark.parametrize("muon", [False, pytest.param(True, marks=needs_muon)])
def test_a_stage_that_is_resumed_ends_as_if_it_had_not_been(tmp_path: Path, muon: bool) -> None:
    whole = _stage(tmp_path / "whole", 30, muon=muon)
    whole.train(lambda: _loss(whole))
    first = _stage(tmp_path / "parts", 30, muon=muon)

    def dies() -> Tensor:
        if first.step == 20:
            raise KeyboardInterrupt
        return _loss(first)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "SAVE_EVERY", -1.0)
        first.train(dies)
    rest = _stage(tmp_path / "parts", 30, muon=muon)
    assert rest.step == 20
    rest.train(lambda: _loss(rest))
    for kind in ("networks", "average"):
        ours, theirs = (getattr(one, kind)["net"].state_dict() for one in (rest, whole))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_pieces_that_are_over_end_as_the_whole(tmp_path: Path) -> None:
    whole = _stage(tmp_path / "whole", 45)
    whole.train(lambda: _loss(whole))
    for step in (1, 10, 20):  # where a stage looks at the clock
        part = _stage(tmp_path / "parts", 45)
        part.run.minutes = 1e-9
        with pytest.raises(OutOfTimeError, match="of 45"):
            part.train(partial(_loss, part))
        assert part.step == step
    part = _stage(tmp_path / "parts", 45)
    part.train(lambda: _loss(part))
    ours, theirs = (one.average["net"].state_dict() for one in (part, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_averaged_weights_alone_are_enough_to_go_on(tmp_path: Path) -> None:
    stage = _stage(tmp_path)
    stage.step = 5
    stage.save(light=True)
    (tmp_path / "state" / "teacher.pt").unlink()
    resumed = _stage(tmp_path)
    assert resumed.step == 5
    for nets in (resumed.networks, resumed.average):
        torch.testing.assert_close(
            nets["net"].weight, stage.average["net"].weight, rtol=1e-3, atol=1e-3
        )


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


def test_a_finished_stage_goes_on_with_more_steps(tmp_path: Path) -> None:
    stage = _stage(tmp_path)
    stage.train(lambda: _loss(stage))
    assert _stage(tmp_path).done and not _stage(tmp_path, 12).done


def test_weights_that_are_not_finite_replace_no_checkpoint(tmp_path: Path) -> None:
    """The loss is finite, its gradient is not."""
    stage = _stage(tmp_path, 40)
    stage.save()

    def loss() -> Tensor:
        loss = _loss(stage)
        if stage.step == 19:
            loss.register_hook(lambda gradient: gradient * torch.nan)
        return loss

    with pytest.raises(TrainingError, match="diverged at step 20.*learning rate"):
        stage.train(loss)
    kept = _stage(tmp_path, 40)
    assert kept.step == 0 and all(p.isfinite().all() for p in kept.parameters)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_recorded_loss_hands_out_the_gradients_of_the_eager_one(device: str) -> None:
    torch.manual_seed(0)
    net = nn.Conv3d(2, 3, 3).to(device)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def loss_of(x: Tensor, target: Tensor) -> Tensor:
        return (net(x).tanh() - target).square().mean()

    recorded = Recorded(loss_of, list(net.parameters()))
    for size in (5, 7, 5):  # another shape has a graph of its own
        for _ in range(2):  # and a graph sees weights that have moved, and new inputs
            x = torch.randn(1, 2, size, size, size, device=device)
            target = torch.randn(1, 3, size - 2, size - 2, size - 2, device=device)
            loss = recorded(x, target)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            expected = torch.autograd.grad(loss_of(x, target), list(net.parameters()))
            for parameter, gradient in zip(net.parameters(), expected, strict=True):
                torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(loss, loss_of(x, target))
            optimizer.step()


def test_known_gradients_are_handed_out_and_added() -> None:
    weight = nn.Parameter(torch.ones(2))
    for times in (1.0, 2.0):
        known = Recorded._hand_out(torch.tensor(5.0), [weight], (torch.tensor([3.0, 4.0]),))
        assert known.item() == 5.0
        known.backward()
        torch.testing.assert_close(weight.grad, times * torch.tensor([3.0, 4.0]))
