"""Measure block-sparse attention without training on a model's own q, k and v.

    python -m tools.sparse_blocks --out results
    python -m tools.sparse_blocks --model DIR --frames 81 --height 240 --width 416 --out results

For each self-attention of one forward, rules choose blocks of 64 keys for each block of 64
queries, by the mass of softmax(mean q . mean k): the fewest blocks that hold a given mass. "drop"
leaves the other blocks out; "mean key" gives all their keys the logit of the block's mean key, so
that the summed value enters with one weight. "exact mass" drops too, but chooses by the true mass,
which no rule knows. The table has the least share of blocks whose error to fp32 is at most 1, 2, 4
and 8 times that of int8 attention on the same rows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from turbo_rcm_patch import ops
from turbo_rcm_patch.files import write_json
from turbo_rcm_patch.video import generate, load_pipeline

BLOCK = 64
TIMES = (1, 2, 4, 8)
RULES = ("drop", "mean key", "exact mass")
_MASSES = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 1.0)
_QUERY_BLOCKS = 16  # of each head, evenly spaced

Heads = tuple[Tensor, Tensor, Tensor]


class SeesAttention(TorchFunctionMode):
    """Keeps q, k and v, [B, H, N, D] each, of every self-attention inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Heads] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            q, k, v = (*args, *((kwargs or {}).get(name) for name in ("query", "key", "value")))[
                :3
            ]
            if q.shape == k.shape:
                self.seen.append((q.detach(), k.detach(), v.detach()))
        return func(*args, **(kwargs or {}))


def one_call(pipe: Any, given: argparse.Namespace) -> Callable[..., Tensor]:
    """The call of the transformer in one step of a video, to be made again; with an argument, with
    inputs of that dtype."""
    calls: list[tuple[Any, Any]] = []
    note = lambda _, args, kwargs: calls.append((args, kwargs))  # noqa: E731
    handle = pipe.transformer.register_forward_pre_hook(note, with_kwargs=True)
    every = {"num_frames": given.frames, "height": given.height, "width": given.width}
    generate(pipe, given.prompt, **{name: value for name, value in every.items() if value})
    handle.remove()
    recorded = calls[given.forward]

    def call(dtype: torch.dtype | None = None) -> Tensor:
        cast = lambda x: x.to(dtype) if dtype and x.is_floating_point() else x  # noqa: E731
        args, kwargs = tree_map_only(Tensor, cast, recorded)
        out: Tensor = pipe.transformer(*args, **kwargs)[0]
        return out

    return call


def int8_attention(
    q: Tensor, k: Tensor, v: Tensor, pv: Any = "auto", attention: Any = "int8"
) -> Tensor:
    """[B, H, N, D] by this package's quantised attention, in fp32."""
    flat = [x.transpose(1, 2).flatten(2) for x in (q, k, v)]
    spec = ops.AttentionSpec(heads=q.shape[1], attention=attention, pv=pv)
    out = ops.attention_skip(*flat, spec, out_dtype=torch.float32)
    return out.unflatten(2, (q.shape[1], -1)).transpose(1, 2)


def _pooled(x: Tensor) -> Tensor:
    """Means of blocks, [N, D] -> [blocks, D]; the last block may be shorter."""
    return torch.stack([part.mean(0) for part in x.split(BLOCK)])


