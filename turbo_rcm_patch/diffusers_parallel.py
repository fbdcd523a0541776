"""One video on several GPUs: the two forwards of a step with classifier-free guidance on two
groups of ranks (CFG parallel), and within a group the sequence split by Ulysses.

    with parallel(pipe, cfg=2, ulysses=2):
        video = pipe(prompt, generator=torch.Generator(device).manual_seed(0))

Every rank runs the whole pipeline with the same inputs, which every call of a network compares
first (`patching/agreement.py`). Predictions are exchanged once a step, so every rank takes the
same step:

- Wan's pipelines call the network twice a step, with inputs that differ in the embedding of the
  prompt alone. `_NegativePrompt` keeps the negative one, so at the first call group 0 computes
  that call, and group 1 the second one. They exchange, and the second call returns what was
  computed. If its inputs are others (a callback changed the prompt), each group computes it.
- CogVideoX's call it once with a batch of two. Each group computes a half.

All ranks then decode rows of the video, if the VAE is patched and can
(`patching/halo_exchange.py`).

diffusers has context parallelism and no CFG parallelism. Written against diffusers 0.42.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any, Final

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusers.hooks.context_parallel import remove_context_parallel
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from turbo_rcm_patch.errors import ContextParallelError
from turbo_rcm_patch.patching import symmetric
from turbo_rcm_patch.patching.agreement import agree, gather_objects, on, sample
from turbo_rcm_patch.patching.find import COMPONENTS, VAE, execution_device, qualified_name
from turbo_rcm_patch.patching.halo_exchange import DECODE_GROUP, DecodeGroup
from turbo_rcm_patch.patching.patch import is_patched, report_of
from turbo_rcm_patch.patching.plain import hook_names, is_own
from turbo_rcm_patch.patching.record import Entry, record_of, runs_own_forward
from turbo_rcm_patch.patching.ulysses import PAIR, PARALLEL, heads_are_refused, heads_of

__all__ = ["Parallel", "parallel"]

_log = logging.getLogger(__name__)

_WAN: Final = "diffusers.pipelines.wan.pipeline_wan"
_COGVIDEOX: Final = "diffusers.pipelines.cogvideo.pipeline_cogvideox"
#: Pipelines that call the network twice a step, first with the prompt.
TWO_CALLS: Final = {
    f"{_WAN}.WanPipeline",
    f"{_WAN}_i2v.WanImageToVideoPipeline",
    f"{_WAN}_vace.WanVACEPipeline",
    f"{_WAN}_video2video.WanVideoToVideoPipeline",
}
#: Pipelines that call it once with the whole batch.
ONE_CALL: Final = {
    f"{_COGVIDEOX}.CogVideoXPipeline",
    f"{_COGVIDEOX}_image2video.CogVideoXImageToVideoPipeline",
    f"{_COGVIDEOX}_video2video.CogVideoXVideoToVideoPipeline",
}
#: Arguments of CogVideoX's network that have a batch.
_BATCHED: Final = ("hidden_states", "encoder_hidden_states", "timestep")
#: What a layer of PEFT has beside weights.
_ADAPTER: Final = ("scaling", "_active_adapter", "_disable_adapters", "merged_adapters")
_NO_VIDEO: Final = object()


def parallel(
    pipe: object,
    *,
    cfg: int = 1,
    ulysses: int = 1,
    ulysses_anything: bool | None = None,
    vae: bool = True,
) -> Parallel:
    """Run the networks of a pipeline, and the decoder of its patched VAE, on several ranks.

    Call it on every rank, before or after `patch_model` or without it. Everything is checked
    before the first change. Then call the pipeline on every rank with the same inputs and seeds.
    Every call of a network compares them, and raises a ContextParallelError on all ranks if they
    differ.

    Args:
        pipe: A pipeline of diffusers. CFG parallelism knows Wan's (one or two experts) from a
            text, an image, a video and VACE, and CogVideoX's. Ulysses takes those whose network
            has a parallel plan in diffusers: Wan's and ChronoEdit's.
        cfg: Groups of ranks that share the two forwards of a step with guidance: 1 or 2.
        ulysses: Ranks that share a sequence. `cfg * ulysses` is the number of processes.
        ulysses_anything: As in diffusers' `ContextParallelConfig`: uneven heads and tokens. By
            default it is chosen if the heads cannot be divided among the ranks.
        vae: All ranks decode a video together, by rows, if the VAE is a patched one of Wan.
            False if only some ranks decode, which would wait for the others.

    Returns:
        A context manager that undoes it, with a method `undo`.

    Raises:
        ContextParallelError: The processes, the pipeline or its networks do not fit. Nothing was
            changed.
    """
    networks = {
        name: network
        for name in COMPONENTS
        if isinstance(network := getattr(pipe, name, None), nn.Module)
    }
    _check_world(cfg, ulysses)
    if not networks or (cfg > 1 and qualified_name(type(pipe)) not in TWO_CALLS | ONE_CALL):
        known = sorted(name.rpartition(".")[2] for name in TWO_CALLS | ONE_CALL)
        raise ContextParallelError(
            "pipe",
            expected=f"with cfg=2 one of {', '.join(known)}, else a pipeline with a transformer",
            got=qualified_name(type(pipe)),
            remedy="Use ulysses alone for another pipeline",
        )
    for name, network in networks.items():
        _check_network(name, network, ulysses)
    uneven = any(heads % ulysses for net in networks.values() for heads in heads_of(net))
    anything = ulysses > 1 and (uneven if ulysses_anything is None else ulysses_anything)
    kind = execution_device(next(iter(networks.values()))).type
    mesh = init_device_mesh(kind, (cfg, 1, ulysses), mesh_dim_names=("cfg", "ring", "ulysses"))
    group = mesh["cfg"].get_group() if cfg > 1 else None
    result, negative = Parallel(cfg, ulysses), None
    result._undo.callback(symmetric.release)
    try:
        if cfg > 1 and qualified_name(type(pipe)) in TWO_CALLS:
            negative = _NegativePrompt(pipe)
            _set_attribute(pipe, "encode_prompt", negative, result._undo)
        for name, network in networks.items():
            parallel_network = _ParallelNetwork(pipe, name, network, group, negative)
            result._undo.callback(parallel_network.undo)
            _set_attribute(network, PARALLEL, parallel_network, result._undo)
            if ulysses > 1:
                config = ContextParallelConfig(
                    ulysses_degree=ulysses, mesh=mesh, ulysses_anything=anything
                )
                network.enable_parallelism(config=config)  # type: ignore[operator]
            # Outside of diffusers' hooks, which split a timestep per token.
            parallel_network.install()
            result._networks.append(parallel_network)
        module = getattr(pipe, VAE, None)
        if vae and isinstance(module, nn.Module) and DECODE_GROUP not in vars(module):
            _set_attribute(module, DECODE_GROUP, DecodeGroup(dist.group.WORLD), result._undo)
    except BaseException:
        result.undo()
        raise
    return result


def _set_attribute(holder: object, name: str, value: object, undo: ExitStack) -> None:
    """Set an attribute of an instance until `undo` is closed."""
    attributes = vars(holder)
    before = attributes.get(name, value)
    attributes[name] = value

    def restore() -> None:
        if attributes.get(name) is value:  # else other code has replaced it
            del attributes[name]
            if before is not value:
                attributes[name] = before

    undo.callback(restore)


def _check_world(cfg: int, ulysses: int) -> None:
    """Raise a ContextParallelError if there are not cfg * ulysses processes."""
    if cfg not in (1, 2) or ulysses < 1 or cfg * ulysses < 2:
        raise ContextParallelError(
            "cfg and ulysses",
            expected="cfg 1 or 2, ulysses 1 or more, and not both 1",
            got=f"cfg={cfg}, ulysses={ulysses}",
        )
    begun = dist.is_available() and dist.is_initialized()
    world = dist.get_world_size() if begun else 0
    if world != cfg * ulysses:
        raise ContextParallelError(
            "the processes",
            expected=f"{cfg * ulysses} of one group for cfg={cfg} and ulysses={ulysses}",
            got=str(world) if begun else "no process group",
            remedy=f"Start with `torchrun --nproc-per-node {cfg * ulysses}`, and call "
            "torch.distributed.init_process_group first",
        )


def _check_network(name: str, network: Any, ulysses: int) -> None:
    """Raise a ContextParallelError if a network cannot run on several ranks."""
    expected, got, remedy = "", "", ""
    if PARALLEL in vars(network) or getattr(network, "_parallel_config", None) is not None:
        expected, got = "no parallelism yet", "a network that is parallel already"
        remedy = "Undo that first, or load the pipeline again"
    elif not runs_own_forward(network):
        expected, got = "its own forward", f"one that other code replaced: {hook_names(network)}"
        remedy = "Remove that (cache-dit, for instance), because it counts the calls of a step"
    elif cache := _cache_of(network):
        expected, got, remedy = "no cache", cache, "Call disable_cache() first"
    elif ulysses > 1 and getattr(network, "_cp_plan", None) is None:
        expected = "a network with a parallel plan in diffusers"
        got, remedy = f"a {type(network).__name__}", "Use cfg=2 alone"
    elif ulysses > 1 and not torch.accelerator.device_count():
        expected, got = "a GPU, which diffusers' enable_parallelism asks for", "none"
        remedy = "Use cfg=2 alone"
    elif not is_patched(network) and any(
        heads_are_refused(heads, ulysses) for heads in heads_of(network)
    ):
        expected = f"heads that diffusers deals out to ulysses={ulysses} ranks"
        got, remedy = (
            f"{heads_of(network)[0]} heads",
            "Call patch_model first, which deals out any",
        )
    if expected:
        raise ContextParallelError(name, expected=expected, got=got, remedy=remedy)


def _cache_of(network: Any) -> str:
    """Return the name of a network's cache, or "".

    A cache skips blocks by what a rank sees, and the others would wait for it.
    """
    enabled = getattr(network, "is_cache_enabled", False)
    return type(network._cache_config).__name__ if enabled else ""


class Parallel:
    """A pipeline that runs on several ranks, from `parallel`.

    Attributes:
        cfg: Groups that share the forwards of a step.
        ulysses: Ranks that share a sequence.
    """

    def __init__(self, cfg: int, ulysses: int) -> None:
        self.cfg, self.ulysses = cfg, ulysses
        self._networks: list[_ParallelNetwork] = []
        self._undo = ExitStack()

    def __repr__(self) -> str:
        return f"Parallel(cfg={self.cfg}, ulysses={self.ulysses})"

    def __enter__(self) -> Parallel:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def undo(self) -> None:
        """Run every rank alone again. A second call does nothing.

        Raises:
            WrappedError: Other code replaced the forward of a network. Nothing was changed.
        """
        for network in self._networks:
            network.entry.check(network.name)
        self._networks.clear()
        self._undo.close()


class _NegativePrompt:
    """Replaces `encode_prompt` of a pipeline, and keeps the embedding of the negative prompt.

    Attributes:
        embeds: The embedding, [B, L, C], in any dtype; None before the first video.
    """

    def __init__(self, pipe: Any) -> None:
        self.embeds: Tensor | None = None
        self._inner = pipe.encode_prompt

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode the prompts of a video."""
        prompt_embeds, self.embeds = self._inner(*args, **kwargs)
        return prompt_embeds, self.embeds


