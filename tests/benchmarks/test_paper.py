"""Forwards on more GPUs than there are, from parts that were measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.paper import CASES, NETWORKS, Links, predicted, table

FAST = Links("fast", 0.0, 1e9)
SLOW = Links("slow", 0.03, 25.0)


def parts() -> dict[str, Any]:
    """Times in proportion to the work."""
    found: dict[str, Any] = {"host": 0.0, "all to all": {"1024": 0.02, "67108864": 0.22}}
    for name, (heads, _) in NETWORKS.items():
        known: dict[str, Any] = {"once": 0.0, "tokens": {}, "attention": {}}
        totals = [total for network, total in CASES if network == name]
        for n in {total // degree for total in totals for degree in (1, 2, 4, 8)}:
            known["tokens"][str(n)] = n * heads / 1e5
        for total in totals:
            known["attention"][str(total)] = {
                "1": total**2 / 4e9,
                str(heads): heads * total**2 / 4e9,
            }
        found[name] = known
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_without_exchanges_work_divides_by_the_ranks(case: tuple[str, int]) -> None:
    one = predicted(parts(), case, 1, links=FAST)
    heads, blocks = NETWORKS[case[0]]
    expected = blocks * (case[1] * heads / 1e5 + heads * case[1] ** 2 / 4e9)
    assert one["milliseconds"] == pytest.approx(expected)
    for ulysses, ring in ((2, 1), (4, 1), (4, 2)):
        some = predicted(parts(), case, ulysses, ring, links=FAST, around=FAST)
        work = some["milliseconds"] - some["copies"] - some["exposed"]
        assert work == pytest.approx(expected / ulysses / ring, rel=1e-3)
        assert some["exposed"] < 1e-3


def test_what_links_cost() -> None:
    """Slow links cost by their bytes, and a ring hides them behind its attention."""
    case = CASES[0]
    fast, slow = (predicted(parts(), case, 2, links=links) for links in (FAST, SLOW))
    # Half of the heads go first, and the other rank has half of these.
    n, attention = 16_380, 6 * 32_760**2 / 4e9
    wire = 16_384 * 12 * 128 / 2 / 2 / 25e6 + 0.03
    first = 3 * wire - 2 * 6 * n * 12 * 128 / 3e9 + 0.03  # while two are quantised, and scales
    second = 3 * wire - attention / 2
    back = 2 * n * 12 * 128 / 2 / 2 / 25e6 + 0.03 - attention / 4  # while own queries are computed
    assert min(first, second, back) > 0
    assert slow["exposed"] == pytest.approx(30 * (first + second + back))
    assert slow["milliseconds"] - fast["milliseconds"] == pytest.approx(slow["exposed"], rel=1e-3)
    assert fast["exposed"] < 1e-3
    ring = predicted(parts(), case, 1, 2, links=FAST, around=Links("", 0.03, 100.0))
    assert ring["exposed"] == 0.0
    crawling = Links("crawling", 0.0, 1.0)
    wire = 2 * 16_384 * 12 * 128 / 1e6
    exposed = predicted(parts(), case, 1, 2, links=FAST, around=crawling)["exposed"]
    assert exposed == pytest.approx(30 * (wire - 12 * 32_760**2 / 4e9 / 4))
    late = parts() | {"host": 1e3}
    assert predicted(late, case, 2, links=FAST)["host is the limit"]
    assert predicted(late, case, 2, links=FAST)["milliseconds"] == 30e3


def test_the_table_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "parallel_paper.json").write_text(json.dumps(parts()), encoding="utf-8")
    assert main(["parallel", "--paper", "--out", str(tmp_path)]) == 0
    screen = capsys.readouterr().out
    found = json.loads((tmp_path / "parallel_table.json").read_text(encoding="utf-8"))
    assert len(found["rows"]) == len(table(parts() | {"host": 3.6}))
    forms = {(row["network"], row["form"]) for row in found["rows"]}
    assert ("14b", "Ulysses 8") in forms and ("1.3b", "Ulysses 8") not in forms
    assert ("1.3b", "Ulysses 4 x ring 2") in forms
    assert "PCIe at 25 GB/s" in screen and "400 Gb/s" in screen
    assert all(line in screen for line in found["assumptions"])
    # The host's time for a forward on two ranks is that of parallel.json.
    slowest = [row for row in found["rows"] if row["host is the limit"]]
    assert all(row["milliseconds"] >= 100 for row in slowest)
