"""The TurboDiffusion examples, from a `.pth` to an mp4, and their numbers against a loop in plain
torch."""

from __future__ import annotations

import math
import os
import re
import runpy
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from PIL import Image

from tests.checkpoints.wan_model import Options, save
from tests.sampling import micro
from turbo_rcm_patch import PatchConfig, load_extra, patch_model
from turbo_rcm_patch.errors import CheckpointError, ModelFolderError, OutputExistsError
from turbo_rcm_patch.sampling import turbowan

EXAMPLES = Path(__file__).parents[2] / "examples"
TEXT = Options(text=32, sla=True)
IMAGE = Options(text=32, inputs=12, sla=True)
#: In fp32 on the CPU, 64 x 48 pixels and 5 frames: 24 tokens.
SMALL = ["--device", "cpu", "--resolution", "64x48", "--num_frames", "5"]
EXACT = ["--dtype", "float32", "--vae_dtype", "float32"]
PROMPT = "a red circle  moves left"


@pytest.fixture(scope="module")
def image_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pipe = micro.micro_image_pipe(experts=True)
    return micro.save(pipe, tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def text_pth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "model.pth"
    save(TEXT, path)
    return path


@pytest.fixture(scope="module")
def expert_pths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("image")
    for seed, name in enumerate(("high", "low"), start=1):
        save(IMAGE, folder / f"{name}.pth", seed=seed)
    return [folder / "high.pth", folder / "low.pth"]


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another shape than the video, and with fine detail."""
    path = tmp_path_factory.mktemp("picture") / "image.png"
    values = np.random.default_rng(0).integers(0, 256, (90, 130, 3), dtype=np.uint8)
    Image.fromarray(values).save(path)
    return path


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What VAEs were asked to decode: the latents, because theirs has mean 0 and deviation 1."""
    latents: list[torch.Tensor] = []
    decode = AutoencoderKLWan.decode

    def recorded(self: Any, z: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        latents.append(z.clone())
        return decode(self, z, *args, **kwargs)

    monkeypatch.setattr(AutoencoderKLWan, "decode", recorded)
    return latents


def main_of(example: str) -> Callable[[Sequence[str]], None]:
    return runpy.run_path(str(EXAMPLES / example))["main"]


def text_to_video(pth: Path, base: Path, out: Path, *more: str) -> None:
    arguments = ["--dit_path", str(pth), "--base", str(base), "--save_path", str(out), *SMALL]
    main_of("turbowan_t2v.py")([*arguments, "--prompt", PROMPT, *more])


def image_to_video(pths: list[Path], base: Path, picture: Path, out: Path, *more: str) -> None:
    arguments = ["--high_noise_model_path", str(pths[0]), "--low_noise_model_path", str(pths[1])]
    arguments += ["--base", str(base), "--save_path", str(out), "--image_path", str(picture)]
    main_of("turbowan_i2v.py")([*arguments, *SMALL, "--prompt", PROMPT, *more])


def movie(path: Path) -> tuple[int, tuple[int, int], float]:
    """Frames, (width, height) and frames a second."""
    program = imageio_ffmpeg.get_ffmpeg_exe()
    done = subprocess.run(
        [program, "-i", str(path), "-f", "null", "-"], capture_output=True, text=True, check=True
    )
    width, height, fps = re.search(
        r"Video: .* (\d+)x(\d+)[ ,].* ([\d.]+) fps", done.stderr
    ).groups()
    frames = re.findall(r"frame=\s*(\d+)", done.stderr)[-1]
    return int(frames), (int(width), int(height)), float(fps)


# The numbers: what TurboDiffusion's scripts do, in plain torch.


@torch.no_grad()
def embedding(base: Path, prompt: str) -> torch.Tensor:
    """[1, 512, C]: cleaned, padded to 512 tokens, masked, and zeros for the padding."""
    from transformers import AutoTokenizer, UMT5EncoderModel

    tokenizer = AutoTokenizer.from_pretrained(base / "tokenizer")
    encoder = UMT5EncoderModel.from_pretrained(base / "text_encoder").eval()
    cleaned = re.sub(r"\s+", " ", prompt).strip()
    ids = tokenizer(
        [cleaned], padding="max_length", truncation=True, max_length=512, return_tensors="pt"
    )
    embeds = encoder(ids.input_ids, ids.attention_mask).last_hidden_state
    return embeds * ids.attention_mask[..., None]


@torch.no_grad()
def condition(base: Path, path: Path, width: int, height: int, frames: int) -> torch.Tensor:
    """[1, 4 + C, T, H, W]: which latents are given, and the first frame followed by grey."""
    vae = AutoencoderKLWan.from_pretrained(base, subfolder="vae").eval()
    with Image.open(path) as image:
        pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)[None]
    pixels = torch.nn.functional.interpolate(
        pixels, (height, width), mode="bilinear", antialias=True, align_corners=False
    )
    first = (pixels.float() / 255 - 0.5) / 0.5
    video = torch.cat([first[:, :, None], torch.zeros(1, 3, frames - 1, height, width)], dim=2)
    latents = vae.encode(video).latent_dist.mode()
    mask = torch.zeros(1, 4, *latents.shape[2:])
    mask[:, :, 0] = 1.0
    return torch.cat([mask, latents], dim=1)


@torch.no_grad()
def plain_loop(
    networks: list[Any],
    text: torch.Tensor,
    *,
    shape: tuple[int, ...],
    seed: int,
    samples: int = 1,
    steps: int = 4,
    sigma_max: float = 80.0,
    boundary: float = 0.0,
    ode: bool = False,
    given: torch.Tensor | None = None,
    our_roundings: bool = False,
) -> torch.Tensor:
    """In the roundings of the scripts, or with `our_roundings`: a first sample in fp32, as the
    pipelines have it, and fp64 where the scripts multiply noise in fp32. Nothing but last bits,
    but those decide how some values are rounded to int8."""
    generator = torch.Generator("cpu")
    generator.manual_seed(seed)
    noise = torch.randn(samples, *shape, dtype=torch.float32, generator=generator)
    trig = [math.atan(sigma_max), *(1.5, 1.4, 1.0)[: steps - 1], 0.0]
    times = [math.sin(t) / (math.cos(t) + math.sin(t)) for t in trig]
    x = noise.double() * times[0]
    x = x.float().double() if our_roundings else x
    for t, t_next in zip(times[:-1], times[1:], strict=True):
        network = networks[-1] if t < boundary else networks[0]
        inputs = x.float()
        if given is not None:
            inputs = torch.cat([inputs, given.expand(samples, -1, -1, -1, -1)], dim=1)
        when = torch.tensor([t * 1000]).bfloat16().float().expand(samples)
        v = network(inputs, when, text.expand(samples, -1, -1), return_dict=False)[0].double()
        if ode:
            x = x - (t - t_next) * v
        else:
            eps = torch.randn(x.shape, dtype=torch.float32, generator=generator)
            x = (1 - t_next) * (x - t * v) + t_next * (eps.double() if our_roundings else eps)
    return x.float()


def network_of(pth: Path, config: PatchConfig | None = None) -> WanTransformer3DModel:
    """The converted transformer, patched if asked for."""
    folder = turbowan.transformer_folder(pth)
    network = WanTransformer3DModel.from_pretrained(folder).eval()
    if config is not None:
        load_extra(network, folder)
        patch_model(network, config)
    return network


LATENTS = (4, 2, 6, 8)


@pytest.mark.parametrize(("steps", "samples"), [(1, 1), (4, 1), (3, 2)])
def test_text_to_video_draws_what_the_script_draws(
    steps: int, samples: int, text_pth, micro_folder, tmp_path, decoded
) -> None:
    more = ["--num_steps", str(steps), "--num_samples", str(samples), "--seed", "7", *EXACT]
    out = tmp_path / "video.mp4"
    text_to_video(text_pth, micro_folder, out, *more, "--no_patch")
    expected = plain_loop(
        [network_of(text_pth)],
        embedding(micro_folder, PROMPT),
        shape=LATENTS,
        seed=7,
        samples=samples,
        steps=steps,
    )
    (ours,) = decoded
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    assert float(expected.std()) > 0.1
    assert movie(out) == (5, (64 * samples, 48), 16.0), "samples side by side"


@pytest.mark.parametrize("quant", [False, True], ids=["as-is", "quant_linear"])
def test_patched_text_to_video_draws_it_too(
    quant: bool, micro_folder, tmp_path, decoded, capsys
) -> None:
    pth = tmp_path / "model.pth"
    save(Options(text=32, sla=True, quant=quant, dtype=torch.float32), pth)
    more = [*EXACT, "--quant_linear"] if quant else EXACT
    text_to_video(pth, micro_folder, tmp_path / "video.mp4", *more)
    config = PatchConfig(linear="int8" if quant else "as-is", guard=False)
    text = embedding(micro_folder, PROMPT)
    how = dict(shape=LATENTS, seed=0, our_roundings=True)
    patched = plain_loop([network_of(pth, config)], text, **how)
    plain = plain_loop([network_of(pth)], text, **how)
    torch.testing.assert_close(decoded[0], patched, rtol=0, atol=1e-5)
    assert not torch.allclose(decoded[0], plain, rtol=0, atol=1e-4)
    assert "video.mp4" in capsys.readouterr().out


@pytest.mark.parametrize("ode", [False, True], ids=["sde", "ode"])
@pytest.mark.parametrize("boundary", [0.9, 0.933, 1.0, 0.0])
def test_image_to_video_draws_what_the_script_draws(
    ode: bool, boundary: float, expert_pths, image_base, picture, tmp_path, decoded
) -> None:
    """At 0.933 the second step is the high-noise expert's, though its rounded time is under it."""
    more = ["--boundary", str(boundary), "--seed", "3", "--no_patch", *EXACT]
    more += ["--num_samples", "2"] + (["--ode"] if ode else [])
    out = tmp_path / "video.mp4"
    image_to_video(expert_pths, image_base, picture, out, *more)
    expected = plain_loop(
        [network_of(path) for path in expert_pths],
        embedding(image_base, PROMPT),
        shape=LATENTS,
        seed=3,
        samples=2,
        sigma_max=200.0,
        boundary=boundary,
        ode=ode,
        given=condition(image_base, picture, 64, 48, 5),
    )
    (ours,) = decoded
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    assert movie(out) == (5, (128, 48), 16.0)


def test_image_to_video_patches_both_experts(
    expert_pths, image_base, picture, tmp_path, capsys
) -> None:
    out = tmp_path / "video"
    image_to_video(expert_pths, image_base, picture, out, "--quant_linear", "--num_steps", "3")
    text = capsys.readouterr().out
    assert "transformer_2" in text and movie(tmp_path / "video.mp4")[0] == 5


def test_frames_are_rounded_as_the_script_rounds_them(
    text_pth, micro_folder, tmp_path, decoded
) -> None:
    out = tmp_path / "video.mp4"
    text_to_video(text_pth, micro_folder, out, "--num_frames", "8", "--num_steps", "1")
    assert decoded[0].shape[2] == 2 and movie(out)[0] == 5


def test_two_prompts_of_a_seed_start_from_the_same_noise(text_pth, micro_folder) -> None:
    from diffusers import WanPipeline

    from turbo_rcm_patch import RCMScheduler

    folder = turbowan.transformer_folder(text_pth)
    kind = dict(dtype=torch.float32, vae_dtype=torch.float32, device="cpu")
    pipe = turbowan.load(WanPipeline, [folder], micro_folder, **kind)
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler = RCMScheduler()
    size = dict(width=32, height=32, num_frames=5)
    first, again = (turbowan.sample(pipe, PROMPT, seed=1, **size) for _ in range(2))
    other = turbowan.sample(pipe, "a blue ring", seed=1, **size)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert pipe.scheduler._noise_generator is None


# Converting, and what does not fit.


def test_a_checkpoint_is_converted_once(tmp_path) -> None:
    pth = tmp_path / "model.pth"
    save(TEXT, pth)
    cache, stages = tmp_path / "cache", []

    def progress(stage: str, done: int, total: int) -> None:
        stages.append(stage)

    folder = turbowan.transformer_folder(pth, cache=cache, progress=progress)
    assert folder.parent == cache and folder.name.startswith("model-diffusers-") and stages
    stages.clear()
    assert turbowan.transformer_folder(pth, cache=cache, progress=progress) == folder
    assert not stages, "used again"
    save(TEXT, pth, seed=5)
    os.utime(pth, ns=(1, 1))
    turbowan.transformer_folder(pth, cache=cache, progress=progress)
    assert stages, "another file is converted again"
    weights = WanTransformer3DModel.from_pretrained(folder).proj_out.weight
    assert torch.equal(weights, torch.load(pth, weights_only=True)["head.head.weight"])
    assert turbowan.transformer_folder(folder) == folder
    assert turbowan.transformer_folder(pth) == tmp_path / "model-diffusers", "beside it"
    (tmp_path / "other").mkdir()
    save(TEXT, tmp_path / "other" / "model.pth")
    assert turbowan.transformer_folder(tmp_path / "other" / "model.pth", cache=cache) != folder


def test_a_folder_that_is_something_else_is_not_replaced(tmp_path, text_pth) -> None:
    pth, other = tmp_path / "model.pth", tmp_path / "model-diffusers"
    pth.symlink_to(text_pth)
    other.mkdir()
    (other / "config.json").write_text("{}")
    with pytest.raises(OutputExistsError, match="is there already"):
        turbowan.transformer_folder(pth)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputExistsError, match="--cache"):
        turbowan.transformer_folder(text_pth, cache=tmp_path / "file")
    for missing in (tmp_path / "none.pth", tmp_path):
        with pytest.raises(CheckpointError):
            turbowan.transformer_folder(missing)
    assert (other / "config.json").read_text() == "{}"


