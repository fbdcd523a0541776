"""The fuzz finds nothing and finds a planted fault; mutants change a file and tests see it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tools import fuzz, mutants


@pytest.mark.parametrize(("kind", "cases"), [("operations", 200), ("models", 12)])
def test_a_slice_of_the_fuzz_finds_nothing(kind: str, cases: int) -> None:
    with torch.no_grad():
        said = [fuzz.run_case(7, case, kind) for case in range(cases)]
    assert not list(filter(None, said))


def test_the_fuzz_finds_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fuzz.ops.skip
    monkeypatch.setattr(fuzz.ops, "skip", lambda x, y, a, b: right(x, y, b, a))
    said = [fuzz.run_case(7, case, "operations") for case in range(60)]
    assert any(": skip " in words and "relative error" in words for words in said)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(x: int) -> bool:\n    return x < 3", {"x <= 3", "4"}),
        ("a and b and c", {"a or b or c", "b and c", "a and c", "a and b"}),
        ("key = f(x, y, z)", {"f(y, x, z)"}),
        ("key = x.dtype, x.device", {"(x.dtype,)"}),
        ("x.to(torch.float32)", {"None", "torch.bfloat16"}),
    ],
)
def test_a_mutant_changes_one_node(source: str, expected: set[str], tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(source)
    count = mutants.count("file.py", tmp_path)
    assert {mutants.mutant("file.py", i, tmp_path).after for i in range(count)} == expected


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A repository with a package of one file and three tests."""
    (tmp_path / "small").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "small" / "__init__.py").touch()
    (tmp_path / "small" / "file.py").write_text(
        "LIMIT = 3\n\n\ndef f(x):\n    return x < LIMIT\n\n\ndef g(x):\n    return x + 1\n"
    )
    (tmp_path / "tests" / "test_file.py").write_text(
        "import pytest\nfrom small.file import f, g\n\n"
        "@pytest.mark.parametrize('x', [1, 2])\ndef test_f(x):\n    assert f(x)\n\n"
        "def test_h():\n    assert f(1) and g(0)\n\n"
        "def test_g():\n    assert g(1) == 2\n"
    )
    return tmp_path


def mutants_of(root: Path) -> list[mutants.Mutant]:
    return [mutants.mutant(FILE, i, root) for i in range(mutants.count(FILE, root))]


FILE = "small/file.py"


def test_a_mutant_is_given_the_tests_that_run_its_line(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "PACKAGE", "small")
    shutil.copytree(Path(mutants.__file__).parent, small / "tools")
    record = mutants.recorded(small, ["tests"], small / "kept.json")
    own = {name.partition("::")[2]: one for name, one in record.items()}
    assert own["test_g"]["lines"] == {FILE: [9]}
    for i, name in enumerate(("test_h", "test_f[2]", "test_f[1]", "test_g")):
        own[name]["seconds"] = i + 1.0
    chosen = {
        one.line: [name.partition("::")[2] for name in mutants.tests_for(one, record, 7.0, small)]
        for one in mutants_of(small)
    }
    # One of each function first, then the others; the constant where it is read.
    runs_f = ["test_h", "test_f[2]", "test_f[1]"]
    assert chosen == {1: runs_f, 5: runs_f, 9: ["test_h", "test_g"]}
    one = mutants_of(small)[0]
    assert len(mutants.tests_for(one, record, 2.5, small)) == 1
    kept = json.loads((small / "kept.json").read_text())
    (small / "kept.json").write_text(json.dumps(kept | {"tests": {}}))
    assert mutants.recorded(small, ["tests"], small / "kept.json") == {}
    (small / FILE).write_text("f = g = lambda x: x + 1\n")
    assert len(mutants.recorded(small, ["tests"], small / "kept.json")) == 4


def test_a_test_notices_a_mutant(small: Path) -> None:
    (small / "pyproject.toml").write_text("[tool.pytest.ini_options]\npythonpath = ['.']\n")
    before, verdicts = (small / FILE).read_text(), {}
    for one in mutants_of(small):
        tests = ["tests/test_file.py::test_f", "tests/test_file.py::test_g"]
        verdicts[one.after] = mutants.run_mutant(one, small, tests, 120)
    assert verdicts == {
        "4": "unnoticed", "x <= LIMIT": "unnoticed", "x - 1": "noticed", "2": "noticed"
    }  # fmt: skip
    assert (small / FILE).read_text() == before


def test_every_table_entry_names_tests_that_exist() -> None:
    for start, tests in mutants.TESTS.items():
        assert list(mutants.ROOT.glob(f"{start}*")) and all(
            (mutants.ROOT / test).exists() for test in tests
        )
