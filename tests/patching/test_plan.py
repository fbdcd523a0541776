"""A plan gives the same bits whatever came first, and is refused where it does not fit."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.patching.models import MODELS, WAN, Model, mapped, named, run, wan
from tests.patching.vae import VAES
from turbo_rcm_patch import PatchConfig, is_patched, patch_model, patched, unpatch_model
from turbo_rcm_patch.errors import OutputError, PlanError
from turbo_rcm_patch.ops.attention import api as attention_api
from turbo_rcm_patch.patching import guard
from turbo_rcm_patch.patching.block import Level
from turbo_rcm_patch.patching.measure import BUDGET, Shares
from turbo_rcm_patch.patching.patch import report_of
from turbo_rcm_patch.patching.plan import Plan

BF16 = torch.bfloat16
_INT8 = {"attention": "int8", "linear": "int8"}


def planned(row: Model = WAN, inputs: Any = None, **options: Any) -> tuple[Plan, torch.Tensor]:
    """The plan of the guard's decisions on some inputs, and what the model returns by them."""
    model, inputs = row.model(BF16), row.inputs(dtype=BF16) if inputs is None else inputs
    report = patch_model(model, **_INT8 | options)
    assert report.plan is None  # Nothing is decided yet.
    out = run(model, inputs)
    assert report.plan is not None
    return report.plan, out


@pytest.mark.parametrize("row", MODELS, ids=str)
def test_a_plan_gives_the_bits_of_its_decisions_and_measures_nothing(
    row: Model, tmp_path: Path
) -> None:
    plan, out = planned(row, fidelity=0.8)
    assert Plan.load(plan.save(tmp_path / "plans" / "plan.json")) == plan
    model = row.model(BF16)
    report = patch_model(model, plan=tmp_path / "plans" / "plan.json")
    assert report.config == PatchConfig(**_INT8, fidelity=0.8) and report.plan == plan
    assert torch.equal(run(model, row.inputs(dtype=BF16)), out)
    assert not report.guard and report.guard.prediction == next(iter(plan.networks.values())).error


def test_the_first_video_no_longer_decides() -> None:
    easy, hard = WAN.inputs(dtype=BF16), WAN.inputs(dtype=BF16)
    hard["encoder_hidden_states"] = 0 * hard["encoder_hidden_states"]
    errors = [
        planned(inputs=inputs, fidelity=100.0)[0].networks[""].error for inputs in (easy, hard)
    ]
    report = patch_model(model := WAN.model(BF16), **_INT8, fidelity=100.0)
    found = []
    for inputs in (easy, hard, easy):
        report.guard.check_next()
        run(model, inputs)
        found.append(report.guard.prediction)
    assert found == [errors[0], errors[1], errors[1]], "the largest of all"
    between = sum(errors) / 2 / 0.95
    plans = {
        name: planned(inputs=inputs, fidelity=between)[0]
        for name, inputs in (("easy", easy), ("hard", hard))
    }
    assert plans["easy"].networks[""].blocks != plans["hard"].networks[""].blocks
    report = patch_model(model := WAN.model(BF16), **_INT8, fidelity=between)
    for inputs in (easy, hard):
        report.guard.check_next()
        run(model, inputs)
    assert report.plan is not None
    levels = [
        [block.level for block in plan.networks[""].blocks.values()]
        for plan in (report.plan, plans["hard"])
    ]
    assert levels[0] == levels[1]
    for name, block in report.plan.networks[""].blocks.items():
        before = plans["easy"].networks[""].blocks[name]
        assert block.level == before.level or block.shares.fast < before.shares.fast
    results = []
    for first in (easy, hard):
        with patched(model := WAN.model(BF16), plan=report.plan):
            run(model, first)
            results.append(run(model, easy))
    assert torch.equal(*results)


