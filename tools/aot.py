"""Compile the kernels for GPUs that are not there, and hold what the compiler made to its limits.

    python -m tools.aot                                  # every case for every target
    python -m tools.aot --target cuda:90 --only sparse   # those cases that have the word
    python -m tools.aot --triton 3.4.0 3.9.0             # with other releases, which pip fetches

The launchers run on meta tensors, so that what is compiled is what a GPU gets: the same tiles,
argument types and constants. Limits: no spills and no stack but for those in `KEEPS`, registers
and shared memory that let as many programs share a multiprocessor as were measured to be fastest,
a barrier before the one-launch kernel's atomic, and sums of a norm in the same order in every
kernel that computes one. Exit code 1 if a kernel breaks one. Triton's cache keeps what was
compiled.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import import_module
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

AMPERE, HOPPER, HIP = Target("cuda", 80), Target("cuda", 90), Target("hip", "gfx942")
#: Largest shared memory of one program, in KiB.
SHARED = {AMPERE: 163, HOPPER: 227, Target("cuda", 100): 227, HIP: 64} | {
    Target("cuda", arch): 99 for arch in (86, 89, 120)
}
#: Registers and KiB on Hopper: three programs of four warps share 65,536 and 228 KiB, or two of
#: eight; each takes 1 KiB more than it asks for.
_THREE, _TWO = (168, 75), (128, 113)
ON_HOPPER = {
    "attention_kernel": _THREE, "one_launch_kernel": _THREE, "sparse_attention_kernel": _THREE,
    "hopper_prologue_kernel": _TWO,
}  # fmt: skip
#: Loads and stores of local memory that a kernel may have in all.
KEEPS = {"hopper_linear_kernel": 10**6, "hopper_kernel": 10**6, "sparse_attention_kernel": 16}
#: Those it may have in a main loop, and how many of its first loops are those.
IN_LOOPS = {"hopper_kernel": (6, 3), "sparse_attention_kernel": (0, 1)}
#: What compilers since 3.8 spill on Hopper; on a card 3.6 was measured, and 3.7 is pinned.
SPILLED_SINCE_3_8 = {
    "attention_kernel": 80, "hopper_prologue_kernel": 17, "int8_linear_kernel": 2,
    "prologue_kernel": 4, "sparse_attention_kernel": 70,
}  # fmt: skip
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
        options: What `run` reads, and fields of `AttentionInputs`; "wide" takes more registers
            than three programs of a Hopper multiprocessor have; "stack" is how many bytes of it
            the kernels may have.
    """

    run: Callable[[Case, Target], object]
    dim: int
    heads: int
    options: dict[str, Any]

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        own: torch.dtype = self.options.get("dtype", torch.bfloat16)
        return torch.empty(*shape, dtype=dtype or own, device="meta")

    def tokens(self, n: int = 32760, dtype: torch.dtype | None = None) -> Tensor:
        """An activation, of a 480p video if it has no other number of tokens."""
        return self.empty(1, n, self.heads * self.dim, dtype=dtype)


@dataclass(frozen=True)
class Result:
    """A compiled kernel."""

    kernel: str
    target: Target
    case: Case
    error: str = ""
    registers: int = 0
    stack: int = 0
    spills: int = 0
    shared: int = 0
    loop_spills: tuple[int, ...] = ()
    barrier: bool = True
    sums: tuple[str, ...] = ()


# --- what is launched ----------------------------------------------------------------------------


_PORTABLE = {
    name: import_module(f"turbo_rcm_patch.kernels.portable.{name}") for name in
    ("attention", "int8_linear", "norm", "one_launch", "prologue", "rows", "skip", "skip_norm",
     "sparse_attention", "streams")
}  # fmt: skip


def _portable(name: str) -> Any:
    return _PORTABLE[name]


