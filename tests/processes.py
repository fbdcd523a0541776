"""Processes of their own for tests, forked from a server that has imported torch and diffusers.

These imports take seconds. The server has run nothing and knows nothing of this package. What is
about a start of Python itself (`python -m`, what an import loads, Triton's interpreter) needs a
real one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

PRELOAD = (
    "accelerate",
    "diffusers.hooks.context_parallel",
    "diffusers.models.transformers.cogvideox_transformer_3d",
    "diffusers.pipelines.wan.pipeline_wan",
    "diffusers.schedulers.scheduling_flow_match_euler_discrete",
    "imageio",
    "jinja2",
    "peft",
    "pytest",
    "torch.distributed.device_mesh",
    "transformers.models.umt5.modeling_umt5",
    "tests.freeze",  # the last one
)
#: How ranks are started, where "" is by the server. A mutant of a process is in those alone that
#: are forked from itself.
RANKS = ""
#: Seconds for a script, less than pytest gives a test.
LIMIT = 280.0
#: A script that is the command line.
COMMAND = "import sys; from turbo_rcm_patch.__main__ import main; sys.exit(main(sys.argv[1:]))"


def server() -> ForkServerContext:
    """Where processes are forked from; the first one starts it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    return context


@dataclass(frozen=True)
class Done:
    """How a script ended: its exit code, less than 0 for a signal, and what it printed."""

    code: int
    out: str
    err: str


class Script:
    """A script that runs.

    Attributes:
        pid: For signals.
    """

    def __init__(self, process: ForkServerProcess, out: Path, err: Path) -> None:
        assert process.pid is not None
        self._process, self._out, self._err, self.pid = process, out, err, process.pid

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.exitcode

    @property
    def out(self) -> str:
        """What it has printed so far; "" if that goes to a file of the caller's."""
        return self._out.read_text(errors="replace") if self._out.is_file() else ""

    @property
    def err(self) -> str:
        """What it has printed on stderr so far."""
        return self._err.read_text(errors="replace") if self._err.is_file() else ""

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.join()

    def until(self, happened: Callable[[], object], seconds: float = 120.0) -> None:
        """Wait until something has happened, while it runs.

        Raises:
            AssertionError: It ended before, or it takes longer; with what it printed.
        """
        deadline = time.monotonic() + seconds
        while not happened():
            assert self.code is None and time.monotonic() < deadline, self.out + self.err
            time.sleep(0.02)

    def wait(self, seconds: float = LIMIT) -> Done:
        """Wait for its end.

        Raises:
            AssertionError: It takes longer; with what it printed.
        """
        self._process.join(seconds)
        assert self.code is not None, f"after {seconds} s: {self.out[-2000:]}\n{self.err[-2000:]}"
        return Done(self.code, self.out, self.err)


@contextmanager
def start(
    code: str, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None,
    out: Path | None = None,
) -> Iterator[Script]:  # fmt: skip
    """Run `code` as a script on one thread, where nothing of this package is imported, while the
    body runs. It is killed after that.

    Args:
        code: Python source.
        *arguments: Of the script.
        env: All of its environment; this process's otherwise.
        cwd: Its working directory.
        out: A file that takes what it prints.
    """
    environment = dict(os.environ if env is None else env)
    with tempfile.TemporaryDirectory() as folder:
        files = out or Path(folder, "out"), Path(folder, "err")
        given = (code, arguments, environment, os.fspath(cwd or Path.cwd()), files)
        process = server().Process(target=_script, args=given)
        process.start()
        script = Script(process, Path(folder, "out"), files[1])
        try:
            yield script
        finally:
            script.kill()


def run(code: str, *arguments: str, **how: Any) -> Done:
    """Run `code` as a script to its end. For the arguments see `start`."""
    with start(code, *arguments, **how) as script:
        return script.wait()


def run_fresh(code: str, *arguments: str, cwd: Path | None = None) -> None:
    """Run `code` as a script that has to succeed.

    Raises:
        AssertionError: It failed; with what it printed.
    """
    done = run(code, *arguments, cwd=cwd)
    assert done.code == 0, done.out[-2000:] + done.err[-4000:]


@contextmanager
def pair(
    code: str, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Iterator[list[Script]]:  # fmt: skip
    """Run `code` in two processes that find each other, as torchrun starts them, while the body
    runs; but neither is ended when the other fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    with ExitStack() as started:
        both = []
        for rank in map(str, range(2)):
            own = place | {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}
            how = start(code, *arguments, env=os.environ | own | dict(env or {}), cwd=cwd)
            both.append(started.enter_context(how))
        yield both


def _script(
    code: str, arguments: tuple[str, ...], environment: dict[str, str], cwd: str,
    files: tuple[Path, Path],
) -> None:  # fmt: skip
    for stream, path in enumerate(files, 1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, stream)
        os.close(file)
    sys.stdout.reconfigure(line_buffering=False)  # type: ignore[union-attr]
    assert not any(name.split(".")[0] == "turbo_rcm_patch" for name in sys.modules)
    import torch

    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)  # Other tests run beside it.
    # The server ignores it, as does what a shell starts in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    sys.argv = ["-c", *arguments]
    try:
        exec(compile(code, "<script>", "exec"), {"__name__": "__main__"})
    finally:
        try:
            sys.stdout.flush()
        except OSError:
            os._exit(120)  # As Python does at its end.
