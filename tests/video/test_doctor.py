"""`doctor`: versions with their remedies, and an attention that the kernels really compute."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch

from turbo_rcm_patch.cli import doctor
from turbo_rcm_patch.cli.doctor import check_version, examine, healthy
from turbo_rcm_patch.ops.attention import sage
from turbo_rcm_patch.video.environment import LIMIT, KernelCheck


@pytest.mark.slow
def test_a_healthy_machine(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    found = examine(told.append)
    text = "\n".join(told)
    assert healthy(found) and text.endswith("generate, compare, judge and demo, LoRAs")
    for topic in ("python", "torch", "triton", "diffusers", "sageattention", "gpu", "kernels"):
        assert any(one.topic.startswith(topic) for one in found)
    if not torch.cuda.is_available():
        assert "by the Triton kernels in Triton's interpreter on the CPU" in text


@pytest.mark.parametrize(
    ("name", "version", "state"),
    [
        *(("transformers", "4.57.1", "missing"), ("transformers", "5.0.0", "ok")),
        *(("diffusers", "0.41.9", "missing"), ("diffusers", "0.42.1", "ok")),
        *(("diffusers", "0.43.0.dev0", "note"), ("torch", "2.7.1+cu128", "missing")),
        *(("torch", "2.13.0+cpu", "ok"), ("imageio-ffmpeg", "0.6.0", "missing")),
        *(("triton", "3.10.0", "ok"), ("accelerate", "unknown", "missing")),
        *(("peft", "0.17.1", "missing"), ("peft", None, "note")),
        *(("safetensors", None, "missing"), ("transformers", None, "note")),
    ],
)
def test_versions_are_compared(name: str, version: str | None, state: str) -> None:
    found = check_version(name, version)
    assert found.state == state and (version or "not installed") in found.text
    assert bool(found.remedy) == (state != "ok")
    assert f"{name}>=" in found.remedy or state == "ok" or version is None


def test_triton_is_needed_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for system, state in (("linux", "missing"), ("win32", "note")):
        monkeypatch.setattr(doctor.sys, "platform", system)
        assert check_version("triton", None).state == state


def test_a_sageattention_that_returns_noise_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sage, "broken_sage", lambda: "it returns noise on Hopper", raising=False)
    monkeypatch.setattr(doctor, "version_of", lambda name: "99.2.0")
    monkeypatch.setattr(doctor, "check_kernels", lambda: KernelCheck(0.01, 200, True))
    found = examine()
    (one,) = (one for one in found if one.topic == "sageattention")
    assert one.state == "missing" and "99.2.0: it returns noise" in one.text and one.remedy
    assert not healthy(found)


def test_a_base_install_without_a_gpu_is_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no numpy, which Triton's interpreter needs and nothing of the base does."""
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "numpy" else object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "check_kernels", pytest.fail)
    found = examine()
    assert healthy(found) and found[-1].remedy == "pip install numpy"


@pytest.mark.parametrize(
    ("code", "error", "works"),
    [(0, LIMIT, True), (0, 2 * LIMIT, False), (0, float("nan"), False), (1, LIMIT, False)],
)
def test_wrong_kernels_are_told(code: int, error: float, works: bool, monkeypatch) -> None:
    """With a remedy, if they do not run."""
    printed = json.dumps({"relative_l2": error, "tokens": 200, "interpreted": True})
    out, err = f"a warning\n{printed}\n", "Traceback\nOSError: no gcc\n"
    done = subprocess.CompletedProcess([], code, stdout=out, stderr=err)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    found = examine()
    assert healthy(found) == works
    if code:
        told = next(str(finding) for finding in found if finding.topic == "kernels")
        assert "OSError: no gcc" in told and "apt-get install gcc" in told