def test_a_plan_that_no_longer_holds_is_replaced_by_what_runs() -> None:
    """An attention whose error is within the budget, and far above what was planned."""
    plan, _ = planned(fidelity=100.0)
    report = patch_model(model := WAN.model(BF16), plan=plan)
    own = attention_api.attend
    off = lambda *args, **named: own(*args, **named) * 1.08  # noqa: E731
    with mock.patch.object(attention_api, "attend", off):
        for _ in range(12):
            run(model, WAN.inputs(dtype=BF16))
    assert {each.error < BUDGET for each in report.guard.decisions} == {True}
    assert "times what was measured" in report.guard.decisions[0].where
    assert "the plan does not hold" in str(report)
    assert report.plan is not None and report.plan != plan
    levels = [block.level for block in report.plan.networks[""].blocks.values()]
    assert levels == [block.level for block in report._blocks()] and any(levels)


def test_a_block_is_far_above_its_plan_by_more_than_the_authors_error() -> None:
    """Of blocks that are all compared, the network's error decides instead."""
    plan, _ = planned(fidelity=100.0)
    blocks = plan.networks[""].blocks
    small = {name: replace(block, shares=Shares(1e-12, 1e-12)) for name, block in blocks.items()}
    plan = replace(plan, networks={"": replace(plan.networks[""], blocks=small)})
    report = patch_model(model := WAN.model(BF16), plan=plan)
    own, inputs = attention_api.attend, WAN.inputs(dtype=BF16)
    for _ in range(12):
        run(model, inputs)
    assert not report.guard.decisions
    off = lambda *args, **named: own(*args, **named) * 1.08  # noqa: E731
    with mock.patch.object(attention_api, "attend", off):
        report.guard.check_next()
        run(model, inputs)
    assert not report.guard.decisions


def test_an_expert_that_did_not_run_keeps_its_plan() -> None:
    def experts() -> SimpleNamespace:
        models = [WAN.model(BF16) for _ in range(2)]
        return SimpleNamespace(transformer=models[0], transformer_2=models[1], vae=None)

    report = patch_model(pipe := experts(), **_INT8)
    for network in (pipe.transformer, pipe.transformer_2):
        run(network, WAN.inputs(dtype=BF16))
    report = patch_model(pipe := experts(), plan=(plan := report.plan))
    report._blocks()[0].raise_level(Level.EXACT_16BIT, "a test")
    run(pipe.transformer, WAN.inputs(dtype=BF16))
    assert plan is not None and report.plan is not None and report.plan != plan
    assert report.plan.networks["transformer_2"] == plan.networks["transformer_2"]


def damaged(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        held = json.loads(path.read_text())
        change(held)
        path.write_text(json.dumps(held))

    return write


def _block(held: dict[str, Any]) -> Any:
    return held["networks"][""]["blocks"]["blocks.1"]


@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        lambda path: path.write_text(path.read_text()[:-40]),
        lambda path: path.write_text("[]"),
        damaged(lambda held: held.pop("plan")),
        damaged(lambda held: held.update(plan=1)),
        damaged(lambda held: held.update(config={"attention": "int9"})),
        damaged(lambda held: held.update(made_with=[])),
        damaged(lambda held: held["networks"][""].update(tokens="12")),
        damaged(lambda held: held["networks"][""].update(dtype="load")),
        damaged(lambda held: held["networks"][""].pop("heads")),
        damaged(lambda held: held["networks"][""].update(command="rm")),
        damaged(lambda held: _block(held).update(level="exactly")),
        damaged(lambda held: _block(held).update(milliseconds=None)),
        damaged(lambda held: _block(held).update(milliseconds=10**400)),
        damaged(lambda held: held["networks"][""].update(dtype="int8")),
        damaged(lambda held: _block(held).update(shares=[1.0])),
        damaged(lambda held: _block(held).update(shares=[1.0, -1.0])),
        damaged(lambda held: _block(held).update(shares=[1.0, float("nan")])),
    ],
)
def test_a_damaged_file_is_refused(damage: Any, tmp_path: Path) -> None:
    path = planned()[0].save(tmp_path / "plan.json")
    damage(path)
    with pytest.raises(PlanError, match="plan.json"):
        patch_model(model := WAN.model(BF16), plan=path)
    assert not is_patched(model)


