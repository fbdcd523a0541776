"""`turbo-rcm-patch generate`: load a pipeline, patch it, and write one mp4 for each prompt."""

from __future__ import annotations

import statistics
import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from turbo_rcm_patch import __version__
from turbo_rcm_patch.cli import options
from turbo_rcm_patch.cli.exit_codes import OK
from turbo_rcm_patch.cli.inputs import check_inputs, load, read_prompts
from turbo_rcm_patch.cli.progress import bars
from turbo_rcm_patch.errors import OutputError, SamplingError
from turbo_rcm_patch.files import check_writable, lock_folder, remove_leftovers
from turbo_rcm_patch.interrupts import reraise_interrupts
from turbo_rcm_patch.patching import PatchReport, patched
from turbo_rcm_patch.patching.plan import Plan, digest_of_settings
from turbo_rcm_patch.patching.sla import held_proj_l
from turbo_rcm_patch.tiny.prompts import DEMO_PROMPTS
from turbo_rcm_patch.video import environment, generation, store
from turbo_rcm_patch.video.load import SHIPPED
from turbo_rcm_patch.video.loading import first_line
from turbo_rcm_patch.video.many import Processes
from turbo_rcm_patch.video.pipelines import VideoPipeline, networks_of
from turbo_rcm_patch.video.result import EMULATED
from turbo_rcm_patch.video.settings import Settings
from turbo_rcm_patch.video.source import Source, digest_of
from turbo_rcm_patch.video.video import ENDINGS, find_ffmpeg


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


def generate(command: options.Generate) -> int:
    """Write one mp4 per prompt; under torchrun every process writes its share, or all make each
    together."""
    # What would fail at the end fails before a model is loaded.
    prompts, processes = read_prompts(command), Processes.here()
    videos = name_videos(command, prompts)
    check_writable(videos[0].path)
    find_ffmpeg()
    check_inputs(command)
    remove_leftovers(videos[0].path.parent)
    if command.model in SHIPPED and processes.rank == 0:
        print(
            f"{command.model!r} is a toy that makes shapes move, for instance "
            f"{DEMO_PROMPTS[0]!r}. Name another model with --model."
        )
    share = videos if command.together else videos[processes.rank :: processes.world]
    with processes.joined(command.device, together=command.together):
        if share:
            # An error that is not raised here would leave processes waiting for this one.
            alone = len(videos) == 1 or command.together
            failed = _make_share(command, share, processes, alone=alone)
        else:
            failed = []
            print(f"rank {processes.rank} of {processes.world}: no prompt is left for it")
            _FirstPlan(command, processes, {}).wait()
    if failed:
        raise SamplingError(
            f"{len(failed)} of {len(share)} prompts failed",
            expected="a video of each",
            got=f"none of {', '.join(map(repr, failed[:3]))}" + ", ..." * (len(failed) > 3),
            remedy="The reasons are above. With --resume the command makes only these",
        )
    return OK


def name_videos(command: options.Generate, prompts: list[str]) -> list[Video]:
    """Give each prompt its seed and its file."""
    out, seeds = command.out.expanduser(), range(command.seed, command.seed + len(prompts))
    if _is_folder(out):
        paths = [out / f"{store.Store.key(*key)}.mp4" for key in zip(prompts, seeds, strict=True)]
        return [*map(Video, prompts, seeds, paths)]
    if len(prompts) > 1 or out.suffix.lower() not in ENDINGS:
        many = f"a folder, because there are {len(prompts)} prompts"
        single = f"a folder, or a file that ends in one of {ENDINGS}"
        raise SamplingError("--out", expected=many if len(prompts) > 1 else single, got=str(out))
    store.check_note(out)
    return [Video(prompts[0], command.seed, out)]


def _is_folder(out: Path) -> bool:
    """Return True if --out names a folder, which may have a dot in its name, as runs/v1.2 has."""
    return out.is_dir() or not out.suffix or out.suffix[1:].isdigit()


class _FirstPlan:
    """The plan of all videos, so that no other video and no process changes their bits: the
    command's, that of a folder's videos with the same settings, or what the first process decides
    first.

    Attributes:
        plan: The plan, None before it is known.
        path: Where it is kept beside the videos, or None.
    """

    def __init__(
        self, command: options.Generate, processes: Processes, settings: dict[str, object]
    ) -> None:
        out, self._processes = command.out.expanduser(), processes
        self.path = self.plan = None
        if command.plan is not None:
            self.plan = Plan.load(command.plan)
        elif command.patch and command.config.guard and _is_folder(out):
            path = self.path = out / f"plan-{digest_of_settings(settings)}.json"
            self.plan = processes.broadcast(lambda: _kept_plan(path))
        self._alone = command.together or processes.world == 1
        #: True while the others wait for what the first process decides.
        self._open = self.path is not None and self.plan is None and not self._alone

    def wait(self) -> None:
        """Wait on all processes but the first for what that one decides."""
        if self._open and self._processes.rank:
            self.plan = self._processes.broadcast(lambda: None)

    def after_step(self, report: PatchReport | None) -> None:
        """Tell the waiting processes a plan as soon as there is one. What a guard raises later it
        raises in its own process."""
        if self._open and not self._processes.rank and report is not None and report.plan:
            self._settle(report.plan)

    def after_video(self, report: PatchReport | None) -> None:
        """Keep the plan. Who waits still goes on without one."""
        plan = None if report is None or self._processes.rank else report.plan
        if self._open and not self._processes.rank:
            self._settle(plan)
        elif self._alone and self.path is not None and plan is not None:
            plan.save(self.path)

    def _settle(self, plan: Plan | None) -> None:
        self._open = False
        if plan is not None and self.path is not None:
            plan.save(self.path)
        with suppress(SamplingError):  # Another process has ended. Its own output says why.
            self._processes.broadcast(lambda: plan)


