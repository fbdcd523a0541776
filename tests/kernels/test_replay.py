"""A replay starts the same kernels with the same arguments as the launcher it stands for.

There is no GPU here, so a stand-in takes the place of Triton's compiled kernels and writes down
what it is started with. A launcher runs on one set of tensors and is recorded; on another set its
replay is compared with the launcher itself, argument by argument: numbers as they are, addresses
by the memory they lie in.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.inputs import attention_inputs
from tests.launches import Log, write_down_launches
from turbo_rcm_patch.kernels import replay
from turbo_rcm_patch.kernels.replay import keep_for_replay, replayed, without_replay

HEADS, DIM = 2, 64
CHANNELS = HEADS * DIM


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    """What is launched."""
    yield write_down_launches(monkeypatch)
    replay.forget_programs()


def address(value: Any) -> int | None:
    """The address that an argument stands for, or None for a number."""
    base = getattr(value, "base", None)
    if base is not None:
        return int(base.data_ptr())
    return int(value.data_ptr()) if isinstance(value, torch.Tensor) else None


def flat(result: Any) -> list[torch.Tensor]:
    """The tensors of what a launcher returned."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [t for part in result for t in flat(part)] if isinstance(result, tuple) else []


def labelled(
    launches: Log, fresh: Log, inputs: list[torch.Tensor], result: Any
) -> list[tuple[Any, ...]]:
    """Launches with every address replaced by what lies there: an argument, a part of the result,
    or the n-th scratch buffer that was seen. An address is what stands where a launcher gave
    memory in `fresh`."""
    places = [(f"input {i}", t) for i, t in enumerate(inputs)]
    places += [(f"output {i}", t) for i, t in enumerate(flat(result))]
    scratch: dict[int, int] = {}

    def label(at: int) -> tuple[str, int]:
        for name, tensor in places:
            start = tensor.untyped_storage().data_ptr()
            if start <= at < start + tensor.untyped_storage().nbytes():
                return name, at - tensor.data_ptr()
        return f"scratch {scratch.setdefault(at, len(scratch))}", 0

    shown = []
    for (name, grid, arguments), (_, _, given) in zip(launches, fresh, strict=True):
        values = []
        for value, like in zip(arguments, given, strict=True):
            at = address(value)
            if at is None and address(like) is not None and isinstance(value, int):
                at = value
            values.append(value if at is None else label(at))
        shown.append((name, grid, values))
    return shown


Call = Callable[[list[torch.Tensor]], Any]


def compare(log: Log, call: Call, make: Callable[[], list[torch.Tensor]]) -> int:
    """Record a call on one set of tensors, and compare its replay on another with the launcher."""
    first = make()
    call(first)
    recorded = len(log)
    log.clear()
    again = make()
    result = call(again)
    replays = list(log)
    assert all(type(a) is not torch.Tensor for _, _, values in replays for a in values), (
        "the launcher ran again: nothing was replayed"
    )
    log.clear()
    with without_replay():
        expected = call(again)
    fresh = list(log)
    log.clear()
    assert [(t.shape, t.stride(), t.dtype) for t in flat(result)] == [
        (t.shape, t.stride(), t.dtype) for t in flat(expected)
    ]
    assert type(result) is type(expected)
    assert labelled(replays, fresh, again, result) == labelled(fresh, fresh, again, expected)
    assert len(fresh) == recorded
    return recorded


def tokens(n: int, channels: int = CHANNELS) -> torch.Tensor:
    return torch.randn(2, n, channels).bfloat16()


def attention(**options: Any) -> Call:
    from turbo_rcm_patch.kernels.portable.attention import attention as launcher

    def call(x: list[torch.Tensor]) -> Any:
        names = ("residual", "c_out", "norm_q", "norm_k", "cos", "sin")
        tensors = dict(zip(names, x[3:], strict=False))
        return launcher(attention_inputs(*x[:3], heads=HEADS, **tensors, **options))

    return call


def test_sparse_attention_is_replayed_around_what_torch_chooses(log: Log) -> None:
    from turbo_rcm_patch.kernels.portable.sparse_attention import _attended, _prepared

    def normed(x: list[torch.Tensor]) -> Any:
        names = ("norm_q", "norm_k", "cos", "sin")
        given = dict(zip(names, x[3:], strict=True))
        return _prepared(attention_inputs(*x[:3], heads=HEADS, **given), 64)

    def bare(x: list[torch.Tensor]) -> Any:
        return _prepared(attention_inputs(*x, heads=HEADS), 64)

    def attended(x: list[torch.Tensor]) -> Any:
        return _attended(attention_inputs(*x[:3], heads=HEADS), *x[3:], 1e-5, 64, 64)

    def qkv() -> list[torch.Tensor]:
        return [tokens(160) for _ in range(3)]

    def tables() -> list[torch.Tensor]:
        return [*qkv(), *(torch.randn(CHANNELS) for _ in range(2)),
                *(torch.randn(160, DIM) for _ in range(2))]  # fmt: skip

    def chosen() -> list[torch.Tensor]:
        lut = torch.zeros(2, HEADS, 3, 2, dtype=torch.int32)
        matrix = torch.randn(2, HEADS, DIM, DIM).bfloat16()
        return [*qkv(), lut, matrix, torch.randn(2, HEADS, DIM), torch.randn(DIM)]

    attended(chosen())  # the first call makes a constant, and is not recorded
    log.clear()
    assert compare(log, normed, tables) == 1
    assert compare(log, bare, qkv) == 1
    assert compare(log, attended, chosen) == 3


