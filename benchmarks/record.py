"""The proofs of the README in one command: measures, prints a table a part, writes one JSON file.

A part that fails is recorded with its error and the others still run; the exit code then is not 0.
The file is written after every part and during the long one, so that an interrupted run leaves
what it had. Parts that an earlier run with the same code, versions and sizes on the same
device wrote to the file stay in it, so parts may run one at a time.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F

from benchmarks.machine import machine
from benchmarks.networks import Sizes
from benchmarks.runner import Deadline, Record, Shape, random_normal
from turbo_rcm_patch import ops
from turbo_rcm_patch.bench import attention_fp64, device_of, errors_of, generator
from turbo_rcm_patch.config import Attention, Form, PVDType
from turbo_rcm_patch.errors import ConfigError, OutputError, OutputExistsError
from turbo_rcm_patch.output import atomic, check_writable
from turbo_rcm_patch.sampling.environment import code_digest, device_name, versions
from turbo_rcm_patch.sampling.measures import highest_precision
from turbo_rcm_patch.sampling.store import to_json
from turbo_rcm_patch.sampling.verdict import FUSION_LIMIT

#: Name on the command line -> (module, function of options and result).
PARTS: Final = {
    "ops": ("benchmarks.record", "accuracy"),
    "network": ("benchmarks.record_network", "network"),
    "fusion": ("benchmarks.record", "fusion"),
    "one-launch": ("benchmarks.record", "one_launch"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to measure.

    Attributes:
        sizes: How large.
        device: Where.
        seed: Of weights and inputs.
        repeats: Runs of the one-launch form, over all its shapes together.
        forwards: Timed forwards of the network.
        times: Timesteps of the network number.
        seeds: Noise seeds of the network number.
        full_size_inputs: Inputs of the network number at the size of the timed forward.
        limit: Seconds after which a part stops and says what it left out.
    """

    sizes: Sizes = field(default_factory=Sizes)
    device: str = "cuda"
    seed: int = 0
    repeats: int = 100_000
    forwards: int = 7
    times: int = 3
    seeds: int = 4
    full_size_inputs: int = 1
    limit: float = 240.0

    def __post_init__(self) -> None:
        for name in ("repeats", "forwards", "times", "seeds", "full_size_inputs"):
            least = 0 if name == "full_size_inputs" else 1
            if getattr(self, name) < least:
                raise ConfigError(name, expected=f"{least} or more", got=str(getattr(self, name)))
        if self.times > 3:
            raise ConfigError("times", expected="1 to 3", got=str(self.times))

    def torch_device(self) -> torch.device:
        """The device, after checking that it is there."""
        return device_of(self.device)


@dataclass(slots=True)
class Result:
    """What a part measures.

    Attributes:
        deadline: When to stop.
        keep: Writes what there is so far, so that a run that is killed leaves it behind.
        header: Column titles of the table on the screen.
        rows: Its rows.
        data: Goes to the JSON file.
        failures: Limits that were not met, in words.
        left_out: What the deadline cut, in words.
    """

    deadline: Deadline
    keep: Callable[[], None] = lambda: None
    header: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = field(default_factory=list)
    data: Record = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def late(self, what: str) -> bool:
        """Whether the time is up; then `what` is noted as left out."""
        if self.deadline.passed:
            self.left_out.append(what)
            return True
        return False

    @property
    def written(self) -> Record:
        """For the file."""
        return {"failures": self.failures, "left_out": self.left_out, **self.data}


