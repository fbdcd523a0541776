"""Measurements: speed and distance to fp32, on one machine."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Final

from benchmarks.runner import Plan
from turbo_rcm_patch.errors import ConfigError
from turbo_rcm_patch.exit_codes import run_command
from turbo_rcm_patch.usage import Types, add_options

_PROGRAM: Final = "python -m benchmarks"
#: Command -> (module and function of a plan, help, an example of --only, an example of --peers).
COMPARISONS: Final = {
    "attention": (
        "attention.run",
        "attention alone against every attention a user could pick",
        "H12-N32760-D128,H48-N17776-D64",
        '"ours fp8,torch cuDNN"',
    ),
    "network": (
        "forward.run",
        "one forward of Wan or CogVideoX: eager, compiled, patched, and where its time goes",
        "1.3b,14b,cogvideox-2b",
        '"eager,patched,patched compiled"',
    ),
    "fidelity": (
        "fidelity.run",
        "the distance of one forward to the same network in fp32, by residual and precision",
        "drawn-x1,live-x8,cogvideox-2b",
        '"compiled,int8 / residual fp32"',
    ),
    "length": (
        "forward.run_length",
        "one forward of Wan over the number of tokens, and of other networks: queued, on the CPU, "
        "as a CUDA graph",
        "780,7800,32760,cogvideox-2b",
        '"eager,patched,patched int8 Linears"',
    ),
    "video": (
        "video.run",
        "seconds a video of Wan, cold and warm, with the guard on",
        "rcm-4-steps",
        "eager,compiled,patched",
    ),
    "sparse": (
        "sparse.run",
        "sparse-linear attention (SLA) against our dense int8 attention",
        "H12-N32760-D128-k0.1",
        '"dense int8,sparse auto"',
    ),
    "parallel": (
        "parallel.run",
        "one forward of Wan split over all GPUs, unpatched and patched",
        "1.3b,14b",
        '"Ulysses cuDNN,Ulysses patched"',
    ),
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog=_PROGRAM,
        description=__doc__,
    )
    commands = top.add_subparsers(dest="command", required=True)
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
        options = _OPTIONS | _OWN.get(name, {})
        add_options(
            one, options, _TYPES, out=_OUT, device="cuda", only=(), peers=(), seed=0, limit=600.0,
            inputs=1,
        )  # fmt: skip
    plot = commands.add_parser("plot", help="draw the plots of a folder again, from its JSON")
    plot.add_argument("folder", type=Path, help="where the comparisons wrote")
    table = commands.add_parser(
        "table", help="print tables of a folder in Markdown, from its JSON"
    )
    table.add_argument("folder", type=Path, help="where `length` or `video` wrote")
    return top


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


_TYPES: Final[Types] = {
    **dict.fromkeys(("CASE,...", "NAME,..."), _names),
    "PATH": Path,
}
_OUT: Final = Path("outputs/benchmarks")
_OPTIONS: Final = {
    "--out FOLDER": "folder to write into (default: %(default)s)",
    "--device DEVICE": '"cuda", "cuda:1", or "cpu" with --micro',
    "--quick": "fewer sizes and fewer calls",
    "--only CASE,...": "cases to measure",
    "--peers NAME,...": "methods to measure",
    "--calls N": "most timed calls of a measurement",
    "--seed N": "of weights and inputs",
    "--limit SECONDS": "begin no measurement after this, and say what was left out (default: "
    "%(default)s)",
    "--micro": "toy sizes, to try the command itself",
}
_CHECKOUT: Final = {
    "--turbodiffusion PATH": "a checkout of thu-ml/TurboDiffusion, for its WanModel: turbo-1.3b "
    "of network, WanModel of length",
}
#: What some comparisons take beyond that.
_OWN: Final = {
    "fidelity": {
        "--inputs N": "pairs of a timestep and a seed, 1 to 12 (default: %(default)s)",
    },
    "network": _CHECKOUT,
    "length": _CHECKOUT,
}


def _plot(folder: Path) -> int:
    from benchmarks.plots import draw

    files = [folder / f"{name}.json" for name in (*COMPARISONS, "network_turbo")]
    found = [path for path in files if path.is_file()]
    if not found:
        raise ConfigError(
            "folder",
            expected=f"one of {', '.join(path.name for path in files)} in it",
            got=str(folder),
            remedy="Run a comparison first",
        )
    for path in found:
        for png in draw(path):
            print(png)
    return 0


def _table(folder: Path) -> int:
    from benchmarks.tables import tables

    made = tables(folder)
    if not made:
        raise ConfigError(
            "folder",
            expected="length.json or video.json in it",
            got=str(folder),
            remedy="Run one of them first",
        )
    print(made)
    return 0


def _run(arguments: argparse.Namespace, command: str) -> int:
    if arguments.command == "plot":
        return _plot(arguments.folder)
    if arguments.command == "table":
        return _table(arguments.folder)
    given = vars(arguments)
    module, function = COMPARISONS[given.pop("command")][0].split(".")
    run = getattr(import_module(f"benchmarks.{module}"), function)
    code: int = run(Plan(**given, command=command))
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 0 only if what is ours ran and was right, 1 if not, 2
    for a mistake in the arguments or the files, 3 for an error nobody foresaw."""
    given = sys.argv[1:] if argv is None else list(argv)
    arguments = parser().parse_args(given)
    # Every case is on disk as soon as it is measured.
    return run_command(
        lambda: _run(arguments, f"{_PROGRAM} {shlex.join(given)}"),
        lambda error: f"error: {error}",
        interrupted="stopped; what was measured so far is kept",
    )


if __name__ == "__main__":
    sys.exit(main())
