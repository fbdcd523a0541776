"""Compiling what the launchers start, for a GPU that is not there: cases, processes, limits.

One process records launches and one compiles them. Both run without Triton's interpreter and live
as long as the session. Every result is kept, so that tests share what they compile, and so do
sessions as long as the kernels are the same; `rm -r build/aot` forgets it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "build" / "aot"

#: A case, or what is known of a compiled kernel, as JSON.
Result = dict[str, Any]
#: (backend, architecture).
Target = tuple[str, int | str]
#: Largest shared memory of one program, in bytes.
SHARED: dict[Target, int] = {
    ("cuda", 80): 163 * 1024,
    ("cuda", 86): 99 * 1024,
    ("cuda", 89): 99 * 1024,
    ("cuda", 90): 227 * 1024,
    ("cuda", 100): 227 * 1024,
    ("cuda", 120): 99 * 1024,
    ("hip", "gfx942"): 64 * 1024,
}
TARGETS = list(SHARED)
AMPERE, ADA, HOPPER, HIP = ("cuda", 80), ("cuda", 89), ("cuda", 90), ("hip", "gfx942")
#: One of each kind: portable code for NVIDIA's GPUs, descriptors and Hopper's own kernels, AMD's.
KINDS: list[Target] = [AMPERE, HOPPER, HIP]


def default_pv(target: Target) -> str:
    backend, arch = target
    return "fp8" if backend == "cuda" and isinstance(arch, int) and arch >= 89 else "bf16"


def case(
    operation: str, target: Target, dim: int, pv: str | None = None, **more: object
) -> dict[str, object]:
    """A call of an operation on a target; `pv` is the target's default. `only`: the names of the
    kernels that count, all if it is not given."""
    pv = pv or default_pv(target)
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


class Process:
    """A script that answers every line of JSON with one. It starts with the first question, and
    anew after one that was broken off."""

    def __init__(
        self,
        python: str,
        path: Sequence[Path],
        script: str,
        *arguments: Path,
        cache: Path | None = None,
    ) -> None:
        self._command = [python, str(HERE / script), *map(str, arguments)]
        self._env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        self._env["PYTHONPATH"] = os.pathsep.join(map(str, path))
        if cache is not None:
            self._env["TRITON_CACHE_DIR"] = str(cache)
        self._process: subprocess.Popen[str] | None = None

    def ask(self, question: object) -> list[Result]:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, env=self._env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True,
            )  # fmt: skip
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None and answers is not None
        try:
            print(json.dumps(question), file=asked, flush=True)
            answer = answers.readline()
            assert answer, f"{self._command} ended"
        except BaseException:  # a late answer would be taken for the next question's
            self.close()
            raise
        found: list[Result] = json.loads(answer)
        return found

    def close(self) -> None:
        """End it, whatever it is doing."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process = None


class Compiler:
    """Records launches here and compiles them with the Triton of some Python.

    Args:
        python: The Python that compiles.
        cache: Triton's, of one session.
        path: What that Python imports from, this repository included.
        results: Where results are kept; processes may share it.
    """

    def __init__(
        self, python: str, cache: Path, path: Sequence[Path] = (ROOT,), results: Path = RESULTS
    ) -> None:
        self._records = Process(sys.executable, [ROOT], "aot_record.py")
        kernels = ROOT / "turbo_rcm_patch" / "kernels"
        self._compiles = Process(python, path, "aot_compile.py", kernels, results, cache=cache)

    def __call__(self, cases: list[Result]) -> list[Result]:
        """A result for each kernel that these cases launch."""
        return self._compiles.ask(self._records.ask(cases))

    def close(self) -> None:
        self._records.close()
        self._compiles.close()


def line(result: Result) -> str:
    return " ".join(f"{key}={value}" for key, value in result.items())


#: Registers that newer compilers spill for Hopper in kernels which those that were measured on a
#: card (3.6) and are pinned (3.7) compile without.
SPILLED_SINCE_3_8 = {
    "attention_kernel": 80,
    "hopper_prologue_kernel": 17,
    "int8_linear_kernel": 2,
    "prologue_kernel": 4,
    "sparse_attention_kernel": 70,
}


def _may_spill(result: Result) -> int:
    release = tuple(map(int, result["triton"].split(".")[:2]))
    newer = release >= (3, 8) and result["target"] == "cuda:90"
    return SPILLED_SINCE_3_8.get(result["kernel"], 0) if newer else 0


def faults(results: Iterable[Result], target: Target) -> str:
    """The compiled kernels that break a limit, one a line."""
    return "\n".join(
        line(result)
        for result in results
        if "error" in result
        or result["spills"] > _may_spill(result)
        or (result["stack"] and not _may_spill(result))
        or result["shared"] > SHARED[target]
        or not result.get("barrier", True)
    )
