"""The command line: `python -m training train`, `evaluate` and `curves`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from turbo_rcm_patch.exit_codes import OK, USAGE, run_command

_USAGE = """\
usage: python -m training train --out DIR ...       train a tiny model (--help lists the options)
       python -m training evaluate ...              judge the videos of one (--help, too)
       python -m training curves LOG.jsonl OUT.png  draw the loss curves of a training log"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; each has its own --help. The exit codes are those of `exit_codes`."""
    command, *rest = (sys.argv[1:] if argv is None else list(argv)) or [""]
    interrupted = "Interrupted."
    if command == "train":
        from training.train import main as run

        interrupted += " The same command with --resume goes on from the last checkpoint."
    elif command == "evaluate":
        from training.evaluate import main as run
    elif command == "curves":
        from training.plots import main as run
    else:
        asked = command in ("-h", "--help")
        print(_USAGE, file=sys.stdout if asked else sys.stderr)
        return OK if asked else USAGE

    def done() -> int:
        run(rest)
        return OK

    return run_command(done, interrupted=interrupted)


if __name__ == "__main__":
    sys.exit(main())