def _inputs(case: Case, target: Target) -> AttentionInputs:
    """An attention with norm, rotary embedding and skip, but for the options of the case."""
    q, k, v = case.empty(1, 32760, 3 * case.heads * case.dim).chunk(3, -1)
    table = case.empty(32760, case.dim, dtype=torch.float32)
    fp8 = target.backend == "cuda" and int(target.arch) >= 89
    fields: Any = dict.fromkeys(AttentionInputs._fields) | {
        "q": q, "k": k, "v": v, "residual": case.tokens(), "c_skip_value": 1.0,
        "c_out": case.tokens(1, torch.float32), "c_out_value": 1.0, "cos": table, "sin": table,
        "heads": case.heads, "attention": "int8", "pv": "fp8" if fp8 else "bf16",
        "smooth_k": True, "causal": False, "sm_scale": case.dim**-0.5, "eps": 1e-6,
        "impl": "triton", "out_dtype": q.dtype, "want_lse": False,
    }  # fmt: skip
    norms, layer = ("norm_q", "norm_k", "norm_q_bias", "norm_k_bias"), case.options.get("layer")
    weight = case.empty(case.dim if layer else case.heads * case.dim)
    fields |= dict.fromkeys(norms if layer else norms[:2], weight)
    fields |= {name: value for name, value in case.options.items() if name in fields}
    if case.options.get("lengths"):
        fields["kv_lengths"] = case.empty(1, dtype=torch.int32)
    inputs = AttentionInputs(**fields)
    return inputs.alone() if case.options.get("alone") else inputs


def _attention(case: Case, target: Target) -> None:
    _portable("attention").attention(_inputs(case, target))


def _one_launch(case: Case, target: Target) -> None:
    launcher, channels = _portable("one_launch").attention_project_skip, case.heads * case.dim
    weight, bias = case.empty(channels, channels), case.empty(channels)
    launcher(_inputs(case, target), weight, bias, cast="fp32")


def _sparse(case: Case, target: Target) -> None:
    block_q, block_k = case.options["blocks"]
    _portable("sparse_attention").sparse_linear_attention(
        _inputs(case, target).alone(), case.empty(case.dim, case.dim, dtype=torch.float32),
        case.empty(case.dim), count=3276 // block_k, block_q=block_q, block_k=block_k,
    )  # fmt: skip


