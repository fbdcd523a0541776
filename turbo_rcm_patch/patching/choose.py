"""The choice of how exactly each block of a network runs.

The guard measures, for every level at which a block can run, what it adds to the network's error.
Errors of blocks add in squares. Here the levels are chosen that reach `PatchConfig.fidelity` and
cost the least time. Time is counted from operations, by what a card does per second, so that equal
errors give equal choices.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import torch

from turbo_rcm_patch import ops
from turbo_rcm_patch.ops.dispatch import capability_of
from turbo_rcm_patch.patching.block import Level, PatchedBlock
from turbo_rcm_patch.patching.measure import Shares, predicted

#: What a block adds to the network's error, at each level at which it can run.
Forms = Mapping[Level, Shares]
#: Operations per second, see `_RATES`.
Rates = tuple[float, ...]

#: Compute capability -> 1e12 operations per second of attention with values in fp8, with values in
#: 16 bits and in exact form, and of Linears in int8 and in 16 bits. H200, 12 heads over 32,760
#: tokens (results/2026-11-29/attention.json); Linears of Wan2.1-1.3B.
_RATES: Final[dict[tuple[int, int], Rates]] = {(9, 0): (950.0, 830.0, 560.0, 1080.0, 700.0)}
#: Largest error of one block, in units of the network's limit.
_OF_ONE: Final = 1.25
#: The least error that is in reach, with room: its last percent may cost every block.
_NEAR: Final = 1.01
_FP8, _WIDE, _EXACT, _INT8_LINEARS, _LINEARS = range(5)


def choose(
    forms: Sequence[Forms],
    times: Sequence[Mapping[Level, float]],
    others: Collection[Shares],
    limit: float,
    dtype: torch.dtype,
) -> list[Level]:
    """Choose levels with which the network's predicted error is at most a limit.

    How much of a block's error reaches the output is not measured, and the network may amplify
    that of its first blocks ten times. So each block begins at the fastest level at which its own
    error, in units of the author's, is near the limit. Then step by step that block is raised, to
    that level, which saves the most error for the time it costs: a greedy knapsack. Of equal ones
    the first is taken. Where the limit is out of reach, the least error that is in reach counts.

    Args:
        forms: What each block adds to the error at each level.
        times: The time of each block at each of these levels.
        others: What the network's other blocks add.
        limit: The largest error, in units of the unpatched network's.
        dtype: The model's dtype.
    """
    least = [min(each.values(), key=lambda share: share.fast) for each in forms]
    limit = max(limit, _NEAR * predicted([*others, *least], dtype))
    most = (_OF_ONE * limit) ** 2
    levels = []
    for each, time in zip(forms, times, strict=True):
        fit = [level for level, share in each.items() if share.fast <= most * share.original]
        levels.append(min(fit or each, key=lambda level: (time[level], level)))
    while True:
        present = [each[level] for each, level in zip(forms, levels, strict=True)]
        if predicted([*others, *present], dtype) <= limit:
            return levels
        gains = {
            (index, level): (present[index].fast - share.fast)
            / max(times[index][level] - times[index][levels[index]], 1e-9)
            for index, each in enumerate(forms)
            for level, share in each.items()
            if level > levels[index] and share.fast < present[index].fast
        }
        if not gains:
            return levels
        index, level = max(gains, key=gains.__getitem__)  # of equal ones the first
        levels[index] = level


def milliseconds(
    block: PatchedBlock, level: Level, attention: str, pv: str, rates: Rates
) -> float:
    """Return the time of a block's self-attention, and of its Linears that can run in int8.

    Args:
        block: The block, which has run.
        level: How exactly it runs.
        attention: What its attention as it was asked for resolves to.
        pv: The same.
        rates: What the card does, of `rates_of`.
    """
    queries, keys = block.last if isinstance(block.last, tuple) else (0, 0)
    kind = _FP8 if pv == "fp8" and not level.attention else _WIDE
    kind = kind if ops.quantises(attention) and level.attention < Level.EXACT else _EXACT
    products = 4 * queries * keys * block.asked.heads * block.head_dim / rates[kind]
    linears = [forward.linear for forward in block.int8]
    weights = sum(int(linear.in_features * linear.out_features) for linear in linears)
    kind = _INT8_LINEARS if level.int8_linears else _LINEARS
    return (products + 2 * queries * weights / rates[kind]) / 1e9


def rates_of(device: torch.device) -> tuple[Rates, bool]:
    """Return what a device does per second, and True if it was measured. Of another only the
    ratios mean anything."""
    measured = _RATES.get(capability_of(device) or (0, 0))
    return measured or _RATES[9, 0], measured is not None


def levels_above(block: PatchedBlock, level: Level, attention: str, pv: str) -> list[Level]:
    """Return the higher levels that change how a block runs, whose attention and pv resolve to
    these as it was asked for. The last one is `Level.ORIGINAL`."""
    forms = {level}
    if ops.quantises(attention) and pv == "fp8":
        forms.add(level.joined(Level.WIDE_VALUES))
    asked = block.config.attention == "exact"
    if not asked and (attention != "exact" or block.other_forwards()):
        forms.add(level.joined(Level.EXACT))
    if block.int8:
        forms |= {form.joined(Level.LINEARS_16BIT) for form in forms}
    return [*sorted(forms - {level}), Level.ORIGINAL]
