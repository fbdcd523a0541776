"""Random models of every family, and random orders of what a user does with them.

A twin goes through the same without ever being patched. After each step both give the same
output: the same bits while the model is not patched, and as near as its options promise while it
is. At the end nothing of the patch is left.
"""

from __future__ import annotations

import copy
import pickle
import random
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.hooks import remove_hook_from_module
from diffusers import FirstBlockCacheConfig, PyramidAttentionBroadcastConfig
from peft import LoraConfig
from torch import Tensor, nn

from tests.fuzz.draw import Mismatch
from tests.patching import cogvideox, sla, turbodiffusion, wan, wan_family
from turbo_rcm_patch import (
    PatchConfig,
    find_pairs,
    is_patched,
    patch_model,
    patched,
    refresh,
    report_of,
    unpatch_model,
)
from turbo_rcm_patch.errors import AlreadyPatchedError, NotPatchedError
from turbo_rcm_patch.models.rcm_attention import RCMAttention
from turbo_rcm_patch.patching.record import record_of

__all__ = ["SUBJECTS", "Pair", "run_orders"]

STEPS = 6
#: Relative L2 of the network's output. "exact": torch's own attention; sums in another order.
EXACT = {torch.float32: 1e-5, torch.bfloat16: 0.03}
#: With int8 attention or Linears.
INT8 = 0.06
#: What a patched model has beside its forward, and nobody else leaves.
ON_MODELS = ("_apply", "load_state_dict", "save_pretrained", "enable_parallelism")
#: Of the gradient of one parameter, the same.
GRADIENTS = {"exact": 2e-4, "int8": 0.2}


@dataclass(frozen=True)
class Subject:
    """A model to be made as often as wanted, and its inputs.

    Attributes:
        build: Makes it, always with the same weights.
        inputs: Of a batch, in a dtype.
        module: Name of the list of blocks.
        targets: What a LoRA may sit on; empty where peft cannot add one.
        caches: Which caches its class has.
        qkv: Whether its projections can be fused.
        sla: Whether its self-attention holds a proj_l.
        casts: Whether it may run in another dtype.
        trains: Whether its gradient is defined.
        batch: Largest batch of its inputs.
        offloads: Whether accelerate can offload it: not under torch's checkpoint wrappers.
    """

    name: str
    build: Callable[[], Any]
    inputs: Callable[[int, torch.dtype], dict[str, Any]]
    module: str = "blocks"
    targets: tuple[tuple[str, ...], ...] = ()
    caches: tuple[str, ...] = ()
    qkv: bool = False
    sla: bool = False
    casts: bool = True
    trains: bool = True
    batch: int = 2
    offloads: bool = True
    fp32: tuple[str, ...] = field(default=("timestep", "e", "t", "image_rotary_emb"))


WAN_LORA = (("to_q", "to_out.0"), ("net.2", "to_k", "to_v"), ("ffn.net.0.proj",))
COG_LORA = (("to_q", "to_out.0"), ("ff.net.2", "to_k"))


def _sizes(d: random.Random, *dims: int) -> dict[str, Any]:
    """Heads, layers and widths."""
    return {
        "num_attention_heads": d.choice([1, 2, 3]),
        "attention_head_dim": d.choice(dims),
        "num_layers": d.choice([1, 2, 2, 3]),
    }


def _wan(d: random.Random) -> Subject:
    config = _sizes(d, 12, 16, 24, 32, 64) | {
        "ffn_dim": d.choice([32, 48, 96]), "cross_attn_norm": d.random() < 0.7,
    }  # fmt: skip
    inner = config["num_attention_heads"] * config["attention_head_dim"]
    image, per_token, holds = d.random() < 0.25, d.random() < 0.2, d.random() < 0.15
    if image:
        config |= {"image_dim": 16, "added_kv_proj_dim": inner}
    frames, rows, columns = d.choice([1, 2, 3]), d.choice([2, 4, 8]), d.choice([2, 6, 10])
    text = 512 if image else d.choice([1, 7, 12])

    def build() -> Any:
        made = wan.wan(**config)
        return sla.with_sla(made) if holds else made

    def inputs(batch: int, dtype: torch.dtype) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(batch)

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        tokens = frames * rows * columns // 4
        given = {
            "hidden_states": noise(batch, 4, frames, rows, columns),
            "timestep": torch.tensor([500.0, 900.0][:batch]),
            "encoder_hidden_states": noise(batch, text, 16),
            "return_dict": False,
        }
        if image:
            given["encoder_hidden_states_image"] = noise(batch, 5, 16)
        if per_token:
            given["timestep"] = torch.rand(batch, tokens, generator=generator) * 1000
        return given

    return Subject(
        "wan" + "-image" * image + "-sla" * holds, build, inputs, targets=WAN_LORA,
        caches=("broadcast",) + ("first-block",) * (config["num_layers"] > 1), qkv=True,
        sla=holds, casts=not holds, trains=not holds,
    )  # fmt: skip


