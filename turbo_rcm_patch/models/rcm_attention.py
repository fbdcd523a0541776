"""Self-attention followed by the skip of a few-step model: `c_skip(t) * x + c_out(t) * F(x)`.

`RCMAttention` computes attention and skip as separate operations of plain torch. It is the
reference in the tests of `FusedRCMAttention`, which closes the skip in the attention kernel
(without output projection) or after the projection. Both have the same parameters under
the same names, so a state dict of one loads into the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import torch
import torch.nn.functional as F
from torch import nn

from turbo_rcm_patch import ops
from turbo_rcm_patch.boundary import EDM
from turbo_rcm_patch.config import Attention, Form, Impl, PVDType
from turbo_rcm_patch.errors import ConfigError, DTypeError, ShapeError
from turbo_rcm_patch.skip import Coefficient, apply_skip, broadcast_coefficient

#: A coefficient as a function of time. It gets t as the caller gave it (float or tensor [B]).
CoefficientOfTime = Callable[[float], float] | Callable[[torch.Tensor], torch.Tensor]


class RCMAttention(nn.Module):
    """Attention, output projection and skip as separate operations of plain torch.

    Parameters: `qkv` Linear(dim, 3 * dim) and, with `projection`, `proj` Linear(dim, dim).

    Args:
        dim: Channels C of the input.
        num_heads: Number of heads H; dim must be a multiple of it.
        sigma_data: Standard deviation of the data in the default coefficients (those of EDM):
            c_skip = sd^2 / (t^2 + sd^2), c_out = sd t / sqrt(sd^2 + t^2).
        projection: Put an output projection between attention and skip.
        bias: Give the Linears a bias.
        c_skip: Function that replaces the default. It takes t and returns a float or a tensor
            [B], [B, 1, C] or [B, N, C].
        c_out: Function that replaces the default c_out, with the same arguments and results.
        device: Device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        sigma_data: float = 0.5,
        *,
        projection: bool = True,
        bias: bool = True,
        c_skip: CoefficientOfTime | None = None,
        c_out: CoefficientOfTime | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim < 1 or dim % num_heads:
            raise ConfigError(
                "dim and num_heads",
                expected="positive, with dim a multiple of num_heads",
                got=f"dim={dim}, num_heads={num_heads}",
            )
        for name, given in (("c_skip", c_skip), ("c_out", c_out)):
            if given is not None and not callable(given):
                raise ConfigError(name, expected="a function of t", got=repr(given))
        default = EDM(sigma_data)
        self.dim = dim
        self.num_heads = num_heads
        self.sigma_data = sigma_data
        self.c_skip: CoefficientOfTime = default.c_skip if c_skip is None else c_skip
        self.c_out: CoefficientOfTime = default.c_out if c_out is None else c_out
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias, device=device, dtype=dtype)
        self.proj: nn.Linear | None = (
            nn.Linear(dim, dim, bias=bias, device=device, dtype=dtype) if projection else None
        )

    def branch(self, x: torch.Tensor) -> torch.Tensor:
        """Compute F(x), the branch without the skip.

        Args:
            x: [B, N, C], dtype of the parameters.

        Returns:
            [B, N, C], dtype of the parameters.
        """
        batch, tokens, _ = x.shape
        heads = self.qkv(x).view(batch, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return self.proj(out) if self.proj is not None else out

    def forward(self, x: torch.Tensor, t: float | torch.Tensor) -> torch.Tensor:
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
        wide = torch.promote_types(x.dtype, torch.float32)
        return apply_skip(x, self.branch(x), c_skip, c_out, dtype=wide)

    def coefficients(
        self, x: torch.Tensor, t: float | torch.Tensor
    ) -> tuple[Coefficient, Coefficient]:
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
        if isinstance(t, torch.Tensor):
            if t.shape not in ((), (1,), (x.shape[0],)):
                raise ShapeError("t", expected=f"[] or [{x.shape[0]}]", got=str(list(t.shape)))
            if t.is_complex() or t.dtype == torch.bool:
                raise DTypeError("t", expected="real numbers", got=str(t.dtype))
        elif isinstance(t, bool) or not isinstance(t, (int, float)):
            raise DTypeError("t", expected="a number or a tensor [B]", got=type(t).__name__)
        else:
            t = float(t)
        pair = []
        for name, of in (("c_skip", self.c_skip), ("c_out", self.c_out)):
            value = of(t)  # type: ignore[arg-type]
            if not isinstance(value, (torch.Tensor, int, float)):
                raise DTypeError(
                    f"{name}(t)", expected="a number or a tensor", got=type(value).__name__
                )
            broadcast_coefficient(value, x, f"{name}(t)")
            pair.append(value.to(x.device) if isinstance(value, torch.Tensor) else float(value))
        return pair[0], pair[1]

    def extra_repr(self) -> str:
        return f"dim={self.dim}, num_heads={self.num_heads}, sigma_data={self.sigma_data}"


class FusedRCMAttention(RCMAttention):
    """Self-attention with the skip fused into its kernel or into the pass after its projection.

    Parameters, defaults and result are those of `RCMAttention`, and so are all arguments that are
    not listed here.

    Args:
        attention: "exact", "int8", "int4" or "sage"; see `PatchConfig`.
        impl: "triton", "reference" (plain torch), or "auto", which chooses by the device of x.
        pv: Element type of the second matrix product; see `PatchConfig`.
        form: Attention and projection in one launch or two; see `PatchConfig`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        sigma_data: float = 0.5,
        *,
        projection: bool = True,
        bias: bool = True,
        c_skip: CoefficientOfTime | None = None,
        c_out: CoefficientOfTime | None = None,
        attention: Attention = "exact",
        impl: Impl = "auto",
        pv: PVDType = "auto",
        form: Form = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            dim,
            num_heads,
            sigma_data,
            projection=projection,
            bias=bias,
            c_skip=c_skip,
            c_out=c_out,
            device=device,
            dtype=dtype,
        )
        if form not in get_args(Form):
            raise ConfigError("form", expected=f"one of {get_args(Form)}", got=repr(form))
        self.spec = ops.AttentionSpec(heads=num_heads, attention=attention, impl=impl, pv=pv)
        self.form: Form = form

    def forward(self, x: torch.Tensor, t: float | torch.Tensor) -> torch.Tensor:
        """Compute attention, projection and skip with the fused operations.

        Args:
            x: [B, N, C], dtype of the parameters (bf16, fp16 or fp32).
            t: Time: one number, or a tensor [B] with one per sample.

        Returns:
            [B, N, C], dtype of x.
        """
        if torch.is_grad_enabled() and (
            x.requires_grad or any(p.requires_grad for p in self.parameters())
        ):
            return super().forward(x, t)  # the fused operations have no derivative
        c_skip, c_out = self.coefficients(x, t)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.proj is None:
            return ops.attention_skip(
                q, k, v, self.spec, residual=x, c_skip=c_skip, c_out=c_out, out_dtype=x.dtype
            )
        if not _is_plain(self.proj, q.dtype):
            branch = self.proj(ops.attention_skip(q, k, v, self.spec))
            return ops.skip(x, branch.to(x.dtype), c_skip, c_out, impl=self.spec.impl)
        return ops.attention_project_skip(
            q,
            k,
            v,
            self.proj.weight,
            self.proj.bias,
            self.spec,
            residual=x,
            c_skip=c_skip,
            c_out=c_out,
            form=self.form,
            out_dtype=x.dtype,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, attention={self.spec.attention}, impl={self.spec.impl}"


def _is_plain(linear: nn.Module, dtype: torch.dtype) -> bool:
    """Return True if a call of the module is exactly x @ weight^T + bias in `dtype`.

    Reading the parameters would lose an adapter, a quantised weight, a hook or an instance
    forward, and autocast multiplies in another dtype than the weight's. In these cases the module
    is called, and only the skip after it is fused.
    """
    return (
        type(linear) is nn.Linear
        and "forward" not in linear.__dict__
        and not (linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks)
        and not linear._backward_pre_hooks
        and type(linear.weight) is nn.Parameter
        and linear.weight.dtype == dtype
    )
