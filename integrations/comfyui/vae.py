"""A patched Wan VAE for ComfyUI."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from turbo_rcm_patch import patch_model
from turbo_rcm_patch.errors import UnknownArchitectureError
from turbo_rcm_patch.patching.find import family_of
from turbo_rcm_patch.patching.plain import Replacement, owner
from turbo_rcm_patch.patching.record import ATTRIBUTE


def patched_vae(vae: Any, conv: str) -> Any:
    """Return a VAE whose decoder and encoder are patched; the given one does not change.

    Both share their modules and the patcher that loads and unloads them: patching replaces
    attributes of the VAE's network alone, and the result has a shallow copy of that.

    Args:
        vae: A `comfy.sd.VAE`.
        conv: As `PatchConfig.conv`.

    Raises:
        UnknownArchitectureError: It is not a Wan VAE.
    """
    original = vae.first_stage_model
    if not isinstance(original, nn.Module) or family_of(original) is None:
        raise UnknownArchitectureError(
            "vae",
            expected="a VAE of Wan 2.1 or 2.2",
            got=f"a {type(original).__qualname__}",
            remedy="Connect this VAE without the node",
        )
    result, network = copy.copy(vae), object.__new__(type(original))
    for name, value in vars(original).items():
        ours = name == ATTRIBUTE or isinstance(owner(value), Replacement)
        if not ours:  # of an earlier node of this kind
            vars(network)[name] = value
    patch_model(network, conv=conv)
    result.first_stage_model = network
    return result
