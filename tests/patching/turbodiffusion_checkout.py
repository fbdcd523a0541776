"""TurboDiffusion's real WanModel, SLA and VAE from a checkout, on a CPU, against ours:
`TRITON_INTERPRET=1 python -m tests.patching.turbodiffusion_checkout PATH`.

Its imports need einops and loguru beside what this package needs. Its SLA is a Triton kernel. On a
CPU its code needs three shims: `Tensor.cuda` does nothing, the rotary embedding of flash-attn is
plain torch, and scaled_dot_product_attention takes the math backend. Its SLA computes in its
attribute `dtype`, fp32 here (on a CPU its autocast is off, and bf16 is wrong in the interpreter).
"""

from __future__ import annotations

import itertools
import math
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from diffusers import WanTransformer3DModel
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.measures import relative_l2
from turbo_rcm_patch import PatchConfig, patched
from turbo_rcm_patch.checkpoints.convert import convert_transformer

EXACT = PatchConfig(attention="exact", guard=False)
INT8 = PatchConfig(guard=False)
SMALL = {"dim": 128, "ffn_dim": 256, "num_heads": 2, "num_layers": 2, "text_dim": 16, "in_dim": 4,
         "out_dim": 4}  # fmt: skip


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **_: Any) -> torch.Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.complex(cos, sin)[None, :, None]).flatten(-2)


def shim(*networks: Any) -> None:
    import rcm.utils.attention as attention

    torch.Tensor.cuda = lambda self, *_, **__: self
    for network in networks:
        network.flash_apply_rotary_emb = rotary
    attention._get_sdpa_config = lambda *_: (0, [SDPBackend.MATH], sdpa_kernel)


def model_of(network: Any, **options: Any) -> Any:
    """Live gates, peaked queries, and an output that is not zero, as its initialisation makes
    it."""
    torch.manual_seed(0)
    model = network.WanModel(**SMALL | options).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("modulation"):
            parameter += 0.7
        elif "norm_q" in name or "norm_k" in name:
            parameter.mul_(2)
        elif parameter.dim() > 1 and "head" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def inputs_of(model: Any, frames: int, *, image: bool = False, extra: int = 0) -> dict[str, Any]:
    torch.manual_seed(1)
    given = {
        "x_B_C_T_H_W": torch.randn(1, 4, frames, 8, 10),
        "timesteps_B_T": torch.tensor([[500.0]]),
        "crossattn_emb": torch.randn(1, 512, 16),
    }
    if image:
        given["frame_cond_crossattn_emb_B_L_D"] = torch.randn(1, 257, 1280)
    if extra:
        given["y_B_C_T_H_W"] = torch.randn(1, extra, frames, 8, 10)
    return given


