"""The TurboDiffusion examples on a GPU: its generator, and the kernels of a patched run."""

from __future__ import annotations

import pytest
import torch

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
    text_base,
    text_pth,
    text_to_video,
)

__all__ = ["decoded", "expert_pths", "image_base", "picture", "text_base", "text_pth"]

pytestmark = pytest.mark.gpu

GPU = ["--device", "cuda"]


def test_text_to_video_draws_what_the_script_draws(text_pth, text_base, tmp_path, decoded) -> None:
    """In fp32, with the numbers of the GPU's generator."""
    more = ["--num_samples", "2", "--seed", "7", "--no_patch", *EXACT, *GPU]
    text_to_video(text_pth, text_base, tmp_path / "video.mp4", *more)
    expected = plain_loop(
        [network_of(text_pth).cuda()],
        embedding(text_base, PROMPT).cuda(),
        shape=LATENTS,
        seed=7,
        samples=2,
        device="cuda",
    )
    torch.testing.assert_close(decoded[0], expected, rtol=0, atol=1e-3)


def test_image_to_video_draws_what_the_script_draws(
    expert_pths, image_base, picture, tmp_path, decoded
) -> None:
    more = ["--seed", "3", "--no_patch", *EXACT, *GPU]
    image_to_video(expert_pths, image_base, picture, tmp_path / "video.mp4", *more)
    expected = plain_loop(
        [network_of(path).cuda() for path in expert_pths],
        embedding(image_base, PROMPT).cuda(),
        shape=LATENTS,
        seed=3,
        sigma_max=200.0,
        boundary=0.9,
        given=condition(image_base, picture, 64, 48, 5).cuda(),
        device="cuda",
    )
    torch.testing.assert_close(decoded[0], expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("offload", ["none", "model"])
def test_the_kernels_run_both_experts(
    offload, expert_pths, image_base, picture, tmp_path, decoded, capsys
) -> None:
    """bf16, SLA and int8 Linears; the same latents from the same seed, twice."""
    for name in ("first.mp4", "again.mp4"):
        more = ["--quant_linear", "--offload", offload, *GPU]
        image_to_video(expert_pths, image_base, picture, tmp_path / name, *more)
        assert movie(tmp_path / name)[0] == 5
        assert "triton" in capsys.readouterr().out
    assert decoded[0].isfinite().all() and torch.equal(decoded[0], decoded[1])
