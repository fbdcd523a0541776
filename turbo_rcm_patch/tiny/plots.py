"""Loss curves and sample sheets as PNG."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

__all__ = ["loss_curves", "sheet"]


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
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture).save(path, optimize=True)


def loss_curves(log: Path, path: Path) -> None:
    """Plot every stage's loss and every probe's accuracy from log.jsonl."""
    try:
        import matplotlib
    except (
        ImportError
    ):  # a training machine need not have it: the curves can be drawn later from the log
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    figure, axes = plt.subplots(2, 3, figsize=(13, 6.5), constrained_layout=True)
    for axis, probe_axis, stage in zip(*axes, ("vae", "teacher", "student"), strict=True):
        points = [r for r in records if r.get("stage") == stage]
        steps = [r for r in points if r.get("loss", 0) > 0]
        axis.plot([r["step"] for r in steps], [r["loss"] for r in steps], color="#2a6f97")
        axis.set(title=stage, xlabel="step", ylabel="loss")
        if steps:
            axis.set_yscale("log")
        probes = [r for r in points if "colour" in r or "psnr" in r]
        for key in ("colour", "shape", "motion", "all", "psnr"):
            values = [(r["step"], r[key]) for r in probes if key in r]
            if values:
                probe_axis.plot(*zip(*values, strict=True), marker="o", label=key)
        probe_axis.set(xlabel="step", ylabel="held-out prompts" if stage != "vae" else "dB")
        if probes:
            probe_axis.legend()
    figure.savefig(path, dpi=90)
    plt.close(figure)
