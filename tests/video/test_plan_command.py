"""`plan` writes what the guard decides on the hardest prompt, and `generate --plan` runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.video.conftest import undrawn
from tests.video.micro import QUICK
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.patching.guard_log import GuardLog
from turbo_rcm_patch.patching.plan import Plan
from turbo_rcm_patch.video.video import read_frames

_TWO = ["--prompt", "a red circle", "--prompt", "a blue square"]


def _make_exact(plan: Path) -> None:
    held = json.loads(plan.read_text())
    for block in held["networks"]["transformer"]["blocks"].values():
        block["level"] = "exact"
    plan.write_text(json.dumps(held))


def test_a_plan_is_made_once_and_run_by_every_process(
    micro_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", str(micro_folder), *QUICK, "--steps", "1"]
    file = tmp_path / "plans" / "micro.json"
    options = ["--linear", "int8", "--no-vae"]
    assert main(["plan", *model, *_TWO, *options, "--out", str(file)]) == 0
    printed = capsys.readouterr().out
    plan = Plan.load(file)
    assert str(plan) in printed and printed.endswith(f"{file}\n")
    assert plan.config.linear == "int8" and [*plan.networks] == ["transformer"]

    made = {}
    for name, prompts in (("both", _TWO), ("one", _TWO[2:])):
        seed = ["--seed", "1"] if name == "one" else []
        out = tmp_path / name
        command = ["generate", *model, *prompts, *seed, "--plan", str(file), "--out", str(out)]
        assert main(command) == 0
        (video,) = out.glob("*blue*.mp4")
        made[name] = read_frames(video)
        assert json.loads(video.with_suffix(".json").read_text())["plan"] == str(plan)
        out_text = capsys.readouterr().out
        assert "Linears in int8" in out_text and "the VAE (AutoencoderKLWan) is not" in out_text
    assert all((a == b).all() for a, b in zip(*made.values(), strict=True))
    # Another plan is another video.
    held = json.loads(file.read_text())
    held["networks"]["transformer"]["blocks"]["blocks.0"]["level"] = "original"
    file.write_text(json.dumps(held))
    assert main([*command, "--resume"]) == 2
    assert "Choose another --out" in capsys.readouterr().err


def test_a_plan_goes_on_after_the_prompts_that_it_was_made_of(
    micro_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Each prompt is measured on both forwards of its first, middle and last step. A resumed plan
    is one of the same prompts, model and settings."""
    asked: list[int] = []
    own = GuardLog.check_next
    monkeypatch.setattr(GuardLog, "check_next", lambda log: (asked.append(1), own(log)))
    model = ["plan", "--model", str(micro_folder), *QUICK, "--steps", "4", "--no-vae"]
    whole, parts = tmp_path / "whole.json", tmp_path / "parts.json"
    assert main([*model, *_TWO, "--out", str(whole)]) == 0 and len(asked) == 12
    assert main([*model, *_TWO[:2], "--out", str(parts)]) == 0 and len(asked) == 18
    assert main([*model, *_TWO, "--out", str(parts), "--resume"]) == 0 and len(asked) == 24
    plans = [Plan.load(path) for path in (whole, parts)]
    assert plans[0] == plans[1]
    assert main([*model, *_TWO, "--out", str(parts), "--resume"]) == 0 and len(asked) == 24
    before = parts.read_bytes()
    for other in (_TWO[2:], [*_TWO, "--steps", "2"], [*_TWO, "--seed", "1"]):
        assert main([*model, *other, "--out", str(parts), "--resume"]) == 2
        assert "first of these prompts" in capsys.readouterr().err
    (tmp_path / "prompts.txt").write_text("a red circle")
    named = ["--prompts", str(tmp_path / "prompts.txt")]
    assert main([*model, *named, "--out", named[1]]) == 2, "no other file is replaced"
    whole.write_text('{"plan": 1}')
    assert main([*model, *named, "--out", str(whole)]) == 0, "but one of another release"
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    assert main([*model, *_TWO, "--out", str(parts)]) == 2
    assert "plan under torchrun" in capsys.readouterr().err and parts.read_bytes() == before


