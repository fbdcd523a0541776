"""int8 copies of weights are never those of other weights: what writes past autograd's counters,
what moves a model about, and what becomes of the copies afterwards.

The truth is always a model that was patched after the change, with the same weights.
"""

from __future__ import annotations

import copy
import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.training_utils import EMAModel
from peft import LoraConfig
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.patching.wan import CASES, dicts, relative, run, wan, with_lora
from turbo_rcm_patch import PatchConfig, patch_model, refresh, unpatch_model
from turbo_rcm_patch.errors import NotPatchedError
from turbo_rcm_patch.ops import Fingerprints
from turbo_rcm_patch.ops.int8_linear import _multiplied_weight
from turbo_rcm_patch.patching import copies as copies_file
from turbo_rcm_patch.patching.copies import Copies
from turbo_rcm_patch.patching.int8_weights import attach_int8, attached_int8, detach_int8
from turbo_rcm_patch.patching.record import record_of

LINEAR = PatchConfig(attention="exact", linear="int8", guard=False)


def fuse_a_lora(model: Any) -> None:
    """The recipe of diffusers' documentation: load, fuse, unload; peft writes through `.data`."""
    torch.manual_seed(7)
    targets = ["to_q", "to_k", "to_out.0", "net.2"]
    model.add_adapter(
        LoraConfig(r=4, lora_alpha=16, target_modules=targets, init_lora_weights=False)
    )
    model.fuse_lora()
    model.unload_lora()


def copy_an_average(model: Any) -> None:
    average = EMAModel(model.parameters())
    for shadow in average.shadow_params:
        shadow.mul_(-0.5)
    average.copy_to(model.parameters())


def step_an_optimiser(model: Any) -> None:
    model.requires_grad_(True)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    model(**CASES[0].inputs())[0].square().mean().backward()
    optimiser.step()
    model.zero_grad()
    model.requires_grad_(False)


def swap_two_values(model: Any) -> None:
    weight = model.blocks[1].ffn.net[2].weight.data
    weight[0, 0], weight[3, 5] = 1.0, -1.0


def permute_rows(model: Any) -> None:
    weight = model.blocks[0].attn1.to_v.weight.data
    weight.copy_(weight[torch.arange(weight.shape[0]).roll(1)])


def negate(model: Any) -> None:
    weight = model.blocks[1].attn2.to_q.weight
    weight.data.neg_()


def shift_a_bias(model: Any) -> None:
    model.blocks[0].attn1.to_k.bias.data.add_(0.3)


