"""The mutation run: its mutants are what they say, it notices what tests notice, and its page
names every survivor."""

from __future__ import annotations

import ast
import json
import multiprocessing
import queue
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.mutants import __main__ as run_mutants
from tests.mutants import coverage
from tests.mutants.__main__ import ENOUGH
from tests.mutants.automatic import PARTS, mutated, sample, sources
from tests.mutants.own import OWN, SIGNS
from turbo_rcm_patch.video import support

ROOT = Path(__file__).parents[1]
RESULT = json.loads((ROOT / "results" / "mutants.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "mutants.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("own", [*SIGNS, *OWN], ids=lambda own: own.name)
def test_own_mutants_change_one_place(own) -> None:
    text = (ROOT / own.file).read_text(encoding="utf-8")
    assert ast.dump(own.tree()) != ast.dump(ast.parse(text))
    for test in own.tests:
        assert test == "-k" or not test.startswith("tests/") or (ROOT / test).is_file()


def test_signs_are_rows_of_the_matrix() -> None:
    marks = support.marks()
    for own in SIGNS:
        assert own.classes
        assert all(marks[cls, own.capability] == "yes" for cls in own.classes), own.name
    broken = {own.capability for own in SIGNS}
    assert broken >= {"self-attention", "cross-attention", "image branch", "feed-forward"}
    assert broken >= {"int8 Linears", "fused QKV", "the guard"}


def test_a_sample_is_the_same_every_time_and_covers_the_parts() -> None:
    drawn = sample(5, 60)
    assert drawn == sample(5, 60) != sample(6, 60)
    for part in PARTS:
        assert any(one.file.startswith(part) for one in drawn)
    for one in drawn:
        tree, same = mutated(one.file, one.index)
        assert same == one and one.before != one.after
        compile(tree, one.file, "exec")


def test_every_file_has_its_tests() -> None:
    for part in PARTS:
        for file in sources(part):
            tests = coverage.tests_of(file)
            assert tests != ["tests"], f"{file}: name its tests in tests/mutants/coverage.py"
            tests += coverage.kernel_tests_of(file)
            assert all((ROOT / test).is_file() for test in tests), tests


def test_no_module_is_loaded_by_pytest_itself(pytestconfig: pytest.Config) -> None:
    """It loads what looks like a file of tests, and the mutant of it would never be seen."""
    patterns = pytestconfig.getini("python_files")
    for part in PARTS:
        for file in sources(part):
            assert not any(fnmatch(Path(file).name, pattern) for pattern in patterns), file


def command(*options: object) -> str:
    """What `python -m tests.mutants` prints; in a process of its own, because it changes modules
    before they are imported."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutants", *map(str, options)],
        cwd=ROOT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    """One that a test notices, and one of a sign of the matrix."""
    path = tmp_path / "mutants.json"
    more = ("--json", path, "--sample", 0, "--only")
    command(*more, "masked_attention without")
    found = json.loads(path.read_text())
    assert found["own"] == {"mutants": 1, "killed": 1}
    assert "test_masked_attention.py" in found["mutants"][0]["killed_by"]
    command(*more, "separate projections are")
    found = json.loads(path.read_text())
    assert found["own"]["killed"] == found["sign"]["killed"] == 1, "the first one is kept"
    assert "self-attention is not fused" in command("--list", "--sample", 3)


def test_the_result_is_good_enough_and_explained() -> None:
    assert RESULT["score"] >= ENOUGH
    assert RESULT["sign"]["mutants"] == RESULT["sign"]["killed"] == len(SIGNS)
    assert RESULT["own"]["mutants"] == RESULT["own"]["killed"] == len(OWN)
    assert f"{RESULT['sample']['killed']} of {RESULT['sample']['mutants']}" in PAGE
    for name in RESULT["survivors"]:
        assert f"`{name}`" in PAGE, f"explain {name} in docs/mutants.md"


@pytest.mark.slow
def test_a_test_that_always_fails_kills_nothing() -> None:
    """It fails without the mutant too; one behind it notices what is broken."""
    code = (
        "import ast; from tests.mutants.run import Job, preload, run_job\n"
        "preload()\n"
        "file = 'turbo_rcm_patch/video/verdict.py'\n"
        "text, tests = open(file).read(), ['tests/mutants/example.py']\n"
        "for more in ('', 'broken = 1'):\n"
        "    job = Job('x', file, ast.parse(text + chr(10) + more), tests, fuzz=False)\n"
        "    print(run_job(job, 60)[0])\n"
        "print(run_job(job, 60, 0.0)[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-4000:]
    nothing, killed, stopped = done.stdout.splitlines()
    assert (nothing, stopped) == ("", "None") and killed.endswith("::test_of_the_change"), killed


def test_a_mutant_that_cannot_be_run_counts_as_a_survivor(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise AssertionError("its text is not there")

    monkeypatch.setattr(run_mutants, "run_entry", fails)
    done: queue.Queue[dict] = queue.Queue()
    next_one = multiprocessing.get_context("fork").Value("i", 0)
    todo = [{"name": name, "kind": "own"} for name in "ab"]
    run_mutants.worker(todo, done, next_one, 1.0, float("inf"))
    found = [done.get_nowait() for _ in todo]
    assert [one["name"] for one in found] == ["a", "b"] and not any(x["killed_by"] for x in found)
    assert run_mutants.summary(0, found)["survivors"] == ["a", "b"]
