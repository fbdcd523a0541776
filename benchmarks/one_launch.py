"""The one-launch form, many times over poisoned scratch memory: every result equal in every
bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from benchmarks.setup import (
    Deadline,
    Options,
    Result,
    Shape,
    errors_of,
    generator,
)
from turbo_rcm_patch import ops

__all__ = ["measure", "poisoned_memory"]

#: Against the two-launch form in bf16; more than rounding means that one of them is wrong.
AGREEMENT = 4e-3
#: How many runs go by between two looks at the clock and at the counter on the device.
CHUNK = 500
#: How many runs a CUDA graph holds: launched one by one, Python would take most of the time.
GRAPH = 20
#: Runs that are launched one by one before graphs take over.
LAUNCHED = 1_000


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, torch's uninitialised tensors are NaN (integers: their largest value, int8: -128).

    Scratch that a kernel reads before writing then changes the result.
    """

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype.is_floating_point:
            return tensor.fill_(float("nan"))
        if tensor.dtype == torch.int8:
            return tensor.fill_(-128)
        if tensor.dtype == torch.bool:
            return tensor
        return tensor.fill_(torch.iinfo(tensor.dtype).max)

    def poisoning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def empty(*args: object, **kwargs: object) -> torch.Tensor:
            return poison(make(*args, **kwargs))

        return empty

    places: list[tuple[object, str]] = [
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ]
    before = [getattr(owner, name) for owner, name in places]
    for (owner, name), make in zip(places, before, strict=True):
        setattr(owner, name, poisoning(make))
    try:
        yield
    finally:
        for (owner, name), make in zip(places, before, strict=True):
            setattr(owner, name, make)


def _case(shape: Shape, options: Options, device: torch.device) -> Callable[[str], torch.Tensor]:
    """A call of the operation in a given form, on fixed bf16 operands."""
    random = generator(device, options.seed)
    channels = shape.channels

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(*size, generator=random, device=device)).bfloat16()

    q = normal(shape.batch, shape.q_tokens, channels)
    k = normal(shape.batch, shape.kv_tokens, channels)
    v = normal(shape.batch, shape.kv_tokens, channels)
    residual = normal(shape.batch, shape.q_tokens, channels)
    weight, bias = normal(channels, channels, scale=channels**-0.5), normal(channels)
    gate = normal(shape.batch, 1, channels).float()
    norm = 1.0 + normal(channels, scale=0.1)
    spec = ops.AttentionSpec(heads=shape.heads)

    def call(form: str) -> torch.Tensor:
        return ops.attention_project_skip(
            q,
            k,
            v,
            weight,
            bias,
            spec,
            residual=residual,
            c_out=gate,
            norm_q=norm,
            norm_k=norm,
            form=form,  # type: ignore[arg-type]
        )

    return call


def measure(options: Options, deadline: Deadline) -> Result:
    """Repeat, and count the runs whose result differs from the first in any bit."""
    device = options.torch_device()
    result = Result(("shape", "runs", "runs that differ", "rel L2 to two-launch"))
    shapes = options.sizes.one_launch
    table: list[dict[str, object]] = []
    result.data = {"scratch": "NaN, int8 -128, other integers their largest value", "table": table}
    for shape in shapes:
        call = _case(shape, options, device)
        wanted = max(1, options.repeats // len(shapes))
        with torch.no_grad(), poisoned_memory():
            first = call("one-launch")
            other = call("two-launch")
            bits = first.view(torch.int16)
            differing = torch.zeros((), dtype=torch.int64, device=device)

            def run(
                call: Callable[[str], torch.Tensor] = call,
                bits: torch.Tensor = bits,
                differing: torch.Tensor = differing,
            ) -> None:
                differing += (call("one-launch").view(torch.int16) != bits).any()

            done = launched = count = 0
            replay: Callable[[], None] | None = None
            while done < wanted and not deadline.passed:
                if device.type == "cuda" and replay is None and launched >= LAUNCHED:
                    replay = _graph_of(run)
                for _ in range(max(1, min(CHUNK, wanted - done) // (GRAPH if replay else 1))):
                    if replay:
                        replay()
                    else:
                        run()
                        launched += 1
                    done += GRAPH if replay else 1
                count = int(differing)  # waits for the device, so that the clock means something
        agreement = errors_of(first, other)["relative_l2"]
        table.append(
            {
                "shape": str(shape),
                "runs": done,
                "runs_wanted": wanted,
                "runs_launched_one_by_one": launched,
                "runs_that_differ": count,
                "relative_l2_to_two_launch": agreement,
            }
        )
        result.rows.append((str(shape), f"{done:,}", str(count), f"{agreement:.2e}"))
        if count:
            result.failures.append(f"{count} of {done} runs at {shape} differ")
        if not agreement < AGREEMENT:
            result.failures.append(f"one and two launches disagree at {shape}: {agreement:.3g}")
        deadline.keep(result)
        if done < wanted:
            result.left_out.append(f"{wanted - done} runs at {shape}")
    return result


def _graph_of(run: Callable[[], None]) -> Callable[[], None]:
    """`GRAPH` runs as one CUDA graph, which poisons its memory anew at every replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH):
            run()
    return graph.replay
