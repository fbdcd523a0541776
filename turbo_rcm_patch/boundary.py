"""Boundary conditions: closed forms of (c_skip, c_out) for a whole network.

A few-step model is a network F inside a skip whose coefficients depend on time. Each class here
is one choice of these coefficients from the literature. At one end of the time axis, the identity
end, the skip returns its input exactly.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from turbo_rcm_patch.config import is_number
from turbo_rcm_patch.errors import ConfigError, DTypeError

__all__ = [
    "EDM",
    "ConsistencyModel",
    "Parameterisation",
    "RCMWrapper",
    "RectifiedFlow",
    "TrigFlow",
    "rectified_flow_time",
]


#: A time, or a function of it: a float from a float, an fp64 tensor from a tensor.
_Time = TypeVar("_Time", bound=float | torch.Tensor)


class Parameterisation(ABC):
    """The coefficients of `D(x) = c_skip(t) * x + c_out(t) * F(c_in(t) * x)` for a network F.

    Each coefficient takes a float and returns a float, or takes a tensor of any shape and returns
    an fp64 tensor of that shape. All arithmetic is fp64. A call never waits for a GPU, so it does
    not check that times lie between the two ends.
    """

    @property
    def identity_end(self) -> float:
        """The time at which c_skip is exactly 1 and c_out exactly 0, so D(x) is x."""
        return 0.0

    @abstractmethod
    def _coefficients(self, t: Any, xp: Any) -> tuple[Any, Any, Any]:
        """Return (c_skip, c_out, c_in) for a float or an fp64 tensor.

        `xp` is `math` or `torch`; both name the functions alike.
        """

    def _coefficient(self, index: int, t: _Time) -> _Time:
        wide = _wide(t)
        if isinstance(t, torch.Tensor):
            found: _Time = self._coefficients(self._widen(t), torch)[index]
        else:
            found = self._coefficients(wide, math)[index]
        return found

    def _widen(self, t: torch.Tensor) -> torch.Tensor:
        return t.double()

    def c_skip(self, t: _Time) -> _Time:
        """Coefficient of the input."""
        return self._coefficient(0, t)

    def c_out(self, t: _Time) -> _Time:
        """Coefficient of the network's output."""
        return self._coefficient(1, t)

    def c_in(self, t: _Time) -> _Time:
        """Factor on the input before the network sees it."""
        return self._coefficient(2, t)


def _positive(owner: object, sigma_data: float) -> None:
    if not is_number(sigma_data) or not 0 < sigma_data < math.inf:
        field = f"{type(owner).__name__}.sigma_data"
        raise ConfigError(field, expected="a positive number", got=repr(sigma_data))


@dataclass(frozen=True, slots=True)
class _OverNoise(Parameterisation):
    """Base of the classes whose times are noise levels, from the identity end to infinity."""

    sigma_data: float = 0.5

    def __post_init__(self) -> None:
        _positive(self, self.sigma_data)

    def _coefficients(self, t: Any, xp: Any) -> tuple[Any, Any, Any]:
        sd, past = self.sigma_data, t - self.identity_end
        norm = xp.sqrt(t * t + sd * sd)
        return sd * sd / (past * past + sd * sd), past * sd / norm, 1 / norm


@dataclass(frozen=True, slots=True)
class EDM(_OverNoise):
    """Preconditioning of EDM (arXiv:2206.00364, table 1); t is the noise level sigma.

    c_skip = sd^2 / (t^2 + sd^2), c_out = t sd / sqrt(t^2 + sd^2), c_in = 1 / sqrt(t^2 + sd^2).

    Attributes:
        sigma_data: Standard deviation of the data, sd.
    """


@dataclass(frozen=True, slots=True)
class ConsistencyModel(_OverNoise):
    """Boundary of consistency models (arXiv:2303.01469, appendix C); t is the noise level sigma.

    c_skip = sd^2 / ((t - smin)^2 + sd^2), c_out = (t - smin) sd / sqrt(t^2 + sd^2),
    c_in = 1 / sqrt(t^2 + sd^2).

    Attributes:
        sigma_data: Standard deviation of the data, sd.
        sigma_min: Noise level at which the network must be the identity. A time in a tensor also
            counts as sigma_min if it is sigma_min rounded to the tensor's dtype, because 0.002 in
            fp32 is not exactly 0.002.
    """

    sigma_min: float = 0.002

    def __post_init__(self) -> None:
        _OverNoise.__post_init__(self)
        if not is_number(self.sigma_min) or not 0 <= self.sigma_min < math.inf:
            raise ConfigError(
                "ConsistencyModel.sigma_min", expected="0 or more", got=repr(self.sigma_min)
            )

    @property
    def identity_end(self) -> float:
        return self.sigma_min

    def _widen(self, t: torch.Tensor) -> torch.Tensor:
        wide = t.double()
        if not t.dtype.is_floating_point:
            return wide
        rounded = torch.tensor(self.sigma_min, dtype=t.dtype, device=t.device).double()
        # The difference is exact, and adding it keeps the derivative in t.
        return wide + torch.where(wide == rounded, self.sigma_min - rounded, 0.0)


@dataclass(frozen=True, slots=True)
class TrigFlow(Parameterisation):
    """TrigFlow (arXiv:2410.11081): x_t = cos t x_0 + sin t z, t from 0 to pi/2.

    c_skip = cos t, c_out = -sd sin t, c_in = 1 / sd.

    Attributes:
        sigma_data: Standard deviation of the data, sd, and of the noise z.
    """

    sigma_data: float = 1.0

    def __post_init__(self) -> None:
        _positive(self, self.sigma_data)

    def _coefficients(self, t: Any, xp: Any) -> tuple[Any, Any, Any]:
        sd = self.sigma_data
        return xp.cos(t), -sd * xp.sin(t), 0 * t + 1 / sd


@dataclass(frozen=True, slots=True)
class RCMWrapper(Parameterisation):
    """rCM (arXiv:2510.08431): a TrigFlow model around a network that predicts the velocity of a
    rectified flow.

    t is TrigFlow time. c_skip = c_in = 1 / (cos t + sin t), c_out = -sin t / (cos t + sin t).
    """

    def _coefficients(self, t: Any, xp: Any) -> tuple[Any, Any, Any]:
        total = xp.cos(t) + xp.sin(t)
        return 1 / total, -xp.sin(t) / total, 1 / total


@dataclass(frozen=True, slots=True)
class RectifiedFlow(Parameterisation):
    """The model of `RCMWrapper` in rectified-flow time: x_0 = x_t - t v.

    x_t = (1 - t) x_0 + t z, t from 0 to 1. c_skip = 1, c_out = -t, c_in = 1.
    """

    def _coefficients(self, t: Any, xp: Any) -> tuple[Any, Any, Any]:
        return 0 * t + 1.0, -t, 0 * t + 1.0


def rectified_flow_time(t: _Time) -> _Time:
    """Convert a TrigFlow time to a rectified-flow time: sin t / (cos t + sin t), in fp64.

    The states differ by a factor: x_rectified = x_trigflow / (cos t + sin t), which is
    `RCMWrapper().c_in(t)`.
    """
    wide, xp = _wide(t), torch if isinstance(t, torch.Tensor) else math
    cos, sin = xp.cos(wide), xp.sin(wide)
    result: _Time = sin / (cos + sin)
    return result


def _wide(t: float | torch.Tensor) -> Any:
    """Convert a time to a float or an fp64 tensor."""
    if not isinstance(t, torch.Tensor):
        return float(t)
    if t.is_complex() or t.dtype == torch.bool:
        raise DTypeError("t", expected="a real number", got=str(t.dtype))
    return t.double()
