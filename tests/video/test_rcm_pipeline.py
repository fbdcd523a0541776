"""The rCM scheduler inside diffusers' own Wan pipelines, patched and not.

Every network call and every state of a pipeline's run is compared with the published loop: x =
noise t0; x <- (1 - t') (x - t v) + t' eps or x <- x - (t - t') v in fp64, written here from the
formulas (rCM: arXiv 2510.08431; TurboDiffusion: arXiv 2512.16093).
"""

from __future__ import annotations

import json
import math
import shutil
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, WanPipeline
from PIL import Image

from tests.measures import relative_l2
from tests.processes import run_fresh
from tests.video.micro import SMALL, micro_image_pipe, micro_pipe, micro_token_time_pipe, save
from turbo_rcm_patch import RCMScheduler, patch_model, unpatch_model
from turbo_rcm_patch.video.load import load_pipeline
from turbo_rcm_patch.video.rcm_times import noise_stream

SHAPE = (1, 4, 2, 4, 4)
PIPES = {
    "t2v": lambda: micro_pipe(),
    "t2v-two-experts": lambda: micro_pipe(experts=True),
    "t2v-token-times": lambda: micro_token_time_pipe(image=False),
    "i2v-clip": lambda: micro_image_pipe(experts=False),
    "i2v-two-experts": lambda: micro_image_pipe(experts=True),
    "i2v-token-times": lambda: micro_token_time_pipe(image=True),
}


def pipe_of(name: str) -> Any:
    pipe = PIPES[name]()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def rcm(pipe: Any, **config: Any) -> RCMScheduler:
    """Put an rCM scheduler in, the way any scheduler is changed."""
    pipe.scheduler = RCMScheduler.from_config(pipe.scheduler.config, **config)
    return pipe.scheduler


@dataclass
class Run:
    """What happened in one call of a pipeline: network calls, and the state after every step."""

    latents: torch.Tensor
    calls: list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)


def generate(pipe: Any, steps: int = 4, **call: Any) -> Run:
    run = Run(torch.empty(0))

    def after(_: object, __: int, ___: object, tensors: dict[str, Any]) -> dict[str, Any]:
        run.states.append(tensors["latents"].clone())
        return {}

    hooks = []
    for name in ("transformer", "transformer_2"):
        network = getattr(pipe, name)
        if network is None:
            continue

        def record(_: Any, __: Any, given: dict[str, Any], out: Any, name: str = name) -> None:
            run.calls.append((name, given["hidden_states"], given["timestep"], out[0]))

        hooks.append(network.register_forward_hook(record, with_kwargs=True))
    image = {}
    if not isinstance(pipe, WanPipeline):
        # The image tokens of Wan's processor are those beyond 512 of text.
        image = {"image": Image.new("RGB", (32, 32), "teal"), "max_sequence_length": 512}
    settings = {"num_inference_steps": steps, "guidance_scale": 1.0, "output_type": "latent"}
    try:
        run.latents = pipe(
            prompt="a red circle",
            **{**SMALL, **settings, **image, **call},
            callback_on_step_end=after,
        ).frames
    finally:
        for hook in hooks:
            hook.remove()
    return run


def times_by_hand(steps: int, sigma_max: float) -> list[float]:
    angles = [math.atan(sigma_max), 1.5, 1.4, 1.0][:steps] + [0.0]
    return [math.sin(a) / (math.cos(a) + math.sin(a)) for a in angles]


@pytest.mark.parametrize("name", PIPES)
@pytest.mark.parametrize(
    ("steps", "sampler", "sigma_max"),
    [(3, "sde", 200.0), (4, "ode", 80.0)],
    ids=["3-sde", "4-ode"],
)
def test_a_pipeline_runs_the_published_loop(name, steps, sampler, sigma_max) -> None:
    pipe = pipe_of(name)
    scheduler = rcm(pipe, sampler=sampler, sigma_max=sigma_max, noise_seed=3)
    noise = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    run = generate(pipe, steps, latents=scheduler.init_noise(noise))

    times = times_by_hand(steps, sigma_max)
    x = noise.double() * times[0]
    stream = noise_stream(3, "rcm-renoise")
    assert len(run.calls) == len(run.states) == steps
    for i, (t, t_next) in enumerate(zip(times, times[1:], strict=False)):
        expert, seen, timestep, v = run.calls[i]
        assert expert == ("transformer_2" if "two-experts" in name and t < 0.9 else "transformer")
        assert float(timestep.max()) == pytest.approx(1000 * t, rel=1e-6)
        if "i2v-token" not in name:  # there the image is in the place of the first frame
            torch.testing.assert_close(seen[:, :4].double(), x, rtol=0, atol=1e-6)
        if sampler == "ode":
            x = x - (t - t_next) * v.double()
        else:
            x = (1 - t_next) * (x - t * v.double())
            if t_next > 0:
                x = x + t_next * torch.randn(SHAPE, generator=stream).double()
        assert run.states[i].dtype == torch.float64
        torch.testing.assert_close(run.states[i], x, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["t2v-two-experts", "i2v-clip"])
