"""What stock models take and a patched one has to take too: batches that broadcast, blocks that
are shared or wrapped, fp64, sharded parameters, symbolic sizes. And what it cannot: in words.

The truth is the unpatched model with the same features.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tests.patching import cogvideox
from tests.patching.turbodiffusion import tiny, tiny_inputs
from tests.patching.wan import CASES, EXACT, INT8, Case, dicts, relative, run, wan
from tests.patching.wan_family import named
from turbo_rcm_patch import (
    PatchConfig,
    find_pairs,
    is_patched,
    patch_model,
    patched,
    unpatch_model,
)
from turbo_rcm_patch.errors import FamilyError, UnknownArchitectureError

# --- batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("linear", ["as-is", "int8"])
@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[5]], ids=lambda case: case.name)
@pytest.mark.parametrize(
    "single",
    [
        ("encoder_hidden_states", "encoder_hidden_states_image"),
        ("encoder_hidden_states", "encoder_hidden_states_image", "timestep"),
        ("hidden_states", "timestep"),
    ],
    ids=["text", "text-and-time", "latents-and-time"],
)
def test_a_batch_of_one_is_every_sample_s(
    case: Case, single: tuple[str, ...], linear: Any
) -> None:
    model, inputs = case.model(), case.inputs(batch=2)
    inputs |= {name: inputs[name][:1] for name in single if name in inputs}
    expected = run(model, **inputs)
    with patched(model, attention="exact", linear=linear):
        assert relative(run(model, **inputs), expected) < (1e-5 if linear == "as-is" else 0.02)


# --- blocks --------------------------------------------------------------------------------------


def shared(kind: str) -> tuple[Any, dict[str, Any], str]:
    if kind == "wan":
        return wan(), CASES[0].inputs(), "blocks"
    if kind == "vace":
        family = named("vace")
        return family.model(), family.inputs(), "blocks"
    if kind == "turbodiffusion":
        return tiny(), tiny_inputs(), "blocks"
    case = cogvideox.CASES[0]
    return case.model(), case.inputs(), "transformer_blocks"


@pytest.mark.parametrize("kind", ["wan", "vace", "cogvideox", "turbodiffusion"])
def test_a_block_that_is_used_twice(kind: str) -> None:
    model, inputs, name = shared(kind)
    blocks = getattr(model, name)
    blocks[1] = blocks[0]

    def forward() -> torch.Tensor:
        with torch.no_grad():
            out = model(**inputs)
        return out if isinstance(out, torch.Tensor) else out[0]

    expected, before = forward(), dicts(model)
    report = patch_model(model, EXACT)
    paths = [pair.path for pair in report.pairs]
    assert len(set(paths)) == len(paths)
    assert not any(path.startswith(f"{name}.1.") for path in paths)
    assert relative(forward(), expected) < 1e-5
    unpatch_model(model)
    assert dicts(model) == before
    assert torch.equal(forward(), expected)


def test_an_expert_that_is_both() -> None:
    class Pipe:
        transformer = transformer_2 = wan()

    before = dicts(Pipe.transformer)
    assert len(patch_model(Pipe()).pairs) == 6
    unpatch_model(Pipe())
    assert dicts(Pipe.transformer) == before


def test_experts_that_share_a_block_are_refused() -> None:
    class Pipe:
        transformer, transformer_2 = wan(), wan()

    Pipe.transformer_2.blocks[0] = Pipe.transformer.blocks[0]
    before = dicts(Pipe.transformer), dicts(Pipe.transformer_2)
    with pytest.raises(FamilyError, match="share no block"):
        patch_model(Pipe())
    assert (dicts(Pipe.transformer), dicts(Pipe.transformer_2)) == before


class Wrapped(nn.Module):
    """What somebody puts around a block, without its attributes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class Strange(nn.Module):
    """A block of which nothing is known."""

    def forward(self, hidden_states: torch.Tensor, *args: Any) -> torch.Tensor:
        return hidden_states * 0.5


@pytest.mark.parametrize("kind", ["wrapped", "checkpointed", "compiled"])
def test_what_is_around_a_block_is_looked_into(kind: str) -> None:
    model = wan()
    expected = run(model)
    if kind == "wrapped":
        model.blocks[0] = Wrapped(model.blocks[0])
    elif kind == "checkpointed":
        kinds = (type(model.blocks[0]),)
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, kinds))
    else:
        torch._dynamo.reset()
        model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
        run(model)
    before = dicts(model)
    report = patch_model(model, INT8)
    assert report.fused == 6
    assert 1e-4 < relative(run(model), expected) < 0.02
    unpatch_model(model)
    assert dicts(model) == before
    assert torch.equal(run(model), expected)


@pytest.mark.parametrize("kind", ["wan", "vace", "cogvideox"])
def test_a_strange_block_is_listed_and_left(kind: str) -> None:
    model, _, name = shared(kind)
    getattr(model, name)[1] = Strange()
    report = patch_model(model, EXACT)
    pair = next(pair for pair in report.pairs if pair.path == f"{name}.1")
    assert pair.runs == "as-written" and "Strange" in pair.reason
    assert "Strange" in str(report) and report.fused > 0
    unpatch_model(model)


def test_a_block_by_itself_is_no_model() -> None:
    for take in (patch_model, find_pairs, unpatch_model, is_patched):
        if take is is_patched:
            assert not take(wan().blocks[0])
        else:
            with pytest.raises((UnknownArchitectureError, RuntimeError)):
                take(wan().blocks[0])
    with pytest.raises(UnknownArchitectureError, match="pass the transformer"):
        patch_model(wan().blocks[0])


