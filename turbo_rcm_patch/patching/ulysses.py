"""Ulysses: a sequence split over several ranks, through diffusers' `enable_parallelism`.

diffusers splits the sequence over the ranks, and records this on the model and on the attention
processors. Norms, Linears, feed-forward and skips need no data of the other ranks. An attention
needs two exchanges in the model's dtype, one of q, k and v and one of the output, so that every
rank computes all tokens of a part of the heads (DeepSpeed-Ulysses, arXiv 2309.14509). On GPUs that
NVLink joins, kernels write to the memory of the rank that needs the result (`symmetric`). With
`ulysses_anything` the parts may be uneven: the first ranks have one head or one token more, and
with more ranks than heads some have none. With rings the attention is called as a module, and
diffusers' processor exchanges.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextvars import ContextVar
from copy import copy
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from turbo_rcm_patch.errors import ContextParallelError
from turbo_rcm_patch.ops import AttentionSpec
from turbo_rcm_patch.ops.attention import api as attention
from turbo_rcm_patch.ops.formats import NO_NORMS, Norms, Rotary
from turbo_rcm_patch.ops.replay import capturing
from turbo_rcm_patch.patching import symmetric
from turbo_rcm_patch.patching.plain import compiling

if TYPE_CHECKING:
    from turbo_rcm_patch.patching.block import PatchedBlock


#: While a network runs on two groups of ranks (`diffusers_parallel`): the two ranks that compute
#: the forwards of a step, and True if the guard's numbers are those of the first.
PAIR: ContextVar[tuple[Any, bool] | None] = ContextVar("PAIR", default=None)
#: The attribute of a network under which `diffusers_parallel` keeps how it runs on several ranks.
PARALLEL: Final = "_turbo_rcm_parallel"


def context_parallel(holder: object) -> Any:
    """Return diffusers' ContextParallelConfig of a model or an attention processor, or None."""
    config: Any = getattr(holder, "_parallel_config", None)
    return getattr(config, "context_parallel_config", None)


def exchanges_itself(processor: object) -> bool:
    """Return True if a processor exchanges by its own code: in a ring, or, with uneven parts, in a
    compiled graph, which cannot ask the other ranks for their lengths."""
    config = context_parallel(processor)
    if config is None:
        return False
    return config.ring_degree > 1 or (_uneven(config) and compiling())


def _uneven(config: Any) -> bool:
    """Return True if the ranks may have uneven numbers of heads and tokens."""
    return bool(getattr(config, "ulysses_anything", False))


@cache
def _with_heads(spec: AttentionSpec, heads: int) -> AttentionSpec:
    return replace(spec, heads=heads)


#: Waits for a tensor that other ranks send, and returns it.
Pending = Callable[[], Tensor]


