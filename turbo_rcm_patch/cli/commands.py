"""Run the commands. Their options are defined in `options.py`."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from turbo_rcm_patch import __version__
from turbo_rcm_patch.checkpoints.convert import convert_pipeline, convert_transformer
from turbo_rcm_patch.checkpoints.folder import write_checkpoint
from turbo_rcm_patch.checkpoints.read import Progress
from turbo_rcm_patch.cli import options
from turbo_rcm_patch.cli.exit_codes import OK, USAGE, of_verdict
from turbo_rcm_patch.cli.progress import bars
from turbo_rcm_patch.errors import ConfigError, SamplingError
from turbo_rcm_patch.interrupts import reraise_interrupts
from turbo_rcm_patch.output import check_writable, remove_leftovers
from turbo_rcm_patch.patching import find_pairs, patched
from turbo_rcm_patch.patching.sla import held_proj_l
from turbo_rcm_patch.video import comparison, environment, generation, judging, store
from turbo_rcm_patch.video.load import load_pipeline, load_skeleton, pipeline_class
from turbo_rcm_patch.video.loading import first_line
from turbo_rcm_patch.video.many import Processes, ranks_here
from turbo_rcm_patch.video.pipelines import PIPELINES, VideoPipeline, check_images, networks_of
from turbo_rcm_patch.video.result import EMULATED
from turbo_rcm_patch.video.settings import Settings
from turbo_rcm_patch.video.source import ImageLike, Source
from turbo_rcm_patch.video.video import ENDINGS, as_bytes, find_ffmpeg, write_mp4


@dataclass(frozen=True, slots=True)
class Line:
    """One video to be made.

    Attributes:
        prompt: The prompt.
        seed: The seed.
        image: The image that the line of the list names, else --image.
    """

    prompt: str
    seed: int
    image: ImageLike | None = field(default=None, compare=False)


def lines_of(given: options.Run) -> list[Line]:
    """Read the prompts of a command.

    The images that a list names are opened when their videos are made, so that 100,000 prompts
    start at once.

    Raises:
        SamplingError: The list or --image cannot be read, or an image that the list names is not
            there.
        ConfigError: A prompt is empty or not in UTF-8.
    """
    found: list[tuple[str, Path | None]] = [(text, None) for text in given.prompt]
    if given.prompts is not None:
        found += _read_list(given.prompts)
    for prompt, _ in found:
        try:
            prompt.encode()
        except UnicodeEncodeError as error:  # Python's stand-in for a byte that is no UTF-8.
            raise ConfigError("--prompt", expected="a text in UTF-8", got=ascii(prompt)) from error
        if not prompt.strip():
            raise ConfigError("--prompt", expected="a text", got="an empty one")
    generation.check_seed(given.seed, len(found))
    image = Source("", given.image).read()
    return [
        Line(prompt, seed, file or image) for seed, (prompt, file) in enumerate(found, given.seed)
    ]


def check_lines(given: options.Run, lines: list[Line]) -> None:
    """Check, before a model is loaded, that it makes videos from these lines. Of their images the
    first is read.

    Raises:
        SamplingError: It takes no image, or needs one, or the first cannot be read.
    """
    Source("", next((one.image for one in lines if one.image is not None), None))
    if name := pipeline_class(given.model):
        check_images(PIPELINES[name], name, {one.prompt: one.image is not None for one in lines})


def _read_list(path: Path) -> Iterator[tuple[str, Path | None]]:
    name = f"--prompts {path}"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SamplingError(f"{name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SamplingError(
            name,
            expected="a text in UTF-8",
            got=f"byte {error.object[error.start]:#04x} at position {error.start}",
            remedy="Convert it, for instance with `iconv -f latin1 -t utf-8`",
        ) from error
    if not text.strip():
        raise ConfigError(name, expected="a prompt on each line", got="no line with text")
    # Not `splitlines`: a prompt may hold what Unicode takes for the end of a line.
    for number, line in enumerate(text.split("\n"), 1):
        prompt, _, other = map(str.strip, line.partition("\t"))
        file = path.parent / Path(other).expanduser() if other else None
        where = f"{name}, line {number}"
        if file is not None and not prompt:
            raise SamplingError(where, expected="a prompt before the tab", got="none")
        if file is not None and not file.is_file():
            raise SamplingError(where, expected=f"the file {file}", got="no such file")
        if prompt:
            yield prompt, file


def generate(given: options.Generate) -> int:
    """Write one mp4 per prompt; under torchrun every process writes its share, or all make each
    together."""
    # What would fail at the end fails before a model is loaded.
    lines, processes = lines_of(given), Processes(ranks_here())
    paths = _paths(given, lines)
    check_writable(paths[lines[0]])
    find_ffmpeg()
    check_lines(given, lines)
    remove_leftovers(paths[lines[0]].parent)
    with processes.joined(given.device, together=_together(given)):
        failed = _write_share(given, paths, processes)
    if failed:
        raise SamplingError(
            f"{len(failed)} of {len(processes.share(lines))} prompts failed",
            expected="a video of each",
            got=f"none of {', '.join(map(repr, failed[:3]))}" + ", ..." * (len(failed) > 3),
            remedy="The reasons are above. With --resume the command makes only these",
        )
    return OK


def _together(given: options.Generate) -> bool:
    """Return True if all processes make each video together."""
    return given.cfg_parallel or given.ulysses != 1


def _paths(given: options.Generate, lines: list[Line]) -> dict[Line, Path]:
    """Return the file of each video."""
    out = given.out.expanduser()
    # A folder may have a dot in its name, as runs/v1.2 has.
    if out.is_dir() or not out.suffix or out.suffix[1:].isdigit():
        return {one: out / f"{store.Store.key(one.prompt, one.seed)}.mp4" for one in lines}
    if len(lines) > 1 or out.suffix.lower() not in ENDINGS:
        many = f"a folder, because there are {len(lines)} prompts"
        one = f"a folder, or a file that ends in one of {ENDINGS}"
        raise SamplingError("--out", expected=many if len(lines) > 1 else one, got=str(out))
    store.check_note(out)
    return {lines[0]: out}


def _write_share(
    given: options.Generate, paths: Mapping[Line, Path], processes: Processes
) -> list[str]:
    """Write the videos of one process. Of several, one that fails costs the others nothing.

    Returns:
        The prompts that failed.
    """
    ranks, together, failed = processes.ranks, _together(given), []
    work = list(paths) if together else processes.share(list(paths))
    if not work:
        print(f"rank {ranks.rank} of {ranks.world}: no prompt is left for it")
        return []
    pipe = _load(given, ranks.device(given.device))
    settings = generation.settings_for(pipe, **given.settings)
    made_from = {
        "made by": f"turbo_rcm_patch {__version__}",
        "model": given.model,
        "dtype": given.dtype,
        "patch": asdict(given.config) if given.patch else None,
        "weights": "int8" if given.config.linear == "int8-only" else "as stored",
        "settings": settings.as_dict(),
    }
    # Of those that make each video together, one process writes and knows what is there.
    writes = processes.first or not together
    for line in work if given.resume and writes else []:  # Replace none if one was made otherwise.
        identity = {"prompt": line.prompt, "seed": line.seed, **made_from}
        store.is_made(paths[line], identity, but_for="inputs")
    if not given.patch:
        _say_dense(pipe)
    if given.cfg_parallel and processes.first and settings.guidance_scale <= 1:
        print("Without guidance both groups of --cfg-parallel compute the same; try --ulysses.")
    made: list[tuple[float, float, int]] = []
    folder = given.out.expanduser() not in paths.values()
    lock = store.lock_folder(given.out) if folder and processes.first else nullcontext()
    with ExitStack() as held:
        held.enter_context(lock)
        report = held.enter_context(patched(pipe, given.config)) if given.patch else None
        if together:
            from turbo_rcm_patch.diffusers_parallel import parallel  # needs diffusers

            groups = 2 if given.cfg_parallel else 1
            held.enter_context(parallel(pipe, cfg=groups, ulysses=given.ulysses))
        with _shown(processes) as progress:
            for done, line in enumerate(work):

                def on_step(step: int, _: int, before: int = done * settings.steps) -> None:
                    progress("generate", before + step, len(work) * settings.steps)

                try:
                    with reraise_interrupts():
                        source, path = Source(line.prompt, line.image), paths[line]
                        identity = {"prompt": line.prompt, "seed": line.seed, **made_from}
                        if source.image is not None:
                            identity["inputs"] = source.digest
                        was_there = partial(store.is_made, path, identity)
                        if given.resume and (
                            processes.broadcast(was_there) if together else was_there()
                        ):
                            print(f"{path}  was there")
                            on_step(settings.steps, 0)
                        else:
                            to = path if writes else None
                            made += [_write_video(pipe, source, settings, on_step, to, identity)]
                except BrokenPipeError:
                    raise
                except Exception as error:
                    if len(paths) == 1 or together:  # The others wait for this one.
                        raise
                    failed.append(line.prompt)
                    why = f"failed: {line.prompt!r} (seed {line.seed}): {first_line(error)}"
                    print(why, file=sys.stderr, flush=True)
        if report is not None and processes.first:
            print(report)
        elif report is not None and any(one.verdict != "kept" for one in report.guard):
            print(f"process {ranks.rank}, {report.guard}")
        if made and writes:
            device = environment.device_name(pipe._execution_device)
            print(_speed(made, device, report.impl if report is not None else ""))
    return failed


def _speed(made: list[tuple[float, float, int]], device: str, impl: str) -> str:
    """Describe time and memory of videos: of each the seconds of both parts, and the peak."""
    denoise, decode = (statistics.median(one[i] for one in made) for i in range(2))
    text = f"{denoise + decode:.3g} s a video ({denoise:.3g} s denoising, {decode:.3g} s decoding"
    text += f"; median of {len(made)}) on {device}"
    if peak := max(one[2] for one in made):
        text += f"; peak memory while denoising {peak / 2**30:.2f} GiB"
    return text + f". {EMULATED}" * (impl == "reference")


def _write_video(
    pipe: VideoPipeline,
    source: Source,
    settings: Settings,
    on_step: Callable[[int, int], None],
    path: Path | None,
    identity: Mapping[str, Any],
) -> tuple[float, float, int]:
    """Make a video, and write it unless another process does. Return the seconds of both parts,
    and the peak memory."""
    video = generation.generate(
        pipe, source.prompt, image=source.image, seed=identity["seed"], settings=settings,
        on_step=on_step,
    )  # fmt: skip
    decode = video.decode_seconds
    if path is not None:
        store.forget_made(path)  # A note never stands beside another video.
        write_mp4(as_bytes(video.frames), path, settings.fps)
        frames = len(video.frames)
        store.note_made(path, {**identity, "frames": frames})
        print(f"{path}  {frames} frames, {video.seconds:.2f} s, and {decode:.2f} s to decode")
    return video.seconds, decode, video.peak_bytes or 0


def _shown(processes: Processes) -> AbstractContextManager[Progress]:
    """Draw bars on the first process."""
    return bars() if processes.first else nullcontext(lambda stage, done, total: None)


def _say_dense(pipe: VideoPipeline) -> None:
    if held := sum(len(held_proj_l(network)) for network in networks_of(pipe).values()):
        print(f"{held} attentions hold SLA's proj_l. With --no-patch they run dense, without SLA.")


def compare(given: options.Compare) -> int:
    """Compare, then print the verdict and the path of the report.

    Raises:
        ConfigError: Among others: torchrun started several processes.
    """
    lines = lines_of(given)
    if (world := ranks_here().world) > 1:
        raise ConfigError(
            "compare under torchrun",
            expected="one process",
            got=str(world),
            remedy="Make the videos with `generate` under torchrun, with and without --no-patch, "
            "and give their folders to `judge`",
        )
    # What would fail at the end fails before a model is loaded.
    store.check_out(given.out, fresh=given.fresh)
    check_lines(given, lines)
    pipe = _load(given, given.device)
    with bars() as progress:
        result = comparison.compare(
            pipe,
            [line.prompt for line in lines],
            images=[line.image for line in lines if line.image is not None] or None,
            out=given.out,
            seed=given.seed,
            config=given.config,
            attention_backend=given.attention_backend,
            settings=generation.settings_for(pipe, **given.settings),
            network_number=given.network_number,
            fresh=given.fresh,
            progress=progress,
            command=given.command_line,
        )
    print(result)
    return of_verdict(result.verdict)


def judge(given: options.Judge) -> int:
    """Judge videos, then print the verdict; what could not be judged decides the exit code."""
    assert given.baseline and given.candidate  # `Judge` has checked it
    with bars() as progress:
        result = judging.judge_folders(
            given.baseline,
            given.candidate,
            given.control,
            out=given.out,
            fps=given.fps,
            fresh=given.fresh,
            progress=progress,
            command=given.command_line,
        )
    print(result)
    return USAGE if result.refused else of_verdict(result.verdict)


def pairs(given: options.Pairs) -> int:
    """Print the table of skip pairs."""
    print(find_pairs(load_skeleton(given.model, **given.loras)))
    return OK


def convert(given: options.Convert) -> int:
    """Convert a checkpoint to a folder or back, and print what was written."""
    with bars() as show:

        def progress(stage: str, done: int, total: int) -> None:
            show(stage, done >> 20, max(1, total >> 20))

        common: dict[str, Any] = {"force": given.force, "progress": progress}
        more = common | {
            "dtype": None if given.dtype is None else getattr(torch, given.dtype),
            "heads": given.heads,
            "network": given.network,
            "int8_only": given.int8_only,
        }
        if given.back:
            written = [write_checkpoint(given.source, given.out, **common)]
        elif given.base is None:
            written = [convert_transformer(given.source, given.out, **more)]
        else:
            more |= {"base": given.base, "low_noise": given.low_noise, "copy": given.copy}
            written = [*convert_pipeline(given.source, given.out, **more)]
    for one in written:
        print(one)
        if one.heads:
            print(f"  {one.heads}")
    return OK


def _load(given: options.Run, device: str | None) -> VideoPipeline:
    int8: bool | Literal["only"] = given.config.linear == "int8" and getattr(given, "patch", True)
    if given.config.linear == "int8-only":
        int8 = "only"
    return load_pipeline(
        given.model,
        dtype=getattr(torch, given.dtype),
        device=device,
        offload=given.offload,
        int8=int8,
        **given.loras,
    )
