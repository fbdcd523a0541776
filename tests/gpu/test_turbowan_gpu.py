"""TurboDiffusion's checkpoints on a GPU: its generator, and the kernels of a patched run."""

from __future__ import annotations

import pytest
import torch

from tests.video.turbowan import (
    expert_pths,
    image_base,
    network_of,
    picture,
    pipeline,
    plain_loop,
    sample,
    text_base,
    text_pths,
)
from turbo_rcm_patch import patch_model

__all__ = ["expert_pths", "image_base", "picture", "text_base", "text_pths"]

pytestmark = pytest.mark.gpu
#: Of the pipeline with the two experts.
IMAGE = {"seed": 3, "sigma_max": 200.0, "boundary": 0.9}


def check(pths, base, **how) -> None:
    """In fp32, with the numbers of the GPU's generator."""
    networks = [network_of(path).cuda() for path in pths]
    expected = plain_loop(networks, base, device="cuda", **how)
    ours = sample(pipeline(pths, base, device="cuda"), **how)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-3)


def test_text_to_video(text_pths, text_base) -> None:
    check(text_pths, text_base, seed=7, samples=2)


def test_image_to_video(expert_pths, image_base, picture) -> None:
    check(expert_pths, image_base, picture=picture, **IMAGE)


@pytest.mark.parametrize("offload", ["none", "model"])
def test_the_kernels_run_both_experts(offload: str, expert_pths, image_base, picture) -> None:
    """bf16, SLA and int8 Linears; the same latents from the same seed, twice."""
    how = {"dtype": torch.bfloat16, "device": "cuda", "offload": offload}
    pipe = pipeline(expert_pths, image_base, **how)
    report = patch_model(pipe, linear="int8")
    first, again = (sample(pipe, picture=picture, seed=3, sigma_max=200.0) for _ in range(2))
    assert "triton" in str(report)
    assert first.isfinite().all() and torch.equal(first, again)
