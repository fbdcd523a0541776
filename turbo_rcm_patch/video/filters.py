"""VMAF, which comes with ffmpeg, so that nothing is downloaded."""

from __future__ import annotations

import re
from typing import Final

import numpy as np
import torch

from turbo_rcm_patch.errors import OutputError
from turbo_rcm_patch.video.video import run_ffmpeg

#: The filter of ffmpeg, and the number in its log.
FILTER: Final = "libvmaf"
_SCORE: Final = re.compile(r"VMAF score: (\S+)")
#: Below this many pixels a side there is too little for libvmaf's scales (it crashed at 16).
MIN_SIDE: Final = 64


def vmaf(frames: torch.Tensor, truth: torch.Tensor, fps: float) -> tuple[float | None, str]:
    """Measure VMAF of a video against the one it should equal, if this ffmpeg can.

    Frames are given with 16 bits and compared with 10 bits a channel, colours in full resolution:
    8 bits would add more noise than a good patch does. VMAF: Li et al. 2016,
    github.com/Netflix/vmaf, model vmaf_v0.6.1; equal videos have some 97 to 100.

    Args:
        frames: [F, H, W, 3] in 0..1.
        truth: The same.
        fps: Frames a second.

    Returns:
        VMAF of the video, 0..100, or None; and why it was not measured, else empty.
    """
    height, width = frames.shape[1:3]
    if min(height, width) < MIN_SIDE:
        return None, f"VMAF needs {MIN_SIDE} pixels a side"
    # One above the other, in one stream.
    both = _bytes(torch.cat([frames, truth], dim=1))
    reads = ["-f", "rawvideo", "-pix_fmt", "rgb48le", "-s", f"{width}x{2 * height}"]
    reads += ["-r", str(fps), "-i", "pipe:0"]
    graph = (
        "[0:v]format=yuv444p10le,split[x][y];"
        f"[x]crop={width}:{height}:0:0,copy[main];"
        f"[y]crop={width}:{height}:0:{height},copy[reference];[main][reference]{FILTER}"
    )
    arguments = ["-v", "info", "-nostats", *reads, "-filter_complex", graph, "-f", "null", "-"]
    try:
        _, log = run_ffmpeg(arguments, f"{FILTER} was not run", both)
    except OutputError as error:
        return None, str(error)
    score = _SCORE.search(log)
    return (float(score[1]), "") if score else (None, f"{FILTER} printed no number")


def _bytes(frames: torch.Tensor) -> np.ndarray:
    """Return frames with 16 bits a channel, in the order of bytes that "rgb48le" has."""
    scaled = np.stack([(f.clamp(0, 1).nan_to_num() * 65535).round().cpu().numpy() for f in frames])
    return scaled.astype("<u2")
