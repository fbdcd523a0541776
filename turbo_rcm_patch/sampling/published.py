"""The published models of every registered class, by the entries of their config.json that differ
from the class's defaults and matter to its pairs; and their pairs, without their weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

import torch
from torch import nn

from turbo_rcm_patch.config import Kind
from turbo_rcm_patch.patching.find import find_pairs

__all__ = ["PUBLISHED", "Published", "count_pairs", "short_name"]


@dataclass(frozen=True, slots=True)
class Published:
    """A model that can be downloaded.

    Attributes:
        name: As its authors call it.
        config: Arguments of its class.
        kinds: Of the pairs of one block, for a class that is run from a checkout and cannot be
            built here.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    kinds: tuple[Kind, ...] = ()

    def build(self, cls: str) -> nn.Module:
        """The network on torch's current default device, its weights random or on "meta" none.

        Args:
            cls: "module.Class", a key of `PUBLISHED`.
        """
        module, _, name = cls.rpartition(".")
        made: nn.Module = getattr(import_module(module), name)(**self.config)
        return made


_SMALL: Final = {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}
_14B: Final = {"num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824}
_IMAGE: Final = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
_5B: Final = {
    "num_attention_heads": 48,
    "num_layers": 42,
    "use_rotary_positional_embeddings": True,
}
_LEARNED: Final = {"in_channels": 32, "use_learned_positional_embeddings": True}
_1_5: Final = {"patch_size_t": 2, "patch_bias": False, "sample_frames": 81}
_DIFFUSERS: Final = "diffusers.models.transformers."

#: Key of the registry -> its published models.
PUBLISHED: Final[dict[str, tuple[Published, ...]]] = {
    f"{_DIFFUSERS}transformer_wan.WanTransformer3DModel": (
        Published("Wan 2.1 T2V 1.3B", _SMALL),
        Published("Wan 2.1 T2V 14B", _14B),
        Published("Wan 2.1 I2V 14B", _14B | _IMAGE),
        Published("Wan 2.1 FLF2V 14B", _14B | _IMAGE | {"pos_embed_seq_len": 514}),
        Published("each expert of Wan 2.2 T2V A14B", _14B),
        Published("each expert of Wan 2.2 I2V A14B", _14B | {"in_channels": 36}),
        Published(
            "Wan 2.2 TI2V 5B",
            {"num_attention_heads": 24, "num_layers": 30, "ffn_dim": 14336, "in_channels": 48,
             "out_channels": 48},
        ),
    ),
    f"{_DIFFUSERS}transformer_wan_vace.WanVACETransformer3DModel": (
        Published("Wan 2.1 VACE 1.3B", _SMALL | {"vace_layers": list(range(0, 30, 2))}),
        Published("Wan 2.1 VACE 14B", _14B | {"vace_layers": list(range(0, 40, 5))}),
    ),
    f"{_DIFFUSERS}transformer_wan_animate.WanAnimateTransformer3DModel": (
        Published("Wan 2.2 Animate 14B", _14B | {"added_kv_proj_dim": 5120}),
    ),
    f"{_DIFFUSERS}transformer_chronoedit.ChronoEditTransformer3DModel": (
        Published("ChronoEdit 14B", _14B | _IMAGE),
    ),
    f"{_DIFFUSERS}transformer_skyreels_v2.SkyReelsV2Transformer3DModel": (
        Published("SkyReels-V2 DF 1.3B", _SMALL | {"inject_sample_info": True}),
        Published("SkyReels-V2 T2V 14B", _14B),
        Published("SkyReels-V2 I2V 14B", _14B | _IMAGE),
    ),
    f"{_DIFFUSERS}cogvideox_transformer_3d.CogVideoXTransformer3DModel": (
        Published("CogVideoX 2B"),
        Published("CogVideoX 5B", _5B),
        Published("CogVideoX 5B I2V", _5B | _LEARNED),
        Published("CogVideoX 1.5 5B", _5B | _1_5),
        Published("CogVideoX 1.5 5B I2V", _5B | _1_5 | {"in_channels": 32, "ofs_embed_dim": 512}),
    ),
    f"{_DIFFUSERS}consisid_transformer_3d.ConsisIDTransformer3DModel": (
        Published("ConsisID", _5B | _LEARNED | {"is_train_face": True}),
    ),
    "WanModel": (
        Published("a block", kinds=("self", "cross", "feed-forward")),
        Published("a block of Wan 2.1 I2V", kinds=("self", "cross", "image", "feed-forward")),
        Published("one with SLA or SageSLA", kinds=("self", "cross", "self", "feed-forward")),
    ),
    "turbo_rcm_patch.models.rcm_attention.RCMAttention": (
        Published("a module of this library", {"dim": 128, "num_heads": 2}),
    ),
}  # fmt: skip


def short_name(cls: str) -> str:
    """The class of a key of `PUBLISHED`, without its module."""
    return cls.rpartition(".")[2]


def count_pairs(cls: str, model: Published) -> tuple[int, int]:
    """How many pairs of a published model are fused, and how many are left as written."""
    if model.kinds:
        return len(model.kinds), 0
    with torch.device("meta"):
        table = find_pairs(model.build(cls))
    return table.fused, len(table) - table.fused
