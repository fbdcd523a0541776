"""diffusers' Wan transformer with SLA's projection attached, as a converted checkpoint has it."""

from __future__ import annotations

from typing import Final

from turbo_rcm_patch.errors import MissingPackageError

__all__ = ["DiffusersShape"]


class DiffusersShape:
    """Stub."""

    name: Final = "diffusers"

    def __init__(self) -> None:
        raise MissingPackageError(
            "turbo_rcm_patch.patching.sla",
            expected="a release that runs SLA of diffusers' Wan",
            got="none",
        )
