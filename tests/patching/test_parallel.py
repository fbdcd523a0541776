"""diffusers' context parallelism over real ranks on a CPU: our plans, our processors, and the way
back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusers.hooks import context_parallel
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.patching import cogvideox, wan, wan_family
from tests.patching.wan import dicts, relative, run
from tests.ranks import on_ranks
from turbo_rcm_patch import patch_model, unpatch_model
from turbo_rcm_patch.errors import ContextParallelError
from turbo_rcm_patch.patching.parallel import (
    attach_plan,
    context_parallel_plan,
    detach_plan,
    disable_parallelism,
    distribute_attention,
    groups_of,
    restore_attention,
)

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")

#: fp32 sums in another order, through two blocks.
NEAR = 2e-5


def enable(model: Any, mesh: DeviceMesh, **more: Any) -> None:
    ring, ulysses = mesh.shape
    config = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, mesh=mesh, **more)
    count = max(1, torch.accelerator.device_count())
    # diffusers counts accelerators, of which a CPU machine has none.
    with mock.patch.object(torch.accelerator, "device_count", return_value=count):
        model.enable_parallelism(config=config)


def mesh(ring: int, ulysses: int, device: str = "cpu") -> DeviceMesh:
    kind = device.partition(":")[0]
    return init_device_mesh(kind, (ring, ulysses), mesh_dim_names=("ring", "ulysses"))


def follows(
    make: Callable[[], Any], inputs: dict[str, Any], layout: DeviceMesh, name: str, **more: Any
) -> None:
    """A parallel model computes what it does on one device, and is as it was afterwards."""
    model = make()
    expected = run(model, **inputs)
    before = dicts(model)
    distribute_attention(model)
    attach_plan(model)
    enable(model, layout, **more)
    groups = groups_of(model)
    assert groups is not None and groups is groups_of(model)
    assert (groups.ring_degree, groups.ulysses_degree) == tuple(layout.shape)
    out = run(model, **inputs)
    assert out.shape == expected.shape, name
    assert relative(out, expected) < NEAR, (name, relative(out, expected))
    same = [torch.empty_like(out) for _ in range(dist.get_world_size())]
    dist.all_gather(same, out.contiguous())
    assert all(torch.equal(x, out) for x in same), name  # gathered, so the same bits
    disable_parallelism(model)
    detach_plan(model)
    restore_attention(model)
    assert groups_of(model) is None
    after = dicts(model)
    assert after.keys() == before.keys()
    for module, attributes in before.items():
        assert after[module] == attributes, (name, module)
    assert torch.equal(run(model, **inputs), expected), name


def families(rank: int, ring: int, ulysses: int, names: list[str]) -> None:
    layout = mesh(ring, ulysses)
    for family in wan_family.FAMILIES:
        if family.name in names:
            follows(family.model, family.inputs(batch=1), layout, family.name)


def cogvideox_case(rotary: bool, text: int, **config: Any) -> tuple[Callable[[], Any], Any]:
    consisid = config.pop("consisid", False)
    case = cogvideox.Case("", config, rotary=rotary, consisid=consisid)
    inputs = case.inputs()
    inputs["encoder_hidden_states"] = torch.randn(
        1, text, 16, generator=torch.Generator().manual_seed(3)
    )
    return lambda: cogvideox.cogvideox(
        consisid, **config, max_text_seq_length=text, use_rotary_positional_embeddings=rotary
    ), inputs


NAMES = [
    "vace-scaled-one-layer", "vace-image-fused-qkv", "animate", "animate-image-two-faces",
    "skyreels-forcing", "skyreels-i2v-fused-qkv", "chronoedit-token-times", "flf2v",
]  # fmt: skip


def wan_family_ranks(rank: int, ring: int, ulysses: int) -> None:
    masked = ["skyreels-masked"] if ring == 1 else []  # a mask is not for a ring
    families(rank, ring, ulysses, NAMES + masked)


def under_autocast(rank: int) -> None:
    """Norms leave autocast in fp32 on a GPU, and v is in 16 bits."""
    for make, inputs in ((wan.CASES[0].model, wan.CASES[0].inputs()), cogvideox_case(True, 8)):
        model = make()
        expected = run(model, **inputs)
        distribute_attention(model)
        attach_plan(model)
        enable(model, mesh(1, 2))
        blocks = getattr(model, "blocks", None) or model.transformer_blocks
        for block in blocks:
            for norm in (block.attn1.norm_q, block.attn1.norm_k):
                norm.register_forward_hook(lambda module, args, out: out.float())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert relative(run(model, **inputs), expected) < 0.02


def cogvideox_ranks(rank: int) -> None:
    under_autocast(rank)
    for ring, ulysses in ((1, 2), (2, 1)):
        layout = mesh(ring, ulysses)
        for rotary, config in (
            (False, {}),
            (True, {}),
            (True, {"consisid": True}),
            (True, {"consisid": True, **cogvideox.FACE}),
        ):
            follows(*cogvideox_case(rotary, 8, **config), layout, str(config)[:40])


@pytest.mark.slow
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 1)], ids=["ulysses", "ring"])
def test_the_wan_family_on_two_ranks(ring: int, ulysses: int) -> None:
    on_ranks(2, wan_family_ranks, ring, ulysses)


def test_cogvideox_and_consisid_on_two_ranks() -> None:
    on_ranks(2, cogvideox_ranks)


def four(rank: int) -> None:
    """Unified; more ranks than heads."""
    unified, ulysses = mesh(2, 2), mesh(1, 4)
    case = wan.CASES[0]
    for layout in (unified, ulysses):
        follows(case.model, case.inputs(), layout, "wan")
        follows(*cogvideox_case(True, 8), layout, "cogvideox")


def gathered(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """diffusers' gather of unequal parts, which gloo does not have: in parts made equal."""
    sizes: list[Any] = [None] * group.size()
    dist.all_gather_object(sizes, tensor.shape[dim], group=group)
    shape = list(tensor.shape)
    shape[dim] = max(sizes)
    mine = tensor.new_zeros(shape)
    mine.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    parts = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(parts, mine, group=group)
    return torch.cat([x.narrow(dim, 0, n) for x, n in zip(parts, sizes, strict=True)], dim)


