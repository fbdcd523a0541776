"""int8 Linears: the Linear's own forward, fresh after every change, and int8 weights alone."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig
from torch import nn

from tests.implementations import over
from tests.measures import relative_l2
from tests.patching.models import WAN, run
from tests.ranks import on_ranks
from turbo_rcm_patch import keep_int8_only, ops, patch_model, refresh, unpatch_model
from turbo_rcm_patch.errors import DroppedWeightError
from turbo_rcm_patch.patching.int8_linears import Int8Copies, Int8Forward
from turbo_rcm_patch.patching.int8_weights import Int8Linear

BF16 = torch.bfloat16


def linears(model: Any) -> list[Any]:
    block = model.blocks[0]
    attns = [getattr(a, n) for a in (block.attn1, block.attn2) for n in ("to_q", "to_k", "to_v")]
    return [*attns, block.attn1.to_out[0], block.ffn.net[0].proj, block.ffn.net[2]]


def product(linear: Any, x: torch.Tensor) -> torch.Tensor:
    """The int8 product, as `ops.int8_linear` computes it."""
    return ops.int8_linear(x, *ops.quantize_weight(linear.weight), linear.bias)


def with_a_linear(**options: Any) -> tuple[Any, Any, torch.Tensor]:
    """A patched model, a Linear of it, and that one's input."""
    model = WAN.model()
    patch_model(model, **{"linear": "int8"} | options)
    return model, model.blocks[0].attn1.to_q, torch.randn(1, 5, 128)


def test_a_linear_computes_the_int8_product() -> None:
    model = WAN.model(BF16)
    patch_model(model, linear="int8")
    x = torch.randn(2, 9, 128, dtype=BF16)
    for linear in linears(model)[:4]:
        with torch.no_grad():
            made = linear(x)
            assert torch.equal(made, product(linear, x))
            assert torch.equal(linear(x[0]), made[0])


def test_a_write_into_a_few_elements_through_data_needs_refresh() -> None:
    model, linear, x = with_a_linear()
    with torch.no_grad():
        linear(x)
        linear.weight.data[1, 1] = 20
        refresh(model)
        assert torch.equal(linear(x), product(linear, x))


# --- writes that leave a weight's version as it was ----------------------------------------------


def weights(model: Any) -> list[nn.Parameter]:
    of_block = [(block.attn1.to_q, block.attn1.to_v, block.ffn.net[2]) for block in model.blocks]
    return [one.weight for several in of_block for one in several]


def moved(model: Any) -> list[torch.Tensor]:
    """Other weights of the same Linears."""
    generator = torch.Generator().manual_seed(5)
    return [w + 0.1 * torch.randn(w.shape, generator=generator).to(w) for w in weights(model)]


def both(model: Any) -> Any:
    return zip(weights(model), moved(model), strict=True)


def data_copy(model: Any) -> None:
    for weight, other in both(model):
        weight.data.copy_(other)


def ema_copy_to(model: Any) -> None:
    from diffusers.training_utils import EMAModel

    EMAModel(moved(model)).copy_to(weights(model))


def one_vector(model: Any) -> None:
    vector = nn.utils.parameters_to_vector(moved(model))
    nn.utils.vector_to_parameters(vector, weights(model))


def fused_adamw(model: Any) -> None:
    inputs = WAN.inputs()
    model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    model(**inputs)[0].square().mean().backward()
    optimizer.step()
    model.zero_grad()
    model.requires_grad_(False)


def merge_lora(model: Any) -> None:
    torch.manual_seed(7)
    model.add_adapter(
        LoraConfig(r=4, lora_alpha=8, target_modules=["to_q", "net.2"], init_lora_weights=False)
    )
    model.eval().requires_grad_(False)
    for module in model.modules():
        if hasattr(module, "merge") and hasattr(module, "base_layer"):
            module.merge()


def collectives(model: Any) -> None:
    for weight, other in both(model):
        weight.data[:] = other if dist.get_rank() == 0 else weight.data
        dist.broadcast(weight, 0)
        dist.all_reduce(weight.data)


