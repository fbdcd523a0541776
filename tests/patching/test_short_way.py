"""How much Python and how many launches stand between a block and its kernels, with ceilings.

Counted on a CPU, over launches that are written down: a call counter does not depend on the
machine. Whoever passes a ceiling has made every forward of every user slower.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel

from tests.launches import write_down_launches
from turbo_rcm_patch import PatchConfig, patch_model
from turbo_rcm_patch.patching import patch

WAN = {
    "num_attention_heads": 2, "attention_head_dim": 128, "in_channels": 4, "out_channels": 4,
    "text_dim": 32, "ffn_dim": 512, "freq_dim": 32, "num_layers": 1,
}  # fmt: skip


def calls_of(function: Callable[[], object]) -> tuple[int, int]:
    """Python functions and built-in functions that a call runs."""
    counted: Counter[str] = Counter()

    def profile(frame: object, event: str, arg: object) -> None:
        counted[event] += 1

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return counted["call"], counted["c_call"]


@pytest.mark.parametrize(
    ("options", "python", "builtin", "launches"),
    [
        ({}, 220, 245, 11),
        ({"attention": "exact"}, 220, 245, 10),
        ({"linear": "int8"}, 600, 520, 19),
    ],
    ids=["int8", "exact", "int8-linears"],
)
def test_a_wan_block_takes_few_steps_to_its_kernels(
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    python: int,
    builtin: int,
    launches: int,
) -> None:
    monkeypatch.setattr(patch, "_check_device", lambda *args: None)
    log = write_down_launches(monkeypatch)
    model = WanTransformer3DModel(**WAN).to(torch.bfloat16).eval()
    patch_model(model, PatchConfig(impl="triton", guard=False, **options))
    block = model.blocks[0]
    hidden, context = torch.randn(1, 32, 256), torch.randn(1, 8, 256)
    table = torch.randn(1, 32, 1, 128)
    inputs = (hidden.bfloat16(), context.bfloat16(), torch.randn(1, 6, 256), (table, table + 1))

    def forward() -> None:
        with torch.no_grad():
            block(*inputs)

    for _ in range(4):
        forward()
    log.clear()
    counted = calls_of(forward)
    own = [len(values) for _, _, values in log if all(not hasattr(v, "dtype") for v in values)]
    assert len(own) == len(log) == launches, "every launch is a replay"
    assert counted[0] <= python and counted[1] <= builtin, counted
