"""Networks of real size with seeded random weights, and the ways to run one: as written, compiled,
patched, both, and with another attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import runner
from benchmarks.attention import sage_major
from benchmarks.measure import Call, calls_within, generator, time_call
from benchmarks.runner import GROUPS, Effort, Enter, Errors, Journal, Plan, Record, Shape, Variant
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import ConfigError, MissingPackageError

if TYPE_CHECKING:
    from diffusers import CogVideoXTransformer3DModel, WanTransformer3DModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large everything is. The defaults are the real sizes; `MICRO` is for trying the command.

    Attributes:
        accuracy: Attentions of the accuracy table.
        one_launch: Attentions of the repeated one-launch form.
        fusion: Attentions of the fusion numbers.
        network: Arguments of WanTransformer3DModel; the defaults are Wan2.1-T2V-1.3B's.
        latents: [B, C, F, H, W] of the timed forward: 480p, 81 frames are 32,760 tokens.
        truth_latents: [B, C, F, H, W] of the network number, whose truth is computed in fp32.
        text_tokens: Length of the encoded prompt.
    """

    accuracy: tuple[Shape, ...] = (
        Shape.square(12, 4096, 64),
        Shape.square(12, 4096, 128),
        Shape.square(12, 4001, 128),
    )
    one_launch: tuple[Shape, ...] = (Shape.square(4, 1280, 64), Shape(2, 777, 512, 12, 128))
    fusion: tuple[Shape, ...] = (
        Shape.square(4, 1280, 64, batch=2),
        Shape.square(12, 2049, 128),
        Shape(2, 1000, 77, 12, 128),
    )
    network: dict[str, Any] = field(
        default_factory=lambda: {
            "patch_size": (1, 2, 2),
            "num_attention_heads": 12,
            "attention_head_dim": 128,
            "in_channels": 16,
            "out_channels": 16,
            "text_dim": 4096,
            "freq_dim": 256,
            "ffn_dim": 8960,
            "num_layers": 30,
            "cross_attn_norm": True,
            "qk_norm": "rms_norm_across_heads",
        }
    )
    latents: tuple[int, ...] = (1, 16, 21, 60, 104)
    truth_latents: tuple[int, ...] = (1, 16, 21, 30, 52)
    text_tokens: int = 512


MICRO: Final = Sizes(
    accuracy=(Shape.square(2, 96, 64),),
    one_launch=(Shape.square(2, 70, 64),),
    fusion=(Shape(1, 70, 33, 2, 64),),
    network={
        "num_attention_heads": 2,
        "attention_head_dim": 64,
        "text_dim": 32,
        "freq_dim": 32,
        "ffn_dim": 128,
        "num_layers": 2,
    },
    latents=(1, 16, 3, 8, 8),
    truth_latents=(1, 16, 2, 8, 8),
    text_tokens=9,
)
#: What differs from Wan2.1-T2V-1.3B, the network of `Sizes`.
WAN: Final[dict[str, dict[str, Any]]] = {
    "1.3b": {},
    "14b": {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40},
}
#: What differs from CogVideoX-2B, which diffusers' defaults describe.
COGVIDEOX: Final[dict[str, dict[str, Any]]] = {
    "cogvideox-2b": {},
    "cogvideox-5b": {
        "num_attention_heads": 48,
        "num_layers": 42,
        "use_rotary_positional_embeddings": True,
    },
}
_MICRO_COGVIDEOX: Final[dict[str, Any]] = {
    "num_attention_heads": 2,
    "num_layers": 2,
    "time_embed_dim": 32,
    "text_embed_dim": 32,
    "max_text_seq_length": 9,
    "sample_width": 8,
    "sample_height": 8,
    "sample_frames": 9,
}
#: Added to both gate rows of every block, so that attention really reaches the output.
LIVE_GATE: Final = 0.3
#: Factor on the query norm, so that attention is peaked.
_SHARP: Final = 8.0
#: Rows of a block's scale_shift_table that gate: of self-attention and of the feed-forward.
GATE_ROWS: Final = (2, 5)


