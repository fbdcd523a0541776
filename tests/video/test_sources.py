"""Videos made from more than text: an image or a video, from the file to the verdict."""

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
from tests.video.test_cli import QUICK
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.cli.exit_codes import CHANGED, OK
from turbo_rcm_patch.errors import ConfigError, SamplingError
from turbo_rcm_patch.video import Source, comparison, generation
from turbo_rcm_patch.video.comparison import compare
from turbo_rcm_patch.video.families import Job, draw, family_of
from turbo_rcm_patch.video.families.wan import Wan
from turbo_rcm_patch.video.generation import (
    encode,
    generate,
    initial_noise,
    recorded_calls,
    settings_for,
)
from turbo_rcm_patch.video.settings import Settings
from turbo_rcm_patch.video.source import read_image
from turbo_rcm_patch.video.video import enlarge, read_frames, write_mp4

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
FACES = {"pose": film(), "face": [picture(5 * i, 16) for i in range(9)]}
VIDEO = {"video": film()}
#: What ConsisID's face models would have made.
IDENTITY = {
    "id_cond": torch.linspace(-1, 1, 16)[None],
    **{f"id_vit_hidden.{i}": torch.linspace(-1, 1 + i, 48).view(1, 6, 8) for i in range(5)},
}
#: A pipeline in fp32, and what its videos are made from beside the prompt.
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "wan-clip": (lambda: micro_image_pipe(experts=False), IMAGE),
    "wan-clip-two-frames": (
        lambda: micro_image_pipe(experts=False, last=True),
        IMAGE | {"last_image": picture(9)},
    ),
    "wan-two-experts": (lambda: micro_image_pipe(experts=True), IMAGE),
    "wan-token-times": (lambda: micro_token_time_pipe(image=True), IMAGE),
    "wan-video": (micro_video_pipe, VIDEO),
    "vace": (vace, {}),
    "vace-video": (
        vace,
        VIDEO | {"mask": [picture(4 * i) for i in range(9)], "reference": [picture(8)] * 2},
    ),
    "animate-video": (animate, IMAGE | FACES),
    "animate-video-replace": (
        animate,
        IMAGE
        | FACES
        | {"background": film()[::-1], "mask": [picture(4 * i, 32) for i in range(9)]},
    ),
    "skyreels": (skyreels, {}),
    "chronoedit": (chronoedit, IMAGE),
    "cogvideox-image": (lambda: micro_cogvideox(source="image"), IMAGE),
    "cogvideox-1.5-image": (lambda: micro_cogvideox(source="image", patch_t=2), IMAGE),
    "cogvideox-face": (
        lambda: micro_cogvideox(source="face"),
        IMAGE | {"identity": IDENTITY},
    ),
    "cogvideox-video": (lambda: micro_cogvideox(source="video"), VIDEO),
}
CLASSES = (
    "WanTransformer3DModel",
    "WanVACETransformer3DModel",
    "WanAnimateTransformer3DModel",
    "SkyReelsV2Transformer3DModel",
    "ChronoEditTransformer3DModel",
    "CogVideoXTransformer3DModel",
    "ConsisIDTransformer3DModel",
)
_MADE: dict[str, Any] = {}


def made(name: str) -> Any:
    """The pipeline of a case as it is loaded. Tests leave it as they found it."""
    if name not in _MADE:
        pipe = CASES[name][0]()
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
    frames = {"num_frames": 9} if "1.5" in name or "video" in name else {}
    given = {"steps": 4, "sampler": "scheduler", "guidance_scale": 1.0, **SMALL, **frames}
    return settings_for(made(name), **given | more)


def test_every_class_has_a_case() -> None:
    assert {type(made(name).transformer).__name__ for name in CASES} == set(CLASSES)


