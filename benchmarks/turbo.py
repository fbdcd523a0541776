"""`network --only turbo-1.3b`: a forward of Wan2.1-1.3B with sparse-linear attention (SLA).

In two shapes: TurboDiffusion's own WanModel from a checkout, and diffusers' Wan transformer with
SLA's projection attached. Each patched variant is checked against its own attention by definition
in fp32: full attention, SLA with blocks of 128 x 64, or SageSLA with the device's blocks.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.clock import Call
from benchmarks.contest import Effort, reason_of
from benchmarks.journal import Journal, Plan, chosen
from benchmarks.setup import errors_of
from benchmarks.turbo_diffusers import DiffusersShape
from benchmarks.turbo_model import Checkout
from benchmarks.turbo_ways import Enter, as_written, in_turn, patched_ways
from benchmarks.variants import Variant, time_variant
from turbo_rcm_patch.errors import ConfigError

__all__ = ["AIMS", "CASE", "run"]

CASE: Final = "turbo-1.3b"
#: Wanted milliseconds of a forward on an H200 at 32,760 tokens and top-k 0.1.
AIMS: Final = {"16-bit linears": 190.0, "int8 linears": 150.0}
#: Relative L2 from which a variant is broken and is not timed; and from which one with full
#: attention is wrong. A sparse one is wrong from the distance to full attention on.
BROKEN: Final = 0.5
WRONG: Final = 0.2
#: Share of the distance to full attention within which a sparse one is right: rounding moves a
#: full one by some percent of it, to either side.
NEARER: Final = 0.9
_LATENTS: Final = (1, 16, 21, 60, 104)
_MICRO_LATENTS: Final = (1, 16, 3, 20, 20)
_SETS: Final = 2
_COLUMNS: Final = (
    ("model", 10), ("variant", 29), ("ms", 9), ("p20", 9), ("p80", 9), ("peak GiB", 8),
    ("relL2", 9),
)  # fmt: skip


class WanModelShape:
    """TurboDiffusion's own class.

    Args:
        path: Of the checkout, or None.
    """

    name: Final = "WanModel"

    def __init__(self, path: Path | None) -> None:
        if path is None:
            raise ConfigError(
                "--turbodiffusion",
                expected="a checkout of thu-ml/TurboDiffusion",
                got="none",
                remedy="Give its folder to time its own WanModel",
            )
        self._checkout = Checkout(path)

    def build(self, device: torch.device, seed: int, *, micro: bool) -> Any:
        """The model."""
        return self._checkout.build(device, seed, micro=micro)

    def call(self, model: Any, latents: tuple[int, ...], device: torch.device, seed: int) -> Call:
        """One forward."""
        return self._checkout.call(model, latents, device, seed)

    def about(self, model: Any) -> dict[str, object]:
        """For the file."""
        return {"stand_ins": self._checkout.stand_ins}

    def truth(self, model: Any, layout: str, topk: float) -> AbstractContextManager[object]:
        """Inside, the attention of the layout by definition."""
        return self._checkout.exact(model, layout, topk)

    def variants(self, topk: float) -> list[Variant]:
        """Every way, the long compilations last."""
        sparse: dict[str, Enter] = {
            layout: self._sparse(layout, topk) for layout in ("SLA", "SageSLA")
        }
        found = [
            Variant("eager", as_written, profiled=True),
            Variant("eager SLA", sparse["SLA"], profiled=True),
            Variant("eager SageSLA", in_turn(self._sparge, sparse["SageSLA"])),
        ]
        found += patched_ways(sparse)
        return found

    def _sparse(self, layout: str, topk: float) -> Enter:
        return lambda model, backend: self._checkout.sparse(model, layout, topk)

    @contextmanager
    def _sparge(self, model: Any, backend: str) -> Iterator[None]:
        self._checkout.require("SageSLA")
        yield


def run(plan: Plan) -> int:
    """Measure and write `network_turbo.json`; 0 if what is ours was right."""
    topk = 0.5 if plan.micro else 0.1
    wanted = chosen("--peers", plan.peers, _names())
    if plan.quick and not plan.peers:
        wanted = [name for name in wanted if "compiled" not in name]
    journal = Journal(
        "network_turbo",
        plan,
        _COLUMNS,
        about={
            "network": "Wan2.1-T2V-1.3B, seeded random weights in bf16, batch 1, 480p, 81 frames; "
            "SLA's proj_l random",
            "topk": topk,
            "SLA": "blocks of 128 queries and 64 keys",
            "SageSLA": "blocks of 64 and 128 on Hopper, 128 and 64 elsewhere",
            "checkpoint int8": "int8 weights with a scale per block of 128 x 128, made from the "
            "random ones",
            "error": "to the same attention by definition in fp32, all else in the model's dtype",
            "of_full_attention": "relative L2 of full attention to the definition; the error of a "
            "sparse variant is less, or it fails",
            "groups": "milliseconds in kernels of one forward, grouped by their names",
            "aims": AIMS,
        },
    )
    shapes: dict[str, Callable[[], Any]] = {
        WanModelShape.name: lambda: WanModelShape(plan.turbodiffusion),
        DiffusersShape.name: DiffusersShape,
    }
    # What takes long to compile comes after everything else, of both classes.
    passes = [[one for one in wanted if ("compiled" in one) == late] for late in (False, True)]
    truths, good = {shape: _Truths() for shape in shapes}, True
    with journal.running():
        for names in filter(None, passes):
            for shape, make in shapes.items():
                if not journal.late(f"{shape}: {', '.join(names)}"):
                    good &= _case(shape, make, names, truths[shape], topk, journal)
                    gc.collect()  # the next network needs the memory
                    if journal.device.type == "cuda":
                        torch.cuda.empty_cache()
    return 0 if good else 1


def _names() -> list[str]:
    """Of all variants of all classes."""
    sparse = dict.fromkeys(("SLA", "SageSLA"), as_written)
    return ["eager", "eager SLA", "eager SageSLA", *(way.name for way in patched_ways(sparse))]


def _kind(name: str) -> str:
    """The layout of a variant's attention, "" where it is full."""
    return next((one for one in ("SageSLA", "SLA") if one in name.split()), "")