class Ulysses:
    """The exchanges of one attention: `send` q, k and v, wait for them with `to_heads`, compute
    the attention, and exchange the output with `attend` or `to_tokens`.

    Args:
        group: The ranks that share its sequence.
        spec: The options of the attention.
        head_dim: Channels of a head.
        tokens: The number of local tokens of each rank.
    """

    def __init__(self, group: Any, spec: AttentionSpec, head_dim: int, tokens: list[int]) -> None:
        self._group, self._spec, self._tokens = group, spec, tokens
        ranks, self._rank = len(tokens), group.rank()
        self._heads = [(spec.heads + ranks - 1 - rank) // ranks for rank in range(ranks)]
        self._widths = [heads * head_dim for heads in self._heads]
        self._even = len(set(self._widths)) == len(set(tokens)) == 1
        #: Memory to which the other ranks write; None if exchanges go through the process group.
        self._shared: symmetric.Shared | None = None

    def send(
        self, index: int, x: Tensor, norms: Norms = NO_NORMS, tables: Rotary | None = None
    ) -> Pending:
        """Normalise and rotate the local tokens of all heads, and begin to exchange them for all
        tokens of some heads.

        Args:
            index: 0 for q, 1 for k, 2 for v, which is sent first.
            x: [B, n, H*D].
            norms: The norms of q and k.
            tables: The rotary table of the local tokens, or None.

        Returns:
            A function that waits for the result [B, N, h*D], with h heads on this rank.
        """
        if index == 2 and self._even and not compiling() and not capturing(x):
            self._shared = symmetric.shared(self._group, x)
        weight, bias = ((norms.q, norms.q_bias), (norms.k, norms.k_bias), (None, None))[index]
        options: Any = {"weight": weight, "bias": bias, "rotary": tables, "eps": norms.eps}
        options |= {"heads": self._spec.heads, "impl": self._spec.impl}
        shared = self._shared
        if shared is not None:
            shared.write(index, lambda to: attention.norm_rotate_to(to, x, **options))
            return lambda: shared.qkv[index]
        if weight is not None or tables is not None:
            x = attention.norm_rotate(x, **options)
        batch, tokens, _ = x.shape
        width = self._widths[self._rank]
        sent = [batch * tokens * rank_width for rank_width in self._widths]
        received = [batch * rank_tokens * width for rank_tokens in self._tokens]
        pending = self._exchange(pack_for_ranks(x, self._widths, 2), sent, received)
        return lambda: unpack_from_ranks(pending(), (batch, width), self._tokens, 1)

    def to_heads(
        self, q: Pending, k: Pending, v: Pending
    ) -> tuple[Tensor, Tensor, Tensor, AttentionSpec]:
        """Wait for q, k and v.

        Args:
            q: What `send` returned for q.
            k: What it returned for k.
            v: What it returned for v.

        Returns:
            q, k and v, [B, N, h*D] each, and the options of their attention over the h heads of
            this rank. Without any head the tensors are empty. They may be read until the output is
            exchanged.
        """
        qkv = q(), k(), v()
        if self._shared is not None:
            self._shared.barrier()
        return *qkv, _with_heads(self._spec, self._heads[self._rank] or 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor | None:
        """Compute an attention and exchange its output for that of the local tokens, in one.

        Args:
            q: [B, N, h*D]. It and the others are what `to_heads` returned.

        Returns:
            [B, n, H*D], the local tokens of all heads; None if this is not possible here.
        """
        shared = self._shared
        if shared is None or not attention.attend_to(shared.to_out, q, k, v, spec=spec):
            return None
        shared.barrier()
        return shared.out

    def to_tokens(self, out: Tensor) -> Tensor:
        """Exchange the output of all tokens for that of the local tokens.

        Args:
            out: [B, N, h*D], all tokens of some heads.

        Returns:
            [B, n, H*D], the local tokens of all heads.
        """
        batch, _, width = out.shape
        shared, tokens = self._shared, self._tokens[self._rank]
        if shared is not None:
            parts = out.chunk(len(self._tokens), 1)
            for place, part in zip(shared.to_out, parts, strict=True):
                place.copy_(part)
            shared.barrier()
            return shared.out
        sent = [batch * rank_tokens * width for rank_tokens in self._tokens]
        received = [batch * tokens * rank_width for rank_width in self._widths]
        pending = self._exchange(pack_for_ranks(out, self._tokens, 1), sent, received)
        return unpack_from_ranks(pending(), (batch, tokens), self._widths, 2)

    def gather(self, x: Tensor) -> Tensor:
        """Return all tokens [B, N, C] of the local ones [B, n, C]."""
        batch, _, channels = x.shape
        sent = [x.numel()] * len(self._tokens)
        received = [batch * rank_tokens * channels for rank_tokens in self._tokens]
        pending = self._exchange(x.flatten().repeat(len(sent)), sent, received)
        return unpack_from_ranks(pending(), (batch, channels), self._tokens, 1)

    def scatter(self, x: Tensor) -> Tensor:
        """Return the local tokens [B, n, C] of all [B, N, C]."""
        local: Tensor = torch.split(x, self._tokens, 1)[self._rank]
        return local

    def _exchange(self, packed: Tensor, sent: list[int], received: list[int]) -> Pending:
        """Begin to send each rank its part of a flat tensor.

        Args:
            packed: The parts for the ranks, one after another.
            sent: The number of elements for each rank.
            received: The number of elements from each rank.
        """
        out = packed.new_empty(sum(received))
        later = not compiling()  # A compiled graph orders its exchanges itself.
        work = dist.all_to_all_single(out, packed, received, sent, self._group, async_op=later)

        def wait() -> Tensor:
            if work is not None and later:
                work.wait()
            return out

        return wait


def pack_for_ranks(x: Tensor, sizes: list[int], dim: int) -> Tensor:
    """Return the parts of each rank along a dimension of x [B, N, C] one after another, flat.

    It is one copy, none if they lie so already, and two if the parts are uneven.
    """
    if dim == 1 and len(x) == 1:
        return x.reshape(-1)
    if len(set(sizes)) == 1:
        return torch.unflatten(x, dim, (len(sizes), -1)).movedim(dim, 0).reshape(-1)
    return torch.cat([part.flatten() for part in torch.split(x, sizes, dim)])


def unpack_from_ranks(
    flat: Tensor, other_sizes: tuple[int, int], sizes: list[int], dim: int
) -> Tensor:
    """Join the parts from each rank along a dimension.

    The tokens of one sample lie so already. All else is one copy.

    Args:
        flat: The parts, one after another.
        other_sizes: The sizes of the other two dimensions.
        sizes: The size of each rank's part.
        dim: The dimension along which they are joined.

    Returns:
        [B, N, C].
    """
    shapes = [(*other_sizes[:dim], size, *other_sizes[dim:]) for size in sizes]
    if dim == 1 and other_sizes[0] == 1:
        return flat.view(1, sum(sizes), other_sizes[1])
    if len(set(sizes)) == 1:
        return flat.view(len(sizes), *shapes[0]).movedim(0, dim).flatten(dim, dim + 1)
    parts = torch.split(flat, [math.prod(shape) for shape in shapes])
    return torch.cat([part.view(shape) for part, shape in zip(parts, shapes, strict=True)], dim)


#: The lengths that a thread exchanged last: for which config, the block that uses them, and the
#: number of tokens of each rank.
_thread = threading.local()


def _lengths(config: Any, group: Any, index: int, x: Tensor, begins: bool = False) -> list[int]:
    """Return the number of tokens of each rank that shares a sequence.

    Uneven lengths are exchanged at the first block of each forward, on every rank: blocks run in
    order. A rank alone cannot tell whether another has one token more than before.

    Args:
        config: diffusers' ContextParallelConfig.
        group: The ranks.
        index: The block that asks.
        x: A tensor with the local tokens in its first dimension.
        begins: True where the block's call begins.
    """
    if not _uneven(config):
        return [len(x)] * config.ulysses_degree
    last_config, last_index, lengths = getattr(_thread, "last", (None, 0, []))
    if last_config is not config or index < last_index + begins:
        on_cpu = "cpu" in str(dist.get_backend(group))  # No card has to be waited for.
        local = torch.tensor([len(x)], device="cpu" if on_cpu else x.device)
        of_ranks = local.new_empty(config.ulysses_degree)
        dist.all_gather([*torch.split(of_ranks, 1)], local, group=group)
        lengths = of_ranks.tolist()
    _thread.last = config, index, lengths
    return lengths


def tokens_of_ranks(block: PatchedBlock, processor: object, x: Tensor) -> int:
    """Return the number of tokens of a sequence, of which x [B, n, C] has those of this rank."""
    config = context_parallel(processor)
    if config is None or config.ulysses_degree < 2:
        return x.shape[1]
    return sum(_lengths(config, config._ulysses_mesh.get_group(), block.index, x[0], begins=True))


def ulysses_of(block: PatchedBlock, processor: object, tables: Rotary) -> Ulysses | None:
    """Return the exchanges of a self-attention, or None if its sequence is not split.

    Args:
        block: The block of the attention.
        processor: The attention's processor.
        tables: The rotary table of the local tokens.

    Raises:
        ContextParallelError: The heads cannot be divided among the ranks. `enable_parallelism` may
            come after `check_parallel`.
    """
    config = context_parallel(processor)
    if config is None or config.ulysses_degree < 2:
        return None
    spec, group = block.spec, config._ulysses_mesh.get_group()
    _check_heads("self-attention", spec.heads, config)
    lengths = _lengths(config, group, block.index, tables[0])
    return Ulysses(group, spec, block.head_dim, lengths)


def heads_of(network: nn.Module) -> list[int]:
    """Return the heads of the attentions that diffusers can run on several ranks."""
    return [
        int(module.heads)  # type: ignore[arg-type]
        for module in network.modules()
        if hasattr(vars(module).get("processor"), "_parallel_config")
    ]


def heads_are_refused(heads: int, ranks: int) -> bool:
    """Return True if diffusers' exchange refuses the heads also with `ulysses_anything`: it pads
    those of the last rank, which has to keep one. 12 heads on 8 ranks are refused."""
    return -heads % ranks >= -(-heads // ranks)


def original_attention(block: PatchedBlock, attn: Any) -> Any:
    """Return the author's self-attention for a comparison: the module, or a function that runs its
    processor over the whole sequence, where diffusers' exchange refuses the heads."""
    config = context_parallel(attn.processor)
    if config is None or not heads_are_refused(attn.heads, config.ulysses_degree):
        return attn

    def call(h: Tensor, context: None, mask: None, rotary: Rotary) -> Tensor:
        tables = [x.flatten(2) for x in rotary]
        ulysses = ulysses_of(block, attn.processor, (tables[0][0], tables[1][0]))
        assert ulysses is not None
        alone = copy(attn.processor)
        alone._parallel_config = None
        cos, sin = [ulysses.gather(x).unsqueeze(2) for x in tables]
        out: Tensor = alone(attn, ulysses.gather(h), context, mask, (cos, sin))
        return ulysses.scatter(out)

    return call


def _check_heads(name: str, heads: int, config: Any) -> None:
    """Raise a ContextParallelError if heads cannot be divided among ranks."""
    ranks = config.ulysses_degree
    if heads % ranks and not _uneven(config):
        raise ContextParallelError(
            f"{name}: {heads} heads",
            expected=f"a multiple of ulysses_degree={ranks}",
            got=str(heads),
            remedy=f"Use ContextParallelConfig(ulysses_degree={ranks}, ulysses_anything=True), "
            f"or turbo_rcm_patch.parallel(pipe, ulysses={ranks}), which does",
        )


def check_parallel(model: nn.Module) -> None:
    """Raise if a model is parallel in a way that the fused path does not support.

    Raises:
        ContextParallelError: The parallelism is not a split sequence, or the heads cannot be
            divided among the ranks evenly without `ulysses_anything`.
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
            _check_heads(name, heads, split)


def all_reduce_max(block: PatchedBlock, numbers: list[float], *failed: float) -> list[float]:
    """Return the largest numbers of all ranks that run a block together, so that they decide
    alike.

    Args:
        block: The block.
        numbers: The largest over the ranks that share the block's sequence counts. Of the two
            forwards of a step the first one's counts, which a single process would compare.
        *failed: The largest over all ranks counts.
    """
    group, pair = block.group(), PAIR.get()
    if group is None and pair is None:
        return [*numbers, *failed]
    device = next(block.block.parameters()).device
    table = torch.tensor([*numbers, *failed], dtype=torch.float64, device=device)
    if group is not None:
        dist.all_reduce(table, dist.ReduceOp.MAX, group=group)
    if pair is not None:
        if pair[1] and pair[0].rank():
            table[: len(numbers)] = 0.0
        dist.all_reduce(table, dist.ReduceOp.MAX, group=pair[0])
    return table.tolist()
