"""`sageattn` and its relatives against torch's attention, and in the calls of the programs that
import them from `sageattention`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.measures import relative_l2
from tests.patching.models import named
from turbo_rcm_patch import errors, ops, patch_model, sageattn
from turbo_rcm_patch.ops import sageattn as names
from turbo_rcm_patch.ops.attention import sage
from turbo_rcm_patch.ops.sageattn import TORCH_WARNING

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
    layout: str, heads: int = 2, kv_heads: int = 2, n_q: int = 33, n_kv: int = 65, dim: int = 64,
    dtype: torch.dtype = torch.float32, contiguous: bool = True, device: str = "cpu",
) -> list[Tensor]:  # fmt: skip
    """q, k and v of a layout: contiguous, or as transposed views of the other layout."""
    made = []
    for count, tokens in ((heads, n_q), (kv_heads, n_kv), (kv_heads, n_kv)):
        x = torch.randn(2, count, tokens, dim, dtype=dtype, device=device)
        x = heads_first(x, layout).contiguous()
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
    out, lse = sageattn(q, k, v, layout, causal, 0.2, True)
    truth = exact(q, k, v, layout, is_causal=causal, scale=0.2)
    error = relative_l2(out, truth)
    assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
    if n_kv == LONG:
        assert 1e-4 < error < 0.2 * 64**0.5 * INT8_FLOOR
    else:
        assert error < 1e-6
    assert all(map(torch.equal, (q, k, v), before))
    if not causal:  # natural, one for each query, of the unsmoothed logits
        qh, kh = (heads_first(x, layout).double() for x in (q, k))
        logits = torch.logsumexp(qh @ kh.transpose(-1, -2) * 0.2, -1)
        assert lse.shape == (2, 2, 33) and lse.dtype == torch.float32
        assert float((lse - logits).abs().max()) < (4e-2 if n_kv == LONG else 1e-5)
        torch.testing.assert_close(
            out, sageattn(q, k, v, layout, sm_scale=0.2), rtol=1e-4, atol=1e-5
        )


def test_keys_are_smoothed_unless_the_caller_says_no() -> None:
    q, k, v = inputs("HND", n_kv=LONG)
    k += 20 * torch.randn(64)
    truth = exact(q, k, v, "HND")
    smoothed, plain = (sageattn(q, k, v, smooth_k=smooth) for smooth in (True, False))
    assert relative_l2(smoothed, truth) < INT8_FLOOR
    assert relative_l2(plain, truth) > 3 * INT8_FLOOR


@each_layout
@each_length
def test_grouped_queries(layout: str, n_kv: int) -> None:
    q, k, v = inputs(layout, heads=6, kv_heads=2, n_kv=n_kv)
    limit = INT8_FLOOR if n_kv == LONG else 1e-6
    assert relative_l2(sageattn(q, k, v, layout), exact(q, k, v, layout)) < limit


def of_shapes(q: tuple[int, ...], k: tuple[int, ...] = (), v: tuple[int, ...] = ()) -> Any:
    return [torch.randn(shape) for shape in (q, k or q, v or k or q)]


SEEN = torch.rand(33, 33) > 0.5
SHAPE, WIDE = (2, 2, 33, 64), (2, 1, 64, 384)
#: At an address that 16 bytes do not divide.
ADDED = torch.randn(2 * 33 * LONG + 3)[3:].view(2, 1, 33, LONG)
#: What torch's attention takes and our kernels do not: reason, q, k and v, other arguments.
TORCH_ALONE: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "a boolean mask": ("a mask", of_shapes(SHAPE, (2, 2, LONG, 64)), {"attn_mask": ADDED > 0}),
    "an added mask": ("a mask", of_shapes(SHAPE, (2, 2, LONG, 64)), {"attn_mask": ADDED}),
    # torch's own attention on a CPU makes noise of queries that overlap in memory.
    "a mask over windows": (
        "a mask", [torch.randn(2, 2, 96).unfold(2, 64, 1), *of_shapes(SHAPE)[1:]],
        {"attn_mask": SEEN},
    ),
    # A Wan VAE has one head of 384 channels, and a replaced function serves the VAE too.
    "wide": ("heads of more than 256 channels", of_shapes(WIDE), {}),
    "wide and grouped": (
        "heads of more than 256 channels", of_shapes((2, 4, 64, 384), (2, 2, 64, 384)),
        {"enable_gqa": True},
    ),
    "three dimensions": ("tensors of 3 dimensions", of_shapes(SHAPE[1:]), {"scale": 0.3}),
    "five dimensions": ("tensors of 5 dimensions", of_shapes((2, *SHAPE)), {"is_causal": True}),
    "fp64": ("fp64", [x.double() for x in of_shapes(SHAPE)], {}),
    "a negative factor": (
        "a factor on the logits that is not over 0", of_shapes(SHAPE), {"scale": -0.1},
    ),
    "dropout": ("dropout", of_shapes(SHAPE), {"dropout_p": 0.5}),
    "fewer channels of v": ("shapes that differ", of_shapes(SHAPE, SHAPE, (2, 2, 33, 32)), {}),
    "one sample of k": ("shapes that differ", of_shapes(SHAPE, (1, 2, 65, 64)), {}),
    "more queries": (
        "a causal mask over other lengths", of_shapes(SHAPE, (2, 2, 20, 64)), {"is_causal": True},
    ),
    "a mask beside causal": ("a mask", of_shapes(SHAPE), {"is_causal": True, "attn_mask": SEEN}),
    "no query": ("an empty tensor", of_shapes((2, 2, 0, 64), SHAPE), {}),
    "no key": ("an empty tensor", of_shapes(SHAPE, (2, 2, 0, 64)), {}),
    "fewer heads of v": (
        "shapes that differ", of_shapes((2, 4, 33, 64), SHAPE, (2, 1, 33, 64)),
        {"enable_gqa": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        (case, layout)
        for case, (_, (q, *_), _) in TORCH_ALONE.items()
        for layout in ("HND", "NHD")[: 2 if q.dim() == 4 else 1]
    ],
)
def test_what_torch_alone_takes_is_torchs_and_said_once(case: str, layout: str) -> None:
    reason, qkv, more = TORCH_ALONE[case]
    torch.manual_seed(0)
    truth = F.scaled_dot_product_attention(*(x.contiguous() for x in qkv), **more)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(3):
            torch.manual_seed(0)
            out = sageattn(*(heads_first(x, layout) for x in qkv), layout, **more)
    torch.testing.assert_close(heads_first(out, layout), truth, rtol=1e-5, atol=1e-6)
    assert out.is_contiguous()
    assert [str(warning.message) for warning in said] == [TORCH_WARNING.format(reason)]
    assert said[0].filename == __file__


@pytest.mark.parametrize(
    "more",
    [(SEEN,), (SEEN, 0.0, False), (None, 0.0, True), (None, 0.5), (None, 0, False)],
    ids=["mask", "mask and flags", "causal", "dropout", "defaults"],
)
@pytest.mark.parametrize("scale", [{}, {"scale": 0.3}], ids=["", "scaled"])
def test_arguments_in_torchs_order(more: tuple[Any, ...], scale: dict[str, float]) -> None:
    qkv = of_shapes(SHAPE)
    torch.manual_seed(0)
    truth = F.scaled_dot_product_attention(*qkv, *more, **scale)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert relative_l2(sageattn(*qkv, *more, **scale), truth) < 1e-6


@pytest.mark.parametrize("name", [name for name in names.__all__ if name != "sageattn_varlen"])
def test_a_mask_compiles_without_a_break_and_without_a_warning(name: str) -> None:
    q, k, v = inputs("NHD")
    mask = torch.rand(33, 65) > 0.5
    torch.compiler.reset()
    compiled = torch.compile(getattr(names, name), backend="eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        made = compiled(q, k, v, "NHD", attn_mask=mask, pv_accum_dtype="fp32")
    assert relative_l2(made, exact(q, k, v, "NHD", attn_mask=mask)) < 1e-6


#: The parameters of sageattention 2.2.0 after q, k and v, but for the default of pv_accum_dtype,
#: which changes nothing here. Its `**kwargs` are ignored. 1.x has
#: `smooth_k` in the place of `return_lse`.
_CUDA = (
    "tensor_layout='HND', is_causal=False, qk_quant_gran='per_thread', sm_scale=None, "
    "pv_accum_dtype={!r}, smooth_k=True, {}return_lse=False"
)
SIGNATURES: dict[str, str] = {
    "sageattn": "tensor_layout='HND', is_causal=False, sm_scale=None, return_lse=False",
    "sageattn_qk_int8_pv_fp16_triton": "tensor_layout='HND', quantization_backend='triton', "
    "is_causal=False, attn_mask=None, sm_scale=None, smooth_k=True, return_lse=False",
    "sageattn_qk_int8_pv_fp16_cuda": _CUDA.format("fp32", "smooth_v=False, "),
    "sageattn_qk_int8_pv_fp8_cuda": _CUDA.format("fp32", "smooth_v=False, "),
    "sageattn_qk_int8_pv_fp8_cuda_sm90": _CUDA.format("fp32", ""),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signatures_begin_with_those_of_sageattention(name: str) -> None:
    own = inspect.signature(getattr(names, name)).parameters.values()
    positional = [one for one in own if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert [one.name for one in positional[:3]] == list("qkv")
    assert ", ".join(f"{one.name}={one.default!r}" for one in positional[3:]) == SIGNATURES[name]


def recipe(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    """sageattention's own: `F.scaled_dot_product_attention = sageattn`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", sageattn)
        return F.scaled_dot_product_attention(q, k, v, **given)


