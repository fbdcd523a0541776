"""Which attention runs, and on which kernels, by the device and the lengths."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.interpreter import HERE
from turbo_rcm_patch.errors import DeviceError, Fp8UnsupportedError, MissingPackageError
from turbo_rcm_patch.ops import (
    FP8_MIN_KEYS,
    AttentionSpec,
    Sparsity,
    attention_skip,
    describe_pv,
    quantises,
    resolve_impl,
    resolve_pv,
    resolved,
    skip,
)
from turbo_rcm_patch.ops.attention.api import load_kernels
from turbo_rcm_patch.ops.dispatch import FP8_MIN_KEYS_HOPPER

#: A GPU of a number that no machine has: decisions are kept by device.
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 99)
AUTO = AttentionSpec(heads=12, attention="auto")


@pytest.fixture
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """A GPU of the compute capability that the test names, 9.0 if it names none."""
    capability: tuple[int, int] = getattr(request, "param", (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    return capability


@pytest.mark.parametrize(
    ("card", "has"),
    [((7, 5), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)],
    indirect=["card"],
)
def test_e4m3_begins_with_compute_capability_8_9(card: tuple[int, int], has: bool) -> None:
    assert resolve_pv("auto", CUDA) == ("fp8" if has else "bf16")
    least = FP8_MIN_KEYS_HOPPER if card == (9, 0) else FP8_MIN_KEYS
    assert resolve_pv("auto", CUDA, least - 1) == "bf16"
    assert resolve_pv("auto", CUDA, least) == ("fp8" if has else "bf16")
    assert describe_pv("auto", CUDA) == (f"fp8 from {least:,} keys, else bf16" if has else "bf16")
    if has:
        assert resolve_pv("fp8", CUDA, 1) == describe_pv("fp8", CUDA) == "fp8"
        return
    with pytest.raises(Fp8UnsupportedError, match=r"8\.9.*got [78]\.[56]"):
        resolve_pv("fp8", CUDA)


def test_without_a_kernel_of_its_own_hopper_takes_fp8_as_early_as_others(
    card: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton.__version__", "3.5.1")
    assert resolve_pv("auto", CUDA, FP8_MIN_KEYS) == "fp8"


def test_choices_of_a_device() -> None:
    assert resolve_impl("auto", CPU) == "reference" and resolve_impl("auto", CUDA) == "triton"
    assert resolve_pv("auto", CPU) == describe_pv("auto", CPU) == "bf16"
    assert resolve_pv("fp8", CPU) == "fp8" and resolve_pv("fp16", CUDA) == "fp16"
    assert [quantises(name) for name in ("auto", "int8", "int4", "exact", "sage")] == [
        True, True, True, False, False,
    ]  # fmt: skip
    assert Sparsity.sage(0.2, CPU) == Sparsity(topk=0.2, block_q=128, block_k=64)


@pytest.mark.parametrize(
    ("n_q", "n_kv", "expected"),
    [
        (1950, 1950, ("exact", "auto")),
        (6143, 8192, ("exact", "auto")),
        (6144, 6144, ("int8", "bf16")),
        (8192, 12288, ("int8", "fp8")),
        (75600, 75600, ("int8", "fp8")),
        (32760, 512, ("exact", "auto")),
        (512, 32760, ("exact", "auto")),
    ],
)
def test_auto_is_int8_on_a_gpu_from_6144_tokens_on(
    n_q: int, n_kv: int, expected: tuple[str, str], card: tuple[int, int]
) -> None:
    made = resolved(AUTO, CUDA, n_q, n_kv)
    assert (made.attention, made.pv, made.impl) == (*expected, "triton")
    for name in ("int8", "int4", "exact", "sage"):  # what has a name is not overruled
        asked = AttentionSpec(heads=12, attention=name)
        assert resolved(asked, CUDA, n_q, n_kv).attention == name


def test_auto_is_int8_on_a_cpu_at_every_length() -> None:
    for n in (1, 4000, 10**6):
        assert resolved(AUTO, CPU, n, n).attention == "int8"
    q = torch.randn(1, 20, 24)
    int8 = AttentionSpec(heads=12)
    assert torch.equal(attention_skip(q, q, q, int8), attention_skip(q, q, q, AUTO))


@pytest.mark.skipif(HERE, reason="Triton interprets here")
def test_triton_without_a_gpu_is_refused_with_a_remedy() -> None:
    x, spec = torch.zeros(1, 4, 8), AttentionSpec(heads=2, impl="triton")
    for call in (lambda: attention_skip(x, x, x, spec), lambda: skip(x, x, impl="triton")):
        with pytest.raises(DeviceError, match="reference"):
            call()


def test_a_triton_that_cannot_be_imported_is_said_before_a_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "turbo_rcm_patch.ops.gluon", None)
    with pytest.raises(MissingPackageError, match='Triton.*impl="reference"'):
        load_kernels("auto", torch.device("cuda"))
    load_kernels("auto", torch.device("cpu"))
    load_kernels("reference", torch.device("cuda"))
