"""Which classes are known, by exact qualified name or by structure; a family's file loads when one
is met."""

from __future__ import annotations

from importlib import import_module
from typing import Final, Protocol, cast

from torch import nn

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.patching.state import ModelPlan

#: Exact class -> the module that serves it. A subclass may run another forward, so it is unknown.
FAMILIES: Final = {
    "diffusers.models.transformers.cogvideox_transformer_3d.CogVideoXTransformer3DModel": (
        "cogvideox"
    ),
    "diffusers.models.transformers.consisid_transformer_3d.ConsisIDTransformer3DModel": (
        "cogvideox"
    ),
    "diffusers.models.transformers.transformer_wan.WanTransformer3DModel": "wan",
    "diffusers.models.transformers.transformer_wan_animate.WanAnimateTransformer3DModel": "wan",
    "diffusers.models.transformers.transformer_wan_vace.WanVACETransformer3DModel": "wan_vace",
    "diffusers.models.transformers.transformer_chronoedit.ChronoEditTransformer3DModel": "wan",
    "diffusers.models.transformers.transformer_skyreels_v2.SkyReelsV2Transformer3DModel": (
        "wan_skyreels"
    ),
    "turbo_rcm_patch.models.rcm_attention.RCMAttention": "rcm_attention",
}

#: Name of a class that is run from a checkout, under whatever module name -> the module whose
#: `recognises` looks at how an instance is laid out.
STRUCTURES: Final = {"WanModel": "turbodiffusion"}


class Family(Protocol):
    """What a family's module offers."""

    def check(self, model: nn.Module) -> None:
        """Raise a typed error if this instance cannot be patched at all."""

    def plan(self, model: nn.Module, path: str, config: PatchConfig) -> ModelPlan:
        """Its pairs, how each would run, and what would be installed. Changes nothing."""


def author_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module's author gave it. `fully_shard` swaps it for a subclass, with the
    same forward, of its own mixin and that class."""
    cls = type(module)
    mixin = cls.__bases__[0]
    sharded = mixin.__name__ == "FSDPModule" and mixin.__module__.startswith("torch.distributed")
    return cls.__bases__[1] if sharded and len(cls.__bases__) == 2 else cls


def qualified_name(cls: type) -> str:
    """ "module.Class", the key of the registry."""
    return f"{cls.__module__}.{cls.__qualname__}"


def family_of(model: nn.Module) -> Family | None:
    """The family of a module's exact class, or of its structure, or None."""
    name = FAMILIES.get(qualified_name(author_class(model)))
    if name is not None:
        module: Family = import_module(f"turbo_rcm_patch.patching.families.{name}")
        return module
    name = STRUCTURES.get(author_class(model).__qualname__)
    if name is None:
        return None
    structured = import_module(f"turbo_rcm_patch.patching.families.{name}")
    return cast("Family", structured) if structured.recognises(model) else None