def _wan_family(d: random.Random) -> Subject:
    family = d.choice(wan_family.FAMILIES)
    config = _sizes(d, 12, 16, 32)
    if "added_kv_proj_dim" in family.config:
        inner = config["num_attention_heads"] * config["attention_head_dim"]
        config["added_kv_proj_dim"] = inner
    if "vace_layers" in family.config or "inject_face_latents_blocks" in family.config:
        config["num_layers"] = 2
    made = replace(family, config=family.config | config)
    name = family.cls.__name__
    caches = ("first-block",) if "VACE" in name and config["num_layers"] > 1 else ()
    return Subject(
        family.name, made.model, made.inputs, targets=WAN_LORA[:2], caches=caches,
        qkv=not family.fuse_qkv, batch=family.batch,
        # Its text encoder's length and its faces are cast by its pipeline, not by itself.
        casts=False,
    )  # fmt: skip


def _cogvideox(d: random.Random) -> Subject:
    # That with faces takes a second.
    case = d.choice(cogvideox.CASES if d.random() < 0.1 else cogvideox.CASES[:-1])
    config = {} if "is_train_face" in case.config else _sizes(d, 16, 32, 64)
    made = replace(case, config=case.config | config)
    caches = ("first-block",) if not case.consisid and config["num_layers"] > 1 else ()
    return Subject(
        f"cogvideox-{case.name}", made.model, made.inputs, module="transformer_blocks",
        targets=() if case.consisid else COG_LORA, caches=caches,
        qkv=not case.fuse_qkv, casts="is_train_face" not in case.config,
    )  # fmt: skip


def _turbodiffusion(d: random.Random) -> Subject:
    heads, image = d.choice([1, 2, 3]), d.random() < 0.3
    dim = heads * d.choice([8, 16, 32, 64])
    tokens, layers = d.choice([1, 30, 60, 150]), d.choice([1, 2])
    sparse, fast = d.choice(["", "", "sla"]), d.random() < 0.3
    options = {
        "qk_norm": d.random() < 0.8,
        "cross_norm": d.random() < 0.7,
        "checkpoint": d.random() < 0.4,
    }

    def build() -> Any:
        made = turbodiffusion.tiny(dim=dim, num_heads=heads, layers=layers, image=image, **options)
        made = turbodiffusion.with_fast_norms(made) if fast else made
        return turbodiffusion.with_sparse(made, topk=1.0) if sparse else made

    def inputs(batch: int, dtype: torch.dtype) -> dict[str, Any]:
        return turbodiffusion.tiny_inputs(
            batch=batch, tokens=tokens, image=image, dim=dim, dtype=dtype
        )

    return Subject(
        "turbodiffusion" + "-image" * image + "-sla" * bool(sparse), build, inputs,
        casts=not sparse, trains=not sparse, offloads=not (options["checkpoint"] or sparse),
    )  # fmt: skip


def _rcm(d: random.Random) -> Subject:
    heads = d.choice([1, 2, 4])
    dim, projection = heads * d.choice([8, 16, 40, 64]), d.random() < 0.6
    tokens = d.choice([1, 33, 77, 200])

    def build() -> Any:
        torch.manual_seed(0)
        return RCMAttention(dim, heads, projection=projection).eval().requires_grad_(False)

    def inputs(batch: int, dtype: torch.dtype) -> dict[str, Any]:
        x = torch.randn(batch, tokens, dim, generator=torch.Generator().manual_seed(1))
        return {"x": x.to(dtype), "t": torch.tensor([0.3, 1.2][:batch])}

    return Subject("rcm" + "-projected" * projection, build, inputs, module="", casts=True)


