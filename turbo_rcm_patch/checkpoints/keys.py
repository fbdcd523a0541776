"""The tensor names of TurboDiffusion's WanModel and of diffusers' Wan transformer.

The names differ, and one shape: TurboDiffusion embeds patches
with a Linear and diffusers with a convolution, over the same numbers in the same order.

A configuration is read from shapes: everything but the number of heads, which no tensor of a model
without SLA shows (every published Wan has heads of 128), and the patch, (1, 2, 2).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from turbo_rcm_patch.errors import CheckpointError
from turbo_rcm_patch.patching.int8_weights import SCALE, WEIGHT

#: Pixels of the latent video in a token: frames, height, width.
PATCH: Final = (1, 2, 2)
#: Rows and columns of a weight that share a scale in a `-quant` checkpoint.
BLOCK: Final = 128
#: Channels of a head of every published Wan.
HEAD_DIM: Final = 128
_IN_A_BLOCK: Final = re.compile(r"blocks\.[0-9]+\.")
#: TurboDiffusion's name of SLA's Linear after its linear attention.
_SLA_LINEAR: Final = "self_attn.attn_op.local_attn.proj_l"


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
        cross_norm: True if a norm stands before cross-attention.
        sla: True if self-attention has SLA's `proj_l`.
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
        """Number of heads."""
        return self.dim // self.head_dim

    @property
    def heads_text(self) -> str:
        """The number of heads and their channels, in words."""
        heads = self.heads
        return f"{heads} head{'s' if heads > 1 else ''} of {self.head_dim} channels"

    def config(self) -> dict[str, object]:
        """The configuration of diffusers' WanTransformer3DModel."""
        return {
            "_class_name": "WanTransformer3DModel",
            "added_kv_proj_dim": self.dim if self.image else None,
            "attention_head_dim": self.head_dim,
            "cross_attn_norm": self.cross_norm,
            "eps": 1e-6,
            "ffn_dim": self.ffn,
            "freq_dim": self.freq,
            "image_dim": self.image,
            "in_channels": self.inputs,
            "num_attention_heads": self.heads,
            "num_layers": self.layers,
            "out_channels": self.outputs,
            "patch_size": list(PATCH),
            "pos_embed_seq_len": self.image_tokens,
            "qk_norm": "rms_norm_across_heads",
            "rope_max_seq_len": 1024,
            "text_dim": self.text,
        }


class _Row(NamedTuple):
    """A module or parameter under both names.

    A shape is made of names of `Sizes`, of "6dim" (six times dim) and of numbers; `part` is the
    option that the row belongs to. Neither norms of q and k nor parameters have a bias.
    """

    theirs: str
    ours: str
    shape: tuple[str | int, ...]
    part: str = ""
    bias: bool = True
    parameter: bool = False