def record(options: Options, only: Sequence[str], out: Path, command: str) -> int:
    """Run the parts and write the file.

    Args:
        options: How to measure.
        only: Names of the parts to run, out of `PARTS`.
        out: JSON file; its folder is made.
        command: The command line, for the file.

    Returns:
        0 if every part ran in full and met its limits, else 1.
    """
    unknown = [name for name in only if name not in PARTS]
    if unknown or not only:
        raise ConfigError("--only", expected=f"some of {tuple(PARTS)}", got=repr(",".join(only)))
    device = options.torch_device()
    _check_out(out)
    begin = time.monotonic()
    document: Record = {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(device),
        "versions": versions(),
        "code": code_digest(),
        "options": asdict(options),
    }
    earlier = _earlier(out, document)
    document["parts"] = parts = {k: v for k, v in earlier.items() if k not in only}

    def write() -> None:
        with atomic(out) as partial:
            text = json.dumps(to_json(document), indent=2) + "\n"
            partial.write_text(text, encoding="utf-8")

    print(f"{device_name(device)}, torch {torch.__version__}, writing {out}", flush=True)
    good = True
    for name in only:
        print(f"\n{name} ...", flush=True)

        def keep(result: Result, name: str = name) -> None:
            parts[name] = {"passed": False, "unfinished": True, **result.written}
            document["passed"] = False
            write()

        parts[name] = _run(name, options, keep)
        parts[name] |= {"command": command, "options": asdict(options)}
        good &= parts[name]["passed"]
        document["seconds"] = round(time.monotonic() - begin, 1)
        document["passed"] = {*only} <= {*parts} and all(one["passed"] for one in parts.values())
        write()
    print(f"\n{'Everything met its limit' if good else 'NOT everything met its limit'}: {out}")
    return 0 if good else 1


def _check_out(out: Path) -> None:
    """Refuse a file that `record` did not write, or cannot."""
    if out.is_file():
        try:
            parts = json.loads(out.read_text(encoding="utf-8"))["parts"]
        except (OSError, ValueError, LookupError, TypeError):
            parts = None
        if not isinstance(parts, dict):
            raise OutputExistsError(
                f"--out {out} is there already, and `record` did not write it",
                expected="a new file, or one with parts measured earlier",
                remedy="Choose another file",
            )
    check_writable(out)


def _earlier(out: Path, now: Record) -> dict[str, Record]:
    """Parts in the file that belong together with what is measured now."""
    now = json.loads(json.dumps(to_json(now)))
    try:
        found = json.loads(out.read_text(encoding="utf-8"))
        same = (
            found["code"] == now["code"]
            and found["machine"]["device"] == now["machine"]["device"]
            and found["versions"] == now["versions"]
            and found["options"]["sizes"] == now["options"]["sizes"]
        )
        return dict(found["parts"]) if same else {}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def _run(name: str, options: Options, keep: Callable[[Result], None]) -> Record:
    begin = time.monotonic()
    result = Result(Deadline(options.limit))
    result.keep = lambda: keep(result)
    module, function = PARTS[name]
    try:
        getattr(import_module(module), function)(options, result)
    except OutputError:  # there is no place to record it in
        raise
    except Exception as error:  # recorded with its traceback, and the exit code says so
        print(f"FAILED: {type(error).__name__}: {error}", flush=True)
        seconds = round(time.monotonic() - begin, 1)
        return {"passed": False, "error": traceback.format_exc(), "seconds": seconds}
    passed = not result.failures and not result.left_out
    print(format_table(result.header, result.rows))
    for failure in result.failures:
        print(f"FAILED: {failure}")
    for left in result.left_out:
        print(f"left out, no time: {left}")
    seconds = round(time.monotonic() - begin, 1)
    print(f"{name}: {'passed' if passed else 'FAILED'} in {seconds} s", flush=True)
    return {"passed": passed, "seconds": seconds, **result.written}


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, numbers to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def cell(text: str, width: int) -> str:
        number = text[:1].isdigit() or text[:1] in "-." or text in ("nan", "inf")
        return text.rjust(width) if number else text.ljust(width)

    text = ["  ".join(cell(c, w) for c, w in zip(line, widths, strict=True)) for line in lines]
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in text)


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


def _attentions(device: torch.device) -> list[tuple[str, Attention, PVDType]]:
    found: list[tuple[str, Attention, PVDType]] = [
        ("exact (torch SDPA)", "exact", "auto"),
        ("int8, bf16 PV", "int8", "bf16"),
        ("int8, fp16 PV", "int8", "fp16"),
    ]
    if device.type == "cpu" or ops.resolve_pv("auto", device) == "fp8":
        found.append(("int8, fp8 PV", "int8", "fp8"))
    found.append(("int4, bf16 PV", "int4", "bf16"))
    if device.type == "cuda":
        found.append(("sageattention", "sage", "auto"))
    return found


