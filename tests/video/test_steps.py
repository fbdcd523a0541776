"""The steps of few-step samplers: at whose times, with whose noise, and in which model.

A step is the published loop, written here from its formulas: x = noise t0; then x <- (1 - t') (x -
t v) + t' eps, or x <- x - (t - t') v, in fp64 (rCM: arXiv 2510.08431; TurboDiffusion: arXiv
2512.16093).
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanPipeline,
)
from hypothesis import given as drawn
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from PIL import Image

from tests.measures import relative_l2
from tests.processes import run_fresh
from tests.video.micro import SMALL, WAN_PIPES, micro_pipe, save
from turbo_rcm_patch import RCMScheduler
from turbo_rcm_patch.errors import ConfigError, SamplingError, TurboRCMError
from turbo_rcm_patch.tiny import TINY_WAN
from turbo_rcm_patch.video import Settings, SettingsOptions, generate
from turbo_rcm_patch.video.generation import settings_for
from turbo_rcm_patch.video.load import load_pipeline
from turbo_rcm_patch.video.rcm_times import noise_stream, rcm_times
from turbo_rcm_patch.video.settings import SCHEDULES

SHAPE = (1, 4, 2, 4, 4)
Network = Callable[[torch.Tensor, float], torch.Tensor]


def velocity(x: torch.Tensor, t: float) -> torch.Tensor:
    """A velocity that depends on everything, in fp64."""
    return torch.sin(3 * x.double()) * (0.5 + t) - 0.2 * x.double()


def noise_of(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(
    times: list[float], form: str, noise: torch.Tensor, renoise: torch.Generator, network: Network
) -> Iterator[torch.Tensor]:
    """The state after every step."""
    x = noise.double() * times[0]
    for t, t_next in zip(times, times[1:], strict=False):
        v = network(x, t).double()
        if form == "ode":
            x = x - (t - t_next) * v
        else:
            x = (1 - t_next) * (x - t * v)
            if t_next > 0:
                x = x + t_next * torch.randn(noise.shape, generator=renoise).double()
        yield x


def rcm_by_hand(steps: int, sigma_max: float = 80.0) -> list[float]:
    angles = [math.atan(sigma_max), 1.5, 1.4, 1.0][:steps] + [0.0]
    return [math.sin(a) / (math.cos(a) + math.sin(a)) for a in angles]


def sample(
    scheduler: RCMScheduler, steps: int = 4, noise: torch.Tensor | None = None, **more: Any
) -> torch.Tensor:
    """Run a scheduler as a pipeline does."""
    scheduler.set_timesteps(steps)
    x = scheduler.init_noise(noise_of() if noise is None else noise)
    for i, t in enumerate(scheduler.timesteps):
        x = scheduler.step(velocity(x, float(scheduler.sigmas[i])), t, x, **more).prev_sample
    return x


@st.composite
def schedules(draw: st.DrawFn) -> tuple[dict[str, Any], list[float]]:
    """The arguments of a scheduler, and the times of its steps in t."""
    if draw(st.booleans()):
        steps, sigma_max = draw(st.integers(1, 4)), draw(st.floats(15.0, 500.0))
        return {"sigma_max": sigma_max}, rcm_by_hand(steps, sigma_max)
    times = sorted(draw(st.sets(st.floats(1.0, 1000.0), min_size=1, max_size=8)), reverse=True)
    return {"times": times}, [*(t / 1000 for t in times), 0.0]


@hypothesis_settings(deadline=None, max_examples=60)
@drawn(schedules(), st.sampled_from(["sde", "ode"]), st.integers(0, 2**63))
def test_a_sampler_is_the_published_loop(
    schedule: tuple[dict[str, Any], list[float]], form: Any, seed: int
) -> None:
    how, times = schedule
    ours = sample(RCMScheduler(sampler=form, noise_seed=seed, **how), len(times) - 1)
    assert ours.dtype == torch.float64
    *_, expected = by_hand(times, form, noise_of(), noise_stream(seed, "rcm-renoise"), velocity)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


def test_published_schedules_are_their_authors() -> None:
    """LightX2V's scheduler for Wan 2.2 takes Euler steps, the others add noise."""
    warped = [1000, 937.5, 2500 / 3, 625]
    published = {
        "lightning": ("ode", warped),
        "self-forcing": ("sde", warped),
        "fastwan": ("sde", [1000, 757, 522]),
    }
    assert {*published} == {*SCHEDULES}
    for name, (form, times) in published.items():
        scheduler = RCMScheduler.named(name)
        scheduler.set_timesteps(len(times))
        assert scheduler.config.sampler == form
        assert scheduler.timesteps.tolist() == pytest.approx(times)
    with pytest.raises(ConfigError, match="lightning.*RCMScheduler"):
        RCMScheduler.named("dmd")
    expected = [0.98765, 0.93378, 0.85290, 0.60898, 0.0]
    assert rcm_times(4).tolist() == pytest.approx(expected, abs=5e-6)
    assert float(rcm_times(4, 200.0)[0]) == pytest.approx(0.99502, abs=5e-6)
    rounded = RCMScheduler(timestep_dtype="bfloat16")  # as TurboDiffusion's
    rounded.set_timesteps(4)
    assert rounded.timesteps.tolist() == [988.0, 932.0, 852.0, 608.0]
    assert rounded.sigmas[0] == rcm_times(4)[0], "only what the network sees is rounded"


