"""What the extras of the package bring, and the error that names the one to install.

The base install is enough for the operations, for `sageattn` and for TurboDiffusion's networks.
diffusers' models, pipelines, videos and reports need more.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Final

from turbo_rcm_patch.errors import MissingPackageError

#: Extra -> the modules that it installs beyond the base. tests/test_packaging.py compares it with
#: pyproject.toml.
EXTRAS: Final = {
    "diffusers": ("diffusers", "huggingface_hub"),
    "video": (
        "transformers",
        "tokenizers",
        "accelerate",
        "ftfy",
        "imageio",
        "imageio_ffmpeg",
        "numpy",
        "PIL",
        "rich",
    ),
    "report": ("jinja2", "matplotlib"),
    "sage": ("sageattention",),
}
#: Extra -> those that it includes.
_INCLUDED: Final = {"video": ("diffusers",), "report": ("diffusers", "video")}
#: The releases of diffusers that are tested: from the first, before the second.
DIFFUSERS: Final = ("0.42", "0.43")


def require(extra: str, purpose: str, *packages: str) -> None:
    """Check that packages of an extra are installed. Nothing is imported.

    Args:
        extra: A key of `EXTRAS`, with what it includes.
        purpose: What needs them, for the message.
        packages: Those that are needed; all of the extra by default.

    Raises:
        MissingPackageError: Some are missing; the message names them and the extra to install.
    """
    names = [name for one in (*_INCLUDED.get(extra, ()), extra) for name in EXTRAS[one]]
    missing = [name for name in packages or names if find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            purpose,
            expected=f"the packages of turbo_rcm_patch[{extra}]",
            got=f"no {', '.join(missing)}",
            remedy=f"pip install 'turbo_rcm_patch[{extra}]'",
        )


def check_diffusers(purpose: str) -> None:
    """Check that diffusers is a release that the code was written for.

    A newer one than was tested is taken: its forwards are compared with the ones that are known.

    Args:
        purpose: What needs it, for the message.

    Raises:
        MissingPackageError: It is not installed, or older.
    """
    least, untested = DIFFUSERS
    try:
        found = version("diffusers")
    except PackageNotFoundError:
        found = ""
    if tuple(map(int, re.findall(r"\d+", found)[:2])) >= tuple(map(int, least.split("."))):
        return
    raise MissingPackageError(
        purpose,
        expected=f"diffusers from {least} on (tested: before {untested})",
        got=f"diffusers {found}" if found else "no diffusers",
        remedy=f"pip install 'diffusers>={least},<{untested}' where nothing else needs another; "
        "`sageattn` and the operations run beside any release",
    )
