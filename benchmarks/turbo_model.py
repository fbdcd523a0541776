"""TurboDiffusion's own WanModel from a checkout, with seeded random weights and its attentions.

Its CUDA extensions are not needed, and what needs them says so: SageSLA's own forward wants
SpargeAttn. Its rotary embedding comes from flash-attn; without that package plain torch stands in.
On a CPU, which its code does not know, what it would fetch from the GPU is set beforehand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks.clock import Call
from benchmarks.network import GATE_ROWS, LIVE_GATE
from benchmarks.setup import generator
from benchmarks.turbo_exact import exact_sla, projection
from benchmarks.turbo_ways import inner_blocks
from turbo_rcm_patch import ops
from turbo_rcm_patch.errors import ConfigError, MissingPackageError

__all__ = ["Checkout"]

#: Arguments of WanModel of Wan2.1-T2V-1.3B, as its inference script has them.
_SIZES: Final[dict[str, Any]] = {
    "model_type": "t2v", "dim": 1536, "ffn_dim": 8960, "freq_dim": 256, "in_dim": 16,
    "out_dim": 16, "num_heads": 12, "num_layers": 30, "text_len": 512, "eps": 1e-6,
}  # fmt: skip
_MICRO: Final[dict[str, Any]] = {
    "dim": 128, "ffn_dim": 128, "freq_dim": 32, "text_dim": 32, "num_heads": 2, "num_layers": 2,
    "text_len": 9,
}  # fmt: skip
_MODULES: Final = ("rcm.networks.wan2pt1", "rcm.utils.attention", "SLA.core")
_LAYOUTS: Final = {"SLA": "SparseLinearAttention", "SageSLA": "SageSparseLinearAttention"}


class Checkout:
    """A folder with TurboDiffusion's code.

    Args:
        path: The folder whose child is `turbodiffusion/`.

    Raises:
        ConfigError: It is not there, or other code of these names was imported before.
        ImportError: A package that its code needs is missing.
    """

    def __init__(self, path: Path) -> None:
        source = path / "turbodiffusion"
        if not (source / "rcm" / "networks" / "wan2pt1.py").is_file():
            raise ConfigError(
                "--turbodiffusion",
                expected="a folder with turbodiffusion/rcm/networks/wan2pt1.py in it",
                got=str(path),
                remedy="Give the root of a checkout of thu-ml/TurboDiffusion",
            )
        sys.path.insert(0, str(source))
        try:
            modules: list[Any] = [import_module(name) for name in _MODULES]
        finally:
            sys.path.remove(str(source))
        self._network, self._attention, self._sla = modules
        if not Path(self._network.__file__).resolve().is_relative_to(source.resolve()):
            raise ConfigError(
                "--turbodiffusion", expected="one checkout a process", got=self._network.__file__
            )
        self._projections: list[nn.Linear] = []
        #: What stands in for a package of its own that is not installed.
        self.stand_ins: list[str] = []
        if self._network.flash_apply_rotary_emb is None:
            self._network.flash_apply_rotary_emb = _rotary
        if self._network.flash_apply_rotary_emb is _rotary:
            self.stand_ins.append("rotary embedding in plain torch: no flash-attn")
        self.has_sparge = bool(self._sla.SAGESLA_ENABLED)

    def build(self, device: torch.device, seed: int, *, micro: bool) -> Any:
        """The model in bf16 (fp32 on a CPU, where its autocast does nothing), with gates and a
        head that let attention reach the output, and an SLA projection a block, not used yet."""
        config = _SIZES | (_MICRO if micro else {})
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.device(device):
            torch.manual_seed(seed)
            model: Any = self._network.WanModel(**config)
            head_dim = config["dim"] // config["num_heads"]
            for parameter in model.head.parameters():
                if parameter.dim() == 2:
                    nn.init.normal_(parameter, std=config["dim"] ** -0.5)
            for block in inner_blocks(model):
                block.modulation.data[:, list(GATE_ROWS)] += LIVE_GATE
        if device.type == "cpu":
            self._prepare_cpu(model)
        else:
            model = model.to(torch.bfloat16)
        self._projections = [
            projection(head_dim, device, seed + i) for i in range(config["num_layers"])
        ]
        return model.eval().requires_grad_(False)

    def _prepare_cpu(self, model: Any) -> None:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        rope = model.rope_position_embedding
        half = rope._dim_h // 2
        rope.seq = torch.arange(max(rope.max_h, rope.max_w, rope.max_t)).float()
        rope.dim_spatial_range = torch.arange(half) * 2.0 / rope._dim_h
        rope.dim_temporal_range = torch.arange(rope._dim_t // 2) * 2.0 / rope._dim_t
        rope._is_initialized = True
        self._attention._SDPA_CONFIG_CACHE["cpu", None, False] = (
            0, [SDPBackend.MATH], sdpa_kernel,
        )  # fmt: skip

    @contextmanager
    def sparse(self, model: Any, layout: str, topk: float) -> Iterator[None]:
        """Inside, every self-attention is "SLA" (blocks of 128 x 64) or "SageSLA" (the device's
        blocks), with the projections of `build`."""
        before = self._sla.SAGESLA_ENABLED
        changed: list[tuple[Any, Any]] = []
        try:
            # Its constructor asks for SpargeAttn, its structure does not need it.
            self._sla.SAGESLA_ENABLED = True
            for block, proj_l in zip(inner_blocks(model), self._projections, strict=True):
                attn = block.self_attn
                sizes = {"BLKQ": 128, "BLKK": 64} if layout == "SLA" else {}
                kind = getattr(self._sla, _LAYOUTS[layout])
                local = kind(attn.head_dim, topk, **sizes).requires_grad_(False)
                local.proj_l = proj_l
                if proj_l.weight.device.type == "cpu":
                    local.dtype = torch.float32
                changed.append((attn.attn_op, attn.attn_op.local_attn))
                del attn.attn_op.local_attn
                attn.attn_op.local_attn = local
            self._sla.SAGESLA_ENABLED = before
            yield
        finally:
            self._sla.SAGESLA_ENABLED = before
            for op, local in changed:
                del op.local_attn
                op.local_attn = local

    @contextmanager
    def exact(self, model: Any, layout: str, topk: float) -> Iterator[None]:
        """Inside, every self-attention is sparse-linear by its definition, in fp32."""
        with self.sparse(model, layout, topk), ExitStack() as stack:
            for block in inner_blocks(model):
                local = block.self_attn.attn_op.local_attn
                local.forward = _exact_forward(local, layout)
                stack.callback(vars(local).pop, "forward")
            yield

    def require(self, layout: str) -> None:
        """Raise if its own forward of this layout cannot run here."""
        if layout == "SageSLA" and not self.has_sparge:
            raise MissingPackageError(
                "spas_sage_attn",
                expected="SpargeAttn, built for this card",
                got="not installed",
                remedy="SageSLA's own forward needs it",
            )

    @staticmethod
    def call(model: Any, latents: tuple[int, ...], device: torch.device, seed: int) -> Call:
        """One forward of batch 1 at timestep 988."""
        random = generator(device, seed)
        dtype = model.patch_embedding.weight.dtype

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=random, device=device).to(dtype)

        x, text = normal(*latents), normal(1, model.text_len, model.text_dim)
        timesteps = torch.full((1, 1), 988.0, device=device, dtype=dtype)

        def call() -> Tensor:
            output: Tensor = model(x_B_C_T_H_W=x, timesteps_B_T=timesteps, crossattn_emb=text)
            return output

        return call


def _exact_forward(local: Any, layout: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layout == "SageSLA":
            sparsity = ops.Sparsity.sage(local.topk, q.device)
        else:
            sparsity = ops.Sparsity(topk=local.topk, block_q=local.BLKQ, block_k=local.BLKK)
        return exact_sla(q, k, v, local.proj_l, sparsity)

    return forward


def _rotary(x: Tensor, cos: Tensor, sin: Tensor, **_: object) -> Tensor:
    """flash-attn's interleaved rotary embedding of x [B, N, H, D] fp32."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.complex(cos, sin)[None, :, None]).flatten(-2)
