"""What the README and the pages of docs/ say can be done: code runs, commands parse, links lead
somewhere.

A Python block is executed, unless the line before it is a comment `<!-- not run: reason -->` (a
GPU, a download); such blocks are compiled only. The blocks of a page share one namespace, in
order, as a reader would type them.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from tests.processes import run_fresh
from turbo_rcm_patch.__main__ import _parser

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [
    README,
    *sorted(ROOT.glob("docs/*.md")),
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    ROOT / "results" / "README.md",
]
BLOCK = re.compile(
    r"(?:^<!--[ ]*not[ ]run:(?P<reason>[^\n]*?)-->\s*\n)?^```python[^\n]*\n(?P<code>.*?)^```[ ]*$",
    re.MULTILINE | re.DOTALL,
)
CONSOLE = re.compile(r"^```console\n(?P<text>.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
#: How a page calls this package's command line, and how the one of the benchmarks.
PACKAGE = ("turbo-rcm-patch ", "python -m turbo_rcm_patch ")
BENCHMARKS = "python -m benchmarks "


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=name_of)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(text: str) -> list[tuple[str, str]]:
    """(code, reason not to run it, or "") of every Python block."""
    return [(m["code"], (m["reason"] or "").strip()) for m in BLOCK.finditer(text)]


def commands(text: str) -> list[str]:
    """Every command of the console blocks, and every one between backticks in the text."""
    found = []
    for match in CONSOLE.finditer(text):
        lines = match["text"].replace("\\\n", " ").splitlines()
        found += [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    # Ellipses and alternatives (`1.3b|14b`) are for people.
    inline = INLINE.findall(CONSOLE.sub("", text))
    return found + [one for one in inline if not re.search(r"[…|]|\.\.\.", one)]


def arguments_of(command: str, *prefixes: str) -> list[str] | None:
    """The arguments of a command that begins with one of these prefixes, else None."""
    for prefix in prefixes:
        if command.startswith(prefix):
            return shlex.split(command.removeprefix(prefix), comments=True)
    return None


def anchors(page: Path) -> set[str]:
    """The anchors that a forge makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


PYTHON_PAGES = [page for page in PAGES if blocks(text_of(page))]


def test_blocks_are_found_with_their_reasons() -> None:
    first = "a\n```python\nx = 1\n```\n"
    second = "<!-- not run: needs a GPU -->\n```python\ny\n```\n```sh\nls\n```\n"
    assert blocks(first + second) == [("x = 1\n", ""), ("y\n", "needs a GPU")]
    text = "<!-- not run: far away -->\n\nwords\n```python\nz\n```\n"
    assert blocks(text) == [("z\n", "")]


def test_commands_are_found_in_blocks_and_in_the_text() -> None:
    text = (
        "`make a` and `x ... y`\n```console\n$ make b \\\n    c\nprinted\n$ make d  # why\n```\n"
    )
    assert [shlex.split(one, comments=True) for one in commands(text)] == [
        ["make", "b", "c"],
        ["make", "d"],
        ["make", "a"],
    ]


@EVERY_PAGE
def test_blocks_compile(page: Path) -> None:
    for index, (code, _) in enumerate(blocks(text_of(page))):
        compile(code, f"{name_of(page)} block {index + 1}", "exec")


@pytest.mark.slow
@pytest.mark.parametrize("page", PYTHON_PAGES, ids=name_of)
def test_blocks_run_in_order(page: Path, tmp_path: Path) -> None:
    runnable = [code for code, reason in blocks(text_of(page)) if not reason]
    if page == README:
        assert runnable, "the README shows how to use the library"
    run_fresh("\n\n".join(runnable), cwd=tmp_path)


@EVERY_PAGE
def test_commands_are_ones_that_the_command_line_takes(page: Path) -> None:
    known = set(_parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr, arg-type]
    for command in commands(text_of(page)):
        given = arguments_of(command, *PACKAGE)
        if not given or given[0].isupper():
            continue
        if given[0] in {"tune", "bench"} - known:
            continue  # not in the package yet
        if given[0].startswith("--") or len(given) > 1:
            _exits_well(command, given)
        assert given[0] in known | {"--help"}, f"{name_of(page)}: {command}"


def _exits_well(command: str, given: list[str]) -> None:
    try:
        _parser().parse_args(given)
    except SystemExit as stop:
        assert not stop.code, f"the command line refuses: {command}"


@EVERY_PAGE
def test_benchmark_commands_are_ones_that_the_benchmarks_take(page: Path) -> None:
    if importlib.util.find_spec("benchmarks") is None:
        pytest.skip("the benchmarks are not beside the package yet")
    from benchmarks.__main__ import parser  # type: ignore[import-not-found, unused-ignore]

    for command in commands(text_of(page)):
        given = arguments_of(command, BENCHMARKS)
        if given:
            try:
                parser().parse_args(given)
            except SystemExit as stop:
                assert not stop.code, f"{name_of(page)}: the benchmarks refuse: {command}"


@EVERY_PAGE
def test_make_has_the_targets_that_are_named(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    for command in commands(text_of(page)):
        given = arguments_of(command, "make ")
        for word in given or []:
            assert "=" in word or word in targets, f"{name_of(page)}: make {word}"


@EVERY_PAGE
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(text_of(page)):
        if link.startswith(("http://", "https://")):
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), f"{name_of(page)} links to {link}, which is not there"
        assert target.is_relative_to(ROOT), f"{name_of(page)} links out of the repository"
        if anchor:
            assert anchor in anchors(target), f"{name_of(page)}: no heading for {link}"


@EVERY_PAGE
def test_results_and_tests_that_are_named_are_there(page: Path) -> None:
    for named in re.findall(
        r"\b(?:results|tests|examples)/[\w./*-]+\.(?:json|txt|py|md)", text_of(page)
    ):
        if named == "results/gpu.json":  # what `make record` writes
            continue
        assert list(ROOT.glob(named)), f"{name_of(page)} names {named}, which is not there"


def test_the_readme_is_short() -> None:
    lines = text_of(README).splitlines()
    assert len(lines) <= 200
    assert max(map(len, lines)) <= 120
    assert len(text_of(README).split()) <= 1_300


def test_the_readme_has_its_parts_in_order() -> None:
    headings = re.findall(r"^## (.*)$", text_of(README), re.MULTILINE)
    assert headings == [
        "Install",
        "Use",
        "Speed",
        "Is the video the same?",
        "What it supports",
        "Limits",
        "Links",
    ]
    assert "$ make demo" in text_of(README) and "$ make test" in text_of(README)


def test_the_readme_has_few_links_that_a_package_index_cannot_follow() -> None:
    relative = [one for one in LINK.findall(text_of(README)) if not one.startswith("http")]
    assert len(relative) <= 15
