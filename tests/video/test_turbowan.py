"""TurboDiffusion's checkpoints in diffusers' pipelines draw what its own scripts draw."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoints.wan_model import Options, save
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
from turbo_rcm_patch import PatchConfig, patch_model

__all__ = ["expert_pths", "image_base", "picture", "text_base", "text_pth"]
EXAMPLE = Path(__file__).parents[2] / "examples" / "turbowan.py"


@pytest.mark.parametrize(("steps", "samples"), [(1, 1), (3, 2)])
def test_text_to_video(steps: int, samples: int, text_pth, text_base) -> None:
    how = {"seed": 7, "samples": samples, "steps": steps}
    text = embedding(text_base, PROMPT)
    expected = plain_loop([network_of(text_pth)], text, shape=LATENTS, **how)
    ours = sample(pipeline([text_pth], text_base), **how)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    assert float(expected.std()) > 0.1


@pytest.mark.parametrize("quant", [False, True], ids=["as-is", "quant"])
def test_patched_text_to_video(quant: bool, text_base, tmp_path) -> None:
    pth = tmp_path / "model.pth"
    save(Options(text=32, sla=True, quant=quant, dtype=torch.float32), pth)
    config = PatchConfig(linear="int8" if quant else "as-is")
    pipe = pipeline([pth], text_base)
    patch_model(pipe, config)
    ours = sample(pipe, seed=0)
    text = embedding(text_base, PROMPT)
    how = dict(shape=LATENTS, seed=0, our_roundings=True)
    patched = plain_loop([network_of(pth, config)], text, **how)
    plain = plain_loop([network_of(pth)], text, **how)
    torch.testing.assert_close(ours, patched, rtol=0, atol=1e-5)
    assert not torch.allclose(ours, plain, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("boundary", "ode"), [(0.9, True), (0.933, False), (0.0, False)])
def test_image_to_video(boundary: float, ode: bool, expert_pths, image_base, picture) -> None:
    """At 0.933 the second step is the high-noise expert's, though its rounded time is under it."""
    how = {"seed": 3, "samples": 2, "sigma_max": 200.0, "boundary": boundary, "ode": ode}
    expected = plain_loop(
        [network_of(path) for path in expert_pths],
        embedding(image_base, PROMPT),
        shape=LATENTS,
        given=condition(image_base, picture, *SIZE, 5),
        **how,
    )
    pipe = pipeline(expert_pths, image_base)
    ours = sample(pipe, image=stretched(picture, SIZE), **how)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def test_the_example_converts_once_and_makes_a_video(
    text_pth, text_base, tmp_path, monkeypatch, capsys
) -> None:
    settings = '{"height": 48, "width": 64, "num_frames": 5}'
    (text_base / "turbo_rcm.json").write_text(settings)
    monkeypatch.chdir(tmp_path)
    pth = tmp_path / "model.pth"
    pth.write_bytes(text_pth.read_bytes())
    monkeypatch.setattr(sys, "argv", ["turbowan.py", str(pth), str(text_base), PROMPT])
    for _ in range(2):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        assert "pairs run fused" in capsys.readouterr().out
        assert Path("outputs/turbowan/video.mp4").stat().st_size > 500
