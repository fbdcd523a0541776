"""Read Wan's own VAE and text encoder files for diffusers' and transformers' classes.

`Wan2.1_VAE.pth` and `models_t5_umt5-xxl-enc-bf16.pth` come with TurboDiffusion's checkpoints.
Sizes are read from the tensors, as those of a transformer are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from torch import Tensor

from turbo_rcm_patch.errors import CheckpointError
from turbo_rcm_patch.turbodiffusion.read import read_tensors

#: Wan 2.1's VAE: inside a residual block, and what is not numbered.
_RESIDUAL: Final = {
    "residual.0": "norm1", "residual.2": "conv1", "residual.3": "norm2", "residual.6": "conv2",
    "shortcut": "conv_shortcut",
}  # fmt: skip
_MIDDLE: Final = ("resnets.0", "attentions.0", "resnets.1")
_ENDS: Final = {"conv1": "conv_in", "head.0": "norm_out", "head.2": "conv_out"}
#: A block of umT5.
_T5: Final = {
    "norm1": "layer.0.layer_norm",
    **{f"attn.{name}": f"layer.0.SelfAttention.{name}" for name in "qkvo"},
    "pos_embedding.embedding": "layer.0.SelfAttention.relative_attention_bias",
    "norm2": "layer.1.layer_norm",
    "ffn.gate.0": "layer.1.DenseReluDense.wi_0",
    "ffn.fc1": "layer.1.DenseReluDense.wi_1",
    "ffn.fc2": "layer.1.DenseReluDense.wo",
}
_T5_ENDS: Final = {"token_embedding": "shared", "norm": "encoder.final_layer_norm"}


class Part(NamedTuple):
    """A part of a pipeline.

    Attributes:
        config: Entries of its class's configuration that the tensors show.
        tensors: By the names of the class, as they lie in the file.
    """

    config: dict[str, object]
    tensors: dict[str, Tensor]


def read_vae(path: str | Path) -> Part:
    """Read Wan 2.1's VAE for diffusers' `AutoencoderKLWan`.

    Args:
        path: The `.pth` file.

    Raises:
        CheckpointError: It cannot be read, holds more than tensors, or is no VAE of Wan 2.1.
    """
    tensors = read_tensors(path, "decoder.conv1.weight")
    try:
        config, per_block = _vae_sizes(tensors)
    except (KeyError, IndexError, ValueError, ZeroDivisionError) as error:
        raise _strange(path, "the VAE of Wan 2.1", str(error)) from error
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, parameter = name.rpartition(".")
        ours = _vae_module(module, per_block)
        if ours is None:
            raise _strange(path, "the VAE of Wan 2.1", name)
        renamed[f"{ours}.{parameter}"] = tensor
    return Part(config, renamed)


def _vae_sizes(tensors: Mapping[str, Tensor]) -> tuple[dict[str, object], int]:
    """The configuration, and how many entries of the decoder's list make a block of ours."""
    listed = sorted({int(n.split(".")[2]) for n in tensors if n.startswith("encoder.downsamples")})
    if listed != list(range(len(listed))):
        raise ValueError(f"encoder.downsamples of {listed[-1] + 1}, and {len(listed)} are there")
    base = tensors["encoder.conv1.weight"].shape[0]
    # A stage of the encoder ends in the convolution that halves it, but for the last one.
    ends = [i for i in listed if f"encoder.downsamples.{i}.resample.1.weight" in tensors]
    halved = [f"encoder.downsamples.{i}" for i in ends]
    last = tensors[f"encoder.downsamples.{listed[-1]}.residual.2.weight"].shape[0]
    widths = [tensors[f"{name}.resample.1.weight"].shape[0] for name in halved] + [last]
    top = tensors["decoder.conv1.weight"].shape[0] * base // last
    config: dict[str, object] = {
        "base_dim": base,
        "z_dim": tensors["conv2.weight"].shape[0],
        "dim_mult": [width // base for width in widths],
        "num_res_blocks": ends[0],
        "temperal_downsample": [f"{name}.time_conv.weight" in tensors for name in halved],
    }
    if top != base:
        config["decoder_base_dim"] = top
    return config, ends[0] + 2


def _vae_module(module: str, per_block: int) -> str | None:
    outside = {"conv1": "quant_conv", "conv2": "post_quant_conv"}
    if module in outside:
        return outside[module]
    half, _, rest = module.partition(".")
    if half not in ("encoder", "decoder"):
        return None
    if rest in _ENDS:
        return f"{half}.{_ENDS[rest]}"
    found = re.fullmatch(r"(downsamples|middle|upsamples)\.(\d{1,4})\.(.+)", rest)
    if found is None:
        return None
    index, inside = int(found[2]), _RESIDUAL.get(found[3], found[3])
    if found[1] == "middle":
        return f"{half}.mid_block.{_MIDDLE[index]}.{inside}" if index < len(_MIDDLE) else None
    if found[1] == "downsamples":
        return f"{half}.down_blocks.{index}.{inside}"
    block, place = divmod(index, per_block)
    within = "upsamplers.0" if place == per_block - 1 else f"resnets.{place}"
    return f"{half}.up_blocks.{block}.{within}.{inside}"


def read_text_encoder(path: str | Path) -> Part:
    """Read the encoder of umT5 for transformers' `UMT5EncoderModel`.

    Args:
        path: The `.pth` file.

    Raises:
        CheckpointError: It cannot be read, holds more than tensors, or is no encoder of umT5.
    """
    tensors = read_tensors(path, "token_embedding.weight")
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, parameter = name.rpartition(".")
        found = re.fullmatch(r"blocks\.(\d+)\.(.+)", module)
        if found is not None and found[2] in _T5:
            renamed[f"encoder.block.{found[1]}.{_T5[found[2]]}.{parameter}"] = tensor
        elif module in _T5_ENDS:
            renamed[f"{_T5_ENDS[module]}.{parameter}"] = tensor
        else:
            raise _strange(path, "the encoder of umT5", name)
    try:
        buckets, heads = tensors["blocks.0.pos_embedding.embedding.weight"].shape
        config: dict[str, object] = {
            "vocab_size": tensors["token_embedding.weight"].shape[0],
            "d_model": tensors["token_embedding.weight"].shape[1],
            "d_ff": tensors["blocks.0.ffn.fc1.weight"].shape[0],
            "d_kv": tensors["blocks.0.attn.q.weight"].shape[0] // heads,
            "num_heads": heads,
            "num_layers": len({n.split(".")[1] for n in tensors if n.startswith("blocks.")}),
            "relative_attention_num_buckets": buckets,
        }
    except (KeyError, IndexError, ValueError, ZeroDivisionError) as error:
        raise _strange(path, "the encoder of umT5", str(error)) from error
    return Part(config, renamed)


def _strange(path: str | Path, expected: str, got: str) -> CheckpointError:
    return CheckpointError(
        str(path),
        expected=f"{expected}, as its authors publish it",
        got=f"other tensors ({got})",
        remedy="Leave the argument out: --base has a VAE and a text encoder",
    )
