"""Compile the kernels for GPUs that are not there, and hold what the compiler made to its limits.

    python -m tools.aot                                  # every case for every target
    python -m tools.aot --target cuda:90 --only sparse   # those cases that have the word
    python -m tools.aot --triton 3.4.0 3.9.0             # with other releases, which pip fetches
    python -m tools.aot --list

The launchers run on meta tensors, so that what is compiled is what a GPU gets: the same tiles,
argument types and constants. Limits: no spills and no stack but for those in `KEEPS`, registers
and shared memory that let as many programs share a multiprocessor as were measured to be fastest,
a barrier before the one-launch kernel's atomic, and sums of a norm in the same order in every
kernel that computes one. Exit code 1 if a kernel breaks one. Triton's cache keeps what was
compiled.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from turbo_rcm_patch.kernels import gluon
from turbo_rcm_patch.kernels.launch import Target
from turbo_rcm_patch.kernels.operands import AttentionInputs

__all__ = ["CASES", "SHARED", "Case", "Result", "compiled", "faults", "main", "order_faults"]

#: Largest shared memory of one program, in bytes.
SHARED = {
    Target("cuda", 80): 163 * 1024,
    Target("cuda", 86): 99 * 1024,
    Target("cuda", 89): 99 * 1024,
    Target("cuda", 90): 227 * 1024,
    Target("cuda", 100): 227 * 1024,
    Target("cuda", 120): 99 * 1024,
    Target("hip", "gfx942"): 64 * 1024,
}
HOPPER = Target("cuda", 90)
#: Registers on Hopper: 65,536 over three programs of four warps or two of eight.
REGISTERS = {
    "attention_kernel": 168, "one_launch_kernel": 168, "sparse_attention_kernel": 168,
    "hopper_prologue_kernel": 128, "hopper_linear_blocks_kernel": 128,
}  # fmt: skip
#: Shared memory on Hopper: of its 228 KiB each program takes 1 KiB more than it asks for.
HOPPER_SHARED = dict.fromkeys(
    ("attention_kernel", "one_launch_kernel", "sparse_attention_kernel"), 228 * 1024 // 3 - 1024
) | {"hopper_prologue_kernel": 228 * 1024 // 2 - 1024}
#: Loads and stores of local memory that a kernel may have in all; in its main loops it has none.
KEEPS = {"hopper_linear_kernel": 10**6, "hopper_kernel": 10**6, "sparse_attention_kernel": 16}
#: Those that Hopper's attention may have in a main loop.
KEEPS_IN_LOOPS = {"hopper_kernel": 6}
#: What compilers since 3.8 spill on Hopper; on a card 3.6 was measured, and 3.7 is pinned.
SPILLED_SINCE_3_8 = {
    "attention_kernel": 80, "hopper_prologue_kernel": 17, "int8_linear_kernel": 2,
    "prologue_kernel": 4, "sparse_attention_kernel": 70,
}  # fmt: skip
#: Kernels that sum a row as the norm's own kernel does, in the order of their launches.
_SUMS = re.compile(r"^(norm_modulate|skip_norm|streams)")
_OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl", "enable_fp_fusion")
_TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.int8: "i8", torch.int32: "i32", torch.int64: "i64", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip
_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Case:
    """A call of a launcher.

    Attributes:
        run: Calls it.
        dim: Channels of a head.
        heads: Number of heads.
        dtype: Of the activations.
        options: What else `run` reads, or fields of `AttentionInputs`.
        portable: Leave Hopper's own kernels out.
        hopper: Only for compute capability 9.0.
        stack: Bytes of stack that its kernels may have.
    """

    run: Callable[[Case, Target], object]
    dim: int = 128
    heads: int = 12
    dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = field(default_factory=dict)
    portable: bool = False
    hopper: bool = False
    stack: int = 0

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(*shape, dtype=dtype or self.dtype, device="meta")

    def tokens(self, dtype: torch.dtype | None = None) -> Tensor:
        """An activation of a 480p video: 32,760 tokens."""
        return self.empty(1, 32760, self.heads * self.dim, dtype=dtype)

    def row(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.empty(1, 1, self.heads * self.dim, dtype=dtype)


@dataclass(frozen=True)
class Result:
    """A compiled kernel."""

    kernel: str
    target: Target
    stack_limit: int
    error: str = ""
    registers: int = 0
    stack: int = 0
    spills: int = 0
    shared: int = 0
    loop_spills: tuple[int, ...] = ()
    igmma: int = 0
    sums_at_end: int = 0
    barrier: bool = True
    sums: tuple[str, ...] = ()


# --- what is launched ----------------------------------------------------------------------------


def _launcher(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"turbo_rcm_patch.kernels.{module}"), name)


def _inputs(case: Case, target: Target) -> AttentionInputs:
    """An attention with norm, rotary embedding and skip, but for the options of the case."""
    q, k, v = case.empty(1, 32760, 3 * case.heads * case.dim).chunk(3, -1)
    table = case.empty(32760, case.dim, dtype=torch.float32)
    fp8 = target.backend == "cuda" and int(target.arch) >= 89
    fields = dict.fromkeys(AttentionInputs._fields) | {
        "q": q, "k": k, "v": v, "residual": case.tokens(), "c_out": case.row(), "cos": table,
        "sin": table, "c_skip_value": 1.0, "c_out_value": 1.0, "heads": case.heads,
        "attention": "int8", "pv": "fp8" if fp8 else "bf16",
        "smooth_k": True, "causal": False, "sm_scale": case.dim**-0.5, "eps": 1e-6,
        "impl": "triton", "out_dtype": case.dtype, "want_lse": False,
    }  # fmt: skip
    fields |= dict.fromkeys(("norm_q", "norm_k"), case.empty(case.heads * case.dim))
    own = {name: value for name, value in case.options.items() if name in fields}
    if case.options.get("layer"):
        own |= dict.fromkeys(
            ("norm_q", "norm_k", "norm_q_bias", "norm_k_bias"), case.empty(case.dim)
        )
    if case.options.get("lengths"):
        own["kv_lengths"] = case.empty(1, dtype=torch.int32)
    inputs: Any = fields | own
    made = AttentionInputs(**inputs)
    return made.alone() if case.options.get("alone") else made


def _attention(case: Case, target: Target) -> None:
    _launcher("portable.attention", "attention")(_inputs(case, target))


def _one_launch(case: Case, target: Target) -> None:
    channels = case.heads * case.dim
    launcher = _launcher("portable.one_launch", "attention_project_skip")
    weight, bias = case.empty(channels, channels), case.empty(channels)
    launcher(_inputs(case, target), weight, bias, cast="fp32")


def _sparse(case: Case, target: Target) -> None:
    block_q, block_k = case.options["blocks"]
    _launcher("portable.sparse_attention", "sparse_linear_attention")(
        _inputs(case, target).alone(), case.empty(case.dim, case.dim, dtype=torch.float32),
        case.empty(case.dim), count=3276 // block_k, block_q=block_q, block_k=block_k,
    )  # fmt: skip


def _int8_linear(case: Case, target: Target) -> None:
    x, channels = case.tokens(), case.heads * case.dim
    rows = _launcher("portable.rows", "quantize_rows")(x)
    groups = -(-channels // 128)
    shape = {"row": (channels,), "group": (channels, groups), "block": (groups, groups)}
    scale = case.empty(*shape[case.options["scales"]], dtype=torch.float32)
    weight = case.empty(channels, rows.int8.shape[2], dtype=torch.int8)
    schedule = case.options.get("schedule")
    for gelu in (False, True):
        how = {"gelu": gelu, "cast": "fp32"}
        given = (rows, weight, scale, case.empty(channels), None, 1.0, 1.0)
        if schedule is None:
            launcher = _launcher("portable.int8_linear", "int8_linear")
            launcher(*given, **how, out_dtype=case.dtype)
        else:
            schedules = _launcher("hopper.int8_linear", "SCHEDULES")
            launcher = _launcher("hopper.int8_linear", "hopper_linear")
            launcher(torch.empty_like(x), *given, **how, schedule=schedules[schedule])


def _norms(case: Case, target: Target) -> None:
    """A norm alone and after its skip, as a tensor and as int8 rows; the skip; rotated rows."""
    x, stream, row = case.tokens(), case.tokens(case.options["stream"]), case.row()
    how: dict[str, Any] = {"one": 1.0, "eps": 1e-6}
    skip: dict[str, Any] = {"cast": "fp32", "out_dtype": stream.dtype}
    norm, both = "portable.norm", _launcher("portable.skip_norm", "skip_norm")
    _launcher(norm, "norm_modulate")(stream, row, row, out_dtype=x.dtype, **how)
    both(stream, x, row, row, row, normed_dtype=x.dtype, **how, **skip)
    _launcher(norm, "norm_modulate_rows")(stream, row, row, **how)
    both(stream, x, row, row, row, normed_dtype=torch.int8, **how, **skip)
    _launcher("portable.skip", "skip")(stream, x, 1.0, row, **skip)
    if case.dim % 2:
        return
    table = case.empty(32760, case.dim, dtype=torch.float32)
    for size in (case.dim, case.heads * case.dim):
        _launcher(norm, "norm_rotate")(
            x, case.heads, weight=case.empty(size), bias=None, cos=table, sin=table, eps=1e-6
        )


def _streams(case: Case, target: Target) -> None:
    """The norm of two streams, a skip with that norm, and the skip alone."""
    x, stream = case.tokens(), case.tokens(case.options["stream"])
    parts, rows = (stream[:, :64], stream[:, 64:]), case.empty(1, 6, 1, x.shape[2])
    pairs = [rows[:, at : at + 2].unbind(1) for at in (0, 2, 4)]
    how: dict[str, Any] = {"cast": "fp32", "one": 1.0, "eps": 1e-6}
    how |= {"out_dtype": stream.dtype, "normed_dtype": x.dtype}
    modulation = (*pairs[1:], case.empty(x.shape[2]), case.empty(x.shape[2]))
    launcher = _launcher("portable.streams", "streams")
    launcher(parts, None, None, *modulation, **how)
    launcher(parts, x, pairs[0], *modulation, **how)
    launcher(parts, x, pairs[0], None, None, None, None, **how)


_WIDE = {"want_lse": True, "lengths": True}
#: Cases by name.
CASES: dict[str, Case] = {
    **{f"attention-d{dim}": Case(_attention, dim) for dim in (32, 64, 128, 256)},
    "attention-alone-d64": Case(_attention, 64, options={"alone": True}),
    "attention-alone-d128": Case(_attention, options={"alone": True}),
    "attention-alone-d128-wide": Case(_attention, options={"alone": True, **_WIDE}),
    "attention-d96-causal": Case(_attention, 96, options={"causal": True, **_WIDE}),
    "attention-bf16": Case(_attention, options={"pv": "bf16", **_WIDE}),
    "attention-fp32": Case(_attention, dtype=torch.float32),
    "attention-portable": Case(_attention, options={"alone": True}, portable=True),
    "attention-bare": Case(
        _attention, options=dict.fromkeys(("norm_q", "norm_k", "cos", "sin")), hopper=True
    ),
    **{
        f"layer-norm-d{dim}": Case(
            _attention, dim, options={"layer": True}, stack=8 if dim == 128 else 0
        )
        for dim in (64, 96, 128)
    },
    **{f"one-launch-d{dim}": Case(_one_launch, dim) for dim in (64, 128, 256)},
    "one-launch-bf16": Case(_one_launch, options={"pv": "bf16"}),
    **{
        f"sparse-d{dim}-{q}x{k}": Case(_sparse, dim, options={"blocks": (q, k)}, hopper=q == 64)
        for dim in (64, 128)
        for q, k in ((128, 64), (64, 128))
    },
    "sparse-14B": Case(_sparse, heads=40, options={"blocks": (128, 64)}),
    **{f"int8-linear-{one}": Case(_int8_linear, options={"scales": one}) for one in
       ("row", "group", "block")},
    "int8-linear-odd": Case(_int8_linear, 77, 1, options={"scales": "row"}),
    "int8-linear-portable": Case(_int8_linear, options={"scales": "row"}, portable=True),
    **{
        f"int8-linear-{name}": Case(
            _int8_linear, options={"scales": "row", "schedule": name}, hopper=True
        )
        for name in ("ping-pong-128x128", "cooperative-128x256", "cooperative-192x256")
    },
    **{
        f"{name}-{heads}x{dim}-{str(stream)[6:]}": Case(
            run, dim, heads, options={"stream": stream}
        )
        for name, run, sizes in (
            ("norms", _norms, ((12, 128), (40, 128), (1, 77))),
            ("streams", _streams, ((30, 64), (1, 77))),
        )
        for heads, dim in sizes
        for stream in (torch.float32, torch.bfloat16)
    },
}  # fmt: skip


@dataclass(frozen=True)
class _Launch:
    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


@contextmanager
def _recording(case: Case, target: Target) -> Iterator[list[_Launch]]:
    """Write launches down in the place of starting them, as on `target`."""
    launches: list[_Launch] = []

    def launch(kernel: Any, grid: object, device: object, **arguments: Any) -> None:
        options = {name: arguments.pop(name) for name in _OPTIONS if name in arguments}
        launches.append(_Launch(kernel, arguments, options))

    stands_in = {"launch": launch, "target_of": lambda device: target}
    if case.portable:
        stands_in["ran_on_hopper"] = lambda *_: False
    folder = Path(gluon.__file__).parent
    with ExitStack() as stack:
        for path in sorted(folder.glob("*/[a-z]*.py")):
            if path.parent.name == "hopper" and target != HOPPER:
                continue
            module = importlib.import_module(
                f"turbo_rcm_patch.kernels.{path.parent.name}.{path.stem}"
            )
            for name, value in stands_in.items():
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, value))
        yield launches


# --- compiling -----------------------------------------------------------------------------------


def _compile(launch: _Launch, target: Target) -> Any:
    """Compile a kernel for arguments as Triton specialises them at a launch."""
    kernel = launch.kernel
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    always = {parameter.name for parameter in kernel.params if parameter.is_constexpr}

    def specialised(value: Any, path: tuple[int, ...], name: str) -> Any:
        if isinstance(value, tuple):
            return tuple([specialised(one, (*path, i), name) for i, one in enumerate(value)])
        number = type(value) is int
        length = name in kernel.do_not_specialize
        one = number and value == 1 and not length
        if name in always or one or value is None or isinstance(value, bool):
            constants[path] = value
            return "constexpr"
        if isinstance(value, float):
            return "fp32"
        if isinstance(value, Tensor) or (number and value % 16 == 0 and not length):
            attributes[path] = [["tt.divisibility", 16]]
        if number:
            return "i32" if value < 2**31 else "i64"
        if isinstance(value, Tensor):
            return f"*{_TYPES[value.dtype]}"
        block, layout = str(list(value.block_shape)), getattr(value, "layout", None)
        rest = "" if layout is None else f",{layout!r}"
        return f"tensordesc<{_TYPES[value.base.dtype]}{block}{rest}>"

    signature = {
        name: specialised(launch.arguments[name], (i,), name)
        for i, name in enumerate(kernel.arg_names)
    }
    kind = ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as kind
    source = kind(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    warp = 64 if target.backend == "hip" else 32
    options = {"enable_fp_fusion": True} | launch.options
    return triton.compile(source, GPUTarget(target.backend, target.arch, warp), options)


def _result(case: Case, launch: _Launch, target: Target) -> Result:
    bare = Result(launch.kernel.__name__, target, case.stack)
    try:
        compiled = _compile(launch, target)
    except Exception as error:  # reported per kernel, so that one failure shows them all
        return replace(bare, error=f"{type(error).__name__}: {error}"[:2000])
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", compiled.asm["ttgir"], re.MULTILINE))
    reduced = r"\}\) : \(tensor<\d+xf32, (#\w+)>\) -> f32"
    made = replace(
        bare, shared=compiled.metadata.shared,
        sums=tuple(layouts[name] for name in re.findall(reduced, compiled.asm["ttgir"])),
    )  # fmt: skip
    if target.backend == "hip":
        names = ("vgpr_count", "private_segment_fixed_size", "vgpr_spill_count")
        found = [re.search(rf"\.{name}:\s*(\d+)", compiled.asm["amdgcn"]) for name in names]
        registers, stack, spills = (int(one[1]) if one else -1 for one in found)
        return replace(made, registers=registers, stack=stack, spills=spills)
    usage, sass = _disassembled(compiled.asm["cubin"])
    one_launch = made.kernel == "one_launch_kernel"
    names = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z]\S*)", sass, re.MULTILINE)
    products = [i for i, name in enumerate(names) if "MMA" in name]
    return replace(
        made,
        registers=int(usage["REG"]), stack=int(usage["STACK"]),
        spills=sum(name.split(".")[0] in ("STL", "LDL") for name in names),
        loop_spills=_spills_in_loops(sass),
        igmma=sum(name.startswith("IGMMA") for name in names),
        # Sums without a product after the last instruction that multiplies matrices.
        sums_at_end=sum(name.startswith("FADD") for name in names[max(products, default=0) :]),
        barrier=not one_launch or _barrier_before_atomic(names),
    )  # fmt: skip


def _disassembled(cubin: bytes) -> tuple[dict[str, str], str]:
    """What the code needs, and the code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run(
                [_BIN / tool, option, file.name], capture_output=True, text=True, check=True
            ).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    return dict(re.findall(r"(REG|STACK):(\d+)", usage)), sass


