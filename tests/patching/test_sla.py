"""SLA in diffusers' Wan: an attention that holds a proj_l is sparse-linear once it is patched."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from torch import nn

from tests.patching.wan import CASES, Case, dicts, relative
from tests.patching.wan_family import FAMILIES
from turbo_rcm_patch import PatchConfig, find_pairs, patch_model, patched, unpatch_model
from turbo_rcm_patch.errors import GradientError, HeadDimError, ShapeError
from turbo_rcm_patch.patching import sla_as_defined
from turbo_rcm_patch.patching.sla import (
    PROJ_L,
    attach_proj_l,
    attached_proj_l,
    detach_proj_l,
)

BF16 = torch.bfloat16
TOPK = 0.5
INT8 = PatchConfig(guard=False, sla_topk=TOPK)
EXACT = PatchConfig(attention="exact", guard=False, sla_topk=TOPK)
#: Same sums in fp32, in another order.
TIGHT = 1e-5

T2V, I2V, TI2V, FUSED_QKV = (CASES[i] for i in (0, 1, 3, 4))
BY_CASE = [T2V, I2V, TI2V, FUSED_QKV, CASES[6], CASES[7]]


def names(cases: list[Case]) -> list[str]:
    return [case.name for case in cases]


def with_sla(model: Any) -> Any:
    """A random proj_l in every self-attention, large enough to show."""
    generator = torch.Generator().manual_seed(7)
    for block in model.blocks:
        dim = block.attn1.inner_dim // block.attn1.heads
        weight = torch.randn(dim, dim, generator=generator) * 2 * dim**-0.5
        attach_proj_l(block.attn1, weight, torch.randn(dim, generator=generator) * 0.3)
    return model


def without_sla(model: Any) -> Any:
    for block in model.blocks:
        detach_proj_l(block.attn1)
    return model


def inputs_of(case: Case, dtype: torch.dtype = torch.float32, batch: int = 2) -> dict[str, Any]:
    """360 tokens: three blocks of queries, six of keys, neither of them whole."""
    generator = torch.Generator().manual_seed(1)
    given = case.inputs(batch, dtype)
    given["hidden_states"] = torch.randn(batch, 4, 3, 20, 24, generator=generator).to(dtype)
    if case.per_token:
        given["timestep"] = torch.rand(batch, 360, generator=generator) * 1000
    return given


def run(model: Any, given: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(**given)[0]
    return output


class PlainSLA:
    """A processor with SLA written out in the simplest way: a mask over all keys."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, topk: float) -> None:
        self.weight, self.bias, self.topk = weight, bias, topk

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        x, dtype = hidden_states, hidden_states.dtype
        if attn.fused_projections:
            q, k, v = attn.to_qkv(x).chunk(3, -1)
        else:
            q, k, v = attn.to_q(x), attn.to_k(x), attn.to_v(x)
        q, k = attn.norm_q(q), attn.norm_k(k)
        q, k, v = (y.unflatten(2, (attn.heads, -1)).transpose(1, 2) for y in (q, k, v))
        assert rotary_emb is not None and attention_mask is None
        q, k = (turned(y, *rotary_emb).to(dtype) for y in (q, k))
        mask = self.seen(q, k)
        q, k, v = q.float(), k.float(), v.float()
        sparse = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        share = q.softmax(-1) @ k.softmax(-1).transpose(-1, -2)
        linear = share @ v / (share.sum(-1, keepdim=True) + 1e-5)
        out = sparse + F.linear(linear, self.weight, self.bias)
        return attn.to_out[1](attn.to_out[0](out.transpose(1, 2).flatten(2).to(dtype)))

    def seen(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        rows, columns = torch.arange(q.shape[2]) // 128, torch.arange(k.shape[2]) // 64
        smooth = (k.float() - k.float().mean(2, keepdim=True).to(k.dtype).float()).to(k.dtype)
        pooled = [
            torch.stack([x[:, :, of == i].float().mean(2) for i in of.unique()], 2).to(q.dtype)
            for x, of in ((q, rows), (smooth, columns))
        ]
        score = (pooled[0].float() @ pooled[1].float().transpose(-1, -2)).to(q.dtype).float()
        count = max(1, int(self.topk * score.shape[-1]))
        order = score.sort(dim=-1, descending=True, stable=True).indices[..., :count]
        chosen = torch.zeros_like(score).scatter(-1, order, 1.0).bool()
        return chosen[:, :, rows][..., columns]


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As diffusers picks them: ChronoEdit's two sines of a pair differ by 1e-3."""
    cos, sin = cos[0, :, 0, 0::2], sin[0, :, 0, 1::2]
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


def oracle(model: Any, topk: float = TOPK) -> Any:
    """A copy of the model whose author's blocks run `PlainSLA`."""
    twin = copy.deepcopy(model)
    for block in twin.blocks:
        held = attached_proj_l(block.attn1)
        assert held is not None
        block.attn1.processor = PlainSLA(held[0].clone(), held[1].clone(), topk)
    return without_sla(twin)


# --- what it computes ---------------------------------------------------------------------------


@pytest.mark.parametrize("case", BY_CASE, ids=names(BY_CASE))
@pytest.mark.parametrize("topk", [0.2, 1.0])
def test_exact_attention_is_sla_as_it_is_defined(case: Case, topk: float) -> None:
    model, given = with_sla(case.model()), inputs_of(case)
    dense, expected = run(model, given), run(oracle(model, topk), given)
    assert relative(dense, expected) > 0.05
    with patched(model, PatchConfig(attention="exact", guard=False, sla_topk=topk)):
        assert relative(run(model, given), expected) < TIGHT
    assert torch.equal(run(model, given), dense)


@pytest.mark.parametrize("case", BY_CASE, ids=names(BY_CASE))
def test_int8_stays_near_it(case: Case) -> None:
    model, given = with_sla(case.model()), inputs_of(case)
    expected = run(oracle(model), given)
    with patched(model, INT8):
        assert 0 < relative(run(model, given), expected) < 0.02
    with patched(model, PatchConfig(attention="int4", guard=False, sla_topk=TOPK)):
        assert 0.03 < relative(run(model, given), expected) < 0.5


@pytest.mark.parametrize("case", [T2V, I2V, TI2V], ids=names([T2V, I2V, TI2V]))
@pytest.mark.parametrize("config", [EXACT, INT8], ids=["exact", "int8"])
def test_in_bf16_it_is_as_near_the_truth_as_the_plain_form(
    case: Case, config: PatchConfig
) -> None:
    """Every key, so that no rounding decides about a block."""
    model, given = with_sla(case.model(BF16)), inputs_of(case, BF16)
    wide = {
        name: x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in given.items()
    }
    plain = oracle(model, 1.0)
    truth, theirs = run(copy.deepcopy(plain).float(), wide), run(plain, given)
    with patched(model, replace(config, sla_topk=1.0)):
        output = run(model, given)
    assert output.dtype == BF16
    assert relative(output, truth) < 1.5 * relative(theirs, truth) + 0.005


def test_a_cast_of_the_model_leaves_proj_l_in_fp32() -> None:
    model = with_sla(T2V.model())
    before = [x.clone() for x in attached_proj_l(model.blocks[0].attn1) or ()]
    model.to(BF16).to(torch.float32)
    after = attached_proj_l(model.blocks[0].attn1) or ()
    assert len(after) == 2 and all(map(torch.equal, before, after))
    assert all(x.dtype == torch.float32 for x in after)


@pytest.mark.parametrize("linear", ["as-is", "int8"])
def test_other_linears_are_called_and_attention_is_sparse_all_the_same(linear: Any) -> None:
    model, given = with_sla(T2V.model()), inputs_of(T2V)
    calls: list[str] = []

    class Adapted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append("called")
            return super().forward(x) + 0.1 * x

    for block in model.blocks:
        for holder, name in ((block.attn1, "to_q"), (block.attn1.to_out, "0")):
            adapted = Adapted(128, 128)
            adapted.load_state_dict(getattr(holder, name).state_dict())
            setattr(holder, name, adapted.requires_grad_(False))
    expected = run(oracle(model), given)
    calls.clear()
    config = PatchConfig(guard=False, sla_topk=TOPK, attention="exact", linear=linear)
    with patched(model, config) as report:
        assert report.pairs[0].runs == "after-linear" and "Adapted" in report.pairs[0].reason
        assert "sparse" in report.pairs[0].reason
        error = relative(run(model, given), expected)
    assert error < TIGHT if linear == "as-is" else 0 < error < 0.05
    assert len(calls) == 4


# --- which pairs there are ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attention", "runs"), [("int8", "in-kernel"), ("int4", "in-kernel"), ("exact", "as-written")]
)
def test_the_sum_of_the_branches_is_a_pair_of_its_own(attention: Any, runs: str) -> None:
    model = with_sla(I2V.model())
    if attention == "int8":
        assert [pair.kind for pair in find_pairs(model)[:4]] == ["self", "self", "cross", "image"]
        assert "sla_topk=0.1" in find_pairs(model)[0].reason
    with patched(model, PatchConfig(attention=attention, guard=False, sla_topk=0.25)) as report:
        assert len(report.pairs) == 10
        first, linear = report.pairs[:2]
        assert first.path == "blocks.0.attn1" and linear.path == "blocks.0.attn1.proj_l"
        assert (first.runs, linear.runs) == ("two-launch", runs)
        assert first.projection and not linear.projection
        assert "sparse" in first.reason and "sla_topk=0.25" in first.reason
        assert "sla_topk=0.25" in str(report)
        assert report.as_dict()["config"]["sla_topk"] == 0.25


