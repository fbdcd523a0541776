"""Several ranks compute what one rank does: its bits, or close where sums come in another order.

One table of ways, over ranks on a CPU through gloo, and over two GPUs through NCCL (`make
test-two-gpus`). What they refuse is at the end of the file; ranks that were given different
things are in `tests/test_ranks_that_differ.py`.
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
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers import FirstBlockCacheConfig
from diffusers.models.attention_dispatch import attention_backend
from torch import Tensor

from tests.measures import relative_l2
from tests.patching.models import mapped, named, run, wan
from tests.patching.test_symmetric import mapped as mapped_memory
from tests.patching.test_vae import FUSION
from tests.patching.vae import VAE, WAN, WAN_RESIDUAL, conv_in_float64, decode, encode
from tests.ranks import enable_parallelism, on_ranks, on_two_gpus
from tests.video.micro import SMALL, micro_pipe, micro_video_pipe, skyreels
from tests.video.micro_cogvideox import micro_cogvideox
from tests.video.test_sources import CASES, UNUSUAL, film
from turbo_rcm_patch import (
    is_patched,
    parallel,
    patch_model,
    patched,
    register_backend,
    report_of,
    unpatch_model,
)
from turbo_rcm_patch.diffusers_backend import BACKEND
from turbo_rcm_patch.diffusers_parallel import ONE_CALL, TWO_CALLS
from turbo_rcm_patch.errors import ContextParallelError, WrappedError
from turbo_rcm_patch.ops.residual import api as residual
from turbo_rcm_patch.patching import block, guard, measure
from turbo_rcm_patch.patching import vae as patching_vae
from turbo_rcm_patch.patching.find import qualified_name
from turbo_rcm_patch.patching.ulysses import PAIR, all_reduce_max
from turbo_rcm_patch.patching.vae import share
from turbo_rcm_patch.video import generate

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
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
            with mock.patch.object(block, "compile_kernels") as ahead:
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
    """Count samples that the networks of this rank compute, exchanges of predictions, and numbers
    that ranks compare."""
    counts = {"samples": 0, "exchanges": 0, "compared": 0}

    def count_samples(_: object, args: Any) -> None:
        counts["samples"] += len(args[0])

    networks = filter(None, (pipe.transformer, getattr(pipe, "transformer_2", None)))
    hooks = [one.proj_out.register_forward_pre_hook(count_samples) for one in networks]

    def counting(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    with (
        mock.patch.object(dist, "all_gather", counting("exchanges", dist.all_gather)),
        mock.patch.object(
            dist, "all_gather_into_tensor", counting("compared", dist.all_gather_into_tensor)
        ),
    ):
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
    compared = steps if batched else 2 * steps
    assert counts == {"samples": steps, "exchanges": steps, "compared": compared}


def guidance_off_and_on(device: torch.device) -> None:
    """Both groups compute the same without guidance; a callback changes the negative prompt."""
    pipe = micro_pipe()
    without, changed = latents(pipe, {}, 1.0), with_another_prompt(pipe)
    with parallel(pipe, cfg=2), counted(pipe) as counts:
        assert torch.equal(latents(pipe, {}, 1.0), without)
        assert counts == {"samples": STEPS, "exchanges": 0, "compared": STEPS}
        assert torch.equal(with_another_prompt(pipe), changed)
    # A step's second call has other inputs than were computed ahead.
    assert counts == {"samples": 2 * STEPS + 1, "exchanges": STEPS, "compared": 3 * STEPS}


def with_another_prompt(pipe: Any) -> Tensor:
    """Latents where a callback changes the negative prompt after the first step."""

    def change(_: Any, step: int, __: Any, values: dict[str, Any]) -> dict[str, Any]:
        return {name: x if step else 2 * x + 1 for name, x in values.items()}

    made: Tensor = pipe(
        prompt=PROMPT, negative_prompt="green", guidance_scale=5.0, num_inference_steps=STEPS,
        generator=torch.Generator().manual_seed(0), output_type="latent", **SMALL,
        callback_on_step_end=change, callback_on_step_end_tensor_inputs=["negative_prompt_embeds"],
    ).frames  # fmt: skip
    return made


def compiled(device: torch.device) -> None:
    pipe = micro_pipe()
    del pipe.transformer.blocks[1]
    expected = latents(pipe, {}, steps=2)
    pipe.transformer.compile(backend="eager")
    with parallel(pipe, cfg=2):
        assert torch.equal(latents(pipe, {}, steps=2), expected)


def both(device: torch.device, patch_first: bool) -> None:
    """Two by two ranks, patched before and after, and what is left of it."""
    pipe = micro_pipe(experts=True)
    networks = (pipe.transformer, pipe.transformer_2)
    alone = latents(pipe, {})
    with patched(pipe, **INT8):
        expected = latents(pipe, {})

    def attributes() -> list[dict[str, set[str]]]:
        return [{name: {*vars(one)} for name, one in net.named_modules()} for net in networks]

    before = attributes()
    if patch_first:
        patch_model(pipe, **INT8)
    together = parallel(pipe, cfg=2, ulysses=2)
    if not patch_first:
        made = latents(pipe, {})
        assert relative_l2(made, alone) < 1e-4 and same_everywhere(made)
        patch_model(pipe, **INT8)
    made = latents(pipe, {})
    assert relative_l2(made, expected) < NEAR_INT8 and same_everywhere(made)
    report = str(report_of(pipe))
    for name in ("transformer", "transformer_2"):
        assert f"{name} on ranks 0, 1, 2, 3: 2 blocks fused with int8 attention" in report
    assert "parallel over 2 ranks" in report
    folder = f"{patch_first}"
    os.makedirs(folder, exist_ok=True)
    with mapped_memory(folder):  # Each pair of ranks has memory of its own, for both networks.
        assert torch.equal(latents(pipe, {}), made)
        assert "in symmetric memory" in str(report_of(pipe))
    undo = [together.undo, partial(unpatch_model, pipe)]
    undo[not patch_first]()
    if patch_first:
        assert torch.equal(latents(pipe, {}), expected)
    undo[patch_first]()
    together.undo()
    assert torch.equal(latents(pipe, {}), alone)
    for were, are in zip(before, attributes(), strict=True):
        assert not patch_first or all(are[name] == were[name] for name in were)


def uneven_heads_of_a_pipeline(device: torch.device) -> None:
    pipe = micro_pipe()
    with pytest.raises(ContextParallelError, match="patch_model first"):
        parallel(pipe, ulysses=3)  # diffusers refuses two heads on three ranks
    with patched(pipe, **INT8):
        expected = latents(pipe, {})
        with mock.patch.object(dist, "all_gather", gather_uneven), parallel(pipe, ulysses=3):
            made = latents(pipe, {})
    assert relative_l2(made, expected) < NEAR_INT8


# --- a fault on one rank -------------------------------------------------------------------------


def decides_alike(device: torch.device, whole: int) -> None:
    """A fault on one rank is seen there, and both decide."""
    row = named("t2v")
    model, inputs = row.model(), row.inputs()
    expected = run(model, inputs)
    report = patch_model(model, attention="int8")
    enable_parallelism(model, ulysses_degree=2)
    right = residual.skip_norm

    def wrong(*args: Any, **named: Any) -> Any:
        x, h = right(*args, **named)
        return x if x is None else x * 2, h

    with (
        mock.patch.object(measure, "_WHOLE", whole),
        mock.patch.object(residual, "skip_norm", right if dist.get_rank() else wrong),
    ):
        made = run(model, inputs)
    assert {record.path for record in report.guard.decisions} == {"blocks.0", "blocks.1"}
    assert relative_l2(made, expected) < 0.02


def predicts_alike(device: torch.device) -> None:
    """The prediction of one rank is far over the target."""
    row = named("t2v")
    model, far = row.model(), (1e-6, 1.0, 1e-6, 0.0)  # the author's, int8, exact, Linears
    report = patch_model(model, attention="int8")
    enable_parallelism(model, ulysses_degree=2)
    alone = mock.patch.object(guard, "shares", lambda *_: far)
    with alone if dist.get_rank() else nullcontext():
        run(model, row.inputs())
    assert report.last_forward == {"fused with exact attention": 2}


def decides_by_the_first_call(device: torch.device) -> None:
    """Of the two calls of a step the guard counts the first one's error, as one process does."""
    block: Any = SimpleNamespace(group=lambda: None, block=torch.nn.Linear(1, 1))
    own = 1.0 + dist.get_rank()
    for first_alone, expected in ((True, [1.0, 2.0]), (False, [2.0, 2.0])):
        before = PAIR.set((dist.group.WORLD, first_alone))
        assert all_reduce_max(block, [own], own) == expected
        PAIR.reset(before)


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
    with mock.patch.object(block, "compile_kernels") as ahead:
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


