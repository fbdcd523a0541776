"""Patch a model, completely or not at all, and restore it exactly."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Unpack

import torch
from torch import nn

from turbo_rcm_patch import ops
from turbo_rcm_patch.config import PatchConfig, PatchOptions, chosen_config
from turbo_rcm_patch.errors import (
    AlreadyPatchedError,
    ConfigError,
    DeviceError,
    FamilyError,
    MissingPackageError,
    NothingToPatchError,
    NotPatchedError,
    WrappedError,
)
from turbo_rcm_patch.patching.block import BlockForward
from turbo_rcm_patch.patching.calibration import (
    fingerprint,
    read_calibration,
    write_calibration,
)
from turbo_rcm_patch.patching.find import (
    Target,
    execution_device,
    find_targets,
    parts_of,
    plan_all,
)
from turbo_rcm_patch.patching.graphs import Graphs
from turbo_rcm_patch.patching.guard import Guard, PipelineSteps, StepContext
from turbo_rcm_patch.patching.int8_only import drop_originals, originals_of, refuse_offloaded
from turbo_rcm_patch.patching.parallel import (
    EnableParallelism,
    check_parallel,
    follow,
    leave,
    split_words,
)
from turbo_rcm_patch.patching.record import Entry, PatchRecord, innermost, record_of
from turbo_rcm_patch.patching.report import GuardLog, PatchReport
from turbo_rcm_patch.patching.sla import (
    Recovered,
    attached_proj_l,
    recover_proj_l,
    recovered_proj_l,
)
from turbo_rcm_patch.patching.state import Installation, ModelPlan
from turbo_rcm_patch.skip import SkipPair

_log = logging.getLogger(__name__)

#: Two threads may patch one model, or put it back, at once: the second finds what the first left.
_LOCK: Final = threading.RLock()


def patch_model(
    model: object, config: PatchConfig | None = None, **options: Unpack[PatchOptions]
) -> PatchReport:
    """Patch a model so that its skip pairs run in fused kernels.

    Only instance attributes change. Everything is checked before the first one changes, and
    `unpatch_model` restores them exactly. If a stock class has loaded a converted folder and so
    dropped SLA's `proj_l`, these are attached from that folder until `unpatch_model`.

    Args:
        model: A module of a known class, a module that contains one, or a diffusers pipeline
            (both experts of Wan 2.2 are patched, or neither).
        config: The options; by default int8 attention with the guard on.
        **options: Fields of `PatchConfig`, e.g. `attention="exact"`. They replace the same fields
            of `config`.

    Returns:
        The report: every pair, how it runs, and why any was left alone. Print it. It stays up to
        date, and `report_of(model)` returns it again.

    Raises:
        ConfigError: An option does not exist or has an invalid value.
        PatchError: The model cannot be patched and is unchanged; the message says why.
        OpError: The model's dtype, head_dim or device is not supported.
        CheckpointError: The model's configuration says that it has SLA, but its `proj_l` cannot be
            found.
    """
    config = chosen_config(config, options)
    with _LOCK:
        return _patch(model, config)


def _patch(model: object, config: PatchConfig) -> PatchReport:
    targets = find_targets(model)
    for target in targets:
        if record_of(target.module) is not None:
            raise AlreadyPatchedError(
                target.path or "model",
                expected="a model that is not patched",
                got="a patched model",
                remedy="Call unpatch_model first to patch it with another configuration",
            )
    for target in targets:
        _check_device(config, execution_device(target.module))
    recovered = _recover(targets)
    try:
        return _install(model, config, targets, recovered)
    except BaseException:
        for one in recovered:
            one.undo()
        raise


def _recover(targets: list[Target]) -> list[Recovered]:
    """Attach what stock classes dropped, in all targets or in none."""
    done: list[Recovered] = []
    try:
        for target in targets:
            done.append(recover_proj_l(target.module, target.path))
    except BaseException:
        for one in done:
            one.undo()
        raise
    return done


def _install(
    model: object, config: PatchConfig, targets: list[Target], recovered: list[Recovered]
) -> PatchReport:
    planned = plan_all(model, config)
    if not any(pair.fused for _, plan in planned for pair in plan.pairs):
        reasons = {pair.reason for _, plan in planned for pair in plan.pairs if pair.reason}
        raise NothingToPatchError(
            "model",
            expected="at least one pair that can run fused",
            got=f"{sum(len(plan.states) for _, plan in planned)} pairs, none fusible",
            remedy="; ".join(sorted(reasons)) or "Widen PatchConfig.kinds",
        )
    _refuse_shared([plan for _, plan in planned])
    for _, plan in planned:
        check_parallel(plan.model, config)
    calibration = None
    if config.calibration is not None:
        calibration = read_calibration(Path(config.calibration), [plan for _, plan in planned])
    dropped = originals_of([plan for _, plan in planned])
    count = 0
    if config.linear == "int8-only":
        refuse_offloaded([target.module for target in targets])
    if dropped:
        for target, plan in planned:  # What cannot be installed is found before weights go.
            _record(model, target, plan, GuardLog())
        modules = [target.module for target in targets]
        weights = {plan.path: fingerprint(plan.model) for _, plan in planned}
        planned.clear()  # Which holds the originals.
        count = drop_originals(modules, dropped, config.impl)
        planned = plan_all(model, config)
        for _, plan in planned:
            plan.weights = weights[plan.path]
    if calibration is not None:
        calibration.apply([plan for _, plan in planned])
    log = GuardLog()
    records = [_record(model, target, plan, log) for target, plan in planned]
    records[0].dropped = count
    for record, one in zip(records, recovered, strict=True):
        record.recovered = one
    try:
        for record in records:
            record.install()
        for record in records:
            follow(record.plan.model, "patched")
        return _report(model, records)
    except BaseException:
        _undo_all([r for r in reversed(records) if record_of(r.plan.model) is r])
        raise


def is_patched(model: object) -> bool:
    """Whether a model, or any network in a pipeline, is patched.

    Raises:
        NotAModelError: `model` is neither a torch module nor an object with one as `transformer`.
    """
    return any(record_of(module) is not None for module in _modules(model))


def report_of(model: object) -> PatchReport:
    """Return the report of a patched model or pipeline, as `patch_model` did.

    Raises:
        NotPatchedError: The model is not patched.
    """
    return _report(model, _records(model, "report_of"))


def _modules(model: object) -> Iterator[nn.Module]:
    """Every module in a model or a pipeline, known or not."""
    for part in parts_of(model).values():
        yield from part.modules()


def unpatch_model(model: object) -> None:
    """Restore a patched model or pipeline exactly as it was.

    Weights that were dropped (`linear="int8-only"`) do not come back, which a warning in the log
    says: such Linears go on with the product of int8 and scale.

    Raises:
        NotPatchedError: The model is not patched.
        WrappedError: Other code wrapped a patched function; nothing was changed.
    """
    with _LOCK:
        records = _records(model, "unpatch_model")
        _undo_all(records)
    _say_dropped(records)


def refresh(model: object) -> None:
    """Drop all int8 copies of a patched model's weights and all CUDA graphs; later forwards make
    them again, and capture what was given up before. Weights that were replaced are let go, too.

    Call it to free the memory, or after weights were written while a forward ran. It is not needed
    after a change between two forwards, because every forward looks for changed weights.

    Raises:
        NotPatchedError: The model is not patched.
    """
    for record in _records(model, "refresh"):
        _forget(record)


def _forget(record: PatchRecord) -> None:
    record.plan.copies.clear()
    for entry in record.entries:
        if isinstance(entry.ours, BlockForward):
            entry.ours.forget_plan()
    if record.graphs is not None:
        record.graphs.clear()


class _Writes:
    """Stands in for a function of a model that moves or writes all of its weights: what belongs to
    other memory is given back.

    Where torch swaps the contents of parameters, everything is forgotten before, because it
    refuses parameters with weak references, and copies, plans and graphs have such.

    Args:
        model: The model.
        name: Of the function.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self._model, self._name = model, name

    def __call__(self, *args: Any, **named: Any) -> Any:
        record = record_of(self._model)
        if record is not None and torch.__future__.get_swap_module_params_on_conversion():
            _forget(record)
        result = getattr(type(self._model), self._name)(self._model, *args, **named)
        if record is not None:
            if record.graphs is not None:
                record.graphs.moved()
            record.plan.copies.release_moved()
        return result


