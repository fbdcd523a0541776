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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from turbo_rcm_patch.output import atomic, write_json, write_text
from turbo_rcm_patch.video import verdict
from turbo_rcm_patch.video.generation import trajectory_steps
from turbo_rcm_patch.video.store import to_json
from turbo_rcm_patch.video.video import PANES, pane_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from turbo_rcm_patch.video.comparison import Comparison, PromptResult
    from turbo_rcm_patch.video.doctor import KernelCheck
    from turbo_rcm_patch.video.measures import Drift

#: Run -> its colour in plots; the control is drawn first.
COLOURS: Final = {"control": "#c2410c", "patched": "#2563eb"}

#: matplotlib settings of every plot of this package.
STYLE: Final[dict[str, object]] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9ca3af",
    "axes.grid": True,
    "grid.color": "#e5e7eb",
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": "#374151",
    "xtick.color": "#6b7280",
    "ytick.color": "#6b7280",
    "font.size": 9.5,
    "legend.frameon": False,
}
#: The changes of a dark page.
_DARK: Final[dict[str, object]] = {
    "figure.facecolor": "#131a26",
    "axes.facecolor": "#131a26",
    "axes.edgecolor": "#64748b",
    "grid.color": "#253044",
    "text.color": "#e8edf5",
    "axes.labelcolor": "#c3cddb",
    "xtick.color": "#9aa7ba",
    "ytick.color": "#9aa7ba",
}
#: Theme -> settings of matplotlib, and the colours of runs and limits.
_THEMES: Final = {
    "light": (STYLE, COLOURS | {"limit": "#dc2626"}),
    "dark": (STYLE | _DARK, {"control": "#fb923c", "patched": "#6ea8fe", "limit": "#f87171"}),
}
#: Pane of the player -> its label and its contents. NAME is that of the judged model.
_LABELS: Final = {
    "baseline": ("Baseline", "the unpatched model's video"),
    "patched": ("NAME", "the judged model's video"),
    "control": ("Control", "the unpatched model's video with another exact attention"),
    "patched difference": ("NAME − baseline", "the difference of the judged video, amplified"),
    "control difference": ("Control − baseline", "the difference of the control, amplified"),
}


