"""`fidelity`: how far one forward is from the same network in fp32, in units of the unpatched one.

Truth is the network with its bf16 weights and inputs upcast to fp32, without TF32, with exact
attention. Wan2.1-1.3B has seeded random weights at four settings: gates as drawn or +0.3, so that
attention reaches the output, and the query norm times 1 or 8, so that attention is peaked. Each of
our ways runs with the residual stream in the model's dtype and in fp32; beside its error stands
the one of exact attention with the same residual, so that a better sum hides no worse attention.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import torch

from benchmarks.networks import (
    Enter,
    Variant,
    as_written,
    build_cogvideox,
    build_wan,
    cogvideox_call,
    compiled,
    patched_with,
    sage_attention,
    setting,
    sizes_of,
    tokens_of,
    wan_call,
)
from benchmarks.record_network import SETTINGS
from benchmarks.runner import Journal, Plan, Record, run_cases
from turbo_rcm_patch import PatchReport
from turbo_rcm_patch.bench import Call, errors_of, reason_of, time_call
from turbo_rcm_patch.ops.modes import synchronize
from turbo_rcm_patch.sampling.measures import highest_precision, upcast

__all__ = ["run"]

#: Further than this from the truth is broken, not inexact.
BROKEN: Final = 0.5
#: (timestep, what is added to the seed) of the inputs, in their order.
_INPUTS: Final = ((988.0, 0), (988.0, 1), (988.0, 2), (988.0, 3), (700.0, 0), (300.0, 0))
_UNPATCHED: Final = "unpatched"
_RESIDUALS: Final = ("model", "fp32")
#: In front of the names of what chooses a precision by head.
_AUTO: Final = "precision "
_COLUMNS: Final = (
    ("case", 22), ("method", 30), ("error", 8), ("of unpatched", 12), ("of exact", 9), ("ms", 8),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A network and how its weights are changed.

    Attributes:
        name: As in the table.
        network: "1.3b", "14b" or "cogvideox-2b".
        live: Whether something is added to the gates.
        sharp: Whether the query norm is multiplied.
    """

    name: str
    network: str = "1.3b"
    live: bool = False
    sharp: bool = False


_NAMES: Final = ("drawn-x1", "drawn-x8", "live-x1", "live-x8")
CASES: Final = {
    **{
        name: Case(name, live=live, sharp=sharp)
        for name, (_, live, sharp) in zip(_NAMES, SETTINGS, strict=True)
    },
    "14b": Case("14b", "14b"),
    "cogvideox-2b": Case("cogvideox-2b", "cogvideox-2b"),
}
_14B: Final[dict[str, Any]] = {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}


def methods() -> list[Variant]:
    """Every way; the first is what the others are compared with."""
    found = [
        Variant(_UNPATCHED, as_written),
        Variant("compiled", compiled),
        Variant("sage", sage_attention),
    ]
    ways: dict[str, dict[str, Any]] = {
        "exact": {"attention": "exact"},
        "int8 with bf16 p and v": {"pv": "bf16"},
        "int8": {},
        "int8 Linears": {"linear": "int8"},
    }
    for residual in _RESIDUALS:
        for name, options in ways.items():
            enter: Enter = patched_with(residual=residual, **options)
            found.append(Variant(f"{name} / residual {residual}", enter, ours=True))
    targets: dict[str, dict[str, Any]] = {
        "auto without a target": {"fidelity": 1e6},
        "auto 1.10": {"fidelity": 1.10},
        "auto 1.10 with int8 Linears": {"fidelity": 1.10, "linear": "int8"},
        "auto 1.25 with int8 Linears": {"fidelity": 1.25, "linear": "int8"},
    }
    for name, options in targets.items():
        enter = patched_with(guard=True, precision="auto", **options)
        found.append(Variant(f"{_AUTO}{name}", enter, ours=True))
    return found


def run(plan: Plan) -> int:
    """Measure and write `fidelity.json`; 0 if nothing of ours was broken."""
    about = {
        "truth": "the same network, bf16 weights and inputs upcast to fp32, no TF32, exact "
        "attention",
        "error": "relative L2 of the output to the truth, mean over the inputs",
        "of_unpatched": "error over that of the unpatched network",
        "of_exact": "error over that of exact attention, patched, with the same residual",
        "live": "0.3 added to both gate rows of every block",
        "x8": "weights of the query norms times 8",
    }
    return run_cases(
        plan,
        "fidelity",
        _COLUMNS,
        about,
        CASES,
        _measure,
        methods=[method.name for method in methods()],
        default=_NAMES,
    )


#: Gives a call for a timestep and a seed; upcast where that is asked for.
Make = Callable[..., Call]


