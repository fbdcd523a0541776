"""The tokenizer, the flow's arithmetic, and a few steps of every stage with a micro network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline

from tests.processes import together
from training import train as module
from training.__main__ import main
from training.evaluate import evaluate
from training.families import Wan, build_tokenizer, small
from training.flow import few_step, ode
from training.stage import Run, Stage, TrainingError
from training.train import decode, install, train
from turbo_rcm_patch.errors import ModelFolderError
from turbo_rcm_patch.tiny.prompts import DEMO_PROMPTS, caption, clips
from turbo_rcm_patch.video import generate, load_pipeline

ROOT = Path(__file__).parents[2]
FAMILY = Wan()
MICRO = small(FAMILY.recipe)
times = FAMILY.times


def _train(out: Path, seed: int = 0) -> None:
    train(Run(out, torch.device("cpu"), seed), FAMILY, MICRO)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny") / "run"
    _train(out)
    return out


def test_ode_is_second_order() -> None:
    """dx/dt = x has the solution x(0) = x(1) / e."""
    start = torch.ones(1, 1, 1, 1, 1, dtype=torch.float64)
    errors = [
        abs(float(ode(lambda x, t: x.double(), start, 1.0, n)) - 0.36787944117) for n in (20, 40)
    ]
    # `ode` reads velocities in fp32, far below these errors
    assert errors[0] / errors[1] > 3.0 and errors[1] < 1e-3


def test_training_decoder_is_the_vae_without_its_clamp() -> None:
    torch.manual_seed(0)
    vae = FAMILY.build_vae(MICRO)
    latents = torch.randn(1, *MICRO.latent_shape(MICRO.buckets[0]))
    with torch.no_grad():
        assert torch.equal(decode(vae, latents).clamp(-1, 1), vae.decode(latents).sample)


def test_tokenizer_round_trip() -> None:
    tokenizer = build_tokenizer(FAMILY.recipe, FAMILY.source.words)
    for clip in clips(held_out=True):
        text = caption(clip)
        ids = tokenizer(text).input_ids
        assert len(ids) <= FAMILY.recipe.text_tokens and tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_samplers_reach_the_data_when_the_velocity_is_exact() -> None:
    """All mass on one point: v = (x - point) / t, a straight line; it is reached exactly."""
    point = torch.full((2, 1, 1, 2, 2), 0.7)

    def velocity(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (x - point) / t[:, None, None, None, None]

    noise = torch.randn(point.shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ode(velocity, noise, 1.0, 5), point)
    for steps in (1, 2, 4):
        found = few_step(velocity, noise, times(steps), torch.Generator().manual_seed(1))
        torch.testing.assert_close(found, point)


def test_run_leaves_what_it_promises(trained: Path) -> None:
    records = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    assert {r.get("stage") for r in records} >= {"vae", "teacher", "student", "decoder"}
    assert records[-1]["event"] == "finished"


@pytest.mark.parametrize("name", ["wan_teacher", "wan_student"])
def test_folder_loads_and_generates(trained: Path, name: str) -> None:
    made = generate(load_pipeline(trained / name, device="cpu"), DEMO_PROMPTS[0])
    assert made.frames.shape == (9, 32, 32, 3) and torch.isfinite(made.frames).all()


def test_interrupted_run_ends_as_if_it_had_not_been(trained: Path, tmp_path, monkeypatch) -> None:
    """Interrupted before the student and run again, the student is the same to the last bit."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(module, "_train_student", interrupted)
        _train(tmp_path / "run")
    _train(tmp_path / "run")
    name = "wan_student/transformer/diffusion_pytorch_model.safetensors"
    assert (tmp_path / "run" / name).read_bytes() == (trained / name).read_bytes()


def test_two_processes_train_together(tmp_path: Path) -> None:
    """Their shards and batches differ, and both finish."""
    code = "import sys; from training.__main__ import main; sys.exit(main(sys.argv[1:]))"
    command = f"train --micro --family wan --device cpu --out {tmp_path}".split()
    for done in together(code, *command, cwd=ROOT):
        assert done.code == 0, done
    assert '"finished"' in (tmp_path / "log.jsonl").read_text()
    assert (tmp_path / "wan_student" / "model_index.json").is_file()


def test_a_finished_run_trains_nothing(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trains(stage: Stage, *_: object) -> None:
        assert stage.done, stage.name

    monkeypatch.setattr(Stage, "train", trains)
    _train(trained)


@pytest.mark.parametrize("text", ['{"mine": 1}', "no JSON"])
def test_a_folder_of_another_origin_is_not_trained_into(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(TrainingError, match="another run"):
        _train(tmp_path)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("config.json", text)]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("evaluate --model {}/nowhere --out {}/x", "no such folder"),
        ("evaluate --model {} --out {}/x", "Train it first"),
        ("install --out {}/nowhere", "Train it first"),
    ],
)
def test_a_mistake_is_answered_in_a_few_lines(command: str, said: str, tmp_path, capsys) -> None:
    assert main(command.replace("{}", str(tmp_path)).split()) == 2
    error = capsys.readouterr().err
    assert said in " ".join(error.split()) and len(error.splitlines()) < 8


def test_install_leaves_the_card_and_refuses_what_is_too_large(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "README.md").write_text("card")
    (tmp_path / "model_index.json").write_text("{}")
    install(FAMILY, trained / "wan_student", tmp_path)
    assert (tmp_path / "README.md").read_text() == "card"
    WanPipeline.from_pretrained(tmp_path)
    with pytest.raises(ModelFolderError, match="turbo_rcm.json"):
        install(FAMILY, tmp_path / "vae", tmp_path)
    monkeypatch.setattr(FAMILY, "most_bytes", 1000)
    with pytest.raises(ModelFolderError, match="1000 bytes"):
        install(FAMILY, trained / "wan_student", tmp_path)


def test_evaluation_writes_its_numbers(trained: Path, tmp_path: Path) -> None:
    student, teacher = trained / "wan_student", trained / "wan_teacher"
    results = evaluate(student, tmp_path, teacher=teacher, count=3, steps=(2,))
    assert json.loads((tmp_path / "evaluation.json").read_text()) == results
    zeroed = {f"zeroed_{one}_attention" for one in ("self", "cross")}
    assert {"student_2_steps", "teacher", *zeroed} <= set(results)
