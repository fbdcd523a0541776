"""One video of every pipeline: that of the pipeline's own call, reproducible, and without a trace
in the pipeline or the global state."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    CogVideoXDPMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    SkyReelsV2DiffusionForcingPipeline,
)
from PIL import ExifTags, Image

from tests.measures import relative_l2
from tests.video.cases import CASES, loaded, picture, settings_of
from tests.video.micro import (
    SMALL,
    WAN_PIPES,
    animate,
    chronoedit,
    micro_image_pipe,
    micro_pipe,
    save,
    skyreels,
    vace,
)
from tests.video.micro_cogvideox import micro_cogvideox
from turbo_rcm_patch import RCMScheduler, patch_model, unpatch_model
from turbo_rcm_patch.errors import ConfigError, DTypeError, NotAModelError, SamplingError
from turbo_rcm_patch.video.comparison import compare
from turbo_rcm_patch.video.generation import _say_once, generate, settings_for
from turbo_rcm_patch.video.load import load_pipeline
from turbo_rcm_patch.video.rcm_times import noise_stream
from turbo_rcm_patch.video.settings import Settings
from turbo_rcm_patch.video.source import read_image
from turbo_rcm_patch.video.video import frame_rate, read_frames

PROMPT = "a red circle moves left"
CLASSES = (
    "WanTransformer3DModel",
    "SkyReelsV2Transformer3DModel",
    "ChronoEditTransformer3DModel",
    "CogVideoXTransformer3DModel",
)
FEW_STEPS = ("wan", "wan-clip", "wan-two-experts", "wan-token-times")


def test_every_class_has_a_case() -> None:
    assert {type(loaded(name).transformer).__name__ for name in CASES} == set(CLASSES)


def by_hand(name: str, settings: Settings, seed: int) -> torch.Tensor:
    """Frames of the pipeline's own call."""
    pipe, cogvideox = loaded(name), name.startswith("cogvideox")
    generator = torch.Generator().manual_seed(seed)
    call: dict[str, Any] = {"generator": generator}
    if settings.guidance_scale_2 is not None:
        call["guidance_scale_2"] = settings.guidance_scale_2
    if cogvideox:  # Its pipelines would draw other noise, in bf16.
        shape = (1, 4 if "1.5" in name else 2, 4, 8, 8)
        call = {"latents": torch.randn(shape, generator=generator).bfloat16()}
    encode = pipe.vae.encode
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]):
        torch.manual_seed(noise_stream(seed, "scheduler").initial_seed())
        # As it is, CogVideoX's pipeline gives bf16 to the VAE, which has to be in fp32.
        patch.setattr(pipe.vae, "encode", lambda x: encode(x.float()))
        made: Any = pipe(
            prompt=PROMPT, negative_prompt=settings.negative_prompt, height=32, width=32,
            num_inference_steps=settings.steps, guidance_scale=settings.guidance_scale,
            max_sequence_length=16, num_frames=settings.num_frames,
            output_type="latent" if cogvideox else "np", **call, **CASES[name][1],
        ).frames  # fmt: skip
    if not cogvideox:
        return torch.from_numpy(made[0])
    latents = made.float()[:, 1 if "1.5" in name else 0 :]  # It only fills a patch in time.
    video: torch.Tensor = pipe.decode_latents(latents)[0].permute(1, 2, 3, 0)
    return (video / 2 + 0.5).clamp(0, 1)


@pytest.mark.parametrize("guidance", [1.0, 1.25])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.supports(CLASSES, "compare")
def test_frames_are_those_of_the_pipelines_own_call(name: str, guidance: float) -> None:
    second = 3.0 if name == "wan-two-experts" else None
    settings = settings_of(
        name, guidance_scale=guidance, guidance_scale_2=second, negative_prompt="blue"
    )
    made = generate(loaded(name), PROMPT, **CASES[name][1], seed=3, settings=settings)
    assert torch.equal(made.frames, by_hand(name, settings, 3))
    count = 8 if name in ("cogvideox", "cogvideox-image") else settings.num_frames
    assert made.frames.shape == (count, 32, 32, 3)
    assert made.frames.dtype == made.latents.dtype == torch.float32
    assert 0.0 <= float(made.frames.min()) <= float(made.frames.max()) <= 1.0
    assert made.seconds > 0 and made.decode_seconds > 0 and made.peak_bytes is None


