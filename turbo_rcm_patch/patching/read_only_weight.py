"""A weight that was computed for one reader: it refuses writes, which would be lost."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from turbo_rcm_patch.errors import DroppedWeightError


class ReadOnlyWeight(Tensor):
    """The weight of an `Int8Linear`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__set__":  # as of `data`, which is no operation
            cls._refuse("an assignment to")
        if name == "numpy":  # torch has none for subclasses
            args = (args[0].clone(), *args[1:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, schema = kwargs or {}, func._schema
        names = [argument.name for argument in schema.arguments]
        values = dict(zip(names, args, strict=False)) | kwargs
        for argument in schema.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            tensors = tree_leaves(values.get(argument.name))
            if (written or func.namespace == "c10d") and any(isinstance(x, cls) for x in tensors):
                cls._refuse(f"{func} of")
        with torch._C._DisableTorchDispatch():
            result = func(*args, **kwargs)
        if not any(returned.alias_info for returned in schema.returns):
            return result
        return tree_map_only(Tensor, lambda x: torch.Tensor._make_subclass(cls, x), result)

    @classmethod
    def _refuse(cls, what: str) -> None:
        raise DroppedWeightError(
            f"{what} the weight of an Int8Linear",
            expected="a Linear with a weight to write into",
            got="one with int8 alone",
            remedy="Fuse adapters before the weights are dropped, or leave them unfused: they are "
            "added to what the Linear returns",
        )
