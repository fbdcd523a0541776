"""VMAF: right where ffmpeg has it, and told where it has not."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.files import stub_ffmpeg
from turbo_rcm_patch.video.filters import vmaf


def smooth(height: int, width: int) -> torch.Tensor:
    """A smooth video [F, H, W, 3]."""
    coarse = torch.rand(5, 3, height // 8, width // 8, generator=torch.Generator().manual_seed(0))
    fine = F.interpolate(coarse, size=(height, width), mode="bicubic").clamp(0.05, 0.95)
    return fine.permute(0, 2, 3, 1)


@pytest.mark.parametrize("size", [(64, 64), (96, 128), (96, 720)], ids=str)
def test_vmaf_falls_with_detail_and_where_a_frame_is_nan(size: tuple[int, int]) -> None:
    truth = smooth(*size)
    small = F.interpolate(truth.permute(0, 3, 1, 2), scale_factor=0.125, mode="area")
    blurred = F.interpolate(small, size=size, mode="bilinear").permute(0, 2, 3, 1)
    black = truth.clone()
    black[2] = math.nan
    (good, why), (bad, _), (broken, _) = (vmaf(x, truth, 16) for x in (truth, blurred, black))
    assert why == "" and good is not None and bad is not None and broken is not None
    assert good > 95 and bad < good - 20 and broken < good - 10


@pytest.mark.parametrize(
    ("side", "script", "said"),
    [
        (32, "exit 0", "VMAF needs 64 pixels a side"),
        (64, "echo No such filter >&2; exit 8", "exit 8, No such filter"),
        (64, "cat >/dev/null", "libvmaf printed no number"),
    ],
)
def test_why_there_is_no_number_is_told(side, script, said, tmp_path, monkeypatch) -> None:
    stub_ffmpeg(tmp_path, monkeypatch, script)
    score, why = vmaf(smooth(side, 96), smooth(side, 96), 16)
    assert score is None and said in why
