"""Ulysses: a sequence split over several ranks, through diffusers' `enable_parallelism`.

diffusers splits the sequence over the ranks, and records this on the model and on the attention
processors. Norms, Linears, feed-forward and skips need no data of the other ranks. An attention
needs two exchanges in the model's dtype, one of q, k and v and one of the output, so that every
rank computes all tokens of a part of the heads (DeepSpeed-Ulysses, arXiv 2309.14509). With rings
and in other modes the attention is called as a module, and diffusers' processor exchanges.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from turbo_rcm_patch.errors import ContextParallelError
from turbo_rcm_patch.ops import AttentionSpec
from turbo_rcm_patch.ops.attention import api as attention
from turbo_rcm_patch.ops.formats import Norms, Rotary

if TYPE_CHECKING:
    from turbo_rcm_patch.patching.block import PatchedBlock


def context_parallel(holder: object) -> Any:
    """Return diffusers' ContextParallelConfig of a model or an attention processor, or None."""
    config: Any = getattr(holder, "_parallel_config", None)
    return getattr(config, "context_parallel_config", None)


def exchanges_itself(processor: object) -> bool:
    """Return True if a processor exchanges by its own code: in a ring, or with uneven parts."""
    config = context_parallel(processor)
    if config is None:
        return False
    uneven = getattr(config, "ulysses_anything", False) or getattr(config, "ring_anything", False)
    return bool(uneven) or config.ring_degree > 1


@cache
def _with_heads(spec: AttentionSpec, heads: int) -> AttentionSpec:
    return replace(spec, heads=heads)


class Ulysses:
    """The exchanges of one attention.

    Args:
        group: The ranks that share its sequence.
        spec: The options of the attention.
    """

    def __init__(self, group: Any, spec: AttentionSpec) -> None:
        self._group, self._spec, self._size = group, spec, group.size()

    def to_heads(
        self, q: Tensor, k: Tensor, v: Tensor, norms: Norms, tables: Rotary | None
    ) -> tuple[Tensor, Tensor, Tensor, AttentionSpec]:
        """Normalise and rotate the local tokens, then exchange them for all tokens of some heads.

        Args:
            q: [B, n, H*D].
            k: [B, n, H*D].
            v: [B, n, H*D].
            norms: The norms of q and k.
            tables: The rotary table of the local tokens, or None.

        Returns:
            q, k and v, [B, N, H/P * D] each with P ranks, and the options of their attention.
        """
        spec = self._spec
        rest: Any = {"rotary": tables, "heads": spec.heads, "eps": norms.eps, "impl": spec.impl}
        q = attention.norm_rotate(q, weight=norms.q, bias=norms.q_bias, **rest)
        k = attention.norm_rotate(k, weight=norms.k, bias=norms.k_bias, **rest)
        batch, tokens, _ = q.shape
        # [P, 3, B, n, H/P * D]: the heads of each rank.
        parts = torch.stack([x.reshape(batch, tokens, self._size, -1) for x in (q, k, v)])
        came = self._exchange(parts.permute(3, 0, 1, 2, 4).contiguous())
        # [P, 3, B, n, ...]: the tokens of each rank, in their order.
        whole = came.permute(1, 2, 0, 3, 4).reshape(3, batch, self._size * tokens, -1)
        q, k, v = whole.unbind()
        return q, k, v, _with_heads(spec, spec.heads // self._size)

    def to_tokens(self, out: Tensor) -> Tensor:
        """Exchange the output of all tokens for that of the local tokens.

        Args:
            out: [B, N, H/P * D], all tokens of some heads.

        Returns:
            [B, n, H*D], the local tokens of all heads.
        """
        batch, tokens, channels = out.shape
        parts = out.reshape(batch, self._size, tokens // self._size, channels)
        parts = parts.transpose(0, 1).contiguous()
        return self._exchange(parts).permute(1, 2, 0, 3).flatten(2)

    def _exchange(self, parts: Tensor) -> Tensor:
        """Send part n to rank n, and return the parts that came, [P, ...]."""
        came = torch.empty_like(parts)
        dist.all_to_all_single(came, parts, group=self._group)
        return came


def ulysses_of(processor: object, spec: AttentionSpec) -> Ulysses | None:
    """Return the exchanges of an attention, or None if its sequence is not split.

    Raises:
        ContextParallelError: The heads cannot be divided among the ranks. `enable_parallelism` may
            come after `check_parallel`.
    """
    config = context_parallel(processor)
    if config is None or config.ulysses_degree < 2:
        return None
    _check_heads("self-attention", spec.heads, config.ulysses_degree)
    return Ulysses(config._ulysses_mesh.get_group(), spec)


def _check_heads(name: str, heads: int, ranks: int) -> None:
    """Raise a ContextParallelError if heads cannot be divided among ranks."""
    if heads % ranks:
        raise ContextParallelError(
            f"{name}: {heads} heads",
            expected=f"a multiple of ulysses_degree={ranks}",
            got=str(heads),
            remedy="Use another ulysses_degree, or a ring with "
            "set_attention_backend('turbo_rcm_int8')",
        )


def check_parallel(model: nn.Module) -> None:
    """Raise if a model is parallel in a way that the fused path does not support.

    Raises:
        ContextParallelError: The parallelism is not a split sequence, or the heads cannot be
            divided among the ranks.
    """
    for name, module in model.named_modules():
        processor = module.__dict__.get("processor")
        for holder in (module, processor):
            config = getattr(holder, "_parallel_config", None)
            if config is not None and context_parallel(holder) is None:
                raise ContextParallelError(
                    name or "model",
                    expected="a sequence split by a ContextParallelConfig, or no parallelism",
                    got=f"{type(config).__name__} without one",
                    remedy="Run the patched model without it",
                )
        split, heads = context_parallel(processor), getattr(module, "heads", 0)
        if split is not None and not exchanges_itself(processor):
            _check_heads(name, heads, split.ulysses_degree)


def agree_on_largest(block: PatchedBlock, numbers: list[float]) -> list[float]:
    """Return the largest of each number over the ranks that share a block's sequence.

    With it all ranks take the same decision.
    """
    group = block.group()
    if group is None:
        return numbers
    device = next(block.block.parameters()).device
    table = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(table, dist.ReduceOp.MAX, group=group)
    return table.tolist()
