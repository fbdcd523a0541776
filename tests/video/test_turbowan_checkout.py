"""The TurboDiffusion examples against its scripts, run from a checkout.

`pytest tests/video/test_turbowan_checkout.py --turbodiffusion PATH`. The scripts run as they
are, on a CPU; in place of their networks, VAE and text encoder stand those that the examples load.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from PIL import Image

from tests.video.test_turbodiffusion import Parts, scripts, their_loop
from tests.video.turbowan import (
    EXACT,
    LATENTS,
    PROMPT,
    decoded,
    embedding,
    expert_pths,
    image_base,
    image_to_video,
    network_of,
    picture,
    text_base,
    text_pth,
    text_to_video,
)
from turbowan.video import adapted_size, fitted

__all__ = ["decoded", "expert_pths", "image_base", "picture", "scripts", "text_base", "text_pth"]

SIZE = (8 * LATENTS[3], 8 * LATENTS[2])


class Converted:
    """A converted checkpoint, called as the scripts call theirs, which compute in bf16 alone."""

    def __init__(self, path: str, calls: list[str]) -> None:
        self.network, self.name, self.calls = network_of(Path(path)), Path(path).stem, calls

    def cpu(self) -> Converted:
        return self

    cuda = cpu

    def __call__(
        self,
        *,
        x_B_C_T_H_W: torch.Tensor,
        timesteps_B_T: torch.Tensor,
        crossattn_emb: torch.Tensor,
        y_B_C_T_H_W: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.calls.append(self.name)
        x = x_B_C_T_H_W
        inputs = x if y_B_C_T_H_W is None else torch.cat([x, y_B_C_T_H_W], dim=1)
        when = timesteps_B_T.bfloat16().float().flatten()
        return self.network(inputs, when, crossattn_emb, return_dict=False)[0]


def parts(base: Path, size: tuple[int, int] = SIZE) -> Parts:
    vae = AutoencoderKLWan.from_pretrained(base, subfolder="vae").eval()

    class Tokenizer:
        latent_ch, spatial_compression_factor = LATENTS[0], 8

        def __init__(self, seen: list[torch.Tensor]) -> None:
            self.seen = seen

        def get_latent_num_frames(self, frames: int) -> int:
            return 1 + (frames - 1) // 4

        def encode(self, frames: torch.Tensor) -> torch.Tensor:
            return vae.encode(frames).latent_dist.mode()

        def decode(self, latents: torch.Tensor) -> torch.Tensor:
            self.seen.append(latents)
            return latents

    def image(opened: Any) -> torch.Tensor:
        assert isinstance(opened, Image.Image)
        return (fitted(opened, *size)[0] - 0.5) / 0.5

    return Parts(Converted, Tokenizer, embedding(base, PROMPT), image, SIZE, torch.float32)


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("steps", [1, 4])
def test_text_to_video(steps, samples, scripts, text_pth, text_base, tmp_path, decoded) -> None:
    more = ["--num_steps", str(steps), "--num_samples", str(samples), "--seed", "5"]
    text_to_video(text_pth, text_base, tmp_path / "video.mp4", *more, *EXACT, "--no_patch")
    arguments = ["--dit_path", str(text_pth), "--num_frames", "5", *more]
    theirs, calls = their_loop(scripts / "wan2.1_t2v_infer.py", arguments, parts(text_base))
    assert calls == ["model"] * steps
    torch.testing.assert_close(decoded[0], theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("ode", [False, True], ids=["sde", "ode"])
@pytest.mark.parametrize(("boundary", "adaptive"), [(0.9, False), (0.933, False), (0.9, True)])
def test_image_to_video(
    ode, boundary, adaptive, scripts, expert_pths, image_base, picture, tmp_path, decoded
) -> None:
    more = ["--boundary", str(boundary), "--num_samples", "2", "--seed", "5"]
    more += ["--ode"] if ode else []
    size = SIZE
    if adaptive:
        with Image.open(picture) as opened:
            portrait = opened.transpose(Image.Transpose.ROTATE_90)
        picture = tmp_path / "portrait.png"
        portrait.save(picture)
        more, size = [*more, "--adaptive_resolution"], adapted_size(portrait.size, SIZE)
        assert size == (48, 64)
    out = tmp_path / "video.mp4"
    image_to_video(expert_pths, image_base, picture, out, *more, *EXACT, "--no_patch")
    ours = decoded[0]
    arguments = ["--image_path", str(picture), "--num_frames", "5", *more]
    for name, path in zip(("high", "low"), expert_pths, strict=True):
        arguments += [f"--{name}_noise_model_path", str(path)]
    theirs, calls = their_loop(scripts / "wan2.2_i2v_infer.py", arguments, parts(image_base, size))
    assert calls == ["high", "high", "low", "low"]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