#: How programs call, with the keywords and layouts of their sources.
CALLERS: dict[str, tuple[Callable[..., Any], str, dict[str, Any]]] = {
    "diffusers CogVideoX": (
        recipe, "HND", {"attn_mask": None, "dropout_p": 0.0, "is_causal": False},
    ),
    "torch": (recipe, "HND", {"scale": None, "enable_gqa": False, "is_causal": 0}),
    "ComfyUI": (
        sageattn, "NHD", {"is_causal": False, "tensor_layout": "NHD", "sm_scale": None,
                          "smooth_k": False},
    ),
    "KJNodes fp16": (
        names.sageattn_qk_int8_pv_fp16_cuda, "HND",
        {"is_causal": False, "attn_mask": None, "pv_accum_dtype": "fp32", "tensor_layout": "HND"},
    ),
    "KJNodes fp8++": (
        names.sageattn_qk_int8_pv_fp8_cuda, "NHD",
        {"is_causal": False, "attn_mask": None, "pv_accum_dtype": "fp32+fp16",
         "tensor_layout": "NHD"},
    ),
    "LightX2V": (names.sageattn_qk_int8_pv_fp16_triton, "NHD", {"tensor_layout": "NHD"}),
    "diffusers sm90": (
        names.sageattn_qk_int8_pv_fp8_cuda_sm90, "NHD",
        {"tensor_layout": "NHD", "is_causal": False, "sm_scale": None, "return_lse": False},
    ),
}  # fmt: skip


