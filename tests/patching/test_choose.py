"""Levels are chosen that reach the target for the least time, and the forward that measured runs
again where they are others."""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.patching.models import WAN, run, wan
from turbo_rcm_patch import is_patched, patch_model, unpatch_model
from turbo_rcm_patch.patching import choose as module
from turbo_rcm_patch.patching import guard
from turbo_rcm_patch.patching.block import Level
from turbo_rcm_patch.patching.choose import choose
from turbo_rcm_patch.patching.families.wan import WanBlock
from turbo_rcm_patch.patching.measure import Shares, predicted
from turbo_rcm_patch.patching.ulysses import PARALLEL

BF16 = torch.bfloat16
LEVELS = (Level.AS_ASKED, Level.WIDE_VALUES, Level.EXACT)
TIMES = dict(zip(LEVELS, (1.0, 1.2, 1.8), strict=True))


def forms(*errors: float) -> dict[Level, Shares]:
    return {
        level: Shares(1e-4, 1e-4 * error) for level, error in zip(LEVELS, errors, strict=False)
    }


def chosen(*blocks: dict[Level, Shares], limit: float, times: Any = TIMES) -> list[int]:
    return [int(level) for level in choose(blocks, [times] * len(blocks), [], limit, BF16)]


@pytest.mark.parametrize(
    ("blocks", "limit", "expected"),
    [
        ([forms(0.8, 0.5, 0.4)] * 3, 1.0, [0, 0, 0]),  # it fits
        ([forms(1.3, 0.5, 0.4), forms(1.1, 1.0, 0.9), forms(0.9, 0.5, 0.4)], 1.0, [1, 0, 0]),
        ([forms(1.1, 0.5, 0.4)] * 4, 1.0, [1, 0, 0, 0]),  # of equal ones the first
        ([forms(1.1, 0.99, 0.1), forms(0.99, 0.98, 0.9)], 0.8, [2, 0]),  # over a level in between
        ([forms(9.0, 0.5, 0.4), *[forms(0.1, 0.1, 0.1)] * 20], 1.0, [1, *[0] * 20]),  # of one
        ([forms(9.0, 8.0, 7.0)] * 2, 1.0, [2, 2]),  # out of reach
        ([forms(1.1), forms(1.1, 2.0, 0.5)], 1.0, [0, 2]),  # no other level; one that is worse
        ([forms(9.0), forms(1.1, 0.5, 0.4)], 0.1, [0, 1]),  # near the least that is in reach
    ],
)
def test_levels_reach_the_limit_for_the_least_time(
    blocks: Any, limit: float, expected: list[int]
) -> None:
    assert chosen(*blocks, limit=limit) == expected


def test_blocks_that_were_decided_before_count() -> None:
    for error, expected in ((0.2, 0), (1.1, 1)):
        others = [Shares(1e-4, 1e-4 * error)] * 5
        assert choose([forms(1.2, 0.2, 0.1)], [TIMES], others, 1.0, BF16) == [expected]


def test_the_choice_is_near_the_best_of_all() -> None:
    random = torch.Generator().manual_seed(3)
    lost = []
    for _ in range(20):
        drawn = (0.3 + torch.rand(5, 3, generator=random)).sort(1, descending=True).values
        blocks = [forms(*errors.tolist()) for errors in drawn]
        every = itertools.product(LEVELS, repeat=5)
        costs = [
            sum(TIMES[level] for level in levels)
            for levels in every
            if predicted([b[level] for b, level in zip(blocks, levels, strict=True)], BF16) <= 0.85
        ]
        levels = choose(blocks, [TIMES] * 5, [], 0.85, BF16)
        if costs:
            lost.append(sum(TIMES[level] for level in levels) / min(costs))
    assert len(lost) > 10 and max(lost) < 1.15 and sum(lost) / len(lost) < 1.03


def test_time_is_counted_from_operations() -> None:
    report = patch_model(model := WAN.model(BF16), attention="int8", linear="int8", pv="fp8")
    run(model, WAN.inputs(dtype=BF16))
    block = report._blocks()[0]
    rates, measured = module.rates_of(torch.device("cpu"))
    assert not measured
    own = {
        level: module.milliseconds(block, level, "int8", "fp8", rates)
        for level in list(Level)[:-1]
    }
    assert own[Level.AS_ASKED] < own[Level.WIDE_VALUES] < own[Level.EXACT]
    for level in LEVELS:
        assert own[level] < own[level.joined(Level.LINEARS_16BIT)]
    assert own[Level.EXACT] - own[0] == pytest.approx(own[Level.EXACT_16BIT] - own[4])  # type: ignore[index]


