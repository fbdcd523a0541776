"""What every family asks of a transformer block, whatever its classes."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from turbo_rcm_patch.config import Kind, PatchConfig
from turbo_rcm_patch.errors import ContextParallelError, DTypeError, FamilyError, ShapeError
from turbo_rcm_patch.ops.modes import is_capturing
from turbo_rcm_patch.ops.spec import MAX_HEAD_DIM
from turbo_rcm_patch.patching.int8_linear import weight_dtype
from turbo_rcm_patch.patching.plain import autocasting, bare, unserved, why_not_plain
from turbo_rcm_patch.patching.registry import author_class
from turbo_rcm_patch.patching.state import PairState
from turbo_rcm_patch.skip import Residual

_FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)

#: What may run now: ours in the place of a branch, the skip after it, or nothing of ours.
Mode = Literal["ours", "called", "as-written"]
_MODES: Final[dict[Mode, str]] = {
    "ours": "fused",
    "called": "fused after a module that was called",
    "as-written": "as written",
}


#: What pairs say of a forward under autocast.
AUTOCAST: Final = "as written because of autocast"
_AUTOCAST: Final = (
    "autocast is on, so the patched blocks run as their authors wrote them and nothing is fused; "
    "cast the model instead, e.g. model.to(torch.bfloat16), and run it without autocast"
)
_log = logging.getLogger(__name__)


def may_run(x: Tensor, states: Iterable[PairState], warned: set[str] | None) -> bool:
    """Whether ours may run: not under autocast, which ours would not follow, and not where
    `unserved` says so; the pairs say that.

    Args:
        x: An input of the block.
        states: The pairs of the block.
        warned: What the model was warned about; None for blocks after its first.
    """
    if not unserved(x):
        return True
    autocast = autocasting(x)
    for state in states:
        state.note(AUTOCAST if autocast else "as written")
    if warned is not None and autocast:
        warn_once(warned, _AUTOCAST)
    return False


def warn_once(warned: set[str], message: str) -> None:
    """Log a warning, the first time; never in a compiled graph."""
    if not torch.compiler.is_compiling() and message not in warned:
        warned.add(message)
        _log.warning(message)


def note_mode(state: PairState | None, mode: Mode) -> None:
    """Say how a pair without an attention of ours runs on this forward."""
    if state is not None:
        state.note(_MODES[mode])


def distinct(modules: Iterable[nn.Module]) -> Iterator[tuple[int, Any]]:
    """Index and module, each module once: one that a model uses twice is one block, as for
    `parameters()`, and is patched once."""
    seen: set[int] = set()
    for index, module in enumerate(modules):
        if id(module) not in seen:
            seen.add(id(module))
            yield index, module


def known_inside(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> tuple[str, Any]:
    """The block in what stands in the list of blocks: itself, or what somebody wrapped (torch's
    activation checkpointing, a compiled module), and its path from there."""
    for name, inner in module.named_modules():
        if author_class(inner) in classes:
            return name.replace("_orig_mod", "").strip("."), inner
    return "", module


def same_batch(x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
    """Both with one batch size: where one has a single sample, it is every sample's.

    Args:
        x: [B or 1, N, C].
        context: [B or 1, T, C].
    """
    if x.shape[0] == context.shape[0]:
        return x, context
    if context.shape[0] == 1:
        return x, context.expand(x.shape[0], -1, -1)
    return (x.expand(context.shape[0], -1, -1) if x.shape[0] == 1 else x), context


def refuse_parallel(path: str, holder: object) -> None:
    """Raise if a model or a processor is parallel in a way that is not known here."""
    config = getattr(holder, "_parallel_config", None)
    if config is not None and getattr(config, "context_parallel_config", None) is None:
        raise ContextParallelError(
            path,
            expected="a sequence split by a ContextParallelConfig, or no parallelism",
            got=f"{type(config).__name__} without one",
            remedy="Run the patched model without it",
        )


def check_parameters(expected: Mapping[Callable[..., Any], tuple[str, ...]], package: str) -> None:
    """Compare parameter names, in order.

    Args:
        expected: Function -> the names of its parameters.
        package: The package they come from, for the message.

    Raises:
        FamilyError: A function takes other parameters than the family knows.
    """
    for function, names in expected.items():
        found = tuple(inspect.signature(function).parameters)
        if found != names:
            raise FamilyError(
                getattr(function, "__qualname__", repr(function)),
                expected=f"({', '.join(names)})",
                got=f"({', '.join(found)})",
                remedy=f"Install a version of {package} that this release supports",
            )


def check_head_dim(path: str, head_dim: int) -> None:
    """Raise if the fused attention, with a rotary embedding, has no kernel for it."""
    if head_dim > MAX_HEAD_DIM or head_dim % 2:
        raise ShapeError(
            f"{path}: head_dim",
            expected=f"an even number up to {MAX_HEAD_DIM}",
            got=str(head_dim),
            remedy="This model cannot run through the fused attention",
        )


def check_weights(path: str, linears: Mapping[str, nn.Module]) -> None:
    """Raise if a plain Linear computes in a dtype that no kernel takes.

    What is called can have any storage dtype; only a plain Linear's weight is the compute dtype.
    """
    for name, linear in linears.items():
        if why_not_plain(linear) == "" and weight_dtype(linear) not in _FLOATS:
            raise DTypeError(
                f"{path}.{name}.weight",
                expected="bfloat16, float16 or float32",
                got=str(weight_dtype(linear)),
                remedy="Cast the model first, e.g. model.to(torch.bfloat16)",
            )


def left_by_config(kind: Kind, config: PatchConfig) -> tuple[Residual, str] | None:
    """How a pair runs, and why, if the configuration leaves its kind alone."""
    if kind in config.kinds:
        return None
    return "as-written", f"PatchConfig.kinds leaves out {kind!r}"


class KeptTables:
    """Rotary tables of a forward, made once for all blocks, which are given the same tensors.

    Nothing is kept while a compiler traces, and nothing passes into or out of a CUDA graph that is
    captured. A copy (deepcopy, pickle) starts empty.
    """

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        # What they were made from and what was made, written at once: other threads read it.
        self._kept: (
            tuple[object, bool, list[weakref.ref[Tensor]], tuple[Tensor, Tensor]] | None
        ) = None

    def __reduce__(self) -> tuple[type[KeptTables], tuple[()]]:
        return KeptTables, ()

    def begin(self) -> None:
        """A forward begins: tables of a CUDA graph that was captured are that graph's alone."""
        if self._kept is not None and self._kept[1]:
            self._kept = None

    def of(
        self,
        sources: Sequence[Tensor],
        make: Callable[[], tuple[Tensor, Tensor]],
        facts: object = None,
    ) -> tuple[Tensor, Tensor]:
        """(cos, sin).

        Args:
            sources: What they are made from.
            make: Makes them.
            facts: What decides about them besides.
        """
        # What was made in inference mode has no version, and nothing shows that it changed.
        if torch.compiler.is_compiling() or any([x.is_inference() for x in sources]):
            return make()
        capturing = any([is_capturing(x.device) for x in sources])
        facts, kept = (facts, [x._version for x in sources]), self._kept
        if kept is not None and kept[:2] == (facts, capturing) and _are(kept[2], sources):
            return kept[3]
        made = make()
        self._kept = facts, capturing, list(map(weakref.ref, sources)), made
        return made


def _are(references: Sequence[weakref.ref[Tensor]], tensors: Sequence[Tensor]) -> bool:
    """Whether these references are to these tensors."""
    return len(references) == len(tensors) and all(
        [a() is b for a, b in zip(references, tensors, strict=True)]
    )


def plain_dropout(module: nn.Module) -> bool:
    """Whether a module is a Dropout and nothing else; ask `drops` whether it is active."""
    return type(module) is nn.Dropout and bare(module)
