"""The nodes inside ComfyUI's own code and its server, on a CPU: `python comfyui_checkout.py PATH`.

It needs the packages of ComfyUI's `requirements.txt` and requests, in an environment of its own.
torchvision and torchaudio, which only other models use, are stand-ins where they are missing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
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
from tests.integrations.comfyui import NODES, load_nodes  # noqa: E402
from tests.measures import relative_l2  # noqa: E402
from turbo_rcm_patch import report_of  # noqa: E402

sys.path.insert(0, str(CHECKOUT))  # last, because it has a package called tests too
SERVE = sys.argv[2:]
sys.argv = ["main.py", "--cpu", "--use-pytorch-cross-attention", *SERVE]
for name in ("torchvision", "torchaudio"):
    if importlib.util.find_spec(name) is None:
        for part in ("", ".transforms", ".functional"):
            stand_in = MagicMock()
            stand_in.__spec__ = ModuleSpec(name + part, None)
            sys.modules[name + part] = stand_in

if SERVE:  # This process is the server that `test_server` starts.
    runpy.run_path(str(CHECKOUT / "main.py"), run_name="__main__")
    sys.exit()

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.ldm.wan.model as comfy_wan  # noqa: E402
import comfy.ldm.wan.vae  # noqa: E402
import comfy.ldm.wan.vae2_2  # noqa: E402
import comfy.model_patcher  # noqa: E402
import comfy.ops  # noqa: E402
import comfy.sample  # noqa: E402
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


def test_few_step_lora() -> None:
    """Four steps with a LoRA that is loaded before and after the node."""
    original = load()
    noise, conditioning = torch.randn(SHAPE), [[torch.randn(1, 7, TEXT), {}]]

    def video(model: Any) -> torch.Tensor:
        return comfy.sample.sample(
            model, noise, 4, 1.0, "euler", "simple", conditioning, conditioning,
            torch.zeros(SHAPE), seed=5, disable_pbar=True,
        )  # fmt: skip

    expected = video(with_lora(original))
    assert relative_l2(expected, video(original)) > 0.05
    for model in (patched(with_lora(original)), with_lora(patched(original))):
        assert 1e-5 < relative_l2(video(model), expected) < 3e-2


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


#: A node of the server test: conditioning without a text encoder.
CONDITIONING = f"""
import torch
class Conditioning:
    CATEGORY, FUNCTION, RETURN_TYPES = "test", "make", ("CONDITIONING",)
    @classmethod
    def INPUT_TYPES(cls):
        return {{"required": {{}}}}
    def make(self):
        return ([[torch.randn(1, 7, {TEXT}), {{}}]],)
NODE_CLASS_MAPPINGS = {{"Conditioning": Conditioning}}
"""


def test_server() -> None:
    """A workflow through the server: its log line, and the template browser's files."""
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        for folder in ("custom_nodes", "models/diffusion_models", "user"):
            (base / folder).mkdir(parents=True)
        (base / "custom_nodes" / "turbo_rcm").symlink_to(NODES)
        (base / "custom_nodes" / "conditioning.py").write_text(CONDITIONING)
        torch.save(
            state_dict(Options(**SIZES, sla=True)), base / "models/diffusion_models/tiny.pth"
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log = base / "log.txt"
        command = [
            sys.executable, __file__, str(CHECKOUT), "--base-directory", name, "--port", str(port),
            "--listen", "127.0.0.1", "--disable-api-nodes",
            "--database-url", f"sqlite:///{base}/user/comfyui.db",
        ]  # fmt: skip
        with log.open("w") as written:
            server = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT)
        try:
            _use_server(f"http://127.0.0.1:{port}", log)
        finally:
            server.terminate()
            server.wait(60)


def _use_server(address: str, log: Path) -> None:
    def get(path: str, data: Any = None) -> bytes:
        body = None if data is None else json.dumps(data).encode()
        with urllib.request.urlopen(address + path, body, timeout=60) as answer:
            made: bytes = answer.read()
            return made

    for _ in range(120):
        time.sleep(1)
        with contextlib.suppress(OSError):
            known = json.loads(get("/object_info"))
            break
    else:
        raise AssertionError(log.read_text())
    [template] = json.loads(get("/workflow_templates"))["turbo_rcm"]
    workflow = json.loads(get(f"/api/workflow_templates/turbo_rcm/{template}.json"))
    assert {node["type"] for node in workflow["nodes"]} <= set(known)
    assert get(f"/api/workflow_templates/turbo_rcm/{template}.jpg")[:2] == b"\xff\xd8"

    def node(kind: str, **inputs: Any) -> dict[str, Any]:
        return {"class_type": kind, "inputs": inputs}

    prompt = {
        "1": node("TurboRCMLoadSLA", weights="tiny.pth", topk=0.5, pv="bf16"),
        "2": node(
            "TurboRCMPatch", model=["1", 0], attention="int8", pv="bf16", min_keys=4, fuse_wan=True
        ),
        "3": node("Conditioning"),
        "4": node("TurboRCMSampler", steps=4, sigma_max=80.0, sampler="sde"),
        "5": node("EmptyHunyuanLatentVideo", width=96, height=96, length=5, batch_size=1),
        "6": node(
            "SamplerCustom", model=["2", 0], add_noise=True, noise_seed=0, cfg=1.0,
            positive=["3", 0], negative=["3", 0], sampler=["4", 0], sigmas=["4", 1],
            latent_image=["5", 0],
        ),
        "7": node("SaveLatent", samples=["6", 0], filename_prefix="out"),
    }  # fmt: skip
    run = json.loads(get("/prompt", {"prompt": prompt}))["prompt_id"]
    for _ in range(120):
        time.sleep(1)
        done = json.loads(get(f"/history/{run}"))
        if done:
            break
    assert done[run]["status"]["status_str"] == "success", log.read_text()
    lines = [line for line in log.read_text().splitlines() if "TurboRCM:" in line]
    print(*lines, sep="\n")
    assert lines == ["TurboRCM: attentions: 8 in SLA; 8 in int8"]


def main() -> None:
    torch.manual_seed(0)
    logging.getLogger().setLevel(logging.WARNING)
    for test in (
        test_patch, test_few_step_lora, test_vae, test_server,
    ):  # fmt: skip
        test()
        print("passed:", test.__name__)


if __name__ == "__main__":
    main()