def anything(rank: int) -> None:
    """45 tokens of Wan, and 7 of text: halves of different length."""
    case = wan.CASES[0]
    inputs = case.inputs()
    inputs["hidden_states"] = inputs["hidden_states"][:, :, :, :6]
    with mock.patch.object(context_parallel, "_all_gather_anything", gathered):
        for layout, more in (
            (mesh(1, 2), {"ulysses_anything": True}),
            (mesh(2, 1), {"ring_anything": True}),
        ):
            follows(case.model, inputs, layout, "wan", **more)
            follows(*cogvideox_case(True, 7), layout, "cogvideox", **more)


def test_lengths_that_do_not_divide() -> None:
    on_ranks(2, anything)


@pytest.mark.slow
def test_four_ranks() -> None:
    on_ranks(4, four)


def orders(rank: int) -> None:
    """A patch made before survives parallelism that came and went; processors may come last."""
    layout = mesh(1, 2)
    animate = wan_family.named("animate")
    for make, inputs in (
        (wan.CASES[0].model, wan.CASES[0].inputs()),
        (animate.model, animate.inputs()),
        cogvideox_case(True, 8),
    ):
        model = make()
        before, author = dicts(model), run(model, **inputs)
        patch_model(model, wan.EXACT)
        patched = run(model, **inputs)
        attach_plan(model)
        enable(model, layout)
        disable_parallelism(model)
        detach_plan(model)
        assert torch.equal(run(model, **inputs), patched)
        unpatch_model(model)
        assert dicts(model) == before
        attach_plan(model)
        enable(model, layout)
        distribute_attention(model)
        assert relative(run(model, **inputs), author) < NEAR
        restore_attention(model)
        disable_parallelism(model)
        detach_plan(model)
        assert torch.equal(run(model, **inputs), author)
        assert dicts(model) == before
        # A processor that somebody set since stays.
        attention = (getattr(model, "blocks", None) or model.transformer_blocks)[0].attn1
        theirs = copy.copy(attention.processor)
        distribute_attention(model)
        attention.processor = theirs
        restore_attention(model)
        assert attention.processor is theirs


def test_orders() -> None:
    on_ranks(2, orders)


def test_a_plan_for_every_family_and_a_word_for_others() -> None:
    for family in wan_family.FAMILIES:
        model = family.model()
        plan = context_parallel_plan(model)
        attach_plan(model)
        assert model._cp_plan == plan
        detach_plan(model)
        assert "_cp_plan" not in vars(model)
    with pytest.raises(ContextParallelError, match="cp_plan of your own"):
        context_parallel_plan(torch.nn.Linear(2, 2))
    with pytest.raises(ContextParallelError, match="got none"):
        disable_parallelism(wan.wan())
