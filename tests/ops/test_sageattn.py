"""`turbo_rcm_patch.sageattn` against torch's attention, and against the interface it replaces."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.measures import relative_l2
from turbo_rcm_patch import ops, sageattn
from turbo_rcm_patch.ops.sageattn import MASK_WARNING

pytestmark = pytest.mark.usefixtures("poisoned")

#: Relative L2 of int8 q and k beside 16-bit p and v, as in test_attention.py.
INT8_FLOOR = 0.015
LONG = ops.INT8_MIN_KEYS + 37
each_layout = pytest.mark.parametrize("layout", ["HND", "NHD"])
each_view = pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "transposed"])
each_length = pytest.mark.parametrize("n_kv", [65, LONG], ids=["exact", "int8"])


def heads_first(x: Tensor, layout: str) -> Tensor:
    return x if layout == "HND" else x.transpose(1, 2)


def inputs(
    layout: str,
    heads: int = 2,
    kv_heads: int = 2,
    n_q: int = 33,
    n_kv: int = 65,
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    contiguous: bool = True,
) -> list[Tensor]:
    """q, k and v of a layout: contiguous, or as transposed views of the other layout."""
    made = []
    for count, tokens in ((heads, n_q), (kv_heads, n_kv), (kv_heads, n_kv)):
        x = heads_first(torch.randn(2, count, tokens, dim, dtype=dtype), layout).contiguous()
        made.append(x if contiguous else x.transpose(1, 2).contiguous().transpose(1, 2))
    return made


def exact(q: Tensor, k: Tensor, v: Tensor, layout: str, **more: object) -> Tensor:
    q, k, v = (heads_first(x, layout).double() for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **more)
    return heads_first(out, layout)


@each_layout
@each_view
@each_length
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_short_attention_is_exact_and_long_attention_int8(
    layout: str, contiguous: bool, n_kv: int, causal: bool
) -> None:
    q, k, v = inputs(layout, n_q=n_kv if causal else 33, n_kv=n_kv, contiguous=contiguous)
    before = [x.clone() for x in (q, k, v)]
    out = sageattn(q, k, v, layout, causal, 0.2)
    assert out.shape == q.shape and out.dtype == q.dtype
    error = relative_l2(out, exact(q, k, v, layout, is_causal=causal, scale=0.2))
    if n_kv == LONG:
        assert 1e-4 < error < 0.2 * 64**0.5 * INT8_FLOOR
    else:
        assert error < 1e-6
    assert all(map(torch.equal, (q, k, v), before))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [32, 72, 128])
def test_dtypes_and_head_dims(dtype: torch.dtype, dim: int) -> None:
    q, k, v = inputs("HND", dim=dim, dtype=dtype)
    out = sageattn(q, k, v)
    assert out.dtype == dtype
    limit = 1e-6 if dtype == torch.float32 else 2e-2
    assert relative_l2(out, exact(q, k, v, "HND")) < limit


@each_layout
@each_length
def test_grouped_queries(layout: str, n_kv: int) -> None:
    q, k, v = inputs(layout, heads=6, kv_heads=2, n_kv=n_kv)
    limit = INT8_FLOOR if n_kv == LONG else 1e-6
    assert relative_l2(sageattn(q, k, v, layout), exact(q, k, v, layout)) < limit


@each_layout
@each_view
@each_length
def test_the_logsumexp_is_natural_and_one_for_each_query(
    layout: str, contiguous: bool, n_kv: int
) -> None:
    """As sageattention 2.x: fp32 [B, H, Nq], of the unsmoothed logits."""
    q, k, v = inputs(layout, n_kv=n_kv, contiguous=contiguous)
    k += 3.0
    out, lse = sageattn(q, k, v, layout, return_lse=True)
    qh, kh = (heads_first(x, layout).double() for x in (q, k))
    truth = torch.logsumexp(qh @ kh.transpose(-1, -2) * 64**-0.5, -1)
    assert lse.shape == (2, 2, 33) and lse.dtype == torch.float32
    assert float((lse - truth).abs().max()) < (2e-2 if n_kv == LONG else 1e-5)
    torch.testing.assert_close(out, sageattn(q, k, v, layout), rtol=1e-4, atol=1e-5)


@each_layout
@pytest.mark.parametrize("kind", ["boolean", "added"])
def test_a_mask_is_exact_and_said_once(layout: str, kind: str) -> None:
    """Also a mask at an address that 16 bytes do not divide."""
    q, k, v = inputs(layout, n_kv=LONG)
    mask = torch.randn(2 * 33 * LONG + 3)[3:].view(2, 1, 33, LONG)
    given = mask > 0 if kind == "boolean" else mask
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        made = [sageattn(q, k, v, layout, attn_mask=given) for _ in range(3)]
    assert [str(one.message) for one in said] == [MASK_WARNING]
    truth = exact(q, k, v, layout, attn_mask=given if kind == "boolean" else given.double())
    assert all(relative_l2(out, truth) < 1e-6 for out in made)


def test_a_mask_compiles_without_a_break_and_without_a_warning() -> None:
    q, k, v = inputs("NHD")
    mask = torch.rand(33, 65) > 0.5
    compiled = torch.compile(sageattn, backend="eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        made = compiled(q, k, v, "NHD", attn_mask=mask)
    assert relative_l2(made, exact(q, k, v, "NHD", attn_mask=mask)) < 1e-6


def test_the_signature_begins_with_that_of_sageattention() -> None:
    """Names, order and defaults of `sageattention.sageattn` 2.2.0, whose **kwargs are ignored."""
    theirs = dict.fromkeys("qkv", inspect.Parameter.empty) | {
        "tensor_layout": "HND", "is_causal": False, "sm_scale": None, "return_lse": False,
    }  # fmt: skip
    own = inspect.signature(sageattn).parameters.values()
    positional = [
        (one.name, one.default)
        for one in own
        if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    assert positional == list(theirs.items())


@each_layout
def test_an_empty_batch_gives_an_empty_logsumexp(layout: str) -> None:
    q = torch.randn(0, 2, 6, 8) if layout == "HND" else torch.randn(0, 6, 2, 8)
    out, lse = sageattn(q, q, q, layout, return_lse=True)
    assert out.shape == q.shape and lse.shape == (0, 2, 6)
