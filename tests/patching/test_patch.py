"""patch_model, unpatch_model, patched: what comes out, and that everything goes back."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import remove_hook_from_module
from diffusers.hooks import HookRegistry, ModelHook
from torch import nn

from tests.patching.wan import CASES, EXACT, INT8, Case, dicts, relative, run, wan
from turbo_rcm_patch import PatchConfig, is_patched, patch_model, patched, unpatch_model
from turbo_rcm_patch.patching import patch as patch_file
from turbo_rcm_patch.patching import record as record_file

BF16 = torch.bfloat16


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_exact_attention_is_the_author_s_forward(case: Case) -> None:
    model, inputs = case.model(), case.inputs(batch=2)
    expected = run(model, **inputs)
    with patched(model, EXACT) as report:
        assert report.fused == case.fused
        assert relative(run(model, **inputs), expected) < 1e-5


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.supports(
    "WanTransformer3DModel",
    "self-attention",
    "cross-attention",
    "image branch",
    "feed-forward",
    "gate per token",
    "fused QKV",
)
def test_int8_stays_near_the_truth(case: Case, dtype: torch.dtype) -> None:
    truth_model, model = case.model(dtype).float(), case.model(dtype)
    inputs = case.inputs(dtype=dtype)
    wide = {k: v.float() if torch.is_tensor(v) else v for k, v in inputs.items()}
    truth = run(truth_model, **wide)
    unpatched = relative(run(model, **inputs), truth)
    with patched(model, INT8):
        output = run(model, **inputs)
    assert output.dtype == dtype
    error = relative(output, truth)
    assert 0 < error < 0.02
    if dtype == BF16:
        assert error < 2 * unpatched


def test_int4_is_worse_than_int8_so_the_attention_reaches_the_output() -> None:
    model = wan()
    truth = run(model)
    errors = {}
    for attention in ("exact", "int8", "int4"):
        with patched(model, PatchConfig(attention=attention, guard=False)):
            errors[attention] = relative(run(model), truth)
    assert errors["exact"] < 1e-5 < errors["int8"] < errors["int4"] / 4


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("guard", [False, True], ids=["no-guard", "guard"])
@pytest.mark.supports("WanTransformer3DModel", "unpatched, bit-equal")
def test_unpatch_leaves_nothing_behind(case: Case, guard: bool) -> None:
    model, inputs = case.model(), case.inputs()
    expected, before = run(model, **inputs), dicts(model)
    state = copy.deepcopy(model.state_dict())
    patch_model(model, PatchConfig(guard=guard))
    assert dicts(model) != before
    run(model, **inputs)
    unpatch_model(model)
    assert dicts(model) == before
    assert torch.equal(run(model, **inputs), expected)
    after = model.state_dict()
    assert list(after) == list(state)
    assert all(torch.equal(after[name], state[name]) for name in state)


def test_only_instance_attributes_change() -> None:
    model = wan()
    block_class, model_class = type(model.blocks[0]), type(model)
    before = dict(vars(block_class)), dict(vars(model_class)), dict(vars(torch.nn.functional))
    other, expected = wan(), run(wan())
    with patched(model):
        now = dict(vars(block_class)), dict(vars(model_class)), dict(vars(torch.nn.functional))
        assert now == before
        assert torch.equal(run(other), expected)


def test_patched_reverts_after_an_exception() -> None:
    model = wan()
    before = dicts(model)
    with pytest.raises(ZeroDivisionError), patched(model):
        raise ZeroDivisionError
    assert dicts(model) == before


def test_patched_forgives_an_unpatch_inside() -> None:
    model = wan()
    with patched(model):
        unpatch_model(model)


def test_patched_reverts_what_it_patched_although_the_pipeline_changed() -> None:
    class Pipe:
        transformer: Any = wan()

    pipe, original = Pipe(), Pipe.transformer
    before = dicts(original)
    with patched(pipe):
        pipe.transformer = wan()
    assert dicts(original) == before


def test_what_fails_after_everything_is_installed_leaves_the_parallelism_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[object] = []
    monkeypatch.setattr(patch_file, "leave", left.append)

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(patch_file, "_report", interrupted)
    model = wan()
    with pytest.raises(KeyboardInterrupt):
        patch_model(model)
    assert left == [model] and not is_patched(model)


def test_a_report_does_not_keep_a_model_alive() -> None:
    model = wan()
    report = patch_model(model)
    run(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    assert report.fused == 6 and "6 of 6" in str(report)


def test_unpatching_leaves_no_cycle_behind() -> None:
    model = wan()
    gc.collect()
    gc.disable()
    try:
        with patched(model):
            run(model)
        alive = weakref.ref(model.blocks[0])
        del model
        assert alive() is None
    finally:
        gc.enable()


def test_patching_again_after_unpatching() -> None:
    model = wan()
    for _ in range(3):
        with patched(model):
            run(model)


def test_guard_does_not_change_the_output() -> None:
    model = wan()
    with patched(model, PatchConfig(guard=False)):
        without = run(model)
    with patched(model, PatchConfig(guard=True)) as report:
        assert torch.equal(run(model), without)
        assert len(report.guard) == 6
        assert torch.equal(run(model), without)


def test_installing_is_all_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pipe:
        transformer, transformer_2 = wan(num_layers=3), wan(num_layers=3)

    before = dicts(Pipe.transformer), dicts(Pipe.transformer_2)
    put, calls = record_file.Entry.install, []

    def fails_late(entry: record_file.Entry) -> None:
        calls.append(entry)
        put(entry)
        if len(calls) == 6:
            raise MemoryError("no room")

    monkeypatch.setattr(record_file.Entry, "install", fails_late)
    with pytest.raises(MemoryError):
        patch_model(Pipe())
    assert (dicts(Pipe.transformer), dicts(Pipe.transformer_2)) == before


def test_a_pipeline_with_two_experts() -> None:
    class Pipe:
        transformer, transformer_2 = wan(), wan(num_layers=3)

    before = dicts(Pipe.transformer), dicts(Pipe.transformer_2)
    report = patch_model(Pipe())
    assert report.fused == 6 + 9
    unpatch_model(Pipe())
    assert (dicts(Pipe.transformer), dicts(Pipe.transformer_2)) == before


def test_deepcopy_of_a_patched_model_stands_alone() -> None:
    model = wan()
    expected = run(model)
    patch_model(model)
    fused = run(model)
    twin = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert torch.equal(run(twin), fused)
    unpatch_model(model)
    assert torch.equal(run(twin), fused)
    unpatch_model(twin)
    assert torch.equal(run(twin), expected)
    assert "forward" not in vars(twin.blocks[0])


def test_pickle_of_a_patched_model_stands_alone() -> None:
    model = wan()
    expected = run(model)
    patch_model(model)
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(run(twin), run(model))
    unpatch_model(twin)
    assert torch.equal(run(twin), expected)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_finds_its_way_back_where_hooks_left_bound_methods(how: str) -> None:
    """accelerate leaves every module's bound forward behind as an instance attribute."""
    model = wan()
    expected = run(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    remove_hook_from_module(model, recurse=True)
    patch_model(model, INT8)
    twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    unpatch_model(twin)
    assert torch.equal(run(twin), expected)
    assert type(twin.blocks[0].forward).__name__ == "method"


def test_save_pretrained_of_a_patched_model_is_the_unpatched_one(tmp_path: Path) -> None:
    model = wan()
    model.save_pretrained(tmp_path / "before")
    with patched(model):
        run(model)
        model.save_pretrained(tmp_path / "patched")
    files = sorted(path.name for path in (tmp_path / "before").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "patched").iterdir())
    for name in files:
        assert (tmp_path / "before" / name).read_bytes() == (
            tmp_path / "patched" / name
        ).read_bytes()


