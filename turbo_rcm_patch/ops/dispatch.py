"""Which attention runs, on which kernels, and why: the one module that decides.

A device, a length and a head size decide four things:

- the attention of "auto": exact or int8, by a table that was measured on that device;
- the type of probabilities and values of "auto": e4m3 or bf16;
- one launch or two for an attention with its projection;
- the kernels: Hopper's own, the portable ones, or plain torch.

The tables are JSON: those of this package in `ops/tables`, and the user's, which `tune` writes
(`measure_dispatch`) and which is read first. A device without a table has a safe default: int8
from `INT8_DEFAULT_KEYS` keys on, exact below. On a CPU nothing is to be won, and "auto" is int8.

Everything here reads numbers, never tensors, and runs inside the registered operations: there
shapes are numbers, and a compiled graph does not depend on what is chosen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args
from zlib import crc32

import torch
from torch import Tensor

from turbo_rcm_patch.config import Impl, PVDType
from turbo_rcm_patch.errors import ConfigError, DeviceError, Fp8UnsupportedError
from turbo_rcm_patch.kernels.operands import QMAX, AttentionInputs
from turbo_rcm_patch.output import atomic

if TYPE_CHECKING:
    from turbo_rcm_patch.ops.spec import AttentionSpec

#: Keys from which "auto" is int8 on a GPU that nobody has measured.
INT8_DEFAULT_KEYS: Final = 4096
#: Keys from which pv="auto" takes fp8 where the device has it. fp8 has three times the error of
#: bf16 (results/h200/ops.json), which a long sequence repays with a faster second product and a
#: short one does not, because there attention is a small part of the time.
FP8_MIN_KEYS: Final = 4096
#: Keys below which a patched cross-attention is exact where int8 was asked for: over the 512
#: tokens of a prompt torch's own attention takes 182 us on an H200 (32,760 queries, 12 heads of
#: 128) and int8 takes 980, and there is no error to speak of.
INT8_MIN_KEYS: Final = 1024

#: A row of a table; see `_row_problem`.
Row = dict[str, Any]
#: Device name -> rows, of which the first that covers a shape decides.
Table = dict[str, list[Row]]

_REMEDY: Final = "Write a new one with `tune`, or delete the file"
_RANGES: Final = ("head_dim", "heads", "n_q", "n_kv")


class Choice(NamedTuple):
    """How an attention runs.

    Attributes:
        attention: "int8", "int4", "exact" or "sage".
        pv: Type of probabilities and values of a quantised attention.
        impl: "triton" or "reference".
        kernels: "Hopper", "portable" or "torch".
        reason: In words.
    """

    attention: str
    pv: str
    impl: Literal["triton", "reference"]
    kernels: str
    reason: str


# --- tables --------------------------------------------------------------------------------------


def dispatch_path() -> Path:
    """Where the user's table is: beside the user's table of tiles.

    Raises:
        ConfigError: There is no home folder.
    """
    from turbo_rcm_patch.kernels.tile_table import table_path

    return table_path().with_name("dispatch.json")


def _shipped() -> Table:
    shipped: Table = {}
    for file in resources.files("turbo_rcm_patch.ops").joinpath("tables").iterdir():
        if file.name.endswith(".json"):
            shipped |= json.loads(file.read_text(encoding="utf-8"))
    return shipped


#: Read at import, because a traced call cannot open files.
_SHIPPED: Final = _shipped()


@cache
def _tables() -> tuple[Table, ...]:
    """What holds of the user's table, the shipped ones, and what cards without a table showed when
    they were first used."""
    from turbo_rcm_patch.kernels.tile_table import MADE_WITH, existing_table, outdated

    path, users = existing_table("dispatch.json"), {}
    for name, rows in () if path is None else _read(path).items():
        made = {row.get(MADE_WITH) for row in rows}
        old = {one for one in made if outdated(one, path, f"choices for {name}")}
        users[name] = [row for row in rows if row.get(MADE_WITH) not in old]
    return users, _SHIPPED, self_tests()


@cache
def forms_measured() -> bool:
    """Whether a table names a form for any shape. Where none does, form="auto" is two launches
    and nobody has to look."""
    return any("form" in row for table in _tables() for rows in table.values() for row in rows)


def self_test_path() -> Path:
    """Where the results of `self_test` are.

    Raises:
        ConfigError: There is no home folder.
    """
    return dispatch_path().with_name("self_test.json")


#: Of this process, where there is no file or it cannot be written.
_held: Final[Table] = {}


def hold_self_test(name: str, rows: list[Row]) -> None:
    """Use a result that cannot be kept, from here on."""
    _held[name] = rows
    forget_tables()


def self_tests() -> Table:
    """The results that are good now, kept and of this process; a file that cannot be used, or
    that has no home folder to be in, holds none."""
    from turbo_rcm_patch.kernels.tile_table import existing_table, made_with

    path = existing_table("self_test.json")
    if path is None:
        return dict(_held)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        good = {
            name: entry["rows"]
            for name, entry in found.items()
            if entry["made_with"] == made_with() and not any(map(_row_problem, entry["rows"]))
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        good = {}
    return good | _held


def is_measured(name: str, head_dim: int) -> bool:
    """Whether a card has a table of its own, or was tested at this head size."""
    user, shipped, tested = _tables()
    rows = tested.get(name, ())
    return bool(user.get(name) or shipped.get(name)) or any(
        row.get("head_dim") == [head_dim, head_dim] for row in rows
    )


def measured_here(device: torch.device) -> str:
    """Which measurements decide for "auto" on a device, in words."""
    name = device_name_of(device)
    user, shipped, tested = _tables()
    found = []
    if user.get(name):
        found.append(f"your table ({dispatch_path()})")
    if shipped.get(name):
        found.append("the shipped table of this card")
    if tested.get(name):
        where = "of this process" if name in _held else self_test_path()
        found.append(f"the self test of this card ({where})")
    return " and ".join(found)


def tiles_here(device: torch.device) -> tuple[str, bool]:
    """Where the tile shapes of a GPU's kernels come from, in words, and whether they were measured
    on such a card."""
    from turbo_rcm_patch.kernels.launch import has_tiles, target_of
    from turbo_rcm_patch.kernels.tile_table import table_path, user_table

    key = target_of(device).key
    if key in user_table():
        return f"{key}: your table ({table_path()}), the shipped one for what is not in it", True
    if key == "sm_90":
        return f"{key}: measured on an H200", True
    if has_tiles(key):
        return f"{key}: chosen by counting instructions, measured on no such card", False
    return f"{key}: safe defaults, measured on no such card", False


def _read(path: Path) -> Table:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"dispatch table {path}", expected="a JSON file",
            got=f"{type(error).__name__}: {error}", remedy=_REMEDY,
        ) from error  # fmt: skip
    wrong = not isinstance(found, dict) and f"a {type(found).__name__}"
    for device, rows in () if wrong else found.items():
        wrong = wrong or (not isinstance(rows, list) and f"{device}: {rows!r}")
        for row in () if wrong else rows:
            problem = _row_problem(row)
            wrong = wrong or (problem and f"{device}: {problem}")
    if wrong:
        raise ConfigError(
            f"dispatch table {path}",
            expected='{"device": [{"n_kv": [low, high or null], "attention": "int8", ...}]}',
            got=str(wrong), remedy=_REMEDY,
        )  # fmt: skip
    table: Table = found
    return table


def _row_problem(row: object) -> str:
    """What is wrong with a row: it has ranges [low, high or null] of head_dim, heads, n_q and n_kv
    (a missing one holds everything), and "attention" (with "pv") or "form" (with "features") with
    the "source" of what it says, and what it was "made_with"."""
    if not isinstance(row, dict):
        return f"{row!r}"
    choices = {
        "attention": ("int8", "exact"), "pv": ("fp8", "bf16", "fp16"),
        "form": ("one-launch", "two-launch"),
    }  # fmt: skip
    for name, value in row.items():
        if name in _RANGES:
            pair = isinstance(value, list) and len(value) == 2
            if not pair or not all(x is None or type(x) is int for x in value):
                return f"{name}: {value!r}"
            if None not in value and value[0] > value[1]:
                return f"{name}: {value!r} holds nothing"
        elif name in choices:
            if value not in choices[name]:
                return f"{name}: {value!r}"
        elif name not in ("features", "source", "made_with"):
            return f"unknown {name!r}"
    if "pv" in row and "attention" not in row:
        return 'a row with "pv" and without "attention"'
    return "" if choices.keys() & row.keys() else "a row that decides nothing"


def forget_tables() -> None:
    """Read the tables again, and decide again."""
    from turbo_rcm_patch.kernels.replay import forget_programs

    _tables.cache_clear()
    forms_measured.cache_clear()
    _decided.cache_clear()
    _resolved.cache_clear()
    _decider.cache_clear()
    forget_programs()


def _row_for(name: str, what: str, numbers: Sequence[int], features: int = 0) -> Row | None:
    """The first row for a device that decides `what` for these numbers, in the order of
    `_RANGES`."""
    for table in _tables():
        for row in table.get(name, ()):
            ranges = [row.get(key) or (None, None) for key in _RANGES]
            if (
                what in row
                and row.get("features", features) == features
                and all(
                    (low is None or low <= n) and (high is None or n <= high)
                    for n, (low, high) in zip(numbers, ranges, strict=True)
                )
            ):
                return row
    return None


@cache
def _device_name(index: int) -> str:
    return torch.cuda.get_device_name(index)


def device_name_of(device: torch.device) -> str:
    """The name of a GPU, by which tables have it; of other devices their type."""
    if device.type != "cuda":
        return device.type
    return _device_name(torch.cuda.current_device() if device.index is None else device.index)


def decider(device: torch.device) -> int:
    """A number of what decides for "auto" on a device: its name and the rows for it. Devices and
    tables with the same number decide alike."""
    return _decider(device_name_of(device))


@cache
def _decider(name: str) -> int:
    return crc32(json.dumps([name, [table.get(name) for table in _tables()]]).encode())


# --- decisions -----------------------------------------------------------------------------------


def resolve_impl(impl: Impl, device: torch.device) -> Literal["triton", "reference"]:
    """The implementation that runs on `device`.

    "auto" is "triton" on a GPU (CUDA or HIP) and "reference" elsewhere. Asking for "triton" on
    another device is refused here unless Triton's interpreter is on, which the launcher knows.

    Raises:
        ConfigError: `impl` is none of these words.
    """
    if impl == "auto":
        return "triton" if device.type == "cuda" else "reference"
    if impl not in get_args(Impl):
        raise ConfigError("impl", expected=f"one of {get_args(Impl)}", got=repr(impl))
    return impl


def resolve_pv(
    pv: PVDType, device: torch.device, n_kv: int | None = None
) -> Literal["fp8", "bf16", "fp16"]:
    """The element type of probabilities and values on `device`.

    "auto" is fp8 on an NVIDIA GPU of compute capability 8.9 or newer from `FP8_MIN_KEYS` keys on,
    and bf16 elsewhere. What is asked for by name is taken at any length.

    Args:
        pv: What was asked for.
        device: Where the attention runs.
        n_kv: Number of keys; None stands for as many as it takes.

    Raises:
        Fp8UnsupportedError: fp8 was asked for by name on a GPU without e4m3 matrix units.
    """
    if pv in ("bf16", "fp16"):
        return pv
    if device.type != "cuda":
        return "fp8" if pv == "fp8" else "bf16"
    if pv == "auto" and n_kv is not None and n_kv < FP8_MIN_KEYS:
        return "bf16"
    if torch.version.hip is not None:
        has_fp8, name = False, "a HIP device, whose e4m3 is another format"
    else:
        if not torch.cuda.is_available():
            raise DeviceError(
                "pv",
                expected="a visible CUDA device",
                got=str(device),
                remedy="Name pv explicitly",
            )
        capability = torch.cuda.get_device_capability(device)
        has_fp8, name = capability >= (8, 9), f"compute capability {capability[0]}.{capability[1]}"
    if pv == "fp8" and not has_fp8:
        raise Fp8UnsupportedError(
            'pv="fp8"',
            expected="compute capability 8.9 or newer",
            got=name,
            remedy='Use pv="auto"',
        )
    return "fp8" if has_fp8 else "bf16"


def describe_pv(pv: PVDType, device: torch.device) -> str:
    """What `resolve_pv` gives on `device` at every length, for a reader."""
    resolved = resolve_pv(pv, device)
    if pv == "auto" and resolved == "fp8":
        return f"fp8 from {FP8_MIN_KEYS:,} keys, else {resolve_pv(pv, device, 0)}"
    return resolved


def quantises(attention: str) -> bool:
    """Whether an attention may run in int8 or int4: so named, or "auto"."""
    return attention == "auto" or attention in QMAX


def choose_form(
    batch: int,
    n_q: int,
    n_kv: int,
    heads: int,
    head_dim: int,
    c_out_features: int,
    device: torch.device,
) -> Literal["one-launch", "two-launch"]:
    """The form that was measured to be faster for a shape on this device; "two-launch" where
    nothing was measured."""
    if device.type != "cuda" or not forms_measured():
        return "two-launch"
    numbers = (head_dim, heads, batch * n_q, n_kv)
    row = _row_for(device_name_of(device), "form", numbers, c_out_features)
    return "one-launch" if row is not None and row["form"] == "one-launch" else "two-launch"


@lru_cache(maxsize=4096)
def _decided(
    attention: str,
    pv: PVDType,
    impl: Impl,
    device: torch.device,
    heads: int,
    head_dim: int,
    n_q: int,
    n_kv: int,
    exact_serves: bool,
) -> Choice:
    own = resolve_impl(impl, device)
    reason = "asked for"
    row = None
    if device.type == "cuda" and exact_serves and (attention == "auto" or pv == "auto"):
        row = _row_for(device_name_of(device), "attention", (head_dim, heads, n_q, n_kv))
    if attention == "auto":
        if device.type != "cuda":
            attention, reason = "int8", f"nothing is measured on {device.type}"
        elif not exact_serves:
            attention, reason = "int8", "only our kernels return the logsumexp at this price"
        else:
            if row is not None:
                attention, reason = row["attention"], row.get("source", "the table of this device")
            else:
                long = n_kv >= INT8_DEFAULT_KEYS
                attention = "int8" if long else "exact"
                reason = (
                    f"no measurement on {device_name_of(device)} covers it: int8 from "
                    f"{INT8_DEFAULT_KEYS:,} keys on"
                )
    if attention not in QMAX:
        return Choice(attention, pv, own, "torch", reason)
    if pv == "auto" and row is not None and "pv" in row:
        pv = row["pv"]
        try:
            resolve_pv(pv, device, n_kv)
        except Fp8UnsupportedError as error:  # Its remedy is for who asked for fp8.
            raise ConfigError(
                f"dispatch table {dispatch_path()}",
                expected=f'no "pv": "fp8" for {device_name_of(device)}', got=str(row),
                remedy=_REMEDY,
            ) from error  # fmt: skip
    chosen = resolve_pv(pv, device, n_kv)
    return Choice(attention, chosen, own, _kernels(own, device, head_dim), reason)


def _kernels(impl: str, device: torch.device, head_dim: int) -> str:
    """Whose kernels a quantised attention runs on. Where Hopper's own do not serve a call (a skip
    in the epilogue, a causal mask, rows that are not aligned, an old Triton) the launcher takes
    the portable ones; see `serves` in `kernels/hopper`."""
    if impl != "triton":
        return "torch"
    hopper = (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) == (9, 0)
        and head_dim in (64, 128)
    )
    return "Hopper" if hopper else "portable"


def choose_inputs(a: AttentionInputs) -> AttentionInputs:
    """The inputs of an attention with its attention, pv and impl decided: what the bodies of the
    registered operations run."""
    choice = _decided(
        a.attention, a.pv, a.impl, a.q.device, a.heads, a.head_dim, a.q.shape[1], a.k.shape[1],
        not a.want_lse,
    )  # fmt: skip
    return a._replace(attention=choice.attention, pv=choice.pv, impl=choice.impl)


def resolved(
    spec: AttentionSpec, device: torch.device, n_q: int, n_kv: int, head_dim: int
) -> AttentionSpec:
    """The spec with its attention, pv and impl decided for a device and these lengths."""
    return _resolved(spec, _indexed(device), n_q, n_kv, head_dim)


@lru_cache(maxsize=4096)
def _resolved(
    spec: AttentionSpec, device: torch.device, n_q: int, n_kv: int, head_dim: int
) -> AttentionSpec:
    return _with(spec, _choice(spec, device, n_q, n_kv, head_dim))


def exact_below(spec: AttentionSpec, device: torch.device, head_dim: int) -> int:
    """The length of a sequence below which its self-attention is exact on a device; 0 where it
    never is. "auto" is exact for short sequences, if at all."""
    exact, other = 0, 2**20
    while other - exact > 1:
        middle = (exact + other) // 2
        if _choice(spec, device, middle, middle, head_dim).attention == "exact":
            exact = middle
        else:
            other = middle
    return other if exact else 0


def attention_name(spec: AttentionSpec, q: Tensor, k: Tensor, *, sparse: bool = False) -> str:
    """The attention that runs, for a report: that of the spec, or what "auto" takes here, which is
    int8 where it is sparse. Under a compiler lengths may be symbols, and it stays "auto"."""
    if spec.attention != "auto" or torch.compiler.is_compiling():
        return spec.attention
    if sparse:
        return "int8"
    return _decided(
        "auto", spec.pv, spec.impl, q.device, spec.heads, q.shape[2] // spec.heads, q.shape[1],
        k.shape[1], True,
    ).attention  # fmt: skip


def _choice(
    spec: AttentionSpec, device: torch.device, n_q: int, n_kv: int, head_dim: int
) -> Choice:
    device = _indexed(device)
    return _decided(
        spec.attention, spec.pv, spec.impl, device, spec.heads, head_dim, n_q, n_kv, True
    )


def _indexed(device: torch.device) -> torch.device:
    """A device by its index: "cuda" alone is another card whenever another one is current."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _with(spec: AttentionSpec, choice: Choice) -> AttentionSpec:
    return replace(spec, **{name: getattr(choice, name) for name in ("attention", "pv", "impl")})


