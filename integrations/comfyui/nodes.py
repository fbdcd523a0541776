"""The nodes. ComfyUI's modules are imported when a node runs, not when this file is."""

from __future__ import annotations

from typing import Any

from turbo_rcm_patch.errors import CheckpointError
from turbo_rcm_patch.ops import INT8_MIN_KEYS
from turbo_rcm_patch.video.rcm_times import MAX_STEPS, rcm_times

from .attention import OVERRIDE, Override, Settings, add_settings
from .sampler import sample_rcm
from .vae import patched_vae
from .wan import patch_wan
from .weights import read_wan

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]

_CATEGORY = "TurboRCM"
_PV = ["auto", "fp8", "bf16", "fp16"]


class TurboRCMPatch:
    """Run the attention of a model in int8."""

    CATEGORY = _CATEGORY
    FUNCTION = "patch"
    RETURN_TYPES = ("MODEL",)
    DESCRIPTION = (
        "Runs attention in int8. In Wan models the norms and the rotary embedding of "
        "self-attention run in the same kernels. The model that comes in is not changed: bypass "
        "the node to go back. After each run the log says how many attentions ran in int8."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("MODEL",),
                "attention": (
                    ["auto", "int8", "exact"],
                    {"tooltip": "auto: int8 from 6,144 keys on, where it is faster on a GPU. "
                                "exact: fuse Wan's norms alone."},
                ),
                "pv": (_PV, {"tooltip": "Element type of probabilities and values."}),
                "min_keys": (
                    "INT", {"default": INT8_MIN_KEYS, "min": 0, "max": 1 << 20,
                            "tooltip": "Attentions over fewer keys stay exact."},
                ),
                "fuse_wan": ("BOOLEAN", {"default": True, "tooltip": "Fuse norms and rotation."}),
            }
        }  # fmt: skip

    def patch(
        self, model: Any, attention: str, pv: str, min_keys: int, fuse_wan: bool = True
    ) -> tuple[Any]:
        patched = model.clone()
        settings = Settings(attention, pv, min_keys, fuse_wan)
        options = add_settings(patched, settings)
        before = options.get(OVERRIDE)
        if isinstance(before, Override):  # of another node of this kind
            before = before.before
        options[OVERRIDE] = Override(settings, before)
        if fuse_wan:  # Else the functions of an earlier node read it in the settings.
            patch_wan(patched, settings)
        return (patched,)


class TurboRCMLoadSLA:
    """Load a TurboWan checkpoint with SLA or SageSLA."""

    CATEGORY = _CATEGORY
    FUNCTION = "load"
    RETURN_TYPES = ("MODEL",)
    DESCRIPTION = (
        "Loads a TurboDiffusion .pth (also -quant) with its sparse-linear attention. SpargeAttn "
        "is not needed."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        import folder_paths

        return {
            "required": {
                "weights": (folder_paths.get_filename_list("diffusion_models"),),
                "topk": (
                    "FLOAT", {"default": 0.1, "min": 0.01, "max": 1.0, "step": 0.01,
                              "tooltip": "Share of the blocks of keys that the softmax sees."},
                ),
                "pv": (_PV, {}),
            }
        }  # fmt: skip

    def load(self, weights: str, topk: float, pv: str) -> tuple[Any]:
        import folder_paths

        path = folder_paths.get_full_path_or_raise("diffusion_models", weights)
        tensors, proj_l = read_wan(path)
        if not proj_l:
            raise CheckpointError(
                path,
                expected="weights with SLA's proj_l",
                remedy="Load weights without SLA with ComfyUI's own loader",
            )
        import comfy.sd

        model = comfy.sd.load_diffusion_model_state_dict(tensors)
        if model is None:
            raise CheckpointError(path, expected="a Wan that this ComfyUI knows")
        settings = Settings(pv=pv)
        add_settings(model, settings)
        patch_wan(model, settings, proj_l=proj_l, topk=topk)
        return (model,)


class TurboRCMSampler:
    """The few-step rCM sampler and its times, for `SamplerCustom`."""

    CATEGORY = _CATEGORY
    FUNCTION = "make"
    RETURN_TYPES = ("SAMPLER", "SIGMAS")
    DESCRIPTION = "rCM in 1 to 4 steps. Connect both outputs to SamplerCustom and set cfg to 1."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "steps": ("INT", {"default": MAX_STEPS, "min": 1, "max": MAX_STEPS}),
                "sigma_max": (
                    "FLOAT", {"default": 80.0, "min": 15.0, "max": 1000.0,
                              "tooltip": "80; 200 for Wan 2.2 I2V."},
                ),
                "sampler": (["sde", "ode"], {}),
            }
        }  # fmt: skip

    def make(self, steps: int, sigma_max: float, sampler: str) -> tuple[Any, Any]:
        import comfy.samplers

        options = {"sampler": sampler, "steps": steps, "sigma_max": sigma_max}
        ksampler = comfy.samplers.KSAMPLER(sample_rcm, options)
        return ksampler, rcm_times(steps, sigma_max).float()


class TurboRCMVAE:
    """Run the decoder and the encoder of a Wan VAE channels-last."""

    CATEGORY = _CATEGORY
    FUNCTION = "patch"
    RETURN_TYPES = ("VAE",)
    DESCRIPTION = (
        "Runs decoder and encoder of a Wan VAE (2.1, 2.2) channels-last. The first video is "
        "compared with ComfyUI's own code. The VAE that comes in is not changed: bypass the node "
        "to go back. The log says how each coder ran."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "vae": ("VAE",),
                "conv": (
                    ["as-is", "bf16"],
                    {"tooltip": "as-is: in the dtype of the VAE. bf16: products of a VAE in fp32 "
                                "in bf16, sums in fp32."},
                ),
            }
        }  # fmt: skip

    def patch(self, vae: Any, conv: str) -> tuple[Any]:
        return (patched_vae(vae, conv),)


NODE_CLASS_MAPPINGS = {
    "TurboRCMPatch": TurboRCMPatch,
    "TurboRCMLoadSLA": TurboRCMLoadSLA,
    "TurboRCMSampler": TurboRCMSampler,
    "TurboRCMVAE": TurboRCMVAE,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "TurboRCMPatch": "TurboRCM Patch",
    "TurboRCMLoadSLA": "TurboRCM Load SLA",
    "TurboRCMSampler": "TurboRCM Sampler",
    "TurboRCMVAE": "TurboRCM VAE",
}
