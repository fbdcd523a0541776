"""Several ranks compute what one rank does: its bits, or close where sums come in another order.

One table of ways, over ranks on a CPU through gloo, and over two GPUs through NCCL (`make
test-two-gpus`).
"""

from __future__ import annotations

import copy
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers.models.attention_dispatch import attention_backend
from torch import Tensor

from tests.measures import relative_l2
from tests.patching.models import mapped, named, run, wan
from tests.patching.test_symmetric import mapped as mapped_memory
from tests.patching.test_vae import FUSION
from tests.patching.vae import VAE, WAN, WAN_RESIDUAL, conv_in_float64, decode, encode
from tests.ranks import enable_parallelism, on_ranks
from tests.video.micro import SMALL, micro_pipe, micro_video_pipe
from tests.video.micro_cogvideox import micro_cogvideox
from tests.video.test_sources import CASES, UNUSUAL, film
from turbo_rcm_patch import (
    parallel,
    patch_model,
    patched,
    register_backend,
    report_of,
    unpatch_model,
)
from turbo_rcm_patch.diffusers_backend import BACKEND
from turbo_rcm_patch.diffusers_parallel import ONE_CALL, TWO_CALLS
from turbo_rcm_patch.patching import block, measure
from turbo_rcm_patch.patching import vae as patching_vae
from turbo_rcm_patch.patching.find import qualified_name
from turbo_rcm_patch.patching.vae import share
from turbo_rcm_patch.video import generate

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
NCCL = "cpu:gloo,cuda:nccl"
#: fp32 sums in another order, through two blocks.
NEAR = 2e-5
#: int8's scales are those of blocks of keys and of tokens, so they are the same on every rank.
NEAR_INT8 = 5e-3
#: bf16 rounds sums in another order, which decides how some values round to int8.
NEAR_BF16, NEAR_BF16_INT8 = 1e-2, 2e-2


def same_everywhere(x: Tensor) -> bool:
    copies = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, x)
    return all(torch.equal(x, other) for other in copies)


# --- a sequence over ranks -----------------------------------------------------------------------


#: Names of the functions that have gathered.
gathered: list[str] = []


def gather_uneven(outputs: list[Tensor], x: Tensor, group: Any = None) -> None:
    """`all_gather` as NCCL has it. gloo refuses parts of uneven sizes."""
    gathered.append(sys._getframe(1).f_code.co_name)
    for rank, output in enumerate(outputs):
        if rank == dist.get_rank(group):
            output.copy_(x)
        dist.broadcast(output, group_src=rank, group=group)


