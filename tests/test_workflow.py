"""The forge runs what `make test` runs, on every Python that the package admits."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
WORKFLOW: dict[Any, Any] = yaml.safe_load(
    (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
)


def commands(job: str) -> str:
    return "\n".join(step.get("run", "") for step in WORKFLOW["jobs"][job]["steps"])


def test_it_lints_checks_types_and_builds_the_reference() -> None:
    assert "make lint" in commands("lint") and "make docs" in commands("lint")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    lint = makefile.partition("\nlint:")[2].partition("\n\n")[0]
    assert all(tool in lint for tool in ("ruff check", "ruff format --check", "mypy"))


def test_the_cpu_tests_run_on_every_python() -> None:
    matrix = WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert matrix == ["3.11", "3.12", "3.13", "3.14"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == f">={matrix[0]}"
    assert re.search(r'pytest .*-m "not gpu"$', commands("test"), re.MULTILINE)


def test_both_ends_of_the_ranges_are_tried() -> None:
    job = WORKFLOW["jobs"]["versions"]
    ends = {one["ends"] for one in job["strategy"]["matrix"]["include"]}
    assert ends == {"lowest-direct", "highest"}
    assert "--resolution ${{ matrix.ends }} -e '.[dev]'" in commands("versions")
    assert "constraints" not in commands("versions")
    assert re.search(r'pytest .*-m "not gpu"$', commands("versions"), re.MULTILINE)


def test_a_release_is_built_and_other_systems_generate() -> None:
    assert "make dist" in commands("dist")
    systems = WORKFLOW["jobs"]["other-systems"]["strategy"]["matrix"]["system"]
    assert {name.partition("-")[0] for name in systems} == {"windows", "macos"}
    assert "generate --prompt" in commands("other-systems")


def test_every_week_what_is_rare_and_the_main_branch_of_diffusers_are_tried() -> None:
    (schedule,) = WORKFLOW[True]["schedule"]  # YAML reads `on` as true
    assert re.fullmatch(r"\d+ \d+ \* \* [0-6]", schedule["cron"])
    assert "--every-target tests/kernels" in commands("every-target")
    for job in ("every-target", "diffusers-main"):
        assert "'schedule'" in WORKFLOW["jobs"][job]["if"]
    assert "diffusers@main" in commands("diffusers-main")
    folders = re.findall(r"tests/\w+", commands("diffusers-main"))
    assert folders and all((ROOT / folder).is_dir() for folder in folders)
