"""Progress bars for the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from turbo_rcm_patch.sampling.passes import Progress

__all__ = ["bars"]

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
    """Draw one progress bar for each stage on stderr."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TaskID,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import (
        Progress as RichProgress,
    )

    tasks: dict[str, TaskID] = {}
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=Console(stderr=True)) as display:

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = display.add_task(_WORDS.get(stage, stage), total=total)
            display.update(tasks[stage], completed=done, total=total)

        yield update
