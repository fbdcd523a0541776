"""Precision by head over a sequence that several ranks share: what they measure together, the
heads that all of them mark, and ranks whose pasts differ."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.measures import relative_l2
from tests.patching import cogvideox, wan
from tests.patching.test_parallel import enable, mesh
from tests.patching.test_parallel_patched import Told, run_all, same_everywhere, shard
from tests.patching.test_precision import AUTO, attended, errors_upcast, one_peaked_head, operands
from tests.patching.test_residual import BF16, errors
from tests.ranks import groups
from turbo_rcm_patch import patch_model, patched
from turbo_rcm_patch.errors import ConfigError
from turbo_rcm_patch.ops.exchange import counting_bytes
from turbo_rcm_patch.patching import branches, guard, noise
from turbo_rcm_patch.patching.noise import Noise, Operands, Share, head_noise, pair_noise
from turbo_rcm_patch.patching.parallel import disable_parallelism
from turbo_rcm_patch.patching.record import record_of

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")

TARGET = 1.5


def everywhere(value: object) -> bool:
    """Whether every rank has the same, to the last bit."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return all(repr(one) == repr(value) for one in everyone)


def from_first(value: str) -> str:
    """What rank 0 has."""
    values = [value]
    dist.broadcast_object_list(values, 0)
    return values[0]


@contextmanager
def cheap_parts() -> Iterator[None]:
    """A second part for exact heads costs next to nothing, as in long sequences, and few rows are
    looked at, so that they lie apart."""
    with mock.patch.object(noise, "_SECOND_PART", 0.0), mock.patch.object(noise, "ROWS", 16):
        yield


# --- measuring -----------------------------------------------------------------------------------


def local(given: Operands, rows: slice, **changes: Any) -> Operands:
    assert given.rotary is not None
    cos, sin = given.rotary
    parts = {"q": given.q[:, rows], "k": given.k[:, rows], "v": given.v[:, rows]}
    return given._replace(**parts, rotary=(cos[rows], sin[rows]), **changes)


def shares_measure_the_whole(rank: int) -> None:
    """Ranks with other numbers of rows, one with none among them: the numbers of one process, and
    the same bits on every rank."""
    parallel = groups(2, 1)
    assert parallel is not None
    torch.manual_seed(3)
    given, weight = operands(exact_heads=(2,)), torch.randn(24, 128).bfloat16()
    ours, gate = attended(given), torch.rand(2, 300, 24)
    author, base = torch.randn(2, 2, 300, 24).bfloat16()
    result = author + 0.01 * torch.randn(2, 300, 24) * torch.linspace(0, 4, 300).view(1, -1, 1)
    whole = head_noise(given, ours, weight, [gate])
    how: dict[str, Any] = {"wide": True, "narrowed": False, "linears": True, "exact": (2,)}
    expected = pair_noise([result], [author], [base], heads=whole, **how)
    for lengths in ((170, 130), (299, 1), (1, 299)):
        rows = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
        share, mine = Share(parallel, lengths), local(given, rows, parallel=parallel)
        found = head_noise(mine, ours[:, rows], weight, [gate[:, rows]], share)
        for name, part, full, near in zip(
            ("error", "rounding", "added", "both"), found, whole, (1e-6, 1e-3, 1e-4, 1e-3),
            strict=True,
        ):  # fmt: skip
            apart = ((part - full).abs() / full.abs().clamp_min(1e-9)).max()
            assert apart < near, (name, lengths, float(apart))
        assert everywhere([x.tolist() for x in found])
        streams = ([x[:, rows]] for x in (result, author, base))
        together = pair_noise(*streams, heads=whole, share=share, **how)
        assert everywhere(together)
        assert together.tokens == expected.tokens == 300
        for name in ("author", "ours", "linears"):
            one, other = getattr(together, name), getattr(expected, name)
            assert one == pytest.approx(other, rel=1e-5), (name, lengths)
    # Keys that every rank has, as of a cross-attention, are not gathered.
    rows = slice(170 * rank, 170 + 130 * rank)
    mine = given._replace(q=given.q[:, rows], rotary=None, norms=(None,) * 4)
    own = attended(mine._replace(norms=(None,) * 4))
    with counting_bytes() as counts:
        found = head_noise(mine, own, weight, [gate[:, rows]], Share(parallel, (170, 130)))
    assert set(counts) == {"noise"} and everywhere([x.tolist() for x in found])
    whole_q = given._replace(rotary=None, norms=(None,) * 4)
    full = head_noise(whole_q, attended(whole_q), weight, [gate])
    torch.testing.assert_close(found[0], full[0], rtol=0.02, atol=0.0)


