"""After a change to the model, the patched model equals the unpatched one with the same change.

One table of changes, before patching and after it, with Linears as they are and in int8, eager and
compiled. Unpatching afterwards leaves the changed model bit for bit.
"""

from __future__ import annotations

import copy
import io
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import diffusers
import pytest
import torch
import torch.nn.functional as F
from accelerate import cpu_offload
from accelerate.hooks import attach_execution_device_hook
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from diffusers.models.normalization import CogVideoXLayerNormZero, FP32LayerNorm
from diffusers.models.transformers import transformer_wan
from peft import LoraConfig
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode

from tests.measures import relative_l2
from tests.patching.models import (
    ANYFLOWS,
    COG,
    WAN,
    blocks,
    classes,
    feed_forward,
    mapped,
    named,
    run,
)
from turbo_rcm_patch import (
    is_patched,
    patch_model,
    patched,
    refresh,
    report_of,
    unpatch_model,
)
from turbo_rcm_patch.errors import NothingToPatchError
from turbo_rcm_patch.patching import sla_as_defined

TIGHT = 3e-6
#: int8 weights and activations are off by 1 % a product; a change must not add to it.
INT8 = 0.05

CPU = torch.device("cpu")

Apply = Callable[[Any], Any]

# --- the changes ---------------------------------------------------------------------------------


def add_lora(model: Any, *names: str, dora: bool = False) -> None:
    torch.manual_seed(7)
    targets = ["to_q", "to_k", "to_v", "to_out.0", "net.2", "net.0.proj"]
    for name in names or ("default",):
        config = LoraConfig(
            r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, use_dora=dora
        )
        model.add_adapter(config, name)
    for name, parameter in model.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            nn.init.normal_(parameter, 0.0, 0.1)
    model.eval().requires_grad_(False)


def called(*calls: str, before: Apply = lambda model: None) -> Apply:
    """Functions of the model, one after another."""

    def change(model: Any) -> None:
        before(model)
        for name in calls:
            getattr(model, name)()

    return change


def scale_loras(model: Any) -> None:
    add_lora(model, "one", "two")
    model.set_adapters(["one", "two"], [0.5, 2.0])


def delete_lora(model: Any) -> None:
    add_lora(model, "one", "two")
    model.fuse_lora()
    model.unfuse_lora()
    model.delete_adapters("one")


def first(change: Apply) -> Apply:
    """A change of the first block."""
    return lambda model: change(blocks(model)[0])


def part(block: Any, path: str) -> Any:
    """A module of a block, by its path in Wan's."""
    return block.get_submodule(path if hasattr(block, "ffn") else path.replace("ffn", "ff"))


def larger(module: nn.Module, args: Any, output: Any) -> Any:
    return tuple(x * 1.25 for x in output) if isinstance(output, tuple) else output * 1.25


def hook(path: str) -> Apply:
    """A forward hook that changes what a module of the first block, or that block, returns."""
    return first(lambda block: part(block, path).register_forward_hook(larger))


def replace_linear(block: Any) -> None:
    torch.manual_seed(3)
    old = block.attn1.to_k
    new = nn.Linear(old.in_features, old.out_features).requires_grad_(False)
    block.attn1.to_k = new.to(old.weight.dtype)


class Doubled(nn.Module):
    """A module in the place of another."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **named: Any) -> Any:
        made = self.inner(*args, **named)
        return tuple(2 * x for x in made) if isinstance(made, tuple) else 2 * made


def wrap(path: str, kind: Callable[[nn.Module], nn.Module] = Doubled) -> Apply:
    def change(block: Any) -> None:
        parent, _, name = path.rpartition(".")
        name = name if hasattr(block, name) or parent else "ff"
        holder = block.get_submodule(parent)
        setattr(holder, name, kind(holder._modules[name]))

    return first(change)


def other_class(path: str) -> Apply:
    """A module of the first block, or that block, becomes one of a subclass."""

    def change(block: Any) -> None:
        module = part(block, path)
        cls = type(module)

        class Derived(cls):  # type: ignore[misc, valid-type]
            def forward(self, *args: Any, **named: Any) -> Any:
                return larger(self, args, cls.forward(self, *args, **named))

        module.__class__ = Derived

    return first(change)


class Own:
    """A processor of the user's own."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None,
        attention_mask: Any = None, rotary_emb: Any = None, image_rotary_emb: Any = None,
    ) -> Any:  # fmt: skip
        rotary = rotary_emb if image_rotary_emb is None else image_rotary_emb
        made = self.inner(attn, hidden_states, encoder_hidden_states, attention_mask, rotary)
        return larger(attn, (), made)


