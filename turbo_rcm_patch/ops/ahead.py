"""Compile kernels for a GPU that is not there, into Triton's cache on disk.

Triton finds a compiled kernel by a hash of its own files, of the kernel's source, and of the types
of the arguments, so a cache serves every machine with the same release of both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.errors import TritonError as TritonError

from turbo_rcm_patch.ops import launch
from turbo_rcm_patch.ops.dispatch import meta_stands_for

VERSION: Final[str] = triton.__version__
#: Numbers of GPUs that are not there. Triton keeps compiled kernels by the number, so each run has
#: one of its own, beside those of real GPUs.
_NUMBERS: Final = itertools.count(1000)


def cache_folder() -> Path:
    """Return the folder of Triton's cache."""
    return Path(triton.knobs.cache.dir)


def is_cached(key: str, kernel: str) -> bool:
    """Return True if the cache has a kernel, by its hash and name."""
    return bool(triton.runtime.cache.get_cache_manager(key).get_group(f"{kernel}.json"))


def compile_for(
    arch: int,
    calls: Sequence[Callable[[], object]],
    folder: Path,
    progress: Callable[[int, int], object],
) -> dict[str, tuple[str, bool]]:
    """Compile what calls with tensors on the meta device would launch on an NVIDIA GPU.

    Args:
        arch: Its architecture, for instance 90.
        calls: The calls.
        folder: The cache folder.
        progress: Called with the number of calls that are done, and of all.

    Returns:
        Hash of a kernel -> its name, and True if the cache had it.

    Raises:
        TritonError: A kernel does not compile; from one of Triton's passes a RuntimeError.
    """
    seen: dict[str, tuple[str, bool]] = {}

    def listen(*, src: Any, metadata: Any, cache_hit: bool, **_: object) -> None:
        seen[metadata["hash"]] = src.name, cache_hit

    target = launch.Target("cuda", arch)
    with triton.knobs.cache.scope(), triton.knobs.compilation.scope(), stand_in_driver(target):
        triton.knobs.cache.dir = str(folder)
        triton.knobs.compilation.listener = listen
        with meta_stands_for(target), torch.no_grad(), launch.compiler_threads() as pool:
            for done, call in enumerate(calls):
                progress(done, len(calls))
                for kernel in launch.compile_together(call, pool):
                    kernel.result()
    progress(len(calls), len(calls))
    return seen


@contextmanager
def stand_in_driver(target: launch.Target) -> Iterator[None]:
    """Stand for the driver of a GPU: what Triton asks of it before it compiles a kernel."""
    held = vars(triton.runtime.driver)
    before, number = dict(held), next(_NUMBERS)
    threads = 64 if target.backend == "hip" else 32
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: number,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget(*target, threads),
        )
    )
    try:
        yield
    finally:
        held.clear()
        held.update(before)
