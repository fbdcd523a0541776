"""The tensor names of TurboDiffusion's WanModel and of diffusers' Wan transformer.

One table, read in both directions. Beside the names the two differ in one shape: patches are
embedded by a Linear there and by a convolution here, over the same numbers in the same order.

What a configuration needs is read from shapes: everything but the number of heads, which no tensor
of a model without SLA shows (every published Wan has heads of 128), and the patch, (1, 2, 2).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from turbo_rcm_patch.errors import CheckpointError

#: Pixels of the latent video in a token: frames, height, width.
PATCH: Final = (1, 2, 2)
#: Rows and columns of a weight that share a scale in a `-quant` checkpoint.
BLOCK: Final = 128
#: Channels of a head of every published Wan.
HEAD_DIM: Final = 128
_IN_A_BLOCK: Final = re.compile(r"blocks\.[0-9]+\.")
#: The Linear of SLA after its linear attention, in their self-attention and in our extra file.
SLA_LINEAR: Final = ("self_attn.attn_op.local_attn.proj_l", "attn1.proj_l")


#: Entry of diffusers' configuration -> the field or property of `Sizes` that it is.
_ENTRIES: Final = {
    "attention_head_dim": "head_dim",
    "cross_attn_norm": "cross_norm",
    "ffn_dim": "ffn",
    "freq_dim": "freq",
    "image_dim": "image",
    "in_channels": "inputs",
    "num_attention_heads": "heads",
    "num_layers": "layers",
    "out_channels": "outputs",
    "pos_embed_seq_len": "image_tokens",
    "text_dim": "text",
}
#: What a configuration may leave out.
_OPTIONAL: Final = {"cross_attn_norm": True, "image_dim": None, "pos_embed_seq_len": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes that distinguish one Wan model from another.

    Attributes:
        dim: Channels of a token.
        head_dim: Channels of a head.
        layers: Blocks.
        ffn: Channels inside the feed-forward.
        inputs: Channels of the latent video with what is concatenated to it.
        outputs: Channels of the predicted velocity.
        text: Channels of the text encoder.
        freq: Channels of the sinusoidal time embedding.
        image: Channels of the image encoder (2.1 I2V), or None.
        image_tokens: Tokens of two images (2.1 FLF2V), or None.
        cross_norm: Whether a norm stands before cross-attention.
        sla: Whether self-attention has SLA's `proj_l`.
    """

    dim: int
    head_dim: int
    layers: int
    ffn: int
    inputs: int
    outputs: int
    text: int
    freq: int
    image: int | None = None
    image_tokens: int | None = None
    cross_norm: bool = True
    sla: bool = False

    @property
    def heads(self) -> int:
        """How many."""
        return self.dim // self.head_dim

    @property
    def heads_text(self) -> str:
        """How many of how many channels."""
        heads = self.heads
        return f"{heads} head{'s' if heads > 1 else ''} of {self.head_dim} channels"

    def config(self) -> dict[str, object]:
        """The configuration of diffusers' WanTransformer3DModel."""
        return {
            **{entry: getattr(self, name) for entry, name in _ENTRIES.items()},
            "_class_name": "WanTransformer3DModel",
            "added_kv_proj_dim": self.dim if self.image else None,
            "eps": 1e-6,
            "patch_size": list(PATCH),
            "qk_norm": "rms_norm_across_heads",
            "rope_max_seq_len": 1024,
        }


def sizes_of_config(config: Mapping[str, Any], *, sla: bool = False) -> Sizes:
    """What a configuration of diffusers' WanTransformer3DModel says, the inverse of
    `Sizes.config`.

    Raises:
        KeyError: It lacks an entry.
        TypeError: An entry is no number.
    """
    given = _OPTIONAL | dict(config)
    sizes = {name: given[entry] for entry, name in _ENTRIES.items()}
    sizes["outputs"] = sizes["outputs"] or sizes["inputs"]
    return Sizes(dim=sizes.pop("heads") * sizes["head_dim"], sla=sla, **sizes)


class _Row(NamedTuple):
    """A module or parameter under both names.

    A shape is made of names of `Sizes`, of "6dim" (six of one) and of numbers; `part` is the
    option that the row belongs to.
    """

    theirs: str
    ours: str
    weight: tuple[str | int, ...]
    bias: str = ""
    part: str = ""


