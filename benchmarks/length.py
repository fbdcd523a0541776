"""`length`: one forward of Wan over the number of tokens: GPU time, CPU time, the first call.

Short sequences are bound by the CPU: a forward of Wan2.1-1.3B over 780 tokens is ten milliseconds
of kernels. So a row has the time of forwards queued one after another, the CPU's time of one with
the GPU idle, and the time of the same forward as a CUDA graph, in which no CPU takes part.
"""

from __future__ import annotations

import gc
import statistics
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks.clock import Call, graph_of
from benchmarks.contest import reason_of
from benchmarks.journal import Journal, Plan, chosen
from benchmarks.network import build_network
from benchmarks.setup import MICRO, Sizes, errors_of, generator
from benchmarks.variants import compiled
from turbo_rcm_patch import PatchReport, patched

if TYPE_CHECKING:
    from diffusers import WanTransformer3DModel

__all__ = ["LENGTHS", "METHODS", "run"]

#: Tokens -> latent frames, height and width.
LENGTHS: Final = {
    "780": (1, 60, 52),
    "1950": (5, 30, 52),
    "7800": (5, 60, 104),
    "17160": (11, 60, 104),
    "32760": (21, 60, 104),
    "75600": (21, 90, 160),
}
_MICRO_LENGTHS: Final = {"780": (1, 8, 8), "1950": (3, 8, 8)}
#: Name -> options of `patch_model`, or None for the model as written.
METHODS: Final[dict[str, dict[str, Any] | None]] = {
    "eager": None,
    "patched": {},
    "patched exact": {"attention": "exact"},
    "patched int8 Linears": {"linear": "int8"},
    "compiled": None,  # last: it takes longest to begin with
}
_COLUMNS: Final = (
    ("tokens", 8), ("method", 22), ("ms", 9), ("CPU ms", 8), ("graph ms", 8), ("of eager", 8),
    ("first s", 8), ("in int8", 7), ("relL2", 9),
)  # fmt: skip
#: A patched forward further than this from the eager one is broken and is not timed.
_BROKEN: Final = 0.2


def run(plan: Plan) -> int:
    """Measure and write `length.json`; 0 if every patched forward was near the eager one."""
    wanted = chosen("--peers", plan.peers, list(METHODS))
    lengths = chosen("--only", plan.only, list(_MICRO_LENGTHS if plan.micro else LENGTHS))
    journal = Journal(
        "length",
        plan,
        _COLUMNS,
        about={
            "network": "Wan2.1-T2V-1.3B with seeded random weights in bf16, batch 1, no guard",
            "milliseconds": "of forwards queued one after another, median of several rounds",
            "cpu_milliseconds": "until the call returns, the GPU idle before it; median",
            "graph_milliseconds": "of replays of the forward as one CUDA graph",
            "first_seconds": "the first forward of this length with this method in this process",
            "in_int8": "share of the self-attentions whose products ran in int8",
            "compiled": "every block with fullgraph=True",
        },
    )
    good = True
    with journal.running(), torch.no_grad():
        sizes = MICRO if plan.micro else Sizes()
        network = build_network(sizes.network, journal.device, plan.seed)
        for name in wanted:
            for tokens in lengths:
                if journal.late(f"{tokens} tokens, {name}"):
                    continue
                case = journal.cases.get(tokens, {"methods": {}})
                methods: Any = case["methods"]
                methods[name] = found = _measure(network, name, tokens, journal)
                good &= found["status"] == "timed" or METHODS[name] is None
                _show(tokens, name, methods, journal)
                journal.case(tokens, case)
    return 0 if good else 1


