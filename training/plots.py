"""Loss curves and sample sheets as PNG.

`python -m training curves LOG.jsonl CURVES.png` draws the curves of a log.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from torch import Tensor

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


def _joined(records: list[Record]) -> tuple[list[Record], list[int]]:
    """A stage's records with steps that go on where a new start began again, and these places."""
    offset, last, seams, found = 0, 0, [], []
    for record in records:
        if record["step"] < last:
            offset += last
            seams.append(offset)
        last = record["step"]
        found.append({**record, "step": last + offset})
    return found, seams


def loss_curves(log: Path, path: Path) -> None:
    """Plot every stage's loss and every probe's numbers from log.jsonl."""
    try:
        from matplotlib.figure import Figure
    except ImportError:  # a training machine need not have it: the curves can be drawn later
        return
    records = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    stages = {
        name: [r for r in records if r.get("stage") == name and "step" in r] for name in _TITLES
    }
    shown = [name for name in _TITLES if stages[name]] or ["vae"]
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
