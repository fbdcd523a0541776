"""find_pairs: which pairs there are, how each would run, and that printing it is worth reading."""

from __future__ import annotations

import json

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import nn

from tests.patching.wan import CASES, Case, dicts, wan
from turbo_rcm_patch import PatchConfig, find_pairs, patch_model, patched


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_pair_is_listed_and_changes_nothing(case: Case) -> None:
    model = case.model()
    before = dicts(model)
    table = find_pairs(model)
    kinds = ["self", "cross", *(["image"] if case.image else []), "feed-forward"]
    assert [pair.kind for pair in table] == kinds * 2
    assert table.fused == case.fused == len(table)
    assert dicts(model) == before


def test_a_pair_says_all_there_is_to_know() -> None:
    attn1, attn2, image, ffn = find_pairs(CASES[1].model())[:4]
    assert (attn1.path, attn1.kind, attn1.heads, attn1.head_dim) == (
        "blocks.0.attn1",
        "self",
        2,
        64,
    )
    assert attn1.cast == "fp32" and attn1.projection and attn1.runs == "two-launch"
    assert attn1.streams[0].c_out == "gate_msa" and attn1.streams[0].c_skip == "1"
    assert attn2.cast == "model" and attn2.streams[0].c_out == "1"
    assert image.path == "blocks.0.attn2.image" and not image.projection
    assert image.runs == "in-kernel"
    assert ffn.heads == 0 and ffn.streams[0].c_out == "c_gate_msa" and ffn.runs == "in-linear"


def test_print_groups_blocks_that_run_alike() -> None:
    model = wan(num_layers=4)
    model.blocks[2].attn1.to_out[0].register_forward_hook(lambda *_: None)
    lines = str(find_pairs(model)).splitlines()
    assert lines[0].split()[:2] == ["pairs", "kind"]
    assert any(line.startswith("blocks.0-1,3.attn1 ") for line in lines)
    assert any(line.startswith("blocks.2.attn1 ") and "after-linear" in line for line in lines)
    assert any("12 pairs, 12 fused" in line for line in lines)
    assert any("to_out[0] is called: it is hooked (torch hooks)" in line for line in lines)
    assert max(map(len, lines)) < 120


#: Real configurations, and how many pairs of each are fused: layers x (self, cross, image, ffn).
REAL = {
    "Wan2.1-T2V-1.3B": (dict(num_attention_heads=12, num_layers=30, ffn_dim=8960), 90),
    "Wan2.1-T2V-14B": (dict(num_attention_heads=40, num_layers=40, ffn_dim=13824), 120),
    "Wan2.1-I2V-14B": (
        dict(num_layers=40, in_channels=36, image_dim=1280, added_kv_proj_dim=5120),
        160,
    ),
    "Wan2.2-T2V-A14B, each expert": (dict(num_layers=40), 120),
    "Wan2.2-I2V-A14B, each expert": (dict(num_layers=40, in_channels=36), 120),
    "Wan2.2-TI2V-5B": (
        dict(num_attention_heads=24, num_layers=30, ffn_dim=14336, in_channels=48),
        90,
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_real_models_without_their_weights(name: str) -> None:
    config, fused = REAL[name]
    with torch.device("meta"):
        model = WanTransformer3DModel(**config)  # type: ignore[arg-type]
    with patched(model) as report:
        assert report.fused == len(report.pairs) == fused
        assert {pair.runs for pair in report.pairs} <= {"two-launch", "in-kernel", "in-linear"}
    assert {pair.head_dim for pair in report.pairs if pair.heads} == {128}


@pytest.mark.parametrize("kinds", [("self",), ("cross", "feed-forward")])
def test_kinds_choose_what_is_fused(kinds: tuple[str, ...]) -> None:
    model = wan()
    report = patch_model(model, PatchConfig(kinds=kinds, guard=False))  # type: ignore[arg-type]
    assert {pair.kind for pair in report.pairs if pair.fused} == set(kinds)
    assert all("PatchConfig.kinds" in pair.reason for pair in report.pairs if not pair.fused)


def test_report_reads_well_and_is_json() -> None:
    with patched(wan(), PatchConfig(form="one-launch")) as report:
        text = str(report)
        data = json.loads(json.dumps(report.as_dict()))
    assert "6 of 6 skip pairs run fused" in text
    assert "int8 q and k, p and v in bf16; implementation reference on cpu" in text
    assert "no forward has been compared yet" in text
    assert (data["impl"], data["fused"], len(data["pairs"])) == ("reference", 6, 6)
    assert data["pairs"][0]["runs"] == "one-launch"


def test_a_model_inside_a_module_is_found() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = wan()

    assert find_pairs(Wrapper())[0].path == "inner.blocks.0.attn1"


class RCMScheduler:
    """Stands for the library's scheduler: the class name is what is asked for."""


class Pipe:
    """As much of a pipeline as find_pairs looks at."""

    def __init__(self, scheduler: object, second: bool = False) -> None:
        self.transformer = wan()
        self.transformer_2 = wan() if second else None
        self.scheduler = scheduler


def test_boundary_belongs_to_a_pipeline_with_an_rcm_scheduler() -> None:
    boundary = [p for p in find_pairs(Pipe(RCMScheduler(), second=True)) if p.kind == "boundary"]
    assert [pair.path for pair in boundary] == ["transformer", "transformer_2"]
    assert boundary[0].streams[0].c_out == "-t" and not boundary[0].fused and boundary[0].reason
    assert not [p for p in find_pairs(Pipe(object())) if p.kind == "boundary"]
    assert not [p for p in find_pairs(wan()) if p.kind == "boundary"]


def test_a_pipeline_prefixes_its_paths() -> None:
    pipe = Pipe(object(), second=True)
    assert {pair.path.split(".")[0] for pair in find_pairs(pipe)} == {
        "transformer",
        "transformer_2",
    }
