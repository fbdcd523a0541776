"""One generation: reproducible, quiet, and without a trace in the pipeline or the global state."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline

from tests.video.micro import SMALL, micro_pipe
from turbo_rcm_patch.errors import ConfigError, DTypeError, NotAModelError
from turbo_rcm_patch.video.comparison import compare
from turbo_rcm_patch.video.generation import _say_once, generate, settings_for
from turbo_rcm_patch.video.settings import Settings

PROMPT = "a red circle moves left"


@pytest.mark.parametrize("sampler", ["rcm", "scheduler"])
def test_the_same_seed_gives_the_same_video(pipe, sampler: str) -> None:
    guidance = {"guidance_scale": 3.0, "negative_prompt": "blue"} if sampler == "scheduler" else {}
    given = {"sampler": sampler, "steps": 2, **SMALL, **guidance}
    first, again, other = (generate(pipe, PROMPT, seed=s, **given) for s in (1, 1, 2))
    assert torch.equal(first.frames, again.frames)
    assert torch.equal(first.latents, again.latents)
    assert not torch.equal(first.frames, other.frames)
    assert first.frames.shape == (5, 32, 32, 3)
    assert first.frames.dtype == torch.float32
    assert 0.0 <= float(first.frames.min()) <= float(first.frames.max()) <= 1.0
    assert first.seconds > 0
    assert first.decode_seconds > 0
    assert first.peak_bytes is None or first.peak_bytes > 0


def test_several_prompts_and_a_seed_that_is_no_integer_are_told(pipe) -> None:
    with pytest.raises(ConfigError, match=r"prompt; expected one prompt; got 2\. .*compare"):
        generate(pipe, ["a", "b"])  # type: ignore[arg-type]
    for seed in ("a", 1.5, 2**64):
        with pytest.raises(ConfigError, match=f"seed; expected an integer .* got {seed!r}"):
            generate(pipe, PROMPT, seed=seed)  # type: ignore[arg-type]


def test_guidance_and_prompt_matter(pipe) -> None:
    given = {"sampler": "scheduler", "steps": 2, **SMALL}
    plain = generate(pipe, PROMPT, guidance_scale=1.0, **given)
    guided = generate(pipe, PROMPT, guidance_scale=6.0, **given)
    other = generate(pipe, "a blue square", guidance_scale=1.0, **given)
    assert not torch.equal(plain.latents, guided.latents)
    assert not torch.equal(plain.latents, other.latents)


@pytest.mark.supports("WanTransformer3DModel", "compare")
def test_equals_the_pipelines_own_call(pipe) -> None:
    settings = Settings(steps=3, guidance_scale=1.0, **SMALL)
    ours = generate(pipe, PROMPT, seed=4, settings=settings)
    theirs = pipe(
        PROMPT, num_inference_steps=3, guidance_scale=1.0, output_type="pt",
        generator=torch.Generator().manual_seed(4), **SMALL,
    ).frames[0]  # fmt: skip
    assert torch.equal(ours.frames, theirs.permute(0, 2, 3, 1))


@pytest.mark.parametrize("stops", [False, True])
def test_nothing_is_left_behind(pipe, stops: bool) -> None:
    def state() -> list[object]:
        return [
            pipe.scheduler,
            dict(pipe.config),
            getattr(pipe, "_progress_bar_config", "absent"),
            torch.random.get_rng_state().tolist(),
            np.random.get_state()[1].tolist(),
            random.getstate(),
        ]

    def on_step(step: int, steps: int) -> None:
        seen.append((step, steps))
        if stops:
            raise KeyboardInterrupt

    seen: list[tuple[int, int]] = []
    before = state()
    with pytest.raises(KeyboardInterrupt) if stops else nullcontext():
        generate(pipe, PROMPT, sampler="rcm", steps=2, on_step=on_step, **SMALL)
    assert state() == before
    assert seen == [(1, 2), (2, 2)][: 1 if stops else 2]


def test_a_stochastic_scheduler_of_the_pipeline_is_reproducible() -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    pipe = micro_pipe()
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    settings = Settings(steps=2, guidance_scale=1.0, **SMALL)
    first = generate(pipe, PROMPT, settings=settings)
    torch.rand(3)  # whatever the caller draws in between
    assert torch.equal(first.latents, generate(pipe, PROMPT, settings=settings).latents)


def test_the_vae_must_be_in_fp32() -> None:
    pipe = micro_pipe()
    pipe.vae.to(torch.bfloat16)
    with pytest.raises(DTypeError, match=r"pipe\.vae\.to\(torch\.float32\)"):
        generate(pipe, PROMPT, steps=1, **SMALL)


def test_other_things_are_not_pipelines() -> None:
    with pytest.raises(NotAModelError, match="load_pipeline"):
        generate(torch.nn.Linear(2, 2), PROMPT)  # type: ignore[arg-type]


def test_pipelines_of_other_models_are_refused(tmp_path: Path) -> None:
    pipe = object.__new__(FluxPipeline)
    with pytest.raises(NotAModelError, match="FluxPipeline"):
        generate(pipe, PROMPT)
    with pytest.raises(NotAModelError, match="FluxPipeline"):
        compare(pipe, PROMPT, out=tmp_path)


def test_a_number_of_frames_that_the_vae_cannot_make_is_told_once(pipe, caplog) -> None:
    """The next smaller number that it can is made."""
    _say_once.cache_clear()
    settings = settings_for(pipe, **SMALL | {"steps": 1, "num_frames": 6})
    for seed in (0, 1):
        made = generate(pipe, "a red circle", seed=seed, settings=settings)
    assert len(made.frames) == 5
    (said,) = [line for line in caplog.messages if "num_frames 6" in line]
    assert "makes 5 frames of that" in said


def test_a_model_of_the_hub_brings_its_settings(pipe, tmp_path: Path, monkeypatch) -> None:
    """They lie in the hub's cache, beside the folders of the parts."""
    root = tmp_path / "models--me--video" / "snapshots" / "abc"
    root.mkdir(parents=True)
    (root / "turbo_rcm.json").write_text('{"sigma_max": 200.0, "steps": 3}')
    monkeypatch.setattr(type(pipe), "name_or_path", "me/video", raising=False)
    assert settings_for(pipe).sampler == "scheduler"
    monkeypatch.setitem(
        pipe.transformer._internal_dict, "_name_or_path", str(root / "transformer")
    )
    settings = settings_for(pipe)
    assert (settings.sampler, settings.sigma_max, settings.steps) == ("rcm", 200.0, 3)
