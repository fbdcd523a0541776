"""CogVideoX from a folder to a verdict, on an untrained model; and on the shipped one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from diffusers import CogVideoXDPMScheduler, CogVideoXPipeline
from turbo_rcm_patch.patching.parallel import groups_of

from tests.ranks import on_ranks
from tests.video.micro import SMALL, save
from tests.video.micro_cogvideox import micro_cogvideox
from turbo_rcm_patch import PatchConfig, patched
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.errors import ConfigError, ModelFolderError, SamplingError
from turbo_rcm_patch.tiny import TINY_COGVIDEOX
from turbo_rcm_patch.tiny.prompts import DEMO_PROMPTS
from turbo_rcm_patch.video import Source, compare, generate
from turbo_rcm_patch.video.families import Job, family_of
from turbo_rcm_patch.video.generation import (
    encode,
    initial_noise,
    recorded_calls,
    sample_latents,
    settings_for,
)
from turbo_rcm_patch.video.kernel_check import run_kernel_check
from turbo_rcm_patch.video.load import load_pipeline, resolve_model
from turbo_rcm_patch.video.many import Processes, Ranks
from turbo_rcm_patch.video.measures import NetworkInput, measure_network, relative_l2
from turbo_rcm_patch.video.settings import Settings

pytestmark = pytest.mark.usefixtures("no_pictures_here")
PROMPT = "a red circle moves left"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(micro_cogvideox(), tmp_path_factory.mktemp("model") / "cogvideox")


@pytest.fixture(scope="module")
def pipe(folder: Path):
    return load_pipeline(folder, device="cpu")


@pytest.fixture(scope="module")
def small(pipe) -> Settings:
    return settings_for(pipe, steps=2, guidance_scale=1.0, **SMALL)


def test_it_loads_in_the_dtypes_of_a_comparison(pipe) -> None:
    assert type(pipe) is CogVideoXPipeline
    assert pipe.transformer.dtype == pipe.text_encoder.dtype == torch.bfloat16
    assert pipe.vae.dtype == torch.float32


def test_settings_are_those_of_the_family(pipe, folder: Path, tmp_path: Path) -> None:
    settings = settings_for(pipe)
    assert (settings.sampler, settings.steps, settings.guidance_scale) == ("scheduler", 50, 6.0)
    assert (settings.height, settings.width, settings.num_frames) == (480, 720, 49)
    own = Path(shutil.copytree(folder, tmp_path / "own"))
    (own / "turbo_rcm.json").write_text('{"sampler": "scheduler", "steps": 4, "height": 64}')
    settings = settings_for(load_pipeline(own, device="cpu"), width=32)
    assert (settings.steps, settings.height, settings.width) == (4, 64, 32)


# diffusers counts accelerators, of which a CPU machine has none.
@mock.patch.object(torch.accelerator, "device_count", return_value=1)
def split_video(rank: int, _: object) -> None:
    pipe = micro_cogvideox()
    given = {"settings": settings_for(pipe, steps=1, guidance_scale=1.0, **SMALL), "seed": 3}
    whole = generate(pipe, PROMPT, **given)
    processes = Processes(Ranks(rank, 2, rank), ulysses=2)
    for _ in range(2):
        with processes.joined("cpu"), processes.splitting(pipe):
            assert groups_of(pipe.transformer) is not None
            split = generate(pipe, PROMPT, **given)
        assert groups_of(pipe.transformer) is None
        assert relative_l2(split.latents, whole.latents) < 1e-4


def test_a_video_is_split_over_two_processes() -> None:
    """diffusers has no plan for this class: ours is attached, and taken away again."""
    on_ranks(2, split_video)


@pytest.mark.supports("CogVideoXTransformer3DModel", "rCM sampler")
def test_the_rcm_sampler_is_refused(pipe) -> None:
    with pytest.raises(ConfigError, match=r"CogVideoXPipeline.*scheduler.*rectified flow"):
        settings_for(pipe, sampler="rcm", steps=4, guidance_scale=1.0)
    with pytest.raises(ConfigError, match="CogVideoXPipeline"):
        generate(pipe, PROMPT, settings=Settings(steps=2, **SMALL))


@pytest.mark.parametrize("guidance", [1.0, 6.0], ids=["plain", "guided"])
@pytest.mark.supports("CogVideoXTransformer3DModel", "generate, compare")
def test_latents_are_those_of_the_pipeline(pipe, small: Settings, guidance: float) -> None:
    """The same call by hand gives the same bits, and so do the frames."""
    made = generate(pipe, PROMPT, seed=3, settings=small, guidance_scale=guidance)
    noise = initial_noise(pipe, 3, small)
    assert noise.shape == made.latents.shape == (1, 2, 4, 8, 8)
    pipe.set_progress_bar_config(disable=True)
    call = {
        "height": 32,
        "width": 32,
        "num_frames": 5,
        "num_inference_steps": 2,
        "guidance_scale": guidance,
        "max_sequence_length": 16,
    }
    latents = pipe(
        PROMPT,
        negative_prompt="" if guidance > 1 else None,
        latents=noise.bfloat16(),
        output_type="latent",
        **call,
    ).frames
    assert torch.equal(made.latents, latents.float())
    video = pipe.decode_latents(latents.float())[0].permute(1, 2, 3, 0)
    assert torch.equal(made.frames, (video / 2 + 0.5).clamp(0, 1))


def test_every_step_is_told_and_the_pipeline_is_as_before(pipe, small: Settings) -> None:
    before, told = pipe.scheduler, []
    generate(pipe, PROMPT, settings=small, on_step=lambda *step: told.append(step))
    assert told == [(1, 2), (2, 2)] and pipe.scheduler is before


def test_frames_that_fill_a_patch_in_time_are_dropped(small: Settings) -> None:
    """CogVideoX 1.5: 9 frames are 3 of latents, denoised as 4."""
    made = micro_cogvideox(patch_t=2).to(torch.bfloat16)
    made.vae.float()
    settings = Settings.for_model(None, **(small.as_dict() | {"num_frames": 9}))
    assert initial_noise(made, 0, settings).shape[1] == 4
    found = generate(made, PROMPT, settings=settings)
    assert found.latents.shape[1] == 3 and found.frames.shape[0] == 9
    conditioning = encode(made, Source(PROMPT), settings)
    number = measure_network(made, conditioning, found.latents, settings, PatchConfig())
    assert 0 < number.unpatched < 0.2 and number.ratio > 0


def test_the_first_frames_are_those_that_are_dropped(small: Settings) -> None:
    """As the author's pipeline does; for the network they come back as copies of the first."""
    made = micro_cogvideox(patch_t=2).to(torch.bfloat16)
    settings = Settings.for_model(None, **(small.as_dict() | {"num_frames": 9}))
    family, frames = family_of(made), torch.arange(4.0).view(1, 4, 1, 1, 1)
    latents = frames.expand(1, 4, *initial_noise(made, 0, settings).shape[2:])
    kept = family.trim(Job(made, 0, encode(made, Source(PROMPT), settings), settings), latents)
    assert kept[0, :, 0, 0, 0].tolist() == [1.0, 2.0, 3.0]
    states = family.noised(made, kept, torch.zeros_like(latents))
    assert len(states) == 3
    for noisy, _ in states:
        seen = noisy[0, :, 0, 0, 0].float()
        wanted = torch.tensor([1.0, 1.0, 2.0, 3.0])
        torch.testing.assert_close(seen / seen[0], wanted, rtol=2e-2, atol=0)