def write_report(comparison: Comparison, kernel_check: KernelCheck | None = None) -> None:
    """Draw the plots and write metrics.json, report.md and the page.

    Args:
        comparison: With the videos of every prompt in its folder.
        kernel_check: The result of `check_kernels`, if it was run.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    metrics = comparison.as_dict()
    if kernel_check is not None:
        metrics["kernel_check"] = asdict(kernel_check) | {"passed": kernel_check.passed}
    write_json(comparison.metrics, to_json(metrics))
    jinja = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "page"),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters |= {
        "db": _db, "number": _number, "value": _value, "seconds": _seconds, "memory": _memory,
        "code": _markdown_code,
    }  # fmt: skip
    results, out = comparison.results, comparison.out
    shared = {
        "m": comparison,
        "name": comparison.attention_backend or "patched",
        "kernel_check": kernel_check,
        "chips": _chips(comparison),
        "facts": _facts(comparison),
        "measures": [measure.row(results) for measure in _MEASURES],
        "unmeasured": sorted({one.unmeasured for one in results} - {""}),
        "summary": {
            name: {
                "psnr": verdict.median([one.psnr for one in drifts]),
                "worst_psnr": verdict.lowest([one.worst_psnr for one in drifts]),
            }
            for name, drifts in _runs(results)
        },
    }
    page = jinja.get_template("report.html.j2").render(
        **shared,
        videos={
            one.key: _data_url((out / "prompts" / one.key / "panes.mp4").read_bytes(), "video/mp4")
            for one in results
        },
        players={one.key: json.dumps(_player(comparison, one)) for one in results},
        plots=_draw_plots(comparison),
        scales=_scales(comparison.judgement),
        guarded=comparison.attention_backend is None and comparison.identity["config"]["guard"],
        # Plain torch ran in the place of the kernels, so that its time means nothing.
        emulated=comparison.patch.get("impl") == "reference",
        patch_report=without_places(comparison.patch_report),
        limits=verdict,
    )
    write_text(comparison.report, page)
    write_text(comparison.short_report, jinja.get_template("report.md.j2").render(**shared))


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


@dataclass(frozen=True, slots=True)
class _Measure:
    """A column of the tables.

    Attributes:
        name: With its unit.
        why: Its meaning, in a line.
        of: Returns the number of a run.
        form: The format of the number.
        low: True if lower is worse.
    """

    name: str
    why: str
    of: Callable[[Drift], float | None]
    form: str
    low: bool = True

    def row(self, results: Sequence[PromptResult]) -> dict[str, object]:
        """Return the texts of the tables: over all prompts, and of each."""
        worst = verdict.lowest if self.low else verdict.highest
        runs = {
            name: [value for drift in drifts if (value := self.of(drift)) is not None]
            for name, drifts in _runs(results)
        }
        cells = [
            self._text(how(runs[name]) if runs[name] else None)
            for how in (verdict.median, worst)
            for name in ("patched", "control")
        ]
        each = {
            one.key: f"{self._text(self.of(one.patched))} / {self._text(self.of(one.control))}"
            for one in results
        }
        return {"name": self.name, "why": self.why, "cells": cells, "each": each}

    def _text(self, value: float | None) -> str:
        if value is None:
            return "–"
        return _db(value, unit="") if ", dB" in self.name else _number(value, self.form)


_MEASURES: Final = (
    _Measure("PSNR, dB", "mean square error of all pixels", lambda d: d.psnr, ".1f"),
    _Measure("PSNR of the worst frame, dB", "the frame with the largest error",
             lambda d: d.worst_psnr, ".1f"),
    _Measure("SSIM", "structure, 1 is equal (Wang et al. 2004)", lambda d: d.ssim, ".4f"),
    _Measure("VMAF", "0 to 100; equal videos have some 97 to 100, 6 are just noticeable",
             lambda d: d.vmaf, ".1f"),
    _Measure("XPSNR, dB", "PSNR weighted by what the eye sees, worst of three planes",
             lambda d: d.xpsnr, ".1f"),
    _Measure("flicker", "how much the difference changes between frames, 8-bit steps; 0 is best",
             lambda d: d.flicker, ".3f", low=False),
    _Measure("latents, relative L2", "before decoding; 0 is equal",
             lambda d: d.latents, ".4f", low=False),
)  # fmt: skip


def _runs(results: Sequence[PromptResult]) -> Iterator[tuple[str, list[Drift]]]:
    """The drifts of the control and of the judged model, one a prompt."""
    return ((name, [getattr(one, name) for one in results]) for name in COLOURS)


def _chips(comparison: Comparison) -> list[str]:
    """The model, the machine and the settings, in a few words each."""
    settings, identity = comparison.settings, comparison.identity
    backend, versions = comparison.attention_backend, identity["versions"]
    return [
        _name_of_model(identity["model"]),
        *([f"attention backend {backend}"] if backend else []),
        identity["device"],
        f"{settings.num_frames} frames, {settings.width} × {settings.height}",
        f"{settings.steps} steps",
        *(f"{name} {versions[name]}" for name in ("torch", "triton") if name in versions),
    ]


def _name_of_model(model: str) -> str:
    """A hub id as it is, of a folder its name."""
    return Path(model).name if Path(model).is_absolute() else without_places(model)


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    settings, identity = comparison.settings, comparison.identity
    patch = ", ".join(f"{name}={value}" for name, value in identity["config"].items())
    backend = comparison.attention_backend
    given = {k: v for k, v in identity["settings"].items() if v not in (None, "", ())}
    shown = given.keys() - {"height", "width", "num_frames"}
    sampler = ", ".join(f"{name}={given[name]}" for name in given if name in shown)
    facts = [
        ("command", shown_command(comparison.command) or "called from Python"),
        ("model", _name_of_model(identity["model"])),
        ("machine", identity["device"]),
        ("video", f"{settings.num_frames} frames of {settings.width} x {settings.height}"),
        ("sampler", sampler),
        ("transformer", f"{identity['dtype']}; VAE in float32"),
        ("baseline", comparison.baseline),
        ("control", f"scaled_dot_product_attention on its {comparison.control_backend} backend"),
        ("judged", f"attention backend {backend}, unpatched" if backend else f"patch: {patch}"),
        ("versions", ", ".join(f"{k} {v}" for k, v in identity["versions"].items())),
    ]
    return [(name, without_places(text)) for name, text in facts]


def _player(comparison: Comparison, result: PromptResult) -> dict[str, object]:
    """The data of one video for the script of the page."""
    height, width = pane_size(comparison.settings.height, comparison.settings.width)
    runs = {name: [_for_page(v) for v in getattr(result, name).frame_psnr] for name in COLOURS}
    known = [value for values in runs.values() for value in values if isinstance(value, float)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    step = next((s for s in (1, 2, 5, 10, 20) if (high - low) / s <= 3), 50)
    bottom, top = math.floor(low / step) * step, (math.floor(high / step) + 1) * step
    judged = comparison.attention_backend or "Patched"
    return {
        "frames": len(result.patched.frame_psnr),
        "fps": comparison.settings.fps,
        "height": height,
        "width": width,
        "gain": result.gain,
        "gains": [result.gain * share // 4 for share in (1, 2, 4, 8, 16, 32)],
        "panes": {
            name: {
                "column": column,
                "row": row,
                "label": _LABELS[name][0].replace("NAME", judged),
                "alt": f"{_LABELS[name][1]}: {result.prompt}",
                "difference": name.endswith("difference"),
            }
            for name, (column, row) in PANES.items()
        },
        "plot": {
            "bottom": bottom,
            "top": top,
            "ticks": list(range(bottom, top, step)),
            "alt": f"PSNR of each frame against the baseline. {judged}: {_span(runs['patched'])}. "
            f"Control: {_span(runs['control'])}.",
        },
        **runs,
    }


def _span(values: Sequence[float | str | None]) -> str:
    known = [v for v in values if isinstance(v, float)]
    wrong = sum(isinstance(v, str) for v in values)
    span = f"{min(known):.1f} to {max(known):.1f} dB" if known else "equal in every frame"
    if wrong:
        span = f"not a number in {wrong} of {len(values)}" + (f", else {span}" if known else "")
    return span


def _scales(judgement: verdict.Verdict) -> dict[str, dict[str, object]]:
    """Where limit, judged model and control lie on a small scale, in percent."""
    checks = {check.name: check for check in judgement.checks}
    scales = {}
    for key, name, margin, room in (
        ("median", verdict.MEDIAN, verdict.MEDIAN_MARGIN_DB, 3.0),
        ("worst", verdict.WORST, verdict.WORST_FRAME_MARGIN_DB, 4.0),
        ("network", verdict.NETWORK, None, 0.5),
        ("fusion", verdict.FUSION, None, verdict.FUSION_LIMIT / 4),
    ):
        if check := checks.get(name):
            control = None if margin is None else check.limit + margin
            scales[key] = scale_of(check, control, room)
    return scales


def scale_of(check: verdict.Check, control: float | None, room: float) -> dict[str, object]:
    """Return a scale that shows a condition's value, its limits and the control.

    Args:
        check: With the value and its limits.
        control: The number of the control, if it has such a number.
        room: How much to show beyond the outermost of them.
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


