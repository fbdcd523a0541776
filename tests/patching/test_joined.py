"""A branch as one registered operation: how few of them a compiled block calls, what stands
between them and the kernels, and that they are what a plan runs."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.patching import cogvideox, wan
from tests.patching.test_short_way import Block, of_cogvideox, of_turbodiffusion, of_wan
from turbo_rcm_patch import PatchConfig, patch_model
from turbo_rcm_patch.errors import GradientError
from turbo_rcm_patch.patching import joined

BRANCHES = ("attention_branch", "feed_forward_branch")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    joined._local.__dict__.clear()
    yield
    torch._dynamo.reset()


class Opaque:
    """A backend that runs graphs as they are and notes which operations of ours they call."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        for node in graph.graph.nodes:
            if getattr(node.target, "namespace", "") == "turbo_rcm_patch":
                self.names.append(node.target.__name__.partition(".")[0])
        return graph


def compiled(model: Any, **options: Any) -> Opaque:
    backend = Opaque()
    model.compile(backend=backend, fullgraph=True, **options)
    return backend


# --- how few -------------------------------------------------------------------------------------

ATTENTION, FEED_FORWARD = BRANCHES


@pytest.mark.parametrize(
    ("made", "options", "expected"),
    [
        pytest.param(of_wan, {}, [ATTENTION, ATTENTION, FEED_FORWARD], id="wan"),
        pytest.param(
            of_wan, {"attention": "exact"}, [ATTENTION, ATTENTION, FEED_FORWARD], id="exact"
        ),
        pytest.param(
            of_wan, {"linear": "int8"}, [ATTENTION, ATTENTION, FEED_FORWARD], id="int8-linears"
        ),
        pytest.param(
            lambda: of_wan(added_kv_proj_dim=256), {}, [ATTENTION, ATTENTION, FEED_FORWARD],
            id="image",
        ),
        pytest.param(
            lambda: of_wan(sla=True), {"sla_topk": 0.5}, [ATTENTION, ATTENTION, FEED_FORWARD],
            id="sla",
        ),
        pytest.param(of_cogvideox, {}, [ATTENTION, FEED_FORWARD], id="cogvideox"),
        pytest.param(
            of_cogvideox, {"linear": "int8"}, [ATTENTION, FEED_FORWARD],
            id="cogvideox-int8-linears",
        ),
        pytest.param(
            lambda: of_turbodiffusion(True), {}, [ATTENTION, ATTENTION, FEED_FORWARD],
            id="turbodiffusion-sla",
        ),
    ],
)  # fmt: skip
def test_a_compiled_block_calls_an_operation_for_each_branch(
    monkeypatch: pytest.MonkeyPatch,
    made: Callable[[], tuple[Any, Any, tuple[Any, ...]]],
    options: dict[str, Any],
    expected: list[str],
) -> None:
    block = Block(monkeypatch, made, **options)
    backend = compiled(block.block)
    block()
    assert backend.names == expected


def own_calls(function: Callable[[], object]) -> int:
    """Functions of this package that a call runs; those of torch differ between its versions."""
    count = 0

    def profile(frame: Any, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call" and "turbo_rcm_patch/" in frame.f_code.co_filename

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    ("made", "options", "launches", "more"),
    [
        pytest.param(of_wan, {}, 11, 30, id="wan"),
        # It quantises ten weights in seven steps, and does not look after copies of them.
        pytest.param(of_wan, {"linear": "int8"}, 29, 90, id="wan-int8-linears"),
        pytest.param(of_cogvideox, {}, 7, 20, id="cogvideox"),
        pytest.param(of_cogvideox, {"linear": "int8"}, 21, 90, id="cogvideox-int8-linears"),
        pytest.param(lambda: of_turbodiffusion(False), {}, 11, 30, id="turbodiffusion"),
    ],
)
def test_a_compiled_block_takes_the_steps_of_a_plain_one(
    monkeypatch: pytest.MonkeyPatch,
    made: Callable[[], tuple[Any, Any, tuple[Any, ...]]],
    options: dict[str, Any],
    launches: int,
    more: int,
) -> None:
    block = Block(monkeypatch, made, **options)
    plain = own_calls(block)
    compiled(block.block)
    for _ in range(4):
        block()
    block.log.clear()
    counted = own_calls(block)
    assert block.replayed == len(block.log) == launches
    assert counted <= plain + more, (plain, counted)


# --- what they compute ---------------------------------------------------------------------------


