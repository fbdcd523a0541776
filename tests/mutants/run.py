"""Run mutants: each in a forked process, against a few cases of the fuzz, the tests that cover its
file, and the rest of the fuzz."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

from tests import interpreter, processes
from tests.mutants.automatic import ROOT

__all__ = ["Job", "cells_that_fail", "preload", "run_job"]

#: Seed and cases of the fuzz that CI runs too (tests/test_fuzz.py).
FUZZ_SEED = 7
OPERATIONS, MODELS = 300, 60
#: Of these, how many come before the tests: most of what the fuzz notices, it notices early.
FIRST = {OPERATIONS: 100, MODELS: 15}
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
    processes.RANKS = "fork"


class Job:
    """A mutant to run.

    Attributes:
        name: Of the mutant.
        file: That it changes.
        tree: What that becomes.
        tests: What should notice, besides the fuzz: arguments of pytest.
        kernels: Tests that run last, under Triton's interpreter and so in a process of its own.
        fuzz: Whether the fuzz runs first.
        interpreted: Whether `tests` need Triton's interpreter, and nothing else is to run.
    """

    def __init__(
        self,
        name: str,
        file: str,
        tree: ast.Module,
        tests: list[str],
        *,
        kernels: Sequence[str] = (),
        fuzz: bool = True,
        interpreted: bool = False,
    ) -> None:
        self.name, self.file, self.tree, self.tests = name, file, tree, tests
        self.kernels = list(tests if interpreted else kernels)
        self.fuzz, self.interpreted = fuzz, interpreted


def preload() -> None:
    for name in _HEAVY:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if "torch" in sys.modules:  # Threads that wait for each other use up the limit.
        sys.modules["torch"].set_num_threads(1)


def run_job(job: Job, limit: float, until: float = float("inf")) -> tuple[str | None, float]:
    """What killed a mutant, and the seconds it took.

    Args:
        job: The mutant.
        limit: CPU seconds that it gets.
        until: A time of `time.monotonic` at which it is stopped.

    Returns:
        "" if nothing noticed it within the limit, None if it was stopped before.
    """
    start = time.monotonic()
    if job.interpreted:
        return _interpreted(job, limit * 8, until), time.monotonic() - start
    unsound: set[str] = set()
    while True:
        said = in_a_fork(partial(_inside, job, limit, unsound), until)
        # A test that fails without the mutant too says nothing about it.
        if said is not None and said.startswith(("test: ", "fuzz: ")):
            sound = in_a_fork(partial(_holds, said, limit), until)
            if sound is None:
                said = None
            elif sound == "no" and said not in unsound:
                unsound.add(said)
                continue
            elif sound == "no":  # It cannot even be collected, so nothing behind it ran.
                said = ""
        if said == "" and job.kernels:
            said = _interpreted(job, limit * 8, until)
        return said, time.monotonic() - start


def in_a_fork(run: Callable[[], str], until: float = float("inf")) -> str | None:
    """What a function returns in a forked process, whose output is dropped; "" if the limit of
    CPU seconds ended it, None if that was the time."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.setsid()
        said = "crashed"
        try:
            with open(os.devnull, "w") as null:
                os.dup2(null.fileno(), 1)
                os.dup2(null.fileno(), 2)
            said = run()
        except BaseException as error:
            said = f"crashed: {type(error).__name__}: {str(error)[:100]}"
        finally:
            os.write(write, said.encode()[:4000])
            os._exit(0)
    os.close(write)
    left = max(0.0, until - time.monotonic())
    with os.fdopen(read, "rb") as pipe:
        # What the child started holds the pipe too, so its end alone does not tell.
        ready, _, _ = select.select([pipe], [], [], None if left == float("inf") else left)
        if not ready:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        said = os.read(pipe.fileno(), 4000).decode(errors="replace") if ready else ""
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ready:
        return None
    if not said and os.WIFSIGNALED(status):
        by = os.WTERMSIG(status)
        # The second is the hard limit, or no memory: neither says that a test noticed something.
        return "" if by in (signal.SIGXCPU, signal.SIGKILL) else f"died by signal {by}"
    return said


