"""Random orders of what a user does with a model, two threads, and exceptions at every step.

A twin goes through the same operations unpatched. After each of them both give the same output,
and once the patch is gone nothing of it is left. `ORDERS=300 pytest
tests/patching/test_orders.py` is a longer run; a failure names its seed and the operations.
"""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import random
import threading
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import remove_hook_from_module
from diffusers import FirstBlockCacheConfig
from peft import LoraConfig

from tests.patching.wan import CASES, Case, dicts, relative, run, wan
from turbo_rcm_patch import (
    PatchConfig,
    is_patched,
    patch_model,
    refresh,
    report_of,
    unpatch_model,
)
from turbo_rcm_patch.errors import AlreadyPatchedError, NotPatchedError
from turbo_rcm_patch.patching import patch as patch_file
from turbo_rcm_patch.patching import record as record_file

SEEDS = range(int(os.environ.get("ORDERS", "12")))
STEPS = 10
CONFIGS = [
    PatchConfig(attention="exact", guard=False),
    PatchConfig(attention="exact"),
    PatchConfig(attention="exact", linear="int8", guard=False),
    PatchConfig(attention="exact", linear="int8"),
    PatchConfig(guard=False),
]


class Pair:
    """A model that may be patched, and its twin that never is."""

    def __init__(self, case: Case, chance: random.Random) -> None:
        self.case, self.chance = case, chance
        self.ours, self.twin = case.model(), case.model()
        self.config: PatchConfig | None = None
        self.lora = self.fused = self.offloaded = self.cached = False
        self.dtype = torch.float32

    @property
    def both(self) -> tuple[Any, Any]:
        return self.ours, self.twin

    def operations(self) -> list[Callable[[], None]]:
        """What may follow now."""
        free = not (self.offloaded or self.cached)
        allowed = [self.forward, self.forward]
        allowed += [self.unpatch, self.refreshed] if self.config else [self.patch, self.patch]
        if free:
            allowed += [self.copied, self.pickled, self.write, self.negate, self.move]
            allowed += [self.cast] if not self.lora else []
            allowed += [self.offload, self.cache]
            allowed += [self.add_lora] if not self.lora else []
        if self.lora and free:
            allowed += [self.unfuse] if self.fused else [self.fuse]
            allowed += [self.unload]
        allowed += [self.onload] if self.offloaded else []
        allowed += [self.uncache] if self.cached else []
        return allowed

    # --- the patch -------------------------------------------------------------------------------

    def patch(self) -> None:
        self.config = self.chance.choice(CONFIGS)
        patch_model(self.ours, self.config)

    def unpatch(self) -> None:
        unpatch_model(self.ours)
        self.config = None

    def refreshed(self) -> None:
        refresh(self.ours)

    # --- what changes weights --------------------------------------------------------------------

    def add_lora(self) -> None:
        seed = self.chance.randrange(100)
        targets = self.chance.choice([["to_q", "to_out.0"], ["net.2", "to_k", "to_v"]])
        for model in self.both:
            torch.manual_seed(seed)
            model.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
            model.eval().requires_grad_(False)
        self.lora = True

    def fuse(self) -> None:
        for model in self.both:
            model.fuse_lora()
        self.fused = True

    def unfuse(self) -> None:
        for model in self.both:
            model.unfuse_lora()
        self.fused = False

    def unload(self) -> None:
        for model in self.both:
            model.unload_lora()
        self.lora = self.fused = False

    def write(self) -> None:
        """Past the version counter, as averages and fused optimisers do."""
        seed = self.chance.randrange(100)
        for model in self.both:
            torch.manual_seed(seed)
            for parameter in model.blocks[1].parameters():
                parameter.data.mul_(1 + 0.1 * torch.randn(()))

    def negate(self) -> None:
        for model in self.both:
            with torch.no_grad():
                for parameter in model.blocks[0].ffn.parameters():
                    parameter.neg_()

    # --- where the model is ----------------------------------------------------------------------

    def copied(self) -> None:
        old, self.ours = self.ours, copy.deepcopy(self.ours)
        with torch.no_grad():
            for parameter in old.parameters():
                parameter.zero_()

    def pickled(self) -> None:
        self.ours = pickle.loads(pickle.dumps(self.ours))

    def move(self) -> None:
        for parameter in self.ours.parameters():
            parameter.data = parameter.data.clone()

    def cast(self) -> None:
        self.dtype = torch.bfloat16 if self.dtype == torch.float32 else torch.float32
        for model in self.both:
            model.to(self.dtype)

    def offload(self) -> None:
        for model in self.both:
            accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        self.offloaded = True

    def onload(self) -> None:
        for model in self.both:
            remove_hook_from_module(model, recurse=True)
        self.offloaded = False

    def cache(self) -> None:
        for model in self.both:
            model.enable_cache(FirstBlockCacheConfig(threshold=1e-9))
        self.cached = True

    def uncache(self) -> None:
        for model in self.both:
            model.disable_cache()
        self.cached = False

    # --- what is looked at -----------------------------------------------------------------------

    def forward(self) -> None:
        pass

    def check(self) -> None:
        outputs = []
        for model in self.both:
            if self.cached:
                model._reset_stateful_cache()  # It holds what was computed before.
            with model.cache_context("cond"):
                inputs = self.case.inputs(batch=1, dtype=self.dtype)
                outputs.append(run(model, **inputs).float())
        found = relative(*outputs)
        narrow = self.dtype != torch.float32
        if self.config is None:
            assert found == 0.0
        elif self.config.attention == "exact" and self.config.linear == "as-is":
            assert found < (0.03 if narrow else 1e-5)
        else:
            assert found < 0.06
        assert is_patched(self.ours) == (self.config is not None)
        if self.config is not None:
            assert len(str(report_of(self.ours))) > 100


