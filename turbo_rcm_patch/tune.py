"""`tune`: measure the tiles of each kernel variant on this card and keep the best for later runs.

What decides is written once, to a file, so that no run depends on measurements made meanwhile.
"""

from __future__ import annotations

import copy
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F

from turbo_rcm_patch import ops
from turbo_rcm_patch.bench import (
    WRONG,
    Call,
    attention_fp64,
    calls_within,
    device_of,
    errors_of,
    generator,
    reason_of,
    some_rows,
    time_call,
)
from turbo_rcm_patch.config import PVDType
from turbo_rcm_patch.errors import ConfigError, Fp8UnsupportedError
from turbo_rcm_patch.kernels.launch import (
    Target,
    Tile,
    forget_tiles,
    shipped_tiles,
    target_of,
    trying_tile,
    watching_launches,
)
from turbo_rcm_patch.kernels.tile_table import (
    MADE_WITH,
    VARIABLE,
    made_with,
    read_table,
    table_path,
)
from turbo_rcm_patch.ops import keep_dispatch, measure_dispatch
from turbo_rcm_patch.output import check_writable, write_text
from turbo_rcm_patch.video.environment import device_name

#: Relative L2 to fp64 from which a shipped tile is wrong where nothing is quantised; a sum in bf16
#: has 0.002.
_WRONG_EXACT: Final = 0.02
#: Kernels that quantise, of which `WRONG` is the limit.
_QUANTISED: Final = ("attention", "one_launch", "prologue")
#: A tile is wrong when its error against fp64 is more than this times the shipped tile's.
_ERROR_MARGIN: Final = 1.05
#: A tile replaces the shipped one only if it is faster by more than measurements scatter.
_GAIN: Final = 1.01
#: How many of the fastest are timed again, longer and in turns with the shipped one.
_FINALISTS: Final = 3
_ROUNDS: Final = 2
#: Head dims whose variants are tuned unless others are asked for: those of the models we know.
_USUAL_HEADS: Final = ("64", "128")
#: Errors below this are rounding, whose ratio means nothing.
_ROUNDING: Final = 2e-4


#: Factor on the residual where one is closed: about as large as an attention over 8,192 keys, so
#: that a wrong attention shows.
_SMALL: Final = 2.0**-6

#: What `only` calls the table of attention="auto", which is measured after the tiles.
_CHOICES: Final = "auto"

#: A table of tiles, with what each target's were made with.
_Table = dict[str, dict[str, Any]]
_Tiles = Sequence[tuple[int, int, int, int]]
_FP8: Final[_Tiles] = (
    (64, 128, 4, 2), (64, 64, 4, 2), (128, 128, 8, 2), (64, 128, 4, 3), (64, 64, 4, 3),
    (128, 64, 4, 2), (128, 64, 8, 2), (128, 128, 8, 3),
)  # fmt: skip
_SIXTEEN: Final[_Tiles] = (
    (64, 64, 4, 2), (128, 64, 4, 3), (64, 64, 4, 3), (128, 64, 4, 2), (128, 64, 8, 2),
    (64, 128, 4, 2), (128, 128, 8, 2), (128, 128, 8, 3), (64, 32, 8, 2), (64, 32, 4, 2),
)  # fmt: skip
_OTHERS: Final[dict[str, _Tiles]] = {
    "project": (
        (64, 64, 4, 2), (128, 128, 8, 3), (128, 128, 8, 4), (64, 64, 4, 3), (64, 128, 4, 3),
        (128, 64, 4, 3), (128, 128, 4, 3), (128, 256, 8, 3), (256, 128, 8, 3),
    ),
    # The rows are the scale block's; what is tried is the width of the pass that sums squares.
    "prologue": tuple((128, w, warps, 1) for warps in (16, 8, 4) for w in (512, 128)),
    "skip": tuple(
        (*size, warps, 1) for size in ((16, 256), (8, 512), (4, 1024)) for warps in (4, 8)
    ),
}  # fmt: skip


class _WrongError(Exception):
    """The shipped tile is wrong, so no other can be judged by it."""


