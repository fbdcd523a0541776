"""What an Ampere and a Hopper GPU get, compiled without one: no spills, no local memory, registers
and shared memory for as many programs as were measured to be fastest.

`python -m tools.aot` compiles the rare variants, for every target and with other releases of
Triton.
"""

from __future__ import annotations

import pytest

from tests.launches import needs_hopper_kernels
from tools.aot import AMPERE, HOPPER, Result, compiled, faults, order_faults
from turbo_rcm_patch.ops.launch import Target

_PROLOGUE = {"statistics_kernel", "prologue_kernel"}
_OWN_PROLOGUE = {"hopper_statistics_kernel", "hopper_prologue_kernel"}
_SPARSE = {"prepare_tokens_kernel", "select_kernel", "sparse_attention_kernel"}
_CONV = {"hopper_conv3d_kernel"}
_PASSES = {"norm_silu_kernel", "group_sums_kernel", "group_factors_kernel", "enlarge_kernel"}
_NORMS = {"residual_kernel", "skip_kernel", "norm_rotate_kernel"}

#: Target, case, and the kernels that it launches.
LAUNCHES = [
    (AMPERE, "attention-d128", _PROLOGUE | {"attention_kernel"}),
    (AMPERE, "layer-norm-d64", _PROLOGUE | {"attention_kernel"}),
    (AMPERE, "one-launch-d128", _PROLOGUE | {"one_launch_kernel"}),
    (AMPERE, "sparse-128x64-d128", _PROLOGUE | _SPARSE | {"key_value_kernel"}),
    (AMPERE, "int8-linear-row", {"quantize_rows_kernel", "int8_linear_kernel"}),
    (HOPPER, "attention-d128", _OWN_PROLOGUE | {"attention_kernel"}),
    (HOPPER, "attention-alone-d64", _OWN_PROLOGUE | {"hopper_kernel"}),
    (HOPPER, "attention-alone-d128", _OWN_PROLOGUE | {"hopper_kernel"}),
    (HOPPER, "attention-ranks-d128", _OWN_PROLOGUE | {"hopper_kernel"}),
    (HOPPER, "one-launch-d128", _OWN_PROLOGUE | {"one_launch_kernel"}),
    (HOPPER, "sparse-64x128-d128", _OWN_PROLOGUE | _SPARSE | {"hopper_key_value_kernel"}),
    (HOPPER, "int8-linear-row", {"quantize_rows_kernel", "hopper_linear_kernel"}),
    (HOPPER, "int8-linear-block", {"quantize_rows_kernel", "hopper_linear_blocks_kernel"}),
    (HOPPER, "int8-linear-group", {"quantize_rows_kernel", "int8_linear_kernel"}),
    (HOPPER, "int8-copies", {"samples_kernel"}),
    (HOPPER, "norms-40x128-bf16", _NORMS),
    (HOPPER, "streams-30x64-fp32", {"residual_kernel"}),
    (HOPPER, "conv3d-96x96", _CONV),
    (HOPPER, "conv3d-fp32", _CONV),
    (HOPPER, "vae-96", _PASSES),
]


@pytest.mark.parametrize(
    ("target", "name", "kernels"),
    [pytest.param(*one, id=f"{one[0].key}-{one[1]}") for one in LAUNCHES],
)
def test_kernels_compile_within_their_limits(target: Target, name: str, kernels: set[str]) -> None:
    """A norm's sums are in the same order alone and after its skip, so both give the same bits."""
    needs_hopper_kernels()
    results = compiled(name, target)
    assert {result.kernel for result in results} == kernels
    assert not [(result, words) for result in results for words in faults(result)]
    assert not order_faults(results)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"error": "CompilationError: no"}, "CompilationError"),
        ({"spills": 1}, "1 loads and stores of local memory"),
        ({"stack": 8}, "8 bytes of stack"),
        ({"registers": 169}, "169 registers"),
        ({"shared": 228 * 1024 // 3}, "bytes of shared memory"),
        ({"barrier": False}, "no barrier"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_broken_limit_is_named(change: dict[str, object], words: str) -> None:
    from tools.aot import CASES

    given: dict[str, object] = {"kernel": "one_launch_kernel", "target": HOPPER}
    good = given | {"case": CASES["one-launch-d128"], "registers": 168, "shared": 75812}
    assert not faults(Result(**good))
    (said,) = faults(Result(**good | change))
    assert words in said
