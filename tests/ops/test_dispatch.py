"""What decides how an attention runs: tables, the safe default, and measuring."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from turbo_rcm_patch import ops
from turbo_rcm_patch.errors import ConfigError, Fp8UnsupportedError
from turbo_rcm_patch.kernels.tile_table import made_with
from turbo_rcm_patch.ops import AttentionSpec, attention_skip, dispatch
from turbo_rcm_patch.ops.dispatch import keep_dispatch, measure_dispatch, resolved

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
AUTO = AttentionSpec(heads=12, attention="auto")


@pytest.fixture(autouse=True)
def own_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A cache folder of the test's own, and nothing decided before or after."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TURBO_RCM_PATCH_TILES", raising=False)
    dispatch.forget_tables()
    yield
    dispatch.forget_tables()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is an H200 by its name and capability."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(dispatch, "_device_name", lambda index: "NVIDIA H200")


def name(device: torch.device, n_q: int, n_kv: int, dim: int = 128, heads: int = 12) -> str:
    spec = AttentionSpec(heads=heads, attention="auto")
    return resolved(spec, device, n_q, n_kv, dim).attention


@pytest.mark.parametrize(
    ("capability", "has"),
    [((8, 0), False), ((8, 6), False), ((8, 8), False), ((8, 9), True), ((9, 0), True),
     ((10, 0), True), ((12, 0), True), ((7, 5), False)],
)  # fmt: skip
def test_e4m3_begins_with_compute_capability_8_9(
    capability: tuple[int, int], has: bool, card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert ops.resolve_pv("auto", CUDA) == ("fp8" if has else "bf16")
    if has:
        assert ops.resolve_pv("fp8", CUDA) == "fp8"
        return
    with pytest.raises(Fp8UnsupportedError, match=f"capability {capability[0]}.{capability[1]}"):
        ops.resolve_pv("fp8", CUDA)


def test_a_cpu_is_int8_at_every_length() -> None:
    for n in (1, 4000, 10**6):
        assert name(CPU, n, n) == "int8"
    q = torch.randn(1, 20, 32)
    asked, auto = (AttentionSpec(heads=2, attention=one) for one in ("int8", "auto"))
    assert torch.equal(attention_skip(q, q, q, asked), attention_skip(q, q, q, auto))
    assert resolved(auto, CPU, 20, 20, 16).attention == "int8"
    assert ops.attention_name(auto, q, q) == "int8"


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    ("n_q", "n_kv", "dim", "expected"),
    [
        (780, 780, 128, "exact"),
        (1950, 1950, 128, "exact"),
        (4096, 4096, 128, "int8"),
        (7800, 7800, 128, "int8"),
        (75600, 75600, 128, "int8"),
        (32760, 512, 128, "exact"),
        (17776, 17776, 64, "int8"),
        (17776, 226, 64, "exact"),
        (100, 100, 256, "exact"),  # not measured: the safe default
        (9000, 9000, 256, "int8"),
    ],
)
def test_an_h200_takes_what_was_measured(n_q: int, n_kv: int, dim: int, expected: str) -> None:
    assert name(CUDA, n_q, n_kv, dim) == expected


@pytest.mark.usefixtures("card")
def test_every_row_of_a_shipped_table_says_where_it_comes_from() -> None:
    results = Path(__file__).parents[2] / "results"
    for rows in dispatch._SHIPPED.values():
        for row in rows:
            assert not dispatch._row_problem(row)
            assert (results.parent / row["source"].split(":")[0]).is_file()


def test_an_unknown_gpu_has_a_safe_default(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_device_name", lambda index: "a card of next year")
    assert name(CUDA, 100_000, 4095) == "exact"
    assert name(CUDA, 100_000, 4096) == "int8"


@pytest.mark.usefixtures("card")
def test_what_is_asked_for_by_name_is_not_overruled() -> None:
    for attention in ("int8", "int4", "exact", "sage"):
        spec = AttentionSpec(heads=12, attention=attention)
        assert resolved(spec, CUDA, 100, 100, 128).attention == attention


@pytest.mark.usefixtures("card")
def test_pv_and_kernels_come_with_the_choice() -> None:
    long, short = (dispatch._choice(AUTO, CUDA, n, n, 128) for n in (8192, 100))
    assert (long.attention, long.pv, long.impl, long.kernels) == (
        "int8",
        "fp8",
        "triton",
        "Hopper",
    )
    assert "dispatch.json" in long.reason
    assert (short.attention, short.kernels) == ("exact", "torch")
    assert dispatch._choice(AUTO, CUDA, 8192, 8192, 80).kernels == "portable"


def test_a_device_without_an_index_is_the_current_one(
    card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    capabilities = [(9, 0), (8, 0)]
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: capabilities[device.index]
    )
    spec, any_card = AttentionSpec(heads=12), torch.device("cuda")
    for current, pv in enumerate(("fp8", "bf16")):
        monkeypatch.setattr(torch.cuda, "current_device", lambda own=current: own)
        assert resolved(spec, any_card, 8192, 8192, 128).pv == pv
        assert dispatch._choice(spec, any_card, 8192, 8192, 128).pv == pv


def test_a_decision_is_made_once(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolved(AUTO, CUDA, 8192, 8192, 128), dispatch.decider(CUDA)
    monkeypatch.setattr(dispatch, "_with", None)
    monkeypatch.setattr(dispatch, "crc32", None)
    assert (resolved(AUTO, CUDA, 8192, 8192, 128), dispatch.decider(CUDA)) == first
    monkeypatch.undo()


def test_rows_for_a_reader() -> None:
    rows = ops.dispatch_rows(None, CPU)
    assert len(rows) >= 4
    assert all(
        runs.startswith("int8") == ("prompt" not in shape) and why for shape, runs, why in rows
    )


def test_a_logsumexp_is_our_kernels(card: None) -> None:
    choice = dispatch._decided("auto", "auto", "auto", CUDA, 12, 128, 100, 100, False)
    assert choice.attention == "int8"


# --- measuring -----------------------------------------------------------------------------------


class Clock:
    """Time that passes only where an attention runs: 1 per call of int8 and a unit of work per
    256 keys; exact attention takes two units and has no start."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> None:
        units = k.shape[1] / 256
        self.now += 1.0 + units if spec.attention == "int8" else 2.0 * units


