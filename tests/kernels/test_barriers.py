"""Barriers in the machine code of the kernels that racecheck reports; docs/kernels.md has a
section about them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from tests.kernels.aot import ROOT, Process, case
from tests.launches import needs_hopper_kernels

NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
TARGET = ("cuda", 90)
_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d\s+)?([A-Z][\w.]*)(.*?);")
_ADDRESS = re.compile(r"\[([^\]]*?)(?:\+(0x[0-9a-f]+))?\]")


def machine_code(kernel: str, folder: Path, **more: object) -> list[tuple[str, str]]:
    """(operation, operands) of a kernel as compiled for Hopper, with ("label", name) between."""
    needs_hopper_kernels()
    records = Process(sys.executable, [ROOT], "aot_record.py")
    kernels = ROOT / "turbo_rcm_patch" / "kernels"
    compiles = Process(
        sys.executable, [ROOT], "aot_compile.py", kernels, folder, cache=folder / "triton"
    )
    asked = case("plain-attention", TARGET, 128, "fp8", only=[kernel], **more)
    try:
        (result,) = compiles.ask(records.ask([asked])[:1])
    finally:
        records.close()
        compiles.close()
    assert result["kernel"] == kernel and "error" not in result, result
    (cubin,) = folder.glob(f"triton/*/{kernel}.cubin")
    done = subprocess.run([NVDISASM, "-c", cubin], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[tuple[str, str]] = []
    for line in done.stdout.splitlines():
        if label := re.match(r"\.(L_x_\d+):", line):
            found.append(("label", label[1]))
        elif instruction := _LINE.search(line):
            found.append((instruction[1], instruction[2].strip()))
    assert len(found) > 500
    return found


def place(operands: str) -> tuple[str, int]:
    """Register and offset of an address in shared memory."""
    match = _ADDRESS.search(operands)
    assert match, operands
    return match[1], int(match[2] or "0", 16)


@pytest.mark.skipif(not NVDISASM.exists(), reason="this release of Triton brings no nvdisasm")
def test_words_that_threads_exchange_have_a_barrier_between(tmp_path: Path) -> None:
    """In the sums over tokens: what is read through another register than it was written through
    is another thread's, and only a thread's own word may be read and written without one."""
    since: list[tuple[str, str, int]] = []
    exchanged = 0
    for operation, operands in machine_code("statistics_kernel", tmp_path, portable=True):
        if operation.startswith("BAR.SYNC"):
            since.clear()
        elif operation.split(".")[0] in ("STS", "LDS", "LDSM"):
            kind, (register, offset) = operation[:3], place(operands)
            for other, held, at in since:
                if other != kind and held != register and at == offset:
                    raise AssertionError(f"{operation} {operands} after {other} [{held}+{at:#x}]")
            since.append((kind, register, offset))
            exchanged += 1
    assert exchanged > 40, "the sums go another way now: look at docs/kernels.md"


@pytest.mark.skipif(not NVDISASM.exists(), reason="this release of Triton brings no nvdisasm")
def test_the_state_of_the_warps_has_a_barrier_on_either_side(tmp_path: Path) -> None:
    code = machine_code("hopper_kernel", tmp_path)
    touching = ("STS", "LDS", "UTMALDG", "SYNCS", "BAR", "EXIT")
    (read,) = (i for i, (operation, _) in enumerate(code) if operation.startswith("LDS.U8"))
    # The first worker warp is the fifth of all, counted from where the read adds its number.
    state = place(code[read][1])[1] + 4
    before = next(c for c in reversed(code[:read]) if c[0].split(".")[0] in touching)
    assert before[0].startswith("BAR.SYNC") and before[1] == "0x1", "written, then read"
    branch = next(operands for operation, operands in code[read:] if operation == "BRX")
    targets = set(re.findall(r"L_x_\d+", branch))
    ends = 0
    for label in targets:
        start = code.index(("label", label))
        first = next(c for c in code[start:] if c[0].split(".")[0] in touching)
        ends += first[0] == "EXIT"
        assert first[0] == "EXIT" or first == ("BAR.SYNC.DEFER_BLOCKING", "0x1"), (label, first)
    assert ends == 1 and len(targets) >= 5
    writes = [
        i for i, (operation, operands) in enumerate(code)
        if operation.startswith("STS") and state <= place(operands)[1] < state + 12
    ]  # fmt: skip
    assert len(writes) >= 2
    for at in writes:
        rest = (c for c in code[at + 1 :] if c[0].split(".")[0] in touching)
        after = next(c for c in rest if not c[0].startswith("STS"))
        assert after == ("BAR.SYNC.DEFER_BLOCKING", "0x1"), (code[at], after)
    last = writes[-1]
    earlier = [c for c in code[:last] if c[0].split(".")[0] in touching]
    while earlier[-1][0].startswith("STS"):
        earlier.pop()
    assert earlier[-1] == ("BAR.SYNC.DEFER_BLOCKING", "0x1"), "all have read before the end"
