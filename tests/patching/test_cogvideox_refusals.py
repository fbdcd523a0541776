"""CogVideoX and ConsisID: what is refused, and what is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import CogVideoXTransformer3DModel
from diffusers.models import attention_processor
from diffusers.models.transformers import cogvideox_transformer_3d
from torch import nn

from tests.patching.cogvideox import CASES, ONE_EACH, ROTARY, Case, cogvideox
from tests.patching.wan import EXACT, dicts, relative, run
from turbo_rcm_patch import PatchConfig, errors, find_pairs, patch_model, unpatch_model

EACH_CLASS = pytest.mark.parametrize("case", ONE_EACH, ids=lambda case: case.name)


def test_a_subclass_is_unknown() -> None:
    class Mine(CogVideoXTransformer3DModel):
        pass

    with pytest.raises(errors.UnknownArchitectureError, match="Mine"):
        find_pairs(Mine(num_layers=1, num_attention_heads=1))


def test_a_processor_that_is_not_known_is_left_alone() -> None:
    class Other(attention_processor.CogVideoXAttnProcessor2_0):
        pass

    model, inputs = ROTARY.model(), ROTARY.inputs()
    expected = run(model, **inputs)
    for block in model.transformer_blocks:
        block.attn1.set_processor(Other())
    report = patch_model(model, EXACT)
    assert [pair.runs for pair in report.pairs[:2]] == ["as-written", "in-linear"]
    assert "its processor is a " in report.pairs[0].reason and "Other" in report.pairs[0].reason
    assert relative(run(model, **inputs), expected) < 1e-5
    unpatch_model(model)
    before = dicts(model)
    with pytest.raises(errors.NothingToPatchError, match="processor is a"):
        patch_model(model, PatchConfig(kinds=("self",)))
    assert dicts(model) == before


def test_fusing_qkv_while_patched_is_noticed() -> None:
    model, inputs = ROTARY.model(), ROTARY.inputs()
    expected = run(model, **inputs)
    report = patch_model(model, PatchConfig(attention="exact", guard=False, linear="int8"))
    for change, names in (
        (model.fuse_qkv_projections, ("to_qkv", "to_out.0")),
        (model.unfuse_qkv_projections, ("to_q", "to_k", "to_v", "to_out.0")),
    ):
        change()
        assert report.pairs[0].int8_linears == names
        assert relative(run(model, **inputs), expected) < 0.02


def test_blocks_that_are_not_the_author_s_are_left_alone() -> None:
    class Mine(cogvideox_transformer_3d.CogVideoXBlock):
        pass

    model = ROTARY.model()
    model.transformer_blocks[0].__class__ = Mine
    author = model.transformer_blocks[1].forward
    model.transformer_blocks[1].forward = lambda *args, **kwargs: author(*args, **kwargs)
    table = find_pairs(model)
    assert table.fused == 0
    assert "the block is a " in table[0].reason and "somebody else" in table[2].reason
    with pytest.raises(errors.NothingToPatchError):
        patch_model(model)
    model.transformer_blocks[1] = nn.Identity()
    table = find_pairs(model)
    assert len(table) == 3 and table.fused == 0
    assert "it is a Identity, of which nothing is known" in table[2].reason


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (cogvideox_transformer_3d.CogVideoXBlock, "forward"),
        (attention_processor.Attention, "forward"),
        (attention_processor.CogVideoXAttnProcessor2_0, "__call__"),
        (attention_processor.FusedCogVideoXAttnProcessor2_0, "__call__"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_signature_drift(owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def drifted(self: Any, hidden_states: Any, something_new: Any) -> None: ...

    model = cogvideox()
    monkeypatch.setattr(owner, name, drifted)
    with pytest.raises(errors.FamilyError, match="something_new"):
        patch_model(model)


def test_dtype_and_head_dim_are_refused() -> None:
    model = cogvideox()
    model.transformer_blocks[1].attn1.to_k.double()
    with pytest.raises(errors.DTypeError, match=r"transformer_blocks\.1\.attn1\.to_k\.weight"):
        patch_model(model)
    with torch.device("meta"):
        model = CogVideoXTransformer3DModel(
            num_attention_heads=1, attention_head_dim=320, num_layers=1
        )
    with pytest.raises(errors.ShapeError, match="320"):
        patch_model(model)


@EACH_CLASS
def test_an_unknown_parallelism_is_refused(case: Case) -> None:
    model = case.model()
    model._parallel_config = object()
    before = dicts(model)
    with pytest.raises(errors.ContextParallelError):
        patch_model(model)
    assert dicts(model) == before
    del model._parallel_config
    patch_model(model)
    model.transformer_blocks[1].attn1.processor._parallel_config = object()
    with pytest.raises(errors.ContextParallelError):
        run(model, **case.inputs())
    unpatch_model(model)


def test_its_pairs_are_listed_from_a_configuration(tmp_path: Path) -> None:
    from turbo_rcm_patch.video.load import load_skeleton

    for case in (ROTARY, CASES[-1]):
        case.model().save_config(tmp_path / case.name / "transformer")
        pairs = find_pairs(load_skeleton(tmp_path / case.name))
        assert (pairs.fused, len(pairs)) == (4, 4 + case.as_written)
        assert pairs[0].path == "transformer.transformer_blocks.0.attn1"
