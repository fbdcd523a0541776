"""The first use of a card without measurements, with a device and a clock that are not there."""

from __future__ import annotations

import json
import logging
import pwd
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.patching.wan import run, wan
from turbo_rcm_patch import patch_model
from turbo_rcm_patch.ops import AttentionSpec, dispatch
from turbo_rcm_patch.ops import self_test as module
from turbo_rcm_patch.ops.dispatch import keep_dispatch, resolved, self_test_path

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
AUTO = AttentionSpec(heads=2, attention="auto")


@pytest.fixture(autouse=True)
def own_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TURBO_RCM_PATCH_TILES", raising=False)
    module._done.clear()
    dispatch._held.clear()
    dispatch.forget_tables()
    yield
    module._done.clear()
    dispatch._held.clear()
    dispatch.forget_tables()


class Card:
    """Attention with an error and a time of its own for each way, and a clock that shows it."""

    def __init__(self, **int8: Any) -> None:
        self.now, self.calls = 0.0, 0
        self.wrong: dict[str, float] = int8.get("wrong", {})
        self.start, self.raises = int8.get("start", 0.0), int8.get("raises")

    def clock(self) -> float:
        return self.now

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        self.calls += 1
        if spec.attention == "int8" and self.raises is not None:
            raise self.raises
        work = k.shape[1] / 1000
        self.now += self.start + work if spec.attention == "int8" else 2 * work
        if k.shape[1] != module._TOKENS:
            return q
        apart = (x.unflatten(-1, (spec.heads, -1)).transpose(1, 2) for x in (q, k, v))
        exact = F.scaled_dot_product_attention(*apart).transpose(1, 2).flatten(2)
        return exact * (1 + self.wrong.get(spec.pv, 0.02))


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[Any], str, Card]]:
    """Rows and words of a test of such a card."""

    def test(pv: str = "fp8", **about: Any) -> tuple[list[Any], str, Card]:
        card = Card(**about)
        monkeypatch.setattr("turbo_rcm_patch.ops.attention.attention_skip", card.attention)
        monkeypatch.setattr(module, "resolve_pv", lambda *_: pv)
        monkeypatch.setattr(module, "_LENGTHS", (256, 512, 1024))
        rows, words = module.self_test(CPU, 64, 2, clock=card.clock)
        assert all(not dispatch._row_problem(row) for row in rows)
        assert all(row["head_dim"] == [64, 64] for row in rows)
        return rows, words, card

    return test


def test_a_card_where_int8_wins(tested: Any) -> None:
    rows, words, card = tested(start=0.4)  # 0.4 + n against 2 n: from 512 on
    assert [row["attention"] for row in rows] == ["int8", "exact"]
    assert rows[0]["n_q"] == [512, None] and "pv" not in rows[0]
    assert words.startswith("self test: int8 attention from 512 tokens on")
    assert "512 over 512" in rows[0]["source"]
    assert card.calls < 150


def test_a_card_where_it_loses_runs_exact_attention(tested: Any) -> None:
    rows, words, _ = tested(start=100.0)
    assert [row["attention"] for row in rows] == ["exact"]
    assert "slower than torch's; exact attention runs" in words


def test_fp8_that_is_wrong_gives_way_to_bf16(tested: Any) -> None:
    rows, words, _ = tested(wrong={"fp8": 0.5})
    assert rows[0]["attention"] == "int8" and rows[0]["pv"] == "bf16"
    assert "p and v in fp8 is wrong (relative L2 0.5)" in words


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"wrong": {"fp8": 0.5, "bf16": float("nan")}}, "p and v in bf16 is wrong"),
        ({"raises": RuntimeError("out of resource: shared memory\nmore")}, "out of resource"),
    ],
)
def test_kernels_that_are_wrong_or_fail_are_not_used(
    about: dict[str, Any], said: str, tested: Any
) -> None:
    rows, words, _ = tested(**about)
    assert [row["attention"] for row in rows] == ["exact"]
    assert said in words and "more" not in words and "\n" not in words


def test_an_error_at_a_length_that_is_timed_leaves_exact_attention(
    tested: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: Any, **__: Any) -> None:
        raise RuntimeError("Triton Error [CUDA]: misc\nmore")

    monkeypatch.setattr(module, "measure_dispatch", measure)
    rows, words, _ = tested()
    assert [row["attention"] for row in rows] == ["exact"]
    assert "fails (RuntimeError: Triton Error [CUDA]: misc); exact attention runs" in words