#: Shapes that a reader of `dispatch_rows` knows: tokens, keys, heads, channels of a head.
_SHAPES: Final = (
    ("a short video, self-attention", 1950, 1950, 12, 128),
    ("480p and 1 s, self-attention", 7800, 7800, 12, 128),
    ("480p and 5 s, self-attention", 32760, 32760, 12, 128),
    ("480p and 5 s, over a prompt", 32760, 512, 12, 128),
    ("CogVideoX, self-attention", 17776, 17776, 48, 64),
)


def dispatch_rows(spec: AttentionSpec | None, device: torch.device) -> list[tuple[str, str, str]]:
    """What runs on a device in patched models that we know, by shape: (shape, what runs, why).

    Args:
        spec: What was asked for; None is `attention="auto"`.
        device: Where it runs.
    """
    from turbo_rcm_patch.ops.spec import AttentionSpec

    rows = []
    for words, n_q, n_kv, heads, head_dim in _SHAPES:
        asked = spec or AttentionSpec(heads=heads, attention="auto")
        choice = _choice(replace(asked, heads=heads), device, n_q, n_kv, head_dim)
        if asked.attention in ("auto", "int8") and n_kv < INT8_MIN_KEYS:  # as patching runs it
            reason = f"cross-attention over fewer than {INT8_MIN_KEYS:,} keys is exact"
            choice = choice._replace(attention="exact", reason=reason)
        runs = choice.attention
        if runs in QMAX:
            kernels = "plain torch" if choice.kernels == "torch" else f"{choice.kernels} kernels"
            runs += f", p and v in {choice.pv}, {kernels}"
        shape = f"{words} ({n_q:,} over {n_kv:,}, {heads} heads of {head_dim})"
        rows.append((shape, runs, choice.reason))
    return rows


