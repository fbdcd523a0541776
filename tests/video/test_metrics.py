"""PSNR and SSIM against their definitions and scikit-image."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from skimage import metrics

from turbo_rcm_patch import PatchConfig
from turbo_rcm_patch.errors import ShapeError
from turbo_rcm_patch.video.measures import (
    Drift,
    NetworkNumber,
    frame_drift,
    fusion_number,
    relative_l2,
    ssim,
)


def video(seed: int, shape=(3, 24, 31, 3)) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.5])
def test_ssim_is_scikit_images(noise: float) -> None:
    a = video(0)
    b = (a + noise * torch.randn(a.shape, generator=torch.Generator().manual_seed(1))).clamp(0, 1)
    expected = [
        metrics.structural_similarity(
            x.numpy().astype(np.float64), y.numpy().astype(np.float64), channel_axis=-1,
            gaussian_weights=True, sigma=1.5, use_sample_covariance=False, data_range=1.0,
        )
        for x, y in zip(a, b, strict=True)
    ]  # fmt: skip
    assert ssim(a, b).tolist() == pytest.approx(expected, abs=1e-7)


def test_relative_l2() -> None:
    assert relative_l2(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)


def test_a_drift_survives_json() -> None:
    import json

    from turbo_rcm_patch.video.store import to_json

    one = Drift(math.inf, 1.0, (30.0, math.inf), vmaf=95.5)
    assert Drift.from_dict(json.loads(json.dumps(to_json(one.as_dict())))) == one


def test_drift_takes_the_whole_video_and_its_worst_frame() -> None:
    a = video(0)
    b = a.clone()
    b[2] = (b[2] + 0.2).clamp(0, 1)
    found = frame_drift(b, a)
    mse = float((a.double() - b.double()).square().mean())
    assert found.psnr == pytest.approx(-10 * math.log10(mse))
    assert found.worst_frame == 2
    assert found.worst_psnr == pytest.approx(found.psnr - 10 * math.log10(3)), "one of three"
    assert found.frame_psnr[0] == math.inf


def test_a_nan_frame_is_the_worst_frame() -> None:
    one = Drift(math.nan, 0.0, (30.0, math.nan, 20.0))
    assert one.worst_frame == 1
    assert math.isnan(one.worst_psnr)


def test_shapes_are_checked() -> None:
    for frames, truth in ((video(0), video(0)[:2]), (video(0)[:, :8], video(0)[:, :8])):
        with pytest.raises(ShapeError, match="of one shape, with at least 11 pixels a side"):
            frame_drift(frames, truth)


@pytest.mark.parametrize("attention", ["auto", "int4", "exact"])
def test_fusing_alone_changes_fp32_rounding(attention: str) -> None:
    config = PatchConfig(attention=attention)
    number = fusion_number(config, torch.device("cpu"), heads=2, head_dim=16)
    assert number < 3e-6


def test_a_network_without_an_error_of_its_own_has_an_infinite_ratio() -> None:
    assert NetworkNumber(unpatched=0.0, patched=0.5).ratio == math.inf
    assert NetworkNumber(unpatched=0.25, patched=0.5).ratio == 2.0
