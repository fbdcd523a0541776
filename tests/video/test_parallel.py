"""`generate` over several processes, and how all of them end if one does.

`tests/test_several_ranks.py` compares what ranks compute.
"""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests import processes
from tests.ranks import on_ranks
from tests.test_several_ranks import PROMPT
from tests.video.micro import QUICK, options
from turbo_rcm_patch.__main__ import main

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
ROOT = Path(__file__).parents[2]


def generates_together(rank: int, folder: str, out: str) -> None:
    given = ["generate", *QUICK, "--prompt", PROMPT, "--prompt", "a blue square"]
    given += options(model=folder, sampler="scheduler", steps=3, guidance_scale=5)
    environment = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    assert main([*given, "--out", f"{out}/alone{rank}"]) == 0
    together = [*given, "--out", f"{out}/together", "--cfg-parallel", "--resume"]
    with mock.patch.dict(os.environ, environment):
        assert main(together) == 0
        assert main(together) == 0  # what is there stays
    if rank == 0:
        videos = sorted(Path(out, "alone0").glob("*.mp4"))
        assert len(videos) == 2
        for video in videos:
            assert (Path(out, "together") / video.name).read_bytes() == video.read_bytes()


def test_generate_makes_each_video_on_all_processes(micro_folder: Path, tmp_path: Path) -> None:
    on_ranks(2, generates_together, os.fspath(micro_folder), os.fspath(tmp_path))


def test_generate_says_what_several_processes_need(micro_folder: Path, tmp_path, capsys) -> None:
    given = ["generate", *QUICK, *options(model=micro_folder, sampler="scheduler", steps=1)]
    given += ["--prompt", PROMPT]
    assert main([*given, "--ulysses", "2", "--out", os.fspath(tmp_path)]) == 2
    assert "torchrun --nproc-per-node 2" in " ".join(capsys.readouterr().err.split())
    alone = mock.patch("turbo_rcm_patch.diffusers_parallel.parallel", return_value=nullcontext())
    for scale, told in (("1", True), ("5", False)):
        with alone:
            out = os.fspath(tmp_path / scale)
            assert main([*given, "--cfg-parallel", "--guidance-scale", scale, "--out", out]) == 0
        assert ("both groups of --cfg-parallel" in capsys.readouterr().out) == told


#: What a rank runs under torchrun. Rank 1 fails, or both wait for the test to end them.
SCRIPT = """
import os, sys
import torch.distributed as dist
from tests.video.micro import SMALL, micro_pipe
from turbo_rcm_patch import parallel
from turbo_rcm_patch.video import generate

dist.init_process_group("gloo")

def on_step(step, _):
    # One write: both ranks have the same pipe, and unbuffered, `print` writes word by word.
    print(f"step {os.environ['RANK']} {os.getpid()}\\n", end="", flush=True)
    if sys.argv[1] == "fails" and step == 2 and os.environ["RANK"] == "1":
        raise ValueError("rank one met its end")

pipe = micro_pipe()
with parallel(pipe, cfg=2):
    more = {"sampler": "scheduler", "steps": 900, "guidance_scale": 5.0}
    generate(pipe, "a red circle", on_step=on_step, **more, **SMALL)
"""

#: torchrun, whose ranks are processes of their own.
TORCHRUN = """
import sys
from torch.distributed.run import main
main(["--standalone", "--nproc-per-node", "2", *sys.argv[1:]])
"""


def test_a_rank_that_fails_ends_all_within_30_seconds(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.fspath(ROOT)}

    def ranks(out: str) -> set[int]:
        return {int(pid) for pid in re.findall(r"^step \d (\d+)$", out, re.MULTILINE)}

    with processes.start(TORCHRUN, os.fspath(script), "fails", env=environment) as run:
        run.until(lambda: len(ranks(run.out)) == 2)
        began = time.monotonic()
        done = run.wait(60)
    assert time.monotonic() - began < 30 and done.code != 0
    assert not any(map(alive, ranks(done.out))) and "ValueError: rank one met its end" in done.err


def test_ctrl_c_ends_all_within_30_seconds() -> None:
    with processes.pair(SCRIPT, "goes on", cwd=ROOT) as both:
        for one in both:
            one.until(lambda one=one: "step" in one.out)
        for one in both:
            os.kill(one.pid, signal.SIGINT)
        began = time.monotonic()
        assert all(one.wait(30).code for one in both) and time.monotonic() - began < 30


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
