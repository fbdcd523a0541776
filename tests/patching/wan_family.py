"""Tiny random transformers of the Wan family beside Wan itself, and how to run them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import (
    ChronoEditTransformer3DModel,
    SkyReelsV2Transformer3DModel,
    WanAnimateTransformer3DModel,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
)
from torch import nn

from tests.patching.wan import BASE, I2V

BLOCK = ["self", "cross", "feed-forward"]
IMAGE_BLOCK = ["self", "cross", "image", "feed-forward"]
#: The first control block adds its input, and every one makes a hint.
CONTROL = ["control", *BLOCK, "control", *BLOCK, "control"]
ANIMATE = {
    "in_channels": 12,
    "latent_channels": 4,
    "image_dim": None,
    "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8},
    "motion_encoder_size": 16,
    "motion_style_dim": 8,
    "motion_dim": 4,
    "motion_encoder_dim": 16,
    "face_encoder_hidden_dim": 16,
    "face_encoder_num_heads": 2,
    "inject_face_latents_blocks": 2,
}


@dataclass(frozen=True)
class Family:
    """A configuration of one class, its input, and its pairs.

    Attributes:
        name: For a reader.
        cls: The class of diffusers.
        kinds: Kind of every pair, in the order of the report.
        config: Beside `BASE`.
        given: Inputs beside the usual ones, by functions of (noise, batch).
        fuse_qkv: Whether its projections are fused.
        batch: Largest batch its forward takes with this configuration.
        left: How many pairs are left as their author wrote them.
        masked: Whether its self-attention has a mask.
        frames: Of the latents.
    """

    name: str
    cls: type[nn.Module]
    kinds: list[str]
    config: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Callable[..., Any]] = field(default_factory=dict)
    fuse_qkv: bool = False
    batch: int = 2
    left: int = 0
    masked: bool = False
    frames: int = 3

    @property
    def per_token(self) -> bool:
        """Whether tokens have timesteps of their own."""
        return self.given.get("timestep") is not None

    @property
    def fused(self) -> int:
        return len(self.kinds) - self.left

    def model(self, dtype: torch.dtype = torch.float32) -> Any:
        """Seeded, with live gates and peaked queries, in `dtype` as `from_pretrained` casts it."""
        torch.manual_seed(0)
        made: Any = self.cls(**{**BASE, **self.config}).eval().requires_grad_(False)
        blocks = [*getattr(made, "vace_blocks", ()), *made.blocks]
        for block in blocks:
            block.scale_shift_table.data[:, (2, 5)] += 0.7
            for attn in (block.attn1, block.attn2):
                attn.norm_q.weight.data.mul_(3)
        if self.fuse_qkv:
            made.fuse_qkv_projections()
        if dtype != torch.float32:
            keep = made._keep_in_fp32_modules
            for name, parameter in made.named_parameters():
                if not any(part in name for part in keep):
                    parameter.data = parameter.data.to(dtype)
        return made

    def inputs(self, batch: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        batch = min(batch, self.batch)
        generator = torch.Generator().manual_seed(1)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        image = "added_kv_proj_dim" in self.config
        given: dict[str, Any] = {
            "hidden_states": noise(batch, self.config.get("in_channels", 4), self.frames, 8, 10),
            "timestep": torch.tensor([500.0] * batch),
            "encoder_hidden_states": noise(batch, 512 if image else 7, 16),
            "return_dict": False,
        }
        if image:
            # With a position embedding, the first and the last frame of each sample.
            images = 2 if "pos_embed_seq_len" in self.config else 1
            given["encoder_hidden_states_image"] = noise(batch * images, 5, 16)
        return given | {name: make(noise, batch) for name, make in self.given.items()}


def control(noise: Callable[..., Any], batch: int) -> torch.Tensor:
    return noise(batch, 6, 3, 8, 10)


def pose(noise: Callable[..., Any], batch: int) -> torch.Tensor:
    return noise(batch, 4, 2, 8, 10)


def face(noise: Callable[..., Any], batch: int) -> torch.Tensor:
    return noise(batch, 3, 5, 16, 16)


def frame_times(noise: Callable[..., Any], batch: int) -> torch.Tensor:
    return torch.tensor([[900.0, 500.0, 20.0]] * batch)


VACE: dict[str, Any] = {"vace_layers": [0, 1], "vace_in_channels": 6}
FORCED: dict[str, Callable[..., Any]] = {
    "timestep": frame_times,
    "enable_diffusion_forcing": lambda noise, batch: True,
}
FPS: dict[str, Callable[..., Any]] = {"fps": lambda noise, batch: [1] * batch}
Wan, Vace, Sky = (
    WanTransformer3DModel,
    WanVACETransformer3DModel,
    SkyReelsV2Transformer3DModel,
)

FAMILIES = [
    Family("flf2v", Wan, IMAGE_BLOCK * 2, I2V | {"pos_embed_seq_len": 10}),
    Family("vace", Vace, CONTROL + BLOCK * 2, VACE, {"control_hidden_states": control}, left=2),
    Family(
        "vace-scaled-one-layer",
        Vace,
        [*CONTROL[:5], *BLOCK * 2],
        VACE | {"vace_layers": [0], "cross_attn_norm": False},
        {
            "control_hidden_states": control,
            "control_hidden_states_scale": lambda noise, batch: torch.tensor([0.6]),
        },
        left=1,
    ),
    Family(
        "vace-image-fused-qkv",
        Vace,
        ["control", *IMAGE_BLOCK, "control", *IMAGE_BLOCK, "control", *IMAGE_BLOCK * 2],
        VACE | I2V,
        {"control_hidden_states": control},
        fuse_qkv=True,
        left=2,
    ),
    Family(
        "animate",
        WanAnimateTransformer3DModel,
        [*BLOCK * 2, "cross"],
        ANIMATE,
        {"pose_hidden_states": pose, "face_pixel_values": face},
        left=1,
    ),
    Family(
        "animate-image-two-faces",
        WanAnimateTransformer3DModel,
        [*IMAGE_BLOCK * 2, "cross", "cross"],
        ANIMATE | I2V | {"inject_face_latents_blocks": 1},
        {"pose_hidden_states": pose, "face_pixel_values": face},
        fuse_qkv=True,
        left=2,
    ),
    Family("chronoedit", ChronoEditTransformer3DModel, BLOCK * 2),
    Family("chronoedit-i2v-fused-qkv", ChronoEditTransformer3DModel, IMAGE_BLOCK * 2, I2V,
           fuse_qkv=True),
    Family(
        "chronoedit-token-times",
        ChronoEditTransformer3DModel,
        BLOCK * 2,
        {"rope_temporal_skip_len": 4},
        {"timestep": lambda noise, batch: torch.linspace(0, 999, 60).repeat(batch, 1)},
    ),
    Family("skyreels", Sky, BLOCK * 2),
    Family("skyreels-i2v-fused-qkv", Sky, IMAGE_BLOCK * 2, I2V, fuse_qkv=True),
    Family("skyreels-forcing", Sky, BLOCK * 2, {}, FORCED),
    Family("skyreels-fps", Sky, BLOCK * 2, {"inject_sample_info": True}, FPS),
    Family("skyreels-forcing-fps", Sky, BLOCK * 2, {"inject_sample_info": True}, FORCED | FPS,
           batch=1),
    Family("skyreels-masked", Sky, BLOCK * 2, {"num_frame_per_block": 2}, masked=True,
           frames=4),
    Family(
        "skyreels-masked-forcing-i2v",
        Sky,
        IMAGE_BLOCK * 2,
        I2V | {"num_frame_per_block": 2},
        FORCED | {"timestep": lambda noise, batch: torch.linspace(900, 9, 4).repeat(batch, 1)},
        masked=True,
        frames=4,
    ),
]  # fmt: skip


def named(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


def classes(families: Iterable[Family]) -> tuple[str, ...]:
    """The names of their classes."""
    return tuple(sorted({family.cls.__name__ for family in families}))