def _int8_linear(case: Case, target: Target) -> None:
    """A linear with GELU and without."""
    x, channels = case.tokens(), case.heads * case.dim
    rows, groups = _portable("rows").quantize_rows(x), -(-channels // 128)
    shapes = {"row": (channels,), "group": (channels, groups), "block": (groups, groups)}
    scale = case.empty(*shapes[case.options["scales"]], dtype=torch.float32)
    weight = case.empty(channels, rows.int8.shape[2], dtype=torch.int8)
    given = (rows, weight, scale, case.empty(channels), None, 1.0, 1.0)
    for gelu in (False, True):
        _portable("int8_linear").int8_linear(*given, gelu=gelu, cast="fp32", out_dtype=x.dtype)


def _norms(case: Case, target: Target) -> None:
    """A norm alone and after its skip, as a tensor and as int8 rows; the skip; rotated rows."""
    x, stream = case.tokens(), case.tokens(dtype=case.options["stream"])
    row, norm = case.tokens(1, torch.float32), _portable("norm")
    how: dict[str, Any] = {"one": 1.0, "eps": 1e-6}
    close: dict[str, Any] = {"cast": "fp32", "out_dtype": stream.dtype}
    norm.norm_modulate(stream, row, row, out_dtype=x.dtype, **how)
    norm.norm_modulate_rows(stream, row, row, **how)
    for dtype in (x.dtype, torch.int8):
        launcher = _portable("skip_norm").skip_norm
        launcher(stream, x, row, row, row, normed_dtype=dtype, **how, **close)
    _portable("skip").skip(stream, x, 1.0, row, **close)
    table = case.empty(32760, case.dim, dtype=torch.float32)
    rotary = {"weight": row[0, 0], "bias": None, "cos": table, "sin": table, "eps": 1e-6}
    norm.norm_rotate(x, case.heads, **rotary)


def _streams(case: Case, target: Target) -> None:
    """The norm of two streams, a skip with that norm, and the skip alone."""
    x, stream = case.tokens(), case.tokens(dtype=case.options["stream"])
    parts, modulation = (stream[:, :64], stream[:, 64:]), case.empty(1, 6, 1, x.shape[2])
    gate, factor, offset = (modulation[:, at : at + 2].unbind(1) for at in (0, 2, 4))
    how: dict[str, Any] = {"cast": "fp32", "one": 1.0, "eps": 1e-6}
    how |= {"out_dtype": stream.dtype, "normed_dtype": x.dtype}
    normed = (factor, offset, case.empty(x.shape[2]), case.empty(x.shape[2]))
    launcher = _portable("streams").streams
    launcher(parts, None, None, *normed, **how)
    launcher(parts, x, gate, *normed, **how)
    launcher(parts, x, gate, None, None, None, None, **how)


def _case(run: Any, dim: int = 128, heads: int = 12, **options: Any) -> Case:
    return Case(run, dim, heads, options)


_MORE: dict[str, Any] = {"want_lse": True, "lengths": True}
_STREAMS = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: Cases by name.
CASES = {
    **{f"attention-d{dim}": _case(_attention, dim, wide=dim > 128) for dim in (32, 64, 128, 256)},
    "attention-alone-d64": _case(_attention, 64, alone=True),
    "attention-alone-d128": _case(_attention, alone=True, **_MORE),
    "attention-causal-d96": _case(_attention, 96, causal=True, **_MORE),
    "attention-bf16": _case(_attention, pv="bf16", wide=True, **_MORE),
    "attention-fp32": _case(_attention, dtype=torch.float32, wide=True),
    "attention-bare": _case(_attention, norm_q=None, norm_k=None, cos=None, sin=None),
    **{f"layer-norm-d{dim}": _case(_attention, dim, layer=True) for dim in (64, 96)},
    "layer-norm-d128": _case(_attention, layer=True, stack=8),
    **{f"one-launch-d{dim}": _case(_one_launch, dim, wide=dim > 128) for dim in (64, 128, 256)},
    "one-launch-bf16": _case(_one_launch, pv="bf16", wide=True),
    **{f"sparse-{q}x{k}-d{dim}": _case(_sparse, dim, blocks=(q, k))
       for dim in (64, 128) for q, k in ((128, 64), (64, 128))},
    "sparse-14B": _case(_sparse, heads=40, blocks=(128, 64)),
    **{f"int8-linear-{one}": _case(_int8_linear, scales=one) for one in ("row", "group", "block")},
    "int8-linear-odd": _case(_int8_linear, 77, 1, scales="row"),
    "int8-linear-14B": _case(_int8_linear, heads=40, scales="row"),
    **{f"norms-{heads}x{dim}-{name}": _case(_norms, dim, heads, stream=stream)
       for heads, dim in ((12, 128), (40, 128), (1, 78)) for name, stream in _STREAMS.items()},
    **{f"streams-{heads}x{dim}-{name}": _case(_streams, dim, heads, stream=stream)
       for heads, dim in ((30, 64), (1, 77)) for name, stream in _STREAMS.items()},
}  # fmt: skip

#: A kernel, its arguments, and its options.
_Launch = tuple[Any, dict[str, Any], dict[str, Any]]


def _launched(case: Case, target: Target) -> list[_Launch]:
    """Return the launches of a case on a target, of which none is started."""
    launches: list[_Launch] = []

    def launch(kernel: Any, grid: object, device: object, **arguments: Any) -> None:
        options = {name: arguments.pop(name) for name in _OPTIONS if name in arguments}
        launches.append((kernel, arguments, options))

    if target == HOPPER:
        for name in ("attention", "int8_linear", "linear_branch", "prologue"):
            gluon.hopper_module(name, name)
    stands_in = {"launch": launch, "target_of": lambda device: target}
    with ExitStack() as stack:
        for path, module in list(sys.modules.items()):
            for name, value in stands_in.items():
                if path.startswith("turbo_rcm_patch.kernels.") and hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, value))
        case.run(case, target)
    return launches


# --- compiling -----------------------------------------------------------------------------------


