"""The one-pass module against the two-pass one, and both against the boundary conditions."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from tests.implementations import over
from tests.measures import relative_l2
from turbo_rcm_patch import patch_model
from turbo_rcm_patch.boundary import EDM, RectifiedFlow
from turbo_rcm_patch.errors import ConfigError, DTypeError, ShapeError
from turbo_rcm_patch.models import RCMAttention


class RCM:
    """A user's own coefficients: those of rCM in the time of TrigFlow (arXiv:2510.08431)."""

    @staticmethod
    def c_skip(t: Any) -> Any:
        t = torch.as_tensor(t, dtype=torch.float64)
        return 1 / (t.cos() + t.sin())

    @staticmethod
    def c_out(t: Any) -> Any:
        t = torch.as_tensor(t, dtype=torch.float64)
        return -t.sin() / (t.cos() + t.sin())


FAMILIES: list[Any] = [EDM(0.5), RectifiedFlow(), RCM()]
each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: type(f).__name__)
projections = pytest.mark.parametrize("projection", [True, False], ids=["projection", "bare"])

#: The fusion alone, fp32, relative L2 (DESIGN: what "unchanged" means, first number).
FUSION_BUDGET = 3e-6


def pair(
    projection: bool, dtype: torch.dtype = torch.float32, on: Any = None, **options: Any
) -> list[Any]:
    """The module in plain torch, and the same one patched."""
    names = ("attention", "form")
    config = {"attention": "exact", "guard": False, "impl": on.impl if on else "auto"}
    config |= {name: options.pop(name) for name in names if name in options}
    plain = RCMAttention(128, 2, projection=projection, **options).to(dtype).eval()
    plain = plain.to(on.device if on else "cpu")
    fused = copy.deepcopy(plain)
    report = patch_model(fused, **config)
    assert report.fused == 1
    return [plain, fused]


@over(
    reference={"attention": ["exact"], "dtype": [torch.float32]},
    gpu={"attention": ["int8"], "dtype": [torch.float32, torch.bfloat16]},
)
@projections
@each_family
@torch.no_grad()
def test_identity_end_gives_the_input_exactly(
    on: Any, attention: str, dtype: torch.dtype, family: Any, projection: bool
) -> None:
    x = on.randn(2, 7, 128, dtype=dtype)
    for module in pair(
        projection, dtype, on, c_skip=family.c_skip, c_out=family.c_out, attention=attention
    ):
        assert torch.equal(module(x, 0.0), x)
        assert torch.equal(module(x, torch.zeros(2, device=on.device)), x)


@projections
def test_default_coefficients_are_those_of_the_write_ups(projection: bool) -> None:
    sd = 0.7
    module = RCMAttention(64, 1, sd, projection=projection)
    for t in (0.0, 0.3, 12.0):
        c_skip, c_out = module.coefficients(torch.zeros(1, 1, 64), t)
        assert c_skip == pytest.approx(sd**2 / (t**2 + sd**2))
        assert c_out == pytest.approx(sd * t / math.sqrt(sd**2 + t**2))


@over(reference={"tokens": [1, 7, 130]}, gpu={"tokens": [1, 77, 1000]})
@projections
@pytest.mark.parametrize("t", [0.8, torch.tensor(0.8), torch.tensor([0.3, 1.7])], ids=repr)
@torch.no_grad()
def test_one_pass_equals_two_pass(
    on: Any, projection: bool, tokens: int, t: float | torch.Tensor
) -> None:
    two_pass, one_pass = pair(projection, on=on)
    x, t = on.randn(2, tokens, 128), t if isinstance(t, float) else t.to(on.device)
    want, got = two_pass(x, t), one_pass(x, t)
    assert got.dtype == want.dtype and got.shape == want.shape
    assert relative_l2(got, want) < FUSION_BUDGET
    exact = copy.deepcopy(two_pass).double()(x.double(), t)
    assert relative_l2(got, exact) <= 2 * relative_l2(want, exact) + (
        1e-8 if on.name == "gpu" else 1e-9
    )


