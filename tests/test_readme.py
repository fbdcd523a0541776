"""The README and the pages of docs/ hold: code runs, commands parse, links lead somewhere.

A Python block is executed, unless the line before it is a comment `<!-- not run: reason -->` (a
GPU, a download); such blocks are compiled only. The blocks of a page share one namespace, in
order, as a reader would type them. A block that begins with `# file: NAME` is saved under that
name instead. A block marked `py` is an excerpt of the file that its first line
names; `...` stands for lines that are left out.
"""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from tests.processes import run_fresh
from turbo_rcm_patch.__main__ import _parser

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
MAKEFILE = ROOT / "Makefile"
PAGES = [
    README,
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("turbo_rcm_patch/ops/*/README.md")),
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *(ROOT / name / "README.md" for name in ("results", "training", "integrations/comfyui")),
    *sorted(ROOT.glob("turbo_rcm_patch/tiny/weights/*/README.md")),
]
BLOCK = re.compile(
    r"(?:^<!--[ ]*not[ ]run:(?P<reason>[^\n]*?)-->\s*\n)?^```python[^\n]*\n(?P<code>.*?)^```[ ]*$",
    re.MULTILINE | re.DOTALL,
)
EXCERPT = re.compile(r"^```py\n# (?P<file>\S+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"^```console\n(?P<text>.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
SAVED = re.compile(r"# file: (?P<name>\S+)\n")
#: How a page calls this package's command line, and how that of the benchmarks.
PACKAGE = ("turbo-rcm-patch ", "python -m turbo_rcm_patch ")
BENCHMARKS, TRAINING = "python -m benchmarks ", "python -m training "


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=name_of)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(text: str) -> list[tuple[str, str]]:
    """(code, reason not to run it, or "") of every Python block."""
    return [(m["code"], (m["reason"] or "").strip()) for m in BLOCK.finditer(text)]


def commands(text: str) -> list[list[str]]:
    """The words of every command in console blocks, and between backticks in the text."""
    found = []
    for match in CONSOLE.finditer(text):
        lines = match["text"].replace("\\\n", " ").splitlines()
        found += [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    # Ellipses and alternatives (`1.3b|14b`) are for people.
    inline = INLINE.findall(CONSOLE.sub("", text))
    found += [one for one in inline if not re.search(r"[…|]|\.\.\.", one)]
    starts = (*PACKAGE, BENCHMARKS, TRAINING, "make ")
    return [shlex.split(one, comments=True) for one in found if one.startswith(starts)]


def anchors(page: Path) -> set[str]:
    """The anchors that a forge makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


@pytest.mark.slow
@pytest.mark.parametrize("page", [one for one in PAGES if blocks(text_of(one))], ids=name_of)
def test_blocks_run_in_order(page: Path, tmp_path: Path) -> None:
    script = ["import sys; sys.path.insert(0, '.')"]
    for code, reason in blocks(text_of(page)):
        compile(code, name_of(page), "exec")
        saved = SAVED.match(code)
        if saved:
            (tmp_path / saved["name"]).write_text(code, encoding="utf-8")
        elif not reason:
            script.append(code)
    assert page != README or len(script) > 1, "the README shows how to use the library"
    run_fresh("\n\n".join(script), cwd=tmp_path)


@EVERY_PAGE
def test_excerpts_are_the_code(page: Path) -> None:
    for match in EXCERPT.finditer(text_of(page)):
        source = [
            re.sub(r"  #.*", "", line) for line in text_of(ROOT / match["file"]).splitlines()
        ]
        at = 0
        for line in match["code"].splitlines():
            shown = re.sub(r"  # \d+$", "", line)
            if shown.strip() == "...":
                continue
            assert shown in source[at:], f"{name_of(page)}: {match['file']} has no {shown!r} there"
            at = source.index(shown, at) + 1


@EVERY_PAGE
def test_commands_are_ones_that_are_there(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text_of(MAKEFILE), re.MULTILINE))
    for words in commands(text_of(page)):
        if words[0] == "make":
            assert all("=" in word or word in targets for word in words[1:]), words
            continue
        parser = _parser()
        if words[1:3] in (["-m", "benchmarks"], ["-m", "training"]):
            parser = import_module(f"{words[2]}.__main__").parser()
        try:
            parser.parse_args(words[1 if words[0] == "turbo-rcm-patch" else 3 :])
        except SystemExit as stop:
            assert not stop.code, f"{name_of(page)}: the command line refuses {words}"


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


@pytest.mark.parametrize("page", [*PAGES, MAKEFILE], ids=name_of)
def test_files_that_are_named_are_there(page: Path) -> None:
    named = re.findall(
        r"(?:\b(?:results|tests|examples|tools|training|turbo_rcm_patch|integrations)|\.ci)"
        r"/[\w./*-]+\.(?:jsonl?|txt|py|md)\b",
        text_of(page),
    )
    for name in named:
        if name != "turbo_rcm_patch/patching/families/lumen.py":  # the example of CONTRIBUTING.md
            assert list(ROOT.glob(name)), f"{name_of(page)} names {name}, which is not there"