def model_and_inputs(name: str | int, device: torch.device) -> tuple[Any, list[dict[str, Any]]]:
    """A model of the table, or of so many heads for uneven ranks, and inputs of several sizes."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    if isinstance(name, str):
        model, inputs = named(name).model(), [named(name).inputs(dtype=dtype)]
    else:
        layers = max(1, dist.get_world_size() - 1)
        size = {"num_attention_heads": name, "attention_head_dim": 24, "num_layers": layers}
        model = wan(**size).eval().requires_grad_(False)
        inputs = []
        for width, batch in ((10, 1), (14, 2), (10, 1)):
            noise = torch.randn(
                batch, 4, 3, 6, width, generator=torch.Generator().manual_seed(3)
            ).to(dtype)
            inputs.append(named("t2v").inputs(batch, dtype) | {"hidden_states": noise})
    model = model.to(device, dtype)
    return model, [mapped(one, lambda x: x.to(device)) for one in inputs]


def sequence(
    device: torch.device,
    name: str | int,
    options: dict[str, Any],
    *,
    patch_first: bool = True,
    whole: int = 4096,
    ring: bool = False,
) -> None:
    """A network whose sequence ranks share, by Ulysses or in a ring.

    Args:
        device: Of this rank.
        name: As in `model_and_inputs`.
        options: Of the patch.
        patch_first: Whether the patch comes before the sequence is split.
        whole: Tokens up to which the guard compares all.
        ring: Whether it is a ring.
    """
    ranks, exact = dist.get_world_size(), options["attention"] == "exact"
    uneven = isinstance(name, int)
    degrees = {"ring_degree": ranks} if ring else {"ulysses_degree": ranks}
    (alone, inputs), (shared, _) = (model_and_inputs(name, device) for _ in range(2))
    unpatched = run(alone, inputs[-1])
    patch_model(alone, **options)
    if patch_first:
        patch_model(shared, **options)
    enable_parallelism(shared, **degrees, **({"ulysses_anything": True} if uneven else {}))
    if not patch_first:
        patch_model(shared, **options)
    if device.type == "cpu":
        near, gather = NEAR if exact else NEAR_INT8, gather_uneven if uneven else dist.all_gather
    else:
        near, gather = NEAR_BF16 if exact else NEAR_BF16_INT8, dist.all_gather
    register_backend()
    with (
        mock.patch.object(measure, "_WHOLE", whole),
        mock.patch.object(dist, "all_gather", gather),
        attention_backend(BACKEND) if ring else nullcontext(),
    ):
        for given in inputs:
            gathered.clear()
            expected = run(alone, given)
            with mock.patch.object(block, "compile_ahead") as ahead:
                made = run(shared, given)
            ahead.assert_not_called()  # Ranks would wait for each other in it.
            assert gathered.count("_lengths") == (gather is gather_uneven)
            assert relative_l2(made, expected) <= near
            assert same_everywhere(made)
    report = report_of(shared)
    form = "fused" if options["guard"] else f"fused with {options['attention']} attention"
    assert all(how.startswith(form) for how in report.ran().values())
    assert set(report.ran()) == set(report_of(alone).ran())
    assert f"parallel over {ranks} ranks" in str(report)
    # "auto" and the guard decide by the length that the attention has, not by this rank's part.
    lengths = [b.last for b in report._blocks()]
    assert ring or lengths == [b.last for b in report_of(alone)._blocks()]
    if options is COMPARED:
        kept = [record.path for record in report.guard if record.verdict == "kept"]
        assert set(report.ran()) <= set(kept) and not report.guard.skipped
    unpatch_model(shared)
    if not uneven and device.type == "cpu" and not ring:
        assert relative_l2(run(shared, inputs[-1]), unpatched) <= NEAR


def in_memory(device: torch.device, name: str, options: dict[str, Any]) -> None:
    """Exchanges in symmetric memory give the bits of those through the process group: in inference
    mode and outside, for more samples and for less again."""
    row, outputs = named(name), []
    folder = f"{name} {options}"
    os.makedirs(folder, exist_ok=True)
    for memory in (nullcontext(), mapped_memory(folder)):
        model = row.model()
        patch_model(model, **options)
        enable_parallelism(model, ulysses_degree=dist.get_world_size())
        with memory:
            with torch.inference_mode():
                made = [run(model, row.inputs(1))]
            outputs.append(made + [run(model, row.inputs(batch)) for batch in (2, 1)])
            report = report_of(model)
            assert all(how.startswith("fused") for how in report.ran().values())
            shared = not isinstance(memory, nullcontext)
            assert ("in symmetric memory" in str(report)) == shared
    assert all(map(torch.equal, *outputs))


# --- the two forwards of a step on two groups of ranks -------------------------------------------


PROMPT, STEPS = "a red circle moves left", 3
PIPELINES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "wan": (micro_pipe, {}),
    "wan-experts": (partial(micro_pipe, experts=True), {}),
    "cogvideox": (micro_cogvideox, {}),
    **{name: CASES[name] for name in ("wan-clip", "cogvideox-image", "cogvideox-1.5-image")},
    "wan-video": (micro_video_pipe, {"video": film(5)}),
    **{name: UNUSUAL[name] for name in ("vace", "cogvideox-video")},
}
EXACT: dict[str, Any] = {"attention": "exact", "guard": False}
INT8: dict[str, Any] = {"attention": "int8", "guard": False}
GUARDED: dict[str, Any] = {"attention": "int8", "linear": "int8", "fidelity": 1.0}


def latents(pipe: Any, inputs: dict[str, Any], guidance: float = 5.0, **more: Any) -> Tensor:
    call = {"guidance_scale": guidance, "negative_prompt": "green"}
    if "video" in inputs:
        call |= {"height": SMALL["height"], "width": SMALL["width"], "num_inference_steps": STEPS}
        noise = torch.Generator().manual_seed(0)
        frames: Tensor = pipe(
            prompt=PROMPT, generator=noise, output_type="latent", **inputs, **call
        ).frames
        return frames
    call |= {"sampler": "scheduler", "steps": STEPS, **SMALL, **inputs, **more}
    return generate(pipe, PROMPT, **call).latents


@contextmanager
def counted(pipe: Any) -> Iterator[dict[str, int]]:
    """Count samples that the networks of this rank compute, and exchanges."""
    counts = {"samples": 0, "exchanges": 0}

    def count_samples(_: object, args: Any) -> None:
        counts["samples"] += len(args[0])

    networks = filter(None, (pipe.transformer, getattr(pipe, "transformer_2", None)))
    hooks = [one.proj_out.register_forward_pre_hook(count_samples) for one in networks]
    gather = dist.all_gather

    def count_exchanges(*args: Any, **kwargs: Any) -> Any:
        counts["exchanges"] += 1
        return gather(*args, **kwargs)

    with mock.patch.object(dist, "all_gather", count_exchanges):
        yield counts
    for hook in hooks:
        hook.remove()


@contextmanager
def by_halves(pipe: Any) -> Iterator[None]:
    """One process whose network gets a batch of two one by one. A product of matrices with twice
    the rows adds up in another order, in torch's own Linears too (2.7e-7 in fp32)."""
    whole = pipe.transformer.forward

    def forward(**inputs: Any) -> Any:
        if len(inputs["hidden_states"]) == 1:
            return whole(**inputs)
        names = ("hidden_states", "encoder_hidden_states", "timestep")
        halves = [
            whole(**inputs | {name: inputs[name].chunk(2)[half] for name in names})[0]
            for half in range(2)
        ]
        return (torch.cat(halves),)

    pipe.transformer.forward = forward
    yield
    del pipe.transformer.forward


