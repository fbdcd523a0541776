"""State dicts with the names and shapes of TurboDiffusion's WanModel, written out by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel

from turbo_rcm_patch.checkpoints.convert import convert_transformer


@dataclass(frozen=True)
class Options:
    """A tiny WanModel."""

    name: str = "t2v"
    dim: int = 256
    head_dim: int = 128
    ffn: int = 320
    layers: int = 2
    inputs: int = 4
    outputs: int = 4
    text: int = 24
    freq: int = 32
    image: int | None = None
    image_tokens: int | None = None
    cross_norm: bool = True
    sla: bool = False
    quant: bool = False
    dtype: torch.dtype = torch.float32


QUANT = Options("quant", quant=True, dtype=torch.bfloat16)
#: Of the text and channels of `micro_pipe`, so that it fits into such a pipeline.
SLA = Options("sla-quant", quant=True, sla=True, text=32, dtype=torch.bfloat16)
I2V_21 = Options("i2v-2.1", inputs=12, image=48)
OPTIONS = [
    Options(),
    Options("t2v-sla", sla=True),
    Options("t2v-quant", quant=True, dtype=torch.bfloat16),
    Options("t2v-sla-quant", sla=True, quant=True, dtype=torch.bfloat16),
    Options("t2v-quant-fp32", quant=True),
    Options("t2v-heads-of-64", head_dim=64, sla=True),
    Options("t2v-no-cross-norm", cross_norm=False),
    Options("t2v-bf16", dtype=torch.bfloat16),
    Options("i2v-2.2", inputs=12, sla=True, dtype=torch.bfloat16),
    Options("i2v-2.2-quant", inputs=12, sla=True, quant=True, dtype=torch.bfloat16),
    I2V_21,
    replace(I2V_21, name="i2v-2.1-sla-quant", sla=True, quant=True, dtype=torch.bfloat16),
    replace(I2V_21, name="flf2v-2.1", image_tokens=6),
]
BLOCK_LINEARS = ("q", "k", "v", "o")


def state_dict(o: Options, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights by TurboDiffusion's names."""
    generator = torch.Generator().manual_seed(seed)
    result: dict[str, torch.Tensor] = {}

    def noise(*shape: int) -> torch.Tensor:
        return scaled(torch.randn(*shape, generator=generator))

    def linear(name: str, out: int, into: int, quant: bool = False) -> None:
        weight = noise(out, into).to(o.dtype)
        if quant:
            int8, scale = quantised(weight)
            result[f"{name}.int8_weight"], result[f"{name}.scale"] = int8, scale
        else:
            result[f"{name}.weight"] = weight
        result[f"{name}.bias"] = noise(out).to(o.dtype)

    def norm(name: str, width: int, bias: bool = True) -> None:
        # A -quant checkpoint has fp32 norms: their fast form casts.
        dtype = torch.float32 if o.quant else o.dtype
        result[f"{name}.weight"] = 1 + noise(width).to(dtype)
        if bias:
            result[f"{name}.bias"] = noise(width).to(dtype)

    linear("patch_embedding", o.dim, 4 * o.inputs)
    linear("text_embedding.0", o.dim, o.text)
    linear("text_embedding.2", o.dim, o.dim)
    linear("time_embedding.0", o.dim, o.freq)
    linear("time_embedding.2", o.dim, o.dim)
    linear("time_projection.1", 6 * o.dim, o.dim)
    for i in range(o.layers):
        block = f"blocks.{i}"
        result[f"{block}.modulation"] = noise(1, 6, o.dim).to(o.dtype)
        for attention in ("self_attn", "cross_attn"):
            for name in BLOCK_LINEARS:
                linear(f"{block}.{attention}.{name}", o.dim, o.dim, o.quant)
            norm(f"{block}.{attention}.norm_q", o.dim, bias=False)
            norm(f"{block}.{attention}.norm_k", o.dim, bias=False)
        if o.sla:
            name = f"{block}.self_attn.attn_op.local_attn.proj_l"
            result[f"{name}.weight"] = noise(o.head_dim, o.head_dim)
            result[f"{name}.bias"] = noise(o.head_dim)
        if o.image:
            linear(f"{block}.cross_attn.k_img", o.dim, o.dim, o.quant)
            linear(f"{block}.cross_attn.v_img", o.dim, o.dim, o.quant)
            norm(f"{block}.cross_attn.norm_k_img", o.dim, bias=False)
        if o.cross_norm:
            norm(f"{block}.norm3", o.dim)
        linear(f"{block}.ffn.0", o.ffn, o.dim, o.quant)
        linear(f"{block}.ffn.2", o.dim, o.ffn, o.quant)
    linear("head.head", 4 * o.outputs, o.dim)
    result["head.modulation"] = noise(1, 2, o.dim).to(o.dtype)
    if o.image:
        norm("img_emb.proj.0", o.image)
        linear("img_emb.proj.1", o.image, o.image)
        linear("img_emb.proj.3", o.dim, o.image)
        norm("img_emb.proj.4", o.dim)
    if o.image_tokens:
        result["img_emb.emb_pos"] = noise(1, o.image_tokens, o.image or 0).to(o.dtype)
    return result


def scaled(x: torch.Tensor) -> torch.Tensor:
    """Normal values as a weight."""
    return x / math.sqrt(x.shape[-1])


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As TurboDiffusion quantises: 128 steps of the largest of a block of 128 x 128, which itself
    saturates."""
    rows, columns = weight.shape
    scale = torch.empty(math.ceil(rows / 128), math.ceil(columns / 128))
    int8 = torch.empty(rows, columns, dtype=torch.int8)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            here = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            block = weight[here].float()
            scale[i, j] = block.abs().max() / 128
            int8[here] = (block / scale[i, j]).round().clamp(-128, 127).to(torch.int8)
    return int8, scale


def save(o: Options, path: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """Write a checkpoint, and return what is in it."""
    state = state_dict(o, seed)
    torch.save(state, path)
    return state


def converted(o: Options, place: Path, name: str = "folder", *, seed: int = 0, **how: Any) -> Path:
    """Write a checkpoint and its folder, and return the folder; the checkpoint is beside it."""
    place.mkdir(exist_ok=True)
    save(o, place / "in.pth", seed)
    convert_transformer(place / "in.pth", place / name, **how)
    return place / name


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load a converted folder with diffusers' class, which has to find every weight."""
    model, info = WanTransformer3DModel.from_pretrained(
        folder, torch_dtype=dtype, output_loading_info=True, local_files_only=True
    )
    assert not any(info[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched")), info
    return model.eval()


@torch.no_grad()
def run(model: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Run a forward of a loaded model, always with the same inputs."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, 4, 3, 8, 8, generator=generator).to(dtype)
    text = torch.randn(1, 7, model.config.text_dim, generator=generator).to(dtype)
    return model(x, torch.tensor([500]), text, return_dict=False)[0]