def _db(value: float, form: str = ".1f", unit: str = " dB") -> str:
    """A PSNR, which of equal videos is infinite."""
    return "equal" if value == math.inf else _number(value, form) + unit


def _number(value: float, form: str = ".4g") -> str:
    return f"{value:{form}}" if math.isfinite(value) else f"not a number ({value})"


def _value(check: verdict.Check, value: float | None = None) -> str:
    """The value of a condition, or another number of its kind."""
    value = check.value if value is None else value
    return _db(value, ".4g") if check.unit == " dB" else _number(value) + check.unit


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f} s" if value < 100 else f"{value / 60:.1f} min"


def _memory(value: float | None) -> str:
    return "–" if value is None else f"{value / 2**30:.2f} GiB"


def _markdown_code(text: str) -> str:
    """A text between backticks, in which Markdown reads nothing; also within a table."""
    text = " ".join(text.split()).replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _draw_plots(comparison: Comparison) -> list[dict[str, str]]:
    """Draw drift per prompt, per frame and per step.

    Returns:
        Of each plot a light picture, which is also a file in plots/, a dark one, and its contents
        in words.
    """
    import matplotlib

    # Without pyplot there is no global figure list and no window system to choose.
    from matplotlib.figure import Figure

    plots = []
    for draw in (_per_prompt, _per_frame, _per_step):
        found: dict[str, str] = {}
        for theme, (style, colours) in _THEMES.items():
            with matplotlib.rc_context(style):
                figure = Figure(figsize=(5.0, 3.6), layout="constrained")
                found["alt"] = draw(figure.add_subplot(), comparison, colours)
                # Outside of the axes, where it can hide nothing.
                figure.legend(loc="outside lower center", ncols=2, fontsize=8.5)
                picture = io.BytesIO()
                figure.savefig(picture, dpi=160, format="png")
            found[theme] = _data_url(picture.getvalue(), "image/png")
            if theme == "light":
                name = f"{draw.__name__.removeprefix('_per_')}s.png"
                with atomic(comparison.out / "plots" / name) as temporary:
                    temporary.write_bytes(picture.getvalue())
        plots.append(found)
    return plots


