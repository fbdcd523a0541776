"""The model that a comparison judges: patched, or unpatched on another attention backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any

import torch

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import ConfigError
from turbo_rcm_patch.ops import AttentionSpec, resolved
from turbo_rcm_patch.ops.dispatch import INT8_MIN_KEYS
from turbo_rcm_patch.patching import PatchReport, patched, sla_as_defined
from turbo_rcm_patch.patching.find import VAE, execution_device
from turbo_rcm_patch.patching.plan import Plan
from turbo_rcm_patch.video.pipelines import networks_of


class BackendCalls(list[str]):
    """The forms in which self-attentions ran on "turbo_rcm_int8" since `forget`, in order."""

    def counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function of the backend, which counts its calls by the rule of `sageattn`. A
        cross-attention, over a prompt, is not counted: it is exact in a patched model too."""

        def call(query: torch.Tensor, key: torch.Tensor, **inputs: Any) -> Any:
            if (n := query.shape[1]) == key.shape[1]:
                spec = resolved(AttentionSpec(heads=1, attention="auto"), query.device, n, n)
                int8 = n >= INT8_MIN_KEYS and spec.attention == "int8"
                masked = inputs.get("attn_mask") is not None
                self.append("mask" if masked else "asked" if int8 else "length")
            return original(query=query, key=key, **inputs)

        return call

    def forms(self) -> dict[str, str]:
        """Return the form of each block."""
        return {f"blocks.{i}": form for i, form in enumerate(self)}

    forget = list.clear


@contextmanager
def watched_forwards(
    model: object, watched: PatchReport | BackendCalls | None
) -> Iterator[list[tuple[Any, dict[str, str]]]]:
    """Yield a list that gets an entry for each forward inside the block: the network, and the form
    in which each of its blocks ran.

    Args:
        model: A pipeline.
        watched: Says in which form the blocks ran; None if nothing does.
    """
    forwards: list[tuple[Any, dict[str, str]]] = []
    with ExitStack() as hooks:
        if watched is not None:

            def after(network: Any, *_: object) -> None:
                # A VAE has no form that was asked for.
                ran = watched.forms().items()
                blocks = {block: form for block, form in ran if not block.startswith(f"{VAE}.")}
                forwards.append((network, blocks))

            for network in networks_of(model).values():
                forget = network.register_forward_pre_hook(lambda *_: watched.forget())
                hooks.enter_context(forget)
                hooks.enter_context(network.register_forward_hook(after))
        yield forwards


def with_skipped(forwards: Sequence[tuple[Any, dict[str, str]]]) -> list[dict[str, str]]:
    """Return the forms of each forward. A block that did not run in one of them, but in another of
    the same network, was skipped there."""
    skipped: dict[Any, dict[str, str]] = {}
    for network, forms in forwards:
        skipped.setdefault(network, {}).update(dict.fromkeys(forms, "skipped"))
    return [skipped[network] | forms for network, forms in forwards]


@contextmanager
def judged(
    model: object,
    config: PatchConfig,
    attention_backend: str | None,
    plan: Plan | None = None,
) -> Iterator[PatchReport | BackendCalls | None]:
    """Turn a model into the judged one for the length of a `with` block.

    Args:
        model: A network or a pipeline, unpatched.
        config: How to patch.
        attention_backend: None to patch the model; else a name that its `set_attention_backend`
            takes, or this package's "turbo_rcm_int8". The model stays unpatched then.
        plan: How each block runs; None to let the guard decide.

    Yields:
        The report of the patched model; with "turbo_rcm_int8" its calls, with another one None.

    Raises:
        ConfigError: No such backend, or the model or the machine cannot use it.
        PatchError: The model cannot be patched.
    """
    if attention_backend is None:
        with patched(model, config, plan=plan) as report:
            yield report
        return
    with sla_as_defined(model, config.sla_topk), _on_backend(model, attention_backend) as calls:
        yield calls


def check_judged(
    model: object, config: PatchConfig, attention_backend: str | None, plan: Plan | None
) -> None:
    """Refuse, before hours of work, a model that cannot be judged. Try a backend on a small input.

    Raises:
        ConfigError: As `judged`, or options of the patch are given beside an attention backend.
        PatchError: The model cannot be patched.
    """
    changed = [f.name for f in fields(config) if getattr(config, f.name) != f.default]
    changed += ["plan"] * (plan is not None)
    if attention_backend is not None and set(changed) - {"sla_topk"}:
        raise ConfigError(
            "attention_backend",
            expected="no option of the patch, because the model stays unpatched",
            got=", ".join(changed),
            remedy="Leave these options out, or compare the patch without an attention backend",
        )
    with judged(model, config, attention_backend, plan):
        if attention_backend is not None:
            for network in networks_of(model).values():
                _try_backend(network, attention_backend)


def _try_backend(network: Any, name: str) -> None:
    """Compute one small attention of a network's heads and dtype on its backend.

    Its dtype is not that of any parameter: Wan keeps some of them in fp32.
    """
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    config = network.config
    shape = (1, 256, config.num_attention_heads, config.attention_head_dim)
    query = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    query = query.to(execution_device(network), network.dtype)
    try:
        with torch.no_grad():
            finite = bool(dispatch_attention_fn(query, query, query).isfinite().all())
    except Exception as error:  # a backend may raise anything where it cannot run
        raise _unusable(name, f"{type(error).__name__}: {error}") from error
    if not finite:
        raise _unusable(name, "NaN or infinity from a small attention")


@contextmanager
def _on_backend(model: object, name: str) -> Iterator[BackendCalls | None]:
    """Set a diffusers attention backend on every network, and restore afterwards the backends of
    its processors and of the process, which `set_attention_backend` sets too."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    from turbo_rcm_patch.diffusers_backend import BACKEND, register_backend, unregister_backend

    networks = [*networks_of(model).values()]
    processors: list[Any] = [getattr(m, "processor", 0) for x in networks for m in x.modules()]
    before = [(p, p._attention_backend) for p in processors if hasattr(p, "_attention_backend")]
    if not before:
        raise _unusable(name, f"a {type(networks[0]).__name__}, which asks for no backend")
    active = registry._active_backend
    with ExitStack() as undo:
        if name == BACKEND and name not in _names():
            register_backend()
            undo.callback(unregister_backend)
        undo.callback(registry.set_active_backend, active)
        for processor, backend in before:
            undo.callback(setattr, processor, "_attention_backend", backend)
        try:
            for network in networks:
                network.set_attention_backend(name)
        except (ValueError, RuntimeError, ImportError) as error:
            raise _unusable(name, str(error)) from error
        calls = None
        if name == BACKEND:
            member, calls = registry._active_backend, BackendCalls()
            original = registry._backends[member]
            undo.callback(registry._backends.__setitem__, member, original)
            registry._backends[member] = calls.counted(original)
        yield calls


def _names() -> set[str]:
    from diffusers.models.attention_dispatch import AttentionBackendName

    return {name.value for name in AttentionBackendName.__members__.values()}


def _unusable(name: str, why: str) -> ConfigError:
    from turbo_rcm_patch.diffusers_backend import BACKEND

    return ConfigError(
        f"attention_backend {name!r}",
        expected="one that this model and this machine can use, of "
        + ", ".join(sorted({BACKEND, *_names()})),
        got=" ".join(why.split())[:200],
        remedy="Install the package that it needs, or name another one",
    )
