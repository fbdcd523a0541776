"""What `doctor` says of several GPUs and their links."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import torch

from turbo_rcm_patch.video import doctor, links

NVLINK = """
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tSYS\tSYS\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""
PCIE = NVLINK.replace("NV18", "PHB")
MIXED = """
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity
GPU0\t X \tNV4\tSYS\tSYS\t0-31
GPU1\tNV4\t X \tSYS\tSYS\t0-31
GPU2\tSYS\tSYS\t X \tNV4\t0-31
GPU3\tSYS\tSYS\tNV4\t X \t0-31
"""


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        (NVLINK, "NVLink"),
        (PCIE, "PCIe"),
        (MIXED, "PCIe"),
        ("", ""),
        ("\tGPU0\tCPU Affinity\nGPU0\t X \t0-31\n", ""),
        ("NVIDIA-SMI has failed because it couldn't communicate with the driver.", ""),
        (NVLINK.replace("GPU1\tNV18\t X", "GPU1\t X"), ""),
    ],
    ids=["nvlink", "pcie", "mixed", "nothing", "one", "no-driver", "torn"],
)
def test_the_slowest_pair_counts(topology: str, expected: str) -> None:
    assert links._slowest(topology) == expected


@pytest.mark.parametrize(
    "fault",
    [
        OSError("no such file"),
        subprocess.TimeoutExpired("nvidia-smi", 20),
        subprocess.CalledProcessError(9, "nvidia-smi"),
        UnicodeDecodeError("utf-8", b"", 0, 1, "what it printed"),
    ],
    ids=lambda fault: type(fault).__name__,
)
def test_a_driver_that_does_not_answer_is_no_error(
    fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: Any, **__: Any) -> None:
        raise fault

    def unknown(*_: Any) -> bool:
        raise AssertionError("invalid device id")

    monkeypatch.setattr(links.shutil, "which", lambda name: name)
    monkeypatch.setattr(links.subprocess, "run", run)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", unknown)
    assert links.joined(2) == ("", None)


def test_two_are_slower_where_bytes_take_longer_than_they_save() -> None:
    """A rank of two sends 5/4 of a byte for each token and channel of the whole sequence."""
    bytes_ = 3 * 16_380 * 1536 / 2 + 2 * 16_380 * 1536 / 2
    seconds = links.least_seconds(30, 1536, 32_760, 25e9)
    assert seconds == pytest.approx(30 * 2 * (bytes_ / 25e9 + 10 * 30e-6))


@pytest.mark.parametrize(
    ("count", "topology", "state", "words"),
    [
        (1, NVLINK, None, ()),
        (2, NVLINK, "ok", ("NVLink",)),
        (2, PCIE, "note", ("PCIe between some", "slower than one", "no access")),
        (2, "", "note", ("does not say", "no access")),
    ],
    ids=["one", "nvlink", "pcie", "unknown"],
)
def test_doctor_says_when_a_split_does_not_pay(
    count: int,
    topology: str,
    state: str | None,
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: topology == NVLINK)
    monkeypatch.setattr(links, "_topology", lambda: topology)
    found = list(doctor._links())
    assert [one.state for one in found] == ([] if state is None else [state])
    for one in found:
        assert all(word in one.text for word in words), one.text
        assert bool(one.remedy) == (state == "note")
