"""The plan of a block is used while it is true, and not a forward longer.

Each change is made to a patched model after its plan has served a forward, and to an unpatched
copy; with exact attention both must still agree.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.testing._internal.two_tensor import TwoTensor

from tests.patching import test_guard_mutants as mutants
from tests.patching.wan import EXACT, Case, relative, run, wan
from turbo_rcm_patch import PatchConfig, patch_model, patched
from turbo_rcm_patch.ops.elementwise import norm_forward
from turbo_rcm_patch.ops.projection import project_forward
from turbo_rcm_patch.ops.registry import attention_forward
from turbo_rcm_patch.patching import block as block_file
from turbo_rcm_patch.patching import branches
from turbo_rcm_patch.patching import plan as plan_file
from turbo_rcm_patch.patching.branches import FeedForwardRun
from turbo_rcm_patch.patching.plan import PlanSlot, Watch
from turbo_rcm_patch.patching.record import record_of


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Grows by one for every block that ran by a plan that was kept."""
    calls: list[int] = []
    own = block_file.BlockForward._planned

    def counting(self: Any, *args: Any) -> Any:
        plan, token = own(self, *args)
        if token is not None:
            calls.append(1)
        return plan, token

    monkeypatch.setattr(block_file.BlockForward, "_planned", counting)
    yield calls


def hook(model: Any) -> None:
    model.blocks[0].attn1.to_v.register_forward_hook(lambda module, args, out: out * 1.5)


def pre_hook(model: Any) -> None:
    model.blocks[1].ffn.net[2].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))


def instance_forward(model: Any) -> None:
    linear = model.blocks[0].attn2.to_out[0]
    linear.forward = lambda x: nn.functional.linear(x, linear.weight, linear.bias) * 1.25


