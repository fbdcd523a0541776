"""`block`: attention + output projection + rCM skip as the write-ups have it, and one Wan block.

    y = c_skip(t) * x + c_out(t) * (softmax(q k^T / sqrt(D)) v W^T + b)

with a time t a sample and the coefficients of EDM. Written once as a user of torch would, once for
torch.compile, and in our two forms; `block` times them and `hbm` counts their memory traffic.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import runner
from benchmarks.attention import BACKENDS, backend_context, split_heads
from benchmarks.networks import (
    build_wan,
    setting,
    sizes_of,
    time_variant,
    variants,
    wan_call,
)
from benchmarks.runner import REL_L2, Column, Effort, Journal, Method, Plan, Record, Shape, Variant
from turbo_rcm_patch import ops
from turbo_rcm_patch.bench import Call, attention_fp64, errors_of, generator, some_rows
from turbo_rcm_patch.boundary import EDM
from turbo_rcm_patch.config import Form
from turbo_rcm_patch.video.measures import highest_precision

#: Relative L2 to fp64 of c_skip * x + c_out * branch from which an output is wrong, and to fp32 of
#: what a Wan block adds to its input.
WRONG: Final = 0.1
_WRONG_BLOCK: Final = 0.2
_ROWS: Final = 64
#: Name on the command line -> in words; "linear" has the linear of q, k and v as part of it.
_SERIES: Final = {"given": "q, k, v given", "linear": "with the linear of q, k, v"}
_COLUMNS: Final = (
    Column("case", 18), Column("method", 20), *runner.times("graph_milliseconds", "milliseconds"),
    Column("speed-up", 8, "speed_up", ".2f"), REL_L2,
)  # fmt: skip
SIGMA_DATA: Final = 0.5
#: As in tables and on the command line; "two-pass" stands for each of torch's backends.
FORMS: Final = ("two-pass", "one-pass", "two-launch", "one-launch")
#: Our forms -> how the attention is computed, and in how many launches it is closed. "two-launch"
#: and "one-launch" choose the precision of p and v by the number of keys, as a patched model does.
OURS: Final[dict[str, tuple[dict[str, Any], Form]]] = {
    "two-launch": ({}, "two-launch"),
    "two-launch-fp8": ({"pv": "fp8"}, "two-launch"),
    "two-launch-exact": ({"attention": "exact"}, "two-launch"),
    "one-launch": ({}, "one-launch"),
}
#: Exact backends in the order in which the compiled form may take them.
_ANY_EXACT: Final = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def write_ups_shapes(*, micro: bool) -> list[Shape]:
    """The attentions of the write-ups' own table."""
    if micro:
        return [Shape.square(2, n, 64, batch=2) for n in (48, 80)]
    return [Shape.square(12, n, 64, batch=4) for n in (1024, 2048, 4096, 8192)]


def run(plan: Plan) -> int:
    """Measure and write `block.json`; 0 if everything of ours was right."""
    only = runner.chosen("--only", plan.only, [*_SERIES, "wan"])
    forms = runner.chosen("--peers", plan.peers, tuple(dict.fromkeys((*FORMS, *OURS))))
    shapes = write_ups_shapes(micro=plan.micro)
    journal = Journal(
        "block",
        plan,
        _COLUMNS,
        about={
            "operation": "c_skip(t) x + c_out(t) (softmax(q k^T / sqrt(D)) v W^T + b)",
            "coefficients": f"EDM with sigma_data {SIGMA_DATA}, t a sample; bf16 in and out",
            "milliseconds": "inside a CUDA graph over several input sets (on a CPU: one by one)",
            "baseline": "two-pass torch with the exact backend that is fastest at this size",
            "speedup": "baseline / method",
            "truth": f"fp64, {_ROWS} rows a sample",
            "wan": "blocks[0] of a one-layer Wan2.1-1.3B at 480p and 81 frames; calls one by one",
        },
    )
    effort = plan.effort(400.0, 60, quick=(100.0, 20), least=5)
    good = True
    with journal.running():
        for series, words in _SERIES.items():
            if series not in only:
                continue
            for shape in shapes[::2] if plan.quick and not plan.micro else shapes:
                if not journal.late(f"{words}, {shape.q_tokens} tokens"):
                    good &= _case(shape, series, forms, effort, journal)
            _geometric_mean(series, words, journal)
        if "wan" in only and not journal.late("Wan block"):
            good &= _wan_block(effort, journal)
    return 0 if good else 1