def _spills_in_loops(sass: str) -> tuple[int, ...]:
    """Count spills inside each innermost loop that multiplies matrices: a label and a jump back to
    it."""
    labels: dict[str, int] = {}
    names: list[str] = []
    loops: list[tuple[int, int]] = []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = len(names)
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", line):
            names.append(found[1])
            jump = re.search(r"(\.L\w+)\)?[;\s]*$", line.split("/* 0x")[0])
            if found[1].startswith("BRA") and jump and jump[1] in labels:
                loops.append((labels[jump[1]], len(names)))
    loops = [loop for loop in loops if any("GMMA" in name for name in names[slice(*loop)])]
    return tuple(
        sum(name.split(".")[0] in ("STL", "LDL") for name in names[first:last])
        for first, last in loops
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in loops)
    )


def _barrier_before_atomic(names: list[str]) -> bool:
    """A barrier of the program stands between the last global store and the one atomic."""
    (atomic,) = (i for i, name in enumerate(names) if name.startswith("ATOM"))
    store = max(i for i in range(atomic) if names[i].startswith("STG"))
    return any(name.startswith("BAR.SYNC") for name in names[store:atomic])


def compiled(name: str, target: Target, only: Sequence[str] = ()) -> list[Result]:
    """Compile what a case launches on a target: all of it, or the kernels of these names."""
    case = CASES[name]
    with _recording(case, target) as launches:
        case.run(case, target)
    wanted = [one for one in launches if not only or one.kernel.__name__ in only]
    return [_result(case, one, target) for one in wanted]