@pytest.mark.parametrize("name", [*FEW_STEPS, "cogvideox"])
@pytest.mark.supports("CogVideoXTransformer3DModel", "rCM sampler")
def test_few_steps_start_from_scaled_noise(name: str) -> None:
    pipe, given = loaded(name), CASES[name][1]
    if name == "cogvideox":
        with pytest.raises(ConfigError, match=r"CogVideoXPipeline.*scheduler.*rectified flow"):
            settings_for(pipe, sampler="rcm", steps=4, guidance_scale=1.0)
        return
    told: list[tuple[int, int]] = []
    settings = settings_of(name, sampler="rcm", sigma_max=200.0)
    made = generate(
        pipe, PROMPT, **given, seed=5, settings=settings, on_step=lambda *step: told.append(step)
    )
    assert told == [(i + 1, 4) for i in range(4)]
    own, pipe.scheduler = pipe.scheduler, RCMScheduler(sigma_max=200.0, noise_seed=5)
    noise = torch.randn(made.latents.shape, generator=torch.Generator().manual_seed(5))
    frames = pipe(
        prompt=PROMPT, **given, **SMALL, num_inference_steps=4, guidance_scale=1.0,
        latents=pipe.scheduler.init_noise(noise), output_type="np",
    ).frames[0]  # fmt: skip
    pipe.scheduler = own
    assert np.array_equal(made.frames.numpy(), frames)


@pytest.mark.parametrize("name", ["wan", "cogvideox"])
def test_seed_prompt_and_guidance_matter(name: str) -> None:
    def frames(prompt: str = PROMPT, seed: int = 1, **more: Any) -> torch.Tensor:
        settings = settings_of(name, steps=2, **more)
        return generate(loaded(name), prompt, seed=seed, settings=settings).frames

    first = frames()
    torch.rand(3)  # whatever the caller draws in between
    assert torch.equal(first, frames())
    for other in (frames(seed=2), frames("a blue square"), frames(guidance_scale=6.0)):
        assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("name", "scheduler"),
    [("wan", FlowMatchEulerDiscreteScheduler), ("cogvideox", CogVideoXDPMScheduler)],
)
def test_a_scheduler_with_noise_of_its_own_repeats_itself(name: str, scheduler: Any) -> None:
    pipe = CASES[name][0]()
    more = {"stochastic_sampling": True} if name == "wan" else {}
    pipe.scheduler = scheduler.from_config(pipe.scheduler.config, **more)
    settings, state = settings_of(name, steps=2), torch.get_rng_state()
    first, again = (generate(pipe, PROMPT, settings=settings).frames for _ in range(2))
    assert torch.equal(first, again) and torch.equal(torch.get_rng_state(), state)


