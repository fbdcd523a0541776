"""Measure what a model's own activations mean for int8 and fp8, layer by layer.

    python -m tools.what_it_teaches --out results
    python -m tools.what_it_teaches --model DIR --frames 81 --height 240 --width 416 --out results

For one forward of a Wan, by layer: the median share of keys that hold 90 % of a row's attention;
the largest channel of k, v and of the feed-forward's input over the median one; the mean
gates of attention and feed-forward; and relative errors to fp32 of int8 attention with values in
the model's dtype and in fp8, and of int8 Linears. Below: what the guard decides, and the network's
error to fp32 over the unpatched one's, as predicted and as measured.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.sparse_blocks import Heads, SeesAttention, about, int8_attention, one_call, options
from turbo_rcm_patch import ops, patched
from turbo_rcm_patch.files import write_json
from turbo_rcm_patch.video import load_pipeline
from turbo_rcm_patch.video.measures import highest_precision, upcast

_ROWS = 128
_MASS = 0.9


def _error(got: Tensor, truth: Tensor) -> float:
    return float((got.float() - truth).norm() / truth.norm())


def _outlier(x: Tensor) -> float:
    """The largest magnitude of a channel [..., C] over that of the median channel."""
    largest = x.float().abs().flatten(0, -2).amax(0)
    return float(largest.max() / largest.median().clamp(min=1e-12))


def of_attention(q: Tensor, k: Tensor, v: Tensor) -> dict[str, float]:
    """Numbers of one attention of q, k, v [B, H, N, D]; errors on a sample of its rows."""
    step = -(-q.shape[2] // _ROWS)
    wide = [x.float() for x in (q[:, :, ::step], k, v)]
    weights = (wide[0] @ wide[1].mT * q.shape[3] ** -0.5).softmax(-1)
    held = weights.sort(-1, descending=True).values.cumsum(-1)
    few = ((held < _MASS).sum(-1) + 1).float() / k.shape[2]
    truth = weights @ wide[2]
    rounded = F.scaled_dot_product_attention(q[:, :, ::step], k, v)
    by = {
        "int8": int8_attention(q, k, v, pv="bf16"),
        "fp8 values": int8_attention(q, k, v, pv="fp8"),
    }
    errors = {name: _error(out[:, :, ::step], truth) for name, out in by.items()}
    outliers = {
        f"{name} outlier": _outlier(x.transpose(1, 2).flatten(2))
        for name, x in (("k", k), ("v", v))
    }
    return {"keys": float(few.median()), **outliers, "exact": _error(rounded, truth), **errors}


def of_blocks(transformer: Any, call: Any) -> tuple[list[dict[str, float]], list[Heads]]:
    """Numbers of every block of a Wan in one forward."""
    rows: list[dict[str, Any]] = [defaultdict(float) for _ in transformer.blocks]
    handles = []

    def watch(row: dict[str, Any], name: str, linear: nn.Linear) -> None:
        def see(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0]
            truth = F.linear(x.float(), linear.weight.float())
            int8, scale = ops.quantize_weight(linear.weight)
            row["int8 Linear"] = max(
                row["int8 Linear"], _error(ops.int8_linear(x, int8, scale), truth)
            )
            if name == "ffn.net.0.proj":
                row["ffn outlier"] = _outlier(x)

        handles.append(linear.register_forward_pre_hook(see))

    def gates(row: dict[str, Any]) -> Any:
        def see(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            temb = kwargs["temb"] if "temb" in kwargs else args[2]
            six = (block.scale_shift_table + temb.float()).unflatten(-2, (6, -1))[..., 0, :]
            row["gate attention"], row["gate ffn"] = (
                float(six[..., i, :].abs().mean()) for i in (2, 5)
            )

        return see

    for block, row in zip(transformer.blocks, rows, strict=True):
        handles.append(block.register_forward_pre_hook(gates(row), with_kwargs=True))
        for name, linear in block.named_modules():
            if isinstance(linear, nn.Linear):
                watch(row, name, linear)
    with SeesAttention() as attentions:
        call()
    for handle in handles:
        handle.remove()
    for row, one in zip(rows, attentions.seen, strict=True):
        row |= of_attention(*one)
    return [dict(row) for row in rows], attentions.seen


def of_network(transformer: Any, call: Any, **config: Any) -> dict[str, Any]:
    """The error to fp32 over the unpatched network's, predicted and measured, and decisions."""
    with highest_precision(), upcast(transformer):
        truth = call(torch.float32)
    unpatched = _error(call(), truth)
    with patched(transformer, **config) as report:
        call()  # the guard decides
        error = _error(call(), truth)
        decisions = [f"{one.path}: {one.verdict} ({one.where})" for one in report.guard.decisions]
        predicted = report.guard.prediction
    return {
        "unpatched": unpatched, "measured": error / unpatched, "predicted": predicted,
        "decisions": decisions,
    }  # fmt: skip


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    """Measure every layer and the network; print tables, write what_it_teaches.json."""
    given = options(__doc__).parse_args(argv)
    pipe = load_pipeline(given.model, device=given.device)
    call = one_call(pipe, given)
    rows, seen = of_blocks(pipe.transformer, call)
    print(f"| layer | {' | '.join(rows[0])} |")
    print("|---" * (1 + len(rows[0])) + "|")
    for i, row in enumerate(rows):
        print(f"| {i} | {' | '.join(f'{value:.3g}' for value in row.values())} |")
    network = {}
    changed: dict[str, dict[str, Any]] = {
        "int8 attention": {"pv": "bf16"}, "with fp8 values": {"pv": "fp8"},
        "with fp8 values, fidelity 2": {"pv": "fp8", "fidelity": 2.0},
        "int8 Linears": {"pv": "bf16", "linear": "int8"},
    }  # fmt: skip
    for name, config in changed.items():
        network[name] = of_network(pipe.transformer, call, **config)
        print(f"{name}: {network[name]}")
    record = about(given, seen[0][0]) | {"layers": rows, "network": network}
    write_json(given.out / "what_it_teaches.json", record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
