"""Compare a shipped model with its patched self, and check the kernels: `make demo`."""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec

from turbo_rcm_patch.cli.doctor import check_kernels
from turbo_rcm_patch.cli.exit_codes import CHANGED, of_verdict
from turbo_rcm_patch.cli.options import Demo
from turbo_rcm_patch.cli.progress import bars
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import SamplingError
from turbo_rcm_patch.video.comparison import compare
from turbo_rcm_patch.video.generation import settings_for
from turbo_rcm_patch.video.load import load_pipeline, resolve_model
from turbo_rcm_patch.video.report import write_report
from turbo_rcm_patch.video.store import check_out


def demo(given: Demo) -> int:
    """Compare a shipped model with its patched self over the demo prompts, and check the kernels.

    Args:
        given: The options of the command.

    Returns:
        The exit code of the verdict, or 1 if the kernels do not agree with their reference. Where
        there is no Triton for the system, the kernels cannot run and the verdict alone decides.
    """
    from turbo_rcm_patch.tiny.prompts import DEMO_PROMPTS

    out, fresh = given.out, not given.resume
    start = time.perf_counter()
    check_out(out, fresh=fresh)
    pipe = load_pipeline(resolve_model(given.model))
    settings = settings_for(pipe)
    print(
        f"{len(DEMO_PROMPTS)} prompts, {settings.num_frames} frames of {settings.width} x "
        f"{settings.height}, {settings.steps} steps: unpatched, patched, and unpatched under "
        "another exact attention backend, all from the same noise."
    )
    with bars() as progress:
        result = compare(
            pipe,
            DEMO_PROMPTS,
            out=out,
            config=PatchConfig(vae=given.vae),
            settings=settings,
            network_number=True,
            fresh=fresh,
            progress=progress,
            command=given.command_line,
        )
    print(result)
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
    word = "ok" if check.passed else "FAILED"
    print(f"{word}: {check}")
    print(f"{time.perf_counter() - start:.0f} s in all")
    return of_verdict(result.verdict) if check.passed else CHANGED
