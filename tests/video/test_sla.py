"""Pipelines whose transformer holds SLA's proj_l: what is generated, and compared with what."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.checkpoints.test_extra import pipeline_of
from tests.checkpoints.wan_model import SLA, converted
from tests.measures import relative_l2
from tests.video.micro import QUICK, SMALL, options
from turbo_rcm_patch import PatchConfig, unload_extra
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.patching import sla_as_defined
from turbo_rcm_patch.video.comparison import RUNS, compare, fast_on_a_cpu, identify
from turbo_rcm_patch.video.generation import generate
from turbo_rcm_patch.video.load import load_pipeline
from turbo_rcm_patch.video.settings import Settings
from turbo_rcm_patch.video.store import Store

pytestmark = pytest.mark.usefixtures("no_pictures_here")
PROMPT = "a red circle moves left"
SETTINGS = Settings(sampler="rcm", steps=2, guidance_scale=1.0, **SMALL)


@pytest.fixture(scope="module")
def sla_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two experts."""
    place = tmp_path_factory.mktemp("sla")
    return pipeline_of(*(converted(SLA, place, f"{seed}", seed=seed) for seed in (1, 2)))


def test_the_baseline_is_sla_and_not_dense_attention(sla_folder, tmp_path, monkeypatch) -> None:
    pipe, settings = load_pipeline(sla_folder, device="cpu"), SETTINGS
    experts = [pipe.transformer, pipe.transformer_2]
    dense = generate(pipe, PROMPT, settings=settings)
    monkeypatch.setattr(Store, "remove_clips", lambda *_: None)
    before = [sorted(m.__dict__) for part in experts for m in part.modules()]
    found = compare(pipe, PROMPT, out=tmp_path, settings=settings)
    assert [sorted(m.__dict__) for part in experts for m in part.modules()] == before

    with sla_as_defined(pipe, 0.1) as count, fast_on_a_cpu(pipe):
        assert count == 2 * len(experts)
        sla = generate(pipe, PROMPT, settings=settings)
    store = Store(tmp_path, json.loads(found.metrics.read_text())["identity"], fresh=False)
    frames = {run: store.load_clip(found.results[0].key, run)[0] for run in RUNS}
    assert torch.equal(frames["baseline"], sla.frames)
    assert relative_l2(dense.latents, sla.latents) > 0.02
    far = relative_l2(dense.frames, sla.frames)
    for variant in ("patched", "control"):
        assert 0 < relative_l2(frames[variant], sla.frames) < far / 2, variant

    said = f"SLA computed by its definition in plain torch in {count} attentions"
    assert said in found.model.baseline and "sla_topk=0.1" in found.model.baseline
    assert found.model.baseline in str(found)
    metrics = json.loads(found.metrics.read_text())
    assert metrics["baseline"] == found.model.baseline
    assert said in found.report.read_text()
    # Against dense attention as truth the unpatched network's error would be `far`.
    assert found.model.network is not None and found.model.network.unpatched < 0.02
    assert found.model.network.ratio < 3


def test_int4_is_caught(sla_folder: Path, tmp_path: Path) -> None:
    """The network number has the same power as without SLA."""
    pipe, settings = load_pipeline(sla_folder, device="cpu"), SETTINGS
    config = PatchConfig(attention="int4", guard=False)
    found = compare(pipe, PROMPT, out=tmp_path, settings=settings, config=config)
    assert found.verdict == "changed"


def test_a_finished_comparison_does_not_serve_another_proj_l(sla_folder: Path, tmp_path) -> None:
    pipe, settings = load_pipeline(sla_folder, device="cpu"), SETTINGS
    first = identify(pipe, settings.as_dict(), PatchConfig())
    unload_extra(pipe.transformer)
    assert identify(pipe, settings.as_dict(), PatchConfig()) != first


def test_the_commands_see_it(sla_folder: Path, tmp_path: Path, capsys) -> None:
    """`pairs` loads no weights."""
    assert main(["pairs", "--model", str(sla_folder)]) == 0
    assert "attn1.proj_l" in capsys.readouterr().out
    given = options(model=sla_folder, prompt=PROMPT, out=tmp_path / "a.mp4")
    model = ["generate", *QUICK, *given]
    assert main([*model, "--sla-topk", "0.3"]) == 0
    assert "attn1.proj_l" in capsys.readouterr().out
    assert main([*model, "--no-patch"]) == 0
    assert "they run dense, without SLA" in capsys.readouterr().out
    assert main([*model, "--sla-topk", "0"]) == 2
    assert "PatchConfig.sla_topk" in capsys.readouterr().err
