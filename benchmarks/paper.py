"""`parallel --paper`: milliseconds of a forward on more GPUs than there are, from what was
measured on two; `parallel --parts` measures that.

A forward of L blocks on P ranks is

    once + L * (tokens(N / P) + attention(H / P heads, N) + copies + exposed)

where `tokens` is everything that a block does for each token (measured at a half, a quarter and
an eighth of them), `attention` that of a rank's share of the heads over the whole sequence
(measured), `copies` what puts received parts together, at the rate of the memory, and `exposed`
the messages that nothing hides, by their bytes and the measured latency and bandwidth. The host
is the limit where its measured time for a forward is longer. `ASSUMPTIONS` says what is not
measured.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.networks import WAN, build_wan, sizes_of, wan_call
from benchmarks.runner import (
    Plan,
    Record,
    check_target,
    free,
    kernel_milliseconds,
    queued_milliseconds,
)
from turbo_rcm_patch import PatchConfig, patched
from turbo_rcm_patch.errors import ConfigError
from turbo_rcm_patch.ops import parallel
from turbo_rcm_patch.ops.exchange import ContextParallel, told
from turbo_rcm_patch.ops.shards import padded
from turbo_rcm_patch.output import write_json

PARTS: Final = Path("results/h200/parallel_paper.json")
MEASURED: Final = Path("results/h200/parallel.json")
#: Network -> (heads, blocks).
NETWORKS: Final[dict[str, tuple[int, int]]] = {"1.3b": (12, 30), "14b": (40, 40)}
CASES: Final = (("1.3b", 32_760), ("14b", 32_760), ("14b", 75_600))
#: Tokens -> frames, height and width of latents.
_LATENTS: Final[dict[int, tuple[int, int, int]]] = {
    32_760: (21, 60, 104), 16_380: (21, 60, 52), 8_190: (21, 30, 52), 4_095: (21, 30, 26),
    75_600: (21, 90, 160), 37_800: (21, 90, 80), 18_900: (21, 90, 40), 9_450: (21, 90, 20),
}  # fmt: skip
_DEGREES: Final = (1, 2, 4, 8)
_HEAD_DIM: Final = 128
_MESSAGES: Final = tuple(1 << exponent for exponent in (10, 14, 17, 20, 22, 24, 26, 27))
#: Blocks that are built: the difference is what a block costs, the rest is there once.
_BLOCKS: Final = (1, 3)
#: GB/s, of memory that is read and written.
_MEMORY: Final = 3_000.0

ASSUMPTIONS: Final = (
    "Every rank reaches every other of its host at once, at the bandwidth measured between two "
    "(NVSwitch). A message to P - 1 ranks has the latency of one to one rank.",
    "The network between hosts carries 50 GB/s for each GPU (400 Gb/s), in both directions at "
    "once, and adds 25 us.",
    "PCIe carries 25 or 50 GB/s for each GPU, in both directions at once, 30 us after the start.",
    "Exchanges that run beside an attention do not slow it down.",
    "All ranks reach an exchange at the same moment. Clocks and power are those of one busy GPU.",
    "Below an eighth of the tokens, a block's time goes on falling on the same line.",
    "The host needs as long for a block as it did on two ranks (parallel.json).",
)


@dataclass(frozen=True, slots=True)
class Links:
    """How fast messages are.

    Attributes:
        name: Of them.
        latency: Milliseconds of the shortest message.
        bandwidth: GB/s of the longest, that a rank sends while it receives as many.
    """

    name: str
    latency: float
    bandwidth: float

    def milliseconds(self, sent: float) -> float:
        """Of a message of so many bytes."""
        return self.latency + sent / self.bandwidth / 1e6 if sent else 0.0


# --- on paper ------------------------------------------------------------------------------------


class _Alone:
    """Groups of P ranks of Ulysses, without processes."""

    ring = None
    ulysses_rank = ring_rank = rank = 0

    def __init__(self, degree: int) -> None:
        self.ulysses_degree = self.size = degree


def _between(known: dict[str, float], at: int) -> float:
    """A measured time at so many tokens; between two, and below the least, on a line."""
    points = sorted((int(name), ms) for name, ms in known.items())
    above = next((i for i, (n, _) in enumerate(points) if n >= at), len(points) - 1)
    (n0, t0), (n1, t1) = points[max(0, above - 1)], points[max(1, above)]
    return max(t0 + (t1 - t0) * (at - n0) / (n1 - n0), 0.0)


def predicted(
    parts: Record,
    case: tuple[str, int],
    ulysses: int,
    ring: int = 1,
    *,
    links: Links,
    around: Links | None = None,
) -> Record:
    """A forward on ulysses * ring ranks.

    Args:
        parts: What was measured.
        case: Network and tokens.
        ulysses: Ranks that exchange heads.
        ring: Groups of them that pass keys on.
        links: Of those that exchange heads.
        around: Of the ring.

    Returns:
        Milliseconds of a forward and of what it is made of.
    """
    name, total = case
    heads, blocks = NETWORKS[name]
    known, ranks = parts[name], ulysses * ring
    n, channels = total // ranks, heads * _HEAD_DIM
    most = -(-heads // ulysses)
    near = total // ring
    rest = _between(known["tokens"], n)
    over = known["attention"][str(total)]
    attention = over.get(str(most), over["1"] * most) / ring  # for the queries of one part
    exposed = copies = 0.0
    if ulysses > 1:
        groups: Any = _Alone(ulysses)
        layout = parallel._Layout(groups, [n] * ulysses, heads)
        away = (ulysses - 1) / ulysses
        shares = layout.shares(heads) if ring == 1 else [(slice(0, heads), layout)]
        of_first, of_last = ((one.stop - one.start) / heads for one, _ in (shares[0], shares[-1]))
        # q, k and v of the first share leave one after the other, as they are quantised; then
        # scales.
        wire = links.milliseconds(padded(n) * channels * away * of_first)
        one = 6 * n * channels / _MEMORY / 1e6
        exposed = max(3 * wire - 2 * one, 2 * wire - one, wire) + links.latency
        if len(shares) > 1:  # those of the last, while the first is computed
            wire = links.milliseconds(padded(n) * channels * away * of_last)
            exposed += max(0.0, 3 * wire - attention * of_first)
        wire = links.milliseconds(2 * n * channels * away * of_last)
        own_last = ring == 1 and len(shares[-1][1].queries(True)) > 1
        exposed += max(0.0, wire - own_last * attention * of_last / ulysses)
        # Keys and values of the heads here, and the output of the tokens here.
        copies = 2 * (2 * near * most * _HEAD_DIM + 2 * n * channels) / _MEMORY / 1e6
    if ring > 1:
        assert around is not None
        # Keys and values of a part, while the attention over the part before runs.
        passed = around.milliseconds(2 * padded(near) * most * _HEAD_DIM)
        exposed += (ring - 1) * max(0.0, passed - attention / ring)
        # Partial results in fp32 are read, merged and written.
        copies += (ring - 1) * 4 * 4 * near * most * _HEAD_DIM / _MEMORY / 1e6
    gpu = known["once"] + blocks * (rest + attention + copies + exposed)
    cpu = blocks * parts["host"] if ranks > 1 else 0.0
    degrees = [f"{word} {d}" for word, d in (("Ulysses", ulysses), ("ring", ring)) if d > 1]
    return {
        "ranks": ranks,
        "form": " x ".join(degrees) or "one GPU",
        "milliseconds": max(gpu, cpu),
        "host is the limit": cpu > gpu,
        "tokens": blocks * rest,
        "attention": blocks * attention,
        "copies": blocks * copies,
        "exposed": blocks * exposed,
        "once": known["once"],
    }


def _links_of(parts: Record) -> Links:
    found = {int(size): ms for size, ms in parts["all to all"].items()}
    largest = max(found)
    latency = min(found.values())
    return Links("measured", latency, largest / max(found[largest] - latency, 1e-6) / 1e6)


def table(parts: Record) -> list[Record]:
    """Every case on one to eight GPUs, over PCIe, and on two hosts."""
    links = _links_of(parts)
    network = Links("measured, 400 Gb/s", links.latency + 0.025, 50.0)
    pcie = [Links(f"PCIe at {rate:g} GB/s", 0.03, rate) for rate in (25.0, 50.0)]
    ways = [(d, 1, links, links) for d in _DEGREES] + [(4, 2, links, links)]
    ways += [(d, 1, each, each) for each in pcie for d in (2, 4)]
    ways += [(d, 2, links, network) for d in (4, 8)]
    rows = []
    for case in CASES:
        one = predicted(parts, case, 1, links=links)["milliseconds"]
        for ulysses, ring, each, around in ways:
            if NETWORKS[case[0]][0] % ulysses:
                continue  # most ranks would wait for those with one head more
            row = predicted(parts, case, ulysses, ring, links=each, around=around)
            about = {"network": case[0], "sequence": case[1], "links": around.name}
            rows.append(about | row | {"times": one / row["milliseconds"]})
    return rows


def run(plan: Plan) -> int:
    """Print the table and write `parallel_table.json`, from `PARTS` or the file in `--out`."""
    target = plan.out / "parallel_table.json"
    check_target(target, lambda found: found.keys() == {"parts", "assumptions", "rows"})
    own = plan.out / PARTS.name
    path = own if own.is_file() else PARTS
    if not path.is_file():
        raise ConfigError(
            "parallel --paper", expected=f"{PARTS}, or one in --out", got="neither",
            remedy="Measure it with `python -m benchmarks parallel --parts` on two GPUs",
        )  # fmt: skip
    parts = json.loads(path.read_text(encoding="utf-8"))
    two = json.loads(MEASURED.read_text(encoding="utf-8"))["cases"]["1.3b"]["methods"]
    parts["host"] = two["Ulysses patched"]["cpu_milliseconds"]["median"] / NETWORKS["1.3b"][1]
    rows, links = table(parts), _links_of(parts)
    print(f"{path}: {links.latency * 1e3:.0f} us and {links.bandwidth:.0f} GB/s between two GPUs")
    names = ("tokens", "attention", "copies", "exposed", "once")
    print(f"{'case':<14}{'GPUs':>5}  {'form':<20}{'links':<20}{'ms':>8}{'times':>7}", end="")
    print("".join(f"{name:>11}" for name in names))
    for row in rows:
        case = f"{row['network']} {row['sequence']}"
        print(f"{case:<14}{row['ranks']:>5}  {row['form']:<20}{row['links']:<20}", end="")
        print(f"{row['milliseconds']:>8.1f}{row['times']:>7.2f}", end="")
        print("".join(f"{row[name]:>11.2f}" for name in names), end="")
        print("  the host is the limit" if row["host is the limit"] else "")
    for line in ASSUMPTIONS:
        print(f"- {line}")
    written = {"parts": str(path), "assumptions": ASSUMPTIONS, "rows": rows}
    write_json(target, written)
    return 0


# --- measured ------------------------------------------------------------------------------------


def measure(out: Path, *, micro: bool = False) -> int:
    """Measure the parts on two GPUs and write them into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    if not micro and torch.cuda.device_count() < 2:
        raise ConfigError("parallel --parts", expected="two GPUs", got="fewer")
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store").as_uri()
        # Daemons end with this process, also where one of them waits for the other after Ctrl-C.
        spawn(_measured, (store, out, micro), nprocs=2, daemon=True)  # type: ignore[no-untyped-call]
    print(out / PARTS.name)
    return 0


