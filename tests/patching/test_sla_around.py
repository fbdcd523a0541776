"""SLA in diffusers' Wan: under hooks, the guard and autocast, and that everything goes back."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import nn

from tests.patching.sla import (
    EXACT,
    I2V,
    INT8,
    T2V,
    TIGHT,
    TOPK,
    inputs_of,
    oracle,
    run,
    with_sla,
    without_sla,
)
from tests.patching.wan import Case, dicts, relative
from tests.patching.wan_family import named
from turbo_rcm_patch import PatchConfig, find_pairs, patch_model, patched, unpatch_model
from turbo_rcm_patch.errors import GradientError, ShapeError
from turbo_rcm_patch.patching import sla_as_defined
from turbo_rcm_patch.patching.sla import PROJ_L, Recovered, attach_proj_l, attached_proj_l

# --- where it is called as a module -------------------------------------------------------------


def test_inside_a_hook_it_runs_as_it_is_defined() -> None:
    model, given = with_sla(T2V.model()), inputs_of(T2V)
    calls: list[int] = []
    for block in model.blocks:
        block.attn1.register_forward_hook(lambda *_: calls.append(1))
    expected = run(oracle(model), given)
    calls.clear()
    with patched(model, INT8) as report:
        first, linear = report.pairs[:2]
        assert (first.runs, linear.runs) == ("after-linear", "as-written")
        assert first.reason.endswith("SLA runs as it is defined, in plain torch")
        # Nothing else is in int8 at this length.
        assert relative(run(model, given), expected) < TIGHT
    assert len(calls) == 2


def test_hooks_that_come_later_run_it_and_go_without_a_trace() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    model, given = with_sla(T2V.model()), inputs_of(T2V)
    expected, dense = run(oracle(model), given), run(model, given)
    patch_model(model, EXACT)
    add_hook_to_module(model.blocks[0].attn1, ModelHook())
    assert relative(run(model, given), expected) < TIGHT
    assert find_pairs(model)[0].runs == "after-linear"
    unpatch_model(model)
    assert torch.equal(run(model, given), dense)
    remove_hook_from_module(model.blocks[0].attn1)
    assert torch.equal(run(model, given), dense)


def test_offloaded_layer_by_layer_it_runs_as_it_is_defined() -> None:
    """accelerate hooks every module that holds a tensor, so also an attention with a proj_l."""
    from accelerate import cpu_offload

    model, given = with_sla(T2V.model()), inputs_of(T2V)
    expected, held = run(oracle(model), given), attached_proj_l(model.blocks[0].attn1)
    cpu_offload(model, execution_device=torch.device("cpu"))
    after = attached_proj_l(model.blocks[0].attn1)
    assert held is not None and after is not None and torch.equal(held[0], after[0])
    dense = run(model, given)
    with patched(model, INT8) as report:
        assert "AlignDevicesHook" in report.pairs[0].reason
        assert report.pairs[0].reason.endswith("SLA runs as it is defined, in plain torch")
        assert relative(run(model, given), expected) < TIGHT
    assert torch.equal(run(model, given), dense)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # the author's norms
def test_under_autocast_the_author_s_block_runs_it() -> None:
    model, given = with_sla(T2V.model()), inputs_of(T2V)
    expected, dense = run(oracle(model, 1.0), given), run(model, given)
    with patched(model, replace(INT8, sla_topk=1.0)), torch.autocast("cpu", torch.bfloat16):
        output = run(model, given)
    assert relative(output, expected) < 0.03 < 0.05 < relative(output, dense)


def test_a_dropout_that_is_active_leaves_the_author_s_modules_and_sla() -> None:
    model, given = with_sla(T2V.model()), inputs_of(T2V)
    expected = run(oracle(model), given)
    for block in model.blocks:
        block.attn1.to_out[1] = nn.Dropout(1e-9).train()
    with patched(model, EXACT) as report:
        assert report.pairs[0].runs == "as-written"
        assert "dropout" in report.pairs[0].reason and "in plain torch" in report.pairs[0].reason
        assert relative(run(model, given), expected) < TIGHT


# --- the guard ----------------------------------------------------------------------------------


def test_the_guard_compares_with_sla() -> None:
    model, given = with_sla(T2V.model()), inputs_of(T2V)
    with patched(model, PatchConfig(sla_topk=TOPK)) as report:
        run(model, given)
        of_sla = [record for record in report.guard if "attn1" in record.path]
        assert len(of_sla) == 4 and all(record.error < 0.03 for record in of_sla)
        assert {record.verdict for record in report.guard} == {"kept"}
        assert report.fused == len(report.pairs)


def test_what_the_guard_gives_back_still_is_sla() -> None:
    model, given = with_sla(T2V.model()), inputs_of(T2V)
    expected, dense = run(oracle(model), given), run(model, given)
    tight = PatchConfig(guard_budget=1e-6, precision="fixed", kinds=("self",), sla_topk=TOPK)
    with patched(model, tight) as report:
        assert relative(run(model, given), expected) < TIGHT
        assert report.fused == 0
        for pair in report.pairs[:2]:
            assert pair.reason.startswith("given back to its author's code by the guard")
            assert pair.reason.endswith("SLA runs as it is defined, in plain torch")
        assert relative(run(model, given), expected) < TIGHT
    assert torch.equal(run(model, given), dense)


def test_the_guard_leaves_out_a_proj_l_that_was_taken_away() -> None:
    for budget in (0.1, 1e-6):
        model, given = with_sla(T2V.model()), inputs_of(T2V)
        dense = run(model, given)
        with patched(
            model, PatchConfig(guard_budget=budget, precision="fixed", kinds=("self",))
        ) as report:
            without_sla(model)
            assert relative(run(model, given), dense) < 0.02
            records = [record for record in report.guard if record.path.startswith("blocks.0.")]
            assert {record.path for record in records} == {"blocks.0.attn1"}
            assert records[-1].verdict == ("kept" if budget == 0.1 else "given back")
            assert "SLA" not in report.pairs[0].reason


def test_the_guard_leaves_sla_out_where_a_mask_came_late() -> None:
    family = named("skyreels-masked")
    model, given = with_sla(family.model()), family.inputs()
    frames = model.config.num_frame_per_block
    model.register_to_config(num_frame_per_block=1)
    with patched(model, PatchConfig(sla_topk=TOPK)) as report:
        model._set_ar_attention(frames)
        run(model, given)
        assert report.guard and not any("proj_l" in record.path for record in report.guard)


def test_the_guard_may_make_it_exact() -> None:
    model, given = with_sla(T2V.model()), inputs_of(T2V)
    expected = run(oracle(model), given)
    tight = PatchConfig(guard_budget=1e-5, precision="auto", kinds=("self",), sla_topk=TOPK)
    with patched(model, tight) as report:
        for _ in range(2):
            assert relative(run(model, given), expected) < TIGHT
        assert {record.verdict for record in report.guard} >= {"exact attention", "kept"}
        first, linear = report.pairs[:2]
        assert first.fused and not linear.fused and "made exact" in linear.reason


# --- around it ----------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [INT8, EXACT, PatchConfig()], ids=["int8", "exact", "guard"])
def test_unpatch_leaves_nothing_behind(config: PatchConfig) -> None:
    model, given = with_sla(I2V.model()), inputs_of(I2V)
    expected, before, keys = run(model, given), dicts(model), list(model.state_dict())
    patch_model(model, config)
    run(model, given)
    assert list(model.state_dict()) == keys
    unpatch_model(model)
    assert dicts(model) == before
    assert torch.equal(run(model, given), expected)


def test_copies_are_independent() -> None:
    model, given = with_sla(T2V.model()), inputs_of(T2V)
    patch_model(model, INT8)
    expected = run(model, given)
    other = copy.deepcopy(model)
    unpatch_model(model)
    without_sla(model)
    assert torch.equal(run(other, given), expected)
    attn = other.blocks[0].attn1
    assert vars(attn)["forward"]._attn is attn
    unpatch_model(other)


def test_saving_writes_the_stock_model(tmp_path: Path) -> None:
    model, given = with_sla(T2V.model()), inputs_of(T2V)
    dense = run(model, given)
    with patched(model, INT8):
        model.save_pretrained(tmp_path)
    again = WanTransformer3DModel.from_pretrained(tmp_path, local_files_only=True).eval()
    assert torch.equal(run(again, given), dense)


def test_compiles_without_a_break() -> None:
    model, given = with_sla(T2V.model()), inputs_of(T2V)
    with patched(model, INT8):
        expected = run(model, given)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert relative(run(compiled, given), expected) < TIGHT
    torch._dynamo.reset()


@pytest.mark.parametrize("config", [INT8, EXACT], ids=["int8", "exact"])
def test_a_gradient_is_refused(config: PatchConfig) -> None:
    model, given = with_sla(T2V.model()).requires_grad_(True), inputs_of(T2V)
    with patched(model, config), pytest.raises(GradientError, match="sparse_linear_attention"):
        model(**given)


def test_a_proj_l_that_comes_later_waits_for_another_patch() -> None:
    """`load_extra` refuses it; whoever attaches it by hand gets what the report says."""
    model, given = T2V.model(), inputs_of(T2V)
    with patched(model, EXACT) as report:
        dense = run(model, given)
        with_sla(model)
        assert torch.equal(run(model, given), dense)
        assert len(report.pairs) == 6 and "sparse" not in str(report)
    with patched(model, EXACT):
        assert relative(run(model, given), dense) > 0.05


def test_the_baseline_is_sla_in_the_author_s_blocks() -> None:
    model, given = with_sla(T2V.model()), inputs_of(T2V)
    expected, dense, before = run(oracle(model), given), run(model, given), dicts(model)
    with sla_as_defined(model, TOPK) as count:
        assert count == 2
        assert relative(run(model, given), expected) < TIGHT
        assert "forward" not in vars(model.blocks[0])
    assert dicts(model) == before
    without_sla(model)
    with sla_as_defined(model, TOPK) as count:
        assert count == 0 and torch.equal(run(model, given), dense)


def test_what_does_not_fit_is_refused() -> None:
    model = T2V.model()
    attn = model.blocks[0].attn1
    for weight, bias in (((32, 32), (32,)), ((64, 64), (32,)), ((64, 32), (64,))):
        with pytest.raises(ShapeError, match=r"\[64, 64\]"):
            attach_proj_l(attn, torch.zeros(weight), torch.zeros(bias))
    assert attached_proj_l(attn) is None and not any(name in attn._buffers for name in PROJ_L)
    wide = with_sla(Case("wide", {"attention_head_dim": 256, "num_attention_heads": 1}).model())
    with pytest.raises(ShapeError, match="head_dim"):
        patch_model(wide)


def test_what_was_recovered_is_taken_away_once() -> None:
    """What somebody attaches afterwards is theirs."""
    model = T2V.model()
    attention = model.blocks[0].attn1
    dim = attention.inner_dim // attention.heads
    recovered = Recovered(model, [attention])
    attach_proj_l(attention, torch.eye(dim), torch.zeros(dim))
    recovered.undo()
    assert attached_proj_l(attention) is None
    attach_proj_l(attention, torch.eye(dim), torch.zeros(dim))
    recovered.undo()
    assert attached_proj_l(attention) is not None
