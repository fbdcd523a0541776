"""Attention with a mask of any form: the author's softmax, its gradient, and what is refused.

It is torch's own attention on every device, so there is no kernel for the interpreter.
"""

from __future__ import annotations

import pytest
import torch

from tests.implementations import Implementation, over
from tests.measures import relative_l2
from turbo_rcm_patch import errors
from turbo_rcm_patch.ops import AttentionSpec, masked_attention
from turbo_rcm_patch.ops.reference import split_heads

pytestmark = pytest.mark.usefixtures("poisoned")

BATCH, HEADS, TOKENS, DIM = 2, 3, 12, 8
MASKS = ["block-causal", "two-dimensional", "per-head-added", "per-sample-keys", "one-value-a-row"]


def masks() -> dict[str, torch.Tensor]:
    frames = torch.arange(TOKENS) // 4
    causal = frames.view(-1, 1) >= frames.view(1, -1)
    return {
        "block-causal": causal.view(1, 1, TOKENS, TOKENS),
        "two-dimensional": causal,
        "per-head-added": torch.randn(1, HEADS, TOKENS, TOKENS),
        "per-sample-keys": torch.rand(BATCH, 1, 1, TOKENS) < 0.8,
        "one-value-a-row": torch.randn(HEADS, TOKENS, 1),
    }


def by_hand(x: list[torch.Tensor], mask: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotary embedding and softmax as torch differentiates them."""
    turn = torch.polar(torch.ones_like(table), table)
    q, k, v = (split_heads(tensor, HEADS) for tensor in x)
    q, k = (
        torch.view_as_real(
            torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous()) * turn
        ).flatten(-2)
        for y in (q, k)
    )
    logits = q @ k.transpose(-1, -2) * DIM**-0.5
    added = mask if mask.dtype != torch.bool else torch.where(mask, 0.0, float("-inf"))
    return ((logits + added).softmax(-1) @ v).transpose(1, 2).flatten(2)


_MASKED = {"name": MASKS}


@over(reference=_MASKED, gpu=_MASKED)
def test_it_is_the_softmax_written_by_hand_and_so_are_its_gradients(
    on: Implementation, name: str
) -> None:
    mask = masks()[name].to(on.device)
    x = [on.randn(BATCH, TOKENS, HEADS * DIM).requires_grad_() for _ in range(3)]
    table = on.randn(TOKENS, DIM // 2)
    wide = table.repeat_interleave(2, -1)
    spec = AttentionSpec(heads=HEADS, attention="int4")
    out = masked_attention(*x, mask, spec, rotary=(wide.cos(), wide.sin()))
    expected = by_hand(x, mask, table)
    assert relative_l2(out, expected) < 1e-5
    if on.name == "reference":
        torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
    seen = torch.randn_like(out)
    got = torch.autograd.grad((out * seen).sum(), x)
    want = torch.autograd.grad((expected * seen).sum(), x)
    for a, b in zip(got, want, strict=True):
        assert relative_l2(a, b) < 1e-4
        if on.name == "reference":
            torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-4)


_SCALED = {"scale": [0.9, -0.4, 0.0]}


@over(reference=_SCALED, gpu=_SCALED)
def test_its_logits_have_the_scale_that_was_asked_for(on: Implementation, scale: float) -> None:
    q, k, v = on.randn(3, BATCH, TOKENS, HEADS * DIM)
    mask = masks()["per-head-added"].to(on.device)
    out = masked_attention(q, k, v, mask, AttentionSpec(heads=HEADS, sm_scale=scale))
    qh, kh, vh = (split_heads(x, HEADS).double() for x in (q, k, v))
    p = (scale * (qh @ kh.mT) + mask.double()).softmax(-1)
    expected = (p @ vh).transpose(1, 2).flatten(2).float()
    assert relative_l2(out, expected) < 1e-5
    if on.name == "reference":
        torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


@over("reference", "gpu")
def test_16_bit_inputs_take_an_added_mask_of_any_float(on: Implementation) -> None:
    q, k, v = on.randn(3, BATCH, TOKENS, HEADS * DIM, dtype=torch.bfloat16)
    mask = masks()["per-head-added"].to(on.device)
    out = masked_attention(q, k, v, mask, AttentionSpec(heads=HEADS))
    assert out.dtype == torch.bfloat16 and torch.isfinite(out).all()


_PADDED = {
    "dtype": [torch.bfloat16, torch.float16],
    "shape": [(TOKENS, TOKENS), (BATCH, 1, 1, TOKENS), (1, HEADS, TOKENS, TOKENS), (TOKENS, 1)],
    "least": [torch.finfo(torch.float32).min, -1e9],
}


@over(reference=_PADDED, gpu=_PADDED)
def test_a_row_of_the_least_fp32_is_the_average_of_all_values(
    on: Implementation, dtype: torch.dtype, shape: tuple[int, ...], least: float
) -> None:
    """As in fp32, and not 0, which is what a row of -inf gives."""
    q, k, v = on.randn(3, BATCH, TOKENS, HEADS * DIM, dtype=dtype)
    mask = torch.zeros(shape, device=on.device)
    mask[..., ::3] = least
    mask[-1] = least
    spec = AttentionSpec(heads=HEADS)
    out = masked_attention(q, k, v, mask, spec)
    qh, kh, vh = (split_heads(x, HEADS) for x in (q.float(), k.float(), v.float()))
    # Not with torch's kernels, which multiply the mask by log2(e) on a GPU and give 0.
    fp32 = ((DIM**-0.5 * (qh @ kh.mT) + mask).softmax(-1) @ vh).transpose(1, 2).flatten(2)
    assert relative_l2(out, fp32) < 5 * torch.finfo(dtype).eps
    # What the dtype holds is rounded as before: numbers, and a row of -inf, which sees no key.
    for other in (mask.clamp(min=-1e4), mask.masked_fill(mask < 0.0, -torch.inf)):
        rounded = masked_attention(q, k, v, other.to(dtype), spec)
        assert torch.equal(masked_attention(q, k, v, other, spec), rounded)


@over("reference", "gpu")
def test_a_row_below_fp16_keeps_its_differences(on: Implementation) -> None:
    q, k, v = on.randn(3, BATCH, TOKENS, HEADS * DIM, dtype=torch.float16)
    added = masks()["per-head-added"].to(on.device)
    spec = AttentionSpec(heads=HEADS)
    out = masked_attention(q, k, v, added - 1e5, spec)
    assert relative_l2(out, masked_attention(q, k, v, added, spec)) < 1e-2


@pytest.mark.parametrize(
    ("mask", "causal", "says"),
    [
        pytest.param(torch.ones(1, 1, 5, 5).bool(), False, "broadcasts", id="length"),
        pytest.param(torch.ones(3, 1, TOKENS, TOKENS), False, "broadcasts", id="batch"),
        pytest.param(torch.ones(TOKENS).bool(), False, "broadcasts", id="one-dimension"),
        pytest.param(torch.ones(TOKENS, TOKENS).int(), False, "boolean", id="dtype"),
        pytest.param(torch.ones(TOKENS, TOKENS).bool(), True, "causal", id="causal-too"),
    ],
)
def test_a_mask_of_another_shape_or_dtype_is_refused(
    mask: torch.Tensor, causal: bool, says: str
) -> None:
    x = torch.zeros(BATCH, TOKENS, HEADS * DIM)
    with pytest.raises(errors.MaskError, match=says):
        masked_attention(x, x, x, mask, AttentionSpec(heads=HEADS, causal=causal))
