"""Decode the latents of one prompt, measure the videos, and write them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from turbo_rcm_patch.sampling.generation import decode_latents
from turbo_rcm_patch.sampling.meter import Meter
from turbo_rcm_patch.sampling.metrics import Drift, drift
from turbo_rcm_patch.sampling.observer import Observer, Seen
from turbo_rcm_patch.sampling.settings import Settings
from turbo_rcm_patch.sampling.store import Store, from_json, reading
from turbo_rcm_patch.sampling.video import (
    amplified_difference,
    choose_gain,
    contact_sheet,
    enlarge,
    side_by_side,
    write_mp4,
)

if TYPE_CHECKING:
    from turbo_rcm_patch.sampling.families import VideoPipeline

__all__ = ["PromptResult", "finish_prompt", "read_prompt"]


@dataclass(frozen=True, slots=True)
class PromptResult:
    """The numbers of one prompt.

    Attributes:
        key: Name of its folder in `prompts/`.
        prompt: The prompt.
        seed: The seed.
        patched: Distance of the patched video from the baseline.
        control: Distance of the control video from the baseline.
        decode_seconds: Mean time of one decoding.
        seen: What an observer says of the videos, if there was one.
    """

    key: str
    prompt: str
    seed: int
    patched: Drift
    control: Drift
    decode_seconds: float
    seen: Seen | None = None

    def as_dict(self) -> dict[str, object]:
        """The numbers as plain data for JSON, including the worst frames."""
        values = asdict(self)
        for name, one in (("patched", self.patched), ("control", self.control)):
            values[name]["worst_frame"] = one.worst_frame
            values[name]["worst_psnr"] = one.worst_psnr
        return values


def finish_prompt(
    pipe: VideoPipeline,
    store: Store,
    key: str,
    prompt: str,
    seed: int,
    settings: Settings,
    observer: Observer | None = None,
) -> PromptResult:
    """Decode the three variants, measure them, and write videos and contact sheet. The record is
    written last, as the mark that the prompt is finished."""
    samples = {v: store.load_sample(key, v) for v in ("baseline", "patched", "control")}
    with Meter(pipe._execution_device) as meter:
        frames = _decode(pipe, {name: sample.latents for name, sample in samples.items()})
    distances = {
        name: drift(
            frames[name],
            frames["baseline"],
            latents=samples[name].latents,
            latents_truth=samples["baseline"].latents,
            trajectory=samples[name].trajectory,
            trajectory_truth=samples["baseline"].trajectory,
        )
        for name in ("patched", "control")
    }
    folder = store.folder(key)
    videos = {name: enlarge(frames[name]) for name in ("baseline", "patched", "control")}
    gain = choose_gain([(frames[n] - frames["baseline"]).abs() for n in ("patched", "control")])
    differences = {
        name: enlarge(amplified_difference(frames[name], frames["baseline"], gain), "nearest")
        for name in ("patched", "control")
    }
    write_mp4(videos["baseline"], folder / "baseline.mp4", settings.fps)
    write_mp4(videos["patched"], folder / "patched.mp4", settings.fps)
    write_mp4(differences["patched"], folder / "difference.mp4", settings.fps)
    rows = {
        "baseline": videos["baseline"],
        "patched": videos["patched"],
        f"patched - baseline, x {gain}": differences["patched"],
        f"control - baseline, x {gain}": differences["control"],
    }
    write_mp4(side_by_side(rows), folder / "side_by_side.mp4", settings.fps)
    contact_sheet(rows, folder / "sheet.png")
    result = PromptResult(
        key=key,
        prompt=prompt,
        seed=seed,
        patched=distances["patched"],
        control=distances["control"],
        decode_seconds=meter.seconds / 3,
        seen=observer.look(prompt, frames["baseline"], frames["patched"]) if observer else None,
    )
    store.write_json(f"prompts/{key}/record.json", result.as_dict())
    return result


def _decode(pipe: VideoPipeline, latents: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Frames [F, H, W, 3] of each variant.

    On a CPU together, which takes a third of the time, because torch has a fast convolution for
    batches only; elsewhere one after the other, which takes a third of the memory.
    """
    if pipe._execution_device.type == "cpu":
        together = decode_latents(pipe, torch.cat(list(latents.values())))
        return dict(zip(latents, together, strict=True))
    return {name: decode_latents(pipe, one)[0] for name, one in latents.items()}


def read_prompt(store: Store, key: str) -> PromptResult | None:
    """Read the numbers of a prompt; None if it is not finished."""
    name = f"prompts/{key}/record.json"
    record = store.read_json(name) if store.is_finished(key) else None
    if record is None:
        return None
    with reading(store.out / name):
        return PromptResult(
            key=key,
            prompt=str(record["prompt"]),
            seed=int(from_json(record["seed"])),
            patched=_read_drift(record["patched"]),
            control=_read_drift(record["control"]),
            decode_seconds=from_json(record["decode_seconds"]),
            seen=_read_seen(record.get("seen")),
        )


def _read_seen(value: object) -> Seen | None:
    if not isinstance(value, dict):
        return None
    return Seen(**{str(name): str(words) for name, words in value.items()})


def _read_drift(value: object) -> Drift:
    assert isinstance(value, dict), "records hold objects"

    def many(name: str) -> tuple[float, ...]:
        return tuple(from_json(v) for v in value[name])

    return Drift(
        psnr=from_json(value["psnr"]),
        ssim=from_json(value["ssim"]),
        frame_psnr=many("frame_psnr"),
        frame_ssim=many("frame_ssim"),
        latents=from_json(value["latents"]),
        steps=many("steps"),
    )