@pytest.mark.supports("WanTransformer3DModel", "training")
def test_gradients_and_checkpointing_are_the_author_s() -> None:
    def gradients(model: Any, checkpointing: bool) -> dict[str, torch.Tensor]:
        model.train().requires_grad_(True)
        model.zero_grad()
        if checkpointing:
            model.enable_gradient_checkpointing()
        model(**CASES[0].inputs())[0].square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = gradients(wan(), False)
    for checkpointing in (False, True):
        for guard in (False, True):
            model = wan()
            with patched(model, PatchConfig(attention="exact", guard=guard)):
                found = gradients(model, checkpointing)
            worst = max(relative(found[name], expected[name]) for name in expected)
            assert worst < 1e-4, (checkpointing, guard)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_autocast_runs_as_written() -> None:
    model = wan()
    with torch.autocast("cpu", torch.bfloat16):
        expected = run(model)
        with patched(model):
            assert torch.equal(run(model), expected)


def test_active_dropout_runs_as_written() -> None:
    model = wan()
    model.blocks[0].attn1.to_out[1].p = 0.5
    patch_model(model, EXACT)
    model.train()
    torch.manual_seed(3)
    output = run(model)
    unpatch_model(model)
    torch.manual_seed(3)
    assert relative(output, run(model)) < 1e-5


def test_float16_and_strided_context() -> None:
    case = CASES[0]
    model = case.model(torch.float16)
    inputs = case.inputs(dtype=torch.float16)
    inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"].repeat(1, 1, 2)[..., ::2]
    expected = run(model, **inputs)
    with patched(model, EXACT):
        assert relative(run(model, **inputs), expected) < 5e-3


@pytest.mark.parametrize("field", ["norm_q", "norm_k"])
def test_a_norm_that_is_not_plain_is_called(field: str) -> None:
    class Doubling(torch.nn.RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = wan()
    for block in model.blocks:
        norm = Doubling(128, eps=1e-6)
        setattr(block.attn1, field, norm.requires_grad_(False))
    expected = run(model)
    with patched(model, EXACT):
        assert relative(run(model), expected) < 1e-5


def test_norms_with_different_eps_are_called() -> None:
    model = wan()
    model.blocks[0].attn1.norm_q.eps = 0.5
    model.blocks[1].attn1.norm_q.eps = model.blocks[1].attn1.norm_k.eps = 0.5
    expected = run(model)
    with patched(model, EXACT):
        assert relative(run(model), expected) < 1e-5


@pytest.mark.parametrize("hooked", [False, True], ids=["bare", "hooked"])
def test_a_deepcopy_of_one_block_is_unpatched_and_of_that_block_alone(hooked: bool) -> None:
    model = wan()
    patch_model(model, EXACT)
    if hooked:
        registry = HookRegistry.check_if_exists_or_initialize(model.blocks[0])
        registry.register_hook(ModelHook(), "passing")
    memo: dict[int, Any] = {}
    block = copy.deepcopy(model.blocks[0], memo)
    parameters = [one for one in memo.values() if isinstance(one, nn.Parameter)]
    assert {*map(id, parameters)} == {*map(id, block.parameters())}
    other = wan()
    other.blocks[0] = block
    expected = run(wan())
    assert relative(run(other), expected) == 0.0
    assert patch_model(other, EXACT).fused == 6
    assert relative(run(other), expected) < 1e-5
    unpatch_model(other)
    assert relative(run(other), expected) == 0.0
