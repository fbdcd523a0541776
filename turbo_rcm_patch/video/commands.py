"""Run the commands. Their arguments are defined in `__main__`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from turbo_rcm_patch import __version__
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import ConfigError, SamplingError
from turbo_rcm_patch.exit_codes import OK, Terminated, of_verdict
from turbo_rcm_patch.extras import require
from turbo_rcm_patch.output import check_writable
from turbo_rcm_patch.patching import find_pairs, patched
from turbo_rcm_patch.patching.sla import attached_proj_l
from turbo_rcm_patch.turbodiffusion.convert import convert_pipeline, convert_transformer
from turbo_rcm_patch.turbodiffusion.folder import Written
from turbo_rcm_patch.turbodiffusion.stored import write_checkpoint
from turbo_rcm_patch.video import comparison, generation
from turbo_rcm_patch.video.families import VideoPipeline, family_named
from turbo_rcm_patch.video.generation import check_seed, settings_for
from turbo_rcm_patch.video.load import (
    first_line,
    load_pipeline,
    load_skeleton,
    pipeline_class,
)
from turbo_rcm_patch.video.many import (
    Processes,
    check_note,
    forget_made,
    is_made,
    note_made,
    ranks_here,
)
from turbo_rcm_patch.video.progress import Progress, bars
from turbo_rcm_patch.video.settings import Settings
from turbo_rcm_patch.video.source import Source
from turbo_rcm_patch.video.store import Store, check_out, marker_of
from turbo_rcm_patch.video.video import ENDINGS, VIDEO_ENDINGS, as_bytes, find_ffmpeg, write_mp4


def generate(arguments: argparse.Namespace) -> int:
    """Write one mp4 per prompt; under torchrun every group of processes writes its share."""
    sources, config, processes = _sources(arguments), _config(arguments), _processes(arguments)
    # What would fail at the end fails before a model is loaded.
    check_seed(arguments.seed, len(sources))
    work = _planned(arguments, sources)
    check_writable(work[0].path)
    find_ffmpeg()
    _check_sources(arguments, sources)
    failed: SamplingError | None = None
    with processes.joined(arguments.device):
        try:
            _write_share(arguments, config, work, processes)
        except SamplingError as error:
            failed = error  # the others go on
    if failed is not None:
        raise failed
    return OK


class _Work(NamedTuple):
    """A video to be made."""

    source: Source
    seed: int
    path: Path
    noted: bool  # whether what it is made from is written beside it


def _planned(arguments: argparse.Namespace, sources: Sequence[Source]) -> list[_Work]:
    """The video of each source, and where it goes."""
    out = Path(arguments.out).expanduser()
    # A folder may have a dot in its name, as runs/v1.2 has.
    ending = "" if out.is_dir() or out.suffix[1:].isdigit() else out.suffix
    if ending and len(sources) > 1:
        raise SamplingError(
            "--out", expected=f"a folder, because there are {len(sources)} prompts", got=str(out)
        )
    if ending and ending.lower() not in ENDINGS:
        raise SamplingError(
            "--out", expected=f"a folder, or a file that ends in one of {ENDINGS}", got=str(out)
        )
    seeds = range(arguments.seed, arguments.seed + len(sources))
    if ending:
        if arguments.resume:
            check_note(out)
        return [_Work(sources[0], arguments.seed, out, noted=arguments.resume)]
    return [
        _Work(one, seed, out / f"{Store.key(one.prompt, seed)}.mp4", noted=True)
        for one, seed in zip(sources, seeds, strict=True)
    ]


def _write_share(
    arguments: argparse.Namespace, config: PatchConfig, work: list[_Work], processes: Processes
) -> None:
    """The videos of one group of processes."""
    ranks = processes.ranks
    several, work = len(work) > 1, processes.share(work)
    if not work:
        print(f"rank {ranks.rank} of {ranks.world}: no prompt is left for it")
        return
    pipe = _load(arguments, processes.ranks.device(arguments.device))
    settings = _settings(pipe, arguments)
    identity = {
        "made by": f"turbo_rcm_patch {__version__}",
        "model": str(arguments.model),
        "dtype": arguments.dtype,
        "patch": None if arguments.no_patch else asdict(config),
        "weights": "int8" if arguments.linear == "int8-only" else "as stored",
        "settings": settings.as_dict(),
    }
    if arguments.no_patch:
        _say_dense(pipe)
    with nullcontext() if arguments.no_patch else patched(pipe, config) as report:
        with _shown(processes) as progress:
            _write_videos(
                pipe, work, settings, identity, progress, processes,
                resume=arguments.resume, several=several,
            )  # fmt: skip
        if report is not None and processes.first:
            print(report)
        elif report is not None and any(one.verdict != "kept" for one in report.guard):
            print(f"process {ranks.rank}, {report.guard}")


def _shown(processes: Processes) -> AbstractContextManager[Progress]:
    """Bars on the first process."""
    return bars() if processes.first else nullcontext(_silent)


def _silent(stage: str, done: int, total: int) -> None:
    """Progress of which nobody is told."""


def _say_dense(pipe: VideoPipeline) -> None:
    parts = [part for part in (pipe.transformer, getattr(pipe, "transformer_2", None)) if part]
    modules = [module for part in parts for module in part.modules()]
    held = sum(attached_proj_l(module) is not None for module in modules)
    if held:
        print(f"{held} attentions hold SLA's proj_l. With --no-patch they run dense, without SLA.")


def _write_videos(
    pipe: VideoPipeline,
    work: list[_Work],
    settings: Settings,
    about: dict[str, object],
    progress: Progress,
    processes: Processes,
    *,
    resume: bool,
    several: bool,
) -> None:
    """Write the video of each prompt and seed. Of several, here or on other processes, one that
    fails costs the others nothing.

    Raises:
        SamplingError: Some failed; the others are written.
    """
    total, failed = settings.steps_run * len(work), []
    for i, (source, seed, path, noted) in enumerate(work):
        prompt = source.prompt

        def on_step(step: int, steps: int, before: int = i * settings.steps_run) -> None:
            progress("generate", before + step, total)

        identity = {"prompt": prompt, "seed": seed, **about}
        if source.given:
            identity["inputs"] = source.digest
        made = partial(is_made, path, identity)
        if resume and made():
            print(f"{path}  was there")
            on_step(settings.steps_run, settings.steps_run)
            continue
        try:
            video = generation.generate(
                pipe, source, seed=seed, settings=settings, on_step=on_step
            )
            had = forget_made(path)  # A note never stands beside another video.
            write_mp4(as_bytes(video.frames), path, settings.fps)
            if had or noted:
                note_made(path, identity)
        except Exception as error:
            if not several:
                raise
            failed.append(prompt)
            why = first_line(error)
            print(f"failed: {prompt!r} (seed {seed}): {why}", file=sys.stderr, flush=True)
            continue
        print(f"{path}  {video.seconds:.2f} s, and {video.decode_seconds:.2f} s to decode")
    if failed:
        raise SamplingError(
            f"{len(failed)} of {len(work)} prompts failed",
            expected="a video of each",
            got=f"none of {', '.join(map(repr, failed[:3]))}" + (", ..." if failed[3:] else ""),
            remedy="The reasons are above. The same command with --resume makes only what is "
            "missing",
        )


def compare(arguments: argparse.Namespace) -> int:
    """Compare, then print the verdict and the path of the report."""
    sources, config, processes = _sources(arguments), _config(arguments), _processes(arguments)
    require("report", "compare")
    before = marker_of(arguments.out)
    try:
        with processes.joined(arguments.device):
            found = _compared(arguments, sources, config, processes)
    except (KeyboardInterrupt, Terminated) as stop:
        again = "without --fresh " if arguments.fresh else ""
        said = f"What is finished is kept in {arguments.out}; the same command {again}goes on"
        if arguments.fresh and before is not None and marker_of(arguments.out) == before:
            said = f"Nothing in {arguments.out} was replaced yet; the same command begins"
        stop.add_note(f"Interrupted. {said} from there.")
        raise
    if processes.first:
        print(found)
    return of_verdict(found.verdict)


def _compared(
    arguments: argparse.Namespace,
    sources: list[Source],
    config: PatchConfig,
    processes: Processes,
) -> comparison.Comparison:
    # What would fail at the end fails before a model is loaded.
    processes.from_first(lambda: check_out(arguments.out, fresh=arguments.fresh))
    find_ffmpeg()
    _check_sources(arguments, sources)
    pipe = _load(arguments, processes.ranks.device(arguments.device))
    settings = _settings(pipe, arguments)
    with _shown(processes) as progress:
        return comparison.compare(
            pipe,
            sources,
            out=arguments.out,
            seed=arguments.seed,
            config=config,
            settings=settings,
            network_number=arguments.network_number,
            fresh=arguments.fresh,
            progress=progress,
            command=arguments.command_line,
            processes=processes,
        )


def _processes(arguments: argparse.Namespace) -> Processes:
    return Processes(ranks_here())


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
    except (KeyboardInterrupt, Terminated) as stop:
        stop.add_note(f"Interrupted. Nothing was written to {arguments.out}.")
        raise
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


def _config(arguments: argparse.Namespace) -> PatchConfig:
    given = {
        f.name: getattr(arguments, f.name) for f in fields(PatchConfig) if f.name in arguments
    }
    return PatchConfig(**given | {"form": arguments.pair_form, "guard": not arguments.no_guard})


def _settings(pipe: VideoPipeline, arguments: argparse.Namespace) -> Settings:
    given = {field.name: getattr(arguments, field.name) for field in fields(Settings)}
    return settings_for(pipe, **given)


def _sources(arguments: argparse.Namespace) -> list[Source]:
    """What the videos are made from. What is given for all of them is read once."""
    lines = _lines(arguments)
    names = [field.name for field in fields(Source) if field.name != "prompt"]
    given = {name: getattr(arguments, name) for name in names}
    common = Source("", **given).media
    sources = []
    for prompt, file in lines:
        own: dict[str, Any] = dict(common)
        if file is not None:
            own["video" if file.suffix.lower() in VIDEO_ENDINGS else "image"] = file
        sources.append(Source(prompt, **own))
    return sources


def _lines(arguments: argparse.Namespace) -> list[tuple[str, Path | None]]:
    """The prompts, each with the file that its line names."""
    lines: list[tuple[str, Path | None]] = [(prompt, None) for prompt in arguments.prompt]
    if arguments.prompts is not None:
        try:
            text = arguments.prompts.read_text(encoding="utf-8-sig")
        except OSError as error:
            raise SamplingError(f"--prompts {arguments.prompts}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise SamplingError(
                f"--prompts {arguments.prompts}",
                expected="a text in UTF-8",
                got=f"byte {error.object[error.start]:#04x} at position {error.start}",
                remedy="Convert it, for instance with `iconv -f latin1 -t utf-8`",
            ) from error
        # Not `splitlines`: a prompt may hold what Unicode takes for the end of a line.
        for number, line in enumerate(text.split("\n"), 1):
            prompt, _, file = map(str.strip, line.partition("\t"))
            if file and not prompt:
                raise SamplingError(
                    f"--prompts {arguments.prompts}, line {number}",
                    expected="a prompt before the tab",
                    got=f"none, and {file!r} behind it",
                )
            own = arguments.prompts.parent / Path(file).expanduser() if file else None
            if prompt:
                lines.append((prompt, own))
    if not lines:
        raise ConfigError(
            f"--prompts {arguments.prompts}",
            expected="a prompt on each line",
            got="no line with text",
        )
    if not all(prompt.strip() for prompt, _ in lines):
        raise ConfigError("--prompt", expected="a text", got="an empty one")
    try:
        "".join(prompt for prompt, _ in lines).encode()
    except UnicodeEncodeError as error:  # Python's stand-in for a byte that is no UTF-8.
        raise ConfigError(
            "--prompt", expected="a text in UTF-8", got=ascii(error.object)
        ) from error
    return lines


def _check_sources(arguments: argparse.Namespace, sources: Sequence[Source]) -> None:
    """Raise, before a model is loaded, if its pipeline does not make videos from these."""
    pipeline = pipeline_class(arguments.model)
    if pipeline is not None:
        family_named(pipeline).check(pipeline, sources)


def _load(arguments: argparse.Namespace, device: str | None = None) -> VideoPipeline:
    int8: bool | Literal["only"] = arguments.linear == "int8"
    if arguments.linear == "int8-only":
        int8 = "only"
    elif getattr(arguments, "no_patch", False):
        int8 = False
    return load_pipeline(
        arguments.model,
        dtype=getattr(torch, arguments.dtype),
        device=arguments.device if device is None else device,
        offload=arguments.offload,
        int8=int8,
    )
