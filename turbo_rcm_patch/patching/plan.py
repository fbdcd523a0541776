"""Plans: how each block of a network runs, decided once and kept.

Without a plan the guard decides by the first video that a process makes, so that the same seed may
give other bits in a process that began with another video. A plan is those decisions as data:

    report = patch_model(pipe)
    pipe(...)                              # the guard decides
    report.plan.save("wan.json")

    patch_model(pipe, plan="wan.json")     # any process: nothing is measured, the same bits

A plan fits one class, size and dtype of networks, and one set of options. The guard trusts it
where it was measured: on one kind of device, with one form of attention. Elsewhere, and in blocks
that were not measured, it measures a first forward as without a plan.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from turbo_rcm_patch import ops
from turbo_rcm_patch.config import PatchConfig, chosen_config
from turbo_rcm_patch.errors import PlanError
from turbo_rcm_patch.extras import version_of
from turbo_rcm_patch.files import read_json, write_json
from turbo_rcm_patch.patching.block import LEVEL_DESCRIPTIONS, Level, PatchedBlock
from turbo_rcm_patch.patching.choose import milliseconds, rates_of
from turbo_rcm_patch.patching.guard_log import grouped, merged_path, without_number
from turbo_rcm_patch.patching.int8_weights import Int8Linear
from turbo_rcm_patch.patching.measure import Shares, predicted
from turbo_rcm_patch.patching.plain import original_class
from turbo_rcm_patch.patching.vae import PatchedCoder

if TYPE_CHECKING:
    from turbo_rcm_patch.patching.record import PatchRecord

#: Version of the file.
_SCHEMA: Final = 3
_REMEDY: Final = (
    "Make one for this model: `turbo-rcm-patch plan`, or `report.plan.save(path)`. The one in a "
    "folder of videos may be deleted"
)


@dataclass(frozen=True, slots=True)
class PlannedBlock:
    """How one block runs.

    Attributes:
        level: How exactly it runs.
        shares: What it adds to the network's error, and what the author's block adds; zeros where
            it was not measured.
        milliseconds: Predicted time of its self-attention, and of the Linears that may run in
            int8; 0 for a card that was not measured, and for offloaded weights.
    """

    level: Level
    shares: Shares
    milliseconds: float = 0.0


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """How each block of one network runs.

    Attributes:
        network: The class.
        dtype: dtype of its weights, for instance "bfloat16".
        heads: Heads of an attention.
        head_dim: Channels of a head.
        tokens: Tokens of the forward that decided; 0 if another network has run since.
        way: What was measured, as `Guard.decided` names it; empty if nothing was.
        blocks: Name of a block in the network -> how it runs, in order.
    """

    network: str
    dtype: str
    heads: int
    head_dim: int
    tokens: int
    way: tuple[str, ...]
    blocks: Mapping[str, PlannedBlock]

    @property
    def error(self) -> float | None:
        """The predicted error of the network, in units of the unpatched network's; None if it was
        not measured."""
        shares = [block.shares for block in self.blocks.values()]
        return predicted(shares, getattr(torch, self.dtype)) if any(map(any, shares)) else None

    def size(self) -> dict[str, Any]:
        """Return what a network has to have that runs by it."""
        names = ("network", "dtype", "heads", "head_dim")
        return {name: getattr(self, name) for name in names} | {"blocks": sorted(self.blocks)}

    def __str__(self) -> str:
        error = (
            "not measured" if self.error is None else f"{self.error:.3g} of the unpatched one's"
        )
        text = f"{self.network}, {self.dtype}: predicted error {error}"
        text += f", over {self.tokens} tokens" if self.tokens else ""
        for alike in grouped(self.blocks, lambda name: self.blocks[name].level):
            level = self.blocks[alike[0]].level
            names = ", ".join(map(merged_path, grouped(alike, without_number)))
            time = sum(self.blocks[name].milliseconds for name in alike)
            text += f"\n  {names}: {LEVEL_DESCRIPTIONS.get(level, 'as asked')}"
            text += f", {time:.3g} ms of attention and Linears" if time else ""
        return text


@dataclass(frozen=True, slots=True)
class Plan:
    """How each block of a model or a pipeline runs.

    Attributes:
        networks: Name of a network in its pipeline, "" for one alone -> its plan.
        config: The options that it was made with.
        made_with: Where and with which releases it was made, for a reader.
    """

    networks: Mapping[str, NetworkPlan]
    config: PatchConfig
    made_with: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a file that `save` wrote.

        Raises:
            PlanError: It is missing, damaged, or of another release.
        """
        path = Path(path).expanduser()
        if not path.is_file():
            raise PlanError(f"plan {path}", expected="a file", got="none there", remedy=_REMEDY)
        held = read_json(path, PlanError, _REMEDY)
        try:
            if held["plan"] != _SCHEMA:
                raise ValueError(f"version {held['plan']}")
            networks = {name: _network(**network) for name, network in held["networks"].items()}
            made_with = {str(name): str(value) for name, value in held["made_with"].items()}
            return cls(networks, PatchConfig(**held["config"]), made_with)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise PlanError(
                f"plan {path}",
                expected=f"what `report.plan.save` of this release wrote (version {_SCHEMA})",
                got=f"{type(error).__name__}: {error}"[:200],
                remedy=_REMEDY,
            ) from error

    def save(self, path: str | Path) -> Path:
        """Write the plan as JSON, and return the path.

        Raises:
            OutputError: The file cannot be written.
        """
        networks = {name: asdict(network) for name, network in self.networks.items()}
        for network in networks.values():
            for block in network["blocks"].values():
                block["level"] = block["level"].name.lower()
        held = {"plan": _SCHEMA, "networks": networks, "config": asdict(self.config)}
        path = Path(path).expanduser()
        write_json(path, held | {"made_with": dict(self.made_with)})
        return path

    def of_prompts(self, prompts: Sequence[str], how: object) -> Plan:
        """Return the plan with a note that it was measured with videos of these prompts."""
        return replace(self, made_with={**self.made_with, "prompts": _prompts_note(prompts, how)})

    def check_prompts(self, prompts: Sequence[str], how: object) -> int:
        """Return with how many of some prompts, the first ones, the plan was measured.

        Raises:
            PlanError: It was measured with others, or they were made in another way.
        """
        held = self.made_with.get("prompts")
        for count in range(1, len(prompts) + 1):
            if held == _prompts_note(prompts[:count], how):
                return count
        raise PlanError(
            "plan to resume",
            expected="one of the first of these prompts, with this model and these settings",
            got=f"one of {held or 'no prompts'}",
            remedy="Leave out --resume, or name another --out",
        )

    def of_each(self, networks: Mapping[str, nn.Module]) -> dict[nn.Module, Plan]:
        """Return a plan for each network of a pipeline alone."""
        return {
            network: Plan({"": self._named(name, networks)}, self.config, self.made_with)
            for name, network in networks.items()
        }

    def check_config(self, config: PatchConfig) -> None:
        """Raise a PlanError that names the options which are not the plan's."""
        differ = [
            f"{name}={value!r}"
            for name, value in asdict(config).items()
            if value != getattr(self.config, name)
        ]
        if differ:
            raise PlanError(
                "options beside a plan",
                expected=f"those of the plan: {self.config!r}",
                got=", ".join(differ),
                remedy="Leave the options out, or make a plan with these",
            )

    def of(self, record: PatchRecord, paths: Collection[str]) -> NetworkPlan:
        """Return the plan of a network, which is one of these of a model.

        Raises:
            PlanError: There is none, or the network differs; each field is named.
        """
        named, size = self._named(record.path, paths), _size_of(record)
        path = record.path or str(size["network"])
        wrong = {name: value for name, value in named.size().items() if value != size[name]}
        if wrong:
            raise PlanError(
                f"plan of {path}",
                expected="; ".join(f"{name} {_short(wrong[name], size[name])}" for name in wrong),
                got="; ".join(f"{name} {_short(size[name], wrong[name])}" for name in wrong),
                remedy=_REMEDY,
            )
        return named

    def _named(self, path: str, paths: Collection[str]) -> NetworkPlan:
        """Return the plan of one of a model's networks. One network alone has any name."""
        if len(paths) == len(self.networks) == 1:
            return next(iter(self.networks.values()))
        if {*paths} != self.networks.keys():
            expected, got = (
                " and ".join(name or "one network" for name in names)
                for names in (paths, self.networks)
            )
            raise PlanError("plan", expected=f"one for {expected}", got=got, remedy=_REMEDY)
        return self.networks[path]

    def __str__(self) -> str:
        made_with = ", ".join(f"{name} {value}" for name, value in self.made_with.items())
        networks = [
            f"{name}: {plan}" if name else str(plan) for name, plan in self.networks.items()
        ]
        return "\n".join([f"plan with {self.config!r}, made with {made_with}", *networks])


