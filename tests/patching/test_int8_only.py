"""int8 weights alone: what is dropped, that nothing is silently wrong afterwards, and the bytes it
takes."""

from __future__ import annotations

import copy
import logging
import pickle
import weakref
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import remove_hook_from_module
from diffusers.hooks import HookRegistry, ModelHook
from peft import LoraConfig
from torch import Tensor, nn

from tests.patching import cogvideox, turbodiffusion
from tests.patching.test_around import group_offloading
from tests.patching.wan import CASES, dicts, relative, run, wan
from turbo_rcm_patch import (
    PatchConfig,
    keep_int8_only,
    patch_model,
    patched,
    report_of,
    unpatch_model,
)
from turbo_rcm_patch.errors import AlreadyPatchedError, DroppedWeightError, OffloadedError
from turbo_rcm_patch.models import RCMAttention
from turbo_rcm_patch.ops.int8_linear import dequantized
from turbo_rcm_patch.patching import int8_only
from turbo_rcm_patch.patching import patch as patch_module
from turbo_rcm_patch.patching.int8_module import Int8Linear
from turbo_rcm_patch.patching.int8_weights import attach_int8

KEPT = PatchConfig(attention="exact", linear="int8", guard=False)
ONLY = PatchConfig(attention="exact", linear="int8-only", guard=False)
CPU = torch.device("cpu")


def storages(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind some tensors, each once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())


def held_bytes(model: Any) -> int:
    """Parameters, buffers and the int8 copies of a patched model."""
    record = model.__dict__.get("_turbo_rcm_patch")
    copies = [] if record is None else record.plan.copies.tensors()
    return storages([*model.parameters(), *model.buffers(), *copies])


def int8_linears(model: nn.Module) -> dict[str, Int8Linear]:
    return {name: m for name, m in model.named_modules() if type(m) is Int8Linear}


def with_products(model: nn.Module) -> nn.Module:
    """A copy in which every Int8Linear is a stock one with the product as its weight."""
    twin = copy.deepcopy(model)
    for name, linear in int8_linears(twin).items():
        stock = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)
        stock.weight = nn.Parameter(torch.Tensor(linear.weight.detach().clone()).to(linear.dtype))
        stock.bias = linear.bias
        stock.requires_grad_(False)
        twin.set_submodule(name, stock)
    return twin


# --- the same as with originals ------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wan_has_the_bits_it_has_with_originals(case: Any) -> None:
    inputs = case.inputs()
    model, other = case.model(), case.model()
    patch_model(model, KEPT)
    expected = run(model, **inputs)
    patch_model(other, ONLY)
    for _ in range(2):
        assert torch.equal(run(other, **inputs), expected)
    assert len(int8_linears(other)) >= 6 * len(other.blocks)


