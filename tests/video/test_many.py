"""Many videos by many processes: who makes which, what is kept, and what a bad prompt costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import processes
from tests.ranks import on_ranks
from tests.video.micro import QUICK, micro_pipe, save
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.errors import ConfigError, SamplingError
from turbo_rcm_patch.patching.plan import Plan
from turbo_rcm_patch.video import generation
from turbo_rcm_patch.video.many import Processes

ROOT = Path(__file__).parents[2]
PROMPTS = ("a red circle", "a blue square", "a green ring")


def listing(folder: Path) -> Path:
    path = folder / "prompts.txt"
    path.write_text("\n".join(PROMPTS), encoding="utf-8")
    return path


@pytest.fixture
def command(micro_folder: Path, tmp_path: Path) -> list[str]:
    out = ["--prompts", str(listing(tmp_path)), "--out", str(tmp_path / "out")]
    return ["generate", "--model", str(micro_folder), *QUICK, *out]


def set_ranks(monkeypatch: pytest.MonkeyPatch, world: str, rank: str, local: str) -> None:
    for name, value in (("WORLD_SIZE", world), ("RANK", rank), ("LOCAL_RANK", local)):
        monkeypatch.setenv(name, value)


def test_the_environment_of_torchrun_says_who_this_is(monkeypatch) -> None:
    def here(*ranks: str) -> Processes:
        set_ranks(monkeypatch, *ranks)
        return Processes.here()

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert Processes.here() == Processes(0, 1, 0)
    assert here("16", "11", "3") == Processes(11, 16, 3)
    for wrong in (("2", "2", "0"), ("two", "0", "0"), ("2", "0", "1"), ("2", "-1", "-1")):
        with pytest.raises(ConfigError, match="torchrun"):
            here(*wrong)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    devices = {None: "cuda:1", "cuda": "cuda:1", "cuda:0": "cuda:0", "cpu": "cpu"}
    for given, device in devices.items():
        assert Processes(3, 4, 1).device(given) == device and Processes().device(given) == given
    with pytest.raises(ConfigError, match="at most 2 processes, one for each GPU"):
        Processes(3, 4, 2).device("cuda")


def test_an_address_that_is_missing_is_told(command: list[str], monkeypatch, capsys) -> None:
    set_ranks(monkeypatch, "2", "0", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "MASTER_ADDR" in error and "torchrun" in error


def test_a_prompt_that_fails_costs_one_video_and_resume_makes_only_that(
    command: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    generate, asked = generation.generate, []

    def fails_once(pipe: Any, prompt: str, **options: Any) -> Any:
        asked.append((prompt, options["seed"]))
        if len(asked) == 2:
            raise ValueError("no such colour")
        return generate(pipe, prompt, **options)

    monkeypatch.setattr(generation, "generate", fails_once)
    assert main(command) == 2
    screen = capsys.readouterr().err
    assert "1 of 3 prompts failed" in screen and "no such colour" in screen
    assert "--resume" in screen and "Traceback" not in screen
    videos = tmp_path / "out"
    before = {path: path.read_bytes() for path in videos.glob("*.mp4")}
    assert len(before) == 2
    assert main([*command, "--resume"]) == 0
    assert asked[3:] == [(PROMPTS[1], 1)], "its own seed, whatever was there"
    assert len(list(videos.glob("*.mp4"))) == 3
    assert all(path.read_bytes() == bytes_ for path, bytes_ in before.items())


def exchanging(rank: int) -> None:
    """Tell each other things, in processes of a group."""
    made = []

    def make() -> str:
        made.append(rank)
        return f"of {rank}"

    def fails() -> str:
        raise ValueError(f"nothing on {rank}")

    both = Processes(rank, 2, rank)
    for _ in range(2):
        made.clear()
        with both.joined("cpu"):
            assert both.broadcast(make) == "of 0" and len(made) == (rank == 0)
            with pytest.raises(SamplingError if rank else ValueError, match="nothing on 0"):
                both.broadcast(fails)
        assert both.broadcast(make) == f"of {rank}", "on its own again"


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
def test_the_first_process_tells_the_others() -> None:
    on_ranks(2, exchanging)


#: `generate` in one of two processes: seed 0 fails, and the seed in WAITS waits until a video of
#: another prompt is made. Each tells by which levels it runs from the first call on.
SCRIPT = """
import os, sys, time
from pathlib import Path
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.patching import patch
from turbo_rcm_patch.video import generation
made = Path(os.environ["MADE"])
def note(what):
    with made.open("a") as file:
        file.write(f"{os.environ['RANK']} {what}\\n")
