"""How the GPUs of a machine are joined, and when splitting a video over two of them pays."""

from __future__ import annotations

import re
import shutil
import subprocess
from contextlib import suppress
from itertools import combinations
from typing import Final, Literal

import torch

#: "NVLink", "PCIe", or "" where nobody says.
Joined = Literal["NVLink", "PCIe", ""]

#: Messages of an attention of two shares on two ranks, and bytes that a rank sends for each token
#: and channel: q, k, v in one byte and the output in two, a quarter of the sequence each.
_MESSAGES: Final = 10
_BYTES: Final = 5 / 4
#: Seconds that a message takes besides its bytes, over PCIe.
_LATENCY: Final = 30e-6


def least_seconds(blocks: int, channels: int, tokens: int, rate: float) -> float:
    """Seconds that a forward has to take on one GPU for two to be faster by Ulysses, if nothing
    hides what they exchange.

    Args:
        blocks: Of the network.
        channels: Heads times their size.
        tokens: Of the sequence.
        rate: Bytes a second that a GPU sends while it receives as many.
    """
    return 2 * blocks * (_MESSAGES * _LATENCY + _BYTES * channels * tokens / rate)


def joined(count: int) -> tuple[Joined, bool | None]:
    """How all pairs of the first so many GPUs are joined: the slowest of them, and whether each
    can read the memory of every other; None where the driver does not tell."""
    pairs = list(combinations(range(count), 2))
    peers: bool | None = None
    with suppress(AssertionError, RuntimeError):
        peers = all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    return _slowest(_topology()), peers


def _topology() -> str:
    """What `nvidia-smi topo -m` prints; "" without it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "topo", "-m"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _slowest(topology: str) -> Joined:
    """Of all GPUs in a matrix, because CUDA_VISIBLE_DEVICES may number them otherwise."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", topology)
    rows = [line.split() for line in plain.splitlines() if re.match(r"\s*GPU\d", line)]
    if len(rows) < 3:  # The head, and a row for each GPU.
        return ""
    count = sum(name.startswith("GPU") and name[3:].isdigit() for name in rows[0])
    if len(rows) != count + 1 or any(len(row) <= count for row in rows[1:]):
        return ""
    matrix = [row[1 : count + 1] for row in rows[1:]]
    if any(row.pop(index) != "X" for index, row in enumerate(matrix)):
        return ""
    cells = [cell for row in matrix for cell in row]
    return "NVLink" if all(re.fullmatch(r"NV\d+", cell) for cell in cells) else "PCIe"
