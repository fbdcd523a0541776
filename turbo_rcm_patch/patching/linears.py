"""The Linears of a block: in int8 where that was asked for, elsewhere as their authors made them.

Only a plain Linear is quantised, which is asked on every forward: one with a LoRA, a hook or a
quantised weight is called. So is one whose parameters want a gradient now, because an int8 weight
has none to give.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turbo_rcm_patch import ops
from turbo_rcm_patch.config import Impl, PatchConfig
from turbo_rcm_patch.ops.elementwise import skip_norm
from turbo_rcm_patch.ops.int8_linear import Activation, rows_linear_forward
from turbo_rcm_patch.ops.int8_linear import linear_forward as int8_forward
from turbo_rcm_patch.ops.operation import Step
from turbo_rcm_patch.ops.projection import closes_apart, project_forward, skip_forward
from turbo_rcm_patch.ops.quantize import stacked_rows, unpadded
from turbo_rcm_patch.ops.streams import project_streams, skip_both, skip_norm_both
from turbo_rcm_patch.patching.author import call
from turbo_rcm_patch.patching.blocks import plain_dropout
from turbo_rcm_patch.patching.copies import Copies, stacked_bias
from turbo_rcm_patch.patching.int8_linear import Int8Linear, weight_dtype
from turbo_rcm_patch.patching.int8_weights import held_int8
from turbo_rcm_patch.patching.plain import plain_linear, weight_is_known, why_not_plain
from turbo_rcm_patch.patching.plan import Token, after_call
from turbo_rcm_patch.patching.state import PairState
from turbo_rcm_patch.skip import Cast, Coefficient, SkipPair

#: An activation [B, N, K], or int8 rows of it: `ops.Rows`, or a plain pair of the same.
Input = Tensor | tuple[Tensor, Tensor]


def runs_int8(module: nn.Module, x: Tensor, *, recomputed: bool = False) -> bool:
    """Whether `module(x)` may run in int8 now.

    Args:
        module: Any module.
        x: Its input, or like it.
        recomputed: Whether this forward will be recomputed with gradients (reentrant
            checkpointing), and must give the same then.
    """
    if x.dim() != 3:
        return False
    linear: Any = module
    if not weight_is_known(linear, x):
        return False
    if not torch.compiler.is_compiling() and _made_in_inference_mode(linear):
        return False
    if linear.in_features > ops.MAX_CHANNELS:
        return False
    if not (recomputed or torch.is_grad_enabled()):
        return True
    return not any(p.requires_grad for p in linear._parameters.values() if p is not None)


def why_not_int8(module: nn.Module) -> str:
    """Why a Linear does not run in int8, or "" if it does; for the report."""
    why = why_not_plain(module)
    if why:
        return why
    linear: Any = module
    if linear.in_features > ops.MAX_CHANNELS:
        return f"its {linear.in_features} channels overflow an int32 sum"
    if not _made_in_inference_mode(linear):
        return ""
    which = "weight" if linear.weight.is_inference() else "bias"
    return f"its {which} was made in inference mode"


def _made_in_inference_mode(linear: Any) -> bool:
    """Whether an int8 copy could become stale unseen: such tensors do not count their changes."""
    return type(linear) is not Int8Linear and any(
        p.is_inference() for p in linear._parameters.values() if p is not None
    )


#: Standard deviation of an attention's logits from which its q, k and v stay in 16 bits. int8
#: Linears put an error of 1.5 % into q k^T, so of 5 % into the probabilities there.
PEAKED: Final = 3.5


def logit_spread(norms: Sequence[Any], head_dim: int) -> float | None:
    """The standard deviation that the norms of q and k give an attention's logits, where what they
    normalise is independent: that of the heads in the mean square.

    Args:
        norms: Of q and of k, with a weight [H*D] or [D], or None for 1.
        head_dim: D.

    Returns:
        None where there are no such norms, or their weights cannot be read here.
    """
    product: Tensor | float = 1.0
    for norm in norms:
        held: Any = getattr(norm, "_parameters", {})
        if "weight" not in held:
            return None
        weight = held["weight"]
        if weight is None:
            continue
        if type(weight.data) is not Tensor or weight.is_meta or weight.numel() % head_dim:
            return None  # a shard, or not there
        by_head = weight.detach().float().view(-1, head_dim)
        product = product * by_head.square()
    if isinstance(product, float):
        return 1.0
    spread = float(product.sum(1).mean().div(head_dim).sqrt())
    return spread if math.isfinite(spread) else None


def pair_state(
    pair: SkipPair,
    linears: Mapping[str, nn.Module],
    config: PatchConfig,
    *,
    norms: Sequence[Any] = (),
    close: str = "",
) -> PairState:
    """The state of a pair, which says what becomes of its Linears.

    With `linear="int8"` the inputs of a peaked attention stay in 16 bits, unless somebody else
    quantised one of them.

    Args:
        pair: The pair as it runs.
        linears: The Linears that its fused form runs itself, by name.
        config: How the model is patched.
        norms: Of an attention's q and k.
        close: The name of its output projection.
    """
    auto = config.chooses and pair.kind != "feed-forward"
    narrow = config.pv in ("auto", "fp8")
    if config.linear == "as-is" or pair.runs == "as-written":
        held = [name for name, module in linears.items() if type(module) is Int8Linear]
        if held and pair.runs != "as-written":
            why_called = f"{', '.join(held)} called: multiplied back from int8"
            pair = replace(pair, reason="; ".join(filter(None, [pair.reason, why_called])))
        return PairState(pair, auto=auto, narrow=narrow)
    why = {name: why_not_int8(module) for name, module in linears.items()}
    inputs = {name: module for name, module in linears.items() if name != close}
    wide: list[str] = []
    if config.linear == "int8" and norms and not any(map(_brings_int8, inputs.values())):
        spread = logit_spread(norms, pair.head_dim)
        if spread is not None and spread >= PEAKED:
            wide = list(inputs)
    chosen = tuple(name for name, reason in why.items() if not reason and name not in wide)
    left = [f"{name} is not in int8: {reason}" for name, reason in why.items() if reason]
    if wide:
        peaked = f"the norms of q and k spread the logits by {spread:.1f}"
        left.append(f"{', '.join(wide)} in 16 bits: {peaked}")
    reason = "; ".join(filter(None, [pair.reason, *left]))
    state = PairState(
        replace(pair, int8_linears=chosen, reason=reason), int8=True, auto=auto, narrow=narrow
    )
    state.int8_inputs = not wide
    if config.linear == "int8-only":
        state.originals = tuple(
            linears[name] for name in chosen if type(linears[name]) is nn.Linear
        )
    return state


def _brings_int8(module: nn.Module) -> bool:
    """Whether its weight was quantised by somebody else."""
    return type(module) is Int8Linear or held_int8(module) is not None


class Linears:
    """Runs the Linears of one block, with the model's int8 copies of those that run in int8.

    A Linear that brings an int8 weight along (`int8_weights`), or has no other (`int8_linear`),
    runs with that one.
    """

    __slots__ = ("_block", "copies")

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        self._block = copies.add_block()

    def __reduce__(self) -> tuple[type[Linears], tuple[Copies]]:
        return Linears, (self.copies,)

    def forget(self, key: str) -> None:
        """Drop the int8 weights of a key, or of a branch: they are not used any more."""
        if not torch.compiler.is_compiling():
            self.copies.forget((self._block, key))

    def weights(
        self, token: Token, key: str, modules: Sequence[Any]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The int8 weight of some plain Linears over one input, its scales and the bias.

        Args:
            token: See `plan.signature`.
            key: A name for these modules within the block.
            modules: The Linears.
        """
        if type(modules[0]) is Int8Linear:  # Which is alone, see `_together`.
            return *modules[0].int8, modules[0].bias
        # Nothing is kept in a graph, and none of it is to know the number of its block.
        if token is None and torch.compiler.is_compiling():
            return self.copies.fresh(modules)
        return self.copies.of((self._block, key), modules)


