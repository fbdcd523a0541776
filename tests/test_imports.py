"""What an import needs: neither triton nor diffusers. Each case is a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Packages as if they were not installed: they are found nowhere. Asking is no import: torch 2.15
#: looks whether there is a triton.
BLOCK = """
import importlib.machinery
import sys
BLOCKED = {blocked!r}
class Refuse(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.split(".")[0] in BLOCKED
        return None if hidden else super().find_spec(name, path, target)
at = sys.meta_path.index(importlib.machinery.PathFinder)
sys.meta_path[at] = Refuse
"""


#: What no part of the base install brings, but for what diffusers brings.
HIDE = """
from turbo_rcm_patch.extras import EXTRAS
HIDDEN = {"sageattention", "peft", *EXTRAS["video"], *EXTRAS["report"]} - {"numpy", "PIL"}
BLOCKED += (*HIDDEN,)
"""


IMPORTS = """
import torch
for name in ("", ".boundary", ".models", ".ops", ".patching"):
    __import__(f"turbo_rcm_patch{name}")
"""
OPERATIONS = """
import torch
from turbo_rcm_patch import ops
q, k, v = (torch.randn(1, 9, 64) for _ in range(3))
x = torch.randn(1, 9, 64)
out = ops.attention_skip(q, k, v, ops.AttentionSpec(heads=1), residual=x, c_out=0.5)
assert out.shape == x.shape and out.isfinite().all()
"""
BASE = """
import torch
from diffusers import WanTransformer3DModel
from turbo_rcm_patch import patch_model, unpatch_model
model = WanTransformer3DModel(
    num_attention_heads=1, attention_head_dim=64, in_channels=4, out_channels=4, text_dim=16,
    freq_dim=16, ffn_dim=64, num_layers=1, cross_attn_norm=True, rope_max_seq_len=16,
).eval()
inputs = torch.randn(1, 4, 1, 8, 8), torch.tensor([500]), torch.randn(1, 5, 16)
with torch.no_grad():
    before = model(*inputs, return_dict=False)[0]
    report = patch_model(model)
    assert report.fused > 0
    after = model(*inputs, return_dict=False)[0]
assert 0 < (after - before).norm() < 0.05 * before.norm()
unpatch_model(model)
assert not HIDDEN & {name.split(".")[0] for name in sys.modules}
"""
NODES = """
import sys
sys.path.insert(0, "integrations")
import comfyui
assert comfyui.NODE_CLASS_MAPPINGS
"""
HELP = """
import contextlib, io, sys
from turbo_rcm_patch.__main__ import main
told = io.StringIO()
with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
    assert main(["compare", "--help"]) == 0 and main(["generate"]) == 2
assert "expected: --prompt TEXT or --prompts FILE" in told.getvalue()
heavy = {"torch", "diffusers", "transformers", "triton"} & {*sys.modules}
assert not heavy, heavy
"""
EVERY_NAME = """
import inspect
from turbo_rcm_patch.errors import MissingPackageError, TurboRCMError
from turbo_rcm_patch.extras import EXTRAS
BLOCKED += tuple({name for names in EXTRAS.values() for name in names} - {"numpy", "PIL"})
import torch, turbo_rcm_patch, turbo_rcm_patch.video as video
told = []
for package in (turbo_rcm_patch, video):
    for name in package.__all__:
        try:
            value = getattr(package, name)
            if inspect.isfunction(value):
                value(*([torch.nn.Linear(2, 2)] * 3))
        except MissingPackageError as error:
            assert "PATH" in error.remedy or "pip install '/" in error.remedy or (
                "diffusers>=" in error.remedy), error
            told.append(name)
        except (TurboRCMError, TypeError):  # of arguments that no function takes
            pass
some = {"RCMScheduler", "register_backend", "load_pipeline", "generate", "compare"}
assert some <= {*told}, told
"""
COMMANDS = """
import contextlib, io
from turbo_rcm_patch.__main__ import main
for command, extra in (
    (["generate", "--prompt", "a"], "video"),
    (["pairs"], "video"),
    (["convert", "a.pth", "b"], "video"),
    (["compare", "--prompt", "a"], "report"),
    (["judge", "--baseline", "a", "--candidate", "b"], "report"),
    (["demo"], "report"),
):
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        assert main(command) == 2, command
    assert f"[{extra}]'" in told.getvalue(), (command, told.getvalue())
"""
#: What is not installed, and what runs there.
WITHOUT = {
    "nothing": ((), HELP),
    "triton and extras": (
        ("triton", "diffusers", "transformers", "huggingface_hub", "comfy", "folder_paths"),
        IMPORTS + OPERATIONS + NODES + EVERY_NAME,
    ),
    "all but diffusers": ((), HIDE + BASE + COMMANDS),
    "all": (
        ("numpy", "PIL", "diffusers", "transformers"),
        "import warnings; warnings.filterwarnings('ignore', 'Failed to initialize NumPy')"
        + COMMANDS,
    ),
}


@pytest.mark.parametrize("without", WITHOUT)
def test_what_runs_where_packages_are_missing(without: str) -> None:
    blocked, code = WITHOUT[without]
    code = BLOCK.format(blocked=blocked) + code
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