def faulty(*given, seed, **options):
    if seed == 0:
        raise ValueError("no such colour")
    waits, prompt = os.environ["WAITS"].split()
    until = time.monotonic() + 30
    while seed == int(waits) and not list(made.parent.glob(f"out/{prompt}*.mp4")):
        assert time.monotonic() < until
        time.sleep(0.02)
    time.sleep(seed == int(waits))
    note(seed)
    return generate(*given, seed=seed, **options)
def by_plan(given, records):
    apply(given, records)
    note(f"by {[int(block.level) for block in records[0].blocks]}")
apply, patch.apply = patch.apply, by_plan
generate, generation.generate = generation.generate, faulty
code = main(sys.argv[1:])
note("ends")
sys.exit(code)
"""


def test_two_processes_share_the_prompts(command: list[str], tmp_path: Path) -> None:
    """The one whose prompt fails waits for the other, which a launcher would end. The other runs
    by what the first one's first video has decided.
    """
    path = tmp_path / "made.txt"
    given = {"MADE": str(path), "WAITS": "1 a-green"}
    with processes.pair(SCRIPT, *command, env=given, cwd=ROOT) as scripts:
        first, second = (script.wait() for script in scripts)
    assert first.code == 2 and "1 of 2 prompts failed" in first.err, first
    assert second.code == 0, second
    lines = path.read_text(encoding="utf-8").splitlines()
    (kept,) = (tmp_path / "out").glob("plan-*.json")
    kept = Plan.load(kept).networks["transformer"]
    levels = [int(block.level) for block in kept.blocks.values()]
    lines.remove(f"1 by {levels}")
    assert lines[:2] == ["0 2", "1 1"] and sorted(lines[2:]) == ["0 ends", "1 ends"]
    videos = sorted((tmp_path / "out").glob("*.mp4"))
    assert [video.name.split("-")[1] for video in videos] == ["blue", "green"]


def test_no_process_waits_longer_than_for_the_first_video(tmp_path: Path) -> None:
    """Which leaves the plan open where an expert did not run."""
    model = save(micro_pipe(experts=True), tmp_path / "model")
    command = ["generate", "--model", str(model), *QUICK, "--steps", "1", "--seed", "5"]
    command += ["--prompts", str(listing(tmp_path)), "--out", str(tmp_path / "out")]
    given = {"MADE": str(tmp_path / "made"), "WAITS": "7 a-blue"}
    with processes.pair(SCRIPT, *command, env=given, cwd=ROOT) as pair:
        assert [script.wait().code for script in pair] == [0, 0]


def test_a_process_without_a_prompt_ends_with_the_others(micro_folder, tmp_path: Path) -> None:
    command = ["generate", "--model", str(micro_folder), *QUICK, "--prompt", "a red circle"]
    command += ["--seed", "5", "--out", str(tmp_path / "out")]
    given = {"MADE": str(tmp_path / "made"), "WAITS": "-1 none"}
    with processes.pair(SCRIPT, *command, env=given, cwd=ROOT) as pair:
        first, second = (script.wait() for script in pair)
    assert (first.code, second.code) == (0, 0), (first, second)
    assert "no prompt is left" in second.out


def test_a_comparison_by_several_processes_is_refused(micro_folder, tmp_path, capsys, monkeypatch):
    set_ranks(monkeypatch, "2", "0", "0")
    command = ["compare", "--model", str(micro_folder), *QUICK, "--prompt", "a"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "`generate` under torchrun" in error and "`judge`" in error
    assert not (tmp_path / "out").exists()
