"""Exit codes of the command lines, and what stands between a command and its exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Final

from turbo_rcm_patch.errors import TurboRCMError

__all__ = ["CHANGED", "INTERRUPTED", "OK", "PIPE", "TABLE", "UNEXPECTED", "USAGE", "run_command"]

OK: Final = 0
CHANGED: Final = 1
USAGE: Final = 2
UNEXPECTED: Final = 3
INTERRUPTED: Final = 130
#: Nobody reads what is printed any more, as in `pairs | head`: 128 and the number of SIGPIPE.
PIPE: Final = 141

#: For `--help`.
TABLE: Final = f"""\
exit codes:
  {OK:<4} done; of compare and demo: nothing visible changed
  {CHANGED:<4} of compare and demo: something changed; of doctor: something needed is missing
  {USAGE:<4} refused or failed for a reason that is told: arguments, model, files, memory
  {UNEXPECTED:<4} an error nobody foresaw, with its traceback
  {INTERRUPTED:<4} interrupted
"""


def run_command(
    run: Callable[[], int],
    tell: Callable[[TurboRCMError], str] = TurboRCMError.block,
    *,
    interrupted: str,
) -> int:
    """Run a command, and turn every way in which it can end into an exit code.

    Without this Python would exit with 1 for an uncaught error, and 1 means something here.

    Args:
        run: The command.
        tell: Puts an error of this library into words.
        interrupted: What to say on Ctrl-C.

    Returns:
        What the command returns, or one of the other codes of this module.
    """
    try:
        code = run()
        sys.stdout.flush()  # Where it goes may be full, which is not "changed" either.
        return code
    except TurboRCMError as error:
        print(tell(error), file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print(f"\n{interrupted}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes once more at its end, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which may not be imported here
            print(f"{error}\nTry --offload model, or a smaller video.", file=sys.stderr)
            return USAGE
        traceback.print_exc()
        print(
            f"\n{type(error).__name__}: nobody foresaw this error. Exit code {UNEXPECTED}; it "
            "says nothing about the video.",
            file=sys.stderr,
        )
        return UNEXPECTED
