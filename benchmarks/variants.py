"""The ways in which a network is run: as written, compiled, patched, with another attention.

Each is a context: inside, the network runs that way; afterwards it is as it was, uncompiled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.clock import (
    GROUPS,
    Call,
    calls_within,
    group_of,
    kernel_milliseconds,
    peak_bytes,
    rotating,
)
from benchmarks.contest import Effort, reason_of
from benchmarks.journal import Journal
from benchmarks.peers import sage_major
from benchmarks.setup import time_call
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import ConfigError, MissingPackageError

if TYPE_CHECKING:
    from diffusers import ModelMixin

__all__ = ["Variant", "compiled", "has_int8_linears", "time_variant", "variants"]


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to run a network.

    Attributes:
        name: As in tables and on the command line.
        enter: Gets the network and the backend of torch.compile.
        ours: Whether it is patched.
        profiled: Whether its kernels are listed.
    """

    name: str
    enter: Callable[[ModelMixin, str], AbstractContextManager[object]]
    ours: bool = False
    profiled: bool = False


def has_int8_linears() -> bool:
    """Whether this release can run linears in int8."""
    return any(one.name == "linear" for one in dataclasses.fields(PatchConfig))


@contextmanager
def compiled(network: ModelMixin, backend: str, *, fullgraph: bool = True) -> Iterator[None]:
    """Inside, every block is compiled, by default without graph breaks."""
    torch._dynamo.reset()
    # CogVideoX names no repeated blocks for `compile_repeated_blocks`.
    blocks = getattr(network, "blocks", None) or network.transformer_blocks
    for block in blocks:
        block.compile(fullgraph=fullgraph, backend=backend)
    try:
        yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None
        torch._dynamo.reset()


@contextmanager
def _as_written(network: ModelMixin, backend: str) -> Iterator[None]:
    yield


@contextmanager
def _cudnn(network: ModelMixin, backend: str) -> Iterator[None]:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        yield


@contextmanager
def _sage(network: ModelMixin, backend: str) -> Iterator[None]:
    from diffusers.models.attention_dispatch import attention_backend

    if not hasattr(network, "blocks"):
        raise ConfigError(
            "attention backend",
            expected="a network that asks diffusers for one",
            got="CogVideoX, which calls torch's attention",
        )
    if sage_major() < 2:
        raise MissingPackageError(
            "sageattention", expected="2.1 or newer, a CUDA build", got=f"{sage_major()}.x"
        )
    with attention_backend("sage"):
        yield


def _patched(**fields: Any) -> Callable[..., AbstractContextManager[object]]:
    @contextmanager
    def enter(network: ModelMixin, backend: str) -> Iterator[None]:
        from turbo_rcm_patch import patched

        with patched(network, PatchConfig(guard=False, **fields)):
            yield

    return enter


def _and_compiled(
    enter: Callable[[ModelMixin, str], AbstractContextManager[object]],
    *,
    fullgraph: bool = True,
) -> Callable[[ModelMixin, str], AbstractContextManager[object]]:
    @contextmanager
    def both(network: ModelMixin, backend: str) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(enter(network, backend))
            stack.enter_context(compiled(network, backend, fullgraph=fullgraph))
            yield

    return both


def _fused_qkv(
    enter: Callable[[ModelMixin, str], AbstractContextManager[object]],
) -> Callable[[ModelMixin, str], AbstractContextManager[object]]:
    """With diffusers' own fusion of the linears of q, k and v into one, made first."""

    @contextmanager
    def both(network: Any, backend: str) -> Iterator[None]:
        flag = "fused_projections"  # diffusers leaves it behind
        clean = [module for module in network.modules() if flag not in vars(module)]
        network.fuse_qkv_projections()
        try:
            with enter(network, backend):
                yield
        finally:
            network.unfuse_qkv_projections()
            for module in clean:
                vars(module).pop(flag, None)

    return both


def variants() -> list[Variant]:
    """Every way, unpatched ones first; the first is what the others are compared with."""
    int8 = _patched(linear="int8")
    found = [
        Variant("eager", _as_written, profiled=True),
        Variant("eager cuDNN", _cudnn),
        Variant("compiled", _and_compiled(_as_written), profiled=True),
        Variant("compiled fused qkv", _fused_qkv(_and_compiled(_as_written))),
        Variant("eager sage", _sage),
        # Its CUDA build breaks the graph at every attention.
        Variant("compiled sage", _and_compiled(_sage, fullgraph=False)),
        Variant("patched", _patched(), ours=True, profiled=True),
        Variant("patched compiled", _and_compiled(_patched()), ours=True, profiled=True),
        Variant("patched fused qkv", _fused_qkv(_patched()), ours=True),
    ]
    if has_int8_linears():
        found += [
            Variant("patched int8", int8, ours=True, profiled=True),
            Variant("patched int8 compiled", _and_compiled(int8), ours=True, profiled=True),
        ]
    return found


def time_variant(
    variant: Variant,
    network: ModelMixin,
    calls: Sequence[Call],
    errors: Callable[[torch.Tensor], dict[str, float]],
    limit: float,
    journal: Journal,
    effort: Effort,
) -> dict[str, object]:
    """Check a variant on the first call, then time it over all; what goes to the file.

    Args:
        variant: How the network runs.
        network: Unpatched and uncompiled before and after.
        calls: One a set of inputs; each runs the network or a part of it.
        errors: Numbers of an output against the truth.
        limit: Relative L2 from which an output is wrong.
        journal: For the device.
        effort: How long; an infinite budget stands for its most calls.
    """
    device = journal.device
    compiler = "eager" if journal.plan.micro else "inductor"
    record: dict[str, object] = {}
    try:
        with variant.enter(network, compiler):
            output = calls[0]()
            record["error"] = found = errors(output)
            if not found["relative_l2"] < limit:
                return record | {
                    "status": "wrong",
                    "reason": f"wrong (relL2 {found['relative_l2']:.3g})",
                }
            del output
            call = rotating(calls)
            count = effort.most
            if math.isfinite(effort.budget):
                count = calls_within(call, device, effort.budget, effort.least, effort.most)
            record["milliseconds"] = asdict(time_call(call, device, count, warmup=1))
            record |= {"status": "timed", **peak_bytes(call, device)}
            if variant.profiled:
                kernels = kernel_milliseconds(call, device)
                groups = dict.fromkeys(GROUPS, 0.0)
                for name, value in kernels.items():
                    groups[group_of(name)] += value
                record["groups"] = groups
                record["kernels"] = dict(list(kernels.items())[:40])
    except Exception as error:  # one that cannot run here says why, and the others go on
        record |= {"status": "missing", "reason": reason_of(error)}
    return record
