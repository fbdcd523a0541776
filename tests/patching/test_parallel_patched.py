"""Patched models over real ranks on a CPU: every family and mode against one process.

The ranks are started once and run all cases; a test looks up what became of its own.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers.hooks import context_parallel
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from tests.patching import cogvideox, turbodiffusion, wan, wan_family
from tests.patching.test_parallel import cogvideox_case, enable, gathered, mesh
from tests.patching.wan import EXACT, INT8, dicts, relative, run
from tests.ranks import on_ranks
from turbo_rcm_patch import PatchConfig, patch_model, report_of, unpatch_model
from turbo_rcm_patch.patching.parallel import attach_plan, disable_parallelism, groups_of

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")

#: fp32 sums in another order, through two blocks.
NEAR = 2e-5
#: Of int8's own distance to exact attention: the mean of k is added in another order, which moves
#: a few int8 values by one step.
SHARE = 0.2
#: In a ring the blocks of keys begin anew with each rank's part: another error, of the same size.
BUDGET = 1.2


#: Makes a model and its inputs in a dtype.
Make = Callable[[torch.dtype], tuple[Any, dict[str, Any]]]


@dataclass(frozen=True)
class Case:
    """A model, a mesh (ring, ulysses), how it is patched, and in which order."""

    name: str
    make: Make
    ring: int = 1
    ulysses: int = 2
    config: PatchConfig = EXACT
    after: bool = True
    anything: bool = False

    @property
    def id(self) -> str:
        mode = "ring" if self.ring > 1 else "ulysses"
        mode = "unified" if self.ring > 1 and self.ulysses > 1 else mode
        order = "after" if self.after else "before"
        return f"{self.name}-{mode}-{self.config.attention}-{order}" + "-any" * self.anything


def made_wan(index: int, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    case = wan.CASES[index]
    return case.model(dtype), case.inputs(dtype=dtype)


def made_family(name: str, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    family = wan_family.named(name)
    return family.model(dtype), family.inputs(batch=1, dtype=dtype)


def made_cogvideox(config: dict[str, Any], dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    make, inputs = cogvideox_case(True, 8, **dict(config))
    model = make()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.to(dtype)
    return model, {
        name: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }


def of_wan(index: int = 0) -> Make:
    return partial(made_wan, index)


def of_family(name: str) -> Make:
    return partial(made_family, name)


def of_cogvideox(**config: Any) -> Make:
    return partial(made_cogvideox, config)


def moved(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: moved(x, device) for name, x in value.items()}
    return type(value)(moved(x, device) for x in value) if type(value) in (list, tuple) else value


MODELS = {
    "wan": of_wan(),
    "wan-i2v": of_wan(1),
    "wan-token-gates": of_wan(3),
    "wan-three-heads": of_wan(7),
    "vace": of_family("vace"),
    "animate": of_family("animate"),
    "chronoedit": of_family("chronoedit-token-times"),
    "skyreels": of_family("skyreels-forcing"),
    "skyreels-masked": of_family("skyreels-masked"),
    "cogvideox": of_cogvideox(),
    "consisid": of_cogvideox(consisid=True),
    "consisid-face": of_cogvideox(consisid=True, **cogvideox.FACE),
}
ONE_EACH = ["wan", "vace", "animate", "chronoedit", "skyreels", "cogvideox", "consisid"]


def cases() -> list[Case]:
    made = []
    for name in MODELS:
        for ring, ulysses in ((1, 2), (2, 1)):
            masked = name == "skyreels-masked"
            heads = name == "wan-three-heads"
            if (masked and ring > 1) or (ring > 1 and name not in ONE_EACH):
                continue
            anything = heads  # three heads on two ranks
            made.append(Case(name, MODELS[name], ring, ulysses, EXACT, True, anything))
            if name in ONE_EACH:
                made.append(Case(name, MODELS[name], ring, ulysses, INT8, ring == 1))
    made.append(Case("wan", MODELS["wan"], 1, 2, EXACT, False))
    made.append(Case("cogvideox", MODELS["cogvideox"], 1, 2, EXACT, False))
    return made


def same_everywhere(out: torch.Tensor) -> bool:
    same = [torch.empty_like(out) for _ in range(dist.get_world_size())]
    dist.all_gather(same, out.contiguous())
    return all(torch.equal(x, out) for x in same)


def on_rank(case: Case, rank: int) -> None:
    equals_one_process(case)


def equals_one_process(
    case: Case,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    near: float = NEAR,
    share: float = SHARE,
) -> None:
    """A parallel, patched model computes what it does on one process, in any order of patching
    and splitting, and is as it was afterwards."""
    model, inputs = case.make(dtype)
    model, inputs = model.to(device), moved(inputs, device)
    before, author = dicts(model), run(model, **inputs)
    patch_model(model, case.config)
    expected = run(model, **inputs)
    layout = mesh(case.ring, case.ulysses, device)
    more = {"ulysses_anything": True} if case.anything else {}
    if not case.after:
        unpatch_model(model)
        attach_plan(model)
        enable(model, layout, **more)
        patch_model(model, case.config)
    else:
        enable(model, layout, **more)
    out = run(model, **inputs)
    report = report_of(model)
    degree = case.ring * case.ulysses
    assert [f"of {degree}" in line for line in report.parallel] == [True], report.parallel
    assert "fused with" in str(report.last_forward), report.last_forward
    apart = relative(out, expected)
    assert out.shape == expected.shape
    if case.config.attention == "exact":
        assert apart < near, apart
    else:
        own = relative(expected, author)
        assert own > 1e-4
        if case.ring == 1:
            assert apart < share * own, (apart, own)
        else:
            assert relative(out, author) < BUDGET * own, (relative(out, author), own)
    assert same_everywhere(out)
    # Undone while it is parallel, it computes its author's attention over all ranks.
    unpatch_model(model)
    if case.name not in ("skyreels-masked",) and (case.after or case.name == "cogvideox"):
        assert groups_of(model) is not None
        assert relative(run(model, **inputs), author) < near
    disable_parallelism(model)
    model.__dict__.pop("_cp_plan", None)
    assert torch.equal(run(model, **inputs), author)
    after = dicts(model)
    assert after.keys() == before.keys()
    for name, attributes in before.items():
        assert after[name] == attributes, name


# --- TurboDiffusion's own context parallelism ----------------------------------------------------


def turbodiffusion_models(rank: int) -> None:
    """Dense, SLA and SageSLA: as on one rank, patched before or after, and undone."""
    group = dist.new_group([0, 1])
    makes: list[Callable[[], Any]] = [
        turbodiffusion.tiny,
        lambda: turbodiffusion.with_sparse(turbodiffusion.tiny()),
        lambda: turbodiffusion.with_sparse(turbodiffusion.tiny(), sage=True),
    ]
    inputs = turbodiffusion.tiny_inputs(tokens=260)
    for make in makes:
        for config, after in ((EXACT, True), (SIXTEEN, True), (SIXTEEN, False)):
            model = make()
            author = forward(model, inputs)
            patch_model(model, config)
            expected = forward(model, inputs)
            if not after:
                unpatch_model(model)
            model.enable_context_parallel(group)
            assert relative(forward(model, inputs), author) < NEAR or after
            if not after:
                patch_model(model, config)
            out = forward(model, inputs)
            report = report_of(model)
            assert "of 2 (Ulysses 2)" in report.parallel[0]
            own = relative(expected, author)
            apart = relative(out, expected)
            assert apart < max(NEAR, SHARE * own), (apart, own)
            assert same_everywhere(out)
            unpatch_model(model)
            assert relative(forward(model, inputs), author) < NEAR
            model.disable_context_parallel()
            assert torch.equal(forward(model, inputs), author)


def forward(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(**inputs)
    return out


#: int8 with values in 16 bits, where a step of the mean of k shows the least.
SIXTEEN = PatchConfig(guard=False, attention="int8", pv="bf16")

#: Beside the cases, what is checked of one model.
SCENARIOS: dict[str, Callable[[int], None]] = {
    "turbodiffusion": turbodiffusion_models,
}


@dataclass(slots=True)
class Told:
    """What became of the cases, from every rank."""

    ranks: int
    found: list[dict[str, str]] = field(default_factory=list)

    def check(self, name: str) -> None:
        for rank, results in enumerate(self.found):
            assert name in results, f"rank {rank} did not come so far"
            assert not results[name], f"rank {rank}: {results[name]}"


def rank_main(rank: int, folder: str, todo: dict[str, Callable[[int], None]]) -> None:
    found: dict[str, str] = {}
    path = Path(folder, f"{rank}.json")
    with mock.patch.object(context_parallel, "_all_gather_anything", gathered):
        for name, check in todo.items():
            try:
                check(rank)
                found[name] = ""
            except Exception:
                found[name] = traceback.format_exc()
                raise  # the other ranks cannot go on
            finally:
                path.write_text(json.dumps(found), encoding="utf-8")


def run_all(ranks: int, folder: Path, todo: dict[str, Callable[[int], None]], **more: str) -> Told:
    with suppress(ProcessRaisedException, ProcessExitedException):  # each test says its own
        on_ranks(ranks, rank_main, str(folder), todo, **more)
    paths = [folder / f"{rank}.json" for rank in range(ranks)]
    return Told(ranks, [json.loads(p.read_text(encoding="utf-8")) for p in paths if p.exists()])


def of_two() -> dict[str, Callable[[int], None]]:
    return {case.id: partial(on_rank, case) for case in cases()} | SCENARIOS


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return run_all(2, tmp_path_factory.mktemp("two"), of_two())


SPLIT = (
    "WanTransformer3DModel", "WanVACETransformer3DModel", "WanAnimateTransformer3DModel",
    "ChronoEditTransformer3DModel", "SkyReelsV2Transformer3DModel", "CogVideoXTransformer3DModel",
    "ConsisIDTransformer3DModel",
)  # fmt: skip


@pytest.mark.supports(SPLIT, "context parallel")
@pytest.mark.parametrize("name", [case.id for case in cases()])
def test_a_family_on_two_ranks(name: str, two_ranks: Told) -> None:
    two_ranks.check(name)


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "turbodiffusion"])
def test_two_ranks(name: str, two_ranks: Told) -> None:
    two_ranks.check(name)


@pytest.mark.supports("WanModel", "context parallel")
def test_turbodiffusion_on_two_ranks(two_ranks: Told) -> None:
    two_ranks.check("turbodiffusion")