_EMBEDDER: Final = "condition_embedder"
_IMAGE: Final = "condition_embedder.image_embedder"
_OUTSIDE: Final = (
    _Row("patch_embedding", "patch_embedding", ("dim", "patch_in"), "dim"),
    _Row("text_embedding.0", f"{_EMBEDDER}.text_embedder.linear_1", ("dim", "text"), "dim"),
    _Row("text_embedding.2", f"{_EMBEDDER}.text_embedder.linear_2", ("dim", "dim"), "dim"),
    _Row("time_embedding.0", f"{_EMBEDDER}.time_embedder.linear_1", ("dim", "freq"), "dim"),
    _Row("time_embedding.2", f"{_EMBEDDER}.time_embedder.linear_2", ("dim", "dim"), "dim"),
    _Row("time_projection.1", f"{_EMBEDDER}.time_proj", ("6dim", "dim"), "6dim"),
    _Row("img_emb.proj.0", f"{_IMAGE}.norm1", ("image",), "image", "image"),
    _Row("img_emb.proj.1", f"{_IMAGE}.ff.net.0.proj", ("image", "image"), "image", "image"),
    _Row("img_emb.proj.3", f"{_IMAGE}.ff.net.2", ("dim", "image"), "dim", "image"),
    _Row("img_emb.proj.4", f"{_IMAGE}.norm2", ("dim",), "dim", "image"),
    _Row("head.head", "proj_out", ("patch_out", "dim"), "patch_out"),
)
_POSITIONS: Final = (1, "image_tokens", "image")
_OUTSIDE_PARAMETERS: Final = (
    _Row("head.modulation", "scale_shift_table", (1, 2, "dim")),
    _Row("img_emb.emb_pos", f"{_IMAGE}.pos_embed", _POSITIONS, part="image_tokens"),
)
_IN_BLOCK: Final = (
    _Row("self_attn.q", "attn1.to_q", ("dim", "dim"), "dim"),
    _Row("self_attn.k", "attn1.to_k", ("dim", "dim"), "dim"),
    _Row("self_attn.v", "attn1.to_v", ("dim", "dim"), "dim"),
    _Row("self_attn.o", "attn1.to_out.0", ("dim", "dim"), "dim"),
    _Row("self_attn.norm_q", "attn1.norm_q", ("dim",)),
    _Row("self_attn.norm_k", "attn1.norm_k", ("dim",)),
    _Row(SLA_LINEAR[0], SLA_LINEAR[1], ("head_dim", "head_dim"), "head_dim", "sla"),
    _Row("norm3", "norm2", ("dim",), "dim", "cross_norm"),
    _Row("cross_attn.q", "attn2.to_q", ("dim", "dim"), "dim"),
    _Row("cross_attn.k", "attn2.to_k", ("dim", "dim"), "dim"),
    _Row("cross_attn.v", "attn2.to_v", ("dim", "dim"), "dim"),
    _Row("cross_attn.o", "attn2.to_out.0", ("dim", "dim"), "dim"),
    _Row("cross_attn.norm_q", "attn2.norm_q", ("dim",)),
    _Row("cross_attn.norm_k", "attn2.norm_k", ("dim",)),
    _Row("cross_attn.k_img", "attn2.add_k_proj", ("dim", "dim"), "dim", "image"),
    _Row("cross_attn.v_img", "attn2.add_v_proj", ("dim", "dim"), "dim", "image"),
    _Row("cross_attn.norm_k_img", "attn2.norm_added_k", ("dim",), "", "image"),
    _Row("ffn.0", "ffn.net.0.proj", ("ffn", "dim"), "ffn"),
    _Row("ffn.2", "ffn.net.2", ("dim", "ffn"), "dim"),
)
_BLOCK_PARAMETERS: Final = (_Row("modulation", "scale_shift_table", (1, 6, "dim")),)


class Name(NamedTuple):
    """A tensor under both names.

    Attributes:
        theirs: In TurboDiffusion's WanModel.
        ours: In diffusers' transformer, or in our extra file.
        shape: There.
        our_shape: Here.
        extra: Whether diffusers' class has no place for it.
        linear: Whether a `-quant` checkpoint holds it in int8: the weight of a block's Linear.
    """

    theirs: str
    ours: str
    shape: tuple[int, ...]
    our_shape: tuple[int, ...]
    extra: bool = False
    linear: bool = False

    @property
    def their_int8(self) -> tuple[str, str]:
        """Their names of the int8 weight and of its scales."""
        module = self.theirs.removesuffix("weight")
        return f"{module}int8_weight", f"{module}scale"

    @property
    def our_int8(self) -> tuple[str, str]:
        """The names of the same in our extra file."""
        module = self.ours.removesuffix("weight")
        return f"{module}int8_weight", f"{module}scale"


def names(sizes: Sizes) -> list[Name]:
    """Every tensor of a model of these sizes, in the order of its forward."""
    result = [n for row in _OUTSIDE for n in _tensors(row, sizes, "")]
    result += [_parameter(row, sizes, "") for row in _OUTSIDE_PARAMETERS if _has(row, sizes)]
    for index in range(sizes.layers):
        prefix = f"blocks.{index}."
        result += [_parameter(row, sizes, prefix) for row in _BLOCK_PARAMETERS]
        result += [n for row in _IN_BLOCK for n in _tensors(row, sizes, prefix)]
    return result


