"""TurboDiffusion's WanModel: which pairs there are, what comes out, and that everything goes
back."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from tests.patching import turbodiffusion as stand_in
from tests.patching.turbodiffusion import (
    WanModel,
    tiny,
    tiny_inputs,
    with_fast_norms,
    with_sparse,
)
from tests.patching.wan import EXACT, INT8, dicts, relative, with_lora
from turbo_rcm_patch import PatchConfig, find_pairs, patch_model, patched, unpatch_model
from turbo_rcm_patch.errors import FamilyError, UnknownArchitectureError
from turbo_rcm_patch.patching.record import record_of

BF16 = torch.bfloat16

CASES: dict[str, dict[str, Any]] = {
    "2.1-t2v": {},
    "2.1-i2v": {"image": True},
    "no-checkpoint-wrapper": {"checkpoint": False},
    "no-norm-of-q-and-k": {"qk_norm": False},
    "no-cross-norm": {"cross_norm": False},
    "head-dim-24": {"dim": 72, "num_heads": 3},
}


def run(model: Any, **inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs)


def given(name: str, **more: Any) -> dict[str, torch.Tensor]:
    options = CASES[name]
    return tiny_inputs(image=options.get("image", False), dim=options.get("dim", 128), **more)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sla"])
@pytest.mark.parametrize("how", ["guard", "given back", "autocast", "hooked", "called"])
def test_without_flash_attn(monkeypatch: pytest.MonkeyPatch, how: str, sparse: bool) -> None:
    """The author's file has no rotary embedding then, so the unpatched model cannot run."""

    def made() -> WanModel:
        return with_sparse(tiny()) if sparse else tiny()

    def forward(model: WanModel) -> torch.Tensor:
        with torch.autocast("cpu", BF16, enabled=how == "autocast"):
            return run(model, **tiny_inputs(tokens=150))

    expected = forward(made())
    monkeypatch.setattr(stand_in, "flash_apply_rotary_emb", None)
    model = made()
    before = dicts(model)
    with pytest.raises(TypeError, match="not callable"):
        forward(model)
    if how == "hooked":
        block_of(model).self_attn.register_forward_hook(lambda module, args, output: output)
    config = {
        "given back": PatchConfig(attention="int4", guard_budget=1e-6),
        "called": PatchConfig(kinds=("feed-forward",), guard=False),
    }.get(how, PatchConfig(precision="fixed"))
    report = patch_model(model, config)
    assert report.fused > 0
    found = relative(forward(model), expected)
    assert found < (1e-5 if how in ("given back", "called") else 0.02)
    if how == "guard":
        assert "kept" in str(report.guard) and report.fused == (8 if sparse else 6)
        assert find_pairs(model)[0].runs == "two-launch"
        twin = copy.deepcopy(model)
        assert torch.equal(forward(twin), forward(model))
    unpatch_model(model)
    if how != "hooked":
        assert dicts(model) == before


def block_of(model: WanModel, index: int = 0) -> Any:
    block = model.blocks[index]
    return getattr(block, "_checkpoint_wrapped_module", block)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fast", [False, True], ids=["trained-norms", "fast-norms"])
def test_exact_attention_is_the_author_s_forward(name: str, fast: bool) -> None:
    model, inputs = tiny(**CASES[name]), given(name, batch=2)
    if fast:
        model = with_fast_norms(model)
    expected = run(model, **inputs)
    with patched(model, EXACT) as report:
        assert report.fused == len(report.pairs) == 2 * (4 if "i2v" in name else 3)
        assert relative(run(model, **inputs), expected) < 1e-5


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fast", [False, True], ids=["trained-norms", "fast-norms"])
@pytest.mark.supports(
    "WanModel", "self-attention", "cross-attention", "image branch", "feed-forward"
)
def test_int8_in_bf16_stays_near_the_truth(name: str, fast: bool) -> None:
    model, inputs = tiny(**CASES[name]).to(BF16), given(name, dtype=BF16)
    truth = run(copy.deepcopy(model).float(), **{k: v.float() for k, v in inputs.items()})
    if fast:
        model = with_fast_norms(model)
    unpatched = relative(run(model, **inputs), truth)
    with patched(model, INT8):
        output = run(model, **inputs)
    assert output.dtype == BF16
    assert relative(output, truth) < max(0.02, 2 * unpatched)