def test_one_launch_is_for_dense_attention() -> None:
    model = with_sla(T2V.model())
    detach_proj_l(model.blocks[1].attn1)
    with patched(model, PatchConfig(form="one-launch", guard=False)) as report:
        assert [pair.runs for pair in report.pairs if pair.path.endswith("attn1")] == [
            "two-launch",
            "one-launch",
        ]


def test_sage_has_no_sparse_kernel_and_is_not_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    from turbo_rcm_patch.patching import patch

    monkeypatch.setattr(patch, "_check_sage", lambda device: None)
    model, given = with_sla(T2V.model()), inputs_of(T2V)
    expected = run(oracle(model), given)
    config = PatchConfig(attention="sage", kinds=("self",), guard=False, sla_topk=TOPK)
    with patched(model, config) as report:
        first, linear = report.pairs[:2]
        assert (first.runs, linear.runs) == ("after-linear", "as-written")
        assert "sage" in first.reason and "in plain torch" in first.reason
        assert relative(run(model, given), expected) < TIGHT


def dense_by_kinds(model: Any) -> PatchConfig:
    return PatchConfig(kinds=("cross", "feed-forward"), attention="exact", guard=False)


def dense_by_processor(model: Any) -> PatchConfig:
    class Mine(type(model.blocks[0].attn1.processor)):
        pass

    for block in model.blocks:
        block.attn1.processor = Mine()
    return EXACT


