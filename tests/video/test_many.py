"""Many videos by many processes: who makes which, what is kept, and what a bad prompt costs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import processes
from tests.ranks import on_ranks
from tests.video.micro import QUICK
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.errors import ConfigError, SamplingError
from turbo_rcm_patch.video import generation
from turbo_rcm_patch.video.many import Processes, Ranks, ranks_here

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
    shares = [Processes(Ranks(rank, 8, rank)).share(work) for rank in range(8)]
    assert sorted(sum(shares, [])) == work
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert Processes().share(work) == work


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


@pytest.mark.parametrize(
    ("given", "device"),
    [(None, "cuda:1"), ("cuda", "cuda:1"), ("cuda:0", "cuda:0"), ("cpu", "cpu")],
)
def test_each_process_has_the_gpu_of_its_number(given, device, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert Ranks(3, 4, 1).device(given) == device
    assert Ranks().device(given) == given
    with pytest.raises(ConfigError, match="at most 2 processes, one for each GPU"):
        Ranks(3, 4, 2).device("cuda")


def test_an_address_that_is_missing_is_told(command: list[str], monkeypatch, capsys) -> None:
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "MASTER_ADDR" in error and "torchrun" in error


def test_a_prompt_that_fails_costs_one_video_and_resume_makes_only_that(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real, made = generation.generate, []

    def fails(pipe: Any, prompt: str, **options: Any) -> Any:
        if prompt == PROMPTS[1]:
            raise ValueError("no such colour")
        return real(pipe, prompt, **options)

    def counts(pipe: Any, prompt: str, **options: Any) -> Any:
        made.append((prompt, options["seed"]))
        return real(pipe, prompt, **options)

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


def exchanging(rank: int) -> None:
    """Tell each other things, in processes of a group."""
    made = []

    def make() -> str:
        made.append(rank)
        return f"of {rank}"

    def fails() -> str:
        raise ValueError(f"nothing on {rank}")

    both = Processes(Ranks(rank, 2, rank))
    for _ in range(2):
        made.clear()
        with both.joined("cpu"):
            assert both.from_first(make) == "of 0" and len(made) == (rank == 0)
            with pytest.raises(SamplingError if rank else ValueError, match="nothing on 0"):
                both.from_first(fails)
            assert both.gathered(rank) == ([] if rank else [0, 1])
        assert both.from_first(make) == f"of {rank}", "on its own again"


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
def test_the_first_process_tells_the_others() -> None:
    on_ranks(2, exchanging)


def test_two_processes_share_the_prompts(command: list[str], tmp_path: Path) -> None:
    """Under torchrun, which ends all processes when one leaves with an error: the one whose
    prompt fails waits for the other."""
    (tmp_path / "prompts.txt").write_text(
        f"{PROMPTS[0]}\n{PROMPTS[1]}\n{PROMPTS[2]}", encoding="utf-8"
    )
    script = tmp_path / "run.py"
    script.write_text(
        "import sys, time\n"
        "from pathlib import Path\n"
        "from turbo_rcm_patch.__main__ import main\n"
        "from turbo_rcm_patch.video import generation\n"
        "real = generation.generate\n"
        "def generate(pipe, prompt, **options):\n"
        f"    if prompt == {PROMPTS[0]!r}:\n"
        "        raise ValueError('no such colour')\n"
        f"    if prompt == {PROMPTS[1]!r}:\n"
        "        until = time.monotonic() + 60\n"
        f"        while not list(Path({str(tmp_path)!r}).glob('out/a-green*.mp4')):\n"
        "            assert time.monotonic() < until\n"
        "            time.sleep(0.02)\n"
        "        time.sleep(2)\n"
        "    return real(pipe, prompt, **options)\n"
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


#: `main` in one of several processes. Faults: by what the environment says.
SCRIPT = """
import os, sys
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.video import comparison
real = comparison.sample_latents
def sample_latents(*given, **options):
    if str(options["seed"]) == os.environ.get("BAD_SEED"):
        raise ValueError("no such colour")
    with open(os.environ["MADE"], "a") as file:
        file.write(f"{os.environ['RANK']} {options['seed']}\\n")
    return real(*given, **options)
comparison.sample_latents = sample_latents
sys.exit(main(sys.argv[1:]))
"""


def side_by_side(folder: Path, arguments: list[str], **environment: str) -> list[processes.Done]:
    """Run a command in two processes that find each other, without a launcher that ends one when
    the other fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | environment | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "MADE": str(folder / "made.txt"),
    }  # fmt: skip
    with ExitStack() as started:
        both = [
            started.enter_context(
                processes.start(
                    SCRIPT, *arguments, env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                )
            )
            for rank in range(2)
        ]
        return [one.wait() for one in both]


def made(folder: Path) -> list[str]:
    path = folder / "made.txt"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    path.unlink(missing_ok=True)
    return sorted(lines)


def numbers(out: Path) -> list[dict[str, Any]]:
    found = json.loads((out / "metrics.json").read_text(encoding="utf-8"))
    prompts = [dict(one) for one in found["prompts"]]
    for one in prompts:
        del one["decode_seconds"]
    return [*prompts, found["network"], found["fusion"], found["control_backend"]]


@pytest.mark.usefixtures("no_pictures")
def test_two_processes_make_one_report(micro_folder: Path, tmp_path, capsys) -> None:
    """The numbers of one process; a process that fails ends both; what was made is kept."""
    given = ["compare", "--model", str(micro_folder), *QUICK]
    given += ["--prompts", str(listing(tmp_path)), "--out"]
    alone, out = tmp_path / "alone", tmp_path / "out"
    code = main([*given, str(alone)])
    assert code in (0, 1)
    both = [*given, str(out)]

    failed = side_by_side(tmp_path, both, BAD_SEED="1")
    assert failed[0].code == 2, failed
    assert failed[1].code != 0 and "no such colour" in failed[1].err
    assert "process" in failed[0].err and "Traceback" not in failed[0].err, failed[0].err
    assert not (out / "metrics.json").exists()

    made(tmp_path)
    done = side_by_side(tmp_path, both)
    assert [one.code for one in done] == [code, code], done
    assert "verdict:" in done[0].out and "verdict:" not in done[1].out
    assert numbers(out) == numbers(alone)
    shares = made(tmp_path)
    # Twice one to warm up and one to keep; the control was tried with the first prompt.
    assert [line for line in shares if line[0] == "1"] == ["1 1"] * 4 + ["1 2"]
    assert shares.count("0 2") == 2 and shares.count("0 1") == 1

    next((out / "latents").glob("a-green*.patched.safetensors")).unlink()
    again = side_by_side(tmp_path, both)
    assert [one.code for one in again] == [code, code], again
    assert made(tmp_path) == ["0 2", "0 2"], "the first call is thrown away"
    assert numbers(out) == numbers(alone)
