"""int8 weights with a scale per block of 128 x 128, as TurboDiffusion's `Int8Linear` has them.

A block is quantised symmetrically there, to 128 steps of its largest magnitude (the largest itself
saturates at 127; its `quant.hpp`), and multiplied back as int8 * scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbo_rcm_patch.turbodiffusion.keys import BLOCK


def dequantise(int8: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """int8 [Cout, K] times its block's scale, in fp32, rounded once to `dtype`."""
    rows, columns = int8.shape
    result = int8.float()
    for index in range(scale.shape[1]):
        part = result[:, index * BLOCK : min((index + 1) * BLOCK, columns)]
        part *= scale[:, index].float().repeat_interleave(BLOCK)[:rows].unsqueeze(1)
    return result.to(dtype)
