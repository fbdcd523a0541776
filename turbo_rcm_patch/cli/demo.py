"""Compare a shipped model with its patched self, and check the kernels: `make demo`."""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec

from turbo_rcm_patch.cli.commands import run_comparison
from turbo_rcm_patch.cli.doctor import check_kernels
from turbo_rcm_patch.cli.exit_codes import CHANGED, of_verdict
from turbo_rcm_patch.cli.options import Compare, Demo
from turbo_rcm_patch.errors import SamplingError
from turbo_rcm_patch.patching.plan import config_and_plan
from turbo_rcm_patch.tiny import prompts
from turbo_rcm_patch.video.report import write_report


def demo(command: Demo) -> int:
    """Compare a shipped model with its patched self over the demo prompts, and check the kernels.

    Args:
        command: The options of the command.

    Returns:
        The exit code of the verdict, or 1 if the kernels do not agree with their reference. Where
        there is no Triton for the system, the kernels cannot run and the verdict alone decides.
    """
    start = time.perf_counter()
    options = {} if command.vae is None else {"vae": command.vae}
    config, _ = config_and_plan(None, command.plan, options)
    comparison = Compare(
        model=command.model,
        prompt=prompts.DEMO_PROMPTS,
        out=command.out,
        config=config,
        plan=command.plan,
        fresh=not command.resume,
        command_line=command.command_line,
    )
    print(
        f"{len(comparison.prompt)} prompts: unpatched, patched, and unpatched under another exact "
        "attention backend, all from the same noise."
    )
    result = run_comparison(comparison)
    if sys.platform != "linux" and find_spec("triton") is None:
        print(f"The kernels were not checked: there is no Triton for {sys.platform}.")
        return of_verdict(result.verdict)
    print("One attention through the Triton kernels ...")
    try:
        check = check_kernels()
    except SamplingError as error:
        print(error.block(), file=sys.stderr)
        return CHANGED
    write_report(result, check)
    print(f"{'ok' if check.passed else 'FAILED'}: {check}")
    print(f"{time.perf_counter() - start:.0f} s in all")
    return of_verdict(result.verdict) if check.passed else CHANGED