_EMBEDDER: Final = "condition_embedder"
_IMAGE: Final = "condition_embedder.image_embedder"
_DIM, _SQUARE = ("dim",), ("dim", "dim")
_OUTSIDE: Final = (
    _Row("patch_embedding", "patch_embedding", ("dim", "patch_in")),
    _Row("text_embedding.0", f"{_EMBEDDER}.text_embedder.linear_1", ("dim", "text")),
    _Row("text_embedding.2", f"{_EMBEDDER}.text_embedder.linear_2", _SQUARE),
    _Row("time_embedding.0", f"{_EMBEDDER}.time_embedder.linear_1", ("dim", "freq")),
    _Row("time_embedding.2", f"{_EMBEDDER}.time_embedder.linear_2", _SQUARE),
    _Row("time_projection.1", f"{_EMBEDDER}.time_proj", ("6dim", "dim")),
    _Row("img_emb.proj.0", f"{_IMAGE}.norm1", ("image",), "image"),
    _Row("img_emb.proj.1", f"{_IMAGE}.ff.net.0.proj", ("image", "image"), "image"),
    _Row("img_emb.proj.3", f"{_IMAGE}.ff.net.2", ("dim", "image"), "image"),
    _Row("img_emb.proj.4", f"{_IMAGE}.norm2", _DIM, "image"),
    _Row("head.head", "proj_out", ("patch_out", "dim")),
    _Row("head.modulation", "scale_shift_table", (1, 2, "dim"), parameter=True),
    _Row(
        "img_emb.emb_pos", f"{_IMAGE}.pos_embed", (1, "image_tokens", "image"), "image_tokens",
        parameter=True,
    ),
)  # fmt: skip
_IN_BLOCK: Final = (
    _Row("modulation", "scale_shift_table", (1, 6, "dim"), parameter=True),
    _Row("self_attn.q", "attn1.to_q", _SQUARE),
    _Row("self_attn.k", "attn1.to_k", _SQUARE),
    _Row("self_attn.v", "attn1.to_v", _SQUARE),
    _Row("self_attn.o", "attn1.to_out.0", _SQUARE),
    _Row("self_attn.norm_q", "attn1.norm_q", _DIM, bias=False),
    _Row("self_attn.norm_k", "attn1.norm_k", _DIM, bias=False),
    _Row(_SLA_LINEAR, "attn1.proj_l", ("head_dim", "head_dim"), "sla"),
    _Row("norm3", "norm2", _DIM, "cross_norm"),
    _Row("cross_attn.q", "attn2.to_q", _SQUARE),
    _Row("cross_attn.k", "attn2.to_k", _SQUARE),
    _Row("cross_attn.v", "attn2.to_v", _SQUARE),
    _Row("cross_attn.o", "attn2.to_out.0", _SQUARE),
    _Row("cross_attn.norm_q", "attn2.norm_q", _DIM, bias=False),
    _Row("cross_attn.norm_k", "attn2.norm_k", _DIM, bias=False),
    _Row("cross_attn.k_img", "attn2.add_k_proj", _SQUARE, "image"),
    _Row("cross_attn.v_img", "attn2.add_v_proj", _SQUARE, "image"),
    _Row("cross_attn.norm_k_img", "attn2.norm_added_k", _DIM, "image", bias=False),
    _Row("ffn.0", "ffn.net.0.proj", ("ffn", "dim")),
    _Row("ffn.2", "ffn.net.2", ("dim", "ffn")),
)


class Name(NamedTuple):
    """A tensor under both names.

    Attributes:
        theirs: In TurboDiffusion's WanModel.
        ours: In diffusers' transformer, or in the extra file.
        shape: In TurboDiffusion's WanModel.
        our_shape: In diffusers' transformer.
        extra: True if diffusers' class has no place for it.
        linear: True if a `-quant` checkpoint holds it in int8: the weight of a block's Linear.
    """

    theirs: str
    ours: str
    shape: tuple[int, ...]
    our_shape: tuple[int, ...]
    extra: bool = False
    linear: bool = False

    @property
    def their_int8(self) -> tuple[str, str]:
        """TurboDiffusion's names of the int8 weight and of its scales."""
        module = self.theirs.removesuffix("weight")
        return f"{module}int8_weight", f"{module}scale"

    @property
    def our_int8(self) -> tuple[str, str]:
        """The names of the int8 weight and of the bits of its scales in a folder."""
        module = self.ours.removesuffix("weight")
        return f"{module}{WEIGHT}", f"{module}{SCALE}"