class _LeftError(Exception):
    """This card does not run the variant, or nothing is known to try; says which."""


@dataclass(slots=True)
class Found:
    """What was found for a kernel variant.

    Attributes:
        kernel: As in the table.
        variant: Likewise.
        tile: The best; the shipped one unless another is faster.
        shipped: The shipped one.
        gain: Time of the shipped tile over that of the best.
        refused: Tile -> why it was not timed.
    """

    kernel: str
    variant: str
    tile: Tile
    shipped: Tile
    gain: float
    refused: dict[Tile, str]


@dataclass(frozen=True, slots=True)
class Work:
    """A call that spends its time in one kernel.

    Attributes:
        words: Its shape, for a reader.
        call: The call.
        truth: fp64 on some rows.
        rows: Which rows of the output, int64.
    """

    words: str
    call: Call
    truth: torch.Tensor
    rows: torch.Tensor


def tune(
    *,
    device: str,
    only: Sequence[str] = (),
    out: Path | None = None,
    quick: bool = False,
    micro: bool = False,
    calls: int | None = None,
    limit: float = 600.0,
    dry_run: bool = False,
) -> int:
    """Measure, show, and write the table after each variant.

    Args:
        device: "cuda", "cuda:1", or "cpu" with `micro`.
        only: Kernels, or kernel.variant, with * for any; empty for the usual ones.
        out: File to write; None is where the kernels look for it.
        quick: Smaller inputs, fewer candidates.
        micro: Toy sizes, to try the command itself.
        calls: Most timed calls of a candidate.
        limit: Seconds after which no further variant begins.
        dry_run: Write nothing.

    Returns:
        1 if a variant failed or is wrong, the time ran out, or nothing was measured of one in
        `only`; else 0.
    """
    if calls is not None and calls < 1:
        raise ConfigError("--calls", expected="1 or more", got=str(calls))
    where = device_of(device)
    if where.type != "cuda" and not (micro and (out is not None or dry_run)):
        raise ConfigError(
            "--device",
            expected="a GPU: the table holds what a card is fastest with",
            got=device,
            remedy="To try the command itself, add --micro and --out FILE or --dry-run",
        )
    target = target_of(where) if where.type == "cuda" else Target("interpreter", 0)
    key = target.key if where.type == "cuda" else "cpu"
    path = table_path() if out is None else out
    before = _table_at(path)  # a corrupt file is refused up front
    if not dry_run:
        check_writable(path)
    shipped = shipped_tiles(target)
    choices = (not only or _CHOICES in only) and where.type == "cuda"
    tiles_asked = [name for name in only if name != _CHOICES]
    wanted = _wanted(tiles_asked, shipped) if tiles_asked or not only else []
    print(f"{device_name(where)} ({key}), {len(wanted)} kernel variants; table: {path}")
    end = time.monotonic() + limit
    found, left, failed = [], [], False
    scale = 1 / 1024 if micro else 0.5 if quick else 1.0
    most = 2 if micro else 4 if quick else None
    for kernel, variant in wanted:
        name = f"{kernel}.{variant}"
        if time.monotonic() >= end:
            left.append(name)
            continue
        try:
            one, words = _tune_one(
                kernel,
                variant,
                shipped[kernel][variant],
                where,
                scale=scale,
                most=most,
                calls=calls or (1 if micro else 20 if quick else 50),
            )
        except _LeftError as reason:
            print(f"{name}: {reason}, its tile stays")
            continue
        except Exception as failure:  # A compiler and a driver raise what they like.
            wrong = isinstance(failure, _WrongError)
            print(f"{name}: {failure if wrong else reason_of(failure)}; its tile stays")
            failed = True
            continue
        found.append(one)
        _show(one, words)
        if not dry_run:
            # At once, so that nothing is lost if a later variant ends the process, and into what
            # is there now, because another process may have written meanwhile.
            write_table(path, _merged(_table_at(path), key, [one]))
    if choices and time.monotonic() < end:
        own = None if _is_default(path) else out
        failed |= not _tune_choices(where, out=own, dry_run=dry_run, calls=calls or 20)
    elif choices:
        left.append(_CHOICES)
    for name in left:
        print(f"left out, no time: {name}")
    if not found:  # An entry without a variant would say that the card was tuned.
        print("no tile was measured; the table of tiles stays as it is")
    elif dry_run:
        print(f"not written (--dry-run):\n{_text(_merged(before, key, found))}", end="")
    else:
        forget_tiles()
        read = "" if _is_default(path) else f"; read with {VARIABLE}={path}"
        print(f"written: {path}{read}")
    unmeasured = _without(tiles_asked, [(one.kernel, one.variant) for one in found])
    for name in unmeasured:
        print(f"nothing was measured of {name}")
    return 1 if left or failed or unmeasured else 0