def blocks_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Number of scales that a weight [Cout, K] has in a `-quant` checkpoint."""
    rows, columns = shape
    return math.ceil(rows / BLOCK), math.ceil(columns / BLOCK)


def sizes_of(
    shapes: Mapping[str, torch.Size | tuple[int, ...]], *, heads: int | None = None
) -> Sizes:
    """Read the sizes of a WanModel from its tensors.

    Args:
        shapes: The shape of every tensor, by its name there.
        heads: Attention heads, where they are not of 128 channels and there is no SLA to tell.

    Raises:
        CheckpointError: A tensor that shows a size is missing or has no such shape, or the heads
            cannot be told.
    """
    patch = _shape(shapes, "patch_embedding.weight")
    dim, inputs = patch[0], math.prod(patch[1:]) // math.prod(PATCH)
    sla = _linear(shapes, f"blocks.0.{SLA_LINEAR[0]}", optional=True)
    image = _linear(shapes, "img_emb.proj.1", optional=True)
    position = shapes.get("img_emb.emb_pos")
    return Sizes(
        dim=dim,
        head_dim=_head_dim(dim, heads, sla[0] if sla else None),
        # Counted, because a single name may have any number.
        layers=len({n.split(".")[1] for n in shapes if _IN_A_BLOCK.match(n)}),
        ffn=_linear(shapes, "blocks.0.ffn.0")[0],
        inputs=inputs,
        outputs=_linear(shapes, "head.head")[0] // math.prod(PATCH),
        text=_linear(shapes, "text_embedding.0")[1],
        freq=_linear(shapes, "time_embedding.0")[1],
        image=image[1] if image else None,
        image_tokens=position[1] if position is not None and len(position) == 3 else None,
        cross_norm="blocks.0.norm3.weight" in shapes,
        sla=bool(sla),
    )


def _head_dim(dim: int, heads: int | None, shown: int | None) -> int:
    if heads is not None:
        if heads < 1 or dim % heads:
            raise CheckpointError("heads", expected=f"a divisor of {dim} channels", got=str(heads))
        if shown not in (None, dim // heads):
            raise CheckpointError(
                "heads",
                expected=f"{dim // (shown or 1)}, as the shape of proj_l shows",
                got=str(heads),
            )
        return dim // heads
    head_dim = shown or HEAD_DIM
    if dim % head_dim:
        raise CheckpointError(
            "heads",
            expected=f"a number, because {dim} channels are not heads of {head_dim}",
            got="none",
            remedy="Pass --heads N (heads=N)",
        )
    return head_dim


def _shape(
    shapes: Mapping[str, torch.Size | tuple[int, ...]], *keys: str
) -> torch.Size | tuple[int, ...]:
    for key in keys:
        if key in shapes and len(shapes[key]) >= 2:
            return shapes[key]
    raise CheckpointError(
        f"no {keys[0]} among {len(shapes)} tensors",
        expected="the weights of TurboDiffusion's WanModel",
        got=", ".join(sorted(shapes)[:4]) or "none",
        remedy="Pass a checkpoint of a whole Wan model, not of a LoRA, a VAE or a text encoder",
    )


def _linear(
    shapes: Mapping[str, torch.Size | tuple[int, ...]], module: str, *, optional: bool = False
) -> torch.Size | tuple[int, ...]:
    keys = (f"{module}.weight", f"{module}.int8_weight")
    if optional and not any(key in shapes for key in keys):
        return ()
    return _shape(shapes, *keys)


def _has(row: _Row, sizes: Sizes) -> bool:
    return not row.part or bool(getattr(sizes, row.part))


def _size(word: str | int, sizes: Sizes) -> int:
    if isinstance(word, int):
        return word
    of_one = {"6dim": 6 * sizes.dim, "patch_in": sizes.inputs, "patch_out": sizes.outputs}
    value: int = of_one[word] if word in of_one else getattr(sizes, word)
    return value * math.prod(PATCH) if word.startswith("patch") else value


def _parameter(row: _Row, sizes: Sizes, prefix: str) -> Name:
    shape = tuple(_size(word, sizes) for word in row.weight)
    return Name(prefix + row.theirs, prefix + row.ours, shape, shape)


def _tensors(row: _Row, sizes: Sizes, prefix: str) -> list[Name]:
    """Weight and bias of a module; none where the model has no such part."""
    if not _has(row, sizes):
        return []
    theirs, ours = prefix + row.theirs, prefix + row.ours
    shape = tuple(_size(word, sizes) for word in row.weight)
    our_shape = (sizes.dim, sizes.inputs, *PATCH) if row.theirs == "patch_embedding" else shape
    extra = row.part == "sla"
    # As TurboDiffusion quantises: every Linear of a block but SLA's.
    linear = bool(prefix) and len(shape) == 2 and not extra
    weight = Name(f"{theirs}.weight", f"{ours}.weight", shape, our_shape, extra, linear)
    if not row.bias:
        return [weight]
    bias = (_size(row.bias, sizes),)
    return [weight, Name(f"{theirs}.bias", f"{ours}.bias", bias, bias, extra)]
