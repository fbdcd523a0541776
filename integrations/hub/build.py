"""Write the operations as a kernel of the Hugging Face Hub: `python build.py --out DIR`.

The result is what `kernels.get_kernel` loads: `build/torch-<backend>/` with the Python files of
`turbo_rcm_patch.ops` and what they import, and metadata. They are Triton and torch, so nothing is
compiled (the format's `torch-noarch`). Two versions may be loaded in one process, so imports
become relative, and operations are registered under an identifier made from the content.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "turbo_rcm_patch"
NAME = "turbo-rcm-patch"
MODULE = PACKAGE.name
#: The format's version of the interface, which every release that changes it raises. 0 is a beta.
VERSION = 0
BACKENDS = ("cuda", "rocm", "cpu")
_HERE = Path(__file__).parent
#: Names inside strings: of modules for importlib, of operations for torch.
_IN_STRINGS = re.compile(rf"""(["']){MODULE}(\.|::)""")
_IMPORT = re.compile(rf"^(\s*from ){MODULE}(\.| (?=import))", re.MULTILINE)


def sources() -> dict[str, str]:
    """Every file of the kernel by its path in the package: operations, kernels, their tables, and
    what they import."""
    wanted = [path for part in ("ops", "kernels") for path in sorted((PACKAGE / part).rglob("*"))]
    found: dict[str, str] = {}
    while wanted:
        path = wanted.pop()
        name = path.relative_to(PACKAGE).as_posix()
        if path.suffix not in (".py", ".json") or name in found:
            continue
        found[name] = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            wanted += imported(found[name])
    return dict(sorted(found.items()))


def imported(text: str) -> Iterator[Path]:
    """Files of the package that a file imports."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == MODULE:
            parts = (node.module or "").split(".")[1:]
            names = [alias.name for alias in node.names]
            for tail in [parts, *([*parts, name] for name in names)]:
                path = PACKAGE.joinpath(*tail) if tail else PACKAGE / "__init__"
                for file in (path.with_suffix(".py"), path / "__init__.py"):
                    if tail and file.is_file():
                        yield file


def relocated(name: str, text: str, identifier: str) -> str:
    """A file whose imports are relative and whose operations have another namespace."""
    if not name.endswith(".py"):
        return text
    dots = "." * name.count("/")
    text = _IMPORT.sub(lambda m: f"{m[1]}.{dots}" if m[2] == "." else f"{m[1]}.{dots} ", text)
    text = _IN_STRINGS.sub(rf"\g<1>{identifier}\g<2>", text)
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        if any(one.split(".")[0] == MODULE for one in names):
            raise SystemExit(f"{name}:{node.lineno}: an import that build.py cannot make relative")
    return text


def public_names(ops: str) -> list[str]:
    """`__all__` of `turbo_rcm_patch.ops`."""
    for node in ast.parse(ops).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    raise SystemExit("ops/__init__.py has no __all__")


def entry(names: list[str]) -> str:
    """`__init__.py` of a variant."""
    imports = "".join(f"    {name},\n" for name in names)
    listed = "".join(f'    "{name}",\n' for name in sorted([*names, "errors", "sageattn"]))
    return (
        '"""int8 attention and its fused neighbours, as turbo_rcm_patch has them."""\n\n'
        f"from . import errors\nfrom .ops import (\n{imports})\n"
        f"from .ops.sageattn import sageattn\n\n__all__ = [\n{listed}]\n"
    )


#: `<variant>/turbo_rcm_patch/__init__.py`, where older versions of `kernels` look.
_COMPATIBLE = '''"""The kernel, for older versions of `kernels`."""

import importlib.util
import json
import sys
from pathlib import Path

_variant = Path(__file__).resolve().parents[1]
_name = json.loads((_variant / "metadata.json").read_text(encoding="utf-8"))["id"]
if _name not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_name, _variant / "__init__.py")
    _module = importlib.util.module_from_spec(_spec)
    sys.modules[_name] = _module
    _spec.loader.exec_module(_module)
__all__ = sys.modules[_name].__all__
globals().update({name: getattr(sys.modules[_name], name) for name in __all__})
'''


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
        variant = out / "build" / f"torch-{backend}"
        written = {name: relocated(name, text, identifier) for name, text in files.items()}
        written["__init__.py"] = entry(public_names(files["ops/__init__.py"]))
        written[f"{MODULE}/__init__.py"] = _COMPATIBLE
        for name, text in written.items():
            path = variant / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        sums = {
            name: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            for name, text in sorted(written.items())
        }
        metadata = {
            "id": identifier,
            "name": NAME,
            "version": VERSION,
            "license": "MIT",
            "python-depends": [],
            "backend": {"type": backend},
            "digest": {"algorithm": "sha256", "files": sums},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", "utf-8")
        variants.append(variant)
    for name in ("build.toml", "CARD.md"):
        shutil.copyfile(_HERE / name, out / ("README.md" if name == "CARD.md" else name))
    return variants


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    for variant in build(parser.parse_args().out):
        print(variant)
    return 0


if __name__ == "__main__":
    sys.exit(main())
