"""Videos made from more than text: an image, or what a function of the user gives a pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from tests.video.micro import (
    QUICK,
    SMALL,
    animate,
    chronoedit,
    micro_image_pipe,
    micro_pipe,
    micro_token_time_pipe,
    micro_video_pipe,
    save,
    skyreels,
    vace,
)
from tests.video.micro_cogvideox import micro_cogvideox
from turbo_rcm_patch import PatchConfig
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.errors import ConfigError, NotAModelError, SamplingError
from turbo_rcm_patch.video import comparison, generation
from turbo_rcm_patch.video.comparison import compare
from turbo_rcm_patch.video.generation import encode, generate, recorded_calls, settings_for
from turbo_rcm_patch.video.pipelines import draw, frames_made
from turbo_rcm_patch.video.settings import Settings
from turbo_rcm_patch.video.source import Source, read_image

pytestmark = pytest.mark.usefixtures("no_pictures_here")
PROMPT = "a red circle moves left"
OTHER = "a blue square moves up"


def picture(shift: int = 0, size: int = 40) -> Image.Image:
    """Colours that differ from pixel to pixel; not of the videos' size."""
    ramp = torch.arange(size, dtype=torch.float32)
    red, green = torch.meshgrid(ramp, ramp + shift, indexing="ij")
    pixels = torch.stack([red * 6 % 256, green * 5 % 256, (red + green) * 3 % 256], -1)
    return Image.fromarray(pixels.to(torch.uint8).numpy(), "RGB")


def film(frames: int = 9) -> list[Image.Image]:
    return [picture(3 * i) for i in range(frames)]


IMAGE = {"image": picture()}
#: A pipeline in fp32, and what its videos are made from beside the prompt.
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "cogvideox": (micro_cogvideox, {}),
    "wan-clip": (lambda: micro_image_pipe(experts=False), IMAGE),
    "wan-two-experts": (lambda: micro_image_pipe(experts=True), IMAGE),
    "wan-token-times": (lambda: micro_token_time_pipe(image=True), IMAGE),
    "skyreels": (skyreels, {}),
    "chronoedit": (chronoedit, IMAGE),
    "cogvideox-image": (lambda: micro_cogvideox(source="image"), IMAGE),
    "cogvideox-1.5-image": (lambda: micro_cogvideox(source="image", patch_t=2), IMAGE),
}
PIPELINE = {"prompt": PROMPT, "height": 32, "width": 32}
#: What ConsisID's face models would have made.
IDENTITY = {
    "id_cond": torch.linspace(-1, 1, 16)[None],
    "id_vit_hidden": [torch.linspace(-1, 1 + i, 48).view(1, 6, 8) for i in range(5)],
}
#: A pipeline that `generate` does not call, and the arguments with which its user calls it.
UNUSUAL: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "wan-two-frames": (
        lambda: micro_image_pipe(experts=False, last=True),
        IMAGE | {"last_image": picture(9), "num_frames": 5},
    ),
    "wan-video": (micro_video_pipe, {"video": film(5), "strength": 0.6}),
    "vace": (
        vace,
        {"video": [x.resize((32, 32)) for x in film(5)], "reference_images": [picture(8)] * 2,
         "mask": [Image.new("L", (32, 32), 255)] * 5, "num_frames": 5},
    ),
    "animate": (
        animate,
        IMAGE | {"pose_video": film(5), "face_video": [picture(5 * i, 16) for i in range(5)],
                 "segment_frame_length": 5},
    ),
    "cogvideox-video": (lambda: micro_cogvideox(source="video"), {"video": film(5)}),
    "cogvideox-face": (
        lambda: micro_cogvideox(source="face"), IMAGE | IDENTITY | {"num_frames": 5}
    ),
}  # fmt: skip
CLASSES = (
    "WanTransformer3DModel",
    "SkyReelsV2Transformer3DModel",
    "ChronoEditTransformer3DModel",
    "CogVideoXTransformer3DModel",
)
_MADE: dict[str, Any] = {}


def made(name: str) -> Any:
    """The pipeline of a case as it is loaded. Tests leave it as they found it."""
    if name not in _MADE:
        pipe = (CASES | UNUSUAL)[name][0]()
        for part in ("transformer", "transformer_2", "text_encoder"):
            module = getattr(pipe, part, None)
            if module is not None:
                kept = getattr(module, "_keep_in_fp32_modules", None) or ()
                for key, parameter in module.named_parameters():
                    if not any(one in key.split(".") for one in kept):
                        parameter.data = parameter.data.to(torch.bfloat16)
                for key, buffer in module.named_buffers():
                    if buffer.is_floating_point() and not any(k in key for k in kept):
                        buffer.data = buffer.data.to(torch.bfloat16)
        pipe.set_progress_bar_config(disable=True)
        _MADE[name] = pipe
    return _MADE[name]


