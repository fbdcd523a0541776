"""The exit codes of the commands, and the function that turns errors into them."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from turbo_rcm_patch.errors import TurboRCMError
from turbo_rcm_patch.extras import missing
from turbo_rcm_patch.interrupts import TERMINATED, reraise_interrupts

OK: Final = 0
CHANGED: Final = 1
USAGE: Final = 2
NOT_JUDGED: Final = 3
INTERRUPTED: Final = 130
#: 128 plus the number of SIGPIPE, as a shell reports it.
_PIPE: Final = 141

#: For `--help`.
TABLE: Final = f"""\
exit codes:
  {OK:<4} fine; for compare, judge and demo: the verdict is "unchanged", over however few
       prompts or clips (one scatters by some 5 dB: give ten)
  {CHANGED:<4} for compare, judge and demo: the verdict is another one, or the kernels disagree;
       for doctor: something that is needed is missing
  {USAGE:<4} a mistake in the arguments, the model or the files, or another failure; also of
       some of several prompts or clips
  {NOT_JUDGED:<4} for compare and demo: not judged, because too little ran as it was asked for;
       for judge: there is no control
  {INTERRUPTED:<4} interrupted with Ctrl-C
The shell gives {TERMINATED} for SIGTERM, and {_PIPE} where the reader of the output has ended.
"""


def of_verdict(word: str) -> int:
    """Return the exit code of `compare` for its verdict."""
    return {"unchanged": OK, "not judged": NOT_JUDGED}.get(word, CHANGED)


def run_command(run: Callable[[], int], *, interrupted: str) -> int:
    """Run a command and return its exit code, whatever happens.

    Python exits with 1 for an uncaught error, but here 1 means "changed".

    Args:
        run: The command.
        interrupted: The text to print on Ctrl-C and on SIGTERM.

    Returns:
        The command's own code, or another code of this module.
    """
    _open_missing_streams()
    try:
        with reraise_interrupts():
            code = run()
            sys.stdout.flush()  # A full disk shows here.
            return code
    except TurboRCMError as error:
        return _failed(error.block())
    except (KeyboardInterrupt, SystemExit) as stop:
        if isinstance(stop, SystemExit) and stop.code != TERMINATED:
            raise  # argparse has printed its help or a mistake
        _failed(f"\n{interrupted}")
        return INTERRUPTED if isinstance(stop, KeyboardInterrupt) else TERMINATED
    except BrokenPipeError:
        _discard_stdout()
        return _PIPE
    except OSError as error:
        _discard_stdout()
        return _failed(f"The system refused: {error}")
    except ModuleNotFoundError as error:
        return _failed(missing("this command", str(error.name).partition(".")[0]).block())
    except Exception as error:
        # The first is torch's, which may not be imported here; the second of its CPU allocator.
        kinds = ("OutOfMemoryError", "MemoryError")
        if type(error).__name__ in kinds or "can't allocate memory" in str(error):
            return _failed(f"Too little memory. Try --offload model, or a smaller video. {error}")
        name = type(error).__name__
        return _failed(f"{traceback.format_exc()}\nInternal error ({name}). Please report it.")


def _failed(text: str) -> int:
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
    return USAGE


def _open_missing_streams() -> None:
    """Open /dev/null for each stream that the shell has closed, as with `>&-`."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as the process


def _discard_stdout() -> None:
    """Send the rest to /dev/null: Python flushes once more at its end, which would fail again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
