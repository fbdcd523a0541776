"""An example of a user's own module: self-attention followed by the skip of a few-step model,
`c_skip(t) * x + c_out(t) * F(x)`, in plain torch.

`patch_model` closes its skip in the attention kernel (without output projection), or with
`form="one-launch"` in one launch with the projection, or after it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turbo_rcm_patch.boundary import EDM
from turbo_rcm_patch.errors import ConfigError, DTypeError, ShapeError
from turbo_rcm_patch.skip import Coefficient, apply_skip, broadcast_coefficient

__all__ = ["RCMAttention"]

#: A coefficient as a function of time. It gets t as the caller gave it (float or tensor [B]).
CoefficientOfTime = Callable[[float], float] | Callable[[Tensor], Tensor]


class RCMAttention(nn.Module):
    """Attention, output projection and skip as separate operations of plain torch.

    Parameters: `qkv` Linear(dim, 3 * dim) and, with `projection`, `proj` Linear(dim, dim).

    Args:
        dim: Channels C of the input.
        num_heads: Number of heads H; dim must be a multiple of it.
        sigma_data: Standard deviation of the data in the default coefficients (those of EDM):
            c_skip = sd^2 / (t^2 + sd^2), c_out = sd t / sqrt(sd^2 + t^2).
        projection: Put an output projection between attention and skip.
        c_skip: Function that replaces the default. It takes t and returns a float or a tensor
            [B], [B, 1, C] or [B, N, C].
        c_out: Function that replaces the default c_out, with the same arguments and results.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        sigma_data: float = 0.5,
        *,
        projection: bool = True,
        c_skip: CoefficientOfTime | None = None,
        c_out: CoefficientOfTime | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim < 1 or dim % num_heads:
            expected = "positive, with dim a multiple of num_heads"
            got = f"dim={dim}, num_heads={num_heads}"
            raise ConfigError("dim and num_heads", expected=expected, got=got)
        self.dim, self.num_heads, default = dim, num_heads, EDM(sigma_data)
        self.c_skip: CoefficientOfTime = default.c_skip if c_skip is None else c_skip
        self.c_out: CoefficientOfTime = default.c_out if c_out is None else c_out
        for name, function in (("c_skip", self.c_skip), ("c_out", self.c_out)):
            if not callable(function):
                raise ConfigError(name, expected="a function of t", got=repr(function))
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim) if projection else None

    def forward(self, x: Tensor, t: float | Tensor) -> Tensor:
        """Compute attention, projection and skip.

        The skip is computed in fp32 (fp64 for fp64 inputs) and rounded once. Where c_out(t) is 0
        and c_skip(t) is 1 the result is x bit for bit.

        Args:
            x: [B, N, C], dtype of the parameters.
            t: Time: one number, or a tensor [B] with one per sample.

        Returns:
            [B, N, C], dtype of x.
        """
        c_skip, c_out = self.coefficients(x, t)
        heads = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(*heads.unbind(0)).transpose(1, 2).reshape(x.shape)
        branch = out if self.proj is None else self.proj(out)
        wide = torch.promote_types(x.dtype, torch.float32)
        return apply_skip(x, branch, c_skip, c_out, dtype=wide)

    def coefficients(self, x: Tensor, t: float | Tensor) -> tuple[Coefficient, Coefficient]:
        """Return (c_skip, c_out) at t, after checking that x and t fit this module and each other.

        Args:
            x: [B, N, C].
            t: One number, or a tensor [] or [B].

        Returns:
            Two coefficients, as the callables returned them, checked to broadcast against x.
        """
        if x.ndim != 3 or x.shape[-1] != self.dim:
            raise ShapeError("x", expected=f"[B, N, {self.dim}]", got=str(list(x.shape)))
        if not x.dtype.is_floating_point:
            raise DTypeError("x", expected="a floating point tensor", got=str(x.dtype))
        if isinstance(t, Tensor):
            if t.shape not in ((), (1,), (x.shape[0],)):
                raise ShapeError("t", expected=f"[] or [{x.shape[0]}]", got=str(list(t.shape)))
            if t.is_complex() or t.dtype == torch.bool:
                raise DTypeError("t", expected="real numbers", got=str(t.dtype))
        elif isinstance(t, bool) or not isinstance(t, (int, float)):
            raise DTypeError("t", expected="a number or a tensor [B]", got=type(t).__name__)
        return self._coefficient("c_skip", x, t), self._coefficient("c_out", x, t)

    def _coefficient(self, name: str, x: Tensor, t: float | Tensor) -> Coefficient:
        value = getattr(self, name)(t if isinstance(t, Tensor) else float(t))
        name = f"{name}(t)"
        if not isinstance(value, (Tensor, int, float)):
            raise DTypeError(name, expected="a number or a tensor", got=type(value).__name__)
        broadcast_coefficient(value, x, name)
        return value.to(x.device) if isinstance(value, Tensor) else float(value)
