"""The int8 linear on a GPU: Hopper's own kernel. Its accuracy is tested in `tests/ops`, networks
in `test_patching_gpu.py`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.gpu.common import random
from turbo_rcm_patch.ops import quantize_weight
from turbo_rcm_patch.ops.gluon import hopper_function
from turbo_rcm_patch.ops.int8_linear import api
from turbo_rcm_patch.ops.int8_linear import triton as kernel
from turbo_rcm_patch.ops.numerics import quantize_rows

pytestmark = pytest.mark.gpu

SCHEDULES = ("ping-pong-128x128", "cooperative-192x256", "cooperative-128x256")


@pytest.fixture
def own() -> ModuleType:
    """The module of Hopper's own kernel."""
    launcher = hopper_function(api.KERNELS[0].load, "int8 linear")
    if torch.cuda.get_device_capability() != (9, 0) or launcher is None:
        pytest.skip("needs a Hopper GPU and a Triton that can build its kernel")
    return sys.modules[launcher.__module__]


@pytest.mark.parametrize("schedule", [*SCHEDULES, "blocks"])
@pytest.mark.parametrize(
    ("batch", "tokens", "channels", "features", "gelu"),
    [
        pytest.param(1, 1, 16, 32, False, id="one-token"),
        pytest.param(1, 700, 1536, 1536, False, id="plain"),
        pytest.param(1, 9001, 1536, 1536, True, id="several-tiles-a-program"),
        pytest.param(2, 1333, 1544, 1568, False, id="ragged"),
        pytest.param(1, 3000, 8960, 1536, False, id="long"),
        pytest.param(2, 333, 904, 1555, True, id="odd-features"),
    ],
)
def test_hopper_s_own_kernel_gives_the_bits_of_the_portable_one(
    own: Any, schedule: str, batch: int, tokens: int, channels: int, features: int, gelu: bool,
) -> None:  # fmt: skip
    """However the work is cut, the integers are exact and the epilogue is the same arithmetic."""
    x, bias = random(batch, tokens, channels), random(features)
    weight, scale = quantize_weight(random(features, channels))
    if schedule == "blocks":
        shape = (-(-features // 128), -(-channels // 128))
        scale = (torch.rand(shape, device="cuda") + 0.1) / 127 * channels**-0.5
    rows = quantize_rows(x)
    weight = F.pad(weight, (0, rows.data.shape[2] - channels))
    linear = api.LinearInputs(weight, scale, bias, "gelu-tanh" if gelu else "")
    expected = torch.empty(batch, tokens, features, device="cuda")
    kernel.launch_kernel(expected, rows, linear)
    out = torch.full_like(expected, float("nan"))
    own.launch_kernel(out, rows, linear, schedule=own.SCHEDULES.get(schedule))
    assert torch.equal(out, expected)
