"""The page a person looks at: report.html, self-contained, written from metrics.json and the files
beside it.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from turbo_rcm_patch.output import atomic
from turbo_rcm_patch.sampling.generation import trajectory_steps
from turbo_rcm_patch.sampling.observer import as_asked
from turbo_rcm_patch.sampling.plots import draw_plots
from turbo_rcm_patch.sampling.store import from_json, reading, to_json
from turbo_rcm_patch.sampling.verdict import (
    MEDIAN_FLOOR_DB,
    MEDIAN_MARGIN_DB,
    NETWORK_LIMIT,
    WORST_FRAME_FLOOR_DB,
    WORST_FRAME_MARGIN_DB,
)

__all__ = ["rewrite_with", "write_report"]


def write_report(out: Path, metrics: Mapping[str, object]) -> Path:
    """Draw the plots and write the page.

    Args:
        out: Folder of the comparison, with the videos of every prompt.
        metrics: What metrics.json holds.

    Returns:
        Path of the page. It refers to nothing outside itself: videos and pictures are inside.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    prompts = [_mapping(one) for one in _list(metrics["prompts"])]
    settings = _mapping(_mapping(metrics["identity"])["settings"])
    steps = trajectory_steps(int(from_json(settings["steps"])))
    plots = draw_plots(prompts, out / "plots", steps)
    jinja = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters.update(db=_db, number=_number, seconds=_seconds, memory=_memory, value=_value)
    page = jinja.get_template("report.html.j2").render(
        m=metrics,
        prompts=[_gallery_entry(out, one) for one in prompts],
        plots=[_data_url(path, "image/png") for path in plots],
        checks=[_mapping(c) | {"sentence": _sentence(c)} for c in _list(metrics["checks"])],
        summary=_summary(prompts),
        seen=_seen(prompts),
        emulated=_emulated(metrics),
        facts=_facts(metrics),
        median_margin=MEDIAN_MARGIN_DB,
        worst_margin=WORST_FRAME_MARGIN_DB,
        median_floor=MEDIAN_FLOOR_DB,
        worst_floor=WORST_FRAME_FLOOR_DB,
        network_limit=NETWORK_LIMIT,
    )
    target = out / "report.html"
    with atomic(target) as path:
        path.write_text(page, encoding="utf-8")
    return target


def rewrite_with(out: Path, name: str, value: object) -> Path:
    """Add something found later to metrics.json, and write the page again.

    Args:
        out: Folder of a finished comparison.
        name: Key in metrics.json.
        value: What to store there.
    """
    path = out / "metrics.json"
    with reading(path):
        metrics = json.loads(path.read_text(encoding="utf-8")) | {name: to_json(value)}
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
    return write_report(out, metrics)


def _gallery_entry(out: Path, one: Mapping[str, object]) -> dict[str, object]:
    folder = out / "prompts" / str(one["key"])
    return dict(one) | {"video": _data_url(folder / "side_by_side.mp4", "video/mp4")}


def _summary(prompts: Sequence[Mapping[str, object]]) -> dict[str, dict[str, float]]:
    """Median PSNR, SSIM and drift of the latents, and the worst frame; patched and control."""
    summary = {}
    for name in ("patched", "control"):
        rows = [_mapping(one[name]) for one in prompts]
        column = {k: sorted(from_json(r[k]) for r in rows) for k in ("psnr", "ssim", "latents")}
        summary[name] = {k: _median(v) for k, v in column.items()}
        summary[name]["worst"] = min(from_json(r["worst_psnr"]) for r in rows)
    return summary


def _seen(prompts: Sequence[Mapping[str, object]]) -> dict[str, int] | None:
    """What the observer found over all prompts it looked at, None if there was none."""
    found = [_mapping(one["seen"]) for one in prompts if one.get("seen")]
    return as_asked([{k: str(v) for k, v in one.items()} for one in found]) if found else None


def _emulated(metrics: Mapping[str, object]) -> bool:
    """Whether the patched run used plain torch in place of the kernels, so that its time means
    nothing.
    """
    patch = metrics.get("patch")
    return isinstance(patch, Mapping) and patch.get("impl") == "reference"


def _facts(metrics: Mapping[str, object]) -> list[tuple[str, str]]:
    identity = _mapping(metrics["identity"])
    settings, versions = _mapping(identity["settings"]), _mapping(identity["versions"])
    shape = f"{settings['num_frames']} frames of {settings['width']} x {settings['height']}"
    sampler = (
        f"rCM ({settings['form']}), {settings['steps']} steps, sigma_max {settings['sigma_max']:g}"
        if settings["sampler"] == "rcm"
        else f"the pipeline's own scheduler, {settings['steps']} steps, "
        f"guidance {settings['guidance_scale']:g}"
    )
    rows = [
        ("command", str(metrics.get("command") or "called from Python")),
        ("model", str(identity["model"])),
        ("machine", str(identity["device"])),
        ("video", shape),
        ("sampler", sampler),
        ("transformer", f"{identity['dtype']}; VAE in float32"),
        ("baseline", str(metrics.get("baseline") or "the unpatched model")),
        ("control", f"scaled_dot_product_attention on its {metrics['control_backend']} backend"),
        ("patch", ", ".join(f"{k}={_value(v)}" for k, v in _mapping(identity["config"]).items())),
        ("versions", ", ".join(f"{k} {v}" for k, v in versions.items())),
    ]
    return rows


def _sentence(check: object) -> str:
    one = _mapping(check)
    value, limit, unit = from_json(one["value"]), from_json(one["limit"]), str(one["unit"])
    accepted = f"{'at least' if one['at_least'] else 'at most'} {_number(limit)}{unit}"
    return f"{one['name']}: {_number(value)}{unit}; accepted: {accepted}"


def _data_url(path: Path, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"


def _db(value: object) -> str:
    number = from_json(value)
    return "equal" if math.isinf(number) else f"{number:.1f}"


def _number(value: object) -> str:
    number = from_json(value)
    return "equal" if math.isinf(number) else f"{number:.4g}"


def _seconds(value: object) -> str:
    if value is None:
        return "–"
    number = from_json(value)
    return f"{number:.2f} s" if number < 100 else f"{number / 60:.1f} min"


def _memory(value: object) -> str:
    return "–" if value is None else f"{from_json(value) / 2**30:.2f} GiB"


def _value(value: object) -> str:
    return "/".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _median(ordered: Sequence[float]) -> float:
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def _mapping(value: object) -> dict[str, object]:
    assert isinstance(value, Mapping), "metrics.json holds an object here"
    return dict(value)


def _list(value: object) -> Sequence[object]:
    assert isinstance(value, (list, tuple)), "metrics.json holds a list here"
    return value