def _measure(
    network: WanTransformer3DModel, name: str, tokens: str, journal: Journal
) -> dict[str, Any]:
    """One method at one length."""
    plan, device = journal.plan, journal.device
    call = _call(network, tokens, journal)
    eager = call()
    options = METHODS[name]
    record: dict[str, Any] = {}
    try:
        with _entered(network, name, options, "eager" if plan.micro else "inductor") as report:
            begin = time.perf_counter()
            output = call()
            _wait(device)
            record["first_seconds"] = time.perf_counter() - begin
            record["error"] = errors_of(output, eager)
            if not record["error"]["relative_l2"] < _BROKEN:
                return record | {"status": "wrong", "reason": "too far from the eager forward"}
            call()
            rounds = plan.calls or (3 if plan.quick else 7)
            record["milliseconds"] = _queued(call, device, rounds)
            record["cpu_milliseconds"] = _on_cpu(call, device, rounds)
            if isinstance(report, PatchReport):
                record["last_forward"] = report.last_forward
                record["in_int8"] = _share_in_int8(report)
            if device.type == "cuda":
                replay = graph_of([call])
                record["graph_milliseconds"] = _queued(replay, device, rounds)
                del replay
            record["status"] = "timed"
    except Exception as error:  # one that cannot run here says why, and the others go on
        record |= {"status": "missing", "reason": reason_of(error)}
    gc.collect()
    return record


def _entered(
    network: WanTransformer3DModel, name: str, options: dict[str, Any] | None, backend: str
) -> AbstractContextManager[object]:
    if options is not None:
        return patched(network, guard=False, **options)
    if name == "compiled":
        return compiled(network, backend)
    return torch.no_grad()  # as it is


def _call(network: WanTransformer3DModel, tokens: str, journal: Journal) -> Call:
    plan, device = journal.plan, journal.device
    sizes = MICRO if plan.micro else Sizes()
    random = generator(device, plan.seed)
    frames, height, width = (_MICRO_LENGTHS if plan.micro else LENGTHS)[tokens]
    latents = torch.randn(1, 16, frames, height, width, generator=random, device=device)
    text_dim = int(str(sizes.network["text_dim"]))
    text = torch.randn(1, sizes.text_tokens, text_dim, generator=random, device=device)
    inputs = {
        "hidden_states": latents.bfloat16(),
        "encoder_hidden_states": text.bfloat16(),
        "timestep": torch.tensor([988.0], device=device),
    }

    def call() -> torch.Tensor:
        output: torch.Tensor = network(**inputs, return_dict=False)[0]
        return output

    return call


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _queued(call: Any, device: torch.device, rounds: int) -> dict[str, float]:
    """Milliseconds of one of several calls in a row."""
    times = []
    for _ in range(rounds):
        _wait(device)
        begin = time.perf_counter()
        for _ in range(3):
            call()
        _wait(device)
        times.append((time.perf_counter() - begin) / 3 * 1e3)
    return _spread(times)


def _on_cpu(call: Call, device: torch.device, rounds: int) -> dict[str, float]:
    """Milliseconds until a call returns when the GPU has nothing to do."""
    times = []
    for _ in range(2 * rounds):
        _wait(device)
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e3)
    _wait(device)
    return _spread(times)


def _spread(times: list[float]) -> dict[str, float]:
    return {"median": statistics.median(times), "least": min(times), "most": max(times)}


def _share_in_int8(report: PatchReport) -> float:
    own = [pair for pair in report.pairs if pair.kind == "self"]
    return report.last_forward.get("fused with int8 attention", 0) / len(own)


def _median(record: object, key: str) -> float | None:
    found = record.get(key) if isinstance(record, dict) else None
    return float(found["median"]) if isinstance(found, dict) else None


def _show(tokens: str, name: str, methods: dict[str, Any], journal: Journal) -> None:
    record = methods[name]
    if record["status"] != "timed":
        journal.show((tokens, name, record["reason"]))
        return

    def number(value: float | None, digits: int = 2) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    own, eager = _median(record, "milliseconds"), _median(methods.get("eager"), "milliseconds")
    journal.show(
        (
            tokens,
            name,
            number(own),
            number(_median(record, "cpu_milliseconds")),
            number(_median(record, "graph_milliseconds")),
            number(None if eager is None or own is None else own / eager, 3),
            number(record["first_seconds"]),
            number(record.get("in_int8")),
            number(record["error"]["relative_l2"], 5),
        )
    )
