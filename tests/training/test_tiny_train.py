"""The tokenizer, the flow's arithmetic, and a few steps of every stage with a micro network."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline

from training.build import TinyConfig, build_tokenizer
from training.evaluate import Evaluation, evaluate, zeroed
from training.family_wan import build_vae, times
from training.flow import few_step, ode
from training.train import install, main
from training.train_vae import decode
from turbo_rcm_patch.errors import ModelFolderError
from turbo_rcm_patch.tiny.prompts import DEMO_PROMPTS, caption, clips

MICRO = ["--micro", "--device", "cpu", "--steps-decoder", "2", "--clips", "8", "--fill", "3"]
MICRO += ["--batch-vae", "2", "--batch-teacher", "4", "--batch-student", "4"]
MICRO += ["--batch-decoder", "2", "--probe-count", "2"]


def _train(out: Path, vae: int, teacher: int, student: int, *extra: str) -> None:
    steps = f"--steps-vae {vae} --steps-teacher {teacher} --steps-student {student}".split()
    main(["--out", str(out), *MICRO, *steps, *extra])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny") / "run"
    _train(out, 3, 4, 4)
    return out


def test_tokenizer_round_trip() -> None:
    tokenizer = build_tokenizer(TinyConfig())
    for clip in clips(held_out=True):
        text = caption(clip)
        ids = tokenizer(text).input_ids
        assert len(ids) <= TinyConfig().max_sequence_length and tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_times_are_those_of_the_published_sampler() -> None:
    assert times(4) == pytest.approx((0.98765, 0.93378, 0.85290, 0.60898, 0.0), abs=1e-5)
    assert times(1) == pytest.approx((0.98765, 0.0), abs=1e-5)


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


def test_ode_is_second_order() -> None:
    """dx/dt = x has the solution x(0) = x(1) / e."""
    start = torch.ones(1, 1, 1, 1, 1, dtype=torch.float64)
    errors = [
        abs(float(ode(lambda x, t: x.double(), start, 1.0, n)) - 0.36787944117) for n in (20, 40)
    ]
    # `ode` reads velocities in fp32, far below these errors
    assert errors[0] / errors[1] > 3.0 and errors[1] < 1e-3


def test_training_decoder_is_the_vae_without_its_clamp() -> None:
    config = TinyConfig.micro()
    torch.manual_seed(0)
    vae = build_vae(config)
    latents = torch.randn(1, *config.latent_shape)
    with torch.no_grad():
        assert torch.equal(decode(vae, latents).clamp(-1, 1), vae.decode(latents).sample)


def test_run_leaves_what_it_promises(trained: Path) -> None:
    records = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    assert {r.get("stage") for r in records} >= {"vae", "teacher", "student", "decoder"}
    assert (trained / "curves.png").exists() and len(list((trained / "sheets").glob("*.png"))) >= 5


@pytest.mark.parametrize("name", ["wan_teacher", "wan_student"])
def test_folder_loads_and_generates(trained: Path, name: str) -> None:
    pipe = WanPipeline.from_pretrained(trained / name)
    pipe.set_progress_bar_config(disable=True)
    settings = json.loads((trained / name / "turbo_rcm.json").read_text())
    frames = pipe(
        DEMO_PROMPTS[0],
        height=settings["height"],
        width=settings["width"],
        num_frames=settings["num_frames"],
        num_inference_steps=settings["steps"],
        guidance_scale=settings["guidance_scale"],
        max_sequence_length=settings["max_sequence_length"],
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
    ).frames
    assert frames.shape == (1, 9, 3, 32, 32) and torch.isfinite(frames).all()


def test_interrupted_run_ends_as_if_it_had_not_been(trained: Path, tmp_path: Path) -> None:
    """Resumable: stop after the teacher, continue, and the student is the same to the last bit."""
    _train(tmp_path / "run", 3, 4, 4, "--stage", "teacher")
    _train(tmp_path / "run", 3, 4, 4, "--resume")
    name = "wan_student/transformer/diffusion_pytorch_model.safetensors"
    assert (tmp_path / "run" / name).read_bytes() == (trained / name).read_bytes()


def test_a_folder_with_state_is_not_overwritten_by_accident(trained: Path) -> None:
    with pytest.raises(SystemExit):
        _train(trained, 3, 4, 4)


def test_a_folder_of_another_origin_is_not_trained_into(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"mine": 1}')
    with pytest.raises(SystemExit):
        _train(tmp_path, 3, 4, 4)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [
        ("config.json", '{"mine": 1}')
    ]


def test_an_installation_that_is_interrupted_changes_nothing(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(trained / "wan_student", tmp_path / "tiny")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    copytree = shutil.copytree

    def interrupted(source: Path, target: Path, *inner: object, **how: bool) -> None:
        copytree(source, target, *inner, **how)  # type: ignore[arg-type]
        if not inner:  # It calls itself for folders in folders.
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "copytree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        install(trained / "wan_teacher", tmp_path / "tiny")
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_a_decoder_is_trained_on_a_finished_folder(trained: Path, tmp_path: Path) -> None:
    """Everything but the decoder stays what it was."""
    start = trained / "wan_student"
    _train(tmp_path / "run", 3, 4, 4, "--stage", "decoder", "--start", str(start))
    before, after = (WanPipeline.from_pretrained(p) for p in (start, tmp_path / "run/wan_student"))
    for part in ("transformer", "text_encoder", "vae"):
        old, new = getattr(before, part).state_dict(), getattr(after, part).state_dict()
        changed = {name.split(".")[0] for name in old if not torch.equal(old[name], new[name])}
        assert changed == ({"decoder", "post_quant_conv"} if part == "vae" else set())


def test_install_leaves_the_card_and_refuses_what_is_too_large(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "README.md").write_text("card")
    install(trained / "wan_student", tmp_path)
    assert (tmp_path / "README.md").read_text() == "card"
    WanPipeline.from_pretrained(tmp_path)
    with pytest.raises(ModelFolderError, match="turbo_rcm.json"):
        install(tmp_path / "vae", tmp_path)
    monkeypatch.setattr("training.train._MOST_BYTES", 1000)
    with pytest.raises(ModelFolderError, match="1000 bytes"):
        install(trained / "wan_student", tmp_path)


def test_evaluation_writes_its_numbers(trained: Path, tmp_path: Path) -> None:
    results = evaluate(
        trained / "wan_student",
        tmp_path,
        teacher=trained / "wan_teacher",
        count=3,
        steps=(2,),
        batch=2,
        say=lambda _: None,
    )
    saved = json.loads((tmp_path / "evaluation.json").read_text())
    assert saved == results
    assert {
        "student_2_steps",
        "zeroed_self_attention",
        "zeroed_cross_attention",
        "teacher",
    } <= set(saved)


def test_zeroing_an_attention_is_undone(trained: Path) -> None:
    judge = Evaluation.load(
        trained / "wan_student", count=1, seed=0, batch=1, device="cpu", dtype=torch.float32
    )
    before = next(judge.frames(steps=1))
    with zeroed(judge.pipe.transformer.blocks, "attn2"):
        pass
    assert torch.equal(before, next(judge.frames(steps=1)))
