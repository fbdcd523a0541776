"""Processes of their own for tests, forked from a server that has imported torch and diffusers.

These imports take seconds. The server has run nothing and knows nothing of this package.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from multiprocessing.context import ForkServerContext
from pathlib import Path

PRELOAD = (
    "diffusers.hooks.context_parallel",
    "diffusers.models.transformers.transformer_cogvideox",
    "diffusers.pipelines.wan.pipeline_wan",
    "diffusers.schedulers.scheduling_flow_match_euler_discrete",
    "torch.distributed.device_mesh",
    "transformers.models.umt5.modeling_umt5",
)
#: How ranks are started, where "" is by the server. A mutant of a process is in those alone that
#: are forked from itself.
RANKS = ""


def server() -> ForkServerContext:
    """Where processes are forked from; the first one starts it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    return context


def run_fresh(code: str, *arguments: str, cwd: Path | None = None) -> None:
    """Run `code` as a script, with these arguments, where nothing of this package is imported.

    Raises:
        AssertionError: It failed; with what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder, "printed")
        process = server().Process(
            target=_script, args=(code, arguments, os.fspath(cwd or Path.cwd()), printed)
        )
        process.start()
        process.join(280)
        process.kill()
        process.join()
        assert process.exitcode == 0, printed.read_text(errors="replace")[-4000:]


def _script(code: str, arguments: tuple[str, ...], cwd: str, printed: Path) -> None:
    with printed.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    assert not any(name.split(".")[0] == "turbo_rcm_patch" for name in sys.modules)
    os.chdir(cwd)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<script>", "exec"), {"__name__": "__main__"})
