"""Progress bars for the command line."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

from turbo_rcm_patch.checkpoints.read import Progress
from turbo_rcm_patch.extras import require

#: Seconds between two lines of a stage.
_EVERY: Final = 15.0

_WORDS: Final = {
    "baseline": "unpatched",
    "patched": "after patch_model",
    "control": "other exact attention",
    "network": "network against fp32",
    "videos": "measure, write",
    "generate": "generate",
    "judge": "read, measure, write",
    "convert": "convert (MiB)",
    "transformer": "transformer (MiB)",
    "transformer_2": "second one (MiB)",
}


@contextmanager
def bars() -> Iterator[Progress]:
    """Draw a bar for each stage on stderr. Elsewhere than on a terminal, print a line when a stage
    begins and ends and each `_EVERY` seconds, with what is left."""
    require("video", "progress bars", "rich")
    from rich import progress as rich
    from rich.console import Console

    tasks: dict[str, rich.TaskID] = {}
    printed: dict[str, float] = {}
    begun: dict[str, int] = {}  # what was done when the clock of a stage started
    columns = (
        rich.TextColumn("{task.description:<24}"),
        rich.BarColumn(bar_width=32),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TextColumn("left"),
        rich.TimeRemainingColumn(),
    )
    # What is printed meanwhile goes above the bars on a terminal, and into a pipe if that is it.
    console = Console(stderr=True)
    shared = sys.stdout.isatty()
    lines = not console.is_terminal
    with rich.Progress(
        *columns, console=console, redirect_stdout=shared, disable=lines
    ) as display:

        def update(stage: str, done: int, total: int) -> None:
            if not total:  # words, as an estimate
                print(stage, flush=True)
                return
            label = _WORDS.get(stage, stage)
            if stage not in tasks:
                tasks[stage], begun[stage] = display.add_task(label, total=total), done
            display.update(tasks[stage], completed=done, total=total)
            now, due = time.monotonic(), printed.get(stage, -math.inf) + _EVERY
            if lines and due < math.inf and (done >= total or now >= due):
                printed[stage] = math.inf if done >= total else now
                elapsed = display.tasks[tasks[stage]].elapsed or 0.0
                timed = done - begun[stage]
                remaining = timedelta(seconds=round(elapsed * (total - done) / max(1, timed)))
                after = f" after {timedelta(seconds=round(elapsed))}" if done >= total else ""
                text = f"{label}: {done} of {total}" + (
                    after or f", {remaining} left" * (timed > 0)
                )
                console.print(text, markup=False, highlight=False)

        yield update