def _make_share(
    command: options.Generate, share: list[Video], processes: Processes, *, alone: bool
) -> list[str]:
    """Make the videos of this process. Of those that make each together, the first writes.

    Args:
        command: The command.
        share: The videos.
        processes: All processes.
        alone: Raise the error of a video that fails, because no other one is to be made.

    Returns:
        The prompts that failed.
    """
    pipe = load(command, processes.device(command.device))
    settings = generation.settings_for(pipe, **command.settings)
    image = Source("", command.image).read()
    generation.check_pipeline(pipe, Source(share[0].prompt, image), settings)
    how = how_made(command, settings)
    decided = _FirstPlan(command, processes, how)
    how |= {} if command.plan is None else {"plan": str(decided.plan)}
    how |= {} if image is None else {"inputs": digest_of(image)}
    records = {video: {"prompt": video.prompt, "seed": video.seed} | how for video in share}
    find_missing = partial(_find_missing, command, records)
    missing = processes.broadcast(find_missing) if command.together else find_missing()
    first, out = processes.rank == 0, command.out.expanduser()
    if first:
        _say_without_effect(command, pipe, settings)
    writes = first or not command.together
    steps, total = settings.steps, len(share) * settings.steps
    done = len(share) - len(missing)
    failed: list[str] = []
    times: list[tuple[float, float, int]] = []
    decided.wait()
    plan = decided.plan
    with (
        lock_folder(out) if first and _is_folder(out) else nullcontext(),
        patched(pipe, command.config, plan=plan) if command.patch else nullcontext() as report,
        _together(pipe, command),
    ):
        with bars() if first else nullcontext(_show_nothing) as progress:
            if done:
                progress("generate", done * steps, total)
            for index, video in enumerate(missing, done):

                def on_step(step: int, _: int, before: int = index * steps) -> None:
                    progress("generate", before + step, total)
                    decided.after_step(report)

                try:
                    with reraise_interrupts():
                        generated = generation.generate(
                            pipe,
                            video.prompt,
                            image=image,
                            seed=video.seed,
                            settings=settings,
                            on_step=on_step,
                        )
                        times.append(
                            (
                                generated.seconds,
                                generated.decode_seconds,
                                generated.peak_bytes or 0,
                            )
                        )
                        decided.after_video(report)
                        if writes:
                            _write(generated, video, records[video])
                except (BrokenPipeError, OutputError):  # The next video would fail too.
                    raise
                except Exception as error:
                    if alone:
                        raise
                    failed.append(video.prompt)
                    why = f"failed: {video.prompt!r} (seed {video.seed}): {first_line(error)}"
                    print(why, file=sys.stderr, flush=True)
        decided.after_video(report)
        if report is not None and first:
            print(report)
        elif report is not None and any(record.verdict != "kept" for record in report.guard):
            print(f"process {processes.rank}, {report.guard}")
        if times and writes:
            device = environment.device_name(pipe._execution_device)
            print(_speed(times, device, report.impl if report is not None else ""))
    return failed


def _kept_plan(path: Path) -> Plan | None:
    """Return a folder's plan, None if there is none yet.

    Raises:
        OutputError: It could not be written after the first video.
        PlanError: It is damaged.
    """
    if path.exists():
        return Plan.load(path)
    check_writable(path)
    return None


def how_made(command: options.Generate | options.Plan, settings: Settings) -> dict[str, object]:
    """Return what decides the frames of all videos, beside their prompts and seeds."""
    patch = isinstance(command, options.Plan) or command.patch
    return {
        "made by": f"turbo_rcm_patch {__version__}",
        "model": command.model,
        "dtype": command.dtype,
        "patch": asdict(command.config) if patch else None,
        "weights": "int8" if command.config.linear == "int8-only" else "as stored",
        "settings": settings.as_dict(),
    }


def _find_missing(
    command: options.Generate, records: dict[Video, dict[str, object]]
) -> list[Video]:
    """Return the videos to be made: with --resume those that are not there yet, else all.

    Raises:
        SamplingError: One that is there was made otherwise. A file that --out names is replaced.
    """
    if not command.resume and not _is_folder(command.out.expanduser()):
        return [*records]
    finished = [video for video, record in records.items() if store.is_made(video.path, record)]
    if not command.resume:
        return [*records]
    for video in finished:
        print(f"{video.path}  was there")
    return [video for video in records if video not in finished]


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


def _write(generated: generation.Generation, video: Video, record: dict[str, object]) -> None:
    """Write a video, and beside it how it was made."""
    store.forget_made(video.path)  # A note never stands beside another video.
    generated.save(video.path)
    frames = len(generated.frames)
    store.note_made(video.path, {**record, "frames": frames})
    print(f"{video.path}  {frames} frames, {generated.seconds:.2f} s, and "
          f"{generated.decode_seconds:.2f} s to decode")  # fmt: skip


def _speed(times: list[tuple[float, float, int]], device: str, impl: str) -> str:
    """Describe the seconds before and of decoding, and the peak memory, of several videos. The
    first one compiles and fills caches, so its seconds count where there is no other."""
    later = times[1:] or times
    denoise, decode = (statistics.median(row[i] for row in later) for i in range(2))
    which = f"median of {len(later)} after the first" if len(times) > 1 else "a first video"
    text = f"{denoise + decode:.3g} s a video ({denoise:.3g} s encoding and denoising, "
    text += f"{decode:.3g} s decoding; {which}) on {device}"
    if peak := max(row[2] for row in times):
        text += f"; peak memory before decoding {peak / 2**30:.2f} GiB"
    return text + f". {EMULATED}" * (impl == "reference")


def _show_nothing(stage: str, done: int, total: int) -> None:
    """Draw no bars: another process does."""