def names(sizes: Sizes) -> list[Name]:
    """Every tensor of a model of these sizes, in the order of its forward."""
    rows = [("", row) for row in _OUTSIDE]
    rows += [(f"blocks.{index}.", row) for index in range(sizes.layers) for row in _IN_BLOCK]
    return [name for prefix, row in rows for name in _tensors(row, sizes, prefix)]


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
        heads: Attention heads, where they are not of 128 channels and no SLA shows them.

    Raises:
        CheckpointError: A tensor that shows a size is missing or has no such shape, or the number
            of heads is needed.
    """
    patch = _shape(shapes, "patch_embedding")
    dim, inputs = patch[0], math.prod(patch[1:]) // math.prod(PATCH)
    sla = _shape(shapes, f"blocks.0.{_SLA_LINEAR}", optional=True)
    image = _shape(shapes, "img_emb.proj.1", optional=True)
    position = shapes.get("img_emb.emb_pos", ())
    return Sizes(
        dim=dim,
        head_dim=_head_dim(dim, heads, sla[0] if sla else None),
        # Counted, because a single name may have any number.
        layers=len({n.split(".")[1] for n in shapes if _IN_A_BLOCK.match(n)}),
        ffn=_shape(shapes, "blocks.0.ffn.0")[0],
        inputs=inputs,
        outputs=_shape(shapes, "head.head")[0] // math.prod(PATCH),
        text=_shape(shapes, "text_embedding.0")[1],
        freq=_shape(shapes, "time_embedding.0")[1],
        image=image[1] if image else None,
        image_tokens=position[1] if len(position) == 3 else None,
        cross_norm="blocks.0.norm3.weight" in shapes,
        sla=bool(sla),
    )


def _head_dim(dim: int, heads: int | None, shown: int | None) -> int:
    expected = ""
    if heads is not None and (heads < 1 or dim % heads):
        expected = f"a divisor of {dim} channels"
    elif heads is None and dim % (shown or HEAD_DIM):
        expected = f"a number, because {dim} channels are not heads of {shown or HEAD_DIM}"
    if expected:
        raise CheckpointError(
            "heads", expected=expected, got=str(heads), remedy="Pass --heads N (heads=N)"
        )
    return dim // heads if heads is not None else shown or HEAD_DIM


def _shape(
    shapes: Mapping[str, torch.Size | tuple[int, ...]], module: str, *, optional: bool = False
) -> torch.Size | tuple[int, ...]:
    """The shape of a module's weight, in int8 or not."""
    for key in (f"{module}.weight", f"{module}.int8_weight"):
        if len(shapes.get(key, ())) >= 2:
            return shapes[key]
    if optional:
        return ()
    raise CheckpointError(
        f"no {module}.weight among {len(shapes)} tensors",
        expected="the weights of TurboDiffusion's WanModel",
        got=", ".join(sorted(shapes)[:4]) or "none",
        remedy="Pass a checkpoint of a whole Wan model, not of a LoRA, a VAE or a text encoder",
    )


def _size(word: str | int, sizes: Sizes) -> int:
    if isinstance(word, int):
        return word
    of_one = {"6dim": 6 * sizes.dim, "patch_in": sizes.inputs, "patch_out": sizes.outputs}
    value: int = of_one[word] if word in of_one else getattr(sizes, word)
    return value * math.prod(PATCH) if word.startswith("patch") else value


def _tensors(row: _Row, sizes: Sizes, prefix: str) -> list[Name]:
    """The tensors of a row; none where the model has no such part."""
    if row.part and not getattr(sizes, row.part):
        return []
    theirs, ours = prefix + row.theirs, prefix + row.ours
    shape = tuple(_size(word, sizes) for word in row.shape)
    if row.parameter:
        return [Name(theirs, ours, shape, shape)]
    our_shape = (sizes.dim, sizes.inputs, *PATCH) if row.theirs == "patch_embedding" else shape
    extra = row.part == "sla"
    # As TurboDiffusion quantises: every Linear of a block but SLA's.
    linear = bool(prefix) and len(shape) == 2 and not extra
    weight = Name(f"{theirs}.weight", f"{ours}.weight", shape, our_shape, extra, linear)
    if not row.bias:
        return [weight]
    return [weight, Name(f"{theirs}.bias", f"{ours}.bias", shape[:1], shape[:1], extra)]
