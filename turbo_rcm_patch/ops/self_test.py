"""The first use of a card that nobody has measured: a second of tests, whose result is kept.

`attention="auto"` decides by tables that were measured (`dispatch`). On a GPU without one the
first forward compares our int8 attention with torch's exact one, for its values and for its time,
at the head size of the model. What is wrong or slower is not used there. The result is a small
file beside the user's tables, good for the driver and the Triton that it was made with; a table
that `tune` writes is read first.

It does not run on a card with a table, while a compiler traces or a graph is captured, nor in a
process of several ranks, which have to decide alike: these read what an earlier process kept.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import Final

import torch
import torch.nn.functional as F

from turbo_rcm_patch.config import PVDType
from turbo_rcm_patch.errors import ConfigError
from turbo_rcm_patch.kernels.tile_table import made_with
from turbo_rcm_patch.ops import dispatch
from turbo_rcm_patch.ops.dispatch import Row, measure_dispatch, resolve_pv, self_test_path
from turbo_rcm_patch.ops.modes import is_capturing, transformed, without_autocast
from turbo_rcm_patch.ops.operation import compile_ahead, running_for_real
from turbo_rcm_patch.output import atomic

_log = logging.getLogger(__name__)

#: Lengths that are timed; at these the kernels' time is longer than Python's.
_LENGTHS: Final = (2048, 4096, 8192, 16384)
#: Times of each, of a few calls in turn; the shortest counts.
_CALLS: Final = 3
#: Relative L2 to exact attention from which a result is wrong and not inaccurate: int8 with p and
#: v in fp8 has 0.05.
_WRONG: Final = 0.1
#: Tokens of that comparison: several tiles, and rows and keys that do not fill the last one.
_TOKENS: Final = 1000

_LOCK: Final = threading.Lock()
_done: Final[set[tuple[str, int]]] = set()


def ensure_tested(device: torch.device, head_dim: int, heads: int) -> None:
    """Test an unmeasured GPU for one head size, once; elsewhere nothing happens.

    Args:
        device: Where a forward of inference begins.
        head_dim: Channels of a head.
        heads: How many.
    """
    if device.type != "cuda" or torch.compiler.is_compiling() or transformed():
        return
    if torch._C._len_torch_dispatch_stack():  # Fake tensors, or somebody who records.
        return
    name = dispatch.device_name_of(device)
    if (name, head_dim) in _done or is_capturing(device) or _several_ranks():
        return
    with _LOCK:
        if (name, head_dim) in _done:
            return
        _done.add((name, head_dim))
        if dispatch.is_measured(name, head_dim):
            return
        try:
            rows, words = self_test(device, head_dim, heads)
        except torch.OutOfMemoryError:
            _log.info("%s is not tested: too little memory is free", name)
            return
        _keep(name, head_dim, rows)
    uses_int8 = any(row["attention"] == "int8" for row in rows)
    _log.log(logging.INFO if uses_int8 else logging.WARNING, "%s: %s", name, words)


def self_test(
    device: torch.device,
    head_dim: int,
    heads: int,
    *,
    clock: Callable[[], float] = perf_counter,
) -> tuple[list[Row], str]:
    """Compare int8 attention with torch's exact attention on a device.

    Args:
        device: The device.
        head_dim: Channels of a head.
        heads: How many.
        clock: Seconds.

    Returns:
        Rows of a dispatch table for this head size, and what was found in a line.
    """
    span = {"head_dim": [head_dim, head_dim]}
    with torch.no_grad(), running_for_real(), without_autocast(device):
        found = ""
        own = resolve_pv("auto", device, _LENGTHS[-1])
        sixteen: PVDType = "bf16"
        either = tuple(dict.fromkeys((own, sixteen)))
        # What does not compile shows again below, where it is told apart from what is wrong.
        with suppress(Exception):
            compile_ahead(lambda: [_ours(device, head_dim, heads, pv) for pv in either], device)
        for pv in either:
            problem = _problem(device, head_dim, heads, pv)
            if not problem:
                break
            found += f"int8 attention with p and v in {pv} {problem}; "
        else:
            return _exact(span, found)
        try:
            table = measure_dispatch(
                device, lengths=_LENGTHS, heads=heads, calls=_CALLS, clock=clock,
                head_dims={head_dim: (head_dim, head_dim)}, pv=pv, graphs=False,
            )  # fmt: skip
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Lengths that `_problem` does not run may fail.
            timing = f"timing up to {_LENGTHS[-1]:,} tokens {_failure(error)}; "
            return _exact(span, found + timing)
    (rows,) = table.values()
    for row in rows:
        row["source"] = f"self test: {found}{row['source']}"
        if row["attention"] == "int8" and pv != own:
            row["pv"] = pv
    first = next((row for row in rows if row["attention"] == "int8"), None)
    if first is None:
        words = f"{found}int8 attention is slower than torch's; exact attention runs"
    else:
        words = f"{found}int8 attention from {first['n_q'][0]:,} tokens on"
    return rows, f"self test: {words} ({rows[0]['source'].removeprefix('self test: ')})"


def _exact(span: Row, found: str) -> tuple[list[Row], str]:
    words = f"self test: {found}exact attention runs"
    return [span | {"attention": "exact", "source": words}], words


def _failure(error: Exception) -> str:
    line = str(error).strip().splitlines()
    return f"fails ({type(error).__name__}: {line[0][:120] if line else 'no message'})"


def _problem(device: torch.device, head_dim: int, heads: int, pv: PVDType) -> str:
    """What is wrong with our int8 attention here, or ""."""
    try:
        ours, (q, k, v) = _ours(device, head_dim, heads, pv)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # A compiler and a driver raise what they like.
        return _failure(error)
    apart = (x.float().unflatten(-1, (heads, head_dim)).transpose(1, 2) for x in (q, k, v))
    truth = F.scaled_dot_product_attention(*apart).transpose(1, 2).flatten(2)
    distance = float((ours.float() - truth).norm() / truth.norm())
    return "" if distance < _WRONG else f"is wrong (relative L2 {distance:.3g})"


def _ours(
    device: torch.device, head_dim: int, heads: int, pv: PVDType
) -> tuple[torch.Tensor, torch.Tensor]:
    """Our int8 attention of random q, k and v, and these as [3, 1, N, H*D]."""
    from turbo_rcm_patch.ops.attention import attention_skip
    from turbo_rcm_patch.ops.spec import AttentionSpec

    random = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = (3, 1, _TOKENS, heads * head_dim)
    q, k, v = given = torch.randn(shape, generator=random, device=device, dtype=dtype)
    spec = AttentionSpec(heads=heads, attention="int8", pv=pv)
    return attention_skip(q, k, v, spec), given


def _several_ranks() -> bool:
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return there and torch.distributed.get_world_size() > 1


def _keep(name: str, head_dim: int, rows: list[Row]) -> None:
    """Write the rows of a head size beside what is kept of others, and use them from here on."""
    mine = dispatch.self_tests().get(name, [])
    rows = [row for row in mine if row.get("head_dim") != [head_dim, head_dim]] + rows
    try:
        path = self_test_path()
    except ConfigError as error:
        _log.info("%s: the test is kept for this process", error)
        dispatch.hold_self_test(name, rows)
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = {}
    entry = {"made_with": made_with(), "rows": rows}
    kept = (before if isinstance(before, dict) else {}) | {name: entry}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic(path) as temporary:
            temporary.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        _log.info("%s cannot be written (%s): the test is kept for this process", path, error)
        dispatch.hold_self_test(name, rows)
        return
    dispatch.forget_tables()
