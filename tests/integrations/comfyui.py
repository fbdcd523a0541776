"""The nodes as ComfyUI would load them, and stand-ins for the parts of ComfyUI that they touch."""

from __future__ import annotations

import copy
import functools
import importlib.util
import sys
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).parents[2]
NODES = ROOT / "integrations" / "comfyui"


def load_nodes(name: str = "turbo_rcm_comfyui_nodes") -> ModuleType:
    """The folder as a package, under whatever name, as ComfyUI loads custom nodes."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, NODES / "__init__.py", submodule_search_locations=[str(NODES)]
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


class ModelPatcher:
    """How ComfyUI's patcher clones, patches and unpatches: object patches are attributes of one
    shared network while it is loaded; options belong to each clone."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.object_patches: dict[str, Any] = {}
        self.backup: dict[str, Any] = {}
        self.model_options: dict[str, Any] = {"transformer_options": {}}
        self.wrappers: dict[str, Any] = {}

    def clone(self) -> ModelPatcher:
        made = ModelPatcher(self.model)
        made.object_patches = self.object_patches.copy()
        made.backup = self.backup
        made.model_options = copy.deepcopy(self.model_options)
        made.wrappers = self.wrappers.copy()
        return made

    def add_wrapper_with_key(self, kind: str, key: str, wrapper: Any) -> None:
        assert kind == "outer_sample" and key not in self.wrappers
        self.wrappers[key] = wrapper

    def remove_wrappers_with_key(self, kind: str, key: str) -> None:
        self.wrappers.pop(key, None)

    def sample(self, *given: Any) -> Any:
        """One forward as a run of ComfyUI: load, copy the options, wrap, unload."""
        self.patch_model()
        options = copy.deepcopy(self.model_options)["transformer_options"]
        run = self.model.diffusion_model
        for wrapper in self.wrappers.values():
            run = functools.partial(wrapper, run)
        try:
            return run(*given, options)
        finally:
            self.unpatch_model()

    def add_object_patch(self, name: str, value: Any) -> None:
        self.object_patches[name] = value

    def get_model_object(self, name: str) -> Any:
        for table in (self.object_patches, self.backup):
            if name in table:
                return table[name]
        return reduce(getattr, name.split("."), self.model)

    def _set(self, name: str, value: Any) -> Any:
        owner, _, last = name.rpartition(".")
        found = reduce(getattr, owner.split("."), self.model)
        old = getattr(found, last)
        setattr(found, last, value)
        return old

    def patch_model(self) -> None:
        for name, value in self.object_patches.items():
            old = self._set(name, value)
            self.backup.setdefault(name, old)

    def unpatch_model(self) -> None:
        for name, value in self.backup.items():
            self._set(name, value)
        self.backup.clear()


def attention_pytorch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    mask: torch.Tensor | None = None,
    attn_precision: torch.dtype | None = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """The attention that ComfyUI's `optimized_attention` computes."""
    if not skip_reshape:
        dim = q.shape[-1] // heads
        q, k, v = (x.reshape(len(x), x.shape[1], -1, dim).transpose(1, 2) for x in (q, k, v))
    if mask is not None:
        mask = mask[:, None] if mask.dim() == 3 else mask
    more = {name: kwargs[name] for name in ("scale", "enable_gqa") if name in kwargs}
    out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **more)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def optimized_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Goes through the override of the model's options, as ComfyUI's decorator does."""
    options = kwargs.get("transformer_options") or {}
    override = options.get("optimized_attention_override")
    if override is not None and "_inside_attn_wrapper" not in kwargs:
        return override(attention_pytorch, *args, _inside_attn_wrapper=True, **kwargs)
    return attention_pytorch(*args, **kwargs)


class WanSelfAttention(nn.Module):
    """With the members, the arithmetic and the rotary layout of ComfyUI's class of that name."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, dim // heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = (nn.RMSNorm(dim, eps=1e-6) for _ in range(2))

    def forward(
        self, x: torch.Tensor, freqs: torch.Tensor, transformer_options: dict[str, Any]
    ) -> torch.Tensor:
        q, k = (
            rotated(norm(linear(x)).unflatten(2, (self.num_heads, -1)), freqs).flatten(2)
            for linear, norm in ((self.q, self.norm_q), (self.k, self.norm_k))
        )
        out = optimized_attention(
            q, k, self.v(x), heads=self.num_heads, transformer_options=transformer_options
        )
        return self.o(out)


def rotated(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """freqs [1, N, 1, D / 2, 2, 2]: a matrix for each pair of channels."""
    pairs = x.float().unflatten(-1, (-1, 1, 2))
    return (freqs * pairs).sum(-1).flatten(-2).type_as(x)


def frequencies(tokens: int, head_dim: int) -> torch.Tensor:
    angle = torch.rand(1, tokens, 1, head_dim // 2) * 6.0
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([cos, -sin, sin, cos], -1).unflatten(-1, (2, 2))


class Block(nn.Module):
    """Self-attention, and cross-attention through `optimized_attention`."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.self_attn = WanSelfAttention(dim, heads)

    def forward(
        self, x: torch.Tensor, freqs: torch.Tensor, text: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        x = x + self.self_attn(x, freqs, transformer_options=options)
        return x + optimized_attention(x, text, text, self.heads, transformer_options=options)


class Wan(nn.Module):
    """A few blocks."""

    def __init__(self, dim: int = 256, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))

    def forward(
        self, x: torch.Tensor, freqs: torch.Tensor, text: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, freqs, text, options)
        return x


class Model(nn.Module):
    """The module of a patcher, with the network under `diffusion_model`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.diffusion_model = Wan()
        for block in self.diffusion_model.blocks:
            attn = block.self_attn
            attn.norm_q.weight.data.uniform_(1.0, 3.0)
            attn.norm_k.weight.data.uniform_(0.5, 1.5)
        self.eval().requires_grad_(False)
