"""Write the report of a comparison: plots, metrics.json, report.md, which is short enough to be
pasted, and report.html, a page that refers to nothing outside itself.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Final

from turbo_rcm_patch.files import atomic, write_json, write_text
from turbo_rcm_patch.text import one_line
from turbo_rcm_patch.video import verdict
from turbo_rcm_patch.video.store import to_json
from turbo_rcm_patch.video.video import PANES, pane_size

if TYPE_CHECKING:
    from turbo_rcm_patch.video.clips import Clip
    from turbo_rcm_patch.video.environment import KernelCheck
    from turbo_rcm_patch.video.measures import Drift
    from turbo_rcm_patch.video.result import Judged

#: Templates of the two pages, with their style, script and settings of matplotlib.
_PAGE: Final = Path(__file__).parent / "page"
#: Pane of the player -> its label and its contents. NAME is that of the judged model.
_LABELS: Final = {
    "baseline": ("Baseline", "the baseline's video"),
    "patched": ("NAME", "the judged video"),
    "control": ("Control", "the control's video"),
    "patched difference": ("NAME − baseline", "the difference of the judged video, amplified"),
    "control difference": ("Control − baseline", "the difference of the control, amplified"),
}
#: Name with its unit, meaning, field of a `Drift`, format, and the function that finds the worst.
_MEASURES: Final = (
    ("PSNR, dB", "mean square error of all pixels", "psnr", ".1f", verdict.lowest),
    ("PSNR of the worst frame, dB", "the frame with the largest error", "worst_psnr", ".1f",
     verdict.lowest),
    ("SSIM", "structure, 1 is equal (Wang et al. 2004)", "ssim", ".4f", verdict.lowest),
    ("VMAF", "0 to 100; equal videos have some 97 to 100, 6 are just noticeable", "vmaf", ".1f",
     verdict.lowest),
    ("flicker", "how much the difference changes between frames, 8-bit steps; 0 is best",
     "flicker", ".3f", verdict.highest),
)  # fmt: skip
#: The same for clips that are latents.
_LATENT_MEASURES: Final = (
    ("SNR, dB", "mean square of the baseline over that of the difference", "psnr", ".1f",
     verdict.lowest),
    ("relative L2", "the same as a share; 0 is equal", "latents", ".5f", verdict.highest),
    ("cosine", "of both as one vector each; 1 is equal", "cosine", ".7f", verdict.lowest),
)  # fmt: skip
#: File in plots/ -> its contents in words, title, labels of both axes, and the condition whose
#: limit it shows.
_PLOTS: Final = {
    "prompts": ("Points: PSNR of each NOUN", "Distance from the baseline, per NOUN",
                "NOUN", "PSNR, dB", verdict.MEDIAN),
    "frames": ("Curves: PSNR of each frame, median over NOUNs",
               "Per frame: median over NOUNs, and range", "frame", "PSNR, dB", verdict.WORST),
}  # fmt: skip


def write_report(judged: Judged, kernel_check: KernelCheck | None = None) -> None:
    """Draw the plots and write metrics.json, report.md and the page.

    Args:
        judged: With the videos of every prompt in its folder.
        kernel_check: The result of `check_kernels`, if it was run.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    metrics = judged.as_dict()
    if kernel_check is not None:
        metrics["kernel_check"] = asdict(kernel_check) | {"passed": kernel_check.passed}
    write_json(judged.metrics, to_json(metrics))
    jinja = Environment(
        loader=FileSystemLoader(_PAGE),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters |= {
        "db": _db, "number": _number, "value": _value, "scale": _scale, "code": _markdown_code,
        "bare": without_places,
    }  # fmt: skip
    results = judged.results
    jinja.globals |= {
        "m": judged,
        "name": judged.name,
        "kernel_check": kernel_check,
        "ran": judged.judgement.ran,
        "measures": _measures(judged),
        "unmeasured": sorted({without_places(clip.unmeasured) for clip in results} - {""}),
        "limits": verdict,
        "checks": {check.name: check for check in judged.judgement.checks},
    }
    videos = [judged.out / "prompts" / clip.key / "panes.mp4" for clip in results if clip.height]
    page = jinja.get_template("report.html.j2").render(
        videos=[_data_url(video.read_bytes(), "video/mp4") for video in videos],
        players=[json.dumps(_player(judged, clip)) for clip in results if clip.height],
        plots=_draw_plots(judged),
    )
    write_text(judged.report, page)
    write_text(judged.short_report, jinja.get_template("report.md.j2").render())


def _shown(value: object) -> object:
    """Return what a template writes for a value: a name of others stays on one line."""
    return one_line(value) if type(value) is str else value


#: A path that begins at a root, a home or a drive, and its last part.
_ABSOLUTE: Final = re.compile(
    r"(?<![\w./\\…~:-])(?:~|[A-Za-z]:)?(?:[/\\](?!\s)[^\s/\\'\"=,;:]+)+(?P<end>[/\\][^\s/\\'\"=,;:]+)[/\\]?"
)


def without_places(text: str) -> str:
    """Return a text without the folders of absolute paths: a report is sent to other people."""
    return _ABSOLUTE.sub(lambda found: "…" + found["end"], text)


def shown_command(command: str) -> str:
    """Return a command line with the last parts of its absolute paths, however they are quoted,
    also after the = of an option."""

    def shown(word: str) -> str:
        option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
        path = Path(value.removeprefix("file://"))
        return f"{option}{equals}…/{path.name}" if path.is_absolute() else word

    return shlex.join(map(shown, shlex.split(command)))


def _runs(judged: Judged) -> dict[str, list[Drift]]:
    """Return the drifts of the control, if there is one, and of the judged videos."""
    results = judged.results
    runs = {"control": [clip.control for clip in results if clip.control is not None]}
    runs["patched"] = [clip.patched for clip in results]
    return {name: drifts for name, drifts in runs.items() if drifts}


def _measures(judged: Judged) -> list[dict[str, object]]:
    """Return the rows of the tables: for judged videos and control the median, its interval and
    the worst over all clips, and the number of each clip, with the function that shows them."""
    rows: list[dict[str, object]] = []
    for name, why, attribute, form, worst in _LATENT_MEASURES if judged.latents else _MEASURES:
        runs = reversed(_runs(judged).values())
        columns = [[getattr(drift, attribute) for drift in drifts] for drifts in runs]
        known = [[v for v in values if v is not None] for values in columns]
        rows.append(
            {
                "name": name,
                "why": why,
                "cells": [how(v) if v else None for how in (verdict.median, worst) for v in known],
                "intervals": [verdict.interval(v) for v in known],
                "each": list(zip(*columns, strict=True)),
                "show": partial(_db, form=form, unit="")
                if name.endswith("dB")
                else partial(_number, form=form),
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
    words = [f"{name}: {_span(runs['patched'])}."]
    words += [f"Control: {_span(runs['control'])}."] if "control" in runs else []
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
            "alt": f"PSNR of each frame against the baseline. {' '.join(words)}",
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
        "alt": f"{_value(check)}{other}; unchanged: {check.accepted}",
    }


def _data_url(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


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


def _markdown_code(text: str) -> str:
    """Return a text between backticks, in which Markdown reads nothing; also within a table."""
    text = " ".join(text.split()).replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _draw_plots(judged: Judged) -> list[dict[str, str]]:
    """Draw drift per prompt and per frame.

    Returns:
        Of each plot a light picture, which is also a file in plots/, a dark one, and its contents
        in words.
    """
    import matplotlib.style

    plots = []
    for name in ["prompts"] if judged.latents else _PLOTS:
        plot = {}
        for theme, styles in (("light", ["plot"]), ("dark", ["plot", "dark"])):
            with matplotlib.style.context([_PAGE / f"{style}.mplstyle" for style in styles]):
                picture, plot["alt"] = _draw_plot(name, judged)
            plot[theme] = _data_url(picture, "image/png")
            if theme == "light":
                with atomic(judged.out / "plots" / f"{name}.png") as temporary:
                    temporary.write_bytes(picture)
        plots.append(plot)
    return plots


def _draw_plot(name: str, judged: Judged) -> tuple[bytes, str]:
    """Draw one plot in the style that is set; return its PNG, and its contents in words."""
    # Without pyplot there is no global figure list and no window system to choose.
    from matplotlib.figure import Figure

    limit = _PLOTS[name][-1]
    words, title, xlabel, ylabel = (text.replace("NOUN", judged.noun) for text in _PLOTS[name][:4])
    if judged.latents:
        words, ylabel, limit = (
            words.replace("PSNR", "SNR"), ylabel.replace("PSNR", "SNR"), verdict.LATENTS_MEDIAN
        )  # fmt: skip
    figure = Figure()
    axes = figure.add_subplot(title=title, xlabel=xlabel, ylabel=ylabel)
    said = []
    for run, drifts in _runs(judged).items():
        colour = {"control": "C0", "patched": "C1"}[run]
        curves: dict[str, Sequence[Sequence[float]]] = {
            "prompts": [[drift.psnr for drift in drifts]],
            "frames": [drift.frame_psnr for drift in drifts],
        }
        columns = [[v for v in column if v is not None] for column in zip_longest(*curves[name])]
        # No axis can show the infinite PSNR of equal videos.
        low, middle, high = (
            [value if math.isfinite(value) else math.nan for value in map(how, columns)]
            for how in (verdict.lowest, verdict.median, verdict.highest)
        )
        places = list(range(1, len(columns) + 1))
        said.append(f"{run} {_span([verdict.median(column) for column in columns])}")
        axes.fill_between(places, low, high, color=colour, alpha=0.18, linewidth=0)
        # A curve of one point shows nothing.
        marker = "o" if name != "frames" or len(places) == 1 else ""
        line = "" if name == "prompts" else "-"
        # matplotlib leaves labels that begin with an underscore out of a legend.
        of_control = "control: another exact attention" if judged.model else run
        label = judged.name.lstrip("_") if run == "patched" else of_control
        axes.plot(places, middle, color=colour, marker=marker, linestyle=line, label=label)
        if name == "prompts":
            axes.axhline(verdict.median(curves[name][0]), color=colour, linewidth=1)
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    for check in judged.judgement.checks:
        if check.name == limit:
            label = f"unchanged: {check.name} {check.accepted}"
            axes.axhline(check.limit, color="C2", linestyle="--", linewidth=1)
            axes.annotate(
                label, (1, check.limit), xytext=(0, 4), textcoords="offset points",
                xycoords=axes.get_yaxis_transform(), ha="right", color="C2", fontsize=8.5,
            )  # fmt: skip
            said.append(label)
    # Outside of the axes, where it can hide nothing.
    figure.legend(loc="outside lower center", ncols=2)
    picture = io.BytesIO()
    figure.savefig(picture)
    return picture.getvalue(), f"{words}. {'; '.join(said)}."
