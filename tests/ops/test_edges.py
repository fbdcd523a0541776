"""The edges of what an operation is given: right, or a typed error that names the argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.measures import relative_l2
from turbo_rcm_patch import errors, ops
from turbo_rcm_patch.ops.emulation import emulated_attention
from turbo_rcm_patch.ops.reference import exact_attention

HEADS, DIM = 2, 16
CHANNELS = HEADS * DIM
INT8 = ops.AttentionSpec(heads=HEADS)
EXACT = ops.AttentionSpec(heads=HEADS, attention="exact")


def tokens(batch: int = 2, n: int = 9, channels: int = CHANNELS) -> Tensor:
    return torch.randn(batch, n, channels)


def spec(**options: Any) -> ops.AttentionSpec:
    return ops.AttentionSpec(heads=HEADS, **options)


# --- lengths and scales --------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["int8", "exact"])
def test_lengths_past_what_32_bits_hold_see_every_key(attention: str) -> None:
    q, k, v = tokens(), tokens(), tokens()
    lengths = torch.tensor([2**31, 2**40 + 3])
    out = ops.attention_skip(q, k, v, spec(attention=attention), kv_lengths=lengths)
    assert torch.equal(out, ops.attention_skip(q, k, v, spec(attention=attention)))


@pytest.mark.parametrize("norm", ["none", "rms", "layer"])
@pytest.mark.parametrize("pv", ["bf16", "fp16", "fp8"])
def test_a_negative_scale(pv: str, norm: str) -> None:
    """exact, and int8 as close to it as with a positive one; its gradients too."""
    q, k, v = tokens(), tokens(), tokens()
    norms: dict[str, Tensor] = {}
    if norm != "none":
        norms = {"norm_q": torch.rand(DIM) + 0.5, "norm_k": torch.rand(DIM) + 0.5}
    if norm == "layer":
        norms |= {"norm_q_bias": torch.randn(DIM), "norm_k_bias": torch.randn(DIM)}

    def of(attention: str, scale: float, q: Tensor = q) -> tuple[Tensor, Tensor]:
        given = spec(attention=attention, sm_scale=scale, pv=pv)
        return ops.attention_lse(q, k, v, given, **norms)

    for ours, exact in zip(of("int8", -0.3), of("exact", -0.3), strict=True):
        assert relative_l2(ours, exact) < 0.06
    assert relative_l2(of("exact", -0.3)[0], of("exact", 0.3)[0]) > 0.3
    if norm == "none":
        for ours, other in zip(of("exact", -0.3), of("exact", 0.3, -q), strict=True):
            assert torch.allclose(ours, other, atol=1e-5)
    gradients = []
    for attention in ("int8", "exact"):
        leaf = q.clone().requires_grad_()
        of(attention, -0.3, leaf)[0].square().sum().backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    assert relative_l2(*gradients) < 0.1


@pytest.mark.parametrize("attention", ["int8", "exact"])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"pv": "fp8"}], ids=["plain", "causal", "fp8"]
)
def test_a_scale_of_zero_is_a_mean(attention: str, options: dict[str, Any]) -> None:
    q, k, v = tokens(), tokens(), tokens()
    out = ops.attention_skip(q, k, v, spec(attention=attention, sm_scale=0.0, **options))
    mean = v.mean(1, keepdim=True).expand(v.shape)
    if options.get("causal"):
        mean = v.cumsum(1) / torch.arange(1, v.shape[1] + 1).view(1, -1, 1)
    assert relative_l2(out, mean) < 0.05


def test_queries_and_keys_whose_scales_underflow() -> None:
    """Their logits are 0; padded keys stay unseen."""
    q, k, v = tokens() * 1e-25, tokens() * 1e-25, tokens()
    out = ops.attention_skip(q, k, v, INT8, kv_lengths=torch.tensor([4, 9]))
    assert relative_l2(out[0], v[0, :4].mean(0).expand_as(out[0])) < 0.01


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "1", True, 1j])
def test_scales_that_are_none(scale: object) -> None:
    with pytest.raises(errors.ConfigError, match="sm_scale"):
        spec(sm_scale=scale)


def test_a_sparse_attention_has_no_negative_scale() -> None:
    x = tokens()
    with pytest.raises(errors.ConfigError, match="sm_scale"):
        ops.sparse_linear_attention(
            x, x, x, torch.eye(DIM), None, spec(sm_scale=-1.0), ops.Sparsity(topk=0.5)
        )


@pytest.mark.parametrize("size", [1e-30, 1e-36, 1e-38, 1e-43, 0.0])
def test_fp8_of_tiny_values(size: float) -> None:
    """As exact as fp8 is while its scale is a normal number, and finite below."""
    q, k, v = (torch.randn(1, HEADS, 40, DIM) for _ in range(3))
    v = v * size
    given: dict[str, Any] = {"sm_scale": 0.25}
    ours, _ = emulated_attention(q, k, v, pv="fp8", qmax=127, smooth_k=True, **given)
    exact, _ = exact_attention(q.double(), k.double(), v.double(), **given)
    wide = exact.transpose(1, 2).flatten(2)
    assert bool(ours.isfinite().all())
    assert float((ours.double() - wide).abs().max()) <= max(0.2 * size, 2.0**-117 / 448)
    if size >= 1e-30:
        assert relative_l2(ours.double() / size, wide / size) < 0.08


@pytest.mark.parametrize("step", [0, 1, 3])
def test_rows_that_overlap_in_memory(step: int) -> None:
    """Windows over one sequence; torch's own attention on a CPU makes noise of them."""
    values = torch.randn(CHANNELS + 8 * 3)
    windows = values.as_strided((1, 9, CHANNELS), (1, step, 1))
    dense = windows.clone(memory_format=torch.contiguous_format)
    mask = torch.ones(9, 9, dtype=torch.bool)
    for run in (
        lambda x: ops.attention_skip(x, x, x, EXACT, residual=x),
        lambda x: ops.attention_skip(x, x, x, INT8, residual=x),
        lambda x: ops.masked_attention(x, x, x, mask, EXACT),
    ):
        torch.testing.assert_close(run(windows), run(dense), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("offset", [0, 1, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torchs_attention_is_given_addresses_that_16_bytes_divide(
    offset: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels for a GPU look at strides alone."""
    x = torch.randn(9 * CHANNELS + offset).to(dtype)[offset:].view(1, 9, CHANNELS)
    mask = torch.randn(9 * 16 + offset).to(dtype)[offset:].view(9, 16)[:, :9]
    given: list[Tensor] = []
    real = torch.nn.functional.scaled_dot_product_attention

    def spy(*args: Tensor, attn_mask: Tensor | None = None, **named: Any) -> Tensor:
        given.extend([*args] if attn_mask is None else [*args, attn_mask])
        return real(*args, attn_mask=attn_mask, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    for run in (
        lambda x, mask: ops.attention_skip(x, x, x, EXACT),
        lambda x, mask: ops.masked_attention(x, x, x, mask, EXACT),
        lambda x, mask: ops.masked_attention(x, x, x, mask > 0, EXACT),
    ):
        assert torch.equal(run(x, mask), run(x.clone(), mask.clone()))
    assert len(given) == 22 and not [y for y in given if y.data_ptr() % 16]


# --- words and dtypes ----------------------------------------------------------------------------

X = torch.randn(2, 5, 16)
ROW = torch.randn(16)
WEIGHT_INT8, SCALE = ops.quantize_weight(torch.randn(16, 16))
THREE = torch.ones(3, dtype=torch.float64)
SPARSITY = ops.Sparsity(topk=0.5)

#: Operations by name, each of what is given over good arguments.
CALLS: dict[str, Callable[..., Any]] = {
    "skip": lambda **g: ops.skip(**{"residual": X, "branch": X} | g),
    "project": lambda **g: ops.project_skip(
        **{"x": X, "weight": torch.randn(16, 16), "bias": ROW, "residual": X} | g
    ),
    "norm": lambda **g: ops.norm_modulate(**{"x": X, "scale": ROW, "shift": ROW} | g),
    "rows": lambda **g: ops.norm_modulate_rows(**{"x": X, "scale": ROW, "shift": ROW} | g),
    "gelu": lambda **g: ops.linear_gelu(
        **{"x": X, "weight": torch.randn(16, 16), "bias": ROW} | g
    ),
    "norm-streams": lambda **g: ops.norm_modulate_streams(
        **{"streams": [X], "scale": [ROW], "shift": [ROW]} | g
    ),
    "project-streams": lambda **g: ops.project_skip_streams(
        **{"x": X, "weight": torch.randn(16, 16), "bias": ROW, "residuals": [X], "c_out": [ROW]}
        | g
    ),
    "int8": lambda **g: ops.int8_linear(
        **{"x": X, "weight_int8": WEIGHT_INT8, "weight_scale": SCALE, "bias": ROW, "residual": X}
        | g
    ),
    "weight": lambda **g: ops.quantize_weight(g.pop("weights", X[0]), **g),
    "denoise": lambda **g: ops.denoise_step(
        **{"x": X, "branch": X, "noise": X, "coefficients": THREE} | g
    ),
    "attention": lambda **g: ops.attention_skip(
        **{"q": X, "k": X, "v": X, "spec": INT8, "residual": X, "norm_q": ROW} | g
    ),
    "lse": lambda **g: ops.attention_lse(**{"q": X, "k": X, "v": X, "spec": INT8} | g),
    "masked": lambda **g: ops.masked_attention(
        **{"q": X, "k": X, "v": X, "spec": INT8, "mask": torch.ones(5, 5) > 0} | g
    ),
    "fused": lambda **g: ops.attention_project_skip(
        **{"q": X, "k": X, "v": X, "weight": torch.randn(16, 16), "bias": ROW, "spec": INT8}
        | {"residual": X, "form": "one-launch"}
        | g
    ),
    "sparse": lambda **g: ops.sparse_linear_attention(
        **{"q": X, "k": X, "v": X, "weight": torch.eye(8), "bias": None, "spec": INT8}
        | {"sparsity": SPARSITY}
        | g
    ),
}
#: Argument -> the operations that have it.
HAVE = {
    "impl": "skip project norm rows norm-streams project-streams int8 weight denoise",
    "form": "norm rows norm-streams fused",
    "out_dtype": "skip project int8 attention lse fused sparse",
    "c_out": "skip project int8 attention fused",
    "c_skip": "skip project int8 attention fused",
    "eps": "norm rows norm-streams",
    "spec": "attention lse masked fused sparse",
    "q": "attention lse masked fused sparse",
    "v": "attention lse masked fused sparse",
    "norm_q": "attention lse fused sparse",
    "kv_lengths": "attention lse fused",
    "residual": "skip project int8 attention fused",
    "branch": "skip denoise",
    "x": "project norm rows gelu project-streams int8 denoise",
    "weight": "project gelu project-streams fused sparse",
    "bias": "project gelu project-streams int8 fused sparse",
    "scale": "norm rows norm-streams",
    "streams": "norm-streams",
    "residuals": "project-streams",
    "coefficients": "denoise",
    "weights": "weight",
    "weight_int8": "int8",
    "weight_scale": "int8",
    "mask": "masked",
    "noise": "denoise",
}


def wrong(**values: list[object]) -> list[Any]:
    return [
        pytest.param(call, argument, value, id=f"{call}-{argument}-{value!s:.12}")
        for argument, several in values.items()
        for call in HAVE[argument].split()
        for value in several
    ]


@pytest.mark.parametrize("call", CALLS)
def test_the_calls_below_are_good(call: str) -> None:
    CALLS[call]()


@pytest.mark.parametrize(
    ("call", "argument", "value"),
    wrong(
        impl=["bogus", None, 1],
        form=["bogus"],
        out_dtype=[torch.int8, torch.complex64, torch.bool, "float32"],
        c_out=[[1.0], "x", torch.ones(2, dtype=torch.complex64)],
        c_skip=[[1.0]],
        eps=[-1.0, float("nan")],
        spec=[None],
        scale=[torch.ones(16, dtype=torch.complex64)],
        **{
            name: [[1.0, 2.0], 3]
            for name in HAVE
            if name not in ("impl", "form", "out_dtype", "c_out", "c_skip", "eps", "spec", "scale")
        },
    ),
)
def test_what_no_operation_takes(call: str, argument: str, value: object) -> None:
    with pytest.raises(errors.TurboRCMError) as caught:
        CALLS[call](**{argument: value})
    if value != [1.0, 2.0]:  # of streams, the first may be named
        assert argument.split("_")[0].rstrip("s") in str(caught.value)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        pytest.param(call, argument, id=f"{call}-{argument}")
        for argument, calls in HAVE.items()
        for call in calls.split()
        if argument not in ("impl", "form", "out_dtype", "eps", "spec")
        and (call, argument) != ("weight", "weights")
    ],
)
def test_tensors_of_two_devices(call: str, argument: str) -> None:
    shapes = {"c_out": (2,), "c_skip": (2,), "v": X.shape, "q": X.shape, "mask": (5, 5)}
    shapes |= {"weight": (8, 8) if call == "sparse" else (16, 16), "weight_int8": (16, 16)}
    shapes |= {"coefficients": (3,), "bias": (8,) if call == "sparse" else (16,)}
    shapes |= dict.fromkeys(("residual", "branch", "x", "noise", "streams", "residuals"), X.shape)
    kinds = {"weight_int8": torch.int8, "coefficients": torch.float64, "kv_lengths": torch.int32}
    shape = shapes.get(argument, (2,) if argument == "kv_lengths" else (16,))
    there: Any = torch.ones(*shape, dtype=kinds.get(argument, torch.float32), device="meta")
    if (
        argument in ("streams", "residuals")
        or "streams" in call
        and argument in ("scale", "c_out")
    ):
        there = [there]
    if call == "norm-streams" and argument == "streams":
        there = [X, there[0]]
    with pytest.raises(errors.TurboRCMError, match="meta"):
        CALLS[call](**{argument: there})


def test_weights_of_two_devices() -> None:
    with pytest.raises(errors.ShapeError, match="meta"):
        ops.quantize_weight(X[0], X[0].to("meta"))
    with pytest.raises(errors.ShapeError):
        ops.quantize_weight()


@pytest.mark.parametrize("call", ["project", "gelu", "project-streams", "int8", "fused"])
def test_a_bias_of_another_dtype(call: str) -> None:
    """bf16 with an fp32 bias, as a model whose biases were left in fp32 has it."""
    low, weight = X.bfloat16(), torch.randn(16, 16).bfloat16()
    given: dict[str, Any] = dict.fromkeys(("q", "k", "v") if call == "fused" else ("x",), low)
    given |= {} if call == "int8" else {"weight": weight}
    given |= {"residuals": [low]} if "streams" in call else {}
    wide, narrow = (CALLS[call](**given, bias=b) for b in (ROW, ROW.bfloat16()))
    pairs = zip(wide, narrow, strict=True) if isinstance(wide, tuple) else [(wide, narrow)]
    for a, b in pairs:
        assert a.dtype == torch.bfloat16 and relative_l2(a, b) < 0.01


# --- nothing, and one ----------------------------------------------------------------------------


@pytest.mark.parametrize("call", [name for name in CALLS if name != "weight"])
def test_an_empty_batch(call: str) -> None:
    """A result of no elements, and a gradient of as many, as torch's own functions have."""
    none = X[:0]
    names = {"norm-streams": ("streams",), "project-streams": ("x", "residuals")}
    given: dict[str, Any] = {
        "skip": {"residual": none, "branch": none},
        "denoise": {"x": none, "branch": none, "noise": none},
        "project": {"x": none, "residual": none},
        "int8": {"x": none, "residual": none},
    }.get(call, dict.fromkeys(names.get(call, ("x",)), none))
    if call in ("attention", "lse", "masked", "fused", "sparse"):
        given = dict.fromkeys(("q", "k", "v"), none)
        given |= {"residual": none} if call in ("attention", "fused") else {}
    given = {k: [v] if k in ("streams", "residuals") else v for k, v in given.items()}
    out = CALLS[call](**given)
    parts = out if isinstance(out, tuple) else (out,)
    assert all(part.numel() == 0 and part.shape[0] == 0 for part in parts)
    if call in ("rows", "sparse"):
        return
    leaf = torch.empty(0, 5, 16, requires_grad=True)
    swapped = {
        k: [leaf] if isinstance(v, list) else leaf for k, v in given.items() if k != "noise"
    }
    out = CALLS[call](**given | swapped)
    sum(part.sum() for part in (out if isinstance(out, tuple) else (out,))).backward()
    assert leaf.grad is not None and leaf.grad.shape == leaf.shape


@pytest.mark.parametrize(
    ("n_q", "n_kv", "channels"), [(0, 4, 16), (4, 0, 16), (4, 4, 0)], ids=["n", "keys", "channels"]
)
@pytest.mark.parametrize("attention", ["int8", "exact"])
def test_attention_of_nothing_is_refused(
    n_q: int, n_kv: int, channels: int, attention: str
) -> None:
    q, k = torch.randn(1, n_q, channels), torch.randn(1, n_kv, channels)
    given = spec(attention=attention)
    mask, eye = torch.ones(n_q, n_kv, dtype=torch.bool), torch.eye(channels // 2)
    for run in (
        lambda: ops.attention_skip(q, k, k, given),
        lambda: ops.attention_lse(q, k, k, given),
        lambda: ops.masked_attention(q, k, k, mask, given),
        lambda: ops.attention_project_skip(
            q, k, k, torch.randn(8, channels), None, given, residual=None
        ),
        lambda: ops.sparse_linear_attention(q, k, k, eye, None, given, SPARSITY),
    ):
        with pytest.raises(errors.ShapeError):
            run()


@pytest.mark.parametrize("shape", [(2, 0, 16), (2, 5, 0)], ids=["tokens", "channels"])
def test_elementwise_of_nothing(shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape)
    assert ops.skip(x, x, 0.5, torch.ones(2)).shape == shape
    assert ops.norm_modulate(x).shape == shape
    out = ops.project_skip(x, torch.randn(8, shape[2]), torch.ones(8), residual=None)
    assert out.shape == (*shape[:2], 8) and bool((out == 1).all())
    if shape[2]:
        assert ops.norm_modulate_rows(x).int8.shape == (2, 0, 16)
    else:
        with pytest.raises(errors.ShapeError):
            ops.norm_modulate_rows(x)


# --- autocast ------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [name for name in CALLS if name != "weight"])
@pytest.mark.parametrize("attention", ["int8", "exact"])
def test_autocast_changes_no_operation(call: str, attention: str) -> None:
    """Its contract says in which dtype it multiplies; bf16 in the place of fp32 is 1e-3 away."""
    takes_spec = call in HAVE["spec"].split()
    if attention == "exact" and not takes_spec:
        pytest.skip("it has no attention")
    given: dict[str, Any] = {"spec": spec(attention=attention)} if takes_spec else {}
    if call == "fused" and attention == "exact":
        given["form"] = "two-launch"
    torch.manual_seed(5)
    plain = CALLS[call](**given)
    torch.manual_seed(5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = CALLS[call](**given)
        assert torch.is_autocast_enabled("cpu")
    for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (cast, plain)), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("pv", ["fp8", "bf16", "fp16"])
def test_large_logits_have_an_attention(pv: str) -> None:
    """Up to 1e7 with p in fp16 and 1e9 in other types. Beyond, a rounding of their distance to the
    maximum is out of range."""
    q, k, v = (torch.randn(1, 64, 64) for _ in range(3))
    for size in (1e3, *([] if pv == "fp16" else [1e4])):
        spec = ops.AttentionSpec(heads=1, pv=pv, impl="reference")  # type: ignore[arg-type]
        out = ops.attention_skip(q * size, k * size, v, spec)
        assert out.isfinite().all(), size