WRITES = [data_copy, ema_copy_to, one_vector, fused_adamw, merge_lora]


def follows(write: Any, guard: bool) -> None:
    unpatched, model, inputs = WAN.model(), WAN.model(), WAN.inputs()
    report = patch_model(model, attention="exact", linear="int8", guard=guard, fidelity=None)
    before = run(model, inputs)
    write(unpatched)
    write(model)
    made, expected = run(model, inputs), run(unpatched, inputs)
    assert relative_l2(before, expected) > 0.15
    assert relative_l2(made, expected) < 0.05
    assert not report.guard.decisions


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_the_next_forward_has_copies_of_weights_that_were_written(write: Any, guard: bool) -> None:
    follows(write, guard)


def follows_collectives(rank: int) -> None:
    follows(collectives, guard=True)
    with pytest.raises(DroppedWeightError, match="int8 alone"):
        dist.broadcast(int8_alone()[1].weight, 0)
    with pytest.raises(DroppedWeightError, match="int8 alone"):
        dist.all_reduce(int8_alone()[1].weight.data)


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
def test_the_next_forward_has_copies_of_weights_that_came_from_other_ranks() -> None:
    """Into weights that are int8 alone no collective may write."""
    on_ranks(2, follows_collectives)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=str)
@pytest.mark.parametrize("shape", [(128, 128), (64, 512), (512, 64), (385, 24), (8, 16)], ids=str)
def test_every_third_of_a_weight_is_looked_at(dtype: Any, shape: tuple[int, int]) -> None:
    """A third of the rows, or of the columns, that moves is seen, also from NaN to a number."""
    linear = nn.Linear(shape[1], shape[0], dtype=dtype).requires_grad_(False)
    forward = Int8Forward(linear, "auto")
    copies, x = Int8Copies([forward]), torch.randn(1, 4, shape[1], dtype=dtype)
    size = [max(1, -(-n // 3)) for n in shape]
    with torch.no_grad():
        for axis in (0, 1) if shape[0] > 8 else (0,):
            for start in range(0, shape[axis], size[axis]):
                part = linear.weight.data.narrow(axis, start, min(size[axis], shape[axis] - start))
                for value in (part * 2, part * float("nan"), torch.ones_like(part)):
                    copies.follow()
                    forward.run(x)
                    copies.follow()
                    assert forward._made is not None  # nothing moved
                    part.copy_(value)
                    copies.follow()
                    assert forward._made is None


#: What becomes of the weight of a Linear.
MOVES: dict[str, Any] = {
    "elsewhere": lambda weight: weight.clone(),
    "turned": lambda weight: weight.t(),
    "one element": lambda weight: weight + F.pad(torch.ones(1, 1), (0, 63, 0, 63)).to(weight),
    "half": lambda weight: weight.half(),
}


@over("reference", "interpreter", "gpu")
def test_weights_that_lie_elsewhere_are_compared_there(on: Any) -> None:
    """Two models, each with weights of two dtypes: what moves in one is nothing to the other."""
    dtypes = (torch.float32, torch.float16, torch.float16) * 2
    forwards = [Int8Forward(nn.Linear(64, 64, device=on.device, dtype=t), on.impl) for t in dtypes]
    copies = [Int8Copies(forwards[:3]), Int8Copies(forwards[3:])]
    order = ("turned", "elsewhere", "one element", "elsewhere", "one element", "turned", "half")
    for move in order:
        for i, forward in enumerate(forwards):
            linear = forward.linear.requires_grad_(False)
            for one in copies:
                one.follow()
            for one in forwards:
                one._made = (one.linear.weight, one.linear.weight)
            before = linear.weight.clone()
            linear.weight.data = MOVES[move](linear.weight.data)
            same = before.dtype == linear.weight.dtype and torch.equal(before, linear.weight)
            for one in copies:
                one.follow()
            dropped = [j for j, one in enumerate(forwards) if one._made is None]
            # A weight of another dtype joins other weights, which are compared with it anew.
            assert dropped == [] if same else i in dropped
            assert len(dropped) < 2 or (move == "half" and i // 3 == dropped[0] // 3)


def test_an_offloaded_weight_keeps_no_copy() -> None:
    """A weight that moves on every call would hold int8 memory beside what offloading frees."""
    model, linear, x = with_a_linear()
    forward = linear.forward.__self__
    made = []
    with torch.no_grad():
        for _ in range(3):  # A weight that moves now and then keeps one.
            for moves in (False, True, True):
                linear.weight.data = linear.weight.data.clone() if moves else linear.weight.data
                made.append(linear(x))
                assert forward._made is not None
        for _ in range(6):
            linear.weight.data = linear.weight.data.clone()
            made.append(linear(x))
    assert all(torch.equal(made[0], one) for one in made)
    assert forward._made is None


# --- int8 weights alone --------------------------------------------------------------------------


def test_int8_only_drops_the_originals_and_keeps_the_values() -> None:
    model, inputs = WAN.model(BF16), WAN.inputs(dtype=BF16)
    twin = copy.deepcopy(model)
    patch_model(twin, attention="exact", linear="int8", guard=False)
    expected = run(twin, inputs)
    before = sum(p.numel() * p.itemsize for p in model.parameters())
    report = patch_model(model, attention="exact", linear="int8-only", guard=False)
    assert sum(p.numel() * p.itemsize for p in model.parameters()) < 0.75 * before
    assert all(type(linear) is Int8Linear for linear in linears(model))
    assert report.pairs[0].int8_linears == ("to_q", "to_k", "to_v", "to_out.0")
    assert torch.equal(run(model, inputs), expected)
    unpatch_model(model)
    # The product of int8 and scale stays, for whoever calls the Linear.
    assert relative_l2(run(model, inputs).float(), expected.float()) < 0.05


def test_a_weight_that_is_int8_alone_can_be_read_and_not_written() -> None:
    model = WAN.model()
    weight = model.blocks[0].attn1.to_q.weight.clone()
    count = keep_int8_only(model)
    assert count == 20
    linear = model.blocks[0].attn1.to_q
    assert relative_l2(linear.weight, weight) < 0.01
    assert relative_l2(torch.from_numpy(linear.weight.detach().numpy()), weight) < 0.01


@cache
def int8_alone() -> tuple[Any, Any, torch.Tensor]:
    """One for all refusals, which change nothing."""
    return with_a_linear(linear="int8-only")


#: Writes into a weight that is int8 alone.
LOST: dict[str, Any] = {
    "data": lambda w, x: w.data.copy_(x),
    "in-place": lambda w, x: w.add_(x),
    "set-data": lambda w, x: setattr(w, "data", x),
    "set": lambda w, x: w.set_(x),
    "foreach": lambda w, x: torch._foreach_copy_([w.data], [x]),
    "out": lambda w, x: torch.add(x, x, out=w.data),
    "view": lambda w, x: w.detach().T.chunk(2)[0].zero_(),
    "vector": lambda w, x: nn.utils.vector_to_parameters(x.flatten(), [w]),
}


@pytest.mark.parametrize("name", LOST)
def test_a_write_that_would_be_lost_is_refused(name: str) -> None:
    _, linear, x = int8_alone()
    expected, weight = linear(x), linear.weight
    assert weight.type() == "torch.FloatTensor"
    with pytest.raises(DroppedWeightError, match="Fuse adapters before"):
        LOST[name](weight, torch.ones(128, 128))
    assert torch.equal(linear(x), expected)


def test_an_adapter_beside_int8_alone_can_be_trained() -> None:
    model, inputs = WAN.model(), WAN.inputs()
    patch_model(model, linear="int8-only")
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q"], init_lora_weights=False))
    model(**inputs)[0].square().mean().backward()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if "lora_" in name}
    assert all(p.grad.abs().max() > 0 for p in model.parameters() if p.requires_grad)


def test_a_model_with_int8_alone_goes_with_its_last_reference() -> None:
    model = WAN.model()
    keep_int8_only(model)
    gone = weakref.ref(model)
    gc.disable()
    del model
    gc.enable()
    assert gone() is None
