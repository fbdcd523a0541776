"""A sequence that ranks share, through diffusers' `enable_parallelism`, over real ranks on a
CPU."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.measures import relative_l2
from tests.patching.models import named, run, wan
from tests.ranks import enable_parallelism, on_ranks
from turbo_rcm_patch import patch_model, report_of, unpatch_model
from turbo_rcm_patch.errors import ContextParallelError
from turbo_rcm_patch.ops.residual import api as residual
from turbo_rcm_patch.patching import block, guard, measure

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")

#: fp32 sums in another order, through two blocks.
NEAR = 2e-5


def patch_and_split(
    model: Any, options: Any, patch_first: bool, ranks: int = 2, **more: Any
) -> None:
    if patch_first:
        patch_model(model, **options)
    enable_parallelism(model, ulysses_degree=ranks, **more)
    if not patch_first:
        patch_model(model, **options)


def lengths(model: Any) -> list[Any]:
    return [block.last for block in report_of(model)._blocks()]


#: Attention, and whether the patch comes before the sequence is split.
WAYS = list(product(("exact", "int8"), (True, False)))


def each_way(rank: int, ways: Any, function: Any, *given: Any) -> None:
    for attention, patch_first in ways:
        function({"attention": attention, "guard": False}, patch_first, *given)


def equals_one_rank(options: dict[str, Any], patch_first: bool, name: str) -> None:
    one = named(name)
    alone, model, inputs = one.model(), one.model(), one.inputs()
    patch_model(alone, **options)
    expected = run(alone, inputs)
    patch_and_split(model, options, patch_first)
    made = run(model, inputs)
    assert all(words.startswith("fused") for words in report_of(model).ran().values())
    # int8's scales are those of blocks of keys and of rows, so they are the same on every rank.
    assert relative_l2(made, expected) <= (NEAR if options["attention"] == "exact" else 5e-3)
    assert any("parallel over 2 ranks" in line for line in str(report_of(model)).splitlines())
    # "auto" and the guard decide by the length that the attention has, not by this rank's part.
    assert lengths(model) == lengths(alone)
    unpatch_model(model)
    assert relative_l2(run(model, inputs), run(one.model(), inputs)) <= NEAR


@pytest.mark.supports(
    ("WanTransformer3DModel", "ChronoEditTransformer3DModel"), "context parallel"
)
@pytest.mark.parametrize("name", ["t2v", "i2v", "chronoedit"])
def test_two_ranks_compute_what_one_does(name: str) -> None:
    on_ranks(2, each_way, WAYS if name == "t2v" else WAYS[::3], equals_one_rank, name)


def equals_one_rank_with_sla(rank: int) -> None:
    one = named("sla")
    alone, model, inputs = one.model(), one.model(), one.inputs()
    options: Any = {"attention": "int8", "guard": False, "sla_topk": 0.5}
    patch_model(alone, **options)
    patch_and_split(model, options, True)
    assert relative_l2(run(model, inputs), run(alone, inputs)) <= 5e-3


def test_sla_over_two_ranks() -> None:
    on_ranks(2, equals_one_rank_with_sla)


#: Rows up to which all are compared: of these sequences all, or some.
WHOLE = [4096, 8]


def decides_alike(rank: int, whole: int) -> None:
    """A fault on one rank is seen there, and both decide."""
    measure._WHOLE = whole
    one = named("t2v")
    model, inputs = one.model(), one.inputs()
    expected = run(model, inputs)
    report = patch_model(model, attention="int8")
    enable_parallelism(model, ulysses_degree=2)
    right = residual.skip_norm

    def wrong(*args: Any, **named: Any) -> Any:
        x, h = right(*args, **named)
        return x if x is None else x * 2, h

    residual.skip_norm = wrong if rank == 0 else right
    ahead: list[Any] = []  # ranks would wait for each other in it
    block.compile_ahead = lambda *given: ahead.append(given)
    made = run(model, inputs)
    assert not ahead
    assert {record.path for record in report.guard.decisions} == {"blocks.0", "blocks.1"}
    assert relative_l2(made, expected) < 0.02


@pytest.mark.parametrize("whole", WHOLE)
def test_ranks_decide_together(whole: int) -> None:
    on_ranks(2, decides_alike, whole)


def predicts_alike(rank: int) -> None:
    """The prediction of one rank is far over the target."""
    one = named("t2v")
    model, inputs = one.model(), one.inputs()
    report = patch_model(model, attention="int8")
    enable_parallelism(model, ulysses_degree=2)
    far = measure.Shares(1e-6, 1.0)
    with mock.patch.object(guard, "shares", lambda *_: far) if rank else nullcontext():
        run(model, inputs)
    assert report.last_forward == {"fused with exact attention": 2}


def test_ranks_predict_together() -> None:
    on_ranks(2, predicts_alike)


def refuses_uneven_heads(rank: int, name: str) -> None:
    for attention, guarded in product(("exact", "int8"), (True, False)):
        options: Any = {"attention": attention, "guard": guarded}
        model, inputs = named(name).model(), named(name).inputs()
        enable_parallelism(model, ulysses_degree=2)
        with pytest.raises((RuntimeError, ValueError)):
            run(model, inputs)
        with pytest.raises(ContextParallelError, match=r"[13] heads?"):
            patch_model(model, **options)
        model = named(name).model()
        patch_and_split(model, options, True)
        for _ in range(2):
            with pytest.raises(ContextParallelError, match=r"ulysses_anything=True"):
                run(model, inputs)


@pytest.mark.parametrize("name", ["three-heads-of-24", "head-dim-128"])
def test_heads_that_ranks_cannot_share_are_refused_whatever_came_first(name: str) -> None:
    """Without `ulysses_anything` the unpatched model raises too."""
    on_ranks(2, refuses_uneven_heads, name)


#: Names of the functions that have gathered.
gathered: list[str] = []


def gather_uneven(outputs: list[Tensor], x: Tensor, group: Any = None) -> None:
    """`all_gather` as NCCL has it. gloo refuses parts of uneven sizes."""
    gathered.append(sys._getframe(1).f_code.co_name)
    for rank, output in enumerate(outputs):
        if rank == dist.get_rank(group):
            output.copy_(x)
        dist.broadcast(output, group_src=rank, group=group)


@mock.patch.object(dist, "all_gather", gather_uneven)
def serves_uneven_parts(options: dict[str, Any], first: bool, heads: int, ranks: int) -> None:
    """Equals one process, for two lengths one after the other, and one again."""
    size = {"num_attention_heads": heads, "attention_head_dim": 24, "num_layers": ranks - 1}
    alone, model = (wan(**size).eval().requires_grad_(False) for _ in range(2))
    patch_model(alone, **options)
    patch_and_split(model, options, first, ranks, ulysses_anything=True)
    for width, batch in ((10, 1), (14, 2), (10, 1)):
        inputs = named("t2v").inputs(batch)
        noise = torch.Generator().manual_seed(3)
        inputs["hidden_states"] = torch.randn(batch, 4, 3, 6, width, generator=noise)
        gathered.clear()
        expected, made = run(alone, inputs), run(model, inputs)
        assert gathered.count("_lengths") == 1
        assert relative_l2(made, expected) <= (NEAR if options["attention"] == "exact" else 5e-3)
        assert set(report_of(model).ran()) == set(report_of(alone).ran())
        assert lengths(model) == lengths(alone)
        assert all(
            words == f"fused with {options['attention']} attention"
            for words in report_of(model).ran().values()
        )
        every = [torch.empty_like(made) for _ in range(ranks)]
        dist.all_gather(every, made)
        assert all(torch.equal(made, other) for other in every)
    if options["guard"]:
        assert not report_of(model).guard.skipped
        compared = [one.path for one in report_of(model).guard if one.verdict == "kept"]
        assert set(report_of(model).ran()) <= set(compared)


@pytest.mark.parametrize(("heads", "ranks"), [(3, 2), (1, 2), (2, 3)])
def test_uneven_heads_and_lengths_are_served(heads: int, ranks: int) -> None:
    on_ranks(ranks, each_way, WAYS, serves_uneven_parts, heads, ranks)


def serves(rank: int, whole: int, *given: Any) -> None:
    measure._WHOLE = whole
    serves_uneven_parts(*given)


@pytest.mark.parametrize("whole", WHOLE)
@pytest.mark.parametrize("heads", [3, 1])
def test_the_guard_compares_uneven_heads_also_where_diffusers_refuses_them(
    heads: int, whole: int
) -> None:
    options = {"attention": "int8", "guard": True, "fidelity": None}
    on_ranks(2, serves, whole, options, True, heads, 2)


def test_six_heads_on_four_ranks() -> None:
    on_ranks(4, serves, 4096, {"attention": "int8", "guard": False}, True, 6, 4)


def test_another_parallelism_is_refused() -> None:
    model = named("t2v").model()
    model._parallel_config = SimpleNamespace(context_parallel_config=None)
    with pytest.raises(ContextParallelError, match="without it"):
        patch_model(model)


def rings(rank: int) -> None:
    one = named("t2v")
    model, inputs = one.model(), one.inputs()
    patch_model(model, attention="int8", guard=False)
    enable_parallelism(model, ring_degree=2)
    called = []

    def ring(*args: Any, **named: Any) -> Tensor:
        called.append(named["parallel_config"])
        query: Tensor = args[0]
        return query

    with mock.patch(
        "diffusers.models.transformers.transformer_wan.dispatch_attention_fn", side_effect=ring
    ):
        run(model, inputs)
    assert sum(config is not None for config in called) == 2  # the two self-attentions


def test_in_a_ring_the_attention_exchanges_by_its_own_code() -> None:
    on_ranks(2, rings)
