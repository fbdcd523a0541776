"""`attention`: every attention a user could pick, against ours, checked and timed in one run.

Inputs are q, k, v as [B, N, H*D], which is how a transformer's linears leave them. A method that
wants heads apart gets views of the same memory; none is copied in the timed call, and every result
is read as [B, N, H*D].
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Final

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import runner
from benchmarks.machine import ceilings, exponential_ceiling, measured_ceilings
from benchmarks.measure import Call, attention_fp64, print_line, some_rows
from benchmarks.runner import REL_L2, Column, Entrant, Journal, Method, Plan, Record, Shape
from turbo_rcm_patch import ops
from turbo_rcm_patch.config import PVDType
from turbo_rcm_patch.errors import Fp8UnsupportedError, MissingPackageError

#: Relative L2 to fp64 from which an output is wrong and not inaccurate: int8 with fp8 PV has 0.05.
WRONG: Final = 0.1
#: Rows of the output that are compared with fp64.
ROWS: Final = 256
_COLUMNS: Final = (
    Column("case", 16), Column("method", 16), *runner.times(), Column("TOPS", 7, "tops", ".1f"),
    Column("kernel", 7, "kernel_tops", ".1f"), Column("graph", 7, "graph_tops", ".1f"),
    Column("relL1", 8, "error.relative_l1", ".5f"), Column("cosine", 9, "error.cosine", ".6f"),
    REL_L2,
)  # fmt: skip
#: Ours by the name they have in tables, with the element type of the second product.
OURS: Final[dict[str, PVDType]] = {"ours fp8": "fp8", "ours bf16": "bf16"}
#: torch's exact attentions by the name they have in tables.
BACKENDS: Final = {
    "torch cuDNN": SDPBackend.CUDNN_ATTENTION,
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
}
REFERENCE_SOURCE: Final = "measured earlier on the same kind of card, not in this run"
#: sageattention 2.2 (CUDA build) on an H200: 1e12 operations a second with smoothing and
#: quantisation included, and of the kernel alone. 2048 tokens: the middle of 211 to 237.
REFERENCE: Final[dict[str, dict[str, float]]] = {
    "H12-N32760-D128": {"all_in": 777.0, "kernel": 863.0},
    "H40-N75600-D128": {"all_in": 807.0},
    "H12-N8192-D128": {"all_in": 610.0, "kernel": 845.0},
    "H12-N4096-D128": {"all_in": 423.0},
    "H12-N2048-D128": {"all_in": 224.0, "kernel": 666.0},
    "H48-N17776-D64": {"all_in": 509.0, "kernel": 574.0},
}
#: Case -> (method to compare with, wanted ratio of speeds).
AIMS: Final[dict[str, tuple[str, float]]] = {
    "H12-N32760-D128": ("sageattention 2", 1.22),
    "H40-N75600-D128": ("sageattention 2", 1.18),
    "H12-N8192-D128": ("torch cuDNN", 1.37),
    "H12-N4096-D128": ("torch cuDNN", 1.20),
    "H12-N2048-D128": ("torch cuDNN", 1.26),
    "H48-N17776-D64": ("sageattention 2", 1.28),
}


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """An attention of the comparison.

    Attributes:
        shape: B, N, H, D.
        peers: Whether every peer runs; else only ours and torch's cuDNN.
        graph: Whether it is short enough for launches to matter, so that a CUDA graph is timed.
        quick: Whether --quick measures it.
    """

    shape: Shape
    peers: bool = True
    graph: bool = False
    quick: bool = False

    @property
    def operations(self) -> float:
        """4 N^2 D H B, both matrix products."""
        shape = self.shape
        return 4.0 * shape.batch * shape.q_tokens * shape.kv_tokens * shape.channels

    @property
    def intensity(self) -> float:
        """Operations a byte, when q, k, v are read once and the output is written once in 16
        bits."""
        tokens = 2 * self.shape.q_tokens + 2 * self.shape.kv_tokens
        return self.operations / (2.0 * self.shape.batch * tokens * self.shape.channels)


def attention_cases(*, micro: bool) -> dict[str, AttentionCase]:
    """All cases by name, those with an aim first."""
    if micro:
        cases = [
            AttentionCase(Shape.square(1, 40, 64), graph=True, quick=True),
            AttentionCase(Shape.square(1, 50, 64), quick=True),
            AttentionCase(Shape.square(1, 64, 64), peers=False),
        ]
    else:
        cases = [
            AttentionCase(Shape.square(12, 32760, 128), quick=True),
            AttentionCase(Shape.square(40, 75600, 128)),
            AttentionCase(Shape.square(12, 8192, 128), graph=True, quick=True),
            AttentionCase(Shape.square(12, 4096, 128), graph=True, quick=True),
            AttentionCase(Shape.square(12, 2048, 128), graph=True, quick=True),
            AttentionCase(Shape.square(48, 17776, 64), quick=True),
            AttentionCase(Shape.square(12, 1024, 128), graph=True),
            AttentionCase(Shape.square(12, 16384, 128)),
            *(
                AttentionCase(Shape.square(12, n, 128), peers=False)
                for n in (65536, 131072, 160000)
            ),
        ]
    return {case.shape.name: case for case in cases}


def run(plan: Plan) -> int:
    """Measure and write `attention.json`; 0 if everything of ours was right."""
    cases = attention_cases(micro=plan.micro)
    found: list[str] = []
    code = runner.run_cases(
        plan,
        "attention",
        _COLUMNS,
        {
            "inputs": "q, k, v [B, N, H*D], standard normal, bf16; several sets in turn",
            "output": "bf16 [B, N, H*D]",
            "TOPS": "4 N^2 D H B / median time",
            "milliseconds": "calls one by one, everything that the method does included",
            "graph_milliseconds": "the same inside a CUDA graph",
            "kernel_milliseconds": "the attention kernel alone, by torch.profiler",
            "share_of_data_sheet": "of the peak of its two products; the kernel alone if known",
            "truth": f"softmax(q k^T / sqrt(D)) v in fp64, {ROWS} rows",
            "wrong": f"relative L2 of {WRONG} or more, or not finite",
            "reference": f"sageattention 2.2, {REFERENCE_SOURCE}",
        },
        cases,
        functools.partial(_case, found=found),
        methods=[method.name for method in attention_methods(1)],
        default=[name for name, case in cases.items() if case.quick or not plan.quick],
        before=_ceilings,
    )
    if found:
        print_line(torch.device(plan.device), found)
    return code


def _ceilings(journal: Journal) -> None:
    if journal.device.type == "cuda":
        measured = measured_ceilings(journal.device)
        journal.header["ceilings"] |= {"plain calls on this card": measured}
        runner.free(journal.device)


def _case(case: AttentionCase, peers: list[str], journal: Journal, *, found: list[str]) -> bool:
    """One case; whether ours were right. What it comes to is added to `found`."""
    plan, device, shape = journal.plan, journal.device, case.shape
    bytes_a_set = 3 * 2 * shape.batch * shape.q_tokens * shape.channels
    sets = [
        runner.random_normal(shape, device, plan.seed + i)
        for i in range(runner.input_sets(bytes_a_set))
    ]
    rows = some_rows(shape.q_tokens, ROWS, device)
    q, k, v = sets[0]
    begin = time.monotonic()
    entrants = runner.compete(
        [
            method
            for method in attention_methods(shape.heads)
            if method.name in peers and (case.peers or method.name in (*OURS, "torch cuDNN"))
        ],
        sets,
        runner.errors_to(attention_fp64(q[:, rows], k, v, shape.heads), rows),
        journal,
        plan.effort(250.0, 100, quick=(100.0, 30)),
        shape.name,
        wrong=WRONG,
        clocks=("milliseconds", "graph_milliseconds") if case.graph else ("milliseconds",),
        alone=("attention", "kernel_milliseconds") if case.peers and not plan.quick else None,
    )
    for entrant in entrants:
        _rate(case, entrant, journal.device)
    record: Record = {
        "shape": shape.record,
        "operations": case.operations,
        "intensity": case.intensity,
        "input_sets": len(sets),
        "observed": journal.watch.since(begin),
    }
    runner.finish(entrants, journal, shape.name, record)
    clock = record["observed"]["sm_clock_mhz"]
    if isinstance(clock, dict):
        ceiling = exponential_ceiling(device, shape.head_dim, clock["median"])
        record["exponential_ceiling_tops"] = ceiling
    record |= _compare(case, entrants)
    if "best_tops" in record:
        ratios = record["best_over_peer"].items()
        others = "".join(f", {ratio:.2f}x {peer}" for peer, ratio in ratios)
        found.append(f"{shape.name} {record['best_tops']:.0f} TOPS{others}")
    journal.case(shape.name, record)
    # A card without fp8 units is no failure of ours.
    excused = Fp8UnsupportedError.__name__
    return all(
        entrant.calls or str(entrant.record["reason"]).startswith(excused)
        for entrant in entrants
        if entrant.name in OURS
    )


def _rate(case: AttentionCase, entrant: Entrant, device: torch.device) -> None:
    """Operations a second by each clock, and the share of the data sheet."""
    record = entrant.record
    clocks = {
        "tops": entrant.median(),
        "graph_tops": entrant.median("graph_milliseconds"),
        "kernel_tops": record.get("kernel_milliseconds"),
    }
    record |= {name: case.operations / ms / 1e9 for name, ms in clocks.items() if ms}
    tops = record.get("kernel_tops", record.get("tops"))
    limit = _limit(entrant.name, device)
    if limit is not None and tops is not None:
        record["share_of_data_sheet"] = tops / limit


def _limit(method: str, device: torch.device) -> float | None:
    """1e12 operations a second of a card that does nothing but this method's two products, by its
    data sheet."""
    sheet = ceilings(device)
    if not sheet:
        return None
    eight, sixteen = sheet["int8 and fp8"], sheet["bf16"]
    if method in ("ours fp8", "sageattention 2"):
        return eight
    if method in ("ours bf16", "sageattention 1"):
        return 2 / (1 / eight + 1 / sixteen)
    return sixteen


def _compare(case: AttentionCase, entrants: list[Entrant]) -> Record:
    """Our best against each peer, the published figure and the aim. One clock for both sides: the
    better of one by one and graph for everybody."""
    best = {
        entrant.name: min(medians)
        for entrant in entrants
        if (medians := [ms for clock in ("milliseconds", "graph_milliseconds")
                      if (ms := entrant.median(clock))])
    }  # fmt: skip
    ours = min((ms for name, ms in best.items() if name in OURS), default=None)
    if ours is None:
        return {}
    name, tops = case.shape.name, case.operations / ours / 1e9
    ratios = {peer: ms / ours for peer, ms in best.items() if peer not in OURS}
    found: Record = {"best_tops": tops, "best_over_peer": ratios}
    reference = REFERENCE.get(name)
    if reference is not None:
        found["reference"] = {"sageattention 2.2": reference, "source": REFERENCE_SOURCE}
        found["best_over_reference"] = tops / reference["all_in"]
    if name in AIMS:
        peer, ratio = AIMS[name]
        reached, source = ratios.get(peer), "this run"
        if reached is None and peer == "sageattention 2" and reference is not None:
            reached, source = tops / reference["all_in"], REFERENCE_SOURCE
        if reached is not None:
            found["aim"] = {
                "peer": peer,
                "ratio": ratio,
                "reached": reached,
                "met": reached >= ratio,
                "peer_from": source,
            }
            print(
                f"{name}: best of ours {tops:.0f} TOPS, {reached:.2f}x {peer} ({source}); "
                f"aim {ratio:.2f}x"
            )
    return found


# --- the methods ---------------------------------------------------------------------------------


def backend_context(backend: SDPBackend) -> Callable[[], AbstractContextManager[object]]:
    """Inside, torch's scaled_dot_product_attention runs this backend or raises."""
    return functools.partial(sdpa_kernel, backend)


