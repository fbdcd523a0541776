"""Plots of the benchmarks as PNG files, drawn from their JSON files alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.runner import GROUPS, Record, number
from turbo_rcm_patch.extras import require
from turbo_rcm_patch.output import atomic
from turbo_rcm_patch.video.report import STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes


#: Colour and marker of a method: ours in blue, torch's in greys, packages in warm colours.
_LOOKS: Final = {
    "ours fp8": ("#1d4ed8", "o"),
    "ours bf16": ("#60a5fa", "o"),
    "torch cuDNN": ("#111827", "s"),
    "torch flash": ("#6b7280", "^"),
    "torch efficient": ("#b6bcc6", "v"),
    "sageattention 1": ("#f59e0b", "D"),
    "sageattention 2": ("#dc2626", "D"),
    "FlashAttention-3": ("#059669", "P"),
    "FlashAttention-2": ("#34d399", "X"),
    "xFormers": ("#a855f7", "*"),
}
_GROUP_COLOURS: Final = dict(
    zip(
        GROUPS,
        ("#93c5fd", "#1d4ed8", "#10b981", "#f59e0b", "#7c3aed", "#111827", "#f87171", "#d1d5db"),
        strict=True,
    )
)
_FORMS: Final = {
    "two-pass": ("#111827", "two-pass torch"),
    "one-pass": ("#9ca3af", "one-pass torch"),
    "two-launch": ("#60a5fa", "ours, two launches"),
    "two-launch-fp8": ("#f59e0b", "ours, two launches, fp8 p and v"),
    "two-launch-exact": ("#10b981", "ours, exact attention"),
    "one-launch": ("#1d4ed8", "ours, one launch"),
}


def plots_of(path: Path, benchmark: str) -> list[Path]:
    """The PNG files that `draw` may write for a benchmark whose JSON file is `path`."""
    return [path.with_name(name) for name in _DRAWINGS.get(benchmark, {})]


def draw(path: Path) -> list[Path]:
    """Draw what a JSON file of a benchmark holds, beside it.

    Args:
        path: Written by a comparison; not every one has plots.

    Returns:
        The PNG files; a plot for which there is nothing yet is left out.
    """
    require("report", "plots", "matplotlib")
    import matplotlib
    from matplotlib.figure import Figure

    document = json.loads(path.read_text(encoding="utf-8"))
    paths = []
    with matplotlib.rc_context(STYLE):
        for name, (size, fill) in _DRAWINGS.get(document["benchmark"], {}).items():
            figure = Figure(figsize=size, layout="constrained")
            axes = figure.add_subplot()
            if not fill(axes, document):
                continue
            target = path.with_name(name)
            with atomic(target) as temporary:
                figure.savefig(temporary, dpi=160, format="png", bbox_inches="tight")
            paths.append(target)
    return paths


def _named(document: Record, name: str) -> Iterator[tuple[str, Record]]:
    """(case, its entry `name`), for cases that have it."""
    for case, record in document["cases"].items():
        if name in record:
            yield case, record[name]


def _best(record: object) -> float | None:
    """TOPS by the better clock: one by one, or inside a CUDA graph."""
    found = [number(record, name) for name in ("tops", "graph_tops")]
    return max((one for one in found if one), default=None)


def _scaling(axes: Axes, document: Record) -> bool:
    lines: dict[str, list[tuple[float, float]]] = {}
    cases = document["cases"].values()
    shapes = [tuple(case["shape"][key] for key in "BHD") for case in cases]
    if not shapes:
        return False
    common = max(set(shapes), key=shapes.count)
    for case, shape in zip(cases, shapes, strict=True):
        for name, record in case["methods"].items():
            tops = _best(record)
            if shape == common and tops:
                lines.setdefault(name, []).append((case["shape"]["N"], tops))
    if not lines:
        return False
    for name, points in lines.items():
        colour, marker = _LOOKS.get(name, ("#374151", "o"))
        ours = name.startswith("ours")
        axes.plot(
            *zip(*sorted(points), strict=True), marker=marker, color=colour, label=name,
            linewidth=2.2 if ours else 1.4, markersize=6 if ours else 5, zorder=3 if ours else 2,
        )  # fmt: skip
    _token_ticks(axes, (tokens for points in lines.values() for tokens, _ in points))
    _, heads, dim = common
    axes.set_ylim(bottom=0)
    axes.set(
        title=f"Attention, {heads} heads of {dim}: everything counted",
        ylabel="$10^{12}$ operations a second",
    )
    return _legend(axes)


def _legend(axes: Axes) -> bool:
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return True


def _token_ticks(axes: Axes, tokens: Iterable[float]) -> None:
    """A logarithmic axis with a tick a size; of two that are close the larger is labelled."""
    ticks = sorted(set(tokens))
    crowded = [after < 1.4 * tick for tick, after in zip(ticks, ticks[1:], strict=False)]
    words = [f"{one / 1000:.0f}k" if one >= 1000 else f"{one:.0f}" for one in ticks]
    labels = ["" if hide else w for w, hide in zip(words, [*crowded, False], strict=True)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, labels, minor=False)
    axes.minorticks_off()
    axes.set_xlabel("tokens")


def _accuracy(axes: Axes, document: Record) -> bool:
    """One case: the one with most methods that were timed."""
    best: tuple[str, dict[str, tuple[float, float]]] = ("", {})
    for case, methods in _named(document, "methods"):
        found = {
            name: (tops, error)
            for name, record in methods.items()
            if (tops := _best(record)) and (error := number(record, "error", "relative_l1"))
        }
        if len(found) > len(best[1]):
            best = case, found
    case, points = best
    if not points:
        return False
    for name, (tops, error) in points.items():
        colour, marker = _LOOKS.get(name, ("#374151", "o"))
        axes.plot([tops], [error], marker, color=colour, markersize=10, label=name)
    errors = [error for _, error in points.values()]
    axes.set(
        yscale="log",
        xlim=(0, 1.1 * max(tops for tops, _ in points.values())),
        ylim=(min(errors) / 2, max(errors) * 2),
        title=f"Accuracy against speed, {case}",
        xlabel="$10^{12}$ operations a second (more is faster)",
        ylabel="relative L1 to fp64 (less is better)",
    )
    return _legend(axes)


def _roofline(axes: Axes, document: Record) -> bool:
    points: dict[str, list[tuple[float, float]]] = {}
    for case, methods in _named(document, "methods"):
        intensity = document["cases"][case]["intensity"]
        for name, record in methods.items():
            tops = number(record, "kernel_tops") or _best(record)
            if tops and name in ("ours fp8", "ours bf16", "torch cuDNN"):
                points.setdefault(name, []).append((intensity, tops))
    if not points:
        return False
    for name, some in points.items():
        colour, marker = _LOOKS[name]
        axes.plot(*zip(*sorted(some), strict=True), marker, color=colour, markersize=6, label=name)
    xs = [x for some in points.values() for x, _ in some]
    ys = [y for some in points.values() for _, y in some]
    low, high = min(xs) / 8, max(xs) * 2
    sheet: dict[str, float] = dict(document["ceilings"].get("data sheet", {}))
    memory = sheet.pop("memory", None)
    for name, peak in sheet.items():
        knee = low if memory is None else max(low, peak / memory)
        axes.plot([knee, high], [peak, peak], color="#dc2626", linewidth=1.2, linestyle="--")
        axes.annotate(
            f"{name} products, {peak:,.0f}", (knee, peak), xytext=(6, 4),
            textcoords="offset points", color="#dc2626", fontsize=8.5,
        )  # fmt: skip
    if memory is not None:
        top = max(sheet.values())
        ridge = min(high, top / memory)
        axes.plot([low, ridge], [low * memory, ridge * memory], color="#dc2626", linewidth=1.2)
        axes.annotate(
            f"memory, {memory} TB/s", (1.05 * low, 1.05 * low * memory),
            xytext=(8, -10), textcoords="offset points", color="#dc2626", fontsize=8.5,
        )  # fmt: skip
        ys = [*ys, top]
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(low, high),
        ylim=(min(ys) / 3, max(ys) * 1.6),
        title="Roofline: the attention kernel against the card",
        xlabel="operations a byte of q, k, v and output",
        ylabel="$10^{12}$ operations a second",
    )
    axes.legend(loc="lower right")
    return True


def _write_ups(axes: Axes, document: Record) -> bool:
    """Speed-up of each form over the two-pass baseline, over tokens, for q, k, v given."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for case, found in _named(document, "speedup"):
        record = document["cases"][case]
        if record["series"] != "given":
            continue
        for name, value in found.items():
            if name in _FORMS:
                lines.setdefault(name, []).append((record["tokens"], value))
    if not lines:
        return False
    for name, points in lines.items():
        colour, label = _FORMS[name]
        axes.plot(
            *zip(*sorted(points), strict=True), marker="o", color=colour, label=label, linewidth=2
        )
    axes.axhline(1.0, color=_FORMS["two-pass"][0], linewidth=1.2, label=_FORMS["two-pass"][1])
    _token_ticks(axes, (tokens for points in lines.values() for tokens, _ in points))
    axes.set_ylim(bottom=0)
    axes.set(
        title="Attention + projection + rCM skip, in CUDA graphs",
        ylabel="times as fast as two-pass torch",
    )
    return _legend(axes)


