"""Tuning: what is tried and refused, the file, and how kernels read it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from turbo_rcm_patch import tune as tuning
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.errors import ConfigError, Fp8UnsupportedError
from turbo_rcm_patch.exit_codes import INTERRUPTED
from turbo_rcm_patch.kernels import launch
from turbo_rcm_patch.kernels.launch import (
    Target,
    Tile,
    forget_tiles,
    shipped_tiles,
    tile_for,
    trying_tile,
    watching_launches,
)
from turbo_rcm_patch.kernels.tile_table import VARIABLE, made_with, read_table, table_path
from turbo_rcm_patch.tune import Work, candidates, work_for

CPU = torch.device("cpu")
SM_90 = Target("cuda", 90)
MICRO_CPU = ["tune", "--micro", "--device", "cpu", "--only", "skip,project.fp32"]
TILE = Tile(128, 32, 8, 5)
KERNELS = [("skip", "any"), ("project", "fp32"), ("project", "16bit")]


@pytest.fixture(autouse=True)
def nobodys_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No table of the machine that runs the tests is read; the default place is in tmp_path."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget_tiles()
    yield tmp_path / "cache" / "turbo_rcm_patch" / "tiles.json"
    forget_tiles()


def test_tune_writes_a_table_that_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "tiles.json"
    out.parent.mkdir()
    out.write_text('{"sm_90": {"skip": {"any": [32, 256, 4, 1]}}}')
    assert main([*MICRO_CPU, "--out", str(out)]) == 0
    table = read_table(out)
    assert set(table) == {"sm_90", "cpu"} and table["sm_90"]["skip"]["any"] == [32, 256, 4, 1]
    screen = capsys.readouterr().out
    assert "skip.any" in screen and "project.fp32" in screen and str(out) in screen
    assert f"{VARIABLE}={out}" in screen


def test_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MICRO_CPU[:4], "--only", "skip", "--dry-run"]) == 0
    assert not list(tmp_path.rglob("tiles.json"))
    assert "not written" in capsys.readouterr().out


def test_the_default_place_is_shown_and_named_by_the_variable(
    nobodys_table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert table_path() == nobodys_table
    monkeypatch.setenv(VARIABLE, str(tmp_path / "named.json"))
    assert table_path() == tmp_path / "named.json"


MADE = {"made_with": made_with()}


def found(tile: Tile) -> tuning.Found:
    shipped = shipped_tiles(SM_90)["attention"]["fp8_128"]
    return tuning.Found("attention", "fp8_128", tile, shipped, 1.1, {})


def test_round_trip_through_the_kernels(
    nobodys_table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = shipped_tiles(SM_90)["attention"]["fp8_128"]
    assert tile_for("attention", "fp8_128", SM_90) == shipped
    tuning.write_table(nobodys_table, tuning._merged({}, "sm_90", [found(TILE)]))
    forget_tiles()
    assert tile_for("attention", "fp8_128", SM_90) == TILE
    # What the table does not hold stays as shipped, and so does every other card.
    assert tile_for("attention", "fp8_64", SM_90) == shipped_tiles(SM_90)["attention"]["fp8_64"]
    assert tile_for("attention", "fp8_128", Target("cuda", 89)) != TILE
    assert tile_for("attention", "fp8_128", Target("interpreter", 0)) != TILE
    # A file that the variable names comes before the default place.
    named = tmp_path / "named.json"
    tuning.write_table(named, {"sm_90": {"attention": {"fp8_128": [64, 64, 4, 2]}}})
    monkeypatch.setenv(VARIABLE, str(named))
    forget_tiles()
    assert tile_for("attention", "fp8_128", SM_90) == Tile(64, 64, 4, 2)


def test_a_tile_is_one_line_and_a_shipped_one_is_not_repeated() -> None:
    table = tuning._merged({}, "sm_90", [found(TILE)])
    text = tuning._text(table)
    assert '"fp8_128": [128, 32, 8, 5]' in text and json.loads(text) == table
    shipped = shipped_tiles(SM_90)["attention"]["fp8_128"]
    assert tuning._merged(table, "sm_90", [found(shipped)]) == {"sm_90": MADE}


def test_tiles_of_other_versions_are_told_and_not_used(
    nobodys_table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A tile that fitted before may not fit any more; one that somebody wrote is his own."""
    tiles = {"attention": {"fp8_128": list(TILE)}}
    old = MADE | {"made_with": "driver 1, triton 2.0, torch 2.0"}
    shipped = shipped_tiles(SM_90)["attention"]["fp8_128"]
    for made, tile in ((old, shipped), (MADE, TILE), ({}, TILE)):
        tuning.write_table(nobodys_table, {"sm_90": tiles | made})
        forget_tiles()
        caplog.clear()
        assert tile_for("attention", "fp8_128", SM_90) == tile
        assert tile_for("attention", "fp8_64", SM_90) is not None
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == (made is old), told
    for before, left in ((old, {}), (MADE, {"skip": {"any": [1, 2, 4, 1]}})):
        table = {"sm_90": {"skip": {"any": [1, 2, 4, 1]}} | before, "sm_86": old}
        assert tuning._merged(table, "sm_90", [found(TILE)]) == {
            "sm_90": tiles | MADE | left,
            "sm_86": old,
        }
        assert "attention" not in table["sm_90"]