def _per_prompt(axes: Axes, comparison: Comparison, colours: dict[str, str]) -> str:
    from matplotlib.ticker import MaxNLocator

    results = comparison.results
    words = []
    for name, drifts in _runs(results):
        values, colour = [one.psnr for one in drifts], colours[name]
        label = "control: another exact attention" if name == "control" else _named(comparison)
        places = range(1, len(results) + 1)
        axes.plot(places, _finite(values), "o", color=colour, markersize=7, label=label)
        axes.axhline(verdict.median(values), color=colour, linewidth=1)
        words.append(f"{name} {_span(list(map(_for_page, values)))}")
        if name == "control":
            limit = verdict.median(values) - verdict.MEDIAN_MARGIN_DB
            words.append(_draw_limit(axes, limit, "lowest median accepted", colours["limit"]))
    axes.set(title="Distance from the baseline, per prompt", xlabel="prompt", ylabel="PSNR, dB")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return f"Points: PSNR of each of {len(results)} prompts. {'; '.join(words)}."


def _per_frame(axes: Axes, comparison: Comparison, colours: dict[str, str]) -> str:
    words = []
    for name, drifts in _runs(comparison.results):
        columns = list(zip(*(one.frame_psnr for one in drifts), strict=True))
        frames, colour = range(1, len(columns) + 1), colours[name]
        lows, middle = ([how(c) for c in columns] for how in (verdict.lowest, verdict.median))
        highs = _finite([verdict.highest(c) for c in columns])
        axes.fill_between(frames, _finite(lows), highs, color=colour, alpha=0.18, linewidth=0)
        point = "o" if len(columns) == 1 else ""  # a curve of one point shows nothing
        label = name if name == "control" else _named(comparison)
        axes.plot(frames, _finite(middle), marker=point, color=colour, linewidth=2, label=label)
        words.append(f"{name} {_span(list(map(_for_page, middle)))}")
        if name == "control":
            limit = verdict.lowest(lows) - verdict.WORST_FRAME_MARGIN_DB
            words.append(_draw_limit(axes, limit, "worst frame accepted", colours["limit"]))
    axes.set(title="Per frame: median over prompts, and range", xlabel="frame", ylabel="PSNR, dB")
    return f"Curves: PSNR of each frame, median over prompts. {'; '.join(words)}."


def _per_step(axes: Axes, comparison: Comparison, colours: dict[str, str]) -> str:
    steps = [index + 1 for index in trajectory_steps(comparison.settings.steps_run)]
    words = []
    for name, drifts in _runs(comparison.results):
        colour = colours[name]
        for one in drifts:
            axes.plot(steps, one.steps, color=colour, linewidth=0.7, alpha=0.35)
        middle = [verdict.median(c) for c in zip(*(one.steps for one in drifts), strict=True)]
        label = name if name == "control" else _named(comparison)
        axes.plot(steps, middle, "o-", color=colour, linewidth=2, markersize=4, label=label)
        words.append(f"{name} {middle[0]:.2g} after the first, {middle[-1]:.2g} after the last")
    axes.set_xticks(steps)
    axes.set_yscale("log")
    axes.set(
        title="Drift of the latents, step by step", xlabel="denoising step", ylabel="relative L2"
    )
    return f"Curves: drift of the latents after each step, median. {'; '.join(words)}."


def _named(comparison: Comparison) -> str:
    # matplotlib leaves labels that begin with an underscore out of a legend.
    return (comparison.attention_backend or "patched").lstrip("_")


def _draw_limit(axes: Axes, limit: float, label: str, colour: str) -> str:
    axes.axhline(limit, color=colour, linestyle="--", linewidth=1)
    axes.annotate(
        label, (1, limit), xytext=(0, 4), textcoords="offset points",
        xycoords=axes.get_yaxis_transform(), ha="right", color=colour, fontsize=8.5,
    )  # fmt: skip
    return f"{label} {_db(limit)}"


def _finite(values: Sequence[float]) -> list[float]:
    """Equal videos have infinite PSNR, which no axis can show: leave them out."""
    return [v if math.isfinite(v) else math.nan for v in values]


def _for_page(value: float) -> float | str | None:
    """A PSNR for the page's script: None where videos are equal, a text where it is no number."""
    if math.isfinite(value):
        return round(value, 3)
    return None if value == math.inf else "nan"
