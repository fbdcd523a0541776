"""CogVideoX networks of real size with seeded random weights, and their inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks.clock import Call
from benchmarks.setup import generator

if TYPE_CHECKING:
    from diffusers import CogVideoXTransformer3DModel

__all__ = ["build_cogvideox", "cogvideox_call", "is_cogvideox"]

#: What differs from CogVideoX-2B, which diffusers' defaults describe.
_NETWORKS: Final[dict[str, dict[str, Any]]] = {
    "cogvideox-2b": {},
    "cogvideox-5b": {
        "num_attention_heads": 48,
        "num_layers": 42,
        "use_rotary_positional_embeddings": True,
    },
}
#: For trying the command.
_MICRO: Final[dict[str, Any]] = {
    "num_attention_heads": 2,
    "num_layers": 2,
    "time_embed_dim": 32,
    "text_embed_dim": 32,
    "max_text_seq_length": 9,
    "sample_width": 8,
    "sample_height": 8,
    "sample_frames": 9,
}


def is_cogvideox(name: str) -> bool:
    """Whether a network of this name is built here."""
    return name in _NETWORKS


def build_cogvideox(
    name: str, device: torch.device, seed: int, *, micro: bool
) -> CogVideoXTransformer3DModel:
    """A transformer in bf16, as `from_pretrained(dtype=torch.bfloat16)` gives it: nothing of it
    stays in fp32."""
    from diffusers import CogVideoXTransformer3DModel

    config = _NETWORKS[name] | (_MICRO if micro else {})
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(device):
        torch.manual_seed(seed)
        network = CogVideoXTransformer3DModel(**config)
    for tensor in (*network.parameters(), *network.buffers()):
        tensor.data = tensor.data.bfloat16()
    return network.eval().requires_grad_(False)


def cogvideox_call(network: CogVideoXTransformer3DModel, device: torch.device, seed: int) -> Call:
    """One forward, batch 1; 480 x 720 and 49 frames are 17,550 tokens of video and 226 of text."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    config, random = network.config, generator(device, seed)
    frames = (config.sample_frames - 1) // config.temporal_compression_ratio + 1
    height, width = config.sample_height, config.sample_width

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random, device=device).bfloat16()

    latents = normal(1, frames, config.in_channels, height, width)
    text = normal(1, config.max_text_seq_length, config.text_embed_dim)
    timestep = torch.tensor([988], device=device)
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
            timestep=timestep,
            image_rotary_emb=rotary,
            return_dict=False,
        )[0]
        return output

    return call