# --- limits --------------------------------------------------------------------------------------


def faults(result: Result) -> list[str]:
    """The limits that a compiled kernel breaks, in words."""
    if result.error:
        return [result.error]
    name, hopper = result.kernel, result.target == HOPPER
    release = tuple(map(int, triton.__version__.split(".")[:2]))
    newer = SPILLED_SINCE_3_8.get(name, 0) if hopper and release >= (3, 8) else 0
    keeps = max(KEEPS.get(name, 0), newer, 2 * result.stack_limit // 4)
    registers = REGISTERS.get(name, 255) if hopper else 512
    if name == "one_launch_kernel" and release >= (3, 9):
        registers = 192  # its assembler wants a few more: two programs then
    shared = HOPPER_SHARED.get(name, SHARED[HOPPER]) if hopper else SHARED[result.target]
    in_loops = max(result.loop_spills[:3], default=0)
    found = {
        f"{result.spills} loads and stores of local memory": result.spills > keeps,
        f"{in_loops} of them in a main loop": in_loops > max(KEEPS_IN_LOOPS.get(name, 0), newer),
        f"{result.stack} bytes of stack": result.stack > result.stack_limit and not keeps,
        f"{result.registers} registers": result.registers > registers,
        f"{result.shared} bytes of shared memory": result.shared > shared,
        "no barrier before the atomic": not result.barrier,
    }
    return [words for words, broken in found.items() if broken]


def order_faults(results: Sequence[Result]) -> list[str]:
    """The kernels that sum a row in another order than the norm's own kernel of the same case."""
    found = [result for result in results if _SUMS.match(result.kernel) and result.sums]
    rows = [[r for r in found if ("rows" in r.kernel) == which] for which in (True, False)]
    return [r.kernel for group in rows for r in group if r.sums != group[0].sums]


# --- the command ---------------------------------------------------------------------------------


def _with_release(release: str, argv: Sequence[str]) -> int:
    """Run this command with another release of Triton, which is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-input", "--quiet"]
        pip += ["--only-binary", ":all:", "--target", folder, f"triton=={release}"]
        if subprocess.run(pip).returncode:
            print(f"triton {release}: pip cannot fetch it")
            return 1
        path = os.pathsep.join([folder, str(Path(__file__).parents[1])])
        environment = os.environ | {"PYTHONPATH": path}
        return subprocess.run(
            [sys.executable, "-m", "tools.aot", *argv], env=environment
        ).returncode


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    names = {f"{one.backend}:{one.arch}": one for one in SHARED}
    parser = argparse.ArgumentParser(
        prog="python -m tools.aot", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--target", nargs="+", choices=names, default=list(names), metavar="ARCH",
                        help=f"of {', '.join(names)}")  # fmt: skip
    parser.add_argument("--only", nargs="+", default=[""], help="words of names of cases")
    parser.add_argument("--triton", nargs="+", metavar="RELEASE", help="releases in its place")
    parser.add_argument("--list", action="store_true", help="list the cases")
    given = parser.parse_args(argv)
    cases = [name for name in CASES if any(word in name for word in given.only)]
    if given.list or not cases:
        print(*(cases or CASES), sep="\n")
        return int(not cases)
    if given.triton:
        rest = ["--target", *given.target, *(["--only", *given.only] if given.only[0] else [])]
        return max(_with_release(release, rest) for release in given.triton)
    failed = 0
    for name in cases:
        for target in (names[one] for one in given.target):
            if CASES[name].hopper and target != HOPPER:
                continue
            results = compiled(name, target)
            unordered = order_faults(results)
            for one in results:
                broken = faults(one)
                failed += len(broken)
                said = "; ".join(broken) or "ok"
                print(f"{triton.__version__} {target.key} {name} {one.kernel}: {one.registers} "
                      f"registers, {one.spills} spills, {one.shared} bytes: {said}")  # fmt: skip
            failed += len(unordered)
            for kernel in unordered:
                print(f"{target.key} {name} {kernel}: sums in another order than the norm")
    print(f"{failed} limits broken")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
