"""What the TurboDiffusion examples load: converting once, what does not fit, and failures."""

from __future__ import annotations

import io
import itertools
import json
import os
import sys
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel

from tests.turbodiffusion.wan_model import Options, save
from tests.video.turbowan import (
    EXACT,
    PROMPT,
    SMALL,
    TEXT,
    decoded,
    expert_pths,
    image_base,
    image_to_video,
    main_of,
    movie,
    picture,
    text_pth,
    text_to_video,
)
from turbo_rcm_patch import patching
from turbo_rcm_patch.errors import CheckpointError, ModelFolderError, OutputExistsError
from turbo_rcm_patch.patching.int8_weights import attached_int8
from turbo_rcm_patch.video import video
from turbowan import models
from turbowan.models import transformer_folder, transformer_folders

__all__ = ["decoded", "expert_pths", "image_base", "picture", "text_pth"]


def test_a_checkpoint_is_converted_once(tmp_path) -> None:
    pth = tmp_path / "model.pth"
    save(TEXT, pth)
    cache, stages = tmp_path / "cache", []

    def progress(stage: str, done: int, total: int) -> None:
        stages.append(stage)

    folder = transformer_folder(pth, cache=cache, progress=progress)
    assert folder.parent == cache and folder.name.startswith("model-diffusers-") and stages
    stages.clear()
    assert transformer_folder(pth, cache=cache, progress=progress) == folder
    assert not stages, "used again"
    save(TEXT, pth, seed=5)
    os.utime(pth, ns=(1, 1))
    transformer_folder(pth, cache=cache, progress=progress)
    assert stages, "another file is converted again"
    weights = WanTransformer3DModel.from_pretrained(folder).proj_out.weight
    assert torch.equal(weights, torch.load(pth, weights_only=True)["head.head.weight"])
    assert transformer_folder(folder) == folder
    assert transformer_folder(pth) == tmp_path / "model-diffusers", "beside it"
    (tmp_path / "other").mkdir()
    save(TEXT, tmp_path / "other" / "model.pth")
    assert transformer_folder(tmp_path / "other" / "model.pth", cache=cache) != folder


def test_a_folder_of_another_converter_is_converted_again(tmp_path, monkeypatch) -> None:
    """One that wrote another format, or none yet."""
    pth = tmp_path / "model.pth"
    save(TEXT, pth)
    folder = transformer_folder(pth)
    config = folder / "config.json"

    def converted() -> bool:
        stages: list[str] = []
        transformer_folder(pth, progress=lambda stage, *_: stages.append(stage))
        return bool(stages)

    assert not converted()
    monkeypatch.setattr(models, "FORMAT", models.FORMAT + 1)
    assert converted() and not converted()
    entries = json.loads(config.read_text())
    del entries["_turbo_rcm_source"]["format"]
    config.write_text(json.dumps(entries))
    assert converted() and not converted()


def test_two_processes_may_convert_at_once(tmp_path, monkeypatch) -> None:
    """Who is second takes what the first has written meanwhile."""
    pth = tmp_path / "model.pth"
    save(TEXT, pth)
    convert = models.convert_transformer

    def second(*args: Any, **kwargs: Any) -> Any:
        convert(*args, **kwargs)
        return convert(*args, **kwargs)

    monkeypatch.setattr(models, "convert_transformer", second)
    assert transformer_folder(pth) == tmp_path / "model-diffusers"


def test_a_folder_that_is_something_else_is_not_replaced(tmp_path, text_pth) -> None:
    pth, other = tmp_path / "model.pth", tmp_path / "model-diffusers"
    pth.symlink_to(text_pth)
    other.mkdir()
    (other / "config.json").write_text("{}")
    with pytest.raises(OutputExistsError, match="already exists"):
        transformer_folder(pth)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputExistsError, match="--cache"):
        transformer_folder(text_pth, cache=tmp_path / "file")
    for missing in (tmp_path / "none.pth", tmp_path):
        with pytest.raises(CheckpointError, match=r"a \.pth of TurboDiffusion, or a folder that"):
            transformer_folder(missing)
    assert (other / "config.json").read_text() == "{}"