@torch.no_grad()
def _measured(rank: int, store: str, out: Path, micro: bool) -> None:
    device = torch.device("cpu") if micro else torch.device("cuda", rank)
    if not micro:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if micro else "cpu:gloo,cuda:nccl",
        init_method=store, rank=rank, world_size=2, timeout=timedelta(minutes=15),
    )  # fmt: skip
    try:
        begin = time.perf_counter()
        found = _messages(device, micro)
        if rank == 0:  # the other GPU idles, as a data sheet's would
            for name in NETWORKS:
                found[name] = _kernels(name, device, micro)
            found |= {"device": "cpu" if micro else torch.cuda.get_device_name(device)}
            found |= {"torch": torch.__version__, "seconds": time.perf_counter() - begin}
            found["NCCL_NVLS_ENABLE"] = os.environ.get("NCCL_NVLS_ENABLE", "")
            write_json(out / PARTS.name, found)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _median(call: Callable[[], object], device: torch.device, queued: int = 20) -> float:
    call()
    return queued_milliseconds(call, device, 3, queued)["median"]


def _messages(device: torch.device, micro: bool) -> Record:
    """Milliseconds of an all-to-all by the bytes that a rank sends to the other, and of the
    header."""
    found: Record = {"all to all": {}}
    for size in _MESSAGES[: 3 if micro else None]:
        x = torch.zeros(size, dtype=torch.uint8, device=device)
        y, rank = torch.empty_like(x), dist.get_rank()
        sizes = [0 if r == rank else size for r in range(2)]

        def exchange(x: Any = x, y: Any = y, sizes: Any = sizes) -> None:
            dist.all_to_all_single(y, x, sizes, sizes)

        found["all to all"][str(size)] = _median(exchange, device)
    group = dist.group.WORLD
    assert group is not None
    groups = ContextParallel.from_groups(group, group, None)
    ask = _median(lambda: told("header", list(range(22)), groups, device), device)
    found["header"] = ask
    return found


