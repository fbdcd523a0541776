"""Write the report of a comparison: metrics.json, and report.html, a page that refers to nothing
outside itself.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from turbo_rcm_patch.files import write_json, write_text
from turbo_rcm_patch.text import one_line
from turbo_rcm_patch.video import verdict
from turbo_rcm_patch.video.store import to_json
from turbo_rcm_patch.video.video import PANES, pane_size

if TYPE_CHECKING:
    from turbo_rcm_patch.video.clips import Clip
    from turbo_rcm_patch.video.environment import KernelCheck
    from turbo_rcm_patch.video.result import Judged

#: Template of the page, its style and its script.
_PAGE: Final = Path(__file__).parent / "page"
#: Pane of the player -> its label and its contents. NAME is that of the judged model.
_LABELS: Final = {
    "baseline": ("Baseline", "the baseline's video"),
    "patched": ("NAME", "the judged video"),
    "control": ("Control", "the control's video"),
    "patched difference": ("NAME − baseline", "the difference of the judged video, amplified"),
    "control difference": ("Control − baseline", "the difference of the control, amplified"),
}
#: Name with its unit, meaning, field of a `Drift`, and format.
_MEASURES: Final = (
    ("PSNR, dB", "mean square error of all pixels", "psnr", ".1f"),
    ("PSNR of the worst frame, dB", "the frame with the largest error", "worst_psnr", ".1f"),
    ("SSIM", "structure, 1 is equal (Wang et al. 2004)", "ssim", ".4f"),
    ("VMAF", "0 to 100; equal videos have some 97 to 100, 6 are just noticeable", "vmaf", ".1f"),
)


def write_report(judged: Judged, kernel_check: KernelCheck | None = None) -> None:
    """Write metrics.json and the page.

    Args:
        judged: With the videos of every clip in its folder.
        kernel_check: The result of `check_kernels`, if it was run.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    metrics = judged.as_dict()
    if kernel_check is not None:
        metrics["kernel_check"] = asdict(kernel_check) | {"passed": kernel_check.passed}
    write_json(judged.metrics, to_json(metrics))
    jinja = Environment(
        loader=FileSystemLoader(_PAGE),
        autoescape=True,
        undefined=StrictUndefined,
        # A name of others stays on one line, in plain characters.
        finalize=lambda value: one_line(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters |= {"db": _db, "number": _number, "value": _value, "scale": _scale}
    jinja.filters["bare"] = without_places
    results = judged.results
    videos = [judged.out / "prompts" / clip.key / "panes.mp4" for clip in results]
    page = jinja.get_template("report.html.j2").render(
        m=judged,
        name=judged.name,
        kernel_check=kernel_check,
        ran=judged.judgement.ran,
        measures=_measures(judged),
        unmeasured=sorted({without_places(clip.unmeasured) for clip in results} - {""}),
        limits=verdict,
        checks={check.name: check for check in judged.judgement.checks},
        videos=[base64.b64encode(video.read_bytes()).decode() for video in videos],
        players=[json.dumps(_player(judged, clip)) for clip in results],
    )
    write_text(judged.report, page)


#: A path that begins at a root, a home or a drive, and its last part.
_ABSOLUTE: Final = re.compile(
    r"(?<![\w./\\…~:-])(?:file://|~|[A-Za-z]:)?(?:[/\\](?!\s)[^\s/\\'\"=,;:]+)+(?P<end>[/\\][^\s/\\'\"=,;:]+)[/\\]?"
)


def without_places(text: str) -> str:
    """Return a text without the folders of absolute paths: a report is sent to other people."""
    return _ABSOLUTE.sub(lambda match: "…" + match["end"], text)


def _measures(judged: Judged) -> list[dict[str, object]]:
    """Return the rows of the tables: for judged videos and control the median, its interval and
    the worst over all clips, and the number of each clip, with the function that shows them. A
    measure that no clip has is left out."""
    runs = [[clip.patched for clip in judged.results]]
    controls = [clip.control for clip in judged.results if clip.control is not None]
    runs += [controls] if controls else []
    rows: list[dict[str, object]] = []
    for name, why, attribute, form in _MEASURES:
        columns = [[getattr(drift, attribute) for drift in drifts] for drifts in runs]
        known = [[v for v in values if v is not None] for values in columns]
        if not any(known):
            continue
        how = partial(_db, unit="") if name.endswith("dB") else _number
        rows.append(
            {
                "name": name,
                "why": why,
                "cells": [
                    of(v) if v else None for of in (verdict.median, verdict.lowest) for v in known
                ],
                "intervals": [verdict.interval(v) for v in known],
                "each": list(zip(*columns, strict=True)),
                "show": partial(how, form=form),
            }
        )
    return rows


def _player(judged: Judged, result: Clip) -> dict[str, object]:
    """Return the data of one video for the script of the page. Of a frame that is equal the PSNR
    is None, and a text where it is no number."""
    height, width = pane_size(result.height, result.width)
    runs = {"control": result.control.frame_psnr} if result.control else {}
    runs["patched"] = result.patched.frame_psnr
    known = [value for values in runs.values() for value in values if math.isfinite(value)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    step = next((s for s in (1, 2, 5, 10, 20) if (high - low) / s <= 3), 50)
    bottom, top = math.floor(low / step) * step, (math.floor(high / step) + 1) * step
    backend = judged.model and judged.model.attention_backend
    name = backend or judged.name.capitalize()
    spans = [f"{name}: {_span(runs['patched'])}."]
    spans += [f"Control: {_span(runs['control'])}."] if "control" in runs else []
    return {
        "frames": len(result.patched.frame_psnr),
        "fps": result.fps,
        "height": height,
        "width": width,
        "gain": result.gain,
        "gains": [result.gain * share // 4 for share in (1, 2, 4, 8, 16, 32)],
        "panes": {
            pane: {
                "column": column,
                "row": row,
                "label": _LABELS[pane][0].replace("NAME", name),
                "alt": f"{_LABELS[pane][1]}: {result.prompt}",
                "difference": pane.endswith("difference"),
            }
            for pane, (column, row) in PANES.items()
            if pane.partition(" ")[0] in ("baseline", *runs)
        },
        "plot": {
            "bottom": bottom,
            "top": top,
            "ticks": list(range(bottom, top, step)),
            "alt": f"PSNR of each frame against the baseline. {' '.join(spans)}",
        },
        **{
            run: [
                round(v, 3) if math.isfinite(v) else None if v == math.inf else "nan"
                for v in values
            ]
            for run, values in runs.items()
        },
    }


def _scale(check: verdict.Check, room: float, control: float | None = None) -> dict[str, object]:
    """Return where limits, judged model and control lie on a small scale, in percent.

    Args:
        check: With the value and its limits.
        room: How much to show beyond the outermost of them.
        control: The number of the control, if it has such a number.
    """
    numbers = [n for n in (check.value, check.limit, control) if n is not None]
    shown = [n for n in numbers if math.isfinite(n)]
    low = min(shown) - room if check.at_least else 0.0
    high = max(shown) + room

    def place(number: float) -> float:
        if not math.isfinite(number):  # Equal videos are at the good end, all else is not.
            return 100.0 if number > 0 or not check.at_least else 0.0
        return round(100 * (number - low) / (high - low), 1)

    limit, wider = place(check.limit), place(check.similar_limit)
    other = "" if control is None else f", control {_value(check, control)}"
    return {
        "limit": limit,
        "wider": wider if wider != limit and 0 < wider < 100 else None,
        "patched": place(check.value),
        "control": None if control is None else place(control),
        "good": (limit, 100) if check.at_least else (0, limit),
        "alt": f"{_value(check)}{other}; unchanged: {check.accepted(check.limit)}",
    }


def _number(value: float | None, form: str = ".4g") -> str:
    if value is None:
        return "–"
    return f"{value:{form}}" if math.isfinite(value) else f"not a number ({value})"


def _db(value: float | None, form: str = ".1f", unit: str = " dB") -> str:
    """Return a PSNR in words; that of equal videos is infinite."""
    return "equal" if value == math.inf else _number(value, form) + unit


def _value(check: verdict.Check, value: float | None = None) -> str:
    """Return the value of a condition in words, or another number of its kind."""
    value = check.value if value is None else value
    return _db(value, ".4g") if check.unit == " dB" else _number(value) + check.unit


def _span(values: Sequence[float]) -> str:
    """Return the range of PSNRs in words."""
    known = [v for v in values if math.isfinite(v)]
    wrong = sum(v != math.inf for v in values) - len(known)
    span = f"{min(known):.1f} to {max(known):.1f} dB" if known else "equal in every frame"
    if wrong:
        span = f"not a number in {wrong} of {len(values)}" + (f", else {span}" if known else "")
    return span
