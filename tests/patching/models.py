"""The one table of models: tiny random transformers of every class that patching knows.

Attention reaches the output of each: gates are live and queries peaked. No two vectors of weights
are equal, and none is all ones or zeros, so a swapped or lost weight shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from diffusers import CogVideoXTransformer3DModel, WanTransformer3DModel
from diffusers.models.attention_processor import FusedCogVideoXAttnProcessor2_0
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from torch import nn
from torch.utils._pytree import tree_map_only

from tests.patching import turbodiffusion
from tests.patching.turbodiffusion import spread
from turbo_rcm_patch.models import RCMAttention
from turbo_rcm_patch.patching.sla import attach_proj_l

BLOCK = ["self", "cross", "feed-forward"]
IMAGE_BLOCK = ["self", "cross", "image", "feed-forward"]
SLA_BLOCK = ["self", "self", "cross", "feed-forward"]
JOINT_BLOCK = ["self", "feed-forward"]

Noise = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Model:
    """One row of the table.

    Attributes:
        name: For a reader.
        kinds: The kind of every pair, in the order of the report.
        make: Makes the model in fp32.
        given: Makes its inputs from a source of noise and the batch size.
        left: How many pairs are left as their author wrote them.
        keep_fp32: Parts of names of parameters that a cast leaves in fp32, as `from_pretrained`
            does.
    """

    name: str
    kinds: list[str]
    make: Callable[[], Any]
    given: Callable[[Noise, int], dict[str, Any]]
    left: int = 0
    keep_fp32: tuple[str, ...] = ()

    @property
    def cls(self) -> str:
        """The name of its class."""
        return type(self.make()).__name__

    def model(self, dtype: torch.dtype = torch.float32) -> Any:
        made = self.make().eval().requires_grad_(False)
        for name, tensor in [*made.named_parameters(), *made.named_buffers()]:
            kept = any(part in name for part in self.keep_fp32)
            if tensor.is_floating_point() and not kept:
                tensor.data = tensor.data.to(dtype)
        return made

    def inputs(self, batch: int = 2, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(1)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        return self.given(noise, batch)

    def __str__(self) -> str:
        return self.name


def run(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """One forward, without gradients."""
    with torch.no_grad():
        made = model(**inputs)
    output: torch.Tensor = made if isinstance(made, torch.Tensor) else made[0]
    return output


def mapped(inputs: Any, by: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same inputs with every tensor changed, also those in lists, tuples and dicts."""
    return tree_map_only(torch.Tensor, by, inputs)


