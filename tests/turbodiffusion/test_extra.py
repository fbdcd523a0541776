"""What stock classes have no place for: attached, run, and taken away again."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel

import turbo_rcm_patch
from tests.measures import relative_l2
from tests.patching import turbodiffusion as stand_in
from tests.turbodiffusion.wan_model import Options, save
from turbo_rcm_patch import PatchConfig, load_extra, patch_model, patched, unload_extra
from turbo_rcm_patch.errors import AlreadyPatchedError, CheckpointError
from turbo_rcm_patch.ops import int8_linear
from turbo_rcm_patch.ops.int8_linear import scales_of_rows
from turbo_rcm_patch.patching import linears
from turbo_rcm_patch.patching.int8_weights import attached_int8, detach_int8
from turbo_rcm_patch.patching.sla import attach_proj_l, attached_proj_l
from turbo_rcm_patch.turbodiffusion import EXTRA_FILE, PROJ_L
from turbo_rcm_patch.turbodiffusion import extra as extra_module
from turbo_rcm_patch.turbodiffusion.convert import convert_transformer

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


@pytest.mark.usefixtures("no_plans")
def test_the_checkpoints_own_integers_are_multiplied(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call of the int8 linear gets the integers and scales of the file, stacked where
    Linears share an input, and none of them is quantised again."""
    state = torch.load(folder.parent / "in.pth", weights_only=True)
    quantised = [key.removesuffix(".int8_weight") for key in state if "int8" in key]
    ours = {name: (state[f"{name}.int8_weight"], state[f"{name}.scale"]) for name in quantised}
    calls = []

    def recording(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *a: Any, **k: Any):
        calls.append((weight, scale))
        return int8_linear(x, weight, scale, *a, **k)

    def refusing(*_: Any, **__: Any) -> None:
        raise AssertionError("a weight was quantised")

    monkeypatch.setattr(linears.ops, "int8_linear", recording)
    monkeypatch.setattr(linears.ops, "quantize_weight", refusing)
    model = load(folder)
    load_extra(model, folder)
    with patched(model, INT8):
        run(model)
    of_block = ["self_attn.q self_attn.k self_attn.v", "self_attn.o", "cross_attn.q"]
    of_block += ["cross_attn.k cross_attn.v", "cross_attn.o", "ffn.0", "ffn.2"]
    expected = {f"{i}: {names}": names.split() for i in range(2) for names in of_block}
    for label, names in expected.items():
        pairs = [ours[f"blocks.{label[0]}.{name}"] for name in names]
        int8 = torch.cat([pair[0] for pair in pairs])
        scale = torch.cat([scales_of_rows(pair[1], pair[0].shape[0]) for pair in pairs])
        found = [s for w, s in calls if w.shape == int8.shape and torch.equal(w, int8)]
        blocks = all(pair[0].shape[0] % 128 == 0 for pair in pairs[:-1])
        for one in found:
            assert (one.shape[0] < int8.shape[0]) == blocks, label
            assert torch.equal(scales_of_rows(one, int8.shape[0]) if blocks else one, scale), label
        assert found, label
    assert len(calls) == len(expected)


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


def test_int8_weights_of_before_a_merge_are_not_saved(folder: Path, tmp_path: Path) -> None:
    """What is written through `.data` is seen by nothing else."""
    model = load(folder)
    load_extra(model, folder)
    linear = model.blocks[0].ffn.net[2]
    linear.weight.data += 0.05
    model.save_pretrained(tmp_path / "merged")
    again = load(tmp_path / "merged")
    load_extra(again, tmp_path / "merged")
    assert attached_int8(again.blocks[0].ffn.net[2]) is None
    assert attached_int8(again.blocks[1].ffn.net[2]) is not None


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
    third.weight.data = third.weight.data + 0.001
    with patched(model, INT8):
        out = run(model)
    unload_extra(third)
    with patched(model, INT8):
        # to_k and to_v share a product with to_q, so they were quantised too.
        assert torch.equal(run(model), out)


def test_a_copy_quantises_its_own(folder: Path) -> None:
    model = load(folder)
    plain = load(folder)
    load_extra(model, folder)
    twin = copy.deepcopy(model)
    assert attached_int8(twin.blocks[0].attn1.to_q) is None
    with patched(twin, INT8), patched(plain, INT8):
        assert torch.equal(run(twin), run(plain))
    unload_extra(twin)


def test_a_compiled_graph_takes_the_weight_as_it_is_now(folder: Path) -> None:
    """A graph cannot ask whether integers still stand for their weight, so it makes its own."""
    model = load(folder)
    load_extra(model, folder)
    for block in model.blocks:
        block.attn1.to_q.weight.data.mul_(1.5)  # leaves no trace
    plain = load(folder)
    plain.load_state_dict(model.state_dict())
    patch_model(model, INT8)
    patch_model(plain, INT8)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert relative_l2(run(compiled), run(plain)) < 1e-6
    torch._dynamo.reset()


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


def test_int8_weights_can_be_left_out(sla_folder: Path) -> None:
    model = load(sla_folder)
    extra = load_extra(model, sla_folder, int8=False)
    assert len(extra.proj_l) == 2 and extra.int8 == ()
    assert attached_int8(model.blocks[0].attn1.to_q) is None


def test_sla_is_refused_by_a_model_that_was_patched_dense(sla_folder: Path) -> None:
    model = load(sla_folder)
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
        assert len(report.pairs) == 8 and "sparse" in str(report)
        unload_extra(model)
        assert torch.equal(run(model), dense)
        assert len(report.pairs) == 6 and "sparse" not in str(report)


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
    save(Options(ffn=256, quant=True), tmp_path / "narrow.pth")
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


@pytest.mark.parametrize("failure", [CheckpointError, KeyboardInterrupt])
def test_a_failure_leaves_what_was_attached_before(
    failure: type[BaseException],
    sla_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether it fails at an int8 weight or, those attached, at the projections."""
    model = load(sla_folder)
    load_extra(model, sla_folder)
    for block in model.blocks:
        detach_int8(block.attn2.to_q)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    inside = {name: dict(module.__dict__) for name, module in model.named_modules()}
    if failure is KeyboardInterrupt:
        other, calls = sla_folder, itertools.count()

        def interrupted(*given: Any) -> None:
            if next(calls) == 1:
                raise KeyboardInterrupt
            attach_proj_l(*given)

        monkeypatch.setattr(extra_module, "attach_proj_l", interrupted)
    else:
        save(QUANT, tmp_path / "other.pth", seed=1)
        convert_transformer(tmp_path / "other.pth", tmp_path / "other")
        other = tmp_path / "other"
    with pytest.raises(failure):
        load_extra(model, other)
    after = dict(model.named_buffers())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    for name, module in model.named_modules():
        assert module.__dict__.keys() == inside[name].keys()
    assert attached_int8(model.blocks[0].attn1.to_q) is not None
    assert attached_int8(model.blocks[0].attn2.to_q) is None
    assert attached_proj_l(model.blocks[1].attn1) is not None


def test_public_names() -> None:
    assert {"load_extra", "unload_extra"} <= set(turbo_rcm_patch.__all__)
