"""Train the tiny models that ship: `python -m training train --family wan --out DIR`.

The same command goes on where an earlier one stopped. `install` puts a trained student where the
package looks for it; `evaluate` judges its videos. Steps, sizes and learning rates are each
model's `recipe` in training/families.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from turbo_rcm_patch.cli.exit_codes import OK, run_command


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser("python -m training", description=__doc__, formatter_class=raw)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, text in (
        ("train", "train a model in all stages"),
        ("install", "put the student of --out where the package looks for it"),
        ("evaluate", "judge the videos of a model"),
    ):
        one = commands.add_parser(name, help=text, description=text)
        add = one.add_argument
        add(
            "--out",
            type=Path,
            required=True,
            metavar="DIR",
            help="folder of the run, or of results",
        )
        if name == "evaluate":
            add(
                "--model",
                default="tiny",
                metavar="PATH_OR_NAME",
                help="a pipeline folder, or one that ships by its name (default: tiny)",
            )
            add("--teacher", type=Path, metavar="DIR", help="its teacher, to be judged as well")
            add("--count", type=int, default=400, metavar="N",
                help="held-out prompts (default: 400)")  # fmt: skip
        else:
            add("--family", choices=("wan", "cogvideox"), default="wan",
                help="which model (default: wan)")  # fmt: skip
        if name != "install":
            add(
                "--seed",
                type=int,
                default=7 if name == "evaluate" else 0,
                metavar="N",
                help="of everything (default: %(default)s)",
            )
            add("--device", default=device, help="cpu, cuda or cuda:N (default: %(default)s)")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. The exit codes are those of `exit_codes`."""
    given = parser().parse_args(argv)

    def run() -> int:
        if given.command == "evaluate":
            from training.evaluate import evaluate
            from turbo_rcm_patch.video.load import resolve_model

            evaluate(
                Path(resolve_model(given.model)), given.out, teacher=given.teacher,
                count=given.count, seed=given.seed, device=given.device,
            )  # fmt: skip
            return OK
        from training.families import FAMILIES
        from training.stage import Run
        from training.train import install, train

        family = FAMILIES[given.family]()
        if given.command == "install":
            print(f"installed {install(family, given.out / f'{family.name}_student')}")
        else:
            train(Run(given.out, torch.device(given.device), given.seed), family)
        return OK

    return run_command(run, interrupted="Interrupted. The same command goes on from the last "
                       "checkpoint.")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
