"""Every argument of TurboDiffusion's inference scripts is taken, or refused with a reason."""

from __future__ import annotations

import ast
import io
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
from turbo_rcm_patch.video.load import choose_device
from turbowan.arguments import (
    frame_size,
    image_to_video_parser,
    parse,
    patch_config,
    run,
    text_to_video_parser,
)
from turbowan.sampling import adapted_size, boundary_ratio, fitted, read_image
from turbowan.serving import requests, serve

EXAMPLES = Path(__file__).parents[2] / "examples"
SHARED = {
    "model": None, "num_samples": 1, "num_steps": 4, "num_frames": 81, "prompt": None,
    "aspect_ratio": "16:9", "seed": 0, "save_path": "output/generated_video.mp4",
    "attention_type": "sagesla", "sla_topk": 0.1, "quant_linear": False, "default_norm": False,
    "serve": False, "vae_path": None, "text_encoder_path": None,
}  # fmt: skip
#: Script -> its parser here, and every argument with our default.
SCRIPTS: dict[str, tuple[Callable[[str], ArgumentParser], dict[str, Any]]] = {
    "wan2.1_t2v_infer.py": (
        text_to_video_parser,
        SHARED | {"dit_path": None, "sigma_max": 80.0, "resolution": "480p"},
    ),
    "wan2.2_i2v_infer.py": (
        image_to_video_parser,
        SHARED
        | {
            **{"image_path": None, "high_noise_model_path": None, "low_noise_model_path": None},
            **{"boundary": 0.9, "sigma_max": 200.0, "resolution": "720p", "ode": False},
            "adaptive_resolution": False,
        },
    ),
}
#: How an error of a value begins, where not with the name.
REASON = {"base": "no such folder"}
#: The least that each parser takes.
LEAST = {
    "wan2.1_t2v_infer.py": ["--dit_path", "x.pth", "--prompt", "a cat"],
    "wan2.2_i2v_infer.py": [
        *("--high_noise_model_path", "h.pth", "--low_noise_model_path", "l.pth"),
        *("--image_path", "i.png", "--prompt", "a cat"),
    ],
}
#: Theirs lie in a folder of the checkout by default; ours come with --base.
FILES = ("vae_path", "text_encoder_path")


def actions(script: str) -> dict[str, Any]:
    return {action.dest: action for action in SCRIPTS[script][0]("")._actions}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_argument_is_known_with_its_default(script: str) -> None:
    ours = actions(script)
    for name, default in SCRIPTS[script][1].items():
        assert ours[name].option_strings == [f"--{name}"]
        assert ours[name].default == default, name


@pytest.mark.parametrize("script", SCRIPTS)
def test_their_own_source_asks_for_nothing_else(
    script: str, request: pytest.FixtureRequest
) -> None:
    """Names, types, choices and defaults, read from the source."""
    given = request.config.getoption("--turbodiffusion", default=None)
    if not given:
        pytest.skip("needs --turbodiffusion PATH, a checkout of TurboDiffusion")
    source = Path(given) / "turbodiffusion" / "inference" / script
    calls = [
        node
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
    ]
    ours, names = actions(script), set()
    for call in calls:
        (name,) = (ast.literal_eval(argument).removeprefix("--") for argument in call.args)
        names.add(name)
        action = ours[name]
        for keyword in call.keywords:
            if keyword.arg == "type":
                assert (action.type or str).__name__ == ast.unparse(keyword.value), name
            elif keyword.arg == "action":
                assert action.nargs == 0 and ast.literal_eval(keyword.value) == "store_true"
            elif keyword.arg == "choices":
                assert list(action.choices) == ast.literal_eval(keyword.value), name
            elif keyword.arg == "required":
                assert action.required
            elif keyword.arg == "default" and name not in {*FILES, "model"}:
                assert action.default == ast.literal_eval(keyword.value), name
    assert names == set(SCRIPTS[script][1])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_files_that_are_not_there_are_refused_with_a_remedy(script: str, name: str) -> None:
    more = [f"--{name}", "x.pth"]
    parser = SCRIPTS[script][0]("")
    assert parse(parser, LEAST[script]).prompt == "a cat"
    with pytest.raises(ConfigError, match=f"--{name}.*--base"):
        parse(parser, [*LEAST[script], *more])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_samples", "0"), ("num_frames", "0"), ("resolution", "4k"), ("prompt", ""),
        ("resolution", "100x64"), ("aspect_ratio", "2:1"), ("save_path", "/dev/null/a.mp4"),
        ("save_path", "/"), ("device", "tpu"), ("base", "no/such/folder"),
        ("sigma_max", "5"), ("sigma_max", "-1"), ("seed", str(2**64)), ("device", "meta"),
        ("save_path", "turbo-v2.1"), ("save_path", "a.webm"),
    ],
)  # fmt: skip
def test_values_outside_a_domain_are_refused_before_anything_loads(name: str, value: str) -> None:
    parser = text_to_video_parser("")
    arguments = [*LEAST["wan2.1_t2v_infer.py"], f"--{name}", value]
    with pytest.raises(TurboRCMError, match=REASON.get(name, name)):
        parse(parser, arguments)


