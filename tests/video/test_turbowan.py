"""TurboDiffusion's checkpoints in diffusers' pipelines draw what its own scripts draw.

With `--turbodiffusion PATH`, a checkout, the scripts run as they are, on a CPU; in place of their
networks, VAE and text encoder stand those of the pipelines. Without it, their loop in plain torch.
"""

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
    script_loop,
    text_base,
    text_pths,
)
from turbo_rcm_patch import PatchConfig, patch_model

__all__ = ["expert_pths", "image_base", "picture", "text_base", "text_pths"]
EXAMPLE = Path(__file__).parents[2] / "examples" / "turbowan.py"
LOOPS = pytest.mark.parametrize("loop", ["plain torch", "its script"])


def script(request: pytest.FixtureRequest, name: str) -> Path:
    """A script of the checkout."""
    root = request.config.getoption("--turbodiffusion", default=None)
    if not root:
        pytest.skip("needs --turbodiffusion PATH, a checkout of TurboDiffusion")
    path = Path(root) / "turbodiffusion" / "inference" / name
    if not path.is_file():
        pytest.fail(f"{root} is not a checkout of TurboDiffusion: no {path}", pytrace=False)
    return path


@LOOPS
@pytest.mark.parametrize(("steps", "samples"), [(1, 1), (3, 2), (4, 2)])
def test_text_to_video(loop, steps: int, samples: int, text_pths, text_base, request) -> None:
    how = {"seed": 7, "samples": samples, "steps": steps}
    if loop == "plain torch":
        expected = plain_loop([network_of(text_pths[0])], text_base, **how)
    else:
        arguments = ["--seed", "7", "--dit_path", str(text_pths[0]), "--num_steps", str(steps)]
        arguments += ["--num_samples", str(samples)]
        path = script(request, "wan2.1_t2v_infer.py")
        expected, calls = script_loop(path, arguments, text_base)
        assert calls == ["model"] * steps
    ours = sample(pipeline(text_pths, text_base), **how)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    assert float(expected.std()) > 0.1


@LOOPS
@pytest.mark.parametrize(
    ("boundary", "ode"), [(0.9, True), (0.9, False), (0.933, False), (0.0, False)]
)
def test_image_to_video(
    loop, boundary: float, ode: bool, expert_pths, image_base, picture, request
) -> None:
    """At 0.933 the second step is the high-noise expert's, though its rounded time is under it."""
    how: dict[str, Any] = {"seed": 3, "samples": 2, "boundary": boundary, "ode": ode}
    how |= {"sigma_max": 200.0, "picture": picture}
    if loop == "plain torch":
        expected = plain_loop([network_of(path) for path in expert_pths], image_base, **how)
    else:
        arguments = ["--seed", "3", "--image_path", str(picture), "--num_samples", "2"]
        arguments += ["--boundary", str(boundary), *(["--ode"] if ode else [])]
        for name, path in zip(("high", "low"), expert_pths, strict=True):
            arguments += [f"--{name}_noise_model_path", str(path)]
        path = script(request, "wan2.2_i2v_infer.py")
        expected, calls = script_loop(path, arguments, image_base, picture)
        assert calls == ["high", "high", "low", "low"] or not boundary
    ours = sample(pipeline(expert_pths, image_base), **how)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("quant", [False, True], ids=["as-is", "quant"])
def test_patched_text_to_video(quant: bool, text_base, tmp_path) -> None:
    pth = tmp_path / "model.pth"
    save(Options(text=32, sla=True, quant=quant, dtype=torch.float32), pth)
    config = PatchConfig(linear="int8" if quant else "as-is")
    pipe = pipeline([pth], text_base)
    patch_model(pipe, config)
    ours = sample(pipe, seed=0)
    patched = plain_loop([network_of(pth, config)], text_base, seed=0, our_roundings=True)
    plain = plain_loop([network_of(pth)], text_base, seed=0, our_roundings=True)
    torch.testing.assert_close(ours, patched, rtol=0, atol=1e-5)
    assert not torch.allclose(ours, plain, rtol=0, atol=1e-4)


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
