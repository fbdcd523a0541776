"""Tables in Markdown of what `length` and `video` measured, for the documentation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

#: Rows of `length` that are not a number of tokens.
_NAMES: Final = {
    "cogvideox-2b": "CogVideoX-2B",
    "WanModel": "Wan2.1-1.3B in TurboDiffusion's class",
    "tiny": "the shipped tiny Wan",
    "tiny-cogvideox": "the shipped tiny CogVideoX",
}
#: Titles of the columns; the one whose CPU time and share in int8 are shown.
_METHODS: Final = {
    "eager": "eager",
    "eager sage": "eager, sageattention",
    "compiled": "`torch.compile`",
    "compiled graphs": "`reduce-overhead`",
    "patched": "**patched**",
    "patched int8 Linears": "patched, int8 Linears",
    "patched graphs": "patched, graphs",
    "patched int8 Linears graphs": "int8 Linears, graphs",
    "patched compiled": "patched, compiled",
    "patched compiled graphs": "patched, `reduce-overhead`",
}
_OURS: Final = "patched"
_VIDEO: Final = {
    "cold_seconds": "first video", "warm_seconds": "next", "denoise_seconds": "in the sampler",
    "decode_seconds": "in the VAE",
}  # fmt: skip


def tables(folder: Path) -> str:
    """The tables of a folder of results; empty if it holds neither file."""
    made = []
    for name, table in (("length", _length), ("video", _video)):
        path = folder / f"{name}.json"
        if path.is_file():
            made.append(table(json.loads(path.read_text(encoding="utf-8"))["cases"]))
    return "\n\n".join(made)


def _length(cases: dict[str, Any]) -> str:
    """Milliseconds of a forward; methods that nothing timed are left out."""
    timed = [case["methods"] for case in cases.values() if "methods" in case]
    shown = [
        name for name in _METHODS
        if any("milliseconds" in methods.get(name, {}) for methods in timed)
    ]  # fmt: skip
    rows = []
    for row, case in cases.items():
        if "methods" not in case:
            continue
        methods, tokens = case["methods"], case["tokens"] if "tokens" in case else int(row)
        title = "Wan2.1-1.3B" if row.isdigit() else _NAMES[row]
        cells = [_ms(methods.get(name, {})) for name in shown]
        own = methods.get(_OURS, {})
        share = f"{own['in_int8']:.0%}" if "in_int8" in own else ""
        rows.append([title, f"{tokens:,}", *cells, share])
    return _markdown(["", "tokens", *(_METHODS[name] for name in shown), "in int8"], rows)


def _ms(record: dict[str, Any]) -> str:
    if "milliseconds" not in record:
        return ""
    median, cpu = (record[key]["median"] for key in ("milliseconds", "cpu_milliseconds"))
    text, hidden = (f"{ms:.1f}" if ms < 100 else f"{ms:.0f}" for ms in (median, cpu))
    # The CPU's time matters only where it is near the whole.
    return f"{text} ({hidden})" if cpu > median / 3 else text


def _video(cases: dict[str, Any]) -> str:
    """Seconds a video."""
    rows = []
    for case, found in cases.items():
        for method, record in found["methods"].items():
            if "warm_seconds" in record:
                cells = [f"{record[key]:.2f}" for key in _VIDEO]
                peak = record.get("peak_bytes")
                rows.append([case, method, *cells, f"{peak / 2**30:.1f}" if peak else ""])
    return _markdown(["", "", *_VIDEO.values(), "peak, GiB"], rows)


def _markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