@pytest.mark.parametrize("value", ["900", "-0.1", "nan"])
def test_a_boundary_is_a_time(value: str) -> None:
    arguments = [*LEAST["wan2.2_i2v_infer.py"], "--boundary", value]
    with pytest.raises(ConfigError, match="--boundary.*from 0 to 1"):
        parse(image_to_video_parser(""), arguments)


@pytest.mark.parametrize("offload", ["model", "sequential"])
def test_a_cpu_has_nothing_to_offload_from(offload: str) -> None:
    arguments = [*LEAST["wan2.1_t2v_infer.py"], "--device", "cpu", "--offload", offload]
    with pytest.raises(DeviceError, match="offload"):
        parse(text_to_video_parser(""), arguments)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(DeviceError, match="2 GPUs.*cuda:2"):
        choose_device("cuda:2")


def test_an_image_in_the_home_folder_is_found(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    Image.new("RGB", (3, 2)).save(tmp_path / "i.png")
    assert read_image("~/i.png").shape == (1, 3, 2, 3)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1)
    with pytest.raises(SamplingError, match="decompression bomb"):
        read_image("~/i.png")


def test_the_patch_is_what_was_asked_for() -> None:
    parser = text_to_video_parser("")

    def config(*more: str) -> PatchConfig:
        return patch_config(parse(parser, [*LEAST["wan2.1_t2v_infer.py"], *more]))

    assert config() == PatchConfig(guard=False)
    assert config("--quant_linear", "--guard") == PatchConfig(linear="int8")
    assert config("--sla_topk", "0.2").sla_topk == 0.2
    for wrong in ("0", "5", "nan"):
        with pytest.raises(
            ConfigError, match=r"^--sla_topk; .*\(0, 1\].*--attention_type original"
        ):
            config("--sla_topk", wrong)


def test_serving_reads_prompts_and_numbers_videos(tmp_path, monkeypatch) -> None:
    parser, least = text_to_video_parser(""), ["--dit_path", "x.pth"]
    least += ["--save_path", str(tmp_path / "video")]
    one = parse(parser, [*least, "--prompt", "a cat"])
    assert list(requests(one)) == [("a cat", tmp_path / "video.mp4")]
    (tmp_path / "video-001.mp4").touch()
    monkeypatch.setattr(sys, "stdin", io.StringIO("a dog\n\n a fox \n/quit\nan owl\n"))
    served = requests(parse(parser, [*least, "--serve"]))
    assert list(served) == [
        ("a dog", tmp_path / "video-002.mp4"), ("a fox", tmp_path / "video-003.mp4")
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="--prompt TEXT, or --serve"):
        parse(parser, least)


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (SamplingError("the latents", got="NaN"), "SamplingError: the latents; got NaN."),
        (torch.OutOfMemoryError("no memory"), "--offload model"),
    ],
    ids=["typed", "memory"],
)
def test_serving_goes_on_after_a_failure(failure, told, tmp_path, monkeypatch, capsys) -> None:
    parser, done = text_to_video_parser(""), []
    least = ["--dit_path", "x.pth", "--save_path", str(tmp_path / "video")]

    def generate(prompt: str, path: Path) -> None:
        done.append((prompt, path.name))
        if prompt == "a dog":
            raise failure

    def served(lines: str) -> int:
        arguments = parse(parser, [*least, "--serve"])
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        return run(lambda: serve(arguments, generate))

    assert served("a dog\na fox\n") == 2
    assert told in capsys.readouterr().err
    assert done == [("a dog", "video-001.mp4"), ("a fox", "video-002.mp4")]
    assert served("a fox\n") == 0
    one = parse(parser, [*least, "--prompt", "a dog"])
    with pytest.raises(type(failure)):
        serve(one, generate)
    assert run(lambda: serve(one, generate)) == 2