def guidance(device: torch.device, name: str, options: dict[str, Any] | None) -> None:
    """The bits of one process, for half of its work and one exchange a step."""
    torch.manual_seed(0)
    make, inputs = PIPELINES[name]
    pipe = make().to(device)
    batched = qualified_name(type(pipe)) in ONE_CALL
    if batched and options is GUARDED:  # It sees both halves, and one by one the first alone.
        options = options | {"fidelity": 3.0}
    patch = partial(patched, pipe, **options) if options else nullcontext
    with patch() as report, by_halves(pipe) if batched else nullcontext():
        expected = latents(pipe, inputs)
        forms = report.forms() if report else {}
    before = {*vars(pipe)}
    with patch() as report:
        with parallel(pipe, cfg=2, vae=False), counted(pipe) as counts:  # rows exchange as well
            made = latents(pipe, inputs)
        assert (report.forms() if report else {}) == forms
    assert torch.equal(made, expected) and {*vars(pipe)} == before
    steps = STEPS - 1 if "video" in inputs and "mask" not in inputs else STEPS  # by its strength
    assert counts == {"samples": steps, "exchanges": steps}


# --- the rows of a video's frames ----------------------------------------------------------------


def rows(device: torch.device, vae: VAE, size: Any, tiles: bool = False) -> None:
    """A video decoded by rows, and what does not belong to the group: a copy, the encoder."""
    patching_vae.conv3d = conv_in_float64  # torch's sums on a CPU depend on the height
    alone, model, latent = vae.model(), vae.model(), vae.latent(*size)
    if tiles:
        for one in (alone, model):
            one.enable_tiling(4 * vae.scale, 4 * vae.scale, 3 * vae.scale, 3 * vae.scale)
    patch_model(alone, guard=False)
    expected = decode(alone, latent)
    report = patch_model(model)
    assert share(model, dist.group.WORLD)
    with mock.patch.object(block, "compile_ahead") as ahead:
        made = decode(model, latent)
    ahead.assert_not_called()
    assert torch.equal(made, expected), float((made - expected).abs().max())
    assert "rows over" in report.ran()["decoder"]
    assert [record.verdict for record in report.guard] == ["kept"]
    if dist.get_rank() == 0:  # A copy belongs to this rank alone.
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(decode(other, latent), expected)
        encode(model, vae.frames())
    dist.barrier()
    assert share(model, None)
    if dist.get_rank() == 0:
        assert torch.equal(decode(model, latent), expected)


def rows_with_torchs_convolutions(device: torch.device) -> None:
    model, latent = WAN.model(), WAN.latent(3, 8, 6, 1)
    patch_model(model, guard=False)
    expected = decode(model, latent)
    share(model, dist.group.WORLD)
    assert relative_l2(decode(model, latent), expected) < FUSION


# --- the table -----------------------------------------------------------------------------------


Way = Callable[[torch.device], None]
WITH_GUARD: dict[str, Any] = {"attention": "int8", "guard": True}
COMPARED = WITH_GUARD | {"fidelity": None}
SLA = INT8 | {"sla_topk": 0.5}