def settings_of(name: str, **more: Any) -> Settings:
    """Four steps of the pipeline's own scheduler; of nine frames, which 1.5 pads."""
    frames = {"num_frames": 9} if "1.5" in name else {}
    given = {"steps": 4, "sampler": "scheduler", "guidance_scale": 1.0, **SMALL, **frames}
    return settings_for(made(name), **given | more)


def test_every_class_has_a_case() -> None:
    assert {type(made(name).transformer).__name__ for name in CASES} == set(CLASSES)


def by_hand(name: str, settings: Settings, seed: int) -> torch.Tensor:
    """Frames of the pipeline's own call."""
    pipe = made(name)
    noise = draw((1, 4, 2, 4, 4), seed)
    if "cogvideox" in name:
        noise = draw((1, 4 if "1.5" in name else 2, 4, 8, 8), seed).bfloat16()
    encode = pipe.vae.encode
    with pytest.MonkeyPatch.context() as patch, generation._private_rng(pipe.device, seed):
        # As it is, CogVideoX's pipeline gives bf16 to the VAE, which has to be in fp32.
        patch.setattr(pipe.vae, "encode", lambda x: encode(x.float()))
        made_so: Any = pipe(
            prompt=PROMPT, height=32, width=32, num_inference_steps=settings.steps,
            guidance_scale=settings.guidance_scale, max_sequence_length=16,
            output_type="latent" if "cogvideox" in name else "np",
            num_frames=settings.num_frames, latents=noise, **CASES[name][1],
        ).frames  # fmt: skip
    if "cogvideox" not in name:
        return torch.from_numpy(made_so[0])
    latents = made_so.float()[:, 1 if "1.5" in name else 0 :]  # It only fills a patch in time.
    video: torch.Tensor = pipe.decode_latents(latents)[0].permute(1, 2, 3, 0)
    return (video / 2 + 0.5).clamp(0, 1)


@pytest.mark.parametrize(
    ("name", "guidance"),
    [*((name, 1.25) for name in CASES),
     *((name, 1.0) for name in ("cogvideox", "wan-clip", "wan-two-experts"))],
)  # fmt: skip
@pytest.mark.supports(CLASSES, "compare")
def test_frames_are_those_of_the_pipelines_own_call(name: str, guidance: float) -> None:
    settings = settings_of(name, guidance_scale=guidance)
    found = generate(made(name), PROMPT, **CASES[name][1], seed=3, settings=settings)
    assert torch.equal(found.frames, by_hand(name, settings, 3))
    assert found.frames.shape == (frames_made(made(name), settings.num_frames), 32, 32, 3)


@pytest.mark.parametrize("name", ["wan-clip", "wan-two-experts"])
def test_the_rcm_sampler(name: str) -> None:
    more = {"sigma_max": 200.0} if "experts" in name else {}
    told: list[tuple[int, int]] = []
    found = generate(
        made(name), PROMPT, **CASES[name][1], settings=settings_of(name, sampler="rcm", **more),
        on_step=lambda *step: told.append(step),
    )  # fmt: skip
    assert told == [(i + 1, 4) for i in range(4)]
    assert torch.isfinite(found.latents).all()


@pytest.mark.parametrize("name", CASES)
def test_the_networks_calls_are_the_pipelines(name: str) -> None:
    """Conditions, image embeddings and times of tokens included; and nothing is left behind."""
    pipe, settings = made(name), settings_of(name)
    seen: list[dict[str, Any]] = []
    hooks = [
        network.register_forward_pre_hook(
            lambda _, __, given: seen.append(given), with_kwargs=True
        )
        for network in (pipe.transformer, getattr(pipe, "transformer_2", None))
        if network is not None
    ]
    by_hand(name, settings, 0)
    for hook in hooks:
        hook.remove()
    assert len(seen) == settings.steps
    states = [latents_in(pipe, one) for one in seen]
    owners = (pipe, pipe.vae, pipe.transformer)
    before = [dict(owner.__dict__) for owner in owners]
    conditioning = encode(pipe, Source(PROMPT, **CASES[name][1]), settings)
    state = torch.get_rng_state()
    calls = recorded_calls(pipe, conditioning, settings, states)
    assert torch.equal(torch.get_rng_state(), state)
    assert [owner.__dict__.keys() for owner in owners] == [one.keys() for one in before]
    for call, expected in zip(calls, seen, strict=True):
        assert call.keys() == expected.keys()
        for key, value in expected.items():
            assert same(call[key], value), key