def sizes_of(plan: Plan) -> Sizes:
    """The real ones, or with --micro toy sizes."""
    return MICRO if plan.micro else Sizes()


def tokens_of(latents: Sequence[int]) -> int:
    """Tokens of latents [B, C, F, H, W] in patches of (1, 2, 2)."""
    return latents[2] * (latents[3] // 2) * (latents[4] // 2)


@contextmanager
def _made_on(device: torch.device, seed: int, dtype: torch.dtype) -> Iterator[None]:
    """Inside, modules get seeded random weights on the device; the caller's stays untouched."""
    before = torch.get_default_dtype()
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.device(device),
    ):
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def build_wan(
    config: dict[str, Any], device: torch.device, seed: int, *, narrow: bool = False
) -> WanTransformer3DModel:
    """A Wan transformer with seeded random weights, made on the device.

    bf16, except what `from_pretrained(dtype=torch.bfloat16)` keeps in fp32 (the scale-shift
    tables, norm1 to norm3, the time embedder, the rotary tables): `.to(torch.bfloat16)` would be a
    different model.

    Args:
        config: Arguments of its class.
        device: Where.
        seed: Of the weights.
        narrow: Make it in bf16 from the start: 14 billion parameters in fp32 would leave no room.
    """
    from diffusers import WanTransformer3DModel

    with _made_on(device, seed, torch.bfloat16 if narrow else torch.get_default_dtype()):
        network = WanTransformer3DModel(**config)
    kept = set(network._keep_in_fp32_modules)
    for name, parameter in network.named_parameters():
        wide = not kept.isdisjoint(name.split("."))
        parameter.data = parameter.data.to(torch.float32 if wide else torch.bfloat16)
    return network.eval().requires_grad_(False)


def wan_call(
    network: WanTransformer3DModel,
    latents: Sequence[int],
    text_tokens: int,
    device: torch.device,
    seed: int,
    *,
    timestep: float = 988.0,
    wide: bool = False,
) -> Call:
    """One forward of a network of `build_wan`; `wide` gives it the same inputs in fp32."""
    normal = _bf16_noise(device, seed, wide)
    inputs = {
        "hidden_states": normal(*latents),
        "encoder_hidden_states": normal(1, text_tokens, network.config.text_dim),
        "timestep": torch.tensor([timestep], device=device),
    }

    def call() -> torch.Tensor:
        output: torch.Tensor = network(**inputs, return_dict=False)[0]
        return output

    return call


@contextmanager
def setting(network: WanTransformer3DModel, *, live: bool, sharp: bool) -> Iterator[None]:
    """Inside, the gates are live or the attention is peaked; the weights are as before
    afterwards."""
    changed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def remember(tensor: torch.Tensor) -> torch.Tensor:
        changed.append((tensor, tensor.clone()))
        return tensor

    with torch.no_grad():
        for block in network.blocks:
            if live:
                remember(block.scale_shift_table.data)[:, list(GATE_ROWS)] += LIVE_GATE
            if sharp:
                for attention in (block.attn1, block.attn2):
                    remember(attention.norm_q.weight.data).mul_(_SHARP)
        try:
            yield
        finally:
            for tensor, before in changed:
                tensor.copy_(before)


def build_cogvideox(
    name: str, device: torch.device, seed: int, *, micro: bool
) -> CogVideoXTransformer3DModel:
    """A transformer in bf16, as `from_pretrained(dtype=torch.bfloat16)` gives it: nothing of it
    stays in fp32."""
    from diffusers import CogVideoXTransformer3DModel

    config = COGVIDEOX[name] | (_MICRO_COGVIDEOX if micro else {})
    with _made_on(device, seed, torch.get_default_dtype()):
        network = CogVideoXTransformer3DModel(**config)
    for tensor in (*network.parameters(), *network.buffers()):
        tensor.data = tensor.data.bfloat16()
    return network.eval().requires_grad_(False)


