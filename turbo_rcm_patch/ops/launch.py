"""Helpers of all launchers: the target of a device, its tiles, and the arguments of kernels."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any, Final, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from turbo_rcm_patch.errors import DeviceError
from turbo_rcm_patch.ops.dispatch import stand_in
from turbo_rcm_patch.ops.replay import compiles_only, compiling_only, recorder

#: Arguments of kernels that vary with the number of tokens. By default Triton compiles a kernel
#: again for integers that are 1 or divisible by 16. For these arguments it must not, because every
#: new length would compile for seconds. None of them moves a pointer along contiguous channels,
#: where the divisibility would help.
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
    "n_rank",
    "n_rows",
    "n_tokens",
    "q_blocks",
    "q_group",
    "q_programs",
    "rows",
    "step",
    "tiles",
)

#: Most partial maxima of a channel of v in an attention's prologue.
AMAX_CHUNKS = 32

#: Kinds of coefficients: a number, or a tensor that varies with the batch, with batch and channel,
#: or with batch, token and channel.
VALUE, PER_BATCH, PER_CHANNEL, PER_ELEMENT = 0, 1, 2, 3


class Target(NamedTuple):
    """The target of compilation: ("cuda", 90), ("hip", "gfx942") or ("interpreter", 0)."""

    backend: str
    arch: int | str

    @property
    def descriptors(self) -> bool:
        """True if hardware copies (TMA) of tensor descriptors feed the tensor cores directly.

        sm_120 has such copies, but its matrix instructions read registers, so that descriptors
        cause spills.
        """
        return self.backend == "cuda" and isinstance(self.arch, int) and 90 <= self.arch < 120

    @property
    def key(self) -> str:
        """The target's key in the tables of tiles."""
        return f"sm_{self.arch}" if self.backend == "cuda" else str(self.arch)


class Tile(NamedTuple):
    """Tile shape and launch options of one kernel."""

    block_m: int
    block_n: int
    warps: int
    stages: int


class CoefficientOperand(NamedTuple):
    """A coefficient as kernels take it.

    Attributes:
        ptr: The coefficient, broadcast to [B, N, C], or None for a number.
        value: The number.
        strides: Strides of the tensor over [B, N, C].
    """

    ptr: torch.Tensor | None
    value: float
    strides: tuple[int, int, int]


class SkipOperands(NamedTuple):
    """A skip as kernels take it; the residual is [B, N, C] with contiguous channels, or None."""

    residual_ptr: torch.Tensor | None
    residual_strides: tuple[int, int]
    c_skip: CoefficientOperand
    c_out: CoefficientOperand


@cache
def _target(index: int) -> Target:
    if torch.version.hip is not None:
        return Target("hip", torch.cuda.get_device_properties(index).gcnArchName.split(":")[0])
    major, minor = torch.cuda.get_device_capability(index)
    return Target("cuda", 10 * major + minor)


def target_of(device: torch.device) -> Target:
    """Return the target of a device.

    Raises:
        DeviceError: The device is not a GPU and Triton's interpreter is off.
    """
    if triton.knobs.runtime.interpret:
        return Target("interpreter", 0)
    if target := stand_in(device):
        return target
    if device.type != "cuda":
        raise DeviceError(
            'impl="triton"',
            expected="tensors on a GPU",
            got=f"device {device}",
            remedy='Use impl="reference", or set TRITON_INTERPRET=1 before triton is imported',
        )
    return _target(device.index if device.index is not None else torch.cuda.current_device())


#: Kernel -> variant -> tile. An attention's variant is the type of p and v, and the padded head.
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
#: Target -> the tiles that differ from the default. Those of sm_90 were measured on an H200, the
#: others were chosen by the instructions and spills of compiled kernels.
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
        "prologue": {"64": Tile(128, 128, 4, 1)},
    },
    "gfx942": {"prologue": {"64": Tile(128, 128, 4, 1), "128": Tile(128, 256, 8, 1)}},
}