@pytest.mark.filterwarnings("ignore")  # peft's, about adapters that are fused.
@pytest.mark.parametrize("seed", SEEDS)
def test_random_orders(seed: int) -> None:
    chance = random.Random(seed)
    pair = Pair(chance.choice([CASES[0], CASES[1], CASES[4]]), chance)
    done: list[str] = []
    for _ in range(STEPS):
        operation = chance.choice(pair.operations())
        done.append(operation.__name__)
        try:
            operation()
            pair.check()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {' '.join(done)}") from error
    if pair.config is not None:
        pair.unpatch()
        pair.check()
    names = {key for name, held in dicts(pair.ours).items() for key in held}
    assert "_turbo_rcm_patch" not in names


# --- threads -------------------------------------------------------------------------------------


def at_once(count: int, call: Callable[[], object]) -> list[object]:
    """What each of several threads got, or the error it met."""
    results: list[object] = []
    ready = threading.Barrier(count)

    def body() -> None:
        ready.wait()
        try:
            results.append(call())
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=body) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_threads_that_patch_one_model() -> None:
    """One does; the others are told. So it is on the way back."""
    model = wan(num_layers=3)
    expected, before = run(model), dicts(model)
    for _ in range(5):
        found = at_once(4, lambda: patch_model(model))
        assert sum(isinstance(one, AlreadyPatchedError) for one in found) == 3
        assert report_of(model).fused == 9
        found = at_once(4, lambda: unpatch_model(model))
        assert sum(isinstance(one, NotPatchedError) for one in found) == 3
        assert dicts(model) == before
    assert torch.equal(run(model), expected)


def test_threads_that_run_one_model_with_int8_copies() -> None:
    model = wan()
    patch_model(model, attention="exact", linear="int8", guard=False)
    expected = run(model)
    for _ in range(5):
        refresh(model)
        assert all(
            isinstance(one, torch.Tensor) and torch.equal(one, expected)
            for one in at_once(4, lambda: run(model))
        )


# --- exceptions ----------------------------------------------------------------------------------


class Injected(BaseException):
    """Ctrl-C, out of memory, anything."""


def breaking(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int, *, after: bool
) -> list[int]:
    """The call number `at` of a function raises, before or after its work is done."""
    calls, real = [0], getattr(owner, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == at and not after:
            raise Injected
        result = real(*args, **kwargs)
        if calls[0] == at:
            raise Injected
        return result

    monkeypatch.setattr(owner, name, broken)
    return calls


PATCHING = [
    (patch_file, "find_targets"),
    (patch_file, "plan_all"),
    (patch_file, "_check_device"),
    (patch_file, "_record"),
    (patch_file, "_entry"),
    (patch_file, "_report"),
    (record_file.Entry, "install"),
    (record_file.Slot, "put"),
    (record_file.PatchRecord, "install"),
]
UNDOING = [
    (patch_file, "_undo_all"),
    (record_file.PatchRecord, "check"),
    (record_file.PatchRecord, "undo"),
    (record_file.Entry, "undo"),
    (record_file.Slot, "put"),
    (record_file.PatchRecord, "_forget"),
]


class Pipe:
    """Two experts, so that the second can fail after the first."""

    def __init__(self) -> None:
        self.transformer, self.transformer_2 = wan(), wan()

    def dicts(self) -> Any:
        return dicts(self.transformer), dicts(self.transformer_2)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name"), PATCHING, ids=[name for _, name in PATCHING])
def test_an_exception_while_patching_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: bool
) -> None:
    pipe = Pipe()
    before = pipe.dicts()
    for at in itertools.count(1):
        with monkeypatch.context() as patched:
            breaking(patched, owner, name, at, after=after)
            try:
                patch_model(pipe)
            except Injected:
                pass
            else:
                break  # There was no such call any more.
        assert pipe.dicts() == before, f"call {at}"
        assert not is_patched(pipe)
    assert at > 1
    unpatch_model(pipe)
    assert pipe.dicts() == before


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name"), UNDOING, ids=[name for _, name in UNDOING])
def test_an_exception_while_undoing_can_be_followed_by_another_try(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: bool
) -> None:
    pipe = Pipe()
    before, expected = pipe.dicts(), run(pipe.transformer)
    for at in itertools.count(1):
        patch_model(pipe)
        with monkeypatch.context() as patched:
            breaking(patched, owner, name, at, after=after)
            try:
                unpatch_model(pipe)
            except Injected:
                pass
            else:
                break
        if is_patched(pipe):
            assert relative(run(pipe.transformer), expected) < 0.02
            unpatch_model(pipe)
        assert pipe.dicts() == before, f"call {at}"
    assert at > 1
    assert pipe.dicts() == before