def counted(model: Any, inputs: Any) -> tuple[torch.Tensor, float]:
    """A forward, and how many times each of its blocks ran, on average."""
    with mock.patch.object(WanBlock, "fast", autospec=True, side_effect=WanBlock.fast) as fast:
        return run(model, inputs), fast.call_count / len(model.blocks)


def few(layers: int = 3, **options: Any) -> tuple[Any, Any, Any]:
    model = wan(num_layers=layers).to(BF16).eval().requires_grad_(False)
    options = {"attention": "int8", "pv": "fp8", "fidelity": 0.01} | options
    return model, WAN.inputs(dtype=BF16), options


@pytest.mark.parametrize("fidelity", [0.01, 100.0])
def test_a_first_forward_runs_again_only_if_it_decided(fidelity: float) -> None:
    model, inputs, options = few(fidelity=fidelity)
    attributes = dict(vars(model))
    report = patch_model(model, **options)
    first, runs = counted(model, inputs)
    assert runs == (2 if fidelity < 1 else 1)
    later, runs = counted(model, inputs)
    assert torch.equal(first, later) and runs == 1
    assert bool(report.guard.decisions) == (fidelity < 1)
    unpatch_model(model)
    assert vars(model) == attributes


def test_a_network_is_called_as_its_author_says() -> None:
    """Modular pipelines read the names of the parameters, and so does torch.export."""
    model, _, options = few()
    expected = inspect.signature(model.forward)
    patch_model(model, **options)
    assert inspect.signature(model.forward) == expected
    assert inspect.signature(copy.deepcopy(model).forward) == expected


