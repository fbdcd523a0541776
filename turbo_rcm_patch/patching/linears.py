"""The Linears of a block: in int8 where that was asked for, elsewhere as their authors made them.

Only a plain Linear is quantised, which is asked on every forward: one with a LoRA, a hook or a
quantised weight is called. So is one whose parameters want a gradient now, because an int8 weight
has none to give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from turbo_rcm_patch import ops
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.ops.int8_linear import Activation
from turbo_rcm_patch.patching.author import call
from turbo_rcm_patch.patching.copies import Copies
from turbo_rcm_patch.patching.normed import Normed, tensor_of
from turbo_rcm_patch.patching.plain import plain_linear, why_not_plain
from turbo_rcm_patch.patching.plan import Product
from turbo_rcm_patch.patching.state import PairState
from turbo_rcm_patch.skip import Cast, Coefficient, SkipPair

__all__ = ["Linears", "pair_state", "runs_int8"]


def runs_int8(module: nn.Module, x: Tensor) -> bool:
    """Whether `module(x)` may run in int8 now."""
    if x.dim() != 3 or not plain_linear(module, x):
        return False
    linear: Any = module
    weight, bias = linear.weight, linear.bias
    if weight.shape[1] > ops.MAX_CHANNELS:
        return False
    if not torch.compiler.is_compiling() and weight.is_inference():
        return False
    if not torch.is_grad_enabled():
        return True
    return not (weight.requires_grad or (bias is not None and bias.requires_grad))


def why_not_int8(module: nn.Module) -> str:
    """Why a Linear does not run in int8, or "" if it does; for the report."""
    why = why_not_plain(module)
    if why:
        return why
    weight: Any = module.weight
    if weight.shape[1] > ops.MAX_CHANNELS:
        return f"its {weight.shape[1]} channels overflow an int32 sum"
    # What is changed in place could not be seen.
    return "its weight was made in inference mode" if weight.is_inference() else ""


def pair_state(pair: SkipPair, linears: Mapping[str, nn.Module], config: PatchConfig) -> PairState:
    """The state of a pair, which says what becomes of its Linears.

    Args:
        pair: The pair as it runs.
        linears: The Linears that its fused form runs itself, by name.
        config: How the model is patched.
    """
    auto = config.precision == "auto" and pair.kind != "feed-forward"
    narrow = config.pv in ("auto", "fp8")
    if config.linear == "as-is" or pair.runs == "as-written":
        return PairState(pair, auto=auto, narrow=narrow)
    why = {name: why_not_int8(module) for name, module in linears.items()}
    chosen = tuple(name for name, reason in why.items() if not reason)
    left = [f"{name} is not in int8: {reason}" for name, reason in why.items() if reason]
    reason = "; ".join(filter(None, [pair.reason, *left]))
    return PairState(
        replace(pair, int8_linears=chosen, reason=reason), int8=True, auto=auto, narrow=narrow
    )


class Linears:
    """Runs the Linears of one block, with the model's int8 copies of those that run in int8.

    A Linear that brings an int8 weight along (`int8_weights`) runs with that one.
    """

    __slots__ = ("_block", "copies")

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        self._block = copies.add_block()

    def __reduce__(self) -> tuple[type[Linears], tuple[Copies]]:
        return Linears, (self.copies,)

    def begin(self) -> None:
        """A forward of the model begins, with this block."""
        if not torch.compiler.is_compiling():
            self.copies.begin()

    def project(
        self, key: str, x: Tensor | Normed, modules: tuple[nn.Module, ...], *, int8: bool
    ) -> tuple[Tensor, ...]:
        """What each module makes of x; those that run in int8 share one product.

        Args:
            key: A name for these modules within the block.
            x: [B, N, K], or what will be.
            modules: Linears, or whatever stands in their places.
            int8: Whether int8 is wanted.

        Returns:
            One [B, N, Cout] each, views of one tensor where they share a product.
        """
        like = x.like if isinstance(x, Normed) else x
        chosen: list[Any] = [m for m in modules if int8 and runs_int8(m, like)]
        if not int8:
            self.forget(key)
        if len(chosen) < len(modules):
            x = tensor_of(x)
        if not chosen:
            return tuple(call(module, x) for module in modules)
        weight, scale, bias = self._weights(key, chosen)
        together = ops.int8_linear(
            _rows_or_tensor(x), weight, scale, bias, impl=self.copies.impl, out_dtype=like.dtype
        )
        parts = iter(torch.split(together, [m.out_features for m in chosen], dim=-1))
        return tuple(
            next(parts) if any(module is c for c in chosen) else call(module, x)
            for module in modules
        )

    def close(
        self,
        key: str,
        x: Tensor | Normed,
        module: nn.Module,
        *,
        int8: bool,
        activation: Activation | None = None,
        residual: Tensor | None = None,
        c_skip: Coefficient = 1.0,
        c_out: Coefficient = 1.0,
        cast: Cast = "fp32",
    ) -> Tensor | None:
        """c_skip * residual + c_out * activation(module(x)) in int8; None where it is not so run.

        Args:
            key: A name for this module within the block.
            x: [B, N, K], or what will be.
            module: A Linear, or whatever stands in its place.
            int8: Whether int8 is wanted.
            activation: As in `ops.int8_linear`.
            residual: [B, N, Cout] or None.
            c_skip: Float or tensor [B], [B, 1, Cout] or [B, N, Cout].
            c_out: Likewise.
            cast: As in `ops.int8_linear`.
        """
        if not int8:
            self.forget(key)
        like = x.like if isinstance(x, Normed) else x
        if not (int8 and runs_int8(module, like)):
            return None
        weight, scale, bias = self._weights(key, [module])
        return ops.int8_linear(
            _rows_or_tensor(x), weight, scale, bias,
            activation=activation, residual=residual, c_skip=c_skip, c_out=c_out, cast=cast,
            impl=self.copies.impl, out_dtype=like.dtype,
        )  # fmt: skip

    def forget(self, key: str) -> None:
        """Drop an int8 weight: the guard gave its Linear back."""
        if not torch.compiler.is_compiling():
            self.copies.forget((self._block, key))

    def product(
        self, key: str, modules: Sequence[Any], like: Tensor, *, int8: bool
    ) -> Product | None:
        """The product of plain Linears for a plan; None where one of them has to be called, or
        some run in int8 and others do not.

        Args:
            key: A name for these modules within the block.
            modules: Linears, or whatever stands in their places.
            like: Of the dtype and on the device of their input.
            int8: Whether int8 is wanted.
        """
        if not int8:
            self.forget(key)
        if not all(plain_linear(module, like) for module in modules):
            return None
        x = like.view(1, 1, -1) if like.dim() == 1 else like.unsqueeze(0)
        chosen = [int8 and runs_int8(module, x) for module in modules]
        if any(chosen) != all(chosen):
            return None
        return Product(modules, self.copies if all(chosen) else None, (self._block, key))

    def _weights(self, key: str, modules: list[Any]) -> tuple[Tensor, Tensor, Tensor | None]:
        if torch.compiler.is_compiling():  # Not even the block's number, or each has a graph.
            return self.copies.fresh(modules)
        return self.copies.of((self._block, key), modules)


def _rows_or_tensor(x: Tensor | Normed) -> Tensor | ops.Rows:
    """What an int8 product takes: rows straight from the norm where that can be."""
    rows = x.rows() if isinstance(x, Normed) else None
    return tensor_of(x) if rows is None else rows
