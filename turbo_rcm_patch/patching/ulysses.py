"""Ulysses: a sequence split over several ranks, through diffusers' `enable_parallelism`.

diffusers splits the sequence over the ranks, and records this on the model and on the attention
processors. Norms, Linears, feed-forward and skips need no data of the other ranks. An attention
needs two exchanges in the model's dtype, one of q, k and v and one of the output, so that every
rank computes all tokens of a part of the heads (DeepSpeed-Ulysses, arXiv 2309.14509). With rings
and in other modes the attention is called as a module, and diffusers' processor exchanges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from turbo_rcm_patch.errors import ContextParallelError
from turbo_rcm_patch.ops import unchecked

if TYPE_CHECKING:
    from turbo_rcm_patch.patching.block import PatchedBlock
    from turbo_rcm_patch.patching.pieces import Attend, Norms, Rotary


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


class Ulysses:
    """The exchanges of one attention.

    Args:
        group: The ranks that share its sequence.
        attend: The options of the attention.
    """

    def __init__(self, group: Any, attend: Attend) -> None:
        self._group, self._attend, self._size = group, attend, group.size()

    def to_heads(
        self, q: Tensor, k: Tensor, v: Tensor, norms: Norms, tables: Rotary | None
    ) -> tuple[Tensor, Tensor, Tensor, Attend]:
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
        attend = self._attend
        rest = (*(tables or (None, None)), attend.heads, norms.eps, attend.impl)
        q = unchecked.norm_rotate(q, norms.q, norms.q_bias, *rest)
        k = unchecked.norm_rotate(k, norms.k, norms.k_bias, *rest)
        batch, tokens, _ = q.shape
        # [P, 3, B, n, H/P * D]: the heads of each rank.
        parts = torch.stack([x.reshape(batch, tokens, self._size, -1) for x in (q, k, v)])
        came = self._exchange(parts.permute(3, 0, 1, 2, 4).contiguous())
        # [P, 3, B, n, ...]: the tokens of each rank, in their order.
        whole = came.permute(1, 2, 0, 3, 4).reshape(3, batch, self._size * tokens, -1)
        q, k, v = whole.unbind()
        return q, k, v, attend._replace(heads=attend.heads // self._size)

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


def ulysses_of(processor: object, attend: Attend) -> Ulysses | None:
    """Return the exchanges of an attention, or None if its sequence is not split.

    Raises:
        ContextParallelError: The heads cannot be divided among the ranks. `enable_parallelism` may
            come after `check_parallel`.
    """
    config = context_parallel(processor)
    if config is None or config.ulysses_degree < 2:
        return None
    _check_heads("self-attention", attend.heads, config.ulysses_degree)
    return Ulysses(config._ulysses_mesh.get_group(), attend)


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
