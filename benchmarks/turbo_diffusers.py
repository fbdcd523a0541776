"""diffusers' Wan transformer with SLA's projection attached, as a converted checkpoint has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks.clock import Call
from benchmarks.network import GATE_ROWS, LIVE_GATE, build_network
from benchmarks.setup import MICRO, Sizes, generator
from benchmarks.turbo_exact import exact_sla, projection
from benchmarks.turbo_ways import as_written, patched_ways
from benchmarks.variants import Variant
from turbo_rcm_patch import ops
from turbo_rcm_patch.patching.sla import attach_proj_l, detach_proj_l

__all__ = ["DiffusersShape"]


class DiffusersShape:
    """diffusers' own class, which has no SLA: unpatched it runs full attention."""

    name: Final = "diffusers"

    def __init__(self) -> None:
        self._projections: list[nn.Linear] = []

    def build(self, device: torch.device, seed: int, *, micro: bool) -> Any:
        """The model in bf16 with live gates, and a random projection a block, not used yet."""
        sizes = MICRO if micro else Sizes()
        network = build_network(sizes.network, device, seed)
        for block in network.blocks:
            block.scale_shift_table.data[:, list(GATE_ROWS)] += LIVE_GATE
        first = network.blocks[0].attn1
        head_dim = first.to_q.out_features // first.heads
        self._projections = [
            projection(head_dim, device, seed + i) for i in range(len(network.blocks))
        ]
        return network

    def call(self, model: Any, latents: tuple[int, ...], device: torch.device, seed: int) -> Call:
        """One forward of batch 1 at timestep 988."""
        random = generator(device, seed)
        sizes = Sizes() if model.config.text_dim == 4096 else MICRO

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=random, device=device).bfloat16()

        x, text = normal(*latents), normal(1, sizes.text_tokens, model.config.text_dim)
        timestep = torch.tensor([988.0], device=device)

        def call() -> Tensor:
            output: Tensor = model(
                hidden_states=x, timestep=timestep, encoder_hidden_states=text, return_dict=False
            )[0]
            return output

        return call

    def about(self, model: Any) -> dict[str, object]:
        """For the file."""
        return {}

    @contextmanager
    def truth(self, model: Any, layout: str, topk: float) -> Iterator[None]:
        """Inside, every self-attention is sparse-linear by its definition, in fp32."""
        before = [block.attn1.processor for block in model.blocks]
        try:
            for block, one in zip(model.blocks, self._projections, strict=True):
                sparsity = ops.Sparsity.sage(topk, one.weight.device)
                block.attn1.processor = _Exact(one, sparsity)
            yield
        finally:
            for block, processor in zip(model.blocks, before, strict=True):
                block.attn1.processor = processor

    @contextmanager
    def _attached(self, model: Any, backend: str) -> Iterator[None]:
        for block, one in zip(model.blocks, self._projections, strict=True):
            attach_proj_l(block.attn1, one.weight, one.bias)
        try:
            yield
        finally:
            for block in model.blocks:
                detach_proj_l(block.attn1)

    def variants(self, topk: float) -> list[Variant]:
        """Every way, the long compilations last."""
        return [
            Variant("eager", as_written, profiled=True),
            *patched_ways({"SageSLA": self._attached}, sla_topk=topk),
        ]


class _Exact:
    """A processor of diffusers' Wan attention: its projections, norms and rotary embedding, and
    SLA by definition."""

    def __init__(self, proj_l: nn.Linear, sparsity: ops.Sparsity) -> None:
        self._proj_l, self._sparsity = proj_l, sparsity

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        assert rotary_emb is not None and encoder_hidden_states is None
        q, k = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
        v = attn.to_v(hidden_states)
        q, k, v = (x.view(*x.shape[:2], attn.heads, -1) for x in (q, k, v))
        q, k = (_rotated(x, *rotary_emb) for x in (q, k))
        out = exact_sla(q, k, v, self._proj_l, self._sparsity).flatten(2)
        projected: Tensor = attn.to_out[1](attn.to_out[0](out))
        return projected


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, N, H, D]; cos and sin [1, N, 1, D], each angle twice."""
    even, odd = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
    cos, sin = cos[..., 0::2].float(), sin[..., 1::2].float()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).type_as(x)
