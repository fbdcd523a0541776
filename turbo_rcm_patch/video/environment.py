"""Describe this machine and this installation, for reports and `doctor`."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from turbo_rcm_patch.extras import version_of

PACKAGES: Final = (
    *("turbo_rcm_patch", "torch", "triton", "diffusers", "transformers", "accelerate"),
    *("safetensors", "sageattention", "imageio-ffmpeg"),
)
#: Largest relative L2 between an int8 attention of random normal numbers and torch's in fp32:
#: 0.01 with fp16 as the type of probabilities and values, 0.04 with fp8.
LIMIT: Final = 0.06


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """One int8 attention of the Triton kernels, compared with torch in fp32.

    Attributes:
        relative_l2: The distance.
        tokens: Number of queries and keys.
        interpreted: True if the kernels ran in Triton's interpreter on the CPU.
        limit: The largest distance that is accepted.
    """

    relative_l2: float
    tokens: int
    interpreted: bool
    limit: float = LIMIT

    @property
    def passed(self) -> bool:
        """True if the distance is accepted. A NaN is not."""
        return self.relative_l2 <= self.limit

    def __str__(self) -> str:
        where = "in Triton's interpreter on the CPU" if self.interpreted else "on the GPU"
        return (
            f"int8 attention over {self.tokens:,} tokens by the Triton kernels {where}, relative "
            f"L2 to torch in fp32 {self.relative_l2:.1e}, accepted: at most {self.limit:.0e}"
        )


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: (2, 13, 0) of "2.13.0+cpu", () where there are none."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def versions() -> dict[str, str]:
    """Return the versions of Python and of every package that can change a result."""
    known = {"python": platform.python_version()}
    known |= {name: version_of(name) or "not installed" for name in PACKAGES}
    if known["turbo_rcm_patch"] == "not installed":
        known["turbo_rcm_patch"] = "run from source"
    known["torch"] = torch.__version__
    built = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    known |= {name: version for name, version in built.items() if version}
    return known | {"platform": platform.platform()}


def python_command(module: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Return the command line that runs a module of this package, and the variables to add to the
    environment of this process.

    Python would look for modules in the working directory first, and run a torch.py that lies
    there in place of torch. -P forbids it; an empty entry of PYTHONPATH means that folder too.

    Args:
        module: The full name.
        *arguments: The arguments of the module.
    """
    source = str(Path(__file__).resolve().parents[2])
    others = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    command = [sys.executable, "-P", "-m", module, *arguments]
    return command, {"PYTHONPATH": os.pathsep.join([source, *others])}


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or the processor with the number of threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} of {os.cpu_count()} threads"


def code_digest() -> str:
    """Return a digest of the code of this package."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


def _processor() -> str:
    try:
        names = re.findall(r"^model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
