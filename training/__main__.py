"""Train the models that ship: `python -m training train --family wan --out DIR`.

The same command goes on where an earlier one stopped, at most a minute before. Steps, sizes and
learning rates are in training/recipes.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from training.loop import Run
from training.recipes import RECIPES, Recipe
from training.stages import STAGES, Training
from turbo_rcm_patch.cli.exit_codes import OK, run_command


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser("python -m training", description=__doc__, formatter_class=raw)
    top.add_argument("command", choices=("train",))
    top.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the run")
    top.add_argument("--family", choices=RECIPES, default="wan", help="default: %(default)s")
    return top


def train(out: Path, recipe: Recipe, device: torch.device) -> None:
    """Train a model in all stages, or go on where an earlier call with the same folder stopped.

    The folder receives the pipelines `<name>_teacher` and `<name>_student`, and in `<name>` the
    log, checkpoints and latents.
    """
    torch.set_float32_matmul_precision("high")
    run = Run(out / recipe.name, device)
    training = Training(run, recipe, recipe.source(run.out / "frames", device))
    for i, name in enumerate(recipe.stages):
        torch.manual_seed(i)
        STAGES[name](training)
    vae, encoder = training.models["vae"], training.models["text_encoder"]
    for name in ("teacher", "student"):
        folder, network = out / f"{recipe.name}_{name}", training.models[name]
        recipe.networks.export(folder, vae, encoder, network, recipe.licence)
    run.log(event="finished")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. The exit codes are those of `exit_codes`."""
    options = parser().parse_args(argv)

    def run() -> int:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        train(options.out, RECIPES[options.family], device)
        return OK

    stopped = "Interrupted. The same command goes on from the last checkpoint."
    return run_command(run, interrupted=stopped)


if __name__ == "__main__":
    sys.exit(main())
