"""Compile recorded launches ahead of time and report what they need, as JSON.

`python aot_compile.py KERNELS_FOLDER RESULTS_FOLDER` reads lists of launches, one a line, from its
input, and answers each with a line: the results. They are kept in RESULTS_FOLDER, which processes
and sessions may share, so that nobody compiles the same launch of the same kernels twice.

Needs triton alone (a torch that is not there is replaced by a stub, which the jit functions never
touch), so that another release of Triton can be tried from an environment of its own.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter
from operator import attrgetter
from pathlib import Path
from unittest import mock

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

#: Kernels whose instructions are looked at.
READ = re.compile(r"linear|^hopper_kernel$|attention|fingerprint|one_launch")
BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def import_kernels(folder: Path) -> None:
    """Make `turbo_rcm_patch.kernels` importable without the rest of the package."""
    try:
        import torch  # noqa: F401
    except ImportError:
        stub = mock.MagicMock(Tensor=object)
        stub.utils._python_dispatch.TorchDispatchMode = object
        names = ("nn", "nn.functional", "utils", "utils._python_dispatch")
        sys.modules["torch"] = stub
        for name in names:
            sys.modules[f"torch.{name}"] = attrgetter(name)(stub)
    package = types.ModuleType("turbo_rcm_patch")
    package.__path__ = [str(folder.parent)]
    sys.modules["turbo_rcm_patch"] = package


def compile_one(launch: dict) -> dict:
    module = importlib.import_module(f"turbo_rcm_patch.kernels.{launch['module']}")
    fn = getattr(module, launch["kernel"])
    signature, constants, attributes = {}, {}, {}

    def specialised(argument: dict, path: tuple[int, ...], name: str) -> object:
        """Its type; a tuple of types where it is a tuple."""
        if "parts" in argument:
            parts = enumerate(argument["parts"])
            return tuple([specialised(part, (*path, i), name) for i, part in parts])
        if "constant" in argument:
            value = argument["constant"]
            if name == "ROUND_TO" and value is not None:
                value = {"bf16": tl.bfloat16, "fp16": tl.float16}[value]
            constants[path] = value
            return "constexpr"
        if argument.get("divisible"):
            attributes[path] = [["tt.divisibility", 16]]
        return argument["type"]

    for i, name in enumerate(fn.arg_names):
        signature[name] = specialised(launch["arguments"][name], (i,), name)
    backend, arch = launch["backend"], launch["arch"]
    target = GPUTarget(backend, arch, 64 if backend == "hip" else 32)
    kind = GluonASTSource if launch["gluon"] else ASTSource
    source = kind(fn=fn, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=target, options=launch["options"])
    result = {
        "kernel": launch["kernel"],
        "target": f"{backend}:{arch}",
        "triton": triton.__version__,
        "warps": launch["options"]["num_warps"],
        "tile": [
            launch["arguments"].get(name, {}).get("constant") for name in ("BLOCK_M", "BLOCK_N")
        ],
        "shared": compiled.metadata.shared,
    }
    if launch["kernel"].startswith(("norm_modulate", "skip_norm", "streams")):
        result["sums"] = sums(compiled.asm["ttgir"])
    if backend == "cuda":
        result |= cuda_resources(compiled.asm["cubin"], launch["kernel"])
    else:
        result |= hip_resources(compiled.asm["amdgcn"])
    return result


def cuda_resources(cubin: bytes, kernel: str) -> dict:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def said(tool: str, option: str) -> str:
            command = [BIN / tool, option, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        usage = said("cuobjdump", "-res-usage")
        stack = re.search(r"STACK:(\d+)", usage)
        registers = re.search(r"REG:(\d+)", usage)
        assert stack and registers, usage
        result = {"registers": int(registers[1]), "stack": int(stack[1]), "spills": 0}
        # What spills does so to its stack.
        if not result["stack"] and not READ.search(kernel):
            return result
        sass = said("nvdisasm", "-c")
    result["spills"] = len(re.findall(r"\b(?:STL|LDL)\b", sass))
    result["loop"] = main_loop(sass)
    if "int8_linear" in kernel or "hopper_linear" in kernel:
        result["igmma"] = len(re.findall(r"\bIGMMA\b", sass))
    if kernel in ("hopper_kernel", "sparse_attention_kernel") or "hopper_linear" in kernel:
        result["loop_spills"] = spills_in_loops(sass)
    if kernel in ("hopper_kernel", "attention_kernel"):
        result["sums_at_end"] = sums_at_end(sass)
    if kernel == "fingerprint_kernel":
        result["wide_loads"] = len(re.findall(r"\bLDG\.E\.128", sass))
    if kernel == "one_launch_kernel":
        result["barrier"] = barrier_before_atomic(sass)
    return result


def sums(code: str) -> list[str]:
    """How the values of each sum over a row lie in threads, which is the order of the sum."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
    reduced = r"\}\) : \(tensor<\d+xf32, (#\w+)>\) -> f32"
    return [layouts[name] for name in re.findall(reduced, code)]


