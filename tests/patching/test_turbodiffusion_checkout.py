"""TurboDiffusion's real code, from a checkout: `pytest tests/patching/test_turbodiffusion_checkout
.py --turbodiffusion PATH`. Its imports need einops and loguru beside what this package needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def results(pytestconfig: pytest.Config) -> dict[str, Any]:
    path = pytestconfig.getoption("--turbodiffusion")
    if path is None:
        pytest.skip("needs --turbodiffusion PATH, a checkout of thu-ml/TurboDiffusion")
    # A process of its own: its packages have names like `ops`, and its SLA runs interpreted.
    done = subprocess.run(
        [sys.executable, HERE / "turbodiffusion_checkout.py", path],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["2.1-t2v", "2.1-i2v", "2.2-i2v"])
def test_its_model_is_patched_and_put_back(results: dict[str, Any], name: str) -> None:
    result = results[name]
    assert results["wrapped"] == "CheckpointWrapper"
    assert result["finite"] and result["back"]
    assert result["fused"] == (8 if name == "2.1-i2v" else 6)
    exact, int8 = result["errors"]
    assert exact < 1e-5
    assert int8 < 0.02


@pytest.mark.parametrize("name", ["2.1", "2.2"])
def test_its_model_without_flash_attn(results: dict[str, Any], name: str) -> None:
    result = results[f"{name}-without-flash-attn"]
    assert result["kept"] == ["kept"] * 6 and result["error"] < 0.02 and result["back"]


def test_its_model_with_sla(results: dict[str, Any]) -> None:
    """By the emulation, and by the kernels in the interpreter."""
    result = results["2.1-sla"]
    assert result["finite"] and result["back"]
    assert max(result["errors"]) < 0.02


def test_its_sla_on_the_same_inputs(results: dict[str, Any]) -> None:
    """The projection is random. Exact means its arithmetic; int8 q and k cost 0.011."""
    assert results["sla"]["exact"] < 1e-5
    assert results["sla"]["emulated"] < 0.02
    assert results["sla"]["triton"] < 0.02


def test_its_vae_is_patched_and_put_back(results: dict[str, Any]) -> None:
    result = results["vae"]
    assert max(result["errors"]) < 3e-6 and result["fused"] == 18 and result["back"]
    assert all(how.startswith("channels-last") for how in result["ran"])