def _tune_one(
    kernel: str,
    variant: str,
    shipped: Tile,
    device: torch.device,
    *,
    scale: float,
    most: int | None,
    calls: int,
) -> tuple[Found, str]:
    """What is found for a variant among its first `most` candidates, and the shape of the work."""
    if variant.startswith("fp8") and not _has_fp8(device):
        raise _LeftError("this card has no fp8")
    with torch.no_grad():
        work = work_for(kernel, variant, device, scale=scale)
        if work is None:
            raise _LeftError("no candidates are known")
        tiles = candidates(kernel, variant)[:most]
        return _best(kernel, variant, shipped, tiles, work, device, calls), work.words


def _has_fp8(device: torch.device) -> bool:
    try:
        return ops.resolve_pv("fp8", device) == "fp8"
    except Fp8UnsupportedError:
        return False


def _is_default(path: Path) -> bool:
    """Whether kernels look for a table there."""
    try:
        return path == table_path()
    except ConfigError:  # There is no such place.
        return False


def _tune_choices(device: torch.device, *, out: Path | None, dry_run: bool, calls: int) -> bool:
    """Measure from which length on int8 is faster than exact attention, which is what
    attention="auto" reads, after the tiles: they decide how fast int8 is. False if it failed."""
    try:
        table = measure_dispatch(device, calls=calls)
    except Exception as failure:
        print(f"{_CHOICES}: {reason_of(failure)}; nothing is written for it")
        return False
    for row in table[device_name(device)]:
        keys = row.get("n_kv", [1, None])
        print(
            f"{row['attention']:>5} for heads of {row['head_dim'][0]} to {row['head_dim'][1]} "
            f"channels over {keys[0]:,} keys and more: {row['source']}"
        )
    if dry_run:
        return True
    path = keep_dispatch(table, None if out is None else out.with_suffix(".attention.json"))
    read = "" if out is None else "; it is read as dispatch.json beside the user's table of tiles"
    print(f"written: {path}{read}")
    return True


def _table_at(path: Path) -> _Table:
    return read_table(path) if path.exists() else {}


def write_table(path: Path, table: _Table) -> None:
    """Write a table of tiles, whole or not at all."""
    write_text(path, _text(table))


