"""Nsight Compute as a child process, and what its CSV says."""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from turbo_rcm_patch.errors import ConfigError, MissingPackageError

__all__ = ["METRICS", "find_ncu", "parse", "profile"]

METRICS: Final = ("dram__bytes_read.sum", "dram__bytes_write.sum")
_UNITS: Final = {
    "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12,
    "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
}  # fmt: skip
#: Bytes by metric.
Workload = dict[str, float]
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


def profile(
    command: Sequence[str], environment: Mapping[str, str], timeout: float = 240.0
) -> tuple[list[Workload], str]:
    """Run a command that launches CUDA graphs between cudaProfilerStart and Stop under the
    profiler.

    A graph is one workload: what one of its kernels leaves in L2 the next one finds there. The two
    counters fit into one pass, so nothing is replayed.

    Args:
        command: What to run.
        environment: Variables to add to this process's.
        timeout: Seconds.

    Returns:
        Bytes by metric of every graph, in the order of their launches, and what was printed.

    Raises:
        ConfigError: The profiler failed or counted nothing; the message quotes it.
    """
    full = [
        find_ncu(),
        *("--clock-control", "none", "--cache-control", "none"),
        *("--graph-profiling", "graph", "--profile-from-start", "off"),
        *("--metrics", ",".join(METRICS)),
        *("--csv", "--print-units", "base"),
        *command,
    ]
    try:
        done = subprocess.run(
            full, env=os.environ | environment, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError("ncu", got=f"no end in {timeout:.0f} s") from error
    except OSError as error:
        raise ConfigError("ncu", got=str(error)) from error
    try:
        found = parse(done.stdout)
    except ConfigError as error:
        said = [line for line in (done.stdout + done.stderr).splitlines() if "==ERROR==" in line]
        tail = said or (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise ConfigError(
            "ncu", expected="counters", got=f"exit {done.returncode}: {' '.join(tail)[:500]}"
        ) from error
    if done.returncode:
        raise ConfigError("ncu", got=f"exit {done.returncode}")
    return found, done.stdout


def parse(text: str) -> list[Workload]:
    """Bytes by metric of every workload of `ncu --csv`, in order.

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
    found: dict[int, Workload] = {}
    for row in csv.DictReader(io.StringIO("\n".join(table))):
        name = row.get("Metric Name", "")
        if name not in METRICS:
            continue
        unit, value = row["Metric Unit"], row["Metric Value"].replace(",", "")
        try:
            found.setdefault(int(row["ID"]), {})[name] = float(value) * _UNITS[unit]
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"output of ncu, {name}", expected="a number of bytes", got=f"{value} {unit}"
            ) from error
    missing = [name for name in METRICS if any(name not in one for one in found.values())]
    if missing or not found:
        raise ConfigError("output of ncu", expected=f"the metrics {', '.join(missing or METRICS)}")
    return [found[number] for number in sorted(found)]
