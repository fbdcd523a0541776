"""CUDA graphs of a model whose sequence two ranks share: replayed, captured or left out together.

The graphs are a stand-in on a CPU (`fake_graphs`), which repeats exchanges through gloo. The truth
is the same model, split and patched without graphs.
"""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.hooks.context_parallel import ContextParallelGatherHook, ContextParallelSplitHook
from torch.multiprocessing import ProcessExitedException

from tests.patching import sla, turbodiffusion
from tests.patching.fake_graphs import FakeEvent, FakePool
from tests.patching.test_parallel import enable, mesh
from tests.patching.test_parallel_patched import MODELS, Told, forward, run_all, same_everywhere
from tests.patching.wan import dicts, run
from tests.ranks import on_ranks
from tests.versions import GROUPS_HAVE_ITS_TIMEOUT
from turbo_rcm_patch import PatchConfig, patch_model, refresh, report_of, unpatch_model
from turbo_rcm_patch.errors import RankMismatchError
from turbo_rcm_patch.ops.exchange import Answers, counting_bytes, told
from turbo_rcm_patch.patching import copies as copies_file
from turbo_rcm_patch.patching import graphs, replay_timer
from turbo_rcm_patch.patching.graphs import WARM_UPS
from turbo_rcm_patch.patching.parallel import disable_parallelism, groups_of, split_hooks
from turbo_rcm_patch.patching.record import record_of

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed"),
    GROUPS_HAVE_ITS_TIMEOUT,
]

EXACT = PatchConfig(guard=False, attention="exact")
INT8 = PatchConfig(guard=False, attention="int8", linear="int8")


@contextmanager
def on_a_cpu() -> Iterator[None]:
    FakePool.reset()
    FakeEvent.hang = False
    gc.collect()
    for thread in timers():  # of models that are gone
        thread.join(60)
    assert not timers()
    with (
        mock.patch.object(graphs, "GraphPool", FakePool),
        mock.patch.object(copies_file, "is_capturing", lambda device: FakePool.capturing),
    ):
        yield
    FakePool.reset()


def with_graphs(config: PatchConfig) -> PatchConfig:
    return replace(config, cuda_graphs=True)


