"""A replay starts the same kernels with the same arguments as the launcher it stands for.

There is no GPU here, so a stand-in takes the place of Triton's compiled kernels and writes down
what it is started with. A launcher runs on one set of tensors and is recorded; on another set its
replay is compared with the launcher itself, argument by argument: numbers as they are, addresses
by the memory they lie in.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from tests.inputs import attention_inputs
from tests.launches import Log, flat, write_down_launches
from turbo_rcm_patch.ops.launch import compile_ahead
from turbo_rcm_patch.ops.numerics import quantize_rows
from turbo_rcm_patch.ops.replay import keep_for_replay, recorder, replayed
from turbo_rcm_patch.ops.residual.triton import norm_rotate, skip, skip_norm

HEADS, DIM = 2, 64
CHANNELS = HEADS * DIM
BF16 = torch.bfloat16

Call = Callable[[list[Tensor]], Any]
Make = Callable[[], list[Tensor]]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """The launches of the test."""
    return write_down_launches(monkeypatch)


def address(value: Any) -> int | None:
    """The address that an argument stands for, or None for a number."""
    base = getattr(value, "base", None)
    if base is not None:
        return int(base.data_ptr())
    return int(value.data_ptr()) if isinstance(value, Tensor) else None


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def place(tensor: Tensor) -> tuple[int, int]:
    """Where its memory is, and how much of it: an address is soon used again."""
    return storage(tensor), tensor.untyped_storage().nbytes()


def labelled(
    launches: Log, fresh: Log, inputs: list[Tensor], result: Any
) -> list[tuple[Any, ...]]:
    """Launches with every address replaced by what lies there: an argument, a part of the result,
    or the n-th scratch buffer that was seen. An address is what stands where a launcher gave
    memory in `fresh`."""
    places = [(f"input {i}", t) for i, t in enumerate(inputs)]
    places += [(f"output {i}", t) for i, t in enumerate(flat(result)) if t is not None]
    scratch: dict[int, int] = {}

    def label(at: int) -> tuple[str, int]:
        for name, tensor in places:
            if 0 <= at - storage(tensor) < tensor.untyped_storage().nbytes():
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


def was_replayed(log: Log) -> bool:
    """A replay starts kernels with addresses, a launcher with tensors."""
    return all(type(value) is not Tensor for _, _, values in log for value in values)


def as_it_is(call: Call, inputs: list[Tensor]) -> Any:
    """Run a launcher while something watches launches, which turns replays off."""
    runtime = triton.knobs.runtime
    before = runtime.launch_enter_hook
    runtime.launch_enter_hook = lambda metadata: None
    try:
        return call(inputs)
    finally:
        runtime.launch_enter_hook = before


def compare(log: Log, call: Call, make: Make) -> int:
    """Record a call on one set of tensors, and compare its replay on another with the launcher.

    Returns:
        The number of kernels.
    """
    call(make())  # the first call of all makes constants, and is not recorded
    call(make())
    log.clear()
    inputs = make()
    result = call(inputs)
    replays = list(log)
    assert was_replayed(replays), "the launcher ran again: nothing was replayed"
    log.clear()
    expected = as_it_is(call, inputs)
    fresh = list(log)
    assert not was_replayed(fresh)
    log.clear()
    forms, expected_forms = (
        [(t.shape, t.stride(), t.dtype) if isinstance(t, Tensor) else t for t in flat(of)]
        for of in (result, expected)
    )
    assert forms == expected_forms and type(result) is type(expected)
    assert labelled(replays, fresh, inputs, result) == labelled(fresh, fresh, inputs, expected)
    return len(fresh)


def tokens(n: int, channels: int = CHANNELS) -> Tensor:
    return torch.randn(2, n, channels).bfloat16()


def attention(**options: Any) -> Call:
    from turbo_rcm_patch.ops.attention.api import launch_attention as launcher

    def call(x: list[Tensor]) -> Any:
        names = ("residual", "c_out", "norm_q", "norm_k", "cos", "sin")
        tensors = dict(zip(names, x[3:], strict=False))
        return launcher(attention_inputs(*x[:3], heads=HEADS, **tensors, **options))

    return call


def test_what_is_compiled_ahead_is_neither_started_nor_recorded(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def warmup(kernel: Any, *, grid: Any, **arguments: Any) -> None:
        asked.append(kernel.__name__)

    monkeypatch.setattr(triton.JITFunction, "warmup", warmup)

    def make() -> list[Tensor]:
        return [tokens(n) for n in (96, 160, 160)]

    for _ in range(3):
        compile_ahead(lambda: attention()(make()), torch.device("cpu"))
    assert len(asked) == 9 and not log
    with pytest.raises(KeyError):
        compile_ahead(lambda: {}["an error of the call"], torch.device("cpu"))
    assert compare(log, attention(), make) == 3
    # Triton 3.5 knows no option for errors.
    name = "triton.runtime._async_compile.AsyncCompileMode"
    monkeypatch.setattr(name, lambda pool: pytest.fail())
    compile_ahead(lambda: pytest.fail("each launch compiles its own"), torch.device("cpu"))
    assert len(asked) == 9


# --- the launchers -------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"want_lse": True, "pv": "bf16"}], ids=["fp8", "lse"])
def test_attention_is_replayed_with_every_tensor_it_can_have(
    log: Log, options: dict[str, Any]
) -> None:
    def everything() -> list[Tensor]:
        gate, table = torch.randn(2, 1, CHANNELS), torch.randn(160, DIM)
        weights = [torch.randn(CHANNELS) for _ in range(2)]
        return [*(tokens(160) for _ in range(4)), gate, *weights, table, table + 1]

    assert compare(log, attention(**options), everything) == 3
    assert compare(log, attention(**options), lambda: [tokens(n) for n in (96, 160, 160)]) == 3


def test_sparse_attention_is_replayed_around_what_torch_chooses(log: Log) -> None:
    from turbo_rcm_patch.ops.sparse_linear.api import ProjL, Sparsity, launch_sparse

    def call(x: list[Tensor]) -> Any:
        inputs = attention_inputs(*x[:3], heads=HEADS)
        return launch_sparse(inputs, ProjL(*x[3:]), Sparsity(topk=0.7, block_q=64, block_k=64))

    def make() -> list[Tensor]:
        return [*(tokens(160) for _ in range(3)), torch.randn(DIM, DIM), torch.randn(DIM)]

    for _ in range(2):
        call(make())
    log.clear()
    call(make())
    again = {name: values for name, _, values in log}
    launched = [name for name, values in again.items() if not was_replayed([("", (), values)])]
    assert len(again) >= 6 and launched == [], "torch's steps lie between recorded launches"


def of_stream(x: Any, branch: Tensor | None = None, **options: Any) -> Any:
    """A pass over one stream or two."""
    given: Any = dict.fromkeys(("gate", "factor", "offset", "weight", "bias"))
    given |= {"one": 1.0, "eps": 1e-6, "dtype": torch.float32, "norm_dtype": BF16} | options
    return skip_norm(x, branch, **given)


def test_operations_around_attention_are_replayed(log: Log) -> None:
    x, row = tokens(33), torch.randn(2, 1, CHANNELS)
    pair = (tokens(9), tokens(24))
    how: dict[str, Any] = {"out_dtype": BF16}
    rotary = {"bias": None, "eps": 1e-6}
    calls: list[tuple[Call, list[Tensor]]] = [
        (lambda x: of_stream(x[0], factor=x[1], offset=x[2]), [x, row, row + 1]),
        (lambda x: of_stream(x[0], factor=x[1], norm_dtype=torch.int8), [x, row]),
        (lambda x: quantize_rows(x[0]), [x]),
        (
            lambda x: norm_rotate(x[0], HEADS, weight=x[1], cos=x[2], sin=x[3], **rotary),
            [x, torch.randn(CHANNELS), torch.randn(33, DIM), torch.randn(33, DIM)],
        ),
        (lambda x: skip(x[0], x[1], 1.0, x[2], **how), [x, x + 1, row]),
        (
            lambda x: of_stream(x[0], x[1], gate=x[2], factor=x[3], offset=x[4]),
            [x, x + 1, row, row + 1, row + 2],
        ),
        (
            lambda x: of_stream(
                (x[0], x[1]), x[2], gate=(x[3], x[3]), factor=(x[4], x[4]), offset=(x[5], x[5]),
                weight=x[6],
            ),
            [*pair, x, row, row + 1, row + 2, row[0, 0]],
        ),
    ]  # fmt: skip
    for call, tensors in calls:
        assert compare(log, call, lambda tensors=tensors: [t.clone() for t in tensors]) == 1


# --- which recordings serve ----------------------------------------------------------------------


def test_views_and_shared_memory_are_told_apart(log: Log) -> None:
    """Views of one tensor, in either order, tensors of their own with the strides of views, one
    tensor in two places, and contiguous tensors."""

    def views() -> list[Tensor]:
        return list(tokens(160, 3 * CHANNELS).chunk(3, dim=-1))

    def same() -> list[Tensor]:
        k = tokens(160)
        return [tokens(96), k, k]

    makes: list[Make] = [
        views, lambda: [views()[0] for _ in range(3)], lambda: views()[::-1], views,
        same, lambda: [tokens(n) for n in (96, 160, 160)], same,
    ]  # fmt: skip
    for make in makes:
        compare(log, attention(), make)
    makes = [
        lambda: [tokens(40)], lambda: [tokens(40, 2 * CHANNELS)[..., :CHANNELS]],
        lambda: [tokens(80)[:, ::2]], lambda: [tokens(42)],
    ]  # fmt: skip
    for make in makes:
        compare(log, normed, make)


def normed(x: list[Tensor]) -> Any:
    return of_stream(x[0])


def test_another_alignment_is_another_recording(log: Log) -> None:
    """Triton compiles apart for addresses that divide by 16."""

    def at(offset: int) -> list[Tensor]:
        memory = torch.randn(2 * 41 * CHANNELS + 8).bfloat16()
        return [memory[offset : offset + 2 * 41 * CHANNELS].view(2, 41, CHANNELS)]

    for offset, recorded in ((0, True), (0, False), (1, True), (1, False), (8, False)):
        log.clear()
        normed(at(offset))
        assert was_replayed(log) != recorded
    for offset in (0, 1, 8, 1):
        compare(log, normed, lambda offset=offset: at(offset))


# --- what is not recorded ------------------------------------------------------------------------


def test_what_else_a_launcher_does_is_never_left_out(log: Log) -> None:
    """A torch operation inside makes a launcher run as it is, every time."""
    runs = []

    @replayed
    def doubled(x: Tensor) -> Tensor:
        runs.append(1)
        return skip(None, x * 2, 1.0, 1.0, out_dtype=x.dtype)

    @replayed
    def writing(x: Tensor, y: Tensor) -> Tensor:
        runs.append(1)
        y.add_(1)
        return skip(None, x, 1.0, 1.0, out_dtype=x.dtype)

    for _ in range(4):
        doubled(tokens(8))
        writing(tokens(8), tokens(8))
    assert len(runs) == 8


def test_only_declared_constants_are_held(log: Log) -> None:
    """A tensor that is no argument may move, unless it was declared to stay."""
    hidden, declared = tokens(8), keep_for_replay(tokens(8))
    runs: list[str] = []

    def beside(name: str, constant: Tensor) -> Callable[[Tensor], Tensor]:
        @replayed
        def launcher(x: Tensor) -> Tensor:
            runs.append(name)
            return skip(constant, x, 1.0, 1.0, out_dtype=x.dtype)

        return launcher

    for name, constant in (("hidden", hidden), ("declared", declared)):
        launcher = beside(name, constant)
        for _ in range(4):
            launcher(tokens(8))
    assert runs == ["hidden"] * 4 + ["declared"]
    assert log[-1][2].count(declared.data_ptr()) == 1


def test_an_error_while_recording_is_raised_and_nothing_is_kept(log: Log) -> None:
    runs = []

    @replayed
    def failing(x: Tensor) -> Tensor:
        runs.append(1)
        raise ValueError("no")

    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            failing(tokens(8))
    assert len(runs) == 3
    assert recorder() is None


def test_a_recording_keeps_no_memory_of_the_call_it_was_made_from(log: Log) -> None:
    """Neither arguments nor scratch nor views of them, also before Python collects garbage: of a
    long video, they are gigabytes."""
    call = attention()
    gc.disable()
    try:
        for _ in range(2):
            call([tokens(n) for n in (97, 161, 161)])
        _holds_one_constant_of(log)
    finally:
        gc.enable()
    call([tokens(n) for n in (97, 161, 161)])
    assert was_replayed(log)


def _holds_one_constant_of(log: Log) -> None:
    """Empty the log, after which no memory that it named lives but the constant."""
    values = [getattr(value, "base", value) for _, _, several in log for value in several]
    memory = {place(value) for value in values if type(value) is Tensor}
    assert len(memory) > 6
    del values
    log.clear()
    tensors = [x for x in gc.get_objects() if type(x) is Tensor and x.layout is torch.strided]
    alive = {place(x) for x in tensors}
    assert len(alive & memory) <= 1, "more than the one constant of the process"


@pytest.mark.parametrize("when", ["launch_enter_hook", "launch_exit_hook"])
def test_nothing_is_replayed_while_something_watches_launches(
    log: Log, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    for _ in range(2):
        normed([tokens(43)])
    log.clear()
    normed([tokens(43)])
    assert was_replayed(log)
    monkeypatch.setattr(triton.knobs.runtime, when, lambda metadata: None)
    log.clear()
    normed([tokens(43)])
    assert not was_replayed(log)
