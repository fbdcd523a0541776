"""What every launcher needs: the target of a device, its tiles, and tensors as kernels take
them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from turbo_rcm_patch.errors import DeviceError
from turbo_rcm_patch.kernels.replay import recorder

#: Arguments of kernels that vary with the number of tokens. Triton compiles a kernel again for
#: integers that are 1 or divide by 16; of these it must not, or every new length would compile
#: for seconds. None of them moves a pointer along contiguous channels, where it would help.
LENGTHS = (
    "blocks_a_chunk",
    "chunk_tokens",
    "chunks",
    "count",
    "k_blocks",
    "k_group",
    "k_parts",
    "k_programs",
    "kv_blocks",
    "n",
    "n_counters",
    "n_kv",
    "n_q",
    "n_rows",
    "n_tokens",
    "n_elements",
    "q_blocks",
    "q_group",
    "q_programs",
    "rows",
    "step",
    "tiles",
)

#: How a kernel reads a coefficient: a number, or a tensor that varies with the batch alone, with
#: batch and channel, or with everything.
VALUE, PER_BATCH, PER_CHANNEL, PER_ELEMENT = 0, 1, 2, 3


class Target(NamedTuple):
    """What code is generated for: ("cuda", 90), ("hip", "gfx942") or ("interpreter", 0)."""

    backend: str
    arch: int | str

    @property
    def descriptors(self) -> bool:
        """Whether hardware copies (TMA) of tensor descriptors feed the tensor cores directly here.

        sm_120 has them, but its matrix instructions read registers, and descriptors cost spills.
        """
        return self.backend == "cuda" and isinstance(self.arch, int) and 90 <= self.arch < 120

    @property
    def key(self) -> str:
        """Name of the tile table."""
        return f"sm_{self.arch}" if self.backend == "cuda" else str(self.arch)


class Tile(NamedTuple):
    """Tile shape and launch options of one kernel."""

    block_m: int
    block_n: int
    warps: int
    stages: int


class Coefficient(NamedTuple):
    """A coefficient as kernels take it: tensor or None, value, strides over [B, N, C], and
    kind."""

    tensor: torch.Tensor | None
    value: float
    strides: tuple[int, int, int]
    kind: int


@cache
def _target(index: int) -> Target:
    if torch.version.hip is not None:
        return Target("hip", torch.cuda.get_device_properties(index).gcnArchName.split(":")[0])
    major, minor = torch.cuda.get_device_capability(index)
    return Target("cuda", 10 * major + minor)


def target_of(device: torch.device) -> Target:
    """The target of `device`.

    Raises:
        DeviceError: The device is not a GPU and Triton's interpreter is off.
    """
    if triton.knobs.runtime.interpret:
        return Target("interpreter", 0)
    if device.type != "cuda":
        raise DeviceError(
            'impl="triton"',
            expected="tensors on a GPU",
            got=f"device {device}",
            remedy='Use impl="reference", or set TRITON_INTERPRET=1 before triton is imported',
        )
    return _target(device.index if device.index is not None else torch.cuda.current_device())


#: Kernel -> variant -> tile. Variants of attentions are the type of p and v and the padded head.
_DEFAULT: Final = {
    "attention": {
        "fp8_32": Tile(64, 128, 4, 2),
        "fp8_64": Tile(64, 128, 4, 2),
        "fp8_128": Tile(64, 128, 4, 2),
        "fp8_256": Tile(64, 64, 8, 2),
        "16bit_32": Tile(64, 64, 4, 2),
        "16bit_64": Tile(64, 64, 4, 2),
        "16bit_128": Tile(64, 64, 4, 2),
        "16bit_256": Tile(64, 32, 8, 2),
    },
    "prologue": {
        "32": Tile(128, 64, 4, 1),
        "64": Tile(128, 128, 8, 1),
        "128": Tile(128, 256, 16, 1),
        "256": Tile(32, 512, 8, 1),
    },
    "skip": {"any": Tile(16, 256, 4, 1)},
    "int8_linear": {
        "small": Tile(64, 64, 4, 3),
        "medium": Tile(64, 64, 4, 3),
        "wide": Tile(128, 128, 8, 3),
    },
}
_WIDE_16BIT: Final = {"16bit_128": Tile(128, 64, 8, 2), "16bit_256": Tile(64, 32, 4, 2)}
_SMALL_FP8: Final = {
    "fp8_32": Tile(64, 64, 4, 2),
    "fp8_64": Tile(64, 64, 4, 2),
    "fp8_128": Tile(128, 64, 8, 2),
    "fp8_256": Tile(64, 32, 8, 2),
}
#: What a target has of its own: sm_90 is measured on an H200, the others are chosen by counting
#: instructions and spills of compiled kernels.
_OF_TARGETS: Final = {
    "sm_80": {"attention": _WIDE_16BIT},
    "sm_86": {"attention": _WIDE_16BIT},
    "sm_89": {"attention": _SMALL_FP8 | _WIDE_16BIT},
    "sm_90": {
        "int8_linear": {
            "small": Tile(64, 64, 4, 4),
            "medium": Tile(128, 128, 4, 3),
            "wide": Tile(128, 128, 4, 3),
        }
    },
    "sm_120": {
        "attention": _SMALL_FP8
        | {"fp8_256": Tile(64, 32, 4, 2), "16bit_128": Tile(128, 64, 8, 2)},
    },
    "gfx942": {"prologue": {"64": Tile(128, 128, 4, 1), "128": Tile(128, 256, 8, 1)}},
}


@cache
def tile_for(kernel: str, variant: str, target: Target) -> Tile:
    """Return the tile of a kernel variant on a target: the target's own, or the safe default."""
    kernel = "attention" if kernel == "one_launch" else kernel
    own = _OF_TARGETS.get(target.key, {}).get(kernel, {})
    return own.get(variant) or _DEFAULT[kernel][variant]


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. `triton.cdiv` on the host takes a microsecond and more."""
    return -(-a // b)


def pad_head(head_dim: int) -> int:
    """Channels per head inside the kernels: a power of two of at least 32 (the depth of an int8
    dot)."""
    return max(32, triton.next_power_of_2(head_dim))


def scale_block(head_dim: int) -> int:
    """Keys that share a scale: a block of this many rows of one head has to fit into registers,
    beside the masks of a padded head."""
    if head_dim <= 64 or head_dim == 128:
        return 128
    return 64 if head_dim < 128 else 32


#: Rows of a tile, at most: where they are further apart than 2**31 / this, `near_rows` copies.
_MOST_ROWS = 256


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """x itself when its last dimension is contiguous, else a dense copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def near_rows(x: torch.Tensor) -> torch.Tensor:
    """`dense_rows` for a kernel whose offsets inside a tile are 32 bits: also a dense copy where
    rows lie so far apart that those of a tile pass them."""
    near = x.shape[-2] == 1 or x.stride(-2) < 2**31 // _MOST_ROWS
    return dense_rows(x) if near else x.contiguous()


