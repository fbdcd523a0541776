"""What holds for every operation: refusals with typed errors, no derivative, empty batches,
autocast, and how torch sees it (schema, fake, compilation)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.inputs import attention_lse, attention_project_skip
from tests.measures import relative_l2
from tests.patching.models import named, run
from turbo_rcm_patch import errors, ops, patch_model, sageattn
from turbo_rcm_patch.ops import AttentionSpec, Norms, Sparsity
from turbo_rcm_patch.ops.formats import AttentionInputs, LinearInputs, Skip
from turbo_rcm_patch.ops.int8_linear.api import quantize_rows
from turbo_rcm_patch.ops.register import split
from turbo_rcm_patch.ops.residual.api import Norm
from turbo_rcm_patch.ops.sparse_linear.api import ProjL

HEADS, CHANNELS = 2, 16
NAN = float("nan")


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


X = torch.randn(2, 5, CHANNELS)
ROW, SQUARE, LENGTHS = torch.randn(CHANNELS), torch.randn(16, 16), torch.tensor([3, 5])
WEIGHT, SCALE = ops.quantize_weight(SQUARE)
INT8, EXACT = (AttentionSpec(heads=HEADS, attention=name) for name in ("int8", "exact"))
SAGE = AttentionSpec(heads=HEADS, attention="sage")
TABLE = torch.randn(5, CHANNELS // HEADS)

QKV = {"q": X, "k": X, "v": X}


def _fused(norm_q: Tensor | None = None, **arguments: Any) -> Tensor:
    return attention_project_skip(norms=Norms(q=norm_q), **arguments)


#: Operations by name, each with good arguments, which keywords of a call replace.
CALLS: dict[str, Callable[..., Any]] = {
    "skip": partial(ops.skip, residual=X, branch=X),
    "norm": partial(ops.norm_modulate, x=X, scale=ROW, shift=ROW),
    "rows": partial(ops.norm_modulate_rows, x=X, scale=ROW, shift=ROW),
    "gelu": partial(ops.linear_gelu, x=X, weight=SQUARE, bias=ROW),
    "int8": partial(ops.int8_linear, x=X, weight_int8=WEIGHT, weight_scale=SCALE, bias=ROW),
    "weight": partial(ops.quantize_weight, weight=SQUARE),
    "attention": partial(ops.attention_skip, **QKV, spec=INT8, residual=X, norm_q=ROW),
    "lse": partial(attention_lse, **QKV, spec=INT8),
    "fused": partial(
        _fused, **QKV, weight=SQUARE, bias=ROW, spec=INT8, residual=X, form="one-launch"
    ),
    "sparse": partial(
        ops.sparse_linear_attention, **QKV, weight=torch.eye(8), bias=None, spec=INT8,
        sparsity=Sparsity(topk=0.5),
    ),
    "sageattn": partial(
        sageattn, **dict.fromkeys("qkv", X.unflatten(2, (HEADS, -1)).transpose(1, 2))
    ),
}  # fmt: skip
ALL_BUT_WEIGHT = [name for name in CALLS if name != "weight"]
#: Argument -> the operations that have it.
HAVE = {
    "impl": "skip norm rows int8 weight",
    "form": "fused",
    "out_dtype": "skip norm int8 attention fused sparse",
    "c_out": "skip attention fused",
    "c_skip": "skip attention fused",
    "spec": "attention fused sparse",
    "q": "attention lse fused sparse sageattn",
    "v": "attention fused sparse sageattn",
    "norm_q": "attention fused sparse",
    "kv_lengths": "attention fused",
    "residual": "skip attention fused",
    "branch": "skip",
    "x": "norm rows gelu int8",
    "weight": "gelu fused sparse weight",
    "bias": "gelu int8 fused sparse",
    "scale": "norm rows",
    "weight_int8": "int8",
    "weight_scale": "int8",
}


# --- refusals ------------------------------------------------------------------------------------

SHAPE, DTYPE, CONFIG, MASK = (
    errors.ShapeError, errors.DTypeError, errors.ConfigError, errors.MaskError,
)  # fmt: skip
ROWS = ops.norm_modulate_rows(torch.randn(1, 4, 33))
OF_33 = {"weight_int8": x(7, 33, dtype=torch.int8), "weight_scale": x(7), "bias": None}
FOUR = x(2, 2, 5, 8)

#: Operation -> changes to good arguments, and the error.
REFUSED: dict[str, list[tuple[dict[str, Any], type[Exception]]]] = {
    "skip": [
        ({"branch": x(2, 5, 9)}, SHAPE),
        ({"c_out": X.to_sparse()}, SHAPE),
        ({"c_out": x(3)}, SHAPE),
    ],
    "norm": [
        ({"scale": x(15)}, SHAPE),
        ({"x": X[0]}, SHAPE),
    ],
    "gelu": [
        ({"weight": SQUARE.half()}, DTYPE),
        ({"weight": SQUARE[:, :7]}, SHAPE),
    ],
    "int8": [
        ({"weight_int8": SQUARE}, DTYPE),
        ({"x": X.double()}, DTYPE),
        ({"weight_scale": SCALE.half()}, DTYPE),
        ({"weight_int8": WEIGHT[:, :7]}, SHAPE),
        ({"weight_scale": x(15)}, SHAPE),
        ({"bias": x(5)}, SHAPE),
        ({"activation": "relu"}, CONFIG),
        (OF_33 | {"x": ROWS}, CONFIG),
        ({"x": ROWS, "out_dtype": X.dtype}, SHAPE),
        (OF_33 | {"x": ops.Int8Tensor(ROWS.data, ROWS.scale[:, :2]), "out_dtype": X.dtype}, SHAPE),
        (OF_33 | {"x": ops.Int8Tensor(ROWS.data.half(), ROWS.scale), "out_dtype": X.dtype}, DTYPE),
        (OF_33 | {"x": ops.Int8Tensor(ROWS.data, None), "out_dtype": X.dtype}, DTYPE),
    ],
    "weight": [
        ({"weight": ROW}, SHAPE),
        ({"weight": SQUARE.double()}, DTYPE),
        ({"weight": x(1, ops.MAX_CHANNELS + 1)}, SHAPE),
    ],
    "attention": [
        ({"q": X[0]}, SHAPE),
        ({"v": x(2, 6, 16)}, SHAPE),
        ({"k": X.to_sparse()}, SHAPE),
        ({"spec": AttentionSpec(heads=3)}, SHAPE),
        ({"q": X[:, :0]}, SHAPE),
        (dict.fromkeys("qkv", X[..., :0]), SHAPE),
        (dict.fromkeys("qkv", x(1, 4, 514)), SHAPE),
        (dict.fromkeys("qkv", X.double()), DTYPE),
        ({"v": X.half()}, DTYPE),
        ({"residual": x(2, 5, 9)}, SHAPE),
        ({"norm_q": x(5)}, SHAPE),
        ({"rotary": (x(6, 8), x(6, 8))}, SHAPE),
        ({"rotary": (TABLE.int(), TABLE)}, DTYPE),
        (
            dict.fromkeys(("q", "k", "v", "residual"), x(1, 4, 6))
            | {"norm_q": None, "rotary": (x(4, 3), x(4, 3))}, SHAPE,
        ),
        ({"kv_lengths": x(2, 5, 5).bool()}, MASK),
        ({"kv_lengths": x(2)}, MASK),
        ({"spec": SAGE}, errors.DeviceError),
        ({"spec": SAGE, "kv_lengths": LENGTHS}, MASK),
    ],
    "fused": [
        ({"spec": EXACT}, CONFIG),
        ({"residual": x(2, 5, 9)}, SHAPE),
    ],
    "sparse": [
        ({"weight": x(4, 8)}, SHAPE),
        ({"bias": x(4)}, SHAPE),
        ({"spec": AttentionSpec(heads=HEADS, causal=True)}, CONFIG),
        ({"spec": SAGE}, CONFIG),
        (dict.fromkeys("qkv", x(1, 4, 320)), SHAPE),
    ],
    "sageattn": [
        ({"window": None}, CONFIG),
        ({"pv_accum_dtype": "int4"}, CONFIG),
        ({"scale": 0.5, "sm_scale": 0.5}, CONFIG),
        ({"tensor_layout": "NDH"}, CONFIG),
        ({"q": FOUR[0]}, SHAPE),
        ({"q": x(2, 3, 5, 8)}, SHAPE),
        ({"q": FOUR, "k": FOUR, "v": x(4, 1, 5, 8)}, SHAPE),
        ({"k": FOUR.bfloat16()}, DTYPE),
        (dict.fromkeys("kv", x(2, 2, 5, 4)), SHAPE),
        (dict.fromkeys("kv", x(3, 2, 5, 8)), SHAPE),
        ({"q": x(2, 2, 9, 8), "is_causal": True, "return_lse": True}, MASK),
        ({"attn_mask": x(5, 5).bool(), "return_lse": True}, MASK),
        ({"attn_mask": x(5, 5).int()}, MASK),
        ({"attn_mask": True}, DTYPE),
        ({"attn_mask": x(4, 5).bool()}, MASK),
        ({"sm_scale": NAN}, CONFIG),
        ({"is_causal": 2}, CONFIG),
        ({"return_lse": "no"}, CONFIG),
        ({"smooth_k": 1}, CONFIG),
        (dict.fromkeys("kv", FOUR[:, :0]), SHAPE),
        (dict.fromkeys("kv", FOUR[:, :, :0]) | {"return_lse": True}, SHAPE),
    ],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:this attention runs exactly")
@pytest.mark.parametrize(
    ("call", "changes", "error"),
    [
        pytest.param(call, *one, id=f"{call}-{number}-{'-'.join(one[0])}")
        for call, several in REFUSED.items()
        for number, one in enumerate(several)
    ],
)
def test_what_does_not_fit_is_refused(
    call: str, changes: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match="; expected ") as caught:
        CALLS[call](**changes)
    assert isinstance(caught.value, errors.TurboRCMError)


_WRONG: dict[str, list[Any]] = {
    "impl": ["bogus", None, 1],
    "form": ["bogus"],
    "out_dtype": [torch.int8, torch.float8_e4m3fn, torch.complex64, "float32"],
    "c_out": [[1.0], "x", torch.ones(2, dtype=torch.complex64)],
    "c_skip": [[1.0]],
}


@pytest.mark.parametrize(
    ("call", "argument", "value"),
    [
        pytest.param(call, argument, value, id=f"{call}-{argument}-{value!s:.12}")
        for argument, calls in HAVE.items()
        if argument != "spec"
        for call in calls.split()
        for value in _WRONG.get(argument, [[1.0, 2.0], 3])
    ],
)
def test_no_operation_takes_values_of_another_kind(call: str, argument: str, value: Any) -> None:
    with pytest.raises(errors.TurboRCMError, match=argument.split("_")[0]):
        CALLS[call](**{argument: value})


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (call, argument)
        for argument, calls in HAVE.items()
        for call in calls.split()
        if argument not in ("impl", "form", "out_dtype", "spec") and call != "weight"
    ],
)
def test_tensors_of_two_devices_are_refused(call: str, argument: str) -> None:
    there = _tensor_of(call, argument).to("meta")
    with pytest.raises(errors.TurboRCMError, match="meta"):
        CALLS[call](**{argument: there})


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        *[({"heads": 2} | one, AttentionSpec) for one in (
            {"heads": 0}, {"attention": "int7"}, {"pv": "fp4"}, {"impl": "cuda"}, {"causal": 1},
            {"smooth_k": None}, {"eps": "1e-6"}, {"eps": 0.0}, {"eps": 1e-50}, {"eps": NAN},
            {"sm_scale": NAN}, {"sm_scale": 0.0}, {"sm_scale": -1.0},
            {"sm_scale": float("inf")}, {"sm_scale": "1"}, {"sm_scale": True},
        )],
        *[({"topk": 0.1} | one, Sparsity) for one in (
            {"topk": 0.0}, {"topk": 1.5}, {"topk": None}, {"topk": "0.1"}, {"topk": True},
            {"block_q": 48}, {"block_k": 0},
        )],
    ],
    ids=str,
)  # fmt: skip
def test_options_that_do_not_exist_are_refused(fields: dict[str, Any], kind: type) -> None:
    *_, changed = fields
    with pytest.raises(errors.ConfigError, match=f"{kind.__name__}.{changed}; expected"):
        kind(**fields)


# --- derivatives ---------------------------------------------------------------------------------

DIFFERENTIABLE = [
    (call, argument)
    for argument in ("q", "v", "norm_q", "c_out", "residual", "branch", "x", "weight", "bias",
                     "scale", "weight_scale")
    for call in HAVE[argument].split()
    if call != "weight"
]  # fmt: skip


def _tensor_of(call: str, argument: str) -> Tensor:
    good: dict[str, Any] = {"weight": SQUARE, "weight_scale": SCALE, "weight_int8": WEIGHT}
    good |= {"c_out": torch.ones(2), "c_skip": torch.ones(2), "kv_lengths": LENGTHS}
    good |= dict.fromkeys(("norm_q", "bias", "scale"), ROW)
    if call == "sageattn":
        return X.unflatten(2, (HEADS, -1)).transpose(1, 2).contiguous()
    if call == "sparse" and argument in ("weight", "bias"):
        return torch.eye(8) if argument == "weight" else torch.ones(8)
    tensor: Tensor = good.get(argument, X)
    return tensor


@pytest.mark.parametrize(("call", "argument"), DIFFERENTIABLE)
def test_a_derivative_is_refused_and_no_grad_is_inference(call: str, argument: str) -> None:
    value = _tensor_of(call, argument)

    def run(tensor: Tensor) -> Any:
        return CALLS[call](**{argument: tensor})

    leaf = value.clone().requires_grad_()
    with pytest.raises(errors.GradientError, match="no_grad"):
        run(leaf)
    with pytest.raises(errors.GradientError, match="transform of torch.func"):
        torch.func.jvp(run, (value,), (value,))
    with pytest.raises(errors.GradientError, match="transform of torch.func"):
        torch.func.vmap(run)(torch.stack([value, value]))
    with torch.no_grad():
        run(leaf)


@pytest.mark.parametrize("call", ["attention", "fused", "sparse"])
def test_a_rotary_table_has_no_gradient_either(call: str) -> None:
    with pytest.raises(errors.GradientError):
        CALLS[call](rotary=(TABLE.clone().requires_grad_(), TABLE))


def test_a_registered_operation_refuses_a_gradient_too() -> None:
    """A compiled function reaches it without the public function."""
    leaf = X.clone().requires_grad_()
    compiled = torch.compile(lambda y: quantize_rows(y, "reference").scale, backend="eager")
    with pytest.raises(errors.GradientError, match="turbo_rcm_patch::quantize_rows"):
        compiled(leaf)


def test_the_epsilon_of_a_spec_is_that_of_the_norms() -> None:
    q, k, v = torch.randn(3, 1, 5, CHANNELS)
    spec = AttentionSpec(heads=HEADS, attention="exact", eps=0.5)
    normed = (torch.nn.functional.rms_norm(x, (CHANNELS,), ROW, 0.5) for x in (q, k))
    expected = ops.attention_skip(*normed, v, spec)
    torch.testing.assert_close(ops.attention_skip(q, k, v, spec, norm_q=ROW, norm_k=ROW), expected)


# --- empty batches, dtypes, autocast -------------------------------------------------------------


def _several(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


@pytest.mark.parametrize("call", ALL_BUT_WEIGHT)
def test_an_empty_batch_gives_an_empty_result(call: str) -> None:
    empty = dict.fromkeys("qkv", (FOUR if call == "sageattn" else X)[:0])
    if call in ("skip", "norm", "rows", "gelu", "int8"):
        empty = dict.fromkeys(("residual", "branch") if call == "skip" else ("x",), X[:0])
    elif call in ("attention", "fused"):
        empty["residual"] = X[:0]
    assert all(part.shape[0] == 0 for part in _several(CALLS[call](**empty)))


@pytest.mark.parametrize("call", ["gelu", "int8", "fused"])
def test_a_bias_may_have_another_dtype(call: str) -> None:
    """bf16 with an fp32 bias, as a model whose biases were left in fp32 has it."""
    low = X.bfloat16()
    given: dict[str, Any] = dict.fromkeys("qkv" if call == "fused" else "x", low)
    given |= {} if call == "int8" else {"weight": SQUARE.bfloat16()}
    wide, narrow = (CALLS[call](**given, bias=b) for b in (ROW, ROW.bfloat16()))
    assert wide.dtype == torch.bfloat16 and relative_l2(wide, narrow) < 0.01


@pytest.mark.parametrize("call", ALL_BUT_WEIGHT)
@pytest.mark.parametrize("attention", ["int8", "exact"])
def test_autocast_changes_no_operation(call: str, attention: str) -> None:
    """Its contract says in which dtype it multiplies; bf16 in the place of fp32 is 1e-3 away."""
    given: dict[str, Any] = {}
    if call in HAVE["spec"].split():
        given["spec"] = INT8 if attention == "int8" else EXACT
    if call == "fused" and attention == "exact":
        given["form"] = "two-launch"
    plain = CALLS[call](**given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = CALLS[call](**given)
        assert torch.is_autocast_enabled("cpu")
    for a, b in zip(_several(cast), _several(plain), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


# --- as torch sees them --------------------------------------------------------------------------


def _registered() -> dict[str, tuple[Any, ...]]:
    """Arguments of each operation that torch knows, by its name."""
    row, gate, impl, fp32 = torch.randn(2, 1, 16), torch.randn(2, 5, 16), "reference", X.dtype
    spec = AttentionSpec(heads=HEADS, pv="bf16", impl=impl)
    norms = Norms(ROW, torch.randn(8), None, torch.randn(8))  # RMSNorm of q, layer norm of k
    a = AttentionInputs(
        X, X + 1, X - 1, spec, fp32, norms, (TABLE, TABLE), Skip(X, row, gate), LENGTHS
    )
    linear, rows = LinearInputs(WEIGHT, SCALE, ROW, "gelu-tanh"), ops.norm_modulate_rows(X)
    streams, pair, low = (X[:, :2], X[:, 2:]), (row, row + 1), torch.float16
    norm, norm_of_two = Norm(row, row), Norm(pair, pair, ROW, ROW)
    return {
        "attention": (a._replace(want_lse=True),),
        "attention without a skip": (AttentionInputs(X, X, X, spec, low, kv_lengths=None),),
        "attention_project_skip": (a, SQUARE, ROW, "one-launch"),
        "int8_linear": (X, linear, impl, low),
        "int8_linear of rows": (ops.Int8Tensor(*rows), linear, impl, low),
        "linear_gelu": (X, SQUARE, ROW),
        "norm_rotate": (X, ROW, None, (TABLE, TABLE), HEADS, 1e-6, impl),
        "quantize_rows": (X[..., :13], impl),
        "skip": (X, X + 1, 0.5, gate, impl, low),
        "skip_norm": (X, X + 1, row, norm, fp32, low, impl),
        "skip_norm of the norm alone": (X, None, None, norm, fp32, low, impl),
        "skip_norm as int8 rows": (X, X + 1, None, norm, fp32, torch.int8, impl),
        "skip_norm of two streams": (streams, X, pair, norm_of_two, fp32, low, impl),
        "skip_norm of two skips": (streams, X, pair, None, fp32, None, impl),
        "sparse_linear_attention": (
            a._replace(norms=Norms(ROW), skip=None, kv_lengths=None),
            ProjL(torch.eye(8), None), Sparsity(topk=0.5, block_q=32, block_k=32),
        ),
    }  # fmt: skip


REGISTERED = _registered()


def test_every_operation_that_torch_knows_is_in_the_table() -> None:
    known = torch._C._dispatch_get_all_op_names()
    own = {name.split("::")[1] for name in known if name.startswith("turbo_rcm_patch::")}
    assert own == {name.split()[0] for name in REGISTERED}


@pytest.mark.parametrize("name", REGISTERED)
def test_schema_fake_and_dispatch_are_right_and_it_compiles_without_a_break(name: str) -> None:
    operation = getattr(torch.ops.turbo_rcm_patch, name.split()[0]).default
    args = split(REGISTERED[name])
    torch.library.opcheck(operation, args)
    torch.compiler.reset()
    compiled = torch.compile(
        lambda values: operation(*split(values)), fullgraph=True, backend="aot_eager"
    )
    with torch.no_grad():
        results, expected = compiled(REGISTERED[name]), operation(*args)
    for a, b in zip(results, expected, strict=True):
        assert a.stride() == b.stride() and torch.equal(a, b)


@pytest.mark.parametrize("call", ALL_BUT_WEIGHT)
def test_a_public_function_compiles_without_a_break(call: str) -> None:
    argument = "q" if call in HAVE["q"].split() else "branch" if call == "skip" else "x"
    value = _tensor_of(call, argument)

    def run(tensor: Tensor) -> Any:
        return CALLS[call](**{argument: tensor * 2})

    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for a, b in zip(_several(compiled(value)), _several(run(value)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "model"])
def test_a_patched_model_compiles_once_with_dynamic_shapes(whole: bool) -> None:
    model, inputs = named("t2v").model(), named("t2v").inputs()
    patch_model(model, guard=False)
    videos = [torch.cat([inputs["hidden_states"]] * times, 3) for times in (1, 2, 3)]
    expected = [run(model, inputs | {"hidden_states": video}) for video in videos]
    torch.compiler.reset()
    options: Any = {"fullgraph": True, "dynamic": True, "backend": "aot_eager"}
    if whole:
        model.compile(**options)
    else:
        model.compile_repeated_blocks(**options)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for video, result in zip(videos, expected, strict=True):
            assert torch.equal(run(model, inputs | {"hidden_states": video}), result)
