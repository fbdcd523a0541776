"""Check the installation and the machine: versions, GPU, compiler, shipped models."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

import torch

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import MissingPackageError, SamplingError, TurboRCMError
from turbo_rcm_patch.extras import EXTRAS
from turbo_rcm_patch.ops import describe_pv, dispatch_rows, resolve_impl
from turbo_rcm_patch.ops.dispatch import measured_here, tiles_here
from turbo_rcm_patch.video.environment import numbers, version_of
from turbo_rcm_patch.video.links import joined, least_seconds

_MARKS: Final = {"ok": "ok", "note": "--", "missing": "!!"}
_WIDTH: Final = 14  # of a topic; those of the table of attentions are longer
#: Package -> the least version that works, and the first that was not tested, as in pyproject.toml
#: (tests/test_packaging.py compares them).
RANGES: Final = {
    "torch": ("2.8", ""),
    "triton": ("3.4", ""),
    "diffusers": ("0.42", "0.43"),
    "safetensors": ("0.8", ""),
    "transformers": ("5.0", ""),
    "accelerate": ("1.2", ""),
    "peft": ("0.18", ""),
    "imageio-ffmpeg": ("0.8.1", ""),
}


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

    def __str__(self) -> str:
        line = f"{_MARKS[self.state]}  {self.topic:<{_WIDTH}}  {self.text}"
        return f"{line}\n    {'':<{_WIDTH}}  -> {self.remedy}" if self.remedy else line


@dataclass(frozen=True, slots=True)
class Examination:
    """All findings. Printing it gives the report."""

    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether everything that is needed is installed."""
        return all(one.state != "missing" for one in self.findings)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.findings), self.verdict])

    @property
    def verdict(self) -> str:
        """The last line of the report."""
        if self.healthy:
            return "everything that is needed is installed"
        return "something is missing: see the lines with !!"


def examine(tell: Callable[[str], object] = lambda _: None) -> Examination:
    """Check the installation and the machine, and load the shipped models. Changes nothing.

    Args:
        tell: Called with each line of the report as soon as it is known.
    """
    found = []
    for look in (_packages, _machine, _links, _compiler, _choices, _model):
        for one in look():
            tell(str(one))
            found.append(one)
    examination = Examination(tuple(found))
    tell(examination.verdict)
    return examination


def _packages() -> Iterator[Finding]:
    python = sys.version.split()[0]
    yield Finding("python", "ok", python)
    yield _in_range("torch", torch.__version__)
    for name in ("triton", "diffusers", "safetensors", "transformers", "accelerate"):
        version = version_of(name)
        if version is None and name == "triton" and sys.platform != "linux":
            text = f"there is none for {sys.platform}; plain torch runs in place of the kernels"
            yield Finding(name, "note", text)
        elif version is None and name in EXTRAS["video"]:
            remedy = "pip install 'turbo_rcm_patch[video]'"
            yield Finding(name, "note", "not installed; only pipelines need it", remedy)
        elif version is None:
            yield Finding(name, "missing", "not installed", f"pip install {name}")
        else:
            yield _in_range(name, version)
    if peft := version_of("peft"):  # Nothing here needs it, but diffusers imports what is there.
        yield _in_range("peft", peft)
    sage = version_of("sageattention")
    if sage:
        yield Finding("sageattention", "ok", f"{sage} (only for attention='sage')")
    else:
        yield Finding("sageattention", "note", "not installed; only attention='sage' needs it")
    if find_spec("imageio_ffmpeg") is None:
        remedy = "pip install 'turbo_rcm_patch[video]'"
        yield Finding("imageio-ffmpeg", "note", "not installed; only mp4 needs it", remedy)
        return
    try:
        import imageio_ffmpeg

        program = imageio_ffmpeg.get_ffmpeg_exe()
        yield _in_range("imageio-ffmpeg", version_of("imageio-ffmpeg") or "", f", {program}")
    except (ImportError, RuntimeError) as error:
        yield Finding(
            "imageio-ffmpeg",
            "missing",
            f"no ffmpeg, so no mp4 can be written ({error})",
            "pip install --force-reinstall imageio-ffmpeg",
        )


def _in_range(name: str, version: str, more: str = "") -> Finding:
    """Whether a version is one that works."""
    least, first_untested = RANGES[name]
    wanted = f"{name}>={least}" + (f",<{first_untested}" if first_untested else "")
    remedy = f"pip install '{wanted}'"
    if numbers(version) < numbers(least):
        text = f"{version}, but {least} is the least that works{more}"
        return Finding(name, "missing", text, remedy)
    if first_untested and numbers(version) >= numbers(first_untested):
        text = f"{version}, but nothing from {first_untested} on was tested{more}"
        return Finding(name, "note", text, remedy)
    return Finding(name, "ok", f"{version}{more}")