@torch.no_grad()
def measure(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    """The error of int8 attention, and for each rule the share of blocks at multiples of it.

    Args:
        q, k, v: [B, H, N, D]; the first of the batch is measured.
    """
    coarse = int8_attention(q, k, v)[0]
    q, k, v = (x[0].float() for x in (q, k, v))
    blocks, scale = -(-q.shape[1] // BLOCK), q.shape[2] ** -0.5
    size_of = torch.tensor([len(part) for part in k[0].split(BLOCK)], device=q.device)
    wanted = sorted({round(i * (blocks - 1) / (_QUERY_BLOCKS - 1)) for i in range(_QUERY_BLOCKS)})
    least = torch.tensor(_MASSES, device=q.device)[:, None]
    totals = torch.zeros(2, device=q.device)  # squares of the truth and of int8's error
    found = {rule: torch.zeros(2, len(_MASSES), device=q.device) for rule in RULES}
    for head in range(len(q)):
        mean_k = _pooled(k[head])
        guess = (_pooled(q[head]) @ mean_k.T * scale + size_of.log()).softmax(-1)
        for block in wanted:
            rows = slice(block * BLOCK, (block + 1) * BLOCK)
            logits, means = (q[head, rows] @ x.T * scale for x in (k[head], mean_k))
            weights = logits.softmax(-1)
            truth = weights @ v[head]
            off = coarse[head, rows] - truth
            totals += torch.stack([truth.square().sum(), off.square().sum()])
            mass = torch.stack([part.sum(-1).mean() for part in weights.split(BLOCK, -1)])
            for rule in RULES:
                order = (mass if rule == "exact mass" else guess[block]).sort(descending=True)
                before = order.values.cumsum(0) - order.values
                keep = torch.zeros(len(_MASSES), blocks, dtype=torch.bool, device=q.device)
                keep[:, order.indices] = (before < least) | (before == 0)  # [masses, blocks]
                kept = keep.repeat_interleave(size_of, 1)[:, None]
                spread = means.repeat_interleave(size_of, -1)
                rest = spread if rule == "mean key" else torch.full_like(logits, -torch.inf)
                got = torch.where(kept, logits, rest).softmax(-1) @ v[head]
                share = keep.float().mean(1) / (len(q) * len(wanted))
                found[rule] += torch.stack([(got - truth).square().sum((1, 2)), share])
    norm, int8 = totals.tolist()
    errors = {
        rule: [((e / norm) ** 0.5, share) for e, share in some.T.tolist()]
        for rule, some in found.items()
    }
    base = (int8 / norm) ** 0.5
    shares = {
        rule: [min((s for e, s in some if e <= t * base), default=1.0) for t in TIMES]
        for rule, some in errors.items()
    }
    return {"int8": base, "shares": shares, "errors": errors}


def options(description: str | None) -> argparse.ArgumentParser:
    """The options of the tools that look at a model's forward."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    parser.add_argument("--model", default="tiny", help="folder or shipped name (default: tiny)")
    parser.add_argument(
        "--prompt", default="a large red circle moving right on a black background"
    )
    parser.add_argument("--forward", type=int, default=2, help="which step (default: %(default)s)")
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", type=Path, required=True, help="folder of the .json")
    for name in ("frames", "height", "width"):
        parser.add_argument(f"--{name}", type=int, help="default: the model's")
    return parser


def about(given: argparse.Namespace, q: Tensor) -> dict[str, Any]:
    """What was measured where."""
    gpu = q.device.type == "cuda"
    record = {"model": Path(given.model).name, "tokens": q.shape[2], "forward": given.forward}
    where = torch.cuda.get_device_name(q.device) if gpu else "cpu"
    return record | {"prompt": given.prompt, "device": where, "torch": torch.__version__}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every layer; print the table and write sparse_blocks.json."""
    given = options(__doc__).parse_args(argv)
    pipe = load_pipeline(given.model, device=given.device)
    call = one_call(pipe, given)
    with torch.no_grad(), SeesAttention() as attentions:
        call()
    layers = [measure(*one) for one in attentions.seen]
    print(f"| layer | int8 | {' | '.join(f'{rule} {t}x' for rule in RULES for t in TIMES)} |")
    print("|---" * (2 + len(RULES) * len(TIMES)) + "|")
    for i, one in enumerate(layers):
        cells = [f"{share:.2f}" for rule in RULES for share in one["shares"][rule]]
        print(f"| {i} | {one['int8']:.4f} | {' | '.join(cells)} |")
    record = about(given, attentions.seen[0][0]) | {"block": BLOCK, "times": TIMES}
    write_json(given.out / "sparse_blocks.json", record | {"layers": layers})
    return 0


if __name__ == "__main__":
    sys.exit(main())
