"""The nodes inside ComfyUI's own code, on a CPU: `python comfyui_checkout.py PATH`.

It needs the packages of ComfyUI's `requirements.txt`, in an environment of its own.
torchvision and torchaudio, which only other models use, are stand-ins where they are missing.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

ROOT = Path(__file__).parents[2]
CHECKOUT = Path(sys.argv[1]).resolve()
sys.path.insert(0, str(ROOT))

from tests.checkpoints.wan_model import Options, state_dict  # noqa: E402
from tests.integrations.comfyui import load_nodes  # noqa: E402
from tests.measures import relative_l2  # noqa: E402
from turbo_rcm_patch import report_of  # noqa: E402

sys.path.insert(0, str(CHECKOUT))  # last, because it has a package called tests too
sys.argv = ["main.py", "--cpu", "--use-pytorch-cross-attention"]
for name in ("torchvision", "torchaudio"):
    if importlib.util.find_spec(name) is None:
        for part in ("", ".transforms", ".functional"):
            stand_in = MagicMock()
            stand_in.__spec__ = ModuleSpec(name + part, None)
            sys.modules[name + part] = stand_in

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.ldm.wan.model as comfy_wan  # noqa: E402
import comfy.ldm.wan.vae  # noqa: E402
import comfy.ldm.wan.vae2_2  # noqa: E402
import comfy.model_patcher  # noqa: E402
import comfy.ops  # noqa: E402
import comfy.sd  # noqa: E402

nodes = load_nodes("custom_nodes_turbo_rcm")
Patch = nodes.NODE_CLASS_MAPPINGS["TurboRCMPatch"]
CHANNELS, TEXT = 16, 4096
#: The sizes that ComfyUI takes for granted of a Wan.
SIZES: dict[str, Any] = {"freq": 256, "text": TEXT, "inputs": CHANNELS, "outputs": CHANNELS}
#: 2 x 6 x 6 tokens, each of 2 x 2 pixels of the latent video.
SHAPE = (1, CHANNELS, 2, 12, 12)


def load() -> Any:
    """A tiny Wan of ComfyUI's own class in ComfyUI's own patcher."""
    tensors = state_dict(Options(**SIZES))
    for index in (0, 1):  # So that attention reaches the output.
        tensors[f"blocks.{index}.modulation"][:, (2, 5)] += 0.7
        tensors[f"blocks.{index}.self_attn.norm_q.weight"] *= 3
    tensors["patch_embedding.weight"] = tensors["patch_embedding.weight"].view(-1, 16, 1, 2, 2)
    model = comfy.sd.load_diffusion_model_state_dict(tensors)
    assert type(model.model.diffusion_model) is comfy_wan.WanModel
    return model


def velocity(model: Any, lowvram: bool = False) -> torch.Tensor:
    """One forward of the network, as sampling calls it; with `lowvram` no Linear is loaded, and
    each applies its LoRA when it runs."""
    torch.manual_seed(0)
    x, context = torch.randn(SHAPE), torch.randn(1, 7, TEXT)
    if lowvram:
        comfy.model_management.unload_all_models()
        model.patch_model(torch.device("cpu"), lowvram_model_memory=1)
        assert model.model.model_lowvram
    else:
        comfy.model_management.load_models_gpu([model], force_full_load=True)
    options = model.model_options["transformer_options"]
    network = model.model.diffusion_model
    with torch.no_grad():
        out = network(x, torch.tensor([500.0]), context, transformer_options=options).float()
    if lowvram:
        model.unpatch_model(torch.device("cpu"))
    return out


def patched(model: Any, **settings: Any) -> Any:
    given = {"attention": "int8", "pv": "bf16", "min_keys": 32, "fuse_wan": True}
    return Patch().patch(model, **(given | settings))[0]


def with_lora(model: Any) -> Any:
    """A clone with a LoRA, in the keys of lightx2v's, as ComfyUI's loader adds it."""
    torch.manual_seed(4)
    weights = {}
    for block in (0, 1):
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "ffn.0"):
            linear = model.model.diffusion_model.get_submodule(f"blocks.{block}.{name}")
            out, inside = linear.weight.shape
            key = f"diffusion_model.blocks.{block}.{name}"
            weights[f"{key}.lora_down.weight"] = torch.randn(4, inside) * 0.1
            weights[f"{key}.lora_up.weight"] = torch.randn(out, 4) * 0.1
    return comfy.sd.load_lora_for_models(model, None, weights, 1.0, 0.0)[0]


def test_patch() -> None:
    original = load()
    expected = velocity(original)
    for fuse in (True, False):
        exact = patched(original, attention="exact", fuse_wan=fuse)
        assert relative_l2(velocity(exact), expected) < 1e-4
        int8 = patched(original, fuse_wan=fuse)
        assert 1e-4 < relative_l2(velocity(int8), expected) < 2e-2
        assert torch.equal(velocity(original), expected)  # Loading it again unpatched the clone.
    adapted = velocity(with_lora(original))
    assert relative_l2(adapted, expected) > 0.01
    for after in (patched(with_lora(original), attention="exact"),
                  with_lora(patched(original, attention="exact"))):  # fmt: skip
        assert relative_l2(velocity(after), adapted) < 1e-4
        assert relative_l2(velocity(after, lowvram=True), adapted) < 1e-4
    assert torch.equal(velocity(original), expected)


def test_vae() -> None:
    """Its own VAEs of Wan 2.1 and 2.2, also with weights that are cast when they are read."""
    for file in (comfy.ldm.wan.vae, comfy.ldm.wan.vae2_2):
        torch.manual_seed(0)
        wider = {} if file is comfy.ldm.wan.vae else {"dec_dim": 12}
        network = file.WanVAE(
            dim=8, z_dim=6, dim_mult=[1, 2, 4, 4], num_res_blocks=1,
            temperal_downsample=[False, True, True], **wider,
        ).eval().requires_grad_(False)  # fmt: skip
        for name, weight in network.named_parameters():
            gamma = name.endswith("gamma")
            spread = 1.4 * weight[0].numel() ** -0.5 if weight.dim() > 1 and not gamma else 0.2
            weight.normal_(float(gamma), spread)
        given = SimpleNamespace(first_stage_model=network)
        z, x = torch.randn(1, 6, 4, 4, 6), torch.randn(1, 3, 9, 32, 48)
        for lends in (False, True):
            for module in network.modules() if lends else ():
                if isinstance(module, comfy.ops.CastWeightBiasOp):
                    module.comfy_cast_weights = True
                    module.weight_function = [lambda weight: 1.1 * weight]
            (made,) = nodes.NODE_CLASS_MAPPINGS["TurboRCMVAE"]().patch(given, "as-is")
            with torch.inference_mode():
                for name, value in (("decode", z), ("encode", x)):
                    found = getattr(made.first_stage_model, name)(value)
                    error = relative_l2(found, getattr(network, name)(value))
                    assert error < 3e-6 and error > 0, error
            ran = report_of(made.first_stage_model).ran()
            assert all(how.startswith("channels-last") for how in ran.values()), ran


def main() -> None:
    torch.manual_seed(0)
    logging.getLogger().setLevel(logging.WARNING)
    for test in (test_patch, test_vae):
        test()
        print("passed:", test.__name__)


if __name__ == "__main__":
    main()
