"""int8 weights and `proj_l`, which stock classes have no place for: attached, run, taken away."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel

from tests.checkpoints.wan_model import Options, save
from tests.measures import relative_l2
from tests.patching import turbodiffusion as stand_in
from turbo_rcm_patch import PatchConfig, load_extra, patched, refresh, unload_extra
from turbo_rcm_patch.checkpoints import EXTRA_FILE, PROJ_L, write_checkpoint
from turbo_rcm_patch.checkpoints.convert import convert_transformer
from turbo_rcm_patch.errors import AlreadyPatchedError, CheckpointError
from turbo_rcm_patch.patching.int8_weights import attached_int8
from turbo_rcm_patch.patching.sla import attached_proj_l, held_proj_l

QUANT = Options("quant", quant=True, dtype=torch.bfloat16)
SLA = Options("sla-quant", quant=True, sla=True, dtype=torch.bfloat16)
INT8 = PatchConfig(linear="int8", guard=False, impl="reference")
PLAIN = PatchConfig(guard=False, impl="reference")
#: Relative L2 in fp32: the same sums in another order; and what int8 q and k cost.
BOTH_FUSED, INT8_OFF = 2e-6, 0.02


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("converted")
    save(QUANT, place / "in.pth")
    convert_transformer(place / "in.pth", place / "folder")
    return place / "folder"


@pytest.fixture(scope="module")
def sla_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sla")
    save(SLA, place / "in.pth")
    convert_transformer(place / "in.pth", place / "folder")
    return place / "folder"


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return WanTransformer3DModel.from_pretrained(
        folder, torch_dtype=dtype, local_files_only=True
    ).eval()


@torch.no_grad()
def run(model: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, 4, 3, 8, 8, generator=generator).to(dtype)
    text = torch.randn(1, 7, 24, generator=generator).to(dtype)
    return model(x, torch.tensor([500]), text, return_dict=False)[0]


def test_attaching_changes_nothing_until_int8_is_asked_for(folder: Path) -> None:
    model = load(folder)
    before, keys = run(model), list(model.state_dict())
    inside = {name: dict(module.__dict__) for name, module in model.named_modules()}
    extra = load_extra(model, folder)
    assert len(extra.int8) == 20 and len(extra.proj_l) == 0
    assert "int8 weights of 20 Linears" in str(extra)
    assert torch.equal(run(model), before) and list(model.state_dict()) == keys
    with patched(model, PatchConfig(guard=False, impl="reference")):
        as_is = run(model)
    unload_extra(model)
    for name, module in model.named_modules():
        assert module.__dict__.keys() == inside[name].keys()
        assert not module._non_persistent_buffers_set - {"freqs_cos", "freqs_sin"}
        assert not any("turbo" in buffer for buffer in module._buffers)
    with patched(model, PatchConfig(guard=False, impl="reference")):
        assert torch.equal(run(model), as_is)


def test_their_scales_and_ours_err_alike(sla_folder: Path) -> None:
    """Measured here against the dequantised weights, fp32: 0.0051 of the output with the file's
    integers (activations alone are rounded), 0.0068 if they are quantised again by row."""
    model = load(sla_folder)
    unload_extra(model)  # Dense attention is meant.
    exact = run(model)
    plain = PatchConfig(guard=False, impl="reference", attention="exact")
    int8 = PatchConfig(guard=False, impl="reference", attention="exact", linear="int8")
    with patched(model, plain):
        assert relative_l2(run(model), exact) < 1e-5
    with patched(model, int8):
        again = relative_l2(run(model), exact)
    load_extra(model, sla_folder, proj_l=False)
    with patched(model, int8):
        direct = relative_l2(run(model), exact)
    assert 0 < direct < 0.006 and direct < again < 0.008


@pytest.mark.parametrize("moment", ["before patching", "after a forward"])
def test_it_is_used_whenever_it_is_attached(folder: Path, moment: str) -> None:
    reference, model = load(folder), load(folder)
    load_extra(reference, folder)
    with patched(reference, INT8):
        expected = run(reference)
    if moment == "before patching":
        load_extra(model, folder)
    with patched(model, INT8):
        if moment == "after a forward":
            own = run(model)
            load_extra(model, folder)
            assert not torch.equal(own, run(model))
        assert torch.equal(run(model), expected)
        if moment == "after a forward":
            unload_extra(model)
            assert torch.equal(run(model), own)


def test_scales_survive_a_cast_of_the_model(folder: Path) -> None:
    model = load(folder)
    load_extra(model, folder)
    before = attached_int8(model.blocks[0].attn1.to_q)
    model.to(torch.bfloat16)
    after = attached_int8(model.blocks[0].attn1.to_q)
    assert before is not None and after is not None
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    with patched(model, INT8):
        assert run(model, torch.bfloat16).isfinite().all()


def test_weights_that_changed_run_as_they_are_now(folder: Path) -> None:
    """An optimiser's step, another parameter, what is fused into a weight through `.data`."""
    model = load(folder)
    load_extra(model, folder)
    linear = model.blocks[0].ffn.net[2]
    with torch.no_grad():
        linear.weight.mul_(1.0)
    assert attached_int8(linear) is None
    other = model.blocks[1].ffn.net[2]
    other.weight = torch.nn.Parameter(other.weight.detach().clone())
    assert attached_int8(other) is None
    third = model.blocks[1].attn1.to_q
    third.weight.data += 0.001
    with patched(model, INT8):
        out = run(model)
        model.blocks[0].attn1.to_q.weight.data += 0.001
        refresh(model)
        again = run(model)
    unload_extra(third)
    unload_extra(model.blocks[0].attn1.to_q)
    with patched(model, INT8):
        assert torch.equal(run(model), again) and not torch.equal(out, again)


