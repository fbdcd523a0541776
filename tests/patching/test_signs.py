"""Signs of the support matrix that fail when their feature does: for each class and each kind of
pair, that ours runs there, reaches the output and is right; that Linears run in int8 there; and
that fused projections are the ones that are read.

`python -m tests.mutants --signs` breaks one feature after the other and looks for each sign.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from tests.patching import cogvideox, sla, turbodiffusion, wan_family
from tests.patching.wan import CASES, I2V, Case, relative
from turbo_rcm_patch import PatchConfig, find_pairs, ops, patch_model, patched, unpatch_model
from turbo_rcm_patch.models.rcm_attention import RCMAttention
from turbo_rcm_patch.patching import linears

Tensor = torch.Tensor
#: Kind of a pair -> the capability that it is.
KINDS = {
    "self": "self-attention",
    "cross": "cross-attention",
    "image": "image branch",
    "feed-forward": "feed-forward",
    "control": "control, faces",
}


@dataclass(frozen=True)
class Subject:
    """A model of a class and its inputs.

    Attributes:
        kinds: Kinds of its fused pairs.
    """

    name: str
    cls: str
    model: Callable[[], Any]
    inputs: Callable[[], dict[str, Any]]
    kinds: tuple[str, ...]


def of_case(case: Any, cls: str, *kinds: str) -> Subject:
    return Subject(case.name, cls, case.model, lambda: case.inputs(2), kinds)


def of_family(name: str) -> Subject:
    family = wan_family.named(name)
    # The only control pair of Animate, its faces', is left to the author's code.
    kinds = tuple(dict.fromkeys(pair.kind for pair in find_pairs(family.model()) if pair.fused))
    return Subject(name, family.cls.__name__, family.model, lambda: family.inputs(2), kinds)


def turbo() -> Subject:
    return Subject(
        "turbodiffusion-i2v", "WanModel", lambda: turbodiffusion.tiny(image=True),
        lambda: turbodiffusion.tiny_inputs(batch=2, image=True),
        ("self", "cross", "image", "feed-forward"),
    )  # fmt: skip


def rcm() -> Subject:
    def build() -> Any:
        torch.manual_seed(0)
        return RCMAttention(128, 2).requires_grad_(False)

    def inputs() -> dict[str, Any]:
        x = torch.randn(2, 60, 128, generator=torch.Generator().manual_seed(1))
        return {"x": x, "t": torch.tensor([0.5, 1.0])}

    return Subject("rcm", "RCMAttention", build, inputs, ("self",))


WAN, COG, CONSISID = (
    "WanTransformer3DModel", "CogVideoXTransformer3DModel", "ConsisIDTransformer3DModel",
)  # fmt: skip
ATTENTION = ("self", "cross", "feed-forward")
SUBJECTS = [
    of_case(CASES[0], WAN, *ATTENTION),
    of_case(CASES[1], WAN, "self", "cross", "image", "feed-forward"),
    *map(of_family, ("vace-image-fused-qkv", "animate-image-two-faces",
                     "chronoedit-i2v-fused-qkv", "skyreels-i2v-fused-qkv")),
    of_case(cogvideox.ROTARY, COG, "self", "feed-forward"),
    of_case(cogvideox.CASES[-2], CONSISID, "self", "feed-forward"),
    turbo(),
    rcm(),
]  # fmt: skip
FUSED_QKV = [
    of_case(Case("fused-qkv-i2v", fuse_qkv=True, image=True), WAN),
    *map(of_family, ("vace-image-fused-qkv", "animate-image-two-faces",
                     "chronoedit-i2v-fused-qkv", "skyreels-i2v-fused-qkv")),
    *(of_case(case, CONSISID if case.consisid else COG)
      for case in cogvideox.CASES if case.name in ("fused-qkv", "consisid-fused-qkv")),
]  # fmt: skip


def cells(*, of_kinds: bool, capability: str = "") -> list[Any]:
    return [
        pytest.param(
            subject, kind, id=f"{subject.name}-{kind}",
            marks=pytest.mark.supports(subject.cls, capability or KINDS[kind]),
        )
        for subject in SUBJECTS
        for kind in subject.kinds
        if of_kinds or kind != "control"
    ]  # fmt: skip


def output_of(subject: Subject, model: Any) -> Tensor:
    with torch.no_grad():
        made = model(**subject.inputs())
    out: Tensor = made[0] if isinstance(made, tuple) else made
    return out


def config_of(subject: Subject, kind: str, **options: Any) -> PatchConfig:
    # An image branch goes through the output projection of the text's attention.
    together = kind in ("cross", "image") and "image" in subject.kinds
    kinds: Any = ("cross", "image") if together else (kind,)
    return PatchConfig(attention="exact", guard=False, kinds=kinds, **options)


CLOSING = ("attention_project_skip", "project_skip", "skip", "project_skip_streams")


def louder(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ours adds to a residual is half as much again."""

    def half_more(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **given: Any) -> Any:
            made = real(*args, **given)
            held = given.get("residual", given.get("residuals", args[0]))
            if held is None:
                return made
            if isinstance(made, Tensor):
                return made + 0.5 * (made - held)
            return tuple(y + 0.5 * (y - x) for y, x in zip(made, held, strict=True))

        return run

    for name in CLOSING:
        monkeypatch.setattr(ops, name, half_more(getattr(ops, name)))