def innermost_loops(code: str, matrix: str) -> list[list[str]]:
    """The instructions of each innermost loop with one that matches `matrix`, of NVIDIA's or AMD's
    disassembly; one loop is one label and the jump back to it."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    loops: list[tuple[int, int]] = []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.match(
            r"\s*(?:/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z]\S*)|([a-z]+_\w+)\s)", line
        ):
            name = (found[1] or found[2]).rstrip(";")
            instructions.append(name)
            jump = re.search(r"(\.L\w+)\)?[;\s]*$", line.split("//")[0].split("/* 0x")[0])
            if name.startswith(("BRA", "s_cbranch", "s_branch")) and jump and jump[1] in labels:
                loops.append((labels[jump[1]], len(instructions)))
    loops = [
        loop for loop in loops if any(re.search(matrix, one) for one in instructions[slice(*loop)])
    ]
    return [
        instructions[first:last]
        for first, last in loops
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in loops)
    ]


def spills_in_loops(sass: str) -> list[int]:
    """Spills inside each innermost loop that multiplies matrices."""
    return [
        sum(one.split(".")[0] in ("STL", "LDL") for one in loop)
        for loop in innermost_loops(sass, "GMMA")
    ]


def sums_at_end(sass: str) -> int:
    """Sums without a product behind the last instruction that multiplies matrices."""
    names = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z]\S*)", sass, re.MULTILINE)
    last = max((i for i, name in enumerate(names) if "MMA" in name), default=0)
    return sum(name.startswith("FADD") for name in names[last:])


def main_loop(code: str) -> dict[str, int]:
    """How often each instruction is in the first innermost loop that multiplies matrices; nothing
    where there is none."""
    loops = innermost_loops(code, r"MMA|v_mfma")
    return dict(Counter(loops[0]).most_common()) if loops else {}


def barrier_before_atomic(sass: str) -> bool:
    """Between the last global store before the atomic and the atomic stands a program barrier."""
    lines = sass.splitlines()
    atomics = [i for i, line in enumerate(lines) if re.search(r"\bATOMG?\b|\bATOMG\.", line)]
    assert len(atomics) == 1, f"{len(atomics)} atomics"
    stores = [i for i in range(atomics[0]) if re.search(r"\bSTG\b|\bSTG\.", lines[i])]
    assert stores, "no global store before the atomic"
    between = lines[stores[-1] : atomics[0]]
    return any(re.search(r"\bBAR\.SYNC", line) for line in between)


def hip_resources(assembly: str) -> dict:
    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", assembly)
        assert found, name
        return int(found[1])

    return {
        "registers": number("vgpr_count"),
        "stack": number("private_segment_fixed_size"),
        "spills": number("vgpr_spill_count"),
        "loop": main_loop(assembly),
    }


def folder_of(kernels: Path, kept: Path) -> Path:
    """Where results of these kernels are kept, as they are now; removes what no session has
    looked at for a week."""
    code = [Path(__file__), *sorted(kernels.rglob("*.py"))]
    text = b"".join(f"{path.name} ".encode() + path.read_bytes() for path in code)
    folder = kept / hashlib.sha256(text).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    folder.touch()
    for other in kept.iterdir():
        if time.time() - other.stat().st_mtime > 7 * 86400:
            shutil.rmtree(other, ignore_errors=True)
    return folder


def result_of(launch: dict, kept: Path) -> dict:
    """The result of one launch, from the folder if somebody has compiled it."""
    launch = dict(launch)
    case = launch.pop("case")
    compiler = f"{triton.__version__} {(BIN / 'ptxas').stat().st_size}"
    text = f"{compiler} {json.dumps(launch, sort_keys=True)}"
    path = kept / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8")) | {"case": case}
    try:
        result = compile_one(launch)
    except Exception as error:  # reported per kernel, so that one failure shows them all
        return {
            "kernel": launch["kernel"],
            "target": f"{launch['backend']}:{launch['arch']}",
            "error": f"{type(error).__name__}: {error}"[:2000],
            "case": case,
        }
    with tempfile.NamedTemporaryFile("w", dir=kept, delete=False, encoding="utf-8") as file:
        json.dump(result, file)
    Path(file.name).replace(path)  # whole or not there, for whoever looks meanwhile
    return result | {"case": case}


def main() -> None:
    kernels, kept = map(Path, sys.argv[1:])
    import_kernels(kernels)
    kept = folder_of(kernels, kept)
    for asked in sys.stdin:
        results = [result_of(launch, kept) for launch in json.loads(asked)]
        print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
