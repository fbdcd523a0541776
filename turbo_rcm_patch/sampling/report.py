"""What a comparison leaves for people and programs: plots, metrics.json, and report.html, a page
that refers to nothing outside itself.
"""

from __future__ import annotations

import base64
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from turbo_rcm_patch.output import atomic
from turbo_rcm_patch.sampling import verdict
from turbo_rcm_patch.sampling.generation import trajectory_steps
from turbo_rcm_patch.sampling.store import to_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from turbo_rcm_patch.sampling.comparison import Comparison, PromptResult
    from turbo_rcm_patch.sampling.kernel_check import KernelCheck
    from turbo_rcm_patch.sampling.measures import Drift

__all__ = ["STYLE", "write_report"]

#: Run -> its colour in plots; the control is drawn first.
COLOURS: Final = {"control": "#9ca3af", "patched": "#2563eb"}
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


def write_report(comparison: Comparison, kernel_check: KernelCheck | None = None) -> None:
    """Draw the plots and write metrics.json and the page.

    Args:
        comparison: With the videos of every prompt in its folder.
        kernel_check: What `run_kernel_check` found, if it was run.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    metrics = comparison.as_dict()
    if kernel_check is not None:
        metrics["kernel_check"] = kernel_check.as_dict()
    with atomic(comparison.metrics) as path:
        path.write_text(json.dumps(to_json(metrics), indent=1) + "\n", encoding="utf-8")
    plots = _draw_plots(comparison)
    jinja = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters.update(
        db=partial(_number, form=".1f"), number=_number, seconds=_seconds, memory=_memory
    )
    videos = {
        one.key: comparison.out / "prompts" / one.key / "side_by_side.mp4"
        for one in comparison.results
    }
    page = jinja.get_template("report.html.j2").render(
        m=comparison,
        kernel_check=kernel_check,
        videos={key: _data_url(path, "video/mp4") for key, path in videos.items()},
        plots=[_data_url(path, "image/png") for path in plots],
        summary={name: _summary(drifts) for name, drifts in _runs(comparison.results)},
        # In place of the kernels ran plain torch, so that its time means nothing.
        emulated=comparison.patch.get("impl") == "reference",
        facts=_facts(comparison),
        limits=verdict,
    )
    with atomic(comparison.report) as path:
        path.write_text(page, encoding="utf-8")


def _runs(results: Sequence[PromptResult]) -> Iterator[tuple[str, list[Drift]]]:
    """The drifts of the control and of the patched model, one a prompt."""
    return ((name, [getattr(one, name) for one in results]) for name in COLOURS)


def _summary(drifts: Sequence[Drift]) -> dict[str, float]:
    """Median PSNR, SSIM and drift of the latents, and the worst frame."""
    medians = {
        name: statistics.median(getattr(one, name) for one in drifts)
        for name in ("psnr", "ssim", "latents")
    }
    return medians | {"worst": min(one.worst_psnr for one in drifts)}


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    settings, identity = comparison.settings, comparison.identity
    sampler = (
        f"rCM ({settings.form}), {settings.steps} steps, sigma_max {settings.sigma_max:g}"
        if settings.sampler == "rcm"
        else f"the pipeline's own scheduler, {settings.steps} steps, "
        f"guidance {settings.guidance_scale:g}"
    )
    config = {
        name: "/".join(map(str, value)) if isinstance(value, (list, tuple)) else value
        for name, value in identity["config"].items()
    }
    return [
        ("command", comparison.command or "called from Python"),
        ("model", identity["model"]),
        ("machine", identity["device"]),
        ("video", f"{settings.num_frames} frames of {settings.width} x {settings.height}"),
        ("sampler", sampler),
        ("transformer", f"{identity['dtype']}; VAE in float32"),
        ("baseline", comparison.baseline),
        ("control", f"scaled_dot_product_attention on its {comparison.control_backend} backend"),
        ("patch", ", ".join(f"{name}={value}" for name, value in config.items())),
        ("versions", ", ".join(f"{k} {v}" for k, v in identity["versions"].items())),
    ]


def _data_url(path: Path, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"


def _number(value: float, form: str = ".4g") -> str:
    return "equal" if math.isinf(value) else f"{value:{form}}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f} s" if value < 100 else f"{value / 60:.1f} min"


def _memory(value: float | None) -> str:
    return "–" if value is None else f"{value / 2**30:.2f} GiB"


def _draw_plots(comparison: Comparison) -> list[Path]:
    """Draw drift per prompt, per frame and per step as PNG files."""
    import matplotlib

    # Without pyplot there is no global figure list and no window system to choose.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [index + 1 for index in trajectory_steps(comparison.settings.steps_run)]
    drawings: dict[str, Callable[[Axes, Sequence[PromptResult]], None]] = {
        "prompts.png": _per_prompt,
        "frames.png": _per_frame,
        "steps.png": partial(_per_step, steps),
    }
    paths = []
    with matplotlib.rc_context(STYLE):
        for name, draw in drawings.items():
            figure = Figure(figsize=(5.0, 3.4), layout="constrained")
            FigureCanvasAgg(figure)
            axes = figure.add_subplot()
            draw(axes, comparison.results)
            axes.legend(loc="best", fontsize=8.5)
            paths.append(comparison.out / "plots" / name)
            with atomic(paths[-1]) as temporary:
                figure.savefig(temporary, dpi=160, format="png")
    return paths


def _per_prompt(axes: Axes, results: Sequence[PromptResult]) -> None:
    places = range(1, len(results) + 1)
    labels = {"control": "control: another exact attention", "patched": "patched"}
    for name, drifts in _runs(results):
        values, colour = [one.psnr for one in drifts], COLOURS[name]
        axes.plot(places, _finite(values), "o", color=colour, markersize=7, label=labels[name])
        axes.axhline(_median(values), color=colour, linewidth=1)
        if name == "control":
            limit = _median(values) - verdict.MEDIAN_MARGIN_DB
            _draw_limit(axes, limit, "lowest median accepted")
    axes.set(title="Distance from the baseline, per prompt", xlabel="prompt", ylabel="PSNR, dB")
    axes.set_xticks(list(places))


def _per_frame(axes: Axes, results: Sequence[PromptResult]) -> None:
    for name, drifts in _runs(results):
        columns = list(zip(*(one.frame_psnr for one in drifts), strict=True))
        frames, colour = range(1, len(columns) + 1), COLOURS[name]
        low = _finite([min(c) for c in columns])
        high = _finite([max(c) for c in columns])
        axes.fill_between(frames, low, high, color=colour, alpha=0.18, linewidth=0)
        middle = _finite([_median(c) for c in columns])
        axes.plot(frames, middle, color=colour, linewidth=2, label=name)
        if name == "control":
            limit = min(low, default=math.nan) - verdict.WORST_FRAME_MARGIN_DB
            _draw_limit(axes, limit, "worst frame accepted")
    axes.set(title="Per frame: median over prompts, and range", xlabel="frame", ylabel="PSNR, dB")


def _per_step(steps: Sequence[int], axes: Axes, results: Sequence[PromptResult]) -> None:
    for name, drifts in _runs(results):
        colour = COLOURS[name]
        for one in drifts:
            axes.plot(steps, one.steps, color=colour, linewidth=0.7, alpha=0.35)
        middle = [_median(c) for c in zip(*(one.steps for one in drifts), strict=True)]
        axes.plot(steps, middle, "o-", color=colour, linewidth=2, markersize=4, label=name)
    axes.set_xticks(steps)
    axes.set_yscale("log")
    axes.set(
        title="Drift of the latents, step by step", xlabel="denoising step", ylabel="relative L2"
    )


def _draw_limit(axes: Axes, limit: float, label: str) -> None:
    axes.axhline(limit, color=MARGIN, linestyle="--", linewidth=1)
    axes.annotate(
        label, (1, limit), xytext=(0, 4), textcoords="offset points",
        xycoords=axes.get_yaxis_transform(), ha="right", color=MARGIN, fontsize=8.5,
    )  # fmt: skip


def _finite(values: Sequence[float]) -> list[float]:
    """Equal videos have infinite PSNR, which no axis can show: leave them out."""
    return [v if math.isfinite(v) else math.nan for v in values]


def _median(values: Sequence[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return statistics.median(known) if known else math.nan
