"""The proofs of the README in one command: measures, prints a table a part, writes one JSON file.

A part that fails is recorded with its error and the others still run; the exit code then is not 0.
The file is written after every part and during the long one, so that an interrupted run leaves
what it had. Parts that an earlier run with the same code, versions and sizes on the same
device wrote to the file stay in it, so parts may run one at a time.
"""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Final

import torch

from benchmarks.machine import machine
from benchmarks.setup import Deadline, Options, Result
from turbo_rcm_patch.errors import ConfigError, OutputError, OutputExistsError
from turbo_rcm_patch.output import atomic, check_writable
from turbo_rcm_patch.sampling.environment import code_digest, device_name, versions

__all__ = ["PARTS", "record"]

#: Name on the command line -> module with `measure(options, deadline)`.
PARTS: Final = {
    "ops": "accuracy",
    "network": "network",
    "fusion": "fusion",
    "one-launch": "one_launch",
}


def record(options: Options, only: Sequence[str], out: Path, command: str) -> int:
    """Run the parts and write the file.

    Args:
        options: How to measure.
        only: Names of the parts to run, out of `PARTS`.
        out: JSON file; its folder is made.
        command: The command line, for the file.

    Returns:
        0 if every part ran in full and met its limits, else 1.
    """
    unknown = [name for name in only if name not in PARTS]
    if unknown or not only:
        raise ConfigError("--only", expected=f"some of {tuple(PARTS)}", got=repr(",".join(only)))
    device = options.torch_device()
    _check_out(out)
    begin = time.monotonic()
    earlier = _earlier(out, options, device)
    parts: dict[str, dict[str, object]] = {k: v for k, v in earlier.items() if k not in only}
    document: dict[str, object] = {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(device),
        "versions": versions(),
        "code": code_digest(),
        "options": asdict(options),
        "parts": parts,
    }
    print(f"{device_name(device)}, torch {torch.__version__}, writing {out}", flush=True)
    good = True
    for name in only:
        print(f"\n{name} ...", flush=True)

        def keep(result: Result, name: str = name) -> None:
            parts[name] = {"passed": False, "unfinished": True, **_written(result)}
            document["passed"] = False
            _write(out, document)

        parts[name], passed = _run(name, options, keep)
        parts[name] |= {"command": command, "options": _json(asdict(options))}
        good &= passed
        document["seconds"] = round(time.monotonic() - begin, 1)
        document["passed"] = {*only} <= {*parts} and all(one["passed"] for one in parts.values())
        _write(out, document)
    print(f"\n{'Everything met its limit' if good else 'NOT everything met its limit'}: {out}")
    return 0 if good else 1


def _check_out(out: Path) -> None:
    """Refuse a file that `record` did not write, or cannot."""
    if out.is_file():
        try:
            parts = json.loads(out.read_text(encoding="utf-8"))["parts"]
        except (OSError, ValueError, LookupError, TypeError):
            parts = None
        if not isinstance(parts, dict):
            raise OutputExistsError(
                f"--out {out} is there already, and `record` did not write it",
                expected="a new file, or one with parts measured earlier",
                remedy="Choose another file",
            )
    check_writable(out)


def _earlier(out: Path, options: Options, device: torch.device) -> dict[str, dict[str, object]]:
    """Parts in the file that belong together with what is measured now."""
    try:
        found = json.loads(out.read_text(encoding="utf-8"))
        same = (
            found["code"] == code_digest()
            and found["machine"]["device"] == device_name(device)
            and found["versions"] == _json(versions())
            and found["options"]["sizes"] == _json(asdict(options.sizes))
        )
        return dict(found["parts"]) if same else {}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def _json(value: object) -> object:
    """As it would be read back."""
    return json.loads(json.dumps(_finite(value)))


def _written(result: Result) -> dict[str, object]:
    return {"failures": result.failures, "left_out": result.left_out, **result.data}


def _run(
    name: str, options: Options, keep: Callable[[Result], None]
) -> tuple[dict[str, object], bool]:
    begin = time.monotonic()
    measure: Callable[[Options, Deadline], Result]
    try:
        measure = import_module(f"benchmarks.{PARTS[name]}").measure
        result = measure(options, Deadline(options.limit, keep))
    except OutputError:  # there is no place to record it in
        raise
    except Exception as error:  # recorded with its traceback, and the exit code says so
        print(f"FAILED: {type(error).__name__}: {error}", flush=True)
        return {
            "passed": False,
            "error": traceback.format_exc(),
            "seconds": round(time.monotonic() - begin, 1),
        }, False
    passed = not result.failures and not result.left_out
    print(format_table(result.header, result.rows))
    for failure in result.failures:
        print(f"FAILED: {failure}")
    for left in result.left_out:
        print(f"left out, no time: {left}")
    seconds = round(time.monotonic() - begin, 1)
    print(f"{name}: {'passed' if passed else 'FAILED'} in {seconds} s", flush=True)
    return {
        "passed": passed,
        "seconds": seconds,
        **_written(result),
    }, passed


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, numbers to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def cell(text: str, width: int) -> str:
        number = text[:1].isdigit() or text[:1] in "-." or text in ("nan", "inf")
        return text.rjust(width) if number else text.ljust(width)

    text = ["  ".join(cell(c, w) for c, w in zip(line, widths, strict=True)) for line in lines]
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in text)


def _finite(value: object) -> object:
    """JSON has no NaN: such numbers become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value


def _write(out: Path, document: dict[str, object]) -> None:
    with atomic(out) as partial:
        partial.write_text(json.dumps(_finite(document), indent=2) + "\n", encoding="utf-8")
