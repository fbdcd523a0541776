"""Ahead-of-time compilation of what the launchers start, for every target, on a machine without
one.

Held to: no spills, no stack, shared memory within the card, and for the one-launch kernel the
barrier before its atomic and, on Hopper, the registers that let three programs share a
multiprocessor.

Every kernel is compiled for one target of each kind, every variant for at least one of those, and
the attention by default for all seven. With `--every-target` everything is compiled for all seven.
`pytest tests/kernels/test_aot.py --aot-python /path/to/python` compiles with another release too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.kernels.aot import (
    ADA,
    AMPERE,
    HIP,
    HOPPER,
    KINDS,
    SHARED,
    TARGETS,
    Compiler,
    Target,
    case,
    default_pv,
    faults,
    line,
)
from tests.launches import needs_hopper_kernels

#: 65,536 registers over three programs of four warps. The assembler that comes with Triton 3.9
#: wants a few more for the one-launch kernel (3.6 does not): two programs there.
HOPPER_REGISTERS = {"attention_kernel": 168, "one_launch_kernel": 168}
HOPPER_REGISTERS_3_9 = HOPPER_REGISTERS | {"one_launch_kernel": 192}
#: What three programs may take of a Hopper multiprocessor's 228 KiB, 1 KiB of which is reserved
#: each.
HOPPER_SHARED = 228 * 1024 // 3 - 1024

EACH_TARGET = pytest.mark.parametrize("target", TARGETS, ids=lambda t: f"{t[0]}-{t[1]}")


@pytest.fixture(scope="session")
def compilers(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Compiler]]:
    """One for the installed Triton, and one for that of `--aot-python`."""
    needs_hopper_kernels()
    folder = tmp_path_factory.getbasetemp()
    if hasattr(pytestconfig, "workerinput"):
        folder = folder.parent
    other = pytestconfig.getoption("--aot-python", default=None)
    found = [
        Compiler(python, folder / "triton")
        for python in [sys.executable, *([other] if other else [])]
    ]
    yield found
    for compiler in found:
        compiler.close()


@pytest.fixture
def every_target(pytestconfig: pytest.Config) -> bool:
    return bool(pytestconfig.getoption("--every-target"))


#: What three of the seven targets stand for: the attention alone, and Ada's prologue, which has
#: the least shared memory and e4m3.
ATTENTION = ("attention_kernel", "one_launch_kernel")


@EACH_TARGET
def test_default_path_compiles(
    target: Target, compilers: list[Compiler], every_target: bool
) -> None:
    cases = [
        case("one-launch", target, 128),
        case("attention", target, 128),
        case("attention", target, 64),
        case("project", target, 128),
    ]
    if target == HOPPER:  # it has a prologue of its own, for 16 bits
        cases.append(case("attention", target, 128, dtype="float32"))
    needed = {*ATTENTION, "prologue_kernel", "statistics_kernel", "project_kernel"}
    if not every_target:  # its prologue is that of one launch, without counters
        cases[1]["only"] = [ATTENTION[0]]
    if target not in KINDS and not every_target:
        needed = {*ATTENTION, *(["prologue_kernel"] if target == ADA else [])}
        cases = [one | {"only": sorted(needed)} for one in cases[:2]]
    for compiled in compilers:
        results = compiled(cases)
        names = {result["kernel"] for result in results}
        assert needed <= names
        own = {"hopper_prologue_kernel", "hopper_statistics_kernel"}
        assert (own <= names) == (target == HOPPER)
        broken = faults(results, target)
        assert not broken, broken


@pytest.mark.parametrize(
    ("operation", "kernels"),
    [("denoise", 2), ("fingerprint", 1)],
    ids=["sampler-step", "checksum"],
)
def test_small_kernels_compile(
    operation: str, kernels: int, compilers: list[Compiler], every_target: bool
) -> None:
    """A sampler's step with noise and without. A chunk of a checksum is in registers, and a GPU of
    NVIDIA's reads it 16 bytes at a time."""
    targets = TARGETS if every_target else KINDS
    for compiled in compilers:
        for target in targets:
            results = compiled([case(operation, target, 128)])
            assert len(results) == kernels
            broken = faults(results, target)
            assert not broken, broken
            if operation == "fingerprint" and target[0] == "cuda":
                # 4,096 words of 4 bytes over 128 threads.
                assert all(result["wide_loads"] == 8 for result in results)


