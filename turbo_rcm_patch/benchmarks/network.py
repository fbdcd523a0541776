"""One forward of a full-size Wan2.1-1.3B with seeded random weights: time, memory, and the network
number."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import torch

from turbo_rcm_patch.benchmarks.setup import (
    Deadline,
    Options,
    Result,
    errors_of,
    generator,
    time_call,
)
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

__all__ = ["build_network", "measure", "setting"]

#: A patched forward further than this from the unpatched one is broken and is not timed.
BROKEN: Final = 0.2
#: What is timed: the whole thing, and the fused skips around exact attention.
ATTENTIONS: Final[tuple[Attention, ...]] = ("int8", "exact")
#: Added to both gate rows of every block, so that attention really reaches the output.
LIVE_GATE: Final = 0.3
#: Factor on the query norm, so that attention is peaked.
SHARP: Final = 8.0
#: Rows of a block's scale_shift_table that gate: of self-attention and of the feed-forward.
GATE_ROWS: Final = (2, 5)
#: (name, gates live, query norm sharp)
SETTINGS: Final = (
    ("gates as drawn, norm_q x1", False, False),
    ("gates as drawn, norm_q x8", False, True),
    ("gates +0.3, norm_q x1", True, False),
    ("gates +0.3, norm_q x8", True, True),
)


def build_network(
    config: dict[str, object], device: torch.device, seed: int
) -> WanTransformer3DModel:
    """A Wan transformer with seeded random weights, made on the device.

    bf16, except what `from_pretrained(dtype=torch.bfloat16)` keeps in fp32 (the scale-shift
    tables, norm1 to norm3, the time embedder, the rotary tables): `.to(torch.bfloat16)` would be a
    different model.
    """
    from diffusers import WanTransformer3DModel

    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(device):
        torch.manual_seed(seed)
        network = WanTransformer3DModel(**config)
    kept = set(network._keep_in_fp32_modules)
    for name, parameter in network.named_parameters():
        if kept.isdisjoint(name.split(".")):
            parameter.data = parameter.data.bfloat16()
    return network.eval().requires_grad_(False)


@contextmanager
def setting(network: WanTransformer3DModel, *, live: bool, sharp: bool) -> Iterator[None]:
    """Inside, the gates are live or the attention is peaked; the weights are as before
    afterwards."""
    changed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def remember(tensor: torch.Tensor) -> torch.Tensor:
        changed.append((tensor, tensor.clone()))
        return tensor

    with torch.no_grad():
        for block in network.blocks:
            if live:
                remember(block.scale_shift_table.data)[:, list(GATE_ROWS)] += LIVE_GATE
            if sharp:
                for attention in (block.attn1, block.attn2):
                    remember(attention.norm_q.weight.data).mul_(SHARP)
        try:
            yield
        finally:
            for tensor, before in changed:
                tensor.copy_(before)


def _inputs(
    latents: tuple[int, ...],
    options: Options,
    device: torch.device,
    times: int,
    seeds: int,
) -> list[NetworkInput]:
    text_dim = options.sizes.network["text_dim"]
    random = generator(device, options.seed + 1)
    text = torch.randn(
        latents[0], options.sizes.text_tokens, int(str(text_dim)), generator=random, device=device
    )
    noises = [
        torch.randn(latents, generator=generator(device, options.seed + 2 + i), device=device)
        for i in range(seeds)
    ]
    return network_inputs(noises, text, times=TIMES[:times])


def _forward(network: WanTransformer3DModel, one: NetworkInput) -> torch.Tensor:
    return one.call(network)


def _tokens(latents: tuple[int, ...]) -> int:
    return latents[2] * (latents[3] // 2) * (latents[4] // 2)


def measure(options: Options, deadline: Deadline) -> Result:
    """Time and peak memory, the network number at its four settings for a first seed, the guard,
    then as many more seeds as the time allows.
    """
    device = options.torch_device()
    result = Result(("what", "setting", "unpatched", "patched", "patched / unpatched"))
    network = build_network(options.sizes.network, device, options.seed)
    result.data["parameters"] = sum(p.numel() for p in network.parameters())
    result.data["config"] = dict(options.sizes.network)
    try:
        _speed(network, options, device, result)
        deadline.keep(result)
        _numbers(network, options, device, deadline, result)
        _full_size_numbers(network, options, device, deadline, result)
    finally:
        # A later part gets the memory back also when this one failed.
        del network
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return result


def _timed(
    network: WanTransformer3DModel, one: NetworkInput, options: Options, device: torch.device
) -> dict[str, object]:
    """Median time of a forward and what it allocates on top of weights and inputs."""
    timing = time_call(lambda: _forward(network, one), device, options.forwards)
    numbers: dict[str, object] = {"milliseconds": asdict(timing)}
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        _forward(network, one)
        torch.cuda.synchronize(device)
        numbers["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        numbers["peak_bytes_over_weights"] = torch.cuda.max_memory_allocated(device) - before
    return numbers


@torch.no_grad()
def _speed(
    network: WanTransformer3DModel, options: Options, device: torch.device, result: Result
) -> None:
    from turbo_rcm_patch import patched

    one = _inputs(options.sizes.latents, options, device, times=1, seeds=1)[0]
    where = f"{_tokens(options.sizes.latents):,} tokens"
    unpatched_output = _forward(network, one)
    unpatched = _timed(network, one, options, device)
    speed: dict[str, object] = {
        "latents": list(options.sizes.latents),
        "tokens": _tokens(options.sizes.latents),
        "unpatched": unpatched,
    }
    result.data["forward"] = speed
    for attention in ATTENTIONS:
        config = PatchConfig(attention=attention, guard=False)
        with patched(network, config) as report:
            drift = errors_of(_forward(network, one), unpatched_output)
            numbers: dict[str, object] = {
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
            numbers.update(_timed(network, one, options, device))
        _row(result, where, attention, unpatched, numbers)
    again = _forward(network, one)
    speed["equal_after_unpatching"] = torch.equal(again, unpatched_output)
    if not speed["equal_after_unpatching"]:
        result.failures.append("the output after unpatching is not bit-equal to before")


def _row(
    result: Result,
    where: str,
    attention: str,
    unpatched: dict[str, object],
    patched: dict[str, object],
) -> None:
    def median(numbers: dict[str, object]) -> float:
        timing = numbers["milliseconds"]
        assert isinstance(timing, dict)
        return float(timing["median"])

    before, after = median(unpatched), median(patched)
    setting = f"attention={attention}"
    result.rows.append(
        (f"ms, {where}", setting, f"{before:.1f}", f"{after:.1f}", f"{after / before:.3f}")
    )
    if "peak_bytes" in patched:
        a, b = (int(str(one["peak_bytes"])) for one in (unpatched, patched))
        result.rows.append(
            (f"peak GiB, {where}", setting, f"{a / 2**30:.2f}", f"{b / 2**30:.2f}", f"{b / a:.3f}")
        )
        if b > a and attention == "int8":
            result.failures.append(f"peak memory rose from {a} to {b} bytes")


@torch.no_grad()
def _guard(
    network: WanTransformer3DModel,
    options: Options,
    device: torch.device,
    deadline: Deadline,
    result: Result,
) -> None:
    """What the guard says at full size: the worst pair's error, and how many it gives back."""
    from turbo_rcm_patch import patched

    one = _inputs(options.sizes.latents, options, device, times=1, seeds=1)[0]
    where = f"guard, {_tokens(options.sizes.latents):,} tokens"
    table: list[dict[str, object]] = []
    result.data["guard"] = table
    for name, live, sharp in SETTINGS:
        if deadline.passed:
            result.left_out.append(f"{where}, {name}")
            continue
        with setting(network, live=live, sharp=sharp), patched(network, PatchConfig()) as report:
            output = _forward(network, one)
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
        result.rows.append(
            (
                where,
                name,
                f"{worst.budget:.2f} allowed",
                f"{worst.error:.4f} worst",
                f"{given_back}",
            )
        )


