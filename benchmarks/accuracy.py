"""Accuracy of the attention against fp64, for random and for outlier-heavy inputs."""

from __future__ import annotations

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
from turbo_rcm_patch.config import Attention, PVDType

__all__ = ["attention_fp64", "measure", "outliers", "random_normal"]

#: A method whose output is further from the truth than this is broken, not inaccurate.
BROKEN = 0.5
#: int8 attention must stay below this on random inputs, with 16-bit and with fp8 PV.
INT8_LIMIT = 0.05
FP8_LIMIT = 0.07

Qkv = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random_normal(shape: Shape, device: torch.device, seed: int) -> Qkv:
    """q [B, Nq, H*D], k and v [B, Nk, H*D], standard normal, bf16."""
    random = generator(device, seed)
    sizes = (shape.q_tokens, shape.kv_tokens, shape.kv_tokens)
    q, k, v = (
        torch.randn(shape.batch, n, shape.channels, generator=random, device=device) for n in sizes
    )
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def outliers(shape: Shape, device: torch.device, seed: int) -> Qkv:
    """The same with what makes int8 hard: peaked logits, large channels, a common mean in k, and
    tokens of very different size.
    """
    random = generator(device, seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random, device=device)

    def tensor(tokens: int, spread: float) -> torch.Tensor:
        x = normal(shape.batch, tokens, shape.channels)
        x = x * torch.exp(spread * normal(shape.batch, tokens, 1))
        large = torch.rand(shape.channels, generator=random, device=device) < 0.03
        return torch.where(large, 6.0 * x, x)

    q, k, v = (
        tensor(shape.q_tokens, 0.5),
        tensor(shape.kv_tokens, 0.5),
        tensor(shape.kv_tokens, 0.3),
    )
    k = k + 4.0 * normal(1, 1, shape.channels)
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def attention_fp64(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v in fp64, a head at a time, written for this table alone.

    Args:
        q: [B, Nq, H*D], any float dtype.
        k: [B, Nk, H*D].
        v: [B, Nk, H*D].
        heads: H.

    Returns:
        [B, Nq, H*D], fp64.
    """
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    dim = q.shape[-1] // heads
    for head in range(heads):
        part = slice(head * dim, (head + 1) * dim)
        logits = q[..., part].double() @ k[..., part].double().transpose(-1, -2) * dim**-0.5
        out[..., part] = logits.softmax(-1) @ v[..., part].double()
    return out


def _methods(device: torch.device) -> list[tuple[str, Attention, PVDType]]:
    methods: list[tuple[str, Attention, PVDType]] = [
        ("exact (torch SDPA)", "exact", "auto"),
        ("int8, bf16 PV", "int8", "bf16"),
        ("int8, fp16 PV", "int8", "fp16"),
    ]
    if device.type == "cpu" or ops.resolve_pv("auto", device) == "fp8":
        methods.append(("int8, fp8 PV", "int8", "fp8"))
    methods.append(("int4, bf16 PV", "int4", "bf16"))
    if device.type == "cuda":
        methods.append(("sageattention", "sage", "auto"))
    return methods


def measure(options: Options, deadline: Deadline) -> Result:
    """The accuracy table."""
    device = options.torch_device()
    result = Result(("inputs", "shape", "method", "cosine", "rel L2", "rel L1", "RMSE"))
    table: list[dict[str, object]] = []
    for inputs, make in (("random", random_normal), ("outliers", outliers)):
        for shape in options.sizes.accuracy:
            if deadline.passed:
                result.left_out.append(f"{inputs} inputs at {shape}")
                continue
            q, k, v = make(shape, device, options.seed)
            truth = attention_fp64(q, k, v, shape.heads)
            for name, attention, pv in _methods(device):
                row: dict[str, object] = {"inputs": inputs, "shape": str(shape), "method": name}
                table.append(row)
                spec = ops.AttentionSpec(heads=shape.heads, attention=attention, pv=pv)
                try:
                    value = ops.attention_skip(q, k, v, spec)
                except Exception as error:
                    if attention != "sage":  # a peer may fail in its own way, we may not
                        raise
                    row["not_measured"] = f"{type(error).__name__}: {error}"
                    continue
                numbers = errors_of(value, truth)
                row.update(numbers)
                broken = not numbers["relative_l2"] < BROKEN
                if attention == "sage" and broken:
                    row["not_measured"] = "its output is wrong here, so it is no peer"
                elif broken and attention != "int4":
                    result.failures.append(f"{name} on {inputs} at {shape} is broken")
                elif (
                    attention == "int8"
                    and inputs == "random"
                    and numbers["relative_l2"] > (FP8_LIMIT if pv == "fp8" else INT8_LIMIT)
                ):
                    result.failures.append(f"{name} on {inputs} at {shape} is inaccurate")
                result.rows.append(
                    (
                        inputs,
                        str(shape),
                        name,
                        f"{numbers['cosine']:.6f}",
                        f"{numbers['relative_l2']:.5f}",
                        f"{numbers['relative_l1']:.5f}",
                        f"{numbers['rmse']:.3e}",
                    )
                )
    result.data = {
        "truth": "softmax(q k^T / sqrt(D)) v in fp64 on the same bf16 inputs",
        "table": table,
    }
    return result
