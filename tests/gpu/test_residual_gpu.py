"""Skips and norms on a GPU: offsets past 32 bits. Their accuracy is tested in `tests/ops`."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.common import random
from turbo_rcm_patch import ops

pytestmark = pytest.mark.gpu


def test_offsets_that_pass_32_bits() -> None:
    """200,000 tokens of 12,288 channels are 2.5e9 elements: only an int64 reaches the last ones.
    One kernel of each family, compared over the last rows."""
    free, _ = torch.cuda.mem_get_info()
    n, channels = 200_000, 12_288
    if free < 6 * 2 * n * channels:
        pytest.skip("too little free memory")
    x = torch.empty(1, n, channels, dtype=torch.bfloat16, device="cuda").normal_()
    gate, last = random(1, 1, channels), slice(n - 300, n)
    for run_it in (
        lambda s: ops.skip(x[:, s], x[:, s], 0.5, gate),
        lambda s: ops.norm_modulate(x[:, s], scale=gate, shift=gate),
        lambda s: ops.norm_modulate_rows(x[:, s], scale=gate).data,
    ):
        assert torch.equal(run_it(slice(None))[:, last], run_it(last))