def digest_of_settings(settings: object) -> str:
    """Return eight characters that tell JSON data from other data."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _prompts_note(prompts: Sequence[str], how: object) -> str:
    return f"{len(prompts)} ({digest_of_settings([how, *prompts])})"


def _short(value: object, other: object) -> str:
    if not isinstance(value, list) or not isinstance(other, list):
        return str(value)
    alone = sorted({*value} - {*other})
    return f"({len(value)})" if len(value) != len(other) else f"{', '.join(alone[:2])}, ..."


def _network(*, blocks: dict[str, Any], **sizes: Any) -> NetworkPlan:
    """Return the plan of a network in a file."""
    sizes["way"] = tuple(map(str, sizes["way"]))
    kinds = {"network": str, "dtype": str, "heads": int, "head_dim": int, "tokens": int}
    if any(type(sizes[name]) is not kind for name, kind in kinds.items()):
        raise ValueError(f"sizes {sizes}")
    dtype = getattr(torch, sizes["dtype"], None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype {sizes['dtype']}")
    planned = {}
    for name, block in blocks.items():
        shares = Shares(*map(float, block["shares"]))
        level, time = Level[block["level"].upper()], float(block["milliseconds"])
        if not all(isfinite(number) and number >= 0 for number in (*shares, time)):
            raise ValueError(f"{name}: {shares}, {time} milliseconds")
        planned[name] = PlannedBlock(level, shares, time)
    return NetworkPlan(blocks=planned, **sizes)


def config_and_plan(
    config: PatchConfig | None,
    plan: Plan | str | Path | None,
    options: Mapping[str, object] = MappingProxyType({}),
) -> tuple[PatchConfig, Plan | None]:
    """Return the options and the plan that a caller names. Without options they are the plan's.

    Raises:
        ConfigError: An option does not exist, or has an invalid value.
        PlanError: The plan is damaged, or has other options.
    """
    if plan is None:
        return chosen_config(config, options), None
    if not isinstance(plan, (Plan, str, Path)):
        got = type(plan).__name__
        raise PlanError("plan", expected="report.plan, or its file", got=got, remedy=_REMEDY)
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    config = chosen_config(plan.config if config is None else config, options)
    plan.check_config(config)
    return config, plan


def is_planned(record: PatchRecord) -> bool:
    """Return True if a plan covers a record; a VAE is not planned."""
    return not any(isinstance(block, PatchedCoder) for block in record.blocks)


def apply(plan: Plan, records: Sequence[PatchRecord]) -> None:
    """Let the blocks of a model's records run by a plan, and their guards trust it.

    Raises:
        PlanError: The plan is of another model.
    """
    covered = [record for record in records if is_planned(record)]
    paths = [record.path for record in covered]
    if not covered:
        raise PlanError("plan", expected="a transformer", got="a VAE alone", remedy=_REMEDY)
    for record in covered:
        record.plan, record.planned = plan, plan.of(record, paths)
        blocks = {_name(block.path, record): block for block in record.blocks}
        for name, planned in record.planned.blocks.items():
            blocks[name].raise_level(planned.level, "the plan")
        if record.guard is not None:
            measured = {
                blocks[name].index: planned.shares
                for name, planned in record.planned.blocks.items()
                if any(planned.shares) or plan.config.fidelity is None
            }
            record.guard.trust(measured, record.planned.way)


def unplanned(record: PatchRecord) -> str:
    """Return which blocks no longer run as their plan says, or ""."""
    planned = {} if record.planned is None else record.planned.blocks
    raised = [
        block.path
        for block in record.blocks
        if (one := planned.get(_name(block.path, record))) and block.level != one.level
    ]
    return ", ".join(map(merged_path, grouped(raised, without_number)))


def plan_note(record: PatchRecord) -> str:
    """Say in the report that a plan decides, or that it no longer holds; "" without a plan."""
    if names := unplanned(record):
        return f"the plan does not hold: the guard found more error in {names}"
    if record.planned is None:
        return ""
    error = record.planned.error
    return "blocks run by a plan" + (f", predicted error {error:.3g}" if error else "")


def plan_of(records: Sequence[PatchRecord]) -> Plan | None:
    """Return how the blocks of patched networks run now; None before all are decided.

    Raises:
        PlanError: The networks of one pipeline were patched one by one.
    """
    networks = {}
    covered = [record for record in records if is_planned(record)]
    if len({record.path for record in covered}) < len(covered):
        raise PlanError(
            "report.plan",
            expected="networks that were patched together",
            got=f"{len(covered)} that were patched one by one",
            remedy="Patch the pipeline, or take the plan of each network's own report",
        )
    holds = [
        not unplanned(record) and (record.guard is None or record.guard.holds())
        for record in covered
    ]
    given = covered[0].plan if covered else None
    if given and all(holds) and all(record.plan is given for record in covered):
        return given
    for record, held in zip(covered, holds, strict=True):
        if record.planned is not None and held:
            networks[record.path] = record.planned
            continue
        shares, _, way = ({}, None, ()) if record.guard is None else record.guard.decided()
        blocks, device = {}, next(record.model.parameters()).device
        for index, block in enumerate(record.blocks):
            # A block that ran as its author wrote it has no decision to wait for.
            if index not in shares and not isinstance(block.last, str):
                return None
            share, time = shares.get(index, Shares(0.0, 0.0)), _time_of(block, device)
            blocks[_name(block.path, record)] = PlannedBlock(block.level, share, time)
        lengths = [block.last[0] for block in record.blocks if isinstance(block.last, tuple)]
        networks[record.path] = NetworkPlan(
            **_size_of(record) | {"blocks": blocks, "tokens": max(lengths, default=0), "way": way}
        )
    return Plan(networks, covered[0].config, _made_with(covered[0])) if covered else None


def _time_of(block: PatchedBlock, device: torch.device) -> float:
    """Return a block's predicted milliseconds, or 0 for a device that was not measured."""
    rates, measured = rates_of(device)
    if not measured or not isinstance(block.last, tuple):
        return 0.0
    spec = ops.resolved(block.asked, device, *block.last)
    return milliseconds(block, block.level, spec.attention, spec.pv, rates)


def _name(path: str, record: PatchRecord) -> str:
    return path.removeprefix(record.path).removeprefix(".")


def _size_of(record: PatchRecord) -> dict[str, Any]:
    """Return what a plan has to share with a network."""
    # In which it computes: weights may be stored in fewer bits.
    counts = Counter[torch.dtype]()
    for module in record.model.modules():
        for weight in module.parameters(recurse=False):
            dtype = module.dtype if isinstance(module, Int8Linear) else weight.dtype
            counts[dtype] += weight.numel() * (dtype.is_floating_point and dtype.itemsize > 1)
    first = record.blocks[0]
    return {
        "network": original_class(record.model).__name__,
        "dtype": str(counts.most_common(1)[0][0]).removeprefix("torch."),
        "heads": first.asked.heads,
        "head_dim": first.head_dim,
        "blocks": sorted(_name(block.path, record) for block in record.blocks),
    }


def _made_with(record: PatchRecord) -> dict[str, str]:
    from turbo_rcm_patch import __version__

    device = next(record.model.parameters()).device
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    releases = {"turbo_rcm_patch": __version__, "torch": torch.__version__}
    return {"device": gpu} | releases | {"triton": version_of("triton") or "none"}