def made(
    config: PatchConfig = EXACT, name: str = "wan", ring: int = 1, graphs: bool = True
) -> tuple[Any, dict[str, Any]]:
    model, inputs = MODELS[name](torch.float32)
    patch_model(model, with_graphs(config) if graphs else config)
    enable(model, mesh(ring, 2 // ring))
    return model, inputs


def pair(
    config: PatchConfig = EXACT, name: str = "wan", ring: int = 1
) -> tuple[Any, Any, dict[str, Any]]:
    """A model with graphs and one without."""
    one, inputs = made(config, name, ring)
    return one, made(config, name, ring, graphs=False)[0], inputs


def seeded(inputs: dict[str, Any], seed: int) -> dict[str, Any]:
    """Another video and another prompt for every seed, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(x.shape, generator=generator, dtype=x.dtype)
        if name in ("hidden_states", "encoder_hidden_states")
        else x
        for name, x in inputs.items()
    }


def agree(one: Any, other: Any, inputs: dict[str, Any], forwards: int = WARM_UPS + 2) -> None:
    for seed in range(forwards):
        given = seeded(inputs, seed)
        assert torch.equal(run(one, **given), run(other, **given)), (seed, said(one))


def said(model: Any) -> str:
    (line,) = report_of(model).cuda_graphs
    return line


def replays(model: Any) -> int:
    return record_of(model).graphs._replays


def number(model: Any) -> list[int]:
    return [captured.number for captured in record_of(model).graphs._captured.values()]


def everywhere(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def timers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "replay timer" in thread.name]


# --- together ------------------------------------------------------------------------------------


def replay_together(name: str, ring: int, config: PatchConfig, rank: int) -> None:
    """Bit for bit what plain forwards give, asking the others once a forward."""
    one, other, inputs = pair(config, name, ring)
    agree(one, other, inputs)
    assert FakePool.captures == 1 and replays(one) == 2, said(one)
    assert everywhere(number(one))[0] == number(one) != [0]
    assert report_of(one).last_forward == report_of(other).last_forward
    with counting_bytes() as counts:
        cond, uncond = (run(one, **seeded(inputs, seed)) for seed in (7, 8))  # guidance
    with counting_bytes() as plain:
        assert torch.equal(cond, run(other, **seeded(inputs, 7)))
    # The stand-in repeats whole operations, of which those that are given back ask again. The
    # message in front of a replay has the size of a plain forward's header.
    if config.kinds == EXACT.kinds:
        assert counts == {what: 2 * sent for what, sent in plain.items()}
    assert torch.equal(uncond, run(other, **seeded(inputs, 8)))
    assert same_everywhere(cond)
    assert replays(one) == 4


def sparse_linear(rank: int) -> None:
    made_two = []
    for graphs_on in (True, False):
        model = sla.with_sla(sla.T2V.model())
        patch_model(model, with_graphs(sla.INT8) if graphs_on else sla.INT8)
        enable(model, mesh(1, 2))
        made_two.append(model)
    agree(*made_two, sla.inputs_of(sla.T2V, batch=1))
    assert replays(made_two[0]) == 2, said(made_two[0])


def two_resolutions(rank: int) -> None:
    one, other, inputs = pair()
    wide = inputs | {"hidden_states": torch.cat([inputs["hidden_states"]] * 2, -1)}
    for given in (inputs, wide, inputs, wide):
        agree(one, other, given, 2)
    assert FakePool.captures == 2 and replays(one) == 4, said(one)


# --- one rank differs ----------------------------------------------------------------------------


def one_rank_changes(rank: int) -> None:
    """A model that changed on one rank runs plain on both, which then capture again together."""
    one, other, inputs = pair()
    agree(one, other, inputs)
    before = number(one)
    if rank == 1:
        weight = one.blocks[0].ffn.net[2].weight
        one.blocks[0].ffn.net[2].weight = torch.nn.Parameter(weight.detach().clone())
    count = replays(one)
    agree(one, other, inputs, WARM_UPS)
    assert replays(one) == count
    if rank == 0:
        assert "ran plain: it does on rank 1" in said(one) and number(one) == before
    agree(one, other, inputs, 2)
    assert replays(one) == count + 2, said(one)
    assert everywhere(number(one))[0] == number(one) != before
    assert FakePool.captures == 2 and FakePool.dropped == 1


def weights_of_both_change(rank: int) -> None:
    one, other, inputs = pair()
    agree(one, other, inputs)
    with torch.no_grad():
        for model in (one, other):
            model.blocks[0].ffn.net[2].weight.mul_(1.5)  # read where it is
            model.blocks[1].ffn.net[2] = torch.nn.Sequential(model.blocks[1].ffn.net[2])
    agree(one, other, inputs)
    assert FakePool.captures == 2, said(one)


def one_rank_is_warm_later(rank: int) -> None:
    """A rank that counts its plain forwards anew holds the others back, and nobody captures
    alone."""
    one, other, inputs = pair()
    agree(one, other, inputs, WARM_UPS)
    if rank == 1:
        refresh(one)
    agree(one, other, inputs, WARM_UPS)
    assert FakePool.captures == 0, said(one)
    agree(one, other, inputs, 2)
    assert FakePool.captures == 1 and replays(one) == 2, said(one)


def one_rank_has_hooks(rank: int) -> None:
    """What needs Python on one rank runs plain on both, for as long."""
    one, other, inputs = pair()
    agree(one, other, inputs)
    seen: list[int] = []
    if rank == 0:
        handle = one.blocks[1].ffn.register_forward_hook(lambda *_: seen.append(1))
    agree(one, other, inputs, 4)
    assert replays(one) == 2
    assert len(seen) == (4 if rank == 0 else 0)
    if rank == 0:
        handle.remove()
    agree(one, other, inputs)
    assert replays(one) == 4, said(one)


def one_rank_cannot_capture(rank: int) -> None:
    """It says why; the other drops its graph and says where."""
    one, other, inputs = pair()

    def fails(result: Any) -> Any:
        raise RuntimeError("out of something")

    # Behind the forward: what is captured waits for no other rank, and the stand-in does.
    with mock.patch.object(graphs, "_taken_apart", fails if rank else graphs._taken_apart):
        agree(one, other, inputs, WARM_UPS + 3)
    assert replays(one) == 0 and not number(one)
    words = ("could not be captured on rank 1", "out of something")
    assert words[rank] in said(one), said(one)
    assert FakePool.captures == FakePool.dropped == 1


def an_error_between_two_exchanges(rank: int) -> None:
    """What is asked in a capture is answered as before it; another question is an error."""
    one, _, inputs = pair()
    groups = groups_of(one)
    device = torch.device("cpu")
    answers = Answers()
    with answers.kept():
        first = [told("a", [rank, 5], groups, device), told("b", [rank], groups, device)]
    with counting_bytes() as counts, answers.again():
        assert [told("a", [rank, 5], groups, device), told("b", [rank], groups, device)] == first
    assert not counts and first[0] == [[0, 5], [1, 5]]
    with pytest.raises(RankMismatchError, match="runs again"), answers.again():
        told("b", [rank], groups, device)
    with pytest.raises(RankMismatchError, match="nothing"), answers.again():
        told("a", [rank, 5], groups, device)
    with pytest.raises(RankMismatchError), answers.again():
        for what in "abc":
            told(what, [rank], groups, device)
    assert told("b", [rank], groups, device) == [[0], [1]]


def graphs_on_one_rank_alone(rank: int) -> None:
    """Both raise the same error; nobody waits."""
    one, inputs = made(graphs=rank == 0)
    for _ in range(2):
        with pytest.raises(RankMismatchError, match="cuda_graphs=True on rank 0 alone") as caught:
            run(one, **inputs)
        assert len(set(everywhere(str(caught.value)))) == 1


def other_arguments(rank: int) -> None:
    """Ranks with different inputs raise, also where each has a graph for its own."""
    one, other, inputs = pair()
    longer = inputs | {"hidden_states": torch.cat([inputs["hidden_states"]] * 2, -1)}
    agree(one, other, inputs)
    agree(one, other, longer)
    count = replays(one)
    with pytest.raises(RankMismatchError, match="tokens"):
        run(one, **(longer if rank else inputs))
    assert replays(one) == count
    agree(one, other, inputs, 1)
    assert replays(one) == count + 1, said(one)


def other_models(rank: int) -> None:
    """Graphs of two models that were not captured together are never replayed as one, though
    their arguments are the same."""
    one, other, inputs = pair()
    two, _ = made()
    agree(one, other, inputs)
    agree(two, other, inputs)
    assert number(one) != number(two)
    given = seeded(inputs, 3)
    out = run((one, two)[rank], **given)
    assert torch.equal(out, run(other, **given))
    assert FakePool.captures == 3
    assert len(set(map(str, everywhere(number((one, two)[rank]))))) == 1
    assert set(number(one)) & set(number(two)) == set()
    agree(one, other, inputs, 2)
    agree(two, other, inputs, 2)
    assert FakePool.captures == 5, "each was captured together again"


# --- the guard -----------------------------------------------------------------------------------


def guard_compares(rank: int) -> None:
    """What the guard wants to see on any rank runs plain on both, and is compared on both."""
    model, inputs = made(PatchConfig(attention="exact"))
    plain, _ = made(PatchConfig(attention="exact"), graphs=False)
    for seed in range(WARM_UPS + 4):
        given = seeded(inputs, seed)
        assert torch.equal(run(model, **given), run(plain, **given)), said(model)
    report = report_of(model)
    assert replays(model) >= 1, said(model)
    assert [r.path for r in report.guard][:4] == [r.path for r in report_of(plain).guard][:4]
    count, compared = replays(model), len(report.guard)
    if rank == 1:
        report.guard.check_next()
    given = seeded(inputs, 50)
    assert torch.equal(run(model, **given), run(plain, **given))
    assert replays(model) == count and len(report.guard) > compared
    assert len(set(everywhere(len(report.guard)))) == 1
    run(model, **given)
    assert replays(model) == count + 1, said(model)


# --- the end -------------------------------------------------------------------------------------


def nothing_is_left(rank: int) -> None:
    """Unpatched, or no longer parallel: no graph, no thread, no attribute."""
    model, inputs = MODELS["wan"](torch.float32)
    before, author = dicts(model), run(model, **inputs)
    for order in ("parallel first", "patch first", "together"):
        patch_model(model, with_graphs(EXACT))
        enable(model, mesh(1, 2))
        for _ in range(WARM_UPS + 2):
            run(model, **inputs)
        assert FakePool.pools[-1].alive and len(timers()) == 1, said(model)
        if order == "parallel first":
            disable_parallelism(model)
            assert not FakePool.pools[-1].alive and not timers()
            for _ in range(WARM_UPS + 2):
                run(model, **inputs)
            assert FakePool.pools[-1].alive and not timers(), "one rank needs no timer"
            unpatch_model(model)
        elif order == "patch first":
            unpatch_model(model)
            assert not FakePool.pools[-1].alive and not timers()
            disable_parallelism(model)
        else:
            refresh(model)
            assert not FakePool.pools[-1].alive and not timers()
            for _ in range(WARM_UPS + 2):
                run(model, **inputs)
            assert FakePool.pools[-1].alive and len(timers()) == 1
            unpatch_model(model)
            disable_parallelism(model)
        assert not FakePool.pools[-1].alive and not timers()
        model.__dict__.pop("_cp_plan", None)
        assert torch.equal(run(model, **inputs), author)
        after = dicts(model)
        assert after.keys() == before.keys()
        for name, attributes in before.items():
            assert after[name] == attributes, name


def given_up(rank: int) -> None:
    """What is never captured says why, and runs."""
    model, inputs = MODELS["wan-three-heads"](torch.float32)
    patch_model(model, with_graphs(EXACT))
    enable(model, mesh(1, 2), ulysses_anything=True)
    for _ in range(WARM_UPS + 2):
        run(model, **inputs)
    assert "different numbers of tokens" in said(model)
    model = turbodiffusion.tiny()
    patch_model(model, with_graphs(EXACT))
    model.enable_context_parallel(dist.new_group([0, 1]))
    for _ in range(WARM_UPS + 2):
        forward(model, turbodiffusion.tiny_inputs(tokens=260))
    assert "author's own code" in said(model)
    model, inputs = made()
    with mock.patch.object(graphs, "tells_on_host", return_value=False):
        for _ in range(WARM_UPS + 2):
            run(model, **inputs)
    assert "no CPU backend" in said(model)
    assert FakePool.captures == 0


def late(rank: int) -> None:
    """A replay that is not done within the group's timeout ends the process, and the log says
    why."""
    ended = threading.Event()
    lines: list[str] = []

    def log(message: str, *args: Any) -> None:
        lines.append(message % args)

    with (
        mock.patch.object(graphs, "timeout_of", return_value=timedelta(seconds=0.5)),
        mock.patch.object(replay_timer.os, "abort", ended.set),
        mock.patch.object(replay_timer._log, "error", log),
    ):
        model, inputs = made()
        for _ in range(WARM_UPS + 2):
            run(model, **inputs)
        time.sleep(1.0)
        assert not lines, "these were done in time"
        FakeEvent.hang = rank == 0
        begin = time.monotonic()
        run(model, **inputs)
        assert ended.wait(30 if rank == 0 else 1) == (rank == 0)
        assert 0.4 < time.monotonic() - begin < 30
        FakeEvent.hang = False
        unpatch_model(model)
    assert not timers()
    if rank == 0:
        assert len(lines) == 1 and "WanTransformer3DModel on rank 0 of 2" in lines[0]
        assert "init_process_group" in lines[0]


SCENARIOS: dict[str, Callable[[int], None]] = {
    **{
        f"{name}-{'ring' if ring > 1 else 'ulysses'}-{words}": partial(
            replay_together, name, ring, config
        )
        for name, ring, words, config in (
            ("wan", 1, "exact", EXACT),
            ("wan", 2, "exact", EXACT),
            ("wan", 1, "int8-linears", INT8),
            ("wan", 2, "int8", INT8),
            ("wan", 1, "given-back", PatchConfig(guard=False, kinds=("feed-forward",))),
            ("cogvideox", 1, "int8", INT8),
            ("skyreels", 1, "exact", EXACT),
            ("vace", 1, "exact", EXACT),
        )
    },
    "sparse-linear": sparse_linear,
    "two-resolutions": two_resolutions,
    "one-rank-changes": one_rank_changes,
    "weights-of-both-change": weights_of_both_change,
    "one-rank-is-warm-later": one_rank_is_warm_later,
    "one-rank-has-hooks": one_rank_has_hooks,
    "one-rank-cannot-capture": one_rank_cannot_capture,
    "answers": an_error_between_two_exchanges,
    "graphs-on-one-rank-alone": graphs_on_one_rank_alone,
    "other-arguments": other_arguments,
    "other-models": other_models,
    "guard-compares": guard_compares,
    "nothing-is-left": nothing_is_left,
    "given-up": given_up,
    "late": late,
}


def faked(scenario: Callable[[int], None], rank: int) -> None:
    with on_a_cpu():
        scenario(rank)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Told:
    todo = {name: partial(faked, scenario) for name, scenario in SCENARIOS.items()}
    return run_all(2, tmp_path_factory.mktemp("two"), todo)


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks(name: str, two_ranks: Told) -> None:
    two_ranks.check(name)


class Doubles(ModelHook):
    def post_forward(self, module: Any, output: Any) -> Any:
        return output * 2


def test_which_hooks_are_captured() -> None:
    """diffusers' hooks that split and gather, and nothing else around a module or under them."""

    def never(function: object) -> bool:
        return False

    def made() -> tuple[torch.nn.Module, HookRegistry]:
        module = torch.nn.Linear(2, 2)
        return module, HookRegistry.check_if_exists_or_initialize(module)

    gathers = ContextParallelGatherHook([], None)
    module, registry = made()
    assert not split_hooks(module, never)
    registry.register_hook(gathers, "cp_output---a")
    registry.register_hook(ContextParallelSplitHook({}, None), "cp_input---a")
    assert split_hooks(module, never) == registry.hooks and len(registry.hooks) == 2
    outer = module.forward
    module.forward = lambda x: outer(x) * 3
    assert not split_hooks(module, never)
    module.forward = outer
    registry.register_hook(Doubles(), "two")
    assert not split_hooks(module, never)
    registry.remove_hook("two")
    assert split_hooks(module, never)
    module, registry = made()
    inner = module.forward = lambda x: x
    registry.register_hook(gathers, "cp_output---a")
    assert not split_hooks(module, never)
    assert split_hooks(module, lambda function: function is inner)


def hangs(rank: int, folder: str) -> None:
    with on_a_cpu(), mock.patch.object(graphs, "timeout_of", return_value=timedelta(seconds=1)):
        model, inputs = made()
        for _ in range(WARM_UPS + 1):
            run(model, **inputs)
        dist.barrier()
        if rank == 1:
            os._exit(0)  # dies
        FakeEvent.hang = True
        graph = record_of(model).graphs
        graph._timer.add(FakeEvent())
        time.sleep(100)  # as a host that waits for the GPU
        os._exit(7)


def test_a_process_that_waits_for_a_dead_rank_ends(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ProcessExitedException, match=r"process 0 .*SIGABRT"):
        on_ranks(2, hangs, str(tmp_path))


if __name__ == "__main__":
    import sys
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        names = sys.argv[1:] or list(SCENARIOS)
        found = run_all(2, Path(folder), {name: partial(faked, SCENARIOS[name]) for name in names})
        for results in found.found:
            print(json.dumps({k: v[-1500:] or "ok" for k, v in results.items()}, indent=1))
