"""The implementations of an operation that its tests are parametrised over.

- `reference`: plain torch on a CPU;
- `interpreter`: the kernels in Triton's interpreter, on a CPU (see `tests/interpreter.py`);
- `gpu`: the compiled kernels, on a card.

`over` marks the last two `interpreter` and `gpu`, so that `pytest -m` chooses among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

from turbo_rcm_patch.ops import resolve_pv

__all__ = ["GPU", "Implementation", "coefficient", "over"]


class Implementation(NamedTuple):
    """Where a test makes its tensors, and what it asks an operation for."""

    name: str
    device: str
    impl: str

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Normal values, rounded to `dtype`."""
        return torch.randn(*shape, device=self.device).to(dtype)

    def skip_without(self, pv: str) -> None:
        """Skip a test of e4m3 p and v on a card that cannot multiply them."""
        if self.name == "gpu" and pv == "fp8" and not has_fp8():
            pytest.skip("this GPU has no e4m3 matrix units")


def has_fp8() -> bool:
    """Whether the GPU multiplies e4m3."""
    return resolve_pv("auto", torch.device("cuda", 0)) == "fp8"


GPU = Implementation("gpu", "cuda", "triton")
_ALL = {
    "reference": (Implementation("reference", "cpu", "reference"), ()),
    "interpreter": (
        Implementation("interpreter", "cpu", "triton"),
        # numpy computes both sides of a `where`
        (pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")),
    ),
    "gpu": (GPU, (pytest.mark.gpu,)),
}


def over(*names: str, **values: Mapping[str, Iterable[Any]]) -> pytest.MarkDecorator:
    """Parametrise a test over implementations: the argument `on`, and others that depend on it.

    `over("reference", "gpu")` gives `on` alone. With `over(interpreter={"dtype": [torch.float16]},
    gpu={"dtype": [torch.bfloat16], ...})` each implementation has values of its own, all
    combinations of them. As for `pytest.mark.parametrize`, an argument may name several with
    commas between, and a value may be a `pytest.param` with an id.
    """
    each: dict[str, Mapping[str, Iterable[Any]]] = dict.fromkeys(names, {}) | values
    arguments = list(next(iter(each.values())))
    parameters = []
    for name, its in each.items():
        assert list(its) == arguments, f"{name} has other arguments than {next(iter(each))}"
        implementation, marks = _ALL[name]
        for some in product(*its.values()):
            fields: list[Any] = [implementation]
            ids, more = [name], list(marks)
            for argument, value in zip(arguments, some, strict=True):
                parts, one, own = _read(value, several="," in argument)
                fields += parts
                ids += [one]
                more += own
            parameters.append(pytest.param(*fields, marks=more, id="-".join(ids)))
    return pytest.mark.parametrize(
        ",".join(["on", *arguments]).replace(" ", "").split(","), parameters
    )


def _read(value: Any, several: bool) -> tuple[tuple[Any, ...], str, list[Any]]:
    """The fields of a value, its id and its marks."""
    own: list[Any] = []
    one = None
    if hasattr(value, "values") and hasattr(value, "marks"):  # a pytest.param
        own, one = list(value.marks), value.id
        value = value.values if several else value.values[0]
    parts = tuple(value) if several else (value,)
    return parts, one or "-".join(map(_named, parts)), own


def _named(value: Any) -> str:
    return str(getattr(value, "name", value)).removeprefix("torch.")


def coefficient(
    on: Implementation, form: str, shape: tuple[int, int, int]
) -> float | torch.Tensor | None:
    """A coefficient of a skip of tensors of this shape, [B, N, C]."""
    batch, tokens, channels = shape
    if form in ("none", "float"):
        return None if form == "none" else 0.3
    shapes = {
        "batch": (batch,),
        "channel": (batch, 1, channels),
        "element": (batch, tokens, channels),
        "token": (batch, tokens, 1),
        "half": (1, 1, channels),
    }
    return on.randn(*shapes[form], dtype=torch.float16 if form == "half" else torch.float32)
