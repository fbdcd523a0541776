"""PatchConfig(linear="int8"): which Linears run in int8, how near, and what is kept and undone."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn

from tests.patching.wan import CASES, Case, dicts, relative, run, wan
from turbo_rcm_patch import PatchConfig, find_pairs, patch_model, patched, unpatch_model
from turbo_rcm_patch.models import RCMAttention
from turbo_rcm_patch.patching import copies as copies_file
from turbo_rcm_patch.patching.branches import FusedNorm
from turbo_rcm_patch.patching.copies import Copies
from turbo_rcm_patch.patching.int8_weights import attach_int8
from turbo_rcm_patch.patching.linears import Linears, Projection, logit_spread

#: int8 in the Linears alone.
LINEAR = PatchConfig(attention="exact", linear="int8", guard=False)
AS_IS = PatchConfig(attention="exact", guard=False)


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of weights that were quantised, as it happens."""
    seen: list[tuple[int, ...]] = []
    real = copies_file.ops.quantize_weight

    def counting(*weights: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.extend(tuple(weight.shape) for weight in weights)
        return real(*weights, **options)

    monkeypatch.setattr(copies_file.ops, "quantize_weight", counting)
    return seen


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.supports("WanTransformer3DModel", "int8 Linears")
def test_near_the_author_s_forward(case: Case) -> None:
    model, inputs = case.model(), case.inputs(batch=2)
    expected = run(model, **inputs)
    with patched(model, LINEAR) as report:
        assert report.fused == case.fused
        assert all(pair.int8_linears for pair in report.pairs)
        # A step of 1/40 sigma in a few Linears in a row, halved by what goes past them.
        assert 1e-3 < relative(run(model, **inputs), expected) < 0.02
    assert torch.equal(run(model, **inputs), expected)


def test_bf16_with_int8_attention() -> None:
    case = CASES[0]
    truth_model, model = case.model(torch.bfloat16).float(), case.model(torch.bfloat16)
    inputs = case.inputs(dtype=torch.bfloat16)
    wide = {k: v.float() if torch.is_tensor(v) else v for k, v in inputs.items()}
    with patched(model, PatchConfig(linear="int8", guard=False)):
        output = run(model, **inputs)
    assert output.dtype == torch.bfloat16
    assert relative(output, run(truth_model, **wide)) < 0.03


def test_the_report_names_them() -> None:
    model = wan()
    report = patch_model(model, LINEAR)
    names = {pair.kind: pair.int8_linears for pair in report.pairs}
    assert names == {
        "self": ("to_q", "to_k", "to_v", "to_out.0"),
        "cross": ("to_q", "to_k", "to_v", "to_out.0"),
        "feed-forward": ("net.0.proj", "net.2"),
    }
    assert "to_q, to_k, to_v, to_out.0" in str(report) and "Linears in int8" in str(report)
    json.dumps(report.as_dict(), allow_nan=False)
    unpatch_model(model)
    report = patch_model(model, AS_IS)
    assert not any(pair.int8_linears for pair in report.pairs)
    assert "int8 Linears" not in str(report) and "Linears in int8" not in str(report)


def test_every_linear_of_a_block_is_quantised_once(quantised: list[tuple[int, ...]]) -> None:
    model = wan(num_layers=1)
    patch_model(model, LINEAR)
    first = run(model)
    assert sorted(quantised) == sorted(
        tuple(module.weight.shape)
        for module in model.blocks[0].modules()
        if isinstance(module, torch.nn.Linear)
    )
    quantised.clear()
    assert torch.equal(run(model), first)
    assert not quantised


def test_the_norms_before_int8_linears_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three norms a block, none of which becomes a tensor; with a LoRA on q, that of q does."""
    seen: list[str] = []
    own = FusedNorm.__call__

    def counting(self: Any, *args: Any) -> Any:
        made = own(self, *args)
        seen.append("norm_modulate" if isinstance(made[0], torch.Tensor) else "norm_modulate_rows")
        return made

    monkeypatch.setattr(FusedNorm, "__call__", counting)
    case = CASES[0]
    model, inputs = case.model(), case.inputs()
    blocks = len(model.blocks)
    with patched(model, LINEAR):
        run(model, **inputs)
    assert seen == 3 * blocks * ["norm_modulate_rows"]
    seen.clear()
    model.add_adapter(LoraConfig(r=2, target_modules=["attn1.to_q"]))
    with patched(model, LINEAR):
        run(model, **inputs)
    assert seen == blocks * ["norm_modulate", *2 * ["norm_modulate_rows"]]


def test_nothing_is_stored_in_the_model() -> None:
    model = wan()
    expected, before = run(model), dicts(model)
    state = copy.deepcopy(model.state_dict())
    patch_model(model, LINEAR)
    run(model)
    now = dicts(model)
    changed = {
        (name, key)
        for name in before
        for key in set(before[name]) | set(now[name])
        if before[name].get(key) is not now[name].get(key)
        and before[name].get(key) != now[name].get(key)
    }
    assert changed == {
        ("", "_turbo_rcm_patch"), ("", "_apply"), ("", "load_state_dict"),
        ("", "enable_parallelism"),
        ("blocks.0", "forward"), ("blocks.1", "forward"),
    }  # fmt: skip
    unpatch_model(model)
    assert dicts(model) == before
    after = model.state_dict()
    assert list(after) == list(state) and all(torch.equal(after[n], state[n]) for n in state)
    assert torch.equal(run(model), expected)


def test_save_pretrained_saves_the_author_s_weights(tmp_path: Path) -> None:
    model = wan(num_layers=1)
    model.save_pretrained(tmp_path / "before")
    with patched(model, LINEAR):
        run(model)
        model.save_pretrained(tmp_path / "patched")
    for path in (tmp_path / "before").iterdir():
        assert path.read_bytes() == (tmp_path / "patched" / path.name).read_bytes()


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_stands_alone(how: str) -> None:
    model = wan()
    expected = run(model)
    patch_model(model, LINEAR)
    fused = run(model)
    twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(run(twin), fused)
    unpatch_model(twin)
    assert torch.equal(run(twin), expected)


# --- the weights may change ----------------------------------------------------------------------


def test_load_state_dict_refreshes_them(quantised: list[tuple[int, ...]]) -> None:
    model, other = wan(), wan()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    patch_model(model, LINEAR)
    run(model)
    model.load_state_dict(other.state_dict())
    quantised.clear()
    output = run(model)
    assert quantised
    patch_model(other, LINEAR)
    assert torch.equal(output, run(other))


@pytest.mark.parametrize("change", ["in place", "new parameter", "new data", "new linear"])
def test_a_changed_weight_is_seen(change: str) -> None:
    model, other = wan(num_layers=1), wan(num_layers=1)
    patch_model(model, LINEAR)
    patch_model(other, LINEAR)
    run(model)
    for network in (model, other):
        linear = network.blocks[0].ffn.net[2]
        if change == "in place":
            with torch.no_grad():
                linear.weight.mul_(-1)
        elif change == "new parameter":
            linear.weight = torch.nn.Parameter(-linear.weight.detach(), requires_grad=False)
        elif change == "new data":
            linear.weight.data = -linear.weight.data
        else:
            network.blocks[0].ffn.net[2] = copy.deepcopy(linear)
            network.blocks[0].ffn.net[2].weight.data.mul_(-1)
    assert torch.equal(run(model), run(other))


# --- what is not quantised -----------------------------------------------------------------------


def add_lora(model: Any, *targets: str) -> None:
    torch.manual_seed(7)
    model.add_adapter(
        LoraConfig(r=4, lora_alpha=16, target_modules=list(targets), init_lora_weights=False)
    )
    model.eval()


@pytest.mark.parametrize("patch_first", [True, False], ids=["patch-first", "patch-after"])
def test_a_linear_with_lora_is_called(patch_first: bool, quantised: list[tuple[int, ...]]) -> None:
    targets = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.2", "ffn.net.0.proj")
    model = wan()
    add_lora(model, *targets)
    expected = run(model)
    model = wan()
    if patch_first:
        report = patch_model(model, LINEAR)
        run(model)
        quantised.clear()
        add_lora(model, *targets)
    else:
        add_lora(model, *targets)
        report = patch_model(model, LINEAR)
    assert relative(run(model), expected) < 1e-5
    assert not quantised
    assert not any(pair.int8_linears for pair in report.pairs)
    assert "to_q is not in int8: it is peft's Linear" in find_pairs(model)[0].reason


def test_the_others_of_a_block_with_lora_are_quantised(quantised: list[tuple[int, ...]]) -> None:
    model = wan(num_layers=1)
    add_lora(model, "to_k")
    expected = run(model)
    report = patch_model(model, LINEAR)
    assert 0 < relative(run(model), expected) < 0.02
    assert report.pairs[0].int8_linears == ("to_q", "to_v", "to_out.0")
    assert len(quantised) == 3 + 3 + 2


def test_inputs_of_peaked_attention_stay_in_16_bits(quantised: list[tuple[int, ...]]) -> None:
    """Where the norms of q and k spread the logits, q, k and v are not in int8: here, of the
    self-attention of the first block."""
    model, inputs = wan(num_layers=2), CASES[0].inputs()
    attn = model.blocks[0].attn1
    for factor, peaked in ((1.0, False), (8.0, True)):
        quantised.clear()
        with torch.no_grad():
            attn.norm_q.weight.mul_(factor)
        expected = run(model, **inputs)
        with patched(model, LINEAR) as report:
            assert relative(run(model, **inputs), expected) < 0.02
            first, *others = report.pairs
            assert first.int8_linears == (
                ("to_out.0",) if peaked else ("to_q", "to_k", "to_v", "to_out.0")
            )
            words = "to_q, to_k, to_v in 16 bits: the norms of q and k spread the logits by"
            assert (words in first.reason) == peaked
            assert all(len(pair.int8_linears) in (2, 4) for pair in others)
        assert len(quantised) == 2 * (4 + 4 + 2) - 3 * peaked
        assert torch.equal(run(model, **inputs), expected)


def test_what_was_quantised_by_others_stays_so_in_peaked_attention() -> None:
    model, inputs = wan(num_layers=1), CASES[0].inputs()
    attn = model.blocks[0].attn1
    with torch.no_grad():
        attn.norm_q.weight.mul_(8.0)
    weight = attn.to_q.weight
    scale = torch.full([-(-n // 128) for n in weight.shape], float(weight.abs().max()) / 127)
    by_rows = scale.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)
    int8 = (weight.detach() / by_rows[:, : weight.shape[1]]).round().to(torch.int8)
    attach_int8(attn.to_q, int8, scale)
    with patched(model, LINEAR) as report:
        run(model, **inputs)
        assert report.pairs[0].int8_linears == ("to_q", "to_k", "to_v", "to_out.0")


@pytest.mark.parametrize("form", ["across", "per head", "no weight", "shard", "none", "nan"])
def test_the_spread_of_logits(form: str) -> None:
    """Against logits of random rows, for every form of a norm."""
    heads, dim = 3, 16
    norms = [nn.RMSNorm(dim if form == "per head" else heads * dim) for _ in range(2)]
    for norm, size in zip(norms, (3.0, 0.7), strict=True):
        with torch.no_grad():
            norm.weight.copy_(size * torch.rand_like(norm.weight))
    if form == "no weight":
        norms[1] = nn.RMSNorm(heads * dim, elementwise_affine=False)
    if form in ("shard", "none", "nan"):
        if form == "shard":
            norms[0].weight = nn.Parameter(norms[0].weight[: dim + 1].detach())
        elif form == "none":
            norms[0] = nn.Identity()
        else:
            norms[0].weight.data[3] = float("nan")
        assert logit_spread(norms, dim) is None
        return
    rows = torch.randn(2, 4000, heads * dim)
    if form == "per head":
        rows = rows.unflatten(2, (heads, dim))
    q, k = (norm(x).view(4000, heads, dim).detach() for norm, x in zip(norms, rows, strict=True))
    logits = torch.einsum("qhd,qhd->qh", q, k) * dim**-0.5
    spread = logit_spread(norms, dim)
    assert spread == pytest.approx(float(logits.square().mean().sqrt()), rel=0.1)


def test_a_linear_that_wants_a_gradient_is_called(quantised: list[tuple[int, ...]]) -> None:
    def gradients(model: Any) -> dict[str, torch.Tensor]:
        model.requires_grad_(True)
        model(**CASES[0].inputs())[0].square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected, model = gradients(wan()), wan()
    with patched(model, LINEAR):
        found = gradients(model)
        assert not quantised
        run(model)
        assert quantised  # without gradients it runs in int8
    assert max(relative(found[name], expected[name]) for name in expected) < 1e-4


def test_an_input_s_gradient_passes_frozen_int8_linears() -> None:
    model, inputs = wan(), CASES[0].inputs()

    def gradient() -> torch.Tensor:
        x = inputs["hidden_states"].clone().requires_grad_()
        model(**{**inputs, "hidden_states": x})[0].square().mean().backward()
        return x.grad

    expected = gradient()
    with patched(model, LINEAR):
        with torch.inference_mode():
            run(model)
        assert relative(gradient(), expected) < 0.1


def test_kinds_and_odd_activations() -> None:
    model = wan(num_layers=1)
    model.blocks[0].ffn.net[0].approximate = "none"
    expected = run(model)
    report = patch_model(model, LINEAR)
    assert 0 < relative(run(model), expected) < 0.02
    assert report.pairs[2].int8_linears == ("net.2",)
    unpatch_model(model)
    report = patch_model(
        model, PatchConfig(attention="exact", linear="int8", kinds=("feed-forward",))
    )
    assert [pair.int8_linears for pair in report.pairs] == [(), (), ("net.2",)]


@pytest.mark.parametrize("factor", [1.0, 8.0], ids=["as-is", "peaked"])
def test_compiles_without_a_break(factor: float) -> None:
    torch._dynamo.reset()
    model = wan()
    for block in model.blocks:
        block.attn1.norm_q.weight.data.mul_(factor)
    with patched(model, LINEAR):
        expected = run(model)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert relative(run(compiled), expected) < 1e-6
        with torch.no_grad():
            model.blocks[0].ffn.net[2].weight.mul_(-1)
        assert relative(run(compiled), run(model)) < 1e-6
    torch._dynamo.reset()


# --- the guard -----------------------------------------------------------------------------------


def test_the_guard_compares_with_int8_linears() -> None:
    model = wan()
    report = patch_model(model, PatchConfig(attention="exact", linear="int8"))
    run(model)
    assert len(report.guard) == 6
    assert all(record.verdict == "kept" and 1e-3 < record.error < 0.05 for record in report.guard)


def test_over_budget_the_linears_go_first() -> None:
    model = wan()
    expected = run(model)
    report = patch_model(model, PatchConfig(attention="exact", linear="int8", guard_budget=1e-4))
    assert relative(run(model), expected) < 1e-5
    assert [record.verdict for record in report.guard[:2]] == ["linears given back", "kept"]
    assert report.fused == 6 and not any(pair.int8_linears for pair in report.pairs)
    assert all("int8 Linears given back by the guard" in pair.reason for pair in report.pairs)
    assert "linears given back: blocks.0.attn1 at 0.0" in str(report)
    assert model._turbo_rcm_patch.plan.copies.bytes() == 0, "they are no longer needed"
    assert relative(run(model), expected) < 1e-5


def test_then_the_pair() -> None:
    model = wan()
    expected = run(model)
    report = patch_model(model, PatchConfig(attention="int4", linear="int8", guard_budget=1e-3))
    assert relative(run(model), expected) < 1e-5
    verdicts = [record.verdict for record in report.guard if record.path == "blocks.0.attn1"]
    assert verdicts == ["linears given back", "given back"]
    assert [pair.kind for pair in report.pairs if pair.fused] == ["feed-forward"] * 2


@pytest.mark.parametrize("projection", [True, False], ids=["projection", "bare"])
@pytest.mark.supports("RCMAttention", "int8 Linears")
def test_an_rcm_module(projection: bool) -> None:
    module = RCMAttention(dim=64, num_heads=2, projection=projection).eval()
    x, t = torch.randn(2, 30, 64), torch.tensor([0.3, 0.9])
    with torch.no_grad():
        expected = module(x, t)
        with patched(module, LINEAR) as report:
            assert 1e-4 < relative(module(x, t), expected) < 0.02
        assert report.pairs[0].int8_linears == (("qkv", "proj") if projection else ("qkv",))


def test_a_captured_graph_makes_its_own_int8_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph quantises the weight on every replay: nothing is kept, and nothing goes stale."""
    module = nn.Linear(32, 32).requires_grad_(False)
    x, linears = torch.randn(1, 4, 32), Linears(Copies("reference"))

    def product() -> torch.Tensor:
        (made,), _ = Projection(linears, "a", (module,), x, x.dtype, int8=True)(None, x, x)
        return made

    monkeypatch.setattr(copies_file, "is_capturing", lambda device: True)
    captured = product()
    assert linears.copies.bytes() == 0
    monkeypatch.setattr(copies_file, "is_capturing", lambda device: False)
    eager = product()
    assert torch.equal(captured, eager) and linears.copies.bytes() > 0
    monkeypatch.setattr(copies_file, "is_capturing", lambda device: True)
    module.weight.mul_(2)
    again = product()
    assert not torch.equal(again, eager)