def _machine() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        text, remedy = "none that torch can see", ""
        if not built:
            text += " (this torch is built for the CPU only)"
            remedy = "on a machine with a GPU, install torch for CUDA or ROCm"
        yield Finding("gpu", "note", text, remedy)
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
        text = f"{name}, compute capability {properties.major}.{properties.minor}, {units}"
        if capability >= (8, 0):
            yield Finding(f"gpu {index}", "ok", text)
        else:
            remedy = "the kernels need compute capability 8.0 or newer; use impl='reference'"
            yield Finding(f"gpu {index}", "note", text, remedy)


def _links() -> Iterator[Finding]:
    """How several GPUs are joined, and what that means for a video that is split."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return
    link, peers = joined(count)
    reach = {True: "", False: ", and no access to each other's memory", None: ""}[peers]
    if link == "NVLink":
        text = f"{count} GPUs, NVLink between all: a video may be split over them{reach}"
        yield Finding("links", "ok", text)
        return
    how = "PCIe between some" if link else "nvidia-smi does not say how they are joined"
    small, large = (
        " to ".join(f"{least_seconds(*network, 32_760, rate):.2f}" for rate in (50e9, 25e9))
        for network in ((30, 1536), (40, 5120))
    )
    yield Finding(
        "links",
        "note",
        f"{count} GPUs, {how}{reach}. Over PCIe of 50 to 25 GB/s, Ulysses on two of them is "
        f"slower than one if a forward over 32,760 tokens takes one less than {small} s "
        f"(Wan2.1-1.3B) or {large} s (14B)",
        "deal the prompts out instead: torchrun ... generate --prompts (docs/many_videos.md)",
    )


def _compiler() -> Iterator[Finding]:
    needed: Literal["missing", "note"] = "missing" if torch.cuda.is_available() else "note"
    names = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    program = next((p for n in names if n and (p := shutil.which(n))), None)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    there = str(header) if header.is_file() else None
    no_compiler = "none found; on a GPU Triton needs one to compile its launcher"
    no_header = f"not at {header}; on a GPU Triton's launcher needs it"
    for topic, found, missing, package in (
        ("C compiler", program, no_compiler, "gcc"),
        ("Python.h", there, no_header, "python3-dev"),
    ):
        remedy = f"apt-get install {package} (or your system's equivalent)"
        yield Finding(topic, "ok", found) if found else Finding(topic, needed, missing, remedy)


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
        if found:
            yield Finding("measured here", "ok", f'attention="auto" reads {found}')
        else:
            text = "nothing: the first forward tests this card in a second or so, "
            text += "and what follows are defaults"
            remedy = "turbo-rcm-patch tune measures tiles and lengths on this card"
            yield Finding("measured here", "note", text, remedy)
        if find_spec("triton") is not None:
            text, measured = tiles_here(device)
            remedy = "turbo-rcm-patch tune measures them; "
            remedy += "docs/other_cards.md says what to expect; "
            remedy += "turbo-rcm-patch bench prints a line to paste into an issue"
            state: Literal["ok", "note"] = "ok" if measured else "note"
            yield Finding("tiles", state, text, "" if measured else remedy)
    for shape, runs, why in dispatch_rows(None, device):
        yield Finding(shape, "note", f"{runs}: {why}")


def _model() -> Iterator[Finding]:
    from turbo_rcm_patch.tiny import TINY_COGVIDEOX, TINY_WAN
    from turbo_rcm_patch.video.kernel_check import check_interpreter
    from turbo_rcm_patch.video.load import load_pipeline

    for folder in (TINY_WAN, TINY_COGVIDEOX):
        if not (folder / "model_index.json").is_file():
            yield Finding("shipped model", "missing", f"not at {folder}", "reinstall the package")
            continue
        size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
        found = f"{folder} ({size / 2**20:.1f} MiB)"
        try:
            load_pipeline(folder, device="cpu")
            yield Finding("shipped model", "ok", f"{found}, loads")
        except MissingPackageError as error:
            yield Finding("shipped model", "note", f"{found}, not loaded: {error.got}")
        except Exception as error:  # Whatever versions that do not fit together may raise.
            last = " ".join(str(error).split())[:400]
            ranges = ("transformers", "accelerate", "diffusers")
            wanted = [f"'{name}>={RANGES[name][0]}'" for name in ranges]
            yield Finding(
                "shipped model",
                "missing",
                f"{found} cannot be loaded: {type(error).__name__}: {last}",
                f"pip install {' '.join(wanted)}",
            )
    try:
        check_interpreter()
    except SamplingError as error:
        text = f"{error.got}: the demo cannot check the kernels in Triton's interpreter"
        yield Finding("interpreter", "missing", text, error.remedy)