def _inside(job: Job, limit: float, unsound: Collection[str]) -> str:
    """In the child: what noticed the mutant, or ""."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 5))
    install(job.file, job.tree)
    parts = _cases(job.file) if job.fuzz else []
    for first in (True, False):
        for models, cases in parts:
            some = range(FIRST[cases]) if first else range(FIRST[cases], cases)
            said = _fuzzed(models, some)
            if said and said not in unsound:
                return said
        if first and job.tests:
            said = _tested(job.tests, [one.removeprefix("test: ") for one in unsound])
            if said:
                return said
    return ""


def _holds(killer: str, limit: float) -> str:
    """In a child without a mutant: whether what noticed one passes, "yes" or "no"."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 5))
    kind, _, rest = killer.partition(": ")
    if kind == "test":
        return "no" if _tested([rest]) == killer else "yes"
    found = re.search(r"--only (\d+)(?:.*--models ([\d.]+))?", rest)
    assert found is not None, killer
    case = int(found[1])
    return "no" if _fuzzed(float(found[2] or 0.2), range(case, case + 1)) else "yes"


def _cases(file: str) -> list[tuple[float, int]]:
    """Share of models, and how many cases of the fuzz look at a file."""
    if "/ops/" in file:
        return [(0.0, OPERATIONS)]
    return [(1.0, MODELS)] if "/patching/" in file else []


def _fuzzed(models: float, cases: Iterable[int]) -> str:
    from tests.fuzz.run import Plan, run

    found = run(Plan(FUZZ_SEED, models=models), cases, most=1, echo=False)
    return f"fuzz: {found.failures[0][:160]}" if found.failures else ""


class _FirstFailure:
    """A plugin that remembers which test failed first."""

    name = ""

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid

    def pytest_collectreport(self, report) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid


def _tested(tests: list[str], without: Iterable[str] = ()) -> str:
    """The first test that fails, or "" if none does."""
    import pytest

    # Another process would import the file as it is. So the kernels' tests are for a process in
    # which Triton interprets.
    marked = "interpreter" if interpreter.HERE else "not gpu and not interpreter"
    first = _FirstFailure()
    os.chdir(ROOT)
    with contextlib.redirect_stdout(io.StringIO()):
        code = pytest.main(
            [
                "-q",
                "-x",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:xdist",
                "--timeout=300",
                "-m",
                marked,
                *(f"--deselect={one}" for one in without),
                *tests,
            ],
            plugins=[first],
        )
    if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return ""
    return f"test: {first.name or code}"


def _interpreted(job: Job, limit: float, until: float) -> str | None:
    """The same in a process of its own, under Triton's interpreter."""
    end = min(time.monotonic() + limit, until)
    unsound: list[str] = []
    with tempfile.NamedTemporaryFile("w", suffix=".py") as source:
        source.write(ast.unparse(job.tree))
        source.flush()
        changed = f"install_file({job.file!r}, {source.name!r}); "
        while True:
            tested = f"_tested({job.kernels!r}, {unsound!r})"
            said = _interpreting(f"{changed}print('said', {tested})", end)
            if not said:
                break
            test = said.removeprefix("test: ")
            alone = [test] if said.startswith("test: ") else job.kernels
            sound = _interpreting(f"print('said', _tested({alone!r}))", end)
            if sound == "":
                break
            if sound is None or test in unsound or alone is job.kernels:
                said = sound and ""
                break
            unsound.append(test)
    return "" if said is None and time.monotonic() < until else said


def _interpreting(code: str, until: float) -> str | None:
    code = (
        "import sys; sys.path.insert(0, '.'); "
        f"from tests.mutants.run import install_file, _tested; {code}"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            cwd=ROOT, capture_output=True, text=True,
            timeout=max(1.0, min(until - time.monotonic(), 1e6)),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    last = done.stdout.strip().splitlines()[-1:]
    if not last or not last[0].startswith("said"):
        return f"crashed: {done.stderr[-300:]}"
    return last[0].removeprefix("said").strip()


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


def cells_that_fail(
    file: str, tree: ast.Module | None, tests: list[str], capability: str, until: float
) -> set[str] | None:
    """In a forked process: classes whose sign fails while one file is what the tree says; None if
    there was no time."""

    def run() -> str:
        if tree is not None:
            install(file, tree)
        import pytest

        os.chdir(ROOT)
        cells = _Cells(capability)
        pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests], plugins=[cells])
        return "classes " + ",".join(sorted(cells.failed))

    said = in_a_fork(run, until)
    if said is None:
        return None
    return set(filter(None, said.removeprefix("classes ").split(","))) if (
        said.startswith("classes ")
    ) else set()  # fmt: skip