def test_an_unknown_card_warns_until_it_is_tuned(nobodys_table: Path) -> None:
    unknown = Target("cuda", 77)
    with pytest.warns(UserWarning, match="turbo-rcm-patch tune"):
        assert tile_for("skip", "any", unknown) == shipped_tiles(unknown)["skip"]["any"]
    tuning.write_table(nobodys_table, {"sm_77": {}})
    forget_tiles()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tile_for("skip", "any", unknown) == shipped_tiles(unknown)["skip"]["any"]


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[]",
        '{"sm_90": 1}',
        '{"sm_90": {"skip": []}}',
        '{"sm_90": {"skip": {"any": [1, 2, 3]}}}',
        '{"sm_90": {"skip": {"any": [24, 256, 4, 1]}}}',
        '{"sm_90": {"skip": {"any": [16, 256, 4, true]}}}',
        '{"sm_90": {"skip": {"any": [16, 256, 4, 0]}}}',
        '{"sm_90": {"attention": {"fp8_128": [256, 128, 8, 2]}}}',
    ],
)
def test_a_corrupt_table_names_file_and_remedy(nobodys_table: Path, text: str) -> None:
    nobodys_table.parent.mkdir(parents=True)
    nobodys_table.write_text(text)
    with pytest.raises(ConfigError) as caught:
        tile_for("skip", "any", SM_90)
    assert str(nobodys_table) in str(caught.value) and "tune" in str(caught.value)


def test_a_table_that_is_named_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "lost.json"))
    with pytest.raises(ConfigError, match=r"lost\.json"):
        tile_for("skip", "any", SM_90)


def test_a_corrupt_table_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tiles.json"
    out.write_text("mine")
    assert main([*MICRO_CPU, "--out", str(out)]) == 2
    assert out.read_text() == "mine" and "ConfigError: table of tiles" in capsys.readouterr().err


def test_the_shipped_table_passes_as_a_users_table() -> None:
    assert read_table(Path(launch.__file__).with_name("tiles.json"))


def test_trying_a_tile() -> None:
    before = tile_for("skip", "any", SM_90)
    with trying_tile("skip", "any", TILE) as asked:
        assert not asked
        assert tile_for("skip", "any", SM_90) == TILE
        assert asked == [SM_90]
        with trying_tile("project", "16bit", TILE):
            assert tile_for("project", "16bit", SM_90) == TILE
        assert tile_for("project", "16bit", SM_90) != TILE
    assert tile_for("skip", "any", SM_90) == before


class Kernel:
    """A kernel as `launch` runs it, which gives back what was compiled."""

    def __init__(self, spills: int) -> None:
        self.n_spills = spills

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        return lambda **options: self


def test_launches_are_watched_only_inside() -> None:
    with watching_launches() as launched:
        launch.launch(Kernel(3), (1,), CPU)
    launch.launch(Kernel(5), (1,), CPU)
    assert [one.n_spills for one in launched] == [3]


def test_candidates_that_fail_spill_or_are_wrong_are_refused_with_the_reason() -> None:
    shipped, fast = Tile(16, 256, 4, 1), Tile(64, 256, 4, 1)
    fails, spills, wrong = (Tile(m, 256, 4, 1) for m in (1, 2, 4))
    truth = torch.ones(1, 8, 4, dtype=torch.float64)

    def call() -> torch.Tensor:
        tile = tile_for("skip", "any", SM_90)
        if tile == fails:
            raise RuntimeError("out of resource: shared memory")
        launch.launch(Kernel(8 if tile == spills else 0), (1,), CPU)
        if tile != fast:
            torch.randn(400, 400) @ torch.randn(400, 400)
        return torch.full((1, 8, 4), 2.0 if tile == wrong else 1.0)

    work = Work("toy", call, truth[:, :2], torch.tensor([0, 1]))
    one = tuning._best("skip", "any", shipped, [fails, spills, wrong, fast], work, CPU, 20)
    assert "shared memory" in one.refused[fails]
    assert "spills 8" in one.refused[spills]
    assert "wrong" in one.refused[wrong]
    assert one.tile == fast and one.gain > 1


def test_every_shipped_variant_of_the_usual_heads_can_be_tuned() -> None:
    shipped = shipped_tiles(SM_90)
    for kernel, variant in tuning._wanted((), shipped):
        if not candidates(kernel, variant):
            continue  # a kernel that is newer than the candidates keeps its tile
        assert all(len(tile) == 4 for tile in candidates(kernel, variant))
    assert work_for("no such kernel", "any", CPU, scale=1.0) is None
    for kernel, variant in (("project", "16bit"), ("one_launch", "16bit_64")):
        work = work_for(kernel, variant, CPU, scale=1 / 1024)
        assert work is not None and work.call()[:, work.rows].shape == work.truth.shape


