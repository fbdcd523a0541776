"""A pipeline without weights, for questions that only need its shape."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from turbo_rcm_patch.errors import ModelFolderError
from turbo_rcm_patch.extras import require
from turbo_rcm_patch.patching.registry import FAMILIES
from turbo_rcm_patch.patching.sla import attach_proj_l
from turbo_rcm_patch.patching.stored import folder_proj_l, mark_of
from turbo_rcm_patch.sampling.load import quiet_loading, resolve_model
from turbo_rcm_patch.sampling.scheduler import RCMScheduler
from turbo_rcm_patch.sampling.settings import folder_defaults

if TYPE_CHECKING:
    from diffusers import ModelMixin, WanPipeline

__all__ = ["load_skeleton"]


def load_skeleton(model: str | Path) -> WanPipeline:
    """Transformers built from their config.json only, in no time and memory whatever their size.

    Args:
        model: As for `load_pipeline`. Of a hub id only the small configuration files are fetched.

    Returns:
        A pipeline that cannot generate. Its scheduler is the rCM sampler if the model's folder
        asks for it, so that the skip pair of the whole network is listed.
    """
    require("video", "a diffusers pipeline")
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

    folder = resolve_model(model)
    first = _transformer(folder, "transformer")
    second = None
    if isinstance(folder, Path) and (folder / "transformer_2").is_dir():
        second = _transformer(folder, "transformer_2")
    defaults = folder_defaults(folder if isinstance(folder, Path) else None)
    distilled = bool(defaults) and defaults.get("sampler", "rcm") == "rcm"
    return WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        scheduler=RCMScheduler() if distilled else FlowMatchEulerDiscreteScheduler(),
        transformer=first,
        transformer_2=second,
        boundary_ratio=0.9 if second is not None else None,
    )


def _transformer(folder: Path | str, name: str) -> ModelMixin:
    import diffusers

    known = sorted(key.rpartition(".")[2] for key in FAMILIES if key.split(".")[0] == "diffusers")
    local = isinstance(folder, Path)
    try:
        with quiet_loading(), torch.device("meta"):
            config = diffusers.WanTransformer3DModel.load_config(
                str(folder), subfolder=name, local_files_only=local
            )
            asked = config.get("_class_name")
            # Another class would be built wrong from this configuration, not refused.
            cls = getattr(diffusers, asked) if asked in known else None
            network = None if cls is None else cls.from_config(config)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelFolderError(
            f"{folder}: no usable {name}/config.json ({type(error).__name__})",
            expected=f"the configuration of one of {', '.join(known)}",
            remedy="Check the path; for another class call find_pairs on the loaded model",
        ) from error
    if network is None:
        raise ModelFolderError(
            f"{folder}: {name}/config.json: _class_name",
            expected=f"one of {', '.join(known)}",
            got=repr(asked),
            remedy="For another class call find_pairs on the loaded model",
        )
    network = _with_stand_ins(network)
    _attach_sla(network, Path(folder) / name if local else None)
    return network


def _attach_sla(network: ModelMixin, folder: Path | None) -> None:
    """Zeros for each proj_l that `load_pipeline` would attach; by the mark where only config.json
    is at hand."""
    modules = dict(network.named_modules())
    if folder is not None:
        owners = list(folder_proj_l(folder))
    else:
        owners = [name for name in modules if name.endswith(".attn1")] * bool(
            mark_of(network.config)
        )
    for name in owners:
        attention = modules.get(name)
        if attention is not None:
            dim = attention.inner_dim // attention.heads
            attach_proj_l(attention, torch.zeros(dim, dim), torch.zeros(dim))


def _with_stand_ins(network: ModelMixin) -> ModelMixin:
    """Weights of the right shape and dtype on the CPU, one number each, in place of none at all.

    The dtypes are those of a model loaded in bf16, where diffusers keeps some layers in fp32.
    """
    for module_name, module in network.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            parts = f"{module_name}.{name}".split(".")
            kept = any(part in parts for part in network._keep_in_fp32_modules or ())
            one = torch.zeros(1, dtype=torch.float32 if kept else torch.bfloat16)
            stand_in = nn.Parameter(one.expand(weight.shape), requires_grad=False)
            setattr(module, name, stand_in)
    return network
