"""The Linears of a block: in int8 where that was asked for, elsewhere as their authors made them.

Only a plain Linear is quantised, which is asked on every forward: one with a LoRA, a hook or a
quantised weight is called. So is one whose parameters want a gradient now, because an int8 weight
has none to give.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from turbo_rcm_patch import ops
from turbo_rcm_patch.config import Impl, PatchConfig
from turbo_rcm_patch.ops.int8_linear import GROUP, Activation, scales_of_rows
from turbo_rcm_patch.patching.author import call
from turbo_rcm_patch.patching.int8_weights import attached_int8, stands_for
from turbo_rcm_patch.patching.normed import Normed, tensor_of
from turbo_rcm_patch.patching.plain import plain_linear, why_not_plain
from turbo_rcm_patch.patching.state import PairState
from turbo_rcm_patch.skip import Cast, Coefficient, SkipPair

__all__ = ["Linears", "pair_state", "runs_int8"]

#: A weight may move once or twice (a model goes to its device); one that keeps moving is
#: offloaded, and an int8 copy of it would hold the memory that offloading is to save.
_MOVES: Final = 2


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


class _Held(NamedTuple):
    """An int8 weight and what it was made from.

    Attributes:
        made: int8 [Cout, K], scale [Cout], bias [Cout] or None; None where it is not kept.
        sources: The parameters, held weakly.
        versions: How often each had been written to.
        places: Where each was.
        moves: How often they moved since they were first seen.
    """

    made: tuple[Tensor, Tensor, Tensor | None] | None
    sources: tuple[weakref.ref[Tensor], ...]
    versions: tuple[int, ...]
    places: tuple[tuple[int, torch.device, torch.dtype], ...]
    moves: int

    def same(self, parameters: list[Tensor]) -> bool:
        """Whether it was made from these, with the values they have now, wherever they are."""
        return (
            len(parameters) == len(self.sources)
            and all(ref() is p for ref, p in zip(self.sources, parameters, strict=True))
            and self.versions == tuple(p._version for p in parameters)
        )


class Linears:
    """Runs the Linears of one block, and keeps the int8 weights of those that run in int8.

    An int8 weight is made once and again whenever its parameter is another tensor, was written to
    (an optimiser's step, `load_state_dict`) or moved. Writing through `.data` leaves no trace;
    patch again after it. Nothing is kept while a compiler traces: there the graph makes the int8
    weight on every call, three bytes of traffic a 16-bit weight. A copy (deepcopy, pickle) starts
    empty. A Linear that brings an int8 weight along (`int8_weights`) runs with that one.
    """

    __slots__ = ("_held", "_impl")

    def __init__(self, impl: Impl) -> None:
        self._impl = impl
        self._held: dict[str, _Held] = {}

    def __reduce__(self) -> tuple[type[Linears], tuple[Impl]]:
        return Linears, (self._impl,)

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
            _rows_or_tensor(x), weight, scale, bias, impl=self._impl, out_dtype=like.dtype
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
            impl=self._impl, out_dtype=like.dtype,
        )  # fmt: skip

    def forget(self, key: str) -> None:
        """Drop an int8 weight: the guard gave its Linear back."""
        self._held.pop(key, None)

    def _weights(self, key: str, modules: list[Any]) -> tuple[Tensor, Tensor, Tensor | None]:
        if torch.compiler.is_compiling():
            return self._quantised(modules)
        parameters = [p for m in modules for p in (m.weight, m.bias) if p is not None]
        brought = [int8 for int8, _ in _brought(modules)]
        places = tuple((p.data_ptr(), p.device, p.dtype) for p in (*parameters, *brought))
        held, moves = self._held.get(key), 0
        if held is not None and held.same(parameters):
            if held.made is not None and held.places == places:
                return held.made
            moves = held.moves + 1
        self._held.pop(key, None)  # Its memory first.
        with torch.inference_mode(False), torch.no_grad():  # Later forwards may be of other modes.
            made = self._quantised(modules)
        self._held[key] = _Held(
            made if moves <= _MOVES else None,
            tuple(map(weakref.ref, parameters)),
            tuple(p._version for p in parameters),
            places,
            moves,
        )
        return made

    def _quantised(self, modules: list[Any]) -> tuple[Tensor, Tensor, Tensor | None]:
        brought = _brought(modules)
        if len(brought) == len(modules) and _current(modules, brought):
            int8, scale = _stacked(brought)
        else:
            int8, scale = ops.quantize_weight(*(m.weight for m in modules), impl=self._impl)
        if len(modules) == 1 or all(m.bias is None for m in modules):
            return int8, scale, modules[0].bias
        biases = [
            m.weight.new_zeros(m.out_features) if m.bias is None else m.bias for m in modules
        ]
        return int8, scale, torch.cat(biases)


def _brought(modules: list[Any]) -> list[tuple[Tensor, Tensor]]:
    """The int8 weights that some of these Linears bring along."""
    return [given for given in map(attached_int8, modules) if given is not None]


def _current(modules: list[Any], given: list[tuple[Tensor, Tensor]]) -> bool:
    """Whether weights still are what came with them in int8."""
    return all(stands_for(m.weight, *one) for m, one in zip(modules, given, strict=True))


def _stacked(given: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Several int8 weights over the same input as one."""
    if len(given) == 1:
        return given[0]
    int8, scales = zip(*given, strict=True)
    if all(weight.shape[0] % GROUP == 0 for weight in int8[:-1]):
        return torch.cat(int8), torch.cat(scales)
    # Blocks would begin inside another's.
    rows = [scales_of_rows(scale, weight.shape[0]) for weight, scale in given]
    return torch.cat(int8), torch.cat([scale.t() for scale in rows], 1).t()


def _rows_or_tensor(x: Tensor | Normed) -> Tensor | ops.Rows:
    """What an int8 product takes: rows straight from the norm where that can be."""
    rows = x.rows() if isinstance(x, Normed) else None
    return tensor_of(x) if rows is None else rows
