"""The residual stream in fp32 inside a patched block: closer to the truth, and unseen by everybody
else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.measures import relative_l2
from tests.patching import cogvideox, sla, wan, wan_family
from tests.patching.turbodiffusion import tiny, tiny_inputs, with_sparse
from turbo_rcm_patch import PatchConfig, ops, patch_model, patched
from turbo_rcm_patch.patching.branches import AuthorRun, CalledRun
from turbo_rcm_patch.patching.record import record_of
from turbo_rcm_patch.video.measures import upcast

BF16 = torch.bfloat16
EXACT: dict[str, Any] = {"attention": "exact", "guard": False}
#: Errors of two residuals over the same attention are this far apart in every network here.
CLOSER = 0.93

WAN = wan.CASES[0]
SUBJECTS: list[Any] = [
    *wan.CASES[:4],
    *[f for f in wan_family.FAMILIES if f.name in (
        "flf2v", "vace-scaled-one-layer", "animate", "skyreels-forcing", "chronoedit"
    )],
    *cogvideox.CASES[:2],
    cogvideox.CASES[-2],
]  # fmt: skip


@torch.no_grad()
def errors(model: Any, given: dict[str, Any], *options: dict[str, Any]) -> list[float]:
    """Relative L2 to the same network in fp32: unpatched, and patched with each of the options."""
    outputs = [model(**given)[0]]
    for each in options:
        with patched(model, **each):
            outputs.append(model(**given)[0])
    with upcast(model):
        truth = model(**cogvideox.widened(given))[0]
    assert all(output.dtype == outputs[0].dtype for output in outputs)
    return [relative_l2(output, truth) for output in outputs]


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: s.name)
def test_a_wide_residual_is_closer_to_the_truth(subject: Any) -> None:
    model, given = subject.model(BF16), subject.inputs(2, BF16)
    unpatched, narrow, wide = errors(model, given, EXACT | {"residual": "model"}, EXACT)
    assert wide < CLOSER * narrow
    assert wide < CLOSER * unpatched


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_turbodiffusion_s_blocks_are_closer_to_the_truth(kind: str) -> None:
    """Int8 in both, where the sparse kernel is to run."""
    model = tiny(layers=4).to(BF16)
    if kind == "sparse":
        model = with_sparse(model).to(BF16)
    given = tiny_inputs(batch=2, dtype=BF16)
    given["x"] = given["x"] * 4
    how: dict[str, Any] = {"guard": False, "pv": "bf16"}
    if kind == "dense":
        how["attention"] = "exact"
    found = {}
    with torch.no_grad():
        for residual in ("model", "fp32"):
            with patched(model, residual=residual, **how):
                found[residual] = model(**given)
        with patched(model.float(), **how):  # fp32 throughout, over the same attention
            truth = model(**cogvideox.widened(given))
    assert relative_l2(found["fp32"], truth) < CLOSER * relative_l2(found["model"], truth)


def test_sla_is_closer_to_the_truth() -> None:
    """To the same network in fp32 over the same sparse attention."""
    model, given = sla.with_sla(sla.T2V.model(BF16)), sla.inputs_of(sla.T2V, BF16)
    found = {}
    for residual in ("model", "fp32"):
        with patched(model, guard=False, sla_topk=sla.TOPK, residual=residual):
            found[residual] = sla.run(model, given)
    with patched(model, guard=False, sla_topk=sla.TOPK), upcast(model):
        truth = sla.run(model, cogvideox.widened(given))
    assert relative_l2(found["fp32"], truth) < CLOSER * relative_l2(found["model"], truth)


@pytest.mark.parametrize("subject", [WAN, cogvideox.ROTARY], ids=["wan", "cogvideox"])
def test_a_wide_residual_makes_int8_linears_closer_to_the_truth(subject: Any) -> None:
    model, given = subject.model(BF16), subject.inputs(2, BF16)
    how: dict[str, Any] = {"attention": "exact", "linear": "int8", "guard": False}
    _, narrow, wide = errors(model, given, how | {"residual": "model"}, how)
    assert wide < narrow


# --- what others see -----------------------------------------------------------------------------


class Seen:
    """Writes down the dtypes that modules get and give."""

    def __init__(self, model: Any, modules: dict[str, nn.Module]) -> None:
        self.dtypes: dict[str, list[torch.dtype]] = {}
        self.values: dict[str, torch.Tensor] = {}
        self._handles = [
            module.register_forward_hook(self._noting(name), with_kwargs=True)
            for name, module in modules.items()
        ]

    def _noting(self, name: str) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = [*args, *kwargs.values()]
            given += output if isinstance(output, tuple) else [output]
            self.dtypes[name] = [x.dtype for x in given if isinstance(x, torch.Tensor)]

        return note


def parts_of(model: Any) -> dict[str, nn.Module]:
    """The blocks, and what a block calls itself."""
    lists = [child for child in model.children() if isinstance(child, nn.ModuleList)]
    blocks = {f"{i}.{j}": b for i, one in enumerate(lists) for j, b in enumerate(one)}
    inside = {
        f"{path}.{name}": part
        for path, block in blocks.items()
        for name, part in block.named_modules()
        if name
    }
    return blocks | inside


@pytest.mark.parametrize(
    "subject",
    [wan.CASES[0], wan.CASES[1], wan_family.FAMILIES[2], cogvideox.ROTARY],
    ids=lambda s: s.name,
)
def test_whatever_is_hooked_sees_the_dtypes_of_the_author_s_code(subject: Any) -> None:
    model, given = subject.model(BF16), subject.inputs(1, BF16)
    parts = parts_of(model)
    seen = Seen(model, parts)
    wan.run(model, **given)
    author = dict(seen.dtypes)
    seen.dtypes.clear()
    with patched(model, **EXACT) as report:
        wan.run(model, **given)
        assert report.fused
    assert seen.dtypes == author


@pytest.mark.parametrize("subject", [WAN, cogvideox.ROTARY], ids=["wan", "cogvideox"])
def test_a_block_gives_the_model_s_dtype_whatever_is_left_alone(subject: Any) -> None:
    model, given = subject.model(BF16), subject.inputs(1, BF16)
    blocks = {name: part for name, part in parts_of(model).items() if name.count(".") == 1}
    for kinds in (("self",), ("cross",), ("feed-forward",), ("self", "feed-forward")):
        if kinds == ("cross",) and subject is not WAN:
            continue
        with patched(model, kinds=kinds, **EXACT):
            seen = Seen(model, blocks)
            wan.run(model, **given)
        for name in blocks:
            assert set(seen.dtypes[name][-1:]) == {BF16}


def test_what_runs_as_written_gets_and_gives_the_model_s_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the author's sum is the author's, bit for bit."""
    model, given = WAN.model(BF16), WAN.inputs(1, BF16)
    expected = wan.run(model, **given)
    report = patch_model(model, attention="exact")
    record: Any = record_of(model)
    for state in record.plan.states:
        state.give_back("for the test")
    streams = dtypes_of_called(monkeypatch)
    assert torch.equal(wan.run(model, **given), expected)
    assert report.fused == 0 and streams == [(BF16, BF16)] * 6


