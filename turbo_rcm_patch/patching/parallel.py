"""Models whose sequence several ranks share, through diffusers' `enable_parallelism`.

diffusers writes its configuration to the model and to the attention processors, and hooks that
split inputs and gather outputs to some modules. Here is what the patch reads of that, what makes
it work for the families that diffusers has no plan for, and the way back, which diffusers lacks.
"""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from turbo_rcm_patch.errors import ContextParallelError
from turbo_rcm_patch.ops.exchange import ContextParallel
from turbo_rcm_patch.patching.registry import family_of

__all__ = [
    "attach_plan",
    "context_parallel_plan",
    "detach_plan",
    "disable_parallelism",
    "distribute_attention",
    "groups_of",
    "restore_attention",
]

_CONFIG: Final = "_parallel_config"
_PLAN: Final = "_cp_plan"
#: On an attention module: the processor that stood there before `distribute_attention`.
_BEFORE: Final = "_turbo_rcm_processor"
#: What diffusers' names of its hooks begin with.
_HOOKS: Final = ("cp_input---", "cp_output---")


def groups_of(holder: object) -> ContextParallel | None:
    """The process groups that a model or an attention processor shares its sequence over; None
    where it is whole."""
    config: Any = getattr(holder, _CONFIG, None)
    config = getattr(config, "context_parallel_config", None)
    if config is None:
        return None
    return ContextParallel.of(
        config._flattened_mesh.get_group(),
        config._ulysses_mesh.get_group() if config.ulysses_degree > 1 else None,
        config._ring_mesh.get_group() if config.ring_degree > 1 else None,
    )


def context_parallel_plan(model: nn.Module) -> dict[str, Any]:
    """What `enable_parallelism` takes as `cp_plan` for a model of a known family.

    Raises:
        ContextParallelError: Nobody has a plan for it.
    """
    from turbo_rcm_patch.patching.families._parallel import plan_of

    plan = plan_of(model) if family_of(model) is not None else None
    if plan is None:
        raise ContextParallelError(
            f"context_parallel_plan({type(model).__qualname__})",
            expected="a transformer of diffusers that this library patches",
            got=type(model).__qualname__,
            remedy="Pass a cp_plan of your own to enable_parallelism",
        )
    return plan


def attach_plan(model: nn.Module) -> None:
    """Make `model.enable_parallelism(config=...)` find a plan, where its class has none or one
    that is not enough. A plan that somebody set on the model stays."""
    if _PLAN not in model.__dict__:
        model.__dict__[_PLAN] = context_parallel_plan(model)


def detach_plan(model: nn.Module) -> None:
    """Drop the plan that `attach_plan` set."""
    model.__dict__.pop(_PLAN, None)


def distribute_attention(model: nn.Module) -> None:
    """Give every attention a processor that computes exactly what its own does, over the tokens of
    all ranks while the model is parallel, by the exchanges of `ops.parallel`.

    CogVideoX and ConsisID need it, because their processors take no notice of parallelism; the
    others gain rings that pass keys on, and numbers of heads and tokens that do not divide.
    """
    from turbo_rcm_patch.patching.families._parallel import distributed

    config = getattr(model, _CONFIG, None)
    for module in model.modules():
        processor = module.__dict__.get("processor")
        made = None if processor is None else distributed(processor)
        if made is None:
            continue
        if getattr(config, "context_parallel_config", None) is not None:
            made._parallel_config = config
        module.__dict__.update({_BEFORE: processor, "processor": made})


def restore_attention(model: nn.Module) -> None:
    """Put back the processors that `distribute_attention` replaced; one that somebody set since
    stays."""
    from turbo_rcm_patch.patching.families._parallel import is_distributed

    for module in model.modules():
        before = module.__dict__.pop(_BEFORE, None)
        if before is not None and is_distributed(module.__dict__.get("processor")):
            module.__dict__["processor"] = before


def disable_parallelism(model: nn.Module) -> None:
    """Undo `model.enable_parallelism`: drop its hooks and its configuration. The process groups
    stay, because others may use them.

    Raises:
        ContextParallelError: The model is not parallel, or shards its weights.
    """
    config = getattr(model, _CONFIG, None)
    if getattr(config, "context_parallel_config", None) is None:
        raise ContextParallelError(
            "disable_parallelism",
            expected="a model that enable_parallelism split the sequence of",
            got="none" if config is None else "sharded weights",
        )
    for module in model.modules():
        registry: Any = module.__dict__.get("_diffusers_hook")
        if registry is not None:
            for name in [name for name in registry.hooks if name.startswith(_HOOKS)]:
                registry.remove_hook(name, recurse=False)
            if not registry.hooks:
                del module._diffusers_hook
            forward = module.__dict__.get("forward")
            if getattr(forward, "__func__", None) is type(module).forward:
                del module.forward  # the class's own, as it was
        for holder in (module, module.__dict__.get("processor")):
            if holder is not None and vars(holder).get(_CONFIG) is config:
                delattr(holder, _CONFIG)