def test_a_whole_pipeline_is_its_own_base(text_pth, tmp_path, micro_folder) -> None:
    """As `convert --base` writes it, given as --dit_path alone."""
    whole = tmp_path / "whole"
    whole.mkdir()
    for path in micro_folder.iterdir():
        (whole / path.name).symlink_to(path)
    (whole / "transformer").unlink()
    (whole / "transformer").symlink_to(turbowan.transformer_folder(text_pth))
    out = tmp_path / "video.mp4"
    arguments = ["--dit_path", str(whole), "--save_path", str(out), *SMALL, "--num_steps", "1"]
    main_of("turbowan_t2v.py")([*arguments, "--prompt", PROMPT])
    assert movie(out)[0] == 5


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        (["--model", "Wan2.1-14B"], CheckpointError, "40 blocks of width 5120"),
        (["--base", "tiny"], ModelFolderError, "channels of a latent"),
        (["--base", "/nowhere/at/all"], ModelFolderError, "no such folder"),
    ],
    ids=["model", "base", "no-base"],
)
def test_what_does_not_fit_is_refused(
    more, error, message, text_pth, micro_folder, tmp_path
) -> None:
    with pytest.raises(error, match=message):
        text_to_video(text_pth, micro_folder, tmp_path / "video.mp4", *more)
    assert not (tmp_path / "video.mp4").exists()