class FreshLinears(Linears):
    """Quantises weights anew on every call, because it is given others every time; all on one
    device."""

    __slots__ = ("_launches", "_quantize")

    def __init__(self, copies: Copies) -> None:
        super().__init__(copies)
        self._quantize = Step(stacked_rows)
        self._launches: bool | None = None

    def weights(
        self, token: Token, key: str, modules: Sequence[Any]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        held = [module.weight for module in modules]
        if self._launches is None:
            self._launches = ops.resolve_impl(self.copies.impl, held[0].device) == "triton"
        if token is None or not self._launches:
            return self.copies.fresh(modules, brought=False)
        rows, scale = self._quantize((token, key), *held)
        return unpadded(rows, held[0].shape[1]), scale[0], stacked_bias(modules)


class Rounding(NamedTuple):
    """Where the residual stream of a block is wider than the model's dtype.

    Attributes:
        model: The model's dtype: of everything but the stream, and of the stream for whatever is
            called or runs as its author wrote it.
        out: Of the stream behind a branch.
        cast: How the skip is summed: in fp32, unless the stream is in the model's dtype on both
            sides.
    """

    model: torch.dtype
    out: torch.dtype
    cast: Cast


#: What a norm takes beside the residual stream, for the pass that closes the skip before it:
#: factor, offset, the number added to the factor and epsilon (of two streams both factors, both
#: offsets, and the norm's weight and bias); the gate of the branch behind it, None for 1; its
#: dtype, None for the stream's and int8 for int8 rows.
Terms = tuple[tuple[Any, ...], Any, torch.dtype | None]


def rounded(hidden: Any, rounding: Rounding | None) -> Any:
    """A residual stream, or one tensor each of several, as the author's code would hold it."""
    if rounding is None:
        return hidden
    if isinstance(hidden, Tensor):
        return hidden.to(rounding.model)
    if all([stream.dtype == rounding.model for stream in hidden]):
        return hidden
    return tuple([stream.to(rounding.model) for stream in hidden])


def holder(module: Any) -> dict[str, Any]:
    """Where a module keeps its weight and bias: a look there costs less than an attribute, and
    sees a tensor that was replaced."""
    held: dict[str, Any] = module._parameters
    return held if "weight" in held else module._buffers


def held_by(*held: dict[str, Any]) -> list[Tensor | None]:
    """Weight and bias, None without one, in each of what `holder` gives."""
    return [own.get(name) for own in held for name in ("weight", "bias")]


def tensors_of(*held: dict[str, Any] | None) -> list[Tensor]:
    """The weights and biases in some of what `holder` gives."""
    pairs = [(own.get("weight"), own.get("bias")) for own in held if own is not None]
    return [x for pair in pairs for x in pair if x is not None]


def _together(modules: Sequence[Any]) -> list[list[int]]:
    """The places of Linears over one input that are one product: a copy may be of several, and
    what is there already is multiplied as it is."""
    places = range(len(modules))
    copied = [i for i in places if type(modules[i]) is not Int8Linear]
    alone = [[i] for i in places if type(modules[i]) is Int8Linear]
    return [copied, *alone] if copied else alone


class Projection:
    """Linears over one input: their weights are read where they are plain, as one int8 product
    where that is wanted, and what is not plain is called.

    Args:
        linears: Keeps the int8 copies of the block's weights.
        key: A name for these modules within the block.
        modules: Linears, or whatever stands in their places.
        like: Of the dtype and on the device of the input [B, N, K].
        dtype: Of the result.
        int8: Whether int8 is wanted.
        activation: In the epilogue of an int8 product.
        recomputed: See `runs_int8`.
    """

    __slots__ = ("_activation", "_chosen", "_dtype", "_impl", "_key", "_linears", "_modules",
                 "_steps", "_together", "_weights", "_widths", "int8", "plain")  # fmt: skip

    def __init__(
        self,
        linears: Linears,
        key: str,
        modules: Sequence[Any],
        like: Tensor,
        dtype: torch.dtype,
        *,
        int8: bool,
        activation: Activation | None = None,
        recomputed: bool = False,
    ) -> None:
        self._linears, self._key, self._modules = linears, key, modules
        self._chosen = [m for m in modules if int8 and runs_int8(m, like, recomputed=recomputed)]
        if not self._chosen:
            linears.forget(key)
        self._activation, self._dtype, self._impl = activation, dtype, linears.copies.impl
        self._together = _together(self._chosen)
        #: Whether int8 products are all of it, so that the input may come as int8 rows.
        self.int8 = len(self._chosen) == len(modules)
        readable = [plain_linear(module, like) for module in modules]
        #: Whether nothing has to be called.
        self.plain = self.int8 or (all(readable) and not self._chosen)
        self._weights = [
            module._parameters if read else None
            for module, read in zip(modules, readable, strict=True)
        ]
        self._widths = [getattr(module, "out_features", -1) for module in modules]
        self._steps = [(Step(int8_forward), Step(rows_linear_forward)) for _ in self._together]

    @property
    def read(self) -> list[Tensor]:
        """The tensors of int8 weights without an original, which a kernel reads."""
        return [x for m in self._chosen if type(m) is Int8Linear for x in m.parameters()]

    @property
    def readable(self) -> bool:
        """Whether nothing has to be called and every module has a weight to be read."""
        return self.plain and all(
            [own is not None and own.get("weight") is not None for own in self._weights]
        )

    @property
    def held(self) -> list[Tensor | None]:
        """Weight and bias of each module, where nothing has to be called."""
        return held_by(*[own for own in self._weights if own is not None])

    def __call__(self, token: Token, x: Input, like: Tensor) -> tuple[Sequence[Tensor], Token]:
        """What each module makes of x, and the token behind them.

        Args:
            token: See `plan.signature`.
            x: [B, N, K], or int8 rows of it.
            like: Of the device and batch of the result.
        """
        chosen: list[Any] = self._chosen
        parts: Sequence[Tensor] = ()
        if chosen:
            linears, impl, dtype = self._linears, self._impl, self._dtype
            ours = token if self.int8 else None
            made: list[Any] = [None] * len(chosen)
            # By place: a compiler cannot share a graph that knows modules by their ids.
            for (step, on_rows), places in zip(self._steps, self._together, strict=True):
                modules = [chosen[i] for i in places]
                weight, scale, bias = linears.weights(ours, self._key, modules)
                if ours is None:
                    y = ops.int8_linear(
                        x if isinstance(x, Tensor) else ops.Rows(*x), weight, scale, bias,
                        activation=self._activation, impl=impl, out_dtype=dtype,
                    )  # fmt: skip
                else:
                    # An int8 weight that a checkpoint brought along has scales of another shape.
                    step_token = (ours, scale.shape, scale.stride())
                    rest = (
                        weight, scale, bias, None, None, None, 1.0, 1.0, self._activation or "",
                        "fp32", impl, dtype,
                    )  # fmt: skip
                    if isinstance(x, Tensor):
                        y = step(step_token, x, *rest)
                    else:
                        y = on_rows(step_token, *x, *rest)
                each: Sequence[Tensor] = (y,)
                if len(modules) > 1:
                    each = torch.split(y, [module.out_features for module in modules], -1)
                for i, part in zip(places, each, strict=True):
                    made[i] = part
            parts = made
            if self.int8:
                return parts, token
        assert isinstance(x, Tensor)
        if token is not None and self.plain:
            return [F.linear(x, w["weight"], w["bias"]) for w in self._weights if w], token
        products = iter(parts)
        outputs: list[Tensor] = []
        for module, own in zip(self._modules, self._weights, strict=True):
            if any([module is c for c in chosen]):
                outputs.append(next(products))
            elif token is not None and own is not None:
                outputs.append(F.linear(x, own["weight"], own["bias"]))
            else:
                outputs.append(call(module, x))
        return outputs, after_call(token, like, self._dtype, outputs, self._widths, x.shape[1])


class Close:
    """residual + c_out * linear(x), where dropouts may follow the Linear.

    Args:
        linears: Keeps the int8 copies of the block's weights.
        key: A name for the Linear within the block.
        modules: The Linear, or whatever stands in its place, and the dropouts.
        like: Of the dtype and on the device of x [B, N, K].
        int8: Whether int8 is wanted.
        cast: Of the skip.
        impl: "triton", "reference" or "auto".
        rounding: Where the residual stream is wider than the model's dtype; None for nowhere.
    """

    __slots__ = ("_apart", "_key", "_linear", "_linears", "_modules", "_rounding", "_step",
                 "_skip", "_then", "_weights", "_with_norm", "cast", "impl", "int8", "out_dtype",
                 "plain")  # fmt: skip

    def __init__(
        self,
        linears: Linears,
        key: str,
        modules: Sequence[Any],
        like: Tensor,
        *,
        int8: bool,
        cast: Cast,
        impl: Impl,
        rounding: Rounding | None = None,
    ) -> None:
        linear, *dropouts = modules
        self._linears, self._key = linears, key
        self._linear, self._modules = (linear,), (linear, *dropouts)
        between = all(map(plain_dropout, dropouts))
        self.int8 = between and int8 and runs_int8(linear, like, recomputed=like.requires_grad)
        if not self.int8:
            linears.forget(key)
        #: Whether the weight can be read.
        self.plain = self.int8 or (between and plain_linear(linear, like))
        self._weights = linear._parameters
        self.cast, self.impl = cast if rounding is None else rounding.cast, impl
        self._rounding = rounding
        #: Of the residual stream behind the skip, where somebody chose it.
        self.out_dtype = None if rounding is None else rounding.out
        #: Whether the library computes the product, of which there is nothing to replay.
        tracing = torch.compiler.is_compiling()
        self._apart = self.plain and not (self.int8 or tracing) and closes_apart(like, impl)
        self._step = Step(int8_forward if self.int8 else project_forward)
        self._skip = Step(skip_forward)
        #: The norm behind the skip, where both can be one pass.
        self._then: Any = None
        self._with_norm = Step(skip_norm)

    def precede(self, norm: Any) -> bool:
        """Whether the skip and a norm (`branches.Norm`) run in one pass from now on, so that the
        residual stream is written and not read again."""
        if self._is_a_pass and norm.joins:
            self._then = norm
        return self._then is not None

    @property
    def _is_a_pass(self) -> bool:
        """Whether a plan closes the skip in a pass of its own."""
        return self._apart or not self.plain

    @property
    def read(self) -> list[Tensor]:
        """The tensors that a kernel reads."""
        if self.int8:
            linear = self._linear[0]
            return list(linear.parameters()) if type(linear) is Int8Linear else []
        return tensors_of(self._weights) if self.plain else []

    @property
    def readable(self) -> bool:
        """Whether there is a weight to be read: not where int8 weights are all there is."""
        return self.plain and self._weights.get("weight") is not None

    @property
    def weight(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias, to be read."""
        return self._weights["weight"], self._weights["bias"]

    def __call__(
        self,
        token: Token,
        x: Tensor,
        residual: Tensor,
        c_out: Coefficient | None,
        c_skip: Coefficient = 1.0,
        given: Any = None,
    ) -> Tensor:
        """c_skip * residual + c_out * linear(x); a c_out of None is 1.

        Args:
            token: See `plan.signature`.
            x: [B, N, K].
            residual: [B, N, C].
            c_out: Float or tensor [B], [B, 1, C] or [B, N, C].
            c_skip: Likewise.
            given: What the block gets (`branches.Given`), where a norm may run in the same pass.
        """
        dtype, cast, impl, branch = self.out_dtype or x.dtype, self.cast, self.impl, None
        if not self.plain or (token is None and x.dtype != weight_dtype(self._modules[0])):
            branch = self._called(x)
            width, tokens = residual.shape[2], residual.shape[1]
            token = after_call(token, residual, x.dtype, (branch,), (width,), tokens)
            if token is None:
                return ops.skip(
                    residual, branch, c_skip, 1.0 if c_out is None else c_out, cast=cast,
                    impl=impl, out_dtype=self.out_dtype,
                )  # fmt: skip
        elif self.int8:
            weight, scale, bias = self._linears.weights(token, self._key, self._linear)
            if token is not None:
                token = (token, scale.shape, scale.stride())
                closed: Tensor = self._step(
                    token, x, weight, scale, bias, residual, None, c_out, 1.0, 1.0, "", cast,
                    self._linears.copies.impl, dtype,
                )  # fmt: skip
                return closed
            return ops.int8_linear(
                x, weight, scale, bias, residual=residual, c_skip=c_skip,
                c_out=1.0 if c_out is None else c_out, cast=cast, impl=self._linears.copies.impl,
                out_dtype=dtype,
            )  # fmt: skip
        else:
            weight, bias = self._weights["weight"], self._weights["bias"]
            if token is None:
                return ops.project_skip(
                    x, weight, bias, residual=residual, c_skip=c_skip,
                    c_out=1.0 if c_out is None else c_out, cast=cast, impl=impl, out_dtype=dtype,
                )  # fmt: skip
            if not self._apart:
                closed = self._step(
                    token, x, weight, bias, residual, None, c_out, 1.0, 1.0, cast, impl, dtype
                )
                return closed
            branch = F.linear(x, weight, bias)
        then = self._then
        if then is None or given.ahead is None:
            closed = self._skip(token, residual, branch, None, c_out, 1.0, 1.0, cast, impl, dtype)
            return closed
        numbers, gate, model = then.terms(given)
        closed, normed = self._with_norm(
            token, residual, branch, c_out, *numbers, cast, impl, dtype, model or dtype
        )
        given.ahead[then] = normed, gate
        return closed

    def _called(self, x: Tensor) -> Tensor:
        for module in self._modules:
            x = call(module, x)
        return x


class StreamsClose(Close):
    """The same for several residual streams, whose rows follow each other in x."""

    __slots__ = ("_close_both", "_skip_both")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._close_both, self._skip_both = Step(_project_two), Step(skip_both)
        self._with_norm = Step(skip_norm_both)

    @property
    def _is_a_pass(self) -> bool:
        return super()._is_a_pass or self.int8

    def __call__(  # type: ignore[override]
        self,
        token: Token,
        x: Tensor,
        streams: tuple[Tensor, ...],
        gates: tuple[Tensor, ...],
        given: Any = None,
    ) -> tuple[Tensor, ...]:
        """stream + gate * (its rows of linear(x)) for each stream."""
        dtype = self.out_dtype or x.dtype
        one_dtype = _one_dtype(x, streams, gates, self._rounding)
        if not self.plain or (token is None and x.dtype != weight_dtype(self._modules[0])):
            branch, (*_, width) = self._called(x), streams[1].shape
            token = after_call(token, streams[1], x.dtype, (branch,), (width,), x.shape[1])
        elif self.int8:
            weight, scale, bias = self._linears.weights(token, self._key, self._linear)
            impl = self._linears.copies.impl
            if token is None:
                branch = ops.int8_linear(x, weight, scale, bias, impl=impl, out_dtype=x.dtype)
            else:
                branch = self._step(
                    (token, scale.shape, scale.stride()), x, weight, scale, bias, None, None, None,
                    1.0, 1.0, "", "fp32", impl, x.dtype,
                )  # fmt: skip
        else:
            weight, bias = self.weight
            if token is not None and self._apart:
                branch = F.linear(x, weight, bias)
            elif token is not None and one_dtype:
                both: tuple[Tensor, ...] = self._close_both(
                    token, x, weight, bias, *streams, *gates, self.cast, self.impl, dtype
                )
                return both
            elif one_dtype:
                return ops.project_skip_streams(
                    x, weight, bias, residuals=streams, c_out=gates, cast=self.cast,
                    impl=self.impl, out_dtype=dtype,
                )  # fmt: skip
            else:
                branch = ops.project_skip(x, weight, bias, residual=None, impl=self.impl)
        if token is not None and one_dtype:
            then = self._then
            if then is not None and given is not None and given.ahead is not None:
                numbers, next_gates, model = then.terms(given)
                if next_gates[0].dtype == x.dtype:  # Else torch will promote the streams.
                    first, second, normed = self._with_norm(
                        token, branch, *streams, *gates, *numbers, self.cast, self.impl, dtype,
                        model or dtype,
                    )  # fmt: skip
                    given.ahead[then] = normed, next_gates
                    return first, second
            closed: tuple[Tensor, ...] = self._skip_both(
                token, branch, *streams, *gates, self.cast, self.impl, dtype
            )
            return closed
        parts = torch.split(branch, [stream.shape[1] for stream in streams], dim=1)
        return skip_streams(
            parts, streams, gates, cast=self.cast, impl=self.impl, rounding=self._rounding
        )


def skip_streams(
    parts: Sequence[Tensor],
    streams: tuple[Tensor, ...],
    gates: tuple[Tensor, ...],
    *,
    cast: Cast,
    impl: Impl,
    rounding: Rounding | None,
) -> tuple[Tensor, ...]:
    """stream + gate * part for each stream: a pass each, or the author's sum where torch would
    promote one of them."""
    if not _one_dtype(parts[0], streams, gates, rounding):
        streams = rounded(streams, rounding)
        return tuple([x + g * y for x, y, g in zip(streams, parts, gates, strict=True)])
    out_dtype = None if rounding is None else rounding.out
    return tuple(
        [
            ops.skip(x, y, 1.0, g, cast=cast, impl=impl, out_dtype=out_dtype)
            for x, y, g in zip(streams, parts, gates, strict=True)
        ]
    )


def _one_dtype(
    x: Tensor,
    streams: tuple[Tensor, ...],
    gates: tuple[Tensor, ...],
    rounding: Rounding | None,
) -> bool:
    """Whether the author's sum is in one dtype throughout."""
    others = (*streams, *gates) if rounding is None else gates
    return all([other.dtype == x.dtype for other in others])


def _project_two(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    first: Tensor,
    second: Tensor,
    first_gate: Tensor,
    second_gate: Tensor,
    cast: str,
    impl: str,
    out_dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """`project_skip_streams` of two streams with flat arguments, as `Step` takes them."""
    return tuple(
        project_streams.body(
            x, weight, bias, [first, second], [first_gate, second_gate], cast, impl, out_dtype
        )
    )