class Doubled(nn.Linear):
    """Not a plain Linear, though its weight can be read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def replaced_linear(model: Any) -> None:
    old = model.blocks[0].attn1.to_out[0]
    new = Doubled(old.in_features, old.out_features)
    new.load_state_dict(old.state_dict())
    model.blocks[0].attn1.to_out[0] = new


def swapped_class(model: Any) -> None:
    model.blocks[0].ffn.net[2].__class__ = Doubled


def replaced_weight(model: Any) -> None:
    linear = model.blocks[0].attn1.to_q
    linear.weight = nn.Parameter(linear.weight.detach() * -1.0)


def replaced_norm_weight(model: Any) -> None:
    norm = model.blocks[0].attn1.norm_q
    norm.weight = nn.Parameter(torch.linspace(0.5, 2.0, norm.weight.numel()))


def written_weight(model: Any) -> None:
    with torch.no_grad():
        model.blocks[0].ffn.net[2].weight.mul_(1.5)


def written_data(model: Any) -> None:
    model.blocks[1].attn1.to_out[0].weight.data.mul_(1.5)


def new_data(model: Any) -> None:
    weight = model.blocks[1].attn1.to_out[0].weight
    weight.data = weight.data * 1.5


def transposed_data(model: Any) -> None:
    weight = model.blocks[1].attn1.to_out[0].weight
    weight.data = weight.data.t()


def other_eps(model: Any) -> None:
    model.blocks[0].attn1.norm_q.eps = model.blocks[0].attn1.norm_k.eps = 0.5


def other_layer_norm_eps(model: Any) -> None:
    model.blocks[0].norm1.eps = 0.5


def no_bias(model: Any) -> None:
    model.blocks[0].attn1.to_out[0].bias = None


def replaced_block_norm(model: Any) -> None:
    model.blocks[0].norm2 = nn.Identity()


def double_norms(model: Any) -> None:
    norms = model.blocks[0].attn1.norm_q, model.blocks[0].attn1.norm_k
    for norm in norms:
        norm.double().weight.data.mul_(2.0)


def other_table(model: Any) -> None:
    table = model.blocks[0].scale_shift_table
    model.blocks[0].scale_shift_table = nn.Parameter(table.detach() + 1.0)


def processor(model: Any) -> None:
    class Processor:
        def __call__(self, attn: Any, hidden: torch.Tensor, *args: Any) -> torch.Tensor:
            out: torch.Tensor = attn.to_out[0](attn.to_v(hidden))
            return out

    model.blocks[0].attn1.set_processor(Processor())


def forward_of_a_module_without_attributes(model: Any) -> None:
    """As hooks of diffusers and accelerate set it; the module itself has no attribute of its own
    but whether it trains."""
    ffn = model.blocks[0].ffn
    own = ffn.forward
    ffn.forward = lambda *args, **kwargs: 2 * own(*args, **kwargs)


def hook_in_another_dict(model: Any) -> None:
    """A recipe for removing every hook; what is hooked afterwards has to run."""
    for module in model.modules():
        module._forward_hooks = OrderedDict()
    hook(model)


def weight_in_another_dict(model: Any) -> None:
    linear = model.blocks[0].attn1.to_q
    linear.__dict__["_parameters"] = dict(linear._parameters)
    replaced_weight(model)


CHANGES = [
    hook_in_another_dict, weight_in_another_dict,
    forward_of_a_module_without_attributes,
    hook, pre_hook, instance_forward, replaced_linear, swapped_class, replaced_weight,
    replaced_norm_weight, written_weight, written_data, new_data, transposed_data, other_eps,
    other_layer_norm_eps, no_bias, replaced_block_norm, double_norms, other_table, processor,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Mismatch dtype:UserWarning")
@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_what_changes_after_patching_is_honoured(
    change: Callable[[Any], None], used: list[int]
) -> None:
    case = Case("2.1-t2v")
    model, inputs = case.model(), case.inputs()
    author = copy.deepcopy(model)
    patch_model(model, EXACT)
    before = run(model, **inputs)
    assert relative(before, run(author, **inputs)) < 1e-5
    assert len(used) == 2, "both blocks run by their plans"
    change(model)
    change(author)
    after = run(author, **inputs)
    assert relative(after, before) > 1e-3, "the change is one that shows"
    for _ in range(2):
        assert relative(run(model, **inputs), after) < 1e-5


def test_an_attention_backend_that_is_chosen_for_one_attention_is_used() -> None:
    model, inputs = Case("2.1-t2v").model(), Case("2.1-t2v").inputs()
    patch_model(model, EXACT)
    record = record_of(model)
    assert record is not None
    run(model, **inputs)
    assert record.plan.states[0].ran == "fused with exact attention"
    model.blocks[0].attn1.processor._attention_backend = AttentionBackendName._NATIVE_MATH
    run(model, **inputs)
    assert record.plan.states[0].ran == "fused after a module that was called"


def _quantised(model: Any) -> None:
    for block in model.blocks:
        weight = block.attn1.to_q.weight.detach()
        both = TwoTensor(weight, weight.clone())
        block.attn1.to_q.weight = nn.Parameter(both, requires_grad=False)


@pytest.mark.filterwarnings("ignore:.*should be kept in float32")
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("of", ["a class of weights", "torch", "torch, set later"])
def test_weights_may_be_swapped_after_a_forward(
    monkeypatch: pytest.MonkeyPatch, of: str, graphs: bool
) -> None:
    """`swap_tensors`, by which such models move, refuses tensors with weak references."""
    model, inputs = Case("2.1-t2v").model(), Case("2.1-t2v").inputs()
    if of == "torch":
        monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    elif of == "a class of weights":
        _quantised(model)
    author = copy.deepcopy(model)
    linear: Any = "as-is" if of == "a class of weights" else "int8"
    patch_model(model, attention="exact", guard=False, linear=linear, cuda_graphs=graphs)
    run(model, **inputs)
    run(author, **inputs)
    if of == "torch, set later":
        monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    for one in (model, author):
        if of == "torch, set later":
            one.load_state_dict({name: x * 1.5 for name, x in one.state_dict().items()})
            monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", False)
            run(one, **inputs)
            monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
        one.to(torch.float64)
        one.to(torch.float32)
        if of == "torch":
            one.load_state_dict({name: x * 1.5 for name, x in one.state_dict().items()})
    assert {x.dtype for x in model.parameters()} == {torch.float32}
    assert relative(run(model, **inputs), run(author, **inputs)) < (
        1e-5 if linear == "as-is" else 0.05
    )


def test_a_hooked_linear_is_called_by_the_plan_and_read_again_without_its_hook(
    used: list[int],
) -> None:
    case = Case("2.1-t2v")
    model, inputs = case.model(), case.inputs()
    patch_model(model, EXACT)
    called: list[nn.Module] = []
    watching = register_module_forward_pre_hook(
        lambda module, args: called.append(module) if type(module) is nn.Linear else None
    )
    linear = model.blocks[0].attn1.to_q
    handle = linear.register_forward_hook(lambda *_: None)
    for _ in range(20):
        run(model, **inputs)
    blocks = set(model.blocks.modules())
    assert len(used) == 40, "both blocks"
    assert set(called) & blocks == {linear}, "nothing else of a block is called"
    handle.remove()
    called.clear()
    run(model, **inputs)
    watching.remove()
    assert len(used) == 42 and not set(called) & blocks


def test_what_changes_with_every_forward_is_not_planned_for_ever(
    monkeypatch: pytest.MonkeyPatch, used: list[int]
) -> None:
    case = Case("2.1-t2v")
    model, inputs = case.model(), case.inputs()
    patch_model(model, EXACT)
    made = []
    own = PlanSlot.get

    def get(self: Any, facts: Any, make: Callable[[], Any], watch: Any) -> Any:
        return own(self, facts, lambda: made.append(1) or make(), watch)

    monkeypatch.setattr(PlanSlot, "get", get)
    for i in range(40):
        model.blocks[0].touched = i
        run(model, **inputs)
    assert len(made) <= 10 + 1


@pytest.mark.parametrize("linear", ["as-is", "int8"])
def test_two_kinds_of_forwards_in_turn_have_a_plan_each(
    linear: Any, monkeypatch: pytest.MonkeyPatch, used: list[int]
) -> None:
    """With an image and without, as a server would that holds one model for both."""
    case = Case("2.1-i2v", image=True)
    model, inputs = case.model(), case.inputs()
    alone = inputs | {"encoder_hidden_states_image": None}
    patch_model(model, PatchConfig(attention="exact", guard=False, linear=linear))
    expected = [run(model, **inputs), run(model, **alone)]
    made = []
    own = PlanSlot.get

    def get(self: Any, facts: Any, make: Callable[[], Any], watch: Any) -> Any:
        return own(self, facts, lambda: made.append(1) or make(), watch)

    monkeypatch.setattr(PlanSlot, "get", get)
    used.clear()
    for _ in range(12):
        assert torch.equal(run(model, **inputs), expected[0])
        assert torch.equal(run(model, **alone), expected[1])
    assert not made and len(used) == 48
    for parameter in model.blocks.parameters():
        parameter.data = parameter.data * 1.5
    changed = [run(model, **inputs), run(model, **alone)]
    monkeypatch.setattr(PlanSlot, "get", lambda *args: None)
    assert torch.equal(run(model, **inputs), changed[0])
    assert torch.equal(run(model, **alone), changed[1])


def test_a_plan_made_without_an_image_serves_none_with_one() -> None:
    """As many tokens as text has at most, and five more: the first forward is the shorter one."""
    case = Case("2.1-i2v", image=True)
    one, other, inputs = case.model(), case.model(), case.inputs()
    patch_model(one, PatchConfig(attention="exact", guard=False))
    record, ran = record_of(one), []
    assert record is not None
    for given in (inputs | {"encoder_hidden_states_image": None}, inputs):
        assert relative(run(one, **given), run(other, **given)) < 1e-5
        ran.append(
            [state.ran for state in record.plan.states if state.pair.path.endswith("attn2")]
        )
    called, exact = "fused after a module that was called", "fused with exact attention"
    assert ran == [[called] * 2, [exact] * 2]


@pytest.mark.parametrize("context", ["no_grad", "inference_mode"])
def test_plans_serve_inference(context: str, used: list[int]) -> None:
    case = Case("2.1-t2v")
    model, inputs = case.model(), case.inputs(batch=2)
    author = copy.deepcopy(model)
    patch_model(model, EXACT)
    with getattr(torch, context)():
        got, expected = model(**inputs)[0], author(**inputs)[0]
    assert relative(got, expected) < 1e-5
    assert len(used) == 2


def test_no_plan_is_kept_in_training(used: list[int]) -> None:
    case = Case("2.1-t2v")
    model, inputs = case.model(), case.inputs()
    patch_model(model, EXACT)
    run(model, **inputs)
    model.requires_grad_(True)
    used.clear()
    model(**inputs)[0].square().sum().backward()
    assert not used
    assert model.blocks[0].attn1.to_q.weight.grad is not None


def test_a_deep_copy_plans_over_its_own_modules(used: list[int]) -> None:
    case = Case("2.1-t2v")
    model, inputs = case.model(), case.inputs()
    patch_model(model, EXACT)
    before = run(model, **inputs)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.blocks.parameters():
            parameter.zero_()
    assert relative(run(other, **inputs), before) > 1e-3
    assert torch.equal(run(model, **inputs), before)


@pytest.mark.parametrize("options", [{}, {"linear": "int8"}, {"attention": "exact"}], ids=str)
def test_plans_compute_and_say_what_the_public_operations_do(
    monkeypatch: pytest.MonkeyPatch, used: list[int], options: dict[str, Any]
) -> None:
    case = Case("2.1-t2v")
    model, inputs = case.model(torch.bfloat16), case.inputs(dtype=torch.bfloat16)
    report = patch_model(model, guard=False, **options)
    planned, said = run(model, **inputs), report.last_forward
    assert len(used) == 2
    monkeypatch.setattr(PlanSlot, "get", lambda *args: None)
    assert torch.equal(run(model, **inputs), planned)
    assert report.last_forward == said
    assert len(used) == 2


def test_a_guarded_forward_compares_the_plan_itself(
    monkeypatch: pytest.MonkeyPatch, used: list[int]
) -> None:
    case = Case("2.1-t2v")
    model, inputs = case.model(), case.inputs()
    expected = run(model, **inputs)
    own = FeedForwardRun.__call__

    def wrong(self: Any, *args: Any) -> Any:
        hidden, token = own(self, *args)
        return hidden * 1.5, token

    monkeypatch.setattr(FeedForwardRun, "__call__", wrong)
    report = patch_model(model)
    assert relative(run(model, **inputs), expected) < 0.02, "the author's code took its place"
    assert {record.path for record in report.guard if record.verdict == "given back"} == {
        "blocks.0.ffn",
        "blocks.1.ffn",
    }


class State:
    """What of a pair a plan rests on."""

    live = True


def _dtype(x: nn.Parameter) -> None:
    x.data = x.data.double()


def _strides(x: nn.Parameter) -> None:
    x.data = x.data.t()


def _shape(x: nn.Parameter) -> None:
    x.data = x.data.view(4, 16)


@pytest.mark.parametrize("change", [_dtype, _strides, _shape], ids=lambda c: c.__name__)
def test_a_look_sees_how_a_tensor_that_kernels_read_lies_in_memory(
    change: Callable[[nn.Parameter], None],
) -> None:
    block = nn.Sequential(nn.Linear(8, 8))
    watch = Watch(block, (), lambda state: None, [block[0].weight])
    assert watch.holds()
    change(block[0].weight)
    assert not watch.holds()


def test_a_look_sees_what_the_guard_decided() -> None:
    state = State()
    watch = Watch(nn.Sequential(nn.Linear(8, 8)), (state,), lambda state: state.live)
    assert watch.holds()
    state.live = False
    assert not watch.holds()


def _no_shift(monkeypatch: pytest.MonkeyPatch) -> None:
    own = norm_forward.body

    def body(x: Any, factor: Any, offset: Any, one: float, *rest: Any) -> Any:
        return own(x, factor, None if one else offset, one, *rest)

    monkeypatch.setattr(norm_forward, "body", body)


def _gates(change: Callable[..., torch.Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    def mutate(monkeypatch: pytest.MonkeyPatch) -> None:
        own = project_forward.body

        def body(
            x: Any, weight: Any, bias: Any, like: Any, skip: Any, gate: Any, *rest: Any
        ) -> Any:
            gate = torch.ones(like.shape[0], 1, like.shape[-1]) if gate is None else gate
            return own(x, weight, bias, like, skip, change(gate, like).contiguous(), *rest)

        monkeypatch.setattr(project_forward, "body", body)

    return mutate


def _heads(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    def mutate(monkeypatch: pytest.MonkeyPatch) -> None:
        own = attention_forward.body

        def body(*args: Any) -> Any:
            out, lse = own(*args)
            return change(out.unflatten(-1, (args[15], -1))).flatten(-2), lse

        monkeypatch.setattr(attention_forward, "body", body)

    return mutate


def _fewer_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    own = attention_forward.body

    def body(*args: Any) -> Any:
        seen = torch.full((args[1].shape[0],), args[1].shape[1] - 4, dtype=torch.int32)
        return own(*args[:12], seen, *args[13:])

    monkeypatch.setattr(attention_forward, "body", body)


BROKEN = {
    "gate-0": (_gates(mutants.no_gate), ("attn1", "attn2", "ffn")),
    "shift-dropped": (_no_shift, ("attn1", "ffn")),
    "gates-of-1-percent": (_gates(mutants.gates_of_other_channels), ("attn1", "ffn")),
    "one-sample": (_gates(mutants.one_sample), ("attn1", "attn2", "ffn")),
    "one-head-scaled": (_heads(mutants.scaled), ("attn1", "attn2")),
    "two-heads-swapped": (_heads(mutants.swapped), ("attn1", "attn2")),
    "last-keys-dropped": (_fewer_keys, ("attn1",)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_in_a_plan_is_given_back(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    mutate, pairs = BROKEN[name]
    case = Case("2.1-t2v")
    model, inputs = case.model(), case.inputs(batch=2)
    expected = run(model, **inputs)
    mutate(monkeypatch)
    report = patch_model(model, attention="exact")
    output = run(model, **inputs)
    back = {record.path for record in report.guard if record.verdict == "given back"}
    assert {f"blocks.{i}.{pair}" for i in (0, 1) for pair in pairs} <= back
    assert relative(output, expected) < 0.02


def test_signatures_of_inputs_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gives another length every time must not fill the memory."""
    monkeypatch.setattr(plan_file, "_MOST_SIGNATURES", 4)
    monkeypatch.setattr(plan_file, "_numbers", {})
    with torch.no_grad():
        numbers = [plan_file.signature(torch.empty(n, 2)) for n in (1, 2, 3, 4, 5, 1, 5)]
    assert len(plan_file._numbers) <= 4
    assert len(set(numbers[:6])) == 6, "no number comes twice"
    assert numbers[6] == numbers[4]


def test_a_plan_asks_for_a_form_where_a_table_has_one(
    used: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody looks where no table names a form; the forms differ in rounding alone."""
    calls: list[str] = []
    original = branches.ops.attention_project_skip

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(kwargs["form"])
        return original(*args, **kwargs)

    monkeypatch.setattr(branches.ops, "attention_project_skip", counted)
    model = wan()
    with patched(model, PatchConfig(attention="int8", guard=False)):
        run(model)
        before, planned = run(model), len(used)
        assert planned and not calls
        monkeypatch.setattr(branches, "forms_measured", lambda: True)
        after = run(model)
    assert len(used) > planned and set(calls) == {"auto"}
    assert relative(after, before) < 1e-5
