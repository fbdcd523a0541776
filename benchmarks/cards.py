"""`cards`: what the compiled attention of each target can reach by counting its instructions.

Nothing runs. The kernels are compiled ahead of time for a target; of the main loop the cycles that
each kind of unit needs for one tile are counted, and cards are described by their data sheets.

Two numbers bound what is to be expected. If everything overlaps, the busiest unit decides. If
matrix products and the other instructions of a tile follow one another, their sum does. On an H200
the portable kernel runs near the second, and Hopper's own kernel between them.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.runner import check_target
from turbo_rcm_patch.output import write_json


@dataclass(frozen=True, slots=True)
class Card:
    """A card by its data sheet.

    Attributes:
        target: What code is generated for.
        multiprocessors: Or compute units.
        mhz: Boost clock.
        int8: Operations of dense matrix products a clock and multiprocessor, summed in int32.
        fp8: The same of e4m3, summed in fp32; 0 without such units.
        bf16: The same of bf16, summed in fp32.
        fp32: Lanes of fp32 arithmetic a multiprocessor.
        shared: Bytes of shared memory a multiprocessor.
        warps: Most warps at a time.
        note: What the numbers leave out.
    """

    target: tuple[str, int | str]
    multiprocessors: int
    mhz: int
    int8: int
    fp8: int
    bf16: int
    fp32: int = 128
    shared: int = 100 * 1024
    warps: int = 48
    note: str = ""


CARDS: Final = {
    "A100": Card(("cuda", 80), 108, 1410, 4096, 0, 2048, 64, 164 * 1024, 64),
    "RTX 3090": Card(("cuda", 86), 82, 1695, 2048, 0, 512),
    "RTX 4090": Card(("cuda", 89), 128, 2520, 2048, 1024, 512),
    "L40S": Card(("cuda", 89), 142, 2520, 2048, 2048, 1024),
    "H100 SXM": Card(
        ("cuda", 90), 132, 1830, 8192, 8192, 4096, 128, 228 * 1024, 64,
        "the portable kernel; Hopper's own is faster",
    ),
    "B200": Card(
        ("cuda", 100), 148, 1850, 4096, 16384, 8192, 128, 228 * 1024, 64,
        "int8 by mma.sync, whose rate there is not published: A100's is assumed",
    ),
    "RTX 5090": Card(("cuda", 120), 170, 2407, 2048, 1024, 512),
    "MI300X": Card(("hip", "gfx942"), 304, 2100, 4096, 0, 2048, 128, 64 * 1024, 32),
}  # fmt: skip

#: Kinds of instructions by what their names begin with; the first that fits decides, and what fits
#: nothing only takes a slot to issue. Cycles are those of a warp on its quarter of a
#: multiprocessor; conversions without a P in their name and MUFU have 4 lanes there.
_NVIDIA: Final = (
    ("matrix", ("IMMA", "HMMA", "QMMA", "IGMMA", "HGMMA", "QGMMA", "UTC"), 0),
    ("integer", ("I2FP", "F2FP"), 2),
    ("special", ("MUFU", "I2F", "F2F", "F2I"), 8),
    ("fp32", ("FADD", "FMUL", "FFMA", "IMAD"), 1),
    ("integer", ("IADD", "IMNMX", "VIMNMX", "VIADD", "FMNMX", "FSEL", "SEL", "ISETP", "FSETP",
                 "LOP3", "PRMT", "SHF", "LEA", "FHADD"), 2),
    ("shared", ("LDSM", "STSM", "LDS.128", "STS.128"), 4),
    ("shared", ("LDS", "STS", "SHFL"), 1),
)  # fmt: skip
_AMD: Final = (
    ("matrix", ("v_mfma",), 0),
    ("special", ("v_exp", "v_rcp", "v_log"), 16),
    ("shared", ("ds_read2", "ds_write_b128", "ds_read_b128"), 8),
    ("shared", ("ds_",), 2),
    ("fp32", ("v_",), 4),
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """An attention on a card.

    Attributes:
        cycles: Kind of unit -> cycles of a multiprocessor for a tile of every resident program.
        programs: Programs that share a multiprocessor.
        low: 1e12 operations a second if matrix products wait for the rest of a tile.
        high: The same if everything overlaps.
        exact: What a kernel of nothing but bf16 products reaches.
        limit: The busiest unit.
    """

    cycles: dict[str, float]
    programs: int
    low: float
    high: float
    exact: float
    limit: str


def programs_that_fit(card: Card, result: Mapping[str, Any]) -> int:
    """How many programs of a compiled kernel share a multiprocessor, at most."""
    warps, registers = int(result["warps"]), int(result["registers"])
    if card.target[0] == "cuda":  # 65,536 registers, given to a warp in units of 8 a thread
        by_registers = 65536 // (32 * warps * (-(-registers // 8) * 8))
        by_shared = card.shared // (int(result["shared"]) + 1024)
    else:  # 512 registers a lane for the waves of each of four units
        by_registers = 4 * (512 // (-(-registers // 8) * 8)) // warps
        by_shared = card.shared // max(1, int(result["shared"]))
    return max(0, min(by_registers, by_shared, card.warps // warps))


def estimate(
    card: Card, result: Mapping[str, Any], tile: Sequence[int], head_dim: int, pv: str
) -> Estimate:
    """Bound an attention by its main loop.

    Args:
        card: Where it would run.
        result: Of the compiler: "loop" (how often each instruction is in it), "warps",
            "registers", "shared".
        tile: Rows and columns.
        head_dim: Channels of a head.
        pv: "fp8" or "bf16".
    """
    rows, columns = tile
    kinds = _NVIDIA if card.target[0] == "cuda" else _AMD
    # Each quarter of a multiprocessor issues for a quarter of the warps; shared memory serves all.
    quarter, warps = result["warps"] / 4, result["warps"]
    cycles = dict.fromkeys(("matrix", "issue", "fp32", "integer", "special", "shared"), 0.0)
    for name, count in result["loop"].items():
        kind, cost = next(
            ((kind, cost) for kind, starts, cost in kinds if name.startswith(starts)), ("issue", 0)
        )
        if kind == "fp32" and card.target[0] == "cuda":
            cost = 128 // card.fp32
        if kind not in ("issue", "matrix"):
            cycles[kind] += count * cost * (warps if kind == "shared" else quarter)
        if card.target[0] == "cuda":
            cycles["issue"] += count * quarter
    product = 2 * rows * columns * head_dim
    second, sums = (card.fp8, 2 * rows * columns * 16) if pv == "fp8" else (card.bf16, 0)
    cycles["matrix"] = product / card.int8 + (product + sums) / second
    others = {kind: count for kind, count in cycles.items() if kind != "matrix"}
    limit = max(cycles, key=lambda kind: cycles[kind])

    def tera(cycles_a_tile: float) -> float:
        return 2 * product / cycles_a_tile * card.multiprocessors * card.mhz / 1e6

    return Estimate(
        cycles=cycles,
        programs=programs_that_fit(card, result),
        low=tera(cycles["matrix"] + max(others.values())),
        high=tera(cycles[limit]),
        exact=tera(2 * product / card.bf16),
        limit=limit,
    )


def run(
    out: Path, names: Sequence[str], tiles: Sequence[Sequence[int]], head_dims: Sequence[int]
) -> int:
    """Compile the attention for cards, print a table and write `cards.json`, row by row; 0 if all
    compiled.

    Args:
        out: Folder to write into.
        names: Cards; all if there are none.
        tiles: [rows, columns, warps, stages] to compare; the shipped tile if there are none.
        head_dims: Channels of a head.
    """
    from tests.kernels.aot import Compiler, case, default_pv

    unknown = [name for name in names if name not in CARDS]
    if unknown:
        from turbo_rcm_patch.errors import ConfigError

        raise ConfigError("--only", expected=f"some of {', '.join(CARDS)}", got=", ".join(unknown))
    path = out / "cards.json"
    check_target(path, lambda found: {"cards", "rows"} <= found.keys())
    cards = {name: asdict(card) for name, card in CARDS.items()}
    rows: list[dict[str, Any]] = []
    good = True
    print(HEAD + "\n" + "|---" * HEAD.count("| ") + "|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        compiler = Compiler(sys.executable, Path(folder))
        try:
            for name in names or CARDS:
                card = CARDS[name]
                for head_dim in head_dims:
                    for tile in tiles or [()]:
                        pv = default_pv(card.target)
                        more = {"tile": list(tile)} if tile else {}
                        asked = case(
                            "plain-attention", card.target, head_dim, pv, portable=True,
                            only=["attention_kernel"], **more,
                        )  # fmt: skip
                        (result,) = compiler([asked])
                        row = {"card": name, "head_dim": head_dim, "pv": pv, "compiled": result}
                        if "error" in result:
                            good = False
                        else:
                            found = estimate(card, result, result["tile"], head_dim, pv)
                            row["estimate"] = asdict(found)
                        rows.append(row)
                        write_json(path, {"cards": cards, "rows": rows})
                        print(line(row), flush=True)
        finally:
            compiler.close()
    return 0 if good else 1


HEAD: Final = (
    "| card | head, p and v | tile, warps | registers, spills | shared KiB | programs | "
    "cycles a tile: matrix | issue | fp32 | integer | special | shared | TOPS expected | "
    "exact at most |"
)


def line(row: Mapping[str, Any]) -> str:
    """A row of the table in Markdown."""
    result = row["compiled"]
    about = f"| {row['card']} | {row['head_dim']}, {row['pv']} "
    if "error" in result:
        return f"{about}| {result['error']} |"
    found = row["estimate"]
    rows, columns = result["tile"]
    cycles = " | ".join(
        f"**{count:,.0f}**" if kind == found["limit"] else f"{count:,.0f}"
        for kind, count in found["cycles"].items()
    )
    return (
        f"{about}| {rows} x {columns}, {result['warps']} "
        f"| {result['registers']}, {result['spills']} | {result['shared'] / 1024:.0f} "
        f"| {found['programs']} | {cycles} | {found['low']:.0f} to {found['high']:.0f} "
        f"| {found['exact']:.0f} |"
    )