def dense_by_forward(model: Any) -> PatchConfig:
    for block in model.blocks:
        own = block.attn1.forward
        block.attn1.forward = lambda *args, own=own, **kwargs: own(*args, **kwargs)
    return EXACT


@pytest.mark.parametrize("leave", [dense_by_kinds, dense_by_processor, dense_by_forward])
def test_what_is_left_dense_is_said(leave: Any) -> None:
    model, given = with_sla(T2V.model()), inputs_of(T2V)
    dense, config = run(model, given), leave(model)
    with patched(model, config) as report:
        for pair in report.pairs[:2]:
            assert "it runs dense, without SLA" in pair.reason
        assert report.pairs[1].runs == "as-written"
        assert relative(run(model, given), dense) < TIGHT
        assert "it runs dense, without SLA" in str(report)


def test_a_mask_leaves_it_dense() -> None:
    family = next(f for f in FAMILIES if f.name == "skyreels-masked")
    model, given = with_sla(family.model()), family.inputs()
    dense = run(model, given)
    with patched(model, EXACT) as report:
        assert "it runs dense, without SLA" in report.pairs[0].reason
        assert relative(run(model, given), dense) < TIGHT


@pytest.mark.parametrize("name", ["chronoedit", "animate", "skyreels-forcing", "vace", "flf2v"])
def test_the_rest_of_the_family_runs_it_too(name: str) -> None:
    family = next(f for f in FAMILIES if f.name == name)
    model, given = with_sla(family.model()), family.inputs()
    expected = run(oracle(model), given)
    with patched(model, EXACT) as report:
        assert sum(pair.path.endswith("proj_l") for pair in report.pairs) == 2
        assert relative(run(model, given), expected) < TIGHT