def test_attention_is_replayed_with_every_tensor_it_can_have(log: Log) -> None:
    def everything() -> list[torch.Tensor]:
        gate, weight, table = torch.randn(2, 1, CHANNELS), torch.randn(CHANNELS), torch.randn(
            160, DIM
        )  # fmt: skip
        return [*(tokens(160) for _ in range(4)), gate, weight, weight.clone(), table, table + 1]

    attention()(everything())  # the first call makes a constant, and is not recorded
    log.clear()
    assert compare(log, attention(), everything) == 3
    assert compare(log, attention(want_lse=True, pv="bf16"), everything) == 3


@pytest.mark.parametrize("pv", ["fp8", "bf16"])
def test_attention_alone_is_replayed(log: Log, pv: str) -> None:
    assert compare(log, attention(pv=pv), lambda: [tokens(n) for n in (96, 160, 160)]) == 3


def test_views_of_one_tensor_are_told_from_tensors_of_their_own(log: Log) -> None:
    def views() -> list[torch.Tensor]:
        return list(tokens(160, 3 * CHANNELS).chunk(3, dim=-1))

    def swapped() -> list[torch.Tensor]:
        q, k, v = views()
        return [v, k, q]

    def apart() -> list[torch.Tensor]:
        # The strides of views, each of its own tensor.
        return [views()[0] for _ in range(3)]

    for make in (views, apart, swapped, views):
        compare(log, attention(), make)


def test_one_tensor_in_two_places_is_told_from_two_tensors(log: Log) -> None:
    def same() -> list[torch.Tensor]:
        k = tokens(160)
        return [tokens(96), k, k]

    compare(log, attention(), same)
    compare(log, attention(), lambda: [tokens(n) for n in (96, 160, 160)])
    compare(log, attention(), same)


def test_another_alignment_is_another_signature(log: Log) -> None:
    from turbo_rcm_patch.kernels.portable.norm import norm_modulate

    def at(offset: int) -> Callable[[], list[torch.Tensor]]:
        def make() -> list[torch.Tensor]:
            memory = torch.randn(2 * 40 * CHANNELS + 8).bfloat16()
            return [memory[offset : offset + 2 * 40 * CHANNELS].view(2, 40, CHANNELS)]

        return make

    def call(x: list[torch.Tensor]) -> Any:
        return norm_modulate(x[0], None, None, one=1.0, eps=1e-6, out_dtype=torch.bfloat16)

    for offset in (0, 1, 8, 1):
        compare(log, call, at(offset))
    replay.forget_programs()
    for offset, recorded in ((0, True), (0, False), (1, True), (1, False), (8, False)):
        log.clear()
        call(at(offset)())
        # Triton compiles apart for addresses that divide by 16, so a recording serves one kind.
        assert any(type(a) is torch.Tensor for a in log[0][2]) == recorded


def test_other_strides_are_another_signature(log: Log) -> None:
    from turbo_rcm_patch.kernels.portable.norm import norm_modulate

    def call(x: list[torch.Tensor]) -> Any:
        return norm_modulate(x[0], None, None, one=1.0, eps=1e-6, out_dtype=torch.bfloat16)

    compare(log, call, lambda: [tokens(40)])
    compare(log, call, lambda: [tokens(40, 2 * CHANNELS)[..., :CHANNELS]])
    compare(log, call, lambda: [tokens(80)[:, ::2]])