@pytest.mark.usefixtures("no_plans")
@pytest.mark.parametrize(("subject", "kind"), cells(of_kinds=True))
def test_ours_runs_there_and_is_right(
    subject: Subject, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = subject.model()
    expected = output_of(subject, model)
    report = patch_model(model, config_of(subject, kind))
    assert relative(output_of(subject, model), expected) < 1e-5
    ran = sum(n for how, n in report.last_forward.items() if how.startswith("fused"))
    assert ran == report.fused > 0, report.last_forward
    louder(monkeypatch)
    assert relative(output_of(subject, model), expected) > 1e-3


@pytest.mark.parametrize("subject", [s for s in SUBJECTS if s.name != "rcm"], ids=lambda s: s.name)
def test_norms_of_q_and_k_are_read_and_not_called(subject: Subject) -> None:
    model = subject.model()
    left = tuple(p.path for p in find_pairs(model) if not p.fused)
    norms = {
        id(module): name
        for name, module in model.named_modules()
        if name.split(".")[-1].startswith("norm_")
        and "blocks" in name
        and not name.startswith(left)
    }
    called: list[str] = []
    watching = register_module_forward_pre_hook(
        lambda module, args: called.append(norms[id(module)]) if id(module) in norms else None
    )
    try:
        output_of(subject, model)
        assert set(called) == set(norms.values()), "the author's code calls them"
        called.clear()
        with patched(model, attention="exact", guard=False):
            output_of(subject, model)
    finally:
        watching.remove()
    assert norms and not called


@pytest.mark.parametrize("subject", [s for s in SUBJECTS if "image" in s.kinds],
                         ids=lambda s: s.name)  # fmt: skip
def test_the_image_reaches_the_output(subject: Subject) -> None:
    model, given = subject.model(), subject.inputs()
    name = "context" if "context" in given else "encoder_hidden_states_image"
    other = given | {name: given[name].roll(1, 0) + 0.3}
    found = []
    for config in (None, config_of(subject, "image")):
        if config is not None:
            patch_model(model, config)
        with torch.no_grad():
            one, two = (model(**g) for g in (given, other))
        found.append(*[(one[0] - two[0]) if isinstance(one, tuple) else one - two])
    assert float(found[0].norm()) > 1e-3
    assert relative(found[1], found[0]) < 1e-3


@pytest.mark.parametrize(("subject", "kind"), cells(of_kinds=False, capability="int8 Linears"))
@pytest.mark.usefixtures("peaked_too")
def test_linears_run_in_int8_there(
    subject: Subject, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact attention and int8 Linears: all of the error is theirs, and it is that of int8."""
    model = subject.model()
    expected = output_of(subject, model)
    counted = []
    made = linears.Projection.__init__

    def counting(self: Any, *args: Any, **given: Any) -> None:
        made(self, *args, **given)
        counted.append(self.int8)

    monkeypatch.setattr(linears.Projection, "__init__", counting)
    with patched(model, config_of(subject, kind, linear="int8")) as report:
        found = relative(output_of(subject, model), expected)
        chosen = [pair.int8_linears for pair in report.pairs if pair.fused]
    assert all(chosen) and all(counted) and counted
    assert 1e-5 < found < 0.05
    with patched(model, config_of(subject, kind)):
        assert relative(output_of(subject, model), expected) < 1e-5


@pytest.mark.parametrize(
    "subject",
    [
        pytest.param(s, id=s.name, marks=pytest.mark.supports(s.cls, "fused QKV"))
        for s in FUSED_QKV
    ],
)
@pytest.mark.parametrize("linear", ["as-is", "int8"])
def test_the_fused_projection_is_read(subject: Subject, linear: Any) -> None:
    """Fusing leaves the separate Linears behind: their weights must not matter any more."""
    model = subject.model()
    for name, module in model.named_modules():
        if name.split(".")[-1] in ("to_qkv", "to_kv", "to_added_kv"):
            torch.manual_seed(3)
            module.weight.data.mul_(1 + 0.3 * torch.randn_like(module.weight))
    expected = output_of(subject, model)
    patch_model(model, PatchConfig(attention="exact", guard=False, linear=linear))
    found = relative(output_of(subject, model), expected)
    assert found < 1e-5 if linear == "as-is" else 1e-5 < found < 0.06
    unpatch_model(model)
    assert torch.equal(output_of(subject, model), expected)


def test_what_diffusers_fuses_of_consisid_is_read_as_it_is() -> None:
    """Its own method leaves the processor, which reads the three Linears."""
    subject = of_case(cogvideox.CASES[-2], CONSISID)
    model = subject.model()
    model.fuse_qkv_projections()
    expected = output_of(subject, model)
    patch_model(model, attention="exact", guard=False)
    assert relative(output_of(subject, model), expected) < 1e-5


@pytest.mark.supports(WAN, "SLA")
def test_sla_is_not_dense() -> None:
    case = Case("i2v", image=True, config={})
    model, given = sla.with_sla(case.model()), sla.inputs_of(case)
    dense = sla.run(model, given)
    expected = sla.run(sla.oracle(model), given)
    with patched(model, sla.EXACT):
        found = sla.run(model, given)
    assert relative(found, expected) < 1e-5 < 1e-2 < relative(dense, expected)
    assert I2V["added_kv_proj_dim"] == 128


@pytest.mark.usefixtures("no_plans")
def test_whose_sum_a_branch_ends_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours after a module that is called, the author's where nothing of ours runs."""
    subject, closed = SUBJECTS[0], []
    real = ops.skip

    def noting(*args: Any, **given: Any) -> Tensor:
        closed.append(1)
        return real(*args, **given)

    monkeypatch.setattr(ops, "skip", noting)
    model = subject.model()
    for block in model.blocks:
        block.attn1.register_forward_hook(lambda _, args, out: 1.5 * out)
    expected = output_of(subject, model)
    cases: list[tuple[Any, int]] = [(("self",), len(model.blocks)), (("cross",), 0)]
    for kinds, ours in cases:
        closed.clear()
        with patched(model, attention="exact", guard=False, kinds=kinds):
            assert relative(output_of(subject, model), expected) < 1e-5
        assert len(closed) == ours, kinds
