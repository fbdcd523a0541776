"""Describe this machine and this installation, for reports and `doctor`."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Final

import torch

PACKAGES: Final = (
    "turbo_rcm_patch",
    "torch",
    "triton",
    "diffusers",
    "transformers",
    "accelerate",
    "safetensors",
    "sageattention",
    "imageio-ffmpeg",
)


def version_of(name: str) -> str | None:
    """The version of an installed package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """Of "2.13.0+cpu" (2, 13, 0); what cannot be read is older than anything."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def versions() -> dict[str, str]:
    """Versions of Python and of every package that can change a result, or "not installed"."""
    found = {"python": platform.python_version()}
    found |= {name: version_of(name) or "not installed" for name in PACKAGES}
    if found["turbo_rcm_patch"] == "not installed":
        found["turbo_rcm_patch"] = "run from source"
    found["torch"] = torch.__version__
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.version.hip:
        found["hip"] = torch.version.hip
    found["platform"] = platform.platform()
    return found


def python_command(module: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """The command line that runs a module of this package, and the environment it needs.

    Python would look for modules in the working directory first, and run a torch.py that lies
    there in place of torch. -P forbids it; an empty entry of PYTHONPATH means that folder too.

    Args:
        module: Full name.
        *arguments: Of the module.

    Returns:
        The command, and the variables to add to this process's.
    """
    source = str(Path(__file__).resolve().parents[2])
    others = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    command = [sys.executable, "-P", "-m", module, *arguments]
    return command, {"PYTHONPATH": os.pathsep.join([source, *others])}


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor with the number of threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} of {os.cpu_count()} threads"


def code_digest() -> str:
    """A digest of the code that can influence a generated video."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.blake2b(digest_size=8)
    own = ("scheduler.py", "generation.py", "settings.py", "source.py", "families")
    parts = ("config.py", "skip.py", "boundary.py", "ops", "kernels", "patching")
    for part in (*parts, *(f"video/{name}" for name in own)):
        path = root / part
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.suffix in (".py", ".json") and file.is_file():
                digest.update(file.relative_to(root).as_posix().encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
