"""Batches longer than a launch's grid run in parts; here with parts of two samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from turbo_rcm_patch import ops
from turbo_rcm_patch.ops import batches

BATCH, N, C, HEADS = 5, 5, 32, 2  # as many samples as tokens, so that no part is mistaken
X, Y, Z = (torch.randn(BATCH, N, C, generator=torch.Generator().manual_seed(i)) for i in range(3))
GATE, EACH = torch.randn(BATCH, 1, C), torch.randn(BATCH)
WEIGHT, BIAS = torch.randn(C, C), torch.randn(C)
WEIGHT_INT8, SCALE = ops.quantize_weight(WEIGHT)
LENGTHS = torch.tensor([1, 2, 3, 4, 5])
ROTARY = torch.randn(N, C // HEADS), torch.randn(N, C // HEADS)
SPEC = ops.AttentionSpec(heads=HEADS)
ROWS = ops.norm_modulate_rows(X)

CALLS: dict[str, Callable[[], Any]] = {
    "attention": lambda: ops.attention_skip(
        X, Y, Z, SPEC, residual=Y, c_skip=EACH, c_out=GATE, norm_q=BIAS, norm_k=BIAS[:16],
        norm_k_bias=BIAS[16:], rotary=ROTARY, kv_lengths=LENGTHS,
    ),
    "lse": lambda: ops.attention_lse(X, Y, Z, SPEC, kv_lengths=LENGTHS),
    "one-launch": lambda: ops.attention_project_skip(
        X, Y, Z, WEIGHT, BIAS, SPEC, residual=Y, c_out=GATE, form="one-launch"
    ),
    "skip": lambda: ops.skip(X, Y, EACH, GATE),
    "project": lambda: ops.project_skip(X, WEIGHT, BIAS, residual=Y, c_skip=EACH, c_out=GATE),
    "norm": lambda: ops.norm_modulate(X, scale=GATE, shift=BIAS),
    "rows": lambda: tuple(ops.norm_modulate_rows(X, scale=GATE, shift=BIAS)),
    "norm-streams": lambda: ops.norm_modulate_streams(
        [X, Y[:, :2]], scale=[GATE, BIAS], shift=[BIAS, GATE]
    ),
    "project-streams": lambda: ops.project_skip_streams(
        torch.cat([X, Y], 1), WEIGHT, BIAS, residuals=(X, Y), c_out=[GATE, BIAS]
    ),
    "int8": lambda: ops.int8_linear(
        X, WEIGHT_INT8, SCALE, BIAS, residual=Y, c_skip=EACH, c_out=GATE
    ),
    "int8-rows": lambda: ops.int8_linear(
        ROWS, WEIGHT_INT8, SCALE, BIAS, residual=Y, c_out=GATE, out_dtype=torch.float32
    ),
    "sparse": lambda: ops.sparse_linear_attention(
        X, Y, Z, WEIGHT[:16, :16], None, SPEC, ops.Sparsity(topk=0.5), rotary=ROTARY
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_parts_are_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = CALLS[name]()
    seen: list[int] = []
    own = batches.in_parts

    def counting(batch: int, run: Callable[[slice], Any]) -> Any:
        seen.append(batch)
        return own(batch, run)

    monkeypatch.setattr(batches, "MAX_BATCH", 2)
    monkeypatch.setattr(batches, "in_parts", counting)
    parts = CALLS[name]()
    assert BATCH in seen
    pairs = zip(parts, whole, strict=True) if isinstance(whole, tuple) else [(parts, whole)]
    for a, b in pairs:
        assert a.shape == b.shape and a.dtype == b.dtype
        # A product of fewer rows may add up in another order.
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_gradient_goes_through_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients() -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in (X, Y, Z, GATE)]
        out = ops.attention_skip(*leaves[:3], SPEC, residual=X, c_out=leaves[3])
        return torch.autograd.grad(out.square().sum(), leaves)

    whole = gradients()
    monkeypatch.setattr(batches, "MAX_BATCH", 2)
    for a, b in zip(gradients(), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
