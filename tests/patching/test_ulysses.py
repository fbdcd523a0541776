"""Ranks that share a sequence decide together, and refuse what they cannot share.

`tests/test_several_ranks.py` compares what they compute.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.measures import relative_l2
from tests.patching.models import named, run
from tests.ranks import enable_parallelism, on_ranks
from turbo_rcm_patch import patch_model
from turbo_rcm_patch.errors import ContextParallelError
from turbo_rcm_patch.ops.residual import api as residual
from turbo_rcm_patch.patching import guard, measure

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


#: Tokens up to which the guard compares all: of these sequences all, or some.
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
    made = run(model, inputs)
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
        patch_model(model, **options)
        enable_parallelism(model, ulysses_degree=2)
        for _ in range(2):
            with pytest.raises(ContextParallelError, match=r"ulysses_anything=True"):
                run(model, inputs)


@pytest.mark.parametrize("name", ["three-heads-of-24", "head-dim-128"])
def test_heads_that_ranks_cannot_share_are_refused_whatever_came_first(name: str) -> None:
    """Without `ulysses_anything` the unpatched model raises too."""
    on_ranks(2, refuses_uneven_heads, name)


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