@pytest.mark.parametrize("cast", [False, True], ids=["as-loaded", "cast-to-bf16"])
def test_sla_lies_at_its_attention(sla_folder: Path, cast: bool) -> None:
    """In fp32 whatever the model is cast to, as TurboDiffusion keeps it."""
    model = load(sla_folder)
    before, keys = run(model), list(model.state_dict())
    extra = load_extra(model, sla_folder)
    assert len(extra.proj_l) == 2 and len(extra.int8) == 20
    assert torch.equal(run(model), before) and list(model.state_dict()) == keys
    if cast:
        model.to(torch.bfloat16)
    state = torch.load(sla_folder.parent / "in.pth", weights_only=True)
    for i, block in enumerate(model.blocks):
        held = attached_proj_l(block.attn1)
        assert held is not None and attached_proj_l(block.attn2) is None
        for ours, part in zip(held, ("weight", "bias"), strict=True):
            theirs = state[f"blocks.{i}.self_attn.attn_op.local_attn.proj_l.{part}"]
            assert theirs.dtype == torch.float32 and torch.equal(ours, theirs)
    unload_extra(model)
    assert not any(name.endswith(PROJ_L) for name, _ in model.named_buffers())


def test_sla_is_refused_by_a_model_that_was_patched_dense(sla_folder: Path) -> None:
    model = load(sla_folder)
    unload_extra(model)
    with patched(model, INT8):
        expected = run(model)
        with pytest.raises(AlreadyPatchedError, match="unpatch_model, then load_extra"):
            load_extra(model, sla_folder)
        assert torch.equal(run(model), expected)
    assert not any("turbo" in name for name, _ in model.named_buffers())


def test_taking_sla_away_from_a_patched_model_leaves_it_dense(sla_folder: Path) -> None:
    model = load(sla_folder)
    unload_extra(model)
    with patched(model, PLAIN):
        dense = run(model)
    load_extra(model, sla_folder, int8=False)
    with patched(model, PLAIN) as report:
        assert relative_l2(run(model), dense) > 0.05
        assert "proj_l" in str(report)
        unload_extra(model)
        assert torch.equal(run(model), dense)


