"""What an import costs: neither triton nor diffusers, and little time. Each case is a fresh
process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

BLOCK = """
import sys
BLOCKED = {blocked!r}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{{name}} was imported")
sys.meta_path.insert(0, Refuse())
"""


def run(code: str, *, blocked: tuple[str, ...] = ()) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", BLOCK.format(blocked=blocked) + code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "module",
    [
        "turbo_rcm_patch",
        "turbo_rcm_patch.boundary",
        "turbo_rcm_patch.models",
        "turbo_rcm_patch.ops",
        "turbo_rcm_patch.patching",
    ],
)
def test_imports_without_triton_and_diffusers(module: str) -> None:
    run(f"import {module}", blocked=("triton", "diffusers", "transformers"))


def test_public_names_are_there_and_listed() -> None:
    code = """
import turbo_rcm_patch
for name in ("patch_model", "unpatch_model", "patched", "find_pairs", "PatchConfig"):
    assert name in turbo_rcm_patch.__all__ and name in dir(turbo_rcm_patch), name
    assert getattr(turbo_rcm_patch, name).__doc__, name
"""
    run(code, blocked=("triton",))


def test_operations_run_on_a_cpu_without_triton() -> None:
    code = """
import torch
from turbo_rcm_patch import ops
q, k, v = (torch.randn(1, 9, 64) for _ in range(3))
x = torch.randn(1, 9, 64)
out = ops.attention_skip(q, k, v, ops.AttentionSpec(heads=1), residual=x, c_out=0.5)
assert out.shape == x.shape and out.isfinite().all()
"""
    run(code, blocked=("triton", "diffusers"))


def test_import_is_quick() -> None:
    """Counted in processor time, torch included, so that a busy machine does not decide."""
    code = """
import time
start = time.process_time()
import turbo_rcm_patch
print(time.process_time() - start)
"""
    assert min(float(run(code)) for _ in range(2)) < 2.5
