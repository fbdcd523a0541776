"""What every launcher needs: the target of a device, its tiles, and tensors as kernels take
them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import resources
from time import perf_counter
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from turbo_rcm_patch.errors import DeviceError
from turbo_rcm_patch.kernels.ahead import compiled_only, note_launch
from turbo_rcm_patch.kernels.replay import forget_programs, recorder, without_replay
from turbo_rcm_patch.kernels.tile_table import user_table

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


@cache
def _tiles() -> dict[str, dict[str, dict[str, list[int]]]]:
    text = resources.files("turbo_rcm_patch.kernels").joinpath("tiles.json").read_text("utf-8")
    return json.loads(text)


#: What `trying_tile` puts in place of the tables.
_tried: dict[tuple[str, str], tuple[Tile, list[Target]]] = {}


def tile_for(kernel: str, variant: str, target: Target) -> Tile:
    """The tile of a kernel variant on a target: from the user's own table where it has one, else
    from the shipped table of the target, else the safe default.

    Raises:
        ConfigError: The user's table cannot be read; see `tile_table.read_table`.
    """
    if (kernel, variant) in _tried:
        tile, asked = _tried[kernel, variant]
        asked.append(target)
        return tile
    return _tile_for(kernel, variant, target)


@cache
def _tile_for(kernel: str, variant: str, target: Target) -> Tile:
    # The interpreter has no speed to tune.
    tuned = {} if target.backend == "interpreter" else user_table()
    own = tuned.get(target.key, {})
    if variant in own.get(kernel, {}):
        return Tile(*own[kernel][variant])
    table = _tiles()
    known = target.key in table or target.key in tuned
    if not known and target.backend != "interpreter":
        warnings.warn(
            f"turbo_rcm_patch has no tile table for {target.key}: safe default tiles. "
            "`turbo-rcm-patch tune` measures and keeps better ones.",
            stacklevel=3,
        )
    return shipped_tiles(target)[kernel][variant]


def has_tiles(key: str) -> bool:
    """Whether the shipped table has tiles of a target's own."""
    return bool(_tiles().get(key))


def shipped_tiles(target: Target) -> dict[str, dict[str, Tile]]:
    """Kernel -> variant -> tile as this package ships them: the target's over the safe
    default."""
    table = _tiles()
    own = table.get(target.key, {})
    return {
        kernel: {
            variant: Tile(*(own.get(kernel, {}).get(variant) or tile))
            for variant, tile in variants.items()
        }
        for kernel, variants in table["default"].items()
    }


def forget_tiles() -> None:
    """Read the user's table again at the next launch."""
    user_table.cache_clear()
    _tile_for.cache_clear()
    forget_programs()


@contextmanager
def trying_tile(kernel: str, variant: str, tile: Tile) -> Iterator[list[Target]]:
    """Inside, `tile_for` gives this tile for a kernel variant; for tuning, in one thread. The list
    has an entry for every time it was asked for."""
    before, asked = dict(_tried), []
    _tried[kernel, variant] = tile, asked
    try:
        with without_replay():
            yield asked
    finally:
        _tried.clear()
        _tried.update(before)


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

#: Compiled kernels since `watching_launches` began, while it runs.
_launched: list | None = None


@contextmanager
def watching_launches() -> Iterator[list]:
    """Gives a list that collects the compiled kernel of every launch inside; for tuning."""
    global _launched
    _launched = []
    try:
        with without_replay():
            yield _launched
    finally:
        _launched = None


def launch(kernel, grid: tuple[int, ...], device: torch.device, **arguments) -> None:
    """Launch `kernel` on `device`, which need not be the current one."""
    asked = arguments | _FUSION
    if compiled_only(kernel, grid, asked):
        return
    begin = perf_counter()
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            compiled = kernel[grid](**asked)
    else:
        compiled = kernel[grid](**asked)
    note_launch(compiled, perf_counter() - begin)
    if _launched is not None:
        _launched.append(compiled)
    recording = recorder()
    if recording is not None:
        recording.launched(kernel, grid, arguments, compiled)
