"""`PatchConfig`: how a model is patched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import wraps
from numbers import Real
from typing import Any, Final, Literal, TypeVar, cast, get_args

from turbo_rcm_patch.errors import ConfigError

__all__ = [
    "Attention",
    "Conv",
    "Form",
    "Impl",
    "Kind",
    "Linear",
    "PVDType",
    "PatchConfig",
    "chosen_config",
    "is_number",
]

Attention = Literal["auto", "int8", "int4", "exact", "sage"]
PVDType = Literal["auto", "fp8", "bf16", "fp16"]
Linear = Literal["as-is", "int8", "int8-only"]
Conv = Literal["as-is", "bf16"]
Impl = Literal["auto", "triton", "reference"]
Form = Literal["auto", "one-launch", "two-launch"]
Kind = Literal["self", "cross", "image", "feed-forward"]

#: Fields that take one of a few words.
CHOICES: Final = {
    "attention": get_args(Attention),
    "pv": get_args(PVDType),
    "linear": get_args(Linear),
    "conv": get_args(Conv),
    "impl": get_args(Impl),
    "form": get_args(Form),
}

_T = TypeVar("_T")


def _names_checked(cls: type[_T]) -> type[_T]:
    """Make a class raise a `ConfigError` where its arguments have no or unknown names."""
    init: Any = cls.__init__

    @wraps(init)
    def checked(self: _T, *values: object, **options: object) -> None:
        if values:
            raise _unnamed("PatchConfig", values[0])
        _check_names(options)
        init(self, **options)

    cls.__init__ = checked  # type: ignore[assignment]
    return cls


@_names_checked
@dataclass(frozen=True, slots=True, kw_only=True)
class PatchConfig:
    """The options of `patch_model`.

    Attributes:
        attention: "auto" takes "int8" or "exact", whichever is faster on the device for the length
            of a call (`ops/dispatch.py`); on a CPU it takes int8. "int8" quantises q and k to
            int8. With both, cross-attention over fewer than 1,024 keys (a prompt) stays exact,
            because that is faster there. "exact" runs torch's scaled_dot_product_attention, or the
            attention backend that was chosen, and fuses norms and skips. "sage" calls the
            `sageattention` package. "int4" quantises q and k to 15 levels; it exists to show that
            the verdict can fail.
        pv: Element type of probabilities and values in the second matrix product. "auto" is fp8
            (e4m3) from 4,096 keys on, on Hopper from 12,288, if the device has it (sm_89 and
            newer), and else bf16. Where fp8 is too inexact, the guard takes bf16. Sums are always
            fp32.
        linear: How the Linears of a block's branches run. "as-is" calls them as they are. "int8"
            gives plain ones an int8 forward (weights with a scale per output channel, activations
            with one per row) and keeps the int8 weights beside the model's own. "int8-only" keeps
            the int8 weights alone: patching drops the model's own, Linear by Linear, and they do
            not come back (`keep_int8_only`).
        conv: How the convolutions of a VAE run. "as-is" keeps the VAE's dtype. "bf16" rounds the
            inputs and weights of a VAE in fp32 to bf16, sums in fp32, and keeps the residual
            stream in fp32.
        vae: Patch the VAE of a pipeline too.
        smooth_k: Subtract the mean over tokens from k before quantising. The softmax does not
            change. With attention="sage", release 2.x of sageattention always does this.
        impl: "triton" or "reference" (plain torch). "auto" chooses by the model's device.
        form: "one-launch" runs self-attention, its output projection and the skip in one kernel
            (Wan and TurboDiffusion). "two-launch" and "auto" run the projection as a module, and
            the skip with the next norm in one pass after it.
        guard: Compare blocks with their authors' code on real forwards, and run blocks that are
            over the budget more exactly.
        fidelity: The target for the network's error to fp32, in units of the unpatched network's.
            On the first forward the guard makes blocks more exact until the predicted error meets
            the target. None switches this off.
        sla_topk: Share of the key blocks that SLA's sparse attention sees, in (0, 1]. It applies
            to diffusers' Wan classes whose self-attention holds a `proj_l` (`load_extra` attaches
            it). TurboDiffusion's own class keeps the share of its modules.
    """

    attention: Attention = "auto"
    pv: PVDType = "auto"
    linear: Linear = "as-is"
    conv: Conv = "as-is"
    vae: bool = True
    smooth_k: bool = True
    impl: Impl = "auto"
    form: Form = "auto"
    guard: bool = True
    fidelity: float | None = 1.0
    sla_topk: float = 0.1

    def __repr__(self) -> str:
        values = ((field, getattr(self, field.name)) for field in fields(self))
        chosen = [f"{field.name}={value!r}" for field, value in values if value != field.default]
        return f"PatchConfig({', '.join(chosen)})"

    def __post_init__(self) -> None:
        check_fields(self, CHOICES, "smooth_k", "guard", "vae")
        target = self.fidelity
        if target is not None and not (is_number(target) and 0.0 < target < float("inf")):
            raise ConfigError(
                "PatchConfig.fidelity",
                expected="a positive number, in units of the unpatched network's error, or None",
                got=repr(target),
            )
        if self.form == "one-launch" and self.attention in ("exact", "sage"):
            raise ConfigError(
                'PatchConfig.form="one-launch"',
                expected='attention="int8" or "int4", whose kernel can finish the projection',
                got=f"attention={self.attention!r}",
                remedy='Use form="auto"',
            )
        if not is_number(self.sla_topk) or not 0.0 < self.sla_topk <= 1.0:
            raise ConfigError(
                "PatchConfig.sla_topk",
                expected="a share of the key blocks, in (0, 1]",
                got=repr(self.sla_topk),
                remedy="Use unload_extra to run without SLA",
            )
        for name in ("fidelity", "sla_topk"):
            value = getattr(self, name)
            if not isinstance(value, int | float | None):  # NumPy's cannot be written as JSON.
                object.__setattr__(self, name, float(value))


def chosen_config(config: object, options: Mapping[str, object]) -> PatchConfig:
    """Combine a configuration with keywords, each of which replaces the field of that name.

    Raises:
        ConfigError: `config` is not a `PatchConfig`, a keyword is not a field, or a value is
            invalid.
    """
    if config is not None and not isinstance(config, PatchConfig):
        raise _unnamed("config", config)
    _check_names(options)
    return replace(config if config is not None else PatchConfig(), **cast("Any", dict(options)))


def _unnamed(what: str, value: object) -> ConfigError:
    """Return the error about a value in the place of a configuration or of named fields."""
    return ConfigError(
        what,
        expected="fields of PatchConfig by their names",
        got=repr(value)[:120],
        remedy="Write them as keywords: attention='int8', linear='int8'",
    )


def _check_names(options: Mapping[Any, object]) -> None:
    """Raise a `ConfigError` for a name that is not a field."""
    names = [field.name for field in fields(PatchConfig)]
    unknown = [str(name) for name in options if name not in names]
    if unknown:
        near = get_close_matches(unknown[0], names, 1)
        guess = f"Did you mean {near[0]!r}" if near else ""
        raise ConfigError(
            f"keyword {unknown[0]!r}",
            expected="a field of PatchConfig: " + ", ".join(names),
            got=", ".join(unknown),
            remedy=guess,
        )


def is_number(value: object) -> bool:
    """Return True for a real number that is not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Refuse a value that is not one of the choices."""
    if value not in choices:
        raise ConfigError(name, expected=f"one of {tuple(choices)}", got=repr(value))


def check_fields(owner: object, choices: Mapping[str, Sequence[object]], *flags: str) -> None:
    """Refuse a field that is not one of its choices, and a flag that is neither True nor False."""
    for field, allowed in choices.items():
        check_choice(f"{type(owner).__name__}.{field}", getattr(owner, field), allowed)
    for field in flags:
        if not isinstance(value := getattr(owner, field), bool):
            name = f"{type(owner).__name__}.{field}"
            raise ConfigError(name, expected="True or False", got=repr(value))
