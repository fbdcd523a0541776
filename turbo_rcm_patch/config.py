"""`PatchConfig`: how a model is patched."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from numbers import Real
from typing import Any, Final, Literal, TypedDict, cast, get_args

from turbo_rcm_patch.errors import ConfigError

__all__ = [
    "Attention",
    "Form",
    "Impl",
    "Kind",
    "Linear",
    "PVDType",
    "PatchConfig",
    "PatchOptions",
    "Precision",
    "ResidualDType",
    "chosen_config",
    "is_number",
]

Attention = Literal["auto", "int8", "int4", "exact", "sage"]
PVDType = Literal["auto", "fp8", "bf16", "fp16"]
Precision = Literal["fixed", "auto"]
Linear = Literal["as-is", "int8", "int8-only"]
Impl = Literal["auto", "triton", "reference"]
Form = Literal["auto", "one-launch", "two-launch"]
ResidualDType = Literal["fp32", "model"]
Kind = Literal["self", "cross", "image", "feed-forward", "control"]

#: How wide a residual stream is by default inside a patched block.
RESIDUAL: Final[ResidualDType] = "fp32"

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchConfig:
    """The options of `patch_model`.

    Attributes:
        attention: "auto" takes "int8" or "exact", whichever was measured to be faster on the
            device for the lengths of a call. On a GPU that was not measured it takes int8 from
            4,096 keys on; on a CPU it takes int8. "int8" quantises q and k to int8. With both,
            cross-attention over fewer than 1,024 keys (a prompt) stays exact, because that is
            faster there. "exact" runs torch's scaled_dot_product_attention and fuses only the
            skip. "sage" calls the `sageattention` package. "int4" quantises q and k to 15 levels;
            it exists to show that the verdict can fail.
        pv: Element type of probabilities and values in the second matrix product. "auto" is fp8
            (e4m3) from 4,096 keys on, if the device has it (sm_89 and newer), and else bf16. At
            shorter lengths bf16 costs no time and is more accurate. Sums are always fp32.
        linear: How the Linears of a fused pair run: q, k, v and output projection of an attention,
            both of a feed-forward. "as-is" runs them in the model's dtype. "int8" runs them with
            int8 weights (a scale per output channel) and int8 activations (a scale per row). That
            is faster and less accurate. A Linear runs in int8 only if it is plain (no hooks, no
            adapter) and needs no gradient; q, k and v of a peaked attention stay in 16 bits (by
            the weights of its norms). The int8 weights are kept beside the model's own, one
            byte per weight, and every forward first checks on the device whether a weight has
            changed. A compiled graph, and a CUDA graph that somebody else captures, quantises the
            weights on every forward. "int8-only" runs the same and keeps the int8 weights alone:
            patching drops the model's own, Linear by Linear, and they do not come back
            (`keep_int8_only`). What calls such a Linear gets the product with int8 times scale.
        smooth_k: Subtract the mean over tokens from k before quantising. The softmax does not
            change. With attention="sage" release 2.x of sageattention always does so.
        impl: "triton" or "reference" (plain torch). "auto" chooses by the model's device.
        form: Whether attention and output projection run in two kernel launches or in one. "auto"
            looks the shape up in a measured table.
        residual: How wide the residual stream is between the branches of one patched block in a
            model of a 16-bit dtype. "fp32" keeps it in fp32, computes every sum of the block in
            fp32, and rounds once, behind the last branch; whatever is called, hooked or runs as
            its author wrote it gets the model's dtype. "model" rounds it after every branch, as
            the author's code does.
        kinds: Which kinds of skip pair are fused: "self" and "cross" attention, "image" (I2V's
            second attention), "feed-forward", "control" (VACE's input projection).
        guard: Compare each closed pair with its author's code on the first and the last step of
            the first inference, and one pair of 60 on each step between, and give it back to that
            code if its error exceeds the budget.
        precision: "auto" lets the guard choose how exact each attention is, and which Linears run
            in int8, for the target `fidelity`. Beside the target, a pair over its own budget first
            gets 16-bit p and v, then exact attention with the skip fused after it, and only then
            its author's code.
            Without the guard, or with another attention than "auto" and "int8", there is nothing
            to choose. "fixed" runs every pair as configured here, or as its author's code.
        fidelity: With precision="auto", the target for the network's error: at most so many times
            that of the unpatched network, both to the same network in fp32. The guard estimates
            what each pair adds to either error. Where the sum is over the target, heads run
            exactly and int8 Linears are given back, those first that take the most error away for
            their time, until it is met or all that helps was chosen. The report has the prediction
            (`report.guard.fidelity`).
        calibration: A file of `report.save_calibration`: from the first forward on, pairs run as
            the guard chose for this model before, whatever `precision` says. A file of other
            weights is refused.
        guard_budget: Largest error that the guard accepts: the relative L2 of each sample, as a
            share of what the pair adds to its residual. Heads, the worst hundredth of the rows and
            the last keys may have a larger error, the input of a branch only a smaller one
            (`patching/measure.py`).
        sla_topk: Share of the key blocks that SLA's sparse attention sees, in (0, 1]. It applies
            to diffusers' Wan classes whose self-attention holds a `proj_l` (`load_extra` attaches
            it, `unload_extra` takes it away). TurboDiffusion's own class keeps the share of its
            modules. Without a `proj_l` attention is dense, and this has no effect.
        cuda_graphs: Capture the whole forward as CUDA graphs, one for each signature of its
            arguments, and replay them in eager inference on a GPU. That takes Python out of short
            forwards. A graph is dropped when weights, adapters or settings change, and captured
            again. With hooks, offloading or caches inside the model every forward runs plain; the
            report says why. A graph holds the memory of a forward until the model is unpatched,
            refreshed or moved. Ranks that share a sequence capture and replay together.
        self_test: With attention="auto", test a GPU that nobody has measured on the first forward:
            a second or so, whose result is kept (`ops/self_test.py`).
    """

    attention: Attention = "auto"
    pv: PVDType = "auto"
    linear: Linear = "as-is"
    smooth_k: bool = True
    impl: Impl = "auto"
    form: Form = "auto"
    residual: ResidualDType = RESIDUAL
    kinds: tuple[Kind, ...] = KINDS
    guard: bool = True
    precision: Precision = "auto"
    fidelity: float = 1.0
    calibration: str | os.PathLike[str] | None = None
    guard_budget: float = 0.10
    sla_topk: float = 0.1
    cuda_graphs: bool = False
    self_test: bool = True

    def __repr__(self) -> str:
        values = ((field, getattr(self, field.name)) for field in fields(self))
        chosen = [f"{field.name}={value!r}" for field, value in values if value != field.default]
        return f"PatchConfig({', '.join(chosen)})"

    def __post_init__(self) -> None:
        for field, choices in (
            ("attention", get_args(Attention)),
            ("pv", get_args(PVDType)),
            ("linear", get_args(Linear)),
            ("impl", get_args(Impl)),
            ("form", get_args(Form)),
            ("residual", get_args(ResidualDType)),
            ("precision", get_args(Precision)),
        ):
            value = getattr(self, field)
            if value not in choices:
                raise ConfigError(
                    f"PatchConfig.{field}", expected=f"one of {choices}", got=repr(value)
                )
        if (
            isinstance(self.kinds, str)
            or not isinstance(self.kinds, Collection)
            or not self.kinds
            or any(k not in KINDS for k in self.kinds)
        ):
            raise ConfigError(
                "PatchConfig.kinds",
                expected=f"a non-empty tuple out of {KINDS}",
                got=repr(self.kinds),
            )
        # A configuration is hashed, compared and written to JSON.
        object.__setattr__(self, "kinds", tuple(kind for kind in KINDS if kind in self.kinds))
        for field in ("smooth_k", "guard", "cuda_graphs", "self_test"):
            if not isinstance(getattr(self, field), bool):
                raise ConfigError(
                    f"PatchConfig.{field}",
                    expected="True or False",
                    got=repr(getattr(self, field)),
                )
        if not is_number(self.guard_budget) or not 0.0 < self.guard_budget < float("inf"):
            raise ConfigError(
                "PatchConfig.guard_budget",
                expected="a positive relative L2 error",
                got=repr(self.guard_budget),
                remedy="Use guard=False to switch the guard off",
            )
        if self.calibration is not None:
            if not isinstance(self.calibration, str | os.PathLike):
                raise ConfigError(
                    "PatchConfig.calibration",
                    expected="the path of a file, or None",
                    got=repr(self.calibration),
                )
            object.__setattr__(self, "calibration", os.fspath(self.calibration))
        if not is_number(self.fidelity) or not self.fidelity > 0.0:
            raise ConfigError(
                "PatchConfig.fidelity",
                expected="a positive number, in units of the unpatched network's error",
                got=repr(self.fidelity),
            )
        if not is_number(self.sla_topk) or not 0.0 < self.sla_topk <= 1.0:
            raise ConfigError(
                "PatchConfig.sla_topk",
                expected="a share of the key blocks, in (0, 1]",
                got=repr(self.sla_topk),
                remedy="Use unload_extra to run without SLA",
            )

    @property
    def chooses(self) -> bool:
        """Whether the guard chooses how exact each attention is."""
        by_head = self.guard and self.attention in ("auto", "int8")
        return by_head and self.precision == "auto"


class PatchOptions(TypedDict, total=False):
    """The fields of `PatchConfig` as keywords of `patch_model` and `patched`."""

    attention: Attention
    pv: PVDType
    linear: Linear
    smooth_k: bool
    impl: Impl
    form: Form
    residual: ResidualDType
    kinds: tuple[Kind, ...]
    guard: bool
    precision: Precision
    fidelity: float
    calibration: str | os.PathLike[str] | None
    guard_budget: float
    sla_topk: float
    cuda_graphs: bool
    self_test: bool


def chosen_config(config: object, options: Mapping[str, object]) -> PatchConfig:
    """Combine a configuration with keywords; a keyword replaces that field.

    Raises:
        ConfigError: `config` is not a `PatchConfig`, a keyword is not a field, or a value is
            invalid.
    """
    if config is not None and not isinstance(config, PatchConfig):
        attention = config if config in get_args(Attention) else "int8"
        raise ConfigError(
            "config",
            expected="a PatchConfig",
            got=repr(config)[:120],
            remedy=f"Write patch_model(model, attention={attention!r}) or "
            f"patch_model(model, PatchConfig(attention={attention!r}))",
        )
    names = [field.name for field in fields(PatchConfig)]
    unknown = [name for name in options if name not in names]
    if unknown:
        near = get_close_matches(unknown[0], names, 1)
        raise ConfigError(
            f"keyword {unknown[0]!r}",
            expected="a field of PatchConfig: " + ", ".join(names),
            got=", ".join(unknown),
            remedy=f"Did you mean {near[0]!r}" if near else "",
        )
    return replace(config if config is not None else PatchConfig(), **cast("Any", dict(options)))


def is_number(value: object) -> bool:
    """Whether a value is a real number; True and False do not count."""
    return isinstance(value, Real) and not isinstance(value, bool)
