"""What the extras of the package bring, and the error that names the one to install.

The base install is enough for `patch_model`. Pipelines, videos and reports need more.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from turbo_rcm_patch.errors import MissingPackageError

#: Extra -> the modules that it installs beyond the base. tests/test_packaging.py compares it with
#: pyproject.toml.
EXTRAS: Final = {
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
}


def require(extra: str, purpose: str, *packages: str) -> None:
    """Check that packages of an extra are installed. Nothing is imported.

    Args:
        extra: A key of `EXTRAS`; "report" includes "video", as in pyproject.toml.
        purpose: What needs them, for the message.
        packages: Those that are needed; all of the extra by default.

    Raises:
        MissingPackageError: Some are missing; the message names them and the extra to install.
    """
    names = EXTRAS["video"] if extra == "video" else EXTRAS["video"] + EXTRAS[extra]
    missing = [name for name in packages or names if find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            purpose,
            expected=f"the packages of turbo_rcm_patch[{extra}]",
            got=f"no {', '.join(missing)}",
            remedy=f"pip install 'turbo_rcm_patch[{extra}]'",
        )
