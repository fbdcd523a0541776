"""`ops`, `fusion` and `one-launch`: the numbers of the README that are no times.

A method beyond its limit is wrong, and the command fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import torch
import torch.nn.functional as F

from benchmarks import runner
from benchmarks.networks import sizes_of
from benchmarks.runner import Column, Journal, Plan, Record, Shape, Variant, Wrong
from turbo_rcm_patch import ops
from turbo_rcm_patch.bench import attention_fp64, errors_of, generator
from turbo_rcm_patch.config import Attention, Form, PVDType
from turbo_rcm_patch.video.measures import highest_precision
from turbo_rcm_patch.video.verdict import FUSION_LIMIT

# --- ops: accuracy against fp64 ------------------------------------------------------------------

#: A method whose output is further from the truth than this is broken, not inaccurate.
BROKEN: Final = 0.5
#: int8 attention must stay below this on random inputs, with 16-bit and with fp8 PV.
INT8_LIMIT: Final = 0.05
FP8_LIMIT: Final = 0.07


def outliers(
    shape: Shape, device: torch.device, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `random_normal`, with what makes int8 hard: peaked logits, large channels, a common mean
    in k, and tokens of very different size.
    """
    random = generator(device, seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random, device=device)

    def tensor(tokens: int, spread: float) -> torch.Tensor:
        x = normal(shape.batch, tokens, shape.channels)
        x = x * torch.exp(spread * normal(shape.batch, tokens, 1))
        large = torch.rand(shape.channels, generator=random, device=device) < 0.03
        return torch.where(large, 6.0 * x, x)

    q, k = tensor(shape.q_tokens, 0.5), tensor(shape.kv_tokens, 0.5)
    v = tensor(shape.kv_tokens, 0.3)
    k = k + 4.0 * normal(1, 1, shape.channels)
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


_INPUTS: Final = {"random": runner.random_normal, "outliers": outliers}
_ATTENTIONS: Final[dict[str, tuple[Attention, PVDType]]] = {
    "exact (torch SDPA)": ("exact", "auto"),
    "int8 bf16 PV": ("int8", "bf16"),
    "int8 fp16 PV": ("int8", "fp16"),
    "int8 fp8 PV": ("int8", "fp8"),
    "int4 bf16 PV": ("int4", "bf16"),
    "sageattention": ("sage", "auto"),
}
_ACCURACY: Final = (
    Column("inputs", 40), Column("method", 18), Column("cosine", 9, "error.cosine", ".6f"),
    Column("rel L2", 8, "error.relative_l2", ".5f"),
    Column("rel L1", 8, "error.relative_l1", ".5f"), Column("RMSE", 9, "error.rmse", ".3e"),
)  # fmt: skip


def accuracy(plan: Plan) -> int:
    """Accuracy of the attention against fp64, for random and for outlier-heavy inputs, into
    `ops.json`; 0 if ours met its limits."""
    cases = {
        f"{inputs} {shape}": (inputs, shape)
        for inputs, shape in product(_INPUTS, sizes_of(plan).accuracy)
    }
    about = {
        "truth": "softmax(q k^T / sqrt(D)) v in fp64 on the same bf16 inputs",
        "limits": {"int8": INT8_LIMIT, "int8 fp8 PV": FP8_LIMIT, "all but int4": BROKEN},
    }
    return runner.run_cases(
        plan, "ops", _ACCURACY, about, cases, _accuracy, methods=list(_ATTENTIONS)
    )


def _accuracy(case: tuple[str, Shape], wanted: list[str], journal: Journal) -> bool:
    inputs, shape = case
    device = journal.device
    q, k, v = _INPUTS[inputs](shape, device, journal.plan.seed)
    truth = attention_fp64(q, k, v, shape.heads)
    fp8 = device.type == "cpu" or ops.resolve_pv("auto", device) == "fp8"

    def measure(way: Variant, record: Record) -> None:
        attention, pv = _ATTENTIONS[way.name]
        spec = ops.AttentionSpec(heads=shape.heads, attention=attention, pv=pv)
        record["error"] = errors_of(ops.attention_skip(q, k, v, spec), truth)
        if attention != "int4":
            runner.check(record["error"], BROKEN)
        if attention == "int8" and inputs == "random":
            runner.check(record["error"], FP8_LIMIT if pv == "fp8" else INT8_LIMIT)

    ways = [
        Variant(name, ours=name != "sageattention")
        for name in wanted
        if (fp8 or "fp8" not in name) and (device.type == "cuda" or name != "sageattention")
    ]
    where = f"{inputs} {shape}"
    return runner.one_by_one(journal, where, {"shape": shape.record}, ways, measure, "methods")