def _bf16_noise(device: torch.device, seed: int, wide: bool) -> Callable[..., torch.Tensor]:
    """Draws seeded normal noise of a size: values of bf16, in fp32 where `wide` asks for it."""
    random = generator(device, seed)

    def normal(*size: int) -> torch.Tensor:
        drawn = torch.randn(*size, generator=random, device=device).bfloat16()
        return drawn.float() if wide else drawn

    return normal


def cogvideox_call(
    network: CogVideoXTransformer3DModel,
    device: torch.device,
    seed: int,
    *,
    timestep: float = 988.0,
    wide: bool = False,
) -> Call:
    """One forward, batch 1; 480 x 720 and 49 frames are 17,550 tokens of video and 226 of text.
    `wide` gives it the same inputs in fp32."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    config, normal = network.config, _bf16_noise(device, seed, wide)
    frames = (config.sample_frames - 1) // config.temporal_compression_ratio + 1
    height, width = config.sample_height, config.sample_width
    latents = normal(1, frames, config.in_channels, height, width)
    text = normal(1, config.max_text_seq_length, config.text_embed_dim)
    time = torch.tensor([int(timestep)], device=device)
    rotary = None
    if config.use_rotary_positional_embeddings:
        grid = (height // config.patch_size, width // config.patch_size)
        rotary = get_3d_rotary_pos_embed(
            config.attention_head_dim, ((0, 0), grid), grid, frames, device=device
        )

    def call() -> torch.Tensor:
        output: torch.Tensor = network(
            hidden_states=latents,
            encoder_hidden_states=text,
            timestep=time,
            image_rotary_emb=rotary,
            return_dict=False,
        )[0]
        return output

    return call


def network_of(
    name: str, plan: Plan, device: torch.device, latents: Sequence[int] | None = None
) -> tuple[Any, Callable[..., Call], Record]:
    """A network by the name that it has in tables.

    Args:
        name: A key of WAN or COGVIDEOX.
        plan: For the seed and the sizes.
        device: Where.
        latents: [B, C, T, H, W] of Wan's inputs, unless those of `Sizes`.

    Returns:
        The network; what makes a call of it from a seed, and by name `timestep` and `wide`; and
        what a file says about both.
    """
    if name in COGVIDEOX:
        network: Any = build_cogvideox(name, device, plan.seed, micro=plan.micro)
        config = {key: value for key, value in network.config.items() if key[0] != "_"}
        return network, partial(cogvideox_call, network, device), {"config": config}
    sizes = sizes_of(plan)
    config = sizes.network | ({} if plan.micro else WAN[name])
    network = build_wan(config, device, plan.seed, narrow=name != "1.3b")
    size = latents or sizes.latents
    make = partial(wan_call, network, size, sizes.text_tokens, device)
    return network, make, {"config": config, "latents": list(size), "tokens": tokens_of(size)}


# --- ways to run a network -----------------------------------------------------------------------


def in_turn(*entered: Enter) -> Enter:
    """One context inside the other."""

    @contextmanager
    def enter(network: Any, backend: str) -> Iterator[None]:
        with ExitStack() as stack:
            for one in entered:
                stack.enter_context(one(network, backend))
            yield

    return enter


def patched_with(**fields: Any) -> Enter:
    """Patched, without the guard unless that is asked for; entering gives the report."""

    def enter(network: Any, backend: str) -> AbstractContextManager[object]:
        from turbo_rcm_patch import patched

        return patched(network, PatchConfig(**{"guard": False, **fields}))

    return enter


@contextmanager
def compiled(network: Any, backend: str, *, fullgraph: bool = True) -> Iterator[None]:
    """Inside, every block is compiled, by default without graph breaks."""
    torch._dynamo.reset()
    # CogVideoX names no repeated blocks for `compile_repeated_blocks`. TurboDiffusion's blocks lie
    # in torch's activation checkpointing.
    blocks = [
        getattr(block, "_checkpoint_wrapped_module", block)
        for block in getattr(network, "blocks", None) or network.transformer_blocks
    ]
    for block in blocks:
        block.compile(fullgraph=fullgraph, backend=backend)
    try:
        yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None
        torch._dynamo.reset()


@contextmanager
def compiled_in_graphs(network: Any, backend: str) -> Iterator[None]:
    """Inside, the whole network is compiled with mode="reduce-overhead", which captures CUDA
    graphs."""
    torch._dynamo.reset()
    # Other backends have no modes.
    options = {"mode": "reduce-overhead"} if backend == "inductor" else {"backend": backend}
    network.compile(fullgraph=True, **options)
    try:
        yield
    finally:
        network._compiled_call_impl = None
        torch._dynamo.reset()


def _cudnn(network: Any, backend: str) -> AbstractContextManager[object]:
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)


@contextmanager
def sage_attention(network: Any, backend: str) -> Iterator[None]:
    from diffusers.models.attention_dispatch import attention_backend

    asks = type(network).__module__.startswith("diffusers.") and hasattr(network, "blocks")
    if not asks:
        raise ConfigError(
            "attention backend",
            expected="a network that asks diffusers for one",
            got=f"{type(network).__name__}, which calls torch's attention",
        )
    if sage_major() < 2:
        raise MissingPackageError(
            "sageattention", expected="2.1 or newer, a CUDA build", got=f"{sage_major()}.x"
        )
    with attention_backend("sage"):
        yield


@contextmanager
def _fused_qkv(network: Any, backend: str) -> Iterator[None]:
    """diffusers' own fusion of the linears of q, k and v into one."""
    flag = "fused_projections"  # diffusers leaves it behind
    clean = [module for module in network.modules() if flag not in vars(module)]
    network.fuse_qkv_projections()
    try:
        yield
    finally:
        network.unfuse_qkv_projections()
        for module in clean:
            vars(module).pop(flag, None)


