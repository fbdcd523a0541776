"""Ranks that differ raise one error on all of them within seconds, whatever differs and whenever.

Every row deviates on rank 1 alone, on the second video of a process. After the error, all ranks
make the next video as one process does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers import CogVideoXDPMScheduler, FlowMatchEulerDiscreteScheduler
from peft import LoraConfig
from torch import Tensor
from torch.nn.parallel import replicate

from tests.measures import relative_l2
from tests.patching.models import named
from tests.patching.test_threads import together
from tests.patching.vae import WAN, conv_in_float64, decode
from tests.ranks import on_ranks
from tests.test_several_ranks import counted
from tests.video.micro import SMALL, micro_pipe
from tests.video.micro_cogvideox import micro_cogvideox
from turbo_rcm_patch import parallel, patch_model, report_of, unpatch_model
from turbo_rcm_patch.errors import ContextParallelError
from turbo_rcm_patch.patching import vae as patching_vae
from turbo_rcm_patch.patching.block import Level
from turbo_rcm_patch.patching.record import record_of
from turbo_rcm_patch.patching.vae import share

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")

Call = dict[str, Any]
EXACT: dict[str, Any] = {"attention": "exact", "guard": False}
#: Seconds until an error, on a machine with other work.
LIMIT = 60.0
on_two = partial(on_ranks, 2, timeout=timedelta(seconds=1.5 * LIMIT))


def call(seed: int = 0, **more: Any) -> Call:
    return {
        "prompt": "a red circle moves left", "negative_prompt": "green", "guidance_scale": 5.0,
        "num_inference_steps": 3, "generator": torch.Generator().manual_seed(seed),
        "output_type": "latent", **SMALL,
    } | more  # fmt: skip


def latents() -> Tensor:
    return torch.randn(1, 4, 2, 4, 4, generator=torch.Generator().manual_seed(0))


def swapped(x: Tensor) -> Tensor:
    """The same numbers in another order; the first one and their sum stay."""
    flat = x.clone().flatten()
    flat[[1, -1]] = flat[[-1, 1]]
    return flat.view(x.shape)


# --- what rank 1 does otherwise ------------------------------------------------------------------


def given(**more: Any) -> Callable[[Any, Call], None]:
    """Other arguments of the pipeline."""
    return lambda pipe, call: call.update(more)


def with_latents(change: Callable[[Tensor], Tensor]) -> Callable[[Any, Call], None]:
    return lambda pipe, call: call.update(latents=change(call["latents"]))


def after_a_step(change: Callable[[Any, Call], object], name: str = "latents") -> Any:
    """A callback that changes something after the first step."""

    def deviate(pipe: Any, call: Call) -> None:
        def callback(pipe: Any, step: int, _: object, values: Call) -> Call:
            if step == 0:
                change(pipe, values)
            return values

        call.update(callback_on_step_end=callback, callback_on_step_end_tensor_inputs=[name])

    return deviate


def stops_between_two_calls(pipe: Any, call: Call) -> None:
    """An error between the calls of the second step, after which a server takes the next video."""
    with failing_at("uncond", 2, pipe), pytest.raises(ZeroDivisionError):
        pipe(**call)


@contextmanager
def failing_at(name: str, count: int, pipe: Any) -> Iterator[None]:
    """A pipeline that fails where it begins a call of its network for the nth time."""
    context, seen = pipe.transformer.cache_context, []

    def cache_context(call: str, **more: Any) -> Any:
        seen.append(call)
        if seen.count(name) == count:
            raise ZeroDivisionError
        return context(call, **more)

    with mock.patch.object(pipe.transformer, "cache_context", cache_context):
        yield


def other_weights(pipe: Any, call: Call, network: str = "transformer") -> None:
    """Another weight of one Linear, but for its first element."""
    weights = [x for x in getattr(pipe, network).parameters() if x.dim() == 2]
    weights[-3].data.flatten()[1:] *= 1.01


def other_adapter(pipe: Any, call: Call) -> None:
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))


def other_scale(pipe: Any, call: Call) -> None:
    pipe.transformer.set_adapters(["default"], [0.5])


def other_patch(pipe: Any, call: Call, **options: Any) -> None:
    unpatch_model(pipe)
    if options:
        patch_model(pipe, **options)


def other_level(pipe: Any, call: Call) -> None:
    report_of(pipe)._blocks()[1].raise_level(Level.EXACT, "a test")


Row = tuple[str, Callable[[Any, Call], object], Call]
#: Name -> what the error names, what rank 1 does, and arguments of all ranks.
DEVIATIONS: dict[str, Row] = {
    "seed": ("hidden_states", given(generator=torch.Generator().manual_seed(1)), {}),
    "prompt": ("encoder_hidden_states", given(prompt="a blue square"), {}),
    "prompt-length": ("encoder_hidden_states", given(max_sequence_length=12), {}),
    "negative-prompt": ("encoder_hidden_states", given(negative_prompt="black"), {}),
    "no-guidance": ("guidance_scale", given(guidance_scale=1.0), {}),
    "guidance": ("guidance_scale", given(guidance_scale=5.5), {}),
    "steps": ("timesteps", given(num_inference_steps=4), {}),
    "fewer-steps": ("timesteps", given(num_inference_steps=2), {}),
    "frames": ("hidden_states", given(num_frames=9), {}),
    "scheduler": ("the scheduler", lambda pipe, _: pipe.scheduler.register_to_config(
        solver_order=1, shift=3.0), {}),
    "order": ("hidden_states", with_latents(swapped), {"latents": latents()}),
    "last-bit": ("hidden_states", with_latents(
        lambda x: torch.cat([x[..., :-1], x[..., -1:].nextafter(torch.tensor(9.0))], -1)
    ), {"latents": latents()}),
    "attention-kwargs": ("attention_kwargs", given(
        attention_kwargs={"k": [torch.tensor([2, 1])]}
    ), {"attention_kwargs": {"k": [torch.tensor([1, 2])]}}),
    "latents-of-a-callback": ("hidden_states", after_a_step(
        lambda _, values: values.update(latents=values["latents"] * 1.01)), {}),
    "order-of-a-callback": ("hidden_states", after_a_step(
        lambda _, values: values.update(latents=swapped(values["latents"]))), {}),
    "prompt-of-a-callback": ("encoder_hidden_states", after_a_step(
        lambda _, values: values["negative_prompt_embeds"].mul_(2), "negative_prompt_embeds"), {}),
    "guidance-of-a-callback": ("guidance_scale", after_a_step(
        lambda pipe, _: vars(pipe).update(_guidance_scale=4.0)), {}),
    "interrupt": ("the call.*call 2 of transformer on rank 0, a call of vae.decoder", after_a_step(
        lambda pipe, _: vars(pipe).update(_interrupt=True)), {"output_type": "pt"}),
    "failure": ("the call.*call 3 of transformer on rank 0, call 0", stops_between_two_calls, {}),
    "weights": ("the weights of transformer", other_weights, {}),
    "weights-of-an-expert": ("the weights of transformer_2", partial(
        other_weights, network="transformer_2"), {"experts": True}),
    "dtype": ("hidden_states", lambda pipe, _: pipe.transformer.bfloat16(), {}),
    "adapter": ("the weights of transformer", other_adapter, {}),
    "adapter-scale": ("the adapters of transformer", other_scale, {"adapter": True}),
    "options": ("the patch of transformer", partial(other_patch, attention="int8"), {}),
    "unpatched": ("the patch of transformer", other_patch, {}),
    "vae-options": ("the patch of vae", lambda pipe, _: (
        unpatch_model(pipe.vae), patch_model(pipe.vae, conv="bf16", guard=False)), {}),
    "guard": ("the patch of transformer", other_level, {}),
}  # fmt: skip
#: Those of CogVideoX, whose pipeline calls its network once a step.
BATCHED = ["seed", "prompt", "negative-prompt", "guidance", "steps", "latents-of-a-callback",
           "order-of-a-callback", "weights"]  # fmt: skip
#: With a sequence that ranks share.
SPLIT = ["seed", "guidance", "frames", "latents-of-a-callback", "weights", "attention-kwargs"]


def deviates(
    rank: int, make: Callable[[], Any], names: list[str], degrees: dict[str, int]
) -> None:
    torch.set_grad_enabled(False)
    many = mock.patch.object(torch.accelerator, "device_count", return_value=4)
    for name in names:
        pattern, deviate, more = DEVIATIONS[name]
        more = dict(more)
        pipe = micro_pipe(experts=True) if more.pop("experts", False) else make()
        if more.pop("adapter", False):
            torch.manual_seed(0)
            other_adapter(pipe, {})
        patch_model(pipe, **EXACT)
        with many, parallel(pipe, **degrees):
            expected, arguments = pipe(**call(**more)).frames, call(**more)
            began = time.monotonic()
            with pytest.raises(ContextParallelError) as error:
                if rank == 1:
                    deviate(pipe, arguments)
                pipe(**arguments)
            assert time.monotonic() - began < LIMIT, name
            error.match(pattern)
            messages: list[Any] = [None, None]
            dist.all_gather_object(messages, str(error.value))
            assert messages[0] == messages[1], name
            if "callback" in name or name in ("seed", "failure", "order"):  # Nothing stays.
                pipe._interrupt = False
                assert torch.equal(pipe(**call(**more)).frames, expected), name


@pytest.mark.parametrize("part", range(3))
def test_all_ranks_raise_what_differs(part: int) -> None:
    on_two(deviates, micro_pipe, list(DEVIATIONS)[part::3], {"cfg": 2})


def test_all_ranks_raise_what_differs_of_a_batch() -> None:
    on_two(deviates, micro_cogvideox, BATCHED, {"cfg": 2})


def test_ranks_that_share_a_sequence_raise_what_differs() -> None:
    on_two(deviates, micro_pipe, SPLIT, {"ulysses": 2})


def goes_on(rank: int) -> None:
    """An error of all ranks between the two calls of a step leaves nothing for the next video,
    and a scheduler that draws noise without a generator draws the same on all ranks."""
    torch.set_grad_enabled(False)
    wan = micro_pipe()
    expected = wan(**call()).frames
    with parallel(wan, cfg=2):
        for count in (1, 2):
            with failing_at("uncond", count, wan), pytest.raises(ZeroDivisionError):
                wan(**call())
            with counted(wan) as counts:
                assert torch.equal(wan(**call()).frames, expected)
            assert counts == {"samples": 3, "exchanges": 3, "compared": 6}
    stochastic = FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    for pipe, scheduler, more in (
        (micro_pipe(), stochastic, {"latents": latents()}),
        (micro_cogvideox(), CogVideoXDPMScheduler(), {"latents": torch.randn(1, 2, 4, 8, 8)}),
    ):
        pipe.scheduler, more["generator"] = scheduler, None
        torch.manual_seed(0)
        expected = pipe(**call(**more)).frames
        torch.manual_seed(rank)
        with parallel(pipe, cfg=2):
            made = pipe(**call(**more)).frames
        assert relative_l2(made, expected) < 1e-5
        torch.manual_seed(7)
        assert relative_l2(pipe(**call(**more)).frames, expected) > 0.01


def test_ranks_go_on_after_an_error_and_draw_the_same_noise() -> None:
    on_two(goes_on)


# --- a decode that ranks share -------------------------------------------------------------------


def tiles(vae: Any) -> None:
    vae.enable_tiling(4 * WAN.scale, 4 * WAN.scale, 3 * WAN.scale, 3 * WAN.scale)


#: Name -> what the error names, what rank 1 does to the VAE, and the latent of rank 1.
DECODES: dict[str, tuple[str, Callable[[Any], object], Callable[[Tensor], Tensor]]] = {
    "latent": ("the latent", lambda _: None, lambda x: x + 0.01 * (x == x.max())),
    "order": ("the latent", lambda _: None, swapped),
    "size": ("the latent", lambda _: None, lambda x: x[..., :-1]),
    "weights": ("weights of the decoder", lambda vae: vae.decoder.conv_in.weight.data.mul_(1.1),
                torch.clone),
    "tiling": ("the tiling", tiles, torch.clone),
    "options": ("the patch of the VAE", lambda vae: (
        unpatch_model(vae), patch_model(vae, conv="bf16"), share(vae, dist.group.WORLD)),
        torch.clone),
}  # fmt: skip


def decodes_something_else(rank: int) -> None:
    patching_vae.conv3d = conv_in_float64  # torch's sums on a CPU depend on the height
    latent = WAN.latent(2, 8, 6, 1)
    for pattern, deviate, other in DECODES.values():
        vae = WAN.model()
        patch_model(vae)
        expected = decode(vae, latent)
        share(vae, dist.group.WORLD)
        if rank == 1:
            deviate(vae)
        with pytest.raises(ContextParallelError, match=pattern):
            decode(vae, other(latent) if rank else latent)
        if pattern == "the latent":
            assert torch.equal(decode(vae, latent), expected)


def test_a_shared_decode_of_something_else_raises_on_all_ranks() -> None:
    on_two(decodes_something_else)


def has_a_reason_alone(rank: int) -> None:
    """All ranks run the author's code; the guard of one compares alone; and threads take turns."""
    patching_vae.conv3d = conv_in_float64
    latent = WAN.latent(2, 8, 6, 1)
    vae = WAN.model()
    original = decode(vae, latent)
    patch_model(vae)
    decoder, coder = vae.decoder, record_of(vae).blocks[0]
    expected = decode(vae, latent) if rank else None  # The guard of rank 0 has not compared yet.
    share(vae, dist.group.WORLD)
    made = decode(vae, latent)
    assert expected is None or torch.equal(made, expected)
    assert len(report_of(vae).guard) == 1 + rank

    def decodes(index: int) -> None:
        time.sleep(0.2 * index)
        outputs[index] = decode(vae, latent + index)

    outputs: dict[int, Tensor] = {}
    together(2, decodes)
    assert torch.equal(outputs[0], made) and not torch.equal(outputs[1], made)
    hook = decoder.conv_in.register_forward_hook(lambda *_: None) if rank else None
    assert torch.equal(decode(vae, latent), original)
    assert "torch hooks" in report_of(vae).ran()["decoder"]
    assert ("on rank 1" in report_of(vae).ran()["decoder"]) == (rank == 0)
    if hook:
        hook.remove()
    with torch.autocast("cpu", enabled=rank == 1):
        decode(vae, latent)
    assert "autocast" in report_of(vae).ran()["decoder"]
    assert torch.equal(decode(vae, latent), made)
    report_of(vae).guard.check_next()
    with mock.patch.object(patching_vae, "distance", lambda *_: (float(rank), "a test")):
        assert torch.equal(decode(vae, latent), original)
    assert torch.equal(decode(vae, latent), original)
    assert (coder.level == Level.ORIGINAL) == (rank == 1)


