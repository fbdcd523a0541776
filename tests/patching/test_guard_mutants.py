"""The guard has to see what is wrong in a pair: every family runs with one thing broken at a time.

A mutant breaks our operations, which all families call, and nothing of their authors' code. The
guard has to give back what it broke, so the network's output is its author's again. Blocks
keep no plans here and call the public operations; `test_plan.py` breaks what plans call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.patching import cogvideox, turbodiffusion, wan_family
from tests.patching.wan import CASES, relative
from turbo_rcm_patch import PatchConfig, ops, patch_model
from turbo_rcm_patch.models.rcm_attention import RCMAttention

Tensor = torch.Tensor
pytestmark = pytest.mark.usefixtures("no_plans")
#: Operations that close a skip with a gate, and those that norm and modulate.
CLOSING = ("attention_project_skip", "project_skip", "skip", "project_skip_streams", "int8_linear")
ATTENTION = ("attention_skip", "attention_project_skip", "masked_attention")
DROPPED = 4


def coefficients(given: Any, change: Callable[[Tensor, Tensor], Tensor], like: Any) -> Any:
    """c_out, a number or a tensor or one a stream, changed; as a tensor [B, 1 or N, C]."""
    if isinstance(given, tuple):
        pairs = zip(given, like, strict=True)
        return tuple(coefficients(one, change, x) for one, x in pairs)
    if not isinstance(given, Tensor):
        given = torch.full((like.shape[0], 1, like.shape[-1]), float(given))
    if given.dim() == 1:
        given = given[:, None, None].expand(-1, 1, like.shape[-1])
    return change(given, like).contiguous()


def gates(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    def mutate(monkeypatch: pytest.MonkeyPatch) -> None:
        for name in CLOSING:
            monkeypatch.setattr(ops, name, changed(name, getattr(ops, name)))

    def changed(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            args_list = list(args)
            like = kwargs.get("residual", kwargs.get("residuals"))
            if name == "skip":  # (residual, branch, c_skip, c_out)
                like = args[0]
                if len(args) > 3:
                    kwargs["c_out"] = args_list.pop(3)
            if like is None:
                return real(*args, **kwargs)
            kwargs["c_out"] = coefficients(kwargs.get("c_out", 1.0), change, like)
            return real(*args_list, **kwargs)

        return run

    return mutate


def no_gate(gate: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(gate)


def gates_of_other_channels(gate: Tensor, like: Tensor) -> Tensor:
    """In 1 % of the tokens, from the middle."""
    wrong = gate.expand(-1, like.shape[1], -1).clone()
    rows = slice(like.shape[1] // 2, like.shape[1] // 2 + max(1, like.shape[1] // 100))
    wrong[:, rows] = 2 * wrong[:, rows].roll(1, -1)
    return wrong


def one_sample(gate: Tensor, like: Tensor) -> Tensor:
    wrong = gate.expand(like.shape[0], -1, -1).clone()
    wrong[-1] *= 1.05
    return wrong


def no_shift(monkeypatch: pytest.MonkeyPatch) -> None:
    single, streams = ops.norm_modulate, ops.norm_modulate_streams
    monkeypatch.setattr(
        ops, "norm_modulate", lambda x, **given: single(x, **given | {"shift": None})
    )
    monkeypatch.setattr(
        ops, "norm_modulate_streams",
        lambda x, **given: streams(
            x, **given | {"shift": tuple(map(torch.zeros_like, given["shift"]))}
        ),
    )  # fmt: skip


def heads(change: Callable[[Tensor], Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    """Change the attention's output [B, N, H, D]; of one that is projected, W_o's columns."""

    def mutate(monkeypatch: pytest.MonkeyPatch) -> None:
        projected, plain = ops.attention_project_skip, ops.attention_skip
        masked = ops.masked_attention

        def with_projection(
            q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Any, spec: Any, **given: Any
        ) -> Tensor:
            columns = change(weight.unflatten(-1, (spec.heads, -1))).flatten(-2)
            return projected(q, k, v, columns, bias, spec, **given)

        def by_head(out: Tensor, spec: Any) -> Tensor:
            return change(out.unflatten(-1, (spec.heads, -1))).flatten(-2)

        monkeypatch.setattr(ops, "attention_project_skip", with_projection)
        monkeypatch.setattr(
            ops, "attention_skip",
            lambda q, k, v, spec, **given: by_head(plain(q, k, v, spec, **given), spec),
        )  # fmt: skip
        monkeypatch.setattr(
            ops, "masked_attention",
            lambda q, k, v, mask, spec, **given: by_head(
                masked(q, k, v, mask, spec, **given), spec
            ),
        )  # fmt: skip

    return mutate


def scaled(x: Tensor) -> Tensor:
    x = x.clone()
    x[..., -1, :] *= 1.05
    return x


def swapped(x: Tensor) -> Tensor:
    return x.roll(1, dims=-2)


def fewer_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("attention_skip", "attention_project_skip"):
        real = getattr(ops, name)

        def run(
            q: Tensor, k: Tensor, v: Tensor, *rest: Any, real: Any = real, **given: Any
        ) -> Any:
            seen = torch.full((k.shape[0],), k.shape[1] - min(DROPPED, k.shape[1] // 2))
            return real(q, k, v, *rest, **given | {"kv_lengths": seen.to(torch.int32)})

        monkeypatch.setattr(ops, name, run)
    masked = ops.masked_attention

    def hidden(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, spec: Any, **given: Any) -> Tensor:
        mask = mask.clone()
        mask[..., -DROPPED:] = False
        return masked(q, k, v, mask, spec, **given)

    monkeypatch.setattr(ops, "masked_attention", hidden)


@dataclass(frozen=True)
class Mutant:
    """What is broken, and which kinds of pair it breaks."""

    name: str
    mutate: Callable[[pytest.MonkeyPatch], None]
    kinds: tuple[str, ...]


ALL = ("self", "cross", "feed-forward", "control")
GATED = ("self", "feed-forward")
MUTANTS = [
    Mutant("gate-0", gates(no_gate), ALL),
    Mutant("shift-dropped", no_shift, GATED),
    Mutant("gates-of-1-percent", gates(gates_of_other_channels), GATED),
    Mutant("one-sample", gates(one_sample), ALL),
    Mutant("one-head-scaled", heads(scaled), ("self", "cross")),
    Mutant("two-heads-swapped", heads(swapped), ("self", "cross")),
    Mutant("last-keys-dropped", fewer_keys, ("self",)),
]


@dataclass(frozen=True)
class Subject:
    """A model and its inputs, of two samples."""

    name: str
    cls: str
    model: Callable[[], Any]
    inputs: Callable[[], dict[str, Any]]


def of_case(case: Any, cls: str = "") -> Subject:
    name = cls or case.cls.__name__
    return Subject(case.name, name, case.model, lambda: case.inputs(2))


def turbo(image: bool) -> Subject:
    return Subject(
        f"turbodiffusion{'-i2v' * image}", "WanModel",
        lambda: turbodiffusion.tiny(image=image),
        lambda: turbodiffusion.tiny_inputs(batch=2, image=image),
    )  # fmt: skip


def rcm() -> Any:
    torch.manual_seed(0)
    return RCMAttention(128, 2).requires_grad_(False)


def rcm_inputs() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 60, 128, generator=generator)
    return {"x": x, "t": torch.tensor([0.5, 1.0])}


COG, CONSISID = "CogVideoXTransformer3DModel", "ConsisIDTransformer3DModel"
SUBJECTS = [
    *(of_case(case, "WanTransformer3DModel") for case in (CASES[0], CASES[1], CASES[3])),
    *(
        of_case(wan_family.named(name))
        for name in ("flf2v", "vace", "animate", "chronoedit", "skyreels", "skyreels-masked")
    ),
    *(
        of_case(case, CONSISID if case.consisid else COG)
        for case in cogvideox.CASES
        if case.name in ("2b", "5b", "fused-qkv", "consisid")
    ),
    turbo(image=False),
    turbo(image=True),
    Subject("rcm", "RCMAttention", rcm, rcm_inputs),
]


def output_of(model: Any, given: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        made = model(**given)
    out: Tensor = made[0] if isinstance(made, tuple) else made
    return out


def cases() -> list[Any]:
    return [
        pytest.param(
            subject, mutant, id=f"{subject.name}-{mutant.name}",
            marks=pytest.mark.supports(subject.cls, "the guard"),
        )
        for subject in SUBJECTS
        for mutant in MUTANTS
        if not (subject.name == "rcm" and mutant.name == "shift-dropped")
    ]  # fmt: skip


@pytest.mark.parametrize(("subject", "mutant"), cases())
def test_what_is_broken_is_given_back(
    subject: Subject, mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = subject.model(), subject.inputs()
    expected = output_of(model, given)
    mutant.mutate(monkeypatch)
    report = patch_model(model, PatchConfig(attention="exact"))
    broken = [pair.path for pair in report.pairs if pair.fused and pair.kind in mutant.kinds]
    output = output_of(model, given)
    back = {record.path for record in report.guard if record.verdict == "given back"}
    assert broken and set(broken) <= back
    assert relative(output, expected) < 1e-4


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_what_is_broken_beside_8_bits_is_given_back(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16, where an honest error is far larger than what some of these are."""
    model, given = CASES[0].model(torch.bfloat16), CASES[0].inputs(2, torch.bfloat16)
    expected = output_of(model, given)
    mutant.mutate(monkeypatch)
    report = patch_model(model, PatchConfig(precision="fixed", form="two-launch"))
    broken = [pair.path for pair in report.pairs if pair.fused and pair.kind in mutant.kinds]
    output = output_of(model, given)
    back = {record.path for record in report.guard if record.verdict == "given back"}
    assert broken and set(broken) <= back
    assert relative(output, expected) < 0.02


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("linear", ["as-is", "int8"])
def test_what_is_whole_is_kept(subject: Subject, dtype: torch.dtype, linear: Any) -> None:
    """With a margin: half of the budget."""
    model, given = subject.model(), subject.inputs()
    if dtype == torch.bfloat16:
        model = model.to(dtype)
        kept = ("timestep", "e", "t", "image_rotary_emb")
        given = {
            name: x.to(dtype)
            if isinstance(x, Tensor) and x.dtype == torch.float32 and name not in kept
            else x
            for name, x in given.items()
        }
    report = patch_model(model, PatchConfig(linear=linear, precision="fixed"))
    output_of(model, given)
    assert len(report.guard) >= report.fused
    worst = max(report.guard, key=lambda record: record.error)
    assert worst.error < 0.05 and {record.verdict for record in report.guard} == {"kept"}, worst


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("one-sample", {"sample": 1}),
        ("one-head-scaled", {"head": 1}),
        ("gates-of-1-percent", {"rows": (30,)}),
    ],
)
def test_the_record_says_where(
    name: str, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = CASES[0].model(), CASES[0].inputs(2)
    next(mutant for mutant in MUTANTS if mutant.name == name).mutate(monkeypatch)
    report = patch_model(model, PatchConfig(attention="exact", kinds=("self",)))
    output_of(model, given)
    record = report.guard[0]
    assert {field: getattr(record, field) for field in expected} == expected
    for value in expected.values():
        assert str(value).strip("(,)") in record.where
        assert record.where in str(report.guard)


def test_a_gate_of_zero_that_is_its_author_s_is_kept() -> None:
    model, given = CASES[0].model(torch.bfloat16), CASES[0].inputs(2, torch.bfloat16)
    projection = model.condition_embedder.time_proj
    projection.weight.data.zero_()
    projection.bias.data.zero_()
    for block in model.blocks:
        block.scale_shift_table.data[:, (2, 5)] = 0
    report = patch_model(model, precision="fixed")
    output_of(model, given)
    assert {record.verdict for record in report.guard} == {"kept"}


def test_turbodiffusion_without_what_its_dense_attention_needs() -> None:
    """Its own attention is flash-attn's; the comparison does with torch's."""

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        raise TypeError("'NoneType' object is not callable")

    expected = output_of(turbodiffusion.tiny(), turbodiffusion.tiny_inputs())
    model = turbodiffusion.tiny()
    for module in model.modules():
        if hasattr(module, "local_attn"):
            module.local_attn = attention
    report = patch_model(model, precision="fixed")
    output = output_of(model, turbodiffusion.tiny_inputs())
    assert relative(output, expected) < 0.05
    assert len(report.guard) == 6 and {r.verdict for r in report.guard} == {"kept"}
