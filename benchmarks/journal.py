"""The file a benchmark writes as it goes, and the table it shows meanwhile."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.machine import ClockWatch, ceilings, machine
from benchmarks.setup import Deadline, Options
from turbo_rcm_patch.errors import ConfigError, OutputExistsError
from turbo_rcm_patch.kernels.tile_table import table_path
from turbo_rcm_patch.output import atomic, check_writable
from turbo_rcm_patch.sampling.environment import code_digest, device_name, versions
from turbo_rcm_patch.sampling.store import to_json

__all__ = ["Journal", "Plan", "chosen"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the command line asked for.

    Attributes:
        out: Folder of the JSON file and the plots.
        device: Where.
        quick: Fewer sizes and fewer calls.
        micro: Toy sizes, to try the command itself.
        only: Names of cases; empty for the default ones.
        peers: Names of methods; empty for all.
        calls: Most timed calls of a measurement; None leaves it to the benchmark.
        limit: Seconds after which no further measurement begins.
        seed: Of inputs and weights.
        command: The command line, for the file.
        turbodiffusion: A checkout of TurboDiffusion, for `network`.
    """

    out: Path
    device: str = "cuda"
    quick: bool = False
    micro: bool = False
    only: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    calls: int | None = None
    limit: float = 600.0
    seed: int = 0
    command: str = ""
    turbodiffusion: Path | None = None

    def __post_init__(self) -> None:
        if self.calls is not None and self.calls < 1:
            raise ConfigError("--calls", expected="1 or more", got=str(self.calls))
        if not self.limit >= 0:
            raise ConfigError("--limit", expected="seconds, 0 or more", got=str(self.limit))
        if self.out.exists() and not self.out.is_dir():
            raise ConfigError("--out", expected="a folder", got=f"the file {self.out}")

    def torch_device(self) -> torch.device:
        """The device, after checking that it is there and fits the sizes."""
        device = Options(device=self.device).torch_device()
        if device.index is not None and device.type == "cuda":
            torch.cuda.set_device(device)  # where streams and graphs are made
        if device.type != "cuda" and not self.micro:
            raise ConfigError(
                "--device",
                expected="a GPU for the real sizes",
                got=self.device,
                remedy="Add --micro to try the command without one",
            )
        return device


def chosen(option: str, wanted: Sequence[str], known: Sequence[str]) -> list[str]:
    """The wanted names in the order of the known ones; all if none is wanted.

    Raises:
        ConfigError: A name that is not known.
    """
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ConfigError(option, expected=f"some of {', '.join(known)}", got=", ".join(unknown))
    return [name for name in known if not wanted or name in wanted]


@dataclass(slots=True)
class Journal:
    """One run of a benchmark: what is written and what is shown.

    Args:
        name: Of the benchmark; the file is `<name>.json`.
        plan: What was asked for.
        columns: Title and width of the columns on the screen.
        about: Goes to the file: definitions and formulas.
    """

    name: str
    plan: Plan
    columns: Sequence[tuple[str, int]]
    about: Mapping[str, object] = field(default_factory=dict)
    cases: dict[str, dict[str, object]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    summary: dict[str, object] = field(default_factory=dict)
    finished: bool = False
    device: torch.device = field(init=False)
    deadline: Deadline = field(init=False)
    watch: ClockWatch = field(init=False)
    _begin: float = field(init=False)
    _header: dict[str, object] = field(init=False)

    def __post_init__(self) -> None:
        self.device = self.plan.torch_device()
        self._check_out()
        self.deadline = Deadline(self.plan.limit)
        self._begin = time.monotonic()
        self.watch = ClockWatch(self.device)
        found = machine(self.device)
        tiles = table_path()
        self._header = {
            "benchmark": self.name,
            "command": self.plan.command,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": found,
            "versions": versions(),
            "code": code_digest(),
            "tiles": str(tiles) if tiles.exists() else "as shipped",
            "quick": self.plan.quick,
            "micro": self.plan.micro,
            "about": dict(self.about),
            "ceilings": {"data sheet": ceilings(self.device)},
        }
        print(f"{device_name(self.device)}, torch {torch.__version__}, writing {self.path}")
        if "driver" in found:
            print(
                f"driver {found['driver']}, SM clock at most {found['sm_clock_max_mhz']} MHz, "
                f"tiles {self._header['tiles']}"
            )
        self.show([title for title, _ in self.columns])
        self.show(["-" * width for _, width in self.columns])

    @property
    def path(self) -> Path:
        """The JSON file."""
        return self.plan.out / f"{self.name}.json"

    def _check_out(self) -> None:
        """Refuse to write over files that no benchmark wrote, and where nothing can be written."""
        from benchmarks.plots import plots_of

        others: list[Path] = []
        if self.path.exists():
            try:
                found = json.loads(self.path.read_text(encoding="utf-8"))["benchmark"]
            except (OSError, ValueError, LookupError, TypeError):
                found = None
            others = [] if found == self.name else [self.path]
        else:  # Plots lie beside the file that they were drawn from.
            others = [path for path in plots_of(self.path, self.name) if path.exists()]
        if others:
            raise OutputExistsError(
                f"--out {self.plan.out} holds files that this benchmark did not write, under the "
                "names of its own",
                expected="a new folder, or one that it has written to",
                got=", ".join(path.name for path in others),
                remedy="Choose another folder",
            )
        check_writable(self.path)

    def header(self, **more: object) -> None:
        """Add to the head of the file."""
        self._header.update(more)

    def show(self, cells: Sequence[str]) -> None:
        """One line of the table; numbers to the right, the last cell as long as it is."""
        parts = []
        for text, (_, width) in zip(cells, self.columns, strict=False):
            number = text[:1].isdigit() or text[:1] in "-+." or text == "nan"
            parts.append(text.rjust(width) if number and set(text) != {"-"} else text.ljust(width))
        print("  ".join(parts).rstrip(), flush=True)

    def late(self, what: str) -> bool:
        """Whether the time is up; then `what` is noted as left out."""
        if self.deadline.passed:
            self.left_out.append(what)
            return True
        return False

    def case(self, name: str, value: dict[str, object]) -> None:
        """Keep a case and write the file."""
        self.cases[name] = value
        self.write()

    def document(self) -> dict[str, object]:
        """What the file holds now."""
        return {
            **self._header,
            "seconds": round(time.monotonic() - self._begin, 1),
            "observed": self.watch.since(self._begin),
            "finished": self.finished,
            "left_out": self.left_out,
            "summary": self.summary,
            "cases": self.cases,
        }

    def write(self) -> None:
        """Write the file, whole or not at all."""
        text = json.dumps(to_json(self.document()), indent=1) + "\n"
        with atomic(self.path) as path:
            path.write_text(text, encoding="utf-8")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around all measurements: whatever ends them, the file and the plots show what there
        was."""
        from benchmarks.plots import draw

        finished = False
        try:
            yield
            finished = True
        finally:
            self._close(finished)
            for path in draw(self.path):
                print(f"drawn: {path}", flush=True)

    def _close(self, finished: bool) -> None:
        self.finished = finished and not self.left_out
        self.write()
        self.watch.stop()
        for what in self.left_out:
            print(f"left out, no time: {what}")
        clock = self.watch.since(self._begin)["sm_clock_mhz"]
        if isinstance(clock, dict):
            print("SM clock: {least:.0f} to {most:.0f} MHz, median {median:.0f}".format(**clock))
        print(f"{self.path}: {len(self.cases)} cases in {self.document()['seconds']} s")
        sys.stdout.flush()
