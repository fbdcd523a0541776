"""`network --only turbo-1.3b`: a forward of Wan2.1-1.3B with sparse-linear attention (SLA).

In two classes: TurboDiffusion's own WanModel from a checkout, and diffusers' Wan transformer with
SLA's projection attached. Each patched variant is checked against its own attention by definition
in fp32: full attention, SLA with blocks of 128 x 64, or SageSLA with the device's blocks.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import runner
from benchmarks.measure import Call, errors_of, generator, reason_of
from benchmarks.networks import (
    GATE_ROWS,
    LIVE_GATE,
    build_wan,
    compiled,
    in_turn,
    patched_with,
    sizes_of,
    time_variant,
    tokens_of,
    wan_call,
)
from benchmarks.runner import PEAK, REL_L2, Column, Enter, Journal, Plan, Record, Variant
from turbo_rcm_patch import ops
from turbo_rcm_patch.errors import ConfigError, MissingPackageError
from turbo_rcm_patch.ops.sparse_reference import block_map, linear_branch
from turbo_rcm_patch.patching.int8_weights import attach_int8, detach_int8
from turbo_rcm_patch.patching.sla import attach_proj_l, detach_proj_l
from turbo_rcm_patch.turbodiffusion.blocks import dequantise

CASE: Final = "turbo-1.3b"
#: Wanted milliseconds of a forward on an H200 at 32,760 tokens and top-k 0.1.
AIMS: Final = {"16-bit linears": 190.0, "int8 linears": 150.0}
#: Relative L2 from which a variant is broken and is not timed; and from which one with full
#: attention is wrong. A sparse one is wrong from the distance to full attention on.
_BROKEN: Final = 0.5
_WRONG: Final = 0.2
#: Share of the distance to full attention within which a sparse one is right: rounding moves a
#: full one by some percent of it, to either side.
_NEARER: Final = 0.9
_LATENTS: Final = (1, 16, 21, 60, 104)
_MICRO_LATENTS: Final = (1, 16, 3, 20, 20)
_COLUMNS: Final = (
    Column("model", 10), Column("variant", 29), *runner.times(digits=2), PEAK, REL_L2,
)  # fmt: skip


def methods() -> list[str]:
    """Names for `--peers`."""
    ways = patched_ways(dict.fromkeys(_LAYOUTS, runner.as_written))
    return ["eager", "eager SLA", "eager SageSLA", *(way.name for way in ways)]


def run(plan: Plan) -> int:
    """Measure and write `network_turbo.json`; 0 if what is ours was right."""
    topk = 0.5 if plan.micro else 0.1
    wanted = runner.chosen("--peers", plan.peers, methods())
    if plan.quick and not plan.peers:
        wanted = [name for name in wanted if "compiled" not in name]
    journal = Journal(
        "network_turbo",
        plan,
        _COLUMNS,
        about={
            "network": "Wan2.1-T2V-1.3B, seeded random weights in bf16, batch 1, 480p, 81 frames; "
            "SLA's proj_l random",
            "topk": topk,
            "SLA": "blocks of 128 queries and 64 keys",
            "SageSLA": "blocks of 64 and 128 on Hopper, 128 and 64 elsewhere",
            "checkpoint int8": "int8 weights with a scale per block of 128 x 128, made from the "
            "random ones",
            "error": "to the same attention by definition in fp32, all else in the model's dtype",
            "of_full_attention": "relative L2 of full attention to the definition; the error of a "
            "sparse variant is less, or it fails",
            "groups": "milliseconds in kernels of one forward, grouped by their names",
            "aims": AIMS,
        },
    )
    # What takes long to compile comes after everything else, of both classes.
    passes = [[one for one in wanted if ("compiled" in one) == late] for late in (False, True)]
    truths: dict[str, dict[str, Tensor]] = {WanModelClass.name: {}, DiffusersClass.name: {}}
    good = True
    with journal.running():
        for names in filter(None, passes):
            for cls in (WanModelClass, DiffusersClass):
                if not journal.late(f"{cls.name}: {', '.join(names)}"):
                    good &= _case(cls, names, truths[cls.name], topk, journal)
                    runner.free(journal.device)
    return 0 if good else 1


@torch.no_grad()
def _case(
    cls: type[WanModelClass] | type[DiffusersClass],
    wanted: Sequence[str],
    truths: dict[str, Tensor],
    topk: float,
    journal: Journal,
) -> bool:
    """Some variants of a network of one class; what was measured of it before is kept."""
    plan, device, name = journal.plan, journal.device, cls.name
    record = journal.cases.setdefault(name, {"variants": {}})
    if "reason" in record:
        return True  # It was reported.
    latents = _MICRO_LATENTS if plan.micro else _LATENTS
    try:
        made = cls(plan)
        model = made.build(device, plan.seed, micro=plan.micro)
        calls = [made.call(model, latents, device, plan.seed + i) for i in range(2)]
        eager = calls[0]()
    except Exception as error:  # e.g. no checkout, or a package of its own is missing
        record.update(status="missing", reason=reason_of(error))
        journal.line((name, "", f"left out: {reason_of(error)}"))
        journal.case(name, record)
        return isinstance(error, ConfigError) and plan.turbodiffusion is None
    record |= {
        "parameters": sum(p.numel() for p in model.parameters()),
        "latents": list(latents),
        "tokens": tokens_of(latents),
        "finite": bool(eager.isfinite().all()),
        **made.about,
    }

    def measure(way: Variant, one: Record) -> None:
        layout = next((one for one in ("SageSLA", "SLA") if one in way.name.split()), "")
        if layout not in truths:
            with made.truth(model, layout, topk):
                truths[layout] = calls[0]()
            reach[layout] = errors_of(eager, truths[layout])["relative_l2"]
        far = reach.get(layout)
        effort = plan.effort(math.inf, 7, quick=(math.inf, 3), least=1)
        time_variant(
            way, one, model, calls, functools.partial(errors_of, truth=truths[layout]), journal,
            effort, wrong=_WRONG if far is None else min(_BROKEN, _NEARER * far),
            beside="" if far is None else f", full attention is at {far:.3g}",
        )  # fmt: skip

    truths[""] = eager
    reach = record.setdefault("of_full_attention", {})
    good = runner.one_by_one(
        journal, name, record, [one for one in made.variants(topk) if one.name in wanted], measure
    )
    record["best"] = _best(name, record["variants"], micro=plan.micro)
    record["equal_afterwards"] = same = torch.equal(calls[0](), eager)
    journal.case(name, record)
    return good and same


def _best(model: str, found: Record, *, micro: bool) -> Record:
    """Our fastest sparse forward with 16-bit and with int8 linears, against the aims."""
    best: Record = {}
    for kind, aim in AIMS.items():
        times = {
            name: float(one["milliseconds"]["median"])
            for name, one in found.items()
            if name.startswith("patched S") and ("int8" in name.split()) == ("int8" in kind)
            if one["status"] == "timed"
        }
        if not times:
            continue
        name, least = min(times.items(), key=lambda item: item[1])
        best[kind] = {"variant": name, "milliseconds": least}
        if not micro:
            best[kind] |= {"aim": aim, "met": least <= aim}
            print(f"{model}, {kind}: {least:.0f} ms ({name}); aim {aim:.0f} ms")
    return best


def patched_ways(sparse: Mapping[str, Enter], **fields: Any) -> list[Variant]:
    """Patched with full attention, and with each sparse layout; compiled ones last.

    Args:
        sparse: Layout -> what makes the network's attention sparse.
        fields: Of PatchConfig, where it is sparse.
    """
    early = [Variant("patched", patched_with(), ours=True)]
    late: list[Variant] = []
    for layout, enter in sparse.items():
        name = f"patched {layout}"
        plain = in_turn(enter, patched_with(**fields))
        int8 = in_turn(enter, patched_with(linear="int8", **fields))
        brought = in_turn(enter, block_weights, patched_with(linear="int8", **fields))
        early += [
            Variant(name, plain, ours=True, profiled=True),
            Variant(f"{name} int8", int8, ours=True, profiled=True),
            Variant(f"{name} checkpoint int8", brought, ours=True, profiled=True),
        ]
        if layout == "SageSLA":  # SLA would compile the same graphs again
            late += [
                Variant(f"{name} compiled", in_turn(plain, compiled), ours=True),
                Variant(f"{name} int8 compiled", in_turn(int8, compiled), ours=True),
            ]
    return early + late


# --- diffusers' class ----------------------------------------------------------------------------


class DiffusersClass:
    """diffusers' own class with SLA's projection attached, as a converted checkpoint has it.

    It has no SLA: unpatched it runs full attention.

    Args:
        plan: What was asked for.
    """

    name: Final = "diffusers"

    def __init__(self, plan: Plan) -> None:
        self._sizes = sizes_of(plan)
        self._projections: list[nn.Linear] = []
        self.about: Record = {}

    def build(self, device: torch.device, seed: int, *, micro: bool) -> Any:
        """The model in bf16 with live gates, and a random projection a block, not used yet."""
        network = build_wan(self._sizes.network, device, seed)
        for block in network.blocks:
            block.scale_shift_table.data[:, list(GATE_ROWS)] += LIVE_GATE
        first = network.blocks[0].attn1
        head_dim = first.to_q.out_features // first.heads
        self._projections = [
            projection(head_dim, device, seed + i) for i in range(len(network.blocks))
        ]
        return network

    def call(self, model: Any, latents: Sequence[int], device: torch.device, seed: int) -> Call:
        """One forward of batch 1 at timestep 988."""
        return wan_call(model, latents, self._sizes.text_tokens, device, seed)

    @contextmanager
    def truth(self, model: Any, layout: str, topk: float) -> Iterator[None]:
        """Inside, every self-attention is sparse-linear by its definition, in fp32."""
        before = [block.attn1.processor for block in model.blocks]
        try:
            for block, one in zip(model.blocks, self._projections, strict=True):
                sparsity = ops.Sparsity.sage(topk, one.weight.device)
                block.attn1.processor = functools.partial(_exact_processor, one, sparsity)
            yield
        finally:
            for block, processor in zip(model.blocks, before, strict=True):
                block.attn1.processor = processor

    @contextmanager
    def _attached(self, model: Any, backend: str) -> Iterator[None]:
        for block, one in zip(model.blocks, self._projections, strict=True):
            attach_proj_l(block.attn1, one.weight, one.bias)
        try:
            yield
        finally:
            for block in model.blocks:
                detach_proj_l(block.attn1)

    def variants(self, topk: float) -> list[Variant]:
        """Every way, the long compilations last."""
        return [
            Variant("eager", profiled=True),
            *patched_ways({"SageSLA": self._attached}, sla_topk=topk),
        ]


def _exact_processor(
    proj_l: nn.Linear,
    sparsity: ops.Sparsity,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    rotary_emb: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """A processor of diffusers' Wan attention: its projections, norms and rotary embedding, and
    SLA by definition."""
    assert rotary_emb is not None and encoder_hidden_states is None
    q, k = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
    v = attn.to_v(hidden_states)
    q, k, v = (x.view(*x.shape[:2], attn.heads, -1) for x in (q, k, v))
    q, k = (_rotated(x, *rotary_emb) for x in (q, k))
    out = exact_sla(q, k, v, proj_l, sparsity).flatten(2)
    projected: Tensor = attn.to_out[1](attn.to_out[0](out))
    return projected


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, N, H, D]; cos and sin [1, N, 1, D], each angle twice."""
    even, odd = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
    cos, sin = cos[..., 0::2].float(), sin[..., 1::2].float()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).type_as(x)


