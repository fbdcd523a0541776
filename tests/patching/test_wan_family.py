"""The rest of the Wan family: every pair is found, the patched output is the author's, and
unpatching puts it back."""

from __future__ import annotations

import copy
import pickle
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers import (
    ChronoEditTransformer3DModel,
    SkyReelsV2Transformer3DModel,
    WanAnimateTransformer3DModel,
    WanVACETransformer3DModel,
)
from diffusers.models.transformers import (
    transformer_chronoedit,
    transformer_skyreels_v2,
    transformer_wan_animate,
    transformer_wan_vace,
)

from tests.patching.wan import EXACT, INT8, dicts, relative, run
from tests.patching.wan_family import BLOCK, FAMILIES, Family, classes, named
from turbo_rcm_patch import PatchConfig, errors, find_pairs, patch_model, patched, unpatch_model

BF16 = torch.bfloat16
each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
#: Cases of every class, for what costs more time.
WITH_LINEARS = (
    "vace",
    "animate-image-two-faces",
    "chronoedit-i2v-fused-qkv",
    "skyreels-masked",
    "skyreels-forcing",
)
COMPILED = ("vace", "animate", "chronoedit", "skyreels-masked")
TRAINED = ("vace", "skyreels-masked", "skyreels-forcing")
PARALLEL = ("vace", "animate", "chronoedit", "skyreels")


@each_family
@pytest.mark.supports("WanAnimateTransformer3DModel", "control, faces")
def test_every_pair_is_listed_and_changes_nothing(family: Family) -> None:
    model = family.model()
    before = dicts(model)
    table = find_pairs(model)
    assert [pair.kind for pair in table] == family.kinds
    assert table.fused == family.fused
    assert all(pair.reason for pair in table if not pair.fused)
    masked = [pair for pair in table if "mask" in pair.reason]
    assert len(masked) == (2 if family.masked else 0)
    assert all((pair.kind, pair.runs) == ("self", "two-launch") for pair in masked)
    assert dicts(model) == before


@each_family
def test_exact_attention_is_the_author_s_forward(family: Family) -> None:
    model, inputs = family.model(), family.inputs(batch=2)
    expected = run(model, **inputs)
    with patched(model, EXACT) as report:
        assert report.fused == family.fused
        assert relative(run(model, **inputs), expected) < 1e-5


@each_family
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.supports(classes(FAMILIES), "self-attention", "cross-attention", "feed-forward")
@pytest.mark.supports(classes(f for f in FAMILIES if "image" in f.kinds), "image branch")
@pytest.mark.supports(classes(f for f in FAMILIES if f.fuse_qkv), "fused QKV")
@pytest.mark.supports(classes(f for f in FAMILIES if f.per_token), "gate per token")
@pytest.mark.supports(classes(f for f in FAMILIES if f.kinds[0] == "control"), "control, faces")
def test_int8_stays_near_the_truth(family: Family, dtype: torch.dtype) -> None:
    truth_model, model = family.model(dtype).float(), family.model(dtype)
    inputs = family.inputs(dtype=dtype)
    wide = {
        k: v.float() if torch.is_tensor(v) and v.dtype == dtype else v for k, v in inputs.items()
    }
    truth = run(truth_model, **wide)
    unpatched = relative(run(model, **inputs), truth)
    with patched(model, INT8):
        output = run(model, **inputs)
    assert output.dtype == dtype
    error = relative(output, truth)
    assert error < 0.02
    assert error > 0 or family.masked, "with a mask every attention here is exact"
    if dtype == BF16:
        assert error < 2 * unpatched


@each_family
@pytest.mark.supports(classes(FAMILIES), "the guard", "unpatched, bit-equal")
def test_guard_sees_every_fused_pair_and_unpatching_leaves_nothing(family: Family) -> None:
    model, inputs = family.model(), family.inputs()
    expected, before = run(model, **inputs), dicts(model)
    state = copy.deepcopy(model.state_dict())
    report = patch_model(model, precision="fixed")
    run(model, **inputs)
    assert {record.path for record in report.guard} == {
        pair.path for pair in report.pairs if pair.fused
    }
    assert {record.verdict for record in report.guard} == {"kept"}
    assert max(record.error for record in report.guard) < 0.05
    unpatch_model(model)
    assert dicts(model) == before
    assert torch.equal(run(model, **inputs), expected)
    after = model.state_dict()
    assert all(torch.equal(after[name], state[name]) for name in state)


