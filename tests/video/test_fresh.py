"""`compare --fresh`, interrupted by Ctrl-C: what an earlier comparison wrote stays until it is
replaced, other files always, and the same command without --fresh goes on."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.video.test_lost_data import everything
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.video import comparison, report
from turbo_rcm_patch.video.store import MARKER, PROMPT_FILES, Store

pytestmark = pytest.mark.usefixtures("no_pictures_here")
SMALL = ["--height", "32", "--width", "32", "--num-frames", "5", "--max-sequence-length", "16"]
SMALL += ["--device", "cpu", "--no-network-number"]
VERDICTS = (0, 1, 4)
A, B = Store.key("a", 0), Store.key("b", 1)
#: Under names that no comparison writes, in the folders that one does write.
FOREIGN = ("mine.txt", "latents/mine.txt", f"prompts/{B}/notes.txt", "plots/mine.png")

OPENED = {"settings.json", MARKER}
BASELINE = {"runs/baseline.json", f"latents/{A}.baseline.safetensors"}
#: And runs/control.json, which says the same again.
SAMPLED = {
    "runs/patched.json",
    *(f"latents/{A}.{variant}.safetensors" for variant in ("patched", "control")),
}
VIDEOS = {f"prompts/{A}/{name}" for name in PROMPT_FILES}


@pytest.fixture(scope="module")
def fresh(micro_folder: Path) -> list[str]:
    """A comparison of one prompt with other settings than the earlier one had."""
    return ["compare", "--model", str(micro_folder), *SMALL, "--steps", "2", "--prompt", "a"]


@pytest.fixture(scope="module")
def earlier(micro_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a comparison of two prompts, and somebody's files."""
    out = tmp_path_factory.mktemp("earlier") / "out"
    command = ["compare", "--model", str(micro_folder), *SMALL, "--steps", "1", "--out", str(out)]
    assert main([*command, "--prompt", "a", "--prompt", "b"]) in VERDICTS
    for name in FOREIGN:
        (out / name).write_text("mine")
    return out


@pytest.fixture(scope="module")
def clean(fresh: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the fresh comparison writes into an empty folder."""
    out = tmp_path_factory.mktemp("clean") / "out"
    assert main([*fresh, "--out", str(out)]) in VERDICTS
    return everything(out)


def pressed(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, call: int) -> list[None]:
    """Press Ctrl-C in this call of a function; the list grows with each call."""
    calls: list[None] = []
    function: Callable[..., Any] = getattr(place, name)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == call:
            signal.raise_signal(signal.SIGINT)
        return function(*arguments, **options)

    monkeypatch.setattr(place, name, interrupted)
    return calls


def numbers(files: dict[str, bytes]) -> list[dict[str, Any]]:
    prompts = json.loads(files["metrics.json"])["prompts"]
    return [{k: v for k, v in one.items() if "seconds" not in k} for one in prompts]


@pytest.mark.parametrize(
    ("place", "name", "call", "replaced", "samples"),
    [
        # Each pass begins with a call that is thrown away.
        (comparison, "sample_latents", 1, OPENED, 5),
        (comparison, "sample_latents", 2, OPENED, 5),
        (comparison, "sample_latents", 4, OPENED | BASELINE, 3),
        (comparison, "write_mp4", 3,
         OPENED | BASELINE | SAMPLED | {f"prompts/{A}/{n}" for n in PROMPT_FILES[:2]}, 0),
        (report, "_draw_plots", 1,
         OPENED | BASELINE | SAMPLED | VIDEOS | {"metrics.json"}, 0),
    ],
    ids=["warming up", "baseline", "patched", "videos", "report"],
)  # fmt: skip
def test_ctrl_c_loses_nothing_that_was_not_replaced(
    place: Any, name: str, call: int, replaced: set[str], samples: int,
    earlier: Path, fresh: list[str], clean: dict[str, bytes],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "out"
    shutil.copytree(earlier, out)
    before = everything(out)
    with monkeypatch.context() as patch:
        pressed(patch, place, name, call)
        assert main([*fresh, "--fresh", "--out", str(out)]) == 130
    said = " ".join(capsys.readouterr().err.split())
    assert "the same command without --fresh goes on from there" in said
    left = everything(out)
    assert left.keys() == before.keys(), "nothing is lost, and nothing half written stays"
    assert {name for name in left if left[name] != before[name]} == replaced

    with monkeypatch.context() as patch:
        calls = pressed(patch, comparison, "sample_latents", -1)
        assert main([*fresh, "--out", str(out)]) in VERDICTS
    assert len(calls) == samples, "what the interrupted run finished is used, and no more"
    after = everything(out)
    assert after.keys() == clean.keys() | {*FOREIGN}
    assert all(after[name] == b"mine" for name in FOREIGN)
    assert numbers(after) == numbers(clean)
    assert after[MARKER] == clean[MARKER], "nothing is called earlier any more"


def test_a_fresh_start_that_starts_again_loses_nothing(
    earlier: Path, fresh: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shutil.copytree(earlier, out)
    for call in (4, 2):
        with monkeypatch.context() as patch:
            pressed(patch, comparison, "sample_latents", call)
            assert main([*fresh, "--fresh", "--out", str(out)]) == 130
        assert everything(out).keys() == everything(earlier).keys()
    # What the first of the two sampled is not the second one's.
    calls = pressed(monkeypatch, comparison, "sample_latents", -1)
    assert main([*fresh, "--out", str(out)]) in VERDICTS and len(calls) == 5


def test_a_folder_that_became_a_link_is_not_emptied_when_it_goes_on(
    earlier: Path, fresh: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    out = tmp_path / "out"
    shutil.copytree(earlier, out)
    with monkeypatch.context() as patch:
        pressed(patch, comparison, "sample_latents", 1)
        assert main([*fresh, "--fresh", "--out", str(out)]) == 130
    (out / "plots").rename(tmp_path / "pictures")
    (out / "plots").symlink_to(tmp_path / "pictures")
    before = everything(tmp_path)
    assert main([*fresh, "--out", str(out)]) == 2
    assert "is a link" in capsys.readouterr().err
    assert everything(tmp_path) == before
