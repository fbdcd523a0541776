"""The Hub folder: its layout, and that it runs where this package is not installed."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.files import everything

ROOT = Path(__file__).parents[2]
COMMAND = ROOT / "integrations" / "hub" / "build.py"

USE = """
import json, sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("turbo_rcm_patch", "diffusers", "transformers"):
            raise ImportError(f"{name} was imported")

sys.meta_path.insert(0, Refuse())
variant = Path(sys.argv[1])

def load(file, name):
    spec = spec_from_file_location(name, file)
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

identifier = json.loads((variant / "metadata.json").read_text())["id"]
kernel = load(variant / "__init__.py", identifier)
assert "triton" not in sys.modules

import torch
import torch.nn.functional as F

q, k, v = (torch.randn(1, 2, 1100, 64) for _ in range(3))
exact = F.scaled_dot_product_attention(q, k, v)
out = kernel.sageattn(q, k, v)
assert 1e-4 < float((out - exact).norm() / exact.norm()) < 0.015
compiled = torch.compile(kernel.sageattn, backend="eager", fullgraph=True)
assert torch.equal(compiled(q, k, v), out)
x = torch.randn(1, 1100, 128)
spec = kernel.AttentionSpec(heads=2)
assert kernel.attention_skip(x, x, x, spec, residual=x, c_out=0.5).shape == x.shape
assert hasattr(getattr(torch.ops, identifier), "attention")
assert not hasattr(torch.ops.turbo_rcm_patch, "attention")
try:
    kernel.sageattn(q, k, v, "DHN")
except kernel.errors.ConfigError:
    pass
else:
    raise AssertionError("the layout was not refused")
for file in sorted(variant.glob("*/*.py")):
    if file.parent.name in ("ops", "kernels") and file.name != "__init__.py":
        import_module(f"{identifier}.{file.parent.name}.{file.stem}")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hub") / "kernel"
    subprocess.run([sys.executable, COMMAND, "--out", out], check=True, timeout=120)
    return out


def test_layout_and_metadata(folder: Path) -> None:
    variants = sorted(folder.glob("build/*"))
    assert [path.name for path in variants] == ["torch-cpu", "torch-cuda", "torch-rocm"]
    assert (folder / "build.toml").is_file() and (folder / "README.md").is_file()
    identifiers = set()
    for variant in variants:
        metadata = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))
        assert metadata["name"] == "turbo-rcm-patch" and metadata["id"].isidentifier()
        assert metadata["backend"]["type"] == variant.name.removeprefix("torch-")
        identifiers.add(metadata["id"])
        files = everything(variant)
        del files["metadata.json"]
        assert metadata["digest"]["files"] == {
            name: base64.b64encode(hashlib.sha256(data).digest()).decode()
            for name, data in files.items()
        }
        assert not {name.split("/")[0] for name in files} & {"patching", "video", "tiny"}
    assert len(identifiers) == 3


def test_the_same_sources_give_the_same_folder_over_their_own(folder: Path) -> None:
    before = everything(folder)
    subprocess.run([sys.executable, COMMAND, "--out", folder], check=True, timeout=120)
    assert everything(folder) == before


def test_another_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    done = subprocess.run(
        [sys.executable, COMMAND, "--out", tmp_path], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and "is not empty" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_runs_without_this_package(folder: Path, tmp_path: Path) -> None:
    variant = folder / "build" / "torch-cpu"
    command = [sys.executable, "-W", "error", "-B", "-c", USE, variant]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
