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
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor

from turbo_rcm_patch.ops import gluon, numerics
from turbo_rcm_patch.ops.ahead import stand_in_driver
from turbo_rcm_patch.ops.attention import api as attention
from turbo_rcm_patch.ops.attention.spec import AttentionSpec
from turbo_rcm_patch.ops.conv3d import api as conv3d
from turbo_rcm_patch.ops.conv3d import triton as passes
from turbo_rcm_patch.ops.conv3d.formats import Call, Duplicate, GroupNorm, RMSNorm
from turbo_rcm_patch.ops.dispatch import meta_stands_for
from turbo_rcm_patch.ops.formats import NO_NORMS, AttentionInputs, LinearInputs, Norms, Skip
from turbo_rcm_patch.ops.int8_linear import api as int8_linear
from turbo_rcm_patch.ops.int8_linear.samples import Samples
from turbo_rcm_patch.ops.launch import Target
from turbo_rcm_patch.ops.residual import triton as residual
from turbo_rcm_patch.ops.sparse_linear import api as sparse_linear

AMPERE, HOPPER, HIP = Target("cuda", 80), Target("cuda", 90), Target("hip", "gfx942")
#: Largest shared memory of one program, in KiB.
SHARED = {AMPERE: 163, HOPPER: 227, Target("cuda", 100): 227, HIP: 64} | {
    Target("cuda", arch): 99 for arch in (86, 89, 120)
}
#: Registers and KiB on Hopper: three programs of four warps share 65,536 and 228 KiB, or two of
#: eight; each takes 1 KiB more than it asks for.
ON_HOPPER = dict.fromkeys(
    ("attention_kernel", "one_launch_kernel", "sparse_attention_kernel"), (168, 75)
) | {"hopper_prologue_kernel": (128, 113)}
#: Loads and stores of local memory that a kernel may have in all.
KEEPS = {
    "hopper_linear_kernel": 10**6, "hopper_kernel": 10**6, "sparse_attention_kernel": 16,
    "prologue_kernel": 4,  # with rows of fp32 on sm_120, before its loop
}  # fmt: skip
#: Those it may have in a main loop, and how many of its first loops are those.
IN_LOOPS = {"hopper_kernel": (6, 3), "sparse_attention_kernel": (0, 1)}
#: What compilers since 3.8 spill on Hopper; on a card 3.6 was measured, and 3.7 is pinned.
SPILLED_SINCE_3_8 = {
    "attention_kernel": 80, "hopper_kernel": 26, "hopper_prologue_kernel": 17,
    "int8_linear_kernel": 2, "prologue_kernel": 4, "sparse_attention_kernel": 70,
}  # fmt: skip
_TABLES = (attention.KERNELS, attention.PROLOGUE_KERNELS, int8_linear.KERNELS,
           sparse_linear.KERNELS, conv3d.KERNELS)  # fmt: skip
_LOADED_LATE = ("attention.one_launch_triton", "int8_linear.samples_triton")
_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Case:
    """A call of a launcher.

    Args:
        run: Calls it.
        dim: Channels of a head.
        heads: Number of heads.
        **options: What `run` reads; "wide" takes more registers
            than three programs of a Hopper multiprocessor have.
    """

    def __init__(self, run: Any, dim: int = 128, heads: int = 12, **options: Any) -> None:
        self.run, self.dim, self.heads, self.options = run, dim, heads, options

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
    rows: bool = False


# --- what is launched ----------------------------------------------------------------------------


def _inputs(case: Case, target: Target) -> AttentionInputs:
    """An attention with norm, rotary embedding and skip, but for the options of the case."""
    options = case.options
    q, k, v = case.empty(1, 32760, 3 * case.heads * case.dim).chunk(3, -1)
    table = case.empty(32760, case.dim, dtype=torch.float32)
    fp8 = target.backend == "cuda" and int(target.arch) >= 89
    spec = AttentionSpec(
        heads=case.heads, pv=options.get("pv", "fp8" if fp8 else "bf16"), impl="triton",
        causal=options.get("causal", False),
    )  # fmt: skip
    weight = case.empty(case.dim if options.get("layer") else case.heads * case.dim)
    norms = Norms(weight, weight, *((weight, weight) if options.get("layer") else ()))
    bare, alone = options.get("bare"), options.get("alone")
    return AttentionInputs(
        q, k, v, spec, q.dtype, norms=NO_NORMS if bare else norms,
        rotary=None if bare else (table, table),
        skip=None if alone else Skip(case.tokens(), 1.0, case.tokens(1, torch.float32)),
        kv_lengths=case.empty(1, dtype=torch.int32) if options.get("lengths") else None,
        want_lse=options.get("want_lse", False),
    )  # fmt: skip


