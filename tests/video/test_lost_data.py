"""No command loses a file that it did not write, or calls half a result a result."""

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
from turbo_rcm_patch.cli import inputs
from turbo_rcm_patch.errors import SamplingError
from turbo_rcm_patch.video import comparison
from turbo_rcm_patch.video.comparison import RUNS, compare
from turbo_rcm_patch.video.store import Store

imageio_ffmpeg = pytest.importorskip(
    "imageio_ffmpeg", reason="videos are written by ffmpeg: pip install imageio-ffmpeg"
)


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("this was to be refused before a model is loaded")

    monkeypatch.setattr(inputs, "load_pipeline", load)


COMPARING = [
    ["demo"],
    ["demo", "--resume"],
    ["compare", "--prompt", "a"],
    ["compare", "--prompt", "a", "--fresh"],
]


@pytest.mark.parametrize("name", ["settings.json", "metrics.json", "prompts/mine.txt"])
@pytest.mark.parametrize("command", COMPARING, ids=" ".join)
def test_a_folder_of_other_files_is_refused_and_untouched(
    command: list[str], name: str, tmp_path: Path, nothing_loads: None, capsys: Any
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    assert main([*command, "--out", str(tmp_path)]) == 2
    assert everything(tmp_path) == {name: b"mine"}
    said = capsys.readouterr().err
    assert "OutputExistsError" in said and "Choose another --out" in said
    assert "--fresh" not in said, "advice that loses files"


@pytest.mark.usefixtures("no_pictures")
def test_damaged_results_are_told(pipe, settings, tmp_path: Path) -> None:
    def again() -> None:
        compare(pipe, "a red circle", out=tmp_path, settings=settings, network_number=False)

    again()
    record = next(tmp_path.glob("prompts/*/record.json"))
    text = record.read_text()
    for broken in (text[:100], "{}", '{"prompt": "a", "seed": null}'):
        record.write_text(broken)
        with pytest.raises(
            SamplingError, match=r"record\.json .*(was changed since|not valid JSON).*`fresh=True`"
        ):
            again()
    record.write_text(text)
    record.with_name("side_by_side.mp4").unlink()
    again()
    assert record.with_name("side_by_side.mp4").is_file()
    record.unlink()
    for run in RUNS:
        clip = tmp_path / "clips" / f"{record.parent.name}.{run}.safetensors"
        clip.write_bytes(b"cut off")
    with pytest.raises(SamplingError, match="was changed since it was written"):
        again()


def test_no_ffmpeg_is_told_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_loads: None, capsys: Any
) -> None:
    def none() -> str:
        raise RuntimeError("No ffmpeg exe could be found.")

    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", none)
    for command in (["generate", "--prompt", "a"], ["compare", "--prompt", "a"], ["demo"]):
        assert main([*command, "--out", str(tmp_path / "out")]) == 2
        assert "no ffmpeg to write mp4 with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "name"),
    [("generate", "v.mp4"), ("generate", "folder"), ("compare", "folder"), ("demo", "folder")],
)
def test_an_output_that_cannot_be_written_is_told_before_a_model_is_loaded(
    command: str, name: str, tmp_path: Path, nothing_loads: None, capsys: Any
) -> None:
    """Below a file, of a name that is too long, and in /proc, which takes no files of root's."""
    (tmp_path / "file").write_text("mine")
    prompt = [] if command == "demo" else ["--prompt", "a"]
    for out, told in (
        (tmp_path / "file" / name, "cannot be written"),
        (tmp_path / f"{'a' * 300}{name}", "File name too long"),
        (Path("/proc/self/out", name), "/proc/self"),
    ):
        assert main([command, *prompt, "--out", str(out)]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert told in said and "Traceback" not in said
        # A trial of an output that can be written leaves no folder behind.
        given = ["--model", "/no/such", *prompt, "--out", str(tmp_path / "new" / name)]
        assert main([command, *given]) == 2 and "no such folder" in capsys.readouterr().err
    assert everything(tmp_path) == {"file": b"mine"} and len(list(tmp_path.iterdir())) == 1


# `compare --fresh`: what an earlier comparison wrote goes, other files stay.

#: Under names that no comparison writes, in the folders that one does write.
FOREIGN = ("mine.txt", "clips/mine.txt", f"prompts/{Store.key('b', 1)}/notes.txt", "runs/a.txt")


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


@pytest.mark.usefixtures("no_pictures_here")
@pytest.mark.parametrize(
    ("name", "call", "samples"),
    # Each pass begins with a call that is thrown away.
    [("generate", 4, 3), ("measure", 1, 0)],
    ids=["patched", "videos"],
)
def test_ctrl_c_keeps_what_is_finished_and_files_of_others(
    name: str, call: int, samples: int, earlier: Path, command: list[str], clean: Any,
    tmp_path: Path, monkeypatch: Any, capsys: Any,
) -> None:  # fmt: skip
    out = tmp_path / "out"
    shutil.copytree(earlier, out)
    (out / "runs" / ".turbo_rcm_patch-partial-0123.json").write_text("half")  # of a killed process
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
    assert main([*command, "--out", str(out)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "other settings" in said and "Start again with --fresh" in said
    assert everything(tmp_path) == before
    (out / "runs").rename(tmp_path / "records")
    (out / "runs").symlink_to(tmp_path / "records")
    before = everything(tmp_path)
    assert main([*command, "--fresh", "--out", str(out)]) == 2
    assert "holds links that no comparison made" in capsys.readouterr().err
    assert everything(tmp_path) == before
