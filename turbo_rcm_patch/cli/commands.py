"""Run the commands. Their options are defined in `options.py`."""

from __future__ import annotations

import statistics
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from turbo_rcm_patch import __version__
from turbo_rcm_patch.checkpoints.convert import convert_pipeline, convert_transformer
from turbo_rcm_patch.checkpoints.read import Progress
from turbo_rcm_patch.cli import options
from turbo_rcm_patch.cli.exit_codes import OK, USAGE, of_verdict
from turbo_rcm_patch.cli.progress import bars
from turbo_rcm_patch.errors import ConfigError, SamplingError
from turbo_rcm_patch.files import check_writable, remove_leftovers
from turbo_rcm_patch.interrupts import reraise_interrupts
from turbo_rcm_patch.patching import find_pairs, patched
from turbo_rcm_patch.patching.sla import held_proj_l
from turbo_rcm_patch.video import comparison, environment, generation, judging, store
from turbo_rcm_patch.video.generation import check_seed
from turbo_rcm_patch.video.load import load_pipeline, load_skeleton, pipeline_class
from turbo_rcm_patch.video.loading import first_line
from turbo_rcm_patch.video.many import Processes, ranks_here
from turbo_rcm_patch.video.pipelines import PIPELINES, VideoPipeline, check_images, networks_of
from turbo_rcm_patch.video.result import EMULATED
from turbo_rcm_patch.video.settings import Settings
from turbo_rcm_patch.video.source import Source, digest_of
from turbo_rcm_patch.video.video import ENDINGS, as_bytes, find_ffmpeg, write_mp4


@dataclass(frozen=True, slots=True)
class Video:
    """One video to be made.

    Attributes:
        prompt: The prompt.
        seed: The seed.
        path: The file to write.
    """

    prompt: str
    seed: int
    path: Path


def read_prompts(command: options.Run) -> list[str]:
    """Return the prompts of a command: those of --prompt, then those of the file.

    Raises:
        SamplingError: The file cannot be read.
        ConfigError: A prompt is empty or not in UTF-8, or there are too many for the seed.
    """
    prompts = [*command.prompt]
    if command.prompts is not None:
        prompts += _read_list(command.prompts)
    for prompt in prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError as error:  # Python's stand-in for a byte that is no UTF-8.
            raise ConfigError("--prompt", expected="a text in UTF-8", got=ascii(prompt)) from error
        if not prompt.strip():
            raise ConfigError("--prompt", expected="a text", got="an empty one")
    check_seed(command.seed, len(prompts))
    return prompts


def _read_list(path: Path) -> list[str]:
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
    # Not `splitlines`: a prompt may hold what Unicode takes for the end of a line.
    lines = [line.strip() for line in text.split("\n")]
    if "\t" in "".join(lines):
        remedy = "Run the command once for each image, with --image FILE"
        raise SamplingError(name, expected="a prompt on each line", got="a tab", remedy=remedy)
    if not any(lines):
        raise ConfigError(name, expected="a prompt on each line", got="no line with text")
    return [line for line in lines if line]


def check_image(command: options.Run, prompts: list[str]) -> None:
    """Check, before a model is loaded, that it makes videos from --image or without one.

    Raises:
        SamplingError: It takes no image, or needs one, or the file cannot be read.
    """
    Source("", command.image)
    if name := pipeline_class(command.model):
        check_images(PIPELINES[name], name, {prompts[0]: command.image is not None})


def generate(command: options.Generate) -> int:
    """Write one mp4 per prompt; under torchrun every process writes its share, or all make each
    together."""
    # What would fail at the end fails before a model is loaded.
    prompts, processes = read_prompts(command), Processes(ranks_here())
    videos = _name_videos(command, prompts)
    check_writable(videos[0].path)
    find_ffmpeg()
    check_image(command, prompts)
    remove_leftovers(videos[0].path.parent)
    with processes.joined(command.device, together=command.together):
        failed = _make_share(command, videos, processes)
    if failed:
        raise SamplingError(
            f"{len(failed)} of {len(processes.share(prompts))} prompts failed",
            expected="a video of each",
            got=f"none of {', '.join(map(repr, failed[:3]))}" + ", ..." * (len(failed) > 3),
            remedy="The reasons are above. With --resume the command makes only these",
        )
    return OK


