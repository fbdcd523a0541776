"""`python -m turbo_rcm_patch.benchmarks record`: arguments only."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from turbo_rcm_patch.benchmarks.record import PARTS, record
from turbo_rcm_patch.benchmarks.setup import MICRO, Options, Sizes
from turbo_rcm_patch.errors import TurboRCMError


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m turbo_rcm_patch.benchmarks", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    one = commands.add_parser(
        "record",
        help="measure what the README claims and write it to one JSON file",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    one.add_argument("--out", type=Path, default=Path("results/gpu.json"), help="JSON to write")
    one.add_argument("--only", default=",".join(PARTS), help="parts to run, separated by commas")
    one.add_argument("--device", default="cuda", help='"cuda", "cuda:1" or "cpu"')
    one.add_argument("--seed", type=int, default=0, help="of weights and inputs")
    one.add_argument("--repeats", type=int, default=100_000, help="runs of the one-launch form")
    one.add_argument("--forwards", type=int, default=7, help="timed forwards of the network")
    one.add_argument(
        "--times", type=int, default=3, help="timesteps of the network number, 1 to 3"
    )
    one.add_argument("--seeds", type=int, default=4, help="noise seeds of the network number")
    one.add_argument(
        "--full-size-inputs", type=int, default=1, help="inputs of the network number at full size"
    )
    one.add_argument("--limit", type=float, default=240.0, help="seconds a part may take")
    one.add_argument("--quick", action="store_true", help="one timestep, one seed, 10,000 repeats")
    one.add_argument(
        "--micro", action="store_true", help="toy sizes, to try the command itself on a CPU"
    )
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 0 only if everything ran and met its limit."""
    given = sys.argv[1:] if argv is None else list(argv)
    arguments = parser().parse_args(given)
    try:
        options = Options(
            sizes=MICRO if arguments.micro else Sizes(),
            device=arguments.device,
            seed=arguments.seed,
            repeats=min(arguments.repeats, 10_000) if arguments.quick else arguments.repeats,
            forwards=arguments.forwards,
            times=1 if arguments.quick else arguments.times,
            seeds=1 if arguments.quick else arguments.seeds,
            full_size_inputs=arguments.full_size_inputs,
            limit=arguments.limit,
        )
        command = "python -m turbo_rcm_patch.benchmarks " + " ".join(given)
        return record(options, arguments.only.split(","), arguments.out, command)
    except TurboRCMError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
