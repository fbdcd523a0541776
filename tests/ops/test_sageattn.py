"""`turbo_rcm_patch.sageattn` against torch's attention, and against the interface it replaces."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F

from tests.measures import relative_l2
from turbo_rcm_patch import errors, ops, sageattn
from turbo_rcm_patch.ops.sageattn import MASK_WARNING

pytestmark = pytest.mark.usefixtures("poisoned")

#: Relative L2 of int8 q and k beside 16-bit p and v, as in test_attention.py.
INT8_FLOOR = 0.015
LONG = ops.INT8_MIN_KEYS + 37
LAYOUTS = ("HND", "NHD")


def heads_first(x: torch.Tensor, layout: str) -> torch.Tensor:
    return x if layout == "HND" else x.transpose(1, 2)


def inputs(
    layout: str,
    batch: int = 2,
    heads: int = 3,
    kv_heads: int | None = None,
    n_q: int = 65,
    n_kv: int = 65,
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    contiguous: bool = True,
) -> tuple[torch.Tensor, ...]:
    """q, k and v of a layout: contiguous, or as transposed views of the other layout."""
    made = []
    for count, tokens in ((heads, n_q), (kv_heads or heads, n_kv), (kv_heads or heads, n_kv)):
        x = torch.randn(batch, count, tokens, dim, dtype=dtype)
        x = heads_first(x, layout)
        if not contiguous:
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        made.append(x.contiguous() if contiguous else x)
    return tuple(made)


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str, **more: object
) -> torch.Tensor:
    q, k, v = (heads_first(x, layout).double() for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **more)
    return heads_first(out, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "transposed-view"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_short_attention_is_exact(layout: str, contiguous: bool, causal: bool) -> None:
    q, k, v = inputs(layout, contiguous=contiguous)
    before = [x.clone() for x in (q, k, v)]
    out = sageattn(q, k, v, layout, causal, 0.2)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert relative_l2(out, exact(q, k, v, layout, is_causal=causal, scale=0.2)) < 1e-6
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "transposed-view"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_long_attention_runs_in_int8(layout: str, contiguous: bool, causal: bool) -> None:
    n_q = LONG if causal else 33
    q, k, v = inputs(layout, 1, 2, n_q=n_q, n_kv=LONG, contiguous=contiguous)
    before = [x.clone() for x in (q, k, v)]
    out = sageattn(q, k, v, tensor_layout=layout, is_causal=causal)
    assert 1e-4 < relative_l2(out, exact(q, k, v, layout, is_causal=causal)) < INT8_FLOOR
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [32, 64, 72, 128])
def test_dtypes_and_head_dims(dtype: torch.dtype, dim: int) -> None:
    q, k, v = inputs("HND", dim=dim, dtype=dtype)
    out = sageattn(q, k, v)
    assert out.dtype == dtype
    budget = 1e-6 if dtype == torch.float32 else 2e-2
    assert relative_l2(out, exact(q, k, v, "HND")) < budget


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n_kv", [65, LONG], ids=["exact", "int8"])
def test_grouped_queries(layout: str, n_kv: int) -> None:
    q, k, v = inputs(layout, heads=6, kv_heads=2, n_kv=n_kv)
    out = sageattn(q, k, v, layout)
    assert relative_l2(out, exact(q, k, v, layout)) < (1e-6 if n_kv < 1024 else INT8_FLOOR)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "transposed-view"])
@pytest.mark.parametrize("n_kv", [65, LONG], ids=["exact", "int8"])
def test_lse_is_natural_and_one_for_each_query(layout: str, contiguous: bool, n_kv: int) -> None:
    """As sageattention 2.x: fp32 [B, H, Nq], of the unsmoothed logits."""
    q, k, v = inputs(layout, n_kv=n_kv, contiguous=contiguous)
    k += 3.0
    out, lse = sageattn(q, k, v, layout, return_lse=True)
    qh, kh = (heads_first(x, layout).double() for x in (q, k))
    truth = torch.logsumexp(qh @ kh.transpose(-1, -2) * 64**-0.5, -1)
    assert lse.shape == (2, 3, 65) and lse.dtype == torch.float32
    assert float((lse - truth).abs().max()) < (1e-5 if n_kv < 1024 else 2e-2)
    assert torch.equal(out, sageattn(q, k, v, layout)) or n_kv < 1024


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["boolean", "added"])
def test_a_mask_is_exact_and_said(layout: str, kind: str) -> None:
    q, k, v = inputs(layout, n_q=33, n_kv=LONG)
    mask = torch.rand(2, 1, 33, LONG) > 0.5
    mask = mask if kind == "boolean" else torch.randn(2, 1, 33, LONG)
    with pytest.warns(UserWarning, match="attn_mask"):
        out = sageattn(q, k, v, layout, attn_mask=mask)
    given = mask if kind == "boolean" else mask.double()
    assert relative_l2(out, exact(q, k, v, layout, attn_mask=given)) < 1e-6


def test_a_mask_is_said_once() -> None:
    q, k, v = inputs("HND")
    mask = torch.ones(65, 65, dtype=torch.bool)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(3):
            sageattn(q, k, v, attn_mask=mask)
    assert [str(one.message) for one in said] == [MASK_WARNING]


def test_gradients_are_those_of_exact_attention() -> None:
    q, k, v = inputs("HND", 1, 2, n_q=9, n_kv=LONG)
    gradients = []
    for function in (sageattn, F.scaled_dot_product_attention):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        function(*leaves).square().sum().backward()
        gradients.append([x.grad for x in leaves])
    for ours, theirs in zip(*gradients, strict=True):
        assert relative_l2(ours, theirs.double()) < 3 * INT8_FLOOR


def test_signature_begins_with_that_of_sageattention() -> None:
    """Names, order and defaults of `sageattention.sageattn` 2.2.0, whose **kwargs are ignored."""
    theirs = {
        "q": inspect.Parameter.empty,
        "k": inspect.Parameter.empty,
        "v": inspect.Parameter.empty,
        "tensor_layout": "HND",
        "is_causal": False,
        "sm_scale": None,
        "return_lse": False,
    }
    ours = inspect.signature(sageattn).parameters
    positional = {
        name: one.default
        for name, one in ours.items()
        if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    }
    assert list(positional.items()) == list(theirs.items())


def test_signature_agrees_with_the_installed_sageattention() -> None:
    package = pytest.importorskip("sageattention")
    ours = inspect.signature(sageattn).parameters
    for name, one in inspect.signature(package.sageattn).parameters.items():
        if one.kind is not inspect.Parameter.VAR_KEYWORD:
            assert ours[name].default == one.default


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"pv_accum_dtype": "fp32"}, errors.ConfigError, "pv_accum_dtype"),
        ({"tensor_layout": "NDH"}, errors.ConfigError, "tensor_layout"),
        ({"q": torch.randn(2, 65, 64)}, errors.ShapeError, "four dimensions"),
        ({"q": torch.randn(2, 4, 65, 64)}, errors.ShapeError, "multiple of the 3 heads"),
        ({"v": torch.randn(2, 3, 64, 64)}, errors.ShapeError, "k and v"),
        ({"k": torch.randn(2, 3, 65, 64).bfloat16()}, errors.DTypeError, "bfloat16"),
        ({"q": torch.randn(2, 3, 9, 64), "is_causal": True}, errors.MaskError, "as many queries"),
        (
            {"attn_mask": torch.ones(65, 65).bool(), "return_lse": True},
            errors.MaskError,
            "return_lse",
        ),
        ({"q": [1.0]}, errors.DTypeError, "list"),
        ({"sm_scale": float("nan")}, errors.ConfigError, "sm_scale"),
        ({"is_causal": 1}, errors.ConfigError, "is_causal"),
        ({"return_lse": "no"}, errors.ConfigError, "return_lse"),
        ({"smooth_k": 1}, errors.ConfigError, "smooth_k"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_is_refused(change: dict, error: type[Exception], words: str) -> None:
    q, k, v = inputs("HND")
    with pytest.raises(error, match=words):
        sageattn(**({"q": q, "k": k, "v": v} | change))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("empty", [1, 2, 3])
def test_no_head_no_token_and_no_channel_are_refused(layout: str, empty: int) -> None:
    q, k, v = inputs(layout)
    with pytest.raises(errors.ShapeError, match="at least one head, token and channel"):
        sageattn(q, k.narrow(empty, 0, 0), v, tensor_layout=layout)


def test_wide_heads_are_refused() -> None:
    q, k, v = inputs("HND", dim=288)
    with pytest.raises(errors.ShapeError):
        sageattn(q, k, v)


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_compiles_without_a_break(masked: bool) -> None:
    q, k, v = inputs("NHD")
    more = {"attn_mask": torch.rand(65, 65) > 0.5} if masked else {}
    compiled = torch.compile(sageattn, backend="eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, eager = compiled(q, k, v, "NHD", **more), sageattn(q, k, v, "NHD", **more)
    assert torch.equal(ours, eager)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_an_empty_batch_gives_an_empty_result(layout: str) -> None:
    q = torch.randn(0, 2, 6, 8) if layout == "HND" else torch.randn(0, 6, 2, 8)
    assert sageattn(q, q, q, layout).shape == q.shape
    out, lse = sageattn(q, q, q, layout, return_lse=True)
    assert out.shape == q.shape and lse.shape == (0, 2, 6)
