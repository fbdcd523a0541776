"""What an import needs: neither triton nor diffusers. Each case is a fork of a process that has
imported nothing of this package."""

from __future__ import annotations

import json
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


#: Each of the codes in a fork of its own; prints how they ended.
FORK = """
import gc, json, os, sys, traceback, warnings
gc.freeze()  # A collection in a fork copies the memory of all that was imported.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
ended = {}
for name, code in json.loads(sys.argv[1]).items():
    child = os.fork()
    if not child:
        try:
            exec(compile(code, name, "exec"), dict(globals()))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    ended[name] = os.waitpid(child, 0)[1]
print(json.dumps(ended))
"""


MODULES = ("", ".boundary", ".models", ".ops", ".patching")
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
#: Codes that see the same packages: what these are, what is imported before, and what each code
#: shows.
TOGETHER: dict[str, tuple[tuple[str, ...], str, dict[str, str]]] = {
    "where everything is": (
        (), "",
        {"help and a missing prompt load nothing": HELP},
    ),
    "without triton and diffusers": (
        ("triton", "diffusers", "transformers", "huggingface_hub", "comfy", "folder_paths"),
        "import torch",
        {
            **{f"turbo_rcm_patch{name} imports": f"import turbo_rcm_patch{name}"
               for name in MODULES},
            "operations run on a CPU": OPERATIONS,
            "the ComfyUI nodes import": NODES,
            "every public name says what to install": EVERY_NAME,
        },
    ),
    "with diffusers alone": (
        (),
        HIDE + "from diffusers import WanTransformer3DModel",
        {
            "a model is patched, and sageattention is not imported": BASE,
        },
    ),
    "with the base alone": (
        ("numpy", "PIL", "diffusers", "transformers"),
        "import warnings; warnings.filterwarnings('ignore', 'Failed to initialize NumPy')",
        {"a command names the extra that it needs": COMMANDS},
    ),
}  # fmt: skip


@pytest.mark.parametrize("where", TOGETHER)
def test_what_runs_where_packages_are_missing(where: str) -> None:
    blocked, before, codes = TOGETHER[where]
    code = f"{BLOCK.format(blocked=blocked)}{before}\n{FORK}"
    command = [sys.executable, "-W", "error", "-c", code, json.dumps(codes)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    ended = json.loads(done.stdout.splitlines()[-1])
    assert not [name for name in codes if ended[name] != 0], done.stderr