def changed_weights(model: Any) -> None:
    """As a checkpoint, an optimiser or a fused LoRA would."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "blocks." in name:
                parameter.mul_(1.25)
        for block in model.blocks:
            block.ffn.net[2].weight.data = block.ffn.net[2].weight.data * 0.5
            block.attn1.to_q.weight = nn.Parameter(-block.attn1.to_q.weight, requires_grad=False)


@pytest.mark.parametrize("linear", ["as-is", "int8"])
@pytest.mark.parametrize("case", wan.CASES, ids=lambda case: case.name)
def test_compiled_is_bit_equal_to_plain_and_never_stale(case: wan.Case, linear: Any) -> None:
    model = case.model()
    patch_model(model, PatchConfig(guard=False, linear=linear))
    inputs = case.inputs(batch=2)
    plain = wan.run(model, **inputs)
    backend = Opaque()
    model.compile_repeated_blocks(backend=backend, fullgraph=True)
    for _ in range(3):
        assert torch.equal(wan.run(model, **inputs), plain)
    finer = set(backend.names) - set(BRANCHES)
    assert bool(finer) == (not model.config.cross_attn_norm), "a norm that is no layer norm"
    changed_weights(model)
    changed = wan.run(model, **inputs)
    assert not torch.equal(changed, plain)
    for block in model.blocks:
        block._compiled_call_impl = None
    assert torch.equal(wan.run(model, **inputs), changed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("attention", ["int8", "exact"])
def test_in_16_bits(dtype: torch.dtype, attention: Any) -> None:
    case = wan.CASES[0]
    model, inputs = case.model(dtype), case.inputs(dtype=dtype)
    patch_model(model, PatchConfig(guard=False, attention=attention))
    plain = wan.run(model, **inputs)
    assert set(compiled(model).names) <= set(BRANCHES)
    assert torch.equal(wan.run(model, **inputs), plain)


@pytest.mark.parametrize("case", cogvideox.CASES, ids=lambda case: case.name)
def test_two_streams(case: Any) -> None:
    model, inputs = case.model(), case.inputs()
    patch_model(model, PatchConfig(guard=False))
    plain = wan.run(model, **inputs)
    backend = compiled(model)
    for _ in range(2):
        assert torch.equal(wan.run(model, **inputs), plain)
    gelu = "geglu" not in case.name
    assert (set(backend.names) == set(BRANCHES)) == gelu


def test_a_branch_with_a_lora_calls_it_and_the_others_are_whole() -> None:
    model = wan.wan(num_layers=1)
    wan.with_lora(model, "attn1.to_q")
    patch_model(model, PatchConfig(guard=False))
    plain = wan.run(model)
    backend = compiled(model)
    assert torch.equal(wan.run(model), plain)
    assert backend.names.count("attention_branch") == 1
    assert backend.names.count("feed_forward_branch") == 1
    assert len(backend.names) > 2, "the finer operations run around the LoRA"


def test_inputs_that_need_the_public_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = wan.wan(), wan.CASES[0].inputs(batch=3)
    patch_model(model, PatchConfig(guard=False))
    plain = wan.run(model, **inputs)
    monkeypatch.setattr(joined, "MAX_BATCH", 2)
    compiled(model)
    assert torch.equal(wan.run(model, **inputs), plain)


# --- gradients -----------------------------------------------------------------------------------


def test_where_a_gradient_is_wanted_the_finer_operations_run() -> None:
    model = wan.wan()
    patch_model(model, PatchConfig(guard=False, attention="exact"))
    inputs = wan.CASES[0].inputs()
    hidden = inputs.pop("hidden_states").requires_grad_()
    (plain,) = torch.autograd.grad(model(hidden, **inputs)[0].sum(), hidden)
    backend = compiled(model)
    (grad,) = torch.autograd.grad(model(hidden, **inputs)[0].sum(), hidden)
    assert torch.allclose(grad, plain, atol=1e-6)
    assert not set(backend.names) & set(BRANCHES)
    assert torch.equal(wan.run(model, hidden_states=hidden, **inputs), model(hidden, **inputs)[0])
    assert set(backend.names) & set(BRANCHES), "without one, they are whole"


class Whole(nn.Module):
    """A model for `torch.export`, which takes tensors alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, hidden_states: torch.Tensor, timestep: torch.Tensor, encoder: torch.Tensor
    ) -> torch.Tensor:
        made: torch.Tensor = self.model(hidden_states, timestep, encoder, return_dict=False)[0]
        return made


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not-strict"])
def test_export_and_refused_gradients(strict: bool) -> None:
    model, given = wan.wan(), wan.CASES[0].inputs()
    patch_model(model, PatchConfig(guard=False))
    inputs = given["hidden_states"], given["timestep"], given["encoder_hidden_states"]
    with torch.no_grad():
        program = torch.export.export(Whole(model), inputs, strict=strict).module()
        assert torch.equal(program(*inputs), wan.run(model, **given))
    wanting = inputs[0].clone().requires_grad_()
    if strict:
        with pytest.raises(GradientError, match="branch"):
            program(wanting, *inputs[1:])
    else:  # Its parameters are fakes, so modules are called and the finer operations run.
        assert program(wanting, *inputs[1:]).requires_grad


# --- as torch sees them --------------------------------------------------------------------------


def operands() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The calls of a small block's operations."""
    calls: list[tuple[Any, tuple[Any, ...]]] = []

    def noting(graph: Any, inputs: Any) -> Any:
        class Noting(torch.fx.Interpreter):
            def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
                if getattr(target, "namespace", "") == "turbo_rcm_patch":
                    calls.append((target, args))
                return super().call_function(target, args, kwargs)

        return Noting(graph).run

    model = wan.wan(num_layers=1)
    patch_model(model, PatchConfig(guard=False))
    model.blocks[0].compile(backend=noting, fullgraph=True)
    wan.run(model)
    yield from calls