def _records(model: object, caller: str) -> list[PatchRecord]:
    """The records in a model or pipeline, at least one."""
    records = map(record_of, _modules(model))
    found = list({id(record): record for record in records if record is not None}.values())
    if not found:
        find_targets(model)  # It says so if there is nothing that could be patched.
        raise NotPatchedError(
            f"{caller}: model",
            expected="a patched model",
            got=f"a {type(model).__name__} that is not patched",
            remedy="Pass the same model or pipeline that was patched",
        )
    return found


def _undo_all(records: list[PatchRecord]) -> None:
    for record in records:
        record.check()
    for record in records:
        record.undo()
        leave(record.plan.model)


def _say_dropped(records: list[PatchRecord]) -> None:
    count = sum(record.dropped for record in records)
    if count:
        _log.warning(
            "The model is unpatched, but %d Linears have int8 weights alone, because it was "
            'patched with linear="int8-only". They multiply them back. Load the model again for '
            "its own weights",
            count,
        )


@contextmanager
def patched(
    model: object, config: PatchConfig | None = None, **options: Unpack[PatchOptions]
) -> Iterator[PatchReport]:
    """Patch a model for the length of a `with` block, and restore it even after an exception."""
    report = patch_model(model, config, **options)
    modules = [target.module for target in find_targets(model)]
    try:
        yield report
    finally:
        # By module, not by searching again: a pipeline may hold other components by now.
        with _LOCK:
            found = [record_of(module) for module in modules]
            records = [record for record in found if record is not None]
            _undo_all(records)
        _say_dropped(records)


