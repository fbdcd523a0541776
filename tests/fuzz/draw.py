"""What a case is drawn from, how its tensors lie in memory, and how far a result may be off."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from tests.poison import filled

__all__ = ["EPS", "FLOATS", "Draw", "Mismatch", "close_to", "named", "same_bits"]

T = TypeVar("T")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
#: Half a unit in the last place.
EPS = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8,
       torch.float16: 2.0**-11}  # fmt: skip
#: How a tensor may lie in memory.
LAYOUTS = ("dense", "dense", "fused", "padded", "samples-last", "channels-apart", "shifted")


class Mismatch(AssertionError):
    """A result that is not what it should be."""


@dataclass
class Draw:
    """The random choices of one case.

    Attributes:
        kind: Chooses what a kernel is compiled for: dtypes, head sizes, flags, layouts. Several
            cases of a run may share it.
        value: Chooses the rest: lengths and numbers.
        device: Where tensors are.
        generator: Of the numbers in tensors.
        inputs: Every tensor that was made, with its bits when it was.
    """

    kind: random.Random
    value: random.Random
    device: torch.device
    generator: torch.Generator = field(init=False)
    inputs: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(self.value.randrange(2**40))

    def of(self, *choices: T) -> T:
        """A choice that kernels are compiled for."""
        return self.kind.choice(choices)

    def maybe(self, chance: float = 0.5) -> bool:
        return self.kind.random() < chance

    def dtype(self) -> torch.dtype:
        return self.of(*FLOATS)

    def length(self, most: int) -> int:
        """Often an edge of a block, or one beside it."""
        if self.value.random() < 0.4:
            edge = self.value.choice([1, 2, 16, 32, 64, 128, 256]) + self.value.choice([-1, 0, 1])
            if 1 <= edge <= most:
                return edge
        return self.value.randint(1, most)

    def noise(self, *shape: int, dtype: torch.dtype, size: float = 1.0) -> Tensor:
        made = torch.randn(shape, generator=self.generator, device=self.device)
        return self.keep((made * size).to(dtype))

    def positive(self, *shape: int, dtype: torch.dtype) -> Tensor:
        made = torch.rand(shape, generator=self.generator, device=self.device)
        return self.keep((made + 0.5).to(dtype))

    def keep(self, x: Tensor) -> Tensor:
        self.inputs.append((x, x.clone()))
        return x

    def laid_out(self, *shape: int, dtype: torch.dtype, size: float = 1.0) -> Tensor:
        """Noise [B, N, C] somewhere in memory whose rest is NaN."""
        layout = self.of(*LAYOUTS)
        made = torch.randn(shape, generator=self.generator, device=self.device)
        return self.keep(self.placed((made * size).to(dtype), layout))

    def placed(self, x: Tensor, layout: str) -> Tensor:
        b, n, c = x.shape

        def room(*shape: int) -> Tensor:
            return filled(torch.empty(shape, dtype=x.dtype, device=x.device))

        if layout == "dense":
            return x
        if layout == "fused":  # one of three in a row
            place = room(b, n, 3 * c)[..., c : 2 * c]
        elif layout == "padded":
            place = room(b, n + 3, c)[:, 1 : n + 1]
        elif layout == "samples-last":
            place = room(n, b, c).transpose(0, 1)
        elif layout == "channels-apart":
            place = room(b, c, n).transpose(1, 2)
        else:  # an address that divides by the size of one element alone
            place = room(b * n * c + 1)[1:].view(b, n, c)
        return place.copy_(x)

    def coefficient(self, batch: int, n: int, channels: int) -> float | Tensor:
        """A number, or a tensor of one of the documented shapes."""
        kind = self.of("one", "number", "batch", "channel", "row", "element")
        if kind in ("one", "number"):
            return 1.0 if kind == "one" else self.value.uniform(-2, 2)
        dtype = self.of(torch.float32, torch.float32, torch.bfloat16)
        if kind == "batch":
            return self.noise(batch, dtype=dtype)
        if kind == "element":
            return self.laid_out(batch, n, channels, dtype=dtype)
        rows = 1 if kind == "row" else batch
        return self.noise(rows, 1, channels, dtype=dtype)

    def lengths(self, batch: int, n: int) -> Tensor:
        """Of keys, none of them up to far more than there are."""
        chosen = [self.value.choice([0, n, n + 5, self.value.randint(1, n)]) for _ in range(batch)]
        wide = self.maybe()
        if wide and self.value.random() < 0.2:
            chosen[0] = 2**31 + 7
        kind = torch.int64 if wide else torch.int32
        return self.keep(torch.tensor(chosen, dtype=kind, device=self.device))

    def check_inputs(self) -> None:
        """No operation writes to what it was given."""
        for index, (now, before) in enumerate(self.inputs):
            if not same_bits(now.detach(), before):
                raise Mismatch(f"input {index} {list(now.shape)} was written to")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal, NaN to NaN."""
    return a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())


def close_to(
    what: str, out: Tensor, expected: Tensor, size: Tensor | None = None, *, budget: float
) -> float:
    """Compare by rows: the error of each sample's each row against the size of what was added
    up.

    Args:
        what: Named in the error.
        out: Any shape, its last dimension a row.
        expected: fp64, as many.
        size: Magnitude of the terms of each element, those of `expected` by default.
        budget: Largest share.

    Returns:
        The largest share of the budget that was used.
    """
    if out.shape != expected.shape:
        raise Mismatch(f"{what}: shape {list(out.shape)}, expected {list(expected.shape)}")
    if not bool((out.isfinite() == expected.isfinite()).all()):
        raise Mismatch(f"{what}: {int((~out.isfinite()).sum())} values are not finite")
    error = torch.where(expected.isfinite(), out.double() - expected, 0.0).norm(dim=-1)
    wide = (expected.abs() if size is None else size.double().expand_as(expected)).nan_to_num(
        0.0, 0.0, 0.0
    )
    base = wide.norm(dim=-1)
    least = EPS.get(out.dtype, 2.0**-24) * 2.0**-5 + 1e-30
    share = error / (budget * base).clamp_min(least)
    worst = float(share.max()) if share.numel() else 0.0
    if worst > 1.0:
        place = int(share.flatten().argmax())
        raise Mismatch(
            f"{what}: row {place} of {share.numel()} is off by "
            f"{float(error.flatten()[place]):.3g} of {float(base.flatten()[place]):.3g}, "
            f"{worst:.3g} times its budget"
        )
    return worst


def named(**fields: Any) -> str:
    """Arguments in short, for a message."""
    parts = []
    for name, value in fields.items():
        if isinstance(value, Tensor):
            value = f"{str(value.dtype)[6:]}{list(value.shape)}"
        elif isinstance(value, Sequence) and not isinstance(value, str):
            value = "[" + " ".join(named(_=v)[2:] for v in value) + "]"
        parts.append(f"{name}={value}")
    return " ".join(parts)