def rows_of_a_pipeline(device: torch.device, patch_first: bool) -> None:
    patching_vae.conv3d = conv_in_float64
    pipe, call = micro_pipe(), {"sampler": "scheduler", "steps": 1, **SMALL}

    def frames() -> Tensor:
        return generate(pipe, PROMPT, **call).frames

    original = frames()  # The author's code leaves its scratch there.
    before = {*vars(pipe.vae)}
    with patched(pipe, guard=False):
        expected = frames()
    if patch_first:
        patch_model(pipe, guard=False)
    with parallel(pipe, cfg=2):
        if not patch_first:
            patch_model(pipe, guard=False)
        report = report_of(pipe)
        assert torch.equal(frames(), expected)
        assert "rows over 2 ranks" in report.ran()["vae.decoder"]
        unpatch_model(pipe)
        assert torch.equal(frames(), original)
    assert {*vars(pipe.vae)} == before
    with patched(pipe, guard=False) as report, parallel(pipe, cfg=2, vae=False):
        assert torch.equal(frames(), expected)
        assert "rows over" not in report.ran()["vae.decoder"]
    with patched(pipe, guard=False) as report:
        share(pipe.vae, dist.group.WORLD)
        parallel(pipe, cfg=2).undo()
        assert torch.equal(frames(), expected)
        assert "rows over 2 ranks" in report.ran()["vae.decoder"]  # as before


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
    "guidance-off-and-on": (2, [guidance_off_and_on, compiled]),
    "guidance-and-sequence": (4, [partial(both, patch_first=first) for first in (True, False)]),
    "heads-of-a-pipeline": (3, [uneven_heads_of_a_pipeline]),
    "a-fault-of-one": (2, [*(partial(decides_alike, whole=whole) for whole in (4096, 8)),
                           predicts_alike, decides_by_the_first_call]),
    "rows": (2, [partial(rows, vae=WAN, size=(3, 8, 6, 1)),
                 *(partial(rows_of_a_pipeline, patch_first=first) for first in (True, False))]),
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
    # diffusers counts accelerators, of which a CPU machine has none.
    counts = nullcontext() if on_gpus else mock.patch("torch.accelerator.device_count", lambda: 4)
    for way in ON_GPUS[name] if on_gpus else WAYS[name][1]:
        try:
            with counts:
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
    on_two_gpus(try_each, name, True, os.fspath(tmp_path))


