"""`linear`: a Linear in int8, a scale per row of the weight or per block, against bf16; and a
Linear in bf16 with the skip after it, by the library and a pass of its own or by one kernel.

The activation comes in bf16, so the pass that quantises it is in the time of the int8 ones; the
product alone is beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

from benchmarks import runner
from benchmarks.runner import REL_L2, Column, Journal, Method, Plan
from benchmarks.turbo import quantised_blocks
from turbo_rcm_patch import ops
from turbo_rcm_patch.bench import Call, generator
from turbo_rcm_patch.kernels.launch import Tile

#: Relative L2 to the product in fp32 from which an output is wrong and not inaccurate.
_WRONG: Final = 0.05
_BASE: Final = "torch bf16"
#: Method -> (whether the weight has a scale per row or per block, whether the Hopper kernel may be
#: used).
_INT8: Final = {
    "int8 scale per row": ("row", True),
    "int8 per row portable": ("row", False),
    "int8 scale per block": ("block", True),
    "int8 per block portable": ("block", False),
}
#: Method that closes a skip, in bf16 -> tile of our kernel, or None for the library and a pass.
_CLOSED: Final[dict[str, Tile | None]] = {
    "bf16 then skip": None,
    "bf16 skip in epilogue, 64x64": Tile(64, 64, 4, 4),
    "bf16 skip in epilogue, 64x128": Tile(64, 128, 4, 4),
    "bf16 skip in epilogue, 128x128": Tile(128, 128, 8, 4),
}
#: Rows that are compared with the truth: some of the first and all of the last tile.
_ROWS: Final = 256
_COLUMNS: Final = (
    Column("case", 20), Column("method", 30), *runner.times(),
    Column("graph", 9, "graph_milliseconds.median", ".4f"),
    Column("product", 9, "product_milliseconds", ".4f"), Column("TOPS", 7, "tops", ".0f"),
    Column("speed-up", 9, "speed_up", ".2f"), REL_L2,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Case:
    tokens: int
    channels: int
    features: int

    @property
    def name(self) -> str:
        return f"N{self.tokens}-{self.channels}-{self.features}"


def run(plan: Plan) -> int:
    """Measure and write `linear.json`; 0 if everything was right."""
    # Wan2.1-1.3B at 480p and 81 frames: attention, and the feed-forward's two.
    cases = [_Case(32760, 1536, 1536), _Case(32760, 1536, 8960), _Case(32760, 8960, 1536)]
    # Short sequences, and 14B's.
    cases += [_Case(n, k, 1536) for n in (780, 1950, 7800) for k in (1536, 8960)]
    cases += [_Case(n, 5120, 5120) for n in (780, 7800)]
    if plan.micro:
        cases = [_Case(70, 160, 48)]
    return runner.run_cases(
        plan,
        "linear",
        _COLUMNS,
        {
            "inputs": "x [1, N, K] and the weight normal, bf16, with bias; several sets in turn",
            "milliseconds": "the quantisation of x included where the product is int8",
            "graph_milliseconds": "one call of a CUDA graph over all sets",
            "product_milliseconds": "the product alone, by torch.profiler",
            "skip": "c_skip 1, c_out [1, 1, Cout] in fp32; the same weight in every set",
            "TOPS": "2 N K Cout / milliseconds, in 1e12 operations a second",
            "truth": f"fp64 with the bf16 weight, {_ROWS} rows",
            "scale per block": "of 128 x 128, as in TurboDiffusion's int8 checkpoints",
            "speed_up": f"median of {_BASE} over median",
        },
        {case.name: case for case in cases},
        _run_case,
        methods=[_BASE, *_INT8, *_CLOSED],
    )


def _run_case(case: _Case, peers: list[str], journal: Journal) -> bool:
    plan, device, tokens = journal.plan, journal.device, case.tokens

    def normal(random: torch.Generator, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random, device=device)

    random = generator(device, plan.seed)
    weight = normal(random, case.features, case.channels) * case.channels**-0.5
    weight, bias = weight.bfloat16(), normal(random, case.features).bfloat16()
    quantised = {"row": ops.quantize_weight(weight), "block": quantised_blocks(weight)}
    sets = [
        [normal(generator(device, plan.seed + 1 + i), 1, tokens, case.channels).bfloat16()]
        for i in range(runner.input_sets(2 * tokens * (case.channels + case.features)))
    ]

    def plain(inputs: Sequence[torch.Tensor]) -> Call:
        return lambda: F.linear(inputs[0], weight, bias)

    def int8(name: str) -> Method:
        scales, hopper = _INT8[name]
        given = quantised[scales]

        def make(inputs: Sequence[torch.Tensor]) -> Call:
            if hopper:
                return lambda: ops.int8_linear(inputs[0], *given, bias)
            from turbo_rcm_patch.kernels.portable.int8_linear import BLOCK_K, int8_linear
            from turbo_rcm_patch.kernels.portable.rows import quantize_rows

            return lambda: int8_linear(
                quantize_rows(inputs[0]), *given, bias, None, 1.0, 1.0,
                gelu=False, cast="fp32", out_dtype=torch.bfloat16, block_k=BLOCK_K,
            )  # fmt: skip

        return Method(
            name, make, note="" if hopper else "the Hopper kernel not used", several=True
        )

    residual = normal(random, 1, tokens, case.features).bfloat16()
    gate = normal(random, 1, 1, case.features)

    def closed(name: str) -> Method:
        tile = _CLOSED[name]

        def make(inputs: Sequence[torch.Tensor]) -> Call:
            if tile is None:
                return lambda: ops.project_skip(
                    inputs[0], weight, bias, residual=residual, c_out=gate
                )
            from turbo_rcm_patch.kernels.portable.project import project_skip

            return lambda: project_skip(
                inputs[0], weight, bias, residual, 1.0, gate, cast="fp32",
                out_dtype=torch.bfloat16, tile=tile,
            )  # fmt: skip

        return Method(
            name,
            make,
            note="" if tile is None else "the kernel asked for by its tile",
            errors=runner.errors_to(residual[:, rows].double() + gate.double() * truth, rows),
        )

    half = min(_ROWS, tokens) // 2
    rows = torch.cat([torch.arange(half), torch.arange(tokens - half, tokens)]).to(device)
    truth = F.linear(sets[0][0][:, rows].double(), weight.double(), bias.double())
    methods = [Method(_BASE, plain, several=True), *map(int8, _INT8), *map(closed, _CLOSED)]
    entrants = runner.compete(
        [method for method in methods if method.name in peers],
        sets,
        runner.errors_to(truth, rows),
        journal,
        plan.effort(200.0, 60),
        case.name,
        wrong=_WRONG,
        clocks=("milliseconds", "graph_milliseconds"),
        alone=("GEMM", "product_milliseconds"),
    )
    for entrant in entrants:
        median = entrant.median()
        if median is not None:
            entrant.record["tops"] = 2e-9 * tokens * case.channels * case.features / median
    shape = {"N": tokens, "K": case.channels, "Cout": case.features}
    runner.finish(entrants, journal, case.name, {"shape": shape}, _BASE)
    # The kernel called by name has no CPU.
    called = ("portable", "epilogue")
    return all(
        e.calls for e in entrants if device.type == "cuda" or not any(c in e.name for c in called)
    )
