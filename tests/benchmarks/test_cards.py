"""What compiled kernels can reach, counted from their instructions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.cards import CARDS, HEAD, Card, estimate, line, programs_that_fit
from tests.kernels.aot_compile import innermost_loops, main_loop, spills_in_loops
from tests.launches import needs_hopper_kernels

#: A card whose every rate is easy to divide by: 10 multiprocessors at 1 GHz.
CARD = Card(("cuda", 89), 10, 1000, 2048, 1024, 512)


def compiled(loop: dict[str, int], **more: Any) -> dict[str, Any]:
    return {"loop": loop, "warps": 4, "registers": 128, "shared": 16 * 1024} | more


def test_cycles_are_counted_by_unit() -> None:
    loop = {
        "IMMA.16832.S8.S8.SAT": 32, "QMMA.16832.F32.E4M3.E4M3": 36, "MUFU.EX2": 10, "FFMA": 7,
        "I2FP.F32.S32": 3, "IMNMX": 4, "LDSM.16.M88.4": 5, "LDS.U8": 6, "BAR.SYNC": 2,
    }  # fmt: skip
    found = estimate(CARD, compiled(loop), (64, 64), 128, "fp8")
    product = 2 * 64 * 64 * 128
    matrix = product / 2048 + (product + 2 * 64 * 64 * 16) / 1024
    assert found.cycles == {
        "matrix": matrix, "issue": sum(loop.values()), "fp32": 7.0, "integer": 2.0 * (3 + 4),
        "special": 80.0, "shared": 4.0 * (4 * 5 + 6),
    }  # fmt: skip
    assert found.limit == "matrix" and found.programs == 4
    operations = 2 * product * 10 * 1000 / 1e6
    assert found.high == pytest.approx(operations / matrix)
    assert found.low == pytest.approx(operations / (matrix + 105))
    assert found.exact == pytest.approx(operations / (2 * product / 512))


def test_ampere_converts_and_adds_at_half_speed() -> None:
    found = estimate(
        CARDS["A100"], compiled({"I2F": 4, "F2F.BF16.F32": 2, "FADD": 3}), (64, 64), 64, "bf16"
    )
    assert found.cycles["special"] == 8 * (4 + 2) and found.cycles["fp32"] == 6
    assert found.cycles["integer"] == 0
    assert found.cycles["matrix"] == 2 * 64 * 64 * 64 / 4096 + 2 * 64 * 64 * 64 / 2048


@pytest.mark.parametrize(
    ("more", "programs"),
    [
        ({}, 4),
        ({"registers": 168}, 3),
        ({"registers": 169}, 2),
        ({"registers": 255, "warps": 8}, 1),
        ({"shared": 48 * 1024}, 2),
        ({"shared": 100 * 1024}, 0),
        ({"registers": 32, "shared": 0}, 12),
    ],
)
def test_programs_of_a_multiprocessor(more: dict[str, Any], programs: int) -> None:
    assert programs_that_fit(CARD, compiled({}, **more)) == programs


def test_cards_reach_what_their_data_sheets_say() -> None:
    """1e12 dense operations a second: int8, and bf16 with sums in fp32."""
    sheets = {
        "A100": (624, 312), "RTX 3090": (284, 71), "RTX 4090": (660.6, 165.2), "L40S": (733, 362),
        "H100 SXM": (1979, 989.5), "RTX 5090": (838, 209.5), "MI300X": (2614.9, 1307.4),
    }  # fmt: skip
    for name, (eight, sixteen) in sheets.items():
        card = CARDS[name]
        clock = card.multiprocessors * card.mhz / 1e6
        assert card.int8 * clock == pytest.approx(eight, rel=0.02), name
        assert card.bf16 * clock == pytest.approx(sixteen, rel=0.02), name


SASS = """
.L_x_0:
        /*0000*/                   LDSM.16.M88.4 R4, [R2] ;
.L_x_1:
        /*0010*/              @!P0 IMMA.16832.S8.S8 R4, R8.ROW, R9.COL, R4 ;
        /*0020*/                   STL [R1], R4 ;
        /*0030*/               @P1 BRA `(.L_x_1) ;
        /*0040*/                   STL [R1], R4 ;
        /*0050*/               @P2 BRA `(.L_x_0) ;
.L_x_2:
        /*0060*/                   FADD R1, R1, R2 ;
        /*0070*/               @P1 BRA `(.L_x_2) ;
"""
AMD = """
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
\tds_read_b32 v1, v2
\tv_mfma_i32_32x32x16_i8 a[0:15], v[0:1], v[2:3], a[0:15]
\ts_cbranch_scc1 .LBB0_1
; %bb.2:
\tv_add_f32_e32 v1, v1, v2
"""


def test_the_main_loop_is_the_innermost_that_multiplies() -> None:
    assert main_loop(SASS) == {"IMMA.16832.S8.S8": 1, "STL": 1, "BRA": 1}
    assert main_loop(AMD) == {"ds_read_b32": 1, "v_mfma_i32_32x32x16_i8": 1, "s_cbranch_scc1": 1}
    assert main_loop("        /*0000*/   IMMA.16832 R4 ;") == {}
    assert innermost_loops(SASS, "FADD") == [["FADD", "BRA"]]
    assert spills_in_loops(SASS.replace("IMMA", "IGMMA")) == [1]


@pytest.mark.slow
def test_the_shipped_tile_of_ada_is_the_better_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the command: 64 rows make Triton split keys over warps, and every maximum then goes
    through shared memory."""
    needs_hopper_kernels()
    asked = ["cards", "--only", "RTX 4090", "--head-dims", "128", "--out", str(tmp_path)]
    assert main([*asked, "--tiles", "64x64x4x2"]) == 0
    (before,) = json.loads((tmp_path / "cards.json").read_text())["rows"]
    assert main(asked) == 0
    (row,) = json.loads((tmp_path / "cards.json").read_text())["rows"]
    assert row["compiled"]["tile"] == [128, 64] and not row["compiled"]["spills"]
    old, new = (one["estimate"]["cycles"] for one in (before, row))
    assert new["issue"] / 2 < 0.75 * old["issue"], "a tile has twice the rows"
    assert "| RTX 4090 | 128, fp8 | 128 x 64, 8 |" in capsys.readouterr().out


def test_the_table_of_the_docs_is_what_was_counted() -> None:
    root = Path(__file__).parents[2]
    rows = json.loads((root / "results" / "cards.json").read_text(encoding="utf-8"))["rows"]
    page = (root / "docs" / "other_cards.md").read_text(encoding="utf-8").splitlines()
    first = page.index(HEAD) + 2
    assert page[first : first + len(rows)] == [line(row) for row in rows]
    assert {row["card"] for row in rows} == set(CARDS)
    for row in rows:
        again = estimate(
            CARDS[row["card"]],
            row["compiled"],
            row["compiled"]["tile"],
            row["head_dim"],
            row["pv"],
        )
        assert again.low == pytest.approx(row["estimate"]["low"]), "the model has changed since"


def test_mistakes_are_refused(tmp_path: Path) -> None:
    assert main(["cards", "--only", "GTX 970", "--out", str(tmp_path)]) == 2
    with pytest.raises(SystemExit):
        main(["cards", "--tiles", "64x64"])
