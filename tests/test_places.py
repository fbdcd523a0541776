"""Machines that lack something: a home folder, a folder that may be written, a C compiler."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from turbo_rcm_patch.__main__ import main

ROOT = Path(__file__).parents[1]


def test_a_command_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that runs as a user whom it does not know."""

    def unknown(user: int) -> Any:
        raise KeyError(user)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert main(["pairs", "--model", "tiny"]) == 0


@pytest.mark.slow
def test_no_compiler_is_needed_on_a_cpu(tmp_path: Path) -> None:
    """Triton builds its launcher with a C compiler: without one nothing may ask for it here."""
    code = (
        "from tests.patching.models import named, run\n"
        "from turbo_rcm_patch import patch_model, refresh\n"
        "model, inputs = named('t2v').model(), named('t2v').inputs()\n"
        "report = patch_model(model, linear='int8'); run(model, inputs); refresh(model)\n"
        "print(report)\n"
    )
    env = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX", "HOME")}
    done = processes.run(code, env=env | {"PATH": str(tmp_path)}, cwd=ROOT)
    assert done.code == 0, done.err[-2000:]
    assert "fused" in done.out