def test_a_card_without_fp8_is_tuned_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(pv: str, *_: object) -> str:
        if pv == "fp8":
            raise Fp8UnsupportedError("pv", expected="8.9", got="8.6")
        return "bf16"

    monkeypatch.setattr(tuning.ops, "resolve_pv", resolve)
    monkeypatch.setattr("turbo_rcm_patch.ops.dispatch.resolve_pv", resolve)
    only = "attention.*_64,prologue.64"
    assert main([*MICRO_CPU[:4], "--only", only, "--out", str(tmp_path / "tiles.json")]) == 0
    screen = capsys.readouterr().out
    assert "attention.fp8_64: this card has no fp8" in screen
    assert "attention.16bit_64 (" in screen and "prologue.64 (" in screen


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError("full"), KeyboardInterrupt()])
def test_a_variant_that_fails_does_not_lose_the_others(
    failure: BaseException,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shipped = shipped_tiles(SM_90)

    def best(kernel: str, variant: str, *_: object) -> tuning.Found:
        if variant == "fp32":
            raise failure
        return tuning.Found(kernel, variant, TILE, shipped[kernel][variant], 1.1, {})

    monkeypatch.setattr(tuning, "_best", best)
    monkeypatch.setattr(tuning, "_wanted", lambda *_: KERNELS)
    out = tmp_path / "tiles.json"
    interrupted = isinstance(failure, KeyboardInterrupt)
    assert main([*MICRO_CPU, "--out", str(out)]) == (INTERRUPTED if interrupted else 1)
    left = {"skip": {"any": list(TILE)}}
    if not interrupted:
        left["project"] = {"16bit": list(TILE)}
        assert "project.fp32: OutOfMemoryError: full" in capsys.readouterr().out
    assert read_table(out) == {"cpu": left | MADE}


@pytest.mark.parametrize("value", [float("nan"), 1.9, 1.05])
def test_a_shipped_tile_that_is_wrong_is_said_and_nothing_is_chosen(
    value: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = torch.tensor([0, 1])
    truth = torch.ones(1, 2, 4, dtype=torch.float64)
    work = Work("toy", lambda: torch.full((1, 8, 4), value), truth, rows)
    monkeypatch.setattr(tuning, "work_for", lambda *_, **__: work)
    out = tmp_path / "tiles.json"
    assert main([*MICRO_CPU[:4], "--only", "skip", "--out", str(out)]) == 1
    screen = capsys.readouterr().out
    assert "skip.any: the shipped [" in screen and "is WRONG (relL2" in screen
    assert "best" not in screen and "x the shipped" not in screen


def test_what_another_process_wrote_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "tiles.json"
    theirs = {"sm_86": {"skip": {"any": [32, 256, 4, 1]}}}

    def best(kernel: str, variant: str, *_: object) -> tuning.Found:
        tuning.write_table(out, theirs)
        return tuning.Found(kernel, variant, TILE, Tile(16, 256, 4, 1), 1.1, {})

    monkeypatch.setattr(tuning, "_best", best)
    assert main([*MICRO_CPU[:4], "--only", "skip", "--out", str(out)]) == 0
    assert read_table(out) == theirs | {"cpu": {"skip": {"any": list(TILE)}} | MADE}


@pytest.mark.parametrize("before", [None, '{"sm_90": {}}'])
@pytest.mark.parametrize("only", ["int8_linear", "auto", "int8_linear,skip"])
def test_a_card_of_which_nothing_was_measured_has_no_entry(
    only: str,
    before: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "tiles.json"
    if before:
        out.write_text(before)
    status = main([*MICRO_CPU[:4], "--only", only, "--out", str(out)])
    screen = capsys.readouterr().out
    assert status == (0 if only == "auto" else 1)
    assert ("nothing was measured of int8_linear" in screen) == (only != "auto")
    if "skip" in only:
        assert "cpu" in read_table(out) and "skip.any (" in screen
    else:
        assert (out.read_text() if out.exists() else None) == before
        assert "no tile was measured" in screen and "written" not in screen


def test_lengths_that_cannot_be_measured_are_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: object, **__: object) -> None:
        raise RuntimeError("Triton Error [CUDA]: misc")

    monkeypatch.setattr(tuning, "measure_dispatch", measure)
    assert not tuning._tune_choices(CPU, out=None, dry_run=True, calls=1)
    assert "auto: RuntimeError: Triton Error" in capsys.readouterr().out


def test_bad_arguments_are_typed_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "--micro", "--device", "cpu"]) == 2
    assert "--dry-run" in capsys.readouterr().err
    out = ["--dry-run"]
    assert main([*MICRO_CPU[:4], "--only", "attention.fp4_64", *out]) == 2
    assert "attention.fp8_64" in capsys.readouterr().err
    assert main([*MICRO_CPU, "--calls", "0", *out]) == 2
    assert main([*MICRO_CPU, "--limit", "0", *out]) == 1
    assert "left out" in capsys.readouterr().out
