"""Nsight Compute as a child process, and what its CSV says."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from turbo_rcm_patch.errors import ConfigError, MissingPackageError

__all__ = ["METRICS", "MODES", "find_ncu", "parse", "profile"]

METRICS: Final = ("dram__bytes_read.sum", "dram__bytes_write.sum")
#: Ways to replay, best first. In a range everything between start and stop is one workload, so
#: that a kernel finds in L2 what the one before it left there. "kernel" sums single kernels.
MODES: Final = ("range", "application-range", "kernel")
_UNITS: Final = {
    "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12,
    "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
}  # fmt: skip
_USUAL: Final = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/ncu")


def find_ncu() -> str:
    """Path of the profiler.

    Raises:
        MissingPackageError: There is none.
    """
    found = shutil.which("ncu") or next((p for p in _USUAL if Path(p).is_file()), None)
    if found is None:
        others = sorted(Path("/opt/nvidia/nsight-compute").glob("*/ncu"))
        found = str(others[-1]) if others else None
    if found is None:
        raise MissingPackageError(
            "ncu",
            expected="Nsight Compute in PATH",
            got="no such program",
            remedy="Install the CUDA toolkit's nsight-compute package and let this user read "
            "performance counters (NVreg_RestrictProfilingToAdminUsers=0, or run as root)",
        )
    return found


def profile(command: Sequence[str], mode: str, timeout: float = 240.0) -> dict[str, float]:
    """Run a command that calls cudaProfilerStart and Stop under the profiler.

    Args:
        command: What to run.
        mode: One of `MODES`.
        timeout: Seconds.

    Returns:
        Bytes by metric, over everything between start and stop, and "workloads", how many ranges
        or kernels that were.

    Raises:
        ConfigError: The profiler failed or counted nothing; the message quotes it.
    """
    full = [
        find_ncu(),
        *("--clock-control", "none", "--cache-control", "none"),
        *("--replay-mode", mode),
        *("--metrics", ",".join(METRICS)),
        *("--csv", "--print-units", "base"),
        *(("--profile-from-start", "off") if mode == "kernel" else ()),
        *command,
    ]
    try:
        done = subprocess.run(full, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"ncu --replay-mode {mode}", got=f"no end in {timeout:.0f} s") from error
    except OSError as error:
        raise ConfigError(f"ncu --replay-mode {mode}", got=str(error)) from error
    try:
        found = parse(done.stdout)
    except ConfigError as error:
        said = [line for line in (done.stdout + done.stderr).splitlines() if "==ERROR==" in line]
        tail = said or (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise ConfigError(
            f"ncu --replay-mode {mode}",
            expected="counters",
            got=f"exit {done.returncode}: {' '.join(tail)[:500]}",
        ) from error
    if done.returncode:
        raise ConfigError(f"ncu --replay-mode {mode}", got=f"exit {done.returncode}")
    return found


def parse(text: str) -> dict[str, float]:
    """Bytes by metric summed over all workloads of `ncu --csv`, and their number as "workloads".

    Args:
        text: What it printed: lines of its own ("==PROF== ..."), then CSV with a header line.

    Raises:
        ConfigError: No such table, or a metric is not in it.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ConfigError("output of ncu", expected='a CSV table that begins with "ID"')
    table = [line for line in lines[start:] if line.startswith('"')]
    sums = dict.fromkeys(METRICS, 0.0)
    seen: dict[str, set[str]] = {name: set() for name in METRICS}
    for row in csv.DictReader(io.StringIO("\n".join(table))):
        name = row.get("Metric Name", "")
        if name not in sums:
            continue
        unit, value = row["Metric Unit"], row["Metric Value"].replace(",", "")
        try:
            sums[name] += float(value) * _UNITS[unit]
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"output of ncu, {name}", expected="a number of bytes", got=f"{value} {unit}"
            ) from error
        seen[name].add(row["ID"])
    missing = [name for name in METRICS if not seen[name]]
    if missing:
        raise ConfigError("output of ncu", expected=f"the metrics {', '.join(missing)}")
    return {**sums, "workloads": float(len(set.union(*seen.values())))}
