"""Every operation on a GPU: the same bits under load, on several streams and in a captured graph,
and past 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.common import random
from tests.implementations import has_fp8
from tests.inputs import attention_lse, attention_project_skip
from turbo_rcm_patch import ops

pytestmark = pytest.mark.gpu

HEADS, DIM = 2, 64
CHANNELS = HEADS * DIM
REPEATS = 100


# --- the same bits -------------------------------------------------------------------------------


def calls() -> dict[str, Callable[[], Tensor]]:
    """Every family of kernels, over lengths that end inside a block."""
    batch, n = 2, 1_333
    q, k, v, x = (random(batch, n, CHANNELS) for _ in range(4))
    odd = [random(batch, n, 2 * 40) for _ in range(3)]  # portable kernels
    gate, weight, bias = random(batch, 1, CHANNELS), random(CHANNELS, CHANNELS), random(CHANNELS)
    norm, lengths = torch.rand(CHANNELS, device="cuda") + 0.5, torch.tensor([700, n]).cuda()
    angle = torch.rand(n, DIM // 2, device="cuda").repeat_interleave(2, -1)
    rotary = (angle.cos(), angle.sin())
    int8, scale = ops.quantize_weight(weight)
    eye, sparsity = torch.eye(DIM, device="cuda"), ops.Sparsity(topk=0.3)

    def spec(**options: Any) -> ops.AttentionSpec:
        return ops.AttentionSpec(heads=HEADS, **options)

    more = {"norm_q": norm, "norm_k": norm, "rotary": rotary}
    made: dict[str, Callable[[], Tensor]] = {
        "16-bit": lambda: ops.attention_skip(q, k, v, spec(pv="bf16"), residual=x, c_out=gate),
        "exact": lambda: ops.attention_skip(q, k, v, spec(attention="exact"), **more),
        "lengths": lambda: ops.attention_skip(q, k, v, spec(pv="fp16"), kv_lengths=lengths),
        "causal": lambda: ops.attention_skip(q, k, v, spec(pv="bf16", causal=True)),
        "logsumexp": lambda: attention_lse(q, k, v, spec(pv="bf16"))[1],
        "int8 linear": lambda: ops.int8_linear(x, int8, scale, bias),
        "norm": lambda: ops.norm_modulate(x, scale=gate, shift=gate),
        "rows": lambda: ops.norm_modulate_rows(x, scale=gate).data,
        "skip": lambda: ops.skip(x, q, 0.5, gate),
    }
    for pv in ("bf16", "fp8") if has_fp8() else ("bf16",):
        made |= {
            f"{pv} normed": partial(ops.attention_skip, q, k, v, spec(pv=pv), **more),
            f"{pv} portable": partial(ops.attention_skip, *odd, spec(pv=pv)),
            f"{pv} one launch": partial(
                attention_project_skip, q, k, v, weight, bias, spec(pv=pv), residual=x,
                form="one-launch",
            ),
            f"{pv} sparse": partial(
                ops.sparse_linear_attention, q, k, v, eye, None, spec(pv=pv), sparsity
            ),
        }  # fmt: skip
    return made


def test_a_hundred_repeats_on_several_streams_give_the_same_bits_under_load() -> None:
    """Another stream multiplies matrices and fills memory with NaN meanwhile."""
    made = calls()
    expected = {name: call().clone() for name, call in made.items()}
    assert all(bool(x.float().isfinite().all()) for x in expected.values())
    busy, side = torch.randn(3000, 3000, device="cuda"), torch.cuda.Stream()
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    wrong = {name: torch.zeros(3, dtype=torch.int64, device="cuda") for name in made}
    torch.cuda.synchronize()
    for repeat in range(REPEATS):
        with torch.cuda.stream(side):
            busy @ busy
            torch.empty(1 << (12 + repeat % 10), device="cuda").fill_(float("nan"))
        with torch.cuda.stream(streams[repeat % 3]):
            for name, call in made.items():
                wrong[name][repeat % 3] += (call() != expected[name]).sum()
    torch.cuda.synchronize()
    assert {name: n.tolist() for name, n in wrong.items() if n.any()} == {}


@pytest.mark.parametrize(
    "name", ["bf16 one launch", "fp8 one launch", "int8 linear", "bf16 sparse", "fp8 sparse"]
)
def test_an_operation_replays_in_a_graph(name: str) -> None:
    """Nothing depends on state from outside the call."""
    call = calls().get(name) or pytest.skip("this GPU has no e4m3 matrix units")
    expected = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("name", ["skip", "norm", "rows", "int8 linear"])
def test_offsets_that_pass_32_bits(name: str) -> None:
    """200,000 tokens of 12,288 channels are 2.5e9 elements: only an int64 reaches the last ones.
    One kernel of each family, compared over the last rows."""
    n, channels = 200_000, 12_288
    if torch.cuda.mem_get_info()[0] < 6 * 2 * n * channels:
        pytest.skip("too little free memory")
    wide = 512 if name == "int8 linear" else channels
    x = torch.empty(1, n, wide, dtype=torch.bfloat16, device="cuda").normal_()
    gate, last = random(1, 1, channels), slice(n - 300, n)
    weight = ops.quantize_weight(random(channels, 512) / 23)
    run: dict[str, Callable[[Tensor], Tensor]] = {
        "skip": lambda x: ops.skip(x, x, 0.5, gate),
        "norm": lambda x: ops.norm_modulate(x, scale=gate, shift=gate),
        "rows": lambda x: ops.norm_modulate_rows(x, scale=gate).data,
        "int8 linear": lambda x: ops.int8_linear(x, *weight),
    }
    assert torch.equal(run[name](x)[:, last], run[name](x[:, last]))
