"""The error of one network call, patched and unpatched.

Truth is the same network with its weights and inputs upcast to fp32, TF32 off, exact attention.
If an attention holds SLA's proj_l, unpatched and truth compute SLA by its definition.
Errors are relative L2 of the output, averaged over three timesteps and four seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.sampling.families import family_of
from turbo_rcm_patch.sampling.generation import Conditioning, initial_noise
from turbo_rcm_patch.sampling.metrics import relative_l2
from turbo_rcm_patch.sampling.network_input import NetworkInput
from turbo_rcm_patch.sampling.settings import Settings

if TYPE_CHECKING:
    from turbo_rcm_patch.sampling.families import VideoPipeline

__all__ = [
    "NetworkNumber",
    "highest_precision",
    "measure_network",
    "network_number",
]

SEEDS: Final = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class NetworkNumber:
    """Mean errors against fp32 truth.

    Attributes:
        unpatched: Error of the unpatched network.
        patched: Error of the patched network.
    """

    unpatched: float
    patched: float

    @property
    def ratio(self) -> float:
        """e(patched) / e(unpatched)."""
        return self.patched / self.unpatched


@torch.no_grad()
def network_number(
    transformer: torch.nn.Module,
    inputs: Sequence[NetworkInput],
    config: PatchConfig | None = None,
) -> NetworkNumber:
    """Measure a transformer. It must be unpatched, and is unpatched afterwards.

    Args:
        transformer: In bf16, on any device, not offloaded. For the truth it is upcast in place,
            one block at a time, so a network of any size needs the memory of one block more.
        inputs: See `network_input.network_inputs`.
        config: How to patch. The guard is off here: no pair is given back before it is measured.
    """
    from turbo_rcm_patch import patched
    from turbo_rcm_patch.patching import sla_as_defined

    config = replace(config or PatchConfig(), guard=False)
    with sla_as_defined(transformer, config.sla_topk):
        unpatched = [one.call(transformer).float().cpu() for one in inputs]
    with patched(transformer, config):
        ours = [one.call(transformer).float().cpu() for one in inputs]
    with highest_precision(), sla_as_defined(transformer, config.sla_topk), upcast(transformer):
        truth = [one.upcast().call(transformer).cpu() for one in inputs]
    return NetworkNumber(unpatched=_mean_error(unpatched, truth), patched=_mean_error(ours, truth))


def measure_network(
    pipe: VideoPipeline,
    conditioning: Conditioning,
    clean: torch.Tensor,
    settings: Settings,
    config: PatchConfig,
) -> NetworkNumber:
    """Apply `network_number` to the (high-noise) transformer of a pipeline.

    Args:
        pipe: The pipeline, not offloaded.
        conditioning: One prompt.
        clean: Latents of a video of that prompt, to which four noises are added.
        settings: Shape of the video.
        config: How to patch.
    """
    network = pipe.transformer
    device = network.device
    inputs = family_of(pipe).network_calls(
        pipe,
        [initial_noise(pipe, seed, settings).to(device) for seed in SEEDS],
        conditioning.embeds.to(device),
        clean.to(device),
        settings,
    )
    return network_number(network, inputs, config)


@contextmanager
def upcast(network: torch.nn.Module) -> Iterator[None]:
    """Run a network in fp32 without a copy of it: blocks are upcast while they are called, other
    parts for the whole time. Afterwards every tensor is the original one.

    Args:
        network: With its blocks in lists (`ModuleList`), the way every video transformer has them.
    """
    blocks = [
        block
        for child in network.children()
        if isinstance(child, torch.nn.ModuleList)
        for block in child
    ]
    inside = {id(x) for block in blocks for x in (*block.parameters(), *block.buffers())}
    rest = [x for x in (*network.parameters(), *network.buffers()) if id(x) not in inside]
    held: dict[torch.nn.Module, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def begin(block: torch.nn.Module, *_: object) -> None:
        if block not in held:
            held[block] = _widen([*block.parameters(), *block.buffers()])

    def end(block: torch.nn.Module, *_: object) -> None:
        _narrow(held.pop(block, []))

    hooks: list[Callable[[], None]] = []
    before = _widen(rest)
    try:
        for block in blocks:
            hooks.append(block.register_forward_pre_hook(begin).remove)
            hooks.append(block.register_forward_hook(end, always_call=True).remove)
        yield
    finally:
        for remove in hooks:
            remove()
        for one in list(held):
            end(one)
        _narrow(before)


def _widen(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Replace tensors by fp32 copies, and return the originals for `_narrow`."""
    held = [(x, x.data) for x in tensors if x.is_floating_point() and x.dtype != torch.float32]
    for x, values in held:
        x.data = values.float()
    return held


def _narrow(held: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for x, values in held:
        x.data = values


@contextmanager
def highest_precision() -> Iterator[None]:
    """Compute fp32 matrix products and convolutions without TF32, and restore the flags
    afterwards."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def _mean_error(outputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> float:
    errors = [relative_l2(a, b) for a, b in zip(outputs, truth, strict=True)]
    return sum(errors) / len(errors)