def _name_videos(command: options.Generate, prompts: list[str]) -> list[Video]:
    """Give each prompt its seed and its file."""
    out, seeds = command.out.expanduser(), range(command.seed, command.seed + len(prompts))
    if _is_folder(out):
        paths = [out / f"{store.Store.key(*key)}.mp4" for key in zip(prompts, seeds, strict=True)]
        return [*map(Video, prompts, seeds, paths)]
    if len(prompts) > 1 or out.suffix.lower() not in ENDINGS:
        many = f"a folder, because there are {len(prompts)} prompts"
        one = f"a folder, or a file that ends in one of {ENDINGS}"
        raise SamplingError("--out", expected=many if len(prompts) > 1 else one, got=str(out))
    store.check_note(out)
    return [Video(prompts[0], command.seed, out)]


def _is_folder(out: Path) -> bool:
    """Return True if --out names a folder, which may have a dot in its name, as runs/v1.2 has."""
    return out.is_dir() or not out.suffix or out.suffix[1:].isdigit()


def _make_share(command: options.Generate, videos: list[Video], processes: Processes) -> list[str]:
    """Make the videos of this process. Of those that make each together, the first writes.

    Returns:
        The prompts that failed.
    """
    ranks, writes = processes.ranks, processes.first or not command.together
    share = videos if command.together else processes.share(videos)
    if not share:
        print(f"rank {ranks.rank} of {ranks.world}: no prompt is left for it")
        return []
    pipe = _load(command, ranks.device(command.device))
    settings = generation.settings_for(pipe, **command.settings)
    maker = Maker(pipe, command, settings, writes=writes)
    find_missing = partial(maker.missing, share)
    missing = processes.broadcast(find_missing) if command.together else find_missing()
    if processes.first:
        _say_without_effect(command, pipe, settings)
    folder = _is_folder(command.out.expanduser()) and processes.first
    with (
        store.lock_folder(command.out) if folder else nullcontext(),
        patched(pipe, command.config) if command.patch else nullcontext() as report,
        _together(pipe, command),
    ):
        with _shown(processes) as progress:
            done = len(share) - len(missing)
            alone = len(videos) == 1 or command.together  # Else the other processes wait for it.
            failed = maker.make_all(missing, progress, done=done, reraise=alone)
        if report is not None and processes.first:
            print(report)
        elif report is not None and any(record.verdict != "kept" for record in report.guard):
            print(f"process {ranks.rank}, {report.guard}")
        if maker.times and writes:
            device = environment.device_name(pipe._execution_device)
            print(maker.speed(device, report.impl if report is not None else ""))
    return failed


def _say_without_effect(
    command: options.Generate, pipe: VideoPipeline, settings: Settings
) -> None:
    """Name what was asked for and has no effect."""
    attentions = sum(len(held_proj_l(network)) for network in networks_of(pipe).values())
    if attentions and not command.patch:
        print(f"{attentions} attentions hold SLA's proj_l. "
              "With --no-patch they run dense, without SLA.")  # fmt: skip
    if command.cfg_parallel and settings.guidance_scale <= 1:
        print("Without guidance both groups of --cfg-parallel compute the same; try --ulysses.")


def _together(pipe: VideoPipeline, command: options.Generate) -> AbstractContextManager[object]:
    """Split each forward among the processes, if they make each video together."""
    if not command.together:
        return nullcontext()
    from turbo_rcm_patch.diffusers_parallel import parallel  # needs diffusers

    return parallel(pipe, cfg=2 if command.cfg_parallel else 1, ulysses=command.ulysses)


