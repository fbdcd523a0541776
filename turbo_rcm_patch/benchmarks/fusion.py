"""The fusion alone: fused against unfused over the same quantised attention, in fp32 and in
bf16."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from turbo_rcm_patch import ops
from turbo_rcm_patch.benchmarks.setup import (
    Deadline,
    Options,
    Result,
    Shape,
    errors_of,
    generator,
)
from turbo_rcm_patch.sampling.measures import highest_precision
from turbo_rcm_patch.sampling.verdict import FUSION_LIMIT

__all__ = ["measure"]

#: Distance to fp64 of the fused path, in units of the unfused path's.
FP64_RATIO = 2.0
#: The same distance in bf16, on the same rounded operands: the kernels round once. It binds them,
#: not torch's linear, which rounds its own output (so "after the linear" everywhere, and every
#: projection on a CPU).
BF16_LIMIT = 2e-3


def measure(options: Options, deadline: Deadline) -> Result:
    """Every way to close a skip, for every shape, in both dtypes."""
    device = options.torch_device()
    result = Result(
        ("shape", "dtype", "closed", "fused to unfused", "fused to fp64", "unfused to fp64")
    )
    table: list[dict[str, object]] = []
    for shape in options.sizes.fusion:
        for dtype in (torch.float32, torch.bfloat16):
            if deadline.passed:
                result.left_out.append(f"{shape} in {dtype}")
                continue
            with torch.no_grad(), highest_precision():
                for row in _rows(shape, dtype, options.seed, device):
                    table.append(row)
                    _judge(row, dtype, result)
    result.data = {
        "limits": {"fp32": FUSION_LIMIT, "fp64_ratio": FP64_RATIO, "bf16_to_fp64": BF16_LIMIT},
        "truth": "c_skip * x + c_out * (attention W^T + b) in fp64 over the same int8 attention",
        "table": table,
    }
    return result


def _judge(row: dict[str, object], dtype: torch.dtype, result: Result) -> None:
    names = ("fused_to_unfused", "fused_to_fp64", "unfused_to_fp64")
    gap, fused, unfused = (float(str(row[name])) for name in names)
    where = f"{row['closed']} at {row['shape']}"
    result.rows.append(
        (str(row["shape"]), str(row["dtype"]), str(row["closed"]))
        + tuple(f"{number:.2e}" for number in (gap, fused, unfused))
    )
    if dtype == torch.float32:
        if not gap <= FUSION_LIMIT:
            result.failures.append(f"{where}: fused to unfused is {gap:.2e} in fp32")
        if not fused <= FP64_RATIO * unfused + 1e-9:
            result.failures.append(f"{where}: {fused / unfused:.2f} times the unfused error")
    elif row["rounds_once"] and not fused <= BF16_LIMIT:
        result.failures.append(f"{where}: {fused:.2e} to fp64 in bf16")


def _rows(
    shape: Shape, dtype: torch.dtype, seed: int, device: torch.device
) -> list[dict[str, object]]:
    random = generator(device, seed)
    channels = shape.channels

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(*size, generator=random, device=device)).to(dtype)

    q = normal(shape.batch, shape.q_tokens, channels)
    k = normal(shape.batch, shape.kv_tokens, channels)
    v = normal(shape.batch, shape.kv_tokens, channels)
    x = normal(shape.batch, shape.q_tokens, channels)
    weight, bias = normal(channels, channels, scale=channels**-0.5), normal(channels)
    c_skip = torch.rand(shape.batch, generator=random, device=device)
    gate = torch.randn(shape.batch, 1, channels, generator=random, device=device)
    spec = ops.AttentionSpec(heads=shape.heads)
    branch = ops.attention_skip(q, k, v, spec)

    def project_and_skip(to: torch.dtype) -> torch.Tensor:
        out = F.linear(branch.to(to), weight.to(to), bias.to(to))
        return c_skip.view(-1, 1, 1).to(to) * x.to(to) + gate.to(to) * out

    # Closed in the attention, the branch is never rounded to the operands' dtype.
    wide = ops.attention_skip(q, k, v, spec, out_dtype=torch.float32)

    def skip_only(to: torch.dtype) -> torch.Tensor:
        return c_skip.view(-1, 1, 1).to(to) * x.to(to) + gate.to(to) * wide.to(to)

    def with_projection(form: str) -> torch.Tensor:
        return ops.attention_project_skip(
            q,
            k,
            v,
            weight,
            bias,
            spec,
            residual=x,
            c_skip=c_skip,
            c_out=gate,
            form=form,  # type: ignore[arg-type]
        )

    in_kernel = ops.attention_skip(q, k, v, spec, residual=x, c_skip=c_skip, c_out=gate)
    after = ops.skip(x, F.linear(branch, weight, bias), c_skip, gate)
    linear = ops.project_skip(branch, weight, bias, residual=x, c_skip=c_skip, c_out=gate)
    closed: list[tuple[str, torch.Tensor, Callable[[torch.dtype], torch.Tensor]]] = [
        ("in the attention", in_kernel, skip_only),
        ("one launch", with_projection("one-launch"), project_and_skip),
        ("two launches", with_projection("two-launch"), project_and_skip),
        ("in the projection", linear, project_and_skip),
        ("after the linear", after, project_and_skip),
    ]
    rows: list[dict[str, object]] = []
    for name, fused, unfused in closed:
        plain, truth = unfused(dtype), unfused(torch.float64)
        rows.append(
            {
                "shape": str(shape),
                "dtype": str(dtype).removeprefix("torch."),
                "closed": name,
                "rounds_once": name == "in the attention"
                or (device.type == "cuda" and name != "after the linear"),
                "fused_to_unfused": errors_of(fused, plain)["relative_l2"],
                "fused_to_fp64": errors_of(fused, truth)["relative_l2"],
                "unfused_to_fp64": errors_of(plain, truth)["relative_l2"],
            }
        )
    return rows
