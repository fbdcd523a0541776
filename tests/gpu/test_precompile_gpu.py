"""The first video from a cache that was filled without a GPU compiles nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

_VIDEO = """
import triton
from turbo_rcm_patch import patch_model
from turbo_rcm_patch.video import generate, load_pipeline
missed = []
def listen(*, src, cache_hit, **_):
    missed.extend([] if cache_hit else [src.name])
triton.knobs.compilation.listener = listen
pipe = load_pipeline("tiny")
patch_model(pipe)
generate(pipe, "a large red circle moving left on a black background")
print(missed)
"""


def test_a_first_video_compiles_nothing(tmp_path: Path) -> None:
    major, minor = torch.cuda.get_device_capability()
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = ["-m", "turbo_rcm_patch", "precompile", "--gpu", f"sm_{major}{minor}"]
    made = _run(command, environment | {"CUDA_VISIBLE_DEVICES": ""})
    assert int(made.split()[0]) > 10
    assert _run(["-c", _VIDEO], environment).splitlines()[-1] == "[]"


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