def test_renoising_has_a_stream_of_its_own_or_the_callers() -> None:
    before = torch.random.get_rng_state()
    scheduler = RCMScheduler(noise_seed=5)
    first = sample(scheduler)
    assert torch.equal(first, sample(scheduler)), "set_timesteps starts it again"
    assert not torch.equal(first, sample(RCMScheduler(noise_seed=6)))

    generator, again = (torch.Generator().manual_seed(3) for _ in range(2))
    two = torch.randn(2, *SHAPE[1:], generator=generator)
    x = sample(scheduler, noise=two, generator=generator)
    *_, expected = by_hand(
        rcm_by_hand(4), "sde", torch.randn(2, *SHAPE[1:], generator=again), again, velocity
    )
    torch.testing.assert_close(x, expected, rtol=0, atol=1e-12)
    assert torch.equal(first, sample(scheduler)), "and the seed is as it was"
    assert torch.equal(before, torch.random.get_rng_state()), "the global generator is untouched"

    initial = torch.randn(60, 60, generator=torch.Generator().manual_seed(5))
    renoise = torch.randn(60, 60, generator=noise_stream(5, "rcm-renoise"))
    assert abs(relative_l2(initial, renoise) - 2**0.5) < 0.1, "the same seed, other noise"


@pytest.mark.parametrize("place", [64, 1024, -1])
def test_every_value_of_the_first_sample_seeds_the_renoising(place: int) -> None:
    """Two videos that begin alike, as those of one first frame do, differ in their noise."""
    noise = noise_of(shape=(1, 4, 3, 20, 20))
    other = noise.clone()
    other.view(-1)[place] += 1e-3
    renoise = []
    for x in (noise, other, noise.clone(memory_format=torch.channels_last_3d)):
        scheduler = RCMScheduler()
        scheduler.set_timesteps(2)
        v = torch.zeros_like(x)
        x = scheduler.step(v, scheduler.timesteps[0], x).prev_sample
        renoise.append((x - (1 - scheduler.sigmas[1]) * noise) / scheduler.sigmas[1])
    assert relative_l2(renoise[1], renoise[0]) > 1.0
    assert torch.equal(renoise[0], renoise[2]), "the layout does not matter"


