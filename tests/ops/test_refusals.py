"""What the operations refuse, each with its own error that says what to do."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

from turbo_rcm_patch import errors, ops
from turbo_rcm_patch.ops import (
    FP8_MIN_KEYS,
    AttentionSpec,
    attention_lse,
    attention_project_skip,
    attention_skip,
    describe_pv,
    norm_modulate,
    project_skip,
    resolve_impl,
    resolve_pv,
    sage,
    skip,
)

SPEC = AttentionSpec(heads=2)


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("error", "arguments", "options"),
    [
        pytest.param(errors.ShapeError, (x(4, 8), x(1, 4, 8), x(1, 4, 8)), {}, id="2-d"),
        pytest.param(
            errors.ShapeError, (x(1, 4, 8), x(1, 4, 8), x(1, 5, 8)), {}, id="k-v-lengths"
        ),
        pytest.param(errors.ShapeError, (x(2, 4, 8), x(1, 4, 8), x(1, 4, 8)), {}, id="batch"),
        pytest.param(errors.ShapeError, (x(1, 4, 7), x(1, 4, 7), x(1, 4, 7)), {}, id="heads"),
        pytest.param(errors.ShapeError, (x(1, 0, 8), x(1, 4, 8), x(1, 4, 8)), {}, id="empty"),
        pytest.param(errors.DTypeError, (x(1, 4, 8, dtype=torch.float64),) * 3, {}, id="fp64"),
        pytest.param(
            errors.DTypeError, (x(1, 4, 8), x(1, 4, 8), x(1, 4, 8).half()), {}, id="mixed-dtypes"
        ),
        pytest.param(
            errors.ShapeError, (x(1, 4, 8),) * 3, {"residual": x(1, 4, 9)}, id="residual"
        ),
        pytest.param(errors.ShapeError, (x(1, 4, 8),) * 3, {"c_out": x(3)}, id="coefficient"),
        pytest.param(errors.ShapeError, (x(1, 4, 8),) * 3, {"norm_q": x(5)}, id="norm"),
        pytest.param(errors.ShapeError, (x(1, 4, 8),) * 3, {"norm_q_bias": x(4)}, id="bias-alone"),
        pytest.param(
            errors.ShapeError,
            (x(1, 4, 8),) * 3,
            {"norm_k": x(8), "norm_k_bias": x(8)},
            id="layer-norm-across",
        ),
        pytest.param(
            errors.ShapeError,
            (x(1, 4, 8),) * 3,
            {"norm_k": x(8), "norm_k_bias": x(4)},
            id="layer-norm-weight",
        ),
        pytest.param(
            errors.DTypeError,
            (x(1, 4, 8),) * 3,
            {"norm_q": x(4), "norm_q_bias": x(4).double()},
            id="bias-dtype",
        ),
        pytest.param(
            errors.ShapeError,
            (x(1, 4, 8),) * 3,
            {"rotary": (x(5, 4), x(5, 4))},
            id="rotary-length",
        ),
        pytest.param(
            errors.GradientError,
            (x(1, 4, 8),) * 3,
            {"rotary": (x(4, 4).requires_grad_(), x(4, 4))},
            id="rotary-gradient",
        ),
        pytest.param(
            errors.MaskError,
            (x(1, 4, 8),) * 3,
            {"kv_lengths": x(1, 4, 4).bool()},
            id="mask-matrix",
        ),
        pytest.param(
            errors.MaskError, (x(1, 4, 8),) * 3, {"kv_lengths": x(1)}, id="float-lengths"
        ),
        pytest.param(
            errors.GradientError,
            (x(1, 4, 8),) * 3,
            {"c_skip": x(1).requires_grad_()},
            id="c-skip-without-residual",
        ),
    ],
)
def test_attention(error: type[Exception], arguments: tuple, options: dict) -> None:
    with pytest.raises(error, match="expected"):
        attention_skip(*arguments, SPEC, **options)


def test_head_dims() -> None:
    with pytest.raises(errors.ShapeError, match="head_dim; expected"):
        attention_skip(*(x(1, 4, 514),) * 3, SPEC)
    with pytest.raises(errors.ShapeError, match="head_dim; expected an even head_dim with rotary"):
        attention_skip(*(x(1, 4, 6),) * 3, SPEC, rotary=(x(4, 3), x(4, 3)))


@pytest.mark.parametrize(
    "fields",
    [
        {"heads": 0},
        {"attention": "int7"},
        {"pv": "fp4"},
        {"causal": 1},
        {"smooth_k": None},
        {"eps": "1e-6"},
        {"exact_heads": None},
        {"exact_heads": [0]},
        {"exact_heads": (True,)},
    ],
    ids=str,
)
def test_spec(fields: dict) -> None:
    with pytest.raises(errors.ConfigError, match=next(iter(fields))):
        AttentionSpec(**({"heads": 2} | fields))


def test_a_sparse_tensor() -> None:
    q = x(1, 4, 8)
    with pytest.raises(errors.ShapeError, match="to_dense"):
        attention_skip(q, q.to_sparse(), q, AttentionSpec(heads=2))


def test_projection_and_skip() -> None:
    with pytest.raises(errors.ShapeError):
        project_skip(x(1, 4, 8), x(6, 7), residual=None)
    with pytest.raises(errors.DTypeError):
        project_skip(x(1, 4, 8), x(6, 8).half(), residual=None)
    with pytest.raises(errors.ShapeError):
        project_skip(x(1, 4, 8), x(6, 8), x(5), residual=None)
    with pytest.raises(errors.ShapeError):
        skip(x(1, 4, 8), x(1, 4, 9))
    with pytest.raises(errors.ConfigError):
        skip(x(1, 4, 8), x(1, 4, 8), cast="fp16")
    with pytest.raises(errors.ConfigError):
        attention_project_skip(
            *(x(1, 4, 8),) * 3, x(8, 8), None, SPEC, residual=None, form="three-launch"
        )
    with pytest.raises(errors.ConfigError, match="one-launch"):
        attention_project_skip(
            *(x(1, 4, 8),) * 3,
            x(8, 8),
            None,
            AttentionSpec(heads=2, attention="exact"),
            residual=None,
            form="one-launch",
        )


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is for Linux")
def test_triton_without_a_gpu() -> None:
    """In a process of its own: whether the interpreter is on is decided when Triton is
    imported."""
    code = (
        "import torch\n"
        "from turbo_rcm_patch.ops import AttentionSpec, attention_skip, skip\n"
        "from turbo_rcm_patch.errors import DeviceError\n"
        "x = torch.zeros(1, 4, 8)\n"
        "for call in (lambda: attention_skip(x, x, x, AttentionSpec(heads=2, impl='triton')),\n"
        "             lambda: skip(x, x, impl='triton')):\n"
        "    try:\n"
        "        call()\n"
        "    except DeviceError as error:\n"
        "        assert 'reference' in str(error)\n"
        "    else:\n"
        "        raise SystemExit('accepted')\n"
    )
    subprocess.run([sys.executable, "-c", code], env={}, check=True, timeout=120)


def test_sage_without_a_gpu() -> None:
    spec = AttentionSpec(heads=1, attention="sage")
    with pytest.raises(errors.DeviceError):
        attention_skip(*(x(1, 4, 64),) * 3, spec)
    with pytest.raises(errors.MaskError):
        attention_skip(*(x(1, 4, 64),) * 3, spec, kv_lengths=torch.tensor([2]))
    with pytest.raises(errors.OpError):
        attention_lse(*(x(1, 4, 64),) * 3, spec)


def test_choices_of_a_device() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve_impl("auto", cpu) == "reference"
    assert resolve_impl("auto", cuda) == "triton"
    assert resolve_pv("auto", cpu) == "bf16"
    assert resolve_pv("fp8", cpu) == "fp8"
    assert resolve_pv("fp16", cuda) == "fp16"
    assert describe_pv("auto", cpu) == "bf16"


def test_fp8_only_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    cuda = torch.device("cuda", 0)
    assert resolve_pv("auto", cuda) == resolve_pv("auto", cuda, FP8_MIN_KEYS) == "fp8"
    assert resolve_pv("auto", cuda, FP8_MIN_KEYS - 1) == "bf16"
    assert resolve_pv("fp8", cuda, 1) == "fp8"
    assert describe_pv("auto", cuda) == "fp8 from 4,096 keys, else bf16"
    assert describe_pv("fp8", cuda) == "fp8"


def test_fp8_on_a_gpu_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert resolve_pv("auto", torch.device("cuda", 0)) == "bf16"
    assert describe_pv("auto", torch.device("cuda", 0)) == "bf16"
    with pytest.raises(errors.Fp8UnsupportedError, match=r"8\.9"):
        resolve_pv("fp8", torch.device("cuda", 0))


@pytest.mark.parametrize("eps", [0.0, 1e-50, -1e-6, float("nan")])
def test_an_eps_that_normalises_zeros_to_nan(eps: float) -> None:
    with pytest.raises(errors.ConfigError, match="eps"):
        AttentionSpec(heads=2, eps=eps)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int32])
def test_results_in_dtypes_that_no_epilogue_has(dtype: torch.dtype) -> None:
    a = torch.ones(1, 2, 16)
    weight = ops.quantize_weight(torch.eye(16))
    for call in (
        lambda: skip(a, a, out_dtype=dtype),
        lambda: norm_modulate(a, out_dtype=dtype),
        lambda: project_skip(a, torch.eye(16), residual=None, cast="model", out_dtype=dtype),
        lambda: ops.int8_linear(a, *weight, out_dtype=dtype),
        lambda: attention_skip(a, a, a, SPEC, out_dtype=dtype),
    ):
        with pytest.raises(errors.DTypeError, match="float64"):
            call()


def test_a_norm_without_channels() -> None:
    assert norm_modulate(x(1, 2, 0), impl="triton").shape == (1, 2, 0)  # no kernel for nothing
    with pytest.raises(errors.ShapeError, match="at least one channel"):
        ops.norm_modulate_rows(x(1, 2, 0))


def test_operands_that_are_no_dense_tensors() -> None:
    a = torch.ones(1, 2, 16)
    weight = ops.quantize_weight(torch.eye(16))
    with pytest.raises(errors.DTypeError, match="bias"):
        ops.linear_gelu(a, torch.eye(16), None)  # type: ignore[arg-type]
    rows = ops.Rows(a.to(torch.int8), None)  # type: ignore[arg-type]
    with pytest.raises(errors.DTypeError, match="rows in int8 and float32"):
        ops.int8_linear(rows, *weight, out_dtype=torch.float32)
    with pytest.raises(errors.ShapeError, match="dense"):
        skip(a, a, a.to_sparse())
    with pytest.raises(errors.DTypeError, match="c_skip"):
        skip(a, a, "2")  # type: ignore[arg-type]


def test_the_release_of_sageattention_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(sage.metadata, "version", lambda name: read.append(name) or "2.2.0")
    sage._release.cache_clear()
    assert [sage._release(), sage._release()] == ["2.2.0"] * 2
    sage._release.cache_clear()
    assert read == ["sageattention"]


def test_a_sageattention_without_a_version_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A checkout on the path can be imported and has no metadata."""

    def missing(name: str) -> str:
        raise sage.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(sage.metadata, "version", missing)
    sage._release.cache_clear()
    with pytest.raises(errors.MissingPackageError, match="no metadata.*pip install sageattention"):
        sage._release()
