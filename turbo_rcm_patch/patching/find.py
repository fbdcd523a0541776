"""Find known models in what a user passes, and the blocks in a model.

A class is known by its exact qualified name, or by its structure where it runs from a checkout.
The file of its family is imported when such a model is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import torch
from torch import nn

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import NotAModelError, UnknownArchitectureError
from turbo_rcm_patch.extras import check_diffusers
from turbo_rcm_patch.patching.block import PatchedBlock
from turbo_rcm_patch.patching.plain import original_class
from turbo_rcm_patch.skip import SkipPair

_TRANSFORMERS: Final = "diffusers.models.transformers."
_AUTOENCODERS: Final = "diffusers.models.autoencoders."
#: Exact class -> its family. A subclass counts as unknown, because it may run another forward.
FAMILIES: Final = {
    f"{_TRANSFORMERS}cogvideox_transformer_3d.CogVideoXTransformer3DModel": "cogvideox",
    f"{_TRANSFORMERS}consisid_transformer_3d.ConsisIDTransformer3DModel": "cogvideox",
    f"{_TRANSFORMERS}transformer_wan.WanTransformer3DModel": "wan",
    f"{_TRANSFORMERS}transformer_wan_animate.WanAnimateTransformer3DModel": "wan",
    f"{_TRANSFORMERS}transformer_wan_vace.WanVACETransformer3DModel": "wan_vace",
    f"{_TRANSFORMERS}transformer_anyflow.AnyFlowTransformer3DModel": "wan_anyflow",
    f"{_TRANSFORMERS}transformer_anyflow_far.AnyFlowFARTransformer3DModel": "wan_anyflow",
    f"{_TRANSFORMERS}transformer_chronoedit.ChronoEditTransformer3DModel": "wan",
    f"{_TRANSFORMERS}transformer_skyreels_v2.SkyReelsV2Transformer3DModel": "wan",
    "turbo_rcm_patch.models.RCMAttention": "rcm_attention",
}

#: The same for autoencoders.
VAES: Final = {
    f"{_AUTOENCODERS}autoencoder_kl_wan.AutoencoderKLWan": "vae_wan",
    f"{_AUTOENCODERS}autoencoder_kl_cogvideox.AutoencoderKLCogVideoX": "vae_cogvideox",
}

#: Name of a class that runs from a checkout, under any module name -> its family, whose
#: `recognises` checks the layout of an instance.
STRUCTURES: Final = {"WanModel": "turbodiffusion"}
#: The same for autoencoders: Wan's and TurboDiffusion's, and ComfyUI's.
VAE_STRUCTURES: Final = dict.fromkeys(("WanVAE_", "WanVAE"), "vae_wan")

#: Where a diffusers pipeline keeps its denoising networks (two experts in Wan 2.2).
COMPONENTS: Final = ("transformer", "transformer_2")
#: Where it keeps its autoencoder, which is left alone if its class is not known.
VAE: Final = "vae"


@dataclass(frozen=True, slots=True)
class KnownModule:
    """A module that a family serves.

    Attributes:
        module: The module.
        family: The file of its family, whose `blocks_of(module, path, config)` returns its blocks
            in the order in which they run, and changes nothing.
        path: Its name in what the user passed; in a pipeline it begins with the network's name.
    """

    module: nn.Module
    family: ModuleType
    path: str


def qualified_name(cls: type) -> str:
    """Return "module.Class", the key of the registry."""
    return f"{cls.__module__}.{cls.__qualname__}"


def family_of(model: nn.Module) -> ModuleType | None:
    """Return the file of a module's family, found by its exact class or its structure, or None.

    Raises:
        MissingPackageError: The class is of a release of diffusers that is too old.
    """
    cls = original_class(model)
    full = qualified_name(cls)
    exact = (FAMILIES | VAES).get(full)
    name = exact or (STRUCTURES | VAE_STRUCTURES).get(cls.__qualname__)
    if name is None:
        return None
    if cls.__module__.startswith((_TRANSFORMERS, _AUTOENCODERS)):
        check_diffusers(f"patching a {cls.__qualname__}")
    family = import_module(f"turbo_rcm_patch.patching.families.{name}")
    known = exact is not None or family.recognises(model)
    return family if known else None


def parts_of(model: object) -> dict[str, nn.Module]:
    """Return the networks of a pipeline and its known VAE by name, or a module under the name "".

    Raises:
        NotAModelError: `model` is neither.
    """
    if isinstance(model, nn.Module):
        return {"": model}
    held = ((name, getattr(model, name, None)) for name in COMPONENTS)
    parts = {name: part for name, part in held if isinstance(part, nn.Module)}
    vae = getattr(model, VAE, None)
    if isinstance(vae, nn.Module) and qualified_name(original_class(vae)) in VAES:
        parts[VAE] = vae
    if not parts:
        raise NotAModelError(
            "model",
            expected="a torch.nn.Module, or a pipeline with a transformer or a known VAE",
            got=f"a {qualified_name(type(model))}",
            remedy="Pass pipe.transformer or the pipeline itself",
        )
    return parts


def find_known(model: object) -> list[KnownModule]:
    """Return every module in a model or pipeline whose exact class is known.

    Raises:
        NotAModelError: `model` is neither a torch module nor a pipeline that holds one.
        UnknownArchitectureError: No family knows a class in the model, or in one of the networks
            of the pipeline.
    """
    parts = parts_of(model)
    known_parts = {component: list(_walk(part, component)) for component, part in parts.items()}
    unknown = [component for component, known in known_parts.items() if not known]
    if unknown:
        names = [qualified_name(type(parts[component])) for component in unknown]
        served = [component for component, known in known_parts.items() if known]
        raise UnknownArchitectureError(
            ", ".join(filter(None, unknown)) or "model",
            expected="one of "
            + ", ".join(sorted(FAMILIES | VAES))
            + ", or a WanModel laid out as TurboDiffusion's, or Wan's own WanVAE_",
            got=", ".join(names),
            remedy=f"The pipeline is unchanged. To patch its {served[0]} alone, pass that: "
            f"patch_model(pipe.{served[0]})"
            if served
            else "If it is part of a transformer, pass the transformer. A subclass is not patched,"
            " because it may run another forward. For the attention alone of any diffusers model:"
            " register_backend()",
        )
    # A network may be held under two names.
    every = [entry for known in known_parts.values() for entry in known]
    return list({id(entry.module): entry for entry in reversed(every)}.values())[::-1]


def _walk(module: nn.Module, path: str) -> Iterator[KnownModule]:
    """Yield the known modules from here down, without looking inside a known module."""
    family = family_of(module)
    if family is not None:
        yield KnownModule(module, family, path)
        return
    for name, child in module.named_children():
        # torch.compile adds a level, which the path leaves out.
        inner = path if name == "_orig_mod" else f"{path}.{name}".strip(".")
        yield from _walk(child, inner)


def find_blocks(
    modules: Iterable[nn.Module],
    path: str,
    cls: type,
    make: type[PatchedBlock],
    config: PatchConfig,
    heads_of: Callable[[Any, str], tuple[int, int]],
    **attributes: object,
) -> list[PatchedBlock | SkipPair]:
    """Return the replacements of the blocks in a list of modules, each once even if it is used
    twice. A block of an unknown class gets a pair that says so.

    Args:
        modules: The list. A block may be inside a wrapper (torch's activation checkpointing, a
            compiled module).
        path: Path of the list in the model.
        cls: Class of the blocks.
        make: The class that replaces their forwards.
        config: How they are patched.
        heads_of: Checks the attentions of a block at a path, and returns their heads and the
            channels of a head.
        **attributes: What the replacements share, such as their tables.
    """
    blocks: dict[int, PatchedBlock | SkipPair] = {}
    for index, module in enumerate(modules):
        if id(module) in blocks:
            continue
        inner = [(n, m) for n, m in module.named_modules() if original_class(m) is cls]
        name, block = inner[0] if inner else ("", module)
        where = f"{path}.{index}.{name.replace('_orig_mod', '')}".replace("..", ".").strip(".")
        if inner:
            patched = make(block, where, config, *heads_of(block, where))
            vars(patched).update(attributes)
            blocks[id(module)] = patched
        else:
            reason = f"it is a {type(block).__qualname__}, which is not supported"
            blocks[id(module)] = SkipPair(where, "self", reason=reason)
    return list(blocks.values())


def execution_device(model: nn.Module) -> torch.device:
    """Return the device on which a model computes.

    It is the device to which offloading hooks move the model, or the device of its weights.
    """
    for module in model.modules():
        hook: Any = module.__dict__.get("_hf_hook")
        device = getattr(hook, "execution_device", None)
        if device is not None:
            return torch.device(device if not isinstance(device, int) else f"cuda:{device}")
        registry: Any = module.__dict__.get("_diffusers_hook")
        for entry in getattr(registry, "hooks", {}).values():
            onload = getattr(getattr(entry, "group", None), "onload_device", None)
            if onload is not None:
                return torch.device(onload)
    parameter = next(model.parameters(), None)
    return parameter.device if parameter is not None else torch.device("cpu")