# --- fusion: fused against unfused over the same quantised attention -----------------------------

#: Distance to fp64 of the fused path, in units of the unfused path's.
FP64_RATIO: Final = 2.0
#: The same distance in bf16, on the same rounded operands: the kernels round once. It binds them,
#: not torch's linear, which rounds its own output (so "after the linear" everywhere, and every
#: projection on a CPU).
BF16_LIMIT: Final = 2e-3


@dataclass(frozen=True, slots=True)
class _Operands:
    """q, k, v, the residual, a square projection, and coefficients."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    random: torch.Generator

    @classmethod
    def of(cls, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> _Operands:
        random, channels = generator(device, seed), shape.channels

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=random, device=device)

        q, k, v, x = (
            normal(shape.batch, n, channels).to(dtype)
            for n in (shape.q_tokens, shape.kv_tokens, shape.kv_tokens, shape.q_tokens)
        )
        weight = (channels**-0.5 * normal(channels, channels)).to(dtype)
        return cls(q, k, v, x, weight, normal(channels).to(dtype), random)

    def project(self, spec: ops.AttentionSpec, form: Form, **more: Any) -> torch.Tensor:
        """Attention, projection and skip in one of our forms."""
        return ops.attention_project_skip(
            self.q,
            self.k,
            self.v,
            self.weight,
            self.bias,
            spec,
            residual=self.x,
            form=form,
            **more,
        )


_DTYPES: Final = (torch.float32, torch.bfloat16)
_WAYS: Final = (
    *("in the attention", "one launch", "two launches", "in the projection", "after the linear"),
)
_FUSION: Final = (
    Column("shape", 34), Column("closed", 18),
    Column("fused to unfused", 16, "fused_to_unfused", ".2e"),
    Column("fused to fp64", 13, "fused_to_fp64", ".2e"),
    Column("unfused to fp64", 15, "unfused_to_fp64", ".2e"),
)  # fmt: skip


def fusion(plan: Plan) -> int:
    """Every way to close a skip, for every shape, in fp32 and in bf16, into `fusion.json`; 0 if
    all met their limits."""
    cases = {
        _named(shape, dtype): (shape, dtype)
        for shape, dtype in product(sizes_of(plan).fusion, _DTYPES)
    }
    about = {
        "limits": {"fp32": FUSION_LIMIT, "fp64_ratio": FP64_RATIO, "bf16_to_fp64": BF16_LIMIT},
        "truth": "c_skip * x + c_out * (attention W^T + b) in fp64 over the same int8 attention",
    }
    return runner.run_cases(plan, "fusion", _FUSION, about, cases, _fusion, methods=_WAYS)


def _named(shape: Shape, dtype: torch.dtype) -> str:
    return f"{shape} {str(dtype).removeprefix('torch.')}"


def _fusion(case: tuple[Shape, torch.dtype], wanted: list[str], journal: Journal) -> bool:
    shape, dtype = case
    with torch.no_grad(), highest_precision():
        closed = _closed(shape, dtype, journal.plan.seed, journal.device)

        def measure(way: Variant, record: Record) -> None:
            fused, unfused = closed[way.name]
            plain, truth = unfused(dtype), unfused(torch.float64)
            rounds_once = way.name == "in the attention" or (
                journal.device.type == "cuda" and way.name != "after the linear"
            )
            values = fused()
            record |= {
                "rounds_once": rounds_once,
                "fused_to_unfused": errors_of(values, plain)["relative_l2"],
                "fused_to_fp64": errors_of(values, truth)["relative_l2"],
                "unfused_to_fp64": errors_of(plain, truth)["relative_l2"],
            }
            far, least = record["fused_to_fp64"], record["unfused_to_fp64"]
            if dtype == torch.float32:
                if not record["fused_to_unfused"] <= FUSION_LIMIT:
                    raise Wrong(f"fused to unfused is {record['fused_to_unfused']:.2e} in fp32")
                if not far <= FP64_RATIO * least + 1e-9:
                    raise Wrong(f"{far / least:.2f} times the unfused error")
            elif rounds_once and not far <= BF16_LIMIT:
                raise Wrong(f"{far:.2e} to fp64 in bf16")

        ways = [Variant(name, ours=True) for name in wanted]
        record: Record = {"shape": shape.record}
        return runner.one_by_one(journal, _named(shape, dtype), record, ways, measure, "methods")


#: Closed in one way, and the same operands unfused in a dtype.
Closed = tuple[Callable[[], torch.Tensor], Callable[[torch.dtype], torch.Tensor]]


def _closed(
    shape: Shape, dtype: torch.dtype, seed: int, device: torch.device
) -> dict[str, Closed]:
    one = _Operands.of(shape, dtype, device, seed)
    q, k, v, x, weight, bias = one.q, one.k, one.v, one.x, one.weight, one.bias
    c_skip = torch.rand(shape.batch, generator=one.random, device=device)
    gate = torch.randn(shape.batch, 1, shape.channels, generator=one.random, device=device)
    spec = ops.AttentionSpec(heads=shape.heads)
    branch = ops.attention_skip(q, k, v, spec)
    # Closed in the attention, the branch is never rounded to the operands' dtype.
    wide = ops.attention_skip(q, k, v, spec, out_dtype=torch.float32)

    def close(out: torch.Tensor, to: torch.dtype) -> torch.Tensor:
        return c_skip.view(-1, 1, 1).to(to) * x.to(to) + gate.to(to) * out

    def skip_only(to: torch.dtype) -> torch.Tensor:
        return close(wide.to(to), to)

    def project_and_skip(to: torch.dtype) -> torch.Tensor:
        return close(F.linear(branch.to(to), weight.to(to), bias.to(to)), to)

    pair: dict[str, Any] = {"residual": x, "c_skip": c_skip, "c_out": gate}
    forms = {"c_skip": c_skip, "c_out": gate}
    ways: list[Closed] = [
        (lambda: ops.attention_skip(q, k, v, spec, **pair), skip_only),
        (lambda: one.project(spec, "one-launch", **forms), project_and_skip),
        (lambda: one.project(spec, "two-launch", **forms), project_and_skip),
        (lambda: ops.project_skip(branch, weight, bias, **pair), project_and_skip),
        (lambda: ops.skip(x, F.linear(branch, weight, bias), c_skip, gate), project_and_skip),
    ]
    return dict(zip(_WAYS, ways, strict=True))


# --- one-launch: many times over poisoned scratch memory, results equal in every bit -------------

#: Runs over all shapes together, unless --calls or --quick asks for others.
RUNS: Final = 100_000
#: Against the two-launch form in bf16; more than rounding means that one of them is wrong.
AGREEMENT: Final = 4e-3
#: How many runs go by between two looks at the clock and at the counter on the device.
CHUNK: Final = 500
#: How many runs a CUDA graph holds: launched one by one, Python would take most of the time.
GRAPH: Final = 20
#: Runs that are launched one by one before graphs take over.
LAUNCHED: Final = 1_000


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, torch's uninitialised tensors are NaN (integers: their largest value, int8: -128).

    Scratch that a kernel reads before writing then changes the result.
    """

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype.is_floating_point:
            return tensor.fill_(float("nan"))
        if tensor.dtype == torch.int8:
            return tensor.fill_(-128)
        if tensor.dtype == torch.bool:
            return tensor
        return tensor.fill_(torch.iinfo(tensor.dtype).max)

    def poisoning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **kwargs: poison(make(*args, **kwargs))

    names = ("empty", "empty_like", "empty_strided")
    places: list[tuple[object, str]] = [(torch, name) for name in names]
    places.append((torch.Tensor, "new_empty"))
    before = [(owner, name, getattr(owner, name)) for owner, name in places]
    for owner, name, make in before:
        setattr(owner, name, poisoning(make))
    try:
        yield
    finally:
        for owner, name, make in before:
            setattr(owner, name, make)