@pytest.mark.parametrize(
    ("model", "options", "named_fields"),
    [
        (lambda: named("cogvideox-5b").model(BF16), {}, ["CogVideoXTransformer3DModel"]),
        (lambda: WAN.model(torch.float16), {}, ["dtype bfloat16", "dtype float16"]),
        (lambda: wan(num_layers=3).to(BF16), {}, [r"blocks \(2\)", r"blocks \(3\)"]),
        (
            lambda: wan(num_attention_heads=4).to(torch.float16),
            {},
            ["dtype bfloat16; heads 2", "dtype float16; heads 4"],
        ),
        (
            lambda: WAN.model(BF16),
            {"linear": "as-is", "pv": "fp16"},
            ["pv='fp16', linear='as-is'"],
        ),
    ],
)
def test_a_plan_of_another_model_or_other_options_is_refused(
    model: Any, options: dict[str, Any], named_fields: list[str]
) -> None:
    plan = planned()[0]
    other = model()
    before = dict(vars(other))
    with pytest.raises(PlanError, match=".*".join(named_fields)):
        patch_model(other, plan=plan, **options)
    assert not is_patched(other) and vars(other) == before


def test_the_report_says_that_a_plan_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    report = patch_model(model := WAN.model(BF16), plan=planned(fidelity=100.0)[0])
    inputs = WAN.inputs(dtype=BF16)
    run(model, inputs)
    assert "blocks run by a plan, predicted error " in str(report)
    assert "does not hold" not in str(report)
    monkeypatch.setattr(guard, "BUDGET", 1e-9)
    for _ in range(4):  # The guard samples one block of the fourth forward.
        run(model, inputs)
    assert "the plan does not hold: the guard found more error in blocks.0-1" in str(report)


def test_two_experts_have_two_plans_and_one_of_them_serves_a_network_alone() -> None:
    pipe = SimpleNamespace(transformer=WAN.model(BF16), transformer_2=WAN.model(BF16), vae=None)
    report = patch_model(pipe, **_INT8, fidelity=100.0)
    run(pipe.transformer, WAN.inputs(dtype=BF16))
    assert report.plan is None
    run(pipe.transformer_2, mapped(WAN.inputs(dtype=BF16), lambda x: x * 0.5))
    plan = report.plan
    assert plan is not None and [*plan.networks] == ["transformer", "transformer_2"]
    text = str(plan)
    assert "transformer_2: WanTransformer3DModel, bfloat16: predicted error" in text
    assert "blocks.0-1: as asked" in text
    other = SimpleNamespace(transformer=WAN.model(BF16), transformer_2=WAN.model(BF16), vae=None)
    assert patch_model(other, plan=plan).plan == plan
    one = SimpleNamespace(transformer=WAN.model(BF16), vae=None)
    for network in (WAN.model(BF16), one):
        with pytest.raises(PlanError, match="got transformer and transformer_2"):
            patch_model(network, plan=plan)
    alone = Plan({"transformer": plan.networks["transformer"]}, plan.config)
    assert patch_model(WAN.model(BF16), plan=alone).plan == alone
    unpatch_model(other)
    with pytest.raises(PlanError, match="one for transformer and transformer_2; got transformer"):
        patch_model(other, plan=alone)
    networks = {name: getattr(other, name) for name in plan.networks}
    for network, each in plan.of_each(networks).items():
        patch_model(network, plan=each)
    with pytest.raises(PlanError, match="patched one by one"):
        assert report_of(other).plan