#: Frames that are asked for, and those that the VAE makes.
@pytest.mark.parametrize(
    ("name", "asked", "frames", "nearer"),
    [("wan", 6, 5, ""), ("wan-clip", 8, 5, "9 is nearer"), ("cogvideox-image", 8, 8, "")],
)
def test_a_number_of_frames_that_the_vae_cannot_make_is_told_once(
    name: str, asked: int, frames: int, nearer: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Wan's pipelines would make 9 of 8."""
    _say_once.cache_clear()
    settings = settings_of(name, num_frames=asked, steps=1)
    for seed in (0, 1):
        made = generate(loaded(name), PROMPT, **CASES[name][1], seed=seed, settings=settings)
        assert len(made.frames) == frames
    said = [line for line in caplog.messages if f"num_frames {asked}" in line]
    assert len(said) == (asked != frames) and all(f"makes {frames} frames" in x for x in said)
    assert ("nearer" in "".join(said)) == bool(nearer) and nearer in "".join(said)


def test_a_generation_is_saved_and_shown(pipe: Any, tmp_path: Path) -> None:
    made = generate(pipe, PROMPT, sampler="rcm", steps=1, fps=8, **SMALL)
    path = made.save(tmp_path / "new" / "a.mp4")
    assert len(read_frames(path)) == 5 and frame_rate(path) == made.settings.fps == 8
    assert len(repr(made)) < 200 and "5 frames of 32 x 32" in repr(made) and PROMPT in repr(made)


def test_an_image_keeps_its_way_up_and_its_levels(tmp_path: Path) -> None:
    """As its EXIF data say; and of 16 bits, of which a conversion would cut most off."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (64, 32), "red").save(tmp_path / "phone.jpg", exif=exif)
    assert read_image(tmp_path / "phone.jpg").size == (32, 64)
    with Image.open(tmp_path / "phone.jpg") as image:
        assert read_image(image).size == (32, 64)
    Image.new("RGB", (64, 32), "red").save(tmp_path / "plain.jpg")
    assert read_image(tmp_path / "plain.jpg").getpixel((3, 3))[0] > 250
    Image.fromarray(np.array([[0, 20000, 65535]], np.uint16)).save(tmp_path / "deep.png")
    pixels = np.asarray(read_image(tmp_path / "deep.png"))
    assert pixels.tolist() == [[[0] * 3, [78] * 3, [255] * 3]]


def test_what_cannot_be_made_is_told(tmp_path: Path) -> None:
    pipe = micro_pipe()
    flux = object.__new__(FluxPipeline)
    two_frames = micro_image_pipe(experts=False, last=True)
    plain, longer = micro_cogvideox(rotary=False), micro_cogvideox(patch_t=2)
    learned = micro_cogvideox()
    learned.transformer.register_to_config(use_learned_positional_embeddings=True)
    refused: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (ConfigError, r"one prompt; got \['a', 'b'\]\. .*compare", pipe, {"prompt": ["a", "b"]}),
        (ConfigError, "expected one prompt; got None", pipe, {"prompt": None}),
        (SamplingError, "none of them empty", pipe, {"prompt": " "}),
        (SamplingError, "Give `image=FILE`", loaded("wan-clip"), {}),
        (SamplingError, "WanImageToVideoPipeline", pipe, {"image": picture()}),
        (SamplingError, r"a first and a last frame.*make=", two_frames, {"image": picture()}),
        (ConfigError, "height of this model.*at most 256", pipe, {"height": 512}),
        (ConfigError, "num_frames.*Choose `num_frames=125`", pipe, {"num_frames": 400}),
        (ConfigError, "num_frames of this model.*at most 125", pipe, {"num_frames": 129}),
        (ConfigError, "height of this model; expected 32; got 64", learned, {"height": 64}),
        (ConfigError, "max_sequence_length.* expected 16", plain, {"max_sequence_length": 8}),
        (ConfigError, "width of this model; expected at most 32", longer, {"width": 64}),
        (ConfigError, "no second expert.*`guidance_scale_2=`", pipe, {"guidance_scale_2": 3.0}),
        (NotAModelError, "load_pipeline", torch.nn.Linear(2, 2), {}),
        (NotAModelError, "FluxPipeline", flux, {}),
        (NotAModelError, "make=", vace(), {}),
    ]
    refused += [
        (ConfigError, f"seed; expected an integer .* got {seed!r}", pipe, {"seed": seed})
        for seed in ("a", 1.5, 2**64)
    ]
    for error, text, target, given in refused:
        with pytest.raises(error, match=text):
            generate(target, **{"prompt": PROMPT, "steps": 1, **SMALL, **given})
    with pytest.raises(NotAModelError, match="FluxPipeline"):
        compare(flux, PROMPT, out=tmp_path)
    pipe.vae.to(torch.bfloat16)
    with pytest.raises(DTypeError, match=r"pipe\.vae\.to\(torch\.float32\)"):
        generate(pipe, PROMPT, steps=1, **SMALL)


def test_settings_are_those_of_the_folder_or_the_family(pipe, tmp_path, monkeypatch) -> None:
    settings = settings_for(loaded("cogvideox"))
    assert (settings.sampler, settings.steps, settings.guidance_scale) == ("scheduler", 50, 6.0)
    assert (settings.height, settings.width, settings.num_frames) == (480, 720, 49)
    folder = save(micro_cogvideox(), tmp_path / "cogvideox")
    (folder / "turbo_rcm.json").write_text('{"sampler": "scheduler", "steps": 4, "height": 64}')
    settings = settings_for(load_pipeline(folder, device="cpu"), width=32)
    assert (settings.steps, settings.height, settings.width) == (4, 64, 32)

    # A model of the hub: they lie in the hub's cache, beside the folders of the parts.
    root = tmp_path / "models--me--video" / "snapshots" / "abc"
    root.mkdir(parents=True)
    monkeypatch.setattr(type(pipe), "name_or_path", "me/video", raising=False)
    (root / "turbo_rcm.json").write_text('{"sigma_max": 200.0, "steps": 3}')
    assert settings_for(pipe).sampler == "scheduler"
    place = str(root / "transformer")
    monkeypatch.setitem(pipe.transformer._internal_dict, "_name_or_path", place)
    settings = settings_for(pipe)
    assert (settings.sampler, settings.sigma_max, settings.steps) == ("rcm", 200.0, 3)


PICTURE = {"image": Image.new("RGB", (32, 32), "teal"), "max_sequence_length": 512}
#: The pose video says how many frames there will be.
FACES: dict[str, Any] = {
    "num_frames": None,
    "pose_video": [Image.new("RGB", (32, 32), "black")] * 5,
    "face_video": [Image.new("RGB", (16, 16), "pink")] * 5,
    "segment_frame_length": 5,
}
PLAIN = {"guidance_scale": 1.0}
EXPERTS = {("transformer", 0, "first"), ("transformer", 1, "last")} | {
    ("transformer_2", 2, "first"), ("transformer_2", 3, "last")
}  # fmt: skip
FIRST, LAST = ("transformer", 0, "first"), ("transformer", 3, "last")
forcing = partial(skyreels, SkyReelsV2DiffusionForcingPipeline)
#: Pipeline, how it is called beside the usual, and where the guard looks.
PATCHED: dict[str, tuple[Any, dict[str, Any], set[tuple[str, int, str]]]] = {
    **{f"{name}-rcm": (make, PLAIN | ({} if "t2v" in name else PICTURE),
                       EXPERTS if "experts" in name else {FIRST, LAST})
       for name, make in WAN_PIPES.items()},
    "vace-rcm": (vace, PLAIN, {FIRST, LAST}),
    "animate-rcm": (animate, PICTURE | FACES | PLAIN, {FIRST, LAST}),
    "chronoedit": (chronoedit, PICTURE | PLAIN, {FIRST, LAST}),
    "skyreels": (skyreels, {}, {FIRST, LAST}),
    "skyreels-forcing": (forcing, {}, {FIRST}),  # Its times are a frame's, not the scheduler's.
    # Two blocks of two frames, the second two steps after the first, with a mask: its author's.
    "skyreels-forcing-causal": (
        forcing, {"num_frames": 13, "ar_step": 2, "causal_block_size": 2}, {FIRST},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PATCHED)
@pytest.mark.supports(
    ("WanTransformer3DModel", "WanVACETransformer3DModel", "WanAnimateTransformer3DModel"),
    *("its pipeline", "rCM sampler"),
)
@pytest.mark.supports(
    ("ChronoEditTransformer3DModel", "SkyReelsV2Transformer3DModel"), "its pipeline"
)
def test_patched_it_is_near_guarded_and_put_back(name: str) -> None:
    make, more, looked = PATCHED[name]
    torch.manual_seed(0)
    pipe = make()
    if "rcm" in name:
        pipe.scheduler = RCMScheduler.from_config(pipe.scheduler.config)
    pipe.set_progress_bar_config(disable=True)
    call = {**SMALL, "num_inference_steps": 4, "guidance_scale": 3.0, **more}
    call = {key: value for key, value in call.items() if value is not None}

    def latents() -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        with torch.random.fork_rng(devices=[]):
            made: torch.Tensor = pipe(
                prompt="a red circle", generator=generator, output_type="latent", **call
            ).frames
        return made

    before = latents()
    report = patch_model(pipe)
    error = relative_l2(latents(), before)
    assert error == 0 if "causal" in name else 0 < error < 0.02
    records = [one for one in report.guard if not one.path.startswith("vae")]
    whole = {(one.path.split(".")[0], one.step, one.when) for one in records}
    assert {one for one in whole if one[2] != "sampled"} == looked
    allowed = {"kept"} if name.removesuffix("-rcm") in WAN_PIPES else {"kept", "not compared"}
    assert {record.verdict for record in report.guard} <= allowed
    unpatch_model(pipe)
    assert torch.equal(latents(), before)