# --- choosing ------------------------------------------------------------------------------------


def marked_alike(rank: int) -> None:
    """A peaked head is marked on every rank, as on one process, from the second forward on; the
    network is within its target, and the prediction is that of one process."""
    for subject, ring, anything in (
        (wan.CASES[0], 1, True), (wan.CASES[0], 2, False), (cogvideox.ROTARY, 1, True),
    ):  # fmt: skip
        given = subject.inputs(2, BF16)
        if anything and subject is wan.CASES[0]:  # 45 tokens
            given["hidden_states"] = given["hidden_states"][:, :, :, :6]
        more = {f"{'ring' if ring > 1 else 'ulysses'}_anything": True} if anything else {}
        alone = one_peaked_head(subject.model(BF16))
        with patched(alone, fidelity=TARGET, **AUTO) as single:
            wan.run(alone, **given)
            path, number = single.pairs[0].path, single.guard.fidelity
            heads = dict(single.exact_heads)
            measured = {r.path: r.noise for r in single.guard if r.noise is not None}
            assert heads.get(path) == (1,), heads
        model = one_peaked_head(subject.model(BF16))
        base, _ = errors(model, given, {"attention": "exact", "guard": False})
        with torch.no_grad(), errors_upcast(model):
            truth = model(**cogvideox.widened(given))[0]
        report = patch_model(model, fidelity=TARGET, **AUTO)
        enable(model, mesh(ring, 3 - ring), **more)
        first = wan.run(model, **given)
        name = f"{subject.name} ring {ring}"
        assert dict(report.exact_heads) == heads, (name, report.precision_map)
        same_rows = ring == 1 and subject is not cogvideox.ROTARY
        for where, one in measured.items():
            near(f"{name} {where}", found_of(report)[where], one, 0.02 if same_rows else 0.35)
        assert number is not None and report.guard.fidelity is not None
        predicted = pytest.approx(number, rel=0.01 if same_rows else 0.15)
        assert report.guard.fidelity == predicted, name
        verdicts = [(r.path, r.verdict, r.error, r.noise) for r in report.guard]
        assert everywhere(verdicts), name
        with counting_bytes() as counts:
            second = wan.run(model, **given)
        assert "states" not in counts, (name, "ranks that chose alike have nothing to say")
        assert "keys of a head" in counts, (name, "what changed is compared again")
        assert [r.verdict for r in report.guard if r.path == path] == [
            "kept", "some heads exact", "kept"
        ], name  # fmt: skip
        assert not torch.equal(first, second), name
        assert torch.equal(wan.run(model, **given), second), name
        assert same_everywhere(first) and same_everywhere(second), name
        assert "1 heads exact" in str(report.last_forward), report.last_forward
        ratio = relative_l2(second, truth) / base
        assert ratio <= 1.1 * TARGET and report.guard.fidelity / ratio < 1.7, (name, ratio)


def found_of(report: Any) -> dict[str, Noise]:
    """What each pair adds, as it was measured last."""
    return {r.path: r.noise for r in report.guard if r.noise is not None}


def near(name: str, found: Noise, single: Noise, tolerance: float) -> None:
    """The numbers of one process. A ring rounds otherwise, and of text and video ranks look at
    other rows."""
    assert found.tokens == single.tokens and len(found.heads) == len(single.heads), name
    for what in ("author", "ours"):
        ours, theirs = getattr(found, what), getattr(single, what)
        assert ours == pytest.approx(theirs, rel=tolerance), (name, what)
    for one, other in zip(found.heads, single.heads, strict=True):
        for what in ("error", "rounding"):
            ours, theirs = getattr(one, what), getattr(other, what)
            assert ours == pytest.approx(theirs, rel=tolerance), (name, what)