@pytest.mark.parametrize("head_dim", [128, 64])
def test_the_converted_class_runs_what_theirs_runs(tmp_path: Path, head_dim: int) -> None:
    """A block of TurboDiffusion's WanModel (the stand-in of the patcher tests) and the converted
    one, with the same weights, both patched: fp32, exact but for int8 q and k in both."""
    options = Options(sla=True, head_dim=head_dim)
    state = save(options, tmp_path / "in.pth")
    convert_transformer(tmp_path / "in.pth", tmp_path / "out", heads=256 // head_dim)
    ours = load(tmp_path / "out")
    load_extra(ours, tmp_path / "out")
    theirs = stand_in.WanModel(dim=256, num_heads=256 // head_dim, layers=2, checkpoint=False)
    for block in theirs.blocks:
        block.ffn = torch.nn.Sequential(
            torch.nn.Linear(256, 320), torch.nn.GELU(approximate="tanh"), torch.nn.Linear(320, 256)
        )
        block.self_attn.attn_op.local_attn = stand_in.SparseLinearAttention(head_dim, 0.3)
    of_blocks = {k: v for k, v in state.items() if k.startswith("blocks.")}
    missing = theirs.load_state_dict(of_blocks, strict=False)
    assert not missing.unexpected_keys
    assert not any(name.startswith("blocks.") for name in missing.missing_keys)
    theirs.eval().requires_grad_(False)

    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(1, 400, 256, generator=generator)
    text = torch.randn(1, 7, 256, generator=generator)
    e = 0.3 * torch.randn(1, 6, 256, generator=generator)
    angles = torch.rand(400, head_dim // 2, generator=generator) * 6
    wide = angles.repeat_interleave(2, -1)
    rotary = tuple(x[None, :, None] for x in (wide.cos(), wide.sin()))

    @torch.no_grad()
    def outputs() -> tuple[torch.Tensor, torch.Tensor]:
        x = y = hidden
        for mine, other in zip(ours.blocks, theirs.blocks, strict=True):
            x = mine(x, text, e, rotary)
            y = other(y, e, None, angles, text, None)
        return x, y

    dense, exact = outputs()
    assert relative_l2(dense, exact) > 0.05
    config = PatchConfig(guard=False, impl="reference", sla_topk=0.3)
    with patched(ours, config), patched(theirs, config):
        x, y = outputs()
        assert relative_l2(x, y) < BOTH_FUSED
        assert 0 < relative_l2(x, exact) < INT8_OFF
    with patched(ours, replace(config, attention="exact")):
        assert relative_l2(outputs()[0], exact) < BOTH_FUSED


def test_what_does_not_belong_together_is_refused(folder: Path, tmp_path: Path) -> None:
    save(QUANT, tmp_path / "other.pth", seed=1)
    convert_transformer(tmp_path / "other.pth", tmp_path / "other")
    model = load(folder)
    with pytest.raises(CheckpointError, match="is not the product"):
        load_extra(model, tmp_path / "other")
    save(replace(QUANT, ffn=256), tmp_path / "narrow.pth")
    convert_transformer(tmp_path / "narrow.pth", tmp_path / "narrow")
    with pytest.raises(CheckpointError, match="expected a Linear"):
        load_extra(model, tmp_path / "narrow")
    save(Options(head_dim=64, sla=True), tmp_path / "heads.pth")
    convert_transformer(tmp_path / "heads.pth", tmp_path / "heads")
    with pytest.raises(CheckpointError, match="heads of 64"):
        load_extra(model, tmp_path / "heads")
    save(Options(), tmp_path / "plain.pth")
    convert_transformer(tmp_path / "plain.pth", tmp_path / "plain")
    with pytest.raises(CheckpointError, match=f"no {EXTRA_FILE}"):
        load_extra(model, tmp_path / "plain")
    assert not any("turbo" in name for name, _ in model.named_buffers())


def test_a_failure_leaves_what_was_attached_before(sla_folder: Path, folder: Path) -> None:
    model = load(sla_folder)
    load_extra(model, sla_folder)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    inside = {name: dict(module.__dict__) for name, module in model.named_modules()}
    with torch.no_grad():
        model.blocks[1].ffn.net[2].weight.mul_(1.1)  # the last one that is checked
    with pytest.raises(CheckpointError, match="is not the product"):
        load_extra(model, sla_folder)
    after = dict(model.named_buffers())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    for name, module in model.named_modules():
        assert module.__dict__.keys() == inside[name].keys()


DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("loaded", DTYPES, ids=str)
@pytest.mark.parametrize("written", DTYPES, ids=str)
def test_a_folder_in_any_dtype_is_loaded_in_any_and_saved(
    written: torch.dtype, loaded: torch.dtype, tmp_path: Path
) -> None:
    """Two roundings: one to the folder's dtype, and one to the model's."""
    save(replace(QUANT, layers=1), tmp_path / "in.pth")
    convert_transformer(tmp_path / "in.pth", tmp_path / "folder", dtype=written)
    model = load(tmp_path / "folder", loaded)
    assert len(load_extra(model, tmp_path / "folder").int8) == 10
    model.save_pretrained(tmp_path / "saved")
    write_checkpoint(tmp_path / "saved", tmp_path / "back.pth")
    source, back = (torch.load(tmp_path / f"{n}.pth", weights_only=True) for n in ("in", "back"))
    for name in (n for n in source if n.endswith((".int8_weight", ".scale"))):
        assert torch.equal(source[name], back[name]), name


def test_saving_keeps_only_int8_weights_of_these_weights(folder: Path, tmp_path: Path) -> None:
    """A merged adapter changes a weight, through `.data` without a trace."""
    model, place = load(folder), tmp_path / "merged"
    load_extra(model, folder)
    model.save_pretrained(place)
    model.blocks[0].ffn.net[2].weight.data += 0.05
    model.save_pretrained(place)
    again = load(place)
    load_extra(again, place)
    assert attached_int8(again.blocks[0].ffn.net[2]) is None
    assert attached_int8(again.blocks[1].ffn.net[2]) is not None
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter.mul_(1.1)
    model.save_pretrained(place)
    assert not (place / EXTRA_FILE).exists(), "it would be of other weights"


def test_what_is_not_asked_for_is_taken_away(sla_folder: Path) -> None:
    model, dense = load(sla_folder), load(sla_folder)
    unload_extra(dense)
    load_extra(model, sla_folder)
    linear = model.blocks[0].attn1.to_q
    assert len(held_proj_l(model)) == 2 and attached_int8(linear) is not None
    assert load_extra(model, sla_folder, proj_l=False).proj_l == ()
    assert not held_proj_l(model) and attached_int8(linear) is not None
    with patched(model, PLAIN) as report, patched(dense, PLAIN):
        assert "proj_l" not in str(report) and torch.equal(run(model), run(dense))
    assert load_extra(model, sla_folder, int8=False).int8 == ()
    assert len(held_proj_l(model)) == 2 and attached_int8(linear) is None