@cache
def tile_for(kernel: str, variant: str, target: Target) -> Tile:
    """Return the tile of a kernel variant on a target: the target's own, or the safe default."""
    variants = _OF_TARGETS.get(target.key, {}).get(kernel, {})
    return variants.get(variant) or _DEFAULT[kernel][variant]


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up. On the host `triton.cdiv` takes over a microsecond."""
    return -(-a // b)


def pad_head(head_dim: int) -> int:
    """Return the channels per head inside the kernels: a power of two, at least 32.

    32 is the depth of an int8 product.
    """
    return max(32, triton.next_power_of_2(head_dim))


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x if its last dimension is contiguous, else a dense copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def in_whole_copies(x: torch.Tensor) -> bool:
    """Return True if hardware copies can read x [B, N, H*D] where it lies.

    Descriptors need the stride of a single sample aligned too; a tensor that came through DLPack
    has 1 there, and an expanded one 0.
    """
    return (
        x.element_size() == 2
        and 0 < x.stride(1) < 2**22
        and x.stride(0) > 0
        and not any(step % 16 for step in x.stride()[:2])
        and (x.device.type == "meta" or x.data_ptr() % 16 == 0)
    )


def strides(x: torch.Tensor) -> tuple[int, int]:
    """Return the strides of batch and tokens of x [B, N, C]; of one sample that of the batch is 0,
    so that its value, which means nothing, compiles no kernel again."""
    return 0 if x.shape[0] == 1 else x.stride(0), x.stride(1)


def coefficient(
    value: float | torch.Tensor, shape: Sequence[int]
) -> tuple[CoefficientOperand, int]:
    """Describe a float, or a tensor that broadcasts to `shape` [B, N, C], for a kernel.

    Returns:
        The coefficient, and its kind: VALUE, PER_BATCH, PER_CHANNEL or PER_ELEMENT.
    """
    if not isinstance(value, torch.Tensor):
        return CoefficientOperand(None, float(value), (0, 0, 0)), VALUE
    wide = value.expand(*shape)
    # For an extent of 1 `expand` keeps the original stride, which has no meaning.
    stride_b, stride_n, stride_c = (
        0 if size == 1 else stride for size, stride in zip(value.shape, wide.stride(), strict=True)
    )
    if stride_c * shape[2] >= 2**31:  # in a kernel, offsets of channels are 32 bits
        return coefficient(value.contiguous(), shape)
    if stride_n == 0 and stride_c == 0:
        kind = PER_BATCH
    elif stride_n == 0:
        kind = PER_CHANNEL
    else:
        kind = PER_ELEMENT
    return CoefficientOperand(wide, 1.0, (stride_b, stride_n, stride_c)), kind


def skip_arguments(
    residual: torch.Tensor | None,
    skip_factor: float | torch.Tensor,
    out_factor: float | torch.Tensor,
    shape: Sequence[int],
) -> dict[str, object]:
    """Return the arguments of `numerics.close_skip`, named as in every kernel with a skip.

    Args:
        residual: [B, N, C] or None.
        skip_factor: Number, or tensor that broadcasts to `shape`.
        out_factor: Number, or tensor that broadcasts to `shape`.
        shape: [B, N, C].
    """
    c_skip, skip_kind = coefficient(skip_factor, shape)
    c_out, out_kind = coefficient(out_factor, shape)
    residual = None if residual is None else dense_rows(residual)
    strides = (0, 0) if residual is None else residual.stride()[:2]
    return {
        "skip": SkipOperands(residual, strides, c_skip, c_out),
        "KINDS": (skip_kind, out_kind),
    }


def descriptor(x: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """Return a descriptor that loads tiles of shape `block` from a dense 2-D tensor."""
    return TensorDescriptor.from_tensor(x, block)


#: Let a product and a sum become one instruction on every release of Triton. Triton 3.9 warns that
#: 3.10 will change the default.
_FUSION = {"enable_fp_fusion": True}


def launch(kernel, grid: tuple[int, ...], device: torch.device, **arguments) -> None:
    """Launch a kernel on a device, which need not be the current one."""
    asked, only = arguments | _FUSION, compiles_only()
    start = partial(kernel.warmup, grid=grid) if only else kernel[grid]
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            compiled = start(**asked)
    else:
        compiled = start(**asked)
    recording = None if only else recorder()
    if recording is not None:
        recording.launched(kernel, grid, arguments, compiled)


def compile_ahead(call: Callable[[], object], device: torch.device) -> None:
    """Compile and load the kernels that a call launches, several at a time, and launch none.

    Where Triton's cache on disk has none, the first video of Wan2.1-1.3B takes 19 s for 32
    (results/2026-11-27/cold_start.txt). A kernel that does not compile is left to its launch,
    which says so.

    Args:
        call: Its torch operations run, on memory that no kernel has written. So it must keep
            nothing of what it computes.
        device: The GPU that will run the kernels.
    """
    with compiler_threads() as pool:
        kernels = [
            future.result() for future in compile_together(call, pool) if not future.exception()
        ]
        # A kernel's launcher is C that Triton compiles, 0.2 s each.
        list(pool.map(partial(_load, device), kernels))


@contextmanager
def compiler_threads() -> Iterator[ThreadPoolExecutor]:
    """Threads that compile kernels, while Python collects no garbage.

    Before Python 3.11.8 and 3.12.2, a collection inside `ast.parse` may let another thread parse
    too, and then both raise SystemError (python/cpython#106905).
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        with ThreadPoolExecutor() as pool:
            yield pool
    finally:
        if collected:
            gc.enable()


def _load(device: torch.device, kernel: Any) -> None:
    """Build the launcher of a compiled kernel, and load both."""
    with suppress(Exception), torch.cuda.device(device):
        _ = kernel.run


def compile_together(call: Callable[[], object], pool: ThreadPoolExecutor) -> list[Future[Any]]:
    """Compile the kernels that a call launches, and launch none of them.

    Args:
        call: As for `compile_ahead`.
        pool: Its threads compile.

    Returns:
        The compiled kernels or errors. None before Triton 3.6, where each launch compiles its own.
    """
    try:
        from triton.runtime._async_compile import AsyncCompileMode

        mode = AsyncCompileMode(pool, ignore_errors=True)
    except (ImportError, TypeError):
        return []
    with mode, compiling_only():
        call()
    futures: list[Future[Any]] = mode.raw_futures
    return futures
