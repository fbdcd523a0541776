"""The guard compares what the fast path returned, sees planted faults, and decides on the spot."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.measures import relative_l2
from tests.patching.models import MODELS, classes, named, run
from turbo_rcm_patch import PatchReport, patch_model, report_of, unpatch_model
from turbo_rcm_patch.errors import NonFiniteInputError
from turbo_rcm_patch.ops import unchecked
from turbo_rcm_patch.patching.measure import BUDGET
from turbo_rcm_patch.patching.pieces import Attend

Wrong = Callable[..., Any]


@dataclass(frozen=True)
class Fault:
    """A wrong operation in the fast path.

    Attributes:
        name: In words.
        operation: The operation of `ops.unchecked` that is replaced.
        wrong: Makes the wrong one from the right one.
    """

    name: str
    operation: str
    wrong: Callable[[Wrong], Wrong]

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


def swapped(args: tuple[Any, ...], i: int, j: int) -> list[Any]:
    made = list(args)
    made[i], made[j] = made[j], made[i]
    return made


def replaced(args: tuple[Any, ...], i: int, change: Callable[[Any], Any]) -> list[Any]:
    """The arguments with one of them changed, where it is there."""
    made = list(args)
    if made[i] is not None:
        made[i] = change(made[i])
    return made


def roll(x: Tensor) -> Tensor:
    return x.roll(1, -1)


def of_input(operation: str, i: int, change: Callable[[Any], Any]) -> Callable[[Wrong], Wrong]:
    return lambda right: lambda *args: right(*replaced(args, i, change))


def one_sample(x: Tensor) -> Tensor:
    return torch.cat([x[:1].roll(3, 1), x[1:]])


def last_rows(x: Tensor) -> Tensor:
    return torch.cat([x[:, :-8], x[:, -8:] * 0], 1)


def heads_permuted(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([x[..., half:], x[..., :half]], -1)


def first(change: Callable[[Tensor], Tensor]) -> Callable[[Wrong], Wrong]:
    """A wrong first result."""

    def wrong(right: Wrong) -> Wrong:
        def run(*args: Any) -> Any:
            made = right(*args)
            return (change(made[0]), *made[1:]) if isinstance(made, tuple) else change(made)

        return run

    return wrong


def last(change: Callable[[Tensor], Tensor]) -> Callable[[Wrong], Wrong]:
    """A wrong last result."""
    return lambda right: lambda *args: (*(made := right(*args))[:-1], change(made[-1]))


# ruff: noqa: E501  one fault a line
# Arguments of skip_norm: residual, branch, gate, factor, offset, one, eps, ...
WAN_FAULTS = [
    Fault("gate rolled", "skip_norm", of_input("skip_norm", 2, roll)),
    Fault("gate of the wrong sign", "skip_norm", of_input("skip_norm", 2, torch.neg)),
    Fault("gate a fifth too large", "skip_norm", of_input("skip_norm", 2, lambda g: 1.2 * g)),
    Fault("gate lost", "skip_norm", lambda right: lambda *a: right(*a[:2], None, *a[3:])),
    Fault("no residual", "skip_norm", of_input("skip_norm", 0, torch.zeros_like)),
    Fault("residual twice", "skip_norm", of_input("skip_norm", 0, lambda x: 2 * x)),
    Fault("branch twice", "skip_norm", of_input("skip_norm", 1, lambda y: 2 * y)),
    Fault("branch lost", "skip_norm", of_input("skip_norm", 1, torch.zeros_like)),
    Fault("residual for branch", "skip_norm", lambda right: lambda *a: right(*swapped(a, 0, 1))),
    Fault("rows one off", "skip_norm", of_input("skip_norm", 1, lambda y: y.roll(1, 1))),
    Fault("scale for shift", "skip_norm", lambda right: lambda *a: right(*swapped(a, 3, 4))),
    Fault("offset lost", "skip_norm", lambda right: lambda *a: right(*a[:4], None, *a[5:])),
    Fault("factor lost", "skip_norm", lambda right: lambda *a: right(*a[:3], None, *a[4:])),
    Fault("one not added", "skip_norm", lambda right: lambda *a: right(*a[:5], 0.0, *a[6:])),
    Fault("epsilon of a thousand", "skip_norm", lambda right: lambda *a: right(*a[:6], 1e3, *a[7:])),
    Fault("the norm of one sample", "skip_norm", last(one_sample)),
    Fault("the norm's last rows", "skip_norm", last(last_rows)),
    Fault("the sum's last rows", "skip_norm", first(last_rows)),
    Fault("the sum of one sample", "skip_norm", first(one_sample)),
    Fault("the last skip's gate", "skip", of_input("skip", 3, roll)),
    Fault("the last skip's branch", "skip", of_input("skip", 1, torch.zeros_like)),
    Fault("the last skip's rows", "skip", first(last_rows)),
    Fault("first norm's scale for shift", "norm_modulate",
          lambda right: lambda *a: right(*swapped(a, 1, 2))),
    Fault("first norm not centred", "norm_modulate", first(lambda h: h + 1)),
    Fault("heads permuted", "attention", first(heads_permuted)),
    Fault("values of other tokens", "attention", of_input("attention", 2, lambda v: v.roll(5, 1))),
    Fault("keys not normed", "attention", lambda right: lambda *a: right(*a[:7], None, *a[8:])),
    Fault("queries not normed", "attention", lambda right: lambda *a: right(*a[:6], None, *a[7:])),
    Fault("no rotary embedding", "attention",
          lambda right: lambda *a: right(*a[:10], None, None, *a[12:])),
    Fault("stale rotary tables", "attention",
          lambda right: lambda *a: right(*replaced(tuple(replaced(a, 10, lambda x: x.roll(9, 0))),
                                                   11, lambda x: x.roll(9, 0)))),
    Fault("logits eight times as large", "attention",
          lambda right: lambda *a: right(*a[:20], 8 * a[20], *a[21:])),
    Fault("half of the keys", "attention",
          lambda right: lambda *a: right(*replaced(tuple(replaced(
              a, 1, lambda k: k[:, ::2].contiguous())), 2, lambda v: v[:, ::2].contiguous()))
          if a[0].shape[1] != a[1].shape[1] else right(*a)),
    Fault("GELU left out", "linear_gelu",
          lambda right: lambda x, w, b: torch.nn.functional.linear(x, w, b)),
    Fault("bias left out", "linear_gelu", lambda right: lambda x, w, b: right(x, w, 0 * b - 1)),
]  # fmt: skip

# Arguments of skip_norm_streams: branch, text, video, both gates, both scales, both shifts, ...
COGVIDEOX_FAULTS = [
    Fault("gates swapped", "skip_norm_streams",
          lambda right: lambda *a: right(*swapped(a, 3, 4))),
    Fault("gate of text rolled", "skip_norm_streams", of_input("", 3, roll)),
    Fault("gate of video rolled", "skip_norm_streams", of_input("", 4, roll)),
    Fault("scales swapped", "skip_norm_streams", lambda right: lambda *a: right(*swapped(a, 5, 6))),
    Fault("scale for shift", "skip_norm_streams", lambda right: lambda *a: right(*swapped(a, 5, 7))),
    Fault("shift lost", "skip_norm_streams", of_input("", 8, torch.zeros_like)),
    Fault("branch one row off", "skip_norm_streams", of_input("", 0, lambda y: y.roll(1, 1))),
    Fault("norm's weight lost", "skip_norm_streams",
          lambda right: lambda *a: right(*a[:9], None, *a[10:])),
    Fault("norm of one sample", "skip_norm_streams", last(one_sample)),
    Fault("sum of the last rows", "skip_streams", lambda right: lambda *a: (
        (made := right(*a))[0], last_rows(made[1]))),
    Fault("last gates swapped", "skip_streams", lambda right: lambda *a: right(*swapped(a, 3, 4))),
    Fault("heads permuted", "attention", first(heads_permuted)),
    Fault("rotary for text too", "attention",
          lambda right: lambda *a: right(*replaced(tuple(replaced(a, 10, lambda x: x.roll(-7, 0))),
                                                   11, lambda x: x.roll(-7, 0)))),
    Fault("first norm one row off", "norm_modulate_streams", first(lambda h: h.roll(1, 1))),
]  # fmt: skip

CASES = [("t2v", fault) for fault in WAN_FAULTS] + [
    ("cogvideox-5b", fault) for fault in COGVIDEOX_FAULTS
]


def plant(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    right = getattr(unchecked, fault.operation)
    monkeypatch.setattr(unchecked, fault.operation, fault.wrong(right))


@pytest.mark.supports(("WanTransformer3DModel", "CogVideoXTransformer3DModel"), "the guard")
@pytest.mark.parametrize(("name", "fault"), CASES, ids=[f"{n}-{f}" for n, f in CASES])
def test_a_planted_fault_is_seen_and_the_author_computes_the_block(
    name: str, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = named(name)
    model, inputs = one.model(), one.inputs()
    before = run(model, inputs)
    report = patch_model(model, attention="int8")
    plant(monkeypatch, fault)
    made = run(model, inputs)
    decided = {record.path for record in report.guard.decisions}
    assert len(decided) == 2, str(report.guard)
    assert {words.split(":")[0] for words in report.ran().values()} <= {
        "as their author wrote them", "fused with exact attention", "fused with int8 attention",
    }  # fmt: skip
    # What the call that decided returned is what every later one does, and it is the author's.
    assert relative_l2(made, before) < 0.02
    assert torch.equal(run(model, inputs), made)
    assert max(pair.fused for pair in report.pairs) == 0


@pytest.mark.supports(classes(MODELS), "the guard")
@pytest.mark.parametrize("one", MODELS, ids=str)
def test_nothing_is_decided_about_a_sound_model(one: Any) -> None:
    model, inputs = one.model(), one.inputs()
    report = patch_model(model, attention="int8", fidelity=None)
    made = run(model, inputs)
    assert not report.guard.decisions, str(report.guard)
    compared = {record.path for record in report.guard}
    assert len(compared) == len(report.ran())
    assert all(record.error < BUDGET for record in report.guard)
    # A forward that was compared returns what it would have returned uncompared.
    unpatch_model(model)
    patch_model(model, attention="int8", guard=False)
    assert torch.equal(run(model, inputs), made)


def test_the_same_input_gives_the_same_bits_in_the_first_and_the_tenth_forward() -> None:
    one = named("t2v")
    model, inputs = one.model(torch.bfloat16), one.inputs(dtype=torch.bfloat16)
    patch_model(model, attention="int8", fidelity=0.3)
    made = [run(model, inputs) for _ in range(10)]
    assert all(torch.equal(made[0], other) for other in made)


_FRESH = """
import torch, zlib
from tests.patching.models import named, run
from turbo_rcm_patch import patch_model
one = named("t2v")
model = one.model(torch.bfloat16)
patch_model(model, attention="int8")
for _ in range(2):
    made = run(model, one.inputs(dtype=torch.bfloat16))
