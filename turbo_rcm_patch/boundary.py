"""Boundary conditions: closed forms of (c_skip, c_out) for a whole network.

A few-step model is a network F inside a skip, `c_skip(t) * x + c_out(t) * F(x)`, whose
coefficients depend on time. At t = 0 c_skip is exactly 1 and c_out exactly 0, so the skip returns
its input exactly.

A coefficient takes a float and returns a float, or takes a tensor of any shape and returns an fp64
tensor of that shape. All arithmetic is fp64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import torch

from turbo_rcm_patch.config import is_number
from turbo_rcm_patch.errors import ConfigError, DTypeError

__all__ = ["EDM", "RectifiedFlow", "rectified_flow_time"]

#: A time or a function of it.
_Time = TypeVar("_Time", float, torch.Tensor)


@dataclass(frozen=True, slots=True)
class EDM:
    """Preconditioning of EDM (arXiv:2206.00364, table 1); t is the noise level sigma.

    c_skip = sd^2 / (t^2 + sd^2), c_out = t sd / sqrt(t^2 + sd^2).

    Attributes:
        sigma_data: Standard deviation of the data, sd.
    """

    sigma_data: float = 0.5

    def __post_init__(self) -> None:
        sd = self.sigma_data
        if not is_number(sd) or not 0 < sd < math.inf:
            raise ConfigError("EDM.sigma_data", expected="a positive number", got=repr(sd))

    def c_skip(self, t: _Time) -> _Time:
        """Coefficient of the input."""
        t, sd = _in_fp64(t), self.sigma_data
        return sd * sd / (t * t + sd * sd)

    def c_out(self, t: _Time) -> _Time:
        """Coefficient of the network's output."""
        t, sd = _in_fp64(t), self.sigma_data
        square = t * t + sd * sd
        return t * sd / (square.sqrt() if isinstance(square, torch.Tensor) else math.sqrt(square))


@dataclass(frozen=True, slots=True)
class RectifiedFlow:
    """A network that predicts the velocity v of x_t = (1 - t) x_0 + t z: x_0 = x_t - t v.

    t goes from 0 to 1. c_skip = 1, c_out = -t.
    """

    def c_skip(self, t: _Time) -> _Time:
        """Coefficient of the input."""
        return 0 * _in_fp64(t) + 1.0

    def c_out(self, t: _Time) -> _Time:
        """Coefficient of the network's output."""
        return -_in_fp64(t)


def rectified_flow_time(t: _Time) -> _Time:
    """Convert a time of TrigFlow (arXiv:2410.11081), in which rCM's samplers (arXiv:2510.08431)
    count, to a rectified-flow time: sin t / (cos t + sin t), in fp64."""
    t = _in_fp64(t)
    if isinstance(t, torch.Tensor):
        return t.sin() / (t.cos() + t.sin())
    return math.sin(t) / (math.cos(t) + math.sin(t))


def _in_fp64(t: _Time) -> _Time:
    if not isinstance(t, torch.Tensor):
        return float(t)
    if t.is_complex() or t.dtype == torch.bool:
        raise DTypeError("t", expected="a real number", got=str(t.dtype))
    return t.double()
