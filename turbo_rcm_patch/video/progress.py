"""Progress bars for the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from turbo_rcm_patch.extras import require

#: Called with (what is being done, units done, units in all).
Progress = Callable[[str, int, int], None]

_WORDS: Final = {
    "baseline": "unpatched",
    "patched": "after patch_model",
    "control": "other exact attention",
    "network": "network against fp32",
    "videos": "decode, measure, write",
    "generate": "generate",
    "convert": "convert (MiB)",
    "transformer": "transformer (MiB)",
    "transformer_2": "second one (MiB)",
}


@contextmanager
def bars() -> Iterator[Progress]:
    """One bar for each stage, drawn on stderr as stages begin; elsewhere than on a terminal a line
    for each, and the bars at the end."""
    require("video", "progress bars", "rich")
    from rich import progress as rich
    from rich.console import Console

    tasks: dict[str, rich.TaskID] = {}
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
    with rich.Progress(*columns, console=console, redirect_stdout=shared) as display:

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                words = _WORDS.get(stage, stage)
                tasks[stage] = display.add_task(words, total=total)
                if not display.console.is_terminal:  # A file gets the bars when all is done.
                    display.console.print(f"{words} ...", markup=False, highlight=False)
            display.update(tasks[stage], completed=done, total=total)

        yield update