def attention_methods(heads: int) -> list[Method]:
    """Every attention for q, k, v [B, N, heads*D], ours first."""
    views = "[B, H, N, D] views of [B, N, H*D]; copied only if the result is not"
    smoothed = "NHD layout; smoothing and quantisation included"
    copied = f"{smoothed}; it writes into k, so it has a copy of its own, made outside"
    part = functools.partial
    return [
        *(
            Method(name, part(_ours, heads, pv), note="prologue included", several=True)
            for name, pv in OURS.items()
        ),
        *(
            Method(name, part(_sdpa, heads), backend_context(backend), views)
            for name, backend in BACKENDS.items()
        ),
        Method("sageattention 1", part(_sage, heads, 1), note=copied, several=True),
        Method("sageattention 2", part(_sage, heads, 2), note=smoothed, several=True),
        Method("FlashAttention-3", part(_flash, heads, "flash_attn_interface"), note="NHD layout"),
        Method(
            "FlashAttention-2",
            part(_flash, heads, "flash_attn"),
            note="the flash_attn package, NHD layout",
        ),
        Method("xFormers", part(_xformers, heads), note="NHD layout"),
    ]


def split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, N, H*D] as a view [B, N, H, D]."""
    return x.view(x.shape[0], x.shape[1], heads, -1)


def sage_major() -> int:
    """Major version of the installed sageattention, 0 if there is none."""
    try:
        return int(metadata.version("sageattention").split(".")[0])
    except (metadata.PackageNotFoundError, ValueError):
        return 0


def _ours(heads: int, pv: PVDType, inputs: Sequence[torch.Tensor]) -> Call:
    q, k, v = inputs
    spec = ops.AttentionSpec(heads=heads, pv=pv)
    return lambda: ops.attention_skip(q, k, v, spec)


def _sdpa(heads: int, inputs: Sequence[torch.Tensor]) -> Call:
    q, k, v = (split_heads(x, heads).transpose(1, 2) for x in inputs)
    return lambda: F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _sage(heads: int, major: int, inputs: Sequence[torch.Tensor]) -> Call:
    found = sage_major()
    if found != major:
        raise MissingPackageError(
            "sageattention",
            expected=f"release {major}.x",
            got=f"release {found}.x" if found else "no such package",
        )
    sageattn = import_module("sageattention").sageattn
    q, k, v = (split_heads(x, heads) for x in inputs)
    k = k.clone()
    return lambda: sageattn(q, k, v, tensor_layout="NHD").flatten(2)


def _flash(heads: int, package: str, inputs: Sequence[torch.Tensor]) -> Call:
    attention = import_module(package).flash_attn_func
    q, k, v = (split_heads(x, heads) for x in inputs)

    def call() -> torch.Tensor:
        out = attention(q, k, v)
        first: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return first.flatten(2)

    return call


def _xformers(heads: int, inputs: Sequence[torch.Tensor]) -> Call:
    attention = import_module("xformers.ops").memory_efficient_attention
    q, k, v = (split_heads(x, heads) for x in inputs)
    return lambda: attention(q, k, v).flatten(2)
