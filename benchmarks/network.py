"""`network`: one forward of Wan, of Wan with SLA, and of CogVideoX: its time and its error.

Short sequences are bound by the CPU, so a row has two times: of forwards that are queued one after
another, and of the CPU until one returns that began on an idle GPU. `first s` is the first forward
with a method in this process, compilation included; the guard decides in it.

`error` is relative L2 to the unpatched eager output, and with SLA to SLA by its definition; in
cases for fidelity it is of the first forward, to the same network in fp32. `of eager's` is that
error over the unpatched network's, `predicted` the same ratio as the guard predicts it. `in int8`
counts the blocks whose self-attention ran in int8 on the last forward.

In cases for fidelity the truth is the network with its bf16 weights and inputs upcast to fp32,
without TF32 and with exact attention. Random gates hardly let attention reach the output and
random queries are hardly peaked, so that some of these cases change both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from benchmarks import runner
from benchmarks.models import (
    EAGER,
    SIZES,
    SLA,
    WAYS,
    build_network,
    make_call,
    record_report,
)
from benchmarks.runner import ERROR, MS, Benchmark, Column, Measure, Plan, Record, Wrong
from turbo_rcm_patch.patching import sla_as_defined
from turbo_rcm_patch.video.measures import highest_precision, relative_l2, upcast


class Case(NamedTuple):
    """A network and its tokens; `fidelity` compares with fp32, of gates or queries that differ."""

    network: str
    tokens: int = 32760
    fidelity: bool = False
    live: bool = False
    sharp: bool = False


_CASES: Final = {
    "1.3b": Case("1.3b"), "14b": Case("14b"), SLA: Case(SLA),
    "cogvideox-2b": Case("cogvideox-2b"), "cogvideox-5b": Case("cogvideox-5b"),
    **{f"1.3b-{tokens}": Case("1.3b", tokens) for tokens in SIZES if tokens != 32760},
    **{
        f"1.3b-{'live' if live else 'drawn'}-x{8 if sharp else 1}":
        Case("1.3b", fidelity=True, live=live, sharp=sharp)
        for live in (False, True) for sharp in (False, True)
    },
    "cogvideox-5b-fidelity": Case("cogvideox-5b", fidelity=True),
}  # fmt: skip
#: Relative L2 to the truth from which a forward is broken and is not timed.
BROKEN: Final = 0.2
#: A patched network's error over the unpatched one's from which the command fails, as `compare`
#: does.
MOST: Final = 2.0
_TIMED: Final = (EAGER, "patched", "patched int8 Linears")
#: Where the attention is diffusers', which CogVideoX's is not.
_SAGE: Final = ("sage", "compile sage")
_COMPARED_WITH_FP32: Final = (
    "patched guard on", "patched int8 Linears guard on", "patched exact guard on"
)  # fmt: skip
#: Over more tokens the GPU never waits, so CUDA graphs change nothing and take minutes to begin.
_MOST_FOR_GRAPHS: Final = 10_000


def _methods(case: Case) -> Sequence[str]:
    if case.network == SLA:  # Unpatched it is dense attention, another function.
        return "patched", "patched int8 Linears"
    sage = () if case.network.startswith("cog") else _SAGE
    if case.fidelity:
        return *_COMPARED_WITH_FP32, *sage[:1]
    graphs = ("patched reduce-overhead",) if case.tokens <= _MOST_FOR_GRAPHS else ()
    return *_TIMED, *sage, *graphs


def _prepare(name: str, plan: Plan, device: torch.device) -> Measure:
    case = _CASES[name]
    network = build_network(case.network, plan, device)
    if case.live:  # Attention and feed-forward reach the output.
        for block in network.blocks:
            block.scale_shift_table.data[:, [2, 5]] += 0.3
    if case.sharp:  # Attention is peaked.
        for block in network.blocks:
            block.attn1.norm_q.weight.data.mul_(8.0)
            block.attn2.norm_q.weight.data.mul_(8.0)
    call = make_call(network, plan, device, case.tokens)
    if case.fidelity:
        with highest_precision(), upcast(network):
            truth = make_call(network, plan, device, case.tokens, wide=True)()
    elif case.network == SLA:
        with sla_as_defined(network, 0.1):
            truth = call()
    else:
        truth = call()
    unpatched_error = relative_l2(call(), truth) if case.fidelity else None

    def measure(method: str, record: Record) -> None:
        outputs = list[torch.Tensor]()
        with WAYS[method].entered(network, plan.compiler) as report:
            record["first_seconds"] = runner.seconds_of(lambda: outputs.append(call()), device)
            record["error"] = runner.checked_error(outputs.pop(), truth, BROKEN)
            if unpatched_error is not None:
                record["error_of_eager"] = record["error"] / unpatched_error
                if record["error_of_eager"] > MOST:
                    ratio = f"{record['error_of_eager']:.3g}"
                    raise Wrong(f"{ratio} times the unpatched network's error")
            for _ in range(2):  # CUDA graphs are captured in the second forward.
                call()
            record["ms"] = runner.time_forwards(call, device)
            record["cpu_ms"] = runner.time_on_cpu(call, device)
            record_report(record, report)

    return measure


network: Final = Benchmark(
    name="network",
    text="one forward of Wan and CogVideoX: its time, or its distance to fp32",
    columns=(
        MS, Column("CPU ms", "cpu_ms", ".2f"), Column("first s", "first_seconds", ".2f"),
        Column("in int8", "in_int8", "d"), ERROR,
        Column("of eager's", "error_of_eager", ".3f"),
        Column("predicted", "predicted", ".3f"),
    ),
    cases={name: _methods(case) for name, case in _CASES.items()},
    prepare=_prepare,
    default=[name for name, case in _CASES.items() if case.network == "1.3b"],
)  # fmt: skip
