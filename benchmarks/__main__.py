"""Measure speed and distance to fp32 on one machine."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Final

from benchmarks.runner import Plan
from turbo_rcm_patch.cli.exit_codes import run_command

_PROGRAM: Final = "python -m benchmarks"
#: Benchmark -> (what it measures, an example of --only).
BENCHMARKS: Final = {
    "attention": (
        "attention alone, compared with cuDNN, flash and sageattention",
        '"H12-N32760-D128,fused int8,torch cuDNN"',
    ),
    "network": (
        "one forward of Wan and CogVideoX at their published sizes",
        '"14b,eager,patched,patched int8 Linears"',
    ),
    "length": (
        "a forward of Wan2.1-1.3B by its number of tokens, on the GPU and on the CPU",
        '"780,7800,eager,patched"',
    ),
    "fidelity": (
        "the distance of a forward to the same network in fp32",
        '"live-x8,patched,patched exact"',
    ),
    "pipeline": (
        "seconds of a video, everything counted, in a fresh process",
        '"1.3b-4-steps,unpatched,patched"',
    ),
    "vae": (
        "decoding and encoding a video by the VAEs of Wan and CogVideoX",
        '"wan2.1-decode,bf16,bf16 patched"',
    ),
    "parallel": (
        "a forward of Wan, and a video with guidance, on all GPUs",
        '"1.3b-video,one GPU patched,CFG patched"',
    ),
    "sparse": ("sparse-linear attention (SLA) compared with dense int8", "H12-N32760-D128-k0.1"),
}
#: Benchmark -> its module, where that has another name.
_ELSEWHERE: Final = {"length": "network"}


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    top = argparse.ArgumentParser(prog=_PROGRAM, description=__doc__)
    commands = top.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, (text, only) in BENCHMARKS.items():
        one = commands.add_parser(
            name,
            help=text,
            description=f"Measure {text}: a table on the screen and {name}.json in a folder.",
            epilog=f"examples:  {_PROGRAM} {name} --only {only}\n"
            f"           {_PROGRAM} {name} --device cpu --micro    (tries the command itself)",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add = one.add_argument
        add("--out", type=Path, default=Path("outputs/benchmarks"), metavar="FOLDER",
            help="folder of the JSON file; results of the same machine and code are added to it "
            "(default: %(default)s)")  # fmt: skip
        add("--only", type=_names, default=(), metavar="NAME,...",
            help="cases and methods to measure, as they are named in the table")  # fmt: skip
        add("--device", default="cuda", help='"cuda", "cuda:1", or "cpu" with --micro')
        add("--calls", type=int, metavar="N", help="most timed calls of a measurement")
        add("--limit", type=float, default=540.0, metavar="SECONDS",
            help="begin no measurement after this, and name what was left out "
            "(default: %(default)s)")  # fmt: skip
        add("--seed", type=int, default=0, metavar="N", help="of weights and inputs")
        add("--micro", action="store_true", help="toy sizes, to try the command itself")
    return top


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _run(arguments: argparse.Namespace, command: str) -> int:
    given = vars(arguments)
    name = given.pop("benchmark")
    module = import_module(f"benchmarks.{_ELSEWHERE.get(name, name)}")
    code: int = getattr(module, name)(Plan(**given, command=command))
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0 if every method of this library ran and was right, 1 if not, 2 for an error.
    """
    given = sys.argv[1:] if argv is None else list(argv)
    arguments = parser().parse_args(given)
    return run_command(
        lambda: _run(arguments, f"{_PROGRAM} {shlex.join(given)}"),
        lambda error: f"error: {error}",
        interrupted="stopped; what was measured so far is kept",
    )


if __name__ == "__main__":
    sys.exit(main())