def test_a_table_is_measured_and_kept_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("turbo_rcm_patch.ops.attention.attention_skip", clock.run)
    table = measure_dispatch(CPU, lengths=(64, 128, 256, 512, 1024), heads=1, calls=2, clock=clock)
    assert list(table) == ["cpu"]
    rows = table["cpu"]
    assert all(not dispatch._row_problem(row) for row in rows)
    assert {row["made_with"] for row in rows} == {made_with()}
    # int8 is 1 + n / 256 against n / 128: equal at 256 keys, and faster from 512 on.
    assert [row["n_kv"] for row in rows if row["attention"] == "int8"] == [[512, None]] * 2
    assert "512 over 512 3000.000 ms (exact 4000.000)" in rows[0]["source"]
    path = keep_dispatch({"NVIDIA H200": rows})
    assert path == ops.dispatch_path()
    assert json.loads(path.read_text()) == {"NVIDIA H200": rows}
    keep_dispatch({"another card": rows})
    assert set(json.loads(path.read_text())) == {"NVIDIA H200", "another card"}


def test_the_user_s_table_is_read_first(card: None) -> None:
    assert name(CUDA, 600, 600) == "exact"
    keep_dispatch({"NVIDIA H200": [{"n_kv": [512, 1000], "attention": "int8", "source": "me"}]})
    assert name(CUDA, 600, 600) == "int8"


def test_choices_of_other_versions_are_told_and_not_used(
    card: None, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"n_kv": [512, 1000], "attention": "int8", "source": "me"}
    old, new = row | {"made_with": "triton 2.0"}, row | {"made_with": made_with()}
    for one, found in ((old, "exact"), (new, "int8"), (row, "int8")):
        caplog.clear()
        keep_dispatch({"NVIDIA H200": [one]})
        assert name(CUDA, 600, 600) == found
        assert [("triton 2.0" in x, "tune" in x) for x in caplog.messages] == [(True, True)] * (
            one is old
        )


def test_the_user_s_table_chooses_the_form(card: None) -> None:
    """No shipped table has a form, so that nobody looks for one until a user's has."""
    shape = (1, 600, 600, 12, 128, 1536, CUDA)
    assert ops.choose_form(*shape) == "two-launch" and not dispatch.forms_measured()
    row = {"n_kv": [512, 1000], "form": "one-launch", "features": 1536, "source": "me"}
    keep_dispatch({"NVIDIA H200": [row]})
    assert ops.choose_form(*shape) == "one-launch" and dispatch.forms_measured()
    assert ops.choose_form(*shape[:5], 64, CUDA) == "two-launch"
    assert name(CUDA, 100, 100) == "exact"


def test_int8_that_never_wins_has_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("turbo_rcm_patch.ops.attention.attention_skip", clock.run)
    table = measure_dispatch(CPU, lengths=(64, 128), heads=1, calls=1, clock=clock)
    assert [row["attention"] for row in table["cpu"]] == ["exact", "exact"]


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        "[]",
        '{"card": {}}',
        '{"card": [{"attention": "int2"}]}',
        '{"card": [{"n_kv": [1], "attention": "int8"}]}',
        '{"card": [{"n_kv": [1, null]}]}',
        '{"card": [{"keys": [1, 2], "attention": "int8"}]}',
        '{"card": [{"pv": "bf16"}]}',
        '{"card": [{"pv": "bf16", "form": "one-launch"}]}',
        '{"card": [{"n_kv": [9, 1], "attention": "int8"}]}',
        '{"card": [{"n_kv": [true, null], "attention": "int8"}]}',
    ],
)
def test_a_damaged_table_is_refused_with_a_remedy(card: None, text: str) -> None:
    path = ops.dispatch_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    with pytest.raises(ConfigError, match="dispatch table .*tune"):
        name(CUDA, 600, 600)


def test_a_table_that_names_fp8_for_a_card_without_it_is_named(
    card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    keep_dispatch({"NVIDIA H200": [{"attention": "int8", "pv": "fp8", "source": "me"}]})
    with pytest.raises(ConfigError, match=r"dispatch table .*dispatch\.json(.|\n)*tune"):
        name(CUDA, 600, 600)


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("dim", [64, 128, 40])
def test_below_which_length_attention_is_exact(dim: int) -> None:
    """The last length that is exact, and the first that is not, at any head size."""
    below = ops.exact_below(AUTO, CUDA, dim)
    assert 1000 < below < 10_000
    assert name(CUDA, below - 1, below - 1, dim) == "exact"
    assert name(CUDA, below, below, dim) == "int8"


def test_a_cpu_is_never_exact_on_its_own() -> None:
    assert ops.exact_below(AUTO, CPU, 128) == 0
    assert ops.exact_below(AttentionSpec(heads=12, attention="int8"), CPU, 128) == 0
