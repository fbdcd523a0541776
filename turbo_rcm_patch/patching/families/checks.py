"""Checks of a model before it changes: does it have the layout that its family knows, and do the
kernels take its heads and dtypes?
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from turbo_rcm_patch.errors import DTypeError, FamilyError, ShapeError
from turbo_rcm_patch.ops.spec import MAX_HEAD_DIM
from turbo_rcm_patch.patching.plain import FLOATS, bare


def check_parameters(expected: Mapping[Callable[..., Any], tuple[str, ...]], package: str) -> None:
    """Compare the parameters of functions with the names that a family knows, in order.

    Raises:
        FamilyError: A function takes other parameters.
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
        if type(linear) is nn.Linear and bare(linear) and linear.weight.dtype not in FLOATS:
            plain = type(linear.weight) is nn.Parameter
            if plain and linear.weight.dtype.is_floating_point and linear.weight.itemsize > 1:
                raise DTypeError(
                    f"{path}.{name}.weight",
                    expected="bfloat16, float16 or float32",
                    got=str(linear.weight.dtype),
                    remedy="Cast the model first, e.g. model.to(torch.bfloat16)",
                )