def test_a_scheduler_with_noise_of_its_own_repeats_itself(folder: Path, small: Settings) -> None:
    made = load_pipeline(folder, device="cpu")
    made.scheduler = CogVideoXDPMScheduler.from_config(made.scheduler.config)
    state = torch.get_rng_state()
    first, second = (generate(made, PROMPT, settings=small).latents for _ in range(2))
    assert torch.equal(first, second) and torch.equal(torch.get_rng_state(), state)


def test_the_networks_inputs_have_the_schedules_noise(pipe, small: Settings) -> None:
    """Three times, with the noise levels of the rectified-flow times, added by the scheduler."""
    clean, noise = (torch.randn(1, 2, 4, 8, 8) for _ in range(2))
    conditioning = encode(pipe, Source(PROMPT), small)
    states = family_of(pipe).noised(pipe, clean, noise)
    calls = [
        NetworkInput.of_call(call) for call in recorded_calls(pipe, conditioning, small, states)
    ]
    assert len(calls) == 3 and all(one.more["image_rotary_emb"] is not None for one in calls)
    for one in calls:
        wanted = pipe.scheduler.add_noise(clean, noise, one.timestep.long())
        torch.testing.assert_close(one.hidden_states, wanted.bfloat16())
        assert torch.equal(one.encoder_hidden_states, conditioning.embeds)
    assert calls[0].timestep > calls[1].timestep > calls[2].timestep


