"""Operations around a branch that several residual streams share, against one stream at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.implementations import Implementation, over
from tests.measures import relative_l2
from turbo_rcm_patch.errors import ConfigError, DTypeError, ShapeError
from turbo_rcm_patch.kernels.portable import project as project_file
from turbo_rcm_patch.ops import (
    norm_modulate,
    norm_modulate_streams,
    project_skip,
    project_skip_streams,
    skip,
)
from turbo_rcm_patch.ops.streams import (
    norm_both,
    norm_streams,
    project_streams,
    skip_both,
    skip_norm_both,
)

pytestmark = pytest.mark.usefixtures("poisoned")

FP32, FP16 = torch.float32, torch.float16
LENGTHS = [(7, 13), (13,), (1, 5, 2), (0, 4)]


def streams(lengths: tuple[int, ...], channels: int = 24) -> list[torch.Tensor]:
    return [torch.randn(2, n, channels) for n in lengths]


def rows(lengths: tuple[int, ...], channels: int = 24) -> list[torch.Tensor]:
    return [torch.randn(2, 1, channels) for _ in lengths]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("form", ["modulation", "affine"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_norm_of_streams_is_that_of_each(
    lengths: tuple[int, ...], form: str, dtype: torch.dtype
) -> None:
    xs = [x.to(dtype) for x in streams(lengths)]
    scale, shift = rows(lengths), rows(lengths)
    got = norm_modulate_streams(xs, scale=scale, shift=shift, form=form, eps=1e-5)  # type: ignore[arg-type]
    each = [
        norm_modulate(x, scale=a, shift=b, form=form, eps=1e-5)  # type: ignore[arg-type]
        for x, a, b in zip(xs, scale, shift, strict=True)
    ]
    assert got.dtype == dtype and got.is_contiguous()
    assert torch.equal(got, torch.cat(each, dim=1))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("cast", ["fp32", "model"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_projection_closes_the_skip_of_each_stream(
    lengths: tuple[int, ...], cast: str, dtype: torch.dtype
) -> None:
    x, weight, bias = torch.randn(2, sum(lengths), 16), torch.randn(24, 16), torch.randn(24)
    x, weight, bias = (tensor.to(dtype) for tensor in (x, weight, bias))
    residuals, gates = [r.to(dtype) for r in streams(lengths)], rows(lengths)
    got = project_skip_streams(x, weight, bias, residuals=residuals, c_out=gates, cast=cast)  # type: ignore[arg-type]
    for y, part, residual, gate in zip(
        got, x.split(lengths, dim=1), residuals, gates, strict=True
    ):
        one = project_skip(part, weight, bias, residual=residual, c_out=gate, cast=cast)  # type: ignore[arg-type]
        assert y.dtype == dtype and y.is_contiguous()
        # A product in 16 bits may sum its rows in another order when there are more of them.
        near = {} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.06}
        torch.testing.assert_close(y, one, **near)  # type: ignore[call-overload]


@over(
    interpreter={
        "dtype": [FP32, FP16],
        "form": ["modulation", "affine"],
    }
)
def test_the_kernel_s_norm_of_streams_is_near_fp64(
    on: Implementation, dtype: torch.dtype, form: str
) -> None:
    lengths, channels = (9, 0, 37), 100
    xs = [on.randn(2, 40, channels, dtype=dtype)[:, :n] for n in lengths]
    scale, shift = ([on.randn(2, 1, channels) for _ in lengths] for _ in range(2))
    given = {"scale": scale, "shift": shift, "form": form, "eps": 1e-5, "impl": on.impl}
    out = norm_modulate_streams(xs, **given)
    other = FP16 if dtype == FP32 else FP32
    converted = norm_modulate_streams(xs, **given, out_dtype=other)
    assert converted.dtype == other and relative_l2(converted, out) < 4e-4
    one = form == "modulation"
    truth = torch.cat(
        [
            F.layer_norm(x.double(), (channels,), eps=1e-5) * (one + a) + b
            for x, a, b in zip(xs, scale, shift, strict=True)
        ],
        dim=1,
    )
    assert out.is_contiguous() and out.dtype == dtype
    assert relative_l2(out, truth) < (1e-6 if dtype == FP32 else 4e-4)


@over(
    reference={"stream": [FP32, FP16], "weights": ["both", "weight", "none"], "one": [1.0, 0.0]},
    interpreter={"stream": [FP32, FP16], "weights": ["both", "none"], "one": [1.0]},
    gpu={"stream": [FP32, FP16], "weights": ["both", "weight", "none"], "one": [1.0, 0.0]},
)
def test_a_skip_of_two_streams_with_their_norm_is_both_bit_for_bit(
    on: Implementation, stream: torch.dtype, weights: str, one: float
) -> None:
    """The streams are parts of a longer one; rows of one Linear modulate them; the skip alone, the
    norm alone, and both in one pass."""
    lengths, channels, batch = (9, 37), 100, 2
    longer = on.randn(batch, 60, 2 * channels, dtype=stream)[..., channels:]
    first, second = longer[:, :9], longer[:, 20:57]
    branch = on.randn(batch, 46, 3 * channels, dtype=FP16)[..., channels : 2 * channels]
    rows = on.randn(batch, 6 * channels, dtype=FP16).unflatten(-1, (6, 1, -1)).unbind(1)
    gates, scale, shift = rows[:2], rows[2:4], rows[4:]
    weight, bias = (on.randn(channels, dtype=FP16) for _ in range(2))
    own = {"both": (weight, bias), "weight": (weight, None), "none": (None, None)}[weights]
    modulation: Any = (*scale, *shift, *own, one, 1e-5)
    cast: Any = "fp32" if stream == FP32 else "model"
    impl: Any = on.impl
    how = (cast, impl, stream)
    left, right = skip_both(branch, first, second, *gates, *how)
    parts = branch.split(lengths, dim=1)
    for y, x, part, gate in zip((left, right), (first, second), parts, gates, strict=True):
        alone = skip(x, part, 1.0, gate, cast=cast, impl=impl)
        assert torch.equal(y, alone) and y.is_contiguous() and y.dtype == stream
    normed = norm_both(left, right, *modulation, impl, FP16)
    made = skip_norm_both(branch, first, second, *gates, *modulation, *how, FP16)
    assert all(map(torch.equal, made, (left, right, normed)))
    truth = torch.cat(
        [
            (
                F.layer_norm(x.double(), (channels,), eps=1e-5)
                * (1 if own[0] is None else own[0].double())
                + (0 if own[1] is None else own[1].double())
            )
            * (one + a.double())
            + b.double()
            for x, a, b in zip((left, right), scale, shift, strict=True)
        ],
        dim=1,
    )
    assert normed.is_contiguous() and normed.dtype == FP16
    assert relative_l2(normed, truth) < 4e-4


@over(
    interpreter={
        "cast": ["fp32", "model"],
        "library": [pytest.param(False, id="own-kernel"), pytest.param(True, id="library")],
    }
)
def test_the_kernel_s_projection_of_streams_is_near_fp64(
    on: Implementation, cast: str, library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library:
        monkeypatch.setattr(project_file, "by_library", lambda x: True)
    lengths = (9, 0, 37)
    x = on.randn(2, 46, 3 * 72, dtype=FP16)[..., 72:144]
    weight, bias = on.randn(100, 72, dtype=FP16), on.randn(100, dtype=FP16)
    residuals = [on.randn(2, 40, 100, dtype=FP16)[:, :n] for n in lengths]
    gates = [on.randn(2, 1, 100, dtype=FP16) for _ in lengths]
    given = {"c_out": gates, "cast": cast, "impl": on.impl}
    outs = project_skip_streams(x, weight, bias, residuals=residuals, **given)
    wide = project_skip_streams(
        x, weight, bias, residuals=[r.float() for r in residuals], out_dtype=FP32, **given
    )
    for one, out in zip(wide, outs, strict=True):
        assert one.dtype == FP32
        if one.numel():
            assert relative_l2(out, one) < 1.5e-3
    branch = F.linear(x.double(), weight.double(), bias.double()).split(lengths, dim=1)
    for out, residual, gate, part in zip(outs, residuals, gates, branch, strict=True):
        assert out.is_contiguous() and out.shape == residual.shape
        truth = residual.double() + gate.double() * part
        if len(truth[0]):
            assert relative_l2(out, truth) < 1.5e-3


def test_with_the_model_s_cast_a_projection_is_the_author_s_arithmetic() -> None:
    dtype = torch.bfloat16
    x, weight, bias = torch.randn(2, 9, 16), torch.randn(24, 16), torch.randn(24)
    x, weight, bias = (tensor.to(dtype) for tensor in (x, weight, bias))
    residuals, gates = [[t.to(dtype) for t in made((4, 5))] for made in (streams, rows)]
    got = project_skip_streams(x, weight, bias, residuals=residuals, c_out=gates, cast="model")
    branch = F.linear(x, weight, bias).split((4, 5), dim=1)
    for y, r, g, part in zip(got, residuals, gates, branch, strict=True):
        assert torch.equal(y, r + g * part)


def test_the_registrations_pass_opcheck_with_gradients() -> None:
    def leaves(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.requires_grad_() for tensor in tensors]

    lengths = (3, 5)
    torch.library.opcheck(
        norm_streams.registered,
        (leaves(streams(lengths)), leaves(rows(lengths)), leaves(rows(lengths)), 1.0, 1e-5,
         "reference", torch.float32),
    )  # fmt: skip
    x, weight, bias = leaves([torch.randn(2, 8, 16), torch.randn(24, 16), torch.randn(24)])
    torch.library.opcheck(
        project_streams.registered,
        (
            x,
            weight,
            bias,
            leaves(streams(lengths)),
            leaves(rows(lengths)),
            "fp32",
            "reference",
            torch.float32,
        ),
    )


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_gradients_are_those_of_plain_torch(bias: bool) -> None:
    lengths = (3, 5)
    norm_inputs = [streams(lengths), rows(lengths), rows(lengths)]
    weight, offset = torch.randn(24, 24), torch.randn(24) if bias else None
    residuals, gates = streams(lengths), rows(lengths)
    flat = [t for group in norm_inputs for t in group] + [weight, *residuals, *gates]
    flat += [] if offset is None else [offset]
    for tensor in flat:
        tensor.requires_grad_()
    xs, scale, shift = norm_inputs
    ours = project_skip_streams(
        norm_modulate_streams(xs, scale=scale, shift=shift),
        weight,
        offset,
        residuals=residuals,
        c_out=gates,
    )
    normal = [
        F.layer_norm(x, (24,), eps=1e-6) * (1 + a) + b
        for x, a, b in zip(xs, scale, shift, strict=True)
    ]
    plain = [
        r + g * F.linear(x, weight, offset)
        for x, r, g in zip(normal, residuals, gates, strict=True)
    ]
    d_outs = [torch.randn_like(y) for y in plain]
    found = torch.autograd.grad(ours, flat, d_outs)
    for got, expected in zip(found, torch.autograd.grad(plain, flat, d_outs), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_bad_input_is_refused() -> None:
    xs, gates = streams((3, 5)), rows((3, 5))
    with pytest.raises(ShapeError, match="at least one"):
        norm_modulate_streams([], scale=[], shift=[])
    with pytest.raises(ShapeError, match="one per stream"):
        norm_modulate_streams(xs, scale=gates[:1], shift=gates)
    with pytest.raises(ShapeError, match="batch and channels"):
        norm_modulate_streams([xs[0], xs[1][:1]], scale=gates, shift=gates)
    with pytest.raises(ShapeError, match=r"scale\[1\]"):
        norm_modulate_streams(xs, scale=[gates[0], torch.randn(3, 1, 24)], shift=gates)
    with pytest.raises(DTypeError, match="that of the others"):
        norm_modulate_streams([xs[0], xs[1].bfloat16()], scale=gates, shift=gates)
    x, weight = torch.randn(2, 8, 16), torch.randn(24, 16)
    with pytest.raises(ShapeError, match="8 rows in all"):
        project_skip_streams(x, weight, residuals=xs[:1], c_out=gates[:1])
    with pytest.raises(ShapeError, match=r"c_out\[0\]"):
        project_skip_streams(x, weight, residuals=xs, c_out=[gates[0][..., :3], gates[1]])
    with pytest.raises(DTypeError, match="float dtype"):
        project_skip_streams(x, weight, residuals=xs, c_out=[g.int() for g in gates])
    with pytest.raises(ConfigError, match="cast"):
        project_skip_streams(x, weight, residuals=xs, c_out=gates, cast="bf16")  # type: ignore[arg-type]