@pytest.mark.parametrize(
    "kinds", [("self",), ("cross",), ("cross", "image"), ("self", "feed-forward")], ids="+".join
)
def test_kinds_choose_the_pairs(kinds: tuple[Any, ...]) -> None:
    model, inputs = tiny(image=True), tiny_inputs(image=True)
    expected = run(model, **inputs)
    with patched(model, PatchConfig(attention="exact", guard=False, kinds=kinds)) as report:
        assert {pair.kind for pair in report.pairs if pair.fused} == set(kinds)
        assert relative(run(model, **inputs), expected) < 1e-5


@pytest.mark.parametrize("name", ["2.1-t2v", "2.1-i2v"])
@pytest.mark.parametrize("sparse", [False, True], ids=["original", "sla"])
@pytest.mark.supports("WanModel", "int8 Linears")
@pytest.mark.usefixtures("peaked_too")
def test_int8_linears(name: str, sparse: bool) -> None:
    model, inputs = tiny(**CASES[name]), given(name, tokens=150)
    if sparse:
        model = with_sparse(model)
    expected = run(model, **inputs)
    with patched(model, PatchConfig(linear="int8", guard=False)) as report:
        names = {pair.path.split(".")[-1]: pair.int8_linears for pair in report.pairs[:5]}
        assert names["self_attn"] == ("q", "k", "v", "o") and names["ffn"] == ("0", "2")
        assert names.get("image", ("k_img", "v_img")) == ("k_img", "v_img")
        assert 0 < relative(run(model, **inputs), expected) < 0.05


def test_the_gate_is_rounded_before_it_multiplies() -> None:
    """With a branch of its own kernels' exact attention and plain Linears, only the cast policy
    tells the two blocks apart: one fp32 gate would leave one value in three different."""
    model = tiny(layers=1).to(BF16)
    inputs = tiny_inputs(dtype=BF16)
    expected = run(model, **inputs)
    config = PatchConfig(attention="exact", guard=False, kinds=("feed-forward",))
    block = block_of(model)
    block.norm2.register_forward_hook(lambda *_: None)  # called, so that it rounds as its author's
    with patched(model, config) as report:
        assert report.fused == 1
        assert torch.equal(run(model, **inputs), expected)


