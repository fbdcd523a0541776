"""Ahead-of-time compilation of what the launchers start, for every target, on a machine without
one.

Recorded in one process and compiled in another, both without the interpreter. Held to: no spills,
no stack, shared memory within the card, and for the one-launch kernel the barrier before its
atomic and, on Hopper, the registers that let three programs share a multiprocessor.

`pytest tests/kernels/test_aot.py --aot-python /path/to/python` compiles with another release too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
#: Largest shared memory of one program, in bytes.
SHARED = {
    ("cuda", 80): 163 * 1024,
    ("cuda", 86): 99 * 1024,
    ("cuda", 89): 99 * 1024,
    ("cuda", 90): 227 * 1024,
    ("cuda", 100): 227 * 1024,
    ("cuda", 120): 99 * 1024,
    ("hip", "gfx942"): 64 * 1024,
}
TARGETS = list(SHARED)
#: One of each kind: rare variants are compiled for these, for all with `--every-target`.
KINDS = [("cuda", 80), ("cuda", 90), ("hip", "gfx942")]
#: 65,536 registers over three programs of four warps. The assembler that comes with Triton 3.9
#: wants a few more for the one-launch kernel (3.6 does not): two programs there.
HOPPER_REGISTERS = {"attention_kernel": 168, "one_launch_kernel": 168}
HOPPER_REGISTERS_3_9 = HOPPER_REGISTERS | {"one_launch_kernel": 192}
#: What three programs may take of a Hopper multiprocessor's 228 KiB, 1 KiB of which is reserved
#: each.
HOPPER_SHARED = 228 * 1024 // 3 - 1024


def case(operation: str, target: tuple[str, int | str], dim: int, pv: str, **more: object) -> dict:
    return {
        "name": f"{operation}-{pv}-d{dim}",
        "operation": operation,
        "backend": target[0],
        "arch": target[1],
        "heads": 12,
        "head_dim": dim,
        "tokens": 32760,
        "dtype": "bfloat16",
        "pv": pv,
        **more,
    }


def resources(python: str, cases: list[dict], folder: Path) -> list[dict]:
    """Record the launches of `cases` here, compile them with `python`."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(folder / "cache")}

    def output(*command: str | Path) -> str:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    (folder / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    launches = output(sys.executable, HERE / "aot_record.py", folder / "cases.json")
    (folder / "launches.json").write_text(launches, encoding="utf-8")
    kernels = ROOT / "turbo_rcm_patch" / "kernels"
    return json.loads(output(python, HERE / "aot_compile.py", folder / "launches.json", kernels))


def line(result: dict) -> str:
    return " ".join(f"{key}={value}" for key, value in result.items())


def faults(results: list[dict], target: tuple[str, int | str]) -> str:
    """The compiled kernels that break a limit, one a line."""
    return "\n".join(
        line(result)
        for result in results
        if "error" in result
        or result["spills"]
        or result["stack"]
        or result["shared"] > SHARED[target]
        or not result.get("barrier", True)
    )


def default_pv(target: tuple[str, int | str]) -> str:
    backend, arch = target
    return "fp8" if backend == "cuda" and isinstance(arch, int) and arch >= 89 else "bf16"


def pythons(config: pytest.Config) -> list[str]:
    other = config.getoption("--aot-python", default=None)
    return [sys.executable] + ([other] if other else [])


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: f"{t[0]}-{t[1]}")
def test_default_path_compiles(
    target: tuple[str, int | str], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    pv = default_pv(target)
    cases = [
        case("one-launch", target, 128, pv),
        case("attention", target, 128, pv),
        case("attention", target, 64, pv),
        case("project", target, 128, pv),
    ]
    if target == ("cuda", 90):  # it has a prologue of its own, for 16 bits
        cases.append(case("attention", target, 128, pv, dtype="float32"))
    for python in pythons(pytestconfig):
        results = resources(python, cases, tmp_path)
        names = {result["kernel"] for result in results}
        assert {
            "attention_kernel",
            "one_launch_kernel",
            "prologue_kernel",
            "statistics_kernel",
            "project_kernel",
        } <= names
        own = {"hopper_prologue_kernel", "hopper_statistics_kernel"}
        assert (own <= names) == (target == ("cuda", 90))
        broken = faults(results, target)
        assert not broken, broken


def test_a_sampler_s_step_compiles(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """With noise and without, on every target."""
    cases = [case("denoise", target, 128, "bf16") for target in TARGETS]
    for python in pythons(pytestconfig):
        results = resources(python, cases, tmp_path)
        assert len(results) == 2 * len(TARGETS)
        broken = "".join(faults(results, target) for target in TARGETS)
        assert not broken, broken


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: f"{t[0]}-{t[1]}")
def test_other_variants_compile(
    target: tuple[str, int | str], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Padded heads, masks, logsumexp, 16-bit values where e4m3 is the default, and layer norms of
    heads of 64 channels, as CogVideoX has, and of padded ones."""
    if target not in KINDS and not pytestconfig.getoption("--every-target"):
        pytest.skip("rare variants for this target: --every-target")
    pv = default_pv(target)
    cases = [case("attention", target, dim, pv) for dim in (32, 256)]
    cases += [case("attention", target, 96, pv, causal=True, lengths=True, lse=True)]
    cases += [case("one-launch", target, 64, pv), case("one-launch", target, 256, pv)]
    if pv == "fp8":
        cases += [case(op, target, 128, "bf16") for op in ("attention", "one-launch")]
    more = {"norm": "layer", "dtype": "float32" if target == ("cuda", 90) else "bfloat16"}
    cases += [case("attention", target, dim, pv, **more) for dim in (64, 96)]
    cases += [case("attention", target, 64, pv, rope=False, **more)]
    for python in pythons(pytestconfig):
        broken = faults(resources(python, cases, tmp_path), target)
        assert not broken, broken


@pytest.mark.slow
@pytest.mark.parametrize("target", KINDS, ids=lambda t: f"{t[0]}-{t[1]}")
def test_context_parallel_pieces_compile(
    target: tuple[str, int | str], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """q, k and v in a launch each, and the attention of operands that came from other ranks."""
    pv = default_pv(target)
    cases = [case("shards", target, 128, pv), case("shards", target, 64, "bf16", norm="layer")]
    if target == ("cuda", 90):
        cases += [case("shards", target, 128, pv, portable=True)]
    for python in pythons(pytestconfig):
        results = resources(python, cases, tmp_path)
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
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: f"{t[0]}-{t[1]}")
def test_sparse_attention_compiles(
    target: tuple[str, int | str], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """With SageSLA's blocks there and with SLA's. On Hopper three programs share a
    multiprocessor, as in the dense kernel. The attention may keep a few values in local memory,
    but on Hopper none in its main loop: what is left is in the loop that masks, over one block at
    most."""
    pv, hopper = default_pv(target), target == ("cuda", 90)
    cases = [
        case("sparse", target, dim, pv, blocks=blocks) | {"name": f"d{dim} {blocks}"}
        for dim in (64, 128)
        for blocks in ([(64, 128)] if hopper else []) + [(128, 64)]
    ]
    if pv == "fp8":
        cases += [case("sparse", target, 128, "bf16", blocks=(128, 64)) | {"name": "bf16"}]
    if target == ("cuda", 89):  # the least shared memory, and tokens of 40 heads
        cases += [case("sparse", target, 128, pv, blocks=(128, 64)) | {"heads": 40, "name": "14B"}]
    for python in pythons(pytestconfig):
        results = resources(python, cases, tmp_path)
        names = {result["kernel"] for result in results}
        # 64 channels and 128 are Hopper's own kernel's there.
        assert names >= SPARSE | {"hopper_key_value_kernel" if hopper else "key_value_kernel"}
        # The prologue is the dense kernel's, and is held to its limits where that is compiled.
        own = [r for r in results if r["kernel"] in SPARSE or "key_value" in r["kernel"]]
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
def test_sparse_attention_of_fp32_compiles(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """It fits, and what it spills on Hopper is bounded (1,200 values without three parts)."""
    target = ("cuda", 90)
    cases = [case("sparse", target, 96, "bf16", blocks=(128, 64)) | {"dtype": "float32"}]
    for python in pythons(pytestconfig):
        for result in resources(python, cases, tmp_path):
            assert "error" not in result and result["shared"] <= SHARED[target], line(result)
            if result["kernel"] == "key_value_kernel":
                assert result["spills"] <= 100, line(result)


@pytest.mark.slow
def test_int8_linears_compile(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """With the skip on every target; on Hopper also with GELU, plain, with a rounded skip, and in
    small tiles with features that divide by nothing."""
    hopper, portable = ("cuda", 90), {"tuning": {"block_k": 128}}
    cases = [case("int8-linear", target, 128, "fp8", **portable) for target in TARGETS]
    cases += [case("int8-linear", hopper, 128, "fp8", rest=True, **portable)]
    cases += [case("int8-linear", hopper, 77, "fp8") | {"heads": 1, "tokens": 300}]
    cases += [case("norm-rows", target, dim, "fp8") for target in TARGETS for dim in (128, 427)]
    for python in pythons(pytestconfig):
        results = resources(python, cases, tmp_path)
        for target in TARGETS:
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
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: f"{t[0]}-{t[1]}")
def test_what_meets_a_wide_residual_compiles(
    target: tuple[str, int | str], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Norms that read the stream in fp32, and skips that read it, write it, or do both. Hopper's
    linear may keep some of the skip in local memory, outside its loops over K, as it does in 16
    bits."""
    for python in pythons(pytestconfig):
        results = resources(python, [case("residual", target, 128, "bf16")], tmp_path)
        linear = "hopper_linear_kernel" if target == ("cuda", 90) else "int8_linear_kernel"
        names = [result["kernel"] for result in results]
        assert all(names.count(name) == 3 for name in ("skip_kernel", "project_kernel", linear))
        assert {"norm_modulate_kernel", "norm_modulate_rows_kernel"} <= set(names)
        broken = faults([r for r in results if r["kernel"] != "hopper_linear_kernel"], target)
        assert not broken, broken
        for result in (r for r in results if r["kernel"] == "hopper_linear_kernel"):
            assert "error" not in result and result["shared"] <= SHARED[target], line(result)
            assert not any(result["loop_spills"][:2]), line(result)


def test_checksums_compile(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """A chunk is in registers, and on a GPU of NVIDIA's it is read 16 bytes at a time."""
    for python in pythons(pytestconfig):
        cases = [case("fingerprint", target, 128, "fp8") for target in TARGETS]
        results = resources(python, cases, tmp_path)
        assert {r["kernel"] for r in results} == {"fingerprint_kernel"}
        for target in TARGETS:
            here = [r for r in results if r["target"] == f"{target[0]}:{target[1]}"]
            broken = faults(here, target)
            assert here and not broken, broken
            # 4,096 words of 4 bytes over 128 threads.
            assert target[0] != "cuda" or all(r["wide_loads"] == 8 for r in here)


@pytest.mark.slow
def test_int8_linears_with_groups_compile(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """A scale for every 128 channels: two sums a value, and nothing spilled on any target."""
    cases = [case("int8-linear", target, 128, "fp8", grouped=True) for target in TARGETS]
    cases += [case("int8-linear", ("cuda", 90), 128, "fp8", grouped=True, rest=True)]
    cases += [case("int8-linear", ("cuda", 90), 77, "fp8", grouped=True) | {"heads": 1}]
    portable = {"blocks": True, "tuning": {"block_k": 128}}
    cases += [case("int8-linear", target, 128, "fp8", **portable) for target in TARGETS]
    for python in pythons(pytestconfig):
        results = resources(python, cases, tmp_path)
        for target in TARGETS:
            here = [r for r in results if r["target"] == f"{target[0]}:{target[1]}"]
            assert {r["kernel"] for r in here} == {"quantize_rows_kernel", "int8_linear_kernel"}
            broken = faults(here, target)
            assert not broken, broken


def test_the_hopper_linear_is_the_default_there(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    for blocks in (False, True):
        cases = [case("int8-linear", ("cuda", 90), 128, "fp8", blocks=blocks)]
        results = resources(sys.executable, cases, tmp_path)
        own = "hopper_linear_blocks_kernel" if blocks else "hopper_linear_kernel"
        assert {r["kernel"] for r in results} == {"quantize_rows_kernel", own}


#: Groups and matrix instructions of a step over K in one group, by schedule.
_SCHEDULES = {
    "ping-pong-128x128": (2, 8),
    "cooperative-128x256": (2, 8),
    "cooperative-192x256": (3, 8),
}


@pytest.mark.slow
def test_hopper_linears_compile(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """No spills in their loops over K; what the skip keeps in local memory is outside them."""
    target = ("cuda", 90)
    cases = [case("hopper-linear", target, 128, "fp8", schedule=name) for name in _SCHEDULES]
    cases += [
        case("hopper-linear", target, 128, "fp8", schedule="ping-pong-128x128", permuted=False)
    ]
    for i, one in enumerate(cases):
        one["name"] = f"{one['schedule']} {i}"
    for python in pythons(pytestconfig):
        results = resources(python, cases, tmp_path)
        own = [result for result in results if result["kernel"] == "hopper_linear_kernel"]
        assert len(own) == 3 * len(cases) and not any("error" in result for result in own), own
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
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Two sums a value in each of three groups, and nothing spilled."""
    target = ("cuda", 90)
    operation = "hopper-linear-blocks"
    cases = [case(operation, target, 128, "fp8", permuted=permuted) for permuted in (True, False)]
    for python in pythons(pytestconfig):
        results = resources(python, cases, tmp_path)
        own = [result for result in results if result["kernel"] == "hopper_linear_blocks_kernel"]
        assert len(own) == 3 * len(cases) and not any("error" in result for result in own), own
        assert not faults(own, target), faults(own, target)
        for result in own:
            # A step over K is four instructions of a group; 16 warps share 65,536 registers.
            assert result["igmma"] == 3 * 4, line(result)
            assert result["registers"] * 32 * 16 <= 65536, line(result)
            assert len(result["loop_spills"]) >= 3, line(result)


def test_the_hopper_kernel_compiles(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Its groups may keep a few values in local memory, outside their loops but for a handful."""
    target = ("cuda", 90)
    cases = [case("plain-attention", target, dim, "fp8") for dim in (64, 128)]
    cases += [case("plain-attention", target, 128, "fp8", lse=True, lengths=True)]
    for python in pythons(pytestconfig):
        results = resources(python, cases, tmp_path)
        own = [result for result in results if result["kernel"] == "hopper_kernel"]
        assert len(own) == len(cases) and not any("error" in result for result in own), own
        for result in own:
            assert result["shared"] <= SHARED[target], line(result)
            # Three groups' main loops; more where the assembler makes a loop of another branch.
            assert len(result["loop_spills"]) >= 3, line(result)
            assert max(result["loop_spills"][:3]) <= 6, line(result)


@pytest.mark.parametrize(
    ("norm", "rope"),
    [("across", True), (None, False), ("layer", True), ("layer", False)],
    ids=["norm-rope", "bare", "layer-norm-rope", "layer-norm"],
)
def test_two_programs_of_the_hopper_prologue_share_a_multiprocessor(
    norm: str | None, rope: bool, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    target, before = ("cuda", 90), {"norm": norm, "rope": rope}
    cases = [case("attention", target, dim, "fp8", **before) for dim in (64, 128)]
    cases += [
        case("attention", target, dim, pv, lse=True, lengths=True, **before)
        for dim, pv in ((64, "fp8"), (128, "fp8"), (128, "bf16"))
    ]
    for python in pythons(pytestconfig):
        results = [
            result
            for result in resources(python, cases, tmp_path)
            if result["kernel"] == "hopper_prologue_kernel"
        ]
        assert len(results) == len(cases)
        wide = [r for r in results if norm == "layer" and r["case"].endswith("d128")]
        assert not faults([result for result in results if result not in wide], target)
        # With a bias over 128 channels, a value or two that a loop only reads have no room.
        assert all("error" not in result and result["stack"] <= 8 for result in wide), wide
        for result in results:
            assert result["registers"] <= 65536 // (2 * 8 * 32), line(result)
            assert result["shared"] <= 228 * 1024 // 2 - 1024, line(result)


def test_three_programs_share_a_hopper_multiprocessor(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    target = ("cuda", 90)
    cases = [case(op, target, 128, "fp8") for op in ("attention", "one-launch")]
    for python in pythons(pytestconfig):
        results = resources(python, cases, tmp_path)
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
