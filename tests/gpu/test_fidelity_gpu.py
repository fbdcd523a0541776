"""The residual stream in fp32, and heads that run exactly, on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.measures import relative_l2
from tests.patching import cogvideox, wan
from tests.patching.test_precision import AUTO, one_peaked_head
from tests.patching.test_residual import BF16, CLOSER, EXACT, errors
from turbo_rcm_patch import patch_model, patched
from turbo_rcm_patch.ops import AttentionSpec, attention_skip
from turbo_rcm_patch.patching import noise

pytestmark = pytest.mark.gpu
HEADS, DIM, TOKENS = 6, 128, 4100


def on_gpu(subject: Any) -> tuple[Any, dict[str, Any]]:
    given = {
        name: tuple(x.cuda() for x in value)
        if isinstance(value, tuple)
        else value.cuda()
        if isinstance(value, torch.Tensor)
        else value
        for name, value in subject.inputs(2, BF16).items()
    }
    return subject.model(BF16).cuda(), given


@pytest.mark.parametrize("exact", [(0,), (1, 2), (0, 3, 5)], ids=str)
def test_marked_heads_are_exact_and_the_others_int8(exact: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, TOKENS, 3 * HEADS * DIM, device="cuda").bfloat16().chunk(3, -1)
    angles = torch.rand(TOKENS, DIM // 2, device="cuda").repeat_interleave(2, -1)
    weight = 2 + torch.rand(HEADS * DIM, device="cuda").bfloat16()
    given: Any = {"norm_q": weight, "norm_k": weight, "rotary": (angles.cos(), angles.sin())}
    spec = AttentionSpec(heads=HEADS)

    def run(spec: AttentionSpec) -> torch.Tensor:
        with torch.no_grad():
            return attention_skip(q, k, v, spec, **given).unflatten(-1, (HEADS, DIM)).float()

    mixed, int8 = run(replace(spec, exact_heads=exact)), run(spec)
    truth = run(replace(spec, attention="exact"))
    for head in range(HEADS):
        off, alone = (relative_l2(x[:, :, head], truth[:, :, head]) for x in (mixed, int8))
        assert (off < 1e-2 < alone) if head in exact else (0.5 * alone < off < 1.1 * alone)


@pytest.mark.parametrize("subject", [wan.CASES[0], cogvideox.ROTARY], ids=["wan", "cogvideox"])
def test_a_wide_residual_is_closer_to_the_truth(subject: Any) -> None:
    model, given = on_gpu(subject)
    _, narrow, wide = errors(model, given, EXACT | {"residual": "model"}, EXACT)
    assert wide < CLOSER * narrow


@pytest.mark.parametrize("linear", ["as-is", "int8"])
@pytest.mark.parametrize("subject", [wan.CASES[0], cogvideox.ROTARY], ids=["wan", "cogvideox"])
def test_replays_and_graphs_compute_what_the_first_forward_does(subject: Any, linear: str) -> None:
    model, given = on_gpu(subject)
    how: Any = {"attention": "int8", "linear": linear, "guard": False}
    with patched(model, **how):
        first = wan.run(model, **given)
        assert all(torch.equal(wan.run(model, **given), first) for _ in range(4))
    with patched(model, cuda_graphs=True, **how):
        assert all(torch.equal(wan.run(model, **given), first) for _ in range(5))


@pytest.mark.parametrize("subject", [wan.CASES[0], cogvideox.ROTARY], ids=["wan", "cogvideox"])
def test_a_peaked_head_runs_exactly(subject: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in long sequences; over so few tokens it is cheaper to make both heads exact.
    monkeypatch.setattr(noise, "_SECOND_PART", 0.0)
    model, given = on_gpu(subject)
    one_peaked_head(model)
    report = patch_model(model, attention="int8", pv="bf16", fidelity=1.5, **AUTO)
    wan.run(model, **given)  # chooses; the next runs as it chose
    assert report.exact_heads.get(report.pairs[0].path) == (1,), report.precision_map
    chosen = wan.run(model, **given)
    assert all(torch.equal(wan.run(model, **given), chosen) for _ in range(4))
