"""The guard compares what the fast path returned, sees planted faults, and decides on the spot."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.measures import relative_l2
from tests.patching.models import MODELS, classes, named, run, wan, wide
from turbo_rcm_patch import PatchReport, ops, patch_model, report_of, unpatch_model
from turbo_rcm_patch.errors import NonFiniteInputError
from turbo_rcm_patch.ops import unchecked
from turbo_rcm_patch.patching.families.wan import WanBlock
from turbo_rcm_patch.patching.measure import BUDGET
from turbo_rcm_patch.patching.pieces import Attend

Wrong = Callable[..., Any]


@dataclass(frozen=True)
class Fault:
    """A wrong operation in the fast path.

    Attributes:
        name: In words.
        operation: The operation of `ops.unchecked`, or of `owner`, that is replaced.
        wrong: Makes the wrong one from the right one.
        model: The row of the table of models.
        options: Of `patch_model`.
        owner: What holds the operation.
    """

    name: str
    operation: str
    wrong: Callable[[Wrong], Wrong]
    model: str = "t2v"
    options: dict[str, Any] = field(default_factory=dict)
    owner: Any = unchecked

    def __str__(self) -> str:
        return f"{self.model}-{self.name.replace(' ', '-')}"

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = getattr(self.owner, self.operation)
        monkeypatch.setattr(self.owner, self.operation, self.wrong(right))


def other_arguments(change: Callable[[list[Any]], Any]) -> Callable[[Wrong], Wrong]:
    """The right operation on changed arguments."""

    def wrong(right: Wrong) -> Wrong:
        def run(*args: Any) -> Any:
            changed = list(args)
            change(changed)
            return right(*changed)

        return run

    return wrong


def change(*numbers: int, by: Callable[[Any], Any]) -> Callable[[Wrong], Wrong]:
    """Some arguments changed, where they are there."""

    def one(args: list[Any]) -> None:
        for number in numbers:
            if args[number] is not None:
                args[number] = by(args[number])

    return other_arguments(one)


def put(*values: tuple[int, Any]) -> Callable[[Wrong], Wrong]:
    """Some arguments replaced."""
    return other_arguments(lambda args: [args.__setitem__(*one) for one in values])


def take(to: int, of: int) -> Callable[[Wrong], Wrong]:
    """An argument in the place of another one too."""
    return other_arguments(lambda args: args.__setitem__(to, args[of]))


def swap(i: int, j: int) -> Callable[[Wrong], Wrong]:
    def both(args: list[Any]) -> None:
        args[i], args[j] = args[j], args[i]

    return other_arguments(both)


def result(number: int, by: Callable[[Tensor], Tensor]) -> Callable[[Wrong], Wrong]:
    """A wrong result; of several the one with a number."""

    def wrong(right: Wrong) -> Wrong:
        def run(*args: Any) -> Any:
            made = right(*args)
            if not isinstance(made, tuple):
                return by(made)
            several = list(made)
            several[number] = by(several[number])
            return tuple(several)

        return run

    return wrong


def by_role(of_text: bool, wrong: Callable[[Wrong], Wrong]) -> Callable[[Wrong], Wrong]:
    """A fault of the attentions to text alone, or of those among video tokens."""

    def one(right: Wrong) -> Wrong:
        bad = wrong(right)
        return lambda *args: (bad if (args[10] is None) == of_text else right)(*args)

    return one


def roll(x: Tensor) -> Tensor:
    return x.roll(1, -1)


def one_sample(x: Tensor) -> Tensor:
    return torch.cat([x[:1].roll(3, 1), x[1:]])


def last_rows(x: Tensor) -> Tensor:
    return torch.cat([x[:, :-8], x[:, -8:] * 0], 1)


def heads_permuted(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([x[..., half:], x[..., :half]], -1)


def norm_of_the_stream_before(right: Wrong) -> Wrong:
    return lambda *a: (right(*a)[0], right(a[0], 0 * a[1], *a[2:])[1])


def modulation_in_another_order(right: Wrong) -> Wrong:
    return lambda self, temb: (*right(self, temb)[3:], *right(self, temb)[:3])


INT8 = {"linear": "int8"}
ONE_LAUNCH = {"form": "one-launch"}

# ruff: noqa: E501  one fault a line
# Arguments of skip_norm: residual, branch, gate, factor, offset, number added to the factor,
# epsilon. Of attention: q, k, v, residual, ..., norms of q and k (6 to 9), cos, sin (10, 11), ...
WAN_FAULTS = [
    Fault("gate rolled", "skip_norm", change(2, by=roll)),
    Fault("gate of the wrong sign", "skip_norm", change(2, by=torch.neg)),
    Fault("gate a fifth too large", "skip_norm", change(2, by=lambda g: 1.2 * g)),
    Fault("gate lost", "skip_norm", put((2, None))),
    Fault("no residual", "skip_norm", change(0, by=torch.zeros_like)),
    Fault("residual twice", "skip_norm", change(0, by=lambda x: 2 * x)),
    Fault("branch twice", "skip_norm", change(1, by=lambda y: 2 * y)),
    Fault("branch lost", "skip_norm", change(1, by=torch.zeros_like)),
    Fault("residual for branch", "skip_norm", swap(0, 1)),
    Fault("rows one off", "skip_norm", change(1, by=lambda y: y.roll(1, 1))),
    Fault("scale for shift", "skip_norm", swap(3, 4)),
    Fault("offset lost", "skip_norm", put((4, None))),
    Fault("factor lost", "skip_norm", put((3, None))),
    Fault("one not added", "skip_norm", put((5, 0.0))),
    Fault("epsilon of a thousand", "skip_norm", put((6, 1e3))),
    Fault("norm of the stream before", "skip_norm", norm_of_the_stream_before),
    Fault("the norm of one sample", "skip_norm", result(1, one_sample)),
    Fault("the norm's last rows", "skip_norm", result(1, last_rows)),
    Fault("the sum's last rows", "skip_norm", result(0, last_rows)),
    Fault("the sum of one sample", "skip_norm", result(0, one_sample)),
    Fault("the last skip's gate", "skip", change(3, by=roll)),
    Fault("the last skip's branch", "skip", change(1, by=torch.zeros_like)),
    Fault("the last skip's rows", "skip", result(0, last_rows)),
    Fault("first norm's scale for shift", "norm_modulate", swap(1, 2)),
    Fault("first norm not centred", "norm_modulate", result(0, lambda h: h + 1)),
    Fault("modulation in another order", "modulation", modulation_in_another_order, owner=WanBlock),
    Fault("heads permuted", "attention", result(0, heads_permuted)),
    Fault("heads of v permuted", "attention", change(2, by=heads_permuted)),
    Fault("values of other tokens", "attention", change(2, by=lambda v: v.roll(5, 1))),
    Fault("keys not normed", "attention", put((7, None))),
    Fault("queries not normed", "attention", put((6, None))),
    Fault("norm of q for k", "attention", take(7, 6)),
    Fault("no rotary embedding", "attention", put((10, None), (11, None))),
    Fault("stale rotary tables", "attention", change(10, 11, by=lambda x: x.roll(9, 0))),
    Fault("rotary one row off for k", "attention", change(1, by=lambda k: k.roll(1, 1))),
    Fault("logits eight times as large", "attention", change(20, by=lambda s: 8 * s)),
    Fault("half of the text", "attention", by_role(True, change(1, 2, by=lambda k: k[:, ::2].contiguous()))),
    Fault("padding in the text", "attention", by_role(True, change(1, 2, by=lambda k: torch.cat([k, 0 * k], 1)))),
    Fault("values of the last keys lost", "attention", by_role(False, change(2, by=last_rows))),
    Fault("GELU left out", "linear_gelu", lambda right: F.linear),
    Fault("bias left out", "linear_gelu", change(2, by=lambda b: 0 * b - 1)),
    Fault("gates one token off", "skip_norm", change(2, by=lambda g: g.roll(1, 1)), "gate-per-token"),
    Fault("scales one token off", "skip_norm", change(3, 4, by=lambda g: g.roll(1, 1)), "gate-per-token"),
    Fault("image dropped", "attention", lambda right: lambda *a: right(*a) if a[3] is None else (a[3], None), "i2v"),
    Fault("text dropped", "attention", change(3, by=torch.zeros_like), "i2v"),
    Fault("scales of int8 rows lost", "skip_norm_rows", result(2, torch.ones_like), options=INT8),
    Fault("int8 rows one off", "skip_norm_rows", result(1, lambda x: x.roll(1, 1)), options=INT8),
    Fault("int8 scales of other channels", "int8_linear", change(2, by=lambda s: 2 * s.roll(7, 0)), options=INT8),
    Fault("gate rolled in one launch", "attention_project_skip",
          lambda right: lambda *a, c_out, **n: right(*a, c_out=roll(c_out), **n), options=ONE_LAUNCH, owner=ops),
    Fault("projection of other heads in one launch", "attention_project_skip",
          lambda right: lambda q, k, v, w, *a, **n: right(q, k, v, roll(w), *a, **n), options=ONE_LAUNCH, owner=ops),
]  # fmt: skip

# Arguments of skip_norm_streams: branch, text, video, both gates, both scales, both shifts, ...
COGVIDEOX_FAULTS = [
    Fault(name, operation, wrong, "cogvideox-5b")
    for name, operation, wrong in [
        ("gates swapped", "skip_norm_streams", swap(3, 4)),
        ("gate of text rolled", "skip_norm_streams", change(3, by=roll)),
        ("gate of video rolled", "skip_norm_streams", change(4, by=roll)),
        ("scales swapped", "skip_norm_streams", swap(5, 6)),
        ("scale for shift", "skip_norm_streams", swap(5, 7)),
        ("shift lost", "skip_norm_streams", change(8, by=torch.zeros_like)),
        ("branch one row off", "skip_norm_streams", change(0, by=lambda y: y.roll(1, 1))),
        ("norm's weight lost", "skip_norm_streams", put((9, None))),
        ("norm of one sample", "skip_norm_streams", result(2, one_sample)),
        ("streams swapped in the norm", "skip_norm_streams", result(2, lambda h: h.roll(7, 1))),
        ("sum of the last rows", "skip_streams", result(1, last_rows)),
        ("last gates swapped", "skip_streams", swap(3, 4)),
        ("text's residual lost", "skip_streams", change(1, by=torch.zeros_like)),
        ("heads permuted", "attention", result(0, heads_permuted)),
        ("norm of q for k", "attention", take(7, 6)),
        ("bias of k's norm lost", "attention", change(9, by=lambda b: b + 1)),
        ("rotary for text too", "attention", change(10, 11, by=lambda x: x.roll(-7, 0))),
        ("values of the text lost", "attention", change(2, by=lambda v: torch.cat([0 * v[:, :7], v[:, 7:]], 1))),
        ("first norm one row off", "norm_modulate_streams", result(0, lambda h: h.roll(1, 1))),
        ("GELU left out", "linear_gelu", lambda right: F.linear),
    ]
]  # fmt: skip

#: Faults that move no block by the budget, and the smallest error of a network, over the unpatched
#: one's, that each gives: `compare` fails at 2.
SMALL_FAULTS = [
    (Fault("gate a twentieth too large", "skip_norm", change(2, by=lambda g: 1.05 * g)), 2.0),
    (Fault("last gate a twentieth too small", "skip", change(3, by=lambda g: 0.95 * g)), 2.0),
    (Fault("logits a tenth larger", "attention", change(20, by=lambda s: 1.1 * s)), 2.0),
    (Fault("GELU by its other formula", "linear_gelu",
           lambda right: lambda x, w, b: F.gelu(F.linear(x, w, b))), 0.0),
    (Fault("residual in bf16", "skip_norm", result(0, lambda x: x.bfloat16().float())), 0.0),
]  # fmt: skip


@pytest.mark.supports(("WanTransformer3DModel", "CogVideoXTransformer3DModel"), "the guard")
@pytest.mark.parametrize("fault", [*WAN_FAULTS, *COGVIDEOX_FAULTS], ids=str)
def test_a_planted_fault_is_seen_and_the_block_is_right_in_the_same_call(
    fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = named(fault.model)
    model, inputs = one.model(), one.inputs()
    before = run(model, inputs)
    report = patch_model(model, attention="int8", fidelity=None, **fault.options)
    fault.plant(monkeypatch)
    made = run(model, inputs)
    assert {record.path for record in report.guard.decisions} == set(report.ran()), str(
        report.guard
    )
    # What the call that decided returned is what every later one does, and it is right.
    assert relative_l2(made, before) < 0.02
    assert torch.equal(run(model, inputs), made)
    if not fault.options and fault.operation != "attention":
        assert report.fused == 0  # its author computes it


def scaled(rows: slice, by: float) -> Callable[[Tensor], Tensor]:
    def wrong(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, rows] *= by
        return x

    return wrong


#: Faults of a few rows of a long sequence. The first is small in the mean over all rows.
LONG_FAULTS = [
    Fault("one row of a tile", "attention", result(0, scaled(slice(63, None, 64), 1.7))),
    Fault("one row of a tile of the sum", "skip", result(0, scaled(slice(127, None, 128), -1))),
    Fault("the last two rows", "attention", result(0, scaled(slice(-2, None), -1))),
    Fault("the last two rows of the sum", "skip", result(0, scaled(slice(-2, None), -1))),
    Fault("one sample", "skip_norm", result(1, one_sample)),
]


@pytest.mark.parametrize("fault", [*LONG_FAULTS, None], ids=str)
def test_faults_of_few_rows_are_seen_in_a_long_sequence(
    fault: Fault | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third of 4,185 rows is compared, which skips the last two, and so are the last 64."""
    model = wan(num_layers=1, num_attention_heads=1, attention_head_dim=16, ffn_dim=16)
    model.eval().requires_grad_(False)
    inputs = named("t2v").inputs()
    generator = torch.Generator().manual_seed(2)
    inputs["hidden_states"] = torch.randn(2, 4, 5, 62, 54, generator=generator)
    before = run(model, inputs)
    report = patch_model(model, attention="exact", fidelity=None)
    if fault is not None:
        fault.plant(monkeypatch)
    made = run(model, inputs)
    assert bool(report.guard.decisions) == (fault is not None)
    assert relative_l2(made, before) < 1e-5
    if fault is None:
        assert all(record.error < 1e-4 for record in report.guard)


