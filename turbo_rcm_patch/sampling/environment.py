"""What this machine and this installation are: for reports and for `doctor`."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Final

import torch

__all__ = ["PACKAGES", "code_digest", "device_name", "versions"]

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


def versions() -> dict[str, str]:
    """Versions of Python and every package that can change a result, if only "not installed"."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    if found["turbo_rcm_patch"] == "not installed":
        found["turbo_rcm_patch"] = "run from source"
    found["torch"] = torch.__version__
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.version.hip:
        found["hip"] = torch.version.hip
    found["platform"] = platform.platform()
    return found


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor with the number of threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} of {os.cpu_count()} threads"


def code_digest() -> str:
    """Changes whenever code of this package changes that a generated video could depend on."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.blake2b(digest_size=8)
    for part in ("config.py", "skip.py", "ops", "kernels", "patching", "sampling/scheduler.py"):
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
