"""Write the operations as a kernel of the Hugging Face Hub: `python build.py --out DIR`.

`kernels.get_kernel` loads the result: `build/torch-<backend>/` with the Python files of
`turbo_rcm_patch.ops` and of all that they import, and metadata. They are Triton and torch, so
nothing is compiled (the format's `torch-noarch`). Two versions may be loaded in one process, so
imports become relative, and operations are registered under an identifier made from the content.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import re
import shutil
from pathlib import Path

MODULE = "turbo_rcm_patch"
PACKAGE = Path(__file__).resolve().parents[2] / MODULE
BACKENDS = ("cuda", "rocm", "cpu")
#: The package's name in strings (of modules for importlib, of operations) and after `torch.ops.`.
_NAMED = re.compile(rf"""(?<=["']){MODULE}(?=["'.:])|(?<=torch\.ops\.){MODULE}\b""")
_IMPORT = re.compile(rf"^(\s*from ){MODULE}(\.| (?=import))", re.MULTILINE)
_ENTRY = '''"""int8 attention and its fused neighbours, as turbo_rcm_patch has them."""

from . import errors
from .ops import *
from .ops import __all__ as _operations
from .ops.sageattn import sageattn

__all__ = [*_operations, "errors", "sageattn"]
'''


def sources() -> dict[str, str]:
    """Return every file of the kernel by its path in the package: operations, kernels, and what
    they import."""
    wanted = sorted((PACKAGE / "ops").rglob("*"))
    found: dict[str, str] = {}
    while wanted:
        path = wanted.pop()
        name = path.relative_to(PACKAGE).as_posix()
        if path.suffix not in (".py", ".json") or name in found:
            continue
        found[name] = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(found[name])) if path.suffix == ".py" else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{MODULE}"):
                parent = PACKAGE.joinpath(*(node.module or "").split(".")[1:])
                for tail in (parent, *(parent / alias.name for alias in node.names)):
                    files = (tail.with_suffix(".py"), tail / "__init__.py")
                    wanted += [file for file in files if file.is_file() and tail != PACKAGE]
    return dict(sorted(found.items()))


def relocated(name: str, text: str, identifier: str) -> str:
    """Return a file whose imports are relative and whose operations have another namespace."""
    if not name.endswith(".py"):
        return text
    dots = "." * name.count("/")
    text = _IMPORT.sub(lambda m: f"{m[1]}.{dots}" if m[2] == "." else f"{m[1]}.{dots} ", text)
    text = _NAMED.sub(identifier, text)
    if re.search(rf"^\s*(import|from) {MODULE}\b", text, re.MULTILINE):
        raise SystemExit(f"{name}: an import that build.py cannot make relative")
    return text


def build(out: Path) -> list[Path]:
    """Write the folder.

    Args:
        out: A new folder, or one that this wrote before, whose `build` is replaced.

    Returns:
        The variants.
    """
    if out.exists() and any(out.iterdir()) and not (out / "build.toml").is_file():
        raise SystemExit(f"{out} is not empty and was not written by this command")
    shutil.rmtree(out / "build", ignore_errors=True)
    files = sources()
    digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:10]
    variants = []
    for backend in BACKENDS:
        identifier = f"_{MODULE}_{backend}_{digest}"
        written = {name: relocated(name, text, identifier) for name, text in files.items()}
        written["__init__.py"] = _ENTRY
        sums = {
            name: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            for name, text in sorted(written.items())
        }
        metadata = {
            "id": identifier,
            "name": "turbo-rcm-patch",
            "version": 0,  # of the interface; every release that changes it raises it
            "license": "MIT",
            "python-depends": [],
            "backend": {"type": backend},
            "digest": {"algorithm": "sha256", "files": sums},
        }
        written["metadata.json"] = json.dumps(metadata, indent=2) + "\n"
        variants.append(out / "build" / f"torch-{backend}")
        for name, text in written.items():
            path = variants[-1] / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    here = Path(__file__).parent
    shutil.copyfile(here / "build.toml", out / "build.toml")
    shutil.copyfile(here / "CARD.md", out / "README.md")
    return variants


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    print(*build(parser.parse_args().out), sep="\n")