def test_a_whole_pipeline_is_its_own_base(text_pth, tmp_path, micro_folder) -> None:
    """As `convert --base` writes it, given as --dit_path alone."""
    whole = tmp_path / "whole"
    whole.mkdir()
    for path in micro_folder.iterdir():
        (whole / path.name).symlink_to(path)
    (whole / "transformer").unlink()
    (whole / "transformer").symlink_to(transformer_folder(text_pth))
    out = tmp_path / "video.mp4"
    arguments = ["--dit_path", str(whole), "--save_path", str(out), *SMALL, "--num_steps", "1"]
    main_of("turbowan_t2v.py")([*arguments, "--prompt", PROMPT])
    assert movie(out)[0] == 5


def test_of_a_whole_pipeline_each_expert_is_found(
    expert_pths, image_base, picture, tmp_path, decoded
) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    for path in image_base.iterdir():
        (whole / path.name).symlink_to(path)
    for part, path in zip(("transformer", "transformer_2"), expert_pths, strict=True):
        (whole / part).unlink()
        (whole / part).symlink_to(transformer_folder(path))
    for paths in ([whole, whole], expert_pths):
        image_to_video(paths, image_base, picture, tmp_path / "video.mp4", *EXACT)
    assert torch.equal(decoded[0], decoded[1])


def test_both_experts_are_looked_for_before_one_is_converted(tmp_path) -> None:
    save(TEXT, tmp_path / "high.pth")
    with pytest.raises(CheckpointError, match=r"no such file or folder: .*low\.pth"):
        transformer_folders([tmp_path / "high.pth", tmp_path / "low.pth"])
    assert [path.name for path in tmp_path.iterdir()] == ["high.pth"]
    save(TEXT, tmp_path / "low.pth")
    seen: list[tuple[str, int, int]] = []
    transformer_folders(
        [tmp_path / "high.pth", tmp_path / "low.pth"], progress=lambda *now: seen.append(now)
    )
    assert {stage for stage, _, _ in seen} == {"transformer", "transformer_2"}
    assert seen[-1][1] == seen[-1][2] == 7, "MiB"


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


@pytest.mark.parametrize("int8", [False, True])
def test_int8_weights_take_memory_where_they_run(
    tmp_path, micro_folder, int8, monkeypatch
) -> None:
    pth = tmp_path / "model.pth"
    save(Options(text=32, sla=True, quant=True), pth)
    held: list[int] = []
    patch = patching.patch_model

    def counting(pipe: Any, config: Any) -> Any:
        modules = pipe.transformer.modules()
        held.append(sum(attached_int8(one) is not None for one in modules))
        return patch(pipe, config)

    monkeypatch.setattr("turbo_rcm_patch.patch_model", counting)
    more = ["--num_steps", "1"] + ["--quant_linear"] * int8
    text_to_video(pth, micro_folder, tmp_path / "video.mp4", *more)
    assert (held[0] > 0) == int8


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

    monkeypatch.setattr(video.subprocess, "run", interrupted)
    out = tmp_path / "out" / "video.mp4"
    with pytest.raises(KeyboardInterrupt):
        text_to_video(text_pth, micro_folder, out, "--num_steps", "1")
    assert not list(out.parent.iterdir())


@pytest.mark.parametrize("example", ["t2v", "i2v"])
def test_a_served_model_outlives_a_failure(
    example,
    text_pth,
    expert_pths,
    micro_folder,
    image_base,
    picture,
    tmp_path,
    monkeypatch,
    capsys,
) -> None:  # fmt: skip
    decode, calls = AutoencoderKLWan.decode, itertools.count()

    def full(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 0:
            raise torch.OutOfMemoryError("no memory")
        return decode(*args, **kwargs)

    monkeypatch.setattr(AutoencoderKLWan, "decode", full)
    monkeypatch.setattr(sys, "stdin", io.StringIO("a blue ring\n"))
    more, out = ("--serve", "--num_steps", "1"), tmp_path / "video.mp4"
    if example == "t2v":
        code = text_to_video(text_pth, micro_folder, out, *more)
    else:
        code = image_to_video(expert_pths, image_base, picture, out, *more)
    assert code == 2 and "--offload model" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["video-001.mp4"]


def test_the_other_example_is_named(text_pth, expert_pths, micro_folder, image_base, tmp_path,
                                    picture) -> None:  # fmt: skip
    with pytest.raises(CheckpointError, match=r"turbowan_i2v\.py"):
        text_to_video(expert_pths[0], micro_folder, tmp_path / "video.mp4")
    with pytest.raises(CheckpointError, match=r"turbowan_t2v\.py"):
        image_to_video([text_pth] * 2, image_base, picture, tmp_path / "video.mp4")