def _compile(launch: _Launch, target: Target) -> Any:
    """Compile a kernel for arguments as Triton specialises them at a launch."""
    kernel, arguments, options = launch
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
        name: specialised(arguments[name], (i,), name) for i, name in enumerate(kernel.arg_names)
    }
    kind = ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as kind
    source = kind(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    warp = 64 if target.backend == "hip" else 32
    options = {"enable_fp_fusion": True} | options
    return triton.compile(source, GPUTarget(target.backend, target.arch, warp), options)


def _result(case: Case, launch: _Launch, target: Target) -> Result:
    bare = Result(launch[0].__name__, target, case)
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
    names, loops = _instructions(sass)
    return replace(
        made, registers=int(usage["REG"]), stack=int(usage["STACK"]), spills=_spills(names),
        loop_spills=tuple(_spills(names[first:last]) for first, last in loops),
        barrier=made.kernel != "one_launch_kernel" or _barrier_before_atomic(names),
    )  # fmt: skip


def _disassembled(cubin: bytes) -> tuple[dict[str, str], str]:
    """What the code needs, and the code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tools = ((_BIN / "cuobjdump", "-res-usage"), (_BIN / "nvdisasm", "-c"))
        run = [subprocess.run([*one, file.name], capture_output=True, check=True) for one in tools]
    usage, sass = (done.stdout.decode() for done in run)
    return dict(re.findall(r"(REG|STACK):(\d+)", usage)), sass


def _instructions(sass: str) -> tuple[list[str], list[tuple[int, int]]]:
    """The instructions, and where the innermost loops that multiply matrices begin and end: a
    label and a jump back to it."""
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
    return names, [
        (first, last) for first, last in loops
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in loops)
    ]  # fmt: skip


def _spills(names: list[str]) -> int:
    """Count loads and stores of local memory."""
    return sum(name.split(".")[0] in ("STL", "LDL") for name in names)


def _barrier_before_atomic(names: list[str]) -> bool:
    """A barrier of the program stands between the last global store and the one atomic."""
    (atomic,) = (i for i, name in enumerate(names) if name.startswith("ATOM"))
    store = max(i for i in range(atomic) if names[i].split(".")[0] == "STG")
    return any(name.startswith("BAR.SYNC") for name in names[store:atomic])


def compiled(name: str, target: Target, only: Sequence[str] = ()) -> list[Result]:
    """Compile what a case launches on a target: all of it, or the kernels of these names."""
    case = CASES[name]
    launches = [one for one in _launched(case, target) if not only or one[0].__name__ in only]
    return [_result(case, one, target) for one in launches]


# --- limits --------------------------------------------------------------------------------------


def faults(result: Result) -> list[str]:
    """The limits that a compiled kernel breaks, in words."""
    if result.error:
        return [result.error]
    name, hopper, options = result.kernel, result.target == HOPPER, result.case.options
    release = tuple(map(int, triton.__version__.split(".")[:2]))
    newer = SPILLED_SINCE_3_8.get(name, 0) if hopper and release >= (3, 8) else 0
    stack = options.get("stack", 0)
    keeps = max(KEEPS.get(name, 0), newer, stack // 4)
    in_loop, loops = IN_LOOPS.get(name, (0, 3))
    registers, shared = 512, SHARED[result.target]
    if hopper and name in ON_HOPPER and not options.get("wide"):
        registers, shared = ON_HOPPER[name]
        if name == "one_launch_kernel" and release >= (3, 9):
            registers = 192  # its assembler wants a few more: two programs then
    spilled = max(result.loop_spills[:loops], default=0)
    found = {
        f"{result.spills} loads and stores of local memory": result.spills > keeps,
        f"{spilled} of them in a main loop": spilled > max(in_loop, newer),
        f"{result.stack} bytes of stack": result.stack > stack and not keeps,
        f"{result.registers} registers": result.registers > registers,
        f"{result.shared} bytes of shared memory": result.shared > 1024 * shared,
        "no barrier before the atomic": not result.barrier,
    }
    return [words for words, broken in found.items() if broken]


def order_faults(results: Sequence[Result]) -> list[str]:
    """The kernels that sum a row in another order than the norm's own kernel of the same case."""
    kernels = ("norm_modulate", "skip_norm", "streams")
    found = [one for one in results if one.kernel.startswith(kernels) and one.sums]
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
        command = [sys.executable, "-m", "tools.aot", *argv]
        return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}).returncode


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
    given = parser.parse_args(argv)
    cases = [name for name in CASES if any(word in name for word in given.only)]
    if not cases:
        parser.error(f"--only: no case has such a word; there are {', '.join(CASES)}")
    if given.triton:
        rest = ["--target", *given.target, *(["--only", *given.only] if given.only[0] else [])]
        return max(_with_release(release, rest) for release in given.triton)
    failed = 0
    for name in cases:
        for target in (names[one] for one in given.target):
            results = compiled(name, target)
            unordered = order_faults(results)
            for one in results:
                broken = faults(one)
                if one.kernel in unordered:
                    broken.append("sums in another order than the norm")
                failed += len(broken)
                print(f"{triton.__version__} {target.key} {name} {one.kernel}: {one.registers} "
                      f"registers, {one.spills} spills, {one.shared} bytes: "
                      + ("; ".join(broken) or "ok"))  # fmt: skip
    print(f"{failed} limits broken")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
