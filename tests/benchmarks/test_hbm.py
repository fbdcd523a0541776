"""Memory traffic: what Nsight Compute prints, how it is asked, and the count on paper."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import traffic
from benchmarks.__main__ import main
from benchmarks.pairs import FORMS
from benchmarks.runner import Plan, Shape
from benchmarks.traffic import paper_bytes, tensor_bytes, write_ups_share
from turbo_rcm_patch.errors import ConfigError, MissingPackageError

MICRO_CPU = ["--micro", "--device", "cpu"]

HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",'
    '"Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)


def line(number: int, kernel: str, metric: str, unit: str, value: str) -> str:
    return (
        f'"{number}","4242","python3.12","127.0.0.1","{kernel}","1","7","(128, 1, 1)",'
        f'"(12, 16, 4)","0","9.0","Command line profiler metrics","{metric}","{unit}","{value}"'
    )


READ, WRITE = traffic.METRICS
CASE = "B2-H2-N48-D64"
SAID = "\n".join(
    [
        "==PROF== Connected to process 4242 (/usr/bin/python3.12)",
        '==PROF== Profiling "graph": 0%....50%....100% - 1 pass',
        f"counted: {CASE} two-pass 6",
        f"left-out: {CASE} one-pass its output is wrong",
        '==PROF== Profiling "graph": 0%....50%....100% - 1 pass',
        f"counted: {CASE} one-launch 3",
        "==PROF== Disconnected from process 4242",
        HEADER,
        line(0, "graph", READ, "byte", "1,200,000"),
        line(0, "graph", WRITE, "byte", "600,000"),
        line(1, "graph", READ, "Mbyte", "1.5"),
        line(1, "graph", WRITE, "Kbyte", "500"),
        line(1, "graph", "gpu__time_duration.sum", "ns", "77"),
    ]
)


def test_graphs_are_read_in_any_unit() -> None:
    assert traffic.parse(SAID) == [{READ: 1.2e6, WRITE: 6e5}, {READ: 1.5e6, WRITE: 5e5}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - no permission", '"ID"'),
        (HEADER, READ),
        (SAID.replace(WRITE, "dram__bytes.sum"), WRITE),
        (SAID.replace("1,200,000", "n/a"), "n/a"),
        (SAID.replace('"byte"', '"furlong"'), "furlong"),
    ],
    ids=["no table", "empty", "metric missing", "no number", "unknown unit"],
)
def test_what_cannot_be_read_is_a_typed_error(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        traffic.parse(text)
    assert words in str(caught.value)


@pytest.fixture
def no_ncu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(traffic, "_USUAL", ())
    monkeypatch.setattr(traffic.Path, "glob", lambda self, pattern: iter(()))


def test_a_missing_profiler_says_how_to_get_it(no_ncu: None) -> None:
    with pytest.raises(MissingPackageError, match="nsight-compute"):
        traffic.find_ncu()


def fake_ncu(folder: Path, monkeypatch: pytest.MonkeyPatch, says: str, status: int = 0) -> Path:
    """A profiler that says something and writes down how it was called."""
    (folder / "says").write_text(says)
    script = folder / "ncu"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/calls\ncat {folder}/says\nexit {status}\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder / "calls"


def measured(out: Path) -> Any:
    plan = Plan(out=out, device="cuda", micro=True)
    return traffic._measured(CASE, ["two-pass", "one-pass", "one-launch"], plan)


def test_every_graph_is_measured_with_clocks_and_caches_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_ncu(tmp_path, monkeypatch, SAID)
    found, missing = measured(tmp_path)
    assert set(found) == {"two-pass", "one-launch"}
    assert found["two-pass"]["bytes"] == pytest.approx(1.8e6 / 6)
    assert found["one-launch"]["read_bytes"] == pytest.approx(1.5e6 / 3)
    assert missing == {"one-pass": "its output is wrong"}
    for words in ("--clock-control none", "--cache-control none", "--graph-profiling graph"):
        assert words in calls.read_text()
    assert f"--inside {CASE} two-pass,one-pass,one-launch" in calls.read_text()
    assert " -P -m benchmarks hbm" in calls.read_text()


def test_a_graph_too_few_is_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ncu(tmp_path, monkeypatch, SAID.replace(f"counted: {CASE} one-launch 3\n", ""))
    found, missing = measured(tmp_path)
    assert not found and missing["two-pass"] == "2 workloads for 1 graphs"


def test_what_the_profiler_refuses_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ncu(tmp_path, monkeypatch, "==ERROR== ERR_NVGPUCTRPERM - no permission", 1)
    found, missing = measured(tmp_path)
    assert not found and "no permission" in missing["one-launch"]


def test_without_counters_there_is_still_the_count_on_paper(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["hbm", *MICRO_CPU, "--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "hbm.json").read_text())
    assert document["about"]["the write-ups' count"]["saved"] == pytest.approx(2 / 7)
    for case in document["cases"].values():
        assert set(case["forms"]) == set(FORMS)
        for form in case["forms"].values():
            assert form["paper_bytes"] == pytest.approx(sum(form["paper"].values()))
            assert "no memory counters" in form["not_measured"]
    assert (tmp_path / "hbm_traffic.png").is_file()
    assert "on paper" in capsys.readouterr().out


def test_the_measured_process_checks_and_runs_every_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["hbm", *MICRO_CPU, "--out", str(tmp_path), "--inside", CASE, ",".join(FORMS)]
    assert main(given) == 0
    said = capsys.readouterr().out
    for form in FORMS:
        assert f"counted: {CASE} {form} {traffic._sets(Shape(2, 48, 48, 2, 64))}\n" in said
    assert not list(tmp_path.iterdir())


def test_the_measured_process_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    given = ["hbm", *MICRO_CPU, "--out", str(tmp_path), "--inside"]
    assert main([*given, "H9-N9-D9", "two-pass"]) == 2
    assert main([*given, "B2-H2-N48-D64", "no-pass"]) == 2


def test_paper() -> None:
    shape = Shape(4, 1024, 1024, 12, 64)
    tensor = tensor_bytes(shape)
    assert tensor == 2 * 4 * 1024 * 768
    total = {form: sum(paper_bytes(shape, form, "bf16").values()) for form in FORMS}
    weight = 2 * 768**2
    assert total["two-pass"] == 13 * tensor + weight
    assert total["one-pass"] == 9 * tensor + weight
    # The one launch saves reading the attention back; fp8 reads v twice more in the prologue.
    assert total["two-launch"] - total["one-launch"] == tensor
    fp8 = sum(paper_bytes(shape, "one-launch", "fp8").values())
    assert fp8 - total["one-launch"] == 2 * tensor
    assert write_ups_share() == {"two-pass": 7.0, "fused": 5.0, "saved": pytest.approx(2 / 7)}
