"""The functions that families share: checks of a model before it changes, and the skip pairs of a
block for the report.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from turbo_rcm_patch.config import Kind
from turbo_rcm_patch.errors import DTypeError, FamilyError, ShapeError
from turbo_rcm_patch.ops.attention.spec import MAX_HEAD_DIM
from turbo_rcm_patch.patching.block import LEVEL_DESCRIPTIONS, Level, PatchedBlock
from turbo_rcm_patch.patching.plain import (
    FLOATS,
    original_class,
    root_package,
    runs_only_its_forward,
)
from turbo_rcm_patch.patching.vae import PatchedCoder
from turbo_rcm_patch.skip import Cast, Residual, SkipPair, Stream


def check_parameters(expected: Mapping[Callable[..., Any], tuple[str, ...]], package: str) -> None:
    """Compare the parameters of functions with the names that a family knows, in order.

    A function of another package than the author's replaced it, and is called wherever it stands.

    Raises:
        FamilyError: A function takes other parameters.
    """
    for function, names in expected.items():
        file = str(getattr(function, "__globals__", {}).get("__name__"))
        if package in sys.modules and file.partition(".")[0] != package:
            continue
        actual = tuple(inspect.signature(function).parameters)
        if actual != names:
            raise FamilyError(
                getattr(function, "__qualname__", repr(function)),
                expected=f"({', '.join(names)})",
                got=f"({', '.join(actual)})",
                remedy=f"Install a version of {package} that this release supports",
            )


def check_coders(
    vae: nn.Module, coders: Sequence[type[PatchedCoder]], *callers: tuple[str, ...]
) -> None:
    """Compare the parameters of a VAE's functions with those that a family knows. Others may
    follow, with defaults.

    Args:
        vae: The VAE.
        coders: What replaces its functions.
        *callers: The first parameters of these functions.

    Raises:
        FamilyError: A function takes other parameters.
    """
    cls = original_class(vae)
    first = dict(zip([getattr(cls, coder.caller) for coder in coders], callers, strict=True))
    for inside in {original_class(module) for module in vae.modules()}:
        if inside.__name__ in coders[0].forwards and root_package(inside) == root_package(cls):
            first[inside.forward] = coders[0].forwards[inside.__name__]
    expected = {}
    for function, names in first.items():
        more = [*inspect.signature(function).parameters.values()][len(names) :]
        expected[function] = (
            *names,
            *(each.name for each in more if each.default is not each.empty),
        )
    check_parameters(expected, root_package(cls))


def check_attention(path: str, head_dim: int, linears: Mapping[str, Any]) -> None:
    """Raise if the kernels do not take the heads of an attention or the dtype of its Linears.

    Raises:
        ShapeError: The head dimension is odd or too large.
        DTypeError: A plain Linear computes in a dtype that no kernel takes.
    """
    if head_dim > MAX_HEAD_DIM or head_dim % 2:
        raise ShapeError(
            f"{path}: head_dim",
            expected=f"an even number up to {MAX_HEAD_DIM}",
            got=str(head_dim),
            remedy="This model cannot run through the fused attention",
        )
    for name, linear in linears.items():
        if type(linear) is not nn.Linear or not runs_only_its_forward(linear):
            continue
        weight = linear.weight
        plain = type(weight) is nn.Parameter and weight.dtype.is_floating_point
        if plain and weight.dtype not in FLOATS:
            raise DTypeError(
                f"{path}.{name}.weight",
                expected="bfloat16, float16 or float32",
                got=str(weight.dtype),
                remedy="Cast the model first, e.g. model.to(torch.bfloat16)"
                + (", or enable_layerwise_casting" if weight.itemsize == 1 else ""),
            )


# --- for the report ------------------------------------------------------------------------------


def branch_pair(
    block: PatchedBlock,
    name: str,
    kind: Kind,
    why: str,
    *streams: Stream,
    cast: Cast = "fp32",
    heads: bool = True,
) -> SkipPair:
    """Describe a branch that ends in a projection, and how it runs.

    Args:
        block: The patched block.
        name: Name of the branch in the block, "" for the block itself.
        kind: Kind of the branch.
        why: Why the author's forward runs, or "".
        *streams: Residual streams of the branch; one without a gate by default.
        cast: Cast policy of the author's skip.
        heads: True if the branch is an attention.
    """
    reasons = [why or LEVEL_DESCRIPTIONS.get(block.level, ""), block.reason]
    runs: Residual = "two-launch"
    if why or block.level == Level.ORIGINAL:
        runs = "as-written"
    elif block.config.form == "one-launch" and kind == "self" and not block.level:
        runs = "one-launch"
    return SkipPair(
        path=f"{block.path}.{name}".strip(".") or type(block.block).__name__,
        kind=kind,
        heads=block.spec.heads if heads else 0,
        head_dim=block.head_dim if heads else 0,
        streams=streams or (Stream("video", "1", "1"),),
        cast=cast,
        projection=True,
        runs=runs,
        reason="; ".join(filter(None, reasons)),
        int8_linears=() if runs == "as-written" else _int8(block, name),
    )


def inner_pair(pair: SkipPair, path: str, stream: str, kind: Kind = "self") -> SkipPair:
    """Describe the sum of two attentions before their shared projection.

    Args:
        pair: Pair of the branch that contains the sum.
        path: Path of the new pair.
        stream: Name of the summand that is the residual.
        kind: Kind of the new pair.
    """
    runs: Residual = "as-written" if pair.runs == "as-written" else "in-kernel"
    return replace(
        pair, path=path, kind=kind, streams=(Stream(stream, "1", "1"),), projection=False,
        runs=runs, int8_linears=(),
    )  # fmt: skip


def block_pairs(
    block: PatchedBlock,
    names: tuple[str, str, str],
    gates: tuple[Stream, Stream],
    cast: Cast,
    *,
    proj_l: str,
    image: bool,
) -> list[SkipPair]:
    """Describe the branches of a block of Wan.

    Args:
        block: The patched block.
        names: Its self-attention, cross-attention and feed-forward.
        gates: The streams of self-attention and feed-forward.
        cast: Cast policy of these two.
        proj_l: Name of the linear attention that is added to a sparse one, or "".
        image: True if the attention to an image is added to that to the text.
    """
    why = block.why_block()
    pairs = [branch_pair(block, names[0], "self", why, gates[0], cast=cast)]
    if proj_l:
        path, stream = f"{pairs[0].path}.{proj_l}", "proj_l of the linear attention"
        pairs.append(inner_pair(pairs[0], path, stream))
    cross = branch_pair(block, names[1], "cross", why, cast="model")
    pairs.append(cross)
    if image:
        pairs.append(inner_pair(cross, f"{cross.path}.image", "text attention", "image"))
    last = branch_pair(block, names[2], "feed-forward", why, gates[1], cast=cast, heads=False)
    return [*pairs, last]


def pairs_between_blocks(model: Any, path: str, name: str, c_out: str) -> list[SkipPair]:
    """Describe attentions, to a face for instance, that run between two blocks.

    Args:
        model: The model.
        path: Its path.
        name: Name of their list in the model, which may have none.
        c_out: Their gate.
    """
    return [
        SkipPair(
            path=f"{path}.{name}.{index}".lstrip("."), kind="cross", heads=attn.heads,
            head_dim=attn.to_q.out_features // attn.heads, streams=(Stream("video", "1", c_out),),
            projection=True,
            reason="the model's own forward adds it between two blocks",
        )
        for index, attn in enumerate(getattr(model, name, ()))
    ]  # fmt: skip


def _int8(block: PatchedBlock, name: str) -> tuple[str, ...]:
    """Return the names of a branch's Linears that run in int8."""
    paths = [path for path in block.int8_linears() if not name or path.startswith(f"{name}.")]
    return tuple(path.removeprefix(f"{name}.") for path in paths)
