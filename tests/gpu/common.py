"""What GPU tests share."""

from __future__ import annotations

from functools import partial

import torch

from tests.implementations import GPU

#: Normal values on the GPU, rounded to `dtype`.
random = partial(GPU.randn, dtype=torch.bfloat16)
skip_without = GPU.skip_without