def _forward(axes: Axes, document: Record) -> bool:
    bars: list[tuple[str, Record]] = []
    for case, variants in _named(document, "variants"):
        several = len(document["cases"]) > 1
        for name, record in variants.items():
            groups = record.get("groups")
            if groups is not None:
                bars.append((f"{case}: {name}" if several else name, groups))
    if not bars:
        return False
    places = range(len(bars))
    left = [0.0] * len(bars)
    for group in GROUPS:
        widths = [groups.get(group, 0.0) for _, groups in bars]
        if any(widths):
            axes.barh(
                places, widths, left=left, color=_GROUP_COLOURS[group], label=group, height=0.62
            )
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, total in zip(places, left, strict=True):
        axes.annotate(
            f"{total:,.0f}" if total >= 10 else f"{total:.2f}", (total, place), xytext=(4, 0),
            textcoords="offset points", va="center", fontsize=8.5, color="#374151",
        )  # fmt: skip
    axes.set_yticks(list(places), [name for name, _ in bars])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 1.1 * max(left))
    axes.set(title="Where the time of a forward goes", xlabel="milliseconds in kernels")
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.16), ncols=4, fontsize=8.5)
    return True


def _over_length(axes: Axes, document: Record) -> bool:
    """Time of a forward over its tokens: queued, and as a CUDA graph."""
    looks = {
        "eager": "#111827",
        "compiled": "#9ca3af",
        "patched": "#1d4ed8",
        "patched exact": "#10b981",
        "patched int8 Linears": "#f59e0b",
    }
    lengths = sorted(int(name) for name in document["cases"] if name.isdigit())
    for name, colour in looks.items():
        for key, style in (("milliseconds", "-"), ("graph_milliseconds", ":")):
            found = [
                (tokens, number(document["cases"], str(tokens), "methods", name, key, "median"))
                for tokens in lengths
            ]
            points = [(tokens, value) for tokens, value in found if value is not None]
            if points:
                label = name if style == "-" else f"{name}, CUDA graph"
                axes.plot(*zip(*points, strict=True), style, color=colour, marker="o",
                          markersize=3, label=label)  # fmt: skip
    if not axes.lines:
        return False
    axes.set(xscale="log", yscale="log", ylabel="ms a forward")
    _token_ticks(axes, lengths)
    axes.legend(fontsize=7)
    return True