def _text(table: _Table) -> str:
    """JSON with a tile on one line, as in the shipped table."""
    text = json.dumps(table, indent=2)
    return re.sub(r"\[\s+([^\]]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text) + "\n"


def _merged(before: _Table, key: str, found: Sequence[Found]) -> _Table:
    """The table before with what was found, but of this target nothing that was made with other
    versions; a shipped tile is not repeated."""
    table = {target: copy.deepcopy(kernels) for target, kernels in before.items()}
    own = table.setdefault(key, {})
    if own.get(MADE_WITH) != made_with():
        own.clear()
    own[MADE_WITH] = made_with()
    for one in found:
        variants = own.setdefault(one.kernel, {})
        if one.tile == one.shipped:
            variants.pop(one.variant, None)
        else:
            variants[one.variant] = list(one.tile)
        if not variants:
            del own[one.kernel]
    return table


def _wanted(
    only: Sequence[str], shipped: Mapping[str, Mapping[str, Tile]]
) -> list[tuple[str, str]]:
    known = [(kernel, variant) for kernel, variants in shipped.items() for variant in variants]
    if not only:
        return [
            (kernel, variant)
            for kernel, variant in known
            if not (last := variant.split("_")[-1]).isdigit() or last in _USUAL_HEADS
        ]
    lost = _without(only, known)
    if lost:
        known_names = ", ".join([*shipped, *(f"{k}.{variant}" for k, variant in known)])
        raise ConfigError("--only", expected=f"some of {known_names}", got=", ".join(lost))
    return [pair for pair in known if any(_fits(pattern, *pair) for pattern in only)]


def _fits(pattern: str, kernel: str, variant: str) -> bool:
    return pattern == kernel or fnmatchcase(f"{kernel}.{variant}", pattern)


def _without(only: Sequence[str], variants: Sequence[tuple[str, str]]) -> list[str]:
    """The patterns that none of these (kernel, variant) fits."""
    return [one for one in only if not any(_fits(one, *pair) for pair in variants)]


def _best(
    kernel: str,
    variant: str,
    shipped: Tile,
    tiles: Sequence[tuple[int, int, int, int]],
    work: Work,
    device: torch.device,
    calls: int,
) -> Found:
    refused: dict[Tile, str] = {}
    # The shipped tile comes first: it says which error and which spills are the kernel's own.
    error, spills = _check(kernel, variant, shipped, work)
    if not error < (WRONG if kernel in _QUANTISED else _WRONG_EXACT):
        raise _WrongError(f"the shipped {list(shipped)} is WRONG (relL2 {error:.3g})")
    times: dict[Tile, float] = {shipped: _time(kernel, variant, shipped, work, device, calls, 60)}
    for tile in dict.fromkeys(Tile(*one) for one in tiles):
        if tile == shipped:
            continue
        try:
            own_error, own_spills = _check(kernel, variant, tile, work)
            if not own_error <= _ERROR_MARGIN * error + _ROUNDING:
                refused[tile] = f"wrong (relL2 {own_error:.3g}, shipped {error:.3g})"
            elif own_spills > spills:
                refused[tile] = f"spills {own_spills} registers a thread, shipped {spills}"
            else:
                times[tile] = _time(kernel, variant, tile, work, device, calls, 60)
        except Exception as failure:  # does not compile or launch on this card
            refused[tile] = reason_of(failure)
    finalists = [*sorted(times, key=lambda one: times[one])[:_FINALISTS]]
    if shipped not in finalists:
        finalists.append(shipped)
    final = dict.fromkeys(finalists, float("inf"))
    for _ in range(_ROUNDS):
        for one in finalists:
            again = _time(kernel, variant, one, work, device, 2 * calls, 100)
            final[one] = min(final[one], again)
    best = min(final, key=lambda one: final[one])
    if final[shipped] / final[best] < _GAIN:
        best = shipped
    return Found(kernel, variant, best, shipped, final[shipped] / final[best], refused)


def _check(kernel: str, variant: str, tile: Tile, work: Work) -> tuple[float, int]:
    """Relative L2 to fp64 (infinite if not finite everywhere), and the most registers that a
    kernel of the call spills."""
    with trying_tile(kernel, variant, tile) as asked, watching_launches() as launched:
        output = work.call()
        if not asked and output.device.type == "cuda":
            raise _LeftError("this card runs another kernel here")
        value = errors_of(output[:, work.rows], work.truth)["relative_l2"]
        finite = bool(output.isfinite().all())
    spills = max((getattr(one, "n_spills", 0) or 0 for one in launched), default=0)
    return (value if finite else float("inf")), spills


def _time(
    kernel: str,
    variant: str,
    tile: Tile,
    work: Work,
    device: torch.device,
    calls: int,
    budget: float,
) -> float:
    with trying_tile(kernel, variant, tile):
        count = calls_within(work.call, device, budget, min(3, calls), calls)
        return time_call(work.call, device, count, warmup=1).median


def _show(one: Found, words: str) -> None:
    tile, shipped = list(one.tile), list(one.shipped)
    what = (
        f"the shipped {shipped} is best"
        if one.tile == one.shipped
        else f"{tile} is {one.gain:.3f}x the shipped {shipped}"
    )
    print(f"{one.kernel}.{one.variant} ({words}): {what}", flush=True)
    for refused, why in one.refused.items():
        print(f"  {list(refused)}: {why}")


# --- what is tried: tiles, and a call that spends its time in the kernel -------------------------


def candidates(kernel: str, variant: str) -> _Tiles:
    """Tiles to try for a kernel variant; none for one that is not known here."""
    if kernel in ("attention", "one_launch"):
        return _FP8 if variant.startswith("fp8") else _SIXTEEN
    return _OTHERS.get(kernel, ())


def work_for(
    kernel: str, variant: str, device: torch.device, *, scale: float, seed: int = 0
) -> Work | None:
    """What is timed for a kernel variant; None for one that is not known here.

    Args:
        kernel: As in the table of tiles.
        variant: Likewise.
        device: Where.
        scale: Factor on the number of tokens; 1 is the real size.
        seed: Of the inputs.
    """
    real = {"attention": 8192, "one_launch": 8192, "prologue": 65536, "skip": 32760,
            "project": 4096}  # fmt: skip
    if kernel not in real:
        return None
    tokens = max(64, int(real[kernel] * scale))
    rows = some_rows(tokens, 64, device)
    random = generator(device, seed)
    dtype = torch.float32 if variant == "fp32" else torch.bfloat16

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random, device=device).to(dtype)

    if kernel == "skip":
        x, branch, gate = normal(1, tokens, 1536), normal(1, tokens, 1536), normal(1, 1, 1536)
        gate = gate.float()
        truth = x[:, rows].double() + gate.double() * branch[:, rows].double()
        return Work(f"N{tokens} C1536", lambda: ops.skip(x, branch, 1.0, gate), truth, rows)
    if kernel == "project":
        x, residual = normal(1, tokens, 1536), normal(1, tokens, 1536)
        square = normal(1536, 1536) * 1536**-0.5
        truth = _SMALL * residual[:, rows].double()
        truth += F.linear(x[:, rows].double(), square.double())
        words = f"N{tokens} C1536 {str(dtype).removeprefix('torch.')}"
        return Work(
            words,
            lambda: ops.project_skip(x, square, residual=residual, c_skip=_SMALL),
            truth,
            rows,
        )
    head_dim = int(variant.split("_")[-1])
    heads = max(1, 1536 // head_dim)
    channels = heads * head_dim
    # Many queries against few keys spend their time in the prologue.
    keys = 128 if kernel == "prologue" else tokens
    fp8 = variant.startswith("fp8") or (kernel == "prologue" and _has_fp8(device))
    pv: PVDType = "fp8" if fp8 else "bf16"
    spec = ops.AttentionSpec(heads=heads, pv=pv)
    q, k, v = (normal(1, n, channels) for n in (tokens, keys, keys))
    words = f"H{heads} N{tokens}x{keys} D{head_dim} {pv}"
    q64, k64 = q[:, rows].double(), k.double()
    if kernel == "prologue":
        # A norm of weight 1 over inputs that are normal already: its work without its error.
        ones = torch.ones(channels, device=device, dtype=torch.bfloat16)
        q64, k64 = (x * (x.square().mean(-1, keepdim=True) + spec.eps).rsqrt() for x in (q64, k64))
        return Work(
            f"{words} with norm",
            lambda: ops.attention_skip(q, k, v, spec, norm_q=ones, norm_k=ones),
            attention_fp64(q64, k64, v, heads),
            rows,
        )
    truth = attention_fp64(q64, k64, v, heads)
    if kernel == "attention":
        # Closing a skip: an attention without one may have a kernel of its own, without tiles.
        truth += _SMALL * q64
        return Work(
            words,
            lambda: ops.attention_skip(q, k, v, spec, residual=q, c_skip=_SMALL),
            truth,
            rows,
        )
    weight = normal(channels, channels) * channels**-0.5
    return Work(
        words,
        lambda: ops.attention_project_skip(
            q, k, v, weight, None, spec, residual=None, form="one-launch"
        ),
        F.linear(truth, weight.double()),
        rows,
    )