def test_a_plan_is_trusted_where_it_was_measured_and_nowhere_else(monkeypatch) -> None:
    """Another dtype or form of attention, and blocks that ran as their author wrote them."""
    plan, _ = planned(fidelity=0.8)
    report = patch_model(model := WAN.model(BF16), plan=plan)
    model.to(torch.float16)
    run(model, WAN.inputs(dtype=torch.float16))
    assert [each.when for each in report.guard if each.verdict == "kept"] == ["first"] * 2

    report = patch_model(model := WAN.model(BF16), **_INT8, fidelity=0.8)
    with torch.no_grad(), torch.autocast("cpu", dtype=BF16):
        model(**WAN.inputs(dtype=BF16))
    plan = report.plan
    assert plan is not None and "error not measured" in str(plan) and " tokens" not in str(plan)
    report = patch_model(model := WAN.model(BF16), plan=plan)
    run(model, WAN.inputs(dtype=BF16))
    assert {each.when for each in report.guard} == {"first"} and report.guard.prediction > 0.8

    report = patch_model(model := WAN.model(BF16), **_INT8, fidelity=100.0)
    model.blocks[1].attn1.register_forward_hook(lambda *_: None)
    run(model, WAN.inputs(dtype=BF16))
    report = patch_model(model := WAN.model(BF16), plan=report.plan)
    run(model, WAN.inputs(dtype=BF16))
    assert [(each.path, each.when) for each in report.guard] == [("blocks.1", "first")]
    assert report.plan is not None and all(
        any(block.shares) for block in report.plan.networks[""].blocks.values()
    )


def test_a_plan_without_a_target_measures_nothing_either() -> None:
    plan, _ = planned(fidelity=None)
    report = patch_model(model := WAN.model(BF16), plan=plan)
    run(model, WAN.inputs(dtype=BF16))
    assert not report.guard and report.plan == plan


def test_a_network_of_int8_weights_alone_has_a_plan(tmp_path: Path) -> None:
    model = WAN.model(BF16)
    report = patch_model(model, attention="int8", linear="int8-only")
    out = run(model, WAN.inputs(dtype=BF16))
    assert report.plan is not None and "bfloat16: predicted error" in str(report.plan)
    again = patch_model(other := WAN.model(BF16), plan=report.plan.save(tmp_path / "plan.json"))
    assert torch.equal(run(other, WAN.inputs(dtype=BF16)), out) and not again.guard


def test_a_plan_is_read_in_any_order_and_refused_in_words(tmp_path: Path) -> None:
    plan, _ = planned()
    blocks = dict(reversed(plan.networks[""].blocks.items()))
    plan = replace(plan, networks={"": replace(plan.networks[""], blocks=blocks)})
    assert patch_model(WAN.model(BF16), plan=plan).plan == plan
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="file"):
        plan.save(tmp_path / "file" / "plan.json")
    wrong: Any
    for wrong in ({}, plan.networks[""]):
        with pytest.raises(PlanError, match="or its file"):
            patch_model(WAN.model(BF16), plan=wrong)
    with pytest.raises(PlanError, match="a VAE alone"):
        patch_model(VAES[0].model(BF16), plan=plan)


def test_a_report_of_an_unpatched_model_has_no_plan() -> None:
    report = patch_model(model := WAN.model(BF16), plan=planned()[0])
    unpatch_model(model)
    with pytest.raises(PlanError, match="before the model is unpatched"):
        assert report.plan
    assert pickle.loads(pickle.dumps(report)).fused == report.fused


@pytest.mark.parametrize(
    ("change", "decided"),
    [
        (lambda block: None, True),
        (lambda block: block.attn1.register_forward_hook(lambda *_: None), True),  # its author's
        (
            lambda block: block.attn1.to_q.register_forward_hook(lambda *_: None),
            False,
        ),  # not twice
    ],
)
def test_only_what_was_decided_is_a_plan(change: Any, decided: bool) -> None:
    change((model := WAN.model(BF16)).blocks[0])
    report = patch_model(model)
    run(model, WAN.inputs(dtype=BF16))
    assert (report.plan is not None) == decided
    with patched(model := WAN.model(BF16), guard=False) as report:
        run(model, WAN.inputs(dtype=BF16))
        assert report.plan is None
