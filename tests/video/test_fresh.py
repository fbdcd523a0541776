"""`compare --fresh`: what an earlier comparison wrote goes, other files stay, and the same command
without --fresh goes on after Ctrl-C."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.files import everything
from tests.video.micro import QUICK
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.video import comparison
from turbo_rcm_patch.video.store import Store

pytestmark = pytest.mark.usefixtures("no_pictures_here")
#: Under names that no comparison writes, in the folders that one does write.
FOREIGN = ("mine.txt", "clips/mine.txt", f"prompts/{Store.key('b', 1)}/notes.txt", "plots/a.txt")


@pytest.fixture(scope="module")
def command(micro_folder: Path) -> list[str]:
    model = ["--model", str(micro_folder), "--no-network-number"]
    return ["compare", *model, *QUICK, "--prompt", "a"]


@pytest.fixture(scope="module")
def earlier(micro_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a comparison of two prompts and other settings, and files of the user."""
    out = tmp_path_factory.mktemp("earlier") / "out"
    command = ["compare", "--model", str(micro_folder), *QUICK, "--steps", "1", "--out", str(out)]
    assert main([*command, "--prompt", "a", "--prompt", "b"]) in (0, 1)
    for name in FOREIGN:
        (out / name).write_text("mine")
    return out


@pytest.fixture(scope="module")
def clean(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files that the command writes into an empty folder."""
    out = tmp_path_factory.mktemp("clean") / "out"
    assert main([*command, "--out", str(out)]) in (0, 1)
    return everything(out)


def pressed(patch: pytest.MonkeyPatch, name: str, call: int) -> list[None]:
    """Press Ctrl-C in this call of a function of the comparison; the list grows with each."""
    calls: list[None] = []
    function = getattr(comparison, name)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == call:
            signal.raise_signal(signal.SIGINT)
        return function(*arguments, **options)

    patch.setattr(comparison, name, interrupted)
    return calls


def numbers(files: dict[str, bytes]) -> list[dict[str, Any]]:
    prompts = json.loads(files["metrics.json"])["prompts"]
    return [{k: v for k, v in one.items() if "seconds" not in k} for one in prompts]


@pytest.mark.parametrize(
    ("name", "call", "samples"),
    # Each pass begins with a call that is thrown away.
    [("generate", 4, 3), ("measured", 1, 0)],
    ids=["patched", "videos"],
)
def test_ctrl_c_keeps_what_is_finished_and_files_of_others(
    name: str,
    call: int,
    samples: int,
    earlier: Path,
    command: list[str],
    clean: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    shutil.copytree(earlier, out)
    with monkeypatch.context() as patch:
        pressed(patch, name, call)
        assert main([*command, "--fresh", "--out", str(out)]) == 130
    said = " ".join(capsys.readouterr().err.split())
    assert "the same command without --fresh goes on from there" in said
    assert not list(out.rglob(".*")), "nothing half written stays"
    with monkeypatch.context() as patch:
        calls = pressed(patch, "generate", -1)
        assert main([*command, "--out", str(out)]) in (0, 1)
    assert len(calls) == samples, "what the interrupted run finished is used, and no more"
    after = everything(out)
    assert after.keys() == clean.keys() | {*FOREIGN}
    assert all(after[name] == b"mine" for name in FOREIGN)
    assert numbers(after) == numbers(clean)


def test_mistakes_remove_nothing(earlier: Path, command: list[str], tmp_path, capsys) -> None:
    """Also through a folder that became a link."""
    out = tmp_path / "out"
    shutil.copytree(earlier, out)
    before = everything(tmp_path)
    assert main([*command, "--fresh", "--out", str(out), "--model", "/no/such"]) == 2
    assert everything(tmp_path) == before
    (out / "plots").rename(tmp_path / "pictures")
    (out / "plots").symlink_to(tmp_path / "pictures")
    before = everything(tmp_path)
    assert main([*command, "--fresh", "--out", str(out)]) == 2
    assert "holds links that no comparison made" in capsys.readouterr().err
    assert everything(tmp_path) == before
