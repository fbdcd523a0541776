"""The support matrix: docs/support.md shows what the code prints, and every mark has its test.

A test says what it proves with `pytest.mark.supports(classes, *capabilities)`: a class or a tuple
of classes, and capabilities of `turbo_rcm_patch.video.support`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from turbo_rcm_patch.patching.registry import FAMILIES, STRUCTURES
from turbo_rcm_patch.video.support import PUBLISHED, count_pairs, short_name

from tests.patching.turbodiffusion import tiny, with_sparse
from turbo_rcm_patch import find_pairs
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.video import support

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "support.md"
COMMAND = "python -m turbo_rcm_patch support --write docs/support.md"


@dataclass(frozen=True)
class Proof:
    """A test that carries the marker."""

    test: str
    cell: tuple[str, str]
    gpu: bool


@cache
def proofs() -> tuple[Proof, ...]:
    """Every marked test function; only files that name the marker are imported."""
    return tuple(
        proof
        for path in sorted(TESTS.rglob("test_*.py"))
        if path != Path(__file__) and "supports(" in path.read_text(encoding="utf-8")
        for proof in in_module(path)
    )


def in_module(path: Path) -> Iterator[Proof]:
    module = import_module(".".join(path.relative_to(TESTS.parent).with_suffix("").parts))
    on_module = getattr(module, "pytestmark", [])
    on_module = on_module if isinstance(on_module, list) else [on_module]
    for name, test in inspect.getmembers(module, inspect.isfunction):
        if not name.startswith("test_") or test.__module__ != module.__name__:
            continue
        marks = [*on_module, *getattr(test, "pytestmark", [])]
        names = {mark.name for mark in marks}
        for mark in marks:
            if mark.name == "supports":
                assert "skip" not in names, f"{name} is skipped and proves nothing"
                yield from cells(f"{path.name}::{name}", mark, "gpu" in names)


def cells(test: str, mark: Any, gpu: bool) -> Iterator[Proof]:
    classes, *capabilities = mark.args
    classes = (classes,) if isinstance(classes, str) else classes
    assert classes and capabilities, f"{test}: supports(classes, *capabilities)"
    for cls in classes:
        for capability in capabilities:
            yield Proof(test, (cls, capability), gpu)


def test_every_registered_class_has_its_column() -> None:
    registered = {*FAMILIES, *STRUCTURES}
    assert set(PUBLISHED) == registered
    assert list(support.CLASSES) == [short_name(name) for name in PUBLISHED]


def test_every_mark_has_its_tests() -> None:
    for cell, mark in support.marks().items():
        found = [proof for proof in proofs() if proof.cell == cell]
        on_cpu = [proof.test for proof in found if not proof.gpu]
        if mark in ("-", "untested"):
            assert not found, f"{cell} is {mark!r}, but {found[0].test} says it proves it"
        elif mark == "gpu":
            assert found, f"no test proves {cell}"
            assert not on_cpu, f"{cell} is proven on a CPU too, by {on_cpu[0]}: mark it so"
        else:
            assert on_cpu, f"no test proves {cell}, {mark!r}, on a CPU"


def test_every_test_proves_what_there_is() -> None:
    marks = support.marks()
    unknown = {f"{proof.test}: {proof.cell}" for proof in proofs() if proof.cell not in marks}
    assert not unknown
    assert len({proof.test for proof in proofs()}) > 50


def test_the_page_has_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["support"]) == 0
    printed = capsys.readouterr().out
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(support.BEGIN)
    shown, end, _ = rest.partition(support.END)
    assert end and shown.strip() == printed.strip(), f"{PAGE.name} is out of date, run: {COMMAND}"


def test_writing_leaves_the_rest_of_a_file(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"before\n\n{support.BEGIN}\nold\n{support.END}\nafter\n", encoding="utf-8")
    for _ in range(2):
        assert main(["support", "--write", str(path)]) == 0
        text = path.read_text(encoding="utf-8")
        assert text.startswith("before\n\n") and text.endswith("\nafter\n") and "old" not in text
        assert support.matrix() in text
    path.write_text("nothing", encoding="utf-8")
    assert main(["support", "--write", str(path)]) == 2
    assert main(["support", "--write", str(tmp_path / "none")]) == 2
    assert path.read_text(encoding="utf-8") == "nothing"
    said = capsys.readouterr().err
    assert "expected: a file with" in said and "expected: an existing page with" in said
    path.write_bytes(b"\xff\xfe")
    assert main(["support", "--write", str(path)]) == 2
    assert "UTF-8" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"{support.BEGIN}{support.END}", encoding="utf-8")

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_text", refuse)
    assert main(["support", "--write", str(path)]) == 2


#: Kind of a pair -> the capability that it is.
KINDS = {
    "self": "self-attention",
    "cross": "cross-attention",
    "image": "image branch",
    "feed-forward": "feed-forward",
    "control": "control, faces",
}


@pytest.mark.parametrize("name", [name for name in FAMILIES if "diffusers" in name])
def test_marks_are_the_pairs_of_the_published_models(name: str) -> None:
    """What `find_pairs` lists in them is marked; beside it only VACE's image branch, which its
    class has and no published model."""
    marks, fused = support.marks(), set()
    for model in PUBLISHED[name]:
        with torch.device("meta"):
            fused |= {pair.kind for pair in find_pairs(model.build(name)) if pair.fused}
    marked = {kind for kind in KINDS if marks[short_name(name), KINDS[kind]] == "yes"}
    assert marked - fused == ({"image"} if "VACE" in name else set())
    assert fused <= marked


def test_a_block_of_a_checkout_has_the_listed_pairs() -> None:
    made = (tiny(layers=1), tiny(layers=1, image=True), with_sparse(tiny(layers=1)))
    for model, listed in zip(made, PUBLISHED["WanModel"], strict=True):
        table = find_pairs(model)
        assert tuple(pair.kind for pair in table) == listed.kinds
        assert count_pairs("WanModel", listed) == (table.fused, 0)