def test_a_memory_that_is_full_while_timing_is_told_apart(
    tested: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(module, "measure_dispatch", measure)
    with pytest.raises(torch.OutOfMemoryError):
        tested()


def test_it_draws_no_random_number(tested: Any) -> None:
    state = torch.get_rng_state()
    tested()
    assert torch.equal(torch.get_rng_state(), state)


# --- once, and kept ------------------------------------------------------------------------------

ROWS = [{"head_dim": [64, 64], "attention": "exact", "source": "self test: slow"}]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An unmeasured GPU; what is tested on it, by head size."""
    found: list[int] = []

    def test(device: torch.device, head_dim: int, heads: int) -> tuple[list[Any], str]:
        found.append(head_dim)
        return [row | {"head_dim": [head_dim, head_dim]} for row in ROWS], "self test: slow"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(dispatch, "_device_name", lambda index: "Card 1")
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 12080, raising=False)
    monkeypatch.setattr(module, "self_test", test)
    return found


def attention(head_dim: int, tokens: int = 9000) -> str:
    return resolved(AUTO, CUDA, tokens, tokens, head_dim).attention


def test_it_runs_once_for_a_head_size_and_is_kept(card: list[int], caplog: Any) -> None:
    assert attention(64) == "int8", "the default"
    with caplog.at_level(logging.WARNING):
        module.ensure_tested(CUDA, 64, 2)
    assert caplog.messages == ["Card 1: self test: slow"], "one line where it falls back"
    assert attention(64) == "exact" and attention(128) == "int8"
    module.ensure_tested(CUDA, 64, 2)
    module.ensure_tested(CUDA, 128, 2)
    assert card == [64, 128] and attention(128) == "exact"
    kept = json.loads(self_test_path().read_text())["Card 1"]
    assert kept["made_with"].startswith("driver 12080, triton") and len(kept["rows"]) == 2
    assert self_test_path().parent == dispatch.dispatch_path().parent
    assert "the self test of this card" in dispatch.measured_here(CUDA)
    another_process()
    module.ensure_tested(CUDA, 64, 2)
    assert card == [64, 128], "read from the file"


def another_process() -> None:
    module._done.clear()
    dispatch._held.clear()
    dispatch.forget_tables()


def test_another_driver_is_tested_again(card: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    module.ensure_tested(CUDA, 64, 2)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13000, raising=False)
    another_process()
    assert attention(64) == "int8"
    module.ensure_tested(CUDA, 64, 2)
    assert card == [64, 64] and attention(64) == "exact"


@pytest.mark.parametrize("text", ["{", "[]", '{"Card 1": 3}', '{"Card 1": {"rows": [1]}}'])
def test_a_file_that_cannot_be_used_is_written_again(card: list[int], text: str) -> None:
    self_test_path().parent.mkdir(parents=True, exist_ok=True)
    self_test_path().write_text(text)
    assert attention(64) == "int8"
    module.ensure_tested(CUDA, 64, 2)
    assert attention(64) == "exact" and "rows" in self_test_path().read_text()


@pytest.mark.parametrize("lacking", ["write", "entry", "home"])
def test_a_folder_that_cannot_be_written_or_is_not_there(
    lacking: str, card: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The result is good for this process, whatever it lacks."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError("not yours")

    def unknown(user: int) -> object:
        raise KeyError(user)

    if lacking == "write":
        monkeypatch.setattr(module, "atomic", refuse)
    elif lacking == "entry":
        monkeypatch.setattr(Path, "stat", refuse)
        monkeypatch.setattr(Path, "read_text", refuse)
        monkeypatch.setattr(Path, "mkdir", refuse)
    else:
        for name in ("HOME", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(pwd, "getpwuid", unknown)
    dispatch.forget_tables()
    assert attention(64) == "int8" and not dispatch.measured_here(CUDA)
    module.ensure_tested(CUDA, 64, 2)
    module.ensure_tested(CUDA, 128, 2)
    assert card == [64, 128] and attention(64) == attention(128) == "exact"
    assert dispatch.measured_here(CUDA) == "the self test of this card (of this process)"
    monkeypatch.undo()
    assert not list(tmp_path.rglob("self_test.json"))


def test_never_where_something_is_measured(card: list[int], monkeypatch: Any) -> None:
    keep_dispatch({"Card 1": [{"attention": "int8", "source": "tune"}]})
    module.ensure_tested(CUDA, 64, 2)
    monkeypatch.setattr(dispatch, "_device_name", lambda index: "NVIDIA H200")
    module.ensure_tested(CUDA, 64, 2)
    assert not card and attention(64) == "int8"
    assert "shipped table" in dispatch.measured_here(CUDA)


@pytest.mark.parametrize("where", ["cpu", "capture", "compile", "ranks", "fake"])
def test_never_where_nothing_may_be_run(
    where: str, card: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = CPU if where == "cpu" else CUDA
    if where == "capture":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    elif where == "compile":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    elif where == "ranks":
        monkeypatch.setattr(module, "_several_ranks", lambda: True)
    if where == "fake":
        from torch._subclasses import FakeTensorMode

        with FakeTensorMode():
            module.ensure_tested(device, 64, 2)
    else:
        module.ensure_tested(device, 64, 2)
    assert not card
    monkeypatch.undo()
    assert not module._done, "a later forward may test it"


def test_too_little_memory_leaves_the_default_and_says_so(
    card: list[int], monkeypatch: Any, caplog: Any
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(module, "self_test", full)
    with caplog.at_level(logging.INFO):
        module.ensure_tested(CUDA, 64, 2)
        module.ensure_tested(CUDA, 64, 2)
    assert attention(64) == "int8" and not self_test_path().exists()
    assert caplog.messages == ["Card 1 is not tested: too little memory is free"], "once"


@pytest.mark.parametrize(
    ("options", "asked"),
    [({}, True), ({"self_test": False}, False), ({"attention": "int8"}, False)],
)
def test_a_forward_asks_for_it(
    options: dict[str, Any], asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    monkeypatch.setattr("turbo_rcm_patch.patching.block.ensure_tested", lambda *a: found.append(a))
    model = wan()
    patch_model(model, guard=False, **options)
    run(model)
    assert found == [(CPU, 64, 2)] * asked
