"""VMAF and XPSNR: right where ffmpeg has them, and told where it has not."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from turbo_rcm_patch.errors import OutputError
from turbo_rcm_patch.video import filters
from turbo_rcm_patch.video.filters import filtered
from turbo_rcm_patch.video.measures import psnr


def clips(height: int, width: int, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A smooth video [F, H, W, 3], and the same with noise."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(5, 3, height // 8, width // 8, generator=generator)
    smooth = F.interpolate(coarse, size=(height, width), mode="bicubic").clamp(0.05, 0.95)
    truth = smooth.permute(0, 2, 3, 1)
    return truth + noise * torch.randn(truth.shape, generator=generator), truth


@pytest.mark.parametrize("size", [(64, 64), (64, 80), (128, 224), (96, 720)], ids=str)
def test_xpsnr_follows_psnr(size: tuple[int, int]) -> None:
    """Ten times the noise is 20 dB, less what rounding adds: 2 dB with 10 bits, 6 with 8. Widths
    of which a filter of 10 bits has to leave something out are among them."""
    found = []
    for noise in (0.001, 0.01):
        video, truth = clips(*size, noise)
        xpsnr = filtered(video, truth, 16).xpsnr
        assert xpsnr is not None
        assert abs(xpsnr - float(psnr(video, truth).mean())) < 6
        found.append(xpsnr)
    assert 17 < found[0] - found[1] < 20.5
    equal = filtered(truth, truth, 16)
    assert equal.xpsnr == math.inf and equal.vmaf is not None and equal.vmaf > 95
    assert equal.why == ""


def test_the_original_gives_the_weights_of_xpsnr() -> None:
    """A flat original weighs all blocks alike, so that distortions of one mean square error have
    one XPSNR; a noisy copy taken for the original would excuse its noise."""
    truth = torch.full((8, 128, 128, 3), 0.5)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(8, 128, 128, 1, generator=generator).expand_as(truth) * 0.05
    shift = float(noise.square().mean().sqrt())
    offset, noisy = (filtered(truth + one, truth, 16).xpsnr for one in (shift, noise))
    assert offset is not None and noisy is not None
    assert abs(offset - noisy) < 1.0


def test_vmaf_falls_with_detail() -> None:
    _, truth = clips(96, 128, 0.0)
    small = F.interpolate(truth.permute(0, 3, 1, 2), scale_factor=0.125, mode="area")
    blurred = F.interpolate(small, size=(96, 128), mode="bilinear").permute(0, 2, 3, 1)
    good, bad = filtered(truth, truth, 16).vmaf, filtered(blurred, truth, 16).vmaf
    assert good is not None and bad is not None and bad < good - 20


def test_a_nan_is_shown_black() -> None:
    video, truth = clips(64, 64, 0.0)
    broken = video.clone()
    broken[2] = math.nan
    found = filtered(broken, truth, 16)
    assert found.xpsnr is not None and found.xpsnr < 20


def test_what_is_too_small_is_told() -> None:
    found = filtered(*clips(32, 96, 0.01), 16)
    assert (found.vmaf, found.xpsnr) == (None, None) and "64 pixels" in found.why


def test_an_ffmpeg_without_the_filters_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "_available", lambda program: frozenset({"xpsnr"}))
    found = filtered(*clips(64, 64, 0.01), 16)
    assert found.vmaf is None and found.xpsnr is not None
    assert found.why == "this ffmpeg has no libvmaf"


def test_a_filter_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    filters._available(filters.find_ffmpeg())

    def broken(arguments: list[str], failed: str, given: object = None) -> tuple[str, str]:
        if any("libvmaf" in one for one in arguments):
            raise OutputError(f"{failed}: ffmpeg failed", got="signal 11")
        return "", "nothing of use"

    monkeypatch.setattr(filters, "run_ffmpeg", broken)
    found = filtered(*clips(64, 64, 0.01), 16)
    assert (found.vmaf, found.xpsnr) == (None, None)
    assert "libvmaf was not run: ffmpeg failed" in found.why and "signal 11" in found.why
    assert "xpsnr printed no number" in found.why
