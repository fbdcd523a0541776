"""SLA in diffusers' Wan: an attention that holds a proj_l is sparse-linear once it is patched."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.patching.sla import (
    BF16,
    BY_CASE,
    EXACT,
    I2V,
    INT8,
    T2V,
    TI2V,
    TIGHT,
    TOPK,
    inputs_of,
    names,
    oracle,
    run,
    with_sla,
)
from tests.patching.wan import Case, relative
from tests.patching.wan_family import classes, named
from turbo_rcm_patch import PatchConfig, find_pairs, patched
from turbo_rcm_patch.patching.sla import attached_proj_l, detach_proj_l

THE_REST = ("chronoedit", "animate", "skyreels-forcing", "vace", "flf2v")


# --- what it computes ---------------------------------------------------------------------------


@pytest.mark.parametrize("case", BY_CASE, ids=names(BY_CASE))
@pytest.mark.parametrize("topk", [0.2, 1.0])
def test_exact_attention_is_sla_as_it_is_defined(case: Case, topk: float) -> None:
    model, given = with_sla(case.model()), inputs_of(case)
    dense, expected = run(model, given), run(oracle(model, topk), given)
    assert relative(dense, expected) > 0.05
    with patched(model, PatchConfig(attention="exact", guard=False, sla_topk=topk)):
        assert relative(run(model, given), expected) < TIGHT
    assert torch.equal(run(model, given), dense)


@pytest.mark.supports("WanTransformer3DModel", "SLA")
@pytest.mark.parametrize("case", BY_CASE, ids=names(BY_CASE))
def test_int8_stays_near_it(case: Case) -> None:
    model, given = with_sla(case.model()), inputs_of(case)
    expected = run(oracle(model), given)
    with patched(model, INT8):
        assert 0 < relative(run(model, given), expected) < 0.02
    with patched(model, PatchConfig(attention="int4", guard=False, sla_topk=TOPK)):
        assert 0.03 < relative(run(model, given), expected) < 0.5


@pytest.mark.parametrize("case", [T2V, I2V, TI2V], ids=names([T2V, I2V, TI2V]))
@pytest.mark.parametrize("config", [EXACT, INT8], ids=["exact", "int8"])
def test_in_bf16_it_is_as_near_the_truth_as_the_plain_form(
    case: Case, config: PatchConfig
) -> None:
    """Every key, so that no rounding decides about a block."""
    model, given = with_sla(case.model(BF16)), inputs_of(case, BF16)
    wide = {
        name: x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in given.items()
    }
    plain = oracle(model, 1.0)
    truth, theirs = run(copy.deepcopy(plain).float(), wide), run(plain, given)
    with patched(model, replace(config, sla_topk=1.0)):
        output = run(model, given)
    assert output.dtype == BF16
    assert relative(output, truth) < 1.5 * relative(theirs, truth) + 0.005


def test_a_cast_of_the_model_leaves_proj_l_in_fp32() -> None:
    model = with_sla(T2V.model())
    before = [x.clone() for x in attached_proj_l(model.blocks[0].attn1) or ()]
    model.to(BF16).to(torch.float32)
    after = attached_proj_l(model.blocks[0].attn1) or ()
    assert len(after) == 2 and all(map(torch.equal, before, after))
    assert all(x.dtype == torch.float32 for x in after)


@pytest.mark.parametrize("linear", ["as-is", "int8"])
def test_other_linears_are_called_and_attention_is_sparse_all_the_same(linear: Any) -> None:
    model, given = with_sla(T2V.model()), inputs_of(T2V)
    calls: list[str] = []

    class Adapted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append("called")
            return super().forward(x) + 0.1 * x

    for block in model.blocks:
        for holder, name in ((block.attn1, "to_q"), (block.attn1.to_out, "0")):
            adapted = Adapted(128, 128)
            adapted.load_state_dict(getattr(holder, name).state_dict())
            setattr(holder, name, adapted.requires_grad_(False))
    expected = run(oracle(model), given)
    calls.clear()
    config = PatchConfig(guard=False, sla_topk=TOPK, attention="exact", linear=linear)
    with patched(model, config) as report:
        assert report.pairs[0].runs == "after-linear" and "Adapted" in report.pairs[0].reason
        assert "sparse" in report.pairs[0].reason
        error = relative(run(model, given), expected)
    assert error < TIGHT if linear == "as-is" else 0 < error < 0.05
    assert len(calls) == 4


# --- which pairs there are ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attention", "runs"), [("int8", "in-kernel"), ("int4", "in-kernel"), ("exact", "as-written")]
)
def test_the_sum_of_the_branches_is_a_pair_of_its_own(attention: Any, runs: str) -> None:
    model = with_sla(I2V.model())
    if attention == "int8":
        assert [pair.kind for pair in find_pairs(model)[:4]] == ["self", "self", "cross", "image"]
        assert "sla_topk=0.1" in find_pairs(model)[0].reason
    with patched(model, PatchConfig(attention=attention, guard=False, sla_topk=0.25)) as report:
        assert len(report.pairs) == 10
        first, linear = report.pairs[:2]
        assert first.path == "blocks.0.attn1" and linear.path == "blocks.0.attn1.proj_l"
        assert (first.runs, linear.runs) == ("two-launch", runs)
        assert first.projection and not linear.projection
        assert "sparse" in first.reason and "sla_topk=0.25" in first.reason
        assert "sla_topk=0.25" in str(report)
        assert report.as_dict()["config"]["sla_topk"] == 0.25


def test_one_launch_is_for_dense_attention() -> None:
    model = with_sla(T2V.model())
    detach_proj_l(model.blocks[1].attn1)
    with patched(model, PatchConfig(form="one-launch", guard=False)) as report:
        assert [pair.runs for pair in report.pairs if pair.path.endswith("attn1")] == [
            "two-launch",
            "one-launch",
        ]


def test_sage_has_no_sparse_kernel_and_is_not_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    from turbo_rcm_patch.patching import patch

    monkeypatch.setattr(patch, "_check_sage", lambda device: None)
    model, given = with_sla(T2V.model()), inputs_of(T2V)
    expected = run(oracle(model), given)
    config = PatchConfig(attention="sage", kinds=("self",), guard=False, sla_topk=TOPK)
    with patched(model, config) as report:
        first, linear = report.pairs[:2]
        assert (first.runs, linear.runs) == ("after-linear", "as-written")
        assert "sage" in first.reason and "in plain torch" in first.reason
        assert relative(run(model, given), expected) < TIGHT


def dense_by_kinds(model: Any) -> PatchConfig:
    return PatchConfig(kinds=("cross", "feed-forward"), attention="exact", guard=False)


def dense_by_processor(model: Any) -> PatchConfig:
    class Mine(type(model.blocks[0].attn1.processor)):
        pass

    for block in model.blocks:
        block.attn1.processor = Mine()
    return EXACT


def dense_by_forward(model: Any) -> PatchConfig:
    for block in model.blocks:
        own = block.attn1.forward
        block.attn1.forward = lambda *args, own=own, **kwargs: own(*args, **kwargs)
    return EXACT


@pytest.mark.parametrize("leave", [dense_by_kinds, dense_by_processor, dense_by_forward])
def test_what_is_left_dense_is_said(leave: Any) -> None:
    model, given = with_sla(T2V.model()), inputs_of(T2V)
    dense, config = run(model, given), leave(model)
    with patched(model, config) as report:
        for pair in report.pairs[:2]:
            assert "it runs dense, without SLA" in pair.reason
        assert report.pairs[1].runs == "as-written"
        assert relative(run(model, given), dense) < TIGHT
        assert "it runs dense, without SLA" in str(report)


def test_a_mask_leaves_it_dense() -> None:
    family = named("skyreels-masked")
    model, given = with_sla(family.model()), family.inputs()
    dense = run(model, given)
    with patched(model, EXACT) as report:
        assert "it runs dense, without SLA" in report.pairs[0].reason
        assert relative(run(model, given), dense) < TIGHT


def test_a_mask_that_comes_after_patching_leaves_it_dense() -> None:
    """SkyReels' pipeline sets the size of its causal blocks when it is called."""
    family = named("skyreels-masked")
    model, given = with_sla(family.model()), family.inputs()
    dense, frames = run(model, given), model.config.num_frame_per_block
    model.register_to_config(num_frame_per_block=1)
    for config in (EXACT, INT8):
        with patched(model, config):
            model._set_ar_attention(frames)
            assert relative(run(model, given), dense) < 0.02
            model.register_to_config(num_frame_per_block=1)


@pytest.mark.supports(classes(map(named, THE_REST)), "SLA")
@pytest.mark.parametrize("name", THE_REST)
def test_the_rest_of_the_family_runs_it_too(name: str) -> None:
    family = named(name)
    model, given = with_sla(family.model()), family.inputs()
    expected = run(oracle(model), given)
    with patched(model, EXACT) as report:
        assert sum(pair.path.endswith("proj_l") for pair in report.pairs) == 2
        assert relative(run(model, given), expected) < TIGHT
    with patched(model, INT8) as report:
        assert sum(pair.fused for pair in report.pairs if pair.path.endswith("proj_l")) == 2
        assert 0 < relative(run(model, given), expected) < 0.02
