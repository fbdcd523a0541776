"""Coefficient tables, limits and round trips of the skip and its parameterisations."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turbo_rcm_patch.boundary import EDM, RectifiedFlow, rectified_flow_time
from turbo_rcm_patch.errors import ConfigError, DTypeError, ShapeError
from turbo_rcm_patch.patching.report import PairTable
from turbo_rcm_patch.skip import SkipPair, Stream, apply_skip, broadcast_coefficient

FAMILIES = [EDM(0.5), EDM(1.0), RectifiedFlow()]
each_family = pytest.mark.parametrize("family", FAMILIES, ids=repr)

# (family, t, c_skip, c_out), worked out by hand from the closed forms.
TABLE = [
    (EDM(0.5), 0.5, 0.5, 0.25 / math.sqrt(0.5)),
    (EDM(0.5), 1.2, 0.25 / 1.69, 0.6 / 1.3),
    (RectifiedFlow(), 0.25, 1.0, -0.25),
]


@pytest.mark.parametrize(("family", "t", "c_skip", "c_out"), TABLE)
def test_table_of_coefficients(family, t, c_skip, c_out) -> None:
    assert family.c_skip(t) == pytest.approx(c_skip, rel=1e-13)
    assert family.c_out(t) == pytest.approx(c_out, rel=1e-13)


@each_family
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_identity_end_returns_the_input_bit_for_bit(family, dtype) -> None:
    x = torch.tensor([[1.5, -0.0, 3.1e-5, -7.0]], dtype=dtype)
    branch = torch.tensor([[math.inf, 1.0, math.nan, -2.0]], dtype=dtype)
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    for t in (0.0, torch.zeros(1, dtype=dtype)):
        assert family.c_skip(t) == 1.0
        assert family.c_out(t) == 0.0
        assert torch.equal(
            apply_skip(x, branch, family.c_skip(t), family.c_out(t)).view(bits), x.view(bits)
        )


@each_family
def test_tensor_times_are_fp64_and_equal_to_floats(family: Any) -> None:
    times = torch.tensor([0.1, 0.25, 0.75], dtype=torch.float64)
    for name in ("c_skip", "c_out"):
        of = getattr(family, name)
        assert of(times).dtype == torch.float64
        assert of(times.float()).dtype == torch.float64
        assert of(times).tolist() == [of(float(t)) for t in times]
        assert of(times[0]).shape == ()
        assert isinstance(of(0.1), float)


@each_family
def test_coefficients_have_derivatives_in_time(family: Any) -> None:
    t = torch.tensor([0.0, 0.3], dtype=torch.float64, requires_grad=True)
    (family.c_skip(t) + family.c_out(t)).sum().backward()
    assert t.grad is not None
    assert torch.isfinite(t.grad).all()
    step = 1e-6
    for slope, time in zip(t.grad.tolist(), t.tolist(), strict=True):
        ahead = family.c_skip(time + step) + family.c_out(time + step)
        behind = family.c_skip(time - step) + family.c_out(time - step)
        assert slope == pytest.approx((ahead - behind) / (2 * step), rel=1e-6, abs=1e-6)


@given(t=st.floats(0.0, math.pi / 2), x=st.floats(-5, 5), v=st.floats(-5, 5))
def test_rcm_is_a_rectified_flow_seen_from_trigflow(t: float, x: float, v: float) -> None:
    """Its coefficients in TrigFlow's time are 1 / (cos t + sin t) and -sin t / (cos t + sin t)."""
    flow, s, total = RectifiedFlow(), rectified_flow_time(t), math.cos(t) + math.sin(t)
    state = torch.tensor([x], dtype=torch.float64)
    velocity = torch.tensor([v], dtype=torch.float64)
    seen = apply_skip(state / total, velocity, flow.c_skip(s), flow.c_out(s))
    own = apply_skip(state, velocity, 1 / total, -math.sin(t) / total)
    torch.testing.assert_close(own, seen, rtol=1e-12, atol=1e-12)


