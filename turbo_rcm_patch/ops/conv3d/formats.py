"""The records in which calls of convolutions and of the passes between them travel."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from turbo_rcm_patch.config import Impl

#: Strides over time, height and width.
Stride = tuple[int, int, int]


class Call(NamedTuple):
    """What the choice of an implementation depends on.

    Attributes:
        x: Activations, as in `conv3d`.
        weight: Packed weight, as in `conv3d`.
        stride: Strides.
        padding: Zeros above and below, left and right.
        impl: As `PatchConfig.impl`.
    """

    x: Tensor
    weight: Tensor
    stride: Stride
    padding: tuple[int, int]
    impl: Impl = "auto"


class RMSNorm(NamedTuple):
    """Wan's norm: x / max(|x|, 1e-12) * sqrt(C) * weight + bias over the channels of a pixel.

    Attributes:
        weight: [C], or any shape of that many elements.
        bias: The same, or None.
    """

    weight: Tensor
    bias: Tensor | None = None


class GroupNorm(NamedTuple):
    """A group norm over all frames given, and CogVideoX's modulation by the latent.

    Attributes:
        weight: [C].
        bias: [C].
        groups: Number of groups.
        eps: Epsilon.
        scale: [B, t, h, w, C], multiplies the norm of the pixels that the latent's pixel covers;
            None for 1. T is 1 + (t - 1) * r or t * r, H is h * s and W is w * s.
        shift: The same, added afterwards, or None.
    """

    weight: Tensor
    bias: Tensor
    groups: int
    eps: float
    scale: Tensor | None = None
    shift: Tensor | None = None


#: The smallest norm of a pixel that Wan's norm divides by (`torch.nn.functional.normalize`).
LEAST_NORM = 1e-12


class Duplicate(NamedTuple):
    """Wan 2.2's shortcut around an enlarging level (`DupUp3D`): its input, repeated.

    A pixel of the input becomes times * 4 phases (in time, row, column). Channel c of phase p is
    its channel (c * times * 4 + p) // repeats.

    Attributes:
        x: [B, t, H, W, C'], any strides with contiguous channels.
        times: Frames that each becomes.
        repeats: Number of phases that share a channel.
    """

    x: Tensor
    times: int
    repeats: int