# --- TurboDiffusion's class ----------------------------------------------------------------------

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


class WanModelClass:
    """TurboDiffusion's own WanModel from a checkout, with seeded random weights.

    Its CUDA extensions are not needed, and what needs them says so: SageSLA's own forward wants
    SpargeAttn. Its rotary embedding comes from flash-attn; without that package plain torch stands
    in. On a CPU, which its code does not know, what it would fetch from the GPU is set beforehand.

    Args:
        plan: What was asked for, with the checkout: the folder whose child is `turbodiffusion/`.

    Raises:
        ConfigError: It is not there, or other code of these names was imported before.
        ImportError: A package that its code needs is missing.
    """

    name: Final = "WanModel"

    def __init__(self, plan: Plan) -> None:
        path = plan.turbodiffusion
        if path is None:
            raise ConfigError(
                "--turbodiffusion",
                expected="a checkout of thu-ml/TurboDiffusion",
                got="none",
                remedy="Give its folder to time its own WanModel",
            )
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
        if self._network.flash_apply_rotary_emb is None:
            self._network.flash_apply_rotary_emb = _rotary
        stands_in = self._network.flash_apply_rotary_emb is _rotary
        #: What stands in for a package of its own that is not installed.
        self.about: Record = {
            "stand_ins": ["rotary embedding in plain torch: no flash-attn"] * stands_in
        }
        self._has_sparge = bool(self._sla.SAGESLA_ENABLED)

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
            for block in _inner_blocks(model):
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

    def call(self, model: Any, latents: Sequence[int], device: torch.device, seed: int) -> Call:
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

    @contextmanager
    def sparse(self, model: Any, layout: str, topk: float) -> Iterator[None]:
        """Inside, every self-attention is "SLA" (blocks of 128 x 64) or "SageSLA" (the device's
        blocks), with the projections of `build`."""
        before = self._sla.SAGESLA_ENABLED
        changed: list[tuple[Any, Any]] = []
        try:
            # Its constructor asks for SpargeAttn, its structure does not need it.
            self._sla.SAGESLA_ENABLED = True
            for block, proj_l in zip(_inner_blocks(model), self._projections, strict=True):
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
    def truth(self, model: Any, layout: str, topk: float) -> Iterator[None]:
        """Inside, every self-attention is sparse-linear by its definition, in fp32."""
        with self.sparse(model, layout, topk), ExitStack() as stack:
            for block in _inner_blocks(model):
                local = block.self_attn.attn_op.local_attn
                local.forward = _exact_forward(local, layout)
                stack.callback(vars(local).pop, "forward")
            yield

    def variants(self, topk: float) -> list[Variant]:
        """Every way, the long compilations last."""
        sparse = {layout: self._entering(layout, topk) for layout in _LAYOUTS}
        return [
            Variant("eager", profiled=True),
            Variant("eager SLA", sparse["SLA"], profiled=True),
            Variant("eager SageSLA", in_turn(self._needs_sparge, sparse["SageSLA"])),
            *patched_ways(sparse),
        ]

    def _entering(self, layout: str, topk: float) -> Enter:
        return lambda model, backend: self.sparse(model, layout, topk)

    @contextmanager
    def _needs_sparge(self, model: Any, backend: str) -> Iterator[None]:
        if not self._has_sparge:
            raise MissingPackageError(
                "spas_sage_attn",
                expected="SpargeAttn, built for this card",
                got="not installed",
                remedy="SageSLA's own forward needs it",
            )
        yield