# --- where it is called as a module -------------------------------------------------------------


def test_inside_a_hook_it_runs_as_it_is_defined() -> None:
    model, given = with_sla(T2V.model()), inputs_of(T2V)
    calls: list[int] = []
    for block in model.blocks:
        block.attn1.register_forward_hook(lambda *_: calls.append(1))
    expected = run(oracle(model), given)
    calls.clear()
    with patched(model, INT8) as report:
        first, linear = report.pairs[:2]
        assert (first.runs, linear.runs) == ("after-linear", "as-written")
        assert first.reason.endswith("SLA runs as it is defined, in plain torch")
        # Nothing else is in int8 at this length.
        assert relative(run(model, given), expected) < TIGHT
    assert len(calls) == 2


def test_hooks_that_come_later_run_it_and_go_without_a_trace() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    model, given = with_sla(T2V.model()), inputs_of(T2V)
    expected, dense = run(oracle(model), given), run(model, given)
    patch_model(model, EXACT)
    add_hook_to_module(model.blocks[0].attn1, ModelHook())
    assert relative(run(model, given), expected) < TIGHT
    assert find_pairs(model)[0].runs == "after-linear"
    unpatch_model(model)
    assert torch.equal(run(model, given), dense)
    remove_hook_from_module(model.blocks[0].attn1)
    assert torch.equal(run(model, given), dense)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # the author's norms
def test_under_autocast_the_author_s_block_runs_it() -> None:
    model, given = with_sla(T2V.model()), inputs_of(T2V)
    expected, dense = run(oracle(model, 1.0), given), run(model, given)
    with patched(model, replace(INT8, sla_topk=1.0)), torch.autocast("cpu", torch.bfloat16):
        output = run(model, given)
    assert relative(output, expected) < 0.03 < 0.05 < relative(output, dense)


def test_a_dropout_that_is_active_leaves_the_author_s_modules_and_sla() -> None:
    model, given = with_sla(T2V.model()), inputs_of(T2V)
    expected = run(oracle(model), given)
    for block in model.blocks:
        block.attn1.to_out[1] = nn.Dropout(1e-9).train()
    with patched(model, EXACT) as report:
        assert report.pairs[0].runs == "as-written"
        assert "dropout" in report.pairs[0].reason and "in plain torch" in report.pairs[0].reason
        assert relative(run(model, given), expected) < TIGHT


# --- the guard ----------------------------------------------------------------------------------


def test_the_guard_compares_with_sla() -> None:
    model, given = with_sla(T2V.model()), inputs_of(T2V)
    with patched(model, PatchConfig(sla_topk=TOPK)) as report:
        run(model, given)
        of_sla = [record for record in report.guard if "attn1" in record.path]
        assert len(of_sla) == 4 and all(record.error < 0.03 for record in of_sla)
        assert {record.verdict for record in report.guard} == {"kept"}
        assert report.fused == len(report.pairs)


def test_what_the_guard_gives_back_still_is_sla() -> None:
    model, given = with_sla(T2V.model()), inputs_of(T2V)
    expected, dense = run(oracle(model), given), run(model, given)
    tight = PatchConfig(guard_budget=1e-6, kinds=("self",), sla_topk=TOPK)
    with patched(model, tight) as report:
        assert relative(run(model, given), expected) < TIGHT
        assert report.fused == 0
        for pair in report.pairs[:2]:
            assert pair.reason.startswith("given back by the guard")
            assert pair.reason.endswith("SLA runs as it is defined, in plain torch")
        assert relative(run(model, given), expected) < TIGHT
    assert torch.equal(run(model, given), dense)