CHANGES: list[Callable[[Any], None]] = [
    fuse_a_lora,
    copy_an_average,
    step_an_optimiser,
    swap_two_values,
    permute_rows,
    negate,
    shift_a_bias,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_behind_the_version_counter_is_seen(change: Callable[[Any], None]) -> None:
    model = wan()
    patch_model(model, LINEAR)
    before = run(model)
    change(model)
    found = run(model)
    assert not torch.equal(found, before), "the change has to reach the output"
    twin = wan()
    twin.load_state_dict(model.state_dict())
    patch_model(twin, LINEAR)
    assert torch.equal(found, run(twin))


def test_only_what_changed_is_quantised_again(made: list[str]) -> None:
    model = wan()
    patch_model(model, LINEAR)
    run(model)
    made.clear()
    negate(model)
    run(model)
    assert made == ["attn2.q"]


def test_one_look_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """All copies in one pass, and the answer fetched once."""
    model = wan()
    patch_model(model, LINEAR)
    run(model)
    looks: list[int] = []
    real = copies_file.Fingerprints.take

    def counting(self: Any) -> torch.Tensor:
        looks.append(len(self.counts))
        return real(self)

    monkeypatch.setattr(copies_file.Fingerprints, "take", counting)
    run(model)
    run(model)
    assert len(looks) == 2 and looks[0] == looks[1] > 16


def test_a_copy_of_a_linear_without_a_bias_is_looked_at() -> None:
    kept, linear = Copies("auto"), nn.Linear(32, 16, bias=False)
    key = (kept.add_block(), "x")
    made = []
    for change in (1.0, 1.0, -1.0):
        kept.begin()
        linear.weight.data.mul_(change)
        int8, _, bias = kept.of(key, [linear])
        assert bias is None
        made.append(int8)
    assert made[0] is made[1] and torch.equal(made[2], -made[1])


@pytest.mark.parametrize("weights", [1, 2])
def test_a_look_that_failed_is_not_taken_for_a_good_one(
    weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory ran out over the checksums, and somebody goes on with the same forward."""
    kept, linears = Copies("auto"), [nn.Linear(32, 16) for _ in range(2)]
    keys = [(kept.add_block(), "x") for _ in linears]
    for forward in range(2):
        kept.begin()
        before = [kept.of(*one)[0] for one in zip(keys, [[x] for x in linears], strict=True)]
        assert forward == 0 or before[0] is kept.of(keys[0], linears[:1])[0]
    for linear in linears[:weights]:
        linear.weight.data.neg_()

    def full(self: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("full")

    kept.begin()
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(copies_file.Fingerprints, "take", full)
        kept.of(keys[0], linears[:1])
    for index, linear in enumerate(linears):
        now = kept.of(keys[index], [linear])[0]
        assert torch.equal(now, -before[index] if index < weights else before[index])


def test_a_block_that_is_called_by_itself_is_looked_at_too() -> None:
    model = wan()
    patch_model(model, LINEAR)
    run(model)
    given: dict[str, Any] = {}
    hook = model.blocks[1].register_forward_pre_hook(
        lambda module, args: given.setdefault("args", args)
    )
    run(model)
    hook.remove()
    with torch.no_grad():
        before = model.blocks[1](*given["args"])
        model.blocks[1].ffn.net[2].weight.data.neg_()
        after = model.blocks[1](*given["args"])
    assert relative(after, before) > 1e-3


def test_integers_that_came_with_a_weight_are_left_when_it_changes() -> None:
    """One value of it, in a row that nobody would pick to look at."""
    model = wan(num_layers=1)
    linear = model.blocks[0].ffn.net[2]
    attach_int8(
        linear,
        torch.randint(-127, 128, linear.weight.shape, dtype=torch.int8),
        torch.full((1, 1), 1e-3),
    )
    int8, scale = attached_int8(linear)
    linear.weight.data.copy_(int8 * scale)
    patch_model(model, LINEAR)
    run(model)
    ours = model._turbo_rcm_patch.plan.copies.tensors
    assert any(kept is int8 for kept in ours())
    held = linear.weight.detach().clone()
    linear.weight.data[17, 3] += 0.5
    run(model)
    assert not any(kept is int8 for kept in ours())
    linear.weight.data.copy_(held)
    run(model)
    assert any(kept is int8 for kept in ours())


# --- refresh -------------------------------------------------------------------------------------


def test_refresh_makes_them_again(made: list[str]) -> None:
    model = wan()
    patch_model(model, LINEAR)
    expected = run(model)
    count = len(made)
    made.clear()
    refresh(model)
    assert not made, "memory first: they are made when they are needed"
    assert torch.equal(run(model), expected)
    assert len(made) == count


def test_refresh_of_a_pipeline_and_of_nothing() -> None:
    class Pipe:
        transformer, transformer_2 = wan(), wan()

    with pytest.raises(NotPatchedError, match="refresh"):
        refresh(Pipe())
    patch_model(Pipe(), LINEAR)
    refresh(Pipe())
    unpatch_model(Pipe())


# --- moves ---------------------------------------------------------------------------------------


def move(model: nn.Module) -> list[torch.Tensor]:
    """As `.to("cpu")` and back leaves it: the same parameters, at other addresses."""
    old = [parameter.data for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return old  # alive, or the allocator may hand the same place out again


def test_a_model_that_moved_often_and_stays_keeps_its_copies(made: list[str]) -> None:
    """Offloaded between videos: some steps at each place."""
    model = wan(num_layers=1)
    patch_model(model, LINEAR)
    places = []
    for _ in range(6):
        run(model)
        made.clear()
        run(model)
        run(model)
        assert not made
        places.append(move(model))


def test_a_weight_that_keeps_moving_is_not_kept_until_it_stays(made: list[str]) -> None:
    """Offloading by blocks brings a weight to another place on every forward, to save memory."""
    model = wan(num_layers=1)
    patch_model(model, LINEAR)
    copies = model._turbo_rcm_patch.plan.copies
    places = []
    for _ in range(6):
        run(model)
        places.append(move(model))
    run(model)
    assert copies.bytes() == 0
    run(model)
    assert copies.bytes() > 0
    made.clear()
    run(model)
    assert not made


def test_copies_of_a_model_that_was_moved_away_go(made: list[str]) -> None:
    """Two experts take turns on a device: the one that left leaves no copies there."""
    first, second = wan(num_layers=1), wan(num_layers=1)
    for model in (first, second):
        patch_model(model, LINEAR)
    run(first)
    copies = first._turbo_rcm_patch.plan.copies
    assert copies.bytes() > 0
    first.to("meta")
    run(second)
    assert copies.bytes() == 0


# --- the end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("hooked", [False, True], ids=["bare", "under-hooks"])
def test_unpatching_frees_them(hooked: bool) -> None:
    """Somebody may hold our forward: a hook, a wrapper, a traceback."""
    model = wan()
    patch_model(model, LINEAR)
    run(model)
    held = [block.forward for block in model.blocks] if hooked else []
    copies = model._turbo_rcm_patch.plan.copies
    alive = [weakref.ref(tensor) for tensor in copies.tensors()]
    assert alive
    unpatch_model(model)
    gc.collect()
    assert not any(reference() is not None for reference in alive)
    if held:  # Whoever still calls it gets a result, and nothing is kept for it.
        inputs = CASES[0].inputs()
        for block, forward in zip(model.blocks, held, strict=True):
            block.forward = forward
        run(model, **inputs)
        assert copies.bytes() == 0


def test_a_copy_has_copies_of_its_own() -> None:
    model = wan()
    patch_model(model, LINEAR)
    run(model)
    twin = copy.deepcopy(model)
    own, other = (m._turbo_rcm_patch.plan.copies for m in (model, twin))
    assert own is not other and other.bytes() == 0
    run(twin)
    assert other.bytes() == own.bytes()
    assert all(block.forward._linears.copies is other for block in twin.blocks)
    unpatch_model(model)
    assert own.bytes() == 0 and other.bytes() > 0


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names within their blocks of the copies that were made, as it happens."""
    names: list[str] = []
    real = copies_file.Copies._make

    def counting(self: Any, key: tuple[int, str], *rest: Any) -> Any:
        names.append(key[1])
        return real(self, key, *rest)

    monkeypatch.setattr(copies_file.Copies, "_make", counting)
    return names


# --- between the look at all copies and the use of one -------------------------------------------


def write_in_place(linear: nn.Linear) -> None:
    with torch.no_grad():
        linear.weight.mul_(-1.0)


def replace_the_parameter(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(-linear.weight.detach(), requires_grad=False)


def replace_its_memory(linear: nn.Linear) -> None:
    linear.weight.data = -linear.weight.data


def drop_the_bias(linear: nn.Linear) -> None:
    linear.weight.data = -linear.weight.data
    linear.bias = None


def bring_an_int8_weight(linear: nn.Linear) -> None:
    rows, columns = linear.weight.shape
    scale = torch.full((-(-rows // 128), -(-columns // 128)), 0.01)
    with torch.no_grad():
        linear.weight.copy_(linear.weight.mul(-100.0).round().clamp(-127, 127) * 0.01)
    attach_int8(linear, (linear.weight * 100.0).round().to(torch.int8), scale)


@pytest.mark.parametrize(
    "change",
    [
        write_in_place, replace_the_parameter, replace_its_memory, drop_the_bias,
        bring_an_int8_weight,
    ],
)  # fmt: skip
def test_a_weight_that_changes_while_a_forward_runs(change: Callable[[nn.Linear], None]) -> None:
    """All copies are looked at in front of the first block, and the change comes behind it."""
    model = wan()
    patch_model(model, LINEAR)
    for _ in range(3):
        run(model)
    linear = model.blocks[1].ffn.net[2]
    handle = model.blocks[1].register_forward_pre_hook(lambda *_: change(linear))
    made = run(model)
    handle.remove()
    truth = copy.deepcopy(model)
    unpatch_model(truth)
    if change is bring_an_int8_weight:  # A deep copy leaves it behind.
        held = attached_int8(linear)
        assert held is not None
        attach_int8(truth.blocks[1].ffn.net[2], *held)
    patch_model(truth, LINEAR)
    assert torch.equal(made, run(truth))


@pytest.mark.parametrize(("rows", "scales"), [(256, (4, 2)), (200, (400, 2))])
def test_blocks_of_stacked_weights_stay_blocks_where_they_can(
    rows: int, scales: tuple[int, int]
) -> None:
    """A kernel for blocks is faster; where a block would begin inside another's, rows have
    scales."""
    given = [
        (torch.randint(-127, 128, (rows, 200), dtype=torch.int8), torch.rand(2, 2) + 0.5)
        for _ in range(2)
    ]
    int8, scale = copies_file._stacked(given)
    assert int8.shape == (2 * rows, 200) and tuple(scale.shape) == scales
    wide = _multiplied_weight(int8, scale)
    assert torch.equal(wide, torch.cat([_multiplied_weight(*one) for one in given]))
    assert copies_file._stacked(given[:1]) is given[0]


def test_a_detached_int8_weight_leaves_nothing() -> None:
    linear = nn.Linear(256, 128)
    before = set(vars(linear)), list(linear.state_dict())
    attach_int8(linear, torch.ones(128, 256, dtype=torch.int8), torch.ones(1, 2))
    assert attached_int8(linear) is not None and set(vars(linear)) > before[0]
    detach_int8(linear)
    assert (set(vars(linear)), list(linear.state_dict())) == before
    assert not list(linear.buffers()) and attached_int8(linear) is None


def test_copies_that_nothing_uses_any_more_go() -> None:
    model = wan()
    patch_model(model, linear="int8", guard=False)
    run(model)
    record: Any = record_of(model)
    copies, states = record.plan.copies, record.plan.states
    whole = copies.bytes()
    add = ["to_q", "to_k", "to_v", "to_out.0", "net.0.proj"]
    with_lora(model, *add)
    run(model)
    left = copies.bytes()
    assert 0 < left < whole / 4  # Of net.2.
    for state in states:
        state.give_back("for a test")
    run(model)
    assert copies.bytes() == 0


def test_copies_of_a_model_that_leaves_its_device_go_with_it() -> None:
    for options in ({}, {"cuda_graphs": True}):
        model = wan()
        before = {k: set(v) for k, v in dicts(model).items()}
        patch_model(model, linear="int8", guard=False, **options)  # type: ignore[arg-type]
        run(model)
        record: Any = record_of(model)
        assert record.plan.copies.bytes() > 0
        unpatched = copy.deepcopy(model)
        model.to("meta")
        assert record.plan.copies.bytes() == 0
        unpatch_model(model)
        unpatch_model(unpatched)
        assert {k: set(v) for k, v in dicts(unpatched).items()} == before


def test_reentrant_checkpointing_runs_the_same_linears_twice() -> None:
    model = wan()
    model.requires_grad_(True)
    for block in model.blocks:
        block.attn1.to_q.requires_grad_(False)  # Whose int8 weight serves both times.
    patch_model(model, linear="int8", guard=False)
    model.gradient_checkpointing = True
    model._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=True)
    seen: list[torch.Tensor] = []
    ours = model.blocks[0].forward

    def noted(*given: Any) -> Any:
        out = ours(*given)
        seen.append(out.detach().clone())
        return out

    model.blocks[0].forward = noted
    model(**CASES[0].inputs())[0].square().mean().backward()
    assert len(seen) == 2
    assert torch.equal(*seen)
    del seen[:]
    run(model)
    record: Any = record_of(model)
    assert record.plan.copies.bytes() > 0  # Inference is int8 as before.


def test_a_weight_that_becomes_another_view_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel takes checksums of the memory, which is the same."""
    monkeypatch.setattr(
        Fingerprints, "take", lambda self: torch.zeros(sum(self.counts), dtype=torch.int64)
    )
    linear = nn.Linear(64, 64).requires_grad_(False)
    copies = Copies("reference")
    copies.begin()
    before, *_ = copies.of((1, "x"), (linear,))
    copies.begin()
    assert copies.of((1, "x"), (linear,))[0] is before
    linear.weight.data = linear.weight.data.t()
    copies.begin()
    after, *_ = copies.of((1, "x"), (linear,))
    assert torch.equal(after, copies.fresh((linear,))[0])


def test_a_linear_whose_bias_was_made_in_inference_mode_stays_in_16_bits() -> None:
    model = wan()
    linear = model.blocks[0].attn1.to_q
    with torch.inference_mode():
        linear.bias = nn.Parameter(torch.zeros(linear.out_features), requires_grad=False)
    author = copy.deepcopy(model)
    patch_model(model, LINEAR)
    for _ in range(2):
        assert relative(run(model), run(author)) < 0.02
    record: Any = record_of(model)
    pair = record.pairs()[0]
    assert "to_q" not in pair.int8_linears and "bias was made in inference mode" in pair.reason


class Growing(weakref.WeakSet[Any]):
    """Whoever walks through it is overtaken by a thread that adds to it."""

    def __init__(self, add: Callable[[], object]) -> None:
        super().__init__()
        self.add_one = add

    def __iter__(self) -> Any:
        for one in super().__iter__():
            thread = threading.Thread(target=self.add_one)
            thread.start()
            thread.join(0.3)
            yield one


def test_another_model_may_be_patched_while_a_weight_is_quantised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Copies] = []
    everyone = Growing(lambda: made.append(Copies("reference")))
    monkeypatch.setattr(copies_file, "_ALL", everyone)
    copies = Copies("reference")
    copies.begin()
    copies.of((1, "x"), (nn.Linear(64, 64).requires_grad_(False),))
    assert set(map(id, made)) < set(map(id, list(weakref.WeakSet.__iter__(everyone))))


def test_refresh_lets_a_replaced_module_go() -> None:
    model = wan()
    patch_model(model, LINEAR)
    run(model)
    gone = weakref.ref(model.blocks[0].attn1.to_q.weight)
    model.blocks[0].attn1.to_q = nn.Linear(128, 128).requires_grad_(False)
    refresh(model)
    gc.collect()
    assert gone() is None
    run(model)