def forward(model: Any, given: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return model(**given)


def compare(
    name: str, model: Any, given: dict[str, Any], fused: int, limits: dict[PatchConfig, float]
) -> None:
    """Patched it is as near as its configuration allows, and afterwards it is as before."""
    expected = forward(model, given)
    assert expected.isfinite().all()
    for config, limit in limits.items():
        with patched(model, config) as report:
            error = relative_l2(forward(model, given), expected)
            assert report.fused == fused and error < limit, (name, config, report.fused, error)
        assert torch.equal(forward(model, given), expected)
    print(f"{name}: fine", flush=True)


def without_flash_attn(name: str, network: Any) -> None:
    """As its file is where flash-attn is missing: no rotary embedding, and the guard on."""
    model = model_of(network)
    given = inputs_of(model, 3)
    expected = forward(model, given)
    network.flash_apply_rotary_emb = None
    try:
        with patched(model, fidelity=None) as report:
            assert relative_l2(forward(model, given), expected) < 0.02
            assert [record.verdict for record in report.guard] == ["kept"] * 2
    finally:
        network.flash_apply_rotary_emb = rotary
    assert torch.equal(forward(model, given), expected)
    print(f"{name} without flash-attn: fine", flush=True)


def with_sla(sla: Any, model: Any) -> Any:
    torch.manual_seed(3)
    for module in model.modules():
        if type(module).__name__ == "WanSelfAttention":
            local = sla.SparseLinearAttention(module.head_dim, topk=0.5, BLKQ=128, BLKK=64)
            nn.init.normal_(local.proj_l.weight, std=0.2)
            local.dtype = torch.float32
            module.attn_op.local_attn = local.requires_grad_(False)
    return model


def converted(name: str, network: Any, *, image: bool, sla: bool) -> None:
    """The same weights through its class and through diffusers', from the folder of `convert`."""
    torch.manual_seed(5)
    options = {"model_type": "i2v", "in_dim": 8} if image else {}
    sizes = {"dim": 256, "ffn_dim": 320, "freq_dim": 32, "text_dim": 24, "num_heads": 2}
    model = network.WanModel(**SMALL | sizes | options).eval().requires_grad_(False)
    for path, parameter in model.named_parameters():  # Its head begins at zero.
        noise = torch.randn_like(parameter) / math.sqrt(parameter.shape[-1])
        parameter.copy_(noise + (parameter.dim() == 1 and "norm" in path and "bias" not in path))
    x, text = torch.randn(2, 4, 3, 8, 12), torch.randn(2, 512, 24)
    y = torch.randn(2, 4, 3, 8, 12) if image else None
    clip = torch.randn(2, 5, 1280) if image and name == "2.1" else None
    more = {} if clip is None else {"frame_cond_crossattn_emb_B_L_D": clip}
    state = model.state_dict()
    for i in range(2 * sla):  # As its converter leaves it: a Linear that starts at zero.
        proj_l = f"blocks.{i}.self_attn.attn_op.local_attn.proj_l"
        state |= {f"{proj_l}.weight": torch.zeros(128, 128), f"{proj_l}.bias": torch.zeros(128)}
    with tempfile.TemporaryDirectory() as place:
        torch.save(state, f"{place}/model.pth")
        convert_transformer(f"{place}/model.pth", f"{place}/folder")
        ours = WanTransformer3DModel.from_pretrained(f"{place}/folder", local_files_only=True)
    inputs = x if y is None else torch.cat([x, y], 1)
    # Its sinusoids of the time are computed in fp64, diffusers' in fp32.
    for times, limit in ((torch.zeros(2, 1), 5e-7), (torch.tensor([[932.0], [608.0]]), 3e-6)):
        with torch.no_grad():
            expected = model(x, times, text, y_B_C_T_H_W=y, **more)
            given = {"encoder_hidden_states_image": clip, "return_dict": False}
            error = relative_l2(ours.eval()(inputs, times[:, 0], text, **given)[0], expected)
        assert error < limit, (name, image, sla, error)
    print(f"{name}{' I2V' * image}{' SLA' * sla} converted: fine", flush=True)


def vae() -> None:
    """Its Wan VAE, as its `WanVAE` calls it. What loads weights is a stand-in."""
    sys.modules["imaginaire.utils.easy_io"] = MagicMock()
    from rcm.tokenizers import wan2pt1

    torch.manual_seed(4)
    model = wan2pt1.WanVAE_(
        dim=8, z_dim=4, dim_mult=[1, 2, 2, 4], num_res_blocks=1,
        temperal_downsample=[False, True, True],
    ).eval().requires_grad_(False)  # fmt: skip
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and "gamma" not in name:
            nn.init.normal_(weight, std=1.4 * weight[0].numel() ** -0.5)
    scale = [torch.randn(4), torch.rand(4) + 0.5]
    z, x = torch.randn(1, 4, 4, 4, 6), torch.randn(1, 3, 9, 16, 24)
    with torch.no_grad():
        expected = model.decode(z, scale), model.encode(x, scale)
        with patched(model) as report:
            found = model.decode(z, scale), model.encode(x, scale)
            assert report.fused == 18
            assert all(how.startswith("channels-last") for how in report.ran().values())
        assert torch.equal(model.decode(z, scale), expected[0])
    assert all(relative_l2(*pair) < 3e-6 for pair in zip(found, expected, strict=True))
    print("VAE: fine")


def main() -> None:
    sys.path.insert(0, str(Path(sys.argv[1]) / "turbodiffusion"))
    sys.modules.setdefault("pynvml", MagicMock())  # which asks GPUs for their neighbours
    from rcm.networks import wan2pt1, wan2pt2
    from SLA import core as sla

    shim(wan2pt1, wan2pt2)
    model, both = model_of(wan2pt1), {EXACT: 1e-5, INT8: 0.02}
    assert type(model.blocks[0]).__name__ == "CheckpointWrapper"
    compare("2.1 T2V", model, inputs_of(model, 3), 6, both)
    model = model_of(wan2pt1, model_type="i2v", in_dim=8)
    compare("2.1 I2V", model, inputs_of(model, 3, image=True, extra=4), 8, both)
    model = model_of(wan2pt2, model_type="i2v", in_dim=8)
    compare("2.2 I2V", model, inputs_of(model, 3, extra=4), 6, both)
    for name, network in (("2.1", wan2pt1), ("2.2", wan2pt2)):
        without_flash_attn(name, network)
        for image, has_sla in itertools.product((False, True), repeat=2):
            converted(name, network, image=image, sla=has_sla)
    model = with_sla(sla, model_of(wan2pt1))
    fp16 = PatchConfig(guard=False, pv="fp16", impl="triton")
    compare("2.1 SLA", model, inputs_of(model, 12), 8, {INT8: 0.02, fp16: 0.02})
    vae()


if __name__ == "__main__":
    main()