@pytest.mark.parametrize("name", ["wan-clip", "cogvideox-image"])
def test_a_number_of_frames_that_a_vae_cannot_make_is_rounded_once(name: str) -> None:
    """Wan's pipelines round it to a larger number, of which nobody was told."""
    settings = settings_of(name, num_frames=8, steps=2)
    video = generate(made(name), PROMPT, **CASES[name][1], settings=settings)
    expected = 8 if name.startswith("cogvideox") else 5
    assert frames_made(made(name), 8) == expected == len(video.frames)


def test_an_image_lies_the_way_up_that_its_exif_data_say(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (64, 32), "red").save(tmp_path / "phone.jpg", exif=exif)
    assert read_image(tmp_path / "phone.jpg").size == (32, 64)
    with Image.open(tmp_path / "phone.jpg") as image:
        assert read_image(image).size == (32, 64)


def test_an_image_of_16_bits_keeps_its_levels(tmp_path: Path) -> None:
    levels = np.array([[0, 20000, 65535]], np.uint16)
    Image.fromarray(levels).save(tmp_path / "deep.png")
    pixels = np.asarray(read_image(tmp_path / "deep.png"))
    assert pixels.tolist() == [[[0] * 3, [78] * 3, [255] * 3]]


def latents_in(pipe: Any, call: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """The latents in a call, as the loop holds them, and its network time."""
    hidden, time = call["hidden_states"], call["timestep"]
    axis = 2 if type(pipe).__name__.startswith(("CogVideoX", "ConsisID")) else 1
    return hidden.narrow(axis, 0, 4).float(), float(time.flatten()[-1])


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one.double(), other.double())
    if isinstance(one, (tuple, list)):
        return all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("name", ["wan-clip", "skyreels", "chronoedit", "cogvideox-image"])
@pytest.mark.supports(CLASSES, "compare")
def test_compare_gives_every_number(name: str, tmp_path: Path) -> None:
    settings = settings_of(name)
    images = CASES[name][1].get("image")
    found = compare(made(name), PROMPT, images=images, out=tmp_path, settings=settings)
    assert found.model.network is not None and 0 < found.model.network.ratio < 2
    assert found.results[0].patched.psnr > 40 and found.model.fusion is not None, str(found)
    metrics = json.loads(found.metrics.read_text())
    assert list(metrics["identity"]["inputs"].values()) == [Source(PROMPT, images).digest]


@pytest.mark.parametrize("name", UNUSUAL)
@pytest.mark.supports(("WanVACETransformer3DModel", "WanAnimateTransformer3DModel"), "compare")
@pytest.mark.supports(("ConsisIDTransformer3DModel",), "compare")
@pytest.mark.supports(("ConsisIDTransformer3DModel",), "its pipeline")
def test_any_pipeline_is_compared_with_a_function_that_calls_it(name, tmp_path, capsys) -> None:
    pipe, given = made(name), UNUSUAL[name][1]
    if name.startswith("cogvideox"):  # Its pipelines encode in the network's dtype.
        pipe.vae.to(torch.bfloat16)
    seeds: list[int] = []

    def make(seed: int) -> np.ndarray:
        seeds.append(seed)
        generator = torch.Generator().manual_seed(seed)
        call = PIPELINE | {"num_inference_steps": 3, "guidance_scale": 1.0} | given
        call["max_sequence_length"] = 16 if name.startswith("cogvideox") else 512
        frames: np.ndarray = pipe(**call, generator=generator, output_type="np").frames[0]
        return frames

    before = make(7)
    prompts = ["one", "two"] if name == "wan-video" else ["one"]
    # Of random weights the guard predicts too much.
    asked = {"make": make, "seed": 7, "out": tmp_path, "config": PatchConfig(fidelity=2.0)}
    found = compare(pipe, prompts, **asked, fps=8)
    assert {*seeds} == {7 + i for i in range(len(prompts))}
    assert (
        found.model.network is not None
        and 0 < found.model.network.ratio < 2
        and found.verdict != "undecided"
    )
    assert found.results[0].patched.psnr > 25, str(found)
    blocks = 4 if name == "vace" else 2
    assert str(found.judgement.ran) == f"All {blocks} blocks ran int8 attention in every step"
    assert found.model.control_backend in str(found)
    metrics = json.loads(found.metrics.read_text())
    assert metrics["identity"]["settings"] == {"fps": 8, "made by": "a function of the caller"}
    page = found.short_report.read_text().partition("<details>")[0]
    assert f"{len(before)} frames of 32 × 32" in page and "steps" not in page
    assert np.array_equal(make(7), before), "the pipeline is unpatched again"
    count = len(seeds)
    again = compare(pipe, prompts, **asked, fps=8)
    assert again.verdict == found.verdict and len(seeds) == count, "finished videos are kept"
    with pytest.raises(SamplingError, match="fps"):
        compare(pipe, prompts, **asked, fps=9)


