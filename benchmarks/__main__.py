"""Measure speed and distance to fp32 on one machine."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.attention import attention
from benchmarks.network import network
from benchmarks.parallel import parallel
from benchmarks.pipeline import pipeline
from benchmarks.runner import Benchmark, Plan
from benchmarks.vae import vae
from turbo_rcm_patch.cli.exit_codes import run_command

_PROGRAM: Final = "python -m benchmarks"
BENCHMARKS: Final[dict[str, Benchmark]] = {
    benchmark.name: benchmark for benchmark in (attention, network, pipeline, vae, parallel)
}


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    top = argparse.ArgumentParser(prog=_PROGRAM, description=__doc__)
    commands = top.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, benchmark in BENCHMARKS.items():
        add = commands.add_parser(
            name, help=benchmark.text, description=f"Measure {benchmark.text}."
        ).add_argument
        add("--out", type=Path, default=Path("outputs/benchmarks"), metavar="FOLDER",
            help="folder of the table's JSON file (default: %(default)s)")  # fmt: skip
        add("--only", type=_names, default=(), metavar="NAME,...",
            help="cases and methods to measure, as they are named in the table")  # fmt: skip
        add("--device", default="cuda", choices=("cuda", "cpu"), help='"cpu" is for --micro')
        add("--micro", action="store_true", help="toy sizes, to try the command itself")
    return top


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0 if every method of this library ran and was right, 1 if not, 2 for an error.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = vars(parser().parse_args(arguments))
    benchmark = BENCHMARKS[options.pop("benchmark")]

    def run() -> int:
        return benchmark(Plan(**options, command=f"{_PROGRAM} {shlex.join(arguments)}"))

    return run_command(run, interrupted="stopped; what was measured so far is kept")


if __name__ == "__main__":
    sys.exit(main())