@pytest.mark.parametrize("sage", [False, True], ids=["sla", "sagesla"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.supports("WanModel", "SLA")
def test_sparse_attention_stays_near_its_author_s(sage: bool, dtype: torch.dtype) -> None:
    model = with_sparse(tiny(), sage=sage).to(dtype)
    inputs = tiny_inputs(tokens=400, dtype=dtype)
    expected = run(model, **inputs)
    with patched(model, INT8) as report:
        runs = {pair.path.split(".", 2)[2]: pair.runs for pair in report.pairs[:4]}
        assert runs == {
            "self_attn": "two-launch",
            "cross_attn": "two-launch",
            "self_attn.attn_op.local_attn": "in-kernel",
            "ffn": "in-linear",
        }
        error = relative(run(model, **inputs), expected)
    assert 0 < error < 0.02
    # The linear branch reaches the output, so the bound above holds it too.
    for module in model.modules():
        if hasattr(module, "proj_l"):
            module.proj_l.weight.data.zero_()
    with patched(model, INT8):
        assert relative(run(model, **inputs), expected) > 0.05


def test_what_is_not_ours_is_called_and_only_its_skip_is_fused() -> None:
    model = with_sparse(tiny())
    inputs = tiny_inputs(tokens=200)
    local = block_of(model).self_attn.attn_op.local_attn
    local.feature_map_q = local.feature_map_k = nn.ReLU()
    block_of(model, 1).self_attn.attn_op.local_attn.BLKQ = 256
    with patched(model, INT8) as report:
        assert "blocks of 256 by 64" in report.pairs[4].reason
    block_of(model, 1).self_attn.attn_op.local_attn.BLKQ = 128
    expected = run(model, **inputs)
    with patched(model, EXACT) as report:
        first, _, linear, _ = report.pairs[:4]
        assert first.runs == "after-linear" and "ReLU" in first.reason
        assert linear.runs == "as-written"
        assert "leaves a sparse attention to its author" in report.pairs[4].reason
        assert relative(run(model, **inputs), expected) < 1e-5


def test_hooks_and_other_linears_are_called() -> None:
    model = tiny()
    block = block_of(model)
    calls: list[str] = []
    block.self_attn.register_forward_hook(lambda *_: calls.append("self_attn"))

    class Int8Linear(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append("o")
            return super().forward(x)

    other = Int8Linear(128, 128)
    other.load_state_dict(block.cross_attn.o.state_dict())
    block.cross_attn.o = other
    inputs = tiny_inputs()
    expected = run(model, **inputs)
    calls.clear()
    with patched(model, EXACT) as report:
        assert [pair.runs for pair in report.pairs[:2]] == ["after-linear", "after-linear"]
        assert "Int8Linear" in report.pairs[1].reason
        assert relative(run(model, **inputs), expected) < 1e-5
    assert calls == ["self_attn", "o"]


@pytest.mark.supports("WanModel", "LoRA")
@pytest.mark.parametrize("sparse", [False, True], ids=["original", "sla"])
def test_lora(sparse: bool) -> None:
    model, inputs = with_sparse(tiny()) if sparse else tiny(), tiny_inputs(tokens=150)
    without = run(model, **inputs)
    with_lora(model, "q", "o", "ffn.2")
    expected = run(model, **inputs)
    assert relative(without, expected) > 0.05
    with patched(model, INT8 if sparse else EXACT) as report:
        attention, *_, ffn = report.pairs[: len(report.pairs) // 2]
        assert attention.runs == ffn.runs == "after-linear" and "peft" in attention.reason
        assert relative(run(model, **inputs), expected) < (0.02 if sparse else 1e-5)


@pytest.mark.parametrize("sparse", [False, True], ids=["original", "sla"])
@pytest.mark.parametrize("guard", [False, True], ids=["no-guard", "guard"])
@pytest.mark.supports("WanModel", "the guard", "unpatched, bit-equal")
def test_unpatch_leaves_nothing_behind(sparse: bool, guard: bool) -> None:
    model = with_sparse(tiny()) if sparse else tiny()
    inputs = tiny_inputs(tokens=150)
    expected, before = run(model, **inputs), dicts(model)
    report = patch_model(model, PatchConfig(guard=guard, precision="fixed"))
    assert dicts(model) != before
    run(model, **inputs)
    if guard:
        assert len(report.guard) == (8 if sparse else 6)
        assert all(record.verdict == "kept" for record in report.guard)
    unpatch_model(model)
    assert dicts(model) == before
    assert torch.equal(run(model, **inputs), expected)


def test_the_guard_gives_a_sparse_attention_back_and_can_make_it_exact() -> None:
    model, inputs = with_sparse(tiny()), tiny_inputs(tokens=150)
    expected = run(model, **inputs)
    tight = PatchConfig(guard_budget=1e-5, precision="auto", kinds=("self",))
    with patched(model, tight) as report:
        assert relative(run(model, **inputs), expected) < 1e-5
        assert {record.verdict for record in report.guard} >= {"exact attention", "kept"}
        by_path = {pair.path: pair for pair in report.pairs}
        assert not by_path["blocks.0.self_attn.attn_op.local_attn"].fused
        assert by_path["blocks.0.self_attn"].fused
        assert relative(run(model, **inputs), expected) < 1e-5
    with patched(
        model, PatchConfig(guard_budget=1e-5, precision="fixed", kinds=("self",))
    ) as report:
        assert torch.equal(run(model, **inputs), expected)
        assert report.fused == 0


@pytest.mark.supports("WanModel", "training")
def test_gradients_are_those_of_the_author_s_block() -> None:
    model = with_sparse(tiny(layers=1)).requires_grad_(True)
    inputs = tiny_inputs(tokens=100)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(**inputs).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients()
    with patched(model, INT8):
        for a, b in zip(gradients(), expected, strict=True):
            assert relative(a, b) < 0.05


def test_copies_are_independent() -> None:
    model, inputs = tiny(), tiny_inputs()
    patch_model(model, INT8)
    expected = run(model, **inputs)
    other = copy.deepcopy(model)
    assert torch.equal(run(other, **inputs), expected)
    unpatch_model(model)
    assert torch.equal(run(other, **inputs), expected)
    forward = vars(block_of(other))["forward"]
    assert forward._block is block_of(other)
    assert pickle.loads(pickle.dumps(forward._shared))._kept is None


@pytest.mark.supports("WanModel", "torch.compile")
def test_compiles_without_a_break() -> None:
    model, inputs = with_sparse(tiny(layers=1, checkpoint=False)), tiny_inputs(tokens=100)
    with patched(model, INT8):
        expected = run(model, **inputs)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert relative(run(compiled, **inputs), expected) < 1e-5


@pytest.mark.parametrize("kind", ["self", "feed-forward"])
def test_a_pair_given_back_compiles(kind: str) -> None:
    """A compiler traces what stands for the block in the eyes of its author's code."""
    model, inputs = with_sparse(tiny(layers=1, checkpoint=False)), tiny_inputs(tokens=100)
    with patched(model, INT8):
        for state in record_of(model).plan.states:  # type: ignore[union-attr]
            if state.pair.kind == kind:
                state.give_back("for a test")
        expected = run(model, **inputs)
        compiled = torch.compile(model, backend="aot_eager")
        assert relative(run(compiled, **inputs), expected) < 1e-5


def test_another_wan_model_is_unknown() -> None:
    model = tiny()
    for block in (block_of(model, i) for i in range(2)):
        del block.self_attn.attn_op
    with pytest.raises(UnknownArchitectureError, match="TurboDiffusion"):
        find_pairs(model)


def test_a_drifted_signature_is_refused() -> None:
    model = tiny()

    class WanLayerNorm(stand_in.WanLayerNorm):
        def forward(self, x: torch.Tensor, extra: int = 0) -> torch.Tensor:
            return super().forward(x)

    block_of(model, 1).norm2 = WanLayerNorm(128, 1e-6)
    with pytest.raises(FamilyError, match="WanLayerNorm"):
        patch_model(model)


@pytest.mark.parametrize(
    ("name", "missing", "known"),
    [
        ("WanAttentionBlock", "", True),
        ("SomeoneElsesBlock", "", False),  # the layout alone is no proof
        ("WanAttentionBlock", "modulation", False),  # nor is the name
        ("WanAttentionBlock", "self_attn.attn_op", False),
        ("WanAttentionBlock", "cross_attn.norm_k", False),
    ],
)
def test_a_model_is_known_by_name_and_layout(name: str, missing: str, known: bool) -> None:
    model = tiny(layers=1, checkpoint=False)
    block = model.blocks[0]
    block.__class__ = type(name, (type(block),), {"forward": type(block).forward})
    owner, _, attribute = missing.rpartition(".")
    if missing:
        delattr(block.get_submodule(owner), attribute)
    if known:
        assert len(find_pairs(model)) == 3
        return
    with pytest.raises(UnknownArchitectureError):
        find_pairs(model)


def test_a_model_without_blocks_is_not_known() -> None:
    model = tiny(layers=1)
    for blocks in (torch.nn.ModuleList(), None):
        model.blocks = blocks  # type: ignore[assignment]
        with pytest.raises(UnknownArchitectureError):
            find_pairs(model)
