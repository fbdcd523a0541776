"""TurboDiffusion's checkpoints in diffusers' pipelines draw what its own scripts draw."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints.wan_model import Options, save
from tests.video.turbowan import (
    PROMPT,
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

__all__ = ["expert_pths", "image_base", "picture", "text_base", "text_pths"]
EXAMPLE = Path(__file__).parents[2] / "examples" / "turbowan.py"


@pytest.mark.parametrize(("steps", "samples"), [(1, 1), (3, 2), (4, 2)])
def test_text_to_video(steps: int, samples: int, text_pths, text_base) -> None:
    how = {"seed": 7, "samples": samples, "steps": steps}
    expected = plain_loop([network_of(text_pths[0])], text_base, **how)
    ours = sample(pipeline(text_pths, text_base), **how)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    assert float(expected.std()) > 0.1


@pytest.mark.parametrize(
    ("boundary", "ode"), [(0.9, True), (0.9, False), (0.933, False), (0.0, False)]
)
def test_image_to_video(boundary: float, ode: bool, expert_pths, image_base, picture) -> None:
    """At 0.933 the second step is the high-noise expert's, though its rounded time is under it."""
    how: dict[str, Any] = {"seed": 3, "samples": 2, "boundary": boundary, "ode": ode}
    how |= {"sigma_max": 200.0, "picture": picture}
    expected = plain_loop([network_of(path) for path in expert_pths], image_base, **how)
    ours = sample(pipeline(expert_pths, image_base), **how)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def test_the_example_converts_once_and_makes_a_video(
    text_base, tmp_path, monkeypatch, capsys
) -> None:
    settings = '{"height": 48, "width": 64, "num_frames": 5}'
    (text_base / "turbo_rcm.json").write_text(settings)
    monkeypatch.chdir(tmp_path)
    for name in ("model", "model-quant"):
        pth = tmp_path / f"{name}.pth"
        save(Options(text=32, sla=True, quant="quant" in name), pth)
        monkeypatch.setattr(sys, "argv", ["turbowan.py", str(pth), str(text_base), PROMPT])
        for _ in range(2):
            runpy.run_path(str(EXAMPLE), run_name="__main__")
            assert "pairs run fused" in capsys.readouterr().out
        assert Path("outputs/turbowan/video.mp4").stat().st_size > 500