def accuracy(options: Options, result: Result) -> None:
    """Accuracy of the attention against fp64, for random and for outlier-heavy inputs."""
    device = options.torch_device()
    result.header = ("inputs", "shape", "method", "cosine", "rel L2", "rel L1", "RMSE")
    table: list[Record] = []
    truth_words = "softmax(q k^T / sqrt(D)) v in fp64 on the same bf16 inputs"
    result.data = {"truth": truth_words, "table": table}
    for inputs, make in (("random", random_normal), ("outliers", outliers)):
        for shape in options.sizes.accuracy:
            if result.late(f"{inputs} inputs at {shape}"):
                continue
            q, k, v = make(shape, device, options.seed)
            truth = attention_fp64(q, k, v, shape.heads)
            for name, attention, pv in _attentions(device):
                row: Record = {"inputs": inputs, "shape": str(shape), "method": name}
                table.append(row)
                spec = ops.AttentionSpec(heads=shape.heads, attention=attention, pv=pv)
                try:
                    value = ops.attention_skip(q, k, v, spec)
                except Exception as error:
                    if attention != "sage":  # a peer may fail in its own way, we may not
                        raise
                    row["not_measured"] = f"{type(error).__name__}: {error}"
                    continue
                numbers = errors_of(value, truth)
                row.update(numbers)
                off, where = numbers["relative_l2"], f"{name} on {inputs} at {shape}"
                limit = FP8_LIMIT if pv == "fp8" else INT8_LIMIT
                if not off < BROKEN and attention == "sage":
                    row["not_measured"] = "its output is wrong here, so it is no peer"
                elif not off < BROKEN and attention != "int4":
                    result.failures.append(f"{where} is broken")
                elif attention == "int8" and inputs == "random" and off > limit:
                    result.failures.append(f"{where} is inaccurate")
                result.rows.append(
                    (
                        *(inputs, str(shape), name, f"{numbers['cosine']:.6f}", f"{off:.5f}"),
                        *(f"{numbers['relative_l1']:.5f}", f"{numbers['rmse']:.3e}"),
                    )
                )


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


def fusion(options: Options, result: Result) -> None:
    """Every way to close a skip, for every shape, in fp32 and in bf16."""
    device = options.torch_device()
    result.header = (
        "shape", "dtype", "closed", "fused to unfused", "fused to fp64", "unfused to fp64"
    )  # fmt: skip
    table: list[Record] = []
    result.data = {
        "limits": {"fp32": FUSION_LIMIT, "fp64_ratio": FP64_RATIO, "bf16_to_fp64": BF16_LIMIT},
        "truth": "c_skip * x + c_out * (attention W^T + b) in fp64 over the same int8 attention",
        "table": table,
    }
    for shape in options.sizes.fusion:
        for dtype in (torch.float32, torch.bfloat16):
            if result.late(f"{shape} in {dtype}"):
                continue
            with torch.no_grad(), highest_precision():
                for row in _closed(shape, dtype, options.seed, device):
                    table.append(row)
                    _judge(row, dtype, result)


def _judge(row: Record, dtype: torch.dtype, result: Result) -> None:
    numbers = [row[name] for name in ("fused_to_unfused", "fused_to_fp64", "unfused_to_fp64")]
    gap, fused, unfused = numbers
    where = f"{row['closed']} at {row['shape']}"
    cells = (row["shape"], row["dtype"], row["closed"])
    result.rows.append((*cells, *(f"{number:.2e}" for number in numbers)))
    if dtype == torch.float32:
        if not gap <= FUSION_LIMIT:
            result.failures.append(f"{where}: fused to unfused is {gap:.2e} in fp32")
        if not fused <= FP64_RATIO * unfused + 1e-9:
            result.failures.append(f"{where}: {fused / unfused:.2f} times the unfused error")
    elif row["rounds_once"] and not fused <= BF16_LIMIT:
        result.failures.append(f"{where}: {fused:.2e} to fp64 in bf16")


