"""The inputs of one call of a video transformer of any family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

__all__ = ["TIMES", "NetworkInput", "network_inputs"]

#: Rectified-flow times of the measurement: the first, second and last step of the four-step
#: sampler.
TIMES: Final = (0.98765, 0.93378, 0.60898)


@dataclass(frozen=True, slots=True)
class NetworkInput:
    """The inputs of one call.

    Attributes:
        hidden_states: [B, C, F, H, W]; of CogVideoX [B, F, C, H, W].
        timestep: Network time [B].
        encoder_hidden_states: [B, L, C].
        image_rotary_emb: Cosines and sines [tokens, head_dim], for networks that are given them.
    """

    hidden_states: torch.Tensor
    timestep: torch.Tensor
    encoder_hidden_states: torch.Tensor
    image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None

    def call(self, network: torch.nn.Module) -> torch.Tensor:
        """Call the network and return its output."""
        given = (
            {} if self.image_rotary_emb is None else {"image_rotary_emb": self.image_rotary_emb}
        )
        output: torch.Tensor = network(
            hidden_states=self.hidden_states,
            timestep=self.timestep,
            encoder_hidden_states=self.encoder_hidden_states,
            return_dict=False,
            **given,
        )[0]
        return output

    def upcast(self) -> NetworkInput:
        """The same inputs in fp32; integer times stay integers."""
        time = self.timestep
        return NetworkInput(
            self.hidden_states.float(),
            time.float() if time.is_floating_point() else time,
            self.encoder_hidden_states.float(),
            self.image_rotary_emb,
        )


def network_inputs(
    noises: Sequence[torch.Tensor],
    encoder_hidden_states: torch.Tensor,
    *,
    clean: torch.Tensor | float = 0.0,
    times: Sequence[float] = TIMES,
    dtype: torch.dtype = torch.bfloat16,
) -> list[NetworkInput]:
    """All combinations of noises and times of a rectified flow: (1 - t) clean + t noise.

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
