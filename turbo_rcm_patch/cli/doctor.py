"""Check the installation and the machine: versions, GPU, and one attention through the kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import chain
from typing import Final, Literal

import torch
import torch.nn.functional as F

from turbo_rcm_patch.errors import SamplingError
from turbo_rcm_patch.extras import EXTRAS, missing, version_of
from turbo_rcm_patch.ops import AttentionSpec, attention_skip
from turbo_rcm_patch.ops.attention import sage
from turbo_rcm_patch.video.environment import KernelCheck, numbers, python_command

_MARKS: Final = {"ok": "ok", "note": "--", "missing": "!!"}
#: Package -> the least version that works, and the first that was not tested, as in pyproject.toml
#: (tests/test_packaging.py compares them).
RANGES: Final = {
    "torch": ("2.8", ""),
    "triton": ("3.4", ""),
    "safetensors": ("0.8", ""),
    "diffusers": ("0.42", "0.43"),
    "transformers": ("5.0", ""),
    "accelerate": ("1.2", ""),
    "peft": ("0.18", ""),
    "imageio-ffmpeg": ("0.8.1", ""),
}
#: Extra -> what it is for.
_PURPOSES: Final = {
    "diffusers": "diffusers' models",
    "video": "generate",
    "report": "compare, judge and demo",
    "lora": "LoRAs",
}
_TIMEOUT_SECONDS: Final = 240
_REMEDY: Final = (
    "On a GPU, Triton needs a C compiler and Python.h: apt-get install gcc python3-dev. On a CPU, "
    "the interpreter of Triton before 3.6 needs pip install 'numpy<2.4'"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the examination.

    Attributes:
        topic: The subject.
        state: "ok", "note" (works without), or "missing" (something needed does not work).
        text: The result.
        remedy: How to fix it, empty if there is nothing to do.
    """

    topic: str
    state: Literal["ok", "note", "missing"]
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{_MARKS[self.state]}  {self.topic:<14}  {self.text}"
        return f"{line}\n{'':<20}-> {self.remedy}" if self.remedy else line


def examine(report: Callable[[str], object] = lambda _: None) -> list[Finding]:
    """Check versions, GPU and kernels. Changes nothing.

    Args:
        report: Called with each line of the report as soon as it is known.
    """
    findings = []
    for finding in chain(_packages(), _gpus(), _kernels()):
        report(str(finding))
        findings.append(finding)
    bad = "something is missing: see the lines with !!"
    works = f"everything works that is needed for {', '.join(_purposes())}"
    report(works if healthy(findings) else bad)
    return findings


def _purposes() -> list[str]:
    """Name what the installed packages suffice for."""
    return ["the operations and sageattn"] + [
        purpose
        for extra, purpose in _PURPOSES.items()
        if all(find_spec(module) for module in EXTRAS[extra])
    ]


def healthy(findings: list[Finding]) -> bool:
    """Return True if everything works that is needed."""
    return all(finding.state != "missing" for finding in findings)


def check_version(name: str, version: str | None) -> Finding:
    """Return the finding about a package of `RANGES`; its version is None if there is none."""
    least, untested = RANGES[name]
    remedy = f"pip install '{name}>={least}" + (f",<{untested}'" if untested else "'")
    if version is None:
        if name == "safetensors" or (name == "triton" and sys.platform == "linux"):
            return Finding(name, "missing", "not installed", remedy)
        there = missing(name, name.replace("-", "_")).remedy if name != "triton" else remedy
        return Finding(name, "note", "not installed", there)
    if numbers(version) < numbers(least):
        return Finding(name, "missing", f"{version}, but {least} is the least that works", remedy)
    if untested and numbers(version) >= numbers(untested):
        return Finding(name, "note", f"{version}, not tested from {untested} on", remedy)
    return Finding(name, "ok", version)


def _packages() -> Iterator[Finding]:
    yield Finding("python", "ok", sys.version.split()[0])
    for name in RANGES:
        there = find_spec(name.replace("-", "_")) is not None
        version = torch.__version__ if name == "torch" else version_of(name)
        yield check_version(name, version if there else None)
    version, broken = version_of("sageattention"), sage.broken_sage()
    if version and broken:
        yield Finding("sageattention", "missing", f"{version}: {broken}", 'use attention="int8"')
    else:
        text = version or 'not installed; only attention="sage" needs it'
        yield Finding("sageattention", "ok" if version else "note", text)


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda or torch.version.hip else " (torch is built for the CPU)"
        yield Finding("gpu", "note", f"none that torch can see{built}")
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        size, capability = f"{gpu.total_memory / 2**30:.0f} GiB", f"{gpu.major}.{gpu.minor}"
        text = f"{gpu.name}, {size}, capability {capability}"
        old = torch.version.hip is None and gpu.major < 8
        remedy = 'the kernels need capability 8.0 or newer: use impl="reference"' if old else ""
        yield Finding(f"gpu {index}", "note" if old else "ok", text, remedy)


def _kernels() -> Iterator[Finding]:
    if find_spec("triton") is None:
        yield Finding("kernels", "note", "plain torch runs in their place, without Triton")
        return
    if not torch.cuda.is_available() and find_spec("numpy") is None:  # The base install has none.
        text = "not tried: without a GPU Triton's interpreter runs them, which needs numpy"
        yield Finding("kernels", "note", text, "pip install numpy")
        return
    try:
        check = check_kernels()
    except SamplingError as error:
        yield Finding("kernels", "missing", error.got, error.remedy)
    else:
        yield Finding("kernels", "ok" if check.passed else "missing", str(check))
    if torch.cuda.is_available() and find_spec("diffusers") is not None:
        yield from _kernel_cache()


def _kernel_cache() -> Iterator[Finding]:
    from turbo_rcm_patch.video.precompile import cached_models

    remedy = "turbo-rcm-patch precompile --model MODEL"
    cached = cached_models()
    for name, state in cached.items():
        yield Finding("kernel cache", "ok" if "kernels" in state else "note", f"{name}: {state}")
    if not cached:
        text = "nothing is compiled ahead, so the first video waits for the compiler"
        yield Finding("kernel cache", "note", text, remedy)


def check_kernels() -> KernelCheck:
    """Run one attention through the kernels in a new process, on a GPU if there is one, else in
    Triton's interpreter, which must be switched on before Triton is imported.

    Raises:
        SamplingError: They did not run.
    """
    command, variables = python_command(__name__)
    if not torch.cuda.is_available():
        variables["TRITON_INTERPRET"] = "1"
    try:
        done = subprocess.run(
            command,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
        )
        if done.returncode == 0:
            return KernelCheck(**json.loads(done.stdout.splitlines()[-1]))
        why = (done.stderr.strip().splitlines() or ["no message"])[-1]
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    raise SamplingError("the Triton kernels did not run", got=why, remedy=_REMEDY)


def run_attention() -> KernelCheck:
    """Compute and compare one attention in this process."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    tokens, heads, device = (200, 2, "cpu") if interpreted else (5_000, 12, "cuda")
    q, k, v = torch.randn(3, 1, tokens, heads * 64).to(device)
    # The interpreter gets bf16 and fp8 wrong.
    spec = AttentionSpec(heads=heads, impl="triton", pv="fp16" if interpreted else "auto")
    ours = attention_skip(q, k, v, spec)
    split = (x.unflatten(-1, (heads, 64)).transpose(1, 2) for x in (q, k, v))
    exact = F.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)
    return KernelCheck(float((ours - exact).norm() / exact.norm()), tokens, interpreted)


if __name__ == "__main__":
    print(json.dumps(asdict(run_attention())))