@pytest.mark.parametrize("caller", CALLERS)
@each_length
def test_calls_of_other_programs(caller: str, n_kv: int) -> None:
    function, layout, given = CALLERS[caller]
    q, k, v = inputs(layout, n_kv=n_kv)
    out = function(q, k, v, **given)
    error = relative_l2(out, exact(q, k, v, layout))
    assert error < (INT8_FLOOR if n_kv == LONG else 1e-6)
    assert out.is_contiguous()
    if n_kv == LONG:  # The names with fp16 take p and v in fp16, the others on a CPU in bf16.
        smooth = given.get("smooth_k", True)
        other = torch.equal(out, sageattn(q, k, v, layout, smooth_k=smooth))
        assert other is ("fp16" not in function.__name__)


def test_packed_sequences() -> None:
    """`sageattn_varlen`, as diffusers calls it."""
    lengths_q, lengths_k = [20, 0, 33], [LONG, 7, 65]
    q = torch.randn(53, 4, 64)
    k, v = (torch.randn(LONG + 72, 2, 64) for _ in range(2))
    ends_q, ends_k = (
        torch.tensor([0, *n]).cumsum(0, dtype=torch.int32) for n in (lengths_q, lengths_k)
    )
    out = names.sageattn_varlen(
        q=q, k=k, v=v, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, max_seqlen_q=33,
        max_seqlen_k=LONG, is_causal=False, sm_scale=None,
    )  # fmt: skip
    parts = (q.split(lengths_q), k.split(lengths_k), v.split(lengths_k))
    truths = [exact(*(x[None] for x in one), "NHD")[0] for one in zip(*parts, strict=True)]
    assert 1e-5 < relative_l2(out[:20], truths[0]) < INT8_FLOOR
    assert relative_l2(out[20:], truths[2]) < 1e-6
    more: dict[str, Any] = {"is_causal": True, "sm_scale": 0.2}
    out = names.sageattn_varlen(q, q, q, ends_q, ends_q, 33, 33, **more)
    for part in (slice(0, 20), slice(20, 53)):
        own = [q[None, part]] * 3
        assert relative_l2(out[part], exact(*own, "NHD", is_causal=True, scale=0.2)[0]) < 1e-6
    with pytest.raises(errors.ShapeError, match="cu_seqlens"):
        names.sageattn_varlen(q, k, v, ends_q, ends_k[:-1], 33, LONG)