def test_what_a_scheduler_cannot_do_is_refused() -> None:
    for steps in (0, 5, -1, 2.0, None):
        with pytest.raises(ConfigError, match=r"from 1 to 4.*sampler='scheduler'"):
            RCMScheduler().set_timesteps(steps)  # type: ignore[arg-type]
    for name, value, text in (
        ("sampler", "euler", "'ode'"), ("sigma_max", 0.0, "positive"),
        ("sigma_max", math.nan, "positive"), ("timestep_dtype", "f8", "one of"),
        ("noise_seed", 1.5, "an integer or None"), ("times", [500, 750], r"Order them: \[750"),
        ("times", [1000, 0], "Leave out the 0"), ("times", [], "decrease"),
        ("times", "1000,750", "decrease"), ("times", [1001.0], r"in \(0, 1000\]"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"{name}.*{text}"):
            RCMScheduler(**{name: value})  # type: ignore[arg-type]
    RCMScheduler(sigma_max=10.0).set_timesteps(1)
    with pytest.raises(ConfigError, match=r"more than 14\.1"):
        RCMScheduler(sigma_max=10.0).set_timesteps(2)
    with pytest.raises(ConfigError, match="expected 3, one for each of the times"):
        RCMScheduler.named("fastwan").set_timesteps(4)
    scheduler, x = RCMScheduler(), noise_of()
    with pytest.raises(SamplingError, match="set_timesteps"):
        scheduler.step(x, 1.0, x)
    scheduler.set_timesteps(1)
    with pytest.raises(SamplingError, match="Iterate over"):
        scheduler.step(x, 123.0, x)
    scheduler.step(x, scheduler.timesteps[0], x)
    with pytest.raises(SamplingError, match="one more call"):
        scheduler.step(x, scheduler.timesteps[0], x)


def test_it_is_used_like_any_scheduler() -> None:
    """Started in the middle, by index or by time; and asked for a noisy sample."""
    scheduler, x = RCMScheduler(sampler="ode"), noise_of()
    ends = []
    for begin in (2, None):
        scheduler.set_timesteps(4)
        t, t_next = scheduler.sigmas[2:4].tolist()
        if begin is not None:
            scheduler.set_begin_index(begin)
        ends.append(scheduler.step(velocity(x, t), scheduler.timesteps[2], x).prev_sample)
    torch.testing.assert_close(ends[0], x - (t - t_next) * velocity(x, t))
    assert torch.equal(*ends)
    noisy = scheduler.add_noise(x, 2 * x, torch.tensor([250.0]))
    torch.testing.assert_close(noisy, 1.25 * x)


def test_its_configuration_is_saved_and_comes_from_other_schedulers(tmp_path: Path) -> None:
    rcm = RCMScheduler(sigma_max=200.0, sampler="ode")
    for scheduler in (rcm, RCMScheduler.named("lightning")):
        scheduler.save_pretrained(tmp_path)
        saved = RCMScheduler.from_pretrained(tmp_path)
        scheduler.set_timesteps(4)
        for again in (saved, RCMScheduler.from_config(scheduler.config)):
            again.set_timesteps(4)
            assert torch.equal(again.sigmas, scheduler.sigmas)
            assert again.config.sampler == scheduler.config.sampler == "ode"
    for other in (FlowMatchEulerDiscreteScheduler(shift=3.0), UniPCMultistepScheduler()):
        mine = RCMScheduler.from_config(other.config).config
        assert (mine.sigma_max, mine.times, mine.num_train_timesteps) == (80.0, None, 1000)


def call(pipe: Any, steps: int = 4, **more: Any) -> torch.Tensor:
    """Latents of a pipeline's own call."""
    image = {}
    if not isinstance(pipe, WanPipeline):
        # The image tokens of Wan's processor are those beyond 512 of text.
        image = {"image": Image.new("RGB", (32, 32), "teal"), "max_sequence_length": 512}
    usual = {"num_inference_steps": steps, "guidance_scale": 1.0, "output_type": "latent"}
    pipe.set_progress_bar_config(disable=True)
    latents: torch.Tensor = pipe(prompt="a red circle", **SMALL | usual | image | more)[0]
    return latents


@pytest.mark.parametrize("name", WAN_PIPES)
@pytest.mark.parametrize(("steps", "form", "sigma_max"), [(3, "sde", 200.0), (4, "ode", 80.0)])
def test_a_pipeline_runs_the_published_loop(name, steps, form, sigma_max) -> None:
    pipe = WAN_PIPES[name]()
    scheduler = RCMScheduler.from_config(
        pipe.scheduler.config, sampler=form, sigma_max=sigma_max, noise_seed=3
    )
    pipe.scheduler, calls, states = scheduler, [], []
    for part in ("transformer", "transformer_2"):
        if (network := getattr(pipe, part)) is not None:
            network.register_forward_hook(
                lambda _, __, named, out, part=part: calls.append((part, named, out[0])),
                with_kwargs=True,
            )

    def after_step(_: Any, __: int, ___: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        states.append(tensors["latents"].clone())
        return {}

    noise, seen = noise_of().float(), iter(calls)
    call(pipe, steps, latents=scheduler.init_noise(noise), callback_on_step_end=after_step)

    def network_said(x: torch.Tensor, t: float) -> torch.Tensor:
        expert, named, v = next(seen)
        assert expert == ("transformer_2" if "two-experts" in name and t < 0.9 else "transformer")
        assert float(named["timestep"].max()) == pytest.approx(1000 * t, rel=1e-6)
        if "i2v-token" not in name:  # there the image is in the place of the first frame
            inputs = named["hidden_states"][:, :4].double()
            torch.testing.assert_close(inputs, x, rtol=0, atol=1e-6)
        return v

    times, renoise = rcm_by_hand(steps, sigma_max), noise_stream(3, "rcm-renoise")
    expected = by_hand(times, form, noise, renoise, network_said)
    for state, wanted in zip(states, expected, strict=True):
        assert state.dtype == torch.float64
        torch.testing.assert_close(state, wanted, rtol=0, atol=1e-6)


def test_a_video_does_not_depend_on_its_batch() -> None:
    pipe = micro_pipe()
    pipe.scheduler = RCMScheduler()
    alone, both = ([torch.Generator().manual_seed(seed) for seed in (4, 5)] for _ in range(2))
    together = call(pipe, num_videos_per_prompt=2, generator=both)
    each = torch.cat([call(pipe, generator=generator) for generator in alone])
    torch.testing.assert_close(together, each, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a pipeline with an rCM scheduler, which names what a user imports."""
    pipe = micro_pipe(experts=True)
    pipe.scheduler = RCMScheduler(sigma_max=200.0, timestep_dtype="bfloat16")
    folder = save(pipe, tmp_path_factory.mktemp("saved") / "model")
    index = json.loads((folder / "model_index.json").read_text())
    assert index["scheduler"] == ["turbo_rcm_patch", "RCMScheduler"]
    return folder


LOADERS = {
    "DiffusionPipeline": """
import turbo_rcm_patch
from diffusers import DiffusionPipeline
pipe = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
""",
    "load_pipeline": """
from turbo_rcm_patch.video import load_pipeline
pipe = load_pipeline(folder, device="cpu")
""",
}


@pytest.mark.parametrize("loader", LOADERS)
def test_a_new_process_loads_it(loader: str, saved: Path) -> None:
    """In the process that saved it everything is imported already, which proves nothing."""
    run_fresh(
        f"import pickle, sys; folder = sys.argv[1]\n{LOADERS[loader]}\n"
        "scheduler = pickle.loads(pickle.dumps(pipe.scheduler))\n"
        "assert type(scheduler).__name__ == 'RCMScheduler'\n"
        "assert scheduler.config.sigma_max == 200.0\n"
        "scheduler.set_timesteps(4)\n"
        "assert scheduler.timesteps.tolist()[1] == 932.0",
        str(saved),
    )


#: What a folder says, what is given, the settings, and the times that the network sees.
WARPED = [1000, 937.5, 833.333, 625]
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[float] | None]] = {
    "nothing": ({}, {}, {"sampler": "scheduler", "steps": 50, "guidance_scale": 5.0}, None),
    "rcm": (
        {}, {"sampler": "rcm"}, {"sampler": "rcm", "steps": 4, "guidance_scale": 1.0},
        [987.65, 933.78, 852.90, 608.98],
    ),
    "rcm-folder": ({"sampler": "rcm", "steps": 1}, {}, {"steps": 1}, [987.65]),
    "rcm-of-before": ({"sigma_max": 200, "steps": 1}, {}, {"sampler": "rcm"}, [995.02]),
    "lightning": ({}, {"sampler": "lightning"}, {"steps": 4, "guidance_scale": 1.0}, WARPED),
    "fastwan": ({"sampler": "fastwan"}, {}, {"sampler": "fastwan", "steps": 3}, [1000, 757, 522]),
    "self-forcing": ({}, {"sampler": "self-forcing"}, {"steps": 4}, WARPED),
    "other-sampler": (
        {"sampler": "rcm", "steps": 2, "sigma_max": 200, "fps": 8}, {"sampler": "lightning"},
        {"sampler": "lightning", "steps": 4, "fps": 8, "sigma_max": 80.0}, WARPED,
    ),
    "own-scheduler": (
        {"steps": 2, "sigma_max": 200, "height": 64}, {"sampler": "scheduler"},
        {"sampler": "scheduler", "steps": 50, "height": 64, "guidance_scale": 5.0}, None,
    ),
    "not-given": ({"width": 64}, {"width": None, "height": 48}, {"width": 64, "height": 48}, None),
    "a-note": ({"about": "for people", "fps": 8}, {}, {"fps": 8}, None),
}  # fmt: skip


def test_keywords_are_typed_as_the_settings_are() -> None:
    types = get_type_hints(Settings)
    del types["lora"]  # which is read off the pipeline
    assert get_type_hints(SettingsOptions) == {name: it | None for name, it in types.items()}


@pytest.mark.parametrize("name", RUNS)
def test_a_model_is_run_as_it_says_or_as_it_is_asked(name: str, pipe: Any, tmp_path: Path) -> None:
    stored, given, expected, times = RUNS[name]
    (tmp_path / "turbo_rcm.json").write_text(json.dumps(stored))
    settings = Settings.for_model(tmp_path, **given)
    assert {key: getattr(settings, key) for key in expected} == expected
    if times is None:
        return
    seen: list[float] = []
    hook = pipe.transformer.register_forward_pre_hook(
        lambda _, __, named: seen.append(float(named["timestep"].flatten()[-1])), with_kwargs=True
    )
    generate(pipe, "a red circle", **settings.as_dict() | SMALL)
    hook.remove()
    assert seen == pytest.approx(times, abs=0.01)


def test_python_users_set_the_scheduler() -> None:
    """The pipeline is then run with it."""
    pipe = micro_pipe()
    pipe.scheduler = RCMScheduler.named("fastwan")
    settings = settings_for(pipe, **SMALL)
    assert (settings.sampler, settings.steps, settings.guidance_scale) == ("scheduler", 3, 1.0)
    frames = generate(pipe, "a red circle", seed=3, **SMALL).frames
    named = generate(micro_pipe(), "a red circle", seed=3, sampler="fastwan", **SMALL).frames
    assert torch.equal(frames, named)
    pipe.scheduler = RCMScheduler(sigma_max=200.0, sampler="ode")
    assert settings_for(pipe, **SMALL).steps == 4
    with pytest.raises(ConfigError, match="from 1 to 4"):
        generate(pipe, "a red circle", steps=5, **SMALL)


def test_few_steps_of_a_model_that_does_not_say_so_are_told_once(
    micro_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert Settings.for_model(TINY_WAN).sampler == "rcm", "the shipped model says so"
    folder = Path(shutil.copytree(micro_folder, tmp_path / "model"))
    pipe = load_pipeline(folder, device="cpu")
    caplog.set_level(logging.WARNING)
    settings_for(pipe)
    assert not caplog.messages, "50 steps are many"
    for _ in range(2):
        settings_for(pipe, sampler="lightning")
    (said,) = caplog.messages
    assert "distilled" in said and "LoRA" in said and str(folder) in said
    caplog.clear()
    (folder / "turbo_rcm.json").write_text('{"sampler": "lightning"}')
    settings_for(pipe)
    settings_for(pipe, sampler="fastwan")
    assert not caplog.messages, "the folder says that it was distilled"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"sampler": "rcm", "steps": 5}, "from 1 to 4"),
        ({"sampler": "fastwan", "steps": 4}, "steps of sampler='fastwan'; expected 3"),
        ({"sampler": "euler"}, "sampler; expected one of .*'lightning'"),
        ({"sampler": "rcm", "guidance_scale": 1.25}, "guidance distilled in"),
        ({"height": 100}, "multiple of 16.*Try 96"),
        ({"num_frames": 0}, "positive whole number"),
        ({"stepz": 3}, "setting 'stepz'; expected one of .*'steps'"),
        ({"steps": 10**9}, "from 1 to 1000"),
        ({"steps": True}, "whole number from 1 to 1000"),
        ({"sigma_max": "80"}, "sigma_max; expected a finite number"),
        ({"guidance_scale": float("nan")}, "guidance_scale; expected a finite number"),
        ({"guidance_scale_2": "5"}, "guidance_scale_2; expected a finite number"),
        ({"negative_prompt": 3}, "negative_prompt; expected a text"),
        ("[1]", "a JSON object"),
        ("{", "not valid JSON"),
    ],
    ids=str,
)
def test_bad_settings(given: dict[str, Any] | str, text: str, tmp_path: Path) -> None:
    """As arguments, and in a folder."""
    if isinstance(given, str):
        (tmp_path / "turbo_rcm.json").write_text(given)
        with pytest.raises(TurboRCMError, match=text):
            Settings.for_model(tmp_path)
    else:
        with pytest.raises(ConfigError, match=text):
            Settings.for_model(None, **given)
