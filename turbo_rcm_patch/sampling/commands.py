"""Run the commands. Their arguments are defined in `__main__`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Literal

import torch

from turbo_rcm_patch.checkpoints.convert import convert_pipeline, convert_transformer
from turbo_rcm_patch.checkpoints.folder import Written
from turbo_rcm_patch.checkpoints.stored import write_checkpoint
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import ConfigError, SamplingError
from turbo_rcm_patch.exit_codes import CHANGED, INTERRUPTED, OK
from turbo_rcm_patch.extras import require
from turbo_rcm_patch.output import check_writable
from turbo_rcm_patch.patching import find_pairs, patched
from turbo_rcm_patch.patching.sla import attached_proj_l
from turbo_rcm_patch.sampling import comparison, generation
from turbo_rcm_patch.sampling.families import VideoPipeline
from turbo_rcm_patch.sampling.generation import settings_for
from turbo_rcm_patch.sampling.load import load_pipeline, load_skeleton
from turbo_rcm_patch.sampling.progress import Progress, bars
from turbo_rcm_patch.sampling.settings import Settings
from turbo_rcm_patch.sampling.store import Store, check_out
from turbo_rcm_patch.sampling.support import replace_in, text
from turbo_rcm_patch.sampling.video import ENDINGS, enlarge, find_ffmpeg, write_mp4

__all__ = ["compare", "convert", "generate", "pairs", "support"]


def generate(arguments: argparse.Namespace) -> int:
    """Write one mp4 per prompt."""
    prompts, config = _prompts(arguments), _config(arguments)
    out = Path(arguments.out).expanduser()
    if out.suffix and len(prompts) > 1:
        raise SamplingError(
            "--out", expected=f"a folder, because there are {len(prompts)} prompts", got=str(out)
        )
    if out.suffix and out.suffix.lower() not in ENDINGS:
        raise SamplingError(
            "--out", expected=f"a folder, or a file that ends in one of {ENDINGS}", got=str(out)
        )
    # What would fail at the end fails before a model is loaded.
    check_writable(out if out.suffix else out / f"{Store.key(prompts[0], arguments.seed)}.mp4")
    find_ffmpeg()
    pipe = _load(arguments)
    settings = _settings(pipe, arguments)
    if arguments.no_patch:
        _say_dense(pipe)
        _write_videos(pipe, prompts, settings, arguments.seed, out)
        return OK
    with patched(pipe, config) as report:
        _write_videos(pipe, prompts, settings, arguments.seed, out)
        print(report)
    return OK


def _say_dense(pipe: VideoPipeline) -> None:
    parts = [part for part in (pipe.transformer, getattr(pipe, "transformer_2", None)) if part]
    modules = [module for part in parts for module in part.modules()]
    held = sum(attached_proj_l(module) is not None for module in modules)
    if held:
        print(f"{held} attentions hold SLA's proj_l. With --no-patch they run dense, without SLA.")


def _write_videos(
    pipe: VideoPipeline, prompts: list[str], settings: Settings, first_seed: int, out: Path
) -> None:
    total = settings.steps * len(prompts)
    with bars() as progress:
        for i, prompt in enumerate(prompts):

            def on_step(step: int, steps: int, before: int = i * settings.steps) -> None:
                progress("generate", before + step, total)

            seed = first_seed + i
            video = generation.generate(
                pipe, prompt, seed=seed, settings=settings, on_step=on_step
            )
            path = out if out.suffix else out / f"{Store.key(prompt, seed)}.mp4"
            write_mp4(enlarge(video.frames), path, settings.fps)
            print(f"{path}  {video.seconds:.2f} s, and {video.decode_seconds:.2f} s to decode")


def compare(arguments: argparse.Namespace) -> int:
    """Compare, then print the verdict and the path of the report."""
    prompts, config = _prompts(arguments), _config(arguments)
    require("report", "compare")
    check_out(arguments.out, fresh=arguments.fresh)
    find_ffmpeg()
    pipe = _load(arguments)
    settings = _settings(pipe, arguments)
    try:
        with bars() as progress:
            found = comparison.compare(
                pipe,
                prompts,
                out=arguments.out,
                seed=arguments.seed,
                config=config,
                settings=settings,
                network_number=arguments.network_number,
                fresh=arguments.fresh,
                progress=progress,
                command=arguments.command_line,
            )
    except KeyboardInterrupt:
        print(
            f"\nInterrupted. What is finished is kept in {arguments.out}; the same command "
            "goes on from there. The model is as it was.",
            file=sys.stderr,
        )
        return INTERRUPTED
    print(found)
    return OK if found.verdict == "unchanged" else CHANGED


def pairs(arguments: argparse.Namespace) -> int:
    """Print the table of skip pairs."""
    print(find_pairs(load_skeleton(arguments.model)))
    return OK


def convert(arguments: argparse.Namespace) -> int:
    """Convert a checkpoint to a folder or back, and print what was written."""
    try:
        with bars() as progress:
            written = _converted(
                arguments,
                lambda stage, done, total: progress(stage, done >> 20, max(1, total >> 20)),
            )
    except KeyboardInterrupt:
        print(f"\nInterrupted. Nothing was written to {arguments.out}.", file=sys.stderr)
        return INTERRUPTED
    for one in written:
        print(one)
        if one.heads:
            print(f"  {one.heads}")
        if one.left_out:
            print(f"  left out, because it holds no weights: {', '.join(one.left_out)}")
    return OK


def _converted(arguments: argparse.Namespace, progress: Progress) -> tuple[Written, ...]:
    source, out, force = arguments.source, arguments.out, arguments.force
    for flag, given in (
        ("--base", arguments.back and arguments.base),
        ("--dtype", arguments.back and arguments.dtype),
        ("--heads", arguments.back and arguments.heads),
        ("--network", arguments.back and arguments.network),
        ("--int8-only", arguments.back and arguments.int8_only),
        ("--low-noise", arguments.low_noise and not (arguments.base and not arguments.back)),
        ("--copy", arguments.copy and not (arguments.base and not arguments.back)),
    ):
        if given:
            context = "--back" if arguments.back else "no --base"
            raise ConfigError(flag, expected="not to be given here", got=f"it, with {context}")
    if arguments.back:
        return (write_checkpoint(source, out, force=force, progress=progress),)
    given = {
        "dtype": None if arguments.dtype is None else getattr(torch, arguments.dtype),
        "heads": arguments.heads,
        "network": arguments.network,
        "int8_only": arguments.int8_only,
        "force": force,
        "progress": progress,
    }
    if arguments.base is None:
        return (convert_transformer(source, out, **given),)
    more = {name: getattr(arguments, name) for name in ("base", "low_noise", "copy")}
    return convert_pipeline(source, out, **more, **given)


def support(arguments: argparse.Namespace) -> int:
    """Print what is supported, or write it into a file."""
    if arguments.write is None:
        print(text(), end="")
    else:
        replace_in(arguments.write)
    return OK


def _config(arguments: argparse.Namespace) -> PatchConfig:
    return PatchConfig(
        attention=arguments.attention,
        pv=arguments.pv,
        linear=arguments.linear,
        precision=arguments.precision,
        impl=arguments.impl,
        form=arguments.pair_form,
        guard=not arguments.no_guard,
        guard_budget=arguments.guard_budget,
        sla_topk=arguments.sla_topk,
    )


def _settings(pipe: VideoPipeline, arguments: argparse.Namespace) -> Settings:
    given = {field.name: getattr(arguments, field.name) for field in fields(Settings)}
    return settings_for(pipe, **given)


def _prompts(arguments: argparse.Namespace) -> list[str]:
    prompts = list(arguments.prompt)
    if arguments.prompts is not None:
        try:
            lines = arguments.prompts.read_text(encoding="utf-8-sig").splitlines()
        except OSError as error:
            raise SamplingError(f"--prompts {arguments.prompts}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise SamplingError(
                f"--prompts {arguments.prompts}",
                expected="a text in UTF-8",
                got=f"byte {error.object[error.start]:#04x} at position {error.start}",
                remedy="Convert it, for instance with `iconv -f latin1 -t utf-8`",
            ) from error
        prompts += [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise ConfigError("prompts", expected="--prompt TEXT or --prompts FILE", got="neither")
    return prompts


def _load(arguments: argparse.Namespace) -> VideoPipeline:
    int8: bool | Literal["only"] = arguments.linear == "int8"
    if arguments.linear == "int8-only":
        int8 = "only"
    elif getattr(arguments, "no_patch", False):
        int8 = False
    return load_pipeline(
        arguments.model,
        dtype=getattr(torch, arguments.dtype),
        device=arguments.device,
        offload=arguments.offload,
        int8=int8,
    )