def wide(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same inputs in fp32."""
    made: dict[str, Any] = mapped(inputs, lambda x: x.float() if x.is_floating_point() else x)
    return made


# --- Wan and its relatives -----------------------------------------------------------------------

_WAN: dict[str, Any] = {
    "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 64, "in_channels": 4,
    "out_channels": 4, "text_dim": 16, "freq_dim": 32, "ffn_dim": 64, "num_layers": 2,
    "rope_max_seq_len": 32,
}  # fmt: skip
I2V: dict[str, Any] = {"image_dim": 16, "added_kv_proj_dim": 128}
VACE: dict[str, Any] = {"vace_layers": [0, 1], "vace_in_channels": 6}
ANIMATE: dict[str, Any] = {
    "in_channels": 12, "latent_channels": 4, "image_dim": None,
    "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8}, "motion_encoder_size": 16,
    "motion_style_dim": 8, "motion_dim": 4, "motion_encoder_dim": 16,
    "face_encoder_hidden_dim": 16, "face_encoder_num_heads": 2, "inject_face_latents_blocks": 2,
}  # fmt: skip


def wan(cls: type[nn.Module] = WanTransformer3DModel, **config: Any) -> Any:
    """A seeded Wan transformer of a class."""
    torch.manual_seed(0)
    model: Any = cls(**(_WAN | config))
    for block in [*getattr(model, "vace_blocks", ()), *model.blocks]:
        block.scale_shift_table.data[:, (2, 5)] += 0.7  # gates
        block.scale_shift_table.data[:, (1, 4)] *= 3  # scales
        for attn in (block.attn1, block.attn2):
            attn.norm_q.weight.data.mul_(2)
    return spread(model)


def fused(model: Any) -> Any:
    """A model after `fuse_qkv_projections`."""
    model.fuse_qkv_projections()
    return model


def with_times_apart(model: Any) -> Any:
    """A modulation that depends on the time as much as a trained one's."""
    model.condition_embedder.time_proj.weight.data.mul_(16)
    return model


def with_sla(model: Any) -> Any:
    """A random proj_l in every self-attention of a Wan transformer, large enough to show."""
    generator = torch.Generator().manual_seed(7)
    for block in model.blocks:
        dim = block.attn1.inner_dim // block.attn1.heads
        weight = torch.randn(dim, dim, generator=generator) * 2 * dim**-0.5
        attach_proj_l(block.attn1, weight, torch.randn(dim, generator=generator) * 0.3)
    return model


def _wan_row(
    name: str,
    kinds: list[str],
    cls: type[nn.Module] = WanTransformer3DModel,
    config: dict[str, Any] | None = None,
    given: dict[str, Callable[[Noise, int], Any]] | None = None,
    *,
    left: int = 0,
    frames: int = 3,
    size: tuple[int, int] = (8, 10),
    after: Callable[[Any], Any] = lambda model: model,
) -> Model:
    config = config or {}

    def inputs(noise: Noise, batch: int) -> dict[str, Any]:
        image = "added_kv_proj_dim" in config
        made: dict[str, Any] = {
            "hidden_states": noise(batch, config.get("in_channels", 4), frames, *size),
            "timestep": torch.tensor([500.0] * batch),
            "encoder_hidden_states": noise(batch, 512 if image else 7, 16),
            "return_dict": False,
        }
        if image:
            images = 2 if "pos_embed_seq_len" in config else 1  # first and last frame
            made["encoder_hidden_states_image"] = noise(batch * images, 5, 16)
        return made | {key: make(noise, batch) for key, make in (given or {}).items()}

    keep = ("rope", "time_embedder", "scale_shift_table", "norm1", "norm2", "norm3")
    return Model(name, kinds, lambda: after(wan(cls, **config)), inputs, left, keep)


_CONTROL = {"control_hidden_states": lambda noise, batch: noise(batch, 6, 3, 8, 10)}
_POSE_AND_FACE = {
    "pose_hidden_states": lambda noise, batch: noise(batch, 4, 2, 8, 10),
    "face_pixel_values": lambda noise, batch: noise(batch, 3, 5, 16, 16),
}
_FORCED = {
    "timestep": lambda noise, batch: torch.tensor([[900.0, 500.0, 20.0]] * batch),
    "enable_diffusion_forcing": lambda noise, batch: True,
}
#: As in Wan 2.2 TI2V the first frame has no noise.
_TOKEN_TIMES = {
    "timestep": lambda noise, batch: torch.tensor([0.0] * 20 + [900.0] * 40).repeat(batch, 1)
}
_SKY = diffusers.SkyReelsV2Transformer3DModel
_ANIMATE = diffusers.WanAnimateTransformer3DModel
_WIDE_HEAD = {"attention_head_dim": 128, "num_attention_heads": 1}
_ODD_HEADS = {"attention_head_dim": 24, "num_attention_heads": 3}
_CHRONO = diffusers.ChronoEditTransformer3DModel

WANS = [
    _wan_row("t2v", BLOCK * 2),
    _wan_row("i2v", IMAGE_BLOCK * 2, config=I2V),
    _wan_row("flf2v", IMAGE_BLOCK * 2, config=I2V | {"pos_embed_seq_len": 10}),
    _wan_row("no-cross-norm", BLOCK * 2, config={"cross_attn_norm": False}),
    _wan_row("gate-per-token", BLOCK * 2, given=_TOKEN_TIMES, after=with_times_apart),
    _wan_row("fused-qkv", BLOCK * 2, after=fused),
    _wan_row("fused-qkv-i2v", IMAGE_BLOCK * 2, config=I2V, after=fused),
    _wan_row("head-dim-128", BLOCK * 2, config=_WIDE_HEAD),
    _wan_row("three-heads-of-24", BLOCK * 2, config=_ODD_HEADS),
    _wan_row("sla", SLA_BLOCK * 2, size=(20, 24), after=with_sla),
    _wan_row(
        "vace", [*BLOCK * 2, *BLOCK * 2], diffusers.WanVACETransformer3DModel, VACE, _CONTROL
    ),
    _wan_row("animate", [*BLOCK * 2, "cross"], _ANIMATE, ANIMATE, _POSE_AND_FACE, left=1),
    _wan_row("chronoedit", BLOCK * 2, _CHRONO),
    _wan_row("chronoedit-i2v", IMAGE_BLOCK * 2, _CHRONO, I2V, after=fused),
    _wan_row("skyreels", BLOCK * 2, _SKY),
    _wan_row("skyreels-forcing", BLOCK * 2, _SKY, {}, _FORCED),
    _wan_row("skyreels-masked", BLOCK * 2, _SKY, {"num_frame_per_block": 2}, frames=4),
]

_FRAME_TIMES = {
    "hidden_states": lambda noise, batch: noise(batch, 3, 4, 8, 10),
    "timestep": lambda noise, batch: torch.tensor([[900.0, 500.0, 20.0]] * batch),
    "r_timestep": lambda noise, batch: torch.tensor([[300.0, 100.0, 0.0]] * batch),
}
#: A step of the third chunk: 4 tokens of a compressed frame and 20 of a full one are cached.
_THIRD_CHUNK = _FRAME_TIMES | {
    "chunk_partition": lambda noise, batch: [1, 1, 3],
    "kv_cache": lambda noise, batch: [
        {"compressed_cache": noise(2, batch, 2, 9, 64), "full_cache": noise(2, batch, 2, 25, 64)}
        for _ in range(6)  # enough for tests that add blocks
    ],
    "kv_cache_flag": lambda noise, batch: {"is_cache_step": False, "num_cached_chunks": 2},
}
_FAR = {"full_chunk_limit": 2, "compressed_patch_size": (1, 4, 4)}
ANYFLOWS = [
    _wan_row("anyflow", BLOCK * 2, diffusers.AnyFlowTransformer3DModel, {}, _FRAME_TIMES),
    _wan_row("anyflow-far", BLOCK * 2, diffusers.AnyFlowFARTransformer3DModel, _FAR, _THIRD_CHUNK),
]

# --- CogVideoX and ConsisID ----------------------------------------------------------------------

_COGVIDEOX: dict[str, Any] = {
    "num_attention_heads": 2, "attention_head_dim": 64, "in_channels": 4, "out_channels": 4,
    "time_embed_dim": 16, "text_embed_dim": 16, "num_layers": 2, "sample_width": 8,
    "sample_height": 12, "sample_frames": 13, "max_text_seq_length": 7,
}  # fmt: skip
FACE: dict[str, Any] = {
    "is_train_face": True, "LFE_id_dim": 16, "LFE_vit_dim": 8, "LFE_depth": 5, "LFE_dim_head": 8,
    "LFE_num_heads": 2, "LFE_num_id_token": 2, "LFE_num_querie": 3, "LFE_output_dim": 85,
    "LFE_ff_mult": 2, "cross_attn_dim_head": 16, "cross_attn_num_heads": 2,
}  # fmt: skip


def cogvideox(cls: type[nn.Module] = CogVideoXTransformer3DModel, **config: Any) -> Any:
    """A seeded CogVideoX transformer of a class."""
    torch.manual_seed(0)
    model: Any = cls(**(_COGVIDEOX | config))
    for block in model.transformer_blocks:
        for norm in (block.norm1, block.norm2):
            nn.init.normal_(norm.linear.bias, 0.3, 0.4)
        block.attn1.norm_q.weight.data.mul_(2)
    return spread(model)


def _fused_by_hand(model: Any) -> Any:
    """ConsisID's `fuse_qkv_projections` does nothing: its attentions are not of the kind that it
    looks for."""
    for block in model.transformer_blocks:
        block.attn1.fuse_projections()
        block.attn1.set_processor(FusedCogVideoXAttnProcessor2_0())
    return model


def _cogvideox_row(
    name: str,
    cls: type[nn.Module] = CogVideoXTransformer3DModel,
    config: dict[str, Any] | None = None,
    *,
    rotary: bool = True,
    left: int = 0,
    after: Callable[[Any], Any] = lambda model: model,
) -> Model:
    config = (config or {}) | {"use_rotary_positional_embeddings": rotary}

    def inputs(noise: Noise, batch: int) -> dict[str, Any]:
        made: dict[str, Any] = {
            "hidden_states": noise(batch, 4, config.get("in_channels", 4), 12, 8),
            "timestep": torch.tensor([500] * batch),
            "encoder_hidden_states": noise(batch, 7, 16),
            "return_dict": False,
        }
        if rotary:
            frames = 4 // config.get("patch_size_t", 1)
            dim = config.get("attention_head_dim", 64)
            made["image_rotary_emb"] = get_3d_rotary_pos_embed(
                dim, ((0, 0), (6, 4)), (6, 4), frames
            )
        if "ofs_embed_dim" in config:
            made["ofs"] = torch.full((1,), 2.0)
        if "is_train_face" in config:
            made["id_cond"] = noise(batch, 16)
            made["id_vit_hidden"] = [noise(batch, 6, 8) for _ in range(5)]
        return made

    kinds = JOINT_BLOCK * 2 + ["cross"] * left
    return Model(name, kinds, lambda: after(cogvideox(cls, **config)), inputs, left)


_1_5 = {"patch_size_t": 2, "patch_bias": False, "in_channels": 8, "ofs_embed_dim": 16}
COGVIDEOXS = [
    _cogvideox_row("cogvideox-2b", rotary=False),
    _cogvideox_row("cogvideox-5b"),
    _cogvideox_row("cogvideox-1.5-i2v", config=_1_5),
    _cogvideox_row("cogvideox-fused-qkv", after=fused),
    _cogvideox_row("cogvideox-no-affine", config={"norm_elementwise_affine": False}, rotary=False),
    _cogvideox_row("cogvideox-geglu", config={"activation_fn": "geglu"}, rotary=False),
    _cogvideox_row("consisid", diffusers.ConsisIDTransformer3DModel),
    _cogvideox_row(
        "consisid-fused-qkv", diffusers.ConsisIDTransformer3DModel, after=_fused_by_hand
    ),
    _cogvideox_row("consisid-face", diffusers.ConsisIDTransformer3DModel, FACE, left=1),
]

# --- TurboDiffusion and this library's module ----------------------------------------------------


def _turbo_row(name: str, kinds: list[str], make: Callable[[], Any]) -> Model:
    def seeded() -> Any:
        torch.manual_seed(0)
        return make()

    def inputs(noise: Noise, batch: int) -> dict[str, Any]:
        text = 512 + 5 if "i2v" in name else 7
        given = {"x": noise(batch, 200, 16), "e": noise(batch, 6, 128).float()}
        return given | {"context": noise(batch, text, 128)}

    return Model(name, kinds, seeded, inputs)


_tiny, _sparse = turbodiffusion.tiny, turbodiffusion.with_sparse
TURBOS = [
    _turbo_row("turbo", BLOCK * 2, _tiny),
    _turbo_row("turbo-i2v", IMAGE_BLOCK * 2, lambda: _tiny(image=True)),
    _turbo_row("turbo-sla", SLA_BLOCK * 2, lambda: _sparse(_tiny())),
    _turbo_row("turbo-sagesla", SLA_BLOCK * 2, lambda: _sparse(_tiny(), sage=True)),
    _turbo_row("turbo-fast-norms", BLOCK * 2, lambda: turbodiffusion.with_fast_norms(_tiny())),
]


def _module(projection: bool) -> Any:
    torch.manual_seed(0)
    return spread(RCMAttention(128, 2, projection=projection))


def _x_and_t(noise: Noise, batch: int) -> dict[str, Any]:
    return {"x": noise(batch, 90, 128), "t": torch.linspace(0.3, 0.8, batch)}


MODULES = [
    Model("rcm-projection", ["self"], lambda: _module(True), _x_and_t),
    Model("rcm", ["self"], lambda: _module(False), _x_and_t),
]

MODELS = [*WANS, *ANYFLOWS, *COGVIDEOXS, *TURBOS, *MODULES]


def named(name: str) -> Model:
    """The row of that name."""
    return next(model for model in MODELS if model.name == name)


WAN, COG = named("t2v"), named("cogvideox-5b")


def blocks(model: Any) -> Any:
    """The blocks of a transformer of diffusers."""
    return model.blocks if hasattr(model, "blocks") else model.transformer_blocks


def feed_forward(block: Any) -> Any:
    """The feed-forward of such a block."""
    return block.ffn if hasattr(block, "ffn") else block.ff


def classes(models: list[Model]) -> tuple[str, ...]:
    """The names of their classes, for the support matrix."""
    return tuple(sorted({model.cls for model in models}))


def dicts(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Every instance attribute of every module, containers copied one level deep."""
    return {
        name: {k: dict(v) if isinstance(v, dict) else v for k, v in vars(module).items()}
        for name, module in model.named_modules()
    }
