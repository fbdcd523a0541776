"""How far one network call is from the truth, patched and unpatched.

Truth is the same network with its weights and inputs upcast to fp32, TF32 off, exact attention.
Errors are relative L2 of the output, averaged over three timesteps and four seeds.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.sampling.generation import Conditioning, initial_noise
from turbo_rcm_patch.sampling.metrics import relative_l2
from turbo_rcm_patch.sampling.settings import Settings

if TYPE_CHECKING:
    from diffusers import WanPipeline, WanTransformer3DModel

__all__ = [
    "NetworkInput",
    "NetworkNumber",
    "highest_precision",
    "measure_network",
    "network_inputs",
    "network_number",
]

#: Rectified-flow times of the measurement: the first, second and last step of the four-step
#: sampler.
TIMES: Final = (0.98765, 0.93378, 0.60898)
SEEDS: Final = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class NetworkInput:
    """One call: hidden_states [B, C, F, H, W], network timestep [B], encoder_hidden_states [B, L,
    C].
    """

    hidden_states: torch.Tensor
    timestep: torch.Tensor
    encoder_hidden_states: torch.Tensor


@dataclass(frozen=True, slots=True)
class NetworkNumber:
    """Mean errors against fp32 truth.

    Attributes:
        unpatched: Of the network as its authors wrote it.
        patched: Of the patched network.
    """

    unpatched: float
    patched: float

    @property
    def ratio(self) -> float:
        """e(patched) / e(unpatched)."""
        return self.patched / self.unpatched


def network_inputs(
    noises: Sequence[torch.Tensor],
    encoder_hidden_states: torch.Tensor,
    *,
    clean: torch.Tensor | float = 0.0,
    times: Sequence[float] = TIMES,
    dtype: torch.dtype = torch.bfloat16,
) -> list[NetworkInput]:
    """Every combination of noises and times, as (1 - t) clean + t noise.

    Args:
        noises: One [1, C, F, H, W] a seed.
        encoder_hidden_states: [1, L, C].
        clean: Latents of a real video [1, C, F, H, W], for a trained network.
        times: Rectified-flow times.
        dtype: The network's; inputs are rounded to it, so that truth sees the same numbers.
    """
    return [
        NetworkInput(
            hidden_states=((1.0 - t) * clean + t * noise).to(dtype),
            timestep=torch.tensor([1000.0 * t], device=noise.device),
            encoder_hidden_states=encoder_hidden_states.to(dtype),
        )
        for noise in noises
        for t in times
    ]


@torch.no_grad()
def network_number(
    transformer: WanTransformer3DModel,
    inputs: Sequence[NetworkInput],
    config: PatchConfig | None = None,
) -> NetworkNumber:
    """Measure a transformer, which is unpatched before and after.

    Args:
        transformer: In bf16, on any device, not offloaded. An fp32 copy of it is made for the time
            of the measurement.
        inputs: See `network_inputs`.
        config: How to patch. The guard is off here: no pair is given back before it is measured.
    """
    from turbo_rcm_patch import patched

    config = replace(config or PatchConfig(), guard=False)
    unpatched = [_call(transformer, one) for one in inputs]
    with patched(transformer, config):
        ours = [_call(transformer, one) for one in inputs]
    truth_network = copy.deepcopy(transformer).float()
    with highest_precision():
        truth = [_call(truth_network, _upcast(one)) for one in inputs]
    return NetworkNumber(unpatched=_mean_error(unpatched, truth), patched=_mean_error(ours, truth))


def measure_network(
    pipe: WanPipeline,
    conditioning: Conditioning,
    clean: torch.Tensor,
    settings: Settings,
    config: PatchConfig,
) -> NetworkNumber:
    """`network_number` of a pipeline's (high-noise) transformer.

    Args:
        pipe: The pipeline, not offloaded.
        conditioning: One prompt.
        clean: Latents of a video of that prompt [1, C, F, H, W], to which four noises are added.
        settings: Shape of the video.
        config: How to patch.
    """
    network = pipe.transformer
    device = network.device
    inputs = network_inputs(
        [initial_noise(pipe, seed, settings).to(device) for seed in SEEDS],
        conditioning.embeds.to(device),
        clean=clean.to(device),
        dtype=network.dtype,
    )
    return network_number(network, inputs, config)


@contextmanager
def highest_precision() -> Iterator[None]:
    """fp32 matrix products and convolutions without TF32; flags are as before afterwards."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def _call(network: WanTransformer3DModel, one: NetworkInput) -> torch.Tensor:
    output: torch.Tensor = network(
        hidden_states=one.hidden_states,
        timestep=one.timestep,
        encoder_hidden_states=one.encoder_hidden_states,
        return_dict=False,
    )[0]
    return output.float().cpu()


def _upcast(one: NetworkInput) -> NetworkInput:
    return NetworkInput(
        one.hidden_states.float(), one.timestep.float(), one.encoder_hidden_states.float()
    )


def _mean_error(outputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> float:
    errors = [relative_l2(a, b) for a, b in zip(outputs, truth, strict=True)]
    return sum(errors) / len(errors)
