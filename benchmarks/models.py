"""Networks and VAEs of published sizes with seeded random weights, and ways to run a network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NamedTuple

import diffusers
import torch
from diffusers.models.attention_dispatch import attention_backend
from diffusers.models.embeddings import get_3d_rotary_pos_embed

from benchmarks.runner import Call, Plan, Record, generator
from turbo_rcm_patch import PatchReport, patched
from turbo_rcm_patch.patching.sla import attach_proj_l

#: The Wan whose self-attention is sparse-linear: each one holds a `proj_l`.
SLA: Final = "1.3b-sla"
_HEADS: Final = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
_WAN_14B: Final = {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}
_WAN_5B: Final = {
    "num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48,
    "out_channels": 48,
}  # fmt: skip
_COG_5B: Final = {
    "num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True
}  # fmt: skip
#: Network -> what differs from diffusers' defaults, which are Wan2.1-14B's and CogVideoX-2B's.
NETWORKS: Final[dict[str, dict[str, Any]]] = {
    "1.3b": _HEADS, SLA: _HEADS, "14b": _WAN_14B, "wan2.2-5b": _WAN_5B,
    "cogvideox-2b": {}, "cogvideox-5b": _COG_5B,
}  # fmt: skip
_MICRO_WAN: Final = {
    "num_attention_heads": 2, "attention_head_dim": 64, "text_dim": 32, "freq_dim": 32,
    "ffn_dim": 128, "num_layers": 2,
}  # fmt: skip
_MICRO_COGVIDEOX: Final = {
    "num_attention_heads": 2, "num_layers": 2, "time_embed_dim": 32, "text_embed_dim": 32,
    "max_text_seq_length": 9, "sample_width": 8, "sample_height": 8, "sample_frames": 9,
}  # fmt: skip
_VAES: Final[dict[str, dict[str, Any]]] = {
    "wan2.1": {},
    "wan2.2-5b": {
        "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True,
        "patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16,
        "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48,
    },
    "cogvideox": {},
}  # fmt: skip
_MICRO_VAES: Final[dict[str, dict[str, Any]]] = {
    "wan2.1": {"base_dim": 8, "num_res_blocks": 1},
    "wan2.2-5b": {"base_dim": 8, "num_res_blocks": 1, "decoder_base_dim": 8},
    "cogvideox": {
        "block_out_channels": (8, 8, 16, 16), "layers_per_block": 1, "norm_num_groups": 4,
    },
}  # fmt: skip
#: Tokens of Wan -> latent frames, height and width; 32,760 are 81 frames of 480 x 832, 75,600 of
#: 720 x 1280.
SIZES: Final = {
    780: (1, 60, 52), 1950: (5, 30, 52), 7800: (5, 60, 104),
    17160: (11, 60, 104), 32760: (21, 60, 104), 75600: (21, 90, 160),
}  # fmt: skip
_TIMESTEP: Final = 988


def text_tokens(network: Any, plan: Plan) -> int:
    """Tokens of text that a network gets."""
    return getattr(network.config, "max_text_seq_length", 9 if plan.micro else 512)


@contextmanager
def drawn_on(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Give modules that are made inside seeded weights on the device."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def build_network(name: str, plan: Plan, device: torch.device) -> Any:
    """Make a transformer with seeded random weights.

    It is in bf16, except the parameters that `from_pretrained(dtype=torch.bfloat16)` keeps in
    fp32: those of norms and times of a Wan.

    Args:
        name: A key of `NETWORKS`.
        plan: Says whether sizes are toys.
        device: Where it is made.
    """
    config, cogvideox = NETWORKS[name], name.startswith("cog")
    kind = diffusers.CogVideoXTransformer3DModel if cogvideox else diffusers.WanTransformer3DModel
    if plan.micro:
        config = {**config, **(_MICRO_COGVIDEOX if cogvideox else _MICRO_WAN)}
    # In fp32, 14 billion parameters would leave no room.
    dtype = torch.bfloat16 if name == "14b" else torch.float32
    with drawn_on(device, dtype):
        network = kind(**config)
    kept = set(network._keep_in_fp32_modules or ())
    for path, parameter in network.named_parameters():
        wide = not kept.isdisjoint(path.split("."))
        parameter.data = parameter.data.to(torch.float32 if wide else torch.bfloat16)
    if cogvideox:
        for buffer in network.buffers():
            buffer.data = buffer.data.bfloat16()
    if name == SLA:
        random, dim = generator(device), network.config.attention_head_dim
        for block in network.blocks:
            drawn = torch.randn(dim + 1, dim, generator=random, device=device)
            attach_proj_l(block.attn1, drawn[:-1] * dim**-0.5, drawn[-1])
    return network.eval().requires_grad_(False)


def build_vae(name: str, plan: Plan, device: torch.device) -> Any:
    """Make a VAE with seeded random weights, in fp32."""
    kind = diffusers.AutoencoderKLWan if "wan" in name else diffusers.AutoencoderKLCogVideoX
    with drawn_on(device, torch.float32):
        return kind(**_VAES[name] | (_MICRO_VAES[name] if plan.micro else {})).eval()


def make_call(
    network: Any, plan: Plan, device: torch.device, tokens: int = 32760, *, wide: bool = False
) -> Call:
    """Return one forward at batch 1.

    CogVideoX has 480 x 720 and 49 frames: 17,550 tokens and 226 of text.

    Args:
        network: A network of `build_network`.
        plan: Says whether sizes are toys.
        device: Where the network is.
        tokens: A key of `SIZES`, for Wan.
        wide: Give the same inputs in fp32.
    """
    config, random = network.config, generator(device)

    def noise(*size: int) -> torch.Tensor:
        drawn = torch.randn(*size, generator=random, device=device).bfloat16()
        return drawn.float() if wide else drawn

    inputs: Record = {}
    if hasattr(network, "blocks"):
        size = (3, 8, 8) if plan.micro else SIZES[tokens]
        inputs["hidden_states"] = noise(1, config.in_channels, *size)
        text, time = config.text_dim, float(_TIMESTEP)
    else:
        frames = (config.sample_frames - 1) // config.temporal_compression_ratio + 1
        height, width = config.sample_height, config.sample_width
        inputs["hidden_states"] = noise(1, frames, config.in_channels, height, width)
        text, time = config.text_embed_dim, _TIMESTEP
        if config.use_rotary_positional_embeddings:
            grid = (height // config.patch_size, width // config.patch_size)
            inputs["image_rotary_emb"] = get_3d_rotary_pos_embed(
                config.attention_head_dim, ((0, 0), grid), grid, frames, device=device
            )
    inputs["encoder_hidden_states"] = noise(1, text_tokens(network, plan), text)
    inputs["timestep"] = torch.tensor([time], device=device)

    def call() -> torch.Tensor:
        output: torch.Tensor = network(**inputs, return_dict=False)[0]
        return output

    return call


# --- ways to run a network -----------------------------------------------------------------------


class Way(NamedTuple):
    """A way to run a network.

    Attributes:
        options: Of its patch, or None without one.
        sage: Run diffusers' attentions on sageattention 2 (a CUDA build).
        compiles: Compile block by block with sageattention, which breaks the graph at every
            attention, else the whole network with mode="reduce-overhead", which captures CUDA
            graphs.
    """

    options: dict[str, Any] | None = None
    sage: bool = False
    compiles: bool = False

    @contextmanager
    def entered(self, network: Any, backend: str) -> Iterator[PatchReport | None]:
        """Run the network so in the block, by a backend of torch.compile; gives the report."""
        with ExitStack() as stack:
            if self.sage:
                stack.enter_context(attention_backend("sage"))
            report = None
            if self.options is not None:
                report = stack.enter_context(patched(network, **self.options))
            if self.compiles:
                torch._dynamo.reset()
                stack.callback(torch._dynamo.reset)
                graphs = not self.sage and backend == "inductor"  # Other backends have no modes.
                how = {"mode": "reduce-overhead"} if graphs else {"backend": backend}
                # CogVideoX names no repeated blocks.
                blocks = getattr(network, "blocks", None) or network.transformer_blocks
                for module in blocks if self.sage else [network]:
                    stack.callback(setattr, module, "_compiled_call_impl", None)
                    module.compile(fullgraph=not self.sage, **how)
            yield report


#: What others are compared with.
EAGER: Final = "eager"
#: Method -> how it runs the network.
WAYS: Final[dict[str, Way]] = {
    EAGER: Way(),
    "sage": Way(sage=True),
    "compile sage": Way(sage=True, compiles=True),
    "patched": Way({"guard": False}),
    "patched int8 Linears": Way({"guard": False, "linear": "int8"}),
    "patched guard on": Way({}),
    "patched int8 Linears guard on": Way({"linear": "int8"}),
    "patched exact guard on": Way({"attention": "exact"}),
    # This takes longest to begin with.
    "patched reduce-overhead": Way({"guard": False}, compiles=True),
}


def record_report(record: Record, report: object) -> None:
    """Note what ran on the last forward of a patched network, and what its guard predicts."""
    if isinstance(report, PatchReport) and report.last_forward:
        record["ran"] = ran = report.last_forward
        record["in_int8"] = sum(n for how, n in ran.items() if "int8 attention" in how)
        record["predicted"] = report.guard.prediction
