"""Few-step schedules by name and by list, and which sampler a model is run with."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.video.micro import SMALL, micro_pipe
from turbo_rcm_patch import RCMScheduler
from turbo_rcm_patch.errors import ConfigError, ModelFolderError
from turbo_rcm_patch.tiny import TINY_WAN
from turbo_rcm_patch.video import Settings, generate
from turbo_rcm_patch.video.generation import settings_for
from turbo_rcm_patch.video.load import load_pipeline, pipeline_class

#: Settings, the network times that the model sees, and the form of the step.
RUNS: dict[str, tuple[dict[str, Any], list[float], str]] = {
    "rcm": ({"sampler": "rcm"}, [987.65, 933.78, 852.90, 608.98], "sde"),
    "lightning": ({"sampler": "lightning"}, [1000, 937.5, 833.333, 625], "ode"),
    "fastwan": ({"sampler": "fastwan"}, [1000, 757, 522], "sde"),
    "self-forcing": ({"sampler": "self-forcing"}, [1000, 937.5, 833.333, 625], "sde"),
    "list": ({"times": [1000, 750, 500, 250]}, [1000, 750, 500, 250], "sde"),
    "shifted list": ({"times": (1000, 500), "shift": 5.0}, [1000, 833.333], "sde"),
    "other shift": ({"sampler": "lightning", "shift": 1}, [1000, 750, 500, 250], "ode"),
    "other form": ({"sampler": "lightning", "form": "sde"}, [1000, 937.5, 833.333, 625], "sde"),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_network_is_called_at_the_published_times(name: str, pipe: Any) -> None:
    given, times, form = RUNS[name]
    seen: list[float] = []
    hook = pipe.transformer.register_forward_pre_hook(
        lambda _, __, named: seen.append(float(named["timestep"].flatten()[-1])), with_kwargs=True
    )
    made = generate(pipe, "a red circle", **given, **SMALL)
    hook.remove()
    assert seen == pytest.approx(times, abs=0.01)
    assert made.settings.steps == len(times) and made.settings.guidance_scale == 1.0
    few = made.settings.few_steps
    assert few is not None and few["sampler"] == form


def test_python_users_set_the_scheduler() -> None:
    """The pipeline is then run with it."""
    pipe = micro_pipe()
    pipe.scheduler = RCMScheduler.named("lightning")
    settings = settings_for(pipe, **SMALL)
    assert (settings.sampler, settings.steps, settings.form) == ("times", 4, "ode")
    assert settings.times == pytest.approx((1000, 937.5, 833.333, 625), abs=0.01)
    pipe.scheduler = RCMScheduler(sigma_max=200.0)
    settings = settings_for(pipe, **SMALL)
    assert (settings.sampler, settings.steps, settings.sigma_max) == ("rcm", 4, 200.0)


def test_a_folder_of_fastvideo_is_loaded_and_run_at_its_times(micro_folder, tmp_path) -> None:
    """Its model_index.json names a pipeline that diffusers does not have."""
    folder = Path(shutil.copytree(micro_folder, tmp_path / "fastwan"))
    index = json.loads((folder / "model_index.json").read_text())
    index["_class_name"] = "WanDMDPipeline"
    (folder / "model_index.json").write_text(json.dumps(index))
    pipe = load_pipeline(folder, device="cpu")
    assert pipeline_class(folder) == type(pipe).__name__ == "WanPipeline"
    made = generate(pipe, "a red circle", **SMALL)
    assert (made.settings.sampler, made.settings.steps) == ("fastwan", 3)
    assert settings_for(pipe, sampler="scheduler").steps == 50


#: What a folder says, what is asked for, and what is run.
CHOICES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}, {"sampler": "scheduler", "steps": 50, "guidance_scale": 5.0}),
    "asked": ({}, {"sampler": "rcm"}, {"sampler": "rcm", "steps": 4, "guidance_scale": 1.0}),
    "asked by list": ({}, {"times": [900, 500]}, {"sampler": "times", "steps": 2}),
    "rcm": ({"sampler": "rcm", "steps": 2}, {}, {"sampler": "rcm", "steps": 2}),
    "rcm of before": ({"sigma_max": 200, "steps": 3}, {}, {"sampler": "rcm", "steps": 3}),
    "times": ({"times": [1000, 757, 522]}, {}, {"sampler": "times", "steps": 3}),
    "schedule": ({"sampler": "fastwan"}, {}, {"sampler": "fastwan", "steps": 3}),
    "other sampler": (
        {"sampler": "rcm", "steps": 2, "sigma_max": 200, "height": 64},
        {"sampler": "lightning"},
        {"sampler": "lightning", "steps": 4, "height": 64, "sigma_max": 80.0},
    ),
    "own scheduler": (
        {"steps": 2, "sigma_max": 200, "height": 64},
        {"sampler": "scheduler"},
        {"sampler": "scheduler", "steps": 50, "height": 64, "guidance_scale": 5.0},
    ),
    "not given": ({"width": 64}, {"width": None, "height": 48}, {"width": 64, "height": 48}),
    "a note": ({"about": "for people", "fps": 8}, {}, {"fps": 8}),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_sampler_is_the_folders_or_the_pipelines_own(name: str, tmp_path: Path) -> None:
    stored, given, expected = CHOICES[name]
    (tmp_path / "turbo_rcm.json").write_text(json.dumps(stored))
    made = Settings.for_model(tmp_path, **given).as_dict()
    assert {key: made[key] for key in expected} == expected


def test_the_shipped_model_goes_on_with_few_steps() -> None:
    settings = Settings.for_model(TINY_WAN)
    assert (settings.sampler, settings.steps, settings.guidance_scale) == ("rcm", 4, 1.0)


def test_few_steps_of_a_model_that_does_not_say_so_are_told_once(
    micro_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(micro_folder, tmp_path / "model"))
    pipe = load_pipeline(folder, device="cpu")
    caplog.set_level(logging.WARNING)
    settings_for(pipe)
    assert not caplog.messages, "50 steps are many"
    for _ in range(2):
        settings_for(pipe, sampler="lightning")
    (said,) = caplog.messages
    assert "distilled" in said and "--lora" in said and str(folder) in said
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
        ({"sampler": "rcm", "times": (900.0,)}, "times; expected none with sampler='rcm'"),
        ({"sampler": "times"}, "times; expected some"),
        ({"sampler": "rcm", "shift": 5.0}, "shift; expected none"),
        ({"times": [500, 750]}, r"decrease, in \(0, 1000\]"),
        ({"times": [1000, 0]}, "Leave out the 0"),
        ({"times": []}, "times"),
        ({"times": "1000,750"}, "times"),
        ({"times": [1001.0]}, "times"),
        ({"times": [1000], "shift": 0}, "shift; expected a positive number"),
        ({"form": "pde"}, "form; expected one of"),
        ({"height": 100}, "multiple of 16.*Try 96"),
        ({"num_frames": 0}, "positive whole number"),
        ({"colour": "red"}, "one of"),
        ({"steps": True}, "whole number from 1 to 1000"),
        ({"sigma_max": "80"}, "sigma_max; expected a finite number"),
        ({"guidance_scale": float("nan")}, "guidance_scale; expected a finite number"),
        ({"guidance_scale_2": "5"}, "guidance_scale_2; expected a finite number"),
        ({"negative_prompt": 3}, "negative_prompt; expected a text"),
    ],
    ids=str,
)
def test_bad_settings(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Settings.for_model(None, **given)


@pytest.mark.parametrize(("content", "text"), [("[1]", "a JSON object"), ("{", "not valid JSON")])
def test_a_folder_with_bad_settings(content: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "turbo_rcm.json").write_text(content)
    with pytest.raises(ModelFolderError, match=text):
        Settings.for_model(tmp_path)
