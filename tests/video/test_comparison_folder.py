"""A comparison's folder under odd circumstances: shared, interrupted early, extended."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.video.micro import SMALL
from turbo_rcm_patch import PatchConfig
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.errors import ConfigError, OutputExistsError, SamplingError
from turbo_rcm_patch.video import commands, comparison
from turbo_rcm_patch.video.comparison import compare
from turbo_rcm_patch.video.environment import code_digest
from turbo_rcm_patch.video.settings import Settings
from turbo_rcm_patch.video.store import Store, check_out, in_use

RED, BLUE = "a red circle", "a blue circle"
CONFIG = PatchConfig(attention="int8", guard_budget=1e-9)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "write_report", lambda *_: None)


def test_one_comparison_a_folder_at_a_time(pipe, settings, tmp_path: Path) -> None:
    """A second one with --fresh would take the samples of the first for its own."""
    out = tmp_path / "new" / "out"
    with in_use(out):
        with pytest.raises(OutputExistsError, match="in use by another comparison"):
            compare(pipe, RED, out=out, settings=settings, fresh=True)
        assert not any(out.iterdir())
    assert not out.exists(), "it was empty"
    with in_use(out):
        (out / "mine.txt").write_text("1")
    assert (out / "mine.txt").exists()


def test_the_folder_is_free_again_afterwards(pipe, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        compare(pipe, RED, out=tmp_path, settings=Settings(steps=1, **SMALL), sampler="none")
    with in_use(tmp_path):
        pass


def test_an_extended_comparison_keeps_what_the_guard_said_before(
    pipe, settings, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"out": tmp_path, "settings": settings, "config": CONFIG}
    first = compare(pipe, RED, network_number=False, **given)
    assert "earlier" not in first.patch and "given back" in first.patch_report
    second = compare(pipe, [RED, BLUE], network_number=False, **given)
    (before,) = second.patch["earlier"]
    assert before == first.patch
    third = compare(pipe, [RED, BLUE, "a ring"], network_number=False, **given)
    assert len(third.patch["earlier"]) == 2


def test_settings_and_fields_by_name_go_together(pipe, tmp_path: Path) -> None:
    settings = Settings(steps=1, **SMALL)
    given: dict[str, Any] = {"out": tmp_path, "settings": settings, "network_number": False}
    assert compare(pipe, RED, steps=2, **given).settings.steps == 2
    with pytest.raises(ConfigError, match="no_such_setting"):
        compare(pipe, RED, no_such_setting=3, **given)
    with pytest.raises(ConfigError, match="seed"):
        compare(pipe, [RED, BLUE], seed=2**64 - 1, **given)


def test_a_network_number_that_is_there_can_be_left_out(pipe, settings, tmp_path: Path) -> None:
    given: dict[str, Any] = {"out": tmp_path, "settings": settings}
    assert compare(pipe, RED, network_number=True, **given).network is not None
    assert compare(pipe, RED, network_number=False, **given).network is None
    assert compare(pipe, RED, network_number=True, **given).network is not None


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("CUDA error: an illegal access\nCUDA kernel errors might", RuntimeError, "illegal"),
        ("No available kernel. Aborting execution.", SamplingError, "cannot run this model"),
    ],
    ids=["fault", "no kernel"],
)
def test_a_fault_of_the_device_is_no_missing_backend(
    fault: str,
    error: type[Exception],
    words: str,
    pipe,
    settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, names = comparison._Run.unpatched, []

    def unpatched(self: Any, backend: str | None = None) -> Any:
        if backend and not names:
            names.append(backend)
            raise RuntimeError(fault)
        return run(self, backend)

    monkeypatch.setattr(comparison._Run, "unpatched", unpatched)
    given: dict[str, Any] = {"out": tmp_path, "settings": settings, "network_number": False}
    with pytest.raises(error, match=words):
        compare(pipe, RED, **given)


@pytest.mark.parametrize(
    ("split", "error", "given"),
    [
        ("", torch.OutOfMemoryError("no memory"), "runs out of memory"),
        ("Ulysses 2", torch.OutOfMemoryError("no memory"), SamplingError),
        ("Ulysses 2", RuntimeError("No available kernel."), "cannot run this model"),
        ("Ulysses 2", torch.distributed.DistBackendError("ncclBackend"), RuntimeError),
    ],
    ids=["alone", "split", "no kernel", "an exchange that broke"],
)
def test_a_rank_that_fails_in_a_split_control_ends_the_comparison(
    split: str, error: Exception, given: str | type[Exception]
) -> None:
    """The other ranks of its group are inside an attention, where they wait for it."""

    def unpatched(backend: str) -> None:
        raise error

    processes = SimpleNamespace(group=0, split=split, from_first=lambda make: make())
    run: Any = SimpleNamespace(processes=processes, encode=lambda i: None, unpatched=unpatched)
    if isinstance(given, str):
        assert comparison._Run._refuses(run, "native") == given
        return
    with pytest.raises(given, match="ncclBackend|under 'native' ran out of memory.*Split each"):
        comparison._Run._refuses(run, "native")


def test_a_file_where_a_folder_goes_is_told_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("mine")
    with pytest.raises(OutputExistsError, match="prompts is a file"):
        check_out(tmp_path, fresh=False)


def test_names_have_64_bits() -> None:
    assert len(Store.key("猫", 0).rpartition("-")[2]) == 16


def test_an_interruption_before_anything_was_replaced_says_so(
    micro_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The same command without --fresh would give the old verdict for a new one."""
    small = [f"--{k.replace('_', '-')}={v}" for k, v in SMALL.items()]
    given = ["compare", "--model", str(micro_folder), "--device", "cpu", "--steps", "1", *small]
    given += ["--prompt", RED, "--no-network-number", "--out", str(tmp_path / "out")]
    main(given)
    load, sample = commands.load_pipeline, comparison.sample_latents

    def interrupted(*args: Any, **more: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "load_pipeline", interrupted)
    capsys.readouterr()
    assert main([*given, "--fresh"]) == 130
    assert "the same command begins from there" in capsys.readouterr().err
    monkeypatch.setattr(commands, "load_pipeline", load)
    monkeypatch.setattr(comparison, "sample_latents", interrupted)
    assert main([*given, "--fresh"]) == 130
    assert "the same command without --fresh goes on" in capsys.readouterr().err
    monkeypatch.setattr(comparison, "sample_latents", sample)


def test_the_digest_of_the_code_is_of_all_that_makes_videos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Path(comparison.__file__).parents[1]
    monkeypatch.setattr("turbo_rcm_patch.video.environment.__file__", str(package / "a" / "b"))
    real, changed = code_digest(), set()
    read = Path.read_bytes
    for name in ("boundary.py", "video/generation.py", "video/families/wan.py"):
        assert (package / name).is_file()
        monkeypatch.setattr(
            Path, "read_bytes", lambda p, n=name: read(p) + b"#" * p.as_posix().endswith(n)
        )
        changed.add(code_digest())
    assert len({real, *changed}) == 4
