"""Distances between two videos: PSNR and SSIM of float frames, relative L2 of latents."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

from turbo_rcm_patch.errors import ShapeError

__all__ = ["Drift", "drift", "psnr", "relative_l2", "ssim"]

# Wang et al. 2004, as scikit-image computes it with gaussian_weights=True,
# use_sample_covariance=False.
SSIM_SIGMA: Final = 1.5
SSIM_RADIUS: Final = 5
SSIM_C1: Final = 0.01**2
SSIM_C2: Final = 0.03**2


@dataclass(frozen=True, slots=True)
class Drift:
    """Distance of one video from another.

    Attributes:
        psnr: PSNR of the whole video in dB; infinite if the frames are equal, NaN if either has a
            NaN.
        ssim: Mean SSIM over frames.
        frame_psnr: PSNR of each frame.
        frame_ssim: SSIM of each frame.
        latents: Relative L2 of the final latents.
        steps: Relative L2 of the latents after each step of the trajectories.
    """

    psnr: float
    ssim: float
    frame_psnr: tuple[float, ...]
    frame_ssim: tuple[float, ...]
    latents: float = math.nan
    steps: tuple[float, ...] = ()

    @property
    def worst_frame(self) -> int:
        """Index of the frame with the lowest PSNR; a frame with a NaN is worse than any."""
        return min(range(len(self.frame_psnr)), key=lambda i: _nan_first(self.frame_psnr[i]))

    @property
    def worst_psnr(self) -> float:
        """PSNR of the worst frame."""
        return self.frame_psnr[self.worst_frame]


def psnr(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """PSNR of each frame in dB, for values in 0..1.

    Args:
        a: Frames [F, H, W, 3], any float dtype.
        b: The same.

    Returns:
        [F], fp64; infinite where frames are equal.
    """
    _check(a, b)
    mse = (a.double() - b.double()).square().flatten(1).mean(1)
    return -10.0 * torch.log10(mse)


def ssim(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """SSIM of each frame: 11x11 Gaussian window, valid positions, mean over channels.

    Args:
        a: Frames [F, H, W, 3] with values in 0..1 and at least 11 pixels a side, any float dtype.
        b: The same.

    Returns:
        [F], fp64.
    """
    _check(a, b)
    if min(a.shape[1:3]) < 2 * SSIM_RADIUS + 1:
        raise ShapeError(
            "frames for SSIM", expected="at least 11 pixels a side", got=str(tuple(a.shape))
        )
    return torch.stack([_ssim_frame(x, y) for x, y in zip(a, b, strict=True)])


def relative_l2(value: torch.Tensor, truth: torch.Tensor) -> float:
    """|value - truth| / |truth| over all elements, computed in fp64."""
    truth64 = truth.double()
    return float((value.double() - truth64).norm() / truth64.norm())


def drift(
    frames: torch.Tensor,
    truth: torch.Tensor,
    *,
    latents: torch.Tensor | None = None,
    latents_truth: torch.Tensor | None = None,
    trajectory: tuple[torch.Tensor, ...] = (),
    trajectory_truth: tuple[torch.Tensor, ...] = (),
) -> Drift:
    """Compute all distances of a video from another.

    Args:
        frames: [F, H, W, 3] in 0..1.
        truth: The same of the other video.
        latents: Final latents, any shape.
        latents_truth: The same of the other video.
        trajectory: Latents after each step.
        trajectory_truth: The same of the other video.
    """
    per_frame, similarity = psnr(frames, truth), ssim(frames, truth)
    mse = float((frames.double() - truth.double()).square().mean())
    return Drift(
        psnr=math.inf if mse == 0.0 else -10.0 * math.log10(mse),
        ssim=float(similarity.mean()),
        frame_psnr=tuple(per_frame.tolist()),
        frame_ssim=tuple(similarity.tolist()),
        latents=(
            math.nan
            if latents is None or latents_truth is None
            else relative_l2(latents, latents_truth)
        ),
        steps=tuple(relative_l2(a, b) for a, b in zip(trajectory, trajectory_truth, strict=True)),
    )


def _ssim_frame(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """SSIM of two frames [H, W, 3]; one frame at a time keeps large videos in memory."""
    offsets = torch.arange(-SSIM_RADIUS, SSIM_RADIUS + 1, dtype=torch.float64, device=a.device)
    window = torch.exp(-0.5 * (offsets / SSIM_SIGMA).square())
    window = window / window.sum()
    x, y = (frame.double().permute(2, 0, 1).unsqueeze(1) for frame in (a, b))  # [3, 1, H, W]

    def blur(image: torch.Tensor) -> torch.Tensor:
        image = F.conv2d(image, window.view(1, 1, -1, 1))
        return F.conv2d(image, window.view(1, 1, 1, -1))

    mean_x, mean_y = blur(x), blur(y)
    var_x = blur(x * x) - mean_x * mean_x
    var_y = blur(y * y) - mean_y * mean_y
    covariance = blur(x * y) - mean_x * mean_y
    score = (2 * mean_x * mean_y + SSIM_C1) * (2 * covariance + SSIM_C2)
    score = score / ((mean_x**2 + mean_y**2 + SSIM_C1) * (var_x + var_y + SSIM_C2))
    return score.mean()


def _check(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.shape != b.shape or a.ndim != 4 or a.shape[-1] != 3:
        raise ShapeError(
            "frames",
            expected="two videos [F, H, W, 3] of one shape",
            got=f"{tuple(a.shape)} and {tuple(b.shape)}",
        )


def _nan_first(value: float) -> float:
    return -math.inf if math.isnan(value) else value
