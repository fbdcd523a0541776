"""Plots of a comparison as PNG files, drawn from metrics.json alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from turbo_rcm_patch.output import atomic
from turbo_rcm_patch.sampling.store import from_json
from turbo_rcm_patch.sampling.verdict import MEDIAN_MARGIN_DB, WORST_FRAME_MARGIN_DB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["STYLE", "draw_plots"]

PATCHED: Final = "#2563eb"
CONTROL: Final = "#9ca3af"
MARGIN: Final = "#dc2626"

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


def draw_plots(
    prompts: Sequence[Mapping[str, object]], folder: Path, steps: Sequence[int]
) -> list[Path]:
    """Draw drift per prompt, per frame and per step.

    Args:
        prompts: The entries of `prompts` in metrics.json.
        folder: Where the PNG files go.
        steps: Indices of the denoising steps whose latents were compared.

    Returns:
        The files.
    """
    import matplotlib

    drawings: dict[str, Callable[[Axes, Sequence[Mapping[str, object]]], None]] = {
        "prompts.png": _per_prompt,
        "frames.png": _per_frame,
        "steps.png": partial(_per_step, steps),
    }
    paths = []
    with matplotlib.rc_context(STYLE):
        for name, draw in drawings.items():
            figure, axes = _figure()
            draw(axes, prompts)
            path = folder / name
            with atomic(path) as temporary:
                figure.savefig(temporary, dpi=160, format="png")
            paths.append(path)
    return paths


def _figure() -> tuple[Figure, Axes]:
    # Without pyplot there is no global figure list and no window system to choose.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _per_prompt(axes: Axes, prompts: Sequence[Mapping[str, object]]) -> None:
    places = range(1, len(prompts) + 1)
    for name, colour, label in (
        ("control", CONTROL, "control: another exact attention"),
        ("patched", PATCHED, "patched"),
    ):
        values = [from_json(_drift(one, name)["psnr"]) for one in prompts]
        axes.plot(places, _finite(values), "o", color=colour, markersize=7, label=label)
        axes.axhline(_median(values), color=colour, linewidth=1)
        if name == "control":
            limit = _median(values) - MEDIAN_MARGIN_DB
            axes.axhline(limit, color=MARGIN, linestyle="--", linewidth=1)
            axes.annotate(
                "lowest median accepted", (1, limit), xytext=(0, 4), textcoords="offset points",
                xycoords=axes.get_yaxis_transform(), ha="right", color=MARGIN, fontsize=8.5,
            )  # fmt: skip
    axes.set(title="Distance from the baseline, per prompt", xlabel="prompt", ylabel="PSNR, dB")
    axes.set_xticks(list(places))
    axes.legend(loc="best", fontsize=8.5)


def _per_frame(axes: Axes, prompts: Sequence[Mapping[str, object]]) -> None:
    for name, colour in (("control", CONTROL), ("patched", PATCHED)):
        rows = [[from_json(v) for v in _list(_drift(one, name)["frame_psnr"])] for one in prompts]
        columns = list(zip(*rows, strict=True))
        frames = range(1, len(columns) + 1)
        low = _finite([min(c) for c in columns])
        high = _finite([max(c) for c in columns])
        axes.fill_between(frames, low, high, color=colour, alpha=0.18, linewidth=0)
        middle = _finite([_median(c) for c in columns])
        axes.plot(frames, middle, color=colour, linewidth=2, label=name)
        if name == "control":
            limit = min(low, default=math.nan) - WORST_FRAME_MARGIN_DB
            axes.axhline(limit, color=MARGIN, linestyle="--", linewidth=1)
            axes.annotate(
                "worst frame accepted", (1, limit), xytext=(0, 4), textcoords="offset points",
                xycoords=axes.get_yaxis_transform(), ha="right", color=MARGIN, fontsize=8.5,
            )  # fmt: skip
    axes.set(title="Per frame: median over prompts, and range", xlabel="frame", ylabel="PSNR, dB")
    axes.legend(loc="best", fontsize=8.5)


def _per_step(indices: Sequence[int], axes: Axes, prompts: Sequence[Mapping[str, object]]) -> None:
    steps = [index + 1 for index in indices]
    for name, colour in (("control", CONTROL), ("patched", PATCHED)):
        rows = [[from_json(v) for v in _list(_drift(one, name)["steps"])] for one in prompts]
        columns = list(zip(*rows, strict=True))
        for row in rows:
            axes.plot(steps, row, color=colour, linewidth=0.7, alpha=0.35)
        middle = [_median(c) for c in columns]
        axes.plot(steps, middle, "o-", color=colour, linewidth=2, markersize=4, label=name)
    axes.set_xticks(steps)
    axes.set_yscale("log")
    axes.set(
        title="Drift of the latents, step by step", xlabel="denoising step", ylabel="relative L2"
    )
    axes.legend(loc="best", fontsize=8.5)


def _drift(prompt: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = prompt[name]
    assert isinstance(value, Mapping), "metrics.json holds objects here"
    return value


def _list(value: object) -> Sequence[object]:
    assert isinstance(value, Sequence), "metrics.json holds lists here"
    return value


def _finite(values: Sequence[float]) -> list[float]:
    """Equal videos have infinite PSNR, which no axis can show: leave them out."""
    return [v if math.isfinite(v) else math.nan for v in values]


def _median(values: Sequence[float]) -> float:
    ordered = sorted(v for v in values if not math.isnan(v))
    if not ordered:
        return math.nan
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
