"""Train the models that ship: `python -m training train --family wan --out DIR`.

The same command goes on where an earlier one stopped, at most a minute before. Steps, sizes and
learning rates are in training/recipes.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from training.loop import Run, TrainingError
from training.recipes import RECIPES, Recipe
from training.stages import STAGES, Training
from turbo_rcm_patch.cli.exit_codes import OK, run_command
from turbo_rcm_patch.files import write_json


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser("python -m training", description=__doc__, formatter_class=raw)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = commands.add_parser("train", help="train a model in all stages").add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the run")
    add("--family", choices=RECIPES, default="wan", help="default: %(default)s")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--seed", type=int, default=0, metavar="N", help="of everything (default: %(default)s)")
    add("--device", default=device, help="cpu, cuda or cuda:N (default: %(default)s)")
    return top


def train(run: Run, recipe: Recipe) -> None:
    """Train a model in all stages, or go on where an earlier call with the same folder stopped.

    The folder receives `log.jsonl`, `state/`, `latents/` and the pipelines `<name>_teacher` and
    `<name>_student`.

    Raises:
        TrainingError: The folder is that of another run, or a stage diverged.
    """
    path = run.out / "config.json"
    sizes = [list(recipe.latent_shape(bucket)) for bucket in recipe.buckets]
    config = {"family": recipe.name, "seed": run.seed, "sizes": sizes}
    if path.exists() and path.read_text() != json.dumps(config, indent=1) + "\n":
        raise TrainingError(
            f"{path} is that of another run", expected=str(config),
            got=path.read_text()[:200], remedy="Choose another --out",
        )  # fmt: skip
    write_json(path, config)
    torch.set_float32_matmul_precision("high")
    source = recipe.source(run.out / "frames", run.device, run.seed)
    training = Training(run, recipe, source)
    for i, name in enumerate(recipe.stages):
        torch.manual_seed(run.seed + i)
        STAGES[name](training)
    vae, encoder = training.models["vae"], training.models["text_encoder"]
    for name in ("teacher", "student"):
        folder, network = run.out / f"{recipe.name}_{name}", training.models[name]
        recipe.networks.export(folder, vae, encoder, network, recipe.licence)
    run.log(event="finished")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. The exit codes are those of `exit_codes`."""
    options = parser().parse_args(argv)

    def run() -> int:
        device = torch.device(options.device)
        train(Run(options.out, device, options.seed), RECIPES[options.family])
        return OK

    stopped = "Interrupted. The same command goes on from the last checkpoint."
    return run_command(run, interrupted=stopped)


if __name__ == "__main__":
    sys.exit(main())
