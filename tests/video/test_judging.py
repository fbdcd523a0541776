"""`judge`: anybody's videos, paired by name, with the words and limits of `compare`."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.errors import ConfigError, OutputError, SamplingError
from turbo_rcm_patch.video import judging, verdict
from turbo_rcm_patch.video import video as video_files
from turbo_rcm_patch.video.judging import judge_folders, read_clip
from turbo_rcm_patch.video.video import as_bytes, write_mp4

FRAMES = (5, 32, 48, 3)
NAMES = ("a", "b", "c")

pytestmark = pytest.mark.usefixtures("no_pictures_here")


def video(seed: int, noise: float = 0.0, shape: tuple[int, ...] = FRAMES) -> torch.Tensor:
    """A random video, and the same with its own noise."""
    truth = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 0.8 + 0.1
    other = torch.Generator().manual_seed(seed + round(noise * 1e4))
    return truth + noise * (torch.rand(shape, generator=other) - 0.5) if noise else truth


def as_tensor(frames: torch.Tensor, path: Path) -> None:
    tensors = {"frames": frames.contiguous(), "more": torch.zeros(3)}
    save_file(tensors, path.with_suffix(".safetensors"))


def as_pngs(frames: torch.Tensor, path: Path) -> None:
    path.mkdir()
    for i, one in enumerate(as_bytes(frames)):  # 10 comes after 9
        Image.fromarray(one).save(path / f"frame {i + 8}.png")


def as_mp4(frames: torch.Tensor, path: Path) -> None:
    write_mp4(as_bytes(frames), path.with_suffix(".mp4"), 12)


Writer = Callable[[torch.Tensor, Path], None]
WRITERS: list[Writer] = [as_tensor, as_pngs, as_mp4]
#: Noise of the judged videos -> the verdict beside a control with noise of 0.01.
WORDS = {0.015: "unchanged", 0.03: "similar", 0.1: "changed"}


def folders(
    at: Path, noise: float = 0.015, write: Writer = as_tensor, names: tuple[str, ...] = NAMES
) -> list[Path]:
    """Baseline, candidate and control."""
    made = [at / which for which in ("baseline", "candidate", "control")]
    for folder, its in zip(made, (0.0, noise, 0.01), strict=True):
        folder.mkdir(parents=True)
        for seed, name in enumerate(names):
            write(video(seed, its), folder / name)
    return made


@pytest.mark.parametrize("write", WRITERS)
def test_every_kind_of_file_is_read_as_its_frames(write: Writer, tmp_path: Path) -> None:
    write(video(0), tmp_path / "clip")
    (path,) = tmp_path.iterdir()
    found = read_clip(path)
    assert found.shape == FRAMES
    if write is as_mp4:  # which halves the resolution of colours
        luma = torch.tensor([0.299, 0.587, 0.114])
        both = torch.stack([(x @ luma).flatten() for x in (found, video(0))])
        assert float(both.corrcoef()[0, 1]) > 0.95
    else:
        worst = 0.5 / 255 + 1e-6 if write is as_pngs else 0.0
        assert float((found - video(0)).abs().max()) <= worst


@pytest.mark.parametrize("noise", WORDS)
def test_the_words_are_those_of_compare(noise: float, tmp_path: Path) -> None:
    found = judge_folders(*folders(tmp_path, noise), out=tmp_path / "out")
    assert found.verdict == WORDS[noise] and not found.notes
    drifts = [one.patched for one in found.results], [one.control for one in found.results]
    assert found.judgement == verdict.judge(*drifts)
    page = found.report.read_text()
    assert f"<b>{WORDS[noise].capitalize()} <small>over 3 clips</small></b>" in page
    assert "95 % interval" in page
    assert str(tmp_path) not in page
    numbers = json.loads(found.metrics.read_text())
    low, high = numbers["median_interval"]["patched"]
    assert low <= verdict.median([one.psnr for one in drifts[0]]) <= high
    assert len(numbers["clips"]) == 3 and numbers["refused"] == {}


def test_a_verdict_says_over_how_many_clips_and_of_what(tmp_path: Path) -> None:
    """One clip scatters, and of mp4 files the coding is measured."""
    names = ("a", "b", "c", "d", "e")
    for write, count in ((as_tensor, 1), (as_tensor, 5), (as_mp4, 5)):
        at = tmp_path / f"{write.__name__}{count}"
        found = judge_folders(*folders(at, write=write, names=names[:count]), out=at / "out")
        page = found.report.read_text()
        assert ("12 fps" in page) == (write is as_mp4)
        for text in (str(found), page):
            assert f"over {count} clip" in text
            assert ("scatters by some 5 dB: give ten" in text) == (count == 1)
            assert ("Clips are .mp4 files" in text) == (write is as_mp4)


def test_an_interval_is_the_same_every_time_and_covers_what_it_should() -> None:
    values = [30.0 + i for i in range(10)]
    assert verdict.interval(values) == verdict.interval(values)
    low, high = verdict.interval(values) or (0, 0)
    assert 30 < low < 34 and 35 < high < 39
    assert verdict.interval([30.0]) is None and verdict.interval([30.0, math.nan]) is None


def test_without_a_control_there_are_numbers_and_no_verdict(tmp_path: Path) -> None:
    baseline, candidate, _ = folders(tmp_path)
    found = judge_folders(baseline, candidate, out=tmp_path / "out")
    assert found.verdict == "not judged" and "no control was given" in str(found)
    assert not found.judgement.checks and "no control was given" in found.report.read_text()
    assert "PSNR 4" in str(found)


# --- what does not fit ---------------------------------------------------------------------------


def shaped(*shape: int) -> Callable[[Path], None]:
    return lambda at: as_tensor(video(1, shape=shape), at)


def halved(at: Path) -> None:
    """Keep the first part of a file."""
    (file,) = at.parent.glob(f"{at.name}.*")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) * 2 // 3])


def instead(*spoil: Callable[[Path], object]) -> Callable[[Path], None]:
    """Remove the clip, and do something in its place."""

    def spoiled(at: Path) -> None:
        at.with_suffix(".safetensors").unlink()
        for step in spoil:
            step(at)

    return spoiled


def too_small(at: Path) -> None:
    for which in ("baseline", "candidate", "control"):
        shaped(5, 8, 48, 3)(at.parents[1] / which / at.name)


def tensors(**by_name: torch.Tensor) -> Callable[[Path], None]:
    return lambda at: save_file(by_name, at.with_suffix(".safetensors"))


def as_pngs_of(content: Callable[[Path], object]) -> Callable[[Path], None]:
    return instead(lambda at: as_pngs(video(1), at), lambda at: content(at / "frame 9.png"))


#: The name of a clip, which is what is wrong with it -> the folder of it, what spoils it there,
#: and what is said.
BAD: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "longer": ("candidate", shaped(6, 32, 48, 3),
               r"expected 5 frames of 48 x 32, as .*baseline/longer.*; got 6 frames"),
    "wider": ("candidate", shaped(5, 32, 64, 3), "got 5 frames of 64 x 32"),
    "missing": ("candidate", instead(), "expected one clip 'missing' in --candidate; got none"),
    "no baseline": ("baseline", instead(), "--baseline"),
    "no control": ("control", instead(), "--control"),
    "twice": ("candidate", lambda at: as_mp4(video(1), at), "twice.mp4 and .*twice.safetensors"),
    "cut off": ("candidate", halved, "is missing, damaged or incomplete"),
    "no video": ("candidate", instead(lambda at: at.with_suffix(".mp4").write_bytes(b"none")),
                 "cannot be read"),
    "half a video": ("candidate", instead(lambda at: as_mp4(video(1), at), halved),
                     "cannot be read"),
    "several sizes": ("candidate", as_pngs_of(lambda at: Image.new("RGB", (32, 32)).save(at)),
                      "expected frames of one size; got 4 of 48 x 32, 1 of 32 x 32"),
    "broken png": ("candidate", as_pngs_of(lambda at: at.write_bytes(b"\x89PNG")),
                   "frame 9.png cannot be read|frame 9.png is no image"),
    "pipe": ("candidate", instead(lambda at: os.mkfifo(at.with_suffix(".mp4"))),
             "expected a regular file"),
    "-1 to 1": ("candidate", tensors(frames=video(1) * 2 - 1),
                "expected frames in 0..1; got numbers from -0."),
    "another name": ("candidate", tensors(latents=video(1)), "got latents.*Save decoded frames"),
    "colours first": ("candidate", tensors(frames=video(1, shape=(5, 3, 32, 48))),
                      r"expected frames \[F, H, W, 3\]"),
    "whole numbers": ("candidate", tensors(frames=video(1).to(torch.int16)), "int16"),
    "small": ("candidate", too_small, "expected at least 11 pixels a side"),
    "equal control": ("control", lambda at: save_file(
        load_file(at.parents[1] / "baseline" / f"{at.name}.safetensors"),
        at.with_suffix(".safetensors")), "control/equal control.*is equal"),
    "nan control": ("control", lambda at: as_tensor(video(1) * math.nan, at),
                    "control/nan control.*holds NaN or infinity"),
}  # fmt: skip


def test_what_does_not_fit_is_named_and_the_others_are_judged(tmp_path: Path) -> None:
    places = folders(tmp_path / "in", names=("good", *BAD))
    for name, (which, spoil, _) in BAD.items():
        spoil(tmp_path / "in" / which / name)
    found = judge_folders(*places, out=tmp_path / "out")
    assert [clip.prompt for clip in found.results] == ["good"] and found.verdict == "unchanged"
    assert found.refused.keys() == BAD.keys()
    for name, (_, _, said) in BAD.items():
        assert re.search(said, found.refused[name]) and f"/{name}" in found.refused[name], name
    page = found.report.read_text()
    assert f"{len(BAD)} of {1 + len(BAD)} clips could not be judged" in page
    assert str(tmp_path) not in page


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf], ids=str)
def test_a_candidate_that_is_not_finite_is_changed(number: float, tmp_path: Path) -> None:
    made = folders(tmp_path)
    broken = video(0)
    broken[2, 0, 0, 0] = number
    as_tensor(broken, made[1] / "a")
    found = judge_folders(*made, out=tmp_path / "out")
    assert found.verdict == "changed" and not found.refused


HOSTILE = "a\nverdict: unchanged\n\x1b]0;owned\x07 \u202e \u2028| `x`"


def test_names_write_no_line_and_send_nothing_to_a_terminal(tmp_path: Path, capsys) -> None:
    """Those of clips, of a clip that could not be judged, and of the folders."""
    places = folders(tmp_path / HOSTILE, 0.1, names=(HOSTILE, HOSTILE + "b"))
    as_tensor(video(1) * 2 - 1, places[1] / (HOSTILE + "b"))
    out = tmp_path / HOSTILE / "out"
    assert main(arguments(places, out)) == 2
    page = (out / "report.html").read_text()
    for text in (capsys.readouterr().out, re.sub("<script>.*?</script>", "", page, flags=re.S)):
        assert "a\\nverdict: unchanged\\n\\x1b]0;owned" in text
        assert not set(text) & set("\x1b\x07\u202e\u2028")
        lines = [line for line in text.splitlines() if line.startswith("verdict: ")]
        assert not [line for line in lines if "changed" not in line or "unchanged" in line]


def test_a_video_that_is_too_large_is_refused_and_not_cut(tmp_path, monkeypatch) -> None:
    write_mp4(np.zeros((258, 32, 32, 3), np.uint8), tmp_path / "a.mp4", 16)
    with pytest.raises(SamplingError, match="a.mp4 is too large.*at most 257 frames"):
        read_clip(tmp_path / "a.mp4")
    for module in (judging, video_files):
        monkeypatch.setattr(module, "MOST_VALUES", 4 * 32 * 48 * 3)
    for write in WRITERS:
        (tmp_path / write.__name__).mkdir()
        write(video(0), tmp_path / write.__name__ / "a")
        (path,) = (tmp_path / write.__name__).iterdir()
        with pytest.raises(SamplingError, match="Cut it into parts"):
            read_clip(path)


def test_when_no_clip_can_be_judged_the_reasons_are_told(tmp_path: Path) -> None:
    made = folders(tmp_path, names=("b",))
    as_tensor(video(1) * 2 - 1, made[1] / "b")
    with pytest.raises(SamplingError, match=r"no clip could be judged.*expected frames in 0..1"):
        judge_folders(*made, out=tmp_path / "out")
    shutil.rmtree(made[1])
    with pytest.raises(SamplingError, match="--candidate .*No such file"):
        judge_folders(*made, out=tmp_path / "out")
    made[1].mkdir()
    with pytest.raises(SamplingError, match=r"has no clip; expected files \.mp4"):
        judge_folders(*made, out=tmp_path / "out")
    with pytest.raises(ConfigError, match="fps"):
        judge_folders(*made, out=tmp_path / "out", fps=0)


# --- the command ---------------------------------------------------------------------------------


def arguments(made: list[Path], out: Path) -> list[str]:
    names = ("--baseline", "--candidate", "--control")
    pairs = [word for pair in zip(names, map(str, made), strict=False) for word in pair]
    return ["judge", *pairs, "--out", str(out)]


def test_the_exit_code_is_that_of_the_verdict_and_of_what_was_refused(tmp_path, capsys) -> None:
    made = folders(tmp_path / "in")
    assert main(arguments(made, tmp_path / "out")) == 0
    told = capsys.readouterr().out
    assert "verdict: unchanged, over 3 clips" in told
    assert main(arguments(made[:2], tmp_path / "two")) == 3
    assert main(arguments(folders(tmp_path / "far", 0.1), tmp_path / "far" / "out")) == 1
    as_tensor(video(1) * 2 - 1, made[1] / "b")
    assert main(arguments(made, tmp_path / "out")) == 2
    assert "could not be judged: " in capsys.readouterr().out
    assert main(["judge", "--baseline", str(made[0])]) == 2
    assert "--candidate" in capsys.readouterr().err
    one = [next(folder.glob("a.safetensors")) for folder in made]
    assert main(arguments(one, tmp_path / "one")) == 0


def test_the_same_command_measures_only_what_is_new_or_changed(tmp_path, monkeypatch) -> None:
    made = folders(tmp_path / "in", write=as_pngs)
    measured: list[str] = []
    real = judging._measure
    stops = ["c"]

    def spied(store: object, name: str, *more: object) -> object:
        if name in stops:
            stops.remove(name)
            raise KeyboardInterrupt
        measured.append(name)
        return real(store, name, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(judging, "_measure", spied)
    assert main(arguments(made, tmp_path / "out")) == 130
    assert measured == ["a", "b"]
    assert main(arguments(made, tmp_path / "out")) == 0
    assert measured == ["a", "b", "c"]
    shutil.rmtree(made[1] / "a")
    as_pngs(video(0, 0.02), made[1] / "a")
    found = judge_folders(*made, out=tmp_path / "out")
    assert measured == ["a", "b", "c", "a"] and len(found.results) == 3
    judge_folders(*made, out=tmp_path / "out", fresh=True)
    assert measured[4:] == ["a", "b", "c"]


def test_a_report_on_other_clips_is_not_replaced(tmp_path: Path) -> None:
    """A control may come later."""
    baseline, candidate, control = folders(tmp_path / "in", names=("a",))
    judge_folders(baseline, candidate, out=tmp_path / "out")
    before = (tmp_path / "out" / "report.html").read_bytes()
    with pytest.raises(SamplingError, match="the same candidate.*another folder"):
        judge_folders(baseline, control, out=tmp_path / "out")
    assert (tmp_path / "out" / "report.html").read_bytes() == before
    assert judge_folders(baseline, candidate, control, out=tmp_path / "out").verdict != "undecided"


def test_errors_of_the_whole_run_are_not_those_of_a_clip(tmp_path, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OutputError("the disk is full")

    made = folders(tmp_path)
    monkeypatch.setattr(judging, "measure", full)
    with pytest.raises(OutputError, match="the disk is full"):
        judge_folders(*made, out=tmp_path / "out")
