"""The command line: `python -m training train`, `evaluate` and `curves`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

_USAGE = """\
usage: python -m training train --out DIR ...       train a tiny model (--help lists the options)
       python -m training evaluate ...              judge the videos of one (--help likewise)
       python -m training curves LOG.jsonl OUT.png  draw the loss curves of a training log"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; each has its own --help."""
    command, *rest = (sys.argv[1:] if argv is None else list(argv)) or [""]
    if command == "train":
        from training.train import main as run
    elif command == "evaluate":
        from training.evaluate import main as run
    elif command == "curves" and len(rest) == 2:
        from training.plots import loss_curves

        loss_curves(Path(rest[0]), Path(rest[1]))
        return 0
    else:
        asked = command in ("-h", "--help")
        print(_USAGE, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    run(rest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
