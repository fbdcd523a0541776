"""The operations on a GPU: sequences longer than any video, offsets past 32 bits,
graphs and compiled functions. Their accuracy is tested beside the other implementations, in
`tests/ops`.
"""

from __future__ import annotations

import pytest
import torch

from tests.measures import relative_l2
from turbo_rcm_patch.ops import (
    AttentionSpec,
    attention_project_skip,
    attention_skip,
    resolve_pv,
)
from turbo_rcm_patch.ops.attention.reference import exact_attention, split_heads

pytestmark = pytest.mark.gpu

#: Against fp64 where q and k are N(0, 1) too: int8 alone costs 0.011, e4m3 raises it to 0.037.
FLOOR = {"fp8": 0.05, "bf16": 0.02}


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def skip_without(pv: str) -> None:
    if pv == "fp8" and resolve_pv("auto", torch.device("cuda", 0)) != "fp8":
        pytest.skip("this GPU has no e4m3 matrix units")


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, **more: object
) -> torch.Tensor:
    """fp64 attention of [B, N, H*D] tensors without norm and rotary."""
    scale = (q.shape[-1] // heads) ** -0.5
    qh, kh, vh = (split_heads(x, heads).double() for x in (q, k, v))
    return exact_attention(qh, kh, vh, sm_scale=scale, **more)[0].transpose(1, 2).flatten(2)


@pytest.mark.parametrize("pv", ["fp8", "bf16"])
def test_attention_stays_accurate_over_200_000_keys(pv: str) -> None:
    """More keys than any video has."""
    skip_without(pv)
    q, k, v = random(1, 64, 128), random(1, 200_003, 128), random(1, 200_003, 128)
    q = q * 4  # attention worth having at this length
    assert (
        relative_l2(attention_skip(q, k, v, AttentionSpec(heads=1, pv=pv)), exact(q, k, v, 1))
        < 0.12
    )


@pytest.mark.parametrize("pv", ["fp8", "bf16"])
def test_attention_reads_past_two_to_the_31_elements(pv: str) -> None:
    skip_without(pv)
    tokens, channels = 210_000, 5120
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB")
    fused = torch.empty(1, tokens, 3 * channels, dtype=torch.bfloat16, device="cuda").normal_()
    q, k, v = fused.chunk(3, -1)
    spec = AttentionSpec(heads=40, pv=pv)
    out = attention_skip(q, k[:, :512], v[:, :512], spec, residual=q, c_skip=0.5)[:, -200:]
    truth = 0.5 * q[:, -200:].double() + exact(q[:, -200:], k[:, :512], v[:, :512], 40)
    assert relative_l2(out, truth) < FLOOR[pv]
    first, last = slice(0, 128), slice(channels - 128, channels)
    out = attention_skip(q[:, :64], k, v, spec)
    for head in (first, last):
        truth = exact(q[:, :64, head], k[..., head], v[..., head], 1)
        assert relative_l2(out[..., head], truth) < 0.08


@pytest.mark.parametrize("pv", ["fp8", "bf16"])
def test_one_launch_replays_in_a_graph(pv: str) -> None:
    """Nothing depends on state from outside the call."""
    skip_without(pv)
    q, k, v, residual = (random(1, 500, 384) for _ in range(4))
    weight, spec = random(384, 384) * 0.05, AttentionSpec(heads=3, pv=pv)

    def run() -> torch.Tensor:
        return attention_project_skip(
            q, k, v, weight, None, spec, residual=residual, form="one-launch"
        )

    expected = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("form", ["auto", "one-launch", "two-launch"])
def test_a_fused_attention_compiles_without_a_break(form: str) -> None:
    q, k, v, residual = (random(1, 300, 256) for _ in range(4))
    weight, bias, spec = random(256, 256) * 0.06, random(256), AttentionSpec(heads=2)

    def block(x: torch.Tensor) -> torch.Tensor:
        return attention_project_skip(
            x * 2, k, v, weight, bias, spec, residual=residual, form=form
        )

    torch.testing.assert_close(torch.compile(block, fullgraph=True)(q), block(q))