def _numbers(
    network: WanTransformer3DModel,
    options: Options,
    device: torch.device,
    deadline: Deadline,
    result: Result,
) -> None:
    """e(patched) / e(unpatched); truth is the fp32 network, which is what takes the time.

    All settings for a first seed, then the guard, then all settings for the next seed.
    """
    latents = options.sizes.truth_latents
    inputs = _inputs(latents, options, device, options.times, options.seeds)
    where = f"error, {_tokens(latents):,} tokens"
    found: dict[str, list[NetworkNumber]] = {name: [] for name, _, _ in SETTINGS}
    for seed in range(options.seeds):
        for name, live, sharp in SETTINGS:
            if seed and deadline.passed:
                result.left_out.append(f"{where}, {name}, seed {seed}")
                continue
            with setting(network, live=live, sharp=sharp):
                some = inputs[seed * options.times : (seed + 1) * options.times]
                found[name].append(network_number(network, some))
        result.data["network_number"] = [
            _entry(latents, name, options.times * len(numbers), _mean(numbers))
            for name, numbers in found.items()
        ]
        if seed == 0:
            _guard(network, options, device, deadline, result)
        deadline.keep(result)
    for name, numbers in found.items():
        _number_row(result, where, name, options.times * len(numbers), _mean(numbers))


def _full_size_numbers(
    network: WanTransformer3DModel,
    options: Options,
    device: torch.device,
    deadline: Deadline,
    result: Result,
) -> None:
    """The same at the size of the timed forward, for a few inputs."""
    if not options.full_size_inputs:
        return
    latents = options.sizes.latents
    seeds = -(-options.full_size_inputs // 3)
    inputs = _inputs(latents, options, device, 3, seeds)[: options.full_size_inputs]
    where = f"error, {_tokens(latents):,} tokens"
    table = result.data["network_number"]
    assert isinstance(table, list), "the numbers come first"
    for name, live, sharp in SETTINGS:
        if deadline.passed:
            result.left_out.append(f"{where}, {name}")
            continue
        with setting(network, live=live, sharp=sharp):
            number = network_number(network, inputs)
        table.append(_entry(latents, name, len(inputs), number))
        deadline.keep(result)
        _number_row(result, where, name, len(inputs), number)


def _mean(numbers: Sequence[NetworkNumber]) -> NetworkNumber:
    """Over seeds, each of which had as many inputs."""
    return NetworkNumber(
        unpatched=statistics.fmean(one.unpatched for one in numbers),
        patched=statistics.fmean(one.patched for one in numbers),
    )


def _entry(
    latents: tuple[int, ...], name: str, inputs: int, number: NetworkNumber
) -> dict[str, object]:
    return {
        "latents": list(latents),
        "tokens": _tokens(latents),
        "inputs": inputs,
        "setting": name,
        "unpatched": number.unpatched,
        "patched": number.patched,
        "ratio": number.ratio,
    }


def _number_row(result: Result, where: str, name: str, inputs: int, number: NetworkNumber) -> None:
    where = f"{where}, {inputs} inputs"
    result.rows.append(
        (
            where,
            name,
            f"{number.unpatched:.5f}",
            f"{number.patched:.5f}",
            f"{number.ratio:.3f}",
        )
    )
    if not number.ratio <= NETWORK_LIMIT:
        result.failures.append(f"{where}, {name}: ratio {number.ratio:.3f}")