class Maker:
    """Makes videos with one pipeline and writes them, each with a note of how it was made.

    Args:
        pipe: The pipeline.
        command: The command.
        settings: How to sample.
        writes: False in a process whose videos another one writes.

    Attributes:
        times: Of each video the seconds before and of decoding, and the peak memory before it.
    """

    def __init__(
        self, pipe: VideoPipeline, command: options.Generate, settings: Settings, *, writes: bool
    ) -> None:
        self.pipe, self.command, self.settings, self.writes = pipe, command, settings, writes
        self.times: list[tuple[float, float, int]] = []
        self._made_from: dict[str, object] = {
            "made by": f"turbo_rcm_patch {__version__}",
            "model": command.model,
            "dtype": command.dtype,
            "patch": asdict(command.config) if command.patch else None,
            "weights": "int8" if command.config.linear == "int8-only" else "as stored",
            "settings": settings.as_dict(),
        }
        self.image = Source("", command.image).read()
        if self.image is not None:
            self._made_from["inputs"] = digest_of(self.image)

    def _identity(self, video: Video) -> dict[str, object]:
        """Return everything that decides the frames of a video."""
        return {"prompt": video.prompt, "seed": video.seed, **self._made_from}

    def missing(self, videos: list[Video]) -> list[Video]:
        """Return the videos that are not there yet: with --resume some, else all.

        Raises:
            SamplingError: One that is there was made otherwise.
        """
        if not self.command.resume:
            return videos
        missing = []
        for video in videos:
            if store.is_made(video.path, self._identity(video)):
                print(f"{video.path}  was there")
            else:
                missing.append(video)
        return missing

    def make_all(
        self, videos: list[Video], progress: Progress, *, done: int, reraise: bool
    ) -> list[str]:
        """Make videos, of which one that fails costs the others nothing.

        Args:
            videos: The videos.
            progress: Called after every step.
            done: The number of videos that were there before.
            reraise: Raise the error of a video that fails.

        Returns:
            The prompts that failed.
        """
        steps, failed = self.settings.steps, []
        total = (done + len(videos)) * steps
        if done:
            progress("generate", done * steps, total)
        for index, video in enumerate(videos, done):
            try:
                with reraise_interrupts():
                    self.make(video, partial(_show_step, progress, index * steps, total))
            except BrokenPipeError:
                raise
            except Exception as error:
                if reraise:
                    raise
                failed.append(video.prompt)
                why = f"failed: {video.prompt!r} (seed {video.seed}): {first_line(error)}"
                print(why, file=sys.stderr, flush=True)
        return failed

    def make(self, video: Video, on_step: generation.OnStep) -> None:
        """Make and write one video."""
        made = generation.generate(
            self.pipe,
            video.prompt,
            image=self.image,
            seed=video.seed,
            settings=self.settings,
            on_step=on_step,
        )
        self.times.append((made.seconds, made.decode_seconds, made.peak_bytes or 0))
        if not self.writes:
            return
        store.forget_made(video.path)  # A note never stands beside another video.
        write_mp4(as_bytes(made.frames), video.path, self.settings.fps)
        frames = len(made.frames)
        store.note_made(video.path, {**self._identity(video), "frames": frames})
        print(f"{video.path}  {frames} frames, {made.seconds:.2f} s, and "
              f"{made.decode_seconds:.2f} s to decode")  # fmt: skip

    def speed(self, device: str, impl: str) -> str:
        """Describe time and memory of the videos."""
        denoise, decode = (statistics.median(times[i] for times in self.times) for i in range(2))
        text = f"{denoise + decode:.3g} s a video ({denoise:.3g} s encoding and denoising, "
        text += f"{decode:.3g} s decoding; median of {len(self.times)}) on {device}"
        if peak := max(times[2] for times in self.times):
            text += f"; peak memory before decoding {peak / 2**30:.2f} GiB"
        return text + f". {EMULATED}" * (impl == "reference")


def _show_step(progress: Progress, before: int, total: int, step: int, _: int) -> None:
    progress("generate", before + step, total)


def _shown(processes: Processes) -> AbstractContextManager[Progress]:
    """Draw bars on the first process."""
    return bars() if processes.first else nullcontext(lambda stage, done, total: None)


def compare(given: options.Compare) -> int:
    """Compare, then print the verdict and the path of the report.

    Raises:
        ConfigError: Among others: torchrun started several processes.
    """
    prompts = read_prompts(given)
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
    check_image(given, prompts)
    pipe = _load(given, given.device)
    with bars() as progress:
        result = comparison.compare(
            pipe,
            prompts,
            images=given.image,
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


def pairs(command: options.Pairs) -> int:
    """Print the table of skip pairs."""
    print(find_pairs(load_skeleton(command.model, **command.loras)))
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


def _load(command: options.Run, device: str | None) -> VideoPipeline:
    return load_pipeline(
        command.model,
        dtype=getattr(torch, command.dtype),
        device=device,
        offload=command.offload,
        int8="only" if command.config.linear == "int8-only" else None,
        **command.loras,
    )