def ranks_that_know_less(rank: int) -> None:
    """Where one rank cannot measure heads, none does, and nobody waits for it."""
    model, given = one_peaked_head(wan.CASES[0].model(BF16)), wan.CASES[0].inputs(1, BF16)
    report = patch_model(model, fidelity=TARGET, **AUTO)
    enable(model, mesh(1, 2))
    own = guard.quantised
    with mock.patch.object(guard, "quantised", lambda given: own(given) and rank == 0):
        wan.run(model, **given)
    assert not report.exact_heads and report.guard.fidelity is None
    assert report.guard.unmeasured and everywhere(report.guard.unmeasured)
    assert all(not one.heads for one in found_of(report).values())
    assert everywhere(found_of(report))


def wrong_on_one_rank(rank: int) -> None:
    """A head that runs exactly and is wrong on one rank's rows is given back on all."""
    model, given = wan.CASES[0].model(BF16), wan.CASES[0].inputs(2, BF16)
    author = wan.run(model, **given)
    report = patch_model(model, kinds=("self",), fidelity=1.0, residual="model", **AUTO)
    enable(model, mesh(1, 2))
    own = branches.parallel_attention

    def changed(q: Any, k: Any, v: Any, spec: Any, *args: Any, **more: Any) -> torch.Tensor:
        out = own(q, k, v, spec, *args, **more).unflatten(-1, (spec.heads, -1)).clone()
        if rank == 1:
            last = out[..., -1, :]
            turned = torch.stack([-last[..., 1::2], last[..., ::2]], -1).flatten(-2)
            out[..., -1, :] = last + 0.08 * turned
        return out.flatten(-2)

    with mock.patch.object(branches, "parallel_attention", changed):
        wan.run(model, **given)
        out = wan.run(model, **given)
    verdicts = [r.verdict for r in report.guard if r.path == "blocks.0.attn1"]
    assert verdicts[-1] == "given back" and "some heads exact" in verdicts, verdicts
    assert everywhere([(r.path, r.verdict, r.noise) for r in report.guard])
    assert same_everywhere(out) and relative_l2(out, author) < 0.01


# --- ranks whose pasts differ --------------------------------------------------------------------


def other_marks(rank: int) -> None:
    """Ranks that marked other heads before run those of all of them exactly, and agree at once;
    what they measured apart they measure together."""
    model = one_peaked_head(wan.wan(num_attention_heads=4).to(BF16), 2)
    given = wan.CASES[0].inputs(1, BF16)
    report = patch_model(model, fidelity=1e6, **AUTO)
    state = record_of(model).plan.states[0]  # type: ignore[union-attr]
    state.take_heads((3 * rank,), "of this rank alone")
    alone = wan.run(model, **{**given, "timestep": torch.tensor([500.0 + rank])})
    assert not everywhere(report.guard.fidelity) and not everywhere(alone.tolist())
    enable(model, mesh(1, 2))
    with counting_bytes() as counts:
        wan.run(model, **given)
    assert "states" in counts
    assert dict(report.exact_heads) == {"blocks.0.attn1": (0, 3)}
    for _ in range(2):
        with counting_bytes() as counts:
            out = wan.run(model, **given)
    assert "states" not in counts and same_everywhere(out)
    assert everywhere(found_of(report))
    # All heads together are an exact attention, on both alike.
    state.take_heads((1 + rank,), "of this rank alone")
    out = wan.run(model, **given)
    assert state.precision == "exact attention" and same_everywhere(out)
    with counting_bytes() as counts:
        wan.run(model, **given)
    assert "states" not in counts
    # A forward that is not parallel asks nobody.
    disable_parallelism(model)
    if rank == 1:
        report.guard.check_next()
        wan.run(model, **given)


def exact_stays(rank: int) -> None:
    """A pair whose attention is exact stays so when ranks agree, whether one rank or all made it
    exact, by a step of the guard or by a calibration."""
    given = wan.CASES[0].inputs()
    how: dict[str, Any] = {"attention": "int8", "fidelity": 1e6, "guard_budget": 1.0}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(from_first(folder), "kept.json")
        with patched(model := wan.CASES[0].model(), **how, **AUTO) as report:
            state = record_of(model).plan.states[0]  # type: ignore[union-attr]
            state.take_heads(range(state.pair.heads), "of a target")
            if rank == 0:
                report.save_calibration(path)
        dist.barrier()
        for alone in (False, True):
            model = wan.CASES[0].model()
            calibration: dict[str, Any] = {} if alone else {"calibration": path}
            report = patch_model(model, **how, **AUTO, **calibration)
            state = record_of(model).plan.states[0]  # type: ignore[union-attr]
            if alone and rank == 0:
                state.take_heads(range(state.pair.heads), "of this rank alone")
            enable(model, mesh(1, 2))
            for again in (False, True):
                if again and rank == 0:
                    report.guard.check_next()
                with counting_bytes() as counts:
                    out = wan.run(model, **given)
                assert ("states" in counts) == (alone or again)
                assert state.precision == "exact attention", state.precision
                assert state.ran == "fused with exact attention", state.ran
                assert same_everywhere(out)
        dist.barrier()


