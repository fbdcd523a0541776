"""The clips of a comparison: the numbers of each, and the videos that show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import torch

from turbo_rcm_patch.video.filters import vmaf
from turbo_rcm_patch.video.measures import Drift, frame_drift
from turbo_rcm_patch.video.store import CLIP_FILES, Store, reading
from turbo_rcm_patch.video.video import (
    SEEK_EVERY,
    choose_gain,
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
        height: Of the frames.
        width: The same.
        fps: Frames a second.
        gain: Amplification of the videos of differences.
        unmeasured: Why a measure is missing, else empty.
        seed: The seed, if `compare` made the video.
        runs: How `compare` made each of its videos, by the name of the run: seconds, seconds of
            decoding and peak memory (of a caller's function all in one, None on a CPU), and the
            forms of the blocks in each forward, if they were watched.
    """

    key: str
    prompt: str
    patched: Drift
    control: Drift | None = None
    height: int
    width: int
    fps: float
    gain: int
    unmeasured: str = ""
    seed: int | None = None
    runs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def frames(self) -> int:
        """The number of frames."""
        return len(self.patched.frame_psnr)

    def as_dict(self) -> dict[str, object]:
        """Return plain data for JSON, worst frames included."""
        drifts = {"patched": self.patched, "control": self.control}
        return asdict(self) | {name: drift and drift.as_dict() for name, drift in drifts.items()}

    @classmethod
    def finished(cls, store: Store, key: str, inputs: object) -> Self | None:
        """Return the clip of an earlier run, if its record is there and all its files are.

        Args:
            store: The folder.
            key: Name of its folder in `prompts/`.
            inputs: What the clip was made from; a record of other inputs does not count.
        """
        name = f"prompts/{key}/record.json"
        record = store.read_json(name)
        if record is None:
            return None
        with reading(store.out / name):
            if record.pop("inputs") != inputs:
                return None
            drifts = {run: record[run] for run in ("patched", "control")}
            drifts = {run: values and Drift.from_dict(values) for run, values in drifts.items()}
            clip = cls(**record | drifts)
        complete = all((store.folder(key) / file).is_file() for file in CLIP_FILES)
        return clip if complete else None


def measure(
    store: Store,
    clips: Mapping[str, torch.Tensor],
    inputs: object,
    *,
    label: str = "patched",
    **identity: Any,
) -> Clip:
    """Measure a clip, and write the videos that show it, and at last the record that marks it as
    finished.

    Args:
        store: The folder; the files are panes.mp4 for the report's player, and side_by_side.mp4
            to look at.
        clips: "baseline", "patched" and perhaps "control" -> frames [F, H, W, 3] in 0..1.
        inputs: What the clip was made from, as for `Clip.finished`.
        label: The word for "patched" in pictures.
        **identity: The fields of the clip that say which one it is, `fps` among them.
    """
    truth, fps = clips["baseline"], identity["fps"]
    runs = {run: clips[run] for run in ("patched", "control") if run in clips}
    numbers: dict[str, Any] = {}
    missing = set()
    for run, clip in runs.items():
        score, why = vmaf(clip, truth, fps)
        numbers[run] = replace(frame_drift(clip, truth), vmaf=score)
        missing |= {why} - {""}
    differences = {run: (clip - truth).abs() for run, clip in runs.items()}
    gain = choose_gain([*differences.values()])
    folder = store.folder(identity["key"])
    shown = {run: enlarge(clip) for run, clip in clips.items()}
    rows = {"baseline": shown["baseline"], label: shown["patched"]}
    for run, difference in differences.items():
        name = label if run == "patched" else run
        amplified = enlarge(difference * gain, "nearest")
        shown[f"{run} difference"] = rows[f"{name} - baseline, x {gain}"] = amplified
    height, width = truth.shape[1:3]
    write_mp4(side_by_side(rows), folder / "side_by_side.mp4", fps)
    joined = panes(shown, pane_size(height, width))
    write_mp4(joined, folder / "panes.mp4", fps, seek_every=SEEK_EVERY)
    numbers |= {"height": height, "width": width, "gain": gain}
    measured = Clip(**identity, **numbers, unmeasured="; ".join(sorted(missing)))
    record = measured.as_dict() | {"inputs": inputs}
    store.write_json(f"prompts/{measured.key}/record.json", record)
    return measured