#: Every family, with its share of the cases.
SUBJECTS: tuple[Callable[[random.Random], Subject], ...] = (
    _wan, _wan, _wan_family, _wan_family, _cogvideox, _turbodiffusion, _rcm,
)  # fmt: skip


def _config(d: random.Random, subject: Subject, device: torch.device) -> PatchConfig:
    """Options whose result has a budget."""
    attention = d.choice(["exact", "exact", "auto", "int8"])
    guard = d.random() < 0.5
    given: dict[str, Any] = {
        "attention": attention,
        "guard": guard,
        "linear": d.choice(["as-is", "as-is", "int8"]),
        "pv": d.choice(["auto", "bf16", "fp16"]),
        "smooth_k": d.random() < 0.8,
        "sla_topk": sla.TOPK,
    }
    if attention != "exact":
        given["form"] = d.choice(["auto", "two-launch", "one-launch"])
        if given["form"] == "one-launch":
            given["attention"] = "int8"
        if guard and d.random() < 0.4:
            given |= {
                "precision": d.choice(["auto", "auto", "fixed"]),
                "guard_budget": d.choice([1e-4, 0.02, 0.1]),
                "fidelity": d.choice([1.0, 1.1, 2.0]),
            }
    if d.random() < 0.2:
        pairs = {pair.kind for pair in find_pairs(subject.build()) if pair.fused}
        some = set(d.sample(sorted(pairs), d.randint(1, len(pairs))))
        if some == {"image"}:  # It is part of a cross-attention, and there is nothing without.
            some.add("cross")
        given["kinds"] = tuple(sorted(some))
    given["cuda_graphs"] = device.type == "cuda" and d.random() < 0.25
    return PatchConfig(**given)


