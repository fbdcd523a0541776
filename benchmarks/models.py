"""Networks of published sizes with seeded random weights, and calls of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks.runner import Call, Plan, generator
from turbo_rcm_patch.patching.sla import attach_proj_l

if TYPE_CHECKING:
    from diffusers import CogVideoXTransformer3DModel, WanTransformer3DModel

#: Makes a forward from a seed; with `wide` in fp32.
MakeCall = Callable[..., Call]

_WAN: Final[dict[str, Any]] = {
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
#: The network whose self-attention is sparse-linear: each one holds a `proj_l`.
SLA: Final = "1.3b-sla"
#: Wan, text to video.
WANS: Final[dict[str, dict[str, Any]]] = {
    "1.3b": _WAN,
    "14b": _WAN | {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40},
    "wan2.2-5b": _WAN
    | {"num_attention_heads": 24, "ffn_dim": 14336, "in_channels": 48, "out_channels": 48},
    SLA: _WAN,
}
_MICRO_WAN: Final[dict[str, Any]] = {
    "num_attention_heads": 2,
    "attention_head_dim": 64,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 128,
    "num_layers": 2,
}
#: The entries that differ from CogVideoX-2B, which diffusers' defaults describe.
COGVIDEOXS: Final[dict[str, dict[str, Any]]] = {
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
#: Tokens -> latent frames, height and width; 32,760 are 81 frames of 480 x 832, 75,600 of
#: 720 x 1280.
LENGTHS: Final = {
    "256": (1, 32, 32),
    "780": (1, 60, 52),
    "1950": (5, 30, 52),
    "7800": (5, 60, 104),
    "17160": (11, 60, 104),
    "32760": (21, 60, 104),
    "75600": (21, 90, 160),
}
_MICRO_SIZE: Final = (3, 8, 8)
_TEXT_TOKENS: Final = 512
#: Added to both gate rows of a block with live gates, so that attention reaches the output.
_LIVE_GATE: Final = 0.3
_TIMESTEP: Final = 988
#: Factor on the query norms of a network with peaked attention.
_SHARP: Final = 8.0
#: Rows of a block's scale_shift_table that gate self-attention and feed-forward.
_GATE_ROWS: Final = (2, 5)


@contextmanager
def made_on(device: torch.device, seed: int, dtype: torch.dtype) -> Iterator[None]:
    """Give modules that are made inside seeded weights on the device."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def build_wan(name: str, plan: Plan, device: torch.device) -> WanTransformer3DModel:
    """Make a Wan transformer with seeded random weights.

    It is in bf16, except the parameters that `from_pretrained(torch_dtype=torch.bfloat16)` keeps
    in fp32: scale-shift tables, norm1 to norm3 and the time embedder.

    Args:
        name: A key of `WANS`.
        plan: For seed and sizes.
        device: Where it is made.
    """
    from diffusers import WanTransformer3DModel

    channels = {key: WANS[name][key] for key in ("in_channels", "out_channels")}
    config = _MICRO_WAN | channels if plan.micro else WANS[name]
    # In fp32, 14 billion parameters would leave no room.
    dtype = torch.bfloat16 if name == "14b" else torch.float32
    with made_on(device, plan.seed, dtype):
        network = WanTransformer3DModel(**config)
    kept = set(network._keep_in_fp32_modules)
    for path, parameter in network.named_parameters():
        wide = not kept.isdisjoint(path.split("."))
        parameter.data = parameter.data.to(torch.float32 if wide else torch.bfloat16)
    if name == SLA:
        random, dim = generator(device, plan.seed), network.config.attention_head_dim
        for block in network.blocks:
            drawn = torch.randn(dim + 1, dim, generator=random, device=device)
            attach_proj_l(block.attn1, drawn[:-1] * dim**-0.5, drawn[-1])
    return network.eval().requires_grad_(False)


def build_cogvideox(name: str, plan: Plan, device: torch.device) -> CogVideoXTransformer3DModel:
    """Make a CogVideoX transformer with seeded random weights, wholly in bf16.

    Args:
        name: A key of `COGVIDEOXS`.
        plan: For seed and sizes.
        device: Where it is made.
    """
    from diffusers import CogVideoXTransformer3DModel

    config = COGVIDEOXS[name] | (_MICRO_COGVIDEOX if plan.micro else {})
    with made_on(device, plan.seed, torch.float32):
        network = CogVideoXTransformer3DModel(**config)
    for tensor in (*network.parameters(), *network.buffers()):
        tensor.data = tensor.data.bfloat16()
    return network.eval().requires_grad_(False)


#: VAE -> what differs from diffusers' defaults, which are those of Wan 2.1 and CogVideoX.
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


