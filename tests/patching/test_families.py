"""Every model of the table, patched: it runs the fast path and computes what its author does."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.measures import relative_l2
from tests.patching import turbodiffusion
from tests.patching.models import (
    ANYFLOWS,
    COGVIDEOXS,
    MODELS,
    TURBOS,
    WANS,
    Model,
    classes,
    named,
    run,
    wide,
)
from turbo_rcm_patch import find_pairs, patch_model, patched, report_of
from turbo_rcm_patch.patching import sla_as_defined

BF16 = torch.bfloat16
#: The fusion alone: the same sums in fp32 in another order.
TIGHT = 3e-6
#: int8 rounds q and k to 1/254 of their largest values, and logits of a peaked attention spread by
#: 10 or so: the emulation's own error on these models is up to half of this.
INT8_ERROR = 0.03

_ALL = classes(MODELS)
_DIFFUSERS = [*WANS, *ANYFLOWS, *COGVIDEOXS]
_BLOCKS = classes([*_DIFFUSERS, *TURBOS])


def assert_fast(model: object) -> None:
    """Every block ran the fast path in the last forward."""
    ran = report_of(model).ran()
    assert ran
    assert all(words.startswith("fused") for words in ran.values()), ran


@pytest.mark.supports(_ALL, "self-attention", "unpatched, bit-equal")
@pytest.mark.supports(_BLOCKS, "feed-forward")
@pytest.mark.supports(classes([*WANS, *ANYFLOWS, *TURBOS]), "cross-attention")
@pytest.mark.supports(classes([*WANS, *TURBOS]), "SLA")
@pytest.mark.supports(classes(ANYFLOWS), "gate per token")
@pytest.mark.parametrize("one", MODELS, ids=str)
def test_fusing_alone_changes_nothing_in_fp32(one: Model) -> None:
    model, inputs = one.model(), one.inputs()
    before = run(model, inputs)
    assert [pair.kind for pair in find_pairs(model)] == one.kinds
    assert not any("forward" in vars(module) for module in model.modules())
    if one.name == "sla":  # its author's code is dense; its definition is what runs as written
        with sla_as_defined(model, 0.1):
            before = run(model, inputs)
    with patched(model, attention="int8" if "sla" in one.name else "exact", guard=False) as report:
        after = run(model, inputs)
        assert_fast(model)
        assert [pair.kind for pair in report.pairs] == one.kinds
        assert len(report.pairs) - report.fused == one.left
    assert relative_l2(after, before) <= (INT8_ERROR if "sla" in one.name else TIGHT)
    if one.name != "sla":
        assert torch.equal(run(model, inputs), before)


@pytest.mark.supports(_BLOCKS, "int8 Linears")
@pytest.mark.parametrize("linear", ["as-is", "int8"])
@pytest.mark.parametrize("one", [*_DIFFUSERS, *TURBOS], ids=str)
def test_a_bf16_network_is_no_further_from_fp32_than_the_unpatched_one(
    one: Model, linear: str
) -> None:
    if one.name == "sla":
        pytest.skip("its author's code is dense")
    model, inputs = one.model(BF16), one.inputs(dtype=BF16)
    truth = run(copy.deepcopy(model).float(), wide(inputs))
    unpatched = relative_l2(run(model, inputs).float(), truth)
    patch_model(model, attention="int8", linear=linear, guard=False)
    ours = relative_l2(run(model, inputs).float(), truth)
    assert_fast(model)
    # int8 attention of peaked heads costs some of what the fp32 stream saves; int8 Linears cost
    # 1.5 % a product.
    assert ours <= (1.5 * unpatched if linear == "as-is" else unpatched + 0.05)


@pytest.mark.supports(classes(WANS[:7] + WANS[10:]) + classes(TURBOS), "image branch")
@pytest.mark.parametrize("name", ["i2v", "flf2v", "chronoedit-i2v", "turbo-i2v"])
def test_the_image_branch_is_summed_in_the_attention_kernel(name: str) -> None:
    model = named(name).model()
    patch_model(model, linear="int8", guard=False)
    pairs = {pair.kind: pair for pair in find_pairs(model)}
    image, cross = pairs["image"], pairs["cross"]
    assert (image.runs, image.path) == ("in-kernel", f"{cross.path}.image")
    # The projection and its Linear are those of the whole branch.
    assert (image.projection, image.int8_linears) == (False, ())
    assert cross.projection and cross.int8_linears
    assert [stream.name for stream in image.streams] == ["text attention"]


@pytest.mark.parametrize("missing", [True, False])
def test_without_flash_attn_the_authors_attention_turns_heads_in_plain_torch(
    missing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file has None then, where its own forward would fail; else that forward stays."""
    model, inputs = TURBOS[0].model(), TURBOS[0].inputs()
    expected = run(model, inputs)
    if missing:
        monkeypatch.setattr(turbodiffusion, "flash_apply_rotary_emb", None)
    report = patch_model(model, attention="exact")
    assert {"forward" in vars(block.self_attn) for block in model.blocks} == {missing}
    assert relative_l2(run(model, inputs), expected) <= TIGHT
    assert report.guard and not report.guard.decisions
    for block in model.blocks:
        block.cross_attn.register_forward_hook(lambda *_: None)
    assert relative_l2(run(model, inputs), expected) <= TIGHT
    assert "original code" in str(report.last_forward)


@pytest.mark.parametrize("name", ["t2v", "turbo", "rcm-projection", "anyflow", "anyflow-far"])
def test_one_launch_is_the_same_function(name: str) -> None:
    model, inputs = named(name).model(), named(name).inputs()
    with patched(model, attention="int8", guard=False):
        two = run(model, inputs)
    with patched(model, attention="int8", guard=False, form="one-launch") as report:
        ones = run(model, inputs)
        assert_fast(model)
        cached = name == "anyflow-far"  # One launch knows no cache of keys.
        assert report.pairs[0].runs == ("two-launch" if cached else "one-launch")
    assert relative_l2(ones, two) <= TIGHT
