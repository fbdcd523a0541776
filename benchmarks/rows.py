"""The rows of `length`: Wan2.1-1.3B over its tokens, and other networks at one length."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch

from benchmarks.measure import Call
from benchmarks.networks import (
    build_cogvideox,
    build_wan,
    cogvideox_call,
    sizes_of,
    tokens_of,
    wan_call,
)
from benchmarks.runner import Plan, Record
from benchmarks.turbo import WanModelClass

#: Tokens -> latent frames, height and width.
LENGTHS: Final = {
    "780": (1, 60, 52),
    "1950": (5, 30, 52),
    "7800": (5, 60, 104),
    "17160": (11, 60, 104),
    "32760": (21, 60, 104),
    "75600": (21, 90, 160),
}
_MICRO_LENGTHS: Final = {"780": (1, 8, 8), "1950": (3, 8, 8)}
_COGVIDEOX: Final = "cogvideox-2b"
_WAN_MODEL: Final = "WanModel"
#: Shipped models, by the names that `load_pipeline` knows.
_SHIPPED: Final = ("tiny", "tiny-cogvideox")


def names(plan: Plan) -> list[str]:
    """Every row, Wan's lengths first."""
    return [*(_MICRO_LENGTHS if plan.micro else LENGTHS), _COGVIDEOX, *_SHIPPED, _WAN_MODEL]


def default(plan: Plan) -> list[str]:
    """The rows that are measured unless some are asked for: WanModel needs a checkout, and the
    shipped models have no toy sizes."""
    left_out = {*(_SHIPPED if plan.micro else ()), *(() if plan.turbodiffusion else (_WAN_MODEL,))}
    return [name for name in names(plan) if name not in left_out]


@dataclass(slots=True)
class Row:
    """One row.

    Attributes:
        network: Unpatched and uncompiled.
        call: A forward of it.
        about: What a file says about both.
    """

    network: Any
    call: Call
    about: Record
    _eager: torch.Tensor | None = None

    def eager(self) -> torch.Tensor:
        """The output of the network as it is written."""
        if self._eager is None:
            self._eager = self.call()
        return self._eager


class Rows:
    """The rows, made when they are first asked for and kept.

    Args:
        plan: What was asked for.
        device: Where.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._plan, self._device = plan, device
        self._found: dict[str, Row] = {}

    def of(self, name: str) -> Row:
        """The row of this name, while its network is as it is written.

        Raises:
            ConfigError: WanModel without its checkout.
            ImportError: A package is missing that its code needs.
        """
        if name not in self._found:
            network, call, tokens = self._made(name)
            kind = f"{type(network).__module__}.{type(network).__qualname__}"
            parameters = sum(p.numel() for p in network.parameters())
            about: Record = {"tokens": tokens, "class": kind, "parameters": parameters}
            self._found[name] = Row(network, call, about)
        return self._found[name]

    def _made(self, name: str) -> tuple[Any, Call, int]:
        plan, device = self._plan, self._device
        lengths = _MICRO_LENGTHS if plan.micro else LENGTHS
        if name in lengths:
            sizes, latents = sizes_of(plan), (1, 16, *lengths[name])
            call = wan_call(self._wan, latents, sizes.text_tokens, device, plan.seed)
            return self._wan, call, tokens_of(latents)
        if name == _WAN_MODEL:
            made = WanModelClass(plan)
            network = made.build(device, plan.seed, micro=plan.micro)
            latents = (1, 16, *((3, 20, 20) if plan.micro else LENGTHS["32760"]))
            return network, made.call(network, latents, device, plan.seed), tokens_of(latents)
        if name == "tiny":  # Its videos: 17 frames of 128 x 128.
            network = _shipped(name, device)
            latents = (1, network.config.in_channels, 5, 32, 32)
            return network, wan_call(network, latents, 24, device, plan.seed), tokens_of(latents)
        if name == "tiny-cogvideox":
            network = _shipped(name, device)
        else:
            network = build_cogvideox(name, device, plan.seed, micro=plan.micro)
        config = network.config
        frames = (config.sample_frames - 1) // config.temporal_compression_ratio + 1
        grid = config.sample_height // 2 * (config.sample_width // 2)
        tokens = config.max_text_seq_length + frames * grid
        return network, cogvideox_call(network, device, plan.seed), tokens

    @cached_property
    def _wan(self) -> Any:
        """One network for all lengths."""
        return build_wan(sizes_of(self._plan).network, self._device, self._plan.seed)


def _shipped(name: str, device: torch.device) -> Any:
    """The transformer of a shipped model, with its trained weights, in bf16."""
    import diffusers

    from turbo_rcm_patch import tiny

    kinds: dict[str, Any] = {
        "tiny": (diffusers.WanTransformer3DModel, tiny.TINY_WAN),
        "tiny-cogvideox": (diffusers.CogVideoXTransformer3DModel, tiny.TINY_COGVIDEOX),
    }
    kind, folder = kinds[name]
    network = kind.from_pretrained(folder, subfolder="transformer", torch_dtype=torch.bfloat16)
    return network.to(device).eval().requires_grad_(False)