class Pair:
    """A model that may be patched, and its twin that never is."""

    def __init__(
        self,
        subject: Subject,
        configs: list[PatchConfig],
        chance: random.Random,
        device: torch.device,
    ) -> None:
        self.subject, self.configs = subject, configs
        self.chance, self.device = chance, device
        self.ours, self.twin = (subject.build().to(device) for _ in range(2))
        self.processors = [block.attn1.processor for block in self.twin.blocks] if (
            subject.sla
        ) else []  # fmt: skip
        self.config: PatchConfig | None = None
        self.lora = self.fused = self.offloaded = self.qkv = self.apart = False
        self.layerwise = self.strided = False
        self.cached = ""
        self.hooks: list[Any] = []
        self.dtype = torch.float32
        self.batch = 1

    @property
    def both(self) -> tuple[Any, Any]:
        return self.ours, self.twin

    def operations(self) -> list[Callable[[], None]]:
        """What may follow now."""
        s = self.subject
        free = not (self.offloaded or self.cached or self.hooks or self.layerwise)
        allowed = [self.forward, self.more, self.autocast]
        allowed += [self.inference, self.threaded, self.views, self.mode]
        if self.config:
            allowed += [self.unpatch, self.refreshed, self.twice]
            allowed += [self.decided] * 2 + [self.looked_at_again] * self.config.guard
            allowed += [self.calibrated] * (free and self.config.guard)
        else:
            allowed += [self.patch] * (10 if free else 4) + [self.not_patched]
        allowed += [self.gradient] * (s.trains and not self.offloaded and not self.cached)
        if free:
            allowed += [self.copied, self.write, self.move, self.saved, self.second]
            allowed += [self.offload] * s.offloads
            allowed += [self.hook, self.pickled, self.negate, self.turned, self.assigned]
            allowed += [self.replaced] * (not self.lora and not self.qkv)
            allowed += [self.processors_anew] * (s.qkv and not self.qkv and not s.sla)
            allowed += [self.layerwise_cast] * (bool(s.caches) and not self.lora and not s.sla)
            allowed += [self.swapped] * (s.casts and not self.lora)
            allowed += [self.cast] * (s.casts and not self.lora)
            allowed += [self.cache] * bool(s.caches)
            allowed += [self.add_lora] * (bool(s.targets) and not self.lora and not self.qkv)
            allowed += [self.fuse_qkv] * (s.qkv and not self.lora)
        if self.lora and free:
            allowed += [self.unfuse if self.fused else self.fuse, self.unload]
        allowed += [self.onload] * self.offloaded
        allowed += [self.uncache] * bool(self.cached)
        allowed += [self.unhook] * bool(self.hooks)
        if free and self.chance.random() < 0.01:
            allowed += [self.compiled] * 3
        return allowed

    # --- the patch -------------------------------------------------------------------------------

    def patch(self) -> None:
        self.config = self.chance.choice(self.configs)
        patch_model(self.ours, self.config)

    def unpatch(self) -> None:
        unpatch_model(self.ours)
        self.config = None

    def twice(self) -> None:
        try:
            patch_model(self.ours)
        except AlreadyPatchedError:
            return
        raise Mismatch("patching twice was accepted")

    def not_patched(self) -> None:
        for call in (unpatch_model, refresh, report_of):
            try:
                call(self.ours)
            except NotPatchedError:
                continue
            raise Mismatch(f"{call.__name__} of a model that is not patched was accepted")

    def refreshed(self) -> None:
        refresh(self.ours)

    def second(self) -> None:
        """Another model of the same class comes and goes."""
        other = self.subject.build().to(self.device)
        with patched(other, self.chance.choice(self.configs)):
            self.run(other, torch.float32)

    def decided(self) -> None:
        """What the guard may decide about a pair, at some time."""
        record = record_of(self.ours)
        assert record is not None
        state = self.chance.choice(record.plan.states)
        heads = [h for h in range(state.pair.heads) if self.chance.random() < 0.5]
        kind = self.chance.randrange(4)
        if kind == 0 and state.live:
            state.give_back("for a test")
        elif kind == 1 and heads:
            state.take_heads(heads, "for a test")
        elif kind == 2 and state.next_step is not None:
            state.take(state.next_step, "for a test")

    def looked_at_again(self) -> None:
        report_of(self.ours).guard.check_next()

    def calibrated(self) -> None:
        """What was chosen is kept in a file, and chosen again from it."""
        config = self.config
        assert config is not None
        with tempfile.TemporaryDirectory() as folder:
            kept = Path(folder, "kept.json")
            report_of(self.ours).save_calibration(kept)
            heads = report_of(self.ours).exact_heads
            unpatch_model(self.ours)
            report = patch_model(self.ours, replace(config, calibration=kept))
        if report.exact_heads != heads:
            raise Mismatch(f"calibrated to {report.exact_heads}, was {heads}")

    # --- what changes weights --------------------------------------------------------------------

    def add_lora(self) -> None:
        seed, targets = self.chance.randrange(100), self.chance.choice(self.subject.targets)
        for model in self.both:
            torch.manual_seed(seed)
            model.add_adapter(
                LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False)
            )
            model.eval().requires_grad_(False)
        self.lora = True

    def fuse(self) -> None:
        for model in self.both:
            model.fuse_lora()
        self.fused = True

    def unfuse(self) -> None:
        for model in self.both:
            model.unfuse_lora()
        self.fused = False

    def unload(self) -> None:
        for model in self.both:
            model.unload_lora()
        self.lora = self.fused = False

    def write(self) -> None:
        """Past the version counter, as averages and fused optimisers do."""
        seed = self.chance.randrange(100)
        for model in self.both:
            torch.manual_seed(seed)
            for parameter in model.parameters():
                parameter.data.mul_(1 + 0.1 * torch.randn(()).item())

    def negate(self) -> None:
        seed = self.chance.randrange(100)
        for model in self.both:
            linears = [m for m in model.modules() if type(m) is nn.Linear]
            linear = random.Random(seed).choice(linears)
            with torch.no_grad():
                linear.weight.neg_()

    def turned(self) -> None:
        """The same values in another order of memory."""
        for model in self.both:
            for module in model.modules():
                if type(module) is nn.Linear:
                    module.weight.data = module.weight.data.t().contiguous().t()

    def assigned(self) -> None:
        """Other tensors with the same values."""
        self.ours.load_state_dict(copy.deepcopy(self.ours.state_dict()), assign=True)
        self.ours.requires_grad_(False)
        self.twin.requires_grad_(False)

    def replaced(self) -> None:
        """Another Linear in the place of one."""
        seed = self.chance.randrange(1000)
        for model in self.both:
            names = [n for n, m in model.named_modules() if type(m) is nn.Linear]
            name = random.Random(seed).choice(names)
            old: Any = model.get_submodule(name)
            torch.manual_seed(seed)
            new = nn.Linear(old.in_features, old.out_features, old.bias is not None)
            new.to(self.device, old.weight.dtype).requires_grad_(False).eval()
            place, _, own = name.rpartition(".")
            setattr(model.get_submodule(place), own, new)

    def swapped(self) -> None:
        """There and back to another dtype, while torch swaps parameters for new ones."""
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            for model in self.both:
                model.to(torch.float64)
                model.to(self.dtype)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    def processors_anew(self) -> None:
        """New processors of the same classes."""
        for model in self.both:
            for module in model.modules():
                if "processor" in vars(module):
                    module.processor = type(module.processor)()

    def layerwise_cast(self) -> None:
        """Weights are kept in 8 bits and cast for each call."""
        for model in self.both:
            model.enable_layerwise_casting(torch.float8_e4m3fn, compute_dtype=self.dtype)
        self.layerwise = True

    def saved(self) -> None:
        """A state dict goes to a fresh model, and back."""
        if self.lora or self.qkv:
            return
        state = self.ours.state_dict()
        fresh = self.subject.build().to(self.device, self.dtype)
        fresh.load_state_dict(state)
        self.ours.load_state_dict(fresh.state_dict())

    def fuse_qkv(self) -> None:
        for model in self.both:
            if self.qkv and not self.apart:  # CogVideoX cannot be told twice.
                model.unfuse_qkv_projections()
            else:
                model.fuse_qkv_projections()
        # Unfusing leaves the fused Linears behind.
        self.apart, self.qkv = self.qkv and not self.apart, True

    # --- where the model is ----------------------------------------------------------------------

    def copied(self) -> None:
        old, self.ours = self.ours, copy.deepcopy(self.ours)
        with torch.no_grad():
            for parameter in old.parameters():
                parameter.zero_()

    def pickled(self) -> None:
        if "WanModel" in type(self.ours).__name__:
            return  # SLA's feature maps are functions inside a function.
        self.ours = pickle.loads(pickle.dumps(self.ours))

    def move(self) -> None:
        for parameter in self.ours.parameters():
            parameter.data = parameter.data.clone()

    def cast(self) -> None:
        self.dtype = torch.bfloat16 if self.dtype == torch.float32 else torch.float32
        for model in self.both:
            model.to(self.dtype)

    def offload(self) -> None:
        for model in self.both:
            accelerate.cpu_offload(model, execution_device=self.device)
        self.offloaded = True

    def onload(self) -> None:
        for model in self.both:
            remove_hook_from_module(model, recurse=True)
            model.to(self.device)
        self.offloaded = False

    # --- around the model ------------------------------------------------------------------------

    def cache(self) -> None:
        self.cached = self.chance.choice(self.subject.caches)
        for model in self.both:
            if self.cached == "first-block":
                model.enable_cache(FirstBlockCacheConfig(threshold=1e-9))
            else:
                model.enable_cache(
                    PyramidAttentionBroadcastConfig(
                        spatial_attention_block_skip_range=2,
                        spatial_attention_timestep_skip_range=(100, 800),
                        spatial_attention_block_identifiers=["blocks"],
                        current_timestep_callback=lambda: 900,
                    )
                )

    def uncache(self) -> None:
        for model in self.both:
            model.disable_cache()
        self.cached = ""

    def hook(self) -> None:
        """Somebody scales what a module returns."""
        seed = self.chance.randrange(1000)
        for model in self.both:
            modules = [m for m in model.modules() if type(m) in (nn.Linear, nn.LayerNorm)]
            module = random.Random(seed).choice(modules)
            self.hooks.append(module.register_forward_hook(lambda _, args, out: 1.25 * out))

    def unhook(self) -> None:
        while self.hooks:
            self.hooks.pop().remove()

    # --- what is looked at -----------------------------------------------------------------------

    def forward(self) -> None:
        pass

    def more(self) -> None:
        """Another batch from here on."""
        self.batch = 3 - self.batch

    def mode(self) -> None:
        """There is no dropout, so training is the same."""
        for model in self.both:
            model.train(not model.training)

    def views(self) -> None:
        """Inputs that are views with strides of their own from here on, or no longer."""
        self.strided = not self.strided

    def inference(self) -> None:
        self.compare(torch.inference_mode)

    def threaded(self) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self.compare).result()

    def autocast(self) -> None:
        """The author's code runs."""
        self.compare(lambda: torch.autocast(self.device.type, torch.bfloat16), autocast=True)

    def compiled(self) -> None:
        torch._dynamo.reset()
        if self.cached or self.offloaded:
            return
        expected = self.run(self.ours, self.dtype)
        out = self.run(torch.compile(self.ours, backend="eager"), self.dtype)
        torch._dynamo.reset()
        found = wan.relative(out.float(), expected.float())
        if found > (0.03 if self.dtype != torch.float32 else 1e-3):
            raise Mismatch(f"compiled: {found:.3g}")

    def gradient(self) -> None:
        """Of one parameter and of the input, checkpointed or not."""
        checkpointing = self.chance.random() < 0.5
        seed = self.chance.randrange(1000)
        found = []
        with self.as_defined():
            for model in self.both:
                parameters = [p for n, p in model.named_parameters() if "norm" not in n]
                one = random.Random(seed).choice(parameters)
                on = checkpointing and hasattr(model, "enable_gradient_checkpointing")
                one.requires_grad_(True)
                model.zero_grad()  # Fused projections have kept some, which a copy does not have.
                if on:
                    model.enable_gradient_checkpointing()
                    model.train()
                try:
                    given = self.given(self.dtype)
                    leaf = next(iter(given.values())).requires_grad_(True)
                    out = self.output(model, given)
                    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
                    (out.float() * weights.to(self.device)).sum().backward()
                    found.append([leaf.grad, one.grad])
                finally:
                    one.requires_grad_(False)
                    one.grad = None
                    if on:
                        model.disable_gradient_checkpointing()
                        model.eval()
        kind = "exact" if self.exactly else "int8"
        for what, (a, b) in zip(("input", "parameter"), zip(*found, strict=True), strict=True):
            if (a is None) != (b is None) and not (a is None or b is None or float(b.norm())):
                raise Mismatch(f"gradient of the {what}: {a is not None} there")
            # Where it is zero but for rounding, as that of the keys of a single token, there is
            # nothing to compare.
            eps = max(1e-4, 16 * torch.finfo(self.dtype).eps)
            least = max(1e-6, eps * float(found[1][0].norm()))
            if a is None or b is None or float(b.norm()) < least:
                continue
            error = wan.relative(a.float(), b.float())
            limit = self.unpatched[self.dtype] if self.config is None else GRADIENTS[kind]
            limit = max(limit, 0.1) if self.dtype != torch.float32 and self.config else limit
            if not error <= limit:
                raise Mismatch(f"gradient of the {what}: {error:.3g}, budget {limit}")

    @property
    def exactly(self) -> bool:
        config = self.config
        return config is None or (config.attention == "exact" and config.linear == "as-is")

    @property
    def unpatched(self) -> dict[torch.dtype, float]:
        """How far gradients of two equal models may be apart: torch's attention adds those of q up
        in any order on a GPU."""
        gpu = self.device.type == "cuda"
        return {torch.float32: 1e-5 * gpu, torch.bfloat16: 0.02 * gpu}

    def given(self, dtype: torch.dtype) -> dict[str, Any]:
        made = self.subject.inputs(min(self.batch, self.subject.batch), torch.float32)

        def there(name: str, x: Any) -> Any:
            if isinstance(x, list | tuple):
                return type(x)(there(name, part) for part in x)
            if not isinstance(x, Tensor):
                return x
            narrow = x.dtype == torch.float32 and name not in self.subject.fp32
            x = x.to(self.device, dtype if narrow else x.dtype)
            return torch.stack([x, x], -1)[..., 0] if self.strided else x

        return {name: there(name, x) for name, x in made.items()}

    def output(self, model: Any, given: dict[str, Any]) -> Tensor:
        made = model(**given)
        out: Tensor = made[0] if isinstance(made, tuple) else made
        return out

    def run(self, model: Any, dtype: torch.dtype) -> Tensor:
        with torch.no_grad():
            if self.cached and model is not self.ours and model is not self.twin:
                return self.output(model, self.given(dtype))
            context = model.cache_context("cond") if self.cached else nullcontext()
            if self.cached:
                model._reset_stateful_cache()  # It holds what was computed before.
            with context:
                return self.output(model, self.given(dtype))

    def as_defined(self) -> ExitStack:
        """The twin computes SLA by its definition while the other one is patched."""
        stack = ExitStack()
        if self.processors and self.config is not None and "self" in self.config.kinds:
            for block, own in zip(self.twin.blocks, self.processors, strict=True):
                held = sla.attached_proj_l(block.attn1)
                assert held is not None
                plain = sla.PlainSLA(held[0].detach(), held[1].detach(), sla.TOPK)
                block.attn1.processor = plain
                stack.callback(setattr, block.attn1, "processor", own)
        return stack

    def compare(self, context: Callable[[], Any] = nullcontext, autocast: bool = False) -> None:
        with context(), self.as_defined() if not autocast else nullcontext():
            # A graph is captured on the third forward and replayed on the fourth.
            for _ in range(3 if self.config is not None and self.config.cuda_graphs else 0):
                self.run(self.ours, self.dtype)
            outputs = [self.run(model, self.dtype).float() for model in self.both]
        found = wan.relative(*outputs)
        limit = EXACT[self.dtype]
        if self.config is None or (autocast and not self.subject.sla):
            limit = 0.0
        elif autocast:
            limit = 2.0
        elif not self.exactly:
            limit = INT8
        if not found <= limit:
            raise Mismatch(f"{found:.3g} from its twin, budget {limit}: {self.config}")

    def check(self) -> None:
        self.compare()
        if is_patched(self.ours) != (self.config is not None):
            raise Mismatch("is_patched says otherwise")
        if self.config is not None and len(str(report_of(self.ours))) < 100:
            raise Mismatch("no report")


