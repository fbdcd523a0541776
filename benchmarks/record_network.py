"""The part "network" of `record`: one forward of a full-size Wan2.1-1.3B with seeded random
weights: time, memory, what the guard says, and the network number."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import torch

from benchmarks.networks import build_wan, setting, tokens_of
from benchmarks.record import Options, Result
from benchmarks.runner import Record, free, peak_bytes
from turbo_rcm_patch.bench import errors_of, generator, time_call
from turbo_rcm_patch.config import Attention, PatchConfig
from turbo_rcm_patch.sampling.measures import (
    TIMES,
    NetworkInput,
    NetworkNumber,
    network_inputs,
    network_number,
)
from turbo_rcm_patch.sampling.verdict import NETWORK_LIMIT

if TYPE_CHECKING:
    from diffusers import WanTransformer3DModel


#: A patched forward further than this from the unpatched one is broken and is not timed.
BROKEN: Final = 0.2
#: What is timed: the whole thing, and the fused skips around exact attention.
ATTENTIONS: Final[tuple[Attention, ...]] = ("int8", "exact")
#: (name, gates live, query norm sharp)
SETTINGS: Final = (
    ("gates as drawn, norm_q x1", False, False),
    ("gates as drawn, norm_q x8", False, True),
    ("gates +0.3, norm_q x1", True, False),
    ("gates +0.3, norm_q x8", True, True),
)


def network(options: Options, result: Result) -> None:
    """Time and peak memory, the network number at its four settings for a first seed, the guard,
    then as many more seeds as the time allows.
    """
    device = options.torch_device()
    result.header = ("what", "setting", "unpatched", "patched", "patched / unpatched")
    model = build_wan(options.sizes.network, device, options.seed)
    result.data["parameters"] = sum(p.numel() for p in model.parameters())
    result.data["config"] = dict(options.sizes.network)
    try:
        _speed(model, options, result)
        result.keep()
        _numbers(model, options, result)
        _full_size_numbers(model, options, result)
    finally:
        # A later part gets the memory back also when this one failed.
        del model
        free(device)


def _inputs(
    latents: tuple[int, ...], options: Options, times: int, seeds: int
) -> list[NetworkInput]:
    device, sizes = options.torch_device(), options.sizes
    size = (latents[0], sizes.text_tokens, sizes.network["text_dim"])
    text = torch.randn(size, generator=generator(device, options.seed + 1), device=device)
    noises = [
        torch.randn(latents, generator=generator(device, options.seed + 2 + i), device=device)
        for i in range(seeds)
    ]
    return network_inputs(noises, text, times=TIMES[:times])


def _full_size_input(options: Options) -> tuple[NetworkInput, str]:
    """An input of the timed forward, and its size in words."""
    latents = options.sizes.latents
    return _inputs(latents, options, times=1, seeds=1)[0], f"{tokens_of(latents):,} tokens"


@torch.no_grad()
def _speed(model: WanTransformer3DModel, options: Options, result: Result) -> None:
    from turbo_rcm_patch import patched

    device = options.torch_device()
    one, where = _full_size_input(options)

    def timed() -> Record:
        timing = time_call(lambda: one.call(model), device, options.forwards)
        peak = peak_bytes(lambda: one.call(model), device)
        return {"milliseconds": asdict(timing), **peak}

    before = one.call(model)
    unpatched = timed()
    speed: Record = {
        "latents": list(options.sizes.latents),
        "tokens": tokens_of(options.sizes.latents),
        "unpatched": unpatched,
    }
    result.data["forward"] = speed
    for attention in ATTENTIONS:
        with patched(model, PatchConfig(attention=attention, guard=False)) as report:
            drift = errors_of(one.call(model), before)
            numbers: Record = {
                "fused_pairs": report.fused,
                "impl": report.impl,
                "to_unpatched": drift,
            }
            speed[attention] = numbers
            if not drift["relative_l2"] < BROKEN:
                result.failures.append(
                    f"patched with attention={attention} is {drift['relative_l2']:.3g} from "
                    "unpatched, so it was not timed"
                )
                continue
            numbers.update(timed())
        _rows(result, where, attention, unpatched, numbers)
    speed["equal_after_unpatching"] = torch.equal(one.call(model), before)
    if not speed["equal_after_unpatching"]:
        result.failures.append("the output after unpatching is not bit-equal to before")


def _rows(result: Result, where: str, attention: str, before: Record, after: Record) -> None:
    name = f"attention={attention}"
    a, b = (one["milliseconds"]["median"] for one in (before, after))
    result.rows.append((f"ms, {where}", name, f"{a:.1f}", f"{b:.1f}", f"{b / a:.3f}"))
    if "peak_bytes" in after:
        a, b = before["peak_bytes"], after["peak_bytes"]
        gib = f"{a / 2**30:.2f}", f"{b / 2**30:.2f}"
        result.rows.append((f"peak GiB, {where}", name, *gib, f"{b / a:.3f}"))
        if b > a and attention == "int8":
            result.failures.append(f"peak memory rose from {a} to {b} bytes")


@torch.no_grad()
def _guard(model: WanTransformer3DModel, options: Options, result: Result) -> None:
    """What the guard says at full size: the worst pair's error, and how many it gives back."""
    from turbo_rcm_patch import patched

    one, where = _full_size_input(options)
    table: list[Record] = []
    result.data["guard"] = table
    for name, live, sharp in SETTINGS:
        if result.late(f"guard, {where}, {name}"):
            continue
        with setting(model, live=live, sharp=sharp), patched(model, PatchConfig()) as report:
            output = one.call(model)
            records = list(report.guard)
        worst = max(records, key=lambda record: record.error)
        given_back = sum(record.verdict == "given back" for record in records)
        table.append(
            {
                "setting": name,
                "pairs": len(records),
                "worst_error": worst.error,
                "worst_pair": worst.path,
                "budget": worst.budget,
                "given_back": given_back,
                "finite": bool(output.isfinite().all()),
            }
        )
        cells = (f"{worst.budget:.2f} allowed", f"{worst.error:.4f} worst", f"{given_back}")
        result.rows.append((f"guard, {where}", name, *cells))


