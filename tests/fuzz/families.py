"""Every family of kernels once, over small shapes that end inside a block; for compute-sanitizer.

`compute-sanitizer --tool memcheck python -m tests.fuzz.families`; `--hopper` runs only what has a
Hopper kernel of its own, which racecheck takes long enough for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from turbo_rcm_patch import ops

HEADS = 2


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def families(hopper: bool) -> dict[str, Callable[[], object]]:
    """Calls by name."""
    calls: dict[str, Callable[[], object]] = {}
    for dim in (64, 128) if hopper else (64, 128, 40):
        n, channels = 333, HEADS * dim
        q, k, v, x = (random(2, n, channels) for _ in range(4))
        gate, weight, bias = random(2, 1, channels), random(channels, channels), random(channels)
        norm = torch.rand(channels, device="cuda") + 0.5
        lengths = torch.tensor([200, n], device="cuda", dtype=torch.int32)
        angle = torch.rand(n, dim // 2, device="cuda").repeat_interleave(2, -1)
        more: dict[str, Any] = {
            "norm_q": norm, "norm_k": norm, "rotary": (angle.cos(), angle.sin())
        }  # fmt: skip
        int8, scale = ops.quantize_weight(weight)
        eye, sparsity = torch.eye(dim, device="cuda"), ops.Sparsity(topk=0.5, block_q=64,
                                                                    block_k=128)  # fmt: skip

        def add(name: str, call: Callable[[], object], dim: int = dim) -> None:
            calls[f"{name} {dim}"] = call

        for pv in ("fp8", "bf16"):

            def spec(pv: Any = pv, **options: Any) -> ops.AttentionSpec:
                return ops.AttentionSpec(heads=HEADS, pv=pv, impl="triton", **options)

            given = {"q": q, "k": k, "v": v}
            add(f"attention {pv}", lambda g=given, s=spec, r=x, c=gate: ops.attention_skip(
                **g, spec=s(), residual=r, c_out=c))  # fmt: skip
            add(f"normed {pv}", lambda g=given, s=spec, m=more: ops.attention_lse(
                **g, spec=s(), **m))  # fmt: skip
            add(f"lengths {pv}", lambda g=given, s=spec, n=lengths: ops.attention_skip(
                **g, spec=s(), kv_lengths=n))  # fmt: skip
            add(f"causal {pv}", lambda g=given, s=spec: ops.attention_skip(
                **g, spec=s(causal=True)))  # fmt: skip
            add(f"one launch {pv}", lambda g=given, s=spec, w=weight, b=bias, r=x:
                ops.attention_project_skip(**g, weight=w, bias=b, spec=s(), residual=r,
                                           form="one-launch"))  # fmt: skip
            add(f"sparse {pv}", lambda g=given, s=spec, e=eye, p=sparsity:
                ops.sparse_linear_attention(**g, weight=e, bias=None, spec=s(),
                                            sparsity=p))  # fmt: skip
        add("int8 linear", lambda x=x, w=int8, s=scale, b=bias: ops.int8_linear(
            x, w, s, b, residual=x, impl="triton"))  # fmt: skip
        blocks = torch.rand(-(-channels // 128), -(-channels // 128), device="cuda")
        add("int8 linear of blocks", lambda x=x, w=int8, s=blocks: ops.int8_linear(
            x, w, s, impl="triton"))  # fmt: skip
        if hopper:
            continue
        add("projection", lambda x=x, w=weight, b=bias, c=gate: ops.project_skip(
            x, w, b, residual=x, c_out=c, impl="triton"))  # fmt: skip
        add("streams", lambda x=x, q=q, w=weight, c=gate: ops.project_skip_streams(
            torch.cat([x, q], 1), w, residuals=[x, q], c_out=[c, c], impl="triton"))  # fmt: skip
        add("norm", lambda x=x, c=gate: ops.norm_modulate(x, scale=c, shift=c, impl="triton"))
        add("rows", lambda x=x, c=gate: ops.norm_modulate_rows(x, scale=c, impl="triton"))
        add("norm of streams", lambda x=x, q=q, c=gate: ops.norm_modulate_streams(
            [x, q], scale=[c, c], shift=[c, c], impl="triton"))  # fmt: skip
        add("skip", lambda x=x, q=q, c=gate: ops.skip(x, q, 0.5, c, impl="triton"))
        add("weights", lambda w=weight: ops.quantize_weight(w, w, impl="triton"))
        add("denoise", lambda x=x, q=q: ops.denoise_step(
            x, q, q, torch.ones(3, dtype=torch.float64, device="cuda"), impl="triton"
        ))  # fmt: skip
        add("checksums", lambda x=x, w=weight: ops.Fingerprints([x, w], impl="triton").take())
    return calls


def main() -> int:
    torch.manual_seed(0)
    for name, call in families("--hopper" in sys.argv).items():
        call()
        torch.cuda.synchronize()
        print(name, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
