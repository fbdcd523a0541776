"""Machines that lack something: a home folder, a folder that may be read or written, a C
compiler."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.patching.wan import relative, run, wan
from turbo_rcm_patch.tune import tune

from tests import processes
from turbo_rcm_patch import ops, patch_model
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.errors import ConfigError
from turbo_rcm_patch.kernels import tile_table
from turbo_rcm_patch.kernels.launch import Target, forget_tiles, tile_for
from turbo_rcm_patch.ops import dispatch

ROOT = Path(__file__).parents[1]


def forget() -> None:
    forget_tiles()
    dispatch.forget_tables()


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A container that runs as a user whom it does not know."""

    def unknown(user: int) -> object:
        raise KeyError(user)

    for name in ("HOME", "XDG_CACHE_HOME", tile_table.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    forget()
    yield
    monkeypatch.undo()
    forget()


@pytest.fixture
def no_entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A home folder of somebody else, which may not be entered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "theirs"))
    monkeypatch.delenv(tile_table.VARIABLE, raising=False)
    real = os.stat

    def stat(path: object, *args: object, **how: object) -> os.stat_result:
        if "theirs" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **how)  # type: ignore[arg-type, call-overload]

    monkeypatch.setattr(os, "stat", stat)
    forget()
    yield
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("place", ["no_home", "no_entry"])
def test_a_model_runs_there(place: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(place)
    model = wan()
    expected = run(model)
    patch_model(model)
    assert relative(run(model), expected) < 0.02
    assert tile_for("attention", "fp8_64", Target("cuda", 90)).block_m > 0
    assert ops.resolved(
        ops.AttentionSpec(heads=1, attention="auto"), torch.device("cpu"), 9, 9, 64
    )


def test_tuning_says_what_is_missing(no_home: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"home folder.*XDG_CACHE_HOME"):
        tune(device="cpu", micro=True, dry_run=True)
    with pytest.raises(ConfigError, match="home folder"):
        ops.dispatch_path()
    path = tmp_path / "tiles.json"
    tune(device="cpu", micro=True, out=path, only=("skip",))
    assert path.is_file()


def test_a_table_that_was_named_has_to_be_there(
    no_home: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tile_table.VARIABLE, "~/tiles.json")
    with pytest.raises(ConfigError, match="home folder"):
        tile_for("attention", "fp8_64", Target("cuda", 90))


@pytest.mark.parametrize("command", ["doctor", "support", "pairs"])
def test_commands_without_a_home(command: str, no_home: None) -> None:
    more = ["--model", "tiny"] if command == "pairs" else []
    assert main([command, *more]) == 0


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="only Linux has such a folder")
@pytest.mark.parametrize("command", ["generate", "compare", "demo", "convert"])
def test_a_folder_that_takes_no_files(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Told before anything is loaded, whoever asks: /proc takes no files of root either."""
    target = "/proc/self/out/v.mp4" if command == "generate" else "/proc/self/out"
    given = {
        "generate": ["--prompt", "a", "--out", target],
        "compare": ["--prompt", "a", "--out", target],
        "demo": ["--out", target],
        "convert": [str(ROOT / "README.md"), target],
    }[command]
    assert main([command, *given]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said and ("/proc/self" in said or "README.md" in said)


def test_no_compiler_is_needed_on_a_cpu(tmp_path: Path) -> None:
    """Triton builds its launcher with a C compiler: without one nothing may ask for it here."""
    code = (
        "import torch\n"
        "from tests.patching.wan import run, wan\n"
        "from turbo_rcm_patch import patch_model, refresh\n"
        "model = wan(); report = patch_model(model, linear='int8'); run(model); refresh(model)\n"
        "print(report)\n"
    )
    env = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX", "HOME")}
    done = processes.run(code, env=env | {"PATH": str(tmp_path)}, cwd=ROOT)
    assert done.code == 0, done.err[-2000:]
    assert "fused" in done.out
