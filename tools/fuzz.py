"""Try random operations against fp64 and random models against the unpatched ones.

    python -m tools.fuzz --seconds 60
    python -m tools.fuzz --seed 3 --only 1234          # one case again
    python -m tools.fuzz --kind models --seconds 300

A case follows from the seed, the kind and its number alone. The seed is printed first; it is drawn
if none is given. Exit code 1 if any case failed.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from turbo_rcm_patch import ops

#: Largest relative L2 error of a result that is rounded once, by dtype.
ROUNDING = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
#: What int8 products add to it for random inputs.
INT8 = 0.03
_CHANGES_AT_MOST = 4
#: Draws of changes until the author's model runs with them; some 1 % of the draws do not.
_DRAWS = 5


class Mismatch(AssertionError):
    """A result is further from its reference than its dtype explains."""


class Draw:
    """Random choices and tensors of one case."""

    def __init__(self, seed: str, device: str) -> None:
        self.choose = random.Random(seed)
        self.device = device
        self._generator = torch.Generator().manual_seed(self.choose.randrange(2**31))
        self.dtype = self.choose.choice(list(ROUNDING))
        self.words: list[str] = [str(self.dtype)]

    def number(self, name: str, *values: Any) -> Any:
        value = self.choose.choice(values)
        self.words.append(f"{name}={value}")
        return value

    def tensor(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        """Normal values; one in four is a view with other strides."""
        noise = torch.randn(*shape, generator=self._generator) * scale
        noise = noise.to(self.device, dtype or self.dtype)
        wide = self.choose.random() < 0.25
        return torch.cat([noise, noise], -1)[..., : shape[-1]] if wide else noise

    def coefficient(self, batch: int, tokens: int, channels: int) -> float | Tensor:
        """A float, or a tensor for a sample, a channel or a token."""
        shapes = [(batch,), (batch, 1, channels), (batch, tokens, channels)]
        kind = self.number("coefficient", 0, 1, 2, 3)
        return 0.7 if kind == 3 else self.tensor(*shapes[kind], dtype=torch.float32)


def _expect(made: Tensor, expected: Tensor, limit: float) -> None:
    if made.shape != expected.shape:
        raise Mismatch(f"shape {tuple(made.shape)}, expected {tuple(expected.shape)}")
    error = (made.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    if not error <= limit:
        raise Mismatch(f"relative error {error:.2e}, at most {limit:.2e}")


def _per_token(coefficient: float | Tensor) -> float | Tensor:
    if isinstance(coefficient, float):
        return coefficient
    wide = coefficient.double()
    return wide[:, None, None] if wide.ndim == 1 else wide


def _split(x: Tensor, heads: int) -> Tensor:
    return x.double().unflatten(-1, (heads, -1)).transpose(1, 2)


def skip(draw: Draw) -> None:
    """`ops.skip` against c_skip * x + c_out * y."""
    shape = (
        draw.number("batch", 1, 2),
        draw.number("tokens", 1, 7, 130),
        8 * draw.number("c", 1, 9),
    )
    x, y = draw.tensor(*shape), draw.tensor(*shape)
    c_skip, c_out = draw.coefficient(*shape), draw.coefficient(*shape)
    expected = _per_token(c_skip) * x.double() + _per_token(c_out) * y.double()
    _expect(ops.skip(x, y, c_skip, c_out), expected, ROUNDING[draw.dtype])


def norm_modulate(draw: Draw) -> None:
    """`ops.norm_modulate` against a layer norm."""
    batch, tokens = draw.number("batch", 1, 3), draw.number("tokens", 1, 7, 130)
    channels = draw.number("channels", 8, 72, 1536)
    x = draw.tensor(batch, tokens, channels, scale=3.0)
    scale, shift = draw.tensor(batch, 1, channels), draw.tensor(batch, 1, channels)
    normed = F.layer_norm(x.double(), (channels,), eps=1e-6)
    expected = normed * (1.0 + scale.double()) + shift.double()
    _expect(ops.norm_modulate(x, scale=scale, shift=shift), expected, ROUNDING[draw.dtype])


def int8_linear(draw: Draw) -> None:
    """`ops.int8_linear` against the Linear that was quantised."""
    tokens, width = draw.number("tokens", 1, 7, 130), draw.number("in", 64, 200, 256)
    out = draw.number("out", 64, 136)
    x, weight = draw.tensor(2, tokens, width), draw.tensor(out, width)
    bias = draw.tensor(out) if draw.number("bias", True, False) else None
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    made = ops.int8_linear(x, *ops.quantize_weight(weight), bias)
    _expect(made, expected, INT8 + ROUNDING[draw.dtype])


def attention_skip(draw: Draw) -> None:
    """`ops.attention_skip` against a softmax in fp64."""
    heads, dim = draw.number("heads", 1, 3), draw.number("head_dim", 16, 64, 128)
    batch, queries = draw.number("batch", 1, 2), draw.number("queries", 1, 65, 200)
    causal = draw.number("causal", False, False, True)
    keys = queries if causal else draw.number("keys", 1, 77, 300)
    attention = draw.number("attention", "exact", "int8")
    q = draw.tensor(batch, queries, heads * dim)
    k, v = draw.tensor(batch, keys, heads * dim), draw.tensor(batch, keys, heads * dim)
    residual = draw.tensor(batch, queries, heads * dim)
    c_skip, c_out = draw.coefficient(*residual.shape), draw.coefficient(*residual.shape)
    spec = ops.AttentionSpec(heads=heads, attention=attention, causal=causal)
    made = ops.attention_skip(q, k, v, spec, residual=residual, c_skip=c_skip, c_out=c_out)
    seen = F.scaled_dot_product_attention(
        _split(q, heads), _split(k, heads), _split(v, heads), is_causal=causal
    )
    branch = seen.transpose(1, 2).flatten(2)
    expected = _per_token(c_skip) * residual.double() + _per_token(c_out) * branch
    # Probabilities and values meet in bf16 where q and k are quantised.
    _expect(made, expected, ROUNDING[draw.dtype] + (INT8 if attention == "int8" else 0.0))


def sparse_linear_attention(draw: Draw) -> None:
    """`ops.sparse_linear_attention` over all keys, against both of its parts in fp64."""
    heads, dim = draw.number("heads", 1, 2), draw.number("head_dim", 32, 64)
    tokens = draw.number("tokens", 64, 130, 300)
    q, k, v = (draw.tensor(1, tokens, heads * dim) for _ in range(3))
    weight = draw.tensor(dim, dim, scale=dim**-0.5)
    spec = ops.AttentionSpec(heads=heads, attention=draw.number("attention", "exact", "int8"))
    made = ops.sparse_linear_attention(q, k, v, weight, None, spec, ops.Sparsity(topk=1.0))
    wide_q, wide_k, wide_v = _split(q, heads), _split(k, heads), _split(v, heads)
    dense = F.scaled_dot_product_attention(wide_q, wide_k, wide_v)
    phi_q, phi_k = wide_q.softmax(-1), wide_k.softmax(-1)
    total = (phi_q * phi_k.sum(2, keepdim=True)).sum(-1, keepdim=True)
    linear = phi_q @ (phi_k.transpose(-1, -2) @ wide_v) / total
    expected = (dense + linear @ weight.double().T).transpose(1, 2).flatten(2)
    # The linear branch multiplies in 16 bits in every dtype.
    _expect(made, expected, INT8 + ROUNDING[draw.dtype])


def models(draw: Draw) -> None:
    """A patched model after random changes against the unpatched one; undo bit for bit."""
    from tests.patching.models import named, run
    from tests.patching.test_changes import CHANGES, STILL, Change, check

    wan = draw.number("family", "t2v", "cogvideox-5b") == "t2v"
    # Fused projections are copies, which pass by what is on or around the module of v.
    of_v = ("hook-linear", "pre-hook-linear", "other-class-of-attn1.to_v", "wrapped-linear")
    # Most changes are of the first block, so it may not be the only one.
    left_out = ("own-", "lora", "compiled", "offload", "layer", "one-block-less",
                *draw.choose.choice([("fused-qkv",), of_v]))  # fmt: skip
    free = [
        change for change in CHANGES
        if not change.name.startswith(left_out) and (wan or not change.wan)
    ]  # fmt: skip
    one = named("t2v" if wan else "cogvideox-5b")
    for left in range(_DRAWS, 0, -1):
        changes = draw.choose.sample(free, draw.choose.randint(1, _CHANGES_AT_MOST))
        # A wrapped module hides its members from later changes, fusing copies the weights of its
        # moment, and accelerate keeps the forward of the class of its moment: these come last.
        changes.sort(key=lambda change: change.name.startswith(("wrapped", "fused-qkv", "moved")))
        moving = [change.name for change in changes if change.name not in STILL]
        both = Change([*moving, "nothing"][0], partial(_apply, changes))
        try:
            unpatched = one.model()
            both.apply(unpatched)
            run(unpatched, one.inputs())
            break
        except Exception:  # Some changes exclude each other, or break the author's model.
            if left == 1:
                raise
    draw.words += map(str, changes)
    linear, order = draw.number("linear", "as-is", "int8"), draw.number("order", "patch", "change")
    check(one, both, linear, f"{order} first")


def _apply(changes: Sequence[Any], model: Any) -> None:
    for change in changes:
        change.apply(model)


OPERATIONS: tuple[Callable[[Draw], None], ...] = (
    skip, norm_modulate, int8_linear, attention_skip, sparse_linear_attention,
)  # fmt: skip
_KINDS = {"operations": OPERATIONS, "models": (models,), "all": (*OPERATIONS, models)}


def run_case(seed: int, case: int, kind: str = "all", device: str = "cpu") -> str:
    """Run one case; the words that describe its failure, or "" if it held."""
    draw = Draw(f"{seed} {case} {kind}", device)
    check = draw.choose.choice(_KINDS[kind])
    try:
        check(draw)
    except Exception as error:
        where, why = f"{check.__name__} {' '.join(draw.words)}", str(error)[:300]
        return f"case {case}: {where}: {type(error).__name__}: {why}"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="time to spend")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--only", type=int, metavar="CASE", help="run this case alone")
    parser.add_argument("--kind", choices=sorted(_KINDS), default="all")
    parser.add_argument("--device", default="cpu", help="device of the operations")
    options = parser.parse_args(argv)
    print(again := f"--seed {options.seed} --kind {options.kind}", flush=True)
    end, failed, done = time.monotonic() + options.seconds, 0, 0
    with torch.no_grad():
        for case in itertools.count() if options.only is None else [options.only]:
            if time.monotonic() >= end:
                break
            if failure := run_case(options.seed, case, options.kind, options.device):
                failed += 1
                print(f"{failure}\n  again: {again} --only {case}")
            done += 1
    print(f"{done} cases, {failed} failed")
    return int(failed > 0 or not done)


if __name__ == "__main__":
    sys.exit(main())