@contextmanager
def _network(case: Case, journal: Journal) -> Iterator[tuple[Any, Make, int]]:
    """The network at its setting, what makes calls of it, and their tokens."""
    plan, device, sizes = journal.plan, journal.device, sizes_of(journal.plan)
    network: Any
    if case.network == "cogvideox-2b":
        network = build_cogvideox(case.network, device, plan.seed, micro=plan.micro)
        yield network, partial(cogvideox_call, network, device), 0
        return
    large = case.network == "14b"
    config = sizes.network | (_14B if large and not plan.micro else {})
    network = build_wan(config, device, plan.seed, narrow=large)
    latents = sizes.truth_latents if plan.quick else sizes.latents
    with setting(network, live=case.live, sharp=case.sharp):
        make = partial(wan_call, network, latents, sizes.text_tokens, device)
        yield network, make, tokens_of(latents)


@torch.no_grad()
def _measure(case: Case, wanted: list[str], journal: Journal) -> bool:
    good = True
    with _network(case, journal) as (network, make, tokens):
        inputs = _INPUTS[: journal.plan.inputs]
        some = [(journal.plan.seed + add, time) for time, add in inputs]
        calls = [make(seed, timestep=time) for seed, time in some]
        with highest_precision(), upcast(network):
            truths = [make(seed, timestep=time, wide=True)() for seed, time in some]
        found: dict[str, Record] = {}
        record: Record = {**asdict(case), "inputs": list(inputs), "methods": found}
        record["tokens"] = tokens or None
        for method in methods():
            if method.name != _UNPATCHED and method.name not in wanted:
                continue
            if journal.late(f"{case.name}, {method.name}"):
                continue
            found[method.name] = one = _one(method, network, calls, truths, journal)
            good &= one["status"] == "measured" or not method.ours
            _compare(found, method.name)
            _show(case.name, method.name, one, journal)
            journal.case(case.name, record)
    return good


def _one(
    method: Variant, network: Any, calls: list[Call], truths: list[torch.Tensor], journal: Journal
) -> Record:
    """Error and time of a method."""
    effort = journal.plan.effort(0.0, 5, quick=(0.0, 3))
    record: Record = {}
    try:
        with method.enter(network, journal.plan.compiler) as report:
            if isinstance(report, PatchReport) and report.config.guard:
                # The guard compares, compares what it changed, and is done.
                record["guarded_seconds"] = [_seconds(calls[0], journal) for _ in range(3)]
            errors = [
                errors_of(call(), truth)["relative_l2"]
                for call, truth in zip(calls, truths, strict=True)
            ]
            record["errors"] = errors
            record["error"] = sum(errors) / len(errors)
            if not record["error"] < BROKEN:
                return record | {"status": "wrong", "reason": f"relL2 {record['error']:.3g}"}
            timing = time_call(calls[0], journal.device, effort.most, warmup=1)
            record |= {"milliseconds": asdict(timing), "status": "measured"}
            if isinstance(report, PatchReport) and report.config.guard:
                record["predicted"] = report.guard.fidelity
                record["exact_heads"] = report.exact_heads
                record["int8_linears"] = sum(bool(p.int8_linears) for p in report.pairs)
                record["verdicts"] = dict(Counter(one.verdict for one in report.guard))
                for name in ("error", "gain"):
                    record[f"largest_{name}"] = max(getattr(one, name) for one in report.guard)
    except Exception as error:  # one that cannot run here says why, and the others go on
        record |= {"status": "missing", "reason": reason_of(error)}
    return record


def _seconds(call: Call, journal: Journal) -> float:
    """How long one call takes, alone."""
    synchronize(journal.device)
    begin = time.perf_counter()
    call()
    synchronize(journal.device)
    return time.perf_counter() - begin


def _compare(found: dict[str, Record], name: str) -> None:
    """Put a method's error beside the unpatched one's and the exact one's."""
    one, residual = found[name], "fp32" if name.startswith(_AUTO) else name.rpartition(" ")[2]
    others = {"of_unpatched": _UNPATCHED, "of_exact": f"exact / residual {residual}"}
    for key, other in others.items():
        if "error" in one and "error" in found.get(other, {}):
            one[key] = one["error"] / found[other]["error"]


def _show(case: str, name: str, one: Record, journal: Journal) -> None:
    if one["status"] != "measured":
        journal.line((case, name, str(one["reason"])))
        return
    ratios = [f"{one[key]:.3f}" if key in one else "" for key in ("of_unpatched", "of_exact")]
    if one.get("predicted") is not None:
        counts = one["exact_heads"].values()
        heads, linears = sum(map(len, counts)), one["int8_linears"]
        name += f" (predicted {one['predicted']:.3f}, {heads} heads exact, {linears} pairs int8)"
    milliseconds = f"{one['milliseconds']['median']:.1f}"
    journal.line((case, name, f"{one['error']:.5f}", *ratios, milliseconds))
