"""The user's own table of tiles, which `tune` writes and `tile_for` reads first.

Format, as of the shipped tiles.json: {"sm_90": {"attention": {"fp8_128": [64, 128, 4, 2]}}}, block
of rows, block of columns, warps, stages.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

from turbo_rcm_patch.errors import ConfigError

#: Environment variable that names the table instead of the default place. A table belongs to a
#: machine and not to a program, so it is no field of a configuration.
VARIABLE = "TURBO_RCM_PATCH_TILES"

#: Target -> kernel -> variant -> [block_m, block_n, warps, stages].
Table = dict[str, dict[str, dict[str, list[int]]]]


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
    """The user's table, read once; empty if there is none in the default place.

    Raises:
        ConfigError: It cannot be used, or the environment variable names a file that is not there.
    """
    path = table_path() if os.environ.get(VARIABLE) else existing_table("tiles.json")
    return {} if path is None else read_table(path)


def read_table(path: Path) -> Table:
    """A table of tiles.

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
