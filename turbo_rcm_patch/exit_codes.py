"""The exit codes of the commands, and the function that turns errors into them."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from turbo_rcm_patch.errors import TurboRCMError

OK: Final = 0
CHANGED: Final = 1
USAGE: Final = 2
UNEXPECTED: Final = 3
#: Not 0, so that nothing passes as unchanged by mistake; not 1, so that a script can accept it.
SIMILAR: Final = 4
INTERRUPTED: Final = 130
#: 128 plus the number of SIGTERM.
TERMINATED: Final = 143
#: The reader of our output has gone, as in `pairs | head`: 128 plus the number of SIGPIPE.
PIPE: Final = 141

#: For `--help`.
TABLE: Final = f"""\
exit codes:
  {OK:<4} success; for compare and demo: nothing visible changed
  {CHANGED:<4} for compare and demo: changed or undecided; for demo also: the kernels disagree; for
       doctor: something needed is missing; for bench: an output is wrong; for tune:
       something was not measured, or is wrong
  {USAGE:<4} a mistake in the arguments, the model or the files, too little memory, or some of
       several prompts failed
  {UNEXPECTED:<4} an unexpected error, with its traceback
  {SIMILAR:<4} for compare and demo: similar
  {INTERRUPTED:<4} interrupted
  {PIPE:<4} the reader of the output has gone, as in `pairs | head`
  {TERMINATED:<4} ended by the system (SIGTERM)
"""


class Terminated(SystemExit):
    """The system ends this process, which cleans up first."""


def of_verdict(word: str) -> int:
    """The exit code of `compare` for its verdict."""
    return {"unchanged": OK, "similar": SIMILAR}.get(word, CHANGED)


class _OnStderr(logging.Handler):
    """On what is stderr now: progress bars put something of theirs in its place."""

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), file=sys.stderr, flush=True)


@contextmanager
def _compiling_shown() -> Iterator[None]:
    log, handler = logging.getLogger("turbo_rcm_patch.kernels.ahead"), _OnStderr()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(before)
        log.removeHandler(handler)


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Clean up on SIGTERM, by which torchrun and batch systems end a process."""
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # somebody else's
        yield
        return

    def stop(_: int, __: object) -> None:
        raise Terminated(TERMINATED)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run_command(
    run: Callable[[], int],
    tell: Callable[[TurboRCMError], str] = TurboRCMError.block,
    *,
    interrupted: str,
) -> int:
    """Run a command and return its exit code, whatever happens. Meanwhile stderr shows how far the
    compilation of kernels is.

    Python exits with 1 for an uncaught error, but here 1 means "changed".

    Args:
        run: The command.
        tell: Formats an error of this library.
        interrupted: What to print on Ctrl-C and on SIGTERM, unless the command added a note to
            that exception.

    Returns:
        The command's own code, or another code of this module.

    Raises:
        Terminated: On SIGTERM.
    """
    try:
        with _compiling_shown(), _terminated_like_interrupted():
            code = run()
        sys.stdout.flush()  # A full disk shows here, and must not exit with 1 either.
        return code
    except TurboRCMError as error:
        print(tell(error), file=sys.stderr)
        return USAGE
    except (KeyboardInterrupt, Terminated) as stop:
        said = getattr(stop, "__notes__", [interrupted])
        print(f"\n{said[-1]}", file=sys.stderr)
        if isinstance(stop, Terminated):
            raise
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes once more at its end, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE
    except Exception as error:
        # The second is torch's, which may not be imported here; the third of its CPU allocator.
        if (
            isinstance(error, MemoryError)
            or type(error).__name__ == "OutOfMemoryError"
            or "can't allocate memory" in str(error)
        ):
            print(f"{error}\nTry --offload model, or a smaller video.", file=sys.stderr)
            return USAGE
        traceback.print_exc()
        print(
            f"\n{type(error).__name__}: an unexpected error (exit code {UNEXPECTED}). It says "
            "nothing about the video.",
            file=sys.stderr,
        )
        return UNEXPECTED