print(zlib.crc32(made.float().numpy().tobytes()))
"""


def test_another_process_gives_the_same_bits() -> None:
    said = {
        subprocess.run(
            [sys.executable, "-c", _FRESH], capture_output=True, text=True, check=True, timeout=200
        ).stdout
        for _ in range(2)
    }
    assert len(said) == 1


def test_a_target_that_int8_misses_makes_blocks_exact_in_the_call_that_decides() -> None:
    one = named("t2v")
    model, inputs = one.model(torch.bfloat16), one.inputs(dtype=torch.bfloat16)
    report = patch_model(model, attention="int8", fidelity=0.01)
    made = run(model, inputs)
    assert {record.verdict for record in report.guard.decisions} == {"exact attention"}
    assert all("exact" in words for words in report.ran().values())
    unpatch_model(model)
    patch_model(model, attention="exact", guard=False)
    assert torch.equal(run(model, inputs), made)


def test_int8_linears_go_back_to_16_bits_for_the_target() -> None:
    one = named("t2v")
    model, inputs = one.model(torch.bfloat16), one.inputs(dtype=torch.bfloat16)
    report = patch_model(model, attention="int8", linear="int8", fidelity=0.01)
    made = run(model, inputs)
    assert report.guard.decisions[-1].verdict == "exact attention, Linears in 16 bits"
    unpatch_model(model)
    patch_model(model, attention="exact", guard=False)
    assert torch.equal(run(model, inputs), made)


def test_a_fault_that_begins_later_is_seen_by_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    one = named("t2v")
    model, inputs = one.model(), one.inputs()
    report = patch_model(model, attention="int8")
    run(model, inputs)
    plant(monkeypatch, WAN_FAULTS[0])
    for _ in range(8):
        run(model, inputs)
    assert {record.path for record in report.guard.decisions} == {"blocks.0", "blocks.1"}


def test_check_next_compares_every_block() -> None:
    one = named("t2v")
    model, inputs = one.model(), one.inputs()
    report = patch_model(model, attention="int8")
    run(model, inputs)
    before = len(report.guard)
    report.guard.check_next()
    run(model, inputs)
    assert len(report.guard) == before + 2


def test_another_length_with_another_attention_is_compared_again() -> None:
    one = named("t2v")
    model, inputs = one.model(), one.inputs()
    report = patch_model(model, attention="int8")
    run(model, inputs)
    run(model, {**inputs, "hidden_states": inputs["hidden_states"][:, :, :2]})
    assert len(report.guard) == 2
    run(model.bfloat16(), one.inputs(dtype=torch.bfloat16))
    assert len(report.guard) == 4


def test_an_input_that_is_not_finite_is_an_error_of_its_own() -> None:
    one = named("t2v")
    model, inputs = one.model(), one.inputs()
    patch_model(model, attention="int8")
    inputs["hidden_states"][0, 0, 0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteInputError, match="NaN or infinity"):
        run(model, inputs)


def test_an_author_that_cannot_run_is_reported_and_not_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = named("t2v")
    model, inputs = one.model(), one.inputs()
    with torch.no_grad():
        report = patch_model(model, attention="int8")

    def fails(*args: object) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(type(model.blocks[0]), "forward", fails)
    made = run(model, inputs)
    assert made.isfinite().all()
    assert {record.verdict for record in report.guard} == {"not compared"}
    assert "no such device" in str(report.guard)


def test_the_guard_leaves_no_hooks() -> None:
    one = named("cogvideox-5b")
    model, inputs = one.model(), one.inputs()
    patch_model(model, attention="int8")
    run(model, inputs)
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks


def test_without_a_guard_nothing_is_compared() -> None:
    one = named("t2v")
    model, inputs = one.model(), one.inputs()
    report = patch_model(model, guard=False)
    run(model, inputs)
    assert not len(report.guard)
    assert "guard: off" in str(report)


def test_the_report_outlives_the_model() -> None:
    one = named("t2v")
    model = one.model()
    report: PatchReport = patch_model(model)
    run(model, one.inputs())
    del model
    assert "9 of 9" not in str(report)
    assert len(report.guard) == 2


def test_keys_that_are_not_smoothed_are_an_error_the_guard_measures() -> None:
    """Outlier channels of k cost accuracy without smoothing: the measured share of int8 grows."""
    one = named("t2v")
    predictions = []
    for smooth in (True, False):
        model, inputs = one.model(torch.bfloat16), one.inputs(dtype=torch.bfloat16)
        for block in model.blocks:
            block.attn1.to_k.bias.data[::16] += 8
            block.attn1.norm_k.weight.data[::16] *= 4
        report = patch_model(model, attention="int8", smooth_k=smooth, fidelity=100.0)
        run(model, inputs)
        predictions.append(report.guard.prediction)
        assert report_of(model).config.smooth_k is smooth
    assert predictions[0] is not None
    assert predictions[1] is not None
    assert predictions[1] > predictions[0]


def test_attend_is_exact_over_few_keys() -> None:
    attend = Attend(2, 64, "auto", "auto", True, "auto")
    assert attend.over_few_keys(512).attention == "exact"
    assert attend.over_few_keys(1024).attention == "auto"