def variants(target: Target, every_target: bool) -> dict[str, dict]:
    """Padded heads, masks, logsumexp, 16-bit values where e4m3 is the default, and layer norms of
    heads of 64 channels, as CogVideoX has, and of padded ones."""
    layer = {"norm": "layer", "dtype": "float32" if target == HOPPER else "bfloat16"}
    found = {
        "d32": case("attention", target, 32),
        "d256": case("attention", target, 256),
        "d96-masked": case("attention", target, 96, causal=True, lengths=True, lse=True),
        "one-launch-d64": case("one-launch", target, 64),
        "one-launch-d256": case("one-launch", target, 256),
        "layer-norm-d64": case("attention", target, 64, **layer),
        "layer-norm-d96": case("attention", target, 96, **layer),
        "layer-norm-no-rope-d64": case("attention", target, 64, rope=False, **layer),
    }
    if default_pv(target) == "fp8":
        found |= {
            f"{one}-bf16": case(one, target, 128, "bf16") for one in ("attention", "one-launch")
        }
    return found


#: The variants that a kind of target compiles without `--every-target`: each once, the largest
#: heads where there is the least shared memory.
REPRESENTED = {
    AMPERE: ("d96-masked", "one-launch-d64", "layer-norm-d96"),
    HOPPER: ("attention-bf16", "one-launch-bf16", "layer-norm-no-rope-d64", "d32"),
    HIP: ("d256", "one-launch-d256", "layer-norm-d64"),
}


def test_every_variant_is_compiled_for_some_target() -> None:
    assert list(REPRESENTED) == KINDS
    for target in TARGETS:
        assert set(variants(target, True)) <= {
            name for names in REPRESENTED.values() for name in names
        }


@pytest.mark.slow
@EACH_TARGET
def test_other_variants_compile(
    target: Target, compilers: list[Compiler], every_target: bool
) -> None:
    cases = variants(target, every_target)
    names = cases if every_target else REPRESENTED.get(target, ())
    if not names:
        pytest.skip("rare variants for this target: --every-target")
    for compiled in compilers:
        broken = faults(compiled([cases[name] for name in names]), target)
        assert not broken, broken