def test_what_make_does_not_take_or_return_is_told(tmp_path: Path) -> None:
    pipe, out = made("wan-video"), tmp_path / "out"
    for wrong in ({"steps": 3}, {"images": picture()}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))}.*inside of make"):
            compare(pipe, PROMPT, make=lambda seed: torch.zeros(5, 32, 32, 3), out=out, **wrong)
    for made_so in (torch.zeros(5, 3, 32, 32), np.zeros((5, 32, 32, 3), np.uint8)):
        with pytest.raises(SamplingError, match=r"make\(seed\).*output_type=\"np\""):
            compare(pipe, PROMPT, make=lambda seed, x=made_so: x, out=out)


def test_another_image_is_refused_and_more_prompts_are_not(tmp_path, monkeypatch) -> None:
    pipe, settings = made("wan-two-experts"), settings_of("wan-two-experts", steps=1)
    given = {"out": tmp_path, "settings": settings, "network_number": False}
    compare(pipe, PROMPT, images=picture(), **given)
    with pytest.raises(SamplingError, match=r"same inputs.*--fresh"):
        compare(pipe, PROMPT, images=picture(1), **given)
    more = compare(pipe, [PROMPT, OTHER], images=[picture(), picture(1)], **given)
    assert (
        len(more.model.identity["inputs"]) == len(set(more.model.identity["inputs"].values())) == 2
    )
    calls: list[int] = []
    real = comparison.generate
    monkeypatch.setattr(comparison, "generate", lambda *a, **k: calls.append(1) or real(*a, **k))
    compare(pipe, [PROMPT, OTHER], images=[picture(), picture(1)], **given)
    assert calls == [], "all of it is there"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    return {
        "text": save(micro_pipe(), place / "text"),
        "image": save(micro_image_pipe(experts=False), place / "image"),
        "video": save(micro_video_pipe(), place / "video"),
    }


def test_the_command_line_takes_images(folders: dict[str, Path], tmp_path, capsys) -> None:
    picture().save(tmp_path / "one.png")
    out = tmp_path / "out"
    command = ["generate", "--model", str(folders["image"]), *QUICK, "--resume"]
    command += ["--prompt", PROMPT, "--prompt", OTHER, "--out", str(out)]
    assert main([*command, "--image", str(tmp_path / "one.png")]) == 0
    notes = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    assert [note["prompt"] for note in notes] == [OTHER, PROMPT]
    assert {note["inputs"] for note in notes} == {Source("", picture()).digest}
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.mp4")}
    capsys.readouterr()
    picture(6).save(tmp_path / "one.png")
    assert main([*command, "--image", str(tmp_path / "one.png")]) == 2
    assert "inputs" in capsys.readouterr().err, "the other image is another video"
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())


@pytest.mark.parametrize(
    ("model", "given", "told"),
    [
        ("image", [], "--image FILE"),
        ("image", ["--image", "none.png"], "No such file"),
        ("image", ["--image", "text.png"], "is no image that can be read"),
        ("image", ["--image", "cut.png"], "cannot be read"),
        ("image", ["--image", "small.png"], "at least 16 pixels a side"),
        ("text", ["--image", "good.png"], "WanImageToVideoPipeline"),
        ("video", [], "compare takes any with make="),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
@pytest.mark.parametrize("command", ["generate", "compare"])
def test_mistakes_are_told_before_a_model_is_loaded(
    command: str,
    model: str,
    given: list[str],
    told: str,
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from turbo_rcm_patch.cli import commands

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "load_pipeline", lambda *_, **__: pytest.fail("it was loaded"))
    picture().save("good.png")
    picture(size=8).save("small.png")
    Path("cut.png").write_bytes(Path("good.png").read_bytes()[:60])
    Path("text.png").write_text("not an image")
    line = [command, "--model", str(folders[model]), *QUICK, "--prompt", PROMPT, *given]
    assert main([*line, "--out", "out"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert told in said and "Traceback" not in said


def test_mistakes_in_python() -> None:
    pipe, settings = made("wan-clip"), settings_of("wan-clip")
    with pytest.raises(SamplingError, match="from Python image="):
        generate(pipe, PROMPT, settings=settings)
    with pytest.raises(SamplingError, match="WanImageToVideoPipeline"):
        generate(micro_pipe(), PROMPT, image=picture(), settings=settings)
    with pytest.raises(SamplingError, match="one for each of 2 prompts"):
        compare(pipe, [PROMPT, OTHER], images=[picture()], out="nowhere", settings=settings)
    with pytest.raises(SamplingError, match=r"a first and a last frame.*make="):
        generate(made("wan-two-frames"), PROMPT, image=picture(), settings=settings)
    with pytest.raises(NotAModelError, match="make="):
        generate(made("vace"), PROMPT, settings=settings)
