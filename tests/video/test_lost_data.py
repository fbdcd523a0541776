"""No command loses a file that it did not write, or calls half a result a result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import imageio_ffmpeg
import pytest
import torch

from tests.files import everything
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.cli import commands
from turbo_rcm_patch.cli import demo as demo_module
from turbo_rcm_patch.errors import OutputExistsError, SamplingError
from turbo_rcm_patch.video.comparison import RUNS, compare
from turbo_rcm_patch.video.store import Store, StoredClip


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("this was to be refused before a model is loaded")

    monkeypatch.setattr(demo_module, "load_pipeline", load)
    monkeypatch.setattr(commands, "load_pipeline", load)


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


def test_from_python_too(pipe, settings, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(OutputExistsError, match=r"report\.html"):
        compare(pipe, "a red circle", out=tmp_path, settings=settings, fresh=True)
    assert everything(tmp_path) == {"report.html": b"mine"}


def test_a_fresh_start_removes_what_comparisons_wrote_alone(tmp_path: Path) -> None:
    store = Store(tmp_path, {"a": 1}, fresh=False)
    key = Store.key("a", 0)
    store.write_json("runs/baseline.json", {})
    store.save_clip(key, "baseline", StoredClip(frames=torch.zeros(1), seconds=1.0))
    (store.folder(key) / "record.json").write_text("{}")
    (tmp_path / "runs" / ".turbo_rcm_patch-partial-0123.json").write_text("half")
    (tmp_path / "runs" / "mine.txt").write_text("mine")
    with pytest.raises(SamplingError, match="other settings; expected the same a;.*--fresh"):
        Store(tmp_path, {"a": 2}, fresh=False)
    Store(tmp_path, {"a": 2}, fresh=True)
    assert sorted(everything(tmp_path)) == ["runs/mine.txt", "settings.json"]
    assert not (tmp_path / "prompts").exists()


def test_more_prompts_may_join_a_comparison(tmp_path: Path) -> None:
    """A prompt that is there keeps what it was made from."""
    Store(tmp_path, {"inputs": {"a": "1"}}, fresh=False)
    Store(tmp_path, {"inputs": {"b": "2"}}, fresh=False)
    Store(tmp_path, {"inputs": {"a": "1", "b": "2"}}, fresh=False)
    with pytest.raises(SamplingError, match="the same inputs"):
        Store(tmp_path, {"inputs": {"b": "3"}}, fresh=False)


@pytest.mark.usefixtures("no_pictures")
def test_damaged_results_are_told(pipe, settings, tmp_path: Path) -> None:
    def again() -> None:
        compare(pipe, "a red circle", out=tmp_path, settings=settings, network_number=False)

    again()
    record = next(tmp_path.glob("prompts/*/record.json"))
    text = record.read_text()
    for broken in (text[:100], "{}", '{"prompt": "a", "seed": null}'):
        record.write_text(broken)
        with pytest.raises(SamplingError, match=r"record\.json was changed since it was written"):
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