# --- measuring -----------------------------------------------------------------------------------

#: Lengths that are measured: of self-attention, and of keys under many queries.
LENGTHS: Final = (512, 1024, 2048, 4096, 8192, 16384)
#: Channels of a head that are measured, with the range that each stands for.
HEAD_DIMS: Final = {64: (33, 64), 128: (65, 128)}
#: Calls between two looks at the clock, without graphs.
_QUEUED: Final = 3
#: int8 has to be faster by more than measurements scatter: it is the less accurate.
_GAIN: Final = 1.02


def measure_dispatch(
    device: torch.device,
    *,
    lengths: Sequence[int] = LENGTHS,
    heads: int = 12,
    calls: int = 20,
    clock: Callable[[], float] = perf_counter,
    head_dims: Mapping[int, tuple[int, int]] = MappingProxyType(HEAD_DIMS),
    pv: PVDType = "auto",
    graphs: bool = True,
) -> Table:
    """Time exact attention against int8 on a device, by length and head size.

    Args:
        device: The device.
        lengths: Tokens, ascending.
        heads: Heads of the attentions that are timed.
        calls: Timed calls of each; the fastest counts.
        clock: Seconds.
        head_dims: Channels of a head, with the range that each stands for.
        pv: Of int8 attention.
        graphs: Whether calls are replayed from a CUDA graph, which times the device alone. Other
            streams may not be busy then. Without graphs a few calls are queued for each time.

    Returns:
        A table for `keep_dispatch`: from which length on int8 was faster at that and at every
        longer one, for self-attention and for many queries over few keys.
    """
    from turbo_rcm_patch.kernels.tile_table import MADE_WITH, made_with
    from turbo_rcm_patch.ops.attention import attention_skip
    from turbo_rcm_patch.ops.modes import synchronize
    from turbo_rcm_patch.ops.spec import AttentionSpec

    def seconds(attention: Literal["int8", "exact"], head_dim: int, n_q: int, n_kv: int) -> float:
        shape = (1, max(n_q, n_kv), heads * head_dim)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        random = torch.Generator(device).manual_seed(0)
        x = torch.randn(shape, generator=random, device=device, dtype=dtype)
        spec = AttentionSpec(heads=heads, attention=attention, pv=pv)
        best = float("inf")

        def run() -> object:
            return attention_skip(x[:, :n_q], x[:, :n_kv], x[:, :n_kv], spec)

        for _ in range(2):  # compile and record
            run()
        if graphs and device.type == "cuda":  # the device's time, not Python's
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            run = graph.replay
        # Queued one behind the other a call's Python is hidden, as it is in a forward.
        queued = 1 if graphs else _QUEUED
        for _ in range(calls):
            synchronize(device)
            start = clock()
            for _ in range(queued):
                run()
            synchronize(device)
            best = min(best, (clock() - start) / queued)
        return best

    def first(head_dim: int, shapes: Sequence[tuple[int, int]]) -> tuple[int | None, str]:
        """The place from which on int8 wins, and the times."""
        times = [
            (seconds("int8", head_dim, *shape), seconds("exact", head_dim, *shape))
            for shape in shapes
        ]
        wins = [exact / int8 >= _GAIN for int8, exact in times]
        place = next((i for i in range(len(wins)) if all(wins[i:])), None)
        words = [
            f"{q:,} over {k:,} {1e3 * int8:.3f} ms (exact {1e3 * exact:.3f})"
            for (q, k), (int8, exact) in zip(shapes, times, strict=True)
        ]
        return place, f"measured, {heads} heads of {head_dim}: " + ", ".join(words)

    rows: list[Row] = []
    with torch.no_grad():
        for head_dim, span in head_dims.items():
            own, own_times = first(head_dim, [(n, n) for n in lengths])
            few, few_times = first(head_dim, [(lengths[-1], n) for n in lengths])
            of_dim: Row = {"head_dim": list(span)}
            if own is not None and few is not None:
                rows.append(
                    of_dim
                    | {
                        "n_q": [lengths[own], None],
                        "n_kv": [max(lengths[own], lengths[few]), None],
                        "attention": "int8",
                        "source": own_times,
                    }
                )
                if few < own:  # fewer keys do, where queries are many
                    rows.append(
                        of_dim
                        | {
                            "n_q": [lengths[-1], None],
                            "n_kv": [lengths[few], None],
                            "attention": "int8",
                            "source": few_times,
                        }
                    )
            rows.append(of_dim | {"attention": "exact", "source": few_times})
    made = {MADE_WITH: made_with()}
    return {device_name_of(device): [row | made for row in rows]}


def keep_dispatch(table: Table, path: Path | None = None) -> Path:
    """Write what `measure_dispatch` found into the user's table, beside other devices; the
    default file is used from here on.

    Returns:
        The file.
    """
    path = dispatch_path() if path is None else path
    before = _read(path) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(before | table, indent=1) + "\n", encoding="utf-8")
    forget_tables()
    return path
