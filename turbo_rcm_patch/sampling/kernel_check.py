"""One block of a model through the Triton kernels, against the plain-torch reference that rounds
alike.

On a machine without a GPU the kernels run in Triton's interpreter, which must be switched on
before Triton is imported. So the check is a process of its own: `python -m
turbo_rcm_patch.sampling.kernel_check FOLDER`, started by `run_kernel_check`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from turbo_rcm_patch.config import Form, Impl, PatchConfig
from turbo_rcm_patch.errors import SamplingError

__all__ = ["LIMIT", "KernelCheck", "run_kernel_check"]

#: Largest relative L2 between kernels and reference. Both round alike, in fp32 with fp16 PV; what
#: is left is the order of sums, and values that fall on the other side of a rounding boundary
#: because of it.
LIMIT: Final = 2e-3
#: Tokens along frames, height and width: 264 in all, no multiple of any block.
GRID: Final = (3, 8, 11)
#: Both ways to close a pair across its projection, and what they must agree with.
RUNS: Final[tuple[tuple[Impl, Form], ...]] = (
    ("triton", "one-launch"),
    ("triton", "two-launch"),
    ("reference", "auto"),
)
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
    """

    relative_l2: float
    limit: float
    tokens: int
    fused: int
    seconds: float
    interpreted: bool

    @property
    def passed(self) -> bool:
        """Whether the kernels agree with the reference."""
        return self.relative_l2 <= self.limit

    @property
    def what(self) -> str:
        """What was run, in words."""
        where = "Triton's interpreter on the CPU" if self.interpreted else "the GPU"
        return (
            f"one block of the model, {self.tokens} tokens, {self.fused} fused pairs, in one "
            f"launch and in two, run by the Triton kernels in {where} ({self.seconds:.1f} s), "
            "against the plain-torch reference"
        )

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self) | {"passed": self.passed, "what": self.what}


def run_kernel_check(folder: Path) -> KernelCheck:
    """Run the check in a process with Triton's interpreter on.

    Args:
        folder: A Wan pipeline folder; its transformer's first block is used.
    """
    command = [sys.executable, "-m", __name__, str(folder)]
    source = str(Path(__file__).resolve().parents[2])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SamplingError(
            f"the kernel check took more than {TIMEOUT_SECONDS} s",
            remedy="Is the machine busy? Run the command again",
        ) from error
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise SamplingError(
            f"the kernel check failed ({last[0]})", remedy=f"Run it by itself: {' '.join(command)}"
        )
    return KernelCheck(**json.loads(done.stdout.strip().splitlines()[-1]))


def check_block(folder: Path) -> KernelCheck:
    """Run the check in this process."""
    import torch

    from turbo_rcm_patch import patched
    from turbo_rcm_patch.sampling.metrics import relative_l2

    network = _first_block(folder)
    generator = torch.Generator("cpu").manual_seed(0)
    config = network.config
    device = network.device
    shape = [tokens * patch for tokens, patch in zip(GRID, config.patch_size, strict=True)]
    latents = torch.randn(1, config.in_channels, *shape, generator=generator).to(device)
    text = torch.randn(1, 13, config.text_dim, generator=generator).to(device)
    time_ = torch.tensor([933.78], device=device)
    branches: list[torch.Tensor] = []
    hook = network.blocks[0].register_forward_hook(
        lambda _, given, out: branches.append((out - given[0]).detach().clone())
    )
    seconds, fused = 0.0, 0
    with torch.no_grad():
        for impl, form in RUNS:
            # The interpreter gets bf16 and fp8 wrong, so the second product is in fp16.
            config = PatchConfig(impl=impl, form=form, pv="fp16", guard=False)
            with patched(network, config) as report:
                start = time.perf_counter()
                network(latents, time_, text, return_dict=False)
                if impl == "triton":
                    seconds += time.perf_counter() - start
                    fused = report.fused
    hook.remove()
    *ours, reference = branches
    return KernelCheck(
        relative_l2=max(relative_l2(one, reference) for one in ours),
        limit=LIMIT,
        tokens=reference.shape[1],
        fused=fused,
        seconds=seconds,
        interpreted=os.environ.get("TRITON_INTERPRET") == "1",
    )


def _first_block(folder: Path):  # type: ignore[no-untyped-def]  # a WanTransformer3DModel
    """The model's transformer with its first block only, in fp32."""
    import torch
    from diffusers import WanTransformer3DModel

    from turbo_rcm_patch.sampling.load import quiet_loading

    with quiet_loading():
        network = WanTransformer3DModel.from_pretrained(
            str(folder), subfolder="transformer", dtype=torch.float32, local_files_only=True
        )
    network.blocks = network.blocks[:1]
    if os.environ.get("TRITON_INTERPRET") != "1" and torch.cuda.is_available():
        network.to("cuda")
    return network.eval()


def _main() -> None:
    parser = argparse.ArgumentParser(description="Check the Triton kernels on one block.")
    parser.add_argument("folder", type=Path)
    print(json.dumps(asdict(check_block(parser.parse_args().folder))))


if __name__ == "__main__":
    _main()
