"""The support matrix: docs/support.md shows what the script writes, and every mark has its test.

A test says what it proves with `pytest.mark.supports(classes, *capabilities)`: a class or a tuple
of classes, and capabilities of `tools.support`.
"""

from __future__ import annotations

import inspect
from functools import cache
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.patching.turbodiffusion import tiny, with_sparse
from tools import support
from tools.support import PUBLISHED, count_pairs, short_name
from turbo_rcm_patch import find_pairs
from turbo_rcm_patch.patching.find import FAMILIES, STRUCTURES

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "support.md"


class Proof(NamedTuple):
    """A test that carries the marker, and one of the cells of the matrix that it proves."""

    test: str
    cell: tuple[str, str]
    gpu: bool


@cache
def proofs() -> list[Proof]:
    """Every marked test function; only files that name the marker are imported."""
    found = []
    for path in sorted(TESTS.rglob("test_*.py")):
        if "pytest.mark.supports(" not in path.read_text(encoding="utf-8"):
            continue
        module = import_module(".".join(path.relative_to(TESTS.parent).with_suffix("").parts))
        on_module = getattr(module, "pytestmark", [])
        on_module = on_module if isinstance(on_module, list) else [on_module]
        for name, test in inspect.getmembers(module, inspect.isfunction):
            marks = [*on_module, *getattr(test, "pytestmark", [])]
            gpu = any(mark.name == "gpu" for mark in marks)
            for mark in marks:
                if mark.name == "supports" and name.startswith("test_"):
                    classes, *capabilities = mark.args
                    classes = (classes,) if isinstance(classes, str) else classes
                    cells = product(classes, capabilities)
                    found += [Proof(f"{path.name}::{name}", cell, gpu) for cell in cells]
    return found


def test_every_registered_class_has_its_column() -> None:
    assert set(PUBLISHED) == {*FAMILIES, *STRUCTURES}
    assert list(support.CLASSES) == [short_name(name) for name in PUBLISHED]


def test_every_mark_has_its_tests() -> None:
    assert {proof.cell for proof in proofs()} <= set(support.marks())
    for cell, mark in support.marks().items():
        found = [proof for proof in proofs() if proof.cell == cell]
        on_cpu = [proof.test for proof in found if not proof.gpu]
        if mark in ("-", "no"):
            assert not found, f"{cell} is {mark!r}, but {found[0].test} says it proves it"
        elif mark == "gpu":
            assert found, f"no test proves {cell}"
            assert not on_cpu, f"{cell} is proven on a CPU too, by {on_cpu[0]}: mark it so"
        else:
            assert on_cpu, f"no test proves {cell}, {mark!r}, on a CPU"


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert support.replaced(page) == page, "run: python -m tools.support docs/support.md"
    with pytest.raises(ValueError, match="the marks"):
        support.replaced("a page without marks")


#: Kind of a pair -> the capability that it is.
KINDS = {
    "self": "self-attention",
    "cross": "cross-attention",
    "image": "image branch",
    "feed-forward": "feed-forward",
}


@pytest.mark.supports(("WanAnimateTransformer3DModel", "ConsisIDTransformer3DModel"), "faces")
@pytest.mark.parametrize("name", [name for name in FAMILIES if "diffusers" in name])
def test_marks_are_the_pairs_of_the_published_models(name: str) -> None:
    """The fused kinds of `find_pairs` are marked, beside them only VACE's image branch, which its
    class has and no published model; and the pairs that are left, which are attentions to a face.
    """
    marks, pairs = support.marks(), []
    for model in PUBLISHED[name]:
        with torch.device("meta"):
            pairs += find_pairs(model.build(name))
    fused = {pair.kind for pair in pairs if pair.fused}
    marked = {kind for kind in KINDS if marks[short_name(name), KINDS[kind]] == "yes"}
    assert marked - fused == ({"image"} if "VACE" in name else set())
    assert fused <= marked
    left = marks[short_name(name), "faces"] == "left"
    assert left == any(not pair.fused for pair in pairs)


def test_a_block_of_a_checkout_has_the_listed_pairs() -> None:
    made = (tiny(layers=1), tiny(layers=1, image=True), with_sparse(tiny(layers=1)))
    for model, listed in zip(made, PUBLISHED["WanModel"], strict=True):
        table = find_pairs(model)
        assert tuple(pair.kind for pair in table) == listed.kinds
        assert count_pairs("WanModel", listed) == (table.fused, 0)
