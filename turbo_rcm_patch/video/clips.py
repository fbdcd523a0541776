"""The clips of a comparison: the numbers of each, and the videos that show it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch

from turbo_rcm_patch.video.filters import filtered, flip
from turbo_rcm_patch.video.measures import Drift
from turbo_rcm_patch.video.store import Store, reading
from turbo_rcm_patch.video.verdict import Verdict, Word
from turbo_rcm_patch.video.video import (
    SEEK_EVERY,
    amplified_difference,
    choose_gain,
    contact_sheet,
    enlarge,
    pane_size,
    panes,
    side_by_side,
    write_mp4,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """Numbers of one video.

    Attributes:
        key: Name of its folder in `prompts/`.
        prompt: The prompt, or the name of its files.
        patched: Distance of the judged video from the baseline.
        control: Distance of the control from the baseline, None without a control.
        height: Of the frames, 0 for latents.
        width: The same.
        fps: Frames a second.
        gain: Amplification of the videos of differences.
        unmeasured: Why a measure is missing, else empty.
    """

    key: str
    prompt: str
    patched: Drift
    control: Drift | None = None
    height: int = 0
    width: int = 0
    fps: float = 0
    gain: int = 1
    unmeasured: str = ""
    #: Files of a finished clip beside its record; latents have none.
    files: ClassVar[tuple[str, ...]] = ("panes.mp4", "side_by_side.mp4", "sheet.png")

    def as_dict(self) -> dict[str, object]:
        """Return plain data for JSON, worst frames included."""
        runs = {"patched": self.patched, "control": self.control}
        return asdict(self) | {name: one and one.as_dict() for name, one in runs.items()}

    @classmethod
    def finished(
        cls, store: Store, key: str, inputs: Mapping[str, str] | None = None
    ) -> Self | None:
        """Return the clip of an earlier run, if its record is there and all its files are.

        Args:
            store: The folder.
            key: Name of its folder in `prompts/`.
            inputs: What the clip was made from; a record of other inputs does not count.
        """
        name = f"prompts/{key}/record.json"
        record = store.read_json(name)
        if record is None or record.pop("inputs", None) != inputs:
            return None
        with reading(store.out / name):
            runs = {run: record[run] for run in ("patched", "control")}
            clip = cls(**record | {run: one and Drift.from_dict(one) for run, one in runs.items()})
        there = all((store.folder(key) / one).is_file() for one in cls.files)
        return clip if there or clip.height == 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(ABC):
    """What a report shows, wherever the videos came from.

    Attributes:
        judgement: The verdict and its conditions.
        results: One entry per clip.
        command: The command line, or nothing.
        out: The folder with everything.
        latents: True if the clips are latents, so that no video shows them.
        one: The word for a clip.
    """

    judgement: Verdict
    results: tuple[Clip, ...]
    command: str
    out: Path
    latents: bool = False
    one: ClassVar[str] = "clip"

    @property
    @abstractmethod
    def name(self) -> str:
        """The word for what was judged."""

    @property
    @abstractmethod
    def facts(self) -> dict[str, str]:
        """How the videos were made, without the folders of this machine."""

    @property
    @abstractmethod
    def chips(self) -> list[str]:
        """The most important facts, in a few words each."""

    @abstractmethod
    def as_dict(self) -> dict[str, object]:
        """Return the contents of metrics.json."""

    @property
    def steps_run(self) -> int:
        """Denoising steps, 0 if they were not watched."""
        return 0

    @property
    def verdict(self) -> Word:
        """ "unchanged", "similar", "changed", "undecided" or "not judged" (see `Verdict`)."""
        return self.judgement.word

    @property
    def report(self) -> Path:
        """The HTML page."""
        return self.out / "report.html"

    @property
    def short_report(self) -> Path:
        """The short form of the page in Markdown, to paste."""
        return self.out / "report.md"

    @property
    def metrics(self) -> Path:
        """The JSON file."""
        return self.out / "metrics.json"


def completed(
    far: Drift, frames: torch.Tensor, truth: torch.Tensor, fps: float
) -> tuple[Drift, set[str]]:
    """Add the measures of other programs to a drift, and say why some are missing."""
    found, (error, why) = filtered(frames, truth, fps), flip(frames, truth)
    return replace(far, vmaf=found.vmaf, xpsnr=found.xpsnr, flip=error), {found.why, why} - {""}


def show(
    frames: Mapping[str, torch.Tensor],
    runs: Mapping[str, Drift],
    folder: Path,
    fps: float,
    name: str = "patched",
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Complete the numbers of a clip, and write the video of the report's player, one to look at,
    and a sheet of pictures.

    Args:
        frames: "baseline", "patched" and perhaps "control" -> [F, H, W, 3] in 0..1.
        runs: Those without "baseline" -> their drift.
        folder: The place of panes.mp4, side_by_side.mp4 and sheet.png.
        fps: Frames a second.
        name: The label of "patched".

    Returns:
        What a `Clip` says of its frames, by the name of the field; the enlarged videos and
        differences.
    """
    truth, missing = frames["baseline"], set[str]()
    found: dict[str, Any] = {"height": truth.shape[1], "width": truth.shape[2]}
    for run, far in runs.items():
        found[run], why = completed(far, frames[run], truth, fps)
        missing |= why
    gain = choose_gain([(frames[run] - truth).abs() for run in runs])
    shown = {run: enlarge(one) for run, one in frames.items()}
    for run in runs:
        amplified = amplified_difference(frames[run], truth, gain)
        shown[f"{run} difference"] = enlarge(amplified, "nearest")
    rows = {"baseline": shown["baseline"], name: shown["patched"]}
    for run in runs:
        label = name if run == "patched" else run
        rows[f"{label} - baseline, x {gain}"] = shown[f"{run} difference"]
    size = pane_size(*truth.shape[1:3])
    write_mp4(side_by_side(rows), folder / "side_by_side.mp4", fps)
    write_mp4(panes(shown, size), folder / "panes.mp4", fps, seek_every=SEEK_EVERY)
    contact_sheet(rows, folder / "sheet.png")
    found |= {"gain": gain, "unmeasured": "; ".join(sorted(missing))}
    return found, shown