@projections
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bit_is_as_good_as_two_pass(projection: bool, dtype: torch.dtype) -> None:
    two_pass, one_pass = pair(projection, dtype)
    x = torch.randn(2, 65, 128).to(dtype)
    t = torch.tensor([0.4, 2.0])
    with torch.no_grad():
        exact = copy.deepcopy(two_pass).double()(x.double(), t)
        got, want = one_pass(x, t), two_pass(x, t)
    assert got.dtype == dtype
    assert relative_l2(got, exact) <= 1.2 * relative_l2(want, exact)


@torch.no_grad()
def test_coefficients_per_token() -> None:
    gate = torch.rand(2, 9, 1)
    two_pass, one_pass = pair(True, c_skip=lambda t: 1.0, c_out=lambda t: gate * t)
    x = torch.randn(2, 9, 128)
    assert relative_l2(one_pass(x, 0.5), two_pass(x, 0.5)) < FUSION_BUDGET


@over("reference", "gpu")
@pytest.mark.parametrize("form", ["one-launch", "two-launch"])
@pytest.mark.parametrize("attention", ["int8", "int4"])
@projections
@torch.no_grad()
def test_int8_is_close_and_int4_is_not(
    on: Any, attention: str, projection: bool, form: str
) -> None:
    two_pass, quantised = pair(projection, on=on, attention=attention, form=form)
    for module in (two_pass, quantised):
        module.qkv.weight[:256] *= 6  # peaked attention, so that q and k matter
    x = on.randn(1, 256, 128)
    error = relative_l2(quantised(x, 1e9), two_pass(x, 1e9))
    assert error < 0.08 if attention == "int8" else error > 0.08


@pytest.mark.parametrize(
    ("named", "wrong"),
    [("num_heads", {"dim": 100, "num_heads": 3}), ("num_heads", {"num_heads": 0}),
     ("sigma_data", {"sigma_data": 0.0}), ("c_skip", {"c_skip": 1.0})],
    ids=str,
)  # fmt: skip
def test_bad_construction(named: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=named):
        RCMAttention(**{"dim": 64, "num_heads": 1} | wrong)


@pytest.mark.parametrize("patched", [False, True])
@torch.no_grad()
def test_bad_inputs(patched: bool) -> None:
    def made(**coefficients: Any) -> RCMAttention:
        module = RCMAttention(64, 1, **coefficients).eval()
        if patched:
            patch_model(module, attention="exact", guard=False)
        return module

    module = made()
    x = torch.zeros(2, 5, 64)
    for bad in (torch.zeros(5, 64), torch.zeros(2, 5, 32)):
        with pytest.raises(ShapeError, match="x"):
            module(bad, 0.5)
    with pytest.raises(DTypeError, match="x"):
        module(x.long(), 0.5)
    for time in (torch.zeros(3), torch.zeros(2, 5)):
        with pytest.raises(ShapeError, match="t;"):
            module(x, time)
    for time in ("now", True, torch.tensor([True, False]), None):
        with pytest.raises(DTypeError, match="t;"):
            module(x, time)
    with pytest.raises(ShapeError, match=r"c_out\(t\)"):
        made(c_out=lambda t: torch.ones(3))(x, 0.5)
    with pytest.raises(DTypeError, match=r"c_skip\(t\)"):
        made(c_skip=lambda t: "one")(x, 0.5)


@each_family
@projections
@torch.no_grad()
def test_compiles_without_a_graph_break(family: Any, projection: bool) -> None:
    torch.compiler.reset()
    _, one_pass = pair(projection, c_skip=family.c_skip, c_out=family.c_out)
    compiled = torch.compile(one_pass, backend="eager", fullgraph=True)
    x = torch.randn(2, 5, 128)
    for t in (0.4, torch.tensor([0.3, 0.9])):
        assert torch.equal(compiled(x, t), one_pass(x, t))