def _inner_blocks(model: Any) -> list[Any]:
    """Its blocks, out of torch's activation checkpointing."""
    return [getattr(block, "_checkpoint_wrapped_module", block) for block in model.blocks]


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


# --- SLA by its definition, and int8 weights such as a checkpoint brings along -------------------

#: Blocks of an int8 weight that share a scale, and the steps of its largest magnitude.
_BLOCK, _STEPS = 128, 128


def projection(head_dim: int, device: torch.device, seed: int) -> nn.Linear:
    """SLA's proj_l in fp32, which starts at zero, with seeded random values instead."""
    linear = nn.Linear(head_dim, head_dim, device=device).requires_grad_(False)
    for parameter in linear.parameters():
        parameter.normal_(std=head_dim**-0.5, generator=generator(device, seed))
    return linear


def exact_sla(
    q: Tensor, k: Tensor, v: Tensor, proj_l: nn.Linear, sparsity: ops.Sparsity
) -> Tensor:
    """softmax(q k^T) v over the chosen blocks plus proj_l of the linear branch, in fp32.

    `ops.sparse_reference` does this block by block; here all blocks of queries of a head go
    together, which a forward of 30 layers needs. The choice of blocks is the reference's.

    Args:
        q: [B, N, H, D], normalised and rotated, any float dtype, which the block map rounds to.
        k: [B, N, H, D], likewise.
        v: [B, N, H, D].
        proj_l: [D, D] and its bias.
        sparsity: Share of key blocks and the sizes of blocks.

    Returns:
        [B, N, H, D], dtype of q.
    """
    dtype, tokens = q.dtype, k.shape[1]
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    size, width = sparsity.block_q, sparsity.block_k
    out = linear_branch(q, k, v, proj_l.weight, proj_l.bias, dtype=torch.float32)
    padding = -q.shape[2] % size
    within = torch.arange(width, device=q.device)
    for batch in range(q.shape[0]):
        for head in range(q.shape[1]):
            one = slice(batch, batch + 1), slice(head, head + 1)
            blocks = block_map(
                q[one], k[one], count=sparsity.count(tokens), block_q=size, block_k=width,
                dtype=dtype,
            )[0, 0]  # fmt: skip
            keys = (blocks[..., None] * width + within).flatten(1)
            absent = (keys >= tokens)[:, None]
            keys = keys.clamp(max=tokens - 1)
            rows = F.pad(q[batch, head], (0, 0, 0, padding)).view(-1, size, q.shape[3])
            logits = rows @ k[batch, head][keys].transpose(1, 2) * q.shape[3] ** -0.5
            weights = logits.masked_fill_(absent, float("-inf")).softmax(-1)
            sparse = (weights @ v[batch, head][keys]).flatten(0, 1)
            out[batch, head] += sparse[: q.shape[2]]
    return out.transpose(1, 2).to(dtype)