def test_a_network_without_such_a_schedule_has_no_number(folder: Path) -> None:
    from turbo_rcm_patch.video.scheduler import RCMScheduler

    made = load_pipeline(folder, device="cpu")
    made.scheduler = RCMScheduler()
    with pytest.raises(SamplingError, match="alphas_cumprod"):
        family_of(made).noised(made, torch.zeros(1, 2, 4, 8, 8), torch.zeros(1, 2, 4, 8, 8))


def test_patching_changes_little_and_is_undone(pipe, small: Settings) -> None:
    conditioning = encode(pipe, Source(PROMPT), small)
    before = sample_latents(pipe, conditioning, seed=0, settings=small).latents
    with patched(pipe, PatchConfig()):
        during = sample_latents(pipe, conditioning, seed=0, settings=small).latents
    after = sample_latents(pipe, conditioning, seed=0, settings=small).latents
    assert torch.equal(before, after) and not torch.equal(before, during)
    torch.testing.assert_close(during, before, rtol=0.1, atol=0.2)


@pytest.mark.supports("CogVideoXTransformer3DModel", "generate, compare")
def test_compare_gives_every_number(pipe, small: Settings, tmp_path: Path) -> None:
    found = compare(pipe, [PROMPT, "a blue ring"], out=tmp_path, settings=small)
    assert found.network is not None and found.fusion is not None
    assert found.verdict == "unchanged", str(found)
    assert "4 of 4" in found.patch_report or "attn1" in found.patch_report
    metrics = json.loads(found.metrics.read_text())
    assert len(metrics["prompts"]) == 2 and found.report.is_file()
    assert metrics["prompts"][0]["patched"]["latents"] > 0


def test_compare_finds_out_int4(pipe, small: Settings, tmp_path: Path) -> None:
    config = PatchConfig(attention="int4", guard=False)
    found = compare(pipe, PROMPT, out=tmp_path, settings=small, config=config)
    assert found.verdict == "changed"


def test_the_command_line_takes_a_folder(folder: Path, tmp_path: Path, capsys) -> None:
    given = ["--model", str(folder), "--prompt", PROMPT, "--steps", "2", "--guidance-scale", "1"]
    for name, value in SMALL.items():
        given += [f"--{name.replace('_', '-')}", str(value)]
    assert main(["generate", *given, "--out", str(tmp_path / "video.mp4")]) == 0
    assert (tmp_path / "video.mp4").is_file() and "fused" in capsys.readouterr().out


@pytest.mark.slow
def test_the_kernels_agree_with_the_reference(folder: Path) -> None:
    found = run_kernel_check(folder)
    assert found.passed and found.interpreted, found
    assert (found.tokens, found.fused) == (264, 2)
    assert "in two launches" in found.what


def test_missing_weights_are_said_with_a_remedy(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("turbo_rcm_patch.tiny.TINY_COGVIDEOX", tmp_path)
    with pytest.raises(ModelFolderError, match=r"tiny-cogvideox.*missing.*[Rr]einstall"):
        resolve_model("tiny-cogvideox")


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "word"), [("int8", "unchanged"), ("int4", "changed")])
def test_the_verdict_on_the_shipped_model(attention: str, word: str, tmp_path: Path) -> None:
    assert resolve_model("tiny-cogvideox") == TINY_COGVIDEOX
    made = load_pipeline("tiny-cogvideox", device="cpu")
    config = PatchConfig(attention=attention, guard=False)
    found = compare(made, DEMO_PROMPTS[:2], out=tmp_path, config=config, network_number=False)
    assert found.verdict == word, str(found)