def strides(*, one_sample: bool = False, **tensors: torch.Tensor) -> dict[str, tuple[int, int]]:
    """Strides of batch and tokens of each tensor [B, N, C], by the names of kernels' arguments;
    with `one_sample` that of the batch is 0."""
    return {
        f"{name}_strides": (0 if one_sample else x.stride(0), x.stride(1))
        for name, x in tensors.items()
    }


def coefficient(value: float | torch.Tensor, shape: Sequence[int]) -> Coefficient:
    """A float or a tensor that broadcasts to `shape` [B, N, C]."""
    if not isinstance(value, torch.Tensor):
        return Coefficient(None, float(value), (0, 0, 0), VALUE)
    wide = value.expand(*shape)
    # An extent of one has no stride of its own: expand leaves the original one there.
    stride_b, stride_n, stride_c = (
        0 if own == 1 else stride for own, stride in zip(value.shape, wide.stride(), strict=True)
    )
    if stride_c * shape[2] >= 2**31:  # in a kernel, offsets of channels are 32 bits
        return coefficient(value.contiguous(), shape)
    if stride_n == 0 and stride_c == 0:
        kind = PER_BATCH
    elif stride_n == 0:
        kind = PER_CHANNEL
    else:
        kind = PER_ELEMENT
    return Coefficient(wide, 1.0, (stride_b, stride_n, stride_c), kind)


def skip_arguments(
    residual: torch.Tensor | None,
    skip_factor: float | torch.Tensor,
    out_factor: float | torch.Tensor,
    shape: Sequence[int],
) -> dict[str, object]:
    """What `portable.skip.close_skip` takes, by the names every kernel with a skip uses; the
    factors broadcast to `shape` [B, N, C]."""
    c_skip, c_out = coefficient(skip_factor, shape), coefficient(out_factor, shape)
    residual = None if residual is None else dense_rows(residual)
    return {
        "residual_ptr": residual,
        "residual_strides": (0, 0) if residual is None else residual.stride()[:2],
        "skip_ptr": c_skip.tensor,
        "skip_value": c_skip.value,
        "skip_strides": c_skip.strides,
        "out_ptr": c_out.tensor,
        "out_value": c_out.value,
        "out_strides": c_out.strides,
        "HAS_RESIDUAL": residual is not None,
        "SKIP_KIND": c_skip.kind,
        "OUT_KIND": c_out.kind,
    }


def round_to(cast: str, dtype: torch.dtype) -> tl.dtype | None:
    """The dtype that the skip rounds every step to, or None for fp32 throughout; float64 counts
    as that."""
    if cast == "fp32" or dtype in (torch.float32, torch.float64):
        return None
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16


def descriptor(x: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """A descriptor over a dense 2-D tensor, which loads tiles of shape `block`."""
    return TensorDescriptor.from_tensor(x, block)


#: A sum and a product may be one instruction, on every release: Triton 3.9 warns that 3.10 will no
#: longer do so unasked.
_FUSION = {"enable_fp_fusion": True}


def launch(kernel, grid: tuple[int, ...], device: torch.device, **arguments) -> None:
    """Launch `kernel` on `device`, which need not be the current one."""
    asked = arguments | _FUSION
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            compiled = kernel[grid](**asked)
    else:
        compiled = kernel[grid](**asked)
    recording = recorder()
    if recording is not None:
        recording.launched(kernel, grid, arguments, compiled)