@torch.no_grad()
def _case(
    name: str,
    make: Callable[[], Any],
    wanted: Sequence[str],
    truths: _Truths,
    topk: float,
    journal: Journal,
) -> bool:
    """Some variants of a network of one class; what was measured of it before is kept."""
    plan, device = journal.plan, journal.device
    record = journal.cases.setdefault(name, {"variants": {}})
    if "reason" in record:
        return True  # It was reported.
    latents = _MICRO_LATENTS if plan.micro else _LATENTS
    try:
        shape = make()
        model = shape.build(device, plan.seed, micro=plan.micro)
        calls = [shape.call(model, latents, device, plan.seed + i) for i in range(_SETS)]
        eager = calls[0]()
    except Exception as error:  # e.g. no checkout, or a package of its own is missing
        record.update(status="missing", reason=reason_of(error))
        journal.show((name, "", f"left out: {reason_of(error)}"))
        journal.case(name, record)
        return isinstance(error, ConfigError) and plan.turbodiffusion is None
    found = record["variants"]
    assert isinstance(found, dict)
    record |= {
        "parameters": sum(p.numel() for p in model.parameters()),
        "latents": list(latents),
        "tokens": latents[2] * (latents[3] // 2) * (latents[4] // 2),
        "finite": bool(eager.isfinite().all()),
        **shape.about(model),
    }

    def defined(layout: str) -> torch.Tensor:
        with shape.truth(model, layout, topk):
            output: torch.Tensor = calls[0]()
        return output

    truths.found[""], good = eager, True
    for way in shape.variants(topk):
        if way.name not in wanted or journal.late(f"{name}, {way.name}"):
            continue
        found[way.name] = numbers = _one(way, model, calls, truths, defined, journal)
        good &= numbers["status"] == "timed" or not way.ours
        _show(name, way.name, numbers, journal)
        record["of_full_attention"] = truths.reach
        journal.case(name, record)
    record["best"] = _best(name, found, micro=plan.micro)
    record["equal_afterwards"] = same = torch.equal(calls[0](), eager)
    journal.case(name, record)
    return good and same


@dataclass(slots=True)
class _Truths:
    """Outputs with each attention by definition, made when they are first asked for.

    Attributes:
        found: Layout -> output; "" is full attention, the author's own.
        reach: Layout -> relative L2 of full attention to it.
    """

    found: dict[str, torch.Tensor] = field(default_factory=dict)
    reach: dict[str, float] = field(default_factory=dict)

    def of(self, layout: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The output with this layout."""
        if layout not in self.found:
            self.found[layout] = truth = make()
            self.reach[layout] = errors_of(self.found[""], truth)["relative_l2"]
        return self.found[layout]


def _one(
    way: Variant,
    model: Any,
    calls: Sequence[Call],
    truths: _Truths,
    defined: Callable[[str], torch.Tensor],
    journal: Journal,
) -> dict[str, object]:
    """Numbers of a variant: wrong if it is no nearer to its definition than full attention is,
    for then it may well be full attention. How long that took is kept in the file."""
    layout = _kind(way.name)
    try:
        errors = partial(_error, truths.of(layout, partial(defined, layout)))
    except Exception as error:  # e.g. no memory
        return {"status": "missing", "reason": f"no definition to check with: {reason_of(error)}"}
    record = time_variant(way, model, calls, errors, BROKEN, journal, _effort(journal.plan))
    reach = truths.reach.get(layout)
    limit, found = WRONG if reach is None else NEARER * reach, record.get("error")
    if isinstance(found, dict) and not found["relative_l2"] < limit:
        what = f"limit {limit:.3g}" if reach is None else f"full attention is at {reach:.3g}"
        reason = f"wrong (relL2 {found['relative_l2']:.3g}, {what})"
        record.update(status="wrong", reason=reason)
    return record


def _error(truth: torch.Tensor, output: torch.Tensor) -> dict[str, float]:
    return errors_of(output, truth)


def _effort(plan: Plan) -> Effort:
    if plan.micro:
        return Effort(budget=5.0, least=2, most=plan.calls or 2)
    return Effort(budget=float("inf"), least=1, most=plan.calls or (3 if plan.quick else 7))


def _show(shape: str, name: str, record: dict[str, object], journal: Journal) -> None:
    timing, error, peak = (record.get(one) for one in ("milliseconds", "error", "peak_bytes"))
    if record["status"] != "timed" or not (isinstance(timing, dict) and isinstance(error, dict)):
        journal.show((shape, name, str(record["reason"])))
        return
    times = (f"{timing[one]:.2f}" for one in ("median", "p20", "p80"))
    memory = f"{peak / 2**30:.2f}" if isinstance(peak, int) else ""
    journal.show((shape, name, *times, memory, f"{error['relative_l2']:.5f}"))


def _best(model: str, found: dict[str, object], *, micro: bool) -> dict[str, object]:
    """Our fastest sparse forward with 16-bit and with int8 linears, against the aims."""
    best: dict[str, object] = {}
    for kind, aim in AIMS.items():
        times = {
            name: float(one["milliseconds"]["median"])
            for name, one in found.items()
            if name.startswith("patched S") and ("int8" in name.split()) == ("int8" in kind)
            if isinstance(one, dict) and one["status"] == "timed"
        }
        if not times:
            continue
        name, least = min(times.items(), key=lambda item: item[1])
        best[kind] = {"variant": name, "milliseconds": least}
        if not micro:
            best[kind] = {"variant": name, "milliseconds": least, "aim": aim, "met": least <= aim}
            print(f"{model}, {kind}: {least:.0f} ms ({name}); aim {aim:.0f} ms")
    return best
