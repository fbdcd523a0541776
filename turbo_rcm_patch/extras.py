"""The packages of each extra, and the error that names the extra to install.

The base install is enough for the operations, for `sageattn` and for TurboDiffusion's networks.
diffusers' models, pipelines, videos and reports need more.
"""

from __future__ import annotations

import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from turbo_rcm_patch.errors import MissingPackageError

#: Extra -> the modules that it installs beyond the base. tests/test_packaging.py compares it with
#: pyproject.toml.
EXTRAS: Final = {
    "diffusers": ("diffusers", "huggingface_hub"),
    "video": (
        *("transformers", "tokenizers", "accelerate", "ftfy"),
        *("imageio", "imageio_ffmpeg", "numpy", "PIL", "rich"),
    ),
    "report": ("jinja2",),
    "lora": ("peft",),
    "sage": ("sageattention",),
}
#: Extra -> the extras that it includes.
_INCLUDED: Final = {
    "video": ("diffusers",), "report": ("diffusers", "video"), "lora": ("diffusers", "video"),
}  # fmt: skip
#: The tested releases of diffusers: at least the first number, and less than the second.
DIFFUSERS: Final = ("0.42", "0.43")


def install(extra: str) -> str:
    """Return the command that installs this package with an extra. It is on no package index, so
    the command names the clone that this is, or says what to put there."""
    source = Path(__file__).resolve().parents[1]
    if (source / "pyproject.toml").is_file():
        return f"pip install '{source}[{extra}]'"
    return f"pip install 'PATH[{extra}]', where PATH is the clone or archive of turbo_rcm_patch"


def missing(purpose: str, *modules: str, extra: str = "") -> MissingPackageError:
    """Return the error about modules that are not installed.

    Args:
        purpose: The feature that needs them.
        modules: Their names.
        extra: The extra to install; by default that of the first module.
    """
    extra = extra or next((name for name, held in EXTRAS.items() if modules[0] in held), "")
    return MissingPackageError(
        purpose,
        expected=f"the packages of the extra [{extra}]"
        if extra
        else "a package of another project",
        got=f"no {', '.join(modules)}",
        remedy=install(extra) if extra else f"pip install {modules[0]}",
    )


def require(extra: str, purpose: str, *packages: str) -> None:
    """Check that packages of an extra are installed, without importing them.

    Args:
        extra: A key of `EXTRAS`; the extras that it includes are checked too.
        purpose: The feature that needs them, for the message.
        packages: The modules that are needed; all of the extra by default.

    Raises:
        MissingPackageError: Some are missing; the message names them and the extra to install.
    """
    names = [name for part in (*_INCLUDED.get(extra, ()), extra) for name in EXTRAS[part]]
    absent = [name for name in packages or names if find_spec(name) is None]
    if absent:
        raise missing(purpose, *absent, extra=extra)


def version_of(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_diffusers(purpose: str) -> None:
    """Check that diffusers is a release that the code was written for.

    A newer release than was tested is accepted, because each family compares the forwards of its
    classes with the signatures that it knows.

    Args:
        purpose: The feature that needs diffusers, for the message.

    Raises:
        MissingPackageError: diffusers is not installed, or is older.
    """
    least, untested = DIFFUSERS
    installed = version_of("diffusers") or ""
    if tuple(map(int, re.findall(r"\d+", installed)[:2])) >= tuple(map(int, least.split("."))):
        return
    raise MissingPackageError(
        purpose,
        expected=f"diffusers from {least} on (tested: before {untested})",
        got=f"diffusers {installed}" if installed else "no diffusers",
        remedy=f"pip install 'diffusers>={least},<{untested}' where nothing else needs another; "
        "`sageattn` and the operations run beside any release",
    )