def _one_launch_call(
    shape: Shape, seed: int, device: torch.device
) -> Callable[[Form], torch.Tensor]:
    one = _Operands.of(shape, torch.bfloat16, device, seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=one.random, device=device)

    gate = normal(shape.batch, 1, shape.channels).bfloat16().float()
    norm = 1.0 + (0.1 * normal(shape.channels)).bfloat16()
    spec = ops.AttentionSpec(heads=shape.heads)
    return lambda form: one.project(spec, form, c_out=gate, norm_q=norm, norm_k=norm)


_ONE_LAUNCH: Final = (
    Column("shape", 26), Column("method", 12), Column("runs", 8, "runs", ",.0f"),
    Column("differ", 7, "runs_that_differ", ",.0f"),
    Column("rel L2 to two-launch", 20, "relative_l2_to_two_launch", ".2e"),
)  # fmt: skip


def one_launch(plan: Plan) -> int:
    """Repeat, and count the runs whose result differs from the first in any bit, into
    `one-launch.json`; 0 if none did and all were run."""
    shapes = {str(shape): shape for shape in sizes_of(plan).one_launch}
    about = {"scratch": "NaN, int8 -128, other integers their largest value"}
    methods = ["one-launch"]
    return runner.run_cases(
        plan, methods[0], _ONE_LAUNCH, about, shapes, _one_launch, methods=methods
    )


