"""Many videos by many processes: who makes which, what is kept, and what a bad prompt costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sampling.test_cli import QUICK
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.errors import ConfigError
from turbo_rcm_patch.sampling import Source, generation
from turbo_rcm_patch.sampling.many import Ranks, ranks_here

PROMPTS = ("a red circle", "a blue square", "a green ring")


def listing(folder: Path) -> Path:
    path = folder / "prompts.txt"
    path.write_text("\n".join(PROMPTS), encoding="utf-8")
    return path


@pytest.fixture
def command(micro_folder: Path, tmp_path: Path) -> list[str]:
    out = ["--prompts", str(listing(tmp_path)), "--out", str(tmp_path / "out")]
    return ["generate", "--model", str(micro_folder), *QUICK, *out]


def test_prompts_are_dealt_out_and_none_is_made_twice() -> None:
    work = list(range(11))
    shares = [Ranks(rank, 4, rank).share(work) for rank in range(4)]
    assert sorted(sum(shares, [])) == work
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert Ranks().share(work) == work


@pytest.mark.parametrize(
    "given",
    [
        {"WORLD_SIZE": "2"},
        {"WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0"},
        {"WORLD_SIZE": "two", "RANK": "0", "LOCAL_RANK": "0"},
        {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "1"},
        {"WORLD_SIZE": "2", "RANK": "-1", "LOCAL_RANK": "-1"},
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="torchrun"):
        ranks_here(given)


def test_the_environment_of_torchrun() -> None:
    assert ranks_here({}) == Ranks(0, 1, 0)
    given = {"WORLD_SIZE": "16", "RANK": "11", "LOCAL_RANK": "3"}
    assert ranks_here(given) == Ranks(11, 16, 3)
    assert Ranks(11, 16, 3).device("cpu") == "cpu"


def test_a_prompt_that_fails_costs_one_video_and_resume_makes_only_that(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real, made = generation.generate, []

    def fails(pipe: Any, source: Source, **options: Any) -> Any:
        if source.prompt == PROMPTS[1]:
            raise ValueError("no such colour")
        return real(pipe, source, **options)

    def counts(pipe: Any, source: Source, **options: Any) -> Any:
        made.append((source.prompt, options["seed"]))
        return real(pipe, source, **options)

    monkeypatch.setattr(generation, "generate", fails)
    assert main(command) == 2
    screen = capsys.readouterr().err
    assert "1 of 3 prompts failed" in screen and "no such colour" in screen
    assert "--resume" in screen and "Traceback" not in screen
    videos = tmp_path / "out"
    before = {path: path.read_bytes() for path in videos.glob("*.mp4")}
    assert len(before) == 2
    monkeypatch.setattr(generation, "generate", counts)
    assert main([*command, "--resume"]) == 0
    assert made == [(PROMPTS[1], 1)], "its own seed, whatever was there"
    assert len(list(videos.glob("*.mp4"))) == 3
    assert all(path.read_bytes() == bytes_ for path, bytes_ in before.items())


def test_what_was_made_otherwise_is_made_again(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, made = generation.generate, []

    def counts(pipe: Any, source: Source, **options: Any) -> Any:
        made.append(source.prompt)
        return real(pipe, source, **options)

    monkeypatch.setattr(generation, "generate", counts)
    assert main([*command, "--resume"]) == 0
    assert main([*command, "--resume"]) == 0
    assert made == [*PROMPTS]
    assert main([*command, "--resume", "--attention", "exact"]) == 0
    assert made == [*PROMPTS, *PROMPTS]
    (tmp_path / "out").joinpath("x").mkdir()  # somebody else's folder changes nothing
    next((tmp_path / "out").glob("a-red*.mp4")).unlink()
    next((tmp_path / "out").glob("a-blue*.json")).write_text("{", encoding="utf-8")
    assert main([*command, "--resume", "--attention", "exact"]) == 0
    assert made == [*PROMPTS, *PROMPTS, *PROMPTS[:2]]
    note = json.loads(next((tmp_path / "out").glob("a-green*.json")).read_text(encoding="utf-8"))
    assert note["prompt"] == PROMPTS[2] and note["seed"] == 2
    assert note["patch"]["attention"] == "exact" and note["settings"]["steps"] == 2


def test_two_processes_share_the_prompts(command: list[str], tmp_path: Path) -> None:
    """Under torchrun, which ends all processes when one leaves with an error: the one whose
    prompt fails waits for the other."""
    (tmp_path / "prompts.txt").write_text(
        f"{PROMPTS[0]}\n{PROMPTS[1]}\n{PROMPTS[2]}", encoding="utf-8"
    )
    script = tmp_path / "run.py"
    script.write_text(
        "import sys, time\n"
        "from turbo_rcm_patch.__main__ import main\n"
        "from turbo_rcm_patch.sampling import generation\n"
        "real = generation.generate\n"
        "def generate(pipe, source, **options):\n"
        f"    if source.prompt == {PROMPTS[0]!r}:\n"
        "        raise ValueError('no such colour')\n"
        f"    if source.prompt == {PROMPTS[1]!r}:\n"
        "        time.sleep(4)\n"
        "    return real(pipe, source, **options)\n"
        "generation.generate = generate\n"
        "sys.exit(main(sys.argv[1:]))\n",
        encoding="utf-8",
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(script), *command],
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )  # fmt: skip
    assert done.returncode != 0 and "1 of 2 prompts failed" in done.stderr, done.stderr
    videos = sorted(path.name for path in (tmp_path / "out").glob("*.mp4"))
    assert len(videos) == 2, (videos, done.stderr)
    assert videos[0].startswith("a-blue") and videos[1].startswith("a-green")
