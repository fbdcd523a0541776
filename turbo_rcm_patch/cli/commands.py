"""Run the short commands. Their options are defined in `options.py`."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from turbo_rcm_patch.checkpoints.convert import convert_pipeline, convert_transformer
from turbo_rcm_patch.cli import options
from turbo_rcm_patch.cli.exit_codes import OK, USAGE, of_verdict
from turbo_rcm_patch.cli.generate import generate as generate
from turbo_rcm_patch.cli.generate import how_made
from turbo_rcm_patch.cli.inputs import check_inputs, load, read_prompts
from turbo_rcm_patch.cli.progress import bars
from turbo_rcm_patch.errors import ConfigError, PlanError, SamplingError
from turbo_rcm_patch.files import check_writable, read_json
from turbo_rcm_patch.patching import find_pairs, patched
from turbo_rcm_patch.patching.plan import Plan
from turbo_rcm_patch.video import comparison, generation, judging, store
from turbo_rcm_patch.video.load import load_skeleton
from turbo_rcm_patch.video.many import Processes
from turbo_rcm_patch.video.pipelines import networks_of
from turbo_rcm_patch.video.result import Judged
from turbo_rcm_patch.video.source import Source, digest_of

_NO_PLAN = "Name another --out, or remove the file"


def compare(command: options.Compare) -> int:
    """Compare, then print the verdict and the path of the report."""
    return of_verdict(run_comparison(command).verdict)


def run_comparison(command: options.Compare) -> Judged:
    """Compare, and print the verdict and the path of the report.

    Raises:
        ConfigError: Among others: torchrun started several processes.
    """
    prompts = read_prompts(command)
    _refuse_several(
        "compare",
        "Make the videos with `generate` under torchrun, with and without --no-patch, "
        "and give their folders to `judge`",
    )
    # What would fail at the end fails before a model is loaded.
    store.check_out(command.out, fresh=command.fresh)
    check_inputs(command)
    pipe = load(command, command.device)
    with bars() as progress:
        result = comparison.compare(
            pipe,
            prompts,
            images=command.image,
            out=command.out,
            seed=command.seed,
            config=command.config,
            attention_backend=command.attention_backend,
            plan=command.plan,
            settings=generation.settings_for(pipe, **command.settings),
            network_number=command.network_number,
            fresh=command.fresh,
            progress=progress,
            command=command.command_line,
        )
    print(result)
    return result


def judge(command: options.Judge) -> int:
    """Judge videos, then print the verdict; what could not be judged decides the exit code."""
    assert command.baseline and command.candidate  # `Judge` has checked it
    with bars() as progress:
        result = judging.judge_folders(
            command.baseline,
            command.candidate,
            command.control,
            out=command.out,
            fps=command.fps,
            fresh=command.fresh,
            progress=progress,
            command=command.command_line,
        )
    print(result)
    return USAGE if result.refused else of_verdict(result.verdict)


def plan(command: options.Plan) -> int:
    """Measure on the first, the middle and the last step of each prompt, and write how exactly
    each block has to run for all of them."""
    prompts, out = read_prompts(command), command.out.expanduser()
    _refuse_several("plan", "Its file serves all processes of `generate --plan`")
    check_writable(out)
    check_inputs(command)
    if out.exists() and "plan" not in read_json(out, PlanError, _NO_PLAN):
        raise PlanError(
            str(out), expected="a plan to replace", got="another file", remedy=_NO_PLAN
        )
    made = Plan.load(out) if command.resume and out.exists() else None
    pipe = load(command, command.device)
    settings = generation.settings_for(pipe, **command.settings)
    image = Source("", command.image).read()
    how = how_made(command, settings) | {"seed": command.seed, "image": digest_of(image)}
    done = 0 if made is None else made.check_prompts(prompts, how)
    measured = True

    def measure(*_: object) -> None:  # each forward of a step with guidance
        if measured:
            report.guard.check_next()

    with (
        bars() as progress,
        patched(pipe, command.config, plan=made) as report,
        ExitStack() as hooks,
    ):
        for network in networks_of(pipe).values():
            hooks.callback(network.register_forward_pre_hook(measure).remove)
        for index in range(done, len(prompts)):

            def on_step(step: int, steps: int, before: int = index * settings.steps) -> None:
                nonlocal measured
                progress("plan", before + step, len(prompts) * steps)
                measured = step in (steps // 2, steps - 1, steps)

            generation.generate(
                pipe,
                prompts[index],
                image=image,
                seed=command.seed + index,
                settings=settings,
                on_step=on_step,
            )
            if report.plan is None:
                raise SamplingError(
                    "no plan",
                    expected="a guard that compares every block",
                    got=str(report.guard) if command.config.guard else "--no-guard",
                    remedy="Leave out what keeps a state inside of blocks, and take so many "
                    "--steps that every network runs",
                )
            made = report.plan.of_prompts(prompts[: index + 1], how)
            made.save(out)
    print(made)
    print(out)
    return OK


def _refuse_several(command: str, remedy: str) -> None:
    """Raise a ConfigError if torchrun started several processes."""
    if (world := Processes.here().world) > 1:
        raise ConfigError(
            f"{command} under torchrun", expected="one process", got=str(world), remedy=remedy
        )


def pairs(command: options.Pairs) -> int:
    """Print the table of skip pairs."""
    print(find_pairs(load_skeleton(command.model, lora=command.lora)))
    return OK


def precompile(command: options.Precompile) -> int:
    """Compile a model's kernels, and print how many."""
    from turbo_rcm_patch.video.precompile import precompile

    with bars() as progress:
        compiled = precompile(
            command.model,
            gpu=command.gpu,
            out=command.out,
            dtype=getattr(torch, command.dtype),
            config=command.config,
            height=command.height,
            width=command.width,
            num_frames=command.num_frames,
            progress=progress,
        )
    print(compiled)
    return OK


def convert(command: options.Convert) -> int:
    """Convert a checkpoint to a folder, and print what was written."""
    with bars() as show:

        def progress(stage: str, done: int, total: int) -> None:
            show(stage, done >> 20, max(1, total >> 20))

        more: dict[str, Any] = {
            "force": command.force,
            "progress": progress,
            "dtype": None if command.dtype is None else getattr(torch, command.dtype),
            "heads": command.heads,
            "network": command.network,
            "int8_only": command.int8_only,
        }
        if command.base is None:
            written = [convert_transformer(command.source, command.out, **more)]
        else:
            more |= {"base": command.base, "low_noise": command.low_noise, "copy": command.copy}
            written = [*convert_pipeline(command.source, command.out, **more)]
    for folder in written:
        print(folder)
        if folder.heads:
            print(f"  {folder.heads}")
    return OK