@each_family
def test_over_budget_goes_back_to_the_author_s_code(family: Family) -> None:
    model, inputs = family.model(), family.inputs()
    expected = run(model, **inputs)
    with patched(model, PatchConfig(attention="int4", guard_budget=1e-3)) as report:
        assert relative(run(model, **inputs), expected) < 1e-5
        back = {pair.kind for pair in report.pairs if "exceeds the budget" in pair.reason}
    assert "cross" in back and ("self" in back) is not family.masked


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@each_family
def test_autocast_runs_as_written(family: Family) -> None:
    model, inputs = family.model(), family.inputs()
    with torch.autocast("cpu", BF16):
        expected = run(model, **inputs)
        with patched(model):
            assert torch.equal(run(model, **inputs), expected)


@pytest.mark.parametrize("name", WITH_LINEARS)
@pytest.mark.supports(classes(map(named, WITH_LINEARS)), "int8 Linears")
@pytest.mark.usefixtures("peaked_too")
def test_int8_linears(name: str) -> None:
    family = named(name)
    model, inputs = family.model(), family.inputs()
    expected = run(model, **inputs)
    with patched(model, PatchConfig(linear="int8", precision="fixed")) as report:
        assert 0 < relative(run(model, **inputs), expected) < 0.05
        assert all(pair.int8_linears for pair in report.pairs if pair.fused)
        assert {record.verdict for record in report.guard} == {"kept"}


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.supports(classes(map(named, COMPILED)), "torch.compile")
def test_one_graph_over_all_steps(name: str) -> None:
    family, graphs = named(name), []
    model = family.model()

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    with patched(model, precision="fixed"):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for step in range(3):
            inputs = family.inputs()
            inputs["timestep"] = inputs["timestep"] - 3.0 * step
            assert torch.equal(run(compiled, **inputs), run(model, **inputs))
    assert len(graphs) == 1


@pytest.mark.parametrize("name", ["vace", "skyreels-masked"])
def test_copies_of_a_patched_model_stand_alone(name: str) -> None:
    family = named(name)
    model, inputs = family.model(), family.inputs()
    expected = run(model, **inputs)
    patch_model(model)
    fused = run(model, **inputs)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(twin, **inputs), fused)
        unpatch_model(twin)
        assert torch.equal(run(twin, **inputs), expected)


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.supports(classes(map(named, TRAINED)), "training")
def test_gradients_are_the_author_s(name: str) -> None:
    family = named(name)

    def gradients(model: Any) -> dict[str, torch.Tensor]:
        model.requires_grad_(True)
        model.zero_grad()
        model(**family.inputs())[0].square().mean().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected = gradients(family.model())
    model = family.model()
    with patched(model, EXACT):
        found = gradients(model)
    assert found.keys() == expected.keys()
    assert max(relative(found[n], expected[n]) for n in expected) < 1e-4


# --- what is special to one of them --------------------------------------------------------------


@pytest.mark.supports("SkyReelsV2Transformer3DModel", "attention mask")
def test_a_masked_attention_is_exact_and_its_mask_matters() -> None:
    family = named("skyreels-masked")
    model, inputs = family.model(), family.inputs()
    expected = run(model, **inputs)
    for attention in ("int8", "int4"):
        with patched(model, PatchConfig(attention=attention, kinds=("self",))) as report:
            assert relative(run(model, **inputs), expected) < 1e-5
            assert report.fused == 2
            assert "attention is exact" in str(report)
    model._set_ar_attention(1)
    assert relative(run(model, **inputs), expected) > 0.01


def test_a_mask_that_comes_later_is_honoured() -> None:
    family = named("skyreels")
    model = family.model()
    inputs = family.inputs() | {"hidden_states": torch.randn(1, 4, 4, 8, 10)}
    model._set_ar_attention(2)
    expected = run(model, **inputs)
    model._set_ar_attention(1)
    report = patch_model(model, PatchConfig(kinds=("self",), form="one-launch"))
    assert report.pairs[0].runs == "one-launch"
    model._set_ar_attention(2)
    assert relative(run(model, **inputs), expected) < 1e-5
    assert report.pairs[0].runs == "two-launch" and "mask" in report.pairs[0].reason


