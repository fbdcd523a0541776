"""`network`: one forward of Wan or CogVideoX: as written, compiled, patched; where time goes."""

from __future__ import annotations

import gc
import math
from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks import turbo
from benchmarks.cases import (
    NETWORK_AIMS,
    NETWORK_REFERENCE,
    NETWORKS,
    REFERENCE_SOURCE,
)
from benchmarks.clock import Call
from benchmarks.cogvideox import build_cogvideox, cogvideox_call, is_cogvideox
from benchmarks.contest import Effort
from benchmarks.journal import Journal, Plan, chosen
from benchmarks.network import build_network
from benchmarks.setup import MICRO, Sizes, errors_of, generator
from benchmarks.variants import time_variant, variants

if TYPE_CHECKING:
    from diffusers import WanTransformer3DModel

__all__ = ["run"]

#: Relative L2 to the unpatched eager output from which a variant is broken and is not timed.
BROKEN: Final = 0.2
_SETS: Final = 2
_COLUMNS: Final = (
    ("network", 12), ("variant", 22), ("ms", 9), ("p20", 9), ("p80", 9), ("of eager", 8),
    ("peak GiB", 8), ("relL2", 9),
)  # fmt: skip


def run(plan: Plan) -> int:
    """Measure and write `network.json` (turbo-1.3b: `network_turbo.json`); 0 if everything of ours
    was right."""
    only = chosen("--only", plan.only or ("1.3b",), [*NETWORKS, turbo.CASE])
    good = True
    if turbo.CASE in only:
        only.remove(turbo.CASE)
        good = turbo.run(plan) == 0
        if not only:
            return 0 if good else 1
    wanted = chosen("--peers", plan.peers, [variant.name for variant in variants()])
    journal = Journal(
        "network",
        plan,
        _COLUMNS,
        about={
            "network": "Wan2.1 with seeded random weights in bf16, batch 1, 480p, 81 frames; "
            "CogVideoX likewise, 480 x 720, 49 frames",
            "error": "to the unpatched eager output, which is exact attention in bf16",
            "groups": "milliseconds in kernels of one forward, grouped by their names",
            "compiled": "every block with fullgraph=True",
            "reference": f"compile + sageattention 2.2, ms on an H200, {REFERENCE_SOURCE}",
        },
    )
    with journal.running():
        for name in only:
            if not journal.late(_title(name)):
                good &= _network(name, wanted, journal)
                gc.collect()  # the next network needs the memory
                if journal.device.type == "cuda":
                    torch.cuda.empty_cache()
    return 0 if good else 1


def _effort(plan: Plan) -> Effort:
    if plan.micro:
        return Effort(budget=5.0, least=2, most=plan.calls or 2)
    most = plan.calls or (3 if plan.quick else 7)
    return Effort(budget=math.inf, least=1, most=most)


