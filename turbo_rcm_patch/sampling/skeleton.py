"""A pipeline without weights, for questions that only need its shape."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from turbo_rcm_patch.errors import ModelFolderError
from turbo_rcm_patch.patching.registry import FAMILIES
from turbo_rcm_patch.sampling.load import quiet_loading, resolve_model
from turbo_rcm_patch.sampling.scheduler import RCMScheduler
from turbo_rcm_patch.sampling.settings import folder_defaults

__all__ = ["Skeleton", "load_skeleton"]

#: Class name -> module, of the diffusers transformers that can be patched.
_CLASSES: Final = {
    name: module
    for module, _, name in (key.rpartition(".") for key in FAMILIES)
    if module.startswith("diffusers.")
}


@dataclass(slots=True)
class Skeleton:
    """As much of a pipeline as `find_pairs` looks at."""

    transformer: nn.Module
    transformer_2: nn.Module | None = None
    scheduler: object = None


def load_skeleton(model: str | Path) -> Skeleton:
    """Transformers built from their config.json only, in no time and memory whatever their size.

    Args:
        model: As for `load_pipeline`, and any other folder or hub id whose transformer can be
            patched. Of a hub id only the small configuration files are fetched.

    Returns:
        A pipeline that cannot generate. Its scheduler is the rCM sampler if the model's folder
        asks for it, so that the skip pair of the whole network is listed.
    """
    folder = resolve_model(model)
    result = Skeleton(_transformer(folder, "transformer"))
    if isinstance(folder, Path) and (folder / "transformer_2").is_dir():
        result.transformer_2 = _transformer(folder, "transformer_2")
    defaults = folder_defaults(folder if isinstance(folder, Path) else None)
    if defaults and defaults.get("sampler", "rcm") == "rcm":
        result.scheduler = RCMScheduler()
    return result


def _transformer(folder: Path | str, name: str) -> nn.Module:
    from diffusers import WanTransformer3DModel

    try:
        with quiet_loading(), torch.device("meta"):
            # Whatever class the configuration is of.
            config: Any = WanTransformer3DModel.load_config(
                str(folder), subfolder=name, local_files_only=isinstance(folder, Path)
            )
            kind = config.get("_class_name")
            made = getattr(import_module(_CLASSES[kind]), kind).from_config(config)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelFolderError(
            f"{folder}: no usable {name}/config.json ({type(error).__name__}: {error})",
            expected=f"the configuration of one of {', '.join(sorted(_CLASSES))}",
            remedy="Check the path; for another class call find_pairs on the loaded model",
        ) from error
    network: nn.Module = made
    return _with_stand_ins(network)


def _with_stand_ins(network: nn.Module) -> nn.Module:
    """Weights of the right shape and dtype on the CPU, one number each, in place of none at all.

    The dtypes are those of a model loaded in bf16, where diffusers keeps some layers in fp32.
    """
    in_fp32: Any = getattr(network, "_keep_in_fp32_modules", None) or ()
    for module_name, module in network.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            parts = f"{module_name}.{name}".split(".")
            kept = any(part in parts for part in in_fp32)
            one = torch.zeros(1, dtype=torch.float32 if kept else torch.bfloat16)
            stand_in = nn.Parameter(one.expand(weight.shape), requires_grad=False)
            setattr(module, name, stand_in)
    return network