SHARDS = {
    "wide": {"dim": 128},
    "layer-norm": {"dim": 64, "pv": "bf16", "norm": "layer"},
    "portable": {"dim": 128, "portable": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("target", KINDS, ids=lambda t: f"{t[0]}-{t[1]}")
@pytest.mark.parametrize("how", SHARDS)
def test_context_parallel_pieces_compile(
    how: str, target: Target, compilers: list[Compiler], every_target: bool
) -> None:
    """q, k and v in a launch each, and the attention of operands that came from other ranks."""
    if how == "portable" and target != HOPPER:
        pytest.skip("it is portable there")
    if not every_target and (target, how) in ((AMPERE, "layer-norm"), (HIP, "wide")):
        pytest.skip("its representative is another target: --every-target")
    for compiled in compilers:
        results = compiled([case("shards", target, **SHARDS[how])])
        assert {result["kernel"] for result in results} >= {"statistics_kernel"}
        assert not any("error" in result for result in results), results
        # Limits of their own are tested below.
        results = [result for result in results if result["kernel"] != "hopper_kernel"]
        broken = faults(results, target)
        assert not broken, broken


SPARSE = {
    "prepare_tokens_kernel",
    "select_kernel",
    "sparse_attention_kernel",
}


@pytest.mark.slow
@EACH_TARGET
def test_sparse_attention_compiles(
    target: Target, compilers: list[Compiler], every_target: bool
) -> None:
    """With SageSLA's blocks there and with SLA's. On Hopper three programs share a
    multiprocessor, as in the dense kernel. The attention may keep a few values in local memory,
    but on Hopper none in its main loop: what is left is in the loop that masks, over one block at
    most."""
    hopper = target == HOPPER
    # 64 channels and 128 are Hopper's own kernel's there. The prologue is the dense kernel's, and
    # is held to its limits where that is compiled.
    only = SPARSE | {"hopper_key_value_kernel" if hopper else "key_value_kernel"}

    def sparse(dim: int, pv: str | None = None, blocks: tuple[int, int] = (128, 64)) -> dict:
        name = f"d{dim} {pv} {blocks}"
        return case("sparse", target, dim, pv, blocks=blocks, only=sorted(only)) | {"name": name}

    cases = []
    if target in KINDS or every_target:
        for blocks in [(64, 128), (128, 64)] if hopper else [(128, 64)]:
            cases += [sparse(dim, blocks=blocks) for dim in (64, 128)]
        if default_pv(target) == "fp8":
            cases += [sparse(128, "bf16")]
    if target == ADA:  # the least shared memory, and tokens of 40 heads
        cases += [sparse(128) | {"heads": 40, "name": "14B"}]
    if not cases:
        pytest.skip("sparse attention for this target: --every-target")
    for compiled in compilers:
        own = compiled(cases)
        assert {result["kernel"] for result in own} == only
        broken = faults([r for r in own if r["kernel"] != "sparse_attention_kernel"], target)
        assert not broken, broken
        for result in own:
            if result["kernel"] != "sparse_attention_kernel":
                continue
            assert "error" not in result and result["spills"] <= 16, line(result)
            assert result["shared"] <= SHARED[target], line(result)
            if hopper:
                assert result["loop_spills"][0] == 0, line(result)
                assert result["registers"] <= 168, line(result)
                assert result["shared"] <= HOPPER_SHARED, line(result)


@pytest.mark.slow
def test_sparse_attention_of_fp32_compiles(compilers: list[Compiler]) -> None:
    """It fits, and what it spills on Hopper is bounded (1,200 values without three parts)."""
    cases = [case("sparse", HOPPER, 96, "bf16", blocks=(128, 64)) | {"dtype": "float32"}]
    for compiled in compilers:
        for result in compiled(cases):
            assert "error" not in result and result["shared"] <= SHARED[HOPPER], line(result)
            if result["kernel"] == "key_value_kernel":
                assert result["spills"] <= 100, line(result)


@pytest.mark.slow
def test_int8_linears_compile(compilers: list[Compiler], every_target: bool) -> None:
    """With the skip on every target; on Hopper also with GELU, plain, with a rounded skip, and in
    small tiles with features that divide by nothing."""
    targets = TARGETS if every_target else KINDS
    portable = {"tuning": {"block_k": 128}}
    cases = [case("int8-linear", target, 128, **portable) for target in targets]
    cases += [case("int8-linear", HOPPER, 128, rest=True, **portable)]
    cases += [case("int8-linear", HOPPER, 77) | {"heads": 1, "tokens": 300}]
    cases += [case("norm-rows", target, dim) for target in targets for dim in (128, 427)]
    for compiled in compilers:
        results = compiled(cases)
        for target in targets:
            here = [r for r in results if r["target"] == f"{target[0]}:{target[1]}"]
            names = {r["kernel"] for r in here}
            assert names == {
                "quantize_rows_kernel",
                "norm_modulate_rows_kernel",
                "int8_linear_kernel",
            }
            broken = faults(here, target)
            assert not broken, broken
        linears = [r for r in results if r.get("igmma") is not None and r["target"] == "cuda:90"]
        assert len(linears) == 5 and all(r["igmma"] for r in linears)


@pytest.mark.slow
def test_what_meets_a_wide_residual_compiles(
    compilers: list[Compiler], every_target: bool
) -> None:
    """Norms that read the stream in fp32, and skips that read it, write it, or do both. Hopper's
    linear may keep some of the skip in local memory, outside its loops over K, as it does in 16
    bits."""
    targets = TARGETS if every_target else KINDS
    for compiled in compilers:
        results = compiled([case("residual", target, 128) for target in targets])
        for target in targets:
            here = [r for r in results if r["target"] == f"{target[0]}:{target[1]}"]
            linear = "hopper_linear_kernel" if target == HOPPER else "int8_linear_kernel"
            names = [result["kernel"] for result in here]
            assert all(names.count(n) == 3 for n in ("skip_kernel", "project_kernel", linear))
            assert {"norm_modulate_kernel", "norm_modulate_rows_kernel"} <= set(names)
            broken = faults([r for r in here if r["kernel"] != "hopper_linear_kernel"], target)
            assert not broken, broken
            for result in (r for r in here if r["kernel"] == "hopper_linear_kernel"):
                assert "error" not in result and result["shared"] <= SHARED[target], line(result)
                assert not any(result["loop_spills"][:2]), line(result)


def test_a_skip_with_its_norm_sums_in_the_norm_s_order(
    compilers: list[Compiler], every_target: bool
) -> None:
    """A row lies in threads as in the norm's own kernel, so both give the same bits; with the
    residual stream in fp32 and in 16 bits. On Hopper of 14B's rows, too, and of rows that divide
    by nothing."""
    for target in TARGETS if every_target else KINDS:
        widths = ((12, 128), (40, 128), (1, 77)) if target == HOPPER else ((12, 128),)
        cases = [
            case("skip-norm", target, dim, heads=heads, stream=stream, modulated=modulated)
            | {"name": f"{heads}x{dim} {stream} {modulated}"}
            for heads, dim in widths
            for stream in ("float32", "bfloat16")
            for modulated in (True, False)
        ]
        for compiled in compilers:
            results = compiled(cases)
            broken = faults(results, target)
            assert not broken, broken
            for one in cases:
                own = {r["kernel"]: r["sums"] for r in results if r["case"] == one["name"]}
                assert len(own) == 4 and all(len(sums) >= 2 for sums in own.values()), own
                assert own["skip_norm_kernel"] == own["norm_modulate_kernel"], one["name"]
                rows = own["skip_norm_rows_kernel"], own["norm_modulate_rows_kernel"]
                assert rows[0] == rows[1], one["name"]


def test_a_skip_of_two_streams_sums_its_norm_in_the_norm_s_order(
    compilers: list[Compiler], every_target: bool
) -> None:
    """As above, of the kernel that does both streams, which also may do the skip alone."""
    for target in TARGETS if every_target else KINDS:
        widths = ((30, 64), (3, 32), (1, 77)) if target == HOPPER else ((30, 64),)
        cases = [
            case("streams", target, dim, heads=heads, stream=stream, folded=folded)
            | {"name": f"{heads}x{dim} {stream} {folded}"}
            for heads, dim in widths
            for stream in ("float32", "bfloat16")
            for folded in (True, False)
        ]
        for compiled in compilers:
            results = compiled(cases)
            broken = faults(results, target)
            assert not broken, broken
            for one in cases:
                norm, both, skip = [r["sums"] for r in results if r["case"] == one["name"]]
                assert norm == both and len(norm) >= 2 and not skip, one["name"]


@pytest.mark.slow
def test_int8_linears_with_groups_compile(compilers: list[Compiler], every_target: bool) -> None:
    """A scale for every 128 channels: two sums a value, and nothing spilled on any target."""
    targets = TARGETS if every_target else KINDS
    cases = [case("int8-linear", target, 128, grouped=True) for target in targets]
    cases += [case("int8-linear", HOPPER, 128, grouped=True, rest=True)]
    cases += [case("int8-linear", HOPPER, 77, grouped=True) | {"heads": 1}]
    portable = {"blocks": True, "tuning": {"block_k": 128}}
    cases += [case("int8-linear", target, 128, **portable) for target in targets]
    for compiled in compilers:
        results = compiled(cases)
        for target in targets:
            here = [r for r in results if r["target"] == f"{target[0]}:{target[1]}"]
            assert {r["kernel"] for r in here} == {"quantize_rows_kernel", "int8_linear_kernel"}
            broken = faults(here, target)
            assert not broken, broken


def test_the_hopper_linear_is_the_default_there(compilers: list[Compiler]) -> None:
    for blocks in (False, True):
        results = compilers[0]([case("int8-linear", HOPPER, 128, blocks=blocks)])
        own = "hopper_linear_blocks_kernel" if blocks else "hopper_linear_kernel"
        assert {r["kernel"] for r in results} == {"quantize_rows_kernel", own}


#: Groups and matrix instructions of a step over K in one group, by schedule.
_SCHEDULES = {
    "ping-pong-128x128": (2, 8),
    "cooperative-128x256": (2, 8),
    "cooperative-192x256": (3, 8),
}


@pytest.mark.slow
def test_hopper_linears_compile(compilers: list[Compiler], every_target: bool) -> None:
    """No spills in their loops over K; what the skip keeps in local memory is outside them."""
    target, all_forms = HOPPER, ["gelu", "plain", "skip"]
    few = all_forms if every_target else ["skip"]
    chosen: list[tuple[str, bool | None, list[str]]] = [
        ("ping-pong-128x128", None, all_forms),
        ("cooperative-128x256", None, few),
        ("cooperative-192x256", None, few),
        ("ping-pong-128x128", False, few),
    ]
    cases = [
        case(
            "hopper-linear", target, 128, schedule=name, permuted=permuted, forms=forms,
            only=["hopper_linear_kernel"],
        )
        for name, permuted, forms in chosen
    ]  # fmt: skip
    for i, one in enumerate(cases):
        one["name"] = f"{one['schedule']} {i}"
    for compiled in compilers:
        own = compiled(cases)
        assert len(own) == sum(len(forms) for *_, forms in chosen)
        assert not any("error" in result for result in own), own
        for result in own:
            groups, products = _SCHEDULES[result["case"].split()[0]]
            assert result["shared"] <= SHARED[target], line(result)
            assert result["igmma"] == groups * products, line(result)
            # The loops over K come first; the one over tiles may count where the assembler lets
            # it begin inside another.
            assert len(result["loop_spills"]) >= groups, line(result)
            assert not any(result["loop_spills"][:groups]), line(result)


@pytest.mark.slow
def test_the_hopper_linear_with_blocks_compiles(
    compilers: list[Compiler], every_target: bool
) -> None:
    """Two sums a value in each of three groups, and nothing spilled."""
    target, kernel = HOPPER, {"only": ["hopper_linear_blocks_kernel"]}
    forms = ["gelu", "plain", "skip"]
    few = forms if every_target else ["skip"]
    cases = [
        case("hopper-linear-blocks", target, 128, permuted=True, forms=forms, **kernel),
        case("hopper-linear-blocks", target, 128, permuted=False, forms=few, **kernel),
    ]
    for compiled in compilers:
        own = compiled(cases)
        assert len(own) == len(forms) + len(few)
        assert not any("error" in result for result in own), own
        assert not faults(own, target), faults(own, target)
        for result in own:
            # A step over K is four instructions of a group; 16 warps share 65,536 registers.
            assert result["igmma"] == 3 * 4, line(result)
            assert result["registers"] * 32 * 16 <= 65536, line(result)
            assert len(result["loop_spills"]) >= 3, line(result)


def test_the_hopper_kernel_compiles(compilers: list[Compiler]) -> None:
    """Its groups may keep a few values in local memory, outside their loops but for a handful."""
    target, kernel = HOPPER, {"only": ["hopper_kernel"]}
    cases = [case("plain-attention", target, dim, **kernel) for dim in (64, 128)]
    cases += [case("plain-attention", target, 128, lse=True, lengths=True, **kernel)]
    for compiled in compilers:
        own = compiled(cases)
        assert len(own) == len(cases) and not any("error" in result for result in own), own
        for result in own:
            assert result["shared"] <= SHARED[target], line(result)
            # Three groups' main loops; more where the assembler makes a loop of another branch.
            assert len(result["loop_spills"]) >= 3, line(result)
            assert max(result["loop_spills"][:3]) <= 6, line(result)


@pytest.mark.parametrize("dim", [64, 128])
def test_the_attentions_close_with_one_multiply_add_a_value(
    dim: int, compilers: list[Compiler]
) -> None:
    """Hopper's and the portable one, also with a logsumexp, lengths or a skip, which would lead
    the assembler to contract the last sum or not: they could not give the same bits. Nothing is
    spilled for it."""
    own = {"only": ["hopper_kernel"], "lse": True, "lengths": True}
    portable = {"only": ["attention_kernel"], "lse": True}
    plain = portable | {"tile": (64, 128, 4, 2)}
    cases = [
        case("plain-attention", HOPPER, dim, **own) | {"name": "own"},
        case("plain-attention", HOPPER, dim, **plain) | {"name": "plain"},
        case("attention", HOPPER, dim, lengths=True, **portable) | {"name": "skip"},
    ]
    values = 64 * dim // 128  # of a thread
    for compiled in compilers:
        results = {result["case"]: result for result in compiled(cases)}
        assert not any("error" in result for result in results.values()), results
        assert not faults([results["plain"], results["skip"]], HOPPER)
        # A logsumexp takes five sums for each of a thread's two rows, a skip one a value.
        ends = {name: result["sums_at_end"] for name, result in results.items()}
        assert ends["own"] <= 10 and ends["plain"] <= 10, ends
        assert ends["skip"] <= 10 + values, ends


@pytest.mark.parametrize(
    ("norm", "rope"),
    [("across", True), (None, False), ("layer", True), ("layer", False)],
    ids=["norm-rope", "bare", "layer-norm-rope", "layer-norm"],
)
def test_two_programs_of_the_hopper_prologue_share_a_multiprocessor(
    norm: str | None, rope: bool, compilers: list[Compiler], every_target: bool
) -> None:
    """A norm over all heads in every form; others with what costs registers: a logsumexp, lengths,
    and 128 channels."""
    target = HOPPER
    before = {"norm": norm, "rope": rope, "only": ["hopper_prologue_kernel"]}
    cases = [case("attention", target, dim, **before) for dim in (64, 128)]
    cases += [
        case("attention", target, dim, pv, lse=True, lengths=True, **before)
        for dim, pv in ((64, "fp8"), (128, "fp8"), (128, "bf16"))
    ]
    if norm != "across" and not every_target:
        cases = cases[-3:] if rope else cases[-3:-1]
    for compiled in compilers:
        results = compiled(cases)
        assert len(results) == len(cases)
        wide = [r for r in results if norm == "layer" and r["case"].endswith("d128")]
        assert not faults([result for result in results if result not in wide], target)
        # With a bias over 128 channels, a value or two that a loop only reads have no room.
        assert all("error" not in result and result["stack"] <= 8 for result in wide), wide
        for result in results:
            assert result["registers"] <= 65536 // (2 * 8 * 32), line(result)
            assert result["shared"] <= 228 * 1024 // 2 - 1024, line(result)


def test_three_programs_share_a_hopper_multiprocessor(compilers: list[Compiler]) -> None:
    cases = [case(op, HOPPER, 128, only=list(ATTENTION)) for op in ("attention", "one-launch")]
    for compiled in compilers:
        results = compiled(cases)
        assert {result["kernel"] for result in results} == set(ATTENTION)
        recent = tuple(map(int, results[0]["triton"].split(".")[:2])) >= (3, 9)
        registers = HOPPER_REGISTERS_3_9 if recent else HOPPER_REGISTERS
        wide = [
            line(result)
            for result in results
            if result["kernel"] in registers
            and (
                result["registers"] > registers[result["kernel"]]
                or result["shared"] > HOPPER_SHARED
            )
        ]
        assert not wide