def _build(config: dict[str, object], device: torch.device, seed: int) -> WanTransformer3DModel:
    """As `build_network`, but made in bf16 from the start: 14 billion parameters in fp32 would
    leave no room."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        network = build_network(config, device, seed)
    finally:
        torch.set_default_dtype(before)
    kept = set(network._keep_in_fp32_modules)
    for name, parameter in network.named_parameters():
        if not kept.isdisjoint(name.split(".")):
            parameter.data = parameter.data.float()
    return network


def _title(name: str) -> str:
    return name if is_cogvideox(name) else f"Wan2.1-{name}"


@torch.no_grad()
def _network(name: str, wanted: list[str], journal: Journal) -> bool:
    plan, device = journal.plan, journal.device
    seeds = [plan.seed + i for i in range(_SETS)]
    network: Any
    if is_cogvideox(name):
        network = build_cogvideox(name, device, plan.seed, micro=plan.micro)
        config = {key: value for key, value in network.config.items() if key[0] != "_"}
        calls = [cogvideox_call(network, device, seed) for seed in seeds]
        about: dict[str, object] = {"config": config}
    else:
        sizes = MICRO if plan.micro else Sizes()
        config = sizes.network | ({} if plan.micro else NETWORKS[name])
        network = (build_network if name == "1.3b" else _build)(config, device, plan.seed)
        calls = [_call(network, sizes, device, seed) for seed in seeds]
        about = {"config": config, "latents": list(sizes.latents)}
    eager = calls[0]()
    found: dict[str, object] = {}
    record: dict[str, object] = {
        "parameters": sum(p.numel() for p in network.parameters()),
        **about,
        "finite": bool(eager.isfinite().all()),
        "variants": found,
    }
    good = True
    for variant in variants():
        if variant.name not in wanted or journal.late(f"{_title(name)}, {variant.name}"):
            continue
        numbers = time_variant(
            variant,
            network,
            calls,
            lambda y: errors_of(y, eager),
            BROKEN,
            journal,
            _effort(plan),
        )
        found[variant.name] = numbers
        good &= numbers["status"] == "timed" or not variant.ours
        _show(name, variant.name, found, journal)
        journal.case(name, record)
    record |= _compare(name, found, micro=plan.micro)
    same = torch.equal(calls[0](), eager)
    record["equal_afterwards"] = same
    journal.case(name, record)
    return good and same


def _call(network: WanTransformer3DModel, sizes: Sizes, device: torch.device, seed: int) -> Call:
    random = generator(device, seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random, device=device).bfloat16()

    latents = normal(*sizes.latents)
    text = normal(1, sizes.text_tokens, int(str(sizes.network["text_dim"])))
    timestep = torch.tensor([988.0], device=device)

    def call() -> torch.Tensor:
        output: torch.Tensor = network(
            hidden_states=latents,
            timestep=timestep,
            encoder_hidden_states=text,
            return_dict=False,
        )[0]
        return output

    return call


def _median(found: dict[str, object], name: str) -> float | None:
    record = found.get(name)
    timing = record.get("milliseconds") if isinstance(record, dict) else None
    return float(timing["median"]) if isinstance(timing, dict) else None


def _show(network: str, name: str, found: dict[str, object], journal: Journal) -> None:
    record = found[name]
    assert isinstance(record, dict)
    if "milliseconds" not in record:
        journal.show((network, name, record["reason"]))
        return
    timing, eager, peak = record["milliseconds"], _median(found, "eager"), record.get("peak_bytes")
    journal.show(
        (
            network,
            name,
            *(f"{timing[one]:.2f}" for one in ("median", "p20", "p80")),
            "" if eager is None else f"{timing['median'] / eager:.3f}",
            "" if peak is None else f"{peak / 2**30:.2f}",
            f"{record['error']['relative_l2']:.5f}",
        )
    )


def _compare(name: str, found: dict[str, object], *, micro: bool) -> dict[str, object]:
    """Our fastest with 16-bit and with int8 linears, against the fastest other and the aims."""
    ours: dict[str, list[float]] = {"16-bit linears": [], "int8 linears": []}
    others: dict[str, float] = {}
    for variant in variants():
        median = _median(found, variant.name)
        if median is None:
            continue
        if not variant.ours:
            others[variant.name] = median
        else:
            ours["int8 linears" if "int8" in variant.name else "16-bit linears"].append(median)
    reference = NETWORK_REFERENCE[name]
    comparison: dict[str, object] = {}
    aims: tuple[float | None, ...] = NETWORK_AIMS.get(name, (None, None))
    for (kind, times), aim in zip(ours.items(), aims, strict=True):
        if not times:
            continue
        best = min(times)
        one: dict[str, object] = {"milliseconds": best}
        one["over"] = {other: median / best for other, median in others.items()}
        if not micro:
            one["over_reference"] = reference / best
            text = (
                f"{_title(name)}, {kind}: {best:.0f} ms, {reference / best:.2f}x compile + sage "
                f"2.2 ({REFERENCE_SOURCE})"
            )
            if aim is not None:
                one |= {"aim": aim, "met": reference / best >= aim}
                text += f"; aim {aim:.2f}x"
            print(text)
        comparison[kind] = one
    return {"comparison": comparison, "reference_milliseconds": reference}