def test_every_pipeline_of_the_list_is_tried() -> None:
    tried = {qualified_name(type(make())) for make, _ in PIPELINES.values()}
    assert tried == TWO_CALLS | ONE_CALL


# --- what is refused -----------------------------------------------------------------------------


def refuses(rank: int) -> None:
    def refused(pattern: str, pipe: Any, **degrees: Any) -> None:
        with pytest.raises(ContextParallelError, match=pattern):
            parallel(pipe, **(degrees or {"cfg": 2}))

    pipe = micro_pipe()
    network = pipe.transformer
    shared = parallel(pipe, cfg=2)
    refused("parallel already", pipe)
    network.enable_cache(FirstBlockCacheConfig())
    with pytest.raises(ContextParallelError, match="FirstBlockCacheConfig"):
        latents(pipe, {})
    network.disable_cache()
    over = network.forward
    network.forward = lambda **named: over(**named)
    with pytest.raises(ContextParallelError, match="no other forward than"):
        latents(pipe, {})
    with pytest.raises(WrappedError):
        shared.undo()
    network.forward = over
    shared.undo()
    assert "forward" not in vars(network) and not is_patched(pipe)

    network.enable_cache(FirstBlockCacheConfig())
    refused("no cache; got FirstBlockCacheConfig", pipe)
    network.disable_cache()
    network.forward = lambda **named: None
    refused("cache-dit", pipe)
    refused("4 of one group", micro_pipe(), cfg=2, ulysses=2)
    refused("cfg 1 or 2", micro_pipe(), cfg=3)
    refused("not both 1", micro_pipe(), cfg=1)
    refused("WanVACEPipeline", skyreels())
    refused("a parallel plan in diffusers", micro_cogvideox(), ulysses=2)
    with mock.patch.object(torch.accelerator, "device_count", return_value=0):
        refused("expected a GPU.*Use cfg=2 alone", micro_pipe(), ulysses=2)

    for name in ("three-heads-of-24", "head-dim-128"):  # without ulysses_anything
        model, inputs = named(name).model(), named(name).inputs()
        enable_parallelism(model, ulysses_degree=2)
        with pytest.raises((RuntimeError, ValueError)):
            run(model, inputs)
        with pytest.raises(ContextParallelError, match=r"[13] heads?"):
            patch_model(model, guard=False)
        for options in (EXACT, WITH_GUARD):
            model = named(name).model()
            patch_model(model, **options)
            enable_parallelism(model, ulysses_degree=2)
            for _ in range(2):
                with pytest.raises(ContextParallelError, match=r"ulysses_anything=True"):
                    run(model, inputs)


def test_what_would_go_wrong_is_refused_in_words() -> None:
    on_ranks(2, refuses)
    with pytest.raises(ContextParallelError, match=r"no process group.*torchrun"):
        parallel(micro_pipe(), cfg=2)
    model = named("t2v").model()
    model._parallel_config = SimpleNamespace(context_parallel_config=None)
    with pytest.raises(ContextParallelError, match="without it"):
        patch_model(model)
