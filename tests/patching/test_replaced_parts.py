"""A module of a block that somebody replaced by another one: every family runs it as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.patching import cogvideox, turbodiffusion, wan, wan_family
from tests.patching.wan import EXACT, dicts, relative
from turbo_rcm_patch import PatchConfig, patched


class Other(nn.Module):
    """What the module does that it replaces, and none of its members."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.held = [module]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.held[0](*args, **kwargs)


def named(cases: Any, name: str) -> Any:
    return next(case for case in cases if case.name == name)


Made = Callable[[], tuple[Any, dict[str, Any], str]]


def of(cases: Any, name: str, blocks: str = "blocks") -> Made:
    case = named(cases, name)
    return lambda: (case.model(), case.inputs(), blocks)


def of_turbodiffusion(image: bool, checkpoint: bool = False) -> Made:
    return lambda: (
        turbodiffusion.tiny(image=image, checkpoint=checkpoint),
        turbodiffusion.tiny_inputs(image=image), "blocks",
    )  # fmt: skip


WAN_PARTS = ("attn1", "attn2", "ffn", "norm1", "norm2", "norm3", "attn1.to_q", "attn2.to_k",
             "attn1.norm_q", "attn2.norm_k", "attn1.to_out.0", "attn2.to_out.1", "attn1 attn2",
             "attn1 attn2 ffn")  # fmt: skip
VACE_PARTS = ("attn1", "attn2", "ffn", "proj_in")
COGVIDEOX_PARTS = ("attn1", "ff", "norm1", "norm2", "attn1.to_q", "attn1.norm_q",
                   "attn1.to_out.0", "attn1.to_out.1", "attn1 ff")  # fmt: skip
TURBO_PARTS = ("self_attn", "cross_attn", "ffn", "norm1", "norm2", "norm3", "self_attn.q",
               "cross_attn.norm_k", "self_attn.o", "self_attn.attn_op", "self_attn cross_attn",
               "")  # fmt: skip
CASES = [
    pytest.param(make, part, id=f"{name}-{part or 'block'}")
    for name, make, parts in (
        ("wan", of(wan.CASES, "2.1-t2v"), WAN_PARTS),
        ("wan-image", of(wan.CASES, "2.1-i2v"), ("attn1", "attn2", "attn2.add_k_proj")),
        ("vace", of(wan_family.FAMILIES, "vace", "vace_blocks"), VACE_PARTS),
        ("skyreels", of(wan_family.FAMILIES, "skyreels-masked"), ("attn1", "attn2", "ffn")),
        ("cogvideox", of(cogvideox.CASES, "5b", "transformer_blocks"), COGVIDEOX_PARTS),
        ("turbodiffusion", of_turbodiffusion(False), TURBO_PARTS),
        ("turbodiffusion-image", of_turbodiffusion(True), ("self_attn", "cross_attn")),
    )
    for part in parts
]  # fmt: skip


@pytest.mark.parametrize(("make", "parts"), CASES)
def test_a_replaced_module_is_left_alone_or_called(make: Made, parts: str) -> None:
    model, inputs, blocks = make()
    # The second, so that the class of a checkout is still recognised by its first block.
    at = 0 if parts == "proj_in" else 1
    for part in parts.split() or [""]:
        path = f"{blocks}.{at}.{part}".rstrip(".")
        model.set_submodule(path, Other(model.get_submodule(path)))
    before = dicts(model)
    with torch.no_grad():
        expected = model(**inputs)
        for config in (EXACT, PatchConfig(attention="exact"), PatchConfig(linear="int8")):
            with patched(model, config) as report:
                made = model(**inputs)
                assert report.fused > 0
                left = [p for p in report.pairs if f"{blocks}.{at}" in p.path]
                whole = [p for p in left if "Other" in p.reason]
                assert whole or part.count(".") or "norm" in part, "the report says why"
            first, second = (x if isinstance(x, torch.Tensor) else x[0] for x in (made, expected))
            assert relative(first, second) < (1e-5 if config.attention == "exact" else 0.1)
    assert dicts(model) == before