@pytest.mark.parametrize(("fault", "least"), SMALL_FAULTS, ids=[str(f) for f, _ in SMALL_FAULTS])
def test_of_smaller_faults_those_that_can_be_seen_fail_a_comparison(
    fault: Fault, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = named(fault.model)
    model, inputs = one.model(torch.bfloat16), one.inputs(dtype=torch.bfloat16)
    truth = run(copy.deepcopy(model).float(), wide(inputs))
    unpatched = relative_l2(run(model, inputs).float(), truth)
    report = patch_model(model, attention="exact", fidelity=None)
    fault.plant(monkeypatch)
    number = relative_l2(run(model, inputs).float(), truth) / unpatched
    assert not report.guard.decisions
    assert least < number if least else number < 2


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


def bits(linear: Any, fidelity: float, count: int) -> list[Tensor]:
    """What the first forwards of a model return; the guard decides in the first."""
    one = named("t2v")
    model, inputs = one.model(torch.bfloat16), one.inputs(dtype=torch.bfloat16)
    report = patch_model(model, attention="int8", linear=linear, fidelity=fidelity)
    made = [run(model, inputs) for _ in range(count)]
    assert report.guard.decisions
    return made


@pytest.mark.parametrize("fidelity", [0.3, 0.9])
@pytest.mark.parametrize("linear", ["as-is", "int8"])
def test_the_same_input_gives_the_same_bits_in_the_first_and_the_tenth_forward(
    linear: Any, fidelity: float
) -> None:
    first, *others = bits(linear, fidelity, 10)
    assert all(torch.equal(first, other) for other in others)


def test_another_process_gives_the_same_bits(tmp_path: Path) -> None:
    ways = [("as-is", 0.3), ("int8", 0.9)]
    file = tmp_path / "bits.pt"
    code = (
        "import torch; from tests.patching.test_guard import bits;"
        f"torch.save([bits(*way, 2)[1] for way in {ways}], {str(file)!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
    made = [bits(*way, 1)[0] for way in ways]
    assert all(map(torch.equal, made, torch.load(file)))


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


class Pipeline(SimpleNamespace):
    """As much of a pipeline as the guard asks for its step."""


@pytest.mark.parametrize("video", [1, 2])
@pytest.mark.parametrize("pipeline", [True, False])
def test_a_fault_that_begins_at_the_second_step_is_found_in_all_blocks(
    pipeline: bool, video: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 30 blocks and 4 steps: by the last step's comparison, where the steps are known, or by a
    sampled block, after which every block is compared."""
    model = wan(num_layers=30).eval().requires_grad_(False)
    inputs = named("t2v").inputs(batch=1)
    scheduler = SimpleNamespace(_step_index=0, timesteps=[4, 3, 2, 1])
    pipe = Pipeline(transformer=model, scheduler=scheduler)
    report = patch_model(pipe if pipeline else model, attention="exact", fidelity=None)
    for forward in range(4 * video):
        scheduler._step_index = forward % 4
        if forward == 4 * (video - 1) + 1:
            assert not report.guard.decisions
            WAN_FAULTS[0].plant(monkeypatch)
        run(model, inputs)
    found = {record.path for record in report.guard.decisions}
    whole = pipeline and video == 1
    if not whole:
        assert found  # in this video
        run(model, inputs)
    assert len({record.path for record in report.guard.decisions}) == 30
    if whole:
        assert {(record.step, record.when) for record in report.guard.decisions} == {(3, "last")}


@pytest.mark.parametrize("guided", [1, 2])
def test_each_expert_is_compared_on_its_own_last_step(guided: int) -> None:
    """The high-noise expert of Wan 2.2 runs the first of five steps alone, here three."""
    pipe = Pipeline(transformer=wan().eval(), transformer_2=wan().eval())
    pipe.config = SimpleNamespace(boundary_ratio=0.875)
    pipe.scheduler = scheduler = SimpleNamespace(
        timesteps=torch.tensor([999, 960, 875, 700, 500]),
        config=SimpleNamespace(num_train_timesteps=1000),
    )
    report = patch_model(pipe, attention="exact", fidelity=None)
    inputs = named("t2v").inputs(batch=1)
    for step in range(5):
        scheduler._step_index = step
        for _ in range(guided):
            run(pipe.transformer if step < 3 else pipe.transformer_2, inputs)
    last = {(one.path, one.step) for one in report.guard if one.when == "last"}
    steps = {"transformer": 2, "transformer_2": 4}
    assert last == {(f"{part}.blocks.{i}", step) for part, step in steps.items() for i in (0, 1)}


def test_samples_reach_both_halves_of_guidance() -> None:
    model, inputs = wan(num_layers=3).eval(), named("t2v").inputs(batch=1)
    report = patch_model(model, attention="exact", fidelity=None)
    halves = set()
    for forward in range(40):
        before = len(report.guard)
        run(model, inputs)
        halves |= {forward % 2} if forward and len(report.guard) > before else set()
    assert halves == {0, 1}


@pytest.mark.parametrize("count", [1, 2, 14])
def test_samples_reach_every_block(count: int) -> None:
    """Also of a multiple of 7, as CogVideoX-5B's 42."""
    model = wan(num_layers=count, num_attention_heads=1, attention_head_dim=16, ffn_dim=16)
    model.eval().requires_grad_(False)
    report = patch_model(model, attention="exact", fidelity=None)
    inputs = named("t2v").inputs(batch=1)
    inputs["hidden_states"] = inputs["hidden_states"][:, :, :1, :4, :4]
    for _ in range(4 * count + 4):
        run(model, inputs)
    sampled = {record.path for record in report.guard if record.when == "sampled"}
    assert len(sampled) == count


def test_a_stale_int8_weight_is_seen_by_sampling() -> None:
    """Merging a LoRA layer by hand writes through `.data`, which nothing counts."""
    one = named("t2v")
    model, inputs = one.model(), one.inputs()
    report = patch_model(model, attention="exact", linear="int8", fidelity=None)
    run(model, inputs)
    for block in model.blocks:
        block.attn1.to_v.weight.data.neg_()
    for _ in range(4):
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

    def fails(*args: object, **named: object) -> None:
        raise RuntimeError("no such device")

    author = sys.modules[type(model).__module__]
    monkeypatch.setattr(author, "dispatch_attention_fn", fails)
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