def _fails_once(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    calls, own = itertools.count(), WanBlock.fast

    def fast(self: Any, *inputs: Any, **notes: Any) -> Any:
        if next(calls) == at:
            raise KeyError  # a new one: a traceback keeps the model
        return own(self, *inputs, **notes)

    monkeypatch.setattr(WanBlock, "fast", fast)


MIXED: Any = {"layers": 6, "linear": "int8", "fidelity": 0.97}


def levels_of(report: Any) -> list[int]:
    return [int(block.level) for block in report._blocks()]


@pytest.mark.parametrize("at", [2, 5])  # in the middle, in the last block
def test_a_first_forward_that_fails_decides_nothing(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs, options = few(**MIXED)
    report = patch_model(model, **options)
    expected = run(model, inputs)
    levels = levels_of(report)
    assert len(set(levels)) > 1
    model, _, _ = few(6)
    report = patch_model(model, **options)
    weight = weakref.ref(model.proj_out.weight)
    _fails_once(monkeypatch, at)
    with pytest.raises(KeyError):
        run(model, inputs)
    again = run(model, inputs)
    assert levels_of(report) == levels and torch.equal(again, expected)
    unpatch_model(model)
    report = patch_model(model, **options)
    _fails_once(monkeypatch, 1)
    with pytest.raises(KeyError):
        run(model, inputs)
    unpatch_model(model)
    del model
    gc.collect()
    assert weight() is None, "a report keeps no weights"


def test_a_comparison_that_memory_is_short_for_decides_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, inputs, options = few(**MIXED)
    report = patch_model(model, **options)
    run(model, inputs)
    levels = levels_of(report)
    calls, own = itertools.count(), guard._run_original_rows

    def rows(*given: Any) -> Any:
        if next(calls) == 1:
            raise torch.OutOfMemoryError("out of memory")
        return own(*given)

    monkeypatch.setattr(guard, "_run_original_rows", rows)
    model, _, _ = few(6)
    report = patch_model(model, **options)
    run(model, inputs)
    assert not any(levels_of(report))
    run(model, inputs)
    assert levels_of(report) == levels


def test_a_thread_that_another_one_overtakes_takes_its_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, inputs, options = few(**MIXED)
    report = patch_model(model, **options)
    own, at, overtaken = WanBlock.fast, threading.Event(), threading.Event()

    def fast(self: Any, *given: Any, **notes: Any) -> Any:
        slow = threading.current_thread().name.startswith("slow")
        if slow and self.index == 2 and not overtaken.is_set():
            at.set()
            overtaken.wait(60)
        return own(self, *given, **notes)

    monkeypatch.setattr(WanBlock, "fast", fast)
    with ThreadPoolExecutor(1, "slow") as pool:
        slow = pool.submit(run, model, inputs)
        at.wait(60)
        first = run(model, inputs)
        levels = levels_of(report)
        overtaken.set()
    assert torch.equal(slow.result(), first) and levels_of(report) == levels
    assert torch.equal(run(model, inputs), first)


def test_a_network_that_is_parallel_already_runs_again_inside_of_that() -> None:
    """What `parallel` runs on a rank is decided there; the exchange around it runs once."""
    model, inputs, options = few()
    vars(model)[PARALLEL] = held = SimpleNamespace(inner=model.forward, describe=list)
    exchanges = itertools.count()

    def exchange(*args: Any, **named: Any) -> Any:
        next(exchanges)
        return held.inner(*args, **named)

    model.forward = exchange
    report = patch_model(model, **options)
    first, runs = counted(model, inputs)
    assert runs == 2 and report.guard.decisions and next(exchanges) == 1
    assert torch.equal(run(model, inputs), first)
    unpatch_model(model)
    assert model.forward is exchange and held.inner.__func__ is type(model).forward


def test_a_kept_forward_of_an_unpatched_network_is_the_authors() -> None:
    model, inputs, options = few()
    patch_model(model, **options)
    kept = model.forward
    unpatch_model(model)
    model.forward = kept
    assert not is_patched(model)
    run(model, inputs)


def _notes(*_: Any) -> None:
    """A hook that may keep something."""


def by_class(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda self, *a, **k: own(self, *a, **k))


#: As group offloading notes the order of modules on a first forward.
TRACKER = SimpleNamespace(hooks={"layer_execution_tracker": None}, _fn_refs=())


def sharded(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `fully_shard` leaves a module: its ranks have to run together."""
    mixin = type("FSDPModule", (), {"__module__": "torch.distributed.fsdp"})
    embedder = model.condition_embedder
    own = type(embedder)
    held = {"__module__": own.__module__}
    monkeypatch.setattr(embedder, "__class__", type("FSDP", (mixin, own), held))


def by_instance(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = model.forward
    model.forward = MethodType(lambda self, *a, **k: own(*a, **k), model)


@pytest.mark.parametrize(
    "change",
    [
        lambda model, _: model.condition_embedder.register_forward_hook(_notes),
        by_class,
        sharded,
        lambda model, _: vars(model.condition_embedder).update(_diffusers_hook=TRACKER),
        lambda model, patch: patch.setattr(
            model.blocks[2].forward.__self__, "replaced_attention", lambda: "attend"
        ),
    ],
)
def test_what_keeps_a_state_is_not_run_again(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decision counts from the next forward on."""
    model, inputs, options = few()
    report = patch_model(model, **options)
    change(model, monkeypatch)
    first, runs = counted(model, inputs)
    decided = len(report.guard.decisions)
    assert runs == 1 and decided in (2, 3)
    later, _ = counted(model, inputs)
    assert not torch.equal(first, later)
    assert report.last_forward["fused with exact attention"] == decided


@pytest.mark.parametrize("before", [True, False])
def test_a_forward_that_other_code_replaced_decides_for_the_next(
    before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs, options = few()
    if before:
        by_instance(model, monkeypatch)
    report = patch_model(model, **options)
    if not before:
        by_instance(model, monkeypatch)
    theirs = model.forward
    run(model, inputs)
    run(model, inputs)
    assert report.last_forward == {"fused with exact attention": 3}
    unpatch_model(model)
    assert model.forward is theirs
    run(model, inputs)
    report = patch_model(model, **options)
    run(model, inputs)  # measured, and decided by the next one
    unpatch_model(model)
    weight = weakref.ref(model.proj_out.weight)
    del model, theirs
    gc.collect()
    assert weight() is None and report.pairs, "a report keeps no weights"