def quantised_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight in int8 with a scale per block of 128 x 128, as `Int8Linear` of TurboDiffusion.

    Args:
        weight: [Cout, K], any float dtype.

    Returns:
        int8 [Cout, K] and fp32 [ceil(Cout / 128), ceil(K / 128)].
    """
    rows, columns = weight.shape
    padded = F.pad(weight.detach().float(), (0, -columns % _BLOCK, 0, -rows % _BLOCK))
    down, across = (size // _BLOCK for size in padded.shape)
    blocks = padded.view(down, _BLOCK, across, _BLOCK)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-30) / _STEPS
    steps = (blocks / scale[:, None, :, None]).round().clamp(-_STEPS, _STEPS - 1)
    int8 = steps.flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return int8.to(torch.int8).contiguous(), scale


@contextmanager
def block_weights(network: Any, backend: str) -> Iterator[None]:
    """Inside, the Linears of the blocks hold int8 weights with a scale per 128 x 128, and are
    about their product; afterwards they are as before."""
    before: list[tuple[Any, Tensor]] = []
    try:
        for name, linear in network.blocks.named_modules():
            if type(linear) is not nn.Linear or "proj_l" in name:
                continue
            # Not on the device, whose peak memory is measured.
            before.append((linear, linear.weight.data.to("cpu", copy=True)))
            int8, scale = quantised_blocks(linear.weight)
            linear.weight.data.copy_(dequantise(int8, scale, linear.weight.dtype))
            attach_int8(linear, int8, scale)
        yield
    finally:
        for linear, weight in before:
            detach_int8(linear)
            linear.weight.data.copy_(weight)