def _kernels(name: str, device: torch.device, micro: bool) -> Record:
    """Milliseconds of a block without its self-attention, of what is there once, and of the
    attention of one to all heads."""
    heads, _ = NETWORKS[name]
    tokens: dict[str, float] = {}
    once = []
    config = PatchConfig(guard=False, attention="int8")
    sizes = sizes_of(Plan(out=Path(), micro=micro))
    lengths = [n for n in _LATENTS if n <= 32_760 or name == "14b"]
    networks = []
    for blocks in _BLOCKS:
        more: Record = {"num_layers": blocks}
        more |= {} if micro else {k: v for k, v in WAN[name].items() if k != "num_layers"}
        networks.append(build_wan(sizes.network | more, device, 0, narrow=name != "1.3b"))
    for n in lengths[-4:] if micro else lengths:
        latents = sizes.latents if micro else (1, 16, *_LATENTS[n])
        times = []
        for network in networks:
            call = wan_call(network, latents, sizes.text_tokens, device, 0)
            with patched(network, config):
                for _ in range(2):
                    call()
                kernels = kernel_milliseconds(call, device)
            times.append(sum(ms for kernel, ms in kernels.items() if kernel != "hopper_kernel"))
        tokens[str(n)] = (times[1] - times[0]) / (_BLOCKS[1] - _BLOCKS[0])
        once.append(times[0] - _BLOCKS[0] * tokens[str(n)])
    networks.clear()
    free(device)
    attention: dict[str, dict[str, float]] = {}
    for total in {total for network, total in CASES if network == name}:
        attention[str(total)] = {
            str(-(-heads // degree)): _attention(
                128 if micro else total, -(-heads // degree), device
            )
            for degree in _DEGREES
        }
        attention[str(total)].setdefault("1", _attention(128 if micro else total, 1, device))
    return {"tokens": tokens, "once": max(0.0, once[0]), "attention": attention}


def _attention(total: int, heads: int, device: torch.device) -> float:
    own = parallel._shards("reference" if device.type == "cpu" else "triton")
    rows = padded(total)
    int8 = torch.randint(-127, 127, (1, heads, rows, _HEAD_DIM), dtype=torch.int8, device=device)
    scale = torch.full((1, heads, rows), 1e-4, device=device)
    v = int8.transpose(2, 3).contiguous().view(torch.float8_e4m3fn)
    v.view(torch.int8).bitwise_and_(0x3F)  # no NaN
    levels = torch.zeros(1, heads, 3, _HEAD_DIM, device=device)
    levels[:, :, 0] = 1

    def call() -> None:
        own.attend(
            (int8, scale), (int8, scale[:, :, : rows // 128].contiguous()), v, levels,
            n_q=total, n_kv=total, head_dim=_HEAD_DIM, pv="fp8", out_dtype=torch.bfloat16,
            want_lse=False,
        )  # fmt: skip

    return _median(call, device, 3)