def variants() -> list[Variant]:
    """Every way, unpatched ones first; the first is what the others are compared with."""
    patched, int8 = patched_with(), patched_with(linear="int8")
    return [
        Variant("eager", profiled=True),
        Variant("eager cuDNN", _cudnn),
        Variant("compiled", compiled, profiled=True),
        Variant("compiled fused qkv", in_turn(_fused_qkv, compiled)),
        Variant("eager sage", sage_attention),
        # Its CUDA build breaks the graph at every attention.
        Variant("compiled sage", in_turn(sage_attention, partial(compiled, fullgraph=False))),
        Variant("patched", patched, ours=True, profiled=True),
        Variant("patched compiled", in_turn(patched, compiled), ours=True, profiled=True),
        Variant("patched fused qkv", in_turn(_fused_qkv, patched), ours=True),
        Variant("patched int8", int8, ours=True, profiled=True),
        Variant("patched int8 compiled", in_turn(int8, compiled), ours=True, profiled=True),
    ]


def time_variant(
    variant: Variant,
    record: Record,
    network: Any,
    calls: Sequence[Call],
    errors: Errors,
    journal: Journal,
    effort: Effort,
    *,
    wrong: float,
    beside: str = "",
) -> None:
    """Check a variant on the first call, then time it over all.

    Args:
        variant: How the network runs.
        record: Of the variant, for the file.
        network: Unpatched and uncompiled before and after.
        calls: One a set of inputs; each runs the network or a part of it.
        errors: Numbers of an output against the truth.
        journal: For the device.
        effort: How long; an infinite budget stands for its most calls.
        wrong: Relative L2 from which an output is wrong.
        beside: What a reader of that verdict should know.
    """
    device = journal.device
    with variant.enter(network, journal.plan.compiler):
        record["error"] = errors(calls[0]())
        runner.check(record["error"], wrong, beside)
        call, count = runner.rotating(calls), effort.most
        if math.isfinite(effort.budget):
            count = calls_within(call, device, effort.budget, effort.least, effort.most)
        record["milliseconds"] = asdict(time_call(call, device, count, warmup=1))
        record |= runner.peak_bytes(call, device)
        if variant.profiled:
            kernels = runner.kernel_milliseconds(call, device)
            groups = record["groups"] = dict.fromkeys(GROUPS, 0.0)
            for name, value in kernels.items():
                groups[runner.group_of(name)] += value
            record["kernels"] = dict(list(kernels.items())[:40])
