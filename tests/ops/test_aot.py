"""What an Ampere and a Hopper GPU get, compiled without one: no spills, no local memory, registers
and shared memory for as many programs as were measured to be fastest.

`python -m tools.aot` compiles the rare variants, for every target and with other releases of
Triton.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from diffusers import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanTransformerBlock

from tests.launches import needs_hopper_kernels
from tools.aot import AMPERE, HOPPER, Result, compiled, faults, order_faults, stand_in
from turbo_rcm_patch import PatchConfig
from turbo_rcm_patch.ops.attention import api as attention
from turbo_rcm_patch.ops.attention.spec import AttentionSpec
from turbo_rcm_patch.ops.formats import AttentionInputs
from turbo_rcm_patch.ops.launch import Target, compile_ahead
from turbo_rcm_patch.ops.residual import triton as residual
from turbo_rcm_patch.patching.families.vae_wan import WanDecoder
from turbo_rcm_patch.patching.families.wan import WanBlock

_PROLOGUE = {"statistics_kernel", "prologue_kernel"}
_OWN_PROLOGUE = {"hopper_statistics_kernel", "hopper_prologue_kernel"}
_SPARSE = {"prepare_tokens_kernel", "select_kernel", "sparse_attention_kernel"}
_CONV = {"hopper_conv3d_kernel"}
_PASSES = {"norm_silu_kernel", "group_sums_kernel", "group_factors_kernel", "upsample_kernel"}
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
    (HOPPER, "attention-alone-bf16-d128", _OWN_PROLOGUE | {"hopper_kernel"}),
    (HOPPER, "attention-ranks-d128", _OWN_PROLOGUE | {"hopper_kernel"}),
    (HOPPER, "one-launch-d128", _OWN_PROLOGUE | {"one_launch_kernel"}),
    (HOPPER, "sparse-64x128-d128", _OWN_PROLOGUE | _SPARSE | {"hopper_key_value_kernel"}),
    (HOPPER, "int8-linear-row", {"quantize_rows_kernel", "hopper_linear_kernel"}),
    (HOPPER, "int8-linear-block", {"quantize_rows_kernel", "hopper_linear_blocks_kernel"}),
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
        ({"registers": 193}, "193 registers"),
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


@pytest.fixture
def hopper() -> Iterator[None]:
    """What is asked of an H200 where tensors are on the meta device."""
    needs_hopper_kernels()

    with stand_in(HOPPER):
        yield


def asked(call: Callable[[], object]) -> set[tuple[str, str]]:
    """The kernels that a call would have compiled, by name and specialisation."""
    found = set()

    def hook(*, key: Any, fn: Any, **_: Any) -> bool:
        found.add((fn.name, str(key)))
        return True  # not to be compiled

    with mock.patch.object(triton.knobs.runtime, "jit_cache_hook", hook):
        compile_ahead(call, torch.device("cpu"))
    return found


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.usefixtures("hopper")
def test_what_a_video_launches_is_compiled_by_several_threads_before() -> None:
    """The skips and norms of a block, compiled for real: their launches find them compiled."""

    def call() -> None:
        x, row = empty(1, 999, 1536, dtype=torch.float32), empty(1, 1, 1536, dtype=torch.float32)
        for branch, norm_dtype in ((None, torch.bfloat16), (x, None)):
            residual.skip_norm(
                x, branch, gate=None if branch is None else row, factor=row, offset=row,
                weight=None, bias=None, one=1.0, eps=1e-6, dtype=x.dtype,
                norm_dtype=norm_dtype or x.dtype,
            )  # fmt: skip

    threads: set[int] = set()

    def compiled_here(**_: Any) -> None:
        threads.add(threading.get_ident())

    before = asked(call)
    with mock.patch.object(triton.knobs.compilation, "listener", compiled_here):
        compile_ahead(call, torch.device("cpu"))
    assert len(before) == 2
    assert threads and threading.get_ident() not in threads
    assert not asked(call)


@pytest.mark.usefixtures("hopper")
def test_few_frames_meet_all_kernels_of_wans_decoder() -> None:
    """27; of the network 8 more. All are compiled before the first video's launches."""
    with torch.device("meta"):
        vae = AutoencoderKLWan().bfloat16().eval().requires_grad_(False)
        block = WanTransformerBlock(1536, 8960, 12, cross_attn_norm=True).bfloat16()
    config = PatchConfig(impl="triton", attention="int8", pv="fp8")
    decoder, latents = WanDecoder(vae, "vae", config), empty(1, 16, 21, 60, 104)
    rotary = (empty(1, 32760, 1, 128, dtype=torch.float32),) * 2
    inputs = empty(1, 32760, 1536), empty(1, 512, 1536), empty(1, 6, 1536), rotary
    patched = WanBlock(block.requires_grad_(False), "", config, 12, 128)
    with torch.no_grad():
        whole = asked(lambda: decoder.run_video(latents))
        few = asked(lambda: decoder.run_start(latents))
        assert len(asked(lambda: patched.fast(*inputs))) == 8
    assert few == whole and len(whole) == 27


@pytest.mark.parametrize(
    ("strides", "portable", "in_place"),
    [
        pytest.param((300 * 256, 256, 1), "", True, id="dense"),
        pytest.param((1, 256, 1), "", False, id="one-sample-of-dlpack"),
        pytest.param((300 * 260, 260, 1), "", False, id="rows-of-520-bytes"),
        pytest.param((300 * 260, 260, 1), "causal", True, id="causal"),
        pytest.param((300 * 260, 260, 1), "lengths", True, id="lengths"),
    ],
)
def test_values_of_16_bits_are_copied_if_hardware_copies_cannot_read_them(
    strides: tuple[int, ...], portable: str, in_place: bool
) -> None:
    """The portable kernel reads any. It masks values that are not finite."""
    needs_hopper_kernels()
    launched: list[dict[str, Any]] = []
    q, v = empty(1, 300, 256), empty(300 * 260).as_strided((1, 300, 256), strides)
    spec = AttentionSpec(heads=2, pv="bf16", impl="triton", causal=portable == "causal")
    lengths = empty(1, dtype=torch.int32) if portable == "lengths" else None
    with stand_in(HOPPER, launch=lambda *_, **arguments: launched.append(arguments)):
        attention.launch_attention(AttentionInputs(q, q, v, spec, q.dtype, kv_lengths=lengths))
    read = launched[-1]["v_src"] if portable else launched[-1]["v_desc"].base
    assert (read is v) == in_place