def by_hand(name: str, settings: Settings, seed: int) -> torch.Tensor:
    """Latents of the pipeline's own call."""
    pipe = made(name)
    call = dict(CASES[name][1])
    if "vace" in name:
        size = (32, 32)
        call = {
            "video": [x.resize(size) for x in call["video"]],
            "mask": [x.resize(size, Image.Resampling.NEAREST) for x in call["mask"]],
            "reference_images": call["reference"],
        } if call else {}  # fmt: skip
        frames = settings.num_frames + 4 * len(call.get("reference_images", ()))
        more = Settings.for_model(None, **settings.as_dict() | {"num_frames": frames})
        call |= {"latents": initial_noise(pipe, seed, more), "num_frames": settings.num_frames}
    elif "animate" in name:
        call = {
            {"image": "image"}.get(key, f"{key}_video"): value for key, value in call.items()
        } | {
            "latents": draw((1, 4, 4, 4, 4), seed), "segment_frame_length": settings.num_frames,
            "mode": "replace" if "replace" in name else "animate",
        }  # fmt: skip
        if "mask_video" in call:
            call["mask_video"] = [x.convert("L") for x in call["mask_video"]]
    elif "video" in call:
        call["generator"] = torch.Generator().manual_seed(seed)
        call["strength"] = settings.strength
        call["video"] = call["video"][: settings.num_frames]
    else:
        if "identity" in call:
            tensors = call.pop("identity")
            call |= {
                "id_cond": tensors["id_cond"],
                "id_vit_hidden": [tensors[f"id_vit_hidden.{i}"] for i in range(5)],
            }
        noise = initial_noise(pipe, seed, settings)
        call["latents"] = noise.bfloat16() if "cogvideox" in name else noise
        call["num_frames"] = settings.num_frames
    encode = pipe.vae.encode
    with pytest.MonkeyPatch.context() as patch, generation._private_rng(pipe.device, seed):
        # As it is, CogVideoX's pipeline gives bf16 to the VAE, which has to be in fp32.
        patch.setattr(pipe.vae, "encode", lambda x: encode(x.float()))
        latents: torch.Tensor = pipe(
            prompt=PROMPT, height=32, width=32, num_inference_steps=settings.steps,
            guidance_scale=settings.guidance_scale, max_sequence_length=16,
            output_type="latent", **call,
        ).frames  # fmt: skip
    return latents