class _ParallelNetwork:
    """Runs a network's forward on this rank, and exchanges predictions.

    Attributes:
        name: The network's name in the pipeline.
        entry: The replacement of its forward.
        inner: The forward that it runs.
        ran: How its blocks ran on each rank, on the first forward of a video.
    """

    def __init__(
        self, pipe: Any, name: str, network: Any, group: Any, negative: _NegativePrompt | None
    ) -> None:
        self._pipe, self.name, self._network, self._negative = pipe, name, network, negative
        self._group = group
        self._half = 0 if group is None else group.rank()
        #: The timesteps of the present video, once its settings were compared, and the number of
        #: its calls.
        self._timesteps: object = _NO_VIDEO
        self._calls = 0
        #: Of a step whose first call computed both predictions: its timestep, the inputs that the
        #: second call has to have, and the second prediction.
        self._ahead: tuple[object, dict[str, Any], Tensor] | None = None
        self._warned = False
        self.ran: list[dict[str, int]] = []
        self._before = {
            id(holder): vars(holder).keys() & {"_diffusers_hook", "_parallel_config", "forward"}
            for holder in self._holders()
        }
        # Collectives do not belong in a graph. The network's own forward is compiled.
        run = torch.compiler.disable(self.run, recursive=False)  # type: ignore[no-untyped-call]
        self.entry = Entry(network, "forward", run, (network, "forward"), absent=True)
        self.inner = network.forward

    def install(self) -> None:
        """Replace the network's forward, which is called instead."""
        self.inner = self._network.forward
        self.entry.install()

    def _holders(self) -> list[Any]:
        """Return the modules and processors on which diffusers notes parallelism."""
        modules = list(self._network.modules())
        processors = [vars(module).get("processor") for module in modules]
        return modules + [processor for processor in processors if processor]

    def undo(self) -> None:
        """Restore the network's forward, and disable its parallelism."""
        network = self._network
        for slot in self.entry.located():
            setattr(*slot, self.inner)
        if getattr(network, "_parallel_config", None) is not None:
            remove_context_parallel(network, network._cp_plan)
        for holder in self._holders():  # Nothing stays that was not there.
            before, now = self._before.get(id(holder), set()), vars(holder)
            if "_parallel_config" in now:
                holder._parallel_config = None
                if "_parallel_config" not in before:
                    del holder._parallel_config
            registry = now.get("_diffusers_hook")
            if registry is not None:
                registry.invalidate_child_registries_cache()
                if "_diffusers_hook" not in before and not registry.hooks:
                    del holder._diffusers_hook
            if "forward" not in before and is_own(holder, "forward", now.get("forward")):
                del holder.forward

    # --- a forward -------------------------------------------------------------------------------

    def run(self, *args: Any, **named: Any) -> Any:
        """Run what the pipeline calls as the network's forward."""
        if not self.entry.located() or (cache := _cache_of(self._network)):
            raise ContextParallelError(
                self.name,
                expected="no cache and no other forward than when parallel() was called",
                got=cache if self.entry.located() else hook_names(self._network),
                remedy="Undo parallel(), or that",
            )
        begins = self._agree(args, named)
        step = getattr(self._pipe, "_current_timestep", None)
        in_step = self._group is not None and "hidden_states" in named and step is not None
        if in_step and self._negative is None:
            out = self._half_of_batch(args, named)
        elif in_step and self._pipe.do_classifier_free_guidance:
            out = self._one_of_two(step, named)
        else:
            if in_step and not self._warned:
                _log.warning("Without guidance both groups of cfg=2 compute the same forward")
                self._warned = True
            out = self._forward(*args, **named)
        if begins:
            ran = report_of(self._network).last_forward if is_patched(self._network) else {}
            self.ran = gather_objects(None, ran, execution_device(self._network))
        return out

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _agree(self, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Check that all ranks make this call with the same values, and return True if it is the
        first one of a video.

        Raises:
            ContextParallelError: They differ: each would denoise another video, and predictions
                would be mixed.
        """
        device = execution_device(self._network)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False  # The call before the capture was compared.
        timesteps = getattr(getattr(self._pipe, "scheduler", None), "timesteps", None)
        begins, self._timesteps = timesteps is not self._timesteps, _NO_VIDEO
        values = {f"{name} of {self.name}": x for name, x in (*enumerate(args), *named.items())}
        values |= {
            f"{name[1:]} of the pipeline": x
            for name, x in vars(self._pipe).items()
            if name.startswith(("_guidance", "_attention_kwargs"))
        }
        if begins:
            self._calls, self._ahead = 0, None
            values |= self._settings(device)
        agree(None, f"call {self._calls} of {self.name}", values, device)
        if begins:
            _share_random_state(device)
        self._calls, self._timesteps = self._calls + 1, timesteps
        return begins

    def _one_of_two(self, step: object, named: dict[str, Any]) -> Any:
        """Return the prediction of one of a step's two calls. The first one computes both."""
        assert self._negative is not None
        prompt = named["encoder_hidden_states"]
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is step:
            _, inputs, prediction = ahead
            other_inputs = [name for name in named if named[name] is not inputs.get(name)]
            expected = not other_inputs or (
                other_inputs == ["encoder_hidden_states"]
                and torch.equal(prompt, inputs["encoder_hidden_states"])
            )
            self._negative.embeds = prompt  # in the network's dtype
            return (prediction,) if expected else self._forward(**named)
        if self._negative.embeds is None:
            return self._forward(**named)
        negative = self._negative.embeds.to(prompt.device, prompt.dtype)
        second = named | {"encoder_hidden_states": negative}
        prediction, other = self._exchange(self._forward(**(second if self._half else named))[0])
        self._ahead = step, second, other
        return (prediction,)

    def _half_of_batch(self, args: Any, named: dict[str, Any]) -> Any:
        """Compute a half of the batch, one of the two predictions, and return both."""
        if len(named["hidden_states"]) % 2:
            return self._forward(*args, **named)
        half = {name: named[name].chunk(2)[self._half] for name in _BATCHED}
        return (torch.cat(self._exchange(self._forward(*args, **named | half)[0])),)

    def _forward(self, *args: Any, **named: Any) -> Any:
        """Run the network's own forward. Its guard decides as in one process."""
        # Of two calls the guard compares the first; a batch it sees as a whole.
        pair = None if self._group is None else (self._group, self._negative is not None)
        before = PAIR.set(pair)
        try:
            return self.inner(*args, **named)
        finally:
            PAIR.reset(before)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _exchange(self, prediction: Tensor) -> list[Tensor]:
        """Return the predictions of both groups."""
        prediction = prediction.contiguous()
        both = [torch.empty_like(prediction) for _ in range(2)]
        dist.all_gather(both, prediction, group=self._group)
        return both

    def _settings(self, device: torch.device) -> dict[str, Any]:
        """Return what is compared once a video, beside the inputs of each call."""
        pipe, scheduler = self._pipe, getattr(self._pipe, "scheduler", None)
        values: dict[str, Any] = {
            "the scheduler": [type(scheduler).__name__, _numbers_in(scheduler)],
            "the timesteps": [getattr(scheduler, name, None) for name in ("timesteps", "sigmas")],
            "the pipeline": [type(pipe).__name__, _numbers_in(pipe)],
            f"the weights of {self.name}": sample(self._network.named_parameters(), device),
            f"the adapters of {self.name}": [
                [vars(module).get(name) for name in _ADAPTER]
                for module in self._network.modules()
                if "scaling" in vars(module)
            ],
        }
        for name, module in ((self.name, self._network), (VAE, getattr(pipe, VAE, None))):
            record = record_of(module) if isinstance(module, nn.Module) else None
            if record is not None:
                levels = None if name == VAE else [int(block.level) for block in record.blocks]
                # The number itself may differ in its last bits where each rank ran alone before.
                compared = record.guard is not None and record.guard.prediction is not None
                values[f"the patch of {name}"] = [repr(record.config), levels, compared]
        return values

    def describe(self) -> list[str]:
        """Describe how the other ranks ran, for the report."""
        ranks: dict[str, list[str]] = {}
        for rank, ran in enumerate(self.ran):
            how = ", ".join(f"{count} blocks {form}" for form, count in ran.items())
            ranks.setdefault(how or "unpatched", []).append(str(rank))
        return [f"{self.name} on ranks {', '.join(r)}: {how}" for how, r in ranks.items()]


def _numbers_in(component: Any) -> dict[str, Any]:
    """Return the numbers and texts in the configuration of a component of diffusers."""
    config = getattr(component, "config", {})
    plain = (bool, int, float, str, type(None))
    names = [name for name in config if not name.startswith("_")]  # such as where it was loaded
    return {name: config[name] for name in names if isinstance(config[name], plain)}


def _share_random_state(device: torch.device) -> None:
    """Give every rank the random state of rank 0, from which a scheduler draws noise in its steps
    if the pipeline was called without a generator."""
    of_device: Any = torch.cuda if device.type == "cuda" else torch
    with on(device):
        of_device.set_rng_state(gather_objects(None, of_device.get_rng_state(), device)[0])
