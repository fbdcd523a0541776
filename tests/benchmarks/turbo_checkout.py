"""A folder laid out as a checkout of TurboDiffusion, whose modules are the stand-ins of
tests/patching/turbodiffusion.py behind the real constructors and the real forward."""

from __future__ import annotations

from pathlib import Path

__all__ = ["write_checkout"]

_NETWORK = """
import torch
from torch import nn

from tests.patching import turbodiffusion as stand_in
from tests.patching.turbodiffusion import WanAttentionBlock

flash_apply_rotary_emb = None


class Rope(nn.Module):
    max_h = max_w = max_t = 8
    _dim_h, _dim_t = 20, 24


class WanModel(stand_in.WanModel):
    def __init__(self, *, model_type, dim, ffn_dim, freq_dim, in_dim, out_dim, num_heads,
                 num_layers, text_len, text_dim, eps):
        super().__init__(dim=dim, num_heads=num_heads, layers=num_layers)
        self.text_len, self.text_dim = text_len, text_dim
        self.text_embedding = nn.Linear(text_dim, dim)
        self.rope_position_embedding = Rope()

    def forward(self, x_B_C_T_H_W, timesteps_B_T, crossattn_emb):
        e = (timesteps_B_T / 1000).expand(1, 6 * self.dim).reshape(1, 6, self.dim) * 0.1
        tokens = x_B_C_T_H_W[..., ::2, ::2].flatten(2).transpose(1, 2)
        return super().forward(tokens, e, self.text_embedding(crossattn_emb))
"""
_SLA = """
from tests.patching import turbodiffusion as stand_in
from tests.patching.turbodiffusion import SparseLinearAttention

SAGESLA_ENABLED = False


class SageSparseLinearAttention(stand_in.SageSparseLinearAttention):
    def __init__(self, head_dim, topk):
        assert SAGESLA_ENABLED
        super().__init__(head_dim, topk)
"""
_FILES = {
    "rcm/networks/wan2pt1.py": _NETWORK,
    "rcm/utils/attention.py": "_SDPA_CONFIG_CACHE = {}\n",
    "SLA/core.py": _SLA,
}


def write_checkout(folder: Path) -> Path:
    """Write it into a folder and give the folder back."""
    for name, text in _FILES.items():
        path = folder / "turbodiffusion" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