replace_processor = first(lambda b: setattr(b.attn1, "processor", Own(b.attn1.processor)))


def replace_forward(block: Any) -> None:
    linear = block.attn1.to_v
    own = linear.forward
    linear.forward = lambda x: own(x) * 0.5


@torch.no_grad()
def write_in_place(model: Any) -> None:
    for block in blocks(model):
        block.attn1.to_q.weight.mul_(-1.5)
        feed_forward(block).net[2].weight.add_(0.05)
        block.attn1.norm_k.weight.mul_(0.7)


def write_data(model: Any) -> None:
    for block in blocks(model):
        block.attn1.to_v.weight.data *= -1.5
    if "_turbo_rcm_patch" in vars(model):
        refresh(model)


def load(module: Any, **options: Any) -> None:
    torch.manual_seed(5)
    state = {k: v + 0.05 * torch.randn_like(v) for k, v in module.state_dict().items()}
    module.load_state_dict(state, **options)
    module.requires_grad_(False)


def replace_parameter(block: Any) -> None:
    attn = block.attn1
    attn.to_q.weight = nn.Parameter(attn.to_q.weight * -1.5, requires_grad=False)
    attn.norm_q.weight = nn.Parameter(attn.norm_q.weight * 0.5, requires_grad=False)


def step_an_optimizer(model: Any) -> None:
    torch.manual_seed(0)
    model.requires_grad_(True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    model.zero_grad()
    model.requires_grad_(False)


def cast_and_back(model: Any) -> None:
    model.to(torch.float64)
    model.to(torch.float32)


def swap_tensors(model: Any) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        cast_and_back(model)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def drop_biases(block: Any) -> None:
    first, _, *others = feed_forward(block).net
    for linear in (block.attn1.to_q, block.attn1.to_out[0], first.proj, *others):
        linear.bias = None


def change_epsilons(block: Any) -> None:
    for norm in (block.attn1.norm_q, block.attn1.norm_k, block.norm2):
        getattr(norm, "norm", norm).eps = 0.5


def other_norm(block: Any) -> None:
    if hasattr(block.norm2, "norm"):
        block.norm2.norm = nn.LayerNorm(128, eps=0.1, elementwise_affine=False)
    else:
        block.norm2 = nn.LayerNorm(128, eps=0.1).requires_grad_(False)


def prune_weights(block: Any) -> None:
    torch.manual_seed(0)
    for module in (block.attn1.to_q, block.attn1.norm_q):
        prune.random_unstructured(module, "weight", 0.5)


def replace_parameters_by_tensors(block: Any) -> None:
    """As torch's older weight_norm and pruning leave weights."""
    norm = [block.norm2] if hasattr(block, "ffn") else []
    for module in (*norm, block.attn1.norm_q, block.attn1.to_q, feed_forward(block).net[2]):
        module.weight = 2 * module._parameters.pop("weight").detach()


class Half(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def parametrize(block: Any) -> None:
    for module in (block.attn1.to_v, block.attn1.norm_k, feed_forward(block).net[0].proj):
        nn.utils.parametrize.register_parametrization(module, "weight", Half())


def offload(kind: str, **named: Any) -> Apply:
    return lambda model: model.enable_group_offload(
        onload_device=CPU, offload_device=CPU, offload_type=kind, **named
    )


def compile_blocks(model: Any, backend: str = "aot_eager") -> None:
    for block in blocks(model):
        block.compile(fullgraph=backend == "aot_eager", backend=backend)


def drop(path: str) -> Apply:
    """One dropout of the first block alone in training mode."""

    def change(block: Any) -> None:
        part(block, path).p = 0.5
        part(block, path).train()

    return first(change)


@dataclass(frozen=True)
class Change:
    """One row of the table.

    Attributes:
        name: For a reader.
        apply: Changes a model.
        before: Whether it can come before patching.
        wan: Whether it is for Wan alone.
    """

    name: str
    apply: Callable[[Any], None]
    before: bool = True
    wan: bool = False

    def __str__(self) -> str:
        return self.name


FUSE, UNFUSE = "fuse_qkv_projections", "unfuse_qkv_projections"
CHANGES = [
    Change("nothing", lambda model: None),
    Change("lora", add_lora),
    Change("loras-scaled", scale_loras),
    Change("dora", lambda model: add_lora(model, dora=True)),
    Change("lora-fused", called("fuse_lora", before=add_lora)),
    Change("lora-fused-and-unfused", called("fuse_lora", "unfuse_lora", before=add_lora)),
    Change("lora-unloaded", called("unload_lora", before=add_lora)),
    Change("lora-off", called("disable_adapters", before=add_lora)),
    Change("lora-deleted", delete_lora),
    Change("hook-linear", hook("attn1.to_v")),
    Change("hook-projection", hook("attn1.to_out.0")),
    Change("hook-dropout", hook("attn1.to_out.1")),
    Change("hook-norm-of-q", hook("attn1.norm_q")),
    Change("hook-norm", hook("norm2"), wan=True),
    Change("hook-cross-attention", hook("attn2"), wan=True),
    Change("hook-attention", hook("attn1")),
    Change("hook-feed-forward", hook("ffn")),
    Change("hook-gelu", hook("ffn.net.0")),
    Change("hook-block", hook("")),
    Change("hook-removed", first(lambda b: b.attn1.register_forward_hook(larger).remove())),
    Change("pre-hook-linear", first(lambda b: b.attn1.to_v.register_forward_pre_hook(
        lambda module, args: (args[0] * 0.5,)))),
    Change("other-linear", first(replace_linear)),
    Change("wrapped-linear", wrap("attn1.to_v")),
    Change("wrapped-norm-of-q", wrap("attn1.norm_q")),
    Change("wrapped-feed-forward", wrap("ffn")),
    *(Change(f"other-class-of-{path or 'block'}", other_class(path))
      for path in ("", "attn1", "attn1.to_v", "ffn", "ffn.net.0.proj", "norm2")),
    Change("other-norm", first(other_norm)),
    Change("no-norm-of-q", first(lambda b: setattr(b.attn1, "norm_q", nn.Identity()))),
    Change("other-epsilons", first(change_epsilons)),
    Change("exact-gelu", first(lambda b: setattr(part(b, "ffn.net.0"), "approximate", "none"))),
    Change("one-layer-more", first(lambda b: feed_forward(b).net.append(nn.Tanh()))),
    Change("no-biases", first(drop_biases)),
    Change("pruned", first(prune_weights)),
    Change("parametrized", first(parametrize)),
    Change("weights-are-no-parameters", first(replace_parameters_by_tensors), before=False),
    Change("one-block-less", lambda model: blocks(model).pop(0)),
    Change("blocks-turned-round", lambda model: blocks(model).insert(0, blocks(model).pop(1))),
    Change("own-processor", replace_processor),
    Change("own-forward", first(replace_forward), before=False),
    Change("written-in-place", write_in_place),
    Change("written-in-inference-mode", torch.inference_mode()(write_in_place)),
    Change("written-data", write_data),
    Change("optimizer", step_an_optimizer),
    Change("state-dict", load),
    Change("state-dict-assigned", partial(load, assign=True)),
    Change("state-dict-of-a-block", first(load)),
    Change("other-parameters", first(replace_parameter)),
    Change("fused-qkv", called(FUSE)),
    Change("fused-and-unfused-qkv", called(FUSE, UNFUSE)),
    Change("cast-and-back", cast_and_back),
    Change("swapped-tensors", swap_tensors),
    Change("layerwise-casting", lambda model: model.enable_layerwise_casting(
        storage_dtype=torch.bfloat16, compute_dtype=torch.float32)),
    Change("offloaded-blocks", offload("block_level", num_blocks_per_group=1)),
    Change("offloaded-leaves", offload("leaf_level")),
    # As `from_pretrained(device_map=...)` and `enable_sequential_cpu_offload` do.
    Change("moved-by-accelerate", lambda model: attach_execution_device_hook(model, CPU)),
    Change("offloaded-by-accelerate", lambda model: cpu_offload(model, CPU)),
    Change("dropout-of-attention", drop("attn1.to_out.1")),
    Change("dropout-of-cross-attention", drop("attn2.to_out.1"), wan=True),
    Change("dropout-of-feed-forward", drop("ffn.net.1")),
]  # fmt: skip
NAMED = {change.name: change for change in CHANGES}
_BOTH = ("WanTransformer3DModel", "CogVideoXTransformer3DModel")


#: Changes that leave the output as it is.
STILL = {"nothing", "lora-unloaded", "lora-off", "hook-removed", "fused-qkv",
          "fused-and-unfused-qkv", "cast-and-back", "swapped-tensors", "offloaded-blocks",
          "offloaded-leaves", "moved-by-accelerate", "offloaded-by-accelerate"}  # fmt: skip


def check(one: Any, change: Change, linear: str, order: str, compiled: bool = False) -> None:
    """The property, for one model."""
    unpatched, model, inputs = one.model(), one.model(), one.inputs()
    before = run(unpatched, inputs)
    change.apply(unpatched)
    if order == "change first":
        change.apply(model)
    options: Any = {"attention": "exact", "linear": linear, "fidelity": None}
    patch_model(model, **options)
    if compiled:
        torch._dynamo.reset()
        compile_blocks(model, "eager")
    run(model, inputs)  # with the guard, and int8 copies of the weights of now
    if order == "patch first":
        change.apply(model)
    expected, made = seeded_run(unpatched, inputs), seeded_run(model, inputs)
    assert (relative_l2(expected, before) > 10 * TIGHT) == (change.name not in STILL)
    assert relative_l2(made, expected) <= (TIGHT if linear == "as-is" else INT8)
    guard = report_of(model).guard
    assert compiled or not guard.decisions
    assert change.name not in STILL or not guard.skipped
    if change.name == "own-forward" and linear == "int8":
        return  # it is around our forward: refused, see test_undo
    unpatch_model(model)
    if compiled:
        torch._dynamo.reset()
    assert torch.equal(seeded_run(model, inputs), expected)


def seeded_run(model: Any, inputs: Any) -> Tensor:
    torch.manual_seed(0)
    return run(model, inputs)


def combinations() -> list[Any]:
    """Each change with each pair of model, order and kind of Linears, and all three of them over
    two changes; a change that is for some alone with all of those."""
    ways = product((WAN, COG), ("change first", "patch first"), ("as-is", "int8"))
    tried = []
    for (place, (one, order, linear)), (index, change) in product(
        enumerate(ways), enumerate(CHANGES)
    ):
        fits = (change.before or order == "patch first") and not (change.wan and one is COG)
        everywhere = change.before and not change.wan
        if fits and (not everywhere or (place.bit_count() + index) % 2 == 0):
            tried.append(pytest.param(one, change, order, linear))
    return tried


@pytest.mark.supports(_BOTH, "LoRA", "fused QKV", "offloading, casting", "torch.compile")
@pytest.mark.parametrize(("one", "change", "order", "linear"), combinations(), ids=str)
def test_a_patched_model_follows_a_change(
    one: Any, change: Change, order: str, linear: str
) -> None:
    check(one, change, linear, order)


@pytest.mark.supports(_BOTH, "offloading, casting")
@pytest.mark.parametrize("order", ["hooks first", "patch first"])
@pytest.mark.parametrize("change", ["moved-by-accelerate", "offloaded-by-accelerate"])
@pytest.mark.parametrize("name", ["t2v", "sla", "skyreels", "vace", "cogvideox-5b"])
def test_hooks_that_only_move_tensors_are_looked_through(
    name: str, change: str, order: str
) -> None:
    """Blocks run fused, and are compared. Accelerate leaves no weight of the last Linear to read,
    so all of the stream counts."""
    model, inputs = named(name).model(), named(name).inputs()
    with sla_as_defined(model, 0.1):
        expected = run(model, inputs)
    if order == "hooks first":
        NAMED[change].apply(model)
    report = patch_model(model, attention="exact", linear="int8", fidelity=1e3)
    if order == "patch first":
        NAMED[change].apply(model)
    assert relative_l2(run(model, inputs), expected) <= INT8
    assert set(report.last_forward) == {"fused with exact attention, int8 Linears"}
    assert "offloaded" in change or any(pair.int8_linears for pair in report.pairs)
    assert len(report.guard) == len(report.ran()) and not report.guard.skipped
    assert report.guard.prediction is not None


# --- around a forward ----------------------------------------------------------------------------


class Larger(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 1.25 if func is F.scaled_dot_product_attention else out


AROUND: dict[str, Callable[[list[Any]], Any]] = {
    "function mode": lambda seen: Larger(),
    "autocast": lambda seen: torch.autocast("cpu", torch.bfloat16),
    "hook": lambda seen: nn.modules.module.register_module_forward_hook(
        lambda module, args, output: seen.append(type(module))
    ),
    "float64": lambda seen: nullcontext(),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("one", [WAN, COG, named("turbo")], ids=str)
def test_what_is_around_a_forward_has_the_authors_code(one: Any, around: str) -> None:
    """A hook for all modules sees the modules that the author calls."""
    dtype = torch.float64 if around == "float64" else torch.float32
    unpatched, model, inputs = one.model(), one.model(), one.inputs()
    inputs = mapped(inputs, lambda x: x.to(dtype) if x.is_floating_point() else x)
    report = patch_model(model)
    seen: list[list[Any]] = [[], []]
    outputs = []
    for each, of_each in zip((unpatched.to(dtype), model.to(dtype)), seen, strict=True):
        with AROUND[around](of_each):
            outputs.append(run(each, inputs))
    assert torch.equal(*outputs) and seen[0] == seen[1]
    assert all(around in words for words in report.ran().values())


@pytest.mark.supports((*_BOTH, "AnyFlowTransformer3DModel"), "training")
@pytest.mark.parametrize(
    ("name", "wanted", "linear"),
    [*product(["t2v", "cogvideox-5b", "anyflow"], ["weights", "checkpointing"], ["as-is", "int8"]),
     ("rcm", "weights", "as-is"), ("rcm-projection", "weights", "as-is"),
     ("t2v", "encoder_hidden_states", "as-is"), ("i2v", "encoder_hidden_states_image", "as-is"),
     ("cogvideox-5b", "encoder_hidden_states", "as-is"), ("turbo", "context", "as-is"),
     ("turbo", "e", "as-is"), ("rcm-projection", "t", "as-is")],
)  # fmt: skip
def test_gradients_are_the_authors(name: str, wanted: str, linear: Any) -> None:
    """Of all weights, or of one input of a frozen model."""
    gradients = []
    for with_patch in (False, True):
        model, inputs = named(name).model(), named(name).inputs()
        if wanted in inputs:
            inputs[wanted].requires_grad_()
        else:
            model.train().requires_grad_(True)
        if wanted == "checkpointing":
            model.enable_gradient_checkpointing()
        if with_patch:
            patch_model(model, linear=linear)
        made = model(**inputs)
        (made if isinstance(made, Tensor) else made[0]).square().mean().backward()
        held = [inputs[wanted]] if wanted in inputs else model.parameters()
        gradients.append([x.grad for x in held])
    assert all("gradient" in words for words in report_of(model).ran().values())
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


def test_forward_mode_and_vmap_are_the_authors() -> None:
    one = named("rcm-projection")
    model, inputs = one.model(), one.inputs()
    x, t = inputs["x"], inputs["t"]
    tangent = torch.randn_like(x)

    def of(x: Tensor) -> Any:
        return model(x, t)

    with sdpa_kernel(SDPBackend.MATH):  # torch's others have no forward derivative
        expected = torch.func.jvp(of, (x,), (tangent,))
        with patched(model):
            made = torch.func.jvp(of, (x,), (tangent,))
    assert torch.equal(made[0], expected[0])
    assert torch.equal(made[1], expected[1])


@pytest.mark.supports(("WanTransformer3DModel",), "gate per token")
def test_other_batches_lengths_and_texts() -> None:
    model = WAN.model()
    twin = copy.deepcopy(model)
    patch_model(model, attention="exact")
    for batch, frames, text in ((1, 3, 7), (3, 2, 11), (2, 5, 1), (1, 1, 512)):
        inputs = WAN.inputs(batch)
        noise = torch.Generator().manual_seed(frames)
        inputs["hidden_states"] = torch.randn(batch, 4, frames, 8, 10, generator=noise)
        inputs["encoder_hidden_states"] = torch.randn(batch, text, 16, generator=noise)
        assert relative_l2(run(model, inputs), run(twin, inputs)) <= TIGHT


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved])  # which pickles
@pytest.mark.parametrize("linear", ["as-is", "int8"])
def test_copies_of_a_patched_model_run_their_own_weights(copied: Any, linear: Any) -> None:
    model, inputs = WAN.model(), WAN.inputs()
    patch_model(model, linear=linear)
    expected = run(model, inputs)
    twin = copied(model)
    assert torch.equal(run(twin, inputs), expected)
    write_in_place(twin)
    assert relative_l2(run(twin, inputs), expected) > 0.05
    assert torch.equal(run(model, inputs), expected)
    unpatch_model(twin)
    assert "forward" not in vars(twin.blocks[0])
    assert torch.equal(run(model, inputs), expected)


CACHES: dict[str, Callable[[], Any]] = {
    "first-block": lambda: diffusers.FirstBlockCacheConfig(threshold=0.5),
    "sea": lambda: diffusers.SeaCacheConfig(
        threshold=0.5,
        raw_vision_callback=lambda module, args, named: [*named["hidden_states"].unbind()],
    ),
    "pyramid-attention-broadcast": lambda: diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(100, 950),
        current_timestep_callback=lambda: 900,
    ),
}


@pytest.mark.supports(_BOTH, "FirstBlockCache, SeaCache", "PAB, FasterCache")
@pytest.mark.parametrize("order", ["cache first", "patch first"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("one", [WAN, COG], ids=str)
def test_a_cache_of_diffusers_caches_what_it_would_unpatched(
    one: Any, cache: str, order: str
) -> None:
    """A cache of attentions hooks them, so their blocks run their authors' code. The report knows
    which blocks a cache skipped."""
    outputs: list[list[Tensor]] = []
    calls: Counter[int] = Counter()
    for with_patch in (False, True):
        model, inputs = one.model(), one.inputs()
        if order == "cache first":
            model.enable_cache(CACHES[cache]())
        if with_patch:
            patch_model(model, attention="exact")
        if order == "patch first":
            model.enable_cache(CACHES[cache]())
        for index, block in enumerate(() if with_patch else blocks(model)):
            block.attn1.to_out[0].register_forward_hook(
                lambda *_, index=index: calls.update([index])
            )
        outputs.append([])
        for step in range(4):
            time = {"step_index": step, "sigma": 1 - 0.2 * step, "num_inference_steps": 4}
            with model.cache_context("cond", **time):
                moved = {**inputs, "hidden_states": inputs["hidden_states"] * (1 + 0.01 * step)}
                outputs[-1].append(run(model, moved))
    hooked = cache == "pyramid-attention-broadcast"
    for theirs, ours in zip(*outputs, strict=True):
        assert relative_l2(ours, theirs) <= (0 if hooked else TIGHT)
    if is_patched(model):
        report = report_of(model)
        words = report.ran().values()
        if not hooked:
            assert calls.total() < 8
            skipped = [calls[index] < calls[0] for index in range(2)]
            assert len(words) == 2 - sum(skipped)
        assert not hooked or all("attn1 has " in one for one in words)
        unpatch_model(model)
        model.disable_cache()
        assert relative_l2(run(model, inputs), run(one.model(), inputs)) <= TIGHT


# --- code in the place of a function ------------------------------------------------------------

_WAN_BLOCK, _COG_BLOCK = WAN.model().blocks[0], COG.model().transformer_blocks[0]
#: Functions of classes: (model, owner, name).
OF_CLASSES: list[tuple[Any, Any, str]] = [
    *((WAN, type(part), "forward") for part in (_WAN_BLOCK, _WAN_BLOCK.attn1)),
    (WAN, type(_WAN_BLOCK.attn1), "__call__"),
    (WAN, type(_WAN_BLOCK.attn1.processor), "__call__"),
    (WAN, GELU, "gelu"),
    *((WAN, cls, "forward")
      for cls in (FeedForward, FP32LayerNorm, GELU, nn.RMSNorm, nn.Linear, nn.Dropout)),
    *((COG, type(part), "forward") for part in (_COG_BLOCK, _COG_BLOCK.attn1)),
    (COG, type(_COG_BLOCK.attn1.processor), "__call__"),
    *((COG, cls, "forward")
      for cls in (CogVideoXLayerNormZero, nn.Linear, nn.LayerNorm, GELU, nn.SiLU, nn.Dropout)),
]  # fmt: skip
#: Functions of torch and of an author's file.
OF_FILES: list[tuple[Any, Any, str]] = [
    *product((WAN, COG), (F,), ("gelu", "linear", "layer_norm")),
    (WAN, F, "rms_norm"),
    *((named(name), transformer_wan, "dispatch_attention_fn") for name in ("t2v", "i2v")),
    *((named(name), F, "scaled_dot_product_attention")
      for name in ("t2v", "i2v", "cogvideox-5b", "turbo")),
]  # fmt: skip
#: Classes beside a Linear: int8 copies and rows depend on them.
_BESIDE_LINEARS = (FeedForward, FP32LayerNorm, GELU, nn.RMSNorm, nn.Linear, CogVideoXLayerNormZero,
                   nn.LayerNorm)  # fmt: skip


@pytest.mark.parametrize("order", ["replaced first", "patched first"])
@pytest.mark.parametrize(
    ("one", "owner", "name", "linear"),
    [(*row, "as-is") for row in (*OF_CLASSES, *OF_FILES)]
    + [(*row, "int8") for row in OF_CLASSES if row[1] in _BESIDE_LINEARS],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_a_replaced_function_is_called_as_often_as_unpatched(
    one: Any, owner: Any, name: str, order: str, linear: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = getattr(owner, name), []

    def replacement(*args: Any, **named: Any) -> Any:
        calls.append(1)
        return larger(one, (), original(*args, **named))

    unpatched, model, inputs = one.model(), one.model(), one.inputs()
    before, tight = run(unpatched, inputs), TIGHT if linear == "as-is" else INT8
    if order == "patched first":
        patch_model(model, attention="exact", linear=linear)
        run(model, inputs)
    with monkeypatch.context() as context:
        context.setattr(owner, name, replacement)
        expected, count = run(unpatched, inputs), len(calls)
        if order == "replaced first":
            with suppress(NothingToPatchError):
                patch_model(model, attention="exact", linear=linear, guard=False)
        # The guard would call a class's function again in later forwards, and no other.
        for _ in range(1 if isinstance(owner, type) else 5):
            calls.clear()
            assert relative_l2(run(model, inputs), expected) <= tight
            assert len(calls) == count > 0
    assert relative_l2(expected, before) > 100 * TIGHT
    # Once the function is its author's again, a model is patched as if nothing had been.
    fresh = one.model()
    report = patch_model(fresh, attention="exact", linear=linear, guard=False)
    assert relative_l2(run(fresh, inputs), before) <= tight
    assert report.fused == len(report.pairs)


@pytest.mark.parametrize(("one", "owner", "name"), OF_FILES[-6:], ids=lambda x: str(x)[:40])
def test_a_replaced_attention_is_named_where_int8_was_asked_for(
    one: Any, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs, original = one.model(), one.inputs(), getattr(owner, name)
    before = run(model, inputs)
    monkeypatch.setattr(owner, name, lambda *args, **named: original(*args, **named) * 1.25)
    report = patch_model(model, attention="int8")
    assert relative_l2(run(model, inputs), before) < 0.03
    assert f"{name}' is chosen and not used" in str(report)
    assert "not run a second time" in str(report.guard) and not report.guard.decisions


def set_on(path: str, name: str, value: Any) -> Any:
    """Set an attribute of a module of the first block; a function makes it of the old one."""

    def change(block: nn.Module) -> None:
        module = block.get_submodule(path)
        old = getattr(module, name, None)
        setattr(module, name, value(old) if callable(value) else value)

    return change


def hook_on(path: str) -> Any:
    return lambda block: block.get_submodule(path).register_forward_hook(lambda m, a, y: 1.25 * y)


def attend_twice(own: Any) -> Any:
    return lambda q, k, v, *rest: 2 * own(q, k, v)


TURBO_CHANGES = [
    ("turbo", hook_on("self_attn"), "self_attn has torch hooks"),
    ("turbo", hook_on("cross_attn"), "cross_attn has torch hooks"),
    ("turbo", hook_on("ffn"), "ffn has torch hooks"),
    ("turbo", hook_on("self_attn.attn_op"), "attn_op of self_attn"),
    ("turbo", hook_on("cross_attn.attn_op"), "attn_op of cross_attn"),
    ("turbo-i2v", hook_on("cross_attn.attn_op_image"), "attn_op of cross_attn"),
    ("turbo", set_on("cross_attn.attn_op", "local_attn", attend_twice), "its local attention"),
    ("turbo-i2v", set_on("cross_attn.attn_op_image", "local_attn", attend_twice), "its local"),
    ("turbo", set_on("ffn.1", "approximate", "none"), "ffn is a Sequential"),
    ("turbo", lambda block: setattr(block, "ffn", Counts(block.ffn)), "ffn is a Counts"),
    ("turbo-sla", hook_on("self_attn.attn_op.local_attn"), "proj_l has a hook"),
    ("turbo-sla", set_on("self_attn.attn_op.local_attn", "feature_map_k",
                         lambda own: lambda x: F.elu(x) + 1), "its feature map"),
    ("turbo-sla", set_on("self_attn.attn_op.local_attn", "BLKQ", 100), "blocks of 100 by 64"),
    ("turbo-sla", set_on("self_attn.attn_op.local_attn", "BLKK", 100), "blocks of 128 by 100"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "words"), TURBO_CHANGES)
def test_what_is_not_turbodiffusions_is_called(name: str, change: Any, words: str) -> None:
    one = named(name)
    unpatched, model, inputs = one.model(), one.model(), one.inputs()
    for each in (unpatched, model):
        del each.blocks[1]
    before = run(unpatched, inputs)
    for each in (unpatched, model):
        change(each.blocks[0]._checkpoint_wrapped_module)
    expected = run(unpatched, inputs)
    assert relative_l2(expected, before) > 10 * TIGHT
    assert words in str(patch_model(model))
    assert torch.equal(run(model, inputs), expected)


# --- inside a block ------------------------------------------------------------------------------


class Counts(nn.Module):
    """A wrapper with a state."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, *args: Any, **named: Any) -> Any:
        self.calls += 1
        return self.inner(*args, **named) * (1 + 0.1 * self.calls)


def count_calls(block: Any) -> None:
    calls = []

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        calls.append(1)
        return output * (1 + 0.1 * len(calls))

    block.attn1.to_out[0].register_forward_hook(hook)


def count_forwards(block: Any) -> None:
    calls: list[int] = []
    own = block.attn1.to_v.forward
    block.attn1.to_v.forward = lambda x: own(x) * (calls.append(1) or len(calls))


def cache_taylor(model: Any) -> None:
    from diffusers import TaylorSeerCacheConfig

    config = {"cache_interval": 3, "disable_cache_before_step": 1}
    model.enable_cache(
        TaylorSeerCacheConfig(cache_identifiers=[r"blocks\.\d+\.ffn\.net\.2"], **config)
    )


STATES = {
    "hook": first(count_calls),
    "random": lambda model: blocks(model)[1].attn1.to_v.register_forward_pre_hook(
        lambda module, args: (args[0] * torch.rand(()),)
    ),
    "to_out.0": wrap("attn1.to_out.0", Counts),
    "norm2": wrap("norm2", Counts),
    "forward": first(count_forwards),
    "taylor": cache_taylor,
}


@pytest.mark.parametrize("order", ["changed first", "patched first"])
@pytest.mark.parametrize("name", STATES)
def test_what_keeps_a_state_inside_a_block_runs_once_a_call(name: str, order: str) -> None:
    made = []
    for is_ours in (False, True):
        model, inputs = WAN.model(), WAN.inputs()
        if is_ours and order == "patched first":
            patch_model(model, attention="exact")
        STATES[name](model)
        if is_ours and order == "changed first":
            patch_model(model, attention="exact")
        torch.manual_seed(3)
        outputs = []
        for step in range(8):
            moved = {**inputs, "hidden_states": inputs["hidden_states"] * (1 + 0.1 * step)}
            with model.cache_context("cond"):
                outputs.append(run(model, moved))
        made.append(outputs)
        if is_ours:
            assert "which is not run a second time" in str(report_of(model).guard)
            assert not report_of(model).guard.decisions
    for theirs, ours in zip(*made, strict=True):
        assert relative_l2(ours, theirs) <= TIGHT


# --- compiled ------------------------------------------------------------------------------------


@pytest.mark.supports(classes([WAN, COG, *ANYFLOWS]), "torch.compile")
@pytest.mark.parametrize(
    ("name", "linear", "whole"),
    [("t2v", "as-is", False), ("t2v", "as-is", True),
     *((name, "int8", False) for name in ("cogvideox-5b", "vace", "anyflow", "anyflow-far"))],
)  # fmt: skip
def test_blocks_compile_once_without_a_break_to_the_same_bits(
    name: str, linear: Any, whole: bool
) -> None:
    """Of a model that is compiled as a whole the bits are the same."""
    one = named(name)
    model, inputs = one.model(torch.bfloat16), one.inputs(dtype=torch.bfloat16)
    blocks(model).extend(copy.deepcopy(blocks(model)[1]) for _ in range(2))
    patch_model(model, attention="int8", linear=linear, guard=False)
    expected = run(model, inputs)
    torch._dynamo.reset()
    if whole:
        model = torch.compile(model, backend="aot_eager")
    else:
        compile_blocks(model)
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    assert torch.equal(run(model, inputs), expected)
    # The first block may get a tensor of other strides than the blocks after it.
    assert whole or stats["unique_graphs"] - before <= 2
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "order", "linear"),
    [("lora", "change first", "int8"), ("written-in-place", "patch first", "int8"),
     ("other-parameters", "patch first", "as-is")],
)  # fmt: skip
def test_compiled_blocks_follow_a_change(name: str, order: str, linear: str) -> None:
    """Hooks on some of the blocks are not in it: torch shares a compiled graph among blocks
    without a look at their hooks, patched or not."""
    check(WAN, NAMED[name], linear, order, compiled=True)


@pytest.mark.parametrize(
    ("one", "change"),
    [*product((WAN,), ("hook-feed-forward", "own-processor", "hook-attention")),
     (COG, "own-processor")],
    ids=str,
)  # fmt: skip
def test_a_compiled_model_keeps_hooks_and_processors(one: Any, change: str) -> None:
    unpatched, model, inputs = one.model(), one.model(), one.inputs()
    for each in (unpatched, model):
        NAMED[change].apply(each)
    patch_model(model, attention="exact", guard=False)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert relative_l2(run(compiled, inputs), run(unpatched, inputs)) <= TIGHT
    torch._dynamo.reset()


def test_a_new_patch_of_a_compiled_model_is_taken() -> None:
    model, inputs = WAN.model(), WAN.inputs()
    expected = run(model, inputs)
    torch._dynamo.reset()
    compile_blocks(model)
    assert torch.equal(run(model, inputs), expected)
    patch_model(model, attention="exact", guard=False)
    assert relative_l2(run(model, inputs), expected) <= TIGHT
    unpatch_model(model)
    assert torch.equal(run(model, inputs), expected)
    torch._dynamo.reset()