def test_a_rank_that_has_a_reason_for_the_authors_decoder_takes_the_others_with_it() -> None:
    on_two(has_a_reason_alone)


def threads_in_other_orders(rank: int) -> None:
    """Two threads decode in another order on each rank: an error, and nobody waits."""
    patching_vae.conv3d = conv_in_float64
    vae, latent = WAN.model(), WAN.latent(2, 8, 6, 1)
    patch_model(vae, guard=False)
    share(vae, dist.group.WORLD)

    def decodes(index: int) -> None:
        time.sleep(0.2 * (index ^ rank))
        with pytest.raises(ContextParallelError, match="the latent"):
            decode(vae, latent + index)

    together(2, decodes)


def test_threads_that_decode_in_another_order_raise() -> None:
    on_two(threads_in_other_orders)


@pytest.mark.parametrize("model", [named("t2v").model, WAN.model], ids=["network", "vae"])
@pytest.mark.parametrize("inside", [False, True])
def test_the_replicas_of_data_parallel_are_refused(model: Callable[[], Any], inside: bool) -> None:
    """They are made on a CPU here, where weights need no broadcast."""
    replication = sys.modules[replicate.__module__]
    module = model()
    whole = torch.nn.Sequential(module) if inside else module

    def replicas() -> list[Any]:
        return replicate(whole, [0, 1])  # type: ignore[arg-type]

    with (
        mock.patch.object(replication, "_get_device_index", lambda device, *_: device),
        mock.patch.object(
            replication,
            "_broadcast_coalesced_reshape",
            lambda x, devices, *_, **__: [x] * len(devices),
        ),
    ):
        before = {*vars(module)}
        patch_model(module)
        with pytest.raises(ContextParallelError, match="nn.DataParallel"):
            replicas()
        unpatch_model(module)
        assert {*vars(module)} == before and len(replicas()) == 2