def _traffic(axes: Axes, document: Record) -> bool:
    cases = list(_named(document, "forms"))
    names = [name for name in _FORMS if any(name in forms for _, forms in cases)]
    if not names:
        return False
    width = 0.8 / len(names)
    measured_any = False
    for index, name in enumerate(names):
        colour, label = _FORMS[name]
        places = [i + (index - (len(names) - 1) / 2) * width for i in range(len(cases))]
        paper = [number(forms, name, "paper_bytes") or 0.0 for _, forms in cases]
        measured = [number(forms, name, "measured", "bytes") or 0.0 for _, forms in cases]
        measured_any |= any(measured)
        scale = [document["cases"][case]["tensor_bytes"] for case, _ in cases]
        paper, measured = (
            [a / b for a, b in zip(values, scale, strict=True)] for values in (paper, measured)
        )
        axes.bar(places, paper, width, edgecolor=colour, facecolor="none", linewidth=1.2)
        axes.bar(places, measured, 0.8 * width, color=colour, label=label)
    axes.set_xticks(range(len(cases)), [case.replace("-N", "\nN", 1) for case, _ in cases])
    axes.grid(axis="x", visible=False)
    how = "filled: measured, outline: on paper" if measured_any else "on paper; not measured"
    axes.set(
        title=f"Memory traffic of attention + projection + skip ({how})",
        ylabel="in tensors of B N C in 16 bits",
    )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4, fontsize=8.5)
    return True


Fill = Callable[["Axes", Record], bool]
_DRAWINGS: Final[dict[str, dict[str, tuple[tuple[float, float], Fill]]]] = {
    "attention": {
        "attention_scaling.png": ((7.6, 4.0), _scaling),
        "attention_accuracy.png": ((7.0, 4.0), _accuracy),
        "attention_roofline.png": ((6.4, 4.0), _roofline),
    },
    "block": {"block_write_ups.png": ((7.0, 3.6), _write_ups)},
    "network": {"network_forward.png": ((8.0, 4.2), _forward)},
    "length": {"time_over_length.png": ((7.0, 4.4), _over_length)},
    "network_turbo": {"network_turbo_forward.png": ((8.0, 5.0), _forward)},
    "hbm": {"hbm_traffic.png": ((8.4, 4.4), _traffic)},
}