def test_control_blocks_can_be_left_alone() -> None:
    family = named("vace")
    model, inputs = family.model(), family.inputs()
    expected = run(model, **inputs)
    with patched(model, PatchConfig(attention="exact", kinds=("control",))) as report:
        assert [pair.path for pair in report.pairs if pair.fused] == ["vace_blocks.0.proj_in"]
        assert relative(run(model, **inputs), expected) < 1e-5
    with patched(model, PatchConfig(attention="exact", kinds=("self",))) as report:
        assert report.pairs[0].runs == "as-written" and "kinds" in report.pairs[0].reason
        assert relative(run(model, **inputs), expected) < 1e-5


def test_a_hooked_input_projection_of_the_control_is_called() -> None:
    family = named("vace")
    model, inputs = family.model(), family.inputs()
    model.vace_blocks[0].proj_in.register_forward_hook(lambda _, __, output: 2 * output)
    expected = run(model, **inputs)
    with patched(model, EXACT) as report:
        assert report.pairs[0].runs == "after-linear"
        assert relative(run(model, **inputs), expected) < 1e-5


def test_non_finite_control_is_refused_by_the_guard() -> None:
    family = named("vace")
    model, inputs = family.model(), family.inputs()
    inputs["control_hidden_states"].view(-1)[0] = float("nan")
    with patched(model), pytest.raises(errors.NonFiniteInputError, match="control"):
        run(model, **inputs)


@pytest.mark.parametrize(
    ("name", "file", "block"),
    [
        ("vace", transformer_wan_vace, "WanVACETransformerBlock"),
        ("vace", transformer_wan_vace, "WanTransformerBlock"),
        ("animate", transformer_wan_animate, "WanTransformerBlock"),
        ("chronoedit", transformer_chronoedit, "WanTransformerBlock"),
        ("skyreels", transformer_skyreels_v2, "SkyReelsV2TransformerBlock"),
    ],
)
def test_signature_drift(
    name: str, file: ModuleType, block: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drifted(self: Any, hidden_states: Any, something_new: Any) -> None: ...

    model = named(name).model()
    before = dicts(model)
    monkeypatch.setattr(getattr(file, block), "forward", drifted)
    with pytest.raises(errors.FamilyError, match="something_new"):
        patch_model(model)
    assert dicts(model) == before


@pytest.mark.parametrize("name", PARALLEL)
def test_an_unknown_parallelism_is_refused(name: str) -> None:
    model = named(name).model()
    blocks = model.vace_blocks if name == "vace" else model.blocks
    blocks[0].attn1.processor._parallel_config = object()
    before = dicts(model)
    with pytest.raises(errors.ContextParallelError):
        patch_model(model)
    assert dicts(model) == before


def test_a_subclass_is_not_patched_on_a_guess() -> None:
    class Mine(WanVACETransformer3DModel):
        pass

    with torch.device("meta"):
        model = Mine(num_layers=1, num_attention_heads=1, ffn_dim=8, vace_layers=[0])
    with pytest.raises(errors.UnknownArchitectureError, match="WanVACETransformer3DModel"):
        patch_model(model)


#: Real configurations: kinds of pair that are fused, and how many pairs are left as written.
WAN_14B = dict(num_attention_heads=40, num_layers=40, ffn_dim=13824)
SMALL = dict(num_attention_heads=12, num_layers=30, ffn_dim=8960)
REAL: dict[str, tuple[type, dict[str, Any], int, int]] = {
    "Wan2.1-VACE-1.3B": (
        WanVACETransformer3DModel, SMALL | {"vace_layers": list(range(0, 30, 2))}, 136, 15,
    ),
    "Wan2.1-VACE-14B": (WanVACETransformer3DModel, WAN_14B, 145, 8),
    "Wan2.2-Animate-14B": (
        WanAnimateTransformer3DModel, WAN_14B | {"added_kv_proj_dim": 5120}, 160, 8,
    ),
    "ChronoEdit-14B": (
        ChronoEditTransformer3DModel,
        WAN_14B | {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}, 160, 0,
    ),
    "SkyReels-V2-DF-1.3B": (SkyReelsV2Transformer3DModel, SMALL | {"inject_sample_info": True},
                            90, 0),
    "SkyReels-V2-T2V-14B": (SkyReelsV2Transformer3DModel, WAN_14B, 120, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_real_models_without_their_weights(name: str) -> None:
    cls, config, fused, left = REAL[name]
    with torch.device("meta"):
        model = cls(**config)
    with patched(model) as report:
        assert (report.fused, len(report.pairs) - report.fused) == (fused, left)
    assert {pair.head_dim for pair in report.pairs if pair.heads} == {128}
    assert set(BLOCK) <= {pair.kind for pair in report.pairs}
