"""Bytes that attention + projection + skip moves between memory and the chip, counted on paper.

T is one tensor of B*N*C elements in 16 bits. What is counted once a kernel: every operand it reads
and every result it writes. What stays in L2 between kernels is not known on paper, which is why
there is a measurement beside it; keys and values that attention reads again for each block of rows
come from L2 and are not counted.
"""

from __future__ import annotations

from benchmarks.setup import Shape

__all__ = ["paper_bytes", "tensor_bytes", "write_ups_share"]


def tensor_bytes(shape: Shape) -> int:
    """T."""
    return 2 * shape.batch * shape.q_tokens * shape.channels


def paper_bytes(shape: Shape, form: str, pv: str) -> dict[str, float]:
    """Bytes by what moves them.

    Args:
        shape: Of the attention; the projection is square.
        form: "two-pass", "one-pass", "two-launch" or "one-launch".
        pv: "fp8" or a 16-bit type: what the second product of ours takes.
    """
    t = float(tensor_bytes(shape))
    found = {"weight of the projection": 2.0 * shape.channels**2}
    if form in ("two-launch", "one-launch"):
        # q and k are read in 16 bits, written in 8 and read in 8; with fp8 PV so is v, which is
        # read once more for its channels' maxima.
        scales = 4.0 * shape.batch * shape.heads * shape.q_tokens
        found["prologue: read"] = 2 * t + (2 * t if pv == "fp8" else 0)
        found["prologue: write"] = t + (0.5 * t if pv == "fp8" else 0) + scales
        found["attention: read q, k, v"] = t + scales + (0.5 * t if pv == "fp8" else t)
        found["attention: write"] = t
        if form == "two-launch":
            found["projection: read attention"] = t
        found["projection: read x, write y"] = 2 * t
        return found
    found["attention: read q, k, v"] = 3 * t
    found["attention: write"] = t
    found["projection: read attention, write"] = 2 * t
    if form == "two-pass":  # c_skip * x, c_out * y, and their sum
        found["skip: three elementwise kernels"] = 7 * t
    else:
        found["skip: one elementwise kernel"] = 3 * t
    return found


def write_ups_share() -> dict[str, float]:
    """The write-ups' own count, without projection and prologue, in tensors of B*N*C: attention
    reads q, k, v and writes; the skip reads that and x and writes. Fused, it reads x and writes.
    """
    two_pass, fused = 7.0, 5.0
    return {"two-pass": two_pass, "fused": fused, "saved": 1.0 - fused / two_pass}
