"""The fuzz finds nothing and finds a planted fault; mutants change a file and tests see it."""

from __future__ import annotations

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


@pytest.mark.parametrize(("test", "verdict"), [("f(2)", "unnoticed"), ("not f(3)", "noticed")])
def test_a_test_notices_a_mutant(tmp_path: Path, test: str, verdict: str) -> None:
    source = "def f(x):\n    return x < 3\n"
    (tmp_path / "file.py").write_text(source)
    (tmp_path / "test_file.py").write_text(f"from file import f\ndef test():\n    assert {test}\n")
    one = mutants.mutant("file.py", 0, tmp_path)
    assert mutants.run_mutant(one, tmp_path, ["test_file.py"], 120) == verdict
    assert (tmp_path / "file.py").read_text() == source


def test_every_table_entry_names_tests_that_exist() -> None:
    for start, tests in mutants.TESTS.items():
        assert list(mutants.ROOT.glob(f"{start}*")) and all(
            (mutants.ROOT / test).exists() for test in tests
        )
