"""The TurboDiffusion examples, from a `.pth` to an mp4: their numbers against a loop in plain
torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.turbodiffusion.wan_model import Options, save, state_dict
from tests.video.turbowan import (
    EXACT,
    LATENTS,
    PROMPT,
    SMALL,
    TEXT,
    condition,
    decoded,
    embedding,
    expert_pths,
    image_base,
    image_to_video,
    main_of,
    movie,
    network_of,
    picture,
    plain_loop,
    text_base,
    text_pth,
    text_to_video,
)
from turbo_rcm_patch import PatchConfig
from turbo_rcm_patch.errors import CheckpointError, ModelFolderError, SamplingError
from turbo_rcm_patch.turbodiffusion.convert import convert_pipeline
from turbowan import video as example

__all__ = ["decoded", "expert_pths", "image_base", "picture", "text_base", "text_pth"]


@pytest.mark.parametrize(("steps", "samples"), [(1, 1), (3, 2)])
def test_text_to_video_draws_what_the_script_draws(
    steps: int, samples: int, text_pth, text_base, tmp_path, decoded
) -> None:
    more = ["--num_steps", str(steps), "--num_samples", str(samples), "--seed", "7", *EXACT]
    out = tmp_path / "video.mp4"
    text_to_video(text_pth, text_base, out, *more, "--no_patch")
    expected = plain_loop(
        [network_of(text_pth)],
        embedding(text_base, PROMPT),
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
    quant: bool, text_base, tmp_path, decoded, capsys
) -> None:
    pth = tmp_path / "model.pth"
    save(Options(text=32, sla=True, quant=quant, dtype=torch.float32), pth)
    more = [*EXACT, "--quant_linear"] if quant else EXACT
    text_to_video(pth, text_base, tmp_path / "video.mp4", *more)
    config = PatchConfig(linear="int8" if quant else "as-is")
    text = embedding(text_base, PROMPT)
    how = dict(shape=LATENTS, seed=0, our_roundings=True)
    patched = plain_loop([network_of(pth, config)], text, **how)
    plain = plain_loop([network_of(pth)], text, **how)
    torch.testing.assert_close(decoded[0], patched, rtol=0, atol=1e-5)
    assert not torch.allclose(decoded[0], plain, rtol=0, atol=1e-4)
    assert "video.mp4" in capsys.readouterr().out


@pytest.mark.parametrize(("boundary", "ode"), [(0.9, True), (0.933, False), (0.0, False)])
def test_image_to_video_draws_what_the_script_draws(
    boundary: float, ode: bool, expert_pths, image_base, picture, tmp_path, decoded
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
    expert_pths, image_base, picture, tmp_path, capsys, decoded
) -> None:
    """8 frames are made of 2 latents, so 5 are, where a pipeline would make 9."""
    more = ["--quant_linear", "--num_steps", "3", "--num_frames", "8"]
    image_to_video(expert_pths, image_base, picture, tmp_path / "video", *more)
    text = capsys.readouterr().out
    assert "transformer_2" in text and decoded[0].shape[2] == 2
    assert movie(tmp_path / "video.mp4")[0] == 5


def test_videos_become_bytes_as_the_script_has_them(tmp_path, monkeypatch) -> None:
    """Half a step is added, and samples are side by side."""
    written: list[np.ndarray] = []
    monkeypatch.setattr(example, "write_mp4", lambda frames, *_, **__: written.append(frames))
    videos = np.random.default_rng(0).random((2, 3, 4, 6, 3), dtype=np.float32)
    videos[0, 0, 0, 0] = 0.0, 254.6 / 255, 1.0
    example.write_video(videos, tmp_path / "video.mp4")
    (frames,) = written
    assert frames.dtype == np.uint8 and frames.shape == (3, 4, 12, 3)
    assert frames[0, 0, 0].tolist() == [0, 255, 255]
    assert (frames[:, :, 6:] == (videos[1] * 255 + 0.5).astype(np.uint8)).all()


def folders(place: Path) -> list[Path]:
    return sorted(path for path in place.iterdir() if path.is_dir())


def test_a_checkpoint_is_converted_once(text_base, tmp_path, capsys) -> None:
    pth, cache = tmp_path / "model.pth", tmp_path / "cache"
    save(TEXT, pth)
    more = ["--cache", str(cache), "--num_steps", "1"]
    for first in (True, False):
        text_to_video(pth, text_base, tmp_path / "video.mp4", *more)
        assert ("Converting to" in capsys.readouterr().err) == first
    (folder,) = folders(cache)
    save(TEXT, pth, seed=5)
    os.utime(pth, ns=(1, 1))
    text_to_video(pth, text_base, tmp_path / "video.mp4", *more)
    assert len(folders(cache)) == 2, "another file"
    arguments = ["--dit_path", str(folder), "--save_path", str(tmp_path / "again.mp4"), *SMALL]
    main_of("turbowan_t2v.py")([*arguments, "--prompt", PROMPT, "--num_steps", "1"])
    assert movie(tmp_path / "again.mp4")[0] == 5, "a converted pipeline needs no base"


def test_attention_types(text_pth, text_base, tmp_path, decoded, capsys) -> None:
    """sla and sagesla are one; original is dense, and still patched."""
    texts = []
    for kind in ("sagesla", "sla", "original"):
        more = ["--attention_type", kind, "--num_steps", "1", *EXACT]
        text_to_video(text_pth, text_base, tmp_path / "video.mp4", *more)
        texts.append(capsys.readouterr().out)
    assert torch.equal(decoded[0], decoded[1])
    assert not torch.allclose(decoded[0], decoded[2], rtol=0, atol=1e-3)
    assert ["proj_l" in text for text in texts] == [True, True, False]
    assert "transformer.blocks.0" in texts[2]


def test_what_does_not_fit_is_refused(
    text_pth, expert_pths, text_base, image_base, picture, tmp_path
) -> None:
    out, dense = tmp_path / "video.mp4", tmp_path / "dense.pth"
    save(Options(text=32), dense)
    pipeline = tmp_path / "i2v"
    refused: list[tuple[Any, type[Exception], str]] = [
        (lambda: text_to_video(tmp_path / "none.pth", text_base, out), CheckpointError,
         "no such file"),
        (lambda: text_to_video(tmp_path, text_base, out), CheckpointError, "is a folder"),
        (lambda: text_to_video(text_pth, Path("tiny"), out), ModelFolderError,
         "num_attention_heads: 4 there, 2"),
        (lambda: text_to_video(text_pth, Path("/no/where"), out), ModelFolderError,
         "no such folder"),
        (lambda: text_to_video(expert_pths[0], text_base, out), ModelFolderError, "in_channels"),
        (lambda: text_to_video(dense, text_base, out), CheckpointError,
         "--attention_type original"),
        (lambda: text_to_video(pipeline, text_base, out), CheckpointError, r"turbowan_i2v\.py"),
        (lambda: image_to_video([text_pth] * 2, image_base, picture, out), ModelFolderError,
         "in_channels"),
    ]  # fmt: skip
    convert_pipeline(expert_pths[0], pipeline, base=image_base, low_noise=expert_pths[1])
    for call, error, message in refused:
        with pytest.raises(error, match=message):
            call()
        assert not out.exists()
    more = ["--attention_type", "original", "--num_steps", "1"]
    text_to_video(dense, text_base, out, *more)
    assert movie(out)[0] == 5


def test_a_network_that_gives_nan_is_no_video(text_base, tmp_path) -> None:
    state = state_dict(TEXT)
    state["head.head.bias"][0] = float("nan")
    torch.save(state, tmp_path / "nan.pth")
    with pytest.raises(SamplingError, match="finite values"):
        text_to_video(tmp_path / "nan.pth", text_base, tmp_path / "v.mp4", "--no_patch")
    assert not (tmp_path / "v.mp4").exists()
