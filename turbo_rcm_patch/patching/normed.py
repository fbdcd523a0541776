"""The input of a branch before it is known what for."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from turbo_rcm_patch import ops
from turbo_rcm_patch.config import Impl

__all__ = ["Normed", "tensor_of"]


class Normed:
    """layer_norm(x) * (1 + scale) + shift, or without the 1, computed when somebody asks.

    int8 Linears take it as int8 rows, in one pass over x; whoever else is called takes the tensor.

    Attributes:
        like: x itself, of the shape, dtype and device of the result.
    """

    __slots__ = ("_eps", "_form", "_impl", "_rows", "_scale", "_shift", "_tensor", "like")

    def __init__(
        self,
        x: Tensor,
        scale: Tensor | None,
        shift: Tensor | None,
        *,
        form: Literal["modulation", "affine"],
        eps: float,
        impl: Impl,
    ) -> None:
        self.like = x
        self._scale, self._shift = scale, shift
        self._form, self._eps, self._impl = form, eps, impl
        self._tensor: Tensor | None = None
        self._rows: ops.Rows | None = None

    def tensor(self) -> Tensor:
        """[B, N, C], dtype of x."""
        if self._tensor is None:
            self._tensor = ops.norm_modulate(
                self.like,
                scale=self._scale,
                shift=self._shift,
                form=self._form,
                eps=self._eps,
                impl=self._impl,
            )
        return self._tensor

    def rows(self) -> ops.Rows | None:
        """The same as int8 rows; None where a gradient is wanted."""
        if self._wants_gradient():
            return None
        if self._rows is None:
            self._rows = ops.norm_modulate_rows(
                self.like,
                scale=self._scale,
                shift=self._shift,
                form=self._form,
                eps=self._eps,
                impl=self._impl,
            )
        return self._rows

    def made_rows(self) -> ops.Rows | None:
        """The int8 rows, if somebody asked for them."""
        return self._rows

    def _wants_gradient(self) -> bool:
        parts = (self.like, self._scale, self._shift)
        return torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in parts)


def tensor_of(x: Tensor | Normed) -> Tensor:
    """The tensor itself, or the one that somebody asks for now."""
    return x.tensor() if isinstance(x, Normed) else x
