"""`turbo-rcm-patch as-sageattention`: `import sageattention` finds our attention in a program.

The command puts `STAND_IN` on PYTHONPATH and becomes the given program. So every worker has the
package: forked, spawned, or started by torchrun.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from typing import Final, NoReturn

from turbo_rcm_patch.engines import REQUIRE, STAND_IN
from turbo_rcm_patch.errors import ConfigError

#: Its line in the list of commands.
HELP: Final = "Run a program in which `import sageattention` finds this package's attention."
#: "1": an installed sageattention is hidden.
REPLACE: Final = "TURBO_RCM_PATCH_REPLACE"


def main(argv: Sequence[str]) -> NoReturn:
    """Become the program that the arguments name.

    Raises:
        ConfigError: A sageattention is installed, or the program cannot be started.
    """
    parser = argparse.ArgumentParser(
        prog="python -m turbo_rcm_patch as-sageattention", description=HELP,
        usage="%(prog)s [--replace] [--require] -- COMMAND ...",
    )  # fmt: skip
    add_arguments(parser)
    given = parser.parse_args(argv)
    if not given.replace:
        refuse_installed(str(STAND_IN))
    paths = [str(STAND_IN), *filter(None, [os.environ.get("PYTHONPATH")])]
    switches = {REPLACE: given.replace, REQUIRE: given.require}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    environment |= {name: "1" for name, on in switches.items() if on}
    try:
        os.execvpe(given.command[0], given.command, environment)
    except OSError as error:
        raise ConfigError(
            "COMMAND", expected="a program that can be started",
            got=f"{given.command[0]}: {error.strerror}",
            remedy="Give its path, or activate its environment",
        ) from error  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to a parser."""
    add = parser.add_argument
    add("--replace", action="store_true", help="hide an installed sageattention")
    add("--require", action="store_true", help="fail on a long attention outside int8 kernels")
    add("command", nargs="+", metavar="COMMAND", help="the program")


def refuse_installed(stand_in: str) -> None:
    """Refuse to hide a sageattention that lies elsewhere on the path.

    Raises:
        ConfigError: There is one.
    """
    elsewhere = [path for path in sys.path if path != stand_in]
    found = PathFinder.find_spec("sageattention", elsewhere)
    if found is not None:
        raise ConfigError(
            "the package sageattention", expected="none to be installed", got=str(found.origin),
            remedy="Hide it with as-sageattention --replace -- COMMAND, or run COMMAND alone",
        )  # fmt: skip
