"""Patch a model, completely or not at all, and restore it exactly."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import _GeneratorContextManager
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import nn

from turbo_rcm_patch import ops
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import (
    AlreadyPatchedError,
    DeviceError,
    FamilyError,
    NothingToPatchError,
    NotPatchedError,
    PlanError,
    WrappedError,
)
from turbo_rcm_patch.ops.attention.api import load_kernels
from turbo_rcm_patch.ops.attention.sage import refuse_unusable_sage
from turbo_rcm_patch.patching.block import Forwards, PatchedBlock
from turbo_rcm_patch.patching.find import (
    VAE,
    KnownModule,
    execution_device,
    find_known,
    parts_of,
)
from turbo_rcm_patch.patching.guard import Guard
from turbo_rcm_patch.patching.guard_log import GuardLog
from turbo_rcm_patch.patching.int8_linears import (
    WRITERS,
    DropsCopies,
    Int8Copies,
    Int8Forward,
    why_not_int8,
)
from turbo_rcm_patch.patching.int8_weights import drop_originals
from turbo_rcm_patch.patching.network import DecidingForward
from turbo_rcm_patch.patching.plain import judge_classes
from turbo_rcm_patch.patching.plan import (
    Plan,
    apply,
    config_and_plan,
    is_planned,
    plan_note,
    plan_of,
)
from turbo_rcm_patch.patching.record import (
    PatchRecord,
    holds_patch,
    record_of,
    undo_replacements,
)
from turbo_rcm_patch.patching.report import Live, PairTable, PatchReport
from turbo_rcm_patch.patching.sla import attached_proj_l, refuse_lost_proj_l
from turbo_rcm_patch.patching.ulysses import PARALLEL, all_reduce_max, check_parallel
from turbo_rcm_patch.skip import SkipPair

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")

#: Serialises threads that patch or unpatch one model at once.
_LOCK = threading.RLock()


def patch_model(
    model: object,
    config: PatchConfig | None = None,
    *,
    plan: Plan | str | Path | None = None,
    **options: object,
) -> PatchReport:
    """Patch a model, a VAE or a pipeline so that its skip pairs run in fused kernels.

    Only instance attributes change. Everything is checked before the first one changes, and
    `unpatch_model` restores them exactly.

    Args:
        model: A module of a known class, a module that contains one, or a diffusers pipeline: its
            networks (both experts of Wan 2.2) and its VAE are patched, or none. A VAE of a class
            that is not known is left alone, and the report says so.
        config: The options; by default those of the plan, or `PatchConfig()`: attention "auto",
            with the guard on.
        plan: How each block runs (`report.plan`), or its file. Nothing is measured on a first
            forward then, and every process gives the same bits. By default the guard decides.
        **options: Fields of `PatchConfig` (see there), which replace those of `config`: attention
            ("auto", "int8", "exact", "sage", "int4"), linear ("as-is", "int8", "int8-only"), pv,
            conv, vae, smooth_k, impl, form, guard, fidelity, sla_topk.

    Returns:
        The report, to be printed: every pair, how it runs, and why it runs as its author wrote it
        where it does. It stays up to date, and `report_of(model)` returns it again.

    Raises:
        ConfigError: An option does not exist or has an invalid value.
        PlanError: The plan is damaged, or was made for another model or other options.
        PatchError: The model cannot be patched and is unchanged; the message says why.
        OpError: The model's dtype, head_dim or device is not supported.
        CheckpointError: The model's configuration says that it has SLA, but its `proj_l` are not
            attached.
    """
    return _patch(model, *config_and_plan(config, plan, options), [])


def _patch(
    model: object, config: PatchConfig, plan: Plan | None, records: list[PatchRecord]
) -> PatchReport:
    """Do what `patch_model` does, and fill an empty list with the records before any change."""
    with _LOCK:
        known = find_known(model)
        if not config.vae and not isinstance(model, nn.Module):
            known = [part for part in known if part.path != VAE]
        patched_before = [part for part in known if _stays_patched(model, part, config)]
        known = [part for part in known if part not in patched_before]
        for part in known or patched_before:
            _refuse_patched(part, known, "patch_model")
            _check_device(config, execution_device(part.module))
            refuse_lost_proj_l(part.module, part.path)
            check_parallel(part.module)
        records += _records_for(model, known, config, plan)
        _refuse_shared(records)
        if config.linear == "int8-only":
            count = _drop_originals(records)
            records[:] = _records_for(model, known, config, plan)  # with the new Linears
            records[0].dropped = count
        records[0].keeps_vae = bool(patched_before)
        try:
            for record in records:
                record.install()
            return _report(model, _records(model))
        except BaseException:
            for record in records:
                record.undo()
            raise


def unpatch_model(model: object) -> None:
    """Restore a patched model or pipeline exactly as it was.

    A VAE that was patched before its pipeline, as part of another one for instance, stays patched.

    Weights that were dropped (`linear="int8-only"`) do not come back: these Linears go on with the
    product of int8 and scale, and a warning in the log says so. Context parallelism stays enabled.

    Raises:
        NotPatchedError: The model is not patched.
        WrappedError: Other code wrapped a patched function; nothing was changed.
    """
    with _LOCK:
        # Patched blocks that were copied into this model are not in its record.
        if not is_patched(model):
            _refuse_unpatched(model, "unpatch_model")
        records, parts = _records(model), parts_of(model)
        if any(record.keeps_vae for record in records):
            vae = parts.pop(VAE)
            records = [record for record in records if record.model is not vae]
        _undo_all(records)
        for part in parts.values():
            undo_replacements(part)


class _Undoing(_GeneratorContextManager[_T]):
    """A context manager that ends also if Ctrl-C arrives between its beginning and its block."""

    def __enter__(self) -> _T:
        try:
            return next(self.gen)
        except BaseException:
            self.gen.close()
            raise


def _undoing(function: Callable[_P, Generator[_T]]) -> Callable[_P, _Undoing[_T]]:
    @wraps(function)
    def make(*args: _P.args, **named: _P.kwargs) -> _Undoing[_T]:
        return _Undoing(function, args, named)

    return make


@_undoing
def patched(
    model: object,
    config: PatchConfig | None = None,
    *,
    plan: Plan | str | Path | None = None,
    **options: object,
) -> Generator[PatchReport, None, None]:
    """Patch a model for the length of a `with` block, and restore it even after an exception."""
    records: list[PatchRecord] = []  # The pipeline may hold other components later.
    failed = True
    try:
        yield _patch(model, *config_and_plan(config, plan, options), records)
        failed = False
    finally:
        try:
            with _LOCK:
                _undo_all([record for record in records if record_of(record.model) is record])
        except WrappedError as error:
            if not failed:
                raise
            _log.warning("The model stays patched: %s", error)  # The block's error goes first.


def refresh(model: object) -> None:
    """Drop all int8 copies of a patched model's weights; later forwards make them again.

    Call it to free memory, or after a few elements of a weight were written through `.data`, which
    cannot be noticed.

    Raises:
        NotPatchedError: The model is not patched.
    """
    for record in _records(model, "refresh"):
        for block in record.blocks:
            if block.copies is not None:
                block.copies.forget()


def keep_int8_only(model: object, *, device: torch.device | str | None = None) -> int:
    """Replace the weights of a model's Linears by int8 permanently, and free the originals.

    It replaces the Linears that `linear="int8-only"` runs in int8, and no others. Each is replaced
    by one that holds only int8 and scales, and multiplies them back when it is called. So the
    model runs without a patch, and patching, the guard and a verdict compare with that product.
    Linears are replaced one by one, so only one original and its int8 weight exist at a time.

    Args:
        model: As for `patch_model`; not patched, and not yet offloaded by hooks.
        device: Where weights are quantised; by default where they are.

    Returns:
        The number of Linears that were replaced.

    Raises:
        PatchError: As `patch_model`, or the model is patched, or a hook offloads its weights. The
            model is unchanged.
        torch.OutOfMemoryError: Memory ran out half way; the Linears that were replaced stay
            replaced, and the model runs.
    """
    known = find_known(model)
    for part in known:
        _refuse_patched(part, [], "keep_int8_only")
    records = _records_for(model, known, PatchConfig(linear="int8-only", guard=False))
    return _drop_originals(records, device)


def is_patched(model: object) -> bool:
    """Return True if a model, or any network in a pipeline, is patched.

    Raises:
        NotAModelError: `model` is neither a torch module nor a pipeline that holds one.
    """
    return any(map(holds_patch, parts_of(model).values()))


def report_of(model: object) -> PatchReport:
    """Return the report of a patched model or pipeline, the same that `patch_model` returned.

    Raises:
        NotPatchedError: The model is not patched.
    """
    return _report(model, _records(model, "report_of"))


def find_pairs(model: object) -> PairTable:
    """List every skip pair of a model or pipeline, and how it runs or would run by default.

    Args:
        model: A module of a known class, a module that contains one, or a diffusers pipeline.

    Raises:
        PatchError: The model cannot be patched; the message says why and what to do.
    """
    pairs: list[SkipPair] = []
    for part in find_known(model):
        record = record_of(part.module)
        pairs += (record or _record(model, part, PatchConfig(guard=False), GuardLog())).pairs()
    return PairTable(pairs)


# --- before anything changes ---------------------------------------------------------------------


def _records_for(
    model: object, known: list[KnownModule], config: PatchConfig, plan: Plan | None = None
) -> list[PatchRecord]:
    """Return a record for each module, ready to be installed; the model does not change yet."""
    log = GuardLog()
    records = [_record(model, part, config, log) for part in known]
    if plan is not None:
        apply(plan, records)
    pairs = [pair for record in records for pair in record.pairs()]
    fused = any(pair.fused for pair in pairs)
    reasons = sorted({pair.reason for pair in pairs} - {""})
    if not fused and any(record.entries for record in records):
        _log.warning("No pair runs fused at present: %s", "; ".join(reasons))
    elif not fused:
        raise NothingToPatchError(
            "model",
            expected="at least one pair that can run fused",
            got=f"{len(pairs)} pairs, none fusible",
            remedy="; ".join([*reasons, "Patch the model before such a change, or undo it"]),
        )
    return records


def _record(model: object, part: KnownModule, config: PatchConfig, log: GuardLog) -> PatchRecord:
    """Return the record of one module, ready to be installed."""
    module = part.module
    judge_classes(module)
    served = part.family.blocks_of(module, part.path, config)
    blocks = [block for block in served if isinstance(block, PatchedBlock)]
    others = [pair for pair in served if isinstance(pair, SkipPair)]
    record = PatchRecord(module, part.path, config, blocks, others)
    if config.guard:
        pipe = None if isinstance(model, nn.Module) else model
        record.guard = Guard(config, log, len(blocks), pipe, all_reduce_max)
    last = getattr(module, "proj_out", getattr(getattr(module, "head", None), "head", None))
    int8: dict[int, Int8Forward] = {}
    forwards = Forwards()
    for index, block in enumerate(blocks):
        block.index, block.guard, block.proj_out = index, record.guard, last
        block.model_forwards = forwards
        if not record.replace(*block.place(), block.__call__):
            block.left = "the block's forward was replaced by other code"
            continue
        for inner, forward in block.other_forwards():
            record.replace(inner, "forward", forward.__call__)
        if config.linear != "as-is":
            _add_int8(record, block, int8)
    alone = any(block.block is module for block in blocks)
    if record.guard is not None and record.entries and is_planned(record) and not alone:
        record.replace(module, "forward", DecidingForward(module, blocks, record.guard).method())
    copies = Int8Copies(list(int8.values()))
    for block in blocks if int8 else ():
        block.copies = copies
    for name in WRITERS if int8 else ():
        if hasattr(type(module), name):
            record.replace(module, name, DropsCopies(module, name, copies).__call__)
    return record


def _add_int8(record: PatchRecord, block: PatchedBlock, forwards: dict[int, Int8Forward]) -> None:
    """Give a block the int8 forwards of its Linears, each made once for a model."""
    for linear in block.linears().values():
        base = getattr(linear, "base_layer", linear)  # inside a LoRA
        if id(base) not in forwards:
            forward = Int8Forward(base, record.config.impl)
            if why_not_int8(base) or not record.replace(base, "forward", forward.run):
                continue
            forwards[id(base)] = forward
        block.int8.append(forwards[id(base)])


def _refuse_patched(part: KnownModule, known: list[KnownModule], caller: str) -> None:
    """Raise if a module is patched; name the other parts of its pipeline, which are not."""
    if holds_patch(part.module):
        rest = [f"pipe.{other.path}" for other in known if not holds_patch(other.module)]
        raise AlreadyPatchedError(
            f"{caller}: {part.path or 'model'}",
            expected="a model that is not patched",
            got="a patched model",
            remedy="Call unpatch_model first to patch it with another configuration"
            + "".join(f". Call {caller}({name}) to patch that part too" for name in rest),
        )


def _refuse_shared(records: list[PatchRecord]) -> None:
    """Refuse networks that share a module, because a module can hold one replacement only."""
    places = [(id(entry.module), entry.name) for record in records for entry in record.entries]
    if len(set(places)) < len(places):
        raise FamilyError(
            " and ".join(record.path for record in records),
            expected="networks and blocks that share no patched module",
            remedy="Patch one of the networks by itself, or give the other a copy",
        )


def _stays_patched(model: object, part: KnownModule, config: PatchConfig) -> bool:
    """Return True for the VAE of a pipeline that is patched already, with the same options.

    Raises:
        AlreadyPatchedError: Its options are others.
    """
    record = record_of(part.module)
    if isinstance(model, nn.Module) or part.path != VAE or record is None:
        return False
    options = "conv", "guard", "impl"
    before, asked = ([getattr(c, name) for name in options] for c in (record.config, config))
    if before != asked:
        raise AlreadyPatchedError(
            "patch_model: vae",
            expected=f"a VAE that is not patched, or with ({', '.join(options)}) = {asked}",
            got=f"a VAE patched with {before}",
            remedy="Pass vae=False to leave it as it is, or call unpatch_model on it first",
        )
    return True


def _check_device(config: PatchConfig, device: Any) -> None:
    """Refuse options that the device cannot run; a model on the CPU may still move to a GPU."""
    gpu = device.type == "cuda" or torch.cuda.is_available()
    if config.impl == "triton" and not gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise DeviceError(
            'PatchConfig.impl="triton"',
            expected="a CUDA or HIP device",
            got=f"a model on {device} and no GPU",
            remedy='Use impl="auto" or "reference"',
        )
    if ops.quantises(config.attention):
        ops.resolve_pv(config.pv, device)
    if config.attention == "sage":
        refuse_unusable_sage(torch.device("cuda") if gpu else device)
    load_kernels(config.impl, device)


def _drop_originals(records: list[PatchRecord], device: torch.device | str | None = None) -> int:
    """Replace the Linears that run in int8 by Linears without originals, and count them."""
    blocks = [block for record in records for block in record.blocks]
    in_int8 = {id(forward.linear): forward.linear for block in blocks for forward in block.int8}
    linears = [linear for linear in in_int8.values() if type(linear) is nn.Linear]
    # A VAE has no Linears that run in int8, and may be offloaded.
    models = [record.model for record in records if any(block.int8 for block in record.blocks)]
    for record in records:  # The records hold the originals.
        record.entries.clear()
    for block in blocks:
        block.int8.clear()
        block.copies = None
    in_int8.clear()
    return drop_originals(models, linears, records[0].config.impl, device)


# --- of a patched model --------------------------------------------------------------------------


def _records(model: object, caller: str = "") -> list[PatchRecord]:
    """Return the records in a model or pipeline; without any, raise an error of the caller."""
    modules = itertools.chain(*(part.modules() for part in parts_of(model).values()))
    held = {id(record): record for module in modules if (record := record_of(module))}
    if caller and not held:
        _refuse_unpatched(model, caller)
    return list(held.values())


def _refuse_unpatched(model: object, caller: str) -> NoReturn:
    find_known(model)  # Raises its own error if nothing in the model could be patched.
    raise NotPatchedError(
        f"{caller}: model",
        expected="a patched model",
        got=f"a {type(model).__name__} that is not patched",
        remedy="Pass the same model or pipeline that was patched",
    )


def _undo_all(records: list[PatchRecord]) -> None:
    for record in records:
        record.check()
    for record in records:
        record.undo()
    count = sum(record.dropped for record in records)
    if count:
        _log.warning(
            "The model is unpatched, but %d Linears have int8 weights alone, because it was "
            'patched with linear="int8-only". Load the model again to get its own weights back',
            count,
        )


def _report(model: object, records: list[PatchRecord]) -> PatchReport:
    config, guard = records[0].config, records[0].guard
    # A weak reference, so that a kept report does not keep the model's memory.
    patched_models = [(weakref.ref(record.model), record.pairs()) for record in records]
    vae = None if isinstance(model, nn.Module) else getattr(model, VAE, None)
    alone = vae is not None and all(record.model is not vae for record in records)
    remarks = [f"the VAE ({type(vae).__name__}) is not patched"] if alone else []

    def models() -> list[nn.Module]:
        return [model for reference, _ in patched_models if (model := reference()) is not None]

    def present() -> list[PatchRecord]:
        return [record for model in models() if (record := record_of(model)) is not None]

    def blocks() -> list[PatchedBlock]:
        return [block for record in present() for block in record.blocks]

    def live() -> Live:
        pairs: list[SkipPair] = []
        for reference, before in patched_models:
            model = reference()
            record = None if model is None else record_of(model)
            pairs += before if record is None else record.pairs()
        ran = {
            block.path: block.describe_last_run()
            for block in blocks()
            if block.last is not None and block.forward == block.model_forwards.count
        }
        notes = [*remarks, *(note for block in blocks() for note in block.notes())]
        notes += [note for record in present() if (note := plan_note(record))]
        parallel = [vars(model)[PARALLEL] for model in models() if PARALLEL in vars(model)]
        notes += [note for network in parallel for note in network.describe()]
        notes = list(dict.fromkeys(notes))
        if not models():
            return Live(PairTable(pairs), ran, "gone", "", "", "", notes)
        device = execution_device(models()[0])
        pv = ops.describe_pv(config.pv, device) if ops.quantises(config.attention) else ""
        impl = ops.resolve_impl(config.impl, device)
        linears = _int8_linears(blocks())
        return Live(PairTable(pairs), ran, str(device), impl, pv, linears, notes)

    def plan() -> Plan | None:
        if not present():
            raise PlanError(
                "report.plan",
                expected="a patched model",
                got="one that is not patched any more",
                remedy="Take it before the model is unpatched",
            )
        return plan_of(present())

    log = guard.log if guard else GuardLog()
    return PatchReport(type(model).__name__, config, log, live, blocks, plan)


def _int8_linears(blocks: list[PatchedBlock]) -> str:
    """Say how many Linears of the blocks run in int8 now, and why others do not."""
    total, running, reasons = 0, 0, []
    for block in blocks:
        names = block.int8_linears()
        for name, linear in block.linears().items():
            total += 1
            running += name in names
            if name not in names:
                why = why_not_int8(getattr(linear, "base_layer", linear))
                wide = not block.level.int8_linears
                reasons.append(why or (wide and "the guard") or "its forward was replaced")
    text = f"{running} of {total} Linears in int8"
    return text + (": " if reasons else "") + ", ".join(dict.fromkeys(reasons))


@_undoing
def sla_as_defined(model: object, topk: float) -> Generator[int, None, None]:
    """Let an unpatched model compute SLA by its definition for the length of a `with` block.

    diffusers' classes run dense attention, for which weights with a `proj_l` were not trained.
    Inside the block every attention that holds a `proj_l` computes SLA in plain torch. A model
    without a `proj_l` does not change.

    Args:
        model: Unpatched, as for `patch_model`.
        topk: As `PatchConfig.sla_topk`.

    Yields:
        The number of attentions that run SLA.
    """
    config = PatchConfig(attention="exact", guard=False, sla_topk=topk)
    entries = []
    for part in find_known(model):
        if not any(attached_proj_l(module) is not None for module in part.module.modules()):
            continue
        record = _record(model, part, config, GuardLog())
        entries += [e for e in record.entries if attached_proj_l(e.module) is not None]
    try:
        for entry in entries:
            entry.install()
        yield len(entries)
    finally:
        for entry in reversed(entries):
            entry.undo()
