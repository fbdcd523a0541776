"""Check the installation and the machine: versions, GPU, compiler, shipped models."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

import torch

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import TurboRCMError
from turbo_rcm_patch.extras import EXTRAS
from turbo_rcm_patch.ops import describe_pv, dispatch_rows, resolve_impl
from turbo_rcm_patch.ops.dispatch import measured_here

__all__ = ["Examination", "Finding", "examine"]

_MARKS: Final = {"ok": "ok", "note": "--", "missing": "!!"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the examination.

    Attributes:
        topic: What was looked at.
        state: "ok", "note" (works without), or "missing" (something needed is not there).
        text: What was found.
        remedy: What to do, empty if there is nothing to do.
    """

    topic: str
    state: Literal["ok", "note", "missing"]
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Examination:
    """All findings. Printing it gives the report."""

    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether everything that is needed is installed."""
        return all(one.state != "missing" for one in self.findings)

    def __str__(self) -> str:
        width = max(len(one.topic) for one in self.findings)
        lines = []
        for one in self.findings:
            lines.append(f"{_MARKS[one.state]}  {one.topic:<{width}}  {one.text}")
            if one.remedy:
                lines.append(f"    {'':<{width}}  -> {one.remedy}")
        lines.append(
            "everything that is needed is installed"
            if self.healthy
            else "something is missing: see the lines with !!"
        )
        return "\n".join(lines)


def examine() -> Examination:
    """Check the installation and the machine. Starts and changes nothing."""
    return Examination((*_packages(), *_machine(), *_compiler(), *_choices(), *_model()))


def _packages() -> Iterator[Finding]:
    python = sys.version.split()[0]
    yield Finding("python", "ok", python)
    yield Finding("torch", "ok", torch.__version__)
    for name in ("triton", "diffusers", "safetensors", "transformers", "accelerate"):
        version = _version(name)
        if version is None and name in EXTRAS["video"]:
            remedy = "pip install 'turbo_rcm_patch[video]'"
            yield Finding(name, "note", "not installed; only pipelines need it", remedy)
        elif version is None:
            yield Finding(name, "missing", "not installed", f"pip install {name}")
        elif name == "diffusers" and not version.startswith("0.42"):
            yield Finding(
                name,
                "note",
                f"{version}, but only 0.42 was tested",
                "pip install 'diffusers>=0.42,<0.43'",
            )
        else:
            yield Finding(name, "ok", version)
    sage = _version("sageattention")
    yield (
        Finding("sageattention", "ok", f"{sage} (only for attention='sage')")
        if sage
        else Finding("sageattention", "note", "not installed; only attention='sage' needs it")
    )
    if find_spec("imageio_ffmpeg") is None:
        remedy = "pip install 'turbo_rcm_patch[video]'"
        yield Finding("imageio-ffmpeg", "note", "not installed; only mp4 needs it", remedy)
        return
    try:
        import imageio_ffmpeg

        program = imageio_ffmpeg.get_ffmpeg_exe()
        yield Finding("imageio-ffmpeg", "ok", f"{_version('imageio-ffmpeg')}, {program}")
    except (ImportError, RuntimeError) as error:
        yield Finding(
            "imageio-ffmpeg",
            "missing",
            f"no ffmpeg, so no mp4 can be written ({error})",
            "pip install --force-reinstall imageio-ffmpeg",
        )


def _machine() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        yield Finding(
            "gpu",
            "note",
            "none that torch can see"
            + ("" if built else " (this torch is built for the CPU only)"),
            "" if built else "on a machine with a GPU, install torch for CUDA or ROCm",
        )
        yield Finding("cpu", "ok", f"{torch.get_num_threads()} of {os.cpu_count()} threads")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        name = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        if torch.version.hip is not None:
            yield Finding(f"gpu {index}", "ok", f"{name}, {properties.gcnArchName}, HIP")
            continue
        capability = (properties.major, properties.minor)
        units = f"int8 {'yes' if capability >= (7, 5) else 'no'}"
        units += f", fp8 {'yes' if capability >= (8, 9) else 'no'}"
        state: Literal["ok", "note"] = "ok" if capability >= (8, 0) else "note"
        yield Finding(
            f"gpu {index}",
            state,
            f"{name}, compute capability {properties.major}.{properties.minor}, {units}",
            ""
            if state == "ok"
            else "the kernels need compute capability 8.0 or newer; use impl='reference'",
        )


def _compiler() -> Iterator[Finding]:
    needed: Literal["missing", "note"] = "missing" if torch.cuda.is_available() else "note"
    names = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    program = next((p for n in names if n and (p := shutil.which(n))), None)
    if program:
        yield Finding("C compiler", "ok", program)
    else:
        yield Finding(
            "C compiler",
            needed,
            "none found; on a GPU Triton needs one to compile its launcher",
            "apt-get install gcc (or your system's equivalent)",
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.is_file():
        yield Finding("Python.h", "ok", str(header))
    else:
        yield Finding(
            "Python.h",
            needed,
            f"not at {header}; on a GPU Triton's launcher needs it",
            "apt-get install python3-dev (or your system's equivalent)",
        )


def _choices() -> Iterator[Finding]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = PatchConfig()
    impl = resolve_impl(config.impl, device)
    try:
        pv = describe_pv(config.pv, device)
    except TurboRCMError as error:
        yield Finding("would use", "missing", str(error))
        return
    kernels = "Triton kernels" if impl == "triton" else "plain torch that rounds as the kernels do"
    yield Finding(
        "would use",
        "ok",
        f"{kernels} on {device.type}: attention {config.attention}, pv {pv}, "
        f"form {config.form}, guard {'on' if config.guard else 'off'}",
    )
    found = measured_here(device)
    if device.type == "cuda":
        yield Finding(
            "measured here",
            "ok" if found else "note",
            f'attention="auto" reads {found}'
            if found
            else "nothing: the first forward tests "
            "this card in a second or so, and what follows are defaults",
            "" if found else "turbo-rcm-patch tune measures tiles and lengths on this card",
        )
    for shape, runs, why in dispatch_rows(None, device):
        yield Finding(shape, "note", f"{runs}: {why}")


def _model() -> Iterator[Finding]:
    from turbo_rcm_patch.tiny import TINY_COGVIDEOX, TINY_WAN

    for folder in (TINY_WAN, TINY_COGVIDEOX):
        if (folder / "model_index.json").is_file():
            size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
            yield Finding("shipped model", "ok", f"{folder} ({size / 2**20:.1f} MiB)")
        else:
            yield Finding("shipped model", "missing", f"not at {folder}", "reinstall the package")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