@contextmanager
def sla_as_defined(model: object, topk: float) -> Iterator[int]:
    """Let an unpatched model compute SLA by its definition for the length of a `with` block.

    diffusers' classes run dense attention, which weights with a `proj_l` were not trained for.
    Inside the block every attention that holds a `proj_l` computes SLA in plain torch. A model
    without a `proj_l` does not change.

    Args:
        model: Unpatched, as for `patch_model`.
        topk: As `PatchConfig.sla_topk`.

    Yields:
        How many attentions run SLA.
    """
    entries: list[Entry] = []
    modules = [target.module for target in find_targets(model)]
    with recovered_proj_l(*modules):
        if any(_holds_proj_l(module) for module in modules):
            config = PatchConfig(attention="exact", kinds=("self",), guard=False, sla_topk=topk)
            for _, plan in plan_all(model, config):
                for installation in plan.installations:
                    if attached_proj_l(installation.module) is not None:
                        entries.append(_entry(plan, installation, None))
        try:
            for entry in entries:
                entry.install()
            yield len(entries)
        finally:
            for entry in reversed(entries):
                entry.undo()


def _holds_proj_l(model: nn.Module) -> bool:
    return any(attached_proj_l(module) is not None for module in model.modules())


def _check_device(config: PatchConfig, device: torch.device) -> None:
    """Refuse what the device cannot run; a model on the CPU may yet move to a GPU."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if config.impl == "triton" and not (
        device.type == "cuda" or torch.cuda.is_available() or interpreted
    ):
        raise DeviceError(
            'PatchConfig.impl="triton"',
            expected="a CUDA or HIP device",
            got=f"a model on {device} and no GPU",
            remedy='Use impl="auto" or "reference"',
        )
    if ops.quantises(config.attention):
        ops.resolve_pv(config.pv, device)
    elif config.form == "one-launch":
        raise ConfigError(
            'PatchConfig.form="one-launch"',
            expected='attention="int8" or "int4", whose kernel can finish the projection',
            got=f"attention={config.attention!r}",
            remedy='Use form="auto" or "two-launch"',
        )
    if config.attention == "sage":
        _check_sage(device)


def _check_sage(device: torch.device) -> None:
    from importlib.util import find_spec

    if find_spec("sageattention") is None:
        raise MissingPackageError(
            'PatchConfig.attention="sage"',
            expected="the sageattention package",
            got="none installed",
            remedy="pip install sageattention, or use attention='int8'",
        )
    if device.type != "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            'PatchConfig.attention="sage"',
            expected="a CUDA device",
            got=f"a model on {device} and no GPU",
            remedy="Use attention='int8'",
        )


def _record(model: object, target: Target, plan: ModelPlan, log: GuardLog) -> PatchRecord:
    guard = None
    if plan.config.guard:
        pipe = None if isinstance(model, nn.Module) else model
        steps = PipelineSteps(pipe, target.component) if pipe is not None else None
        guard = Guard(plan.config, plan.path, log, steps, plan.model, plan.states)
    record = PatchRecord(plan, log)
    distinct = {(id(one.module), one.name): one for one in reversed(plan.installations)}
    for installation in reversed(distinct.values()):  # An attention may be shared by two blocks.
        record.entries.append(_entry(plan, installation, guard))
    plan.installations.clear()  # They hold the modules, and are done with.
    if guard is not None and hasattr(type(plan.model), "cache_context"):
        slot = innermost(plan.model, "cache_context")
        if slot is not None:
            ours = StepContext(plan.model, guard)
            record.entries.append(Entry(plan.model, "cache_context", ours, slot, slot.get()))
    if hasattr(type(plan.model), "enable_parallelism"):
        slot = innermost(plan.model, "enable_parallelism")
        if slot is not None:
            enable = EnableParallelism(plan.model, plan.config)
            entry = Entry(plan.model, "enable_parallelism", enable, slot, slot.get())
            record.entries.append(entry)
    for name in ("_apply", "load_state_dict"):
        slot = innermost(plan.model, name)
        if slot is not None:
            writes = _Writes(plan.model, name)
            record.entries.append(Entry(plan.model, name, writes, slot, slot.get()))
    if plan.config.cuda_graphs:
        _capture_by_itself(record, guard)
    return record


def _capture_by_itself(record: PatchRecord, guard: Guard | None) -> None:
    """Have the forward of the whole model run as CUDA graphs."""
    plan = record.plan
    model = plan.model
    own = next((e for e in record.entries if e.module is model and e.name == "forward"), None)
    inner = None if own is None else own.ours  # A model that is one attention.
    graphs = Graphs(model, inner, plan.states, plan.copies, guard)
    if own is None:
        slot = innermost(model)
        if slot is None:
            graphs.note("somebody else's function was put in the place of its forward")
        else:
            record.entries.append(Entry(model, "forward", graphs, slot, slot.get()))
    else:
        own.ours = graphs
    record.graphs = graphs


def _entry(plan: ModelPlan, installation: Installation, guard: Guard | None) -> Entry:
    slot = innermost(installation.module, installation.name)
    if slot is None:  # The family leaves such a block as written, so this is a late change.
        raise WrappedError(
            f"{plan.path or 'model'}: {type(installation.module).__name__}.{installation.name}",
            expected="the class's own function, possibly under hooks of diffusers or accelerate",
            got="a function that other code put there",
            remedy="Undo that change, patch, then apply it again",
        )
    ours = installation.make(guard)
    return Entry(installation.module, installation.name, ours, slot, slot.get())


def _refuse_shared(plans: list[ModelPlan]) -> None:
    """Refuse networks that share a block: each would have to put its own function there."""
    owners: dict[int, ModelPlan] = {}
    for plan in plans:
        for installation in plan.installations:
            if owners.setdefault(id(installation.module), plan) is not plan:
                raise FamilyError(
                    f"{plan.path}: {type(installation.module).__name__}",
                    expected="networks that share no block",
                    got=f"one that {owners[id(installation.module)].path} holds too",
                    remedy="Patch one of the networks by itself, or give the other a copy",
                )


def _report(model: object, records: list[PatchRecord]) -> PatchReport:
    config, log = records[0].plan.config, records[0].log
    # A report that is kept must not keep a model's memory.
    held = [
        (weakref.ref(record.plan.model), record.plan.states, record.plan.boundary)
        for record in records
    ]
    places = [record.plan.path for record in records]
    came_with = [record.plan.weights for record in records]
    last_device = execution_device(records[0].plan.model)

    def pairs() -> list[SkipPair]:
        result = []
        for reference, states, boundary in held:
            module = reference()
            record = record_of(module) if module is not None else None
            if record is not None and record.plan.states is states:
                result += record.pairs()
            else:
                result += [state.pair for state in states] + boundary
        return result

    def ran() -> list[str]:
        return [state.ran for _, states, _ in held for state in states]

    def device() -> tuple[str, str, str]:
        module = held[0][0]()
        where = execution_device(module) if module is not None else last_device
        attention = ops.quantises(config.attention)
        pv = ops.describe_pv(config.pv, where) if attention else "as the backend"
        return str(where), ops.resolve_impl(config.impl, where), pv

    def graphs() -> list[str]:
        found = [(reference(), states) for reference, states, _ in held]
        of_models = [(m, record_of(m), states) for m, states in found if m is not None]
        return [
            f"{record.plan.path}: {record.graphs}".removeprefix(": ")
            for _, record, states in of_models
            if record is not None and record.plan.states is states and record.graphs is not None
        ]

    def parallel() -> list[str]:
        models = [(reference(), path) for (reference, *_), path in zip(held, places, strict=True)]
        lines = [
            (path, split_words(m, config, device()[2])) for m, path in models if m is not None
        ]
        return [f"{path}: {line}".removeprefix(": ") for path, line in lines if line]

    def exact() -> dict[str, tuple[int, ...]]:
        chosen = [state for _, states, _ in held for state in states]
        return {s.pair.path: s.heads_in_16_bits for s in chosen if s.heads_in_16_bits}

    def save(path: Path) -> None:
        known = []
        for place, weights, (reference, states, _) in zip(places, came_with, held, strict=True):
            module = reference()
            if module is None:
                raise NotPatchedError(
                    f"save_calibration: {place or 'the model'}",
                    expected="a model that is still in memory",
                    got="one that is gone",
                    remedy="Save the calibration before the last reference to the model goes",
                )
            known.append((place, module, states, weights))
        about = {"config": repr(config), "predicted fidelity": log.fidelity}
        write_calibration(path, known, about)

    return PatchReport(
        type(model).__name__, config, log, pairs, ran, device, graphs, parallel, exact, save
    )