def test_operations_around_attention_are_replayed(log: Log) -> None:
    from turbo_rcm_patch.kernels.portable.norm import (
        norm_modulate,
        norm_modulate_rows,
        norm_rotate,
    )
    from turbo_rcm_patch.kernels.portable.project import project_skip
    from turbo_rcm_patch.kernels.portable.rows import quantize_rows
    from turbo_rcm_patch.kernels.portable.skip import skip

    half = torch.bfloat16
    rows = [tokens(33), torch.randn(2, 1, CHANNELS), torch.randn(2, 1, CHANNELS)]

    def again(tensors: list[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        return lambda: [t.clone() for t in tensors]

    calls: list[tuple[Call, list[torch.Tensor]]] = [
        (lambda x: norm_modulate(*x, one=1.0, eps=1e-6, out_dtype=half), rows),
        (lambda x: norm_modulate_rows(*x, one=1.0, eps=1e-6), rows),
        (lambda x: quantize_rows(x[0]), rows[:1]),
        (
            lambda x: norm_rotate(
                x[0], HEADS, weight=x[1], bias=None, cos=x[2], sin=x[3], eps=1e-6
            ),
            [tokens(33), torch.randn(CHANNELS), torch.randn(33, DIM), torch.randn(33, DIM)],
        ),
        (
            lambda x: skip(x[0], x[1], 1.0, x[2], cast="fp32", out_dtype=half),
            [tokens(33), tokens(33), torch.randn(2, 1, CHANNELS)],
        ),
        (
            lambda x: project_skip(*x[:4], 1.0, x[4], cast="fp32", out_dtype=half),
            [tokens(33), torch.randn(48, CHANNELS).bfloat16(), torch.randn(48).bfloat16(),
             tokens(33, 48), torch.randn(2, 1, 48)],
        ),
    ]  # fmt: skip
    for call, tensors in calls:
        assert compare(log, call, again(tensors)) == 1


def test_what_else_a_launcher_does_is_never_left_out(log: Log) -> None:
    """A torch operation inside makes a launcher run as it is, every time."""
    from turbo_rcm_patch.kernels.portable.skip import skip

    runs = []

    @replayed
    def doubled(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return skip(None, x * 2, 1.0, 1.0, cast="fp32", out_dtype=x.dtype)

    @replayed
    def writing(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        y.add_(1)
        return skip(None, x, 1.0, 1.0, cast="fp32", out_dtype=x.dtype)

    for _ in range(4):
        doubled(tokens(8))
        writing(tokens(8), tokens(8))
    assert len(runs) == 8


def skip_beside(hidden: torch.Tensor, runs: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that reads a tensor which is none of its arguments."""
    from turbo_rcm_patch.kernels.portable.skip import skip

    @replayed
    def beside(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return skip(hidden, x, 1.0, 1.0, cast="fp32", out_dtype=x.dtype)

    return beside


def test_memory_that_nobody_declared_is_not_held(log: Log) -> None:
    hidden, runs = tokens(8), []
    beside = skip_beside(hidden, runs)
    for _ in range(4):
        beside(tokens(8))
    assert len(runs) == 4
    keep_for_replay(hidden)
    replay.forget_programs()
    for _ in range(4):
        beside(tokens(8))
    assert len(runs) == 5
    assert log[-1][2].count(hidden.data_ptr()) == 1


def test_calls_in_a_captured_graph_do_not_count_as_failed_attempts(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A constant that is made there is the graph's own; later calls find that of the process."""
    constant, runs = tokens(8), []
    beside = skip_beside(constant, runs)
    monkeypatch.setattr(replay, "_capturing", lambda tensor: True)
    for _ in range(3):
        beside(tokens(8))
    monkeypatch.setattr(replay, "_capturing", lambda tensor: False)
    keep_for_replay(constant)
    for _ in range(3):
        beside(tokens(8))
    assert len(runs) == 4


def test_an_error_while_recording_is_raised_and_nothing_is_kept(log: Log) -> None:
    runs = []

    @replayed
    def failing(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        raise ValueError("no")

    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            failing(tokens(8))
    assert len(runs) == 3
    assert replay.recorder() is None


def test_a_recording_keeps_no_memory_of_the_call_it_was_made_from(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither arguments nor scratch, nor views of them: of a long video, they are gigabytes."""
    places: set[int] = set()
    own = replay.Recorder.program

    def program(self: Any, result: Any) -> Any:
        places.update(x.untyped_storage().data_ptr() for x in (*self._made, *self._inputs))
        return own(self, result)

    monkeypatch.setattr(replay.Recorder, "program", program)
    inputs = [tokens(n) for n in (96, 160, 160)]
    attention()(inputs)  # in fp8, whose kernel reads through descriptors
    assert len(places) > 6
    inputs.clear()
    log.clear()
    gc.collect()
    alive = [x for x in gc.get_objects() if type(x) is torch.Tensor]
    assert not [x.shape for x in alive if x.untyped_storage().data_ptr() in places]
    compare(log, attention(), lambda: [tokens(n) for n in (96, 160, 160)])


@pytest.mark.parametrize("when", ["launch_enter_hook", "launch_exit_hook"])
def test_nothing_is_replayed_while_somebody_watches_launches(
    log: Log, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    assert replay.replay_generation()
    monkeypatch.setattr(replay.triton.knobs.runtime, when, lambda metadata: None)
    assert not replay.replay_generation()


class Growing(weakref.WeakSet[Any]):
    """Whoever walks through it is overtaken by a thread that adds to it."""

    def __iter__(self) -> Any:
        for one in super().__iter__():
            thread = threading.Thread(target=lambda: replay.Recordings(4))
            thread.start()
            thread.join(0.3)
            yield one


def test_a_launcher_may_begin_to_record_while_others_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay, "_caches", Growing())
    recordings = replay.Recordings(4)
    recordings.found["a"] = None
    replay.forget_programs()
    assert not recordings.found
