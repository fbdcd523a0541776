"""`linear`: a Linear in int8, a scale per row of the weight or per block, against bf16.

The activation comes in bf16, so the pass that quantises it is in the time of the int8 ones; the
product alone is beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

from turbo_rcm_patch import ops
from turbo_rcm_patch.benchmarks.clock import (
    Call,
    group_of,
    input_sets,
    kernel_milliseconds,
    rotating,
)
from turbo_rcm_patch.benchmarks.contest import Effort, Entrant, Method, admit, time_entrants
from turbo_rcm_patch.benchmarks.journal import Journal, Plan, chosen
from turbo_rcm_patch.benchmarks.setup import errors_of, generator
from turbo_rcm_patch.benchmarks.turbo_exact import quantised_blocks

__all__ = ["run"]

#: Relative L2 to the product in fp32 from which an output is wrong and not inaccurate.
_WRONG: Final = 0.05
_BASE: Final = "torch bf16"
_PORTABLE: Final = "the Hopper kernel not used"
#: Rows that are compared with the truth: some of the first and all of the last tile.
_ROWS: Final = 256
_COLUMNS: Final = (
    ("case", 20), ("method", 26), ("ms", 9), ("p20", 9), ("p80", 9), ("product", 9),
    ("TOPS", 7), ("speed-up", 9), ("relL2", 8),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Case:
    tokens: int
    channels: int
    features: int

    @property
    def name(self) -> str:
        return f"N{self.tokens}-{self.channels}-{self.features}"

    @property
    def operations(self) -> float:
        return 2.0 * self.tokens * self.channels * self.features


def _cases(*, micro: bool) -> list[_Case]:
    if micro:
        return [_Case(70, 160, 48)]
    # Wan2.1-1.3B at 480p and 81 frames: attention, and the feed-forward's two.
    return [_Case(32760, 1536, 1536), _Case(32760, 1536, 8960), _Case(32760, 8960, 1536)]


class _Work:
    """The weight of one case, in all its forms."""

    def __init__(self, case: _Case, device: torch.device, seed: int) -> None:
        random = generator(device, seed)
        size = (case.features, case.channels)
        weight = torch.randn(*size, generator=random, device=device) * case.channels**-0.5
        self.weight = weight.bfloat16()
        self.bias = torch.randn(case.features, generator=random, device=device).bfloat16()
        self.rows = ops.quantize_weight(self.weight)
        self.blocks = quantised_blocks(self.weight)

    def methods(self) -> list[Method]:
        """bf16 first."""
        return [
            Method(_BASE, self._torch),
            Method("int8 scale per row", self._ours(self.rows)),
            Method("int8 per row portable", self._portable(self.rows), note=_PORTABLE),
            Method("int8 scale per block", self._ours(self.blocks)),
            Method("int8 per block portable", self._portable(self.blocks), note=_PORTABLE),
        ]

    def _torch(self, inputs: Sequence[torch.Tensor]) -> Call:
        return lambda: F.linear(inputs[0], self.weight, self.bias)

    def _ours(
        self, given: tuple[torch.Tensor, torch.Tensor]
    ) -> Callable[[Sequence[torch.Tensor]], Call]:
        return lambda inputs: lambda: ops.int8_linear(inputs[0], *given, self.bias)

    def _portable(
        self, given: tuple[torch.Tensor, torch.Tensor]
    ) -> Callable[[Sequence[torch.Tensor]], Call]:
        def prepare(inputs: Sequence[torch.Tensor]) -> Call:
            from turbo_rcm_patch.kernels.portable.int8_linear import BLOCK_K, int8_linear
            from turbo_rcm_patch.kernels.portable.rows import quantize_rows

            return lambda: int8_linear(
                quantize_rows(inputs[0]), *given, self.bias, None, 1.0, 1.0,
                gelu=False, cast="fp32", out_dtype=torch.bfloat16, block_k=BLOCK_K,
            )  # fmt: skip

        return prepare

    def errors(self, x: torch.Tensor) -> Callable[[torch.Tensor], dict[str, float]]:
        """Numbers of an output against the product with the bf16 weight in fp32."""
        half = min(_ROWS, x.shape[1]) // 2
        rows = torch.cat([torch.arange(half), torch.arange(x.shape[1] - half, x.shape[1])])
        rows = rows.to(x.device)
        truth = F.linear(x[:, rows].double(), self.weight.double(), self.bias.double())
        return lambda output: errors_of(output[:, rows], truth)


def run(plan: Plan) -> int:
    """Measure and write `linear.json`; 0 if everything was right."""
    cases = {case.name: case for case in _cases(micro=plan.micro)}
    names = [method.name for method in _Work(_Case(16, 16, 16), torch.device("cpu"), 0).methods()]
    only = chosen("--only", plan.only, list(cases))
    # A method is called "int8 scale per row", a list of them is split at commas.
    peers = chosen("--peers", plan.peers, [name.replace(", ", " ") for name in names])
    journal = Journal(
        "linear",
        plan,
        _COLUMNS,
        about={
            "inputs": "x [1, N, K] and the weight normal, bf16, with bias; several sets in turn",
            "milliseconds": "the quantisation of x included where the product is int8",
            "product_milliseconds": "the product alone, by torch.profiler",
            "TOPS": "2 N K Cout / milliseconds, in 1e12 operations a second",
            "truth": f"fp64 with the bf16 weight, {_ROWS} rows",
            "scale per block": "of 128 x 128, as in TurboDiffusion's int8 checkpoints",
            "speed_up": f"median of {_BASE} over median",
        },
    )
    good = True
    with journal.running():
        for name in only:
            if not journal.late(name):
                good &= _run_case(cases[name], peers, journal)
    return 0 if good else 1


def _run_case(case: _Case, peers: Sequence[str], journal: Journal) -> bool:
    plan, device = journal.plan, journal.device
    work = _Work(case, device, plan.seed)
    size = 2 * case.tokens * (case.channels + case.features)
    sets = [
        [
            torch.randn(
                1, case.tokens, case.channels, generator=generator(device, plan.seed + 1 + i),
                device=device,
            ).bfloat16()
        ]
        for i in range(input_sets(size))
    ]  # fmt: skip
    errors = work.errors(sets[0][0])
    entrants = [
        admit(method, sets, errors, _WRONG) for method in work.methods() if method.name in peers
    ]
    least, most = (1, 2) if plan.micro else (4, 60)
    most = plan.calls or most
    effort = Effort(budget=200.0, least=min(least, most), most=most)
    time_entrants(entrants, journal, effort, case.name)
    base = next((e.median() for e in entrants if e.method.name == _BASE), None)
    for entrant in entrants:
        if entrant.ready:
            kernels = kernel_milliseconds(rotating(entrant.calls), device, calls=3)
            entrant.record["kernels"] = dict(list(kernels.items())[:8])
            entrant.record["product_milliseconds"] = sum(
                value for name, value in kernels.items() if group_of(name) == "GEMM"
            )
        _show(case, entrant, base, journal)
    journal.case(
        case.name,
        {
            "shape": {"N": case.tokens, "K": case.channels, "Cout": case.features},
            "methods": {entrant.method.name: entrant.record for entrant in entrants},
        },
    )
    # The kernel called by name has no CPU.
    return all(
        e.ready for e in entrants if device.type == "cuda" or "portable" not in e.method.name
    )


def _show(case: _Case, entrant: Entrant, base: float | None, journal: Journal) -> None:
    record, median = entrant.record, entrant.median()
    timing, error = record.get("milliseconds"), record.get("error")
    if median is None or not isinstance(timing, dict) or not isinstance(error, dict):
        journal.show((case.name, entrant.method.name, str(record.get("reason", "not timed"))))
        return
    record["tops"] = tops = case.operations / median / 1e9
    if base is not None:
        record["speed_up"] = base / median
    journal.show(
        (
            case.name,
            entrant.method.name,
            *(f"{timing[name]:.4f}" for name in ("median", "p20", "p80")),
            f"{record['product_milliseconds']:.4f}",
            f"{tops:.0f}",
            f"{base / median:.2f}" if base is not None else "",
            f"{error['relative_l2']:.5f}",
        )
    )