@each_layout
def test_an_empty_batch_gives_an_empty_logsumexp(layout: str) -> None:
    q = torch.randn(0, 2, 6, 8) if layout == "HND" else torch.randn(0, 6, 2, 8)
    out, lse = sageattn(q, q, q, layout, return_lse=True)
    assert out.shape == q.shape and lse.shape == (0, 2, 6)


# --- attention="sage" ---------------------------------------------------------------------------


def _fake(q: Tensor) -> Tensor:
    return torch.empty(0)


def _kernel(q: Tensor) -> Tensor:
    return _qattn_sm90(q)  # type: ignore[name-defined]  # noqa: F821


#: The binding for Hopper in `sageattention/sm90_compile.py`, by release; None without that file.
BINDINGS: dict[str, Any] = {
    "2.2.0 of the index": _fake, "a fork": _kernel, "repaired": object(), "older": None,
}  # fmt: skip


@pytest.fixture
def binding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A sageattention with this binding, on a machine with a Hopper GPU."""

    def imported(name: str) -> Any:
        if name == "sageattention.sm90_compile" and request.param is None:
            raise ImportError(name)
        return SimpleNamespace(**{sage._BINDING: request.param})

    monkeypatch.setattr(sage, "import_module", imported)
    monkeypatch.setattr(sage, "_release", lambda: "2.2.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    sage.broken_sage.cache_clear()
    yield request.param
    sage.broken_sage.cache_clear()


@pytest.mark.parametrize("binding", BINDINGS.values(), ids=BINDINGS, indirect=True)
def test_a_release_that_returns_noise_on_hopper_is_refused(
    binding: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = named("t2v").make()
    if binding is not _fake:
        patch_model(model, attention="sage")
        return
    with pytest.raises(errors.DeviceError, match=r"Hopper.*noise.*repaired source"):
        patch_model(model, attention="sage")
    sage.broken_sage.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    assert not sage.broken_sage()


def test_it_takes_the_place_of_torchs_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers' Wan and Flux pass query, key and value by name."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    q, k, v = torch.randn(3, 1, 65, 2, 64)
    expected = dispatch_attention_fn(q, k, v)
    calls: list[set[str]] = []

    def replaced(**given: Any) -> Any:
        calls.append({*given})
        return sageattn(**given)

    monkeypatch.setattr(F, "scaled_dot_product_attention", replaced)
    assert relative_l2(dispatch_attention_fn(q, k, v), expected) < 1e-5
    assert {"query", "key", "value"} <= calls[0]
    with pytest.raises(errors.ConfigError, match="query"):
        sageattn(q, k, v, query=q)


def test_a_type_checker_knows_that_one_tensor_comes_back() -> None:
    from typing import get_overloads

    returns = [inspect.signature(one).return_annotation for one in get_overloads(names.sageattn)]
    assert returns == ["Tensor", "Result"]
