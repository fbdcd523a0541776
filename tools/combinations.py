"""Judge the patch beside what else changes a model: guidance, caches of diffusers, a LoRA.

    python -m tools.combinations --model RUN/world_teacher --sampler scheduler --steps 30 \
        --guidance-scale 3 --rows plain "first block cache" TaylorSeer MagCache \
        --out outputs/caches --json caches.json
    python -m tools.combinations --model RUN/world_student --lora LORA --rows plain LoRA \
        --colour green --out outputs/lora --json lora.json

Each row is one `compare`, whose three runs all have the cache or the LoRA. Distances are relative
L2 of latents, medians over the prompts; "effect" is that of a row's unpatched videos from those of
the first row. "colour" counts the videos, unpatched and patched, that show the colour that their
prompt names, or the one given.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from typing import Any, Final

from diffusers import FirstBlockCacheConfig, MagCacheConfig, TaylorSeerCacheConfig
from safetensors.torch import load_file

from training.world import HUES, look
from turbo_rcm_patch.files import write_json
from turbo_rcm_patch.video import add_loras, compare, generate, load_pipeline
from turbo_rcm_patch.video.comparison import Observer
from turbo_rcm_patch.video.generation import settings_for
from turbo_rcm_patch.video.measures import relative_l2
from turbo_rcm_patch.video.store import to_json
from turbo_rcm_patch.video.video import as_bytes

#: Prompts of clips that were recorded in maps for evaluation.
PROMPTS: Final = Path(__file__).parents[1] / "training" / "world_prompts.txt"
SETTINGS: Final = {
    "sampler": str, "steps": int, "guidance_scale": float, "num_frames": int, "height": int,
    "width": int,
}  # fmt: skip
CACHES: Final = ("first block cache", "TaylorSeer", "MagCache")


def colour_of(prompt: str) -> str:
    """Return the colour that a prompt names, or "" if it names none."""
    return next((one for one in (*HUES, "grey") if one in prompt.split()), "")


def cache_of(name: str, pipe: Any, prompt: str, settings: Any, threshold: float) -> Any:
    """Return diffusers' configuration of a cache, calibrated if it must be."""
    if name == "first block cache":
        return FirstBlockCacheConfig(threshold=threshold)
    if name == "TaylorSeer":
        # By default it hooks nothing of a Wan (diffusers 0.42.1); "lite" skips whole blocks.
        return TaylorSeerCacheConfig(cache_interval=3, use_lite_mode=True)
    # It prints a list for each of both calls of a guided step.
    pipe.transformer.enable_cache(
        MagCacheConfig(num_inference_steps=settings.steps, calibrate=True)
    )
    with redirect_stdout(io.StringIO()) as said:
        generate(pipe, prompt, settings=settings)
    pipe.transformer.disable_cache()
    found = re.findall(r"^\[([^a-z]+)\]$", said.getvalue(), re.M)[0]
    ratios = [float(one) for one in found.split(",")]
    return MagCacheConfig(num_inference_steps=settings.steps, mag_ratios=ratios)


def row_of(pipe: Any, out: Path, first: Path, colour: str | None, **given: Any) -> dict[str, Any]:
    """Compare, and return what the table shows."""
    observer = Observer(
        lambda prompt: colour or colour_of(prompt), lambda frames: look(as_bytes(frames))[1]
    )
    # A folder does not know of caches, so nothing of an earlier run may be used.
    found = compare(pipe, out=out, observer=observer, network_number=False, fresh=True, **given)
    pairs = [
        [load_file(place / "latents" / f"{one.key}.baseline.safetensors")["latents"]
         for place in (out, first)]
        for one in found.results
    ]  # fmt: skip
    assert found.seen is not None
    return {
        "verdict": found.verdict, "ran": str(found.judgement.ran),
        "psnr": median(one.patched.psnr for one in found.results),
        "control psnr": median(one.control.psnr for one in found.results if one.control),
        "distance": median(one.patched.latents for one in found.results),
        "control distance": median(one.control.latents for one in found.results if one.control),
        "effect": median(relative_l2(*pair) for pair in pairs),
        "colour": [found.seen["baseline"], found.seen["patched"], found.seen["prompts"]],
        "seconds": [found.times[name]["median_seconds"] for name in ("baseline", "patched")],
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Judge every row; print the table and write it as JSON."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="one a line")
    parser.add_argument("--rows", nargs="+", choices=("plain", *CACHES, "LoRA"), required=True)
    parser.add_argument("--colour", help="what to count in every video")
    parser.add_argument("--threshold", type=float, default=0.3, help="of the first block cache")
    for name in ("lora", "device"):
        parser.add_argument(f"--{name}")
    for name in ("out", "json"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name, kind in SETTINGS.items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=kind, default=argparse.SUPPRESS, help="as for compare")
    given = parser.parse_args(argv)
    prompts = given.prompts.read_text(encoding="utf-8").splitlines()
    changed = {name: value for name, value in vars(given).items() if name in SETTINGS}
    pipe: Any = load_pipeline(given.model, device=given.device)
    settings, rows = settings_for(pipe, **changed), {}
    for name in given.rows:
        if name == "LoRA":
            add_loras(pipe, [given.lora])
            settings = settings_for(pipe, **changed)
        elif name in CACHES:
            pipe.transformer.enable_cache(
                cache_of(name, pipe, prompts[0], settings, given.threshold)
            )
        places = [given.out / one.replace(" ", "_") for one in (name, given.rows[0])]
        rows[name] = row_of(pipe, *places, given.colour, prompts=prompts, settings=settings)
        if name in CACHES:
            pipe.transformer.disable_cache()
    record = {"model": Path(given.model).name, "settings": settings.as_dict(), "prompts": prompts}
    write_json(given.json, to_json(record | {"rows": rows}))
    shown = ("verdict", "psnr", "control psnr", "distance", "control distance", "effect", "colour")
    print(f"| | {' | '.join(shown)} |\n" + "|---" * (1 + len(shown)) + "|")
    for name, row in rows.items():
        cells = [f"{row[x]:.3g}" if isinstance(row[x], float) else str(row[x]) for x in shown]
        print(f"| {name} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