def calibrated(rank: int) -> None:
    """What one process chose, several run from the first forward on."""
    model, given = one_peaked_head(wan.CASES[0].model(BF16)), wan.CASES[0].inputs(1, BF16)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(from_first(folder), "kept.json")
        with patched(model, fidelity=TARGET, **AUTO) as report:
            wan.run(model, **given)
            expected = wan.run(model, **given)
            if rank == 0:
                report.save_calibration(path)
        dist.barrier()
        own = Path(folder, "own.json")  # another path on every rank
        own.write_bytes(path.read_bytes())
        for ring in (1, 2):
            with patched(model, guard=False, calibration=own if ring == 1 else str(own)) as report:
                enable(model, mesh(ring, 3 - ring))
                out = wan.run(model, **given)
                assert report.exact_heads["blocks.0.attn1"] == (1,)
                assert same_everywhere(out) and relative_l2(out, expected) < 0.02
                assert torch.equal(wan.run(model, **given), out)  # recorded, then replayed
                disable_parallelism(model)
        dist.barrier()


def calibrated_and_sharded(rank: int) -> None:
    """A calibration serves every rank that has a part of the weights, in any process and number of
    ranks, before a forward and after it; another class's is refused."""
    given, how = wan.CASES[0].inputs(), {"attention": "int8", **AUTO}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(from_first(folder), "kept.json")

        def chosen(model: Any) -> tuple[int, ...]:
            with patched(model, calibration=path, **how) as report:
                return dict(report.exact_heads).get("blocks.0.attn1", ())

        def saved(model: Any) -> None:
            with patched(model, fidelity=1e6, guard_budget=1.0, **how) as report:
                wan.run(model, **given)
                record_of(model).plan.states[0].take_heads((1,), "it")  # type: ignore[union-attr]
                if rank == 0:
                    report.save_calibration(path)
                dist.barrier()

        whole, sharded = wan.CASES[0].model(), wan.CASES[0].model()
        shard(sharded, init_device_mesh("cpu", (2,)))
        again = wan.CASES[0].model()
        shard(again, init_device_mesh("cpu", (2,)))
        saved(sharded)
        assert chosen(sharded) == chosen(again) == chosen(whole) == (1,)
        dist.barrier()
        saved(whole)
        assert chosen(sharded) == chosen(whole) == (1,)
        other = wan.CASES[1].model()
        shard(other, init_device_mesh("cpu", (2,)))
        with pytest.raises(ConfigError, match="another fingerprint"):
            chosen(other)
        dist.barrier()


SCENARIOS: dict[str, Callable[[int], None]] = {
    "shares-measure-the-whole": shares_measure_the_whole,
    "marked-alike": marked_alike,
    "ranks-that-know-less": ranks_that_know_less,
    "wrong-on-one-rank": wrong_on_one_rank,
    "other-marks": other_marks,
    "exact-stays": exact_stays,
    "calibrated": calibrated,
    "calibrated-and-sharded": calibrated_and_sharded,
}


def with_cheap_parts(check: Callable[[int], None], rank: int) -> None:
    with cheap_parts():
        check(rank)


def of_two() -> dict[str, Callable[[int], None]]:
    return {name: partial(with_cheap_parts, check) for name, check in SCENARIOS.items()}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return run_all(2, tmp_path_factory.mktemp("precision"), of_two())


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks(name: str, two_ranks: Told) -> None:
    two_ranks.check(name)


if __name__ == "__main__":
    import sys

    with tempfile.TemporaryDirectory() as folder:
        todo = {name: run for name, run in of_two().items() if name in sys.argv[1:]}
        for results in run_all(2, Path(folder), todo).found:
            for name, text in results.items():
                print(name, text or "passed")
