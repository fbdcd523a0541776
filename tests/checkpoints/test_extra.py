"""int8 weights and `proj_l`, which stock classes have no place for: attached, run, taken away."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.checkpoints.wan_model import QUANT, SLA, Options, converted, load, run
from tests.measures import relative_l2
from tests.patching import turbodiffusion as stand_in
from turbo_rcm_patch import PatchConfig, load_extra, patched, refresh, unload_extra
from turbo_rcm_patch.checkpoints import EXTRA_FILE, PROJ_L, write_checkpoint
from turbo_rcm_patch.errors import AlreadyPatchedError, CheckpointError
from turbo_rcm_patch.patching.int8_weights import attached_int8
from turbo_rcm_patch.patching.sla import attached_proj_l, held_proj_l

INT8 = PatchConfig(linear="int8", guard=False, impl="reference")
PLAIN = PatchConfig(guard=False, impl="reference")
#: Relative L2 in fp32: the same sums in another order; and what int8 q and k cost.
BOTH_FUSED, INT8_OFF = 2e-6, 0.02


def test_attaching_changes_nothing_until_int8_is_asked_for(folder: Path) -> None:
    model = load(folder)
    before, keys = run(model), list(model.state_dict())
    inside = {name: dict(module.__dict__) for name, module in model.named_modules()}
    extra = load_extra(model, folder)
    assert len(extra.int8) == 20 and len(extra.proj_l) == 0
    assert "int8 weights of 20 Linears" in str(extra)
    assert torch.equal(run(model), before) and list(model.state_dict()) == keys
    with patched(model, PLAIN):
        as_is = run(model)
    unload_extra(model)
    for name, module in model.named_modules():
        assert module.__dict__.keys() == inside[name].keys()
        assert not module._non_persistent_buffers_set - {"freqs_cos", "freqs_sin"}
        assert not any("turbo" in buffer for buffer in module._buffers)
    with patched(model, PLAIN):
        assert torch.equal(run(model), as_is)


def test_their_scales_and_ours_err_alike(tmp_path: Path) -> None:
    """Measured here against the dequantised weights, fp32: 0.0051 of the output with the file's
    integers (activations alone are rounded), 0.0068 if they are quantised again by row."""
    folder = converted(replace(SLA, text=24), tmp_path)
    model = load(folder)
    unload_extra(model)  # Dense attention is meant.
    exact = run(model)
    plain, int8 = (replace(one, attention="exact") for one in (PLAIN, INT8))
    with patched(model, plain):
        assert relative_l2(run(model), exact) < 1e-5
    with patched(model, int8):
        again = relative_l2(run(model), exact)
    load_extra(model, folder, proj_l=False)
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


def test_sla_and_scales_lie_at_their_modules_in_whatever_dtype(sla_folder: Path) -> None:
    """In fp32 after a cast of the model too, as TurboDiffusion keeps them."""
    model = load(sla_folder)
    before, keys = run(model), list(model.state_dict())
    extra = load_extra(model, sla_folder)
    assert len(extra.proj_l) == 2 and len(extra.int8) == 20
    assert torch.equal(run(model), before) and list(model.state_dict()) == keys
    state = torch.load(sla_folder.parent / "in.pth", weights_only=True)
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        for i, block in enumerate(model.blocks):
            own, q = f"blocks.{i}.self_attn", attached_int8(block.attn1.to_q)
            held = attached_proj_l(block.attn1)
            assert held is not None and q is not None and attached_proj_l(block.attn2) is None
            for ours, name in (
                *zip(held, ("weight", "bias"), strict=True), (q[0], "int8_weight"), (q[1], "scale")
            ):  # fmt: skip
                place = "q" if ours is q[0] or ours is q[1] else "attn_op.local_attn.proj_l"
                theirs = state[f"{own}.{place}.{name}"]
                assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    with patched(model, INT8):
        assert run(model, torch.bfloat16).isfinite().all()
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
    out = converted(Options(sla=True, head_dim=head_dim), tmp_path, heads=256 // head_dim)
    state = torch.load(tmp_path / "in.pth", weights_only=True)
    ours = load(out)
    load_extra(ours, out)
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
    model = load(folder)
    for options, seed, text in (
        (QUANT, 1, "is not the product"),
        (replace(QUANT, ffn=256), 0, "expected a Linear"),
        (Options(head_dim=64, sla=True), 0, "heads of 64"),
        (Options(), 0, f"no {EXTRA_FILE}"),
    ):
        other = converted(options, tmp_path / text, seed=seed)
        with pytest.raises(CheckpointError, match=text):
            load_extra(model, other)
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
def test_a_folder_in_any_dtype_is_loaded_in_any_and_saved(written, loaded, tmp_path) -> None:
    """Two roundings: one to the folder's dtype, and one to the model's."""
    folder = converted(replace(QUANT, layers=1), tmp_path, dtype=written)
    model = load(folder, loaded)
    assert len(load_extra(model, folder).int8) == 10
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