def test_the_plan_of_a_folder_of_videos_lies_beside_them(
    micro_folder: Path, tmp_path: Path, capsys
) -> None:
    """Videos of other settings have their own."""
    command = ["generate", "--model", str(micro_folder), *QUICK, "--steps", "1", "--no-vae"]
    command += ["--out", str(tmp_path / "out")]
    assert main([*command, *_TWO]) == 0
    (file,) = (tmp_path / "out").glob("plan-*.json")
    _make_exact(file)
    (video,) = file.parent.glob("*blue*.mp4")
    video.unlink()
    resumed, other = [*_TWO, "--resume"], ["--prompt", "a ring"]
    for more, exact in (
        (resumed, True),
        (other, True),
        (["--steps", "2", *_TWO[:1], "an oval"], False),
    ):
        capsys.readouterr()
        assert main([*command, *more]) == 0 and video.is_file()
        assert ("fused with exact attention" in capsys.readouterr().out) == exact
    assert len([*file.parent.glob("plan-*.json")]) == 2
    file.write_text("{")
    assert main([*command, "--prompt", "a cross"]) == 2 and file.name in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--plan", "none.json"], "none.json"),
        (["--plan", "PLAN", "--no-patch"], "--no-patch"),
        (["--plan", "PLAN", "--linear", "int8"], "linear='int8'"),
    ],
)
def test_a_plan_that_does_not_fit_is_told(
    options: list[str], says: str, micro_folder: Path, tmp_path: Path, capsys
) -> None:
    model = ["--model", str(micro_folder), *QUICK, "--steps", "1", "--prompt", "a red circle"]
    file = tmp_path / "plan.json"
    assert main(["plan", *model, "--out", str(file)]) == 0
    options = [str(file) if option == "PLAN" else option for option in options]
    assert main(["generate", *model, *options, "--out", str(tmp_path / "out")]) == 2
    assert says in capsys.readouterr().err
    assert main(["plan", *model, "--no-guard", "--out", str(tmp_path / "none.json")]) == 2
    assert "no plan" in capsys.readouterr().err and not (tmp_path / "none.json").exists()


def test_a_comparison_judges_a_plan(micro_folder: Path, tmp_path: Path, capsys) -> None:
    model = ["--model", str(micro_folder), *QUICK, "--steps", "1", "--prompt", "a red circle"]
    file, out = tmp_path / "plan.json", tmp_path / "out"
    assert main(["plan", *model, "--no-vae", "--out", str(file)]) == 0
    with undrawn():
        assert main(["compare", *model, "--plan", str(file), "--out", str(out)]) != 2
        held = json.loads((out / "metrics.json").read_text())
        assert held["identity"]["plan"] == str(Plan.load(file))
        kept = out / "runs" / "plan_of_videos.json"
        assert Plan.load(kept) == Plan.load(file)
        compared = [each for each in held["patch"]["guard"] if "blocks" in each["path"]]
        assert {each["when"] for each in compared} == {"last"}, "no first forward"
        assert any("the VAE" in note for note in held["patch"]["notes"])
        _make_exact(kept)
        more = ["--prompt", "a blue square", "--plan", str(file), "--out", str(out)]
        assert main(["compare", *model, *more]) != 2
        ran = json.loads((out / "metrics.json").read_text())["ran"]
        assert ran["share_as_asked"] == 1, "the plan that is given decides"
        backend = ["--attention-backend", "native", "--out", str(tmp_path / "other")]
        assert main(["compare", *model, "--plan", str(file), *backend]) == 2
    assert "got:      vae, plan" in capsys.readouterr().err


def test_a_comparison_goes_on_by_the_plan_of_its_videos(
    micro_folder: Path, tmp_path: Path
) -> None:
    """A new start decides anew."""
    out, shares = tmp_path / "out", []
    command = ["compare", "--model", str(micro_folder), *QUICK, "--steps", "1", "--no-vae"]
    command += ["--no-network-number", "--out", str(out)]
    with undrawn():
        for options in (_TWO[:2], _TWO, [*_TWO, "--fresh"]):
            assert main([*command, *options]) != 2
            shares += [json.loads((out / "metrics.json").read_text())["ran"]["share_as_asked"]]
            _make_exact(out / "runs" / "plan_of_videos.json")
    assert shares == [1, 0.5, 1], "the second of two videos ran exactly"