def test_the_guard_may_make_it_exact() -> None:
    model, given = with_sla(T2V.model()), inputs_of(T2V)
    expected = run(oracle(model), given)
    tight = PatchConfig(guard_budget=1e-5, precision="auto", kinds=("self",), sla_topk=TOPK)
    with patched(model, tight) as report:
        for _ in range(2):
            assert relative(run(model, given), expected) < TIGHT
        assert {record.verdict for record in report.guard} >= {"exact attention", "kept"}
        first, linear = report.pairs[:2]
        assert first.fused and not linear.fused and "made exact" in linear.reason


# --- around it ----------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [INT8, EXACT, PatchConfig()], ids=["int8", "exact", "guard"])
def test_unpatch_leaves_nothing_behind(config: PatchConfig) -> None:
    model, given = with_sla(I2V.model()), inputs_of(I2V)
    expected, before, keys = run(model, given), dicts(model), list(model.state_dict())
    patch_model(model, config)
    run(model, given)
    assert list(model.state_dict()) == keys
    unpatch_model(model)
    assert dicts(model) == before
    assert torch.equal(run(model, given), expected)


def test_copies_are_independent() -> None:
    model, given = with_sla(T2V.model()), inputs_of(T2V)
    patch_model(model, INT8)
    expected = run(model, given)
    other = copy.deepcopy(model)
    unpatch_model(model)
    without_sla(model)
    assert torch.equal(run(other, given), expected)
    attn = other.blocks[0].attn1
    assert vars(attn)["forward"]._attn is attn
    unpatch_model(other)


def test_saving_writes_the_stock_model(tmp_path: Path) -> None:
    model, given = with_sla(T2V.model()), inputs_of(T2V)
    dense = run(model, given)
    with patched(model, INT8):
        model.save_pretrained(tmp_path)
    again = WanTransformer3DModel.from_pretrained(tmp_path, local_files_only=True).eval()
    assert torch.equal(run(again, given), dense)


def test_compiles_without_a_break() -> None:
    model, given = with_sla(T2V.model()), inputs_of(T2V)
    with patched(model, INT8):
        expected = run(model, given)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert relative(run(compiled, given), expected) < TIGHT
    torch._dynamo.reset()


@pytest.mark.parametrize("config", [INT8, EXACT], ids=["int8", "exact"])
def test_a_gradient_is_refused(config: PatchConfig) -> None:
    model, given = with_sla(T2V.model()).requires_grad_(True), inputs_of(T2V)
    with patched(model, config), pytest.raises(GradientError, match="sparse_linear_attention"):
        model(**given)


def test_a_proj_l_that_comes_later_waits_for_another_patch() -> None:
    """`load_extra` refuses it; whoever attaches it by hand gets what the report says."""
    model, given = T2V.model(), inputs_of(T2V)
    with patched(model, EXACT) as report:
        dense = run(model, given)
        with_sla(model)
        assert torch.equal(run(model, given), dense)
        assert len(report.pairs) == 6 and "sparse" not in str(report)
    with patched(model, EXACT):
        assert relative(run(model, given), dense) > 0.05


def test_the_baseline_is_sla_in_the_author_s_blocks() -> None:
    model, given = with_sla(T2V.model()), inputs_of(T2V)
    expected, dense, before = run(oracle(model), given), run(model, given), dicts(model)
    with sla_as_defined(model, TOPK) as count:
        assert count == 2
        assert relative(run(model, given), expected) < TIGHT
        assert "forward" not in vars(model.blocks[0])
    assert dicts(model) == before
    without_sla(model)
    with sla_as_defined(model, TOPK) as count:
        assert count == 0 and torch.equal(run(model, given), dense)


def test_what_does_not_fit_is_refused() -> None:
    model = T2V.model()
    attn = model.blocks[0].attn1
    for weight, bias in (((32, 32), (32,)), ((64, 64), (32,)), ((64, 32), (64,))):
        with pytest.raises(ShapeError, match=r"\[64, 64\]"):
            attach_proj_l(attn, torch.zeros(weight), torch.zeros(bias))
    assert attached_proj_l(attn) is None and not any(name in attn._buffers for name in PROJ_L)
    wide = with_sla(Case("wide", {"attention_head_dim": 256, "num_attention_heads": 1}).model())
    with pytest.raises(HeadDimError, match="head_dim"):
        patch_model(wide)
