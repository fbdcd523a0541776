"""Compile two kernels with `compile_ahead` for an Ampere GPU that is not there. It prints the
release of Triton that this Python imports, whether it can, and how many were ready."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from turbo_rcm_patch.kernels import ahead
from turbo_rcm_patch.kernels.launch import launch

CPU = torch.device("cpu")


class Driver:
    """Stands for the driver of a GPU: what a launch asks of it before it starts anything."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 80, 32)


@triton.jit
def copy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n, other=0.0))


def call() -> None:
    for block in (32, 64):
        x = torch.zeros(block)
        launch(copy_kernel, (1,), CPU, x_ptr=x, y_ptr=x, n=3, BLOCK=block)


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    ready: list[object] = []
    ahead._loaded = lambda kernel, device: ready.append(kernel.asm["cubin"]) or kernel
    done = ahead.compile_ahead(call, CPU)
    kept = copy_kernel.device_caches[0][0]
    assert len(ready) == len(kept), "what was compiled was not kept"
    print(triton.__version__, done, len(kept))


if __name__ == "__main__":
    main()
