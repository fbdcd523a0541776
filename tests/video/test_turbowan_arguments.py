"""Every argument of TurboDiffusion's inference scripts is taken, or refused with a reason."""

from __future__ import annotations

import ast
import runpy
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from turbo_rcm_patch import PatchConfig
from turbo_rcm_patch.errors import ConfigError, DeviceError, SamplingError, TurboRCMError
from turbowan.arguments import (
    RESOLUTIONS,
    frame_size,
    image_to_video_parser,
    parse,
    patch_config,
    run,
    text_to_video_parser,
)
from turbowan.video import adapted_size, boundary_ratio, fitted, read_image

EXAMPLES = Path(__file__).parents[2] / "examples"
SHARED = {
    "num_samples": 1, "num_steps": 4, "num_frames": 81, "prompt": None, "aspect_ratio": "16:9",
    "seed": 0, "save_path": "output/generated_video.mp4", "attention_type": "sagesla",
    "sla_topk": 0.1, "quant_linear": False, "default_norm": False, "vae_path": None,
    "text_encoder_path": None,
}  # fmt: skip
#: Script -> its parser here, and every argument with our default.
SCRIPTS: dict[str, tuple[Callable[[str], ArgumentParser], dict[str, Any]]] = {
    "wan2.1_t2v_infer.py": (
        text_to_video_parser,
        SHARED | {"dit_path": None, "sigma_max": 80.0, "resolution": "480p"}
        | {"model": "Wan2.1-1.3B"},
    ),
    "wan2.2_i2v_infer.py": (
        image_to_video_parser,
        SHARED
        | {
            **{"image_path": None, "high_noise_model_path": None, "low_noise_model_path": None},
            **{"boundary": 0.9, "sigma_max": 200.0, "resolution": "720p", "ode": False},
            **{"adaptive_resolution": False, "model": "Wan2.2-A14B"},
        },
    ),
}  # fmt: skip
#: The least that each parser takes.
TEXT = ["--dit_path", "x.pth", "--prompt", "a cat"]
IMAGE = [
    *("--high_noise_model_path", "h.pth", "--low_noise_model_path", "l.pth"),
    *("--image_path", "i.png", "--prompt", "a cat"),
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def actions(script: str) -> dict[str, Any]:
    return {action.dest: action for action in SCRIPTS[script][0]("")._actions}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_argument_is_known_with_its_default(script: str) -> None:
    ours = actions(script)
    for name, default in SCRIPTS[script][1].items():
        assert ours[name].option_strings == [f"--{name}"]
        assert ours[name].default == default, name


@pytest.fixture(scope="module")
def checkout(request: pytest.FixtureRequest) -> Path:
    given = request.config.getoption("--turbodiffusion", default=None)
    if not given:
        pytest.skip("needs --turbodiffusion PATH, a checkout of TurboDiffusion")
    return Path(given) / "turbodiffusion"


@pytest.mark.parametrize("script", SCRIPTS)
def test_their_own_source_asks_for_nothing_else(script: str, checkout: Path) -> None:
    """Names, choices and defaults, read from the source."""
    source = checkout / "inference" / script
    calls = [
        node
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
    ]
    ours, names = actions(script), set()
    for call in calls:
        (name,) = (ast.literal_eval(argument).removeprefix("--") for argument in call.args)
        names.add(name)
        for keyword in call.keywords if name != "serve" else ():
            action = ours[name]
            if keyword.arg == "action":
                assert action.nargs == 0 and ast.literal_eval(keyword.value) == "store_true"
            elif keyword.arg == "choices":
                assert list(action.choices) == ast.literal_eval(keyword.value), name
            elif keyword.arg == "default" and not name.endswith("_path"):
                assert action.default == ast.literal_eval(keyword.value), name
    assert names == {*SCRIPTS[script][1], "serve"}


def test_sizes_are_those_of_the_checkout(checkout: Path) -> None:
    theirs = runpy.run_path(str(checkout / "rcm/datasets/utils.py"))
    assert theirs["VIDEO_RES_SIZE_INFO"] == RESOLUTIONS


def test_arguments_without_effect_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--vae_path", "Wan2.1_VAE.pth", "--text_encoder_path", "t5.pth", "--default_norm"]
    assert parse(text_to_video_parser(""), [*TEXT, *more]).prompt == "a cat"
    said = capsys.readouterr().err
    assert said.count("has no effect: ") == 3 and "--vae_path" in said and "--base" in said


def test_their_server_is_refused_with_what_to_use() -> None:
    with pytest.raises(ConfigError, match="--serve.*turbo-rcm-patch generate"):
        parse(text_to_video_parser(""), ["--dit_path", "x.pth", "--serve"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("resolution", "4k"), ("resolution", "100x64"), ("aspect_ratio", "2:1"),
        ("save_path", "/dev/null/a.mp4"), ("save_path", "a.webm"), ("save_path", "turbo-v2.1"),
        ("device", "tpu"), ("device", "meta"), ("sigma_max", "5"), ("sigma_max", "-1"),
        ("sla_topk", "0"), ("sla_topk", "nan"),
    ],
)  # fmt: skip
def test_values_outside_a_domain_are_refused_before_anything_loads(name: str, value: str) -> None:
    with pytest.raises(TurboRCMError):
        parse(text_to_video_parser(""), [*TEXT, f"--{name}", value])


@pytest.mark.parametrize(
    "wrong",
    [["--num_samples", "0"], ["--num_frames", "0"], ["--num_steps", "5"], ["--boundary", "900"],
     ["--boundary", "nan"], ["--seed", str(2**64)], ["--image", "i.png"]],
    ids=" ".join,
)  # fmt: skip
def test_wrong_usage_ends_with_code_2(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(image_to_video_parser(""), [*IMAGE, *wrong])
    assert stop.value.code == 2 and wrong[0] in capsys.readouterr().err


def test_a_cpu_has_nothing_to_offload_from() -> None:
    with pytest.raises(DeviceError, match="offload"):
        parse(text_to_video_parser(""), [*TEXT, "--device", "cpu", "--offload", "model"])


def test_the_patch_is_what_was_asked_for() -> None:
    def config(*more: str) -> PatchConfig:
        return patch_config(parse(text_to_video_parser(""), [*TEXT, *more]))

    assert config() == PatchConfig()
    assert config("--quant_linear") == PatchConfig(linear="int8")
    assert config("--sla_topk", "0.2").sla_topk == 0.2


def test_sizes() -> None:
    def size(*more: str) -> tuple[int, int]:
        return frame_size(parse(text_to_video_parser(""), [*TEXT, *more]))

    assert size() == (832, 480)
    assert size("--resolution", "720p", "--aspect_ratio", "9:16") == (720, 1280)
    assert size("--resolution", "64x48", "--aspect_ratio", "4:3") == (64, 48)
    # 1280 x 720 pixels in the shape of the image.
    assert adapted_size((1280, 720), (1280, 720)) == (1280, 720)
    assert adapted_size((600, 800), (1280, 720)) == (832, 1104)


def test_the_boundary_switches_where_exact_times_do() -> None:
    times = torch.tensor([0.99502, 0.93379, 0.85291, 0.60898])
    rounded = torch.tensor([996.0, 932.0, 852.0, 608.0])
    for boundary in (0.0, 0.5, 0.6085, 0.8525, 0.9, 0.933, 0.94, 0.9955, 1.0):
        ratio = boundary_ratio(boundary, 4, 200.0)
        assert torch.equal(rounded >= ratio * 1000, times >= boundary), boundary
    assert boundary_ratio(0.9, 1, 200.0) == 0.0


def test_an_image_is_stretched_bilinearly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    monkeypatch.setenv("HOME", str(tmp_path))
    Image.fromarray(values).save(tmp_path / "image.png")
    image = read_image("~/image.png")
    pixels = torch.from_numpy(values).permute(2, 0, 1)[None].float()
    assert torch.equal(fitted(image, 60, 40), pixels / 255)
    exact = torch.nn.functional.interpolate(
        pixels, (16, 32), mode="bilinear", antialias=True, align_corners=False
    )
    assert float((fitted(image, 32, 16) * 255 - exact).abs().max()) < 1.0
    (tmp_path / "text.png").write_text("no image")
    for name in ("text.png", "none.png"):
        with pytest.raises(SamplingError, match="--image_path"):
            read_image(tmp_path / name)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1)
    with pytest.raises(SamplingError, match="decompression bomb"):
        read_image("~/image.png")


@pytest.mark.parametrize(("example", "least"), [("t2v", TEXT), ("i2v", IMAGE)])
def test_help_and_errors_of_the_scripts(
    example: str, least: list[str], monkeypatch: Any, capsys: Any
) -> None:
    script = EXAMPLES / f"turbowan_{example}.py"

    def exit_code(*argv: str) -> int:
        monkeypatch.setattr(sys, "argv", [script.name, *argv])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(script), run_name="__main__")
        return int(stop.value.code or 0)

    assert exit_code("--help") == 0
    text = capsys.readouterr().out
    assert "example:" in text and "--sla_topk" in text and "--base" in text
    assert exit_code(*least) == 2
    error = capsys.readouterr().err
    assert ("x.pth" in error or "i.png" in error) and "Traceback" not in error


@pytest.mark.parametrize(
    ("failure", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "Nothing unfinished is written"),
        (torch.OutOfMemoryError("no memory"), 2, "--offload model"),
        (SamplingError("the latents", got="NaN"), 2, "SamplingError: the latents"),
    ],
    ids=["interrupt", "memory", "typed"],
)
def test_failures_are_lines_and_codes(
    failure: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise failure

    assert run(fails) == code and said in capsys.readouterr().err
    assert run(lambda: None) == 0
