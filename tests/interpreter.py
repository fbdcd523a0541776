"""Run tests that carry the marker `interpreter` in a process with Triton's interpreter on.

Triton decides on import whether it compiles or interprets, so a process does either. One process
a session (a worker of xdist has its own) collects the same files and runs the tests that it is
named, one at a time; outcome and traceback come back to the test of that name here.

With TRITON_INTERPRET=1 in the environment the tests run where they are, for a debugger:
`TRITON_INTERPRET=1 pytest -m interpreter --pdb tests/ops/test_attention.py`
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from typing import IO, Any

import pytest

__all__ = ["HERE", "Interpreter"]

#: Whether Triton interprets in this process.
HERE = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


class Interpreter:
    """The other process, seen from here. It starts with its first test."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._said: IO[bytes] | None = None

    def run(self, item: pytest.Item) -> None:
        """Run a test there.

        Raises:
            Failed, Skipped: As it did there.
        """
        if self._process is None:
            self._start(item.session)
        assert self._process is not None
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None and answers is not None
        try:
            requests.write(json.dumps(item.nodeid) + "\n")
            requests.flush()
            answer = answers.readline()
        except BrokenPipeError:
            answer = ""
        except BaseException:  # the time limit of the test, an interrupt
            self.stop(kill=True)
            raise
        if not answer:
            said = self.stop()
            pytest.fail(f"the process with the interpreter ended, {said}", pytrace=False)
        outcome, text = json.loads(answer)
        if outcome == "failed":
            pytest.fail(text, pytrace=False)
        if outcome == "skipped":
            pytest.skip(text)

    def _start(self, session: pytest.Session) -> None:
        files = {
            str(item.path) for item in session.items if item.get_closest_marker("interpreter")
        }
        environment = {
            name: value
            for name, value in os.environ.items()
            if name != "PYTEST_ADDOPTS" and not name.startswith("PYTEST_XDIST")
        }
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.interpreter", "-p", "no:cacheprovider", "-p", "no:xdist",
             "-m", "interpreter", "--timeout=0", f"--tb={session.config.option.tbstyle}",
             *sorted(files)],
            env=environment | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            cwd=session.config.rootpath,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True,
        )  # fmt: skip

    def stop(self, kill: bool = False) -> str:
        """End the process; a later test starts another.

        Returns:
            Its exit status and the end of what it printed.
        """
        process, said = self._process, self._said
        self._process = self._said = None
        if process is None or said is None:
            return ""
        if kill:
            process.kill()
        process.communicate()
        said.seek(0)
        with said:
            printed = said.read().decode(errors="replace")[-6000:]
        return f"status {process.returncode}:\n{printed}"


class _Worker:
    """The plugin of the other process: it runs the tests that it reads the names of."""

    def __init__(self, requests: IO[str], answers: IO[str]) -> None:
        self._requests, self._answers = requests, answers
        self._reports: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        for line in self._requests:
            name = json.loads(line)
            self._reports.clear()
            if name in items:
                session.config.hook.pytest_runtest_protocol(item=items[name], nextitem=None)
            answer = _outcome(self._reports) if name in items else ("failed", f"no test {name}")
            self._answers.write(json.dumps(answer) + "\n")
            self._answers.flush()
        return True


def _outcome(reports: list[pytest.TestReport]) -> tuple[str, str]:
    """ "passed", "failed" or "skipped", and why."""
    texts: list[Any] = []
    for report in reports:
        if report.failed:
            texts += [
                report.longreprtext,
                *(f"{title}\n{text}" for title, text in report.sections),
            ]
    if texts:
        return "failed", "\n".join(texts)
    for report in reports:
        if report.skipped and isinstance(report.longrepr, tuple):
            return "skipped", report.longrepr[2].removeprefix("Skipped: ")
    return "passed", ""


def _patch_once() -> None:
    """Let Triton patch its language once a launch. At every call of a device function it does so
    again, which takes half of the interpreter's time."""
    from triton import language
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # before 3.6
        return
    patch, nothing = interpreter._patch_lang, interpreter._LangPatchScope()
    patched: set[str] = set()

    @cache
    def sees(function: Any) -> set[str]:
        held = {id(value) for value in function.__globals__.values()}
        return {one.__name__ for one in (language, language.core) if id(one) in held}

    def once(function: Any) -> Any:
        if sees(function) <= patched:
            return nothing
        scope, begins = patch(function), not patched
        patched.update(sees(function))
        if begins:  # a launch; its end takes all of it back
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    interpreter._patch_lang = once


def _remember() -> None:
    """Let Triton compute once what it makes anew for each value: NumPy's dtype of a type, a
    block's type, and a tensor's shape. That is half of the time that `_patch_once` leaves."""
    from triton.language import core
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # before 3.6
        return
    dtypes: dict[str, Any] = {}
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[str, dict[str, Any]] = {}
    dtype_of, block_type, tensor = (
        interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__
    )  # fmt: skip

    def dtype(one: Any) -> Any:
        if one.name not in dtypes:
            dtypes[one.name] = dtype_of(one)
        return dtypes[one.name]

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in blocks:
            block_type(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key], element_ty=element_ty)

    def shaped(self: Any, handle: Any, type: Any) -> None:
        if type.name not in shapes:
            tensor(self, handle, type)
            shapes[type.name] = dict(vars(self))
        vars(self).update(shapes[type.name], handle=handle, type=type, dtype=type.scalar)

    interpreter._get_np_dtype = dtype
    core.block_type.__init__, core.tensor.__init__ = block, shaped


def _main() -> None:
    _patch_once()
    _remember()
    # pytest redirects the streams themselves, and prints where errors go.
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.exit(pytest.main(sys.argv[1:], plugins=[_Worker(requests, answers)]))


if __name__ == "__main__":
    _main()
