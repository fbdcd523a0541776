"""Run the attention of Wan and CogVideoX video models in fused int8 kernels, and check whether the
videos changed.

examples:
  turbo-rcm-patch demo
  turbo-rcm-patch compare --model tiny \\
      --prompt 'a large red circle moving left on a black background'
  turbo-rcm-patch compare --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers \\
      --sampler scheduler --steps 30 --prompts prompts.txt --out outputs/wan
"""

from __future__ import annotations

import argparse
import inspect
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from turbo_rcm_patch import __version__
from turbo_rcm_patch.cli import as_sageattention
from turbo_rcm_patch.cli.exit_codes import CHANGED, OK, TABLE, USAGE, run_command
from turbo_rcm_patch.cli.options import COMMANDS, Command, Convert, Demo, Doctor, Patched, Run
from turbo_rcm_patch.cli.usage import Parser, add_fields, given_fields
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.extras import require
from turbo_rcm_patch.video.settings import Settings

_NAME: Final = "turbo-rcm-patch"


def _called() -> str:
    """Return how this program was called: by its name, or as a module of which Python."""
    if Path(sys.argv[0]).stem == _NAME:
        return _NAME
    python = sys.orig_argv[0] if sys.orig_argv[1:3] == ["-m", "turbo_rcm_patch"] else "python"
    return f"{'python' if Path(python).is_absolute() else python} -m turbo_rcm_patch"


_PROGRAM: Final = _called()
_PATCH_NAMES: Final = {"form": "pair_form"}
#: Settings without an option: `--lora` is of the model, and its turbo_rcm.json has `sigma_max`.
_SETTINGS_NAMES: Final = dict.fromkeys(("lora", "sigma_max"), "")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments without the program's name; by default those of the process.

    Returns:
        One of `exit_codes`, whose `TABLE` says what they mean.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["as-sageattention"]:  # its arguments are those of another program
        run_other = partial(as_sageattention.main, argv[1:], f"{_PROGRAM} as-sageattention")
        return run_command(run_other, interrupted="Interrupted.")
    command = COMMANDS.get(argv[0] if argv else "", Command)
    return run_command(partial(_run, argv), interrupted=command.interrupted)


def _run(argv: Sequence[str]) -> int:
    parser = _parser()
    if not argv:
        parser.print_help(sys.stderr)
        return USAGE
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed help or a usage error
        return int(stop.code or 0)
    name: str = arguments.run
    cls = COMMANDS[name]
    values: dict[str, Any] = given_fields(arguments, cls)
    if issubclass(cls, Run):
        values["settings"] = given_fields(arguments, Settings, _SETTINGS_NAMES)
    if issubclass(cls, Patched):
        config = PatchConfig()
        if path := values.get("plan"):
            from turbo_rcm_patch.patching.plan import Plan  # imports torch

            config = Plan.load(path).config
        values["config"] = replace(config, **given_fields(arguments, PatchConfig, _PATCH_NAMES))
    command = cls(command_line=f"{_PROGRAM} {shlex.join(argv)}", **values)
    if name in ("compare", "demo", "judge"):  # Else the first import would name another extra.
        require("report", name)
    # What a command imports takes seconds.
    if isinstance(command, Demo):
        from turbo_rcm_patch.cli.demo import demo

        return demo(command)
    if isinstance(command, Doctor):  # It has to run where packages are missing.
        from turbo_rcm_patch.cli.doctor import examine, healthy

        return OK if healthy(examine(partial(print, flush=True))) else CHANGED
    from turbo_rcm_patch.cli import commands

    code: int = getattr(commands, name)(command)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=_PROGRAM,
        description=str(__doc__).replace(_NAME, _PROGRAM),
        epilog=TABLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"turbo_rcm_patch {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    subparser = commands.add_parser("as-sageattention", help=as_sageattention.HELP)
    as_sageattention.add_arguments(subparser)
    for name, cls in COMMANDS.items():
        text = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")[0]
        text = text.replace(_NAME, _PROGRAM)
        subparser = commands.add_parser(
            name,
            help=text.partition("\n")[0],
            description=text,
            usage=f"{_PROGRAM} {name} [options]" + " SOURCE OUT" * (cls is Convert),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        subparser.set_defaults(run=name)
        add_fields(subparser, cls)
        for base in cls.__mro__[1:-2]:  # without `Command` and `object`
            title = str(base.__doc__).partition("\n")[0]
            add_fields(subparser.add_argument_group(title), base)
        if issubclass(cls, Run):
            sampling = "Defaults are those of a model whose folder has no turbo_rcm.json."
            add_fields(
                subparser.add_argument_group("sampling", sampling), Settings, _SETTINGS_NAMES
            )
        if issubclass(cls, Patched):
            add_fields(subparser.add_argument_group("patch"), PatchConfig, _PATCH_NAMES)
    return parser


if __name__ == "__main__":
    sys.exit(main())