def test_opcheck() -> None:
    found = list(operands())
    assert len(found) == 3
    for operation, args in found:
        torch.library.opcheck(
            operation,
            args,
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"),
        )


def test_threads_do_not_share_what_they_are_given() -> None:
    """Each of two threads stops in the middle of a branch while the other runs it."""
    found = list(operands())
    target, args = found[2]
    others = (args[0], args[1], [None if x is None else x * 0.5 for x in args[2]], *args[3:])
    expected = [target(*args)[0], target(*others)[0]]
    barrier = threading.Barrier(2, timeout=120)
    run = joined.FeedForwardRun.__call__
    made: list[Any] = [None, None]

    def meeting(self: Any, *given: Any) -> Any:
        barrier.wait()
        return run(self, *given)

    def work(index: int) -> None:
        with torch.no_grad():
            made[index] = target(*(args, others)[index])[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joined.FeedForwardRun, "__call__", meeting)
        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(map(torch.equal, made, expected))


def test_no_weight_outlives_its_model() -> None:
    model = wan.wan(num_layers=1)
    patch_model(model, PatchConfig(guard=False))
    compiled(model.blocks[0])
    wan.run(model)
    assert joined._local.kept, "the branches are kept"
    weights = [weakref.ref(p) for p in model.blocks.parameters()]
    kept = [tensor for branch in joined._local.kept.values() for tensor in held_by(branch)]
    assert kept == [None] * len(kept) and kept
    del model
    torch._dynamo.reset()
    gc.collect()
    assert all(weight() is None for weight in weights)


def held_by(branch: Any) -> list[Any]:
    return [slot[name] for slot in branch._slots for name in ("weight", "bias")]


# --- below autograd ------------------------------------------------------------------------------


def test_a_module_that_is_called_may_still_use_autograd() -> None:
    model = wan.wan(num_layers=1)
    patch_model(model, PatchConfig(guard=False))
    grads: list[torch.Tensor] = []

    def hook(module: Any, given: Any, out: torch.Tensor) -> None:
        with torch.enable_grad():
            x = out.detach().requires_grad_()
            (x * x).sum().backward()
        assert x.grad is not None
        grads.append(x.grad)

    model.blocks[0].attn1.to_q.register_forward_hook(hook)
    for _ in range(3):
        wan.run(model)
    assert len(grads) == 3


def test_a_plan_runs_below_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    from turbo_rcm_patch.patching import branches

    model = wan.wan(num_layers=1)
    patch_model(model, PatchConfig(guard=False))
    seen: list[bool] = []
    own = branches.FeedForwardRun.__call__

    def run(self: Any, *args: Any) -> Any:
        key = torch._C.DispatchKey.AutogradFunctionality
        seen.append(torch._C._dispatch_tls_is_dispatch_key_excluded(key))
        return own(self, *args)

    monkeypatch.setattr(branches.FeedForwardRun, "__call__", run)
    wan.run(model)
    assert seen == [True]


def test_a_branch_is_made_for_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it decides on a GPU does not run on a CPU."""
    made: list[torch.device] = []

    def branch(layout: Any, held: Any, streams: list[torch.Tensor], given: Any) -> object:
        made.append(streams[0].device)
        return object()

    monkeypatch.setattr(joined, "_Branch", branch)
    monkeypatch.setattr(joined, "_unpacked", lambda *args: None)
    given: Any = None
    for device in ("cpu", "meta", "cpu", "meta"):
        streams = [torch.ones(1, device=device)]
        joined._branch(joined.FeedForwardLayout, ("", [], []), streams, given, ())
    assert made == [torch.device("cpu"), torch.device("meta")]


def test_weights_that_kernels_read_are_looked_at_on_every_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of a library's product are not, because it looks itself."""
    model, inputs = wan.CASES[0].model(), wan.CASES[0].inputs()
    patch_model(model, PatchConfig(guard=False))
    seen: list[set[int]] = []

    def signature(*tensors: torch.Tensor) -> Any:
        seen.append({x.data_ptr() for x in tensors})
        return own(*tensors)

    own = joined.signature
    monkeypatch.setattr(joined, "signature", signature)
    block = model.blocks[0]
    block.compile(backend="eager")
    wan.run(model, **inputs)
    for attention, looked in ((block.attn1, seen[0]), (block.attn2, seen[1])):
        for part in (attention.norm_q, attention.norm_k, attention.to_out[0]):
            assert part.weight.data_ptr() in looked, part
        for part in (attention.to_q, attention.to_k, attention.to_v):
            assert part.weight.data_ptr() not in looked
    assert block.ffn.net[2].weight.data_ptr() in seen[2]
    assert block.ffn.net[0].proj.weight.data_ptr() not in seen[2]
