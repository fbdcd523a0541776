"""Measurements: `record` proves what the README claims; the others compare speed and traffic."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Final

from benchmarks.journal import Plan
from benchmarks.record import PARTS, record
from benchmarks.setup import MICRO, Options, Sizes
from turbo_rcm_patch.errors import ConfigError
from turbo_rcm_patch.exit_codes import run_command

_PROGRAM: Final = "python -m benchmarks"
#: Command -> (module with `run(plan)`, help, an example of --only, an example of --peers).
COMPARISONS: Final = {
    "attention": (
        "attention",
        "attention alone against every attention a user could pick",
        "H12-N32760-D128,H48-N17776-D64",
        '"ours fp8,torch cuDNN"',
    ),
    "block": (
        "block",
        "attention + projection + rCM skip as in the write-ups, and one Wan block",
        "given,linear,wan",
        "two-pass,one-launch",
    ),
    "network": (
        "forward",
        "one forward of Wan or CogVideoX: eager, compiled, patched, and where its time goes",
        "1.3b,14b,cogvideox-2b",
        '"eager,patched,patched compiled"',
    ),
    "length": (
        "length",
        "one forward of Wan over the number of tokens: queued, on the CPU, as a CUDA graph",
        "780,7800,32760",
        '"eager,patched,patched int8 Linears"',
    ),
    "sparse": (
        "sparse",
        "sparse-linear attention (SLA) against our dense int8 attention",
        "H12-N32760-D128-k0.1",
        '"dense int8,sparse auto"',
    ),
    "linear": (
        "linear",
        "a Linear in int8, scales per row or per block of the weight, against bf16",
        "N32760-1536-1536",
        '"torch bf16,int8 scale per block"',
    ),
    "hbm": (
        "hbm",
        "memory traffic of attention + projection + skip, counted by Nsight Compute",
        "H12-N32760-D128",
        "two-pass,one-launch",
    ),
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog=_PROGRAM, description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    _add_record(commands)
    for name, (_, text, only, peers) in COMPARISONS.items():
        one = commands.add_parser(
            name,
            help=text,
            description=f"Measures {text}. Writes {name}.json and plots into a folder.",
            epilog=f"examples:  {_PROGRAM} {name} --quick\n"
            f"           {_PROGRAM} {name} --only {only} --peers {peers} --out results/today\n"
            f"           {_PROGRAM} {name} --device cpu --micro    (tries the command itself)",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        _add_common(one)
        if name == "network":
            one.add_argument(
                "--turbodiffusion",
                type=Path,
                metavar="PATH",
                help="a checkout of thu-ml/TurboDiffusion, whose WanModel turbo-1.3b times",
            )
        if name == "hbm":
            one.add_argument(
                "--inside", nargs=2, metavar=("CASE", "FORMS"), help=argparse.SUPPRESS
            )
    _add_tune(commands)
    plot = commands.add_parser("plot", help="draw the plots of a folder again, from its JSON")
    plot.add_argument("folder", type=Path, help="where the comparisons wrote")
    return top


def _add_common(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--out",
        type=Path,
        default=Path("outputs/benchmarks"),
        metavar="FOLDER",
        help="folder to write into (default: %(default)s)",
    )
    one.add_argument("--device", default="cuda", help='"cuda", "cuda:1", or "cpu" with --micro')
    one.add_argument("--quick", action="store_true", help="fewer sizes and fewer calls")
    one.add_argument("--only", default="", metavar="CASE,...", help="cases to measure")
    one.add_argument("--peers", default="", metavar="NAME,...", help="methods to measure")
    one.add_argument("--calls", type=int, help="most timed calls of a measurement")
    one.add_argument("--seed", type=int, default=0, help="of weights and inputs")
    one.add_argument(
        "--limit",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="begin no measurement after this, and say what was left out (default: %(default)s)",
    )
    one.add_argument("--micro", action="store_true", help="toy sizes, to try the command itself")


def _add_tune(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    one = commands.add_parser(
        "tune",
        help="measure tile shapes on this card and keep the best for later runs",
        description="Measures the tile shapes of each kernel on the present card and writes a "
        "table that the kernels read instead of the shipped one.",
        epilog=f"examples:  {_PROGRAM} tune --dry-run\n"
        f"           {_PROGRAM} tune --only attention.fp8_128,project\n"
        f"           {_PROGRAM} tune --out my-tiles.json"
        "    (read with TURBO_RCM_PATCH_TILES=my-tiles.json)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    one.add_argument(
        "--out", type=Path, metavar="FILE", help="JSON to write (default: the user's own table)"
    )
    one.add_argument("--device", default="cuda", help='"cuda", "cuda:1", or "cpu" with --micro')
    one.add_argument(
        "--only",
        default="",
        metavar="KERNEL[.VARIANT],...",
        help="what to tune, * for any (default: all of 64 and 128 channels a head)",
    )
    one.add_argument("--quick", action="store_true", help="fewer calls and smaller inputs")
    one.add_argument("--calls", type=int, help="most timed calls of a candidate")
    one.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="as elsewhere")
    one.add_argument("--dry-run", action="store_true", help="show what would be written")
    one.add_argument("--micro", action="store_true", help="toy sizes, to try the command itself")


def _add_record(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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


def _record(arguments: argparse.Namespace, command: str) -> int:
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
    return record(options, arguments.only.split(","), arguments.out, command)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _compare(arguments: argparse.Namespace, command: str) -> int:
    plan = Plan(
        out=arguments.out,
        device=arguments.device,
        quick=arguments.quick,
        micro=arguments.micro,
        only=_names(arguments.only),
        peers=_names(arguments.peers),
        calls=arguments.calls,
        limit=arguments.limit,
        seed=arguments.seed,
        command=command,
        turbodiffusion=getattr(arguments, "turbodiffusion", None),
    )
    module = import_module(f"benchmarks.{COMPARISONS[arguments.command][0]}")
    inside = getattr(arguments, "inside", None)
    if inside:
        return int(module.inside(plan, *inside))
    return int(module.run(plan))


def _tune(arguments: argparse.Namespace, command: str) -> int:
    from benchmarks.tune import tune

    return tune(
        device=arguments.device,
        only=_names(arguments.only),
        out=arguments.out,
        quick=arguments.quick,
        micro=arguments.micro,
        calls=arguments.calls,
        limit=arguments.limit,
        dry_run=arguments.dry_run,
    )


def _plot(arguments: argparse.Namespace, command: str) -> int:
    from benchmarks.plots import draw

    files = [arguments.folder / f"{name}.json" for name in (*COMPARISONS, "network_turbo")]
    found = [path for path in files if path.is_file()]
    if not found:
        raise ConfigError(
            "folder",
            expected=f"one of {', '.join(path.name for path in files)} in it",
            got=str(arguments.folder),
            remedy="Run a comparison first",
        )
    for path in found:
        for png in draw(path):
            print(png)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 0 only if what is ours ran and was right, 1 if not, 2
    for a mistake in the arguments or the files, 3 for an error nobody foresaw."""
    given = sys.argv[1:] if argv is None else list(argv)
    arguments = parser().parse_args(given)
    run: Callable[[argparse.Namespace, str], int] = {
        "record": _record,
        "tune": _tune,
        "plot": _plot,
    }.get(arguments.command, _compare)
    # Every case is on disk as soon as it is measured.
    return run_command(
        lambda: run(arguments, f"{_PROGRAM} {shlex.join(given)}"),
        lambda error: f"error: {error}",
        interrupted="stopped; what was measured so far is kept",
    )


if __name__ == "__main__":
    sys.exit(main())
