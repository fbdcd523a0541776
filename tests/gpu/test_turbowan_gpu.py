"""TurboDiffusion's checkpoints on a GPU: its generator, and the kernels of a patched run."""

from __future__ import annotations

import pytest
import torch

from tests.video.turbowan import (
    LATENTS,
    PROMPT,
    SIZE,
    condition,
    embedding,
    expert_pths,
    image_base,
    network_of,
    picture,
    pipeline,
    plain_loop,
    sample,
    stretched,
    text_base,
    text_pth,
)
from turbo_rcm_patch import patch_model

__all__ = ["expert_pths", "image_base", "picture", "text_base", "text_pth"]

pytestmark = pytest.mark.gpu


def test_text_to_video(text_pth, text_base) -> None:
    """In fp32, with the numbers of the GPU's generator."""
    how = {"seed": 7, "samples": 2}
    text = embedding(text_base, PROMPT).cuda()
    network = network_of(text_pth).cuda()
    expected = plain_loop([network], text, shape=LATENTS, device="cuda", **how)
    ours = sample(pipeline([text_pth], text_base, device="cuda"), **how)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-3)


def test_image_to_video(expert_pths, image_base, picture) -> None:
    how = {"seed": 3, "sigma_max": 200.0, "boundary": 0.9}
    expected = plain_loop(
        [network_of(path).cuda() for path in expert_pths],
        embedding(image_base, PROMPT).cuda(),
        shape=LATENTS,
        given=condition(image_base, picture, *SIZE, 5).cuda(),
        device="cuda",
        **how,
    )
    pipe = pipeline(expert_pths, image_base, device="cuda")
    ours = sample(pipe, image=stretched(picture, SIZE), **how)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("offload", ["none", "model"])
def test_the_kernels_run_both_experts(offload: str, expert_pths, image_base, picture) -> None:
    """bf16, SLA and int8 Linears; the same latents from the same seed, twice."""
    how = {"dtype": torch.bfloat16, "device": "cuda", "offload": offload}
    pipe = pipeline(expert_pths, image_base, **how)
    report = patch_model(pipe, linear="int8")
    image = stretched(picture, SIZE)
    first, again = (sample(pipe, seed=3, sigma_max=200.0, image=image) for _ in range(2))
    assert "triton" in str(report)
    assert first.isfinite().all() and torch.equal(first, again)
