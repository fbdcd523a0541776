"""The TurboDiffusion examples, from a `.pth` to an mp4: their numbers against a loop in plain
torch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.turbodiffusion.wan_model import Options, save
from tests.video.turbowan import (
    EXACT,
    LATENTS,
    PROMPT,
    condition,
    decoded,
    embedding,
    expert_pths,
    image_base,
    image_to_video,
    movie,
    network_of,
    picture,
    plain_loop,
    text_pth,
    text_to_video,
)
from turbo_rcm_patch import PatchConfig
from turbo_rcm_patch.errors import SamplingError
from turbowan import sampling
from turbowan.models import load, transformer_folder
from turbowan.sampling import decode, sample, write_video

__all__ = ["decoded", "expert_pths", "image_base", "picture", "text_pth"]


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
    text_pth, expert_pths, micro_folder, image_base, picture, tmp_path, decoded
) -> None:
    """8 are made of 2 latents, so 5 are, where a pipeline would make 9."""
    out, more = tmp_path / "video.mp4", ["--num_frames", "8", "--num_steps", "1"]
    text_to_video(text_pth, micro_folder, out, *more)
    assert decoded[0].shape[2] == 2 and movie(out)[0] == 5
    image_to_video(expert_pths, image_base, picture, out, *more)
    assert decoded[1].shape[2] == 2 and movie(out)[0] == 5


def test_videos_become_bytes_as_the_script_has_them(tmp_path, monkeypatch) -> None:
    """Half a step is added, and samples are side by side."""
    written: list[np.ndarray] = []
    monkeypatch.setattr(sampling, "write_mp4", lambda frames, *_, **__: written.append(frames))
    videos = torch.rand(2, 3, 4, 6, 3)
    videos[0, 0, 0, 0] = torch.tensor([0.0, 254.6 / 255, 1.0])
    write_video(videos, tmp_path / "video.mp4")
    (frames,) = written
    assert frames.dtype == np.uint8 and frames.shape == (3, 4, 12, 3)
    assert frames[0, 0, 0].tolist() == [0, 255, 255]
    assert (frames[:, :, 6:] == (videos[1] * 255 + 0.5).byte().numpy()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_latents_are_scaled_in_the_dtype_of_the_vae(dtype: torch.dtype) -> None:
    """By mean and deviation, the reciprocal of the deviation rounded as theirs is."""
    mean, std = [0.3, -0.7, 0.11, 1.9], [2.8184, 1.4541, 2.3275, 0.6558]
    seen: list[torch.Tensor] = []

    def decode(z: torch.Tensor, return_dict: bool) -> tuple[torch.Tensor]:
        seen.append(z)
        return (torch.full((1, 3, 5, 16, 16), 2.0, dtype=dtype),)

    config = SimpleNamespace(z_dim=4, latents_mean=mean, latents_std=std)
    vae = SimpleNamespace(dtype=dtype, config=config, decode=decode)
    pipe = SimpleNamespace(
        vae=vae, _execution_device=torch.device("cpu"), maybe_free_model_hooks=lambda: None
    )
    latents = torch.randn(1, 4, 2, 2, 2, dtype=torch.float64)
    frames = sampling.decode(pipe, latents)
    scale = 1.0 / torch.tensor(std, dtype=dtype).view(1, 4, 1, 1, 1)
    shift = torch.tensor(mean, dtype=dtype).view(1, 4, 1, 1, 1)
    assert torch.equal(seen[0], latents.float().to(dtype) / scale + shift)
    assert frames.shape == (1, 5, 16, 16, 3) and frames.dtype == torch.float32
    assert frames.unique().tolist() == [1.0]


def test_a_failure_frees_what_offload_has_on_the_gpu(text_pth, micro_folder, monkeypatch) -> None:
    from diffusers import WanPipeline

    from turbo_rcm_patch import RCMScheduler

    def fails(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    folder, freed = transformer_folder(text_pth), []
    pipe = load(WanPipeline, [folder], micro_folder, device="cpu")
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler = RCMScheduler()
    monkeypatch.setattr(pipe, "maybe_free_model_hooks", lambda: freed.append(1))
    monkeypatch.setattr(pipe.transformer, "forward", fails)
    monkeypatch.setattr(pipe.vae, "decode", fails)
    with pytest.raises(torch.OutOfMemoryError):
        sample(pipe, PROMPT, width=32, height=32, num_frames=5)
    with pytest.raises(torch.OutOfMemoryError):
        decode(pipe, torch.zeros(1, 4, 1, 4, 4))
    assert len(freed) == 2 and pipe.scheduler._noise_generator is None


def test_two_prompts_of_a_seed_start_from_the_same_noise(text_pth, micro_folder) -> None:
    from diffusers import WanPipeline

    from turbo_rcm_patch import RCMScheduler

    folder = transformer_folder(text_pth)
    kind = dict(dtype=torch.float32, vae_dtype=torch.float32, device="cpu")
    pipe = load(WanPipeline, [folder], micro_folder, **kind)
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler = RCMScheduler()
    size = dict(width=32, height=32, num_frames=5)
    first, again = (sample(pipe, PROMPT, seed=1, **size) for _ in range(2))
    other = sample(pipe, "a blue ring", seed=1, **size)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert pipe.scheduler._noise_generator is None
    pipe.transformer.proj_out.bias.data[0] = float("nan")
    with pytest.raises(SamplingError, match="finite values"):
        sample(pipe, PROMPT, **size)
