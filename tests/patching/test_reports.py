"""A report says what is so now, and goes where it is sent."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from tests.patching.models import named, run
from turbo_rcm_patch import patch_model, unpatch_model
from turbo_rcm_patch.ops import dispatch, launch
from turbo_rcm_patch.ops.dispatch import Implementation, always, choose
from turbo_rcm_patch.patching.block import Level


def test_linears_that_were_replaced_do_not_count_as_int8() -> None:
    model = named("t2v").model()
    report = patch_model(model, linear="int8", guard=False)
    names = ("to_q", "to_k", "to_v", "to_out.0")
    assert report.pairs[0].int8_linears == names
    model.blocks[0].attn1.to_q = nn.Linear(128, 128).requires_grad_(False)
    assert report.pairs[0].int8_linears == names[1:]
    module = model.blocks[0].attn1.to_k  # as other code leaves a weight that it computes
    module.weight = module._parameters.pop("weight").detach()
    assert report.pairs[0].int8_linears == names[2:]


class GGUFLinear(nn.Linear):
    """As other quantisers have one."""


def other_weight(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(linear.weight.as_subclass(Quantised), requires_grad=False)


class Quantised(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("change", "words"),
    [(lambda one: None, "20 of 20 Linears in int8\n"),
     (lambda one: setattr(one, "__class__", GGUFLinear),
      "0 of 20 Linears in int8: GGUFLinear keeps its own forward\n"),
     (other_weight, "0 of 20 Linears in int8: a weight that is a Quantised is left as it is\n")],
)  # fmt: skip
@pytest.mark.parametrize("order", ["changed first", "patched first"])
def test_the_first_lines_count_the_linears_in_int8(change: Any, words: str, order: str) -> None:
    model = named("t2v").model()
    linears = [one for one in model.blocks.modules() if type(one) is nn.Linear]
    if order == "changed first":
        any(map(change, linears))
    report = patch_model(model, linear="int8")
    if order == "patched first":
        any(map(change, linears))
    assert words in str(report)[:300]
    report._blocks()[0].raise_level(Level.EXACT_16BIT, "")
    assert "10 of 20 Linears in int8: the guard\n" in str(report) or words[0] == "0"


@pytest.mark.parametrize("name", ["t2v", "cogvideox-5b"])
def test_sums_are_in_fp32_where_a_kernel_closes_them(name: str) -> None:
    model = named(name).model(torch.bfloat16)
    report = patch_model(model)
    assert "model dtype" not in str(report)
    block = (model.blocks if name == "t2v" else model.transformer_blocks)[0]
    block.attn1.processor = object()
    assert "model dtype" in str(report)


def test_blocks_that_run_alike_for_other_reasons_share_a_row() -> None:
    report = patch_model(named("t2v").model())
    for index, block in enumerate(report._blocks()):
        block.raise_level(Level.EXACT, f"the network's error would be 1.{index}")
    said = str(report.pairs)
    assert said.count("two-launch  (2)") == 3
    for index in range(2):
        rows = ", ".join(f"blocks.{index}.{name}" for name in ("attn1", "attn2", "ffn"))
        assert f"\n  {rows}: exact attention; the network's error would be 1.{index}" in said


def test_a_block_whose_forward_was_replaced_later_is_not_fused() -> None:
    """As cache-dit does to VACE."""
    model = named("vace").model()
    report = patch_model(model, attention="exact", guard=False)
    assert report.fused == 12
    for block in model.blocks:
        block.forward = type(block).forward.__get__(block)
    assert report.fused == 6
    assert "other code replaced the block's forward" in str(report)


def test_a_report_can_be_pickled() -> None:
    model, inputs = named("t2v").model(), named("t2v").inputs()
    report = patch_model(model, linear="int8")
    run(model, inputs)
    held = pickle.dumps(report)
    assert b"_rebuild_parameter" not in held  # It may be read where no GPU is.
    kept = pickle.loads(held)
    assert str(kept) == str(report)
    assert kept.as_dict() == report.as_dict()
    before = str(report)
    unpatch_model(model)
    assert str(kept) == before != str(report)


def test_a_report_names_the_kernels_that_ran_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_chosen", {})
    monkeypatch.setattr(launch, "target_of", lambda device: launch.Target("cuda", 90))
    report = patch_model(named("t2v").model(), guard=False)
    assert "kernels of this process" not in str(report)
    table = (
        Implementation("fast", lambda target, n: n > 4, "more than 4", lambda: str, "sum"),
        Implementation("plain", always, "everything else", lambda: str, "sum"),
    )
    for call in (9, 9):
        choose(table, torch.device("cpu"), call)()
    assert "\nkernels of this process: sum: fast (more than 4)\n" in str(report)
    choose(table, torch.device("cpu"), 1)()
    assert report.as_dict()["kernels"] == ["sum: fast (more than 4), plain (everything else)"]
