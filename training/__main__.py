"""Train the models that ship: `python -m training train --family wan --out DIR`.

The same command goes on where an earlier one stopped. Over several GPUs of a machine it is
`torchrun --nproc-per-node N -m training train ...`. Steps, sizes and learning rates are in
training/recipes.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from training.loop import OutOfTimeError, Run, TrainingError
from training.recipes import RECIPES, Recipe
from training.stages import STAGES, Training
from turbo_rcm_patch.cli.exit_codes import OK, run_command
from turbo_rcm_patch.errors import ConfigError
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
    add("--minutes", type=float, default=0.0, metavar="M",
        help="save and stop after so many; the same command goes on")  # fmt: skip
    add("--steps", action="append", default=[], metavar="STAGE=N",
        help="another number of steps than the recipe's; may be repeated")  # fmt: skip
    add("--no-compile", action="store_true", help="run the transformers' blocks eagerly")
    return top


def train(run: Run, recipe: Recipe) -> None:
    """Train a model in all stages, or go on where an earlier call with the same folder stopped.

    The folder receives `log.jsonl`, `state/`, `latents/` and the pipelines `<name>_teacher` and
    `<name>_student`.

    Raises:
        TrainingError: The folder is that of another run, or a stage diverged.
        OutOfTimeError: The minutes of this piece are over.
    """
    path = run.out / "config.json"
    sizes = [list(recipe.latent_shape(bucket)) for bucket in recipe.buckets]
    config = {"family": recipe.name, "seed": run.seed, "sizes": sizes}
    if path.exists() and path.read_text() != json.dumps(config, indent=1) + "\n":
        raise TrainingError(
            f"{path} is that of another run", expected=str(config),
            got=path.read_text()[:200], remedy="Choose another --out",
        )  # fmt: skip
    if not run.rank:
        write_json(path, config)
    torch.set_float32_matmul_precision("high")
    source = recipe.source(run.out / "frames", run.device, run.seed)
    training = Training(run, recipe, source)
    for i, name in enumerate(recipe.stages):
        torch.manual_seed(run.seed + i)
        STAGES[name](training)
    if not run.rank:
        vae, encoder = training.models["vae"], training.models["text_encoder"]
        for name in ("teacher", "student"):
            folder = run.out / f"{recipe.name}_{name}"
            network = training.models[name]
            recipe.networks.export(folder, vae, encoder, network, recipe.licence)
    run.log(event="finished")


def _train(options: argparse.Namespace) -> int:
    recipe = RECIPES[options.family]
    stages = dict(recipe.stages)
    for name, _, steps in (text.partition("=") for text in options.steps):
        if name not in stages or not steps.isdecimal():
            expected = f"STAGE=N with a stage of {', '.join(stages)}"
            raise ConfigError("--steps", expected=expected, got=f"{name}={steps}")
        stages[name] = replace(stages[name], steps=int(steps))
    device = torch.device(options.device)
    several = dist.is_torchelastic_launched()
    if several:
        dist.init_process_group()
        if device.type == "cuda":
            device = torch.device("cuda", dist.get_node_local_rank())
            torch.cuda.set_device(device)
    run = Run(options.out, device, options.seed, options.minutes, not options.no_compile)
    try:
        train(run, replace(recipe, stages=stages))
    except OutOfTimeError as over:
        run.log(event="out of time", says=str(over))
    finally:
        if several:
            dist.destroy_process_group()
    return OK


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. The exit codes are those of `exit_codes`."""
    options = parser().parse_args(argv)
    stopped = "Interrupted. The same command goes on from the last checkpoint."
    return run_command(lambda: _train(options), interrupted=stopped)


if __name__ == "__main__":
    sys.exit(main())
