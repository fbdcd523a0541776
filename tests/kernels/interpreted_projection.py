"""Projection, skip, one-launch and sampler kernels in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.measures import relative_l2
from turbo_rcm_patch.kernels.portable import project as project_file
from turbo_rcm_patch.ops import (
    AttentionSpec,
    attention_project_skip,
    attention_skip,
    norm_modulate,
    norm_modulate_streams,
    project_skip,
    project_skip_streams,
    skip,
)
from turbo_rcm_patch.ops.denoise import denoise_step
from turbo_rcm_patch.ops.elementwise import norm_forward, rows_forward, skip_norm
from turbo_rcm_patch.ops.projection import skip_forward
from turbo_rcm_patch.ops.reference import norm_rope
from turbo_rcm_patch.ops.registry import rotated_heads

#: DESIGN: the fusion alone, fp32, W_o included.
FUSION = 3e-6

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def coefficients(shape: tuple[int, int, int]) -> dict[str, float | torch.Tensor]:
    batch, tokens, channels = shape
    return {
        "float": 0.3,
        "batch": torch.randn(batch),
        "channel": torch.randn(batch, 1, channels),
        "element": torch.randn(batch, tokens, channels),
        "token": torch.randn(batch, tokens, 1),
        "half": torch.randn(1, 1, channels).half(),
    }


@pytest.mark.parametrize("cast", ["fp32", "model"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("form", ["float", "batch", "channel", "element", "token", "half"])
def test_skip_is_bit_equal(form: str, dtype: torch.dtype, cast: str) -> None:
    c = coefficients((2, 37, 300))[form]
    residual = torch.randn(2, 37, 600).to(dtype)[..., 100:400]
    branch = torch.randn(2, 37, 300).to(dtype)
    out = skip(residual, branch, c, c, cast=cast, impl="triton")
    assert torch.equal(out, skip(residual, branch, c, c, cast=cast, impl="reference"))


@pytest.mark.parametrize("cast", ["fp32", "model"])
@pytest.mark.parametrize(
    ("stream", "out"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
        (torch.float16, torch.float16),
    ],
    ids=["fp32", "fp16-to-fp32", "fp16"],
)
@pytest.mark.parametrize("form", ["none", "channel", "element", "token", "half"])
def test_a_skip_with_its_norm_is_both_bit_for_bit(
    form: str, stream: torch.dtype, out: torch.dtype, cast: str
) -> None:
    """And the norm may go to rows of a longer sequence, beside which nothing is written."""
    c = coefficients((2, 5, 300))[form] if form != "none" else None
    factor, offset = (None, None) if form == "half" else (c, torch.randn(2, 1, 300))
    residual = torch.randn(2, 5, 600).to(stream)[..., 100:400]
    branch = torch.randn(2, 8, 300).half()[:, 3:]
    one, eps = (0.0, 1e-5) if form == "token" else (1.0, 1e-6)
    for impl in ("triton", "reference"):
        y = skip_forward.body(residual, branch, None, c, 1.0, 1.0, cast, impl, out)
        normed = norm_forward.body(y, factor, offset, one, eps, impl, torch.float16)
        how = (factor, offset, one, eps, cast, impl, out, torch.float16)
        made = skip_norm(residual, branch, c, *how)
        assert torch.equal(made[0], y) and made[0].dtype == out
        assert torch.equal(made[1], normed) and made[1].is_contiguous()
        longer = torch.full((2, 9, 300), 7.0, dtype=torch.float16)
        _, rows = skip_norm(residual, branch, c, *how, longer[:, 3:8])
        assert torch.equal(longer[:, 3:8], normed) and rows.data_ptr() == longer[0, 3].data_ptr()
        assert longer[:, :3].eq(7).all() and longer[:, 8:].eq(7).all()
        rows = rows_forward.body(y, factor, offset, one, eps, impl)
        made = skip_norm(residual, branch, c, *how[:-1], torch.int8)
        assert torch.equal(made[0], y) and all(map(torch.equal, made[1], rows))


@pytest.mark.parametrize("noisy", [False, True], ids=["last-step", "re-noising"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_denoise_step_is_fp64_throughout(dtype: torch.dtype, noisy: bool) -> None:
    x = torch.randn(2, 3, 5, 7, 11, dtype=torch.float64).transpose(1, 2)
    branch = torch.randn(2, 5, 3, 7, 11).to(dtype)
    noise = torch.randn(2, 5, 3, 7, 11) if noisy else None
    c = torch.tensor([[0.1, 5.0], [-0.7, 5.0], [0.9, 5.0]], dtype=torch.float64)[:, 0]
    out = denoise_step(x, branch, noise, c, impl="triton")
    assert out.dtype == torch.float64
    expected = denoise_step(x, branch, noise, c, impl="reference")
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("cast", ["fp32", "model"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("form", ["float", "batch", "channel", "element"])
def test_projection(form: str, dtype: torch.dtype, cast: str) -> None:
    c = coefficients((2, 70, 100))[form]
    x = torch.randn(2, 70, 3 * 72).to(dtype)[..., 72:144]
    weight, bias = torch.randn(100, 72).to(dtype), torch.randn(100).to(dtype)
    residual = torch.randn(2, 70, 100).to(dtype)
    out = project_skip(
        x, weight, bias, residual=residual, c_skip=c, c_out=c, cast=cast, impl="triton"
    )
    wide = c.view(2, 1, 1) if form == "batch" else c
    truth = wide * (residual.double() + F.linear(x.double(), weight.double(), bias.double()))
    # fp16 rounds once at the end, or after every step.
    budget = FUSION if dtype == torch.float32 else {"fp32": 4e-4, "model": 1.5e-3}[cast]
    assert relative_l2(out, truth) < budget


@pytest.mark.parametrize("out", [torch.float32, torch.float16], ids=["to-fp32", "to-fp16"])
@pytest.mark.parametrize("stream", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_a_residual_in_fp32_beside_16_bits(stream: torch.dtype, out: torch.dtype) -> None:
    """Nothing is rounded but the result, whatever the cast policy of the 16-bit model."""
    x, weight = torch.randn(2, 70, 72).half(), torch.randn(100, 72).half()
    residual = 100 * torch.randn(2, 70, 100).to(stream)
    gate = torch.randn(2, 1, 100)
    given = {"c_out": gate, "impl": "triton", "out_dtype": out}
    branch = F.linear(x.double(), weight.double())
    truth = residual.double() + gate.double() * branch
    budget = 1e-6 if out == torch.float32 else 4e-4
    made = project_skip(x, weight, residual=residual, **given)
    assert made.dtype == out and relative_l2(made, truth) < budget
    narrow = branch.half()
    made, truth = skip(residual, narrow, **given), residual.double() + gate.double() * narrow
    assert made.dtype == out and relative_l2(made, truth) < budget
    normed = norm_modulate(residual, scale=gate, impl="triton", out_dtype=out)
    truth = F.layer_norm(residual.double(), (100,), eps=1e-6) * (1 + gate.double())
    assert normed.dtype == out and relative_l2(normed, truth) < budget


@pytest.mark.parametrize("form", ["modulation", "affine"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_norm_of_several_streams(form: str, dtype: torch.dtype) -> None:
    lengths, channels = (9, 0, 37), 100
    xs = [torch.randn(2, 40, channels).to(dtype)[:, :n] for n in lengths]
    scale, shift = ([torch.randn(2, 1, channels) for _ in lengths] for _ in range(2))
    given = {"scale": scale, "shift": shift, "form": form, "eps": 1e-5}
    out = norm_modulate_streams(xs, **given, impl="triton")
    other = torch.float16 if dtype == torch.float32 else torch.float32
    converted = norm_modulate_streams(xs, **given, impl="triton", out_dtype=other)
    assert converted.dtype == other and relative_l2(converted, out) < 4e-4
    wide = [x.double() for x in xs]
    one = form == "modulation"
    truth = torch.cat(
        [
            F.layer_norm(x, (channels,), eps=1e-5) * (one + a) + b
            for x, a, b in zip(wide, scale, shift, strict=True)
        ],
        dim=1,
    )
    assert out.is_contiguous() and out.dtype == dtype
    assert relative_l2(out, truth) < (1e-6 if dtype == torch.float32 else 4e-4)


@pytest.mark.parametrize("cast", ["fp32", "model"])
@pytest.mark.parametrize("library", [False, True], ids=["one kernel", "library"])
def test_projection_of_several_streams(
    cast: str, library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library:
        monkeypatch.setattr(project_file, "by_library", lambda x: True)
    lengths, dtype = (9, 0, 37), torch.float16
    x = torch.randn(2, 46, 3 * 72).to(dtype)[..., 72:144]
    weight, bias = torch.randn(100, 72).to(dtype), torch.randn(100).to(dtype)
    residuals = [torch.randn(2, 40, 100).to(dtype)[:, :n] for n in lengths]
    gates = [torch.randn(2, 1, 100).to(dtype) for _ in lengths]
    outs = project_skip_streams(
        x, weight, bias, residuals=residuals, c_out=gates, cast=cast, impl="triton"
    )
    wide = project_skip_streams(
        x, weight, bias, residuals=[r.float() for r in residuals], c_out=gates, cast=cast,
        impl="triton", out_dtype=torch.float32,
    )  # fmt: skip
    branch = F.linear(x.double(), weight.double(), bias.double()).split(lengths, dim=1)
    for one, out in zip(wide, outs, strict=True):
        assert one.dtype == torch.float32
        if one.numel():
            assert relative_l2(out, one) < 1.5e-3
    for out, residual, gate, part in zip(outs, residuals, gates, branch, strict=True):
        assert out.is_contiguous() and out.shape == residual.shape
        truth = residual.double() + gate.double() * part
        if len(truth[0]):
            assert relative_l2(out, truth) < 1.5e-3


@pytest.mark.parametrize(
    ("heads", "dim", "tokens", "features"),
    [(2, 64, 130, 128), (3, 40, 70, 100)],
    ids=["d64", "d40-odd-features"],
)
def test_one_launch(heads: int, dim: int, tokens: int, features: int) -> None:
    """Fused against unfused over the same quantised attention, and against the two-launch form."""
    channels = heads * dim
    q, k, v = (torch.randn(2, tokens, channels) for _ in range(3))
    weight, bias = torch.randn(features, channels) * channels**-0.5, torch.randn(features)
    residual, gate = torch.randn(2, tokens, features), torch.randn(2, 1, features)
    lengths = torch.tensor([tokens - 9, tokens], dtype=torch.int32)
    spec = AttentionSpec(heads=heads, pv="fp16", impl="triton")
    one, two = (
        attention_project_skip(
            q, k, v, weight, bias, spec,
            residual=residual, c_skip=0.5, c_out=gate, kv_lengths=lengths, form=form,
        )
        for form in ("one-launch", "two-launch")
    )  # fmt: skip
    branch = attention_skip(q, k, v, spec, kv_lengths=lengths)
    projected = F.linear(branch.double(), weight.double(), bias.double())
    truth = 0.5 * residual.double() + gate * projected
    assert relative_l2(one, truth) < FUSION
    assert relative_l2(two, truth) < FUSION
    unfused = 0.5 * residual + gate * F.linear(branch, weight, bias)
    assert relative_l2(one, truth) <= 2 * relative_l2(unfused, truth)


@pytest.mark.parametrize("tokens", [(5, 5), (6, 1)], ids=["self", "one-key"])
@pytest.mark.parametrize("norm", ["none", "rows", "heads"])
def test_q_and_k_as_heads(norm: str, tokens: tuple[int, int]) -> None:
    """Dense in memory as [B, N, H * D], whatever they are seen as."""
    batch, heads, dim = 2, 3, 16
    qkv = [torch.randn(batch, n, 2 * heads * dim)[..., : heads * dim] for n in tokens]
    width = {"none": 0, "rows": heads * dim, "heads": dim}[norm]
    weights: list[torch.Tensor | None] = [torch.randn(width) if width else None for _ in qkv]
    cos = sin = None
    if tokens[0] == tokens[1]:
        angle = torch.randn(tokens[0], dim // 2).repeat_interleave(2, -1)
        cos, sin = angle.cos(), angle.sin()
    made = rotated_heads(*qkv, heads, *weights, None, None, cos, sin, 1e-6)
    for x, y, weight in zip(qkv, made, weights, strict=True):
        expected = norm_rope(x, heads, weight=weight, cos=cos, sin=sin, eps=1e-6)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        if weight is not None or cos is not None:
            assert y.transpose(1, 2).is_contiguous()
