"""Run mutants: each in a forked process, against the fuzz first and then against the tests that
cover its file."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from tests.mutants.automatic import ROOT

__all__ = ["Job", "preload", "run_job"]

#: Seed and cases of the fuzz that CI runs too (tests/test_fuzz.py).
FUZZ_SEED = 7
OPERATIONS, MODELS = 300, 60
#: What every child would import by itself otherwise; nothing of ours.
_HEAVY = (
    "torch", "numpy", "diffusers", "accelerate", "accelerate.hooks", "peft", "pytest",
    "hypothesis", "transformers", "safetensors.torch", "diffusers.hooks",
    "diffusers.models.transformers.transformer_wan",
    "diffusers.models.transformers.cogvideox_transformer_3d",
)  # fmt: skip


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads one module from a changed tree."""

    def __init__(self, name: str, path: str, tree: ast.Module) -> None:
        super().__init__(name, path)
        self._tree = tree

    def get_code(self, fullname: str):  # noqa: ANN201 (a code object)
        return compile(self._tree, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, path: Path, tree: ast.Module) -> None:
        self._name, self._path, self._tree = name, path, tree

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        loader = _Loader(fullname, str(self._path), self._tree)
        return importlib.util.spec_from_file_location(fullname, self._path, loader=loader)


def install(file: str, tree: ast.Module) -> None:
    """From here on a module of the package is what the tree says."""
    name = ".".join(Path(file).with_suffix("").parts)
    assert name not in sys.modules, f"{name} was imported before"
    sys.meta_path.insert(0, _Finder(name, ROOT / file, tree))


class Job:
    """A mutant to run.

    Attributes:
        name: Of the mutant.
        file: That it changes.
        tree: What that becomes.
        tests: What should notice, besides the fuzz: arguments of pytest.
        fuzz: Whether the fuzz runs first.
        interpreted: Whether it needs Triton's interpreter, and so a process of its own.
    """

    def __init__(
        self,
        name: str,
        file: str,
        tree: ast.Module,
        tests: list[str],
        *,
        fuzz: bool = True,
        interpreted: bool = False,
    ) -> None:
        self.name, self.file, self.tree, self.tests = name, file, tree, tests
        self.fuzz, self.interpreted = fuzz, interpreted


def preload() -> None:
    for name in _HEAVY:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def run_job(job: Job, limit: float) -> tuple[str, float]:
    """What killed a mutant ("" if nothing did within the limit of CPU seconds), and the seconds
    it took."""
    start = time.monotonic()
    if job.interpreted:
        return _interpreted(job, limit), time.monotonic() - start
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.setsid()
        said = "crashed"
        try:
            said = _inside(job, limit)
        except BaseException as error:
            said = f"crashed: {type(error).__name__}: {str(error)[:100]}"
        finally:
            os.write(write, said.encode()[:4000])
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    if not said and os.WIFSIGNALED(status):
        by = os.WTERMSIG(status)
        said = "" if by == signal.SIGXCPU else f"died by signal {by}"
    said = "" if said == "survived" else said
    return said, time.monotonic() - start


def _inside(job: Job, limit: float) -> str:
    """In the child: what noticed the mutant, or "survived"."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 5))
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
    install(job.file, job.tree)
    if job.fuzz:
        said = _fuzzed(job.file)
        if said:
            return said
    return _tested(job.tests) if job.tests else "survived"


def _fuzzed(file: str) -> str:
    from tests.fuzz.run import Plan, run

    of_ops = "/ops/" in file
    parts = [(0.0, OPERATIONS)] if of_ops else [] if "verdict" in file else [(1.0, MODELS)]
    for models, cases in parts:
        found = run(Plan(FUZZ_SEED, models=models), range(cases), most=1, echo=False)
        if found.failures:
            return f"fuzz: {found.failures[0][:160]}"
    return ""


class _FirstFailure:
    """A plugin that remembers which test failed first."""

    name = ""

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid

    def pytest_collectreport(self, report) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid


def _tested(tests: list[str]) -> str:
    import pytest

    first = _FirstFailure()
    os.chdir(ROOT)
    with contextlib.redirect_stdout(io.StringIO()):
        code = pytest.main(
            ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=60", *tests],
            plugins=[first],
        )
    if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return "survived"
    return f"test: {first.name or code}"


def _interpreted(job: Job, limit: float) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".py") as source:
        source.write(ast.unparse(job.tree))
        source.flush()
        code = (
            "import sys, ast; sys.path.insert(0, '.')\n"
            "from tests.mutants.run import install_file, _tested\n"
            f"install_file({job.file!r}, {source.name!r})\n"
            f"print(_tested({job.tests!r}))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            cwd=ROOT, capture_output=True, text=True, timeout=limit * 8,
        )  # fmt: skip
    said = done.stdout.strip().splitlines()[-1:] or [f"crashed: {done.stderr[-300:]}"]
    return "" if said[0] == "survived" else said[0]


def install_file(file: str, source: str) -> None:
    """`install`, from a file that keeps the lines; Triton reads the source of its kernels."""
    name = ".".join(Path(file).with_suffix("").parts)

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(
            self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
        ) -> importlib.machinery.ModuleSpec | None:
            if fullname != name:
                return None
            return importlib.util.spec_from_file_location(fullname, source)

    sys.meta_path.insert(0, Finder())


# --- signs of the support matrix -----------------------------------------------------------------


class _Cells:
    """A plugin that keeps the tests that carry one mark of the support matrix, and remembers the
    classes whose tests failed."""

    def __init__(self, capability: str) -> None:
        self._capability = capability
        self.failed: set[str] = set()

    def pytest_collection_modifyitems(self, config, items) -> None:
        items[:] = [item for item in items if self._classes(item)]

    def _classes(self, item) -> set[str]:
        found: set[str] = set()
        for mark in item.iter_markers("supports"):
            classes, *capabilities = mark.args
            if self._capability in capabilities:
                found |= {classes} if isinstance(classes, str) else set(classes)
        return found

    def pytest_runtest_makereport(self, item, call) -> None:
        if call.excinfo is not None:
            self.failed |= self._classes(item)


def cells_that_fail(file: str, tree: ast.Module, tests: list[str], capability: str) -> set[str]:
    """In a forked process: classes whose sign fails while one file is what the tree says."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            with open(os.devnull, "w") as null:
                os.dup2(null.fileno(), 1)
                os.dup2(null.fileno(), 2)
            install(file, tree)
            import pytest

            os.chdir(ROOT)
            cells = _Cells(capability)
            pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests],
                        plugins=[cells])  # fmt: skip
            os.write(write, ",".join(sorted(cells.failed)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return set(filter(None, said.split(",")))
