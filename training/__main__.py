"""Train the models that ship: `python -m training train --family wan --out DIR`.

The same command goes on where an earlier one stopped. Over several GPUs of a machine it is
`torchrun --nproc-per-node N -m training train ...`. `record` makes clips of a recorded world in
advance. `install` puts a trained student where the package looks for it; `evaluate` judges its
videos. Steps, sizes and learning rates are each model's `recipe` in training/families.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from turbo_rcm_patch.cli.exit_codes import OK, run_command
from turbo_rcm_patch.errors import ConfigError

_COMMANDS = {
    "record": "record the clips of --family world",
    "train": "train a model in all stages",
    "install": "put the student of --out where the package looks for it",
    "evaluate": "judge the videos of a model",
}


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser("python -m training", description=__doc__, formatter_class=raw)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, text in _COMMANDS.items():
        add = commands.add_parser(name, help=text, description=text).add_argument
        add("--out", type=Path, required=True, metavar="DIR", help="of the run, or of results")
        if name == "evaluate":
            add("--model", default="tiny", metavar="PATH_OR_NAME",
                help="a pipeline folder, or a shipped one by name (default: tiny)")  # fmt: skip
            add("--teacher", type=Path, metavar="DIR", help="its teacher, to be judged as well")
            add("--count", type=int, default=400, metavar="N",
                help="held-out prompts (default: 400)")  # fmt: skip
        else:
            choices = ("wan", "cogvideox", "world")[2 * (name == "record") :]
            add("--family", choices=choices, default=choices[0],
                help="which model (default: %(default)s)")  # fmt: skip
        if name != "install":
            add("--seed", type=int, default=7 if name == "evaluate" else 0, metavar="N",
                help="of everything (default: %(default)s)")  # fmt: skip
        if name == "record":
            add("--processes", type=int, default=0, metavar="N", help="default: one a core")
        if name in ("train", "evaluate"):
            add("--device", default=device, help="cpu, cuda or cuda:N (default: %(default)s)")
        if name == "train":
            add("--minutes", type=float, default=0.0, metavar="M",
                help="save and stop after so many; the same command goes on")  # fmt: skip
            add("--steps", action="append", default=[], metavar="STAGE=N",
                help="another number of steps than the recipe's; may be repeated")  # fmt: skip
            add("--micro", action="store_true", help="a model of toy size, to try the command")
            add("--no-compile", action="store_true", help="run the transformers' blocks eagerly")
    return top


def _train(given: argparse.Namespace) -> None:
    from training.families import FAMILIES, small
    from training.stage import OutOfTimeError, Run
    from training.train import train

    family = FAMILIES[given.family]()
    recipe = small(family.recipe) if given.micro else family.recipe
    stages = dict(recipe.stages)
    for name, _, steps in (one.partition("=") for one in given.steps):
        if name not in stages or not steps.isdecimal():
            expected = f"STAGE=N with a stage of {', '.join(stages)}"
            raise ConfigError("--steps", expected=expected, got=f"{name}={steps}")
        stages[name] = replace(stages[name], steps=int(steps))
    device = torch.device(given.device)
    several = dist.is_torchelastic_launched()
    if several:
        dist.init_process_group()
        if device.type == "cuda":
            device = torch.device("cuda", dist.get_node_local_rank())
            torch.cuda.set_device(device)
    run = Run(given.out, device, given.seed, given.minutes, not given.no_compile)
    try:
        train(run, family, replace(recipe, stages=stages))
    except OutOfTimeError as over:
        run.log(event="out of time", says=str(over))
    finally:
        if several:
            dist.destroy_process_group()


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
        elif given.command == "train":
            _train(given)
        elif given.command == "record":
            from training import world
            from training.families import FAMILIES

            buckets = FAMILIES[given.family].recipe.buckets
            shards = [world.Shard(b, i, given.seed) for b in buckets for i in range(b.shards)]
            shards.append(world.Shard(buckets[0], 0, given.seed, held_out=True))
            for i, path in enumerate(
                world.record(shards, given.out / "frames", given.processes), 1
            ):
                print(f"{i} of {len(shards)}: {path}", flush=True)
        else:
            from training.families import FAMILIES
            from training.train import install

            family = FAMILIES[given.family]()
            print(f"installed {install(family, given.out / f'{family.name}_student')}")
        return OK

    return run_command(run, interrupted="Interrupted. The same command goes on from the last "
                       "checkpoint.")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