def _case(shape: Shape, series: str, forms: list[str], effort: Effort, journal: Journal) -> bool:
    plan, device, linear = journal.plan, journal.device, series == "linear"
    bytes_a_set = 4 * 2 * shape.batch * shape.q_tokens * shape.channels
    sets = [
        inputs_of(shape, device, plan.seed + i, linear=linear)
        for i in range(min(6, runner.input_sets(bytes_a_set)))
    ]
    rows = some_rows(shape.q_tokens, _ROWS, device)
    clock = "graph_milliseconds"
    torch._dynamo.reset()  # one compilation a size: dynamic shapes would be another kernel
    with torch.no_grad():
        entrants = runner.compete(
            pair_methods(shape.heads, linear=linear, compiler=plan.compiler, forms=forms),
            sets,
            runner.errors_to(truth_of(sets[0], shape, rows, linear=linear), rows),
            journal,
            effort,
            str(shape),
            wrong=WRONG,
            clocks=(clock,),
        )
    record: Record = {"series": series, "shape": shape.record, "tokens": shape.q_tokens}
    medians = {entrant.name: ms for entrant in entrants if (ms := entrant.median(clock))}
    two_pass = {one: ms for one, ms in medians.items() if one.startswith("two-pass")}
    if two_pass:
        record["baseline"] = baseline = min(two_pass, key=lambda one: two_pass[one])
        ratios = {one: two_pass[baseline] / ms for one, ms in medians.items()}
        record["speedup"] = {one: ratios[one] for one in ratios if one not in two_pass}
        for entrant in entrants:
            entrant.record["speed_up"] = ratios.get(entrant.name)
    runner.finish(entrants, journal, f"{series}-N{shape.q_tokens}", record)
    return all(entrant.calls for entrant in entrants if entrant.name in OURS)


def _geometric_mean(series: str, words: str, journal: Journal) -> None:
    """Over the sizes that were measured: each of ours, and the better one of each size."""
    found: dict[str, list[float]] = {}
    for record in journal.cases.values():
        if record.get("series") != series or "speedup" not in record:
            continue
        speedup = record["speedup"]
        for name, value in speedup.items():
            found.setdefault(name, []).append(value)
        ours = [value for name, value in speedup.items() if name in OURS]
        if ours:
            found.setdefault("better of ours", []).append(max(ours))
    journal.summary[series] = summary = {
        name: {
            "geometric_mean": math.exp(sum(map(math.log, values)) / len(values)),
            "least": min(values),
            "sizes": len(values),
        }
        for name, values in found.items()
    }
    for name, one in summary.items():
        print(
            f"{words}: {name} is {one['geometric_mean']:.2f}x the two-pass baseline in the "
            f"geometric mean of {one['sizes']} sizes, {one['least']:.2f}x at least"
        )


@torch.no_grad()
def _wan_block(effort: Effort, journal: Journal) -> bool:
    """Time blocks[0] of a one-layer network and keep it as the case "wan-block"; whether ours was
    right."""
    plan, device = journal.plan, journal.device
    sizes = sizes_of(plan)
    network: Any = build_wan(sizes.network | {"num_layers": 1}, device, plan.seed)
    block = network.blocks[0]

    def inputs(seed: int) -> tuple[Any, ...]:
        """What the block gets in a forward of the network."""
        seen: list[tuple[Any, ...]] = []
        hook = block.register_forward_pre_hook(lambda _, args: seen.append(args))
        with hook:
            wan_call(network, sizes.latents, sizes.text_tokens, device, seed, timestep=900.0)()
        return seen[0]

    def upcast(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.float()
        return tuple(map(upcast, value)) if isinstance(value, tuple) else value

    # Live gates, so that what self-attention and feed-forward compute shows in the output.
    with setting(network, live=True, sharp=False):
        sets = [inputs(plan.seed + i) for i in range(2)]
        calls: list[Call] = [functools.partial(block, *one) for one in sets]
        hidden = sets[0][0].double()
        with highest_precision():
            added = copy.deepcopy(block).float()(*upcast(sets[0])).double() - hidden
        found: dict[str, Record] = {}
        record: Record = {
            "tokens": int(hidden.shape[1]),
            "truth": "the same block in fp32, of what it adds to its input; gates +0.3",
            "variants": found,
        }

        def measure(variant: Variant, one: Record) -> None:
            def errors(y: torch.Tensor) -> dict[str, float]:
                return errors_of(y.double() - hidden, added)

            time_variant(variant, one, network, calls, errors, journal, effort, wrong=_WRONG_BLOCK)
            eager = runner.number(found, "eager", "milliseconds", "median")
            if eager is not None:
                one["speed_up"] = eager / one["milliseconds"]["median"]

        some = [one for one in variants() if "sage" not in one.name and "cuDNN" not in one.name]
        return runner.one_by_one(journal, "wan-block", record, some, measure)


# --- the operation -------------------------------------------------------------------------------


def inputs_of(
    shape: Shape, device: torch.device, seed: int, *, linear: bool = False
) -> tuple[torch.Tensor, ...]:
    """One set of inputs.

    Returns:
        q, k, v [B, N, C] in bf16 (with `linear`: hidden states [B, N, C] and the weight [3 C, C]
        and bias [3 C] that make them), x [B, N, C], weight [C, C], bias [C] in bf16, and t [B] in
        fp32. v is so large that the branch is about as large as x and its errors show.
    """
    random = generator(device, seed)
    channels = shape.channels

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(*size, generator=random, device=device)).bfloat16()

    tokens = (shape.batch, shape.q_tokens, channels)
    # An attention over random keys averages about N / e values.
    large = (shape.kv_tokens / 2.718) ** 0.5
    if linear:
        qkv = normal(3 * channels, channels, scale=channels**-0.5)
        qkv[2 * channels :] *= large
        first = (normal(*tokens), qkv, normal(3 * channels, scale=0.1))
    else:
        first = (normal(*tokens), normal(*tokens), normal(*tokens, scale=large))
    weight, bias = normal(channels, channels, scale=channels**-0.5), normal(channels, scale=0.1)
    times = torch.linspace(0.2, 1.5, shape.batch, device=device)
    return (*first, normal(*tokens), weight, bias, times)


