"""Loss curves and sample sheets as PNG.

`python -m training curves LOG.jsonl CURVES.png` draws the curves of a log.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from training.run import TrainingError
from turbo_rcm_patch.extras import require
from turbo_rcm_patch.output import atomic

_SMOOTH: Final = 15
# label, keys of a probe's record, line style; what coincides at 1.0 stays visible
_PROBES: Final = {
    "colour": ("#2a6f97", "-", 4.0),
    "shape": ("#c1121f", "-", 1.5),
    "motion": ("#ffb703", "--", 1.5),
    "psnr": ("#2a6f97", "-", 1.5),
    "psnr_noisy_latents": ("#ffb703", "--", 1.5),
    "psnr_worst": ("#c1121f", ":", 1.5),
}
_TITLES: Final = {
    "vae": "1. VAE",
    "teacher": "2. teacher",
    "student": "3. student",
    "decoder": "4. decoder",
}
Record = dict[str, Any]


def sheet(frames: Tensor, path: Path, *, rows: int = 16, columns: int = 6) -> None:
    """Write videos as rows of frames, two videos side by side.

    Args:
        frames: [B, F, H, W, 3] in 0..1.
        path: PNG to write.
        rows: At most this many videos.
        columns: Frames per video, evenly spaced.
    """
    frames = frames[:rows]
    pick = torch.linspace(0, frames.shape[1] - 1, columns).round().long().to(frames.device)
    tiles = (frames[:, pick].clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()
    strips = [np.concatenate(list(video), axis=1) for video in tiles]
    if len(strips) % 2:
        strips.append(np.zeros_like(strips[0]))
    half = len(strips) // 2
    picture = np.concatenate(
        [np.concatenate(strips[:half]), np.concatenate(strips[half:])], axis=1
    )
    with atomic(path) as partial:
        Image.fromarray(picture).save(partial, format="PNG", optimize=True)


def _records(log: Path) -> list[Record]:
    """The records of a log, but for lines that a kill cut short."""
    try:
        lines = log.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingError(
            "log", expected="the log.jsonl of a training", got=f"{log} ({error})"
        ) from error
    found: list[object] = []
    for line in lines:
        with suppress(ValueError):
            found.append(json.loads(line))
    return [record for record in found if isinstance(record, dict)]


def _joined(records: list[Record]) -> tuple[list[Record], list[int]]:
    """A stage's records with steps that go on where a new start began again, and these places.

    What a killed run did after its last checkpoint is done again when it resumes; only the second
    time counts.
    """
    found: list[Record] = []
    offset, last, seams = 0, 0, []
    for record in records:
        step = record["step"]
        if record.get("event") == "resumed":
            found = [one for one in found if one["step"] <= step + offset]
        elif step < last:
            offset += last
            seams.append(offset)
        last = step
        found.append({**record, "step": step + offset})
    return found, seams


def loss_curves(log: Path, path: Path) -> None:
    """Plot every stage's loss and every probe's numbers from log.jsonl.

    Raises:
        MissingPackageError: matplotlib is not installed.
        TrainingError: The log cannot be read, or says nothing of a stage.
    """
    require("report", "loss curves", "matplotlib")
    from matplotlib.figure import Figure

    records = _records(log)
    stages = {
        name: [r for r in records if r.get("stage") == name and "step" in r] for name in _TITLES
    }
    shown = [name for name in _TITLES if stages[name]]
    if not shown:
        raise TrainingError(
            "log",
            expected="the log.jsonl of a training",
            got=f"{log}, which has no step of a stage",
        )
    figure = Figure(figsize=(3.6 * len(shown), 5.6), layout="constrained")
    axes = figure.subplots(2, len(shown), squeeze=False)
    for column, name in enumerate(shown):
        axis, probe_axis = axes[0][column], axes[1][column]
        points, seams = _joined(stages[name])
        losses = [(r["step"], r["loss"]) for r in points if r.get("loss", 0) > 0]
        axis.set(title=_TITLES[name], xlabel="step", ylabel="loss")
        if losses:
            steps, values = zip(*losses, strict=True)
            width = min(_SMOOTH, len(values))
            mean = np.exp(np.convolve(np.log(values), np.ones(width) / width, mode="valid"))
            axis.plot(steps, values, color="#2a6f97", alpha=0.3, linewidth=0.8)
            axis.plot(steps[width // 2 :][: len(mean)], mean, color="#2a6f97", linewidth=1.8)
            if max(values) > 10 * min(values):
                axis.set_yscale("log")
            else:
                axis.set_ylim(bottom=0)
        probes = [r for r in points if "colour" in r or "psnr" in r]
        for key, (colour, line, width_of_line) in _PROBES.items():
            pairs = [(r["step"], r[key]) for r in probes if key in r]
            if pairs:
                probe_axis.plot(
                    *zip(*pairs, strict=True),
                    color=colour,
                    linestyle=line,
                    linewidth=width_of_line,
                    marker="o",
                    label=key.replace("_", " "),
                )
        flow = name in ("teacher", "student")
        probe_axis.set(
            xlabel="step",
            ylabel="share right, held-out prompts" if flow else "held-out clips, dB",
            xlim=axis.get_xlim(),
        )
        low, high = probe_axis.get_ylim()
        if flow:
            probe_axis.set_ylim(min(low, 0.7), 1.02)
        elif probes:  # room for the legend
            probe_axis.set_ylim(low - 0.7 * (high - low), high)
        if probes:
            probe_axis.legend(loc="lower right")
        for each in (axis, probe_axis):
            each.grid(alpha=0.25, linewidth=0.6)
            each.spines[["top", "right"]].set_visible(False)
            for seam in seams:
                each.axvline(seam, color="#888888", linestyle=":", linewidth=1.0)
    with atomic(path) as partial:
        figure.savefig(partial, dpi=90, format="png")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of `curves`."""
    parser = argparse.ArgumentParser(
        prog="python -m training curves", description="Draw the loss curves of a training log."
    )
    parser.add_argument("log", metavar="LOG.jsonl", type=Path, help="the log of a training")
    parser.add_argument("out", metavar="OUT.png", type=Path, help="picture to write")
    given = parser.parse_args(arguments)
    loss_curves(given.log, given.out)