def _attention(case: Case, target: Target) -> None:
    a, ranks = _inputs(case, target), case.options.get("ranks", 1)
    to = case.empty(1, 32760 // ranks, ranks * a.q.shape[2])
    attention.launch_attention(a, to=(to,) * ranks if ranks > 1 else ())


def _one_launch(case: Case, target: Target) -> None:
    wide = case.heads * case.dim
    weight, bias = case.empty(wide, wide), case.empty(wide)
    attention.launch_projected(_inputs(case, target), weight, bias)


def _sparse(case: Case, target: Target) -> None:
    block_q, block_k = case.options["blocks"]
    weight, bias = case.empty(case.dim, case.dim, dtype=torch.float32), case.empty(case.dim)
    sparse_linear.launch_sparse(
        _inputs(case, target)._replace(skip=None), sparse_linear.ProjL(weight, bias),
        sparse_linear.Sparsity(topk=0.1, block_q=block_q, block_k=block_k),
    )  # fmt: skip


def _int8_linear(case: Case, target: Target) -> None:
    """A linear with GELU and without."""
    x, channels = case.tokens(), case.heads * case.dim
    rows, groups = numerics.quantize_rows(x), -(-channels // 128)
    shapes = {"row": (channels,), "block": (groups, groups)}
    scale = case.empty(*shapes[case.options["scales"]], dtype=torch.float32)
    weight = case.empty(channels, rows.data.shape[2], dtype=torch.int8)
    for activation in ("", "gelu-tanh"):
        linear = LinearInputs(weight, scale, case.empty(channels), activation)
        int8_linear.launch_linear(rows, linear, out_dtype=x.dtype)


def _samples(case: Case, target: Target) -> None:
    """Elements of the weights of which int8 copies are kept."""
    weights = [case.empty(1536, 1536)] * 300
    Samples(weights, "triton").read(weights)


def _norms(case: Case, target: Target) -> None:
    """A norm alone and after its skip, as a tensor and as int8 rows; the skip; rotated rows."""
    x, stream = case.tokens(), case.tokens(dtype=case.options["stream"])
    row = case.tokens(1, torch.float32)
    for branch in (None, x):
        gate = None if branch is None else row
        for dtype in (x.dtype, torch.int8):
            residual.skip_norm(
                stream, branch, gate=gate, factor=row, offset=row, weight=None, bias=None, one=1.0,
                eps=1e-6, dtype=stream.dtype, norm_dtype=dtype,
            )  # fmt: skip
    residual.skip(stream, x, 1.0, row, out_dtype=stream.dtype)
    table = case.empty(32760, case.dim, dtype=torch.float32)
    rotary = {"weight": row[0, 0], "bias": None, "cos": table, "sin": table, "eps": 1e-6}
    residual.norm_rotate(x, case.heads, **rotary)
    residual.norm_rotate(x, case.heads, **rotary, to=tuple(x.chunk(4, 2)))


def _streams(case: Case, target: Target) -> None:
    """The norm of two streams, a skip with that norm, and the skip alone."""
    x, stream = case.tokens(), case.tokens(dtype=case.options["stream"])
    parts, modulation = (stream[:, :64], stream[:, 64:]), case.empty(1, 6, 1, x.shape[2])
    gate, factor, offset = (modulation[:, at : at + 2].unbind(1) for at in (0, 2, 4))
    weight = case.empty(x.shape[2])
    normed = {"factor": factor, "offset": offset, "weight": weight, "bias": weight}
    normed |= {"norm_dtype": x.dtype}
    for branch, options in ((None, normed), (x, normed), (x, dict.fromkeys(normed))):
        residual.skip_norm(
            parts, branch, gate=None if branch is None else gate, one=1.0, eps=1e-6,
            dtype=stream.dtype, **options,
        )  # fmt: skip


def _conv3d(case: Case, target: Target) -> None:
    """A convolution with bias and residual, and alone; only sm_90 has a kernel."""
    channels, features, taps, size = case.options["shape"]
    x, weight = case.empty(1, 3 + taps[0], *size, channels), case.empty(features, *taps, channels)
    residual = case.empty(1, 4, *size, features)
    kernel = conv3d.KERNELS[0].load()
    call = Call(x, weight, (1, 1, 1), (1, 1))
    for more in (None, None), (case.empty(features), residual):
        kernel(call, *more, out_dtype=x.dtype)


def _passes(case: Case, target: Target) -> None:
    """The passes between convolutions, over a frame of 60 x 104 pixels."""
    x = case.empty(1, 3, 60, 104, case.dim)
    weight, latent = case.empty(case.dim), case.empty(1, 2, 30, 52, case.dim)
    group = GroupNorm(weight, weight, case.dim // 4, 1e-6)
    for norm in (None, RMSNorm(weight), group, group._replace(scale=latent, shift=latent)):
        for before in (None, weight):
            passes.norm_silu(x, norm, norm is not None, before, 2, x[:, :2], x.dtype)
    y = case.empty(1, 3, 61, 105, 4 * case.dim)
    for duplicate in (None, Duplicate(x, 1, 4), Duplicate(x, 2, 4)):
        passes.upsample(y, weight, duplicate, 1, duplicate is not None, x.dtype)
    for bias, skip in ((weight, None), (weight, x), (None, x)):
        passes.norm_silu(x, None, False, bias, 0, None, x.dtype, skip)


_MORE: dict[str, Any] = {"want_lse": True, "lengths": True}
_STREAMS = {"fp32": torch.float32, "bf16": torch.bfloat16}
_CUBE, _FULL = (3, 3, 3), (480, 832)
#: Convolutions of Wan's VAE, and one of fp32 in TF32.
_CONVS: dict[str, Any] = {
    "96x96": (96, 96, _CUBE, _FULL), "96x3": (96, 3, _CUBE, _FULL),
    "192x96-flat": (192, 96, (1, 3, 3), _FULL), "384x384": (384, 384, _CUBE, (60, 104)),
    "384x768-time": (384, 768, (3, 1, 1), (120, 208)),
}  # fmt: skip
#: Cases by name.
CASES = {
    **{f"attention-d{dim}": Case(_attention, dim, wide=dim > 128) for dim in (32, 64, 128, 256)},
    "attention-alone-d64": Case(_attention, 64, alone=True),
    "attention-alone-d128": Case(_attention, alone=True, **_MORE),
    **{f"attention-alone-bf16-d{dim}": Case(_attention, dim, alone=True, pv="bf16")
       for dim in (64, 128)},
    "attention-ranks-d128": Case(_attention, alone=True, ranks=4),
    "attention-causal-d96": Case(_attention, 96, causal=True, **_MORE),
    "attention-bf16": Case(_attention, pv="bf16", wide=True, **_MORE),
    "attention-fp32": Case(_attention, dtype=torch.float32, wide=True),
    "attention-bare": Case(_attention, bare=True),
    **{f"layer-norm-d{dim}": Case(_attention, dim, layer=True) for dim in (64, 96)},
    **{f"one-launch-d{dim}": Case(_one_launch, dim, wide=dim > 128) for dim in (64, 128, 256)},
    "one-launch-bf16": Case(_one_launch, pv="bf16", wide=True),
    **{f"sparse-{q}x{k}-d{dim}": Case(_sparse, dim, blocks=(q, k))
       for dim in (64, 128) for q, k in ((128, 64), (64, 128))},
    "sparse-14B": Case(_sparse, heads=40, blocks=(128, 64)),
    **{f"int8-linear-{one}": Case(_int8_linear, scales=one) for one in ("row", "block")},
    "int8-copies": Case(_samples),
    "int8-linear-odd": Case(_int8_linear, 77, 1, scales="row"),
    "int8-linear-14B": Case(_int8_linear, heads=40, scales="row"),
    **{f"norms-{heads}x{dim}-{name}": Case(_norms, dim, heads, stream=stream)
       for heads, dim in ((12, 128), (40, 128), (1, 78)) for name, stream in _STREAMS.items()},
    **{f"streams-{heads}x{dim}-{name}": Case(_streams, dim, heads, stream=stream)
       for heads, dim in ((30, 64), (1, 77)) for name, stream in _STREAMS.items()},
    **{f"conv3d-{name}": Case(_conv3d, shape=shape) for name, shape in _CONVS.items()},
    "conv3d-fp32": Case(_conv3d, shape=_CONVS["96x96"], dtype=torch.float32),
    **{f"vae-{dim}": Case(_passes, dim) for dim in (96, 512)},
}  # fmt: skip


# --- compiling -----------------------------------------------------------------------------------


def compiled(name: str, target: Target) -> list[Result]:
    """Compile what a case launches on a target."""
    case, results = CASES[name], []

    def launch(kernel: Any, grid: object, device: object, **arguments: Any) -> None:
        rows = getattr(arguments.get("norm"), "scale_ptr", None) is not None
        made = Result(kernel.__name__, target, case, rows=rows)
        results.append(
            _measured(made, lambda: kernel.warmup(grid=grid, enable_fp_fusion=True, **arguments))
        )

    if case.run is _conv3d and target != HOPPER:
        return []
    with stand_in(target, launch=launch):
        case.run(case, target)
    return results


@contextmanager
def stand_in(target: Target, launch: Callable[..., object] | None = None) -> Iterator[None]:
    """Let the meta device stand for a target, with another `launch` in all operators if given."""
    for row in itertools.chain(*_TABLES):  # These modules load when they are first needed.
        gluon.hopper_function(row.load, row.what)
    for name in _LOADED_LATE:
        import_module(f"turbo_rcm_patch.ops.{name}")
    with ExitStack() as stack:
        for place, module in list(sys.modules.items()):
            if launch and place.startswith("turbo_rcm_patch.ops.") and hasattr(module, "launch"):
                stack.enter_context(mock.patch.object(module, "launch", launch))
        stack.enter_context(stand_in_driver(target))
        stack.enter_context(meta_stands_for(target))
        yield


def _measured(bare: Result, compile_it: Callable[[], Any]) -> Result:
    """Compile a kernel, and look at its code."""
    target = bare.target
    try:
        compiled = compile_it()
    except Exception as error:  # reported per kernel, so that one failure shows them all
        return replace(bare, error=f"{type(error).__name__}: {error}"[:2000])
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", compiled.asm["ttgir"], re.MULTILINE))
    reduced = r"\}\) : \(tensor<\d+xf32, (#\w+)>\) -> f32"
    made = replace(
        bare, shared=compiled.metadata.shared,
        sums=tuple(layouts[name] for name in re.findall(reduced, compiled.asm["ttgir"])),
    )  # fmt: skip
    if target.backend == "hip":
        said = ("vgpr_count", "private_segment_fixed_size", "vgpr_spill_count")
        found = [re.search(rf"\.{name}:\s*(\d+)", compiled.asm["amdgcn"]) for name in said]
        registers, stack, spills = (int(one[1]) if one else -1 for one in found)
        return replace(made, registers=registers, stack=stack, spills=spills)
    one_launch = made.kernel == "one_launch_kernel"
    usage, sass = _resources(compiled.asm["cubin"], always=one_launch)
    names, loops = _instructions(sass)
    return replace(
        made, registers=usage["REG"], stack=usage["STACK"], spills=_spills(names),
        loop_spills=tuple(_spills(names[first:last]) for first, last in loops),
        barrier=not one_launch or _barrier_before_atomic(names),
    )  # fmt: skip


def _resources(cubin: bytes, always: bool) -> tuple[dict[str, int], str]:
    """Return the resources that the code needs, and the code, if it has local memory or `always`:
    without any it cannot load or store there, and the disassembler takes as long as the rest."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def run(tool: str, option: str) -> str:
            command = [_BIN / tool, option, file.name]
            return subprocess.run(command, capture_output=True, check=True).stdout.decode()

        found = re.findall(r"(REG|STACK|LOCAL):(\d+)", run("cuobjdump", "-res-usage"))
        usage = {name: int(number) for name, number in found}
        sass = run("nvdisasm", "-c") if always or usage["STACK"] or usage["LOCAL"] else ""
    return usage, sass


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
    found = re.findall(r"STG|BAR\.SYNC|ATOM", " ".join(names))
    return found.count("ATOM") == 1 and found[found.index("ATOM") - 1] == "BAR.SYNC"


# --- limits --------------------------------------------------------------------------------------


def faults(result: Result) -> list[str]:
    """The limits that a compiled kernel breaks, in words."""
    if result.error:
        return [result.error]
    name, hopper, options = result.kernel, result.target == HOPPER, result.case.options
    release = tuple(map(int, triton.__version__.split(".")[:2]))
    newer = SPILLED_SINCE_3_8.get(name, 0) if hopper and release >= (3, 8) else 0
    keeps = max(KEEPS.get(name, 0), newer)
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
        f"{result.stack} bytes of stack": result.stack > 0 and not keeps,
        f"{result.registers} registers": result.registers > registers,
        f"{result.shared} bytes of shared memory": result.shared > 1024 * shared,
        "no barrier before the atomic": not result.barrier,
    }
    return [words for words, broken in found.items() if broken]


def order_faults(results: Sequence[Result]) -> list[str]:
    """The kernels that sum a row in another order than the norm's own kernel of the same case."""
    found = [one for one in results if one.kernel == "residual_kernel" and one.sums]
    first = {one.rows: one.sums for one in reversed(found)}
    return [one.kernel for one in found if one.sums != first[one.rows]]


# --- the command ---------------------------------------------------------------------------------


def _with_release(release: str, argv: Sequence[str]) -> int:
    """Run this command with another release of Triton, which is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", folder]
        if subprocess.run([*pip, f"triton=={release}"]).returncode:
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