# --- dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["wan", "cogvideox", "turbodiffusion"])
def test_a_model_cast_to_fp64_after_patching_runs_as_written(kind: str) -> None:
    model, inputs, _ = shared(kind)
    inputs = {
        name: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in inputs.items()
    }

    def forward() -> torch.Tensor:
        with torch.no_grad():
            out = model(**inputs)
        return out if isinstance(out, torch.Tensor) else out[0]

    expected = copy.deepcopy(model)
    patch_model(model, INT8)
    model.double()
    found = forward()
    model = expected.double()
    assert torch.equal(found, forward())


# --- sharded parameters --------------------------------------------------------------------------


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("patch_first", [True, False], ids=["patch-first", "patch-after"])
@pytest.mark.parametrize("linear", ["as-is", "int8"])
def test_fully_shard(mesh: DeviceMesh, patch_first: bool, linear: Any) -> None:
    """It swaps the class of the model and its blocks, and their parameters on every forward."""
    model = wan()
    expected = run(model)

    def shard() -> None:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    config = PatchConfig(attention="exact", linear=linear, guard=False)
    if not patch_first:
        shard()
        sharded = dicts(model)
    report = patch_model(model, config)
    if patch_first:
        shard()
    for _ in range(3):
        found = relative(run(model), expected)
        assert found < 1e-5 if linear == "as-is" else 1e-4 < found < 0.02
    assert report.fused == 6 and "6 of 6" in str(report)
    assert len(find_pairs(model)) == 6 and is_patched(model)
    unpatch_model(model)
    assert "forward" not in vars(model.blocks[0])
    assert patch_first or vars(model).keys() == sharded[""].keys()
    assert torch.equal(run(model), expected)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_a_step_of_training_with_sharded_parameters(mesh: DeviceMesh) -> None:
    def gradients(shard: bool, patch: bool) -> list[torch.Tensor]:
        model = wan().train().requires_grad_(True)
        if patch:
            patch_model(model, EXACT)
        if shard:
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        model(**CASES[0].inputs())[0].square().mean().backward()
        grads = [parameter.grad for parameter in model.parameters()]
        return [getattr(grad, "full_tensor", lambda grad=grad: grad)() for grad in grads]

    expected, found = gradients(False, False), gradients(True, True)
    worst = max(relative(a, b) for a, b in zip(found, expected, strict=True))
    assert worst < 1e-4


# --- selective checkpointing ---------------------------------------------------------------------


def save_products(ctx: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """As TurboDiffusion trains: products are saved, everything else is computed again."""
    product = function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("frozen", [False, True], ids=["all", "frozen-linears"])
@pytest.mark.parametrize("linear", ["as-is", "int8"])
@pytest.mark.parametrize("guard", [False, True], ids=["", "guard"])
def test_training_with_selective_checkpointing(linear: Any, frozen: bool, guard: bool) -> None:
    """What looks after int8 copies in a forward is not replayed in the backward."""

    def gradients(config: PatchConfig | None) -> list[torch.Tensor]:
        model = tiny(checkpoint=False).requires_grad_(True)
        context = partial(create_selective_checkpoint_contexts, save_products)
        for name, block in model.blocks.named_children():
            model.blocks.register_module(name, checkpoint_wrapper(block, context_fn=context))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not frozen or "attn" not in name and "ffn" not in name)
        if config is not None:
            patch_model(model, config)
        for _ in range(2):
            model.zero_grad()
            model(**tiny_inputs()).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    config = PatchConfig(attention="exact", linear=linear, guard=guard)
    expected, found = gradients(None), gradients(config)
    worst = max(relative(a, b) for a, b in zip(found, expected, strict=True))
    assert worst < (0.1 if frozen and linear == "int8" else 1e-4)


# --- symbolic sizes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [INT8, EXACT, PatchConfig(linear="int8")],
    ids=["int8", "exact", "int8-linears-guard"],
)
@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=lambda case: case.name)
def test_repeated_blocks_with_dynamic_shapes(case: Case, config: PatchConfig) -> None:
    torch._dynamo.reset()
    model, inputs = case.model(), case.inputs()
    with patched(model, config):
        run(model, **inputs)  # The guard chooses.
        expected = run(model, **inputs)
        model.compile_repeated_blocks(backend="aot_eager", fullgraph=True, dynamic=True)
        assert relative(run(model, **inputs), expected) < 1e-5
    torch._dynamo.reset()


@pytest.mark.parametrize("case", cogvideox.CASES[:2], ids=lambda case: case.name)
def test_cogvideox_blocks_with_dynamic_shapes(case: Any) -> None:
    torch._dynamo.reset()
    model, inputs = case.model(), case.inputs()
    with patched(model, INT8):
        expected = run(model, **inputs)
        for block in model.transformer_blocks:
            block.compile(backend="aot_eager", fullgraph=True, dynamic=True)
        assert relative(run(model, **inputs), expected) < 1e-5
    torch._dynamo.reset()


def test_a_feed_forward_that_gets_another_dtype_is_its_author_s_error() -> None:
    """Of a norm that somebody hooked, for one. The modules are called then, as the author does."""
    said = []
    for patch in (False, True):
        case = cogvideox.CASES[0]
        model, inputs = case.model(torch.bfloat16), case.inputs(dtype=torch.bfloat16)
        model.transformer_blocks[0].norm2.register_forward_hook(
            lambda _, given, made: (made[0].float(), made[1].float(), *made[2:])
        )
        if patch:
            patch_model(model, PatchConfig(guard=False))
        with pytest.raises(RuntimeError, match="same dtype") as caught:
            run(model, **inputs)
        said.append(str(caught.value))
    assert said[0] == said[1]
