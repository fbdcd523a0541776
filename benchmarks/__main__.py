"""Measurements: accuracy, bits, speed and memory traffic, on one machine."""

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
    "ops": (
        "proofs.accuracy",
        "accuracy of each attention against fp64, for random inputs and for outliers",
        '"random B1 H12 N4096 D128"',
        '"int8 bf16 PV"',
    ),
    "fusion": (
        "proofs.fusion",
        "the distance of every fused skip to the same operands unfused, and of both to fp64",
        '"B1 H12 N2049 D128 float32"',
        '"one launch"',
    ),
    "one-launch": (
        "proofs.one_launch",
        "bits of many runs of the one-launch form over poisoned memory (runs: --calls)",
        '"B1 H4 N1280 D64"',
        "one-launch",
    ),
    "attention": (
        "attention.run",
        "attention alone against every attention a user could pick",
        "H12-N32760-D128,H48-N17776-D64",
        '"ours fp8,torch cuDNN"',
    ),
    "block": (
        "pairs.run",
        "attention + projection + rCM skip as in the write-ups, and one Wan block",
        "given,linear,wan",
        "two-pass,one-launch",
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
    "linear": (
        "linear.run",
        "a Linear in int8, scales per row or per block of the weight, against bf16",
        "N32760-1536-1536",
        '"torch bf16,int8 scale per block"',
    ),
    "parallel": (
        "parallel.run",
        "one forward of Wan split over all GPUs, unpatched and patched",
        "1.3b,14b",
        '"Ulysses cuDNN,Ulysses patched"',
    ),
    "hbm": (
        "traffic.run",
        "memory traffic of attention + projection + skip, counted by Nsight Compute",
        "H12-N32760-D128",
        "two-pass,one-launch",
    ),
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog=_PROGRAM,
        description=__doc__,
        epilog="For your own card, `turbo-rcm-patch bench` and `turbo-rcm-patch tune` need no "
        "checkout.",
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
        if name == "hbm":
            one.add_argument(
                "--inside", nargs=2, metavar=("CASE", "FORMS"), help=argparse.SUPPRESS
            )
    _add_cards(commands)
    plot = commands.add_parser("plot", help="draw the plots of a folder again, from its JSON")
    plot.add_argument("folder", type=Path, help="where the comparisons wrote")
    table = commands.add_parser(
        "table", help="print tables of a folder in Markdown, from its JSON"
    )
    table.add_argument("folder", type=Path, help="where `length` or `video` wrote")
    return top


def _add_cards(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "what the compiled attention of each card can reach, by counting its instructions"
    one = commands.add_parser(
        "cards",
        help=text,
        description=f"Bounds {text}. Nothing runs, and no GPU is needed. Prints a table and "
        "writes cards.json.",
        epilog=f"examples:  {_PROGRAM} cards\n"
        f'           {_PROGRAM} cards --only "RTX 4090" --tiles 64x64x4x2,128x64x8x2',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options = {
        "--out FOLDER": "folder to write into (default: %(default)s)",
        "--only CARD,...": "cards (default: all)",
        "--tiles TILE,...": "rows x columns x warps x stages to compare (default: the shipped "
        "tile)",
        "--head-dims D,...": "channels a head (default: 64,128)",
    }
    add_options(one, options, _TYPES, out=_OUT, only=(), tiles=(), head_dims=(64, 128))


def _tiles(text: str) -> tuple[tuple[int, ...], ...]:
    found = tuple(tuple(int(part) for part in tile.split("x")) for tile in _names(text))
    if any(len(tile) != 4 for tile in found):
        raise argparse.ArgumentTypeError(f"{text!r}: a tile is four numbers, as 128x64x8x2")
    return found


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, _names(text)))


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


_TYPES: Final[Types] = {
    **dict.fromkeys(("CASE,...", "NAME,...", "CARD,..."), _names),
    "TILE,...": _tiles,
    "D,...": _numbers,
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
    "parallel": {
        "--paper": "compute a table for more GPUs and two hosts from what --parts measured",
        "--parts": "measure on two GPUs what --paper computes with",
    },
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
    if arguments.command == "cards":
        from benchmarks import cards

        return cards.run(arguments.out, arguments.only, arguments.tiles, arguments.head_dims)
    if arguments.command == "plot":
        return _plot(arguments.folder)
    if arguments.command == "table":
        return _table(arguments.folder)
    given = vars(arguments)
    inside = given.pop("inside", None)
    module, function = COMPARISONS[given.pop("command")][0].split(".")
    paper, parts = given.pop("paper", False), given.pop("parts", False)
    plan = Plan(**given, command=command)
    if paper or parts:
        from benchmarks.paper import measure
        from benchmarks.paper import run as on_paper

        return on_paper(plan) if paper else measure(plan.out, micro=plan.micro)
    run = getattr(import_module(f"benchmarks.{module}"), "inside" if inside else function)
    code: int = run(plan, *inside or ())
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
