"""`turbo-rcm-patch as-sageattention`: `import sageattention` finds our attention in a program.

The command puts `STAND_IN` on PYTHONPATH and becomes the given program. So every worker has the
package: forked, spawned, or started by torchrun.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Final, NoReturn

from turbo_rcm_patch.engines import REPLACE, REQUIRE, STAND_IN, refuse_installed
from turbo_rcm_patch.errors import ConfigError

#: Its line in the list of commands.
HELP: Final = "Run a program in which `import sageattention` finds this package's attention."
_EXAMPLES: Final = """examples:
  %(prog)s -- torchrun --nproc-per-node 2 generate.py
  %(prog)s --require -- python main.py --use-sage-attention
"""


def main(argv: Sequence[str], name: str) -> NoReturn:
    """Become the program that the arguments name.

    Args:
        argv: Arguments of this command.
        name: How it was called, for its help.

    Raises:
        ConfigError: A sageattention is installed, or the program cannot be started.
    """
    parser = argparse.ArgumentParser(
        prog=name, description=HELP,
        usage="%(prog)s [--replace] [--require] -- COMMAND ...", epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    if not arguments.replace:
        refuse_installed(str(STAND_IN))
    paths = [str(STAND_IN), *filter(None, [os.environ.get("PYTHONPATH")])]
    switches = {REPLACE: arguments.replace, REQUIRE: arguments.require}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    environment |= {name: "1" for name, on in switches.items() if on}
    try:
        os.execvpe(arguments.command[0], arguments.command, environment)
    except OSError as error:
        raise ConfigError(
            "COMMAND", expected="a program that can be started",
            got=f"{arguments.command[0]}: {error.strerror}",
            remedy="Give its path, or activate its environment",
        ) from error  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to a parser."""
    add = parser.add_argument
    add("--replace", action="store_true", help="hide an installed sageattention")
    add("--require", action="store_true", help="fail on a long attention outside int8 kernels")
    add("command", nargs="+", metavar="COMMAND", help="the program")