def _numbers(model: WanTransformer3DModel, options: Options, result: Result) -> None:
    """e(patched) / e(unpatched); truth is the fp32 network, which is what takes the time.

    All settings for a first seed, then the guard, then all settings for the next seed.
    """
    latents, times = options.sizes.truth_latents, options.times
    inputs = _inputs(latents, options, times, options.seeds)
    where = f"error, {tokens_of(latents):,} tokens"
    found: dict[str, list[NetworkNumber]] = {name: [] for name, _, _ in SETTINGS}
    for seed in range(options.seeds):
        for name, live, sharp in SETTINGS:
            if seed and result.late(f"{where}, {name}, seed {seed}"):
                continue
            with setting(model, live=live, sharp=sharp):
                some = inputs[seed * times : (seed + 1) * times]
                found[name].append(network_number(model, some))
        result.data["network_number"] = [
            _entry(latents, name, times * len(numbers), _mean(numbers))
            for name, numbers in found.items()
        ]
        if seed == 0:
            _guard(model, options, result)
        result.keep()
    for name, numbers in found.items():
        _number_row(result, where, name, times * len(numbers), _mean(numbers))


def _full_size_numbers(model: WanTransformer3DModel, options: Options, result: Result) -> None:
    """The same at the size of the timed forward, for a few inputs."""
    count, latents = options.full_size_inputs, options.sizes.latents
    if not count:
        return
    inputs = _inputs(latents, options, 3, -(-count // 3))[:count]
    where = f"error, {tokens_of(latents):,} tokens"
    for name, live, sharp in SETTINGS:
        if result.late(f"{where}, {name}"):
            continue
        with setting(model, live=live, sharp=sharp):
            number = network_number(model, inputs)
        result.data["network_number"].append(_entry(latents, name, count, number))
        result.keep()
        _number_row(result, where, name, count, number)


def _mean(numbers: Sequence[NetworkNumber]) -> NetworkNumber:
    """Over seeds, each of which had as many inputs."""
    return NetworkNumber(
        unpatched=statistics.fmean(one.unpatched for one in numbers),
        patched=statistics.fmean(one.patched for one in numbers),
    )


def _entry(latents: tuple[int, ...], name: str, inputs: int, number: NetworkNumber) -> Record:
    return {
        "latents": list(latents),
        "tokens": tokens_of(latents),
        "inputs": inputs,
        "setting": name,
        "unpatched": number.unpatched,
        "patched": number.patched,
        "ratio": number.ratio,
    }


def _number_row(result: Result, where: str, name: str, inputs: int, number: NetworkNumber) -> None:
    where = f"{where}, {inputs} inputs"
    errors = f"{number.unpatched:.5f}", f"{number.patched:.5f}"
    result.rows.append((where, name, *errors, f"{number.ratio:.3f}"))
    if not number.ratio <= NETWORK_LIMIT:
        result.failures.append(f"{where}, {name}: ratio {number.ratio:.3f}")