def test_the_generator_is_respected_in_all_of_the_noise(name: str) -> None:
    pipe = pipe_of(name)

    def first_states(**config: Any) -> list[torch.Tensor]:
        rcm(pipe, **config)
        seeds = (0, 0, 1)
        runs = [generate(pipe, 2, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return [run.states[0].flatten() for run in runs]

    def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
        return float(torch.corrcoef(torch.stack([a, b]))[0, 1])

    state = torch.random.get_rng_state()
    one, same, other = first_states()
    assert torch.equal(one, same)
    assert abs(correlation(one, other)) < 0.4
    one, same, other = first_states(noise_seed=7)
    assert torch.equal(one, same)
    assert correlation(one, other) > 0.9, "what a fixed seed costs: 93 % of the state is shared"
    assert torch.equal(state, torch.random.get_rng_state()), "the global generator is untouched"


def test_a_video_does_not_depend_on_its_batch() -> None:
    pipe = pipe_of("t2v")
    rcm(pipe)
    seeds = (4, 5)
    alone = [
        generate(pipe, generator=torch.Generator().manual_seed(seed)).latents for seed in seeds
    ]
    together = generate(
        pipe,
        num_videos_per_prompt=2,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
    ).latents
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", PIPES)
@pytest.mark.supports("WanTransformer3DModel", "its pipeline", "rCM sampler")
def test_patched_is_near_and_unpatched_is_as_before(name: str) -> None:
    pipe = pipe_of(name)
    rcm(pipe)
    noise = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    before = generate(pipe, latents=noise).latents
    report = patch_model(pipe)
    boundary = [pair for pair in report.pairs if pair.kind == "boundary"]
    experts = ["transformer"] + ["transformer_2"] * ("two-experts" in name)
    assert [pair.path for pair in boundary] == experts
    after = generate(pipe, latents=noise).latents
    error = relative_l2(after, before)
    assert 0 < error < 0.02
    unpatch_model(pipe)
    assert torch.equal(generate(pipe, latents=noise).latents, before)

    # The guard looked at the first and the last step of each expert.
    looked = {
        (one.path.split(".")[0], one.step, one.when)
        for one in report.guard
        if one.when != "sampled" and not one.path.startswith("vae")
    }
    started = {(one, 2 * i, "first") for i, one in enumerate(experts)}
    ended = {(one, 1 if one != experts[-1] else 3, "last") for one in experts}
    assert looked == started | ended
    assert {record.verdict for record in report.guard} == {"kept"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline folder with an rCM scheduler."""
    pipe = pipe_of("t2v")
    rcm(pipe, sigma_max=200.0)
    return save(pipe, tmp_path_factory.mktemp("saved") / "model")


LOADERS = {
    "DiffusionPipeline": "import turbo_rcm_patch; from diffusers import DiffusionPipeline\n"
    "pipe = DiffusionPipeline.from_pretrained(folder, local_files_only=True)",
    "load_pipeline": "from turbo_rcm_patch.video import load_pipeline\n"
    "pipe = load_pipeline(folder, device='cpu')",
    "another-scheduler": "import turbo_rcm_patch\n"
    "from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline\n"
    "pipe = WanPipeline.from_pretrained(folder, scheduler=FlowMatchEulerDiscreteScheduler())\n"
    "from turbo_rcm_patch import RCMScheduler\n"
    "pipe.scheduler = RCMScheduler.from_pretrained(folder, subfolder='scheduler')",
}


@pytest.mark.parametrize(
    ("loader", "recorded"),
    [*((loader, "today") for loader in LOADERS), ("load_pipeline", "older")],
)
def test_a_new_process_loads_it(loader: str, recorded: str, saved: Path, tmp_path: Path) -> None:
    """In the process that saved it everything is imported already, which proves nothing."""
    folder = saved
    if recorded == "older":  # Folders of before name the module, which has to be imported.
        folder = Path(shutil.copytree(saved, tmp_path / "model"))
        index = json.loads((folder / "model_index.json").read_text())
        index["scheduler"] = ["turbo_rcm_patch.video.scheduler", "RCMScheduler"]
        (folder / "model_index.json").write_text(json.dumps(index))
    code = LOADERS[loader]
    run_fresh(
        f"import sys; folder = sys.argv[1]\n{code}\n"
        "assert type(pipe.scheduler).__name__ == 'RCMScheduler'\n"
        "assert pipe.scheduler.config.sigma_max == 200.0\n"
        "pipe.scheduler.set_timesteps(4)",
        str(folder),
    )


def test_its_folder_names_what_a_user_imports(saved: Path) -> None:
    index = json.loads((saved / "model_index.json").read_text())
    assert index["scheduler"] == ["turbo_rcm_patch", "RCMScheduler"]
    run_fresh(
        "import pickle, turbo_rcm_patch\n"
        "scheduler = pickle.loads(pickle.dumps(turbo_rcm_patch.RCMScheduler(sigma_max=200.0)))\n"
        "assert scheduler.config.sigma_max == 200.0"
    )


def test_saved_and_loaded_with_its_pipeline(tmp_path: Path) -> None:
    pipe = pipe_of("t2v-two-experts")
    rcm(pipe, sigma_max=200.0, timestep_dtype="bfloat16")
    noise = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    before = generate(pipe, latents=noise).latents
    folder = save(pipe, tmp_path / "model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    again.set_progress_bar_config(disable=True)
    assert type(again) is type(pipe) and type(again.scheduler) is RCMScheduler
    config, expected = dict(again.scheduler.config), dict(pipe.scheduler.config)
    expected.pop("_use_default_values")  # bookkeeping of diffusers that is not saved
    assert config == expected
    torch.testing.assert_close(generate(again, latents=noise).latents, before, rtol=0, atol=1e-6)
    loaded = load_pipeline(folder, dtype=torch.float32, device="cpu")
    assert type(loaded.scheduler) is RCMScheduler