def test_sampler_times_of_rcm() -> None:
    """The five times of the rCM sampler for sigma_max 80, and the first for 200."""
    trig = [math.atan(80.0), 1.5, 1.4, 1.0, 0.0]
    mapped = [rectified_flow_time(t) for t in trig]
    assert mapped == pytest.approx([0.98765, 0.93378, 0.85290, 0.60898, 0.0], abs=6e-6)
    assert rectified_flow_time(math.atan(200.0)) == pytest.approx(0.99502, abs=6e-6)


def test_times_per_sample_reach_their_sample() -> None:
    x, branch = torch.randn(3, 5, 4), torch.randn(3, 5, 4)
    t = torch.tensor([0.0, 0.4, 1.0])
    flow = RectifiedFlow()
    got = apply_skip(x, branch, flow.c_skip(t), flow.c_out(t))
    want = x.double() - t.double().view(3, 1, 1) * branch.double()
    assert torch.equal(got, want.float())
    assert torch.equal(got[0], x[0])


@pytest.mark.parametrize("shape", [(), (2,), (2, 1, 4), (2, 3, 4)], ids=str)
def test_coefficient_shapes(shape: tuple[int, ...]) -> None:
    x, branch = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    c = torch.randn(shape, dtype=torch.float64)
    view = c.view(2, 1, 1) if shape == (2,) else c
    want = (view * x.double() + 0.5 * view * branch.double()).float()
    torch.testing.assert_close(apply_skip(x, branch, c, 0.5 * c), want, rtol=0, atol=1e-7)


def test_gradient_reaches_both_operands_and_stays_finite_at_the_identity() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    branch = torch.randn(2, 3, requires_grad=True)
    apply_skip(x, branch, 2.0, torch.tensor([0.0, 0.5])).sum().backward()
    assert x.grad is not None and branch.grad is not None
    assert torch.equal(x.grad, torch.full((2, 3), 2.0))
    assert torch.equal(branch.grad, torch.tensor([[0.0] * 3, [0.5] * 3]))


def test_wrong_arguments_are_typed_errors() -> None:
    x = torch.zeros(2, 3, 4)
    with pytest.raises(ShapeError, match="branch"):
        apply_skip(x, x[:1], 1.0, 1.0)
    for bad in (torch.ones(3), torch.ones(3, 4), torch.ones(2, 1, 5), torch.ones(1, 2, 3, 4)):
        with pytest.raises(ShapeError, match="c_out"):
            apply_skip(x, x, 1.0, bad)
    with pytest.raises(DTypeError):
        broadcast_coefficient(torch.ones(2, dtype=torch.complex64), x, "c_skip")
    with pytest.raises(DTypeError):
        RectifiedFlow().c_out(torch.ones(2, dtype=torch.bool))


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan, "a", None, True, 0.5j], ids=repr)
def test_sigma_data_must_be_a_positive_number(value: Any) -> None:
    with pytest.raises(ConfigError, match="sigma_data"):
        EDM(value)


def test_a_pair_knows_whether_it_is_fused() -> None:
    video = Stream("video", "1", "gate_msa", "[B, 1, C]")
    pair = SkipPair("blocks.0.attn1", "self", 12, 128, (video,), "fp32", True, "two-launch")
    assert pair.fused
    left = SkipPair(
        "blocks.0.ffn", "feed-forward", 0, 0, (video,), "fp32", True, "as-written", "x"
    )
    assert not left.fused
    # The column says what runs: a fused pair sums in fp32 whatever its author did.
    model = [replace(one, cast="model") for one in (pair, left)]
    rows = [line for line in str(PairTable(model)).splitlines() if line.startswith("blocks")]
    assert ["model dtype" in row for row in rows] == [False, True]


@pytest.mark.parametrize("t", [torch.tensor([1j]), torch.tensor([True])], ids=["complex", "bool"])
def test_a_time_is_real_everywhere(t: torch.Tensor) -> None:
    for call in (rectified_flow_time, EDM().c_skip):
        with pytest.raises(DTypeError, match="a real number"):
            call(t)
