"""An attention of which some heads run exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.measures import relative_l2
from turbo_rcm_patch.errors import ConfigError
from turbo_rcm_patch.ops import (
    AttentionSpec,
    Sparsity,
    attention_lse,
    attention_project_skip,
    attention_skip,
    sparse_linear_attention,
)

HEADS, DIM, TOKENS = 5, 32, 70
INT8 = AttentionSpec(heads=HEADS)
SOME = [(0,), (4,), (1, 2), (0, 3, 4), (0, 1, 2, 3, 4)]


def operands(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, TOKENS, 3 * HEADS * DIM).to(dtype).chunk(3, -1)
    return 3 * q, k, v


def norms() -> dict[str, Any]:
    torch.manual_seed(1)
    angles = torch.rand(TOKENS, DIM // 2).repeat_interleave(2, -1)
    return {
        "norm_q": 1 + torch.rand(HEADS * DIM), "norm_k": 1 + torch.rand(HEADS * DIM),
        "rotary": (angles.cos(), angles.sin()),
    }  # fmt: skip


def by_head(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (HEADS, DIM))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("exact", SOME, ids=str)
def test_marked_heads_are_exact_and_the_others_as_before(
    exact: tuple[int, ...], dtype: torch.dtype
) -> None:
    """The norm goes across all heads, whichever of them are marked."""
    q, k, v = operands(dtype)
    given = {name: x.to(dtype) for name, x in norms().items() if name != "rotary"}
    given["rotary"] = norms()["rotary"]
    mixed = by_head(attention_skip(q, k, v, replace(INT8, exact_heads=exact), **given))
    int8 = by_head(attention_skip(q, k, v, INT8, **given))
    whole = by_head(attention_skip(q, k, v, replace(INT8, attention="exact"), **given))
    for head in range(HEADS):
        if head in exact:
            torch.testing.assert_close(mixed[:, :, head], whole[:, :, head])
            assert not torch.equal(mixed[:, :, head], int8[:, :, head])
        else:
            assert torch.equal(mixed[:, :, head], int8[:, :, head])


def test_the_skip_and_the_projection_close_behind_it() -> None:
    q, k, v = operands()
    x, gate = torch.randn(2, TOKENS, HEADS * DIM), torch.randn(2, 1, HEADS * DIM)
    spec = replace(INT8, exact_heads=(1, 3))
    alone = attention_skip(q, k, v, spec)
    closed = attention_skip(q, k, v, spec, residual=x, c_out=gate)
    torch.testing.assert_close(closed, x + gate * alone)
    weight = torch.randn(24, HEADS * DIM)
    for form in ("auto", "two-launch"):
        out = attention_project_skip(q, k, v, weight, None, spec, residual=None, form=form)  # type: ignore[arg-type]
        torch.testing.assert_close(out, alone @ weight.T, rtol=1e-5, atol=1e-4)


def test_lengths_hide_keys_from_both_kinds_of_heads() -> None:
    q, k, v = operands()
    spec, lengths = replace(INT8, exact_heads=(0, 1)), torch.tensor([40, 70], dtype=torch.int32)
    seen = attention_skip(q, k, v, spec, kv_lengths=lengths)[:1]
    alone = attention_skip(q[:1], k[:1, :40], v[:1, :40], spec)
    assert relative_l2(seen, alone) < 0.02
    torch.testing.assert_close(by_head(seen)[:, :, :2], by_head(alone)[:, :, :2])


def test_gradients_are_those_of_exact_attention() -> None:
    grads = []
    for spec in (replace(INT8, exact_heads=(2,)), replace(INT8, attention="exact")):
        leaves = [x.clone().requires_grad_() for x in operands()]
        attention_skip(*leaves, spec).square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for mine, exact in zip(*grads, strict=True):
        assert relative_l2(mine, exact) < 0.05


def test_it_is_registered_and_compiles_in_one_graph() -> None:
    q, k, v = (x.detach() for x in operands())
    spec = replace(INT8, exact_heads=(1, 4))

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention_skip(q, k, v, spec)

    got = torch.compile(run, backend="aot_eager", fullgraph=True)(q, k, v)
    torch.testing.assert_close(got, run(q, k, v))
    batch = torch.func.vmap(lambda q: run(q[None], k[:1], v[:1])[0])(q)
    assert batch.shape == q.shape


def test_what_has_no_such_form_refuses() -> None:
    q, k, v = operands()
    spec = replace(INT8, exact_heads=(1,))
    with pytest.raises(ConfigError, match="exact_heads"):
        attention_lse(q, k, v, spec)
    with pytest.raises(ConfigError, match="exact_heads"):
        attention_project_skip(
            q, k, v, torch.randn(8, HEADS * DIM), None, spec, residual=None, form="one-launch"
        )
    with pytest.raises(ConfigError, match="exact_heads"):
        sparse_linear_attention(
            q, k, v, torch.randn(DIM, DIM), None, spec, Sparsity(topk=0.5, block_q=64, block_k=64)
        )
    for wrong in ((5,), (-1,), (2, 1), (1, 1)):
        with pytest.raises(ConfigError, match="exact_heads"):
            AttentionSpec(heads=HEADS, exact_heads=wrong)