def orders(name: str | int) -> list[Way]:
    """Exact and int8, patched before the sequence is split and after."""
    return [
        partial(sequence, name=name, options=options, patch_first=first)
        for options in (EXACT, INT8)
        for first in (True, False)
    ]


def compared(heads: int) -> list[Way]:
    """The guard compares all rows of a sequence, or some."""
    return [partial(sequence, name=heads, options=COMPARED, whole=whole) for whole in (4096, 8)]


def pipelines(*names: str, options: tuple[Any, ...] = (GUARDED,)) -> list[Way]:
    return [partial(guidance, name=name, options=one) for name in names for one in options]


MEMORY = [("t2v", EXACT), ("t2v", EXACT | {"guard": True}), ("t2v", INT8), ("t2v", WITH_GUARD),
          ("sla", SLA)]  # fmt: skip
#: Name -> number of ranks, and the ways that they try one after another.
WAYS: dict[str, tuple[int, list[Way]]] = {
    "ulysses": (2, orders("t2v")),
    "ulysses-image": (2, orders("i2v")[::3]),
    "ulysses-chronoedit": (2, orders("chronoedit")[::3]),
    "ulysses-sla": (2, [partial(sequence, name="sla", options=SLA)]),
    "ulysses-guard": (2, [partial(sequence, name="t2v", options=WITH_GUARD)]),
    "ring": (2, [partial(sequence, name="t2v", options=INT8, ring=True)]),
    "three-heads": (2, orders(3) + compared(3)),
    "one-head": (2, orders(1) + compared(1)),
    "two-heads-on-three": (3, orders(2)),
    "six-heads-on-four": (4, [partial(sequence, name=6, options=INT8)]),
    "memory": (2, [partial(in_memory, name=name, options=options) for name, options in MEMORY]),
    "guidance": (2, pipelines("wan", options=(None, EXACT, GUARDED)) + pipelines("wan-experts")),
    "guidance-batched": (2, pipelines("cogvideox", options=(None, GUARDED))),
    "guidance-others": (2, pipelines(*list(PIPELINES)[3:])),
    "rows": (2, [partial(rows, vae=WAN, size=(3, 8, 6, 1))]),
    "rows-on-three": (3, [partial(rows, vae=WAN, size=(1, 7, 5, 2)),
                          partial(rows, vae=WAN_RESIDUAL, size=(2, 7, 5, 1)),
                          partial(rows, vae=WAN, size=(2, 7, 5, 1), tiles=True),
                          rows_with_torchs_convolutions]),
}  # fmt: skip
#: The same on two GPUs, where sums are in bf16.
ON_GPUS: dict[str, list[Way]] = {
    "ulysses": [partial(sequence, name="t2v", options=options)
                for options in (EXACT, INT8, INT8 | {"linear": "int8"}, WITH_GUARD)],
    "uneven": [partial(sequence, name=3, options=options) for options in (INT8, WITH_GUARD)],
    "ring": WAYS["ring"][1],
    "guidance": pipelines("wan-experts", options=(None, {"attention": "int8"})),
}  # fmt: skip


def try_each(rank: int, name: str, on_gpus: bool, folder: str) -> None:
    torch.set_grad_enabled(False)
    os.chdir(folder)  # where memory is mapped
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    for way in ON_GPUS[name] if on_gpus else WAYS[name][1]:
        try:
            way(device)
        except Exception as error:
            error.add_note(str(way))
            raise


@pytest.mark.supports(
    ("WanTransformer3DModel", "ChronoEditTransformer3DModel"), "context parallel"
)
@pytest.mark.supports(
    ("WanTransformer3DModel", "WanVACETransformer3DModel", "CogVideoXTransformer3DModel"),
    "CFG parallel",
)
@pytest.mark.parametrize("name", WAYS)
def test_ranks_compute_what_one_rank_does(name: str, tmp_path: Path) -> None:
    ranks, _ = WAYS[name]
    on_ranks(ranks, try_each, name, False, os.fspath(tmp_path))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPUS)
def test_two_gpus_compute_what_one_does(name: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    on_ranks(2, try_each, name, True, os.fspath(tmp_path), backend=NCCL)


def test_every_pipeline_of_the_list_is_tried() -> None:
    tried = {qualified_name(type(make())) for make, _ in PIPELINES.values()}
    assert tried == TWO_CALLS | ONE_CALL
