"""A time limit and a finished student spare the work of encoding clips and calling the teacher."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from training import family_wan, train_flow
from training.build import TinyConfig, build_tokenizer, tokenize
from training.probe import Flow
from training.run import Budget, Run
from training.train_flow import Corpus, build_corpus, train_student, train_teacher

CONFIG = TinyConfig.micro()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times from which trajectories of the teacher are asked for."""
    asked: list[float] = []
    monkeypatch.setattr(train_flow, "ode", lambda _, x, t, __: asked.append(t) or x)
    return asked


@pytest.fixture
def flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Flow:
    monkeypatch.setattr(train_flow, "probe_flow", lambda *_, **__: None)
    run = Run(tmp_path, torch.device("cpu"), seed=0, autocast=False)
    return Flow(run, family_wan, CONFIG, torch.nn.Identity(), 1.5, compiled=False, probe_count=1)


def _clips() -> Corpus:
    ids, mask = tokenize(build_tokenizer(CONFIG), ["a red circle", "a blue square", ""], 24)
    latents = torch.zeros(2, *CONFIG.latent_shape, dtype=torch.bfloat16)
    return Corpus(latents, ids[:2], mask[:2], (ids[2:], mask[2:]))


def _train_student(flow: Flow, *, steps: int, fill: int, clips=_clips) -> None:
    teacher = family_wan.build_transformer(CONFIG)
    encoder = family_wan.build_text_encoder(CONFIG)
    budget = Budget(1.0, steps, 2, 1e-3)
    train_student(flow, clips, teacher, encoder, budget, fill=fill, refresh=6)


def test_a_limit_ends_the_encoding_of_clips(flow: Flow) -> None:
    vae = family_wan.build_vae(CONFIG).eval()
    how = {"count": 6, "seconds": 60.0, "batch": 2}
    assert len(build_corpus(flow.run, CONFIG, vae, **how).ids) == 6
    flow.run.limit = -1.0
    assert len(build_corpus(flow.run, CONFIG, vae, **how).ids) == 2


def test_a_limit_ends_the_teacher_s_first_batches(flow: Flow, calls: list[float]) -> None:
    flow.run.limit = -1.0
    _train_student(flow, steps=2, fill=3)
    assert not calls


def test_a_student_goes_on_at_any_step_without_first_batches(
    flow: Flow, calls: list[float]
) -> None:
    _train_student(flow, steps=1, fill=1)
    calls.clear()
    _train_student(flow, steps=2, fill=0)
    assert len(calls) == 1


def test_finished_stages_need_no_clips(flow: Flow, calls: list[float]) -> None:
    budget = Budget(1.0, 1, 2, 1e-3)
    train_teacher(flow, _clips, budget)
    _train_student(flow, steps=1, fill=1)
    calls.clear()
    train_teacher(flow, pytest.fail, budget)
    _train_student(flow, steps=1, fill=1, clips=pytest.fail)
    assert not calls
