"""Run the commands. Their arguments are defined in `__main__`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import ConfigError, SamplingError
from turbo_rcm_patch.exit_codes import CHANGED, INTERRUPTED, OK
from turbo_rcm_patch.output import check_writable
from turbo_rcm_patch.sampling.settings import Settings

if TYPE_CHECKING:
    from turbo_rcm_patch.checkpoints.folder import Progress, Written
    from turbo_rcm_patch.sampling.families import VideoPipeline

__all__ = [
    "compare",
    "convert",
    "doctor",
    "generate",
    "pairs",
    "support",
]


def generate(arguments: argparse.Namespace) -> int:
    """Write one mp4 per prompt."""
    from turbo_rcm_patch import patched
    from turbo_rcm_patch.sampling.generation import settings_for
    from turbo_rcm_patch.sampling.store import Store
    from turbo_rcm_patch.sampling.video import ENDINGS, find_ffmpeg

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
    settings = settings_for(pipe, **_settings(arguments))
    if arguments.no_patch:
        _say_dense(pipe)
        _write_videos(pipe, prompts, settings, arguments.seed, out)
        return OK
    with patched(pipe, config) as report:
        _write_videos(pipe, prompts, settings, arguments.seed, out)
        print(report)
    return OK


def _say_dense(pipe: VideoPipeline) -> None:
    from turbo_rcm_patch.patching.sla import attached_proj_l

    parts = [part for part in (pipe.transformer, getattr(pipe, "transformer_2", None)) if part]
    modules = [module for part in parts for module in part.modules()]
    held = sum(attached_proj_l(module) is not None for module in modules)
    if held:
        print(f"{held} attentions hold SLA's proj_l. With --no-patch they run dense, without SLA.")


def _write_videos(
    pipe: VideoPipeline, prompts: list[str], settings: Settings, first_seed: int, out: Path
) -> None:
    from turbo_rcm_patch.sampling.generation import generate as generate_one
    from turbo_rcm_patch.sampling.progress import bars
    from turbo_rcm_patch.sampling.store import Store
    from turbo_rcm_patch.sampling.video import enlarge, write_mp4

    total = settings.steps * len(prompts)
    with bars() as progress:
        for i, prompt in enumerate(prompts):

            def on_step(step: int, steps: int, before: int = i * settings.steps) -> None:
                progress("generate", before + step, total)

            seed = first_seed + i
            video = generate_one(pipe, prompt, seed=seed, settings=settings, on_step=on_step)
            path = out if out.suffix else out / f"{Store.key(prompt, seed)}.mp4"
            write_mp4(enlarge(video.frames), path, settings.fps)
            print(f"{path}  {video.seconds:.2f} s, and {video.decode_seconds:.2f} s to decode")


def compare(arguments: argparse.Namespace) -> int:
    """Compare, then print the verdict and the path of the report."""
    from turbo_rcm_patch.sampling.comparison import compare as run
    from turbo_rcm_patch.sampling.generation import settings_for
    from turbo_rcm_patch.sampling.progress import bars
    from turbo_rcm_patch.sampling.store import check_out
    from turbo_rcm_patch.sampling.video import find_ffmpeg

    prompts, config = _prompts(arguments), _config(arguments)
    check_out(arguments.out, fresh=arguments.fresh)
    find_ffmpeg()
    pipe = _load(arguments)
    settings = settings_for(pipe, **_settings(arguments))
    try:
        with bars() as progress:
            comparison = run(
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
    print(comparison)
    return OK if comparison.verdict == "unchanged" else CHANGED


def pairs(arguments: argparse.Namespace) -> int:
    """Print the table of skip pairs."""
    from turbo_rcm_patch import find_pairs
    from turbo_rcm_patch.sampling.skeleton import load_skeleton

    print(find_pairs(load_skeleton(arguments.model)))
    return OK


def convert(arguments: argparse.Namespace) -> int:
    """Convert a checkpoint to a folder or back, and print what was written."""
    from turbo_rcm_patch.sampling.progress import bars

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
    import torch

    from turbo_rcm_patch.checkpoints.stored import write_checkpoint
    from turbo_rcm_patch.sampling.convert import convert_pipeline, convert_transformer

    source, out, force = arguments.source, arguments.out, arguments.force
    for flag, given in (
        ("--base", arguments.back and arguments.base),
        ("--dtype", arguments.back and arguments.dtype),
        ("--heads", arguments.back and arguments.heads),
        ("--network", arguments.back and arguments.network),
        ("--low-noise", arguments.low_noise and not (arguments.base and not arguments.back)),
        ("--copy", arguments.copy and not (arguments.base and not arguments.back)),
    ):
        if given:
            context = "--back" if arguments.back else "no --base"
            raise ConfigError(flag, expected="not to be given here", got=f"it, with {context}")
    if arguments.back:
        return (write_checkpoint(source, out, force=force, progress=progress),)
    dtype = None if arguments.dtype is None else getattr(torch, arguments.dtype)
    if arguments.base is None:
        one = convert_transformer(
            source,
            out,
            dtype=dtype,
            heads=arguments.heads,
            network=arguments.network,
            force=force,
            progress=progress,
        )
        return (one,)
    return convert_pipeline(
        source,
        out,
        base=arguments.base,
        low_noise=arguments.low_noise,
        dtype=dtype,
        heads=arguments.heads,
        network=arguments.network,
        copy=arguments.copy,
        force=force,
        progress=progress,
    )


def doctor(_: argparse.Namespace) -> int:
    """Print what is installed and what would be used."""
    from turbo_rcm_patch.sampling.doctor import examine

    report = examine()
    print(report)
    return OK if report.healthy else CHANGED


def support(arguments: argparse.Namespace) -> int:
    """Print what is supported, or write it into a file."""
    from turbo_rcm_patch.sampling.support import replace_in, text

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


def _settings(arguments: argparse.Namespace) -> dict[str, object]:
    names = (
        "sampler",
        "steps",
        "form",
        "sigma_max",
        "height",
        "width",
        "num_frames",
        "fps",
        "guidance_scale",
        "guidance_scale_2",
        "negative_prompt",
        "max_sequence_length",
    )
    return {name: getattr(arguments, name) for name in names}


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
    import torch

    from turbo_rcm_patch.sampling.load import load_pipeline

    return load_pipeline(
        arguments.model,
        dtype=getattr(torch, arguments.dtype),
        device=arguments.device,
        offload=arguments.offload,
        int8=arguments.linear == "int8" and not getattr(arguments, "no_patch", False),
    )