def build_vae(name: str, plan: Plan, device: torch.device) -> Any:
    """Make a VAE with seeded random weights, in fp32.

    Args:
        name: A key of `_VAES`.
        plan: For seed and sizes.
        device: Where it is made.
    """
    from diffusers import AutoencoderKLCogVideoX, AutoencoderKLWan

    make: Any = AutoencoderKLCogVideoX if name == "cogvideox" else AutoencoderKLWan
    with made_on(device, plan.seed, torch.float32):
        return make(**_VAES[name] | (_MICRO_VAES[name] if plan.micro else {})).eval()


def _noise(device: torch.device, seed: int, wide: bool) -> Callable[..., torch.Tensor]:
    """Return a source of normal noise: bf16 values, held in fp32 if `wide`."""
    random = generator(device, seed)

    def draw(*size: int) -> torch.Tensor:
        drawn = torch.randn(*size, generator=random, device=device).bfloat16()
        return drawn.float() if wide else drawn

    return draw


def _forward(network: Any, inputs: dict[str, Any]) -> Call:
    def call() -> torch.Tensor:
        output: torch.Tensor = network(**inputs, return_dict=False)[0]
        return output

    return call


def wan_call(
    network: WanTransformer3DModel,
    plan: Plan,
    device: torch.device,
    size: Sequence[int],
    seed: int,
    *,
    wide: bool = False,
) -> Call:
    """Return one forward at batch 1.

    Args:
        network: A network of `build_wan`.
        plan: With `micro`, the inputs are of toy size.
        device: Where the network is.
        size: Latent frames, height and width.
        seed: Of the inputs.
        wide: Give the same inputs in fp32.
    """
    noise = _noise(device, seed, wide)
    inputs = {
        "hidden_states": noise(1, 16, *size),
        "encoder_hidden_states": noise(
            1, 9 if plan.micro else _TEXT_TOKENS, network.config.text_dim
        ),
        "timestep": torch.tensor([float(_TIMESTEP)], device=device),
    }
    return _forward(network, inputs)


def cogvideox_call(
    network: CogVideoXTransformer3DModel, device: torch.device, seed: int, *, wide: bool = False
) -> Call:
    """Return one forward at batch 1: 480 x 720 and 49 frames are 17,550 tokens and 226 of text.

    The arguments are those of `wan_call`.
    """
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    config, noise = network.config, _noise(device, seed, wide)
    frames = (config.sample_frames - 1) // config.temporal_compression_ratio + 1
    height, width = config.sample_height, config.sample_width
    rotary = None
    if config.use_rotary_positional_embeddings:
        grid = (height // config.patch_size, width // config.patch_size)
        rotary = get_3d_rotary_pos_embed(
            config.attention_head_dim, ((0, 0), grid), grid, frames, device=device
        )
    inputs = {
        "hidden_states": noise(1, frames, config.in_channels, height, width),
        "encoder_hidden_states": noise(1, config.max_text_seq_length, config.text_embed_dim),
        "timestep": torch.tensor([_TIMESTEP], device=device),
        "image_rotary_emb": rotary,
    }
    return _forward(network, inputs)


def network_of(
    name: str, plan: Plan, device: torch.device, tokens: str = "32760"
) -> tuple[Any, MakeCall]:
    """Make a network, and a function that makes forwards of it.

    Args:
        name: A key of `WANS` or `COGVIDEOXS`.
        plan: For seed and sizes.
        device: Where it is made.
        tokens: A key of `LENGTHS`, for Wan.
    """
    if name in COGVIDEOXS:
        cogvideox = build_cogvideox(name, plan, device)
        return cogvideox, partial(cogvideox_call, cogvideox, device)
    network = build_wan(name, plan, device)
    return network, partial(wan_call, network, plan, device, size_of(tokens, plan))


def size_of(tokens: str, plan: Plan) -> tuple[int, int, int]:
    """Return latent frames, height and width for a key of `LENGTHS`."""
    return _MICRO_SIZE if plan.micro else LENGTHS[tokens]


@contextmanager
def changed(network: WanTransformer3DModel, *, live: bool, sharp: bool) -> Iterator[None]:
    """Give a network live gates or peaked attention for the length of a `with` block."""
    before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        before.append((tensor, tensor.clone()))
        return tensor

    for block in network.blocks:
        if live:
            noted(block.scale_shift_table.data)[:, list(_GATE_ROWS)] += _LIVE_GATE
        if sharp:
            for attention in (block.attn1, block.attn2):
                noted(attention.norm_q.weight.data).mul_(_SHARP)
    try:
        yield
    finally:
        for tensor, values in before:
            tensor.copy_(values)