def test_a_checkpoint_without_sla_says_how_to_run_it(micro_folder, tmp_path, decoded) -> None:
    pth, out = tmp_path / "model.pth", tmp_path / "video.mp4"
    save(Options(text=32), pth)
    with pytest.raises(CheckpointError, match="--attention_type original"):
        text_to_video(pth, micro_folder, out)
    text_to_video(pth, micro_folder, out, "--attention_type", "original", "--num_steps", "1")
    assert movie(out)[0] == 5


def test_attention_types(text_pth, micro_folder, tmp_path, decoded, capsys) -> None:
    """sla and sagesla are one; original leaves proj_l out, and is still patched."""
    texts = []
    for kind in ("sagesla", "sla", "original"):
        more = ["--attention_type", kind, "--num_steps", "1", *EXACT]
        text_to_video(text_pth, micro_folder, tmp_path / "video.mp4", *more)
        texts.append(capsys.readouterr().out)
    assert torch.equal(decoded[0], decoded[1])
    assert not torch.allclose(decoded[0], decoded[2], rtol=0, atol=1e-3)
    assert ["proj_l" in text for text in texts] == [True, True, False]
    assert "two-launch" in texts[2]


def test_an_interruption_leaves_nothing(text_pth, micro_folder, tmp_path, monkeypatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(imageio_ffmpeg, "write_frames", interrupted)
    out = tmp_path / "out" / "video.mp4"
    with pytest.raises(KeyboardInterrupt):
        text_to_video(text_pth, micro_folder, out, "--num_steps", "1")
    assert not list(out.parent.iterdir())


def test_the_other_example_is_named(text_pth, expert_pths, micro_folder, image_base, tmp_path,
                                    picture) -> None:  # fmt: skip
    with pytest.raises(CheckpointError, match=r"turbowan_i2v\.py"):
        text_to_video(expert_pths[0], micro_folder, tmp_path / "video.mp4")
    with pytest.raises(CheckpointError, match=r"turbowan_t2v\.py"):
        image_to_video([text_pth] * 2, image_base, picture, tmp_path / "video.mp4")
