"""Measures of other programs: VMAF and XPSNR come with ffmpeg, so that nothing is downloaded; FLIP
is a package."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from statistics import fmean
from typing import Final

import numpy as np
import torch

from turbo_rcm_patch.errors import OutputError
from turbo_rcm_patch.extras import install
from turbo_rcm_patch.video.video import find_ffmpeg, run_ffmpeg

#: Measure -> the filter that computes it, and the number in its log. XPSNR is that of the worst of
#: three planes, as the filter sums up.
FILTERS: Final = {
    "vmaf": ("libvmaf", re.compile(r"VMAF score: (\S+)")),
    "xpsnr": ("xpsnr", re.compile(r"XPSNR .*\(minimum: (\S+)\)")),
}
#: Below this many pixels a side there is too little for libvmaf's scales (it crashed at 16).
MIN_SIDE: Final = 64
#: With more than 8 bits xpsnr takes a line's width for its distance to the next one. So it gets
#: the middle of a video whose width is no multiple of this many pixels (128 bytes). Seen with
#: ffmpeg 9.0.2.
XPSNR_WIDTH: Final = 64
#: Pixels of the video in one degree of the field of view, on which FLIP depends: its authors'
#: value, that of a 4K monitor of 0.7 m at a distance of 0.7 m.
FLIP_PPD: Final = 67
#: FLIP takes some 0.6 s for a frame of 480 x 832 on a core, so at most so many evenly spread ones.
FLIP_FRAMES: Final = 8


@dataclass(frozen=True, slots=True)
class Filtered:
    """The measures of ffmpeg's filters.

    Attributes:
        vmaf: VMAF of the video, 0..100 (model vmaf_v0.6.1; equal videos have some 97 to 100), or
            None.
        xpsnr: XPSNR in dB of the worst plane of Y, Cb and Cr; infinite for equal videos; or None.
        why: Why something was not measured, else empty.
    """

    vmaf: float | None
    xpsnr: float | None
    why: str


def filtered(frames: torch.Tensor, truth: torch.Tensor, fps: float) -> Filtered:
    """Measure a video against the one it should equal, with the filters that this ffmpeg has.

    Frames are given with 16 bits and compared with 10 bits a channel, colours in full resolution:
    8 bits would add more noise than a good patch does. VMAF: Li et al. 2016,
    github.com/Netflix/vmaf. XPSNR: Helmrich et al., ICASSP 2020.

    Args:
        frames: [F, H, W, 3] in 0..1.
        truth: The same.
        fps: Frames a second.
    """
    height, width = frames.shape[1:3]
    if min(height, width) < MIN_SIDE:
        return Filtered(None, None, f"VMAF and XPSNR need {MIN_SIDE} pixels a side")
    # One above the other, in one stream: xpsnr misreads frames that were cut out from the left.
    both = _bytes(torch.cat([frames, truth], dim=1))
    reads = ["-f", "rawvideo", "-pix_fmt", "rgb48le", "-s", f"{width}x{2 * height}"]
    reads += ["-r", str(fps), "-i", "pipe:0"]
    found: dict[str, float | None] = dict.fromkeys(FILTERS)
    missing: list[str] = []
    for measure, (name, logged) in FILTERS.items():
        if name not in _available(find_ffmpeg()):
            missing.append(f"this ffmpeg has no {name}")
            continue
        part = width // XPSNR_WIDTH * XPSNR_WIDTH if measure == "xpsnr" else width
        left = (width - part) // 2
        # xpsnr takes its first input for the original, whose activity gives the weights.
        inputs = "[reference][main]" if measure == "xpsnr" else "[main][reference]"
        graph = (
            "[0:v]format=yuv444p10le,split[x][y];"
            f"[x]crop={part}:{height}:{left}:0,copy[main];"
            f"[y]crop={part}:{height}:{left}:{height},copy[reference];{inputs}{name}"
        )
        arguments = ["-v", "info", "-nostats", *reads, "-filter_complex", graph, "-f", "null", "-"]
        try:
            said = logged.search(run_ffmpeg(arguments, f"{name} was not run", both)[1])
        except OutputError as error:
            missing.append(str(error))
            continue
        if said is None:
            missing.append(f"{name} printed no number")
        else:
            found[measure] = float(said[1])
    return Filtered(found["vmaf"], found["xpsnr"], "; ".join(missing))


def flip(frames: torch.Tensor, truth: torch.Tensor) -> tuple[float | None, str]:
    """Measure FLIP (Andersson et al. 2020) of at most `FLIP_FRAMES` frames, where it is installed.

    Args:
        frames: [F, H, W, 3] in 0..1.
        truth: The same.

    Returns:
        The mean, or None, and why there is none, else empty.
    """
    if find_spec("flip_evaluator") is None:
        return None, f"FLIP, whose package is not installed ({install('flip')})"
    from flip_evaluator import evaluate

    count = len(frames)
    picks = np.linspace(0, count - 1, min(count, FLIP_FRAMES)).round().astype(int).tolist()
    seen = [
        [one[i].clamp(0, 1).nan_to_num().float().contiguous().numpy() for one in (truth, frames)]
        for i in picks
    ]
    how = {"applyMagma": False, "parameters": {"ppd": FLIP_PPD}}
    return fmean(float(evaluate(*pair, "LDR", **how)[1]) for pair in seen), ""


def _bytes(frames: torch.Tensor) -> np.ndarray:
    """Return frames with 16 bits a channel, in the order of bytes that "rgb48le" has."""
    scaled = np.stack([(f.clamp(0, 1).nan_to_num() * 65535).round().cpu().numpy() for f in frames])
    return scaled.astype("<u2")


@cache
def _available(program: str) -> frozenset[str]:
    """Return the names of the filters that the ffmpeg in use has."""
    said, _ = run_ffmpeg(["-hide_banner", "-filters"], "its filters were not listed")
    return frozenset(words[1] for line in said.splitlines() if len(words := line.split()) > 2)