def dtypes_of_called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, torch.dtype]]:
    """Of the residual streams that branches which are called get and give, from here on."""
    streams: list[tuple[torch.dtype, torch.dtype]] = []

    def noted(own: Any) -> Any:
        def noting(self: Any, token: Any, hidden: Any, given: Any) -> Any:
            made, token = own(self, token, hidden, given)
            one, other = (x if isinstance(x, torch.Tensor) else x[0] for x in (hidden, made))
            streams.append((one.dtype, other.dtype))
            return made, token

        return noting

    for kind in (CalledRun, AuthorRun):
        monkeypatch.setattr(kind, "__call__", noted(kind.__call__))
    return streams


@pytest.mark.usefixtures("no_plans")
@pytest.mark.parametrize("subject", [WAN, cogvideox.ROTARY], ids=["wan", "cogvideox"])
def test_what_is_given_back_in_the_middle_of_a_forward_gets_the_rounded_stream(
    subject: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = subject.model(BF16), subject.inputs(1, BF16)
    last = (getattr(model, "blocks", None) or model.transformer_blocks)[1]
    name, bad = ("ffn", last.ffn) if subject is WAN else ("ff", last.ff)
    for operation in ("project_skip", "project_skip_streams"):
        monkeypatch.setattr(ops, operation, broken(getattr(ops, operation), bad.net[2].weight))
    report = patch_model(model, attention="exact")
    streams = dtypes_of_called(monkeypatch)
    assert wan.run(model, **given).isfinite().all()
    paths = [pair.path for pair in report.pairs if not pair.fused]
    assert len(paths) == 1 and paths[0].endswith(f".1.{name}")
    assert streams == [(torch.float32, BF16)]
    wan.run(model, **given)
    assert streams[1:] == [(BF16, BF16)], "the branch before rounds by itself from here on"


def broken(own: Any, bad: torch.Tensor) -> Any:
    """The operation, which gives NaN for one weight."""

    def run(x: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        made = own(x, weight, *args, **kwargs)
        if weight is not bad:
            return made
        return made * float("nan") if isinstance(made, torch.Tensor) else [
            x * float("nan") for x in made
        ]  # fmt: skip

    return run


def test_a_lora_sees_the_model_s_dtype_and_a_wide_residual_still_helps() -> None:
    model, given = WAN.model(BF16), WAN.inputs(2, BF16)
    wan.with_lora(model, "to_q", "to_out.0", "net.2")
    _, narrow, wide = errors(model, given, EXACT | {"residual": "model"}, EXACT)
    assert wide < narrow
    seen = Seen(model, {"lora": model.blocks[1].ffn.net[2]})
    with patched(model, **EXACT):
        wan.run(model, **given)
    assert seen.dtypes["lora"] == [BF16, BF16]


# --- ways to run ---------------------------------------------------------------------------------


@pytest.mark.parametrize("subject", [WAN, cogvideox.ROTARY], ids=["wan", "cogvideox"])
def test_the_guard_changes_nothing_of_what_it_keeps(subject: Any) -> None:
    model, given = subject.model(BF16), subject.inputs(2, BF16)
    with patched(model, guard=False):
        expected = wan.run(model, **given)
    report = patch_model(model, precision="fixed")
    assert torch.equal(wan.run(model, **given), expected)
    assert len(report.guard) == report.fused and {r.verdict for r in report.guard} == {"kept"}
    assert torch.equal(wan.run(model, **given), expected)


def test_the_guard_compares_in_the_model_s_dtype() -> None:
    """Then the author's rounding of the sum is no error; in fp32 it would be one of 0.019."""
    model, given = WAN.model(BF16), WAN.inputs(2, BF16)
    with patched(model, attention="exact") as report:
        wan.run(model, **given)
    assert max(record.error for record in report.guard) < 0.004


def test_a_narrow_residual_rounds_after_every_branch() -> None:
    """Each branch alone is what the wide form gives for the first, rounded."""
    model, given = WAN.model(BF16), WAN.inputs(1, BF16)
    outputs = {}
    for residual in ("model", "fp32"):
        with patched(model, kinds=("self",), residual=residual, **EXACT):
            outputs[residual] = wan.run(model, **given)
    assert torch.equal(outputs["model"], outputs["fp32"]), "one branch of a block rounds once"


def test_nothing_changes_in_a_model_in_fp32() -> None:
    for subject in (WAN, cogvideox.ROTARY):
        model, given = subject.model(), subject.inputs(1)
        outputs = []
        for residual in ("model", "fp32"):
            with patched(model, PatchConfig(residual=residual, guard=False)):  # type: ignore[arg-type]
                outputs.append(wan.run(model, **given))
        assert torch.equal(*outputs)


@pytest.mark.parametrize("subject", [WAN, cogvideox.ROTARY], ids=["wan", "cogvideox"])
def test_gradients_are_at_least_as_close_to_those_in_fp32(subject: Any) -> None:
    model, given = subject.model(BF16), subject.inputs(1, BF16)

    def gradients(module: Any, inputs: dict[str, Any], **options: Any) -> torch.Tensor:
        module.requires_grad_(True)
        with patched(module, **EXACT, **options):
            module(**inputs)[0].float().square().sum().backward()
        found = [
            p.grad.float().flatten() for n, p in module.named_parameters()
            if p.grad is not None and ("to_q" in n or "net.0" in n)
        ]  # fmt: skip
        assert all(p.grad.dtype == p.dtype for p in module.parameters() if p.grad is not None)
        module.zero_grad(set_to_none=True)
        return torch.cat(found)

    truth = gradients(copy.deepcopy(model).float(), cogvideox.widened(given))
    narrow = relative_l2(gradients(model, given, residual="model"), truth)
    wide = relative_l2(gradients(model, given), truth)
    assert wide < 1.02 * narrow


@pytest.mark.parametrize("subject", [WAN, cogvideox.ROTARY], ids=["wan", "cogvideox"])
def test_a_compiled_block_computes_the_same(subject: Any) -> None:
    model, given = subject.model(BF16), subject.inputs(1, BF16)
    with patched(model, **EXACT):
        expected = wan.run(model, **given)
        blocks = getattr(model, "blocks", None) or model.transformer_blocks
        for block in blocks:
            block.compile(backend="aot_eager", fullgraph=True)
        try:
            got = wan.run(model, **given)
        finally:
            for block in blocks:
                block._compiled_call_impl = None
            torch._dynamo.reset()
    assert got.dtype == BF16 and relative_l2(got, expected) < 2e-3