@pytest.mark.parametrize("guidance", [1.0, 1.25], ids=["plain", "guided"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.supports(CLASSES, "generate, compare")
def test_latents_are_those_of_the_pipelines_own_call(name: str, guidance: float) -> None:
    settings = settings_of(name, guidance_scale=guidance)
    found = generate(made(name), Source(PROMPT, **CASES[name][1]), seed=3, settings=settings)
    expected = by_hand(name, settings, 3).float()
    axis = 1 if "cogvideox" in name else 2
    start = expected.shape[axis] - found.latents.shape[axis]
    assert start == (2 if "vace-video" in name else 1 if "1.5" in name or "animate" in name else 0)
    expected = expected.narrow(axis, start, found.latents.shape[axis])
    if "animate" in name:  # The pipeline returns what its VAE takes.
        mean, std = Wan.scales(made(name), expected)
        assert torch.equal(found.latents, (expected - mean) / std)
    else:
        assert torch.equal(found.latents, expected)
    assert found.frames.shape == (settings.num_frames, 32, 32, 3)


@pytest.mark.parametrize(
    "name", ["wan-clip", "wan-two-experts", "wan-video", "vace-video", "animate-video"]
)
def test_the_rcm_sampler(name: str) -> None:
    """With two experts, and from a video from its third step on."""
    more = {"sigma_max": 200.0} if "experts" in name else {}
    settings = settings_of(name, sampler="rcm", **more)
    told: list[tuple[int, int]] = []
    source = Source(PROMPT, **CASES[name][1])
    found = generate(
        made(name), source, settings=settings, on_step=lambda *step: told.append(step)
    )
    steps = 3 if name == "wan-video" else 4
    assert told == [(i + 1, steps) for i in range(steps)]
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
    assert len(seen) == settings.steps_run
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


@pytest.mark.parametrize("name", ["wan-clip", "vace-video", "animate-video", "cogvideox-image"])
def test_a_number_of_frames_that_a_vae_cannot_make_is_rounded_once(name: str) -> None:
    """The pipelines round it to another number than the noise that they are given has."""
    pipe = made(name)
    settings = settings_of(name, num_frames=8, steps=2)
    video = generate(pipe, Source(PROMPT, **CASES[name][1]), settings=settings)
    expected = 8 if name.startswith("cogvideox") else 5
    assert family_of(pipe).frames_made(pipe, 8) == expected == len(video.frames)


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


COMPARED = ("wan-clip", "vace-video", "animate-video", "skyreels", "chronoedit")


@pytest.mark.parametrize("name", [*COMPARED, "cogvideox-image", "cogvideox-face"])
@pytest.mark.supports(CLASSES, "generate, compare")
@pytest.mark.supports(("ConsisIDTransformer3DModel",), "its pipeline")
def test_compare_sees_every_picture_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, settings = made(name), settings_of(name)
    encoded: list[str] = []

    def counted(what: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def count(*given: Any, **named: Any) -> Any:
            encoded.append(what)
            return real(*given, **named)

        return count

    monkeypatch.setattr(pipe.vae, "encode", counted("vae", pipe.vae.encode))
    clip = getattr(pipe, "image_encoder", None) is not None
    if clip:
        monkeypatch.setattr(pipe, "encode_image", counted("clip", pipe.encode_image))
    source = Source(PROMPT, **CASES[name][1])
    found = compare(pipe, source, out=tmp_path, settings=settings)
    assert found.network is not None and 0 < found.network.ratio < 2
    assert found.results[0].patched.psnr > 40, str(found)
    # VACE's video in two parts (black without one), and its references, which are equal.
    # Animate's image, its poses, and what is before the segment.
    times = {"vace-video": 3, "animate-video": 3, "skyreels": 0}.get(name, 1)
    assert sorted(encoded) == ["clip"] * clip + ["vae"] * times
    metrics = json.loads(found.metrics.read_text())
    assert list(metrics["identity"]["inputs"].values()) == [source.digest]
    assert len(metrics["prompts"][0]["patched"]["steps"]) == settings.steps_run


def test_another_image_is_refused_and_more_prompts_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, settings = made("wan-two-experts"), settings_of("wan-two-experts", steps=1)
    given = {"out": tmp_path, "settings": settings, "network_number": False}
    compare(pipe, PROMPT, images=picture(), **given)
    with pytest.raises(SamplingError, match=r"same inputs.*--fresh"):
        compare(pipe, PROMPT, images=picture(1), **given)
    more = compare(pipe, [PROMPT, OTHER], images=[picture(), picture(1)], **given)
    assert len(more.identity["inputs"]) == len(set(more.identity["inputs"].values())) == 2
    calls: list[int] = []
    real = comparison.sample_latents
    monkeypatch.setattr(
        comparison, "sample_latents", lambda *a, **k: calls.append(1) or real(*a, **k)
    )
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


def test_the_command_line_takes_images(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture().save(tmp_path / "one.png")
    picture(5).save(tmp_path / "two.png")
    (tmp_path / "prompts.tsv").write_text(f"{PROMPT}\n{OTHER}\ttwo.png\n", encoding="utf-8")
    out = tmp_path / "out"
    command = ["generate", "--model", str(folders["image"]), *QUICK, "--resume"]
    command += ["--prompts", str(tmp_path / "prompts.tsv"), "--out", str(out)]
    assert main([*command, "--image", str(tmp_path / "one.png")]) == 0
    notes = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    assert [note["prompt"] for note in notes] == [OTHER, PROMPT]
    assert notes[0]["inputs"] == Source("", image=tmp_path / "two.png").digest
    assert notes[1]["inputs"] == Source("", image=picture()).digest
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.mp4")}
    capsys.readouterr()
    picture(6).save(tmp_path / "two.png")
    assert main([*command, "--image", str(tmp_path / "one.png")]) == 2
    assert "inputs" in capsys.readouterr().err, "the other image is another video"
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())


def test_the_command_line_takes_a_video(folders: dict[str, Path], tmp_path: Path) -> None:
    frames = torch.rand(9, 32, 32, 3, generator=torch.Generator().manual_seed(0))
    write_mp4(enlarge(frames), tmp_path / "given.mp4", 8)
    assert len(read_frames(tmp_path / "given.mp4")) == 9
    command = ["compare", "--model", str(folders["video"]), *QUICK, "--prompt", PROMPT]
    command += ["--no-network-number", "--out", str(tmp_path / "out")]
    command += ["--video", str(tmp_path / "given.mp4"), "--strength", "0.5"]
    assert main(command) in (OK, CHANGED)
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["identity"]["settings"]["strength"] == 0.5
    assert len(metrics["prompts"][0]["patched"]["steps"]) == 1


@pytest.mark.parametrize(
    ("model", "given", "told"),
    [
        ("image", [], "--image FILE"),
        ("image", ["--image", "none.png"], "No such file"),
        ("image", ["--image", "text.png"], "is no image that can be read"),
        ("image", ["--image", "cut.png"], "cannot be read"),
        ("image", ["--image", "small.png"], "at least 16 pixels a side"),
        ("image", ["--video", "text.png"], "cannot be read"),
        ("image", ["--prompts", "prompts.tsv"], "nowhere.png"),
        ("text", ["--image", "good.png"], "WanImageToVideoPipeline"),
        ("video", ["--image", "good.png"], "--video FILE"),
        ("video", ["--video", "none.mp4"], "no such file"),
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
    Path("prompts.tsv").write_text(f"{PROMPT}\tnowhere.png\n", encoding="utf-8")
    prompt = [] if "--prompts" in given else ["--prompt", PROMPT]
    line = [command, "--model", str(folders[model]), *QUICK, *prompt, *given, "--out", "out"]
    assert main(line) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert told in said and "Traceback" not in said


def test_mistakes_in_python() -> None:
    pipe, video = made("wan-clip"), made("wan-video")
    settings = settings_of("wan-clip")
    with pytest.raises(SamplingError, match="from Python image="):
        generate(pipe, PROMPT, settings=settings)
    with pytest.raises(SamplingError, match=r"last_image.*WanImageToVideoPipeline"):
        generate(micro_pipe(), Source(PROMPT, last_image=picture()), settings=settings)
    with pytest.raises(SamplingError, match="one for each of 2 prompts"):
        compare(pipe, [PROMPT, OTHER], images=[picture()], out="nowhere", settings=settings)
    with pytest.raises(ConfigError, match="video-to-video"):
        generate(pipe, PROMPT, image=picture(), settings=settings, strength=0.5)
    with pytest.raises(SamplingError, match="FLF2V"):
        generate(pipe, Source(PROMPT, **IMAGE, last_image=picture()), settings=settings)
    with pytest.raises(SamplingError, match="--last-image FILE"):
        generate(made("wan-clip-two-frames"), PROMPT, image=picture(), settings=settings)
    with pytest.raises(SamplingError, match=r"mask.*--video FILE"):
        generate(made("vace"), Source(PROMPT, mask=film()), settings=settings)
    short = Source(PROMPT, video=film(4))
    with pytest.raises(SamplingError, match=r"9 frames.*--num-frames"):
        generate(video, short, settings=settings_of("wan-video"))
    for strength in (0.0, 1.5, 0.2):
        with pytest.raises(ConfigError, match="strength"):
            Settings(sampler="scheduler", steps=4, strength=strength)


def test_an_identity_is_read_from_its_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "face.safetensors"
    save_file(IDENTITY, path)
    source = Source(PROMPT, **IMAGE, identity=path)
    assert source.digest == Source(PROMPT, **IMAGE, identity=IDENTITY).digest
    assert source.digest != Source(PROMPT, **IMAGE).digest
    other = IDENTITY | {"id_cond": IDENTITY["id_cond"] + 1}
    assert source.digest != Source(PROMPT, **IMAGE, identity=other).digest
    save_file({"id_cond": IDENTITY["id_cond"]}, path)
    with pytest.raises(SamplingError, match=r"id_vit_hidden\.0.*process_face_embeddings_infer"):
        _ = source.media
    path.write_bytes(b"no tensors")
    with pytest.raises(SamplingError, match=r"face\.safetensors cannot be read"):
        Source(PROMPT, identity=path)
    with pytest.raises(SamplingError, match="identity of the prompt"):
        generate(
            made("cogvideox-face"), Source(PROMPT, **IMAGE), settings=settings_of("cogvideox-face")
        )


def test_keypoints_of_a_face_are_drawn_by_the_pipeline() -> None:
    """Where the model takes them."""
    pipe, settings = made("cogvideox-face"), settings_of("cogvideox-face")
    points = torch.arange(10.0).view(5, 2)
    source = Source(PROMPT, **IMAGE, identity=IDENTITY | {"face_kps": points})
    call = family_of(pipe).call_inputs(Job(pipe, 0, encode(pipe, source, settings), settings))
    assert call["kps_cond"] == points.tolist() and "identity" not in call
    assert call["id_cond"] is IDENTITY["id_cond"]


@pytest.mark.parametrize("given", ["background", "mask"])
def test_a_person_is_replaced_with_background_and_mask(given: str) -> None:
    pipe, settings = made("animate-video"), settings_of("animate-video")
    with pytest.raises(SamplingError, match="--background FILE and --mask FILE"):
        generate(pipe, Source(PROMPT, **IMAGE, **FACES, **{given: film()}), settings=settings)


def test_animate_needs_as_many_poses_as_frames() -> None:
    pipe, settings = made("animate-video"), settings_of("animate-video")
    source = Source(PROMPT, **IMAGE | FACES | {"pose": film(5)})
    with pytest.raises(SamplingError, match="9 frames"):
        generate(pipe, source, settings=settings)