def test_other_families_have_them_too() -> None:
    made: list[tuple[Any, Any, Any]] = []
    for case in cogvideox.CASES[:2]:
        made.append((case.model(), case.model(), case.inputs()))
    for model, other, inputs in made:
        patch_model(model, KEPT)
        patch_model(other, ONLY)
        assert int8_linears(other)
        assert torch.equal(run(other, **inputs), run(model, **inputs))
    x = torch.randn(2, 77, 128, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    module = RCMAttention(128, 2).eval().requires_grad_(False)
    twin = copy.deepcopy(module)
    patch_model(module, KEPT)
    patch_model(twin, ONLY)
    assert set(int8_linears(twin)) == {"qkv", "proj"}
    assert torch.equal(twin(x, 0.7), module(x, 0.7))


@pytest.mark.usefixtures("peaked_too")
def test_turbodiffusions_own_class_too() -> None:
    model, other = turbodiffusion.tiny(), turbodiffusion.tiny()
    inputs = turbodiffusion.tiny_inputs()
    patch_model(model, KEPT)
    patch_model(other, ONLY)
    assert int8_linears(other)
    with torch.no_grad():
        assert torch.equal(other(**inputs), model(**inputs))


def test_a_checkpoints_own_integers_are_kept() -> None:
    model = wan(num_layers=1)
    linear = model.blocks[0].ffn.net[2]
    int8 = torch.randint(-127, 128, linear.weight.shape, dtype=torch.int8)
    scale = torch.full((1, 1), 1e-3)
    attach_int8(linear, int8, scale)
    linear.weight.data.copy_(int8 * scale)
    attach_int8(linear, int8, scale)
    patch_model(model, KEPT)
    expected = run(model)
    unpatch_model(model)
    keep_int8_only(model)
    found = model.blocks[0].ffn.net[2].int8
    assert torch.equal(found[0], int8) and torch.equal(found[1], scale)
    patch_model(model, KEPT)
    assert torch.equal(run(model), expected)


# --- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_byte_is_counted(dtype: torch.dtype) -> None:
    model = CASES[0].model(dtype)
    before, inputs = held_bytes(model), CASES[0].inputs(dtype=dtype)
    linears = [m for n, m in model.blocks.named_modules() if type(m) is nn.Linear]
    weights = sum(linear.weight.nbytes for linear in linears)
    int8 = sum(linear.weight.numel() for linear in linears)
    scales = sum(4 * linear.out_features for linear in linears)
    del linears
    patch_model(model, ONLY)
    for _ in range(2):
        assert held_bytes(model) == before - weights + int8 + scales
        run(model, **inputs)
    kept = CASES[0].model(dtype)
    patch_model(kept, KEPT)
    run(kept, **inputs)
    biases = held_bytes(kept) - before - int8 - scales
    assert biases >= 0, "both at once"


def test_one_original_at_a_time_stays_beside_its_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wan()
    before = held_bytes(model)
    largest = max(p.nbytes for p in model.blocks.parameters())
    peaks: list[int] = []
    real = Int8Linear.in_place_of.__func__  # type: ignore[attr-defined]

    def counting(cls: Any, linear: nn.Linear, int8: Tensor, scale: Tensor) -> Int8Linear:
        made: Int8Linear = real(cls, linear, int8, scale)
        peaks.append(held_bytes(model) + storages([int8, scale]))
        return made

    monkeypatch.setattr(Int8Linear, "in_place_of", classmethod(counting))
    alive = [weakref.ref(m) for m in model.blocks.modules() if type(m) is nn.Linear]
    count = len(alive)
    seen: list[int] = []
    quantized = int8_only._quantized

    def watching(*args: Any) -> Any:
        seen.append(sum(reference() is not None for reference in alive))
        return quantized(*args)

    monkeypatch.setattr(int8_only, "_quantized", watching)
    patch_model(model, ONLY)
    assert len(peaks) == count and max(peaks) <= before + largest
    assert seen == list(range(count, 0, -1)), "each goes before the next is looked at"
    assert not any(reference() is not None for reference in alive)


def test_quantising_a_slice_at_a_time_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = wan(), wan()
    keep_int8_only(one)
    monkeypatch.setattr(int8_only, "_ROWS", 24)
    keep_int8_only(other, device="cpu")
    for name, linear in int8_linears(one).items():
        assert all(map(torch.equal, linear.int8, other.get_submodule(name).int8))


@pytest.mark.parametrize("shape", [(300,), (300, 2), (3, 2)], ids=["row", "group", "block"])
@pytest.mark.parametrize("at_once", [128, 1024])
def test_the_product_is_rounded_once(
    shape: tuple[int, ...], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(dequantized.__globals__, "_ROWS_AT_ONCE", at_once)
    torch.manual_seed(0)
    int8 = torch.randint(-127, 128, (300, 200), dtype=torch.int8)
    scale = torch.rand(shape) + 0.1
    wide = scale.double()
    if len(shape) == 2:
        wide = wide.repeat_interleave(128, 1)[:, :200]
    if shape[0] == 3:
        wide = wide.repeat_interleave(128, 0)[:300]
    expected = int8.double() * (wide.unsqueeze(1) if len(shape) == 1 else wide)
    for dtype in (torch.float32, torch.bfloat16):
        found = Int8Linear(int8, scale, None, dtype).weight
        assert torch.equal(torch.Tensor(found.float()), expected.float().to(dtype).float())


# --- honest wherever it is used ------------------------------------------------------------------


def test_it_is_undone_but_for_the_weights_and_says_so(caplog: Any) -> None:
    model = wan()
    before = set(dicts(model))
    patch_model(model, ONLY)
    with caplog.at_level(logging.WARNING):
        unpatch_model(model)
    assert "20 Linears have int8 weights alone" in caplog.text
    assert set(dicts(model)) == before
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(run(model), run(with_products(model)))
    caplog.clear()
    with patched(model, ONLY):
        pass
    assert not caplog.text, "nothing was dropped this time"


def test_the_author_and_the_guard_see_the_product() -> None:
    model = wan()
    keep_int8_only(model)
    expected = run(model)
    assert torch.equal(expected, run(with_products(model)))
    report = patch_model(model, attention="exact")
    assert relative(run(model), expected) < 1e-5, "as-is: every Linear is called"
    assert all("multiplied back from int8" in pair.reason for pair in report.pairs)
    with patched(wan(), attention="exact") as of_stock:
        assert not any("multiplied back" in pair.reason for pair in of_stock.pairs)
    unpatch_model(model)
    report = patch_model(model, attention="exact", linear="int8")
    assert 1e-3 < relative(run(model), expected) < 0.02
    assert {record.verdict for record in report.guard} == {"kept"}
    unpatch_model(model)
    # A pair over budget gets its Linears back: called, with the product.
    report = patch_model(model, attention="exact", linear="int8", guard_budget=1e-4)
    found = run(model)
    assert {record.verdict for record in report.guard} == {"linears given back", "kept"}
    assert relative(found, expected) < 1e-5


def test_the_guard_measures_heads_with_the_product() -> None:
    """Before the output projection, of which it has to know the weight."""
    model, stock = wan(), wan()
    keep_int8_only(model)
    stock = with_products(model)
    errors = []
    for one in (model, stock):
        report = patch_model(one, attention="int8")
        run(one)
        errors.append([record.head_error for record in report.guard])
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)


def test_dtype_device_copies_and_pickles() -> None:
    model = wan(num_layers=1)
    keep_int8_only(model)
    linear = model.blocks[0].attn1.to_q
    scale = linear.int8[1].clone()
    expected = run(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(twin), expected)
        assert twin.blocks[0].attn1.to_q.int8[0] is not linear.int8[0]
    model.to(torch.bfloat16)
    assert linear.dtype == linear.weight.dtype == torch.bfloat16
    assert torch.equal(linear.int8[1], scale), "scales are never rounded"
    assert linear(torch.ones(1, 3, 128, dtype=torch.bfloat16)).dtype == torch.bfloat16
    model.to(torch.float32)
    assert linear.dtype == torch.float32 and model.dtype == torch.float32
    meta = copy.deepcopy(model).to("meta")
    assert all(p.is_meta for p in meta.parameters())


def test_state_dicts_go_into_a_model_of_the_same_kind_only() -> None:
    model, twin, stock = wan(), wan(), wan()
    keep_int8_only(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert "blocks.0.attn1.to_q.weight" not in state
    with pytest.raises(RuntimeError, match=r"Missing key.*to_q\.weight"):
        stock.load_state_dict(state)
    for block in twin.blocks:
        block.ffn.net[2].weight.data.neg_()
    keep_int8_only(twin)
    assert not torch.equal(run(twin), run(model))
    twin.load_state_dict(state)
    assert torch.equal(run(twin), run(model))
    with pytest.raises(RuntimeError, match="Missing key"):
        twin.load_state_dict(stock.state_dict())


def test_a_lora_runs_beside_it_and_cannot_be_fused_into_it() -> None:
    def add(model: Any) -> None:
        torch.manual_seed(7)
        targets = ["to_q", "to_out.0", "net.2"]
        model.add_adapter(
            LoraConfig(r=4, lora_alpha=16, target_modules=targets, init_lora_weights=False)
        )
        model.eval()

    model = wan()
    patch_model(model, ONLY)
    without = run(model)
    stock = with_products(model)
    unpatch_model(stock)
    add(stock)
    expected = run(stock)
    add(model)
    found = run(model)
    assert relative(found, without) > 0.05
    assert relative(found, expected) < 0.02, "to_k, to_v and net.0.proj still run in int8"
    with pytest.raises(DroppedWeightError, match="Fuse adapters before"):
        model.fuse_lora()
    with pytest.raises(DroppedWeightError):
        model.fuse_lora(safe_fusing=True)
    assert torch.equal(run(model), found), "refused, not half done"
    model.unload_lora()
    assert torch.equal(run(model), without)


def test_writing_into_the_weight_is_refused_and_reading_is_not() -> None:
    linear = Int8Linear(torch.ones(4, 8, dtype=torch.int8), torch.ones(4), None, torch.float32)
    for write in (
        lambda: linear.weight.add_(1),
        lambda: linear.weight.data.mul_(2),
        lambda: linear.weight.detach()[0].zero_(),
        lambda: linear.weight.__setitem__(0, 1.0),
        lambda: setattr(linear.weight, "data", torch.zeros(4, 8)),
        lambda: torch.add(linear.weight, 1, out=linear.weight),
        lambda: linear.reset_parameters(),
        lambda: nn.init.zeros_(linear.weight),
    ):
        with pytest.raises(DroppedWeightError):
            write()
    with pytest.raises(KeyError):
        linear.weight = nn.Parameter(torch.zeros(4, 8))
    assert type(linear.weight + 1) is Tensor and type(torch.cat([linear.weight])) is Tensor
    assert linear.weight.sum() == 32 and (~linear.weight.bool()).sum() == 0
    assert "in_features=8, out_features=4" in repr(linear)


def test_projections_that_are_fused_later_are_of_the_products() -> None:
    model = wan()
    keep_int8_only(model)
    expected = run(model)
    model.fuse_qkv_projections()
    assert relative(run(model), expected) < 1e-5


def test_gradients_pass_through_to_the_input() -> None:
    linear = Int8Linear(
        torch.randint(-9, 9, (6, 8), dtype=torch.int8), torch.rand(6), None, torch.float32
    )
    x = torch.randn(2, 3, 8, requires_grad=True)
    linear(x).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, torch.Tensor(linear.weight.sum(0)).expand(2, 3, 8))
    model = wan()
    patch_model(model, ONLY)
    inputs = CASES[0].inputs()
    inputs["hidden_states"].requires_grad_(True)
    model(**inputs)[0].square().mean().backward()
    assert inputs["hidden_states"].grad.abs().sum() > 0


def test_compiled_it_reads_the_integers() -> None:
    model = wan(num_layers=1)
    patch_model(model, ONLY)
    expected = run(model)
    torch._dynamo.reset()
    model.compile(backend="eager", fullgraph=True)
    assert relative(run(model), expected) < 1e-5


def test_both_experts_or_neither_and_twice() -> None:
    class Pipe:
        transformer, transformer_2 = wan(), wan()

    pipe = Pipe()
    assert keep_int8_only(pipe) == 40 and keep_int8_only(pipe) == 0
    patch_model(pipe, ONLY)
    assert "without originals" in str(report_of(pipe))
    with pytest.raises(AlreadyPatchedError):
        keep_int8_only(pipe)


def test_a_linear_that_is_not_plain_keeps_its_weight() -> None:
    model = wan()
    model.blocks[0].attn1.to_q.register_forward_hook(lambda *_: None)
    model.blocks[1].ffn.net[2].my_note = "kept"
    report = patch_model(model, ONLY)
    assert type(model.blocks[0].attn1.to_q) is nn.Linear
    assert len(int8_linears(model)) == 19
    assert "to_q is not in int8: it is hooked" in str(report.pairs[0].reason)
    assert model.blocks[1].ffn.net[2].my_note == "kept"


# --- offloading ----------------------------------------------------------------------------------


def offload_sequentially(model: Any) -> None:
    accelerate.cpu_offload(model, execution_device=CPU, offload_buffers=True)


@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_group_offloading_after(kind: str) -> None:
    model = wan()
    patch_model(model, ONLY)
    expected, products = run(model), run(with_products(unpatched(model)))
    with group_offloading(kind) as apply:
        apply(model)
        for _ in range(2):
            # On leaf level every Linear is hooked and called: the product.
            assert relative(run(model), expected if kind == "block_level" else products) < 1e-5


def unpatched(model: Any) -> Any:
    twin = copy.deepcopy(model)
    unpatch_model(twin)
    return twin


def test_sequential_offloading_after() -> None:
    model = wan()
    patch_model(model, ONLY)
    products = run(with_products(unpatched(model)))
    offload_sequentially(model)
    linear = model.blocks[0].attn1.to_q
    assert all(p.is_meta for p in linear.parameters())
    for _ in range(2):
        assert relative(run(model), products) < 1e-5
    remove_hook_from_module(model, recurse=True)
    assert not any(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("kind", ["block_level", "leaf_level", "sequential"])
def test_weights_that_hooks_hold_are_not_dropped(kind: str) -> None:
    model = wan()
    expected = run(model)
    with group_offloading(kind) as apply:
        if kind == "sequential":
            offload_sequentially(model)
        else:
            apply(model)
        for drop in (keep_int8_only, lambda m: patch_model(m, ONLY)):
            with pytest.raises(OffloadedError, match="first"):
                drop(model)
        assert not int8_linears(model)
        assert relative(run(model), expected) < 1e-6


def test_offloading_whole_models_may_come_first() -> None:
    """Both experts take turns; the hook of one sends the other away."""
    first, second = wan(), wan()
    expected = run(with_both(copy.deepcopy(first)))
    hooks: list[Any] = []
    for model in (first, second):
        _, hook = accelerate.cpu_offload_with_hook(
            model, CPU, prev_module_hook=hooks[-1] if hooks else None
        )
        hooks.append(hook)
        patch_model(model, ONLY)
    for model in (first, second, first):
        assert torch.equal(run(model), expected)


def with_both(model: Any) -> Any:
    patch_model(model, ONLY)
    return model


def test_a_move_between_forwards_is_seen() -> None:
    model = wan()
    patch_model(model, ONLY)
    expected = run(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    assert torch.equal(run(model), expected)
    model.blocks[0].attn1.to_q.int8[0].neg_()
    changed = run(model)
    assert not torch.equal(changed, expected)
    twin = wan()
    patch_model(twin, ONLY)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(run(twin), changed)


@pytest.mark.parametrize("library", ["accelerate", "diffusers"])
def test_what_a_hook_left_behind_does_not_keep_the_original(library: str) -> None:
    model = wan()
    linears = [m for m in model.modules() if type(m) is nn.Linear]
    for linear in linears:
        if library == "accelerate":
            accelerate.hooks.add_hook_to_module(linear, accelerate.hooks.ModelHook())
            remove_hook_from_module(linear)
        else:
            registry = HookRegistry.check_if_exists_or_initialize(linear)
            registry.register_hook(ModelHook(), "passing")
            registry.remove_hook("passing")
        assert "forward" in vars(linear)
    originals = [weakref.ref(linear.weight) for linear in linears]
    del linear, linears
    report = patch_model(model, ONLY)
    expected = patch_model(wan(), ONLY)
    assert {p.path: p.runs for p in report.pairs} == {p.path: p.runs for p in expected.pairs}
    before = run(model)
    kept = int8_linears(model).values()
    assert kept and sum(one() is not None for one in originals) == len(originals) - len(kept)
    for one in kept:
        one.int8[0].data.zero_()
    assert relative(run(model), before) > 0.1
    model.to(torch.bfloat16)
    run(model, **CASES[0].inputs(dtype=torch.bfloat16))


def test_what_stops_half_way_is_marked_and_can_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    model, quantized, done = wan(), int8_only._quantized, 0

    def three(*given: Any) -> Any:
        nonlocal done
        done += 1
        if done == 4:
            raise torch.OutOfMemoryError("out of memory")
        return quantized(*given)

    with monkeypatch.context() as patch:
        patch.setattr(int8_only, "_quantized", three)
        with pytest.raises(torch.OutOfMemoryError):
            patch_model(model, ONLY)
    assert len(int8_linears(model)) == 3
    assert int8_only.is_marked(model.config)
    assert "3 of 20 Linears have int8 weights alone" in caplog.text
    run(model)
    patch_model(model, ONLY)
    assert len(int8_linears(model)) == 20
    whole = wan()
    patch_model(whole, ONLY)
    assert torch.equal(run(model), run(whole))


def test_what_cannot_be_installed_is_found_before_weights_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*given: Any) -> Any:
        raise RuntimeError("no entry")

    model = wan()
    before = dicts(model)
    monkeypatch.setattr(patch_module, "_entry", broken)
    with pytest.raises(RuntimeError, match="no entry"):
        patch_model(model, ONLY)
    assert not int8_linears(model) and dicts(model) == before


def test_a_pipeline_that_takes_no_weak_reference() -> None:
    pipe = SimpleNamespace(transformer=wan())
    patch_model(pipe, linear="int8-only")
    assert len(int8_linears(pipe.transformer)) == 20
    run(pipe.transformer)
    unpatch_model(pipe)
    patch_model(pipe)
    run(copy.deepcopy(pipe).transformer)
