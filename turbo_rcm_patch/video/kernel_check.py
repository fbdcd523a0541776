"""Run one block of a model through the Triton kernels and compare it with the plain-torch
reference, which rounds in the same way.

On a machine without a GPU the kernels run in Triton's interpreter, which must be switched on
before Triton is imported. So the check is a process of its own: `python -P -m
turbo_rcm_patch.video.kernel_check FOLDER`, started by `run_kernel_check`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch

from turbo_rcm_patch.config import Form, Impl, PatchConfig
from turbo_rcm_patch.errors import SamplingError
from turbo_rcm_patch.patching import patched
from turbo_rcm_patch.video.environment import numbers, python_command, version_of
from turbo_rcm_patch.video.families import family_named
from turbo_rcm_patch.video.load import check_folder, quiet_loading
from turbo_rcm_patch.video.measures import relative_l2
from turbo_rcm_patch.video.verdict import highest

#: Largest relative L2 between kernels and reference. Both round alike, in fp32 with fp16 PV; what
#: is left is the order of sums, and values that fall on the other side of a rounding boundary
#: because of it.
LIMIT: Final = 2e-3
TIMEOUT_SECONDS: Final = 240


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """Result of the check.

    Attributes:
        relative_l2: What the block adds to its input, kernels against reference, the worse of the
            two forms.
        limit: Largest accepted.
        tokens: Video tokens.
        fused: Pairs that ran fused.
        seconds: Time of the kernels.
        interpreted: Whether they ran in the interpreter.
        forms: The ways in which the pairs were closed.
    """

    relative_l2: float
    limit: float
    tokens: int
    fused: int
    seconds: float
    interpreted: bool
    forms: tuple[str, ...] = ("one-launch", "two-launch")

    @property
    def passed(self) -> bool:
        """Whether the kernels agree with the reference."""
        return self.relative_l2 <= self.limit

    @property
    def what(self) -> str:
        """A description of what was run."""
        where = "in Triton's interpreter on the CPU" if self.interpreted else "on the GPU"
        closed = "in one launch and in two" if len(self.forms) > 1 else "in two launches"
        return (
            f"one block of the model, {self.tokens} tokens, {self.fused} fused pairs, "
            f"{closed}, run by the Triton kernels {where} ({self.seconds:.1f} s), "
            "against the plain-torch reference"
        )

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self) | {"passed": self.passed, "what": self.what}


def check_interpreter() -> None:
    """Raise if the kernels cannot run on this machine because Triton's interpreter and NumPy do
    not fit together. A GPU needs no interpreter.

    Raises:
        SamplingError: The interpreter of Triton 3.4 and 3.5 takes arrays of one element for
            numbers, which NumPy 2.4 no longer does. Nothing that pip could know keeps them apart,
            because torch says which Triton it needs.
    """
    if torch.cuda.is_available():
        return
    triton, numpy = (version_of(name) or "" for name in ("triton", "numpy"))
    if triton and numbers(triton) < (3, 6) and numbers(numpy) >= (2, 4):
        raise SamplingError(
            "the kernels cannot run in the interpreter of this Triton",
            expected="Triton 3.6 or newer, or NumPy older than 2.4",
            got=f"Triton {triton} and NumPy {numpy}",
            remedy="pip install 'numpy<2.4'",
        )


def run_kernel_check(folder: Path) -> KernelCheck:
    """Run the check in a new process: on a GPU if there is one, else in Triton's interpreter.

    Args:
        folder: A pipeline folder; its transformer's first block is used.
    """
    check_interpreter()
    command, own = python_command(__name__, str(folder))
    if not torch.cuda.is_available():
        own["TRITON_INTERPRET"] = "1"
    try:
        done = subprocess.run(
            command,
            env=os.environ | own,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SamplingError(
            f"the kernel check took more than {TIMEOUT_SECONDS} s",
            remedy="Run the command again when the machine is less busy",
        ) from error
    except OSError as error:
        raise SamplingError(f"the kernel check could not be started ({error})") from error
    by_itself = shlex.join([*(f"{name}={value}" for name, value in own.items()), *command])
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise SamplingError(
            f"the kernel check failed ({last[0]})",
            remedy=f"Run this command to see why: env {by_itself}",
        )
    try:
        return KernelCheck(**json.loads(done.stdout.strip().splitlines()[-1]))
    except (IndexError, ValueError, TypeError) as error:
        raise SamplingError(
            "the kernel check printed no result",
            got=done.stdout[-200:],
            remedy=f"Run this command to see why: env {by_itself}",
        ) from error


def check_block(folder: Path) -> KernelCheck:
    """Run the check in this process."""
    family = family_named(check_folder(folder))
    with quiet_loading():
        probe = family.block_probe(folder)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    device = "cuda" if not interpreted and torch.cuda.is_available() else "cpu"
    network = probe.network.eval().to(device)
    inputs = {name: _on(device, value) for name, value in probe.inputs.items()}
    branches: list[torch.Tensor] = []
    hook = probe.block.register_forward_hook(
        lambda _, given, named, out: branches.append(probe.branch(given, named, out).clone()),
        with_kwargs=True,
    )
    # Every way to close a pair across its projection, and what they must agree with.
    runs: list[tuple[Impl, Form]] = [("triton", form) for form in probe.forms]
    runs.append(("reference", "auto"))
    seconds, fused = 0.0, 0
    with torch.no_grad():
        for impl, form in runs:
            # The interpreter gets bf16 and fp8 wrong, so the second product is in fp16.
            config = PatchConfig(impl=impl, form=form, pv="fp16", guard=False)
            with patched(network, config) as report:
                start = time.perf_counter()
                network(**inputs, return_dict=False)
                if impl == "triton":
                    seconds += time.perf_counter() - start
                    fused = report.fused
    hook.remove()
    *ours, reference = branches
    return KernelCheck(
        relative_l2=highest([relative_l2(one, reference) for one in ours]),
        limit=LIMIT,
        tokens=probe.tokens,
        fused=fused,
        seconds=seconds,
        interpreted=interpreted,
        forms=probe.forms,
    )


def _on(device: str, value: object) -> object:
    """Move tensors, and tuples of them, to a device."""
    if isinstance(value, tuple):
        return tuple(_on(device, one) for one in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _main() -> None:
    parser = argparse.ArgumentParser(description="Check the Triton kernels on one block.")
    parser.add_argument("folder", type=Path)
    print(json.dumps(asdict(check_block(parser.parse_args().folder))))


if __name__ == "__main__":
    _main()
