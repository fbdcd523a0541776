"""The user's own table of tiles, which `tune` writes and `tile_for` reads first.

Format, as of the shipped tiles.json: {"sm_90": {"attention": {"fp8_128": [64, 128, 4, 2]}}}, block
of rows, block of columns, warps, stages. `tune` adds "made_with" to a target: tiles that were
measured with another driver, Triton or torch may not fit any more, and are not used. A target
without it always is.
"""

from __future__ import annotations

import json
import logging
import os
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from turbo_rcm_patch.errors import ConfigError

#: Environment variable that names the table instead of the default place. A table belongs to a
#: machine and not to a program, so it is no field of a configuration.
VARIABLE = "TURBO_RCM_PATCH_TILES"

#: Target -> kernel -> variant -> [block_m, block_n, warps, stages].
Table = dict[str, dict[str, dict[str, list[int]]]]
#: Beside the kernels of a target.
MADE_WITH: Final = "made_with"
_log = logging.getLogger(__name__)


def made_with() -> str:
    """What measurements are good for: a driver and a compiler."""
    import triton  # Its distribution has other names on other systems.

    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: "unknown")
    return f"driver {driver()}, triton {triton.__version__}, torch {torch.__version__}"


def outdated(made: str | None, path: Path | None, what: str) -> bool:
    """Whether measurements of the user's were made with other versions, which is told."""
    if made is None or made == made_with():
        return False
    _log.warning(
        "%s in %s: measured with %s, and not used with %s. Run `turbo-rcm-patch tune` again; to "
        'use them as they are, delete "%s" there.', what, path, made, made_with(), MADE_WITH,
    )  # fmt: skip
    return True


def table_path() -> Path:
    """Where the user's table is looked for and written by default.

    Raises:
        ConfigError: Nothing says where: there is no home folder, as in a container that runs as a
            user whom it does not know.
    """
    cache_home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    named = os.environ.get(VARIABLE)
    try:
        return Path(named or f"{cache_home}/turbo_rcm_patch/tiles.json").expanduser()
    except RuntimeError as error:
        raise ConfigError(
            "the place of the user's tables",
            expected="a home folder",
            got=str(error),
            remedy=f"Set HOME, XDG_CACHE_HOME or {VARIABLE}",
        ) from error


def existing_table(name: str) -> Path | None:
    """The user's table of this name; None where there is none, no home folder, or only one that
    must not be entered."""
    try:
        path = table_path().with_name(name)
        path.stat()
    except (ConfigError, OSError):
        return None
    return path


@cache
def user_table() -> Table:
    """What holds of the user's table, read once; empty if there is none in the default place.

    Raises:
        ConfigError: It cannot be used, or the environment variable names a file that is not there.
    """
    path = table_path() if os.environ.get(VARIABLE) else existing_table("tiles.json")
    if path is None:
        return {}
    return {
        target: {kernel: tiles for kernel, tiles in kernels.items() if kernel != MADE_WITH}
        for target, kernels in read_table(path).items()
        if not outdated(kernels.get(MADE_WITH), path, f"the tiles of {target}")
    }


def read_table(path: Path) -> dict[str, dict[str, Any]]:
    """A table of tiles, with what its targets were made with.

    Raises:
        ConfigError: The file cannot be read or does not hold such a table.
    """
    remedy = (
        f"Write a new one with `turbo-rcm-patch tune`, delete the file, or "
        f"unset {VARIABLE} if it names this file"
    )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"table of tiles {path}",
            expected="a JSON file",
            got=f"{type(error).__name__}: {error}",
            remedy=remedy,
        ) from error
    wrong = _what_is_wrong(found)
    if wrong:
        raise ConfigError(
            f"table of tiles {path}",
            expected='{"sm_90": {kernel: {variant: [block_m, block_n, warps, stages]}}}',
            got=wrong,
            remedy=remedy,
        )
    return found


def _what_is_wrong(found: object) -> str:
    if not isinstance(found, dict):
        return f"a {type(found).__name__}"
    for target, kernels in found.items():
        if not isinstance(kernels, dict):
            return f"{target}: {kernels!r}"
        for kernel, variants in kernels.items():
            if kernel == MADE_WITH and isinstance(variants, str):
                continue
            if not isinstance(variants, dict):
                return f"{target}.{kernel}: {variants!r}"
            for variant, tile in variants.items():
                # Rows of q are padded to 128.
                tall = kernel in ("attention", "one_launch") and _is_tile(tile) and tile[0] > 128
                if tall or not _is_tile(tile):
                    return f"{target}.{kernel}.{variant}: {tile!r}"
    return ""


def _is_tile(tile: object) -> bool:
    """Four integers: blocks and warps are powers of two (a block of 0 is one that the kernel does
    not have)."""
    if not isinstance(tile, list) or len(tile) != 4:
        return False
    if any(not isinstance(one, int) or isinstance(one, bool) for one in tile):
        return False
    block_m, block_n, warps, stages = tile
    powers = all(one > 0 and one & (one - 1) == 0 for one in (block_m, warps))
    return powers and block_n >= 0 and block_n & (block_n - 1) == 0 and 1 <= stages <= 16
