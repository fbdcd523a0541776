"""Ways to run a network: as written, compiled, patched, both, and with another attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Final, Unpack

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from turbo_rcm_patch import PatchConfig, PatchReport, patched
from turbo_rcm_patch.config import PatchOptions
from turbo_rcm_patch.errors import ConfigError, MissingPackageError
from turbo_rcm_patch.extras import version_of

#: Changes how a network runs for the length of a `with` block; takes a backend of torch.compile.
Way = Callable[[Any, str], AbstractContextManager[object]]


def as_written(network: Any, backend: str) -> AbstractContextManager[object]:
    """Change nothing."""
    return nullcontext()


def in_turn(*ways: Way) -> Way:
    """Return one way inside the other; entering gives what the first gives."""

    @contextmanager
    def enter(network: Any, backend: str) -> Iterator[object]:
        with ExitStack() as stack:
            yield [stack.enter_context(way(network, backend)) for way in ways][0]

    return enter


def patch(**options: Unpack[PatchOptions]) -> Way:
    """Return the patch, without the guard unless the options say so; entering gives the report."""

    def enter(network: Any, backend: str) -> AbstractContextManager[PatchReport]:
        return patched(network, PatchConfig(guard=False), **options)

    return enter


@contextmanager
def _compiled(modules: Sequence[Any], **options: Any) -> Iterator[None]:
    torch._dynamo.reset()
    for module in modules:
        module.compile(**options)
    try:
        yield
    finally:
        for module in modules:
            module._compiled_call_impl = None
        torch._dynamo.reset()


def compiled(
    network: Any, backend: str, *, fullgraph: bool = True
) -> AbstractContextManager[object]:
    """Compile every block, as diffusers' `compile_repeated_blocks` does.

    CogVideoX names no repeated blocks, so the blocks are compiled here.
    """
    blocks = getattr(network, "blocks", None) or network.transformer_blocks
    return _compiled(blocks, fullgraph=fullgraph, backend=backend)


def reduce_overhead(network: Any, backend: str) -> AbstractContextManager[object]:
    """Compile the whole network with mode="reduce-overhead", which captures CUDA graphs."""
    inductor = backend == "inductor"  # Other backends have no modes.
    options = {"mode": "reduce-overhead"} if inductor else {"backend": backend}
    return _compiled([network], fullgraph=True, **options)


def cudnn(network: Any, backend: str) -> AbstractContextManager[object]:
    """Let torch's attention run on cuDNN."""
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)


@contextmanager
def sage(network: Any, backend: str) -> Iterator[None]:
    """Run diffusers' attentions on sageattention 2 (a CUDA build)."""
    from diffusers.models.attention_dispatch import attention_backend

    if not hasattr(network, "blocks"):
        raise ConfigError(
            "sageattention",
            expected="a network that asks diffusers for its attention backend",
            got=f"{type(network).__name__}, which calls torch's attention",
        )
    release = version_of("sageattention") or ""
    if not release.startswith("2."):
        raise MissingPackageError(
            "sageattention", expected="release 2.x, a CUDA build", got=release or "no package"
        )
    with attention_backend("sage"):
        yield


#: Method -> how it runs the network. Unpatched ones first; `EAGER` is what others are compared
#: with.
EAGER: Final = "eager"
WAYS: Final[dict[str, Way]] = {
    EAGER: as_written,
    "eager cuDNN": cudnn,
    "compile": compiled,
    "sage": sage,
    # Its CUDA build breaks the graph at every attention.
    "compile sage": in_turn(sage, partial(compiled, fullgraph=False)),
    "patched": patch(),
    "patched int8 Linears": patch(linear="int8"),
    "patched exact": patch(attention="exact"),
    "patched compile": in_turn(patch(), compiled),
    "patched int8 Linears compile": in_turn(patch(linear="int8"), compiled),
    # These take longest to begin with.
    "reduce-overhead": reduce_overhead,
    "patched reduce-overhead": in_turn(patch(), reduce_overhead),
    "patched int8 Linears reduce-overhead": in_turn(patch(linear="int8"), reduce_overhead),
}


def record_report(record: dict[str, Any], report: object) -> None:
    """Note what ran on the last forward of a patched network; nothing for an unpatched one."""
    if isinstance(report, PatchReport) and report.last_forward:
        record["ran"] = ran = report.last_forward
        record["in_int8"] = sum(n for how, n in ran.items() if "int8 attention" in how)