def test_sizes() -> None:
    assert frame_size("480p") == (832, 480)
    assert frame_size("720p", "9:16") == (720, 1280)
    assert frame_size("720", "4:3") == (960, 704)
    assert frame_size("64x48", "4:3") == (64, 48)
    # 1280 x 720 pixels in the shape of the image.
    assert adapted_size((1280, 720), (1280, 720)) == (1280, 720)
    assert adapted_size((1000, 1000), (1280, 720)) == (960, 960)
    assert adapted_size((600, 800), (1280, 720)) == (832, 1104)


def test_sizes_are_those_of_the_checkout(request: pytest.FixtureRequest) -> None:
    given = request.config.getoption("--turbodiffusion", default=None)
    if not given:
        pytest.skip("needs --turbodiffusion PATH, a checkout of TurboDiffusion")
    from turbowan.arguments import RESOLUTIONS

    theirs = runpy.run_path(str(Path(given) / "turbodiffusion/rcm/datasets/utils.py"))
    assert theirs["VIDEO_RES_SIZE_INFO"] == RESOLUTIONS


def test_the_boundary_switches_where_exact_times_do() -> None:
    times = torch.tensor([0.99502, 0.93379, 0.85291, 0.60898])
    rounded = torch.tensor([996.0, 932.0, 852.0, 608.0])
    for boundary in (0.0, 0.5, 0.6085, 0.7, 0.8525, 0.9, 0.933, 0.94, 0.9955, 1.0, 2.0):
        ratio = boundary_ratio(boundary, 4, 200.0)
        assert torch.equal(rounded >= ratio * 1000, times >= boundary), boundary
    assert boundary_ratio(0.9, 1, 200.0) == 0.0


def test_an_image_is_stretched_bilinearly(tmp_path) -> None:
    values = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    path = tmp_path / "image.png"
    Image.fromarray(values).save(path)
    image = read_image(path)
    assert torch.equal(image[0].permute(1, 2, 0), torch.from_numpy(values))
    assert torch.equal(fitted(image, 60, 40), image.float() / 255)
    small = fitted(image, 32, 16)
    exact = torch.nn.functional.interpolate(
        image.float(), (16, 32), mode="bilinear", antialias=True, align_corners=False
    )
    assert float((small * 255 - exact).abs().max()) < 1.0
    with Image.open(path) as opened:
        reduced = opened.resize((32, 16), Image.Resampling.BILINEAR)
    pillow = torch.from_numpy(np.array(reduced)).permute(2, 0, 1)
    assert float((small[0] * 255 - pillow).abs().max()) <= 1.0 + 1e-4
    (tmp_path / "text.png").write_text("no image")
    for name in ("text.png", "none.png"):
        with pytest.raises(SamplingError, match="--image_path"):
            read_image(tmp_path / name)


@pytest.mark.parametrize("example", ["turbowan_t2v.py", "turbowan_i2v.py"])
def test_help_and_errors_of_the_scripts(example: str, monkeypatch, capsys) -> None:
    def exit_code(*argv: str) -> int:
        monkeypatch.setattr(sys, "argv", [example, *argv])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(EXAMPLES / example), run_name="__main__")
        return int(stop.value.code or 0)

    assert exit_code("--help") == 0
    text = capsys.readouterr().out
    assert "example:" in text and "--sla_topk" in text and "--base" in text
    least = LEAST["wan2.1_t2v_infer.py" if "t2v" in example else "wan2.2_i2v_infer.py"]
    assert exit_code(*least, "--num_samples", "0") == 2
    assert "ConfigError: --num_samples" in capsys.readouterr().err
    assert exit_code(*least) == 2
    error = capsys.readouterr().err
    assert "x.pth" in error or "i.png" in error
    assert "Traceback" not in error


def test_an_interruption_is_no_traceback(capsys) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert run(interrupted) == 130
    assert "not finished is not written" in capsys.readouterr().err
    assert run(lambda: None) == 0

    def too_large() -> None:
        raise torch.OutOfMemoryError("no memory")

    assert run(too_large) == 2
    assert "--offload model" in capsys.readouterr().err

    def broken() -> None:
        raise ZeroDivisionError

    assert run(broken) == 3
    assert "Traceback" in capsys.readouterr().err