def run_orders(kind: random.Random, value: random.Random, device: torch.device) -> str:
    """One random model through a random order of steps; returns what it was.

    Raises:
        Mismatch: It does not give what its twin gives, or something of the patch is left.
    """
    subject = kind.choice(SUBJECTS)(kind)
    pair = Pair(subject, [_config(kind, subject, device) for _ in range(2)], value, device)
    done: list[str] = []
    before = wan.dicts(pair.ours)
    try:
        for _ in range(STEPS):
            operation = value.choice(pair.operations())
            done.append(operation.__name__)
            operation()
            pair.check()
        if pair.config is not None:
            done.append("end")
            pair.unpatch()
            pair.check()
        left = {
            name: sorted(set(held) - set(before.get(name, held)))
            for name, held in wan.dicts(pair.ours).items()
        }
        traces = {
            f"{name}.{key}"
            for name, keys in left.items()
            for key in keys
            if "rcm" in key or key in ON_MODELS or (key == "forward" and not pair.offloaded)
        }
        if traces - _left_by_others(pair):
            raise Mismatch(f"left behind: {sorted(traces)[:3]}")
    except Exception as error:
        raise Mismatch(
            f"{subject.name}: {' '.join(done)}: {type(error).__name__}: {error}"
        ) from error
    return f"{subject.name}: {' '.join(done)}"


def _left_by_others(pair: Pair) -> set[str]:
    """Hooks of diffusers and accelerate leave the bound method of the class as an attribute."""
    return {
        f"{name}.forward"
        for name, module in pair.ours.named_modules()
        if getattr(vars(module).get("forward"), "__func__", None) is type(module).forward
        or "forward" in vars(pair.twin.get_submodule(name))
    }