def _one_launch(shape: Shape, wanted: list[str], journal: Journal) -> bool:
    plan = journal.plan
    runs = plan.calls or (3 if plan.micro else 10_000 if plan.quick else RUNS)
    most = max(1, runs // len(sizes_of(plan).one_launch))

    def measure(way: Variant, record: Record) -> None:
        call = _one_launch_call(shape, plan.seed, journal.device)
        with torch.no_grad(), poisoned_memory():
            first, other = call("one-launch"), call("two-launch")
            done, launched, count = _repeat(call, first, most, journal)
        record |= {
            "runs": done,
            "runs_wanted": most,
            "runs_launched_one_by_one": launched,
            "runs_that_differ": count,
            "relative_l2_to_two_launch": errors_of(first, other)["relative_l2"],
        }
        if count:
            raise Wrong(f"{count} of {done} runs differ")
        if not record["relative_l2_to_two_launch"] < AGREEMENT:
            raise Wrong(f"not the two-launch form's ({record['relative_l2_to_two_launch']:.3g})")
        if done < most:
            journal.left_out.append(f"{most - done} runs at {shape}")

    ways = [Variant(name, ours=True) for name in wanted]
    good = runner.one_by_one(
        journal, str(shape), {"shape": shape.record}, ways, measure, "methods"
    )
    return good and not journal.left_out


def _repeat(
    call: Callable[[Form], torch.Tensor], first: torch.Tensor, wanted: int, journal: Journal
) -> tuple[int, int, int]:
    """Runs done, those that were launched one by one, and those that differ from the first."""
    bits = first.view(torch.int16)
    differing = torch.zeros((), dtype=torch.int64, device=first.device)

    def run() -> None:
        nonlocal differing
        differing += (call("one-launch").view(torch.int16) != bits).any()

    done = launched = count = 0
    replay: Callable[[], None] | None = None
    while done < wanted and not journal.time_is_up:
        if first.device.type == "cuda" and replay is None and launched >= LAUNCHED:
            # As one CUDA graph, which poisons its memory anew at every replay.
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(GRAPH):
                    run()
            replay = graph.replay
        for _ in range(max(1, min(CHUNK, wanted - done) // (GRAPH if replay else 1))):
            if replay:
                replay()
            else:
                run()
                launched += 1
            done += GRAPH if replay else 1
        count = int(differing)  # waits for the device, so that the clock means something
    return done, launched, count
