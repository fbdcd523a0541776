"""What is imported is declared, what is declared is pinned, and the commands are there."""

from __future__ import annotations

import ast
import sys
import tomllib
import warnings
from pathlib import Path
from unittest import mock

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from turbo_rcm_patch.extras import _INCLUDED, DIFFUSERS, EXTRAS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OURS = {"turbo_rcm_patch", "benchmarks", "training", "tests"}
#: Hosts whose plug-ins we are: they import our files for them.
ENGINES = {"sglang", "vllm-omni", "xfuser", "lightx2v"}
DISTRIBUTION_OF = {"PIL": "pillow", "sklearn": "scikit-learn", "skimage": "scikit-image"}


def declared(*extras: str) -> dict[str, Requirement]:
    """The base and some extras, with the extras that these name in turn."""
    requirements = [Requirement(text) for text in PROJECT["dependencies"]]
    for extra in extras:
        requirements += [Requirement(t) for t in PROJECT["optional-dependencies"][extra]]
    found = {canonicalize_name(one.name): one for one in requirements}
    own = found.pop("turbo-rcm-patch", None)
    return found | declared(*own.extras) if own else found


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wanted = [line.split("#")[0].strip() for line in lines]
    found = [line.split("==") for line in wanted if line]
    return {canonicalize_name(name): version for name, version in found}


def third_party(folder: Path) -> dict[str, str]:
    """Distribution -> one file that imports it."""
    found: dict[str, str] = {}
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                if top not in sys.stdlib_module_names and top not in OURS:
                    found[canonicalize_name(DISTRIBUTION_OF.get(top, top))] = str(path)
    return found


def test_what_the_package_imports_is_declared() -> None:
    known = declared("all")
    for name, path in third_party(ROOT / "turbo_rcm_patch").items():
        assert name in known | dict.fromkeys(ENGINES), (
            f"{path} imports {name}, which pyproject.toml does not list"
        )
    # FlashAttention and xFormers are peers that a user may have, imported by name.
    for folder in ("benchmarks", "training", "examples"):
        for name, path in third_party(ROOT / folder).items():
            # ViZDoom renders a world, on a machine that trains.
            assert name in declared("dev") | {"vizdoom": None}, f"{path} imports {name}"


def test_the_base_install_is_what_patching_needs() -> None:
    """The base brings no package that its host may need in another release."""
    assert set(declared()) == {"torch", "triton", "triton-windows", "safetensors"}
    extras = dict.fromkeys(("ops", "models", "patching"), ("diffusers", "sage"))
    for part, brought in (extras | {"checkpoints": ("video",)}).items():
        known = declared(*brought)
        for name, path in third_party(ROOT / "turbo_rcm_patch" / part).items():
            assert name in known, f"{path} imports {name}"


def test_the_code_knows_the_packages_of_every_extra() -> None:
    brought = {
        extra: {canonicalize_name(DISTRIBUTION_OF.get(name, name)) for name in modules}
        for extra, modules in EXTRAS.items()
    }
    assert set().union(*brought.values()) == set(declared("all")) - set(declared())
    for extra, known in brought.items():
        known = known.union(*(brought[name] for name in _INCLUDED.get(extra, ())))
        assert known == set(declared(extra)) - set(declared()), extra


def test_the_code_knows_the_declared_ranges() -> None:
    from turbo_rcm_patch.cli.doctor import RANGES

    known = declared("dev")
    for name, (least, first_untested) in {"diffusers": DIFFUSERS, **RANGES}.items():
        bounds = {s.operator: s.version for s in known[name].specifier}
        assert bounds == {">=": least} | ({"<": first_untested} if first_untested else {}), name


def test_every_dependency_is_pinned_within_its_range() -> None:
    pinned = pins()
    for name, requirement in declared("dev").items():
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue  # of another system
        assert name in pinned, f"{name} has no pin in constraints.txt"
        assert requirement.specifier.contains(pinned[name]), f"{requirement} excludes its pin"


def test_a_gpu_without_triton_runs_plain_torch_and_says_so_once() -> None:
    import torch

    from turbo_rcm_patch.ops import resolve_impl

    resolve_impl.cache_clear()
    try:
        with mock.patch("turbo_rcm_patch.ops.dispatch.find_spec", return_value=None):
            with pytest.warns(RuntimeWarning, match="pip install triton"):
                assert resolve_impl("auto", torch.device("cuda", 0)) == "reference"
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert resolve_impl("auto", torch.device("cuda", 0)) == "reference"
    finally:
        resolve_impl.cache_clear()