def truth_of(
    inputs: Sequence[torch.Tensor], shape: Shape, rows: torch.Tensor, *, linear: bool
) -> torch.Tensor:
    """The operation in fp64 on some rows: [B, rows, C]."""
    *first, x, weight, bias, times = inputs
    if linear:
        hidden, qkv, qkv_bias = first
        wide = F.linear(hidden.double(), qkv.double(), qkv_bias.double())
        q, k, v = wide.chunk(3, dim=-1)
    else:
        q, k, v = first
    branch = attention_fp64(q[:, rows], k, v, shape.heads)
    branch = F.linear(branch, weight.double(), bias.double())
    c_skip, c_out = _coefficients(times)
    wide_skip, wide_out = (c.double().view(-1, 1, 1) for c in (c_skip, c_out))
    return wide_skip * x[:, rows].double() + wide_out * branch


def _coefficients(times: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """c_skip(t) and c_out(t), fp32 [B]."""
    edm = EDM(SIGMA_DATA)
    return edm.c_skip(times).float(), edm.c_out(times).float()


def pair_methods(
    heads: int, *, linear: bool, compiler: str = "inductor", forms: Sequence[str] = FORMS
) -> list[Method]:
    """The operation in every form.

    Args:
        heads: H.
        linear: Whether the linear that makes q, k and v is part of it.
        compiler: Backend of torch.compile.
        forms: Some of `FORMS` and `OURS`.
    """
    methods = []
    plain = _written(heads, linear)
    if "two-pass" in forms:
        methods += [
            Method(
                f"two-pass, {name.removeprefix('torch ')}",
                functools.partial(_torch, plain),
                backend_context(backend),
                "attention, linear, and the skip as written in bf16: c_skip * x + c_out * y",
            )
            for name, backend in BACKENDS.items()
        ]
    if "one-pass" in forms:
        fused = torch.compile(plain, fullgraph=True, dynamic=False, backend=compiler)
        methods.append(
            Method(
                "one-pass",
                functools.partial(_torch, fused),
                lambda: sdpa_kernel(_ANY_EXACT, set_priority=True),
                f"the same as one function under torch.compile ({compiler}), cuDNN first",
            )
        )
    methods += [
        Method(name, functools.partial(_ours, ops.AttentionSpec(heads=heads, **how), linear, form))
        for name, (how, form) in OURS.items()
        if name in forms
    ]
    return methods


def _written(heads: int, linear: bool) -> Callable[..., torch.Tensor]:
    """The operation as a user of torch writes it."""

    def attend(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        q, k, v = (split_heads(one, heads).transpose(1, 2) for one in parts)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def plain(
        first: Sequence[torch.Tensor],
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        c_skip: torch.Tensor,
        c_out: torch.Tensor,
    ) -> torch.Tensor:
        parts = F.linear(*first).chunk(3, dim=-1) if linear else first
        y = F.linear(attend(parts), weight, bias)
        return c_skip * x + c_out * y

    return plain


def _torch(function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> Call:
    *first, x, weight, bias, times = inputs
    # As a module in bf16 would hold them.
    c_skip, c_out = (c.to(x.dtype).view(-1, 1, 1) for c in _coefficients(times))
    return lambda: function(first, x, weight, bias, c_skip, c_out)


def _ours(
    spec: ops.AttentionSpec, linear: bool, form: Form, inputs: Sequence[torch.Tensor]
) -> Call:
    *first, x, weight, bias, times = inputs
    c_skip, c_out = _coefficients(times)

    def call() -> torch.Tensor:
        q, k, v = F.linear(*first).chunk(3, dim=-1) if linear else first
        return ops.attention_project_skip(
            q, k, v, weight, bias, spec, residual=x, c_skip=c_skip, c_out=c_out, form=form
        )

    return call