def _closed(shape: Shape, dtype: torch.dtype, seed: int, device: torch.device) -> Iterator[Record]:
    """Each way, with its distance to what the same operands give unfused and in fp64."""
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
    ways: list[tuple[str, torch.Tensor, Callable[[torch.dtype], torch.Tensor]]] = [
        ("in the attention", ops.attention_skip(q, k, v, spec, **pair), skip_only),
        ("one launch", one.project(spec, "one-launch", **forms), project_and_skip),
        ("two launches", one.project(spec, "two-launch", **forms), project_and_skip),
        ("in the projection", ops.project_skip(branch, weight, bias, **pair), project_and_skip),
        (
            "after the linear",
            ops.skip(x, F.linear(branch, weight, bias), c_skip, gate),
            project_and_skip,
        ),
    ]
    for name, fused, unfused in ways:
        plain, truth = unfused(dtype), unfused(torch.float64)
        yield {
            "shape": str(shape),
            "dtype": str(dtype).removeprefix("torch."),
            "closed": name,
            "rounds_once": name == "in the attention"
            or (device.type == "cuda" and name != "after the linear"),
            "fused_to_unfused": errors_of(fused, plain)["relative_l2"],
            "fused_to_fp64": errors_of(fused, truth)["relative_l2"],
            "unfused_to_fp64": errors_of(plain, truth)["relative_l2"],
        }


# --- one-launch: many times over poisoned scratch memory, results equal in every bit -------------

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
    shape: Shape, options: Options, device: torch.device
) -> Callable[[Form], torch.Tensor]:
    """A call of the operation in a given form, on fixed bf16 operands."""
    one = _Operands.of(shape, torch.bfloat16, device, options.seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=one.random, device=device)

    gate = normal(shape.batch, 1, shape.channels).bfloat16().float()
    norm = 1.0 + (0.1 * normal(shape.channels)).bfloat16()
    spec = ops.AttentionSpec(heads=shape.heads)
    return lambda form: one.project(spec, form, c_out=gate, norm_q=norm, norm_k=norm)


def one_launch(options: Options, result: Result) -> None:
    """Repeat, and count the runs whose result differs from the first in any bit."""
    device = options.torch_device()
    result.header = ("shape", "runs", "runs that differ", "rel L2 to two-launch")
    shapes = options.sizes.one_launch
    table: list[Record] = []
    result.data = {"scratch": "NaN, int8 -128, other integers their largest value", "table": table}
    wanted = max(1, options.repeats // len(shapes))
    for shape in shapes:
        call = _one_launch_call(shape, options, device)
        with torch.no_grad(), poisoned_memory():
            first, other = call("one-launch"), call("two-launch")
            done, launched, count = _repeat(call, first, wanted, result.deadline)
        agreement = errors_of(first, other)["relative_l2"]
        table.append(
            {
                "shape": str(shape),
                "runs": done,
                "runs_wanted": wanted,
                "runs_launched_one_by_one": launched,
                "runs_that_differ": count,
                "relative_l2_to_two_launch": agreement,
            }
        )
        result.rows.append((str(shape), f"{done:,}", str(count), f"{agreement:.2e}"))
        if count:
            result.failures.append(f"{count} of {done} runs at {shape} differ")
        if not agreement < AGREEMENT:
            result.failures.append(f"one and two launches disagree at {shape}: {agreement:.3g}")
        result.keep()
        if done < wanted:
            result.left_out.append(f"{wanted - done} runs at {shape}")


def _repeat(
    call: Callable[[Form], torch.Tensor], first: torch.Tensor, wanted: int, deadline: Deadline
) -> tuple[int, int, int]:
    """Runs done, those that were launched one by one, and those that differ from the first."""
    bits = first.view(torch.int16)
    differing = torch.zeros((), dtype=torch.int64, device=first.device)

    def run() -> None:
        nonlocal differing
        differing += (call("one-launch").view(torch.int16) != bits).any()

    done = launched = count = 0
    replay: Callable[[], None] | None = None
    while done < wanted and not deadline.passed:
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
